"""Pieces as byte runs: how long they get in the layouts that engines have, and that they pair the right bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvferry.layout import Box, Component, Interval, Shard, attention_components, latent_component, shard_from_tensors
from kvferry.plan import Runs, lower

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


def both(box: Box, source: Pool, destination: Pool) -> Runs:
    return lower(box, source.shard, destination.shard)


def test_equal_nhd_layouts_melt_into_one_run_a_page_and_layer():
    runs = both(K.whole, Pool(NHD), Pool(NHD))
    assert runs.length == TOKENS * HEADS * DIM * ELEMENT == runs.source_page_stride == runs.destination_page_stride
    assert len(runs.source) == len(runs.destination) == LAYERS
    assert runs.bytes_per_page == LAYERS * runs.length


def test_equal_hnd_layouts_melt_into_one_run_a_page_and_layer():
    assert both(K.whole, Pool(HND), Pool(HND)).length == TOKENS * HEADS * DIM * ELEMENT


def test_a_slice_of_heads_in_nhd_is_one_run_a_token():
    runs = both((Interval(0, 2), Interval(2, 4), Interval(0, DIM)), Pool(NHD), Pool(NHD, Interval(2, 4)))
    assert runs.length == 2 * DIM * ELEMENT
    assert len(runs.source) == LAYERS * TOKENS
    assert runs.source_page_stride == 2 * runs.destination_page_stride


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
        assert both(K.whole, Pool(source, tokens=1), Pool(destination, tokens=1)).length == HEADS * DIM * ELEMENT


def test_layers_count_from_the_first_that_a_side_holds():
    whole = Pool(NHD)
    array = np.zeros((PAGES, TOKENS, HEADS, DIM), np.int16)
    stage = shard_from_tensors(K, [array], dims=NHD, held={"layer": Interval(1, 2)})
    box = (Interval(1, 2), *K.whole[1:])
    assert list(lower(box, stage, whole.shard).source) == [array.ctypes.data]
    assert list(lower(box, whole.shard, stage).source) == [whole.arrays[1].ctypes.data]
    assert list(lower(box, whole.shard, stage).destination) == [array.ctypes.data]


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
    runs = lower(K.whole, shard_from_tensors(K, views, dims=NHD), Pool(NHD).shard)
    assert (runs.length, len(runs.source)) == (DIM * ELEMENT, LAYERS * TOKENS * HEADS)


def test_alike_gaps_on_both_sides_are_not_melted_over_either():
    def pool() -> Any:
        return [np.zeros((PAGES, TOKENS, HEADS, DIM + 4), np.int16)[..., :DIM] for _ in range(LAYERS)]

    one, other = (shard_from_tensors(K, pool(), dims=NHD) for _ in range(2))
    assert lower(K.whole, one, other).length == DIM * ELEMENT


def test_latents_of_equal_layout_melt_into_a_page():
    latent = latent_component(num_layers=1, latent_dim=576, dtype="int16")
    arrays = [np.zeros((PAGES, TOKENS, 576), np.int16) for _ in range(2)]
    shards = [shard_from_tensors(latent, [array], dims=("page", "token", "latent")) for array in arrays]
    assert lower(latent.whole, *shards).length == TOKENS * 576 * ELEMENT


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
    assert runs.bytes_per_page == len(expected) * ELEMENT


def test_addresses_of_the_upper_half_of_memory_stay_exact():
    """Device addresses may use all 64 bits."""
    component = Component(
        name="latent", axes=latent_component(num_layers=1, latent_dim=4, dtype="int16").axes, dtype="int16"
    )
    array = np.zeros((PAGES, TOKENS, 4), np.int16)
    low = shard_from_tensors(component, [array], dims=("page", "token", "latent"))
    high = Shard(component=component, box=low.box, addresses=(2**64 - 4096,), strides=low.strides, paging=low.paging)
    runs = lower((Interval(0, 1), Interval(1, 3)), low, high)
    assert [int(address) for address in runs.destination] == [2**64 - 4096 + 2 + 8 * token for token in range(TOKENS)]
