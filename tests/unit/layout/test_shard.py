"""Shards and rank layouts: which descriptions are refused, and which memory they cover."""

from __future__ import annotations

from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tiers import examples

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
    TokenShare,
    empty_shard,
    interleaved,
    latent_component,
    packed_component,
    state_component,
)
from kvferry.layout.shard import PageGroup

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
    assert (shard().entries_per_page, shard().bytes_per_page) == (4, 4 * 2 * 3 * 2 * 2)
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


@settings(max_examples=examples(400))
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
    assert (empty.regions(), empty.bytes_per_page, len(empty.box[0])) == ([], 0, 0)


# --- slots and packed pages

STATE = state_component("state", num_layers=2, axes=(Axis("head", 3), Axis("dim", 2)), dtype="float16")
SLOTS = Paging(page_tokens=1, num_pages=5, page_stride=12, token_stride=0)
PACKED = packed_component("kv", num_layers=2, num_kv_heads=3, packed=8, dtype="float16", packing="cpu-1")
PACKED_PAGES = Paging(page_tokens=4, num_pages=2, page_stride=48, token_stride=0)


def state(**changes: Any) -> Shard:
    return shard(**{"component": STATE, "addresses": (0x5000, 0x6000), "paging": SLOTS, "group": "state", **changes})


def packed(**changes: Any) -> Shard:
    fields = {"component": PACKED, "box": PACKED.whole, "strides": (16, 2), "paging": PACKED_PAGES}
    return shard(**{**fields, **changes})


def test_a_slot_holds_the_state_of_a_request():
    one = state()
    assert (one.entries_per_page, one.bytes_per_page) == (1, 2 * 3 * 2 * 2)
    assert {step.name for step in one.steps()} == {"page", "head", "dim"}
    assert one.regions() == [Region(0x5000, 60), Region(0x6000, 60)]


def test_slots_of_more_than_a_request_are_refused():
    paging = msgspec.structs.replace(SLOTS, page_tokens=16)
    with pytest.raises(LayoutError, match="'state' has pages of 16 tokens, but one entry per request: its pages are"):
        state(paging=paging)


def test_a_packed_page_has_one_entry_whatever_its_tokens():
    one = packed()
    assert (one.entries_per_page, one.bytes_per_page) == (1, 2 * 3 * 8 * 2)
    assert {step.name for step in one.steps()} == {"page", "head", "packed"}
    assert sorted(occupied(one)) == [base + byte for base in (0x1000, 0x2000) for byte in range(96)]


def test_token_strides_do_not_matter_where_tokens_have_no_entries():
    assert packed(paging=msgspec.structs.replace(PACKED_PAGES, token_stride=-7)).regions() == packed().regions()


# --- ranks


def test_a_rank_sums_up_its_shards():
    rank = RankLayout(shards=(shard(), renamed(shard(addresses=(0x3000, 0x4000)), "v"), state()))
    assert rank.device == Device()
    assert [component.name for component in rank.components] == ["k", "v", "state"]
    assert [region.address for region in rank.regions()] == [0x1000, 0x2000, 0x3000, 0x4000, 0x5000, 0x6000]
    assert rank.tokens.partition.is_whole


def test_shards_that_share_page_numbers_form_a_group():
    windowed = msgspec.structs.replace(COMPONENT, name="w", window_tokens=8)
    window = shard(component=windowed, addresses=(0x3000, 0x4000), group="window")
    rank = RankLayout(shards=(shard(), renamed(shard(addresses=(0x7000, 0x8000)), "v"), window, state()))
    assert rank.groups == (
        PageGroup("kv", 4, 2, has_slots=False, window_tokens=None),
        PageGroup("window", 4, 2, has_slots=False, window_tokens=8),
        PageGroup("state", 1, 5, has_slots=True, window_tokens=None),
    )
    assert rank.group("window") == rank.groups[1]
    with pytest.raises(LayoutError, match=r"no group 'w': there are \['kv', 'window', 'state'\]"):
        rank.group("w")


def test_a_group_may_hold_every_token_on_a_rank_that_holds_a_share():
    draft = renamed(shard(addresses=(0x7000, 0x8000), group="draft", has_every_token=True), "draft")
    share = TokenShare(interleaved(2), 1)
    rank = RankLayout(shards=(shard(), draft, state()), tokens=share)
    assert [rank.share_of(group) for group in rank.groups] == [share, TokenShare(), TokenShare()]
    assert [rank.share_of(each) for each in rank.shards] == [share, TokenShare(), TokenShare()]
    with pytest.raises(LayoutError, match="'draft' has 2 pages of 4 tokens for every token, 'k' has 2 pages of 4 tok"):
        RankLayout(shards=(shard(), msgspec.structs.replace(draft, group="kv")), tokens=share)


def layer_of_k(layer: int, *, group: str, address: int, heads: Interval = COMPONENT.whole[1]) -> Shard:
    return shard(box=(Interval(layer, layer + 1), heads, Interval(0, 2)), addresses=(address,), group=group)


def test_layers_of_one_component_may_be_in_different_groups():
    """Engines that manage hybrid models give layers of the same kind different page tables."""
    first, second = layer_of_k(0, group="a", address=0x1000), layer_of_k(1, group="b", address=0x2000)
    rank = RankLayout(shards=(first, second))
    assert rank.components == (COMPONENT,)
    assert rank.shards_of("k") == (first, second)
    assert rank.shards_of("v") == ()
    assert [group.name for group in rank.groups] == ["a", "b"]
    assert rank.shard_with("k", (Interval(1, 2), Interval(1, 2), Interval(0, 2))) == second
    assert rank.shard_with("k", COMPONENT.whole) is None
    assert rank.shard_with("v", first.box) is None


def test_shards_of_a_component_that_share_elements_are_refused():
    first = layer_of_k(0, group="a", address=0x1000, heads=Interval(0, 2))
    second = layer_of_k(0, group="b", address=0x2000, heads=Interval(1, 3))
    with pytest.raises(LayoutError, match=r"'k' appears twice, with .*head \[0, 2\).* and .*head \[1, 3\)"):
        RankLayout(shards=(first, second))
    beside = layer_of_k(0, group="b", address=0x2000, heads=Interval(2, 3))
    assert len(RankLayout(shards=(first, beside)).shards_of("k")) == 2


@pytest.mark.parametrize("first", ["empty", "full"])
def test_an_empty_shard_beside_another_of_its_component_is_refused(first: str):
    both = (empty_shard(COMPONENT, page_tokens=4, num_pages=2), shard())
    with pytest.raises(LayoutError, match=r"'k' appears twice, .* one that holds nothing stands alone"):
        RankLayout(shards=both if first == "empty" else both[::-1])


def test_two_components_of_one_name_are_refused():
    other = msgspec.structs.replace(COMPONENT, is_optional=True)
    shards = (layer_of_k(0, group="a", address=0x1000), shard(component=other, addresses=(0x3000, 0x4000)))
    with pytest.raises(LayoutError, match="two different components are called 'k'"):
        RankLayout(shards=shards)


def test_groups_may_share_storage_because_their_pages_are_apart():
    """Layers of different groups alias one tensor; no page number belongs to both."""
    first, second = layer_of_k(0, group="a", address=0x1000), layer_of_k(1, group="b", address=0x1000)
    rank = RankLayout(shards=(first, second, renamed(layer_of_k(0, group="c", address=0x1000), "v")))
    assert rank.regions() == (Region(0x1000, 96),)


def test_an_empty_shard_takes_no_address_from_others():
    none = (Interval(0, 2), Interval(1, 1), Interval(0, 2))
    rank = RankLayout(shards=(shard(box=none), renamed(shard(box=none), "v"), renamed(shard(), "w")))
    assert rank.regions() == (Region(0x1000, 96), Region(0x2000, 96))


def test_the_digest_is_the_same_on_every_rank_of_an_engine():
    empty = empty_shard(COMPONENT, page_tokens=4, num_pages=9)
    part = shard(box=(Interval(1, 2), Interval(0, 1), Interval(0, 2)), addresses=(0x1000,))
    assert len({RankLayout(shards=(one,)).digest for one in (shard(), empty, part)}) == 1
    both = shard(), renamed(shard(addresses=(0x3000, 0x4000)), "v")
    assert RankLayout(shards=both).digest == RankLayout(shards=both[::-1]).digest
    parts = [RankLayout(shards=(shard(),), tokens=TokenShare(interleaved(2), part)) for part in range(2)]
    assert parts[0].digest == parts[1].digest
    # Two pipeline stages, each with those layers of a component that the engine gives pages of their own.
    other = shard(group="other", paging=Paging(page_tokens=2, num_pages=2, page_stride=48, token_stride=12))
    assert RankLayout(shards=(other,)).digest == RankLayout(shards=(shard(),)).digest


def test_the_digest_tells_engines_apart():
    layouts = [
        RankLayout(shards=(shard(),)),
        RankLayout(shards=(shard(), state())),
        RankLayout(shards=(renamed(shard(), "v"),)),
        RankLayout(shards=(shard(component=msgspec.structs.replace(COMPONENT, dtype="bfloat16")),)),
        RankLayout(shards=(shard(component=msgspec.structs.replace(COMPONENT, window_tokens=8)),)),
        RankLayout(shards=(shard(),), tokens=TokenShare(interleaved(2), 0)),
        RankLayout(shards=(shard(),), tokens=TokenShare(interleaved(2, 4), 0)),
        RankLayout(shards=(shard(),), tokens=TokenShare(interleaved(3), 0)),
    ]
    assert len({layout.digest for layout in layouts}) == len(layouts)


def test_a_rank_without_shards_is_refused():
    with pytest.raises(LayoutError, match="at least one shard, which may be empty"):
        RankLayout(shards=())


@pytest.mark.parametrize(("page_tokens", "num_pages"), [(8, 2), (4, 3)])
def test_different_pages_in_one_group_are_refused(page_tokens: int, num_pages: int):
    paging = Paging(page_tokens=page_tokens, num_pages=num_pages, page_stride=96, token_stride=12)
    other = renamed(shard(paging=paging, addresses=(0x3000, 0x4000)), "v")
    message = rf"'v' has {num_pages} pages of {page_tokens} tokens, 'k' has 2 pages of 4 tokens: .*'kv' .*another group"
    with pytest.raises(LayoutError, match=message):
        RankLayout(shards=(shard(), other))
    apart = RankLayout(shards=(shard(), msgspec.structs.replace(other, group="v")))
    assert [group.page_tokens for group in apart.groups] == [4, page_tokens]


def test_a_window_beside_all_tokens_in_one_group_is_refused():
    windowed = msgspec.structs.replace(COMPONENT, name="w", window_tokens=8)
    with pytest.raises(LayoutError, match="'w' has 2 pages of 4 tokens with a window of 8 tokens, 'k' has 2 pages of"):
        RankLayout(shards=(shard(), shard(component=windowed, addresses=(0x3000, 0x4000))))


def test_slots_beside_pages_of_one_token_in_one_group_are_refused():
    paging = Paging(page_tokens=1, num_pages=5, page_stride=12, token_stride=12)
    with pytest.raises(LayoutError, match="'state' has 5 slots, 'k' has 5 pages of 1 tokens"):
        RankLayout(shards=(shard(paging=paging), state(group="kv")))


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


def test_two_components_of_a_group_in_the_same_tensor_are_refused():
    with pytest.raises(LayoutError, match=r"'v' and 'k' both start at 0x1000: shards of group 'kv' share page numbers"):
        RankLayout(shards=(shard(), renamed(shard(), "v")))


def test_two_layers_of_a_group_in_the_same_tensor_are_refused():
    shards = (layer_of_k(0, group="kv", address=0x1000), layer_of_k(1, group="kv", address=0x1000))
    with pytest.raises(LayoutError, match="'k' and 'k' both start at 0x1000"):
        RankLayout(shards=shards)


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
    latent = latent_component(num_layers=1, latent_dim=2, dtype="int8")
    shards = (shard(), empty_shard(latent, page_tokens=4, num_pages=2), state(), packed(group="packed"))
    rank = RankLayout(shards=shards, tokens=TokenShare(interleaved(2, 16), 1))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(rank), type=RankLayout) == rank


# ---- layouts from peers -----------------------------------------------------------------------------------------


def test_absurd_layouts_are_refused_before_they_are_looked_at():
    with pytest.raises(LayoutError, match="has 9 axes: 8 at most"):
        Component(name="k", axes=tuple(Axis(f"axis{number}", 3) for number in range(9)), dtype="int8")
    with pytest.raises(LayoutError, match="axis 'layer' has size"):
        Axis("layer", 2**40 + 1)
    with pytest.raises(LayoutError, match=r"pages at most 2147483647 and tokens at most 1048576"):
        shard(paging=Paging(page_tokens=2**20 + 1, num_pages=2, page_stride=48, token_stride=12))
    with pytest.raises(LayoutError, match=r"pages at most 2147483647"):
        shard(paging=Paging(page_tokens=4, num_pages=2**31, page_stride=48, token_stride=12))
    layers = latent_component(num_layers=2049, latent_dim=1, dtype="int8")
    with pytest.raises(LayoutError, match="2049 of axis 'layer' at addresses of their own: 2048 at most"):
        shard(component=layers, box=layers.whole, addresses=tuple(range(0, 2049 * 64, 64)), strides=(1,))
    with pytest.raises(LayoutError, match="at most 512: it has 513"):
        RankLayout(shards=tuple(renamed(shard(), str(number)) for number in range(513)))


def test_addresses_inside_each_other_in_very_many_ways_are_refused():
    """Two bytes in each of 2^31 - 1 pages of 16 KiB, and layers at distances that are all different."""
    layers = latent_component(num_layers=200, latent_dim=1, dtype="int8")
    paging = Paging(page_tokens=1, num_pages=2**31 - 1, page_stride=1 << 34, token_stride=1)
    addresses = tuple(number * number * 7 + number for number in range(1, 201))
    with pytest.raises(LayoutError, match="in more than 4096 different ways; give every layer memory of its own"):
        shard(component=layers, box=layers.whole, addresses=addresses, strides=(1,), paging=paging)
