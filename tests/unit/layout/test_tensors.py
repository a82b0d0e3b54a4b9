"""Shards from tensors: every element lies where the shard says, and what does not fit is refused by name."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LayoutError
from kvferry.layout import (
    Axis,
    Component,
    Device,
    Interval,
    RankLayout,
    Shard,
    attention_components,
    default_group,
    empty_shard,
    latent_component,
    packed_component,
    shard_from_tensors,
    split,
    state_component,
)
from kvferry.layout.tensors import geometry

torch = pytest.importorskip("torch")

NHD = ("page", "token", "head", "dim")
HND = ("page", "head", "token", "dim")
K, V = attention_components(num_layers=2, num_kv_heads=4, head_dim=3, dtype="int32")
SHAPE = {"page": 5, "token": 2, "head": 4, "dim": 3}


def shape(dims: Sequence[str], **changes: int) -> tuple[int, ...]:
    return tuple({**SHAPE, **changes}[name] for name in dims)


def pools(dims: Sequence[str] = NHD, **changes: int) -> list[Any]:
    return [np.zeros(shape(dims, **changes), np.int32) for _ in range(2)]


def assert_elements_lie_where_the_shard_says(shard: Shard, views: Sequence[Any]) -> None:
    """Reads every element through the shard's addresses. `views` have dimensions page, token, head, dim."""
    for index, view in enumerate(views):
        for page, token, head, dim in product(*map(range, view.shape)):
            offset = page * shard.paging.page_stride + token * shard.paging.token_stride
            offset += head * shard.strides[0] + dim * shard.strides[1]
            assert ctypes.c_int32.from_address(shard.addresses[index] + offset).value == int(
                view[page, token, head, dim]
            )


def numbered(array: Any) -> Any:
    array[...] = np.arange(array.size).reshape(array.shape)
    return array


@pytest.mark.parametrize("dims", [NHD, HND, ("token", "page", "head", "dim"), ("head", "dim", "page", "token")])
def test_numpy_arrays_of_any_order_are_described(dims: Sequence[str]):
    arrays = [numbered(array) for array in pools(dims)]
    shard = shard_from_tensors(K, arrays, dims=dims)
    order = [list(dims).index(name) for name in NHD]
    assert_elements_lie_where_the_shard_says(shard, [array.transpose(order) for array in arrays])
    assert shard.device == Device()


@given(st.permutations(NHD), st.integers(0, 3), st.integers(0, 3))
def test_layers_stacked_anywhere_in_one_padded_storage_are_described(dims: list[str], layer_at: int, pad: int):
    names = [*dims[:layer_at], "layer", *dims[layer_at:]]
    full = tuple({**SHAPE, "layer": 2}[name] + (pad if name == dims[0] else 0) for name in names)
    storage = numbered(np.zeros(full, np.int32))
    storage = np.moveaxis(np.moveaxis(storage, names.index(dims[0]), 0)[: SHAPE[dims[0]]], 0, names.index(dims[0]))
    layers = list(np.moveaxis(storage, layer_at, 0))
    shard = shard_from_tensors(K, layers, dims=dims)
    order = [dims.index(name) for name in NHD]
    assert_elements_lie_where_the_shard_says(shard, [layer.transpose(order) for layer in layers])


def test_nhd_and_hnd_strides():
    nhd = shard_from_tensors(K, pools(NHD), dims=NHD)
    assert (nhd.paging.page_stride, nhd.paging.token_stride, nhd.strides) == (2 * 4 * 3 * 4, 4 * 3 * 4, (3 * 4, 4))
    hnd = shard_from_tensors(K, pools(HND), dims=HND)
    assert (hnd.paging.page_stride, hnd.paging.token_stride, hnd.strides) == (4 * 2 * 3 * 4, 3 * 4, (2 * 3 * 4, 4))
    assert nhd.group == hnd.group == "kv"
    assert (hnd.paging.num_pages, hnd.paging.page_tokens) == (nhd.paging.num_pages, nhd.paging.page_tokens) == (5, 2)


def test_an_hnd_pool_that_is_shown_as_nhd_keeps_its_memory_order():
    """Engines allocate HND and permute the view."""
    arrays = [numbered(array) for array in pools(HND)]
    views = [array.transpose(0, 2, 1, 3) for array in arrays]
    assert shard_from_tensors(K, views, dims=NHD) == shard_from_tensors(K, arrays, dims=HND)


def test_layers_as_slices_of_one_stacked_tensor():
    stacked = torch.zeros((2, *shape(NHD)), dtype=torch.int32)
    apart = RankLayout(shards=(shard_from_tensors(K, list(stacked), dims=NHD),))
    assert [region.length for region in apart.regions()] == [stacked[0].numel() * 4] * 2
    interleaved = torch.zeros((5, 2, 2, 4, 3), dtype=torch.int32)  # page, layer, token, head, dim
    rank = RankLayout(shards=(shard_from_tensors(K, list(interleaved.unbind(1)), dims=NHD),))
    assert [(region.address, region.length) for region in rank.regions()] == [
        (interleaved.data_ptr(), interleaved.numel() * 4)
    ]


def test_keys_and_values_in_one_tensor_register_one_region():
    both = torch.zeros((2, 5, 2, 2, 4, 3), dtype=torch.int32)  # layer, page, k or v, token, head, dim
    shards = [shard_from_tensors(part, list(both[:, :, index]), dims=NHD) for index, part in enumerate((K, V))]
    regions = RankLayout(shards=tuple(shards)).regions()
    assert sum(region.length for region in regions) == both.numel() * 4
    assert len(regions) == 2


def test_keys_and_values_interleaved_in_one_tensor():
    """Keys and values of a token side by side: one tensor for all layers, of which every shard has slices."""
    both = numbered(np.zeros((2, 5, 2, 4, 2, 3), np.int32))  # layer, page, token, head, k or v, dim
    layers = [[layer[..., index, :] for layer in both] for index in range(2)]
    shards = [shard_from_tensors(part, layers[index], dims=NHD) for index, part in enumerate((K, V))]
    for one, views in zip(shards, layers, strict=True):
        assert_elements_lie_where_the_shard_says(one, views)
    regions = RankLayout(shards=tuple(shards)).regions()
    assert [(each.address, each.length) for each in regions] == [(layer.ctypes.data, layer.nbytes) for layer in both]


def test_index_keys_with_their_scales_in_the_same_page():
    """A page is the keys of all its tokens, 128 bytes each, and then their scales, 4 bytes each."""
    pages, tokens = 3, 4
    storage = torch.arange(pages * tokens * 132, dtype=torch.int32).to(torch.uint8).view(pages, tokens * 132)
    keys = storage[:, : tokens * 128].unflatten(1, (tokens, 128))
    scales = storage[:, tokens * 128 :].view(torch.float32).unflatten(1, (tokens, 1))
    component = Component(name="index_k", axes=(Axis("layer", 1), Axis("dim", 128)), dtype="uint8")
    scale = Component(name="index_scale", axes=(Axis("layer", 1), Axis("scale", 1)), dtype="float32")
    rank = RankLayout(
        shards=(
            shard_from_tensors(component, [keys], dims=("page", "token", "dim")),
            shard_from_tensors(scale, [scales], dims=("page", "token", "scale")),
        )
    )
    first, second = rank.shards
    assert second.addresses[0] - first.addresses[0] == tokens * 128
    assert (first.paging.page_stride, first.paging.token_stride) == (tokens * 132, 128)
    assert (second.paging.page_stride, second.paging.token_stride) == (tokens * 132, 4)
    last = second.addresses[0] + 2 * second.paging.page_stride + 3 * second.paging.token_stride
    assert ctypes.c_float.from_address(last).value == scales[2, 3, 0].item() or scales[2, 3, 0].isnan()
    assert [region.length for region in rank.regions()] == [storage.numel()]
    assert len(rank.groups) == 1


def test_channel_groups_of_one_convolution_are_components_of_their_own():
    """Query, key and value channels stand one behind the other in a slot's state: 4, 4 and 8 channels of width 3."""
    storage = [numbered(np.zeros((6, 16, 3), np.int32)) for _ in range(2)]
    channels = {"conv_q": (0, 4), "conv_k": (4, 8), "conv_v": (8, 16)}
    shards = []
    for name, (start, stop) in channels.items():
        component = state_component(
            name, num_layers=2, axes=(Axis("channel", stop - start), Axis("width", 3)), dtype="int32"
        )
        views = [layer[:, start:stop] for layer in storage]
        shard = shard_from_tensors(component, views, dims=("slot", "channel", "width"))
        for index, view in enumerate(views):
            assert ctypes.c_int32.from_address(shard.addresses[index]).value == view[0, 0, 0]
            last = 5 * shard.paging.page_stride + (stop - start - 1) * shard.strides[0] + 2 * shard.strides[1]
            assert ctypes.c_int32.from_address(shard.addresses[index] + last).value == view[-1, -1, -1]
        shards.append(shard)
    rank = RankLayout(shards=tuple(shards))
    (group,) = rank.groups
    assert (group.name, group.has_slots, group.num_pages, group.page_tokens) == ("state", True, 6, 1)
    assert [(each.address, each.length) for each in rank.regions()] == sorted(
        (layer.ctypes.data, layer.nbytes) for layer in storage
    )


@pytest.mark.parametrize("dims", [("slot", "head", "dim"), ("head", "slot", "dim"), ("dim", "slot", "head")])
def test_state_in_slots_of_any_order(dims: tuple[str, ...]):
    component = state_component("state", num_layers=1, axes=(Axis("head", 2), Axis("dim", 3)), dtype="int32")
    sizes = {"slot": 5, "head": 2, "dim": 3}
    array = numbered(np.zeros([sizes[name] for name in dims], np.int32))
    shard = shard_from_tensors(component, [array], dims=dims, group="mamba")
    assert (shard.paging.num_pages, shard.paging.page_tokens, shard.paging.token_stride) == (5, 1, 0)
    assert shard.group == "mamba"
    view = array.transpose([list(dims).index(name) for name in ("slot", "head", "dim")])
    for slot, head, dim in np.ndindex(5, 2, 3):
        offset = slot * shard.paging.page_stride + head * shard.strides[0] + dim * shard.strides[1]
        assert ctypes.c_int32.from_address(shard.addresses[0] + offset).value == view[slot, head, dim]


PACKED = packed_component("kv", num_layers=2, num_kv_heads=4, packed=96, dtype="uint8", packing="cpu-1")
PACKED_DIMS = ("page", "head", "packed")


def test_packed_pages_say_how_many_tokens_they_hold():
    storage = np.zeros((2, 5, 4, 96), np.uint8)
    shard = shard_from_tensors(PACKED, list(storage), dims=PACKED_DIMS, page_tokens=16)
    assert (shard.paging.page_tokens, shard.paging.num_pages, shard.paging.token_stride) == (16, 5, 0)
    assert (shard.paging.page_stride, shard.strides) == (4 * 96, (96, 1))
    assert shard.addresses == tuple(storage.ctypes.data + layer * 5 * 4 * 96 for layer in range(2))
    assert shard.bytes_per_page == 2 * 4 * 96


def test_packed_pages_can_be_cut_by_head():
    shard = shard_from_tensors(
        PACKED,
        [np.zeros((5, 2, 96), np.uint8)] * 1,
        dims=PACKED_DIMS,
        page_tokens=16,
        held={"layer": Interval(1, 2), "head": Interval(2, 4)},
    )
    assert shard.box == (Interval(1, 2), Interval(2, 4), Interval(0, 96))


@pytest.mark.parametrize("page_tokens", [0, -1])
def test_packed_pages_without_tokens_are_refused(page_tokens: int):
    with pytest.raises(LayoutError, match=f"has 5 pages of {page_tokens} tokens: both must be at least 1"):
        shard_from_tensors(
            PACKED, [np.zeros((5, 4, 96), np.uint8) for _ in range(2)], dims=PACKED_DIMS, page_tokens=page_tokens
        )


def test_packed_pages_must_say_how_many_tokens_they_hold():
    with pytest.raises(LayoutError, match=r"'kv' has one entry per page: page_tokens is given for .* it is None"):
        shard_from_tensors(PACKED, [np.zeros((5, 4, 96), np.uint8)] * 2, dims=PACKED_DIMS)


def test_page_tokens_beside_a_token_dimension_are_refused():
    with pytest.raises(LayoutError, match=r"'k' has one entry per token: page_tokens is given for .* it is 2"):
        shard_from_tensors(K, pools(), dims=NHD, page_tokens=2)
    state = state_component("state", num_layers=1, axes=(Axis("head", 2),), dtype="int32")
    with pytest.raises(LayoutError, match=r"'state' has one entry per request: .* it is 1"):
        shard_from_tensors(state, [np.zeros((5, 2), np.int32)], dims=("slot", "head"), page_tokens=1)


def test_groups_by_default():
    window, _ = attention_components(num_layers=1, num_kv_heads=1, head_dim=1, dtype="int8", window_tokens=128)
    state = state_component("state", num_layers=1, axes=(), dtype="int8")
    assert [default_group(each) for each in (K, PACKED, window, state)] == ["kv", "kv", "window-128", "state"]
    for component in (K, window, state):
        page_tokens = 1 if component is state else 4
        assert empty_shard(component, page_tokens=page_tokens, num_pages=2).group == default_group(component)
        assert empty_shard(component, page_tokens=page_tokens, num_pages=2, group="g").group == "g"


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float32"])
def test_torch_tensors_of_types_that_numpy_lacks(name: str):
    component = latent_component(num_layers=1, latent_dim=8, dtype=name)
    tensor = torch.zeros((3, 4, 8), dtype=getattr(torch, name))
    shard = shard_from_tensors(component, [tensor], dims=("page", "token", "latent"))
    assert shard.addresses == (tensor.data_ptr(),)
    assert (shard.paging.page_stride, shard.paging.token_stride) == (
        32 * tensor.element_size(),
        8 * tensor.element_size(),
    )


def test_a_rank_holds_its_heads_and_its_layers():
    heads = split(4, 2, 1)
    held = {"layer": Interval(1, 2), "head": heads}
    shard = shard_from_tensors(K, pools(head=2)[:1], dims=NHD, held=held)
    assert shard.box == (Interval(1, 2), Interval(2, 4), Interval(0, 3))


def test_more_ranks_than_heads_give_the_same_box_twice():
    boxes = [shard_from_tensors(K, pools(head=1), dims=NHD, held={"head": split(4, 8, rank)}).box for rank in range(8)]
    assert boxes[0] == boxes[1] != boxes[2] == boxes[3]


def test_a_tensor_that_starts_inside_of_its_storage():
    storage = torch.arange(2 * 120 + 7, dtype=torch.int32)
    tensors = [storage[7 + 120 * layer :][:120].view(5, 2, 4, 3) for layer in range(2)]
    shard = shard_from_tensors(K, tensors, dims=NHD)
    assert shard.addresses[0] == storage.data_ptr() + 28
    assert_elements_lie_where_the_shard_says(shard, tensors)


# --- refusals


def test_wrong_head_count_names_both_numbers():
    with pytest.raises(LayoutError, match=r"'k' for layer 0 has 3 in dimension 'head' where the rank holds 4: shape"):
        shard_from_tensors(K, pools(head=3), dims=NHD)


def test_a_head_count_that_fits_the_model_but_not_the_rank():
    with pytest.raises(LayoutError, match=r"has 4 in dimension 'head' where the rank holds 2"):
        shard_from_tensors(K, pools(), dims=NHD, held={"head": Interval(0, 2)})


def test_swapped_dimension_names_are_noticed_where_sizes_differ():
    with pytest.raises(LayoutError, match=r"has 2 in dimension 'head' where the rank holds 4"):
        shard_from_tensors(K, pools(NHD), dims=HND)


def test_wrong_dtype_names_both_types():
    with pytest.raises(LayoutError, match="'k' for layer 0 has dtype float32, the component int32"):
        shard_from_tensors(K, [np.zeros(shape(NHD), np.float32)] * 2, dims=NHD)
    with pytest.raises(LayoutError, match="'k' for layer 1 has dtype bfloat16, the component int32"):
        shard_from_tensors(
            K,
            [torch.zeros(shape(NHD), dtype=torch.int32), torch.zeros(shape(NHD), dtype=torch.bfloat16)],
            dims=NHD,
        )


def test_a_device_that_no_transport_reads_is_refused():
    with pytest.raises(LayoutError, match="device meta cannot be registered: use cpu or cuda"):
        shard_from_tensors(K, [torch.zeros(shape(NHD), dtype=torch.int32, device="meta")] * 2, dims=NHD)


def test_something_that_is_no_tensor_is_refused():
    with pytest.raises(LayoutError, match="expected a torch tensor or a NumPy array, got list"):
        geometry([1, 2, 3])


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_last_dimension_with_gaps_is_refused(library: str):
    arrays = [np.zeros(shape(NHD, dim=6), np.int32)[..., ::2] for _ in range(2)]
    tensors = arrays if library == "numpy" else [torch.zeros(shape(NHD, dim=6), dtype=torch.int32)[..., ::2]] * 2
    with pytest.raises(
        LayoutError, match="not contiguous in its last dimension 'dim': a step is 8 bytes, an element 4"
    ):
        shard_from_tensors(K, tensors, dims=NHD)


def test_a_reversed_array_is_refused():
    with pytest.raises(LayoutError, match=r"a step on token is -48 bytes.* elements would overlap"):
        shard_from_tensors(K, [array[:, ::-1] for array in pools()], dims=NHD)


def test_an_expanded_tensor_is_refused():
    with pytest.raises(LayoutError, match=r"a step on head is 0 bytes.* elements would overlap"):
        shard_from_tensors(K, [torch.zeros((5, 2, 1, 3), dtype=torch.int32).expand(shape(NHD))] * 2, dims=NHD)


def test_the_same_tensor_for_every_layer_is_refused():
    with pytest.raises(LayoutError, match=r"layer 0 at .* and layer 1 at .* share bytes"):
        shard_from_tensors(K, pools()[:1] * 2, dims=NHD)


@pytest.mark.parametrize(
    "other",
    [
        np.zeros(shape(NHD, page=6), np.int32),
        np.zeros(shape(NHD, token=3), np.int32),
        np.zeros(shape(HND), np.int32).transpose(0, 2, 1, 3),
    ],
    ids=["pages", "tokens", "strides"],
)
def test_layers_of_different_shapes_or_strides_are_refused(other: Any):
    with pytest.raises(LayoutError) as caught:
        shard_from_tensors(K, [pools()[0], other], dims=NHD)
    message = str(caught.value)
    assert "'k' for layer 1 differs from the first" in message
    assert str(other.shape) in message
    assert str(other.strides) in message


def test_layers_are_named_by_their_global_number():
    k, _ = attention_components(num_layers=8, num_kv_heads=4, head_dim=3, dtype="int32")
    bad = [pools()[0], np.zeros(shape(NHD), np.int8)]
    with pytest.raises(LayoutError, match="layer 6 has dtype int8"):
        shard_from_tensors(k, bad, dims=NHD, held={"layer": Interval(5, 7)})


@pytest.mark.parametrize("wrong", [(5, 2, 12), (5, 2, 4, 3, 1)])
def test_a_wrong_number_of_dimensions_is_refused(wrong: tuple[int, ...]):
    with pytest.raises(LayoutError, match=r"has shape .*: that is not one number for each of \['page', 'token'"):
        shard_from_tensors(K, [np.zeros(wrong, np.int32)] * 2, dims=NHD)


@pytest.mark.parametrize("dims", [("page", "token", "head"), ("page", "token", "head", "head"), (*NHD, "layer")])
def test_dimension_names_that_do_not_fit_the_component_are_refused(dims: Sequence[str]):
    message = r"of 'k', which has one entry per token, must be \['page', 'token'\] and \['head', 'dim'\], in any order"
    with pytest.raises(LayoutError, match=message):
        shard_from_tensors(K, pools(), dims=dims)


@pytest.mark.parametrize("dims", [("page", "token", "head"), ("page", "head"), ("slot", "token", "head")])
def test_state_has_a_slot_and_no_other_paged_dimension(dims: tuple[str, ...]):
    state = state_component("state", num_layers=1, axes=(Axis("head", 2),), dtype="int32")
    with pytest.raises(LayoutError, match=r"one entry per request, must be \['slot'\] and \['head'\]"):
        shard_from_tensors(state, [np.zeros((2,) * len(dims), np.int32)], dims=dims)


def test_packed_pages_have_no_token_dimension():
    with pytest.raises(LayoutError, match=r"one entry per page, must be \['page'\] and \['head', 'packed'\]"):
        shard_from_tensors(
            PACKED,
            [np.zeros((5, 2, 4, 48), np.uint8)] * 2,
            dims=(*PACKED_DIMS[:1], "token", "head", "packed"),
            page_tokens=2,
        )


def test_a_wrong_number_of_layers_is_refused():
    with pytest.raises(LayoutError, match=r"holds layer \[0, 2\): that takes 2 tensors, not 3"):
        shard_from_tensors(K, [*pools(), *pools()[:1]], dims=NHD)


def test_no_tensors_point_to_the_empty_shard():
    with pytest.raises(LayoutError, match="a rank that holds nothing of it uses empty_shard"):
        shard_from_tensors(K, [], dims=NHD, held={"layer": Interval(0, 0)})
    assert empty_shard(K, page_tokens=2, num_pages=5).addresses == ()


def test_an_unknown_axis_is_refused():
    with pytest.raises(LayoutError, match=r"has no axis \['heads'\]: its axes are \['layer', 'head', 'dim'\]"):
        shard_from_tensors(K, pools(), dims=NHD, held={"heads": Interval(0, 1)})


def test_an_interval_beyond_the_axis_is_refused():
    with pytest.raises(LayoutError, match=r"'k' has layer 2, head 4, dim 3: a shard of .* is not a part of it"):
        shard_from_tensors(K, pools(), dims=NHD, held={"head": Interval(2, 6)})


@pytest.mark.parametrize("dimension", ["page", "token"])
def test_a_pool_without_pages_or_tokens_is_refused(dimension: str):
    with pytest.raises(
        LayoutError, match=r"has shape \(.*0, .*\): a pool needs at least one page and one token a page"
    ):
        shard_from_tensors(K, pools(NHD, **{dimension: 0}), dims=NHD)
