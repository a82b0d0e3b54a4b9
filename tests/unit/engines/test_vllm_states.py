"""Recurrent state of vLLM's layers as shards: shapes as its layers have them, on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.crossing import cross

from kvferry import GroupPages
from kvferry.engines.vllm import components
from kvferry.engines.vllm.caches import CacheGroup, HeldPart, ModelShape
from kvferry.engines.vllm.layouts import describe
from kvferry.engines.vllm.states import (
    SHARE,
    KeptStates,
    State,
    StateLayer,
    ring_of,
    state_pieces,
    states_of,
)
from kvferry.errors import IncompatiblePeerError, LayoutError
from kvferry.layout import Entry, Interval, RankCoordinates
from kvferry.layout.shard import RankLayout, Shard
from kvferry.plan import check_exchangeable
from kvferry.testing.network import LocalNetwork

BLOCKS, LAYERS, ROWS, WIDTH = 3, 4, 3, 2
SIZES = (1, 2, 4)


def spec(kind: str, *shapes: tuple[int, ...], tp_replicated: bool = False) -> Any:
    return SimpleNamespace(shapes=shapes, mamba_type=SimpleNamespace(name=kind), tp_replicated=tp_replicated)


def convolution(channels: int, *, first: bool) -> tuple[int, int]:
    return (channels, ROWS) if first else (ROWS, channels)


# What one rank of so many has: the spec, the layer, and over all ranks the sizes of each state's parts. A part of which
# every rank has all is negative.
Kind = Callable[[int, bool], tuple[Any, Any, list[list[int]]]]


def mamba1(tp: int, first: bool) -> tuple[Any, Any, list[list[int]]]:
    return spec("MAMBA1", convolution(16 // tp, first=first), (16 // tp, 5)), None, [[16], [16]]


def mamba2(tp: int, first: bool) -> tuple[Any, Any, list[list[int]]]:
    layer = SimpleNamespace(
        intermediate_size=16, n_groups=4, ssm_state_size=WIDTH, conv1d=SimpleNamespace(output_sizes=3)
    )
    return spec("MAMBA2", convolution(32 // tp, first=first), (8 // tp, 2, WIDTH)), layer, [[16, 8, 8], [8]]


def mamba2_of_one_group(tp: int, first: bool) -> tuple[Any, Any, list[list[int]]]:
    """Its layer counts a group for each rank, and all of them are the same."""
    conv1d = SimpleNamespace(output_sizes=3) if tp == 1 else object()
    layer = SimpleNamespace(intermediate_size=16, n_groups=tp, ssm_state_size=WIDTH, conv1d=conv1d)
    held = convolution(16 // tp + 2 * WIDTH, first=first)
    return spec("MAMBA2", held, (8 // tp, 2, WIDTH)), layer, [[16, -WIDTH, -WIDTH], [8]]


def gated_delta_net(tp: int, first: bool) -> tuple[Any, Any, list[list[int]]]:
    layer = SimpleNamespace(key_dim=8, value_dim=16)
    return spec("GDN_ATTN", convolution(32 // tp, first=first), (8 // tp, 2, 3)), layer, [[8, 8, 16], [8]]


def kimi_delta_attention(tp: int, first: bool) -> tuple[Any, Any, list[list[int]]]:
    layer = SimpleNamespace(projection_size=8)
    return spec("GDN_ATTN", convolution(24 // tp, first=first), (8 // tp, 2, 3)), layer, [[8, 8, 8], [8]]


def short_convolution(tp: int, first: bool) -> tuple[Any, Any, list[list[int]]]:
    return spec("SHORT_CONV", convolution(8 // tp, first=first)), None, [[8]]


def linear_attention(tp: int, first: bool) -> tuple[Any, Any, list[list[int]]]:
    return spec("LINEAR", (4 // tp, 3, 3)), None, [[4]]


def replicated(tp: int, first: bool) -> tuple[Any, Any, list[list[int]]]:
    return spec("SHORT_CONV", (6, ROWS), tp_replicated=True), None, [[-6]]


KINDS: list[Kind] = [
    mamba1,
    mamba2,
    mamba2_of_one_group,
    gated_delta_net,
    kimi_delta_attention,
    short_convolution,
    linear_attention,
    replicated,
]


def whole_part(layer: int, number: int, part: int, shape: list[int]) -> np.ndarray:
    """The values of one part over all ranks: no two of any part, state or layer are the same."""
    base = ((layer * 4 + number) * 4 + part) * 10_000
    return np.arange(base, base + BLOCKS * int(np.prod(shape)), dtype=np.float32).reshape(BLOCKS, *shape)


def rank_states(kind: Kind, tp: int, rank: int, *, first: bool) -> tuple[tuple[State, ...], list[tuple[Any, ...]]]:
    """What a rank keeps, and the tensors of every layer, divided as the layers divide them."""
    made, layer, sizes = kind(tp, first)
    states = states_of(made, layer, RankCoordinates(tp_rank=rank, tp_size=tp), channels_first=first)
    layers = []
    for index in range(LAYERS):
        tensors = []
        for number, (shape, parts) in enumerate(zip(made.shapes, sizes, strict=True)):
            is_convolution = len(shape) == 2 and ROWS in shape and not made.tp_replicated
            divided = int(is_convolution and not first)
            pieces = []
            for part, size in enumerate(parts):
                whole = whole_part(index, number, part, [abs(size) if d == divided else n for d, n in enumerate(shape)])
                pieces.append(whole if size < 0 else np.split(whole, tp, axis=1 + divided)[rank])
            tensors.append(torch.from_numpy(np.ascontiguousarray(np.concatenate(pieces, axis=1 + divided))))
        layers.append(tuple(tensors))
    return states, layers


def shards_from(layers: Sequence[StateLayer], coordinates: RankCoordinates) -> list[Shard]:
    """The shards of layers that are all of the model's that keep state."""
    forms = components.by_form(state_pieces(layers, LAYERS, coordinates))
    names = components.named(forms)
    return [shard for form, pieces in forms.items() for shard in components.shards_of(names[form], pieces)]


def shards_of(kind: Kind, tp: int, rank: int, *, first: bool) -> tuple[list[Shard], list[tuple[Any, ...]]]:
    states, tensors = rank_states(kind, tp, rank, first=first)
    layers = [
        StateLayer(number, f"layers.{number}", "group 1", KeptStates(states, each))
        for number, each in enumerate(tensors)
    ]
    return shards_from(layers, RankCoordinates(tp_rank=rank, tp_size=tp)), tensors


def values(shard: Shard, layer: int, memory: tuple[Any, ...]) -> np.ndarray:
    """What a shard says lies in its slots of a layer, read from the memory that its tensors have."""
    shape = (BLOCKS, *(len(each) for each in shard.box[1:]))
    for tensor in memory:
        offset = shard.addresses[layer] - tensor.data_ptr()
        if 0 <= offset < tensor.nbytes:
            strides = (shard.paging.page_stride, *shard.strides)
            flat = tensor.numpy().reshape(-1)[offset // 4 :]
            return np.array(np.lib.stride_tricks.as_strided(flat, shape, strides))
    raise AssertionError("the shard is in no tensor")


@pytest.mark.parametrize("first", [True, False], ids=["channels first", "rows first"])
@pytest.mark.parametrize("tp", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_has_its_part_of_every_state(kind: Kind, tp: int, first: bool):
    _, _, sizes = kind(tp, first)
    for rank in range(tp):
        shards, tensors = shards_of(kind, tp, rank, first=first)
        expected = [(number, part) for number, parts in enumerate(sizes) for part in range(len(parts))]
        assert len(shards) == len(expected)
        for shard, (number, part) in zip(shards, expected, strict=True):
            component = shard.component
            assert (component.entry, shard.group) == (Entry.REQUEST, "group 1")
            axis = next(index for index, each in enumerate(component.axes) if each.name == "channel")
            for layer in range(LAYERS):
                whole = whole_part(layer, number, part, [each.size for each in component.axes[1:]])
                held = shard.box[axis]
                mine = np.take(whole, range(held.start, held.stop), axis=axis)
                assert (values(shard, layer, tensors[layer]) == mine).all()


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_of_any_number_and_either_order_exchange_state(kind: Kind):
    """Components have the same names and axes on all of them; the library proves what follows from that."""
    for first in (True, False):
        names = {tp: [each.component for each in shards_of(kind, tp, 0, first=first)[0]] for tp in SIZES}
        assert names[1] == names[2] == names[4]


def test_what_nobody_knows_is_a_ranks_share():
    made = spec("GDN_ATTN", (ROWS, 16), (4, 2, 3))
    states = states_of(made, SimpleNamespace(), RankCoordinates(tp_rank=1, tp_size=2), channels_first=False)
    assert [state.parts for state in states] == [None, None]
    tensors = tuple(torch.zeros(BLOCKS, *shape) for shape in made.shapes)
    layer = StateLayer(2, "layers.2", "g", KeptStates(states, tensors))
    shards = [*shards_from([layer], RankCoordinates(tp_rank=1, tp_size=2))]
    assert [shard.component.axes[1].name for shard in shards] == [SHARE, SHARE]
    assert {shard.box[1] for shard in shards} == {Interval(1, 2)}


@pytest.mark.parametrize(
    "layer",
    [
        SimpleNamespace(intermediate_size=16, n_groups=4),
        SimpleNamespace(intermediate_size=16, n_groups=3, ssm_state_size=WIDTH),
        SimpleNamespace(intermediate_size=12, n_groups=4, ssm_state_size=WIDTH),
        SimpleNamespace(intermediate_size=16, n_groups=4, ssm_state_size=WIDTH, conv1d=object()),
    ],
    ids=["says no width", "groups do not divide", "sizes do not add up", "one piece, and more groups than ranks"],
)
def test_a_convolution_that_is_not_what_its_layer_says_is_not_cut(layer: Any):
    made = spec("MAMBA2", (ROWS, 16), (4, 2, WIDTH))
    states = states_of(made, layer, RankCoordinates(tp_size=2), channels_first=False)
    assert {state.parts for state in states} == {None}


def test_more_states_than_a_kind_has_are_not_cut():
    """As with a ring of inputs that are replayed."""
    made = spec("MAMBA1", (ROWS, 8), (8, 5), (8, 2))
    states = states_of(made, None, RankCoordinates(tp_size=2), channels_first=False)
    assert {state.parts for state in states} == {None}


def test_a_tensor_that_is_not_what_vllm_says_is_named():
    kept = KeptStates((State((4, 3)),), (torch.zeros(BLOCKS, 4, 2),))
    layer = StateLayer(0, "model.layers.0.mixer", "g", kept)
    with pytest.raises(
        LayoutError, match=r"state 0 of layer 'model.layers.0.mixer' has shape \(4, 2\) where vLLM says"
    ):
        shards_from([layer], RankCoordinates())


def described(numbers: list[int], *, tp_rank: int = 0, tp_size: int = 1) -> RankLayout:
    """Attention in layer 1, Mamba 1 in the layers of these numbers."""
    coordinates = RankCoordinates(tp_rank=tp_rank, tp_size=tp_size)
    made, _, _ = mamba1(tp_size, True)
    names = tuple(f"model.layers.{number}.mixer" for number in numbers)
    states = states_of(made, None, coordinates, channels_first=True)
    kept = {name: KeptStates(states, tuple(torch.zeros(BLOCKS, *shape) for shape in made.shapes)) for name in names}
    return describe(
        {"model.layers.1.attn": torch.zeros(BLOCKS, 1, 4, 10)},
        [CacheGroup("pages", ("model.layers.1.attn",), 4), CacheGroup("state", names, 1024, has_state=True)],
        ModelShape(LAYERS),
        coordinates,
        heads={"model.layers.1.attn": None},
        states=kept,
        num_blocks=BLOCKS,
    ).layout


def test_layers_with_state_stand_beside_attention_and_a_number_may_have_both():
    layout = described([0, 1, 3])
    boxes = [shard.box[0] for shard in layout.shards if shard.component.name == "state 0"]
    assert boxes == [Interval(0, 2), Interval(3, 4)]
    assert [group.has_slots for group in layout.groups] == [False, True]


def test_layers_that_are_numbered_on_behind_those_with_attention_have_an_axis_of_their_own():
    """As in Falcon-H1."""
    layout = described([4, 5, 6, 7])
    (shard,) = (shard for shard in layout.shards if shard.component.name == "state 1")
    assert (shard.box[0], shard.component.axes[0].size) == (Interval(4, 8), 2 * LAYERS)


def test_a_model_may_have_state_alone():
    """As Mamba has."""
    made, _, _ = mamba1(1, True)
    states = states_of(made, None, RankCoordinates(), channels_first=True)
    name = "backbone.layers.0.mixer"
    found = describe(
        {},
        [CacheGroup("state", (name,), 1024, has_state=True)],
        ModelShape(1),
        RankCoordinates(),
        heads={},
        states={name: KeptStates(states, tuple(torch.zeros(BLOCKS, *shape) for shape in made.shapes))},
        num_blocks=BLOCKS,
    )
    assert [group.has_slots for group in found.layout.groups] == [True]
    assert found.pages_per_block == {"state": 1}


def test_a_share_is_exchanged_with_the_same_number_of_ranks_alone():
    made = spec("GDN_ATTN", (ROWS, 16), (4, 2, 3))

    def layout(tp_rank: int, tp_size: int) -> RankLayout:
        coordinates = RankCoordinates(tp_rank=tp_rank, tp_size=tp_size)
        states = states_of(made, None, coordinates, channels_first=False)
        kept = KeptStates(states, tuple(torch.zeros(BLOCKS, *shape) for shape in made.shapes))
        layer = StateLayer(0, "layers.0", "g", kept)
        return RankLayout(shards=tuple(shards_from([layer], coordinates)))

    check_exchangeable(layout(0, 2), layout(1, 2), source_name="prefill", destination_name="decode")
    with pytest.raises(Exception, match=SHARE):
        check_exchangeable(layout(0, 2), layout(0, 4), source_name="prefill", destination_name="decode")


@pytest.mark.parametrize("first", [True, False], ids=["channels first", "rows first"])
@pytest.mark.parametrize("kind", ["GDN_ATTN", "MAMBA2", "SHORT_CONV"])
def test_a_side_that_drafts_alone_is_refused_by_the_name_of_what_makes_its_state_longer(kind: str, first: bool):
    """vLLM keeps what a convolution has seen for as many more tokens as it drafts."""

    def layout(drafted: int) -> RankLayout:
        shapes = [(16, ROWS + drafted) if first else (ROWS + drafted, 16), (4, 2, 3)][: 2 - (kind == "SHORT_CONV")]
        made = spec(kind, *shapes)
        states = states_of(made, SimpleNamespace(key_dim=4, value_dim=8), RankCoordinates(), channels_first=first)
        kept = KeptStates(states, tuple(torch.zeros(BLOCKS, *shape) for shape in shapes))
        return RankLayout(shards=tuple(shards_from([StateLayer(0, "layers.0", "g", kept)], RankCoordinates())))

    with pytest.raises(IncompatiblePeerError, match=r"num_speculative_tokens\) 3.*num_speculative_tokens\) 5"):
        check_exchangeable(layout(0), layout(2), source_name="prefill", destination_name="decode")


def test_rings_of_several_sizes_are_refused_by_the_same_name():
    def layout(size: int) -> RankLayout:
        made = SimpleNamespace(num_heads=1, num_states=size, state_content_size_bytes=8, dtype=torch.float32)
        kept = ring_of(made, torch.zeros(BLOCKS, 1, size, 2), "ring")
        return RankLayout(shards=tuple(shards_from([StateLayer(0, "layers.0", "g", kept)], RankCoordinates())))

    with pytest.raises(IncompatiblePeerError, match=r"num_speculative_tokens\) 4.*num_speculative_tokens\) 6"):
        check_exchangeable(layout(4), layout(6), source_name="prefill", destination_name="decode")


DRAFTS = ("mtp.layers.0.mixer", "mtp.layers.1.attn")


def drafting(*, has_draft: bool = True, tp_size: int = 1, tp_rank: int = 0) -> tuple[RankLayout, dict[str, Any]]:
    """A model of one attention layer, and a draft with Mamba 1 and attention; and the tensors of all of them."""
    coordinates = RankCoordinates(tp_rank=tp_rank, tp_size=tp_size)
    made, _, _ = mamba1(tp_size, True)
    kept = KeptStates(
        states_of(made, None, coordinates, channels_first=True),
        tuple(torch.zeros(BLOCKS, *shape) for shape in made.shapes),
    )
    names = ("model.layers.0.attn", *DRAFTS[1:]) if has_draft else ("model.layers.0.attn",)
    caches = {name: torch.zeros(BLOCKS, 1, 4, 10) for name in names}
    groups = [CacheGroup("pages", names, 4)]
    if has_draft:
        groups.append(CacheGroup("state", DRAFTS[:1], 1024, has_state=True))
    layout = describe(
        caches,
        groups,
        ModelShape(1, drafts=DRAFTS if has_draft else ()),
        coordinates,
        heads=dict.fromkeys(names, HeldPart(1, Interval(0, 1))),
        states={DRAFTS[0]: kept},
        num_blocks=BLOCKS,
    ).layout
    states = {f"state {number}": tensor for number, tensor in enumerate(kept.tensors)} if has_draft else {}
    return layout, {**caches, **states}


def test_a_drafts_state_is_a_component_of_its_own_that_the_other_side_may_lack():
    """Its layers are told by their place among the draft's, whatever their numbers."""
    layout, _ = drafting()
    found = {each.name: (each.entry, each.is_optional, each.axes[0].size) for each in layout.components}
    assert found == {
        "kv": (Entry.TOKEN, False, 1),
        "draft": (Entry.TOKEN, True, 2),
        "draft, state 0": (Entry.REQUEST, True, 2),
        "draft, state 1": (Entry.REQUEST, True, 2),
    }
    boxes = {shard.component.name: shard.box[0] for shard in layout.shards}
    assert (boxes["draft"], boxes["draft, state 0"]) == (Interval(1, 2), Interval(0, 1))
    for source, destination in ((drafting()[0], drafting(has_draft=False)[0]), (drafting(has_draft=False)[0], layout)):
        check_exchangeable(source, destination, source_name="theirs", destination_name="ours")


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize(("sends", "receives"), [(True, True), (True, False), (False, True)])
def test_a_drafts_state_arrives_where_both_sides_draft(prefill_tp: int, decode_tp: int, sends: bool, receives: bool):
    prefill = [drafting(has_draft=sends, tp_size=prefill_tp, tp_rank=rank) for rank in range(prefill_tp)]
    decode = [drafting(has_draft=receives, tp_size=decode_tp, tp_rank=rank) for rank in range(decode_tp)]

    def whole(name: str, shape: tuple[int, ...], tp_size: int) -> torch.Tensor:
        """The first dimension of state is that which ranks divide."""
        width = shape[0] * (tp_size if name.startswith("state") else 1)
        random = np.random.default_rng(sum(name.encode()))
        return torch.from_numpy(random.random((width, *shape[1:]), np.float32))

    def own(name: str, shape: tuple[int, ...], tp_size: int, rank: int) -> torch.Tensor:
        all_of_it = whole(name, shape, tp_size)
        return all_of_it.chunk(tp_size)[rank] if name.startswith("state") else all_of_it

    for rank, (_, caches) in enumerate(prefill):
        for name, tensor in caches.items():
            tensor[1] = own(name, tuple(tensor.shape[1:]), prefill_tp, rank)
    with LocalNetwork() as network:
        cross(
            network,
            [layout for layout, _ in prefill],
            [layout for layout, _ in decode],
            sent={"pages": GroupPages([1]), **({"state": GroupPages([1])} if sends else {})},
            received={"pages": GroupPages([2]), **({"state": GroupPages([2])} if receives else {})},
            tokens=4,
        )
    for rank, (_, caches) in enumerate(decode):
        for name, tensor in caches.items():
            expected = own(name, tuple(tensor.shape[1:]), decode_tp, rank)
            if name != "model.layers.0.attn" and not sends:
                expected = torch.zeros_like(expected)
            assert torch.equal(tensor[2], expected), name
