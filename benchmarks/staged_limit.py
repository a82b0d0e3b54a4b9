"""The limit of the staged path on one machine: its three copies between two processes, and nothing else.

One process gathers runs into staging memory and writes them into the other's with `process_vm_writev`, as UCX does
between processes of one machine; the other scatters them. Two counters in shared memory are all the protocol there is.
What kvferry takes more than this is what rooms, credits, messages and threads cost; what this takes more than one bulk
write, the machine's memory.

    python benchmarks/staged_limit.py --run-bytes 1024 --row-bytes 2048 --chunk-mib 8
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import multiprocessing.connection
import time
from multiprocessing import shared_memory

import numpy as np

from kvferry.layout import Device, Region
from kvferry.plan.packing import BlockShape
from kvferry.staging import allocate, kernels_for

BLOCK_BYTES = 32 << 10  # of the receiver's pages: 16 tokens
POOL_BYTES = 2 << 30
SETS = 64  # of scattered pages, used in turn
SLEEP_S = 20e-6


class _Vector(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


def write(process: int, source: int, destination: int, length: int) -> None:
    """Copies from our memory into another process's."""
    library = ctypes.CDLL(None, use_errno=True)
    here, there = _Vector(source, length), _Vector(destination, length)
    written = library.process_vm_writev(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    if written != length:
        raise OSError(ctypes.get_errno(), f"process_vm_writev wrote {written} of {length} bytes")


def both(counters: shared_memory.SharedMemory) -> tuple[memoryview, memoryview]:
    """Sub-chunks written, and read."""
    assert counters.buf is not None
    numbers = counters.buf.cast("q")
    return numbers[:1], numbers[1:2]


def page_starts(pool: np.ndarray, page_bytes: int, count: int) -> list[np.ndarray]:
    """Addresses of scattered pages, several sets."""
    random = np.random.default_rng(1)
    return [
        pool.ctypes.data + random.permutation(pool.size // page_bytes)[:count].astype(np.int64) * page_bytes
        for _ in range(SETS)
    ]


def receive(connection: multiprocessing.connection.Connection, name: str, options: argparse.Namespace) -> None:
    """Scatters every sub-chunk, then sends its CPU time."""
    counters = shared_memory.SharedMemory(name)
    written, read = both(counters)
    chunk, runs = int(options.chunk_mib * 2**20), BLOCK_BYTES // options.row_bytes
    pool = np.full(POOL_BYTES, 1, np.uint8)
    kernels = kernels_for([Region(pool.ctypes.data, pool.size)], Device())
    shape = BlockShape(((runs, options.row_bytes),) if runs > 1 else (), options.run_bytes)
    starts = page_starts(pool, BLOCK_BYTES, chunk // shape.num_bytes)
    with allocate(chunk * options.ring, Device()) as ring:
        connection.send((multiprocessing.current_process().pid, ring.address))
        before = time.process_time()
        for number in range(options.chunks):
            while written[0] <= number:
                time.sleep(SLEEP_S)
            kernels.scatter(ring.address + number % options.ring * chunk, starts[number % SETS], shape)
            read[0] = number + 1
        connection.send(time.process_time() - before)
    written.release()
    read.release()
    counters.close()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-bytes", type=int, default=1024, help="contiguous on the receiver's side")
    parser.add_argument("--row-bytes", type=int, default=2048, help="from one run to the next there")
    parser.add_argument("--chunk-mib", type=float, default=8, help="of a sub-chunk")
    parser.add_argument("--ring", type=int, default=4, help="sub-chunks in the ring")
    parser.add_argument("--chunks", type=int, default=768, help="sub-chunks to move")
    options = parser.parse_args()
    chunk, runs = int(options.chunk_mib * 2**20), BLOCK_BYTES // options.row_bytes
    counters = shared_memory.SharedMemory(create=True, size=16)
    written, read = both(counters)
    written[0] = read[0] = 0
    ours, theirs = multiprocessing.Pipe()
    receiver = multiprocessing.Process(target=receive, args=(theirs, counters.name, options))
    receiver.start()
    pool = np.full(POOL_BYTES, 1, np.uint8)
    kernels = kernels_for([Region(pool.ctypes.data, pool.size)], Device())
    shape = BlockShape((), runs * options.run_bytes)  # the sender's pages have nothing else
    starts = page_starts(pool, shape.num_bytes, chunk // shape.num_bytes)
    process, address = ours.recv()
    with allocate(chunk, Device()) as slot:
        begun_at, before = time.perf_counter(), time.process_time()
        for number in range(options.chunks):
            while number - read[0] >= options.ring:
                time.sleep(SLEEP_S)
            kernels.gather(starts[number % SETS], shape, slot.address)
            write(process, slot.address, address + number % options.ring * chunk, chunk)
            written[0] = number + 1
        while read[0] < options.chunks:
            time.sleep(SLEEP_S)
        seconds, ours_s = time.perf_counter() - begun_at, time.process_time() - before
    gigabytes = options.chunks * chunk / 1e9
    figures = {
        "gb_per_s": gigabytes / seconds,
        "cpu_s_per_gb": {"prefill": ours_s / gigabytes, "decode": ours.recv() / gigabytes},
    }
    print(json.dumps(figures))
    receiver.join()
    written.release()
    read.release()
    counters.close()
    counters.unlink()


if __name__ == "__main__":
    main()
