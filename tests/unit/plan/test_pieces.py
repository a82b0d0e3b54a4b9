"""Pieces and who writes them: everything is owed by somebody, and the work is spread evenly."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import IncompatiblePeerError
from kvferry.layout import (
    Component,
    Interval,
    Paging,
    RankLayout,
    Shard,
    all_coordinates,
    attention_components,
    latent_component,
    split,
    stage_layers,
)
from kvferry.layout.interval import overlap, volume
from kvferry.plan import Piece, elect_writer, pieces_for_receiver

K, V = attention_components(num_layers=4, num_kv_heads=6, head_dim=2, dtype="int8")
LATENT = latent_component(num_layers=4, latent_dim=8, dtype="int8")


def layout(tp_rank: int, tp_size: int, layers: Interval, components: tuple[Component, ...] = (K, V)) -> RankLayout:
    """A rank's layout without memory: addresses that are only numbers."""
    shards = []
    for number, component in enumerate(components):
        rest = [
            split(a.size, tp_size, tp_rank) if a.name == "head" else Interval(0, a.size) for a in component.axes[1:]
        ]
        strides: list[int] = []
        step = 1
        for interval in reversed(rest):
            strides.insert(0, step)
            step *= len(interval)
        shards.append(
            Shard(
                component=component,
                box=(layers, *rest),
                addresses=tuple(0x10000 * (1 + number) + 0x1000 * index for index in range(len(layers))),
                strides=tuple(strides),
                paging=Paging(page_tokens=2, num_pages=3, page_stride=2 * step, token_stride=step),
            )
        )
    return RankLayout(shards=tuple(shards))


def engine(
    tp: int, stages: tuple[int, ...] = (4,), components: tuple[Component, ...] = (K, V)
) -> dict[int, RankLayout]:
    return {
        rank.group_rank: layout(rank.tp_rank, tp, stage_layers(stages, rank.pp_rank), components)
        for rank in all_coordinates(tp_size=tp, pp_size=len(stages))
    }


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
        held = {rank: overlap(source.shard(piece.component).box, piece.box) for rank, source in sources.items()}
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
    assert pieces_for_receiver(engine(2), layout(0, 1, Interval(4, 4))) == ()


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


def test_without_sources_everything_is_missing():
    with pytest.raises(IncompatiblePeerError, match=r"no source rank holds 'k'.*the 0 source ranks"):
        pieces_for_receiver({}, engine(1)[0])


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
    piece = Piece("latent", LATENT.whole, tuple(range(10, 10 + holders)))
    load = Counter(elect_writer(piece, room=number * step, receiver=0) for number in range(1000))
    assert set(load) == set(piece.holders)
    assert max(load.values()) < 1.3 * 1000 / holders
    assert min(load.values()) > 0.7 * 1000 / holders


@given(st.integers(0, 2**64 - 1), st.integers(0, 100), st.sets(st.integers(0, 50), min_size=1, max_size=8))
def test_the_writer_is_a_holder_and_the_same_on_both_sides(room: int, receiver: int, holders: set[int]):
    piece = Piece("latent", LATENT.whole, tuple(sorted(holders)))
    writer = elect_writer(piece, room=room, receiver=receiver)
    assert writer in holders
    assert elect_writer(piece, room=room, receiver=receiver) == writer


def test_the_election_never_changes():
    """Peers of different releases elect alike, so that these numbers are part of the protocol."""
    piece = Piece("latent", LATENT.whole, (0, 1, 2, 3))
    assert [elect_writer(piece, room=room, receiver=1) for room in (0, 1, 2, 3, 1000, 2**63)] == [2, 0, 1, 3, 1, 2]
