"""The check of `kvferry bench` sees every wrong byte, and bytes that are right in a wrong place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.unit.applications.test_bench_options import options

from kvferry.applications.bench import pattern
from kvferry.applications.bench.options import BenchOptions, checked_device
from kvferry.applications.bench.pool import Pool, allocate, pool_bytes
from kvferry.layout import (
    Axis,
    Component,
    Device,
    RankCoordinates,
    Shard,
    ShardedComponent,
    default_group,
    state_component,
)
from kvferry.models import ModelCache
from kvferry.pools.pool import POISON


def made(shape: BenchOptions, rank: RankCoordinates) -> Pool:
    """The pool of a decode rank."""
    return Pool(shape, shape.decode, rank, allocate(pool_bytes(shape, shape.decode, rank), shape.device))


def written(shape: BenchOptions, pool: Pool | None = None) -> Pool:
    """The pool of the only decode rank, as a perfect transfer leaves it."""
    pool = pool or made(shape, shape.decode.coordinates[0])
    pool.memory.fetch()  # pages of no request are poison in a device's memory, and here in the copy of it
    pattern.write(pool, shape)
    return pool


def lanes(pool: Pool, shard: Shard, index: int, size: int) -> NDArray[Any]:
    """The pages of one layer as numbers of so many bytes."""
    return pool.elements(shard, index).view(f"u{size}")


def wrong_bytes(pool: Pool, shape: BenchOptions) -> int:
    return pattern.check(pool, shape).wrong_bytes


@pytest.mark.parametrize("tokens", [64, 50])
@pytest.mark.parametrize("changes", [{}, {"decode_layout": "hnd"}, {"pages": "contiguous"}, {"page_size": "1"}])
def test_what_was_written_is_found_and_nothing_else(changes: dict[str, Any], tokens: int):
    shape = options(tokens=tokens, **changes)
    pool = written(shape)
    checked = pattern.check(pool, shape)
    request_bytes = tokens * 4 * 2 * 4 * 64 * 2
    assert checked.wrong_bytes == 0
    assert checked.checked_bytes > shape.requests * request_bytes
    pool.memory.fill(POISON)
    assert wrong_bytes(pool, shape) > 0.99 * shape.requests * request_bytes


def test_every_single_wrong_byte_is_seen():
    shape = options(tokens=4, page_size="2", requests=1)
    pool = written(shape)
    address = pool.storage.address
    places = [
        place for region in pool.layout.regions() for place in range(region.address - address, region.stop - address)
    ]
    assert len(places) == 4 * 2 * 3 * 2 * 4 * 64 * 2  # with a page of no request
    for place in np.random.default_rng(0).permutation(places)[:400]:
        pool.memory.host[place] ^= 0x10
        assert wrong_bytes(pool, shape) == 1
        pool.memory.host[place] ^= 0x10


def test_the_first_wrong_byte_is_named():
    shape = options(requests=3)
    pool = written(shape)
    pattern.damage(pool, shape)
    checked = pattern.check(pool, shape)
    assert (checked.wrong_bytes, checked.first_wrong) == (1, "v of layer 3 of request 2, token 63")


def test_right_bytes_in_a_wrong_place_are_wrong():
    shape = options()
    pool = written(shape)
    first, second = pool.layout.shards
    keys = lanes(pool, first, 0, 8)
    own, other = (pool.requests[request]["kv"].pages for request in (0, 1))
    for mine, theirs in [
        (keys[own[0]], keys[own[1]]),  # two pages
        (keys[own[0]], keys[other[0]]),  # two requests
        (keys[own[0], 0], keys[own[0], 1]),  # two tokens
        (keys[own[0], 0, 0], keys[own[0], 0, 1]),  # two heads
        (keys[own[0]], lanes(pool, first, 1, 8)[own[0]]),  # two layers
        (keys[own[0]], lanes(pool, second, 0, 8)[own[0]]),  # keys and values
    ]:
        kept = mine.copy()
        mine[...] = theirs
        assert wrong_bytes(pool, shape) > kept.nbytes // 2  # of every number some bytes
        mine[...] = kept
    assert wrong_bytes(pool, shape) == 0


def test_a_write_into_a_page_of_no_request_is_seen():
    shape = options()
    pool = written(shape)
    (page, *_) = pool.untaken()["kv"]
    lanes(pool, pool.layout.shards[0], 2, 8)[page].flat[0] = POISON
    checked = pattern.check(pool, shape)
    assert checked.wrong_bytes == 7
    assert checked.first_wrong == "k of layer 2, a page of no request"


@pytest.mark.parametrize("tp_size", [2, 3])
def test_ranks_agree_on_what_an_element_is(tp_size: int):
    shape = options(decode_tp=tp_size)
    whole = written(options())
    whole_keys = lanes(whole, whole.layout.shards[0], 1, 8)[whole.requests[1]["kv"].pages]
    parts = []
    for coordinates in shape.decode.coordinates:
        pool = made(shape, coordinates)
        pattern.write(pool, shape)
        parts.append(lanes(pool, pool.layout.shards[0], 1, 8)[pool.requests[1]["kv"].pages])
    assert np.array_equal(np.concatenate(parts, axis=2), whole_keys)


def test_states_and_windows_and_odd_widths_are_checked():
    state = state_component("conv", num_layers=2, axes=(Axis("channel", 6), Axis("width", 3)), dtype="bfloat16")
    window = Component(name="w", axes=(Axis("layer", 2), Axis("latent", 5)), dtype="uint8", window_tokens=20)
    components = tuple(
        ShardedComponent(component=component, layers=(0, 1), tp_axis=axis)
        for component, axis in ((state, "channel"), (window, None))
    )
    shape = replace(options(), model=ModelCache(name="odd", num_layers=2, components=components))
    pool = written(shape)
    checked = pattern.check(pool, shape)
    assert checked.wrong_bytes == 0
    slots, window_pages = (pool.requests[0][default_group(component)].pages for component in (state, window))
    assert len(slots) == 1
    assert len(window_pages) == 2  # 64 tokens in pages of 16: tokens 44 to 63 lie in the last two
    lanes(pool, pool.layout.shards[0], 1, 2)[slots[0], 0, 5, 2] ^= 1
    assert wrong_bytes(pool, shape) == 1
    lanes(pool, pool.layout.shards[1], 1, 1)[window_pages[0], 12, 4] ^= 1
    assert wrong_bytes(pool, shape) == 2
    lanes(pool, pool.layout.shards[1], 1, 1)[window_pages[0], 11, 4] ^= 1  # before the window: need not arrive
    assert wrong_bytes(pool, shape) == 2


def test_several_threads_find_and_write_the_same():
    shape = options(requests=3)
    pool = written(shape)
    alone = pool.memory.host.copy()
    pool.memory.fill(POISON)
    pattern.write(pool, shape, threads=4)
    assert np.array_equal(pool.memory.host, alone)
    pattern.damage(pool, shape)
    assert pattern.check(pool, shape, threads=4) == pattern.check(pool, shape)


def test_after_several_passes_only_what_the_last_one_brought_is_right():
    shape = options(requests=3, in_flight=2)
    pool = written(shape)
    assert pattern.check(pool, shape, passes=1).wrong_bytes == 0
    assert pattern.check(pool, shape, passes=2).wrong_bytes > 0.9 * 3 * 64 * 4 * 2 * 4 * 64 * 2
    rank = shape.decode.coordinates[0]
    moved = made(shape, rank)
    for shard, other in zip(pool.layout.shards, moved.layout.shards, strict=True):
        for layer in range(4):
            for transfer in range(6):
                to = moved.requests[transfer % 3]["kv"].pages
                lanes(moved, other, layer, 8)[to] = lanes(pool, shard, layer, 8)[
                    pool.requests[shape.source_of(transfer)]["kv"].pages
                ]
    assert pattern.check(moved, shape, passes=2).wrong_bytes == 0


def test_memory_of_a_device_is_filled_and_checked_by_way_of_a_copy():
    torch = pytest.importorskip("torch")
    shape = options()
    rank = shape.decode.coordinates[0]
    size = pool_bytes(shape, shape.decode, rank)
    storage = allocate(size + 8192, Device(), "cpu")  # torch knows main memory as a device, too
    pool = Pool(shape, shape.decode, rank, storage)
    assert storage.tensor is not None
    on_device = storage.tensor.numpy()
    assert storage.address == storage.tensor.data_ptr() != storage.host.ctypes.data
    assert storage.address % 4096 == 0
    assert (on_device[:size] == POISON).all()
    written(shape, pool)
    assert np.array_equal(on_device[:size], pool.memory.host)
    pool.memory.host.fill(0)
    pool.memory.fetch()
    assert wrong_bytes(pool, shape) == 0
    for region in pool.layout.regions():
        assert storage.address <= region.address < region.stop <= storage.address + size
    pool.memory.fill(POISON)
    pool.memory.fetch()
    assert wrong_bytes(pool, shape) > 0
    pattern.write(pool, shape)
    storage.tensor[: size // 2].fill_(1)  # as a transfer would
    assert wrong_bytes(pool, shape) == 0  # what is here is a copy from before
    pool.memory.fetch()
    assert wrong_bytes(pool, shape) > 0
    assert storage.copy_seconds(4096) > 0
    assert torch.equal(storage.tensor[-4096:], storage.tensor[:4096])


@pytest.mark.gpu
def test_memory_of_a_gpu_is_filled_and_checked_by_way_of_a_copy():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    shape = replace(options(), device=checked_device("cuda"))
    pool = written(shape)
    assert {shard.device for shard in pool.layout.shards} == {shape.device}
    pool.memory.fetch()
    assert wrong_bytes(pool, shape) == 0
    pool.memory.fill(POISON)
    pool.memory.fetch()
    assert wrong_bytes(pool, shape) > 0
