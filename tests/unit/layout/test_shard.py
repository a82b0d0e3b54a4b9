"""Shards and rank layouts: which descriptions are refused, and which memory they cover."""

from __future__ import annotations

from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import LayoutError
from kvferry.layout import (
    Axis,
    Box,
    Component,
    Device,
    Interval,
    MemoryKind,
    Paging,
    RankLayout,
    Region,
    Shard,
    empty_shard,
    latent_component,
)

# Two layers of two pages of four tokens of three heads of two 2-byte elements, NHD, each layer on its own.
COMPONENT = Component(name="k", axes=(Axis("layer", 2), Axis("head", 3), Axis("dim", 2)), dtype="float16")
PAGING = Paging(page_tokens=4, num_pages=2, page_stride=48, token_stride=12)
ADDRESSES = (0x1000, 0x2000)


def shard(**changes: Any) -> Shard:
    fields: dict[str, Any] = {
        "component": COMPONENT,
        "box": COMPONENT.whole,
        "addresses": ADDRESSES,
        "strides": (4, 2),
        "paging": PAGING,
    }
    return Shard(**{**fields, **changes})


def renamed(one: Shard, name: str, **changes: Any) -> Shard:
    component = msgspec.structs.replace(one.component, name=name)
    return msgspec.structs.replace(one, component=component, **changes)


def occupied(one: Shard) -> list[int]:
    """Every byte of every element, by the definition in Shard's docstring."""
    steps = [range(step.count) for step in one.steps()]
    strides = [step.stride for step in one.steps()]
    return [
        address + sum(index * stride for index, stride in zip(indices, strides, strict=True)) + byte
        for address in one.addresses
        for indices in product(*steps)
        for byte in range(one.component.element_bytes)
    ]


def test_a_right_shard_knows_its_bytes():
    assert shard().bytes_per_token == 2 * 3 * 2 * 2
    assert shard().regions() == [Region(0x1000, 96), Region(0x2000, 96)]
    assert Region(0x1000, 96).stop == 0x1060


@pytest.mark.parametrize(
    "box",
    [
        (Interval(0, 2), Interval(0, 3)),
        (Interval(0, 2), Interval(0, 4), Interval(0, 2)),
        (Interval(1, 3), Interval(0, 3), Interval(0, 2)),
    ],
)
def test_a_box_that_leaves_the_component_is_refused(box: Box):
    with pytest.raises(LayoutError, match=r"'k' has layer 2, head 3, dim 2: a shard of .* is not a part of it"):
        shard(box=box)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"addresses": (1, 2, 3)}, "not 3 and 2"),
        ({"addresses": ()}, "not 0 and 2"),
        ({"strides": (4,)}, "not 2 and 1"),
    ],
)
def test_wrong_numbers_of_addresses_or_strides_are_refused(changes: dict[str, Any], found: str):
    with pytest.raises(LayoutError, match=rf"needs 2 addresses and 2 strides, {found}"):
        shard(**changes)


@pytest.mark.parametrize(("page_tokens", "num_pages"), [(0, 2), (4, 0), (-1, 2)])
def test_a_pool_without_pages_or_tokens_is_refused(page_tokens: int, num_pages: int):
    paging = Paging(page_tokens=page_tokens, num_pages=num_pages, page_stride=48, token_stride=12)
    with pytest.raises(LayoutError, match=f"has {num_pages} pages of {page_tokens} tokens: both must be at least 1"):
        shard(paging=paging)


@pytest.mark.parametrize(
    ("changes", "step", "stride", "takes"),
    [
        ({"strides": (4, 1)}, "dim", 1, 2),
        ({"strides": (2, 2)}, "dim|head", 2, 6),
        ({"strides": (4, 0)}, "dim", 0, 2),
        ({"strides": (-4, 2)}, "head", -4, 2),
        ({"paging": Paging(page_tokens=4, num_pages=2, page_stride=48, token_stride=11)}, "token", 11, 12),
        ({"paging": Paging(page_tokens=4, num_pages=2, page_stride=47, token_stride=12)}, "page", 47, 48),
        ({"paging": Paging(page_tokens=4, num_pages=2, page_stride=0, token_stride=12)}, "page", 0, 2),
    ],
)
def test_strides_that_make_elements_overlap_are_refused(changes: dict[str, Any], step: str, stride: int, takes: int):
    message = rf"'k': a step on ({step}) is {stride} bytes, but one ({step}) takes {takes}: elements would overlap"
    with pytest.raises(LayoutError, match=message):
        shard(**changes)


def test_strides_of_dimensions_with_one_index_do_not_matter():
    paging = Paging(page_tokens=4, num_pages=1, page_stride=0, token_stride=12)
    assert shard(paging=paging).regions() == [Region(0x1000, 48), Region(0x2000, 48)]


@pytest.mark.parametrize(
    ("addresses", "what"),
    [
        ((0x1000, 0x1000), "the same tensor twice"),
        ((0x1000, 0x1000 + 48), "the second page of the other layer"),
        ((0x1000 + 12, 0x1000), "the second token of the other layer"),
        ((0x1000, 0x1000 + 95), "the last byte of the other layer"),
        ((0x1000, 0x1000 + 1), "half an element off"),
    ],
)
def test_layers_that_share_bytes_are_refused(addresses: tuple[int, int], what: str):
    with pytest.raises(LayoutError, match=r"'k': layer \d at 0x[0-9a-f]+ and layer \d at 0x[0-9a-f]+ share bytes"):
        shard(addresses=addresses)


def test_layers_that_share_bytes_two_layers_on_are_refused():
    component = Component(name="k", axes=(Axis("layer", 3), *COMPONENT.axes[1:]), dtype="float16")
    paging = Paging(page_tokens=4, num_pages=2, page_stride=96, token_stride=12)
    interleaved = (0x1000, 0x1000 + 48, 0x1000 + 96)  # a page has room for two layers only
    with pytest.raises(LayoutError, match=r"layer 0 at 0x1000 and layer 2 at 0x1060 share bytes"):
        shard(component=component, box=component.whole, addresses=interleaved, paging=paging)


@pytest.mark.parametrize("distance", [99, 100, 101, 199, 201, 299, 301])
def test_layers_that_share_a_byte_across_gaps_are_refused(distance: int):
    """Tokens of 12 bytes every 100 bytes: what starts a byte before a token runs into it."""
    paging = Paging(page_tokens=4, num_pages=1, page_stride=400, token_stride=100)
    with pytest.raises(LayoutError, match="share bytes"):
        shard(paging=paging, addresses=(0x1000, 0x1000 + distance))
    for free in (12, 50, 88, 112, 188, 312, 388, 400):
        assert shard(paging=paging, addresses=(0x1000, 0x1000 + free)).regions()


@st.composite
def nested_strides(draw: st.DrawFn) -> tuple[int, ...]:
    """Strides of page, token, head and dim in some order, with gaps; now and then one that is too short."""
    strides, inner = [], 2
    for _ in range(4):
        strides.append(max(0, inner + draw(st.integers(-1, 12))))
        inner = 2 * strides[-1]
    return tuple(draw(st.permutations(strides)))


@settings(max_examples=400)
@given(strides=nested_strides(), distance=st.integers(0, 200))
def test_two_elements_on_one_byte_are_refused_and_nothing_else(strides: tuple[int, ...], distance: int):
    component = Component(name="k", axes=(Axis("layer", 2), Axis("head", 2), Axis("dim", 2)), dtype="int16")
    page, token, head, dim = strides

    def described(*addresses: int) -> Shard:
        return Shard(
            component=component,
            box=component.whole,
            addresses=addresses,
            strides=(head, dim),
            paging=Paging(page_tokens=2, num_pages=2, page_stride=page, token_stride=token),
        )

    try:
        apart = described(0, 10**6)
    except LayoutError:
        return  # strides that do not nest
    elements = occupied(apart)
    assert len(set(elements)) == len(elements)
    layer = {byte for byte in elements if byte < 10**6}
    if layer & {byte + distance for byte in layer}:
        with pytest.raises(LayoutError, match="share bytes"):
            described(0, distance)
    else:
        assert described(0, distance).addresses == (0, distance)


@given(st.permutations(["page", "token", "head", "dim"]), st.integers(0, 4))
def test_no_dense_shard_is_refused(order: list[str], layer_at: int):
    """Layers anywhere in a dense tensor of any order, the last dimension excepted, are described without complaint."""
    names = [*order[:layer_at], "layer", *order[layer_at:]]
    shape = dict.fromkeys(names, 2)
    array = np.zeros(tuple(shape.values()), np.int16)
    stride = dict(zip(names, array.strides, strict=True))
    component = Component(name="k", axes=(Axis("layer", 2), Axis("head", 2), Axis("dim", 2)), dtype="int16")
    one = Shard(
        component=component,
        box=component.whole,
        addresses=(0x1000, 0x1000 + stride["layer"]),
        strides=(stride["head"], stride["dim"]),
        paging=Paging(page_tokens=2, num_pages=2, page_stride=stride["page"], token_stride=stride["token"]),
    )
    assert sorted(occupied(one)) == list(range(0x1000, 0x1000 + array.nbytes))


def test_regions_run_from_the_first_to_the_last_byte():
    heads = (Interval(0, 2), Interval(1, 2), Interval(0, 2))  # a head out of the middle of a bigger tensor
    bytes_used = occupied(shard(box=heads))
    regions = shard(box=heads).regions()
    assert (regions[0].address, regions[-1].stop) == (min(bytes_used), max(bytes_used) + 1)


def test_an_empty_shard_has_no_memory():
    empty = empty_shard(COMPONENT, page_tokens=4, num_pages=2)
    assert (empty.regions(), empty.bytes_per_token, len(empty.box[0])) == ([], 0, 0)


# --- ranks


def test_a_rank_sums_up_its_shards():
    rank = RankLayout(shards=(shard(), renamed(shard(addresses=(0x3000, 0x4000)), "v")))
    assert (rank.page_tokens, rank.num_pages, rank.bytes_per_token, rank.device) == (4, 2, 48, Device())
    assert rank.shard("v").addresses == (0x3000, 0x4000)
    assert [region.address for region in rank.regions()] == [0x1000, 0x2000, 0x3000, 0x4000]


def test_the_digest_is_the_same_on_every_rank_of_an_engine():
    empty = empty_shard(COMPONENT, page_tokens=4, num_pages=9)
    part = shard(box=(Interval(1, 2), Interval(0, 1), Interval(0, 2)), addresses=(0x1000,))
    assert len({RankLayout(shards=(one,)).digest for one in (shard(), empty, part)}) == 1


@pytest.mark.parametrize("shards", [(), (shard(), shard(addresses=(0x3000, 0x4000)))])
def test_a_rank_lists_each_component_once(shards: tuple[Shard, ...]):
    with pytest.raises(LayoutError, match="lists each component once, and at least one; got"):
        RankLayout(shards=shards)


@pytest.mark.parametrize(("page_tokens", "num_pages"), [(8, 2), (4, 3)])
def test_shards_of_different_pages_are_refused(page_tokens: int, num_pages: int):
    paging = Paging(page_tokens=page_tokens, num_pages=num_pages, page_stride=96, token_stride=12)
    other = renamed(shard(paging=paging), "v")
    message = rf"'v' has {num_pages} pages of {page_tokens} tokens, 'k' has 2 of 4"
    with pytest.raises(LayoutError, match=message):
        RankLayout(shards=(shard(), other))


def test_shards_on_different_devices_are_refused():
    other = renamed(shard(addresses=(0x3000, 0x4000)), "v", device=Device(MemoryKind.VRAM, 1))
    with pytest.raises(LayoutError, match=r"'v' is on VRAM:1, 'k' on DRAM:0"):
        RankLayout(shards=(shard(), other))


def test_an_empty_shard_must_name_the_device_of_its_rank():
    component = latent_component(num_layers=1, latent_dim=2, dtype="float16")
    on_gpu = shard(device=Device(MemoryKind.VRAM, 0))
    with pytest.raises(LayoutError, match=r"'latent' is on DRAM:0, 'k' on VRAM:0"):
        RankLayout(shards=(on_gpu, empty_shard(component, page_tokens=4, num_pages=2)))
    empty = empty_shard(component, page_tokens=4, num_pages=2, device=on_gpu.device)
    assert RankLayout(shards=(empty, on_gpu)).device == on_gpu.device


def test_two_components_in_the_same_tensor_are_refused():
    with pytest.raises(LayoutError, match=r"'v' and 'k' both start at 0x1000"):
        RankLayout(shards=(shard(), renamed(shard(), "v")))


def test_a_component_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(LayoutError, match=r"no component 'v': there are \['k'\]"):
        RankLayout(shards=(shard(),)).shard("v")


def test_regions_that_overlap_become_one_and_neighbours_stay_apart():
    """Memory of two allocations may be adjacent, and must not be registered as one."""
    interleaved = shard(addresses=(0x1000, 0x1000 + 48), paging=msgspec.structs.replace(PAGING, page_stride=96))
    assert RankLayout(shards=(interleaved,)).regions() == (Region(0x1000, 2 * 96),)
    adjacent = shard(addresses=(0x1000, 0x1000 + 96))
    assert RankLayout(shards=(adjacent,)).regions() == (Region(0x1000, 96), Region(0x1000 + 96, 96))


def test_a_region_inside_of_another_does_not_shorten_it():
    outer = shard(paging=msgspec.structs.replace(PAGING, page_stride=0x800), addresses=(0x1000, 0x3000))
    inner = renamed(shard(addresses=(0x1100, 0x3100)), "v")
    assert RankLayout(shards=(outer, inner)).regions() == (Region(0x1000, 0x830), Region(0x3000, 0x830))


def test_a_layout_travels():
    rank = RankLayout(shards=(shard(), empty_shard(latent_component(num_layers=1, latent_dim=2, dtype="int8"),
                                                   page_tokens=4, num_pages=2)))  # fmt: skip
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(rank), type=RankLayout) == rank
