"""How large staging memory is where the settings do not say."""

from __future__ import annotations

import pytest

from kvferry.layout import Device, MemoryKind
from kvferry.settings import Settings
from kvferry.staging.sizes import MIB, StagingSizes, staging_notice, staging_sizes


@pytest.mark.parametrize(
    ("kind", "given", "sizes"),
    [
        (MemoryKind.DRAM, {}, (64, 16, 2)),
        (MemoryKind.VRAM, {}, (256, 64, 64)),
        (MemoryKind.VRAM, {"staging_ring_mib": 512}, (512, 64, 64)),
        (MemoryKind.VRAM, {"staging_ring_mib": 32}, (32, 8, 32)),
        (MemoryKind.VRAM, {"staging_chunk_mib": 128}, (512, 128, 64)),
        (MemoryKind.VRAM, {"staging_chunk_mib": 8}, (256, 8, 64)),
        (MemoryKind.DRAM, {"staging_ring_mib": 1, "staging_chunk_mib": 1}, (1, 1, 1)),
    ],
)
def test_what_is_set_counts_and_defaults_go_with_it(
    kind: MemoryKind, given: dict[str, float], sizes: tuple[int, int, int]
):
    assert staging_sizes(Settings(**given), kind) == StagingSizes(*(size * MIB for size in sizes))


def test_what_a_gpus_pool_must_leave_free_is_said():
    gpu = Device(MemoryKind.VRAM, 1)
    sending = staging_notice(Settings(gather_workers=2), gpu, sends=True)
    assert sending.startswith("staging takes 576 MiB of VRAM:1 beside the pool, and up to 2048 MiB")
    assert "--gpu-memory-utilization" in sending
    assert "--mem-fraction-static" in sending
    assert "takes 256 MiB" in staging_notice(Settings(), gpu, sends=False)
    assert staging_notice(Settings(path="direct"), gpu, sends=True) == ""
    assert staging_notice(Settings(), Device(), sends=True) == ""
