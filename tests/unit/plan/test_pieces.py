"""Pieces and who writes them: everything is owed by somebody, and the work is spread evenly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import IncompatiblePeerError
from kvferry.layout import (
    Axis,
    Component,
    Interval,
    RankLayout,
    Shard,
    ShardedComponent,
    TokenPartition,
    VirtualPools,
    all_coordinates,
    attention_components,
    contiguous,
    interleaved,
    latent_component,
    state_component,
    virtual_layout,
    zigzag,
)
from kvferry.layout.interval import covers, overlap, volume
from kvferry.layout.tokens import parts_met
from kvferry.plan import Piece, SourceGroup, elect_writer, pieces_for_receiver

LAYERS = 4
EVERY_TOKEN = TokenPartition()


def sharded(component: Component, tp_axis: str | None = None) -> ShardedComponent:
    return ShardedComponent(component=component, layers=tuple(range(LAYERS)), tp_axis=tp_axis)


K, V = (
    sharded(each, "head") for each in attention_components(num_layers=LAYERS, num_kv_heads=6, head_dim=2, dtype="int8")
)
LATENT = sharded(latent_component(num_layers=LAYERS, latent_dim=8, dtype="int8"))
STATE = ShardedComponent(
    component=state_component("state", num_layers=2, axes=(Axis("head", 6), Axis("dim", 2)), dtype="int8"),
    layers=(1, 3),
    tp_axis="head",
)
DRAFT = sharded(msgspec.structs.replace(K.component, name="draft", is_optional=True), "head")


def engine(
    tp: int,
    stages: tuple[int, ...] = (LAYERS,),
    components: Sequence[ShardedComponent] = (K, V),
    partition: TokenPartition = EVERY_TOKEN,
) -> dict[int, RankLayout]:
    pools = VirtualPools(page_tokens=2, num_pages=3, partition=partition, layers_per_stage=stages)
    return {
        rank.group_rank: virtual_layout(components, rank, pools)
        for rank in all_coordinates(tp_size=tp, cp_size=partition.num_parts, pp_size=len(stages))
    }


def box_of(source: RankLayout, piece: Piece) -> tuple[Interval, ...]:
    (shard,) = source.shards_of(piece.component)
    return shard.box


stages = st.sampled_from([(4,), (2, 2), (1, 3), (3, 0, 1)])


@given(st.integers(1, 8), stages, st.integers(1, 8), stages)
def test_pieces_tile_what_the_receiver_holds(tp: int, stages: tuple[int, ...], other_tp: int, others: tuple[int, ...]):
    sources = engine(tp, stages)
    for receiver in engine(other_tp, others).values():
        pieces = pieces_for_receiver(sources, receiver)
        for shard in receiver.shards:
            boxes = [piece.box for piece in pieces if piece.component == shard.component.name]
            assert sum(map(volume, boxes)) == volume(shard.box)
            assert all(overlap(one, other) is None for one, other in combinations(boxes, 2))
            assert all(overlap(box, shard.box) == box for box in boxes)


@given(st.integers(1, 8), stages, st.integers(1, 8))
def test_the_holders_are_all_ranks_that_hold_all_of_a_piece(tp: int, stages: tuple[int, ...], other_tp: int):
    sources = engine(tp, stages)
    for piece in pieces_for_receiver(sources, engine(other_tp)[0]):
        held = {rank: overlap(box_of(source, piece), piece.box) for rank, source in sources.items()}
        assert piece.holders == tuple(rank for rank in sorted(held) if held[rank] == piece.box)
        assert all(part in (None, piece.box) for part in held.values())


def test_three_ranks_to_two_with_six_heads():
    sources, receivers = engine(3), engine(2)
    heads = [
        (str(piece.box[1]), piece.holders)
        for piece in pieces_for_receiver(sources, receivers[1])
        if piece.component == "k"
    ]
    assert heads == [("[3, 4)", (1,)), ("[4, 6)", (2,))]


def test_a_rank_that_holds_nothing_is_owed_nothing():
    assert pieces_for_receiver(engine(2), engine(1, (LAYERS, 0))[1]) == ()


def test_sources_that_hold_nothing_are_nobody_s_writers():
    for piece in pieces_for_receiver(engine(1, (0, LAYERS, 0)), engine(1)[0]):
        assert piece.holders == (1,)


def test_a_part_that_nobody_holds_is_named_with_what_the_ranks_do_hold():
    sources = {rank: source for rank, source in engine(2).items() if rank == 0}
    with pytest.raises(IncompatiblePeerError) as caught:
        pieces_for_receiver(sources, engine(1)[0])
    assert "no source rank holds 'k' layer [0, 4) head [3, 6) dim [0, 2), which this rank needs" in str(caught.value)
    assert "the 1 source ranks hold rank 0: layer [0, 4) head [0, 3) dim [0, 2)" in str(caught.value)


def test_missing_layers_are_named():
    sources = {rank: source for rank, source in engine(1, (1, 2, 1)).items() if rank != 1}
    with pytest.raises(IncompatiblePeerError, match=r"no source rank holds 'k' layer \[1, 3\) head"):
        pieces_for_receiver(sources, engine(1)[0])


def test_without_sources_nothing_can_be_planned():
    with pytest.raises(IncompatiblePeerError, match="there are no source ranks"):
        pieces_for_receiver({}, engine(1)[0])


# --- components that not everybody has


def test_an_optional_component_that_the_sources_lack_is_not_owed():
    pieces = pieces_for_receiver(engine(2), engine(1, components=(K, V, DRAFT))[0])
    assert {piece.component for piece in pieces} == {"k", "v"}


def test_a_component_that_the_receiver_lacks_is_not_owed():
    pieces = pieces_for_receiver(engine(2, components=(K, V, DRAFT)), engine(1)[0])
    assert {piece.component for piece in pieces} == {"k", "v"}


def test_an_optional_component_that_both_have_travels_like_any_other():
    pieces = pieces_for_receiver(engine(2, components=(K, DRAFT)), engine(1, components=(K, DRAFT))[0])
    assert sorted((piece.component, piece.holders) for piece in pieces) == [
        ("draft", (0,)),
        ("draft", (1,)),
        ("k", (0,)),
        ("k", (1,)),
    ]


def test_a_component_that_no_source_has_is_named_if_the_receiver_needs_it():
    with pytest.raises(IncompatiblePeerError, match="no source rank has component 'latent'"):
        pieces_for_receiver(engine(2), engine(1, components=(K, LATENT))[0])
    nothing = engine(1, (LAYERS, 0), components=(K, LATENT))[1]
    assert pieces_for_receiver(engine(2), nothing) == ()


# --- context parallelism


def test_ranks_with_other_tokens_have_pieces_of_their_own():
    """TP2 and CP3: group ranks are tp + 2 * cp. The receiver holds every token."""
    pieces = pieces_for_receiver(engine(2, components=(K,), partition=interleaved(3)), engine(1, components=(K,))[0])
    found = sorted((piece.token_part, str(piece.box[1]), piece.holders) for piece in pieces)
    assert found == [
        (part, heads, (holder + 2 * part,)) for part in range(3) for holder, heads in enumerate(("[0, 3)", "[3, 6)"))
    ]


@pytest.mark.parametrize("partition", [interleaved(2, 4), contiguous(2), zigzag(2)])
def test_receivers_that_deal_alike_need_their_own_part_alone(partition: TokenPartition):
    sources, receivers = engine(1, partition=partition), engine(3, partition=partition)
    for receiver in receivers.values():
        pieces = pieces_for_receiver(sources, receiver)
        assert {(piece.token_part, piece.holders) for piece in pieces} == {
            (receiver.tokens.part, (receiver.tokens.part,))
        }


@pytest.mark.parametrize("theirs", [interleaved(2), interleaved(4, 2), contiguous(3), TokenPartition()])
@pytest.mark.parametrize("ours", [interleaved(2), interleaved(4, 1), interleaved(2, 6), zigzag(2), TokenPartition()])
def test_a_receiver_is_owed_the_parts_that_it_may_meet_each_complete(theirs: TokenPartition, ours: TokenPartition):
    sources = engine(2, (1, 3), components=(K, LATENT), partition=theirs)
    for receiver in engine(3, components=(K, LATENT), partition=ours).values():
        pieces = pieces_for_receiver(sources, receiver)
        for shard in receiver.shards:
            for part in range(theirs.num_parts):
                boxes = [
                    piece.box
                    for piece in pieces
                    if piece.component == shard.component.name and piece.token_part == part
                ]
                may_meet = part in parts_met(theirs, receiver.tokens)
                assert sum(map(volume, boxes)) == (volume(shard.box) if may_meet else 0)
                assert all(overlap(one, other) is None for one, other in combinations(boxes, 2))
        for piece in pieces:
            assert {sources[rank].tokens.part for rank in piece.holders} == {piece.token_part}
            assert piece.holders == tuple(
                rank
                for rank, source in sources.items()
                if source.tokens.part == piece.token_part and covers(box_of(source, piece), piece.box)
            )


def test_blocks_that_never_meet_are_not_owed():
    """Round-robin over 4 parts is a refinement of round-robin over 2: parts 0 and 2 make part 0."""
    sources = engine(1, partition=interleaved(4))
    owed = [
        {piece.token_part for piece in pieces_for_receiver(sources, receiver)}
        for receiver in engine(1, partition=interleaved(2)).values()
    ]
    assert owed == [{0, 2}, {1, 3}]


def test_state_of_a_whole_request_is_held_by_every_context_parallel_rank():
    sources = engine(2, components=(STATE,), partition=interleaved(3))
    for receiver in engine(1, components=(STATE,), partition=contiguous(2)).values():
        pieces = pieces_for_receiver(sources, receiver)
        assert [(piece.token_part, str(piece.box[1]), piece.holders) for piece in pieces] == [
            (None, "[0, 3)", (0, 2, 4)),
            (None, "[3, 6)", (1, 3, 5)),
        ]


def test_sources_that_deal_tokens_out_differently_are_refused():
    sources = {**engine(1, partition=interleaved(2)), 1: engine(1, partition=contiguous(2))[1]}
    with pytest.raises(IncompatiblePeerError) as caught:
        SourceGroup(sources)
    assert str(caught.value) == (
        "the source ranks partition tokens differently: blocks of 1 tokens over parts [0, 1]; one cycle over "
        "parts [0, 1]"
    )


def test_a_part_of_the_tokens_that_nobody_holds_is_named():
    sources = {0: engine(1, components=(K,), partition=interleaved(2))[0]}
    with pytest.raises(IncompatiblePeerError) as caught:
        pieces_for_receiver(sources, engine(1, components=(K,))[0])
    assert (
        "no source rank holds 'k' layer [0, 4) head [0, 6) dim [0, 2) for part 1 of the tokens, which this rank needs"
        in str(caught.value)
    )


@pytest.mark.parametrize("is_reversed", [False, True])
def test_what_sources_were_asked_before_changes_no_answer(is_reversed: bool):
    """One group of sources serves receivers of many engines."""
    sources = engine(2, partition=interleaved(4), components=(K, STATE))
    receivers = [
        receiver
        for partition in (interleaved(2), EVERY_TOKEN, contiguous(2), interleaved(4))
        for stages in ((4,), (1, 3))
        for receiver in engine(3, stages, components=(K, STATE), partition=partition).values()
    ]
    group = SourceGroup(sources)
    for receiver in reversed(receivers) if is_reversed else receivers:
        assert group.pieces_for(receiver) == pieces_for_receiver(sources, receiver)


# --- several shards of a component


def in_groups(layout: RankLayout, *stops: int) -> RankLayout:
    """The same layout with the layers of every component in groups of their own, cut at `stops`."""
    shards: list[Shard] = []
    for shard in layout.shards:
        for number, (start, stop) in enumerate(zip((0, *stops), (*stops, LAYERS), strict=True)):
            held = Interval(start, stop).overlap(shard.box[0])
            if held is None:
                continue
            first = held.start - shard.box[0].start
            shards.append(
                msgspec.structs.replace(
                    shard,
                    box=(held, *shard.box[1:]),
                    addresses=shard.addresses[first : first + len(held)],
                    group=f"group-{number}",
                )
            )
    return RankLayout(shards=tuple(shards), tokens=layout.tokens)


@pytest.mark.parametrize(
    ("theirs", "ours", "layers"),
    [
        ((), (1, 3), ["[0, 1)", "[1, 3)", "[3, 4)"]),
        ((1, 3), (), ["[0, 1)", "[1, 3)", "[3, 4)"]),
        ((1, 3), (2,), ["[0, 1)", "[1, 2)", "[2, 3)", "[3, 4)"]),
        ((2,), (2,), ["[0, 2)", "[2, 4)"]),
    ],
)
def test_layers_in_different_groups_are_cut_where_either_side_changes(
    theirs: tuple[int, ...], ours: tuple[int, ...], layers: list[str]
):
    sources = {0: in_groups(engine(1)[0], *theirs)}
    receiver = in_groups(engine(1)[0], *ours)
    pieces = pieces_for_receiver(sources, receiver)
    assert [str(piece.box[0]) for piece in pieces if piece.component == "k"] == layers
    for piece in pieces:
        assert piece.holders == (0,)
        for layout in (sources[0], receiver):
            assert layout.shard_with(piece.component, piece.box) is not None


def test_groups_and_stages_cut_together():
    sources = {rank: in_groups(layout, 1) for rank, layout in engine(1, (2, 2)).items()}
    pieces = pieces_for_receiver(sources, in_groups(engine(1)[0], 3))
    assert [(str(piece.box[0]), piece.holders) for piece in pieces if piece.component == "k"] == [
        ("[0, 1)", (0,)),
        ("[1, 2)", (0,)),
        ("[2, 3)", (1,)),
        ("[3, 4)", (1,)),
    ]


# --- election


def writers(sources: dict[int, RankLayout], receivers: dict[int, RankLayout], room: int) -> Counter[int]:
    """How many bytes a token each source sends in a room."""
    load: Counter[int] = Counter()
    for number, receiver in receivers.items():
        for piece in pieces_for_receiver(sources, receiver):
            load[elect_writer(piece, room=room, receiver=number)] += volume(piece.box)
    return load


@pytest.mark.parametrize("room", [0, 1, 2, 12345, 2**63 - 1])
def test_four_holders_of_a_latent_send_once_each_to_four_receivers(room: int):
    load = writers(engine(4, components=(LATENT,)), engine(4, components=(LATENT,)), room)
    assert load == dict.fromkeys(range(4), 4 * 8)


@pytest.mark.parametrize("room", range(5))
def test_replicated_heads_are_sent_by_every_replica_in_turn(room: int):
    """Twelve ranks hold six heads twice; of the twelve receivers every two need the same head."""
    load = writers(engine(12), engine(12), room)
    assert sorted(load) == list(range(12))
    assert len(set(load.values())) == 1


@pytest.mark.parametrize("holders", [2, 3, 4, 8])
@pytest.mark.parametrize("step", [1, 2, 3, 4, 8, 10, 16, 64, 100, 1000, 1024, 2**16, 2**20, 2**32, 2**40, 2**50, 10**9])
def test_many_rooms_spread_over_the_holders_whatever_pattern_their_numbers_follow(holders: int, step: int):
    piece = Piece("latent", LATENT.component.whole, 0, tuple(range(10, 10 + holders)))
    load = Counter(elect_writer(piece, room=number * step, receiver=0) for number in range(1000))
    assert set(load) == set(piece.holders)
    assert max(load.values()) < 1.3 * 1000 / holders
    assert min(load.values()) > 0.7 * 1000 / holders


@given(st.integers(0, 2**64 - 1), st.integers(0, 100), st.sets(st.integers(0, 50), min_size=1, max_size=8))
def test_the_writer_is_a_holder_and_the_same_on_both_sides(room: int, receiver: int, holders: set[int]):
    piece = Piece("latent", LATENT.component.whole, 0, tuple(sorted(holders)))
    writer = elect_writer(piece, room=room, receiver=receiver)
    assert writer in holders
    assert elect_writer(piece, room=room, receiver=receiver) == writer


def test_the_election_never_changes():
    """Peers of different releases elect alike, so that these numbers are part of the protocol."""
    piece = Piece("latent", LATENT.component.whole, 0, (0, 1, 2, 3))
    assert [elect_writer(piece, room=room, receiver=1) for room in (0, 1, 2, 3, 1000, 2**63)] == [2, 0, 1, 3, 1, 2]
