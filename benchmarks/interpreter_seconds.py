"""What a gigabyte costs the interpreter, both sides together, where the device and the wire cost nothing.

Real endpoints and the kernels' host code for GPUs, of two ranks in one process. The device does nothing that is queued,
and the wire carries notifications alone: so all processor time is kvferry's own, and that of Python's threads. What is
left of a second at so many seconds a gigabyte is how fast a rank can be at all, beside an engine that wants most of it.

    python -m benchmarks.interpreter_seconds [--chunk-mib 16 64 128] [--tokens 2048 16384] [--rounds 5]

Prints processor seconds a gigabyte, and microseconds a sub-chunk: the median over the rounds, and the least and most.
"""

from __future__ import annotations

import argparse
import itertools
import json
import secrets
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray
from proof.made_up_resources import MadeUpResources

import kvferry as kf
from kvferry.endpoint.runtime.platform import SystemPlatform
from kvferry.layout import Device, MemoryKind, Region
from kvferry.staging import Kernels
from kvferry.staging.accelerator import (
    Accelerator,
    CopyLaunch,
    DeviceArray,
    RunsLaunch,
    Stream,
    StreamEvent,
)
from kvferry.staging.gpu import GpuKernels
from kvferry.staging.kernels import StartArray
from kvferry.staging.sharing import MappedCopies
from kvferry.transport import TransferHandle, TransferReport
from kvferry.transport.copies import Copies
from kvferry.transport.inprocess import InProcessConnection, InProcessNetwork, InProcessTransport

MIB = 1 << 20
LAYERS, HEADS, HEAD_DIM, PAGE_TOKENS = 64, 4, 128, 16
LONGEST_S = 120.0
GB_A_ROUND = 8.0
VRAM = Device(MemoryKind.VRAM)


class _Done(StreamEvent):
    def query(self) -> bool:
        return True


class NullStream(Stream):
    """Does nothing of what is queued."""

    def upload(self, numbers: StartArray | NDArray[np.int32]) -> DeviceArray:
        return DeviceArray()

    def launch(self, copy: CopyLaunch) -> None:
        pass

    def launch_runs(self, copy: RunsLaunch) -> None:
        pass

    def record(self) -> StreamEvent:
        return _Done()

    def synchronize(self) -> None:
        pass


class NullAccelerator(Accelerator):
    """A device on which everything is done as soon as it is asked for."""

    def bind_thread(self) -> None:
        pass

    def stream(self) -> Stream:
        return NullStream()


class NullResources(MadeUpResources):
    """The kernels for GPUs, on that device."""

    def kernels(self, regions: Sequence[Region], device: Device) -> Kernels:
        return GpuKernels(regions, NullAccelerator())

    def bind_thread(self, device: Device) -> None:
        pass

    def mapped_copies(self, device: Device) -> MappedCopies:
        raise NotImplementedError("no write here is mapped")

    def epoch(self) -> int:
        return secrets.randbits(63)


class _NullHandle(TransferHandle):
    def __init__(self, connection: InProcessConnection, report: TransferReport, notification: bytes) -> None:
        self.connection = connection
        self.report = report
        self.notification = notification


class NullTransport(InProcessTransport):
    """Carries notifications alone."""

    memory_kinds = frozenset({MemoryKind.VRAM})

    def start(self, connection: InProcessConnection, copies: Copies, notification: bytes) -> TransferHandle:
        report = TransferReport(copies.total_bytes, len(copies), 0.0, 0.0)
        return _NullHandle(connection, report, notification)

    def poll(self, transfer: TransferHandle) -> TransferReport | None:
        assert isinstance(transfer, _NullHandle)
        if transfer.notification:
            self.alive(transfer.connection).deliver(self.endpoint_name, transfer.notification)
            transfer.notification = b""
        return transfer.report


def layout(pages: int) -> tuple[kf.RankLayout, list[NDArray[np.float16]]]:
    """A pool that is never touched, and so takes no memory: its layout, and the arrays that keep its addresses."""
    pools = [np.empty((pages, PAGE_TOKENS, HEADS, HEAD_DIM), np.float16) for _ in range(2 * LAYERS)]
    components = kf.attention_components(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype="float16")
    shards = tuple(
        kf.shard_from_tensors(component, tensors, dims=("page", "token", "head", "dim"))
        for component, tensors in zip(components, (pools[:LAYERS], pools[LAYERS:]), strict=True)
    )
    return kf.RankLayout(shards=tuple(structs.replace(shard, device=VRAM) for shard in shards)), pools


class Pair:
    """Two ranks of one process, and the requests between them."""

    def __init__(self, chunk_mib: int, pages: int) -> None:
        """Starts and connects them."""
        platform, network = SystemPlatform(), InProcessNetwork()
        platform.staging = NullResources()
        described, self._pools = layout(pages)
        given: dict[str, Any] = {
            "path": "staged",
            "staging_chunk_mib": chunk_mib,
            "staging_ring_mib": 4 * chunk_mib,
        }
        self.prefill = kf.PrefillEndpoint(
            described,
            settings=kf.Settings(registry_port=0, **given),
            transport=NullTransport(network),
            platform=platform,
        )
        self.decode = kf.DecodeEndpoint(
            described,
            settings=kf.Settings(registry_url=self.prefill.registry_url, **given),
            transport=NullTransport(network),
            platform=platform,
        )
        assert self.prefill.wait_registered(LONGEST_S)
        self.decode.connect(timeout_s=LONGEST_S)
        self._rooms = itertools.count(1)
        self._order = np.random.default_rng(0).permutation(pages)

    def move(self, pages: int) -> None:
        """Moves one request."""
        room, numbers = next(self._rooms), self._order[:pages].tolist()
        receiver = self.decode.open(room, numbers)
        sender = self.prefill.open(room)
        sender.submit(numbers, last=True)
        receiver.wait(LONGEST_S)
        sender.wait(LONGEST_S)

    def close(self) -> None:
        """Ends both."""
        self.decode.close()
        self.prefill.close()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunk-mib", type=int, nargs="+", default=[16, 64, 128], help="sizes of sub-chunks")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 16384], help="tokens of a request")
    parser.add_argument("--rounds", type=int, default=5, help="of which a figure is the median")
    parser.add_argument("--json", action="store_true", help="end with the same as JSON")
    options = parser.parse_args()
    rows = []
    token_bytes = 2 * LAYERS * HEADS * HEAD_DIM * 2
    print(f"{'sub-chunk':>12}{'tokens':>8}{'s a GB':>10}{'least':>10}{'most':>10}{'us a sub-chunk':>16}")
    for chunk_mib in options.chunk_mib:
        pair = Pair(chunk_mib, max(options.tokens) // PAGE_TOKENS)
        try:
            for tokens in options.tokens:
                pages = tokens // PAGE_TOKENS
                requests = max(1, round(GB_A_ROUND * 1e9 / (tokens * token_bytes)))
                pair.move(pages)
                found = []
                for _ in range(options.rounds):
                    before = time.process_time()
                    for _ in range(requests):
                        pair.move(pages)
                    found.append((time.process_time() - before) / (requests * tokens * token_bytes / 1e9))
                middle = statistics.median(found)
                rows.append({"chunk_mib": chunk_mib, "tokens": tokens, "s_per_gb": middle, "least": min(found)})
                print(
                    f"{chunk_mib:>8} MiB{tokens:>8}{middle:>10.4f}{min(found):>10.4f}{max(found):>10.4f}"
                    f"{middle * chunk_mib * MIB / 1e3:>16.0f}"
                )
        finally:
            pair.close()
    if options.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
