"""What sharing a large direct write between threads gains, and what it costs where the write is small.

Two processes of this machine, scattered blocks, in turn with everything posted by the caller
(`KVFERRY_NIXL_THREADS=0`), with kvferry's threads, and with NIXL's own (`num_threads`), which kvferry does not use:
with them a write that failed may go on. Ratios are of medians; the rounds alternate, so that what else the machine does
meets all three.

    python benchmarks/shared_writes.py --block-bytes 32768 --counts 16 1024 16384
    UCX_TLS=tcp python benchmarks/shared_writes.py
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import statistics
import time
import uuid
from typing import Any

import numpy as np

from kvferry.layout import Device, Region
from kvferry.transport import NixlTransport

SLEEP_S = 50e-6


def receive(size: int, connection: multiprocessing.connection.Connection) -> None:
    """The process that is written to."""
    transport = NixlTransport(f"receiver-{uuid.uuid4().hex[:8]}")
    memory = np.zeros(size, np.uint8)
    transport.register([Region(memory.ctypes.data, size)], Device())
    connection.send((transport.metadata(), memory.ctypes.data))
    connection.recv()
    transport.close()


class Writer:
    """A transport of one kind, connected and prepared."""

    def __init__(self, memory: Any, block_bytes: int, metadata: bytes, address: int, **options: Any) -> None:
        self.transport = NixlTransport(f"writer-{uuid.uuid4().hex[:8]}", only_writes=True, **options)
        self.transport.register([Region(memory.ctypes.data, memory.nbytes)], Device())
        peer = self.transport.connect(metadata)
        count = memory.nbytes // block_bytes
        rows = [np.array([(at, block_bytes, 0, block_bytes, count)], np.uint64) for at in (memory.ctypes.data, address)]
        self.lists = self.transport.prepare(rows[0], None), self.transport.prepare(rows[1], peer)

    def write_s(self, here: Any, there: Any) -> float:
        """Seconds that one write takes, from post to completion."""
        began_at = time.perf_counter()
        transfer = self.transport.post(self.lists[0], here, self.lists[1], there, b"")
        while self.transport.poll(transfer) is None:
            time.sleep(SLEEP_S)
        self.transport.release(transfer)
        return time.perf_counter() - began_at


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Times of every kind, by number of blocks."""
    size = max(options.counts) * options.block_bytes
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(size, theirs))
    process.start()
    metadata, address = ours.recv()
    memory = np.ones(size, np.uint8)
    nixls_own = {"num_threads": str(options.threads), "split_batch_size": "2"}
    writers = {
        "caller": Writer(memory, options.block_bytes, metadata, address),
        "shared": Writer(memory, options.block_bytes, metadata, address, threads=options.threads),
        "nixls_own": Writer(memory, options.block_bytes, metadata, address, backend_parameters=nixls_own),
    }
    random = np.random.default_rng(0)
    here, there = (random.permutation(max(options.counts)).astype(np.int32) for _ in range(2))
    results = []
    for count in options.counts:
        times: dict[str, list[float]] = {name: [] for name in writers}
        for _ in range(options.rounds + 1):
            for name, writer in writers.items():
                times[name].append(writer.write_s(here[:count], there[:count]))
        medians = {name: statistics.median(values[1:]) for name, values in times.items()}
        results.append(
            {
                "blocks": count,
                "median_ms": {name: round(value * 1e3, 3) for name, value in medians.items()},
                "fastest_ms": {name: round(min(values[1:]) * 1e3, 3) for name, values in times.items()},
                "slowest_ms": {name: round(max(values[1:]) * 1e3, 3) for name, values in times.items()},
                "shared_to_caller": round(medians["shared"] / medians["caller"], 4),
                "shared_to_nixls_own": round(medians["shared"] / medians["nixls_own"], 4),
            }
        )
    for writer in writers.values():
        writer.transport.close()
    ours.send(None)
    process.join()
    return {"block_bytes": options.block_bytes, "threads": options.threads, "rounds": options.rounds, "writes": results}


def main() -> None:
    """Prints the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-bytes", type=int, default=32768)
    parser.add_argument("--counts", type=int, nargs="+", default=[16, 1024, 16384], help="blocks of a write")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    found = measure(options)
    if options.json:
        print(json.dumps(found))
        return
    for each in found["writes"]:
        times = ", ".join(
            f"{name} {median} ms ({each['fastest_ms'][name]} to {each['slowest_ms'][name]})"
            for name, median in each["median_ms"].items()
        )
        ratios = f"{each['shared_to_caller']} of the caller's, {each['shared_to_nixls_own']} of NIXL's own"
        print(f"{each['blocks']} x {found['block_bytes']} B: {times}; shared: {ratios}")


if __name__ == "__main__":
    main()
