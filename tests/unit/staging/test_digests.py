"""Digests of packed blocks, against their definition: the digest of a page's bytes, index by index."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from kvferry.errors import SettingsError
from kvferry.layout import Device, MemoryKind, Region
from kvferry.plan.packing import MovedBlocks, digested_together
from kvferry.staging.digests import DIGESTED_BYTES, DigestMemory, digests_of
from kvferry.staging.resources import MachineResources


def some_bytes(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, count, np.uint8)


@pytest.mark.parametrize("num_bases", [1, 3])
@pytest.mark.parametrize("bounds", [[0, 1], [0, 2, 3, 7], [0, 7]])
@pytest.mark.parametrize("block_bytes", [1, 6, 512])
def test_a_digest_is_of_all_bytes_of_a_row_in_order(num_bases: int, bounds: list[int], block_bytes: int):
    packed = some_bytes(num_bases * bounds[-1] * block_bytes)
    blocks = packed.reshape(num_bases, bounds[-1], block_bytes)
    expected = b""
    for row in range(len(bounds) - 1):
        parts = [blocks[base, unit] for base in range(num_bases) for unit in range(bounds[row], bounds[row + 1])]
        expected += xxhash.xxh3_64(b"".join(part.tobytes() for part in parts)).digest()
    assert digests_of(packed.ctypes.data, num_bases, block_bytes, bounds) == expected


def test_equal_rows_in_other_places_do_not_cancel_out():
    packed = np.tile(some_bytes(64), 4)
    before = digests_of(packed.ctypes.data, 2, 64, [0, 1, 2])
    packed[5] ^= 1
    packed[64 + 5] ^= 1
    after = digests_of(packed.ctypes.data, 2, 64, [0, 1, 2])
    assert before[:8] != after[:8]
    assert before[8:] != after[8:]
    packed[128 + 5] ^= 1
    packed[192 + 5] ^= 1
    again = digests_of(packed.ctypes.data, 2, 64, [0, 1, 2])
    assert again[:8] not in (before[:8], after[:8])


def test_a_write_is_digested_in_parts_that_fit_and_cover_all_of_it():
    for load in (
        MovedBlocks(0, 0, 64, 128, 4096),
        MovedBlocks(0, 0, 3, 5, 3 << 20),
        MovedBlocks(1, 2, 1000, 7, 4096),
        MovedBlocks(0, 1, 1, 1, 1),
    ):
        seen = np.zeros((load.num_bases, load.num_units), np.int64)
        for segment in digested_together([load], DIGESTED_BYTES):
            assert (segment.move, segment.piece) == (load.move, load.piece)
            blocks = seen[segment.first_base : segment.stop_base, segment.first_unit : segment.stop_unit]
            assert segment.num_bytes == blocks.size * load.block_bytes <= max(DIGESTED_BYTES, load.block_bytes)
            blocks += 1
        assert (seen == 1).all()
    (whole,) = digested_together([MovedBlocks(0, 0, 64, 8, 4096)], DIGESTED_BYTES)
    assert whole.num_bytes == DIGESTED_BYTES, "all indices of the first axis together"


def pool() -> tuple[np.ndarray, list[Region]]:
    memory = some_bytes(4096)
    return memory, [Region(memory.ctypes.data, len(memory))]


def test_memory_is_used_again_and_grows_where_a_block_is_larger():
    _, regions = pool()
    memory = DigestMemory(MachineResources(), regions, Device())
    with memory.borrowed(10) as first, memory.borrowed(10) as second:
        assert abs(first - second) >= DIGESTED_BYTES
    with memory.borrowed(DIGESTED_BYTES) as again:
        assert again in (first, second)
    with memory.borrowed(DIGESTED_BYTES + 1), memory.borrowed(3 * DIGESTED_BYTES):
        pass
    assert sorted(each.num_bytes for each in memory.free) == [DIGESTED_BYTES + 1, 3 * DIGESTED_BYTES]


def test_a_pool_on_a_gpu_is_refused_saying_what_to_do():
    with pytest.raises(SettingsError, match=r"checksums \(KVFERRY_CHECKSUMS.*CPU memory, and this one is on VRAM:0"):
        DigestMemory(MachineResources(), [], Device(MemoryKind.VRAM, 0))
