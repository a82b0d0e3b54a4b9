"""How large rings, sub-chunks and measurements are, where the settings do not say: it depends on the kind of memory.

What counts are calls. On a GPU a sub-chunk costs the prefill side's interpreter 300 to 500 us whatever its size, which
at 8 MiB would end at 17 to 28 GB/s. On a CPU 8 MiB and more are equally fast while the interpreter's lock is free; but
beside a thread that keeps it every sub-chunk waits for it several times, whatever its size. A ring has four sub-chunks,
so that one is gathered while others cross and are scattered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import Field, model_validator

from kvferry.layout import Device, MemoryKind
from kvferry.plan import TransferPath
from kvferry.settings import OwnSettings, Settings

MIB = 1 << 20
CHUNKS_IN_RING = 4


class StagingSettings(OwnSettings):
    """How much memory staging takes, as far as it is set."""

    staging_ring_mib: float | None = Field(
        None,
        gt=0,
        le=65536,
        description="Staging memory of every thread that gathers, and of a decode rank for every prefill rank, beside "
        "the pool. By default 64 where the pool is in CPU memory, 256 in a GPU's, or four sub-chunks if that is more.",
    )
    staging_chunk_mib: float | None = Field(
        None,
        gt=0,
        le=65536,
        description="How much is gathered, written in bulk and scattered at a time. By default 16 where the pool is in "
        "CPU memory, 64 in a GPU's, or a quarter of a ring if that is less.",
    )
    staging_memory_mib: float = Field(
        2048.0, gt=0, le=2**24, description="Most staging memory that an endpoint takes; beyond it, bytes go directly."
    )

    @model_validator(mode="after")
    def _check(self) -> StagingSettings:
        if (self.staging_chunk_mib or 0) > (self.staging_ring_mib or float("inf")):
            raise ValueError(
                f"staging_chunk_mib (KVFERRY_STAGING_CHUNK_MIB) is {self.staging_chunk_mib:g}, more than the "
                f"{self.staging_ring_mib:g} MiB of a whole ring: lower it, or raise staging_ring_mib "
                "(KVFERRY_STAGING_RING_MIB)"
            )
        return self

    @property
    def most_bytes(self) -> int:
        """The most staging memory that an endpoint takes."""
        return int(self.staging_memory_mib * MIB)


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
    usual, own = DEFAULTS[kind], settings.of(StagingSettings)
    ring, chunk = (None if mib is None else int(mib * MIB) for mib in (own.staging_ring_mib, own.staging_chunk_mib))
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
    sizes, most_mib = staging_sizes(settings, device.kind), settings.of(StagingSettings).staging_memory_mib
    now = sum(sizes.of_sender(settings.gather_workers)) if sends else sizes.ring_bytes
    return (
        f"staging takes {now / MIB:g} MiB of {device} beside the pool, and up to {most_mib:g} MiB "
        "(KVFERRY_STAGING_MEMORY_MIB) as more ranks connect. An engine that sizes its cache to what is free leaves "
        "that by vLLM's --gpu-memory-utilization, or SGLang's --mem-fraction-static"
    )
