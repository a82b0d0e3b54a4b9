"""Layouts of pools that nobody allocated: what an engine's tensors of the same shape would give, elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LayoutError
from kvferry.layout import (
    Axis,
    Component,
    Device,
    Entry,
    Interval,
    MemoryKind,
    PageOrder,
    RankCoordinates,
    RankLayout,
    ShardedComponent,
    TokenPartition,
    TokenShare,
    VirtualPools,
    all_coordinates,
    attention_components,
    contiguous,
    interleaved,
    latent_component,
    shard_from_tensors,
    state_component,
    virtual_layout,
)

LAYERS = 4
K, V = attention_components(num_layers=LAYERS, num_kv_heads=6, head_dim=3, value_head_dim=5, dtype="int16")
LATENT = latent_component(num_layers=LAYERS, latent_dim=7, dtype="int8")
STATE = state_component("state", num_layers=2, axes=(Axis("head", 4), Axis("dim", 3)), dtype="float32")
WINDOW = msgspec.structs.replace(K, name="w", window_tokens=32)
MODEL = (
    ShardedComponent(component=K, layers=(0, 1, 2, 3), tp_axis="head"),
    ShardedComponent(component=V, layers=(0, 1, 2, 3), tp_axis="head"),
    ShardedComponent(component=LATENT, layers=(0, 1, 2, 3)),
    ShardedComponent(component=STATE, layers=(1, 3), tp_axis="head"),
    ShardedComponent(component=WINDOW, layers=(0, 1, 2, 3), tp_axis="head"),
)
POOLS: dict[str, Any] = {"page_tokens": 8, "num_pages": 5, "layers_per_stage": (LAYERS,)}
WHOLE = RankCoordinates()


def pools(**changes: Any) -> VirtualPools:
    return VirtualPools(**{**POOLS, **changes})


def array(component: Component, sizes: dict[str, int], dims: Sequence[str]) -> np.ndarray[Any, Any]:
    return np.zeros([sizes[name] for name in dims], component.dtype)


@pytest.mark.parametrize("order", [PageOrder.NHD, PageOrder.HND])
@pytest.mark.parametrize("coordinates", [WHOLE, RankCoordinates(tp_rank=1, tp_size=4)], ids=["whole", "tp"])
def test_strides_are_those_of_an_array_of_that_shape(order: PageOrder, coordinates: RankCoordinates):
    layout = virtual_layout(MODEL, coordinates, pools(order=order))
    for shard in layout.shards:
        axes = [axis.name for axis in shard.component.axes[1:]]
        if shard.component.entry is Entry.REQUEST:
            dims = ["slot", *axes]
        elif order is PageOrder.HND and len(axes) > 1:
            dims = ["page", axes[0], "token", *axes[1:]]
        else:
            dims = ["page", "token", *axes]
        held = dict(zip([axis.name for axis in shard.component.axes], shard.box, strict=True))
        sizes = {"page": 5, "slot": 5, "token": 8, **{name: len(held[name]) for name in axes}}
        tensors = [array(shard.component, sizes, dims) for _ in shard.addresses]
        real = shard_from_tensors(shard.component, tensors, dims=dims, held=held)
        assert (shard.strides, shard.paging, shard.box, shard.group) == (
            real.strides,
            real.paging,
            real.box,
            real.group,
        )


def test_packed_pages_are_cut_along_the_axis_that_tensor_parallelism_divides():
    rank = RankCoordinates(tp_rank=1, tp_size=2)
    layout = virtual_layout(MODEL, rank, pools(order=PageOrder.PACKED))
    by_name = {shard.component.name: shard for shard in layout.shards}
    k = by_name["k"]
    assert k.component.axes == (Axis("layer", LAYERS), Axis("head", 6), Axis("packed", 3 * 8))
    assert (k.component.entry, k.component.dtype) == (Entry.PAGE, "int16")
    assert k.component.packing == "pages of 8 tokens in an order of the engine's own"
    assert k.box == (Interval(0, LAYERS), Interval(3, 6), Interval(0, 24))
    tensors = [np.zeros((5, 3, 24), np.int16) for _ in range(LAYERS)]
    held = {"head": Interval(3, 6)}
    real = shard_from_tensors(k.component, tensors, dims=("page", "head", "packed"), held=held, page_tokens=8)
    assert (k.strides, k.paging) == (real.strides, real.paging)
    assert by_name["latent"].component.axes == (Axis("layer", LAYERS), Axis("packed", 7 * 8))
    assert by_name["w"].component.window_tokens == 32
    assert by_name["state"].component == STATE


def test_pages_of_other_sizes_are_packed_otherwise():
    sizes = {
        virtual_layout(MODEL, WHOLE, pools(order=PageOrder.PACKED, page_tokens=tokens)).components[0].packing
        for tokens in (8, 16)
    }
    assert len(sizes) == 2


@given(st.sampled_from(PageOrder), st.integers(1, 7), st.sampled_from([(4,), (1, 3), (0, 2, 2)]), st.integers(1, 20))
def test_no_two_layers_share_memory(order: PageOrder, tp: int, stages: tuple[int, ...], page_tokens: int):
    for rank in all_coordinates(tp_size=tp, pp_size=len(stages)):
        layout = virtual_layout(MODEL, rank, pools(order=order, layers_per_stage=stages, page_tokens=page_tokens))
        regions = sorted(region for shard in layout.shards for region in shard.regions())
        assert all(low.stop <= high.address for low, high in pairwise(regions))
        assert sum(region.length for region in regions) == sum(5 * shard.bytes_per_page for shard in layout.shards)


def test_groups_follow_the_components():
    groups = virtual_layout(MODEL, WHOLE, pools()).groups
    assert [(group.name, group.page_tokens, group.has_slots) for group in groups] == [
        ("kv", 8, False),
        ("state", 1, True),
        ("window-32", 8, False),
    ]


@pytest.mark.parametrize("order", PageOrder)
def test_every_rank_lists_every_component(order: PageOrder):
    layouts = [
        virtual_layout(MODEL, rank, pools(order=order, layers_per_stage=(1, 0, 3)))
        for rank in all_coordinates(tp_size=2, pp_size=3)
    ]
    assert len({layout.digest for layout in layouts}) == 1
    empty = layouts[2]
    assert empty.regions() == ()
    assert [len(shard.box[0]) for shard in empty.shards] == [0] * len(MODEL)


def test_a_stage_without_layers_of_a_kind_has_an_empty_shard_beside_full_ones():
    layout = virtual_layout(MODEL, RankCoordinates(pp_size=2), pools(layers_per_stage=(1, 3)))
    assert {shard.component.name: len(shard.box[0]) for shard in layout.shards} == {
        "k": 1,
        "v": 1,
        "latent": 1,
        "state": 0,
        "w": 1,
    }


def test_ranks_hold_their_share_of_the_tokens():
    layouts = [virtual_layout(MODEL, rank, pools(partition=interleaved(3, 8))) for rank in all_coordinates(cp_size=3)]
    assert [layout.tokens for layout in layouts] == [TokenShare(interleaved(3, 8), part) for part in range(3)]
    assert len({layout.shards for layout in layouts}) == 1


@pytest.mark.parametrize(
    ("partition", "size"), [(interleaved(2), 3), (interleaved(3), 2), (contiguous(2), 1), (TokenPartition(), 2)]
)
def test_a_dealing_for_another_size_of_context_parallelism_is_refused(partition: TokenPartition, size: int):
    with pytest.raises(LayoutError, match=f"cp_size {size}"):
        virtual_layout(MODEL, RankCoordinates(cp_size=size), pools(partition=partition))


def test_a_layout_may_be_on_a_device():
    device = Device(MemoryKind.VRAM, 1)
    for stages in ((4, 0), (0, 4)):
        rank = RankCoordinates(pp_size=2)
        layout = virtual_layout(MODEL, rank, pools(layers_per_stage=stages), device=device)
        assert layout.device == device


def test_stages_that_do_not_fit_the_rank_are_refused():
    with pytest.raises(LayoutError, match=r"1 stages \[4\] for pp_size 2"):
        virtual_layout(MODEL, RankCoordinates(pp_size=2), pools())


def test_a_model_without_components_is_refused():
    with pytest.raises(LayoutError, match="at least one shard"):
        virtual_layout((), WHOLE, pools())


def test_layouts_travel():
    layout = virtual_layout(MODEL, WHOLE, pools(order=PageOrder.PACKED))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=RankLayout) == layout


@pytest.mark.parametrize("order", [PageOrder.NHD, PageOrder.HND])
def test_components_that_lie_beside_each_other_share_a_tensor(order: PageOrder):
    """Keys and values of different width, as an engine has them in [page, both]."""
    layout = virtual_layout(MODEL, RankCoordinates(tp_rank=1, tp_size=2), pools(order=order, beside=(("k", "v"),)))
    alone = virtual_layout(MODEL, RankCoordinates(tp_rank=1, tp_size=2), pools(order=order))
    keys, values = layout.shards[:2]
    for shard, other in zip(layout.shards, alone.shards, strict=True):
        assert (shard.component, shard.box, shard.strides) == (other.component, other.box, other.strides)
        assert shard.paging.token_stride == other.paging.token_stride
    key_bytes, value_bytes = 8 * 3 * 3 * 2, 8 * 3 * 5 * 2  # of a page in one layer: 8 tokens, 3 heads, int16
    assert {high - low for low, high in zip(keys.addresses, values.addresses, strict=True)} == {key_bytes}
    assert keys.paging.page_stride == values.paging.page_stride == key_bytes + value_bytes
    assert {shard.paging for shard in layout.shards[2:]} == {shard.paging for shard in alone.shards[2:]}


@pytest.mark.parametrize(
    ("beside", "says"),
    [
        (("k", "x"), r"there are no components \['x'\]"),
        (("k", "latent"), "'k' and 'latent' cannot lie beside"),
        (("k", "w"), "'k' and 'w' cannot lie beside"),
        (("k", "state"), "'k' and 'state' cannot lie beside"),
    ],
)
def test_components_that_are_not_alike_cannot_lie_beside_each_other(beside: tuple[str, str], says: str):
    with pytest.raises(LayoutError, match=says):
        virtual_layout(MODEL, WHOLE, pools(beside=(beside,)))


def test_every_group_may_have_its_own_number_of_pages():
    layout = virtual_layout(MODEL, WHOLE, pools(num_pages={"kv": 5, "state": 2, "window-32": 3}))
    assert {group.name: group.num_pages for group in layout.groups} == {"kv": 5, "state": 2, "window-32": 3}
    with pytest.raises(LayoutError, match=r"nothing about group 'state', only about \['kv'\]"):
        virtual_layout(MODEL, WHOLE, pools(num_pages={"kv": 5}))
