"""Pieces as byte runs: how long they get in the layouts that engines have, and that they pair the right bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvferry.layout import (
    Axis,
    Box,
    Component,
    Interval,
    Shard,
    attention_components,
    latent_component,
    packed_component,
    shard_from_tensors,
    state_component,
)
from kvferry.plan import Runs, lower
from kvferry.plan.lowering import Loop, PageSteps

NHD, HND = ("page", "token", "head", "dim"), ("page", "head", "token", "dim")
LAYERS, HEADS, TOKENS, DIM, PAGES = 2, 4, 8, 16, 3
K, _ = attention_components(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype="int16")
ELEMENT = 2
ALL_HEADS = Interval(0, HEADS)


class Pool:
    """Numbered arrays of some heads, with the shard that describes them."""

    def __init__(
        self, dims: tuple[str, ...], heads: Interval = ALL_HEADS, tokens: int = TOKENS, pages: int = PAGES
    ) -> None:
        sizes = {"page": pages, "token": tokens, "head": len(heads), "dim": DIM}
        self.arrays = [np.zeros([sizes[name] for name in dims], np.int16) for _ in range(LAYERS)]
        self.shard = shard_from_tensors(K, self.arrays, dims=dims, held={"head": heads})


def both(box: Box, source: Pool, destination: Pool, unit_tokens: int = TOKENS) -> Runs:
    return lower(box, source.shard, destination.shard, unit_tokens=unit_tokens)


def test_equal_nhd_layouts_melt_into_one_run_a_page_and_layer():
    runs = both(K.whole, Pool(NHD), Pool(NHD))
    assert runs.length == TOKENS * HEADS * DIM * ELEMENT
    assert runs.source_steps == runs.destination_steps == PageSteps(1, runs.length, runs.length)
    assert len(runs.source) == len(runs.destination) == LAYERS
    assert (runs.count, runs.loops, runs.bytes_per_unit) == (LAYERS, (), LAYERS * runs.length)


def test_equal_hnd_layouts_melt_into_one_run_a_page_and_layer():
    assert both(K.whole, Pool(HND), Pool(HND)).length == TOKENS * HEADS * DIM * ELEMENT


def test_a_slice_of_heads_in_nhd_is_one_run_a_token():
    runs = both((Interval(0, 2), Interval(2, 4), Interval(0, DIM)), Pool(NHD), Pool(NHD, Interval(2, 4)))
    assert runs.length == 2 * DIM * ELEMENT
    assert len(runs.source) == LAYERS * TOKENS
    assert runs.source_steps.page_stride == 2 * runs.destination_steps.page_stride
    assert runs.loops == (Loop(TOKENS, HEADS * DIM * ELEMENT, 2 * DIM * ELEMENT),)


def test_a_slice_of_heads_in_hnd_melts_tokens_and_dims_and_heads():
    source, destination = Pool(HND), Pool(HND, Interval(2, 4))
    runs = both((Interval(0, 2), Interval(2, 4), Interval(0, DIM)), source, destination)
    assert runs.length == 2 * TOKENS * DIM * ELEMENT
    assert list(runs.source) == [array.ctypes.data + 2 * TOKENS * DIM * ELEMENT for array in source.arrays]
    assert list(runs.destination) == [array.ctypes.data for array in destination.arrays]


def test_one_head_of_hnd_is_one_run_a_page():
    runs = both((Interval(0, 2), Interval(1, 2), Interval(0, DIM)), Pool(HND), Pool(HND))
    assert (runs.length, len(runs.source)) == (TOKENS * DIM * ELEMENT, LAYERS)


@pytest.mark.parametrize(("source", "destination"), [(NHD, HND), (HND, NHD)])
def test_different_layouts_melt_only_what_both_have(source: tuple[str, ...], destination: tuple[str, ...]):
    runs = both(K.whole, Pool(source), Pool(destination))
    assert runs.length == DIM * ELEMENT
    assert len(runs.source) == LAYERS * TOKENS * HEADS


def test_a_single_head_makes_nhd_and_hnd_the_same_memory():
    one = (Interval(0, 2), Interval(1, 2), Interval(0, DIM))
    runs = both(one, Pool(NHD, Interval(1, 2)), Pool(HND, Interval(1, 2)))
    assert runs.length == TOKENS * DIM * ELEMENT


def test_pages_of_a_single_token_make_nhd_and_hnd_the_same_memory():
    for source, destination in ((NHD, HND), (HND, NHD)):
        assert both(K.whole, Pool(source, tokens=1), Pool(destination, tokens=1), 1).length == HEADS * DIM * ELEMENT


def test_layers_count_from_the_first_that_a_side_holds():
    whole = Pool(NHD)
    array = np.zeros((PAGES, TOKENS, HEADS, DIM), np.int16)
    stage = shard_from_tensors(K, [array], dims=NHD, held={"layer": Interval(1, 2)})
    box = (Interval(1, 2), *K.whole[1:])
    assert list(lower(box, stage, whole.shard, unit_tokens=TOKENS).source) == [array.ctypes.data]
    assert list(lower(box, whole.shard, stage, unit_tokens=TOKENS).source) == [whole.arrays[1].ctypes.data]
    assert list(lower(box, whole.shard, stage, unit_tokens=TOKENS).destination) == [array.ctypes.data]


def test_pools_of_different_sizes_have_the_same_runs():
    runs = both(K.whole, Pool(NHD, pages=2), Pool(NHD, pages=7))
    assert (len(runs.source), runs.length) == (LAYERS, TOKENS * HEADS * DIM * ELEMENT)


def test_only_the_asked_layers_are_enumerated():
    source, destination = Pool(NHD), Pool(NHD)
    runs = both((Interval(1, 2), *K.whole[1:]), source, destination)
    assert list(runs.source) == [source.arrays[1].ctypes.data]
    assert list(runs.destination) == [destination.arrays[1].ctypes.data]


def test_gaps_are_not_melted_over():
    padded = np.zeros((PAGES, TOKENS, HEADS, DIM + 4), np.int16)
    views = [padded[..., :DIM], np.zeros_like(padded)[..., :DIM]]
    runs = lower(K.whole, shard_from_tensors(K, views, dims=NHD), Pool(NHD).shard, unit_tokens=TOKENS)
    assert (runs.length, len(runs.source)) == (DIM * ELEMENT, LAYERS * TOKENS * HEADS)


def test_alike_gaps_on_both_sides_are_not_melted_over_either():
    def pool() -> Any:
        return [np.zeros((PAGES, TOKENS, HEADS, DIM + 4), np.int16)[..., :DIM] for _ in range(LAYERS)]

    one, other = (shard_from_tensors(K, pool(), dims=NHD) for _ in range(2))
    assert lower(K.whole, one, other, unit_tokens=TOKENS).length == DIM * ELEMENT


def test_latents_of_equal_layout_melt_into_a_page():
    latent = latent_component(num_layers=1, latent_dim=576, dtype="int16")
    arrays = [np.zeros((PAGES, TOKENS, 576), np.int16) for _ in range(2)]
    shards = [shard_from_tensors(latent, [array], dims=("page", "token", "latent")) for array in arrays]
    assert lower(latent.whole, *shards, unit_tokens=TOKENS).length == TOKENS * 576 * ELEMENT


def addresses_of(shard: Shard, runs: Any, length: int) -> list[int]:
    return [int(start) + byte for start in runs for byte in range(0, length, shard.component.element_bytes)]


@pytest.mark.parametrize("source_dims", [NHD, HND, ("token", "head", "page", "dim"), ("head", "page", "token", "dim")])
@pytest.mark.parametrize("destination_dims", [NHD, HND, ("dim", "head", "token", "page")])
def test_runs_pair_the_same_elements(source_dims: tuple[str, ...], destination_dims: tuple[str, ...]):
    """Every element of page 0 is found at its two addresses, computed from the arrays themselves."""
    box = (Interval(0, 2), Interval(1, 3), Interval(0, DIM))
    source, destination = Pool(source_dims), Pool(destination_dims, Interval(1, 4))
    runs = both(box, source, destination)
    expected = {}
    for layer in range(LAYERS):
        for token, head, dim in np.ndindex(TOKENS, 2, DIM):
            place = {"page": 0, "token": token, "dim": dim}
            here, there = (
                pool.arrays[layer].ctypes.data
                + sum(
                    {**place, "head": 1 + head - held}[name] * stride
                    for name, stride in zip(dims, pool.arrays[layer].strides, strict=True)
                )
                for pool, dims, held in ((source, source_dims, 0), (destination, destination_dims, 1))
            )
            expected[here] = there
    found = zip(
        addresses_of(source.shard, runs.source, runs.length),
        addresses_of(destination.shard, runs.destination, runs.length),
        strict=True,
    )
    assert dict(found) == expected
    assert runs.bytes_per_unit == len(expected) * ELEMENT


def test_addresses_of_the_upper_half_of_memory_stay_exact():
    """Device addresses may use all 64 bits."""
    component = Component(
        name="latent", axes=latent_component(num_layers=1, latent_dim=4, dtype="int16").axes, dtype="int16"
    )
    array = np.zeros((PAGES, TOKENS, 4), np.int16)
    low = shard_from_tensors(component, [array], dims=("page", "token", "latent"))
    high = Shard(component=component, box=low.box, addresses=(2**64 - 4096,), strides=low.strides, paging=low.paging)
    runs = lower((Interval(0, 1), Interval(1, 3)), low, high, unit_tokens=TOKENS)
    assert [int(address) for address in runs.destination] == [2**64 - 4096 + 2 + 8 * token for token in range(TOKENS)]


# --- pages of different sizes


@pytest.mark.parametrize(
    ("theirs", "ours", "unit", "source_units", "destination_units"),
    [(16, 64, 16, 1, 4), (64, 16, 16, 4, 1), (16, 48, 16, 1, 3), (32, 48, 16, 2, 3), (16, 16, 4, 4, 4)],
)
@pytest.mark.parametrize("dims", [NHD, HND])
def test_pages_are_so_many_units(
    theirs: int, ours: int, unit: int, source_units: int, destination_units: int, dims: tuple[str, ...]
):
    runs = both(K.whole, Pool(dims, tokens=theirs), Pool(dims, tokens=ours), unit)
    token = DIM * ELEMENT if dims == HND else HEADS * DIM * ELEMENT
    page = HEADS * DIM * ELEMENT
    assert runs.source_steps == PageSteps(source_units, unit * token, theirs * page)
    assert runs.destination_steps == PageSteps(destination_units, unit * token, ours * page)
    assert runs.bytes_per_unit == LAYERS * unit * HEADS * DIM * ELEMENT


def test_a_unit_of_nhd_is_one_run_whatever_the_pages():
    assert both(K.whole, Pool(NHD, tokens=16), Pool(NHD, tokens=64), 16).length == 16 * HEADS * DIM * ELEMENT


def test_a_unit_of_hnd_is_one_run_a_head_where_pages_differ():
    runs = both(K.whole, Pool(HND, tokens=16), Pool(HND, tokens=64), 16)
    assert (runs.length, runs.count) == (16 * DIM * ELEMENT, LAYERS * HEADS)
    assert runs.loops == (Loop(HEADS, 16 * DIM * ELEMENT, 64 * DIM * ELEMENT),)


def address_in(pool: Pool, dims: tuple[str, ...], layer: int, position: int, head: int, dim: int) -> int:
    """Where an element of a request lies, whose pages are 0, 1, 2, ... of the pool."""
    array = pool.arrays[layer]
    tokens = pool.shard.paging.page_tokens
    place = {"page": position // tokens, "token": position % tokens, "head": head, "dim": dim}
    offsets = [place[name] * stride for name, stride in zip(dims, array.strides, strict=True)]
    return int(array.ctypes.data + sum(offsets))


@pytest.mark.parametrize(("theirs", "ours", "unit"), [(2, 6, 2), (6, 2, 2), (4, 6, 2), (4, 4, 1), (3, 3, 3)])
@pytest.mark.parametrize("source_dims", [NHD, HND, ("token", "head", "page", "dim")])
@pytest.mark.parametrize("destination_dims", [NHD, HND, ("dim", "token", "head", "page")])
def test_units_pair_the_same_tokens_in_pages_of_any_size(
    theirs: int, ours: int, unit: int, source_dims: tuple[str, ...], destination_dims: tuple[str, ...]
):
    """Every element of the first 12 tokens, its addresses computed from the arrays themselves."""
    source = Pool(source_dims, tokens=theirs, pages=12 // theirs)
    destination = Pool(destination_dims, tokens=ours, pages=12 // ours)
    runs = both(K.whole, source, destination, unit)

    def start_of(number: int, steps: PageSteps) -> int:
        return number // steps.units * steps.page_stride + number % steps.units * steps.unit_stride

    found = {}
    for number in range(12 // unit):
        here, there = (start_of(number, steps) for steps in (runs.source_steps, runs.destination_steps))
        for from_address, to_address in zip(
            addresses_of(source.shard, runs.source, runs.length),
            addresses_of(destination.shard, runs.destination, runs.length),
            strict=True,
        ):
            found[from_address + here] = to_address + there
    expected = {
        address_in(source, source_dims, layer, position, head, dim): address_in(
            destination, destination_dims, layer, position, head, dim
        )
        for layer, position, head, dim in np.ndindex(LAYERS, 12, HEADS, DIM)
    }
    assert found == expected


# --- slots and packed pages


def test_slots_are_moved_whole_where_both_sides_keep_them_alike():
    state = state_component("state", num_layers=2, axes=(Axis("head", 4), Axis("dim", 8)), dtype="int16")
    shards = []
    for slots in (3, 7):
        arrays = [np.zeros((slots, 4, 8), np.int16) for _ in range(2)]
        shards.append(shard_from_tensors(state, arrays, dims=("slot", "head", "dim")))
    runs = lower(state.whole, *shards, unit_tokens=1)
    assert (runs.length, runs.loops, runs.count) == (4 * 8 * ELEMENT, (), 2)
    assert runs.source_steps == runs.destination_steps == PageSteps(1, 0, 4 * 8 * ELEMENT)
    heads = (Interval(1, 2), Interval(1, 3), Interval(0, 8))
    part = lower(heads, *shards, unit_tokens=1)
    assert part.source.tolist() == [shards[0].addresses[1] + 8 * ELEMENT]
    assert part.destination.tolist() == [shards[1].addresses[1] + 8 * ELEMENT]
    assert part.length == 2 * 8 * ELEMENT


def test_channels_of_a_convolution_are_cut_from_the_middle_of_a_slot():
    """Key channels lie between others: 8 of 32 on the source, 4 of 16 on a receiver that has half of them."""
    keys = state_component("conv_k", num_layers=1, axes=(Axis("channel", 8), Axis("width", 3)), dtype="int16")
    dims = ("slot", "channel", "width")
    whole, half = np.zeros((3, 32, 3), np.int16), np.zeros((5, 16, 3), np.int16)
    source = shard_from_tensors(keys, [whole[:, 8:16]], dims=dims)
    destination = shard_from_tensors(keys, [half[:, 4:8]], dims=dims, held={"channel": Interval(4, 8)})
    runs = lower(destination.box, source, destination, unit_tokens=1)
    assert runs.source.tolist() == [whole.ctypes.data + (8 + 4) * 3 * ELEMENT]
    assert runs.destination.tolist() == [half.ctypes.data + 4 * 3 * ELEMENT]
    assert (runs.length, runs.source_steps.page_stride) == (4 * 3 * ELEMENT, 32 * 3 * ELEMENT)
    assert runs.destination_steps.page_stride == 16 * 3 * ELEMENT


def test_packed_pages_are_cut_by_head_and_moved_whole():
    packed = packed_component("kv", num_layers=2, num_kv_heads=4, packed=96, dtype="uint8", packing="x")
    dims = ("page", "head", "packed")
    source = shard_from_tensors(packed, [np.zeros((3, 4, 96), np.uint8) for _ in range(2)], dims=dims, page_tokens=16)
    held = {"head": Interval(2, 4)}
    arrays = [np.zeros((3, 2, 96), np.uint8) for _ in range(2)]
    destination = shard_from_tensors(packed, arrays, dims=dims, page_tokens=16, held=held)
    runs = lower(destination.box, source, destination, unit_tokens=16)
    assert (runs.length, runs.loops, runs.count) == (2 * 96, (), 2)
    assert runs.source.tolist() == [address + 2 * 96 for address in source.addresses]
    assert (runs.source_steps, runs.destination_steps) == (PageSteps(1, 0, 4 * 96), PageSteps(1, 0, 2 * 96))


def test_runs_start_at_every_combination_of_steps_the_last_fastest():
    runs = both(K.whole, Pool(NHD), Pool(HND))
    assert [loop.count for loop in runs.loops] == [TOKENS, HEADS]
    starts = (runs.source - runs.source[0]).tolist()[: HEADS + 1]
    assert starts == [head * DIM * ELEMENT for head in range(HEADS)] + [HEADS * DIM * ELEMENT]
    assert len(runs.source) == len(runs.destination) == runs.count == LAYERS * TOKENS * HEADS
    assert runs.source.dtype == runs.destination.dtype == np.uint64
