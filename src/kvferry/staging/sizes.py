"""How large rings, sub-chunks and measurements are, where the settings do not say: it depends on the kind of memory.

What counts are calls. On a GPU a sub-chunk costs the prefill side's interpreter 300 to 500 us whatever its size, which
at 8 MiB would end at 17 to 28 GB/s. On a CPU 8 MiB and more are equally fast while the interpreter's lock is free; but
beside a thread that keeps it every sub-chunk waits for it several times, whatever its size. A ring has four sub-chunks,
so that one is gathered while others cross and are scattered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.layout import Device, MemoryKind
from kvferry.plan import TransferPath
from kvferry.settings import Settings

MIB = 1 << 20
CHUNKS_IN_RING = 4


@dataclass(frozen=True, slots=True)
class StagingSizes:
    """Bytes of what staged writes take.

    Attributes:
        ring_bytes: staging memory of a thread that gathers, and for a prefill rank of a decode rank.
        chunk_bytes: the most that is gathered, written and scattered at a time.
        measured_bytes: what is gathered, or written in bulk, to measure how fast that is; no more than a ring.
    """

    ring_bytes: int
    chunk_bytes: int
    measured_bytes: int

    def of_sender(self, gather_workers: int) -> list[int]:
        """Returns the pieces of memory that a prefill endpoint begins with: one to measure with, and one a worker."""
        return [self.measured_bytes, *[self.ring_bytes] * gather_workers]


DEFAULTS: Mapping[MemoryKind, StagingSizes] = {
    MemoryKind.DRAM: StagingSizes(64 * MIB, 16 * MIB, 2 * MIB),
    MemoryKind.VRAM: StagingSizes(256 * MIB, 64 * MIB, 64 * MIB),
}


def staging_sizes(settings: Settings, kind: MemoryKind) -> StagingSizes:
    """Returns the sizes for pools in one kind of memory: those that are set, and defaults that go with them."""
    usual = DEFAULTS[kind]
    ring, chunk = (
        None if mib is None else int(mib * MIB) for mib in (settings.staging_ring_mib, settings.staging_chunk_mib)
    )
    if chunk is None:
        chunk = usual.chunk_bytes if ring is None else max(1, min(usual.chunk_bytes, ring // CHUNKS_IN_RING))
    if ring is None:
        ring = max(usual.ring_bytes, CHUNKS_IN_RING * chunk)
    return StagingSizes(ring, chunk, min(usual.measured_bytes, ring))


def staging_notice(settings: Settings, device: Device, *, sends: bool) -> str:
    """Returns how much of a GPU's memory staging takes beside the pool, which an engine sizes without knowing of it.

    Empty where the pool is in CPU memory, or nothing is staged.

    Args:
        sends: whether this is the prefill side.
    """
    if device.kind is MemoryKind.DRAM or settings.forced_path not in (None, TransferPath.STAGED):
        return ""
    sizes = staging_sizes(settings, device.kind)
    now = sum(sizes.of_sender(settings.gather_workers)) if sends else sizes.ring_bytes
    return (
        f"staging takes {now / MIB:g} MiB of {device} beside the pool, and up to {settings.staging_memory_mib:g} MiB "
        "(KVFERRY_STAGING_MEMORY_MIB) as more ranks connect. An engine that sizes its cache to what is free leaves "
        "that by vLLM's --gpu-memory-utilization, or SGLang's --mem-fraction-static"
    )
