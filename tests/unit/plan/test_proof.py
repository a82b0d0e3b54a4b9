"""The proof accepts right plans and finds planted faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.tiers import examples

from kvferry.errors import IncompatiblePeerError
from kvferry.layout import (
    Axis,
    Box,
    Component,
    Entry,
    Interval,
    PageOrder,
    Paging,
    RankLayout,
    Shard,
    ShardedComponent,
    TokenPartition,
    TokenShare,
    VirtualPools,
    all_coordinates,
    attention_components,
    contiguous,
    even_stages,
    interleaved,
    latent_component,
    split,
    state_component,
    virtual_layout,
    zigzag,
)
from kvferry.plan import (
    Piece,
    Proof,
    Runs,
    Segments,
    Units,
    check_exchangeable,
    lower,
    pieces_for_receiver,
    proof,
    prove,
    prove_receiver,
    route_between,
)
from kvferry.plan.lowering import Loop
from kvferry.plan.proof import ProofError, prove_runs

ELEMENT = 2
LAYERS, HEADS, DIM = 4, 6, 3
EVERY_TOKEN = TokenPartition()


def sharded(component: Component, tp_axis: str | None = None) -> ShardedComponent:
    layers = tuple(range(component.axes[0].size))
    return ShardedComponent(component=component, layers=layers, tp_axis=tp_axis)


K, V = (
    sharded(each, "head")
    for each in attention_components(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype="int16")
)
LATENT = sharded(latent_component(num_layers=LAYERS, latent_dim=5, dtype="int16"))
STATE = ShardedComponent(
    component=state_component("state", num_layers=2, axes=(Axis("head", 4), Axis("dim", 3)), dtype="float32"),
    layers=(1, 2),
    tp_axis="head",
)
WINDOW = sharded(msgspec.structs.replace(K.component, name="w", window_tokens=8), "head")
DRAFT = sharded(msgspec.structs.replace(K.component, name="draft", is_optional=True), "head")
HYBRID = (K, V, LATENT, STATE, WINDOW)


def engine(
    tp: int = 1,
    *,
    stages: tuple[int, ...] = (LAYERS,),
    partition: TokenPartition = EVERY_TOKEN,
    order: PageOrder = PageOrder.NHD,
    page_tokens: int = 4,
    components: Sequence[ShardedComponent] = (K, V),
    whole: Collection[str] = (),
) -> dict[int, RankLayout]:
    """All ranks that share a request, by group rank.

    Args:
        whole: components of which every rank has all tokens, whatever the partition says.
    """
    pools = VirtualPools(
        page_tokens=page_tokens, num_pages=2, order=order, partition=partition, layers_per_stage=stages
    )
    return {
        rank.group_rank: with_every_token(virtual_layout(components, rank, pools), whole)
        for rank in all_coordinates(tp_size=tp, cp_size=partition.num_parts, pp_size=len(stages))
    }


def with_every_token(layout: RankLayout, components: Collection[str]) -> RankLayout:
    shards = (
        msgspec.structs.replace(shard, has_every_token=True, group=shard.component.name)
        if shard.component.name in components
        else shard
        for shard in layout.shards
    )
    return msgspec.structs.replace(layout, shards=tuple(shards))


@pytest.fixture
def forgetful() -> Iterator[None]:
    """The proof remembers what it proved of partitions and routes: not beyond a test that changes them."""

    def forget() -> None:
        for remembered in vars(proof).values():
            if hasattr(remembered, "cache_clear"):
                remembered.cache_clear()

    forget()
    yield
    forget()


# --- right plans


@pytest.mark.parametrize("order", [PageOrder.NHD, PageOrder.HND])
@pytest.mark.parametrize(("tp", "other"), [(1, 1), (3, 2), (2, 3), (4, 5), (12, 2), (2, 12)])
def test_right_plans_are_proved(tp: int, other: int, order: PageOrder):
    found = prove(engine(tp), engine(other, order=order), room=5)
    assert (found.receivers, found.absent) == (other, ())
    assert found.pieces >= other * 2


stages = st.sampled_from([(4,), (1, 3), (3, 0, 1), (1, 1, 2)])
partitions = st.sampled_from(
    [EVERY_TOKEN, interleaved(2), interleaved(3, 4), contiguous(2), contiguous(3), zigzag(2), interleaved(2, 6)]
)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_right_plans_of_any_parallelism_and_pages_are_proved(data: st.DataObject):
    def some_engine() -> dict[int, RankLayout]:
        return engine(
            data.draw(st.integers(1, 7)),
            stages=data.draw(stages),
            partition=data.draw(partitions),
            order=data.draw(st.sampled_from([PageOrder.NHD, PageOrder.HND])),
            page_tokens=data.draw(st.sampled_from([1, 4, 6, 16])),
            components=HYBRID,
            whole=data.draw(st.sets(st.sampled_from(["v", "latent", "w", "state"]))),
        )

    sources, receivers = some_engine(), some_engine()
    found = prove(sources, receivers, room=data.draw(st.integers(0, 100)))
    assert found.receivers == len(receivers)
    assert found.absent == ()


@pytest.mark.parametrize("partition", [EVERY_TOKEN, contiguous(2), interleaved(2, 4)])
def test_packed_pages_are_proved(partition: TokenPartition):
    sides = (engine(tp, order=PageOrder.PACKED, components=HYBRID, partition=partition) for tp in (3, 2))
    assert prove(*sides, room=0).receivers == 2 * partition.num_parts


def test_packed_pages_of_which_every_rank_has_all_tokens_are_proved():
    """A partition that would cut them does not touch them."""
    one, other = (
        engine(
            order=PageOrder.PACKED, components=HYBRID, partition=interleaved(2, turn), whole=["k", "v", "latent", "w"]
        )
        for turn in (1, 2)
    )
    check_exchangeable(one[0], other[0], source_name="prefill", destination_name="decode")
    assert prove(one, other, room=0).receivers == 2


def test_ranks_that_do_not_all_have_every_token_of_a_component_are_refused():
    sources = engine(partition=interleaved(2))
    sources[1] = with_every_token(sources[1], ["v"])
    with pytest.raises(IncompatiblePeerError, match=r"partition the tokens of 'v' differently: blocks of 1 .* every"):
        prove(sources, engine(), room=0)


def test_dealings_of_very_long_blocks_are_proved_without_looking_at_every_token():
    long = engine(partition=interleaved(2, 1 << 32), page_tokens=1 << 12)
    assert prove(long, engine(page_tokens=1 << 12), room=0).pieces == 4
    assert prove(long, long, room=0).pieces == 4


def test_one_receiver_can_be_proved_alone():
    sources, receivers = engine(3), engine(2)
    pieces = pieces_for_receiver(sources, receivers[0])
    assert prove_receiver(sources, receivers[0], pieces, room=1, receiver=0) == Proof(receivers=1, pieces=4)


def test_a_receiver_that_holds_nothing_is_proved_without_a_piece():
    receiver = engine(stages=(LAYERS, 0))[1]
    assert prove(engine(3), {0: receiver}, room=0) == Proof(receivers=1, pieces=0)


def test_optional_components_that_no_source_has_are_named():
    assert prove(engine(2), engine(components=(K, DRAFT)), room=0).absent == ("draft",)
    assert prove(engine(2, components=(K, DRAFT)), engine(components=(K, DRAFT)), room=0).absent == ()


def test_sources_that_lack_something_are_no_defect_of_the_plan():
    sources = engine(3)
    del sources[1]
    with pytest.raises(IncompatiblePeerError):
        prove(sources, engine(2), room=0)


# --- wrong pieces


def plan(change: Callable[[list[Piece]], list[Piece]], *, partition: TokenPartition = EVERY_TOKEN) -> None:
    """Proves a changed plan of TP3 -> TP2 for the first receiver: of k, then of v, heads [0, 2) and [2, 3)."""
    sources, receivers = engine(3, partition=partition), engine(2, order=PageOrder.HND, partition=partition)
    pieces = change(list(pieces_for_receiver(sources, receivers[0])))
    prove_receiver(sources, receivers[0], tuple(pieces), room=0, receiver=0)


def moved(piece: Piece, axis: int, start: int, stop: int) -> Piece:
    box = [*piece.box]
    box[axis] = Interval(box[axis].start + start, box[axis].stop + stop)
    return msgspec.structs.replace(piece, box=tuple(box))


def test_the_unchanged_plan_passes():
    plan(lambda pieces: pieces)
    plan(lambda pieces: pieces, partition=interleaved(2))


@pytest.mark.parametrize("index", range(4))
def test_a_dropped_piece_is_found(index: int):
    with pytest.raises(ProofError, match=r"'[kv]': \d+ of 36 elements of an entry are never written"):
        plan(lambda pieces: pieces[:index] + pieces[index + 1 :])


@pytest.mark.parametrize("index", range(4))
def test_a_repeated_piece_is_found(index: int):
    with pytest.raises(ProofError, match=r"'[kv]' .* and '[kv]' .* write the same elements"):
        plan(lambda pieces: [*pieces, pieces[index]])


def test_a_component_without_pieces_is_found():
    with pytest.raises(ProofError, match="'v': 36 of 36 elements of an entry are never written"):
        plan(lambda pieces: [piece for piece in pieces if piece.component == "k"])


def test_pieces_that_overlap_are_found():
    with pytest.raises(ProofError, match="write the same elements"):
        plan(lambda pieces: [moved(pieces[0], 1, 0, 1), *pieces[1:]])


def test_a_piece_that_is_too_short_is_found():
    with pytest.raises(ProofError, match="12 of 36 elements of an entry are never written"):
        plan(lambda pieces: [moved(pieces[0], 1, 0, -1), *pieces[1:]])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_piece_that_leaves_the_receivers_part_is_found(axis: int):
    with pytest.raises(ProofError):
        plan(lambda pieces: [pieces[0], moved(pieces[1], axis, 1, 1), *pieces[2:]])
    outside = "1 pieces lie outside of what the receiver holds"
    with pytest.raises(ProofError, match=outside):
        plan(lambda pieces: [*pieces, moved(pieces[1], axis, 9, 9)])


def test_a_piece_of_a_component_that_the_receiver_lacks_is_found():
    with pytest.raises(ProofError, match="1 pieces lie outside of what the receiver holds"):
        plan(lambda pieces: [*pieces, msgspec.structs.replace(pieces[0], component="draft")])


def test_a_piece_of_a_component_that_no_source_has_is_found():
    sources, receivers = engine(1), engine(1, components=(K, DRAFT))
    pieces = pieces_for_receiver(sources, receivers[0])
    invented = msgspec.structs.replace(pieces[0], component="draft")
    with pytest.raises(ProofError, match="'draft'"):
        prove_receiver(sources, receivers[0], (*pieces, invented), room=0, receiver=0)


def test_a_writer_that_does_not_hold_its_piece_is_found():
    with pytest.raises(ProofError, match=r"rank 2 was elected to send 'k' .* but does not hold it"):
        plan(lambda pieces: [msgspec.structs.replace(pieces[0], holders=(2,)), *pieces[1:]])


def test_a_writer_that_does_not_exist_is_found():
    with pytest.raises(ProofError, match=r"rank 7 was elected to send 'k' .* but does not hold it"):
        plan(lambda pieces: [msgspec.structs.replace(pieces[0], holders=(7,)), *pieces[1:]])


def test_an_election_of_a_stranger_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(proof, "elect_writer", lambda piece, *, room, receiver: (max(piece.holders) + 1) % 3)
    with pytest.raises(ProofError, match="was elected to send"):
        plan(lambda pieces: pieces)


def test_a_writer_that_nobody_elected_is_found_even_if_it_holds_the_piece(monkeypatch: pytest.MonkeyPatch):
    sources, receivers = engine(2, components=(LATENT,)), engine(components=(LATENT,))
    pieces = tuple(msgspec.structs.replace(piece, holders=(0,)) for piece in pieces_for_receiver(sources, receivers[0]))
    prove_receiver(sources, receivers[0], pieces, room=0, receiver=0)
    monkeypatch.setattr(proof, "elect_writer", lambda piece, *, room, receiver: 1)
    with pytest.raises(ProofError, match="rank 1 was elected to send 'latent'"):
        prove_receiver(sources, receivers[0], pieces, room=0, receiver=0)


def test_a_component_that_a_receiver_needs_and_no_source_has_is_found():
    receiver = engine(components=(K, LATENT))[0]
    sources = engine(components=(K,))
    pieces = pieces_for_receiver(sources, engine(components=(K,))[0])
    with pytest.raises(ProofError, match="no source has 'latent', which the receiver cannot do without"):
        prove_receiver(sources, receiver, pieces, room=0, receiver=0)


# --- wrong parts of the tokens


def part(piece: Piece, number: int | None) -> Piece:
    return msgspec.structs.replace(piece, token_part=number)


def test_a_piece_of_another_part_of_the_tokens_is_found():
    with pytest.raises(ProofError, match=r"'k' layer .* travels with part 1 of the tokens, where \[0\] are needed"):
        plan(lambda pieces: [part(pieces[0], 1), *pieces[1:]], partition=interleaved(2))


def test_a_piece_of_one_part_of_the_tokens_for_that_of_another_is_found():
    sources, receivers = engine(partition=interleaved(2)), engine()
    first, *others = pieces_for_receiver(sources, receivers[0])
    with pytest.raises(ProofError, match="'k': 72 of 72 elements of an entry are never written"):
        prove_receiver(sources, receivers[0], (part(first, 1), *others), room=0, receiver=0)


@pytest.mark.parametrize("number", [1, None])
def test_a_complete_set_of_pieces_for_tokens_that_nobody_asked_for_is_found(number: int | None):
    with pytest.raises(ProofError, match=rf"'k' layer .* travels with part {number} of the tokens, where \[0\]"):
        plan(lambda pieces: [*pieces, *(part(piece, number) for piece in pieces)], partition=interleaved(2))


def test_a_writer_that_holds_other_tokens_is_found():
    """Group ranks are tp + 3 * cp: rank 3 holds the same heads as rank 0, and the other half of the tokens."""
    with pytest.raises(ProofError, match=r"rank 3 was elected to send 'k' .* but holds other tokens of it"):
        plan(lambda pieces: [msgspec.structs.replace(pieces[0], holders=(3,)), *pieces[1:]], partition=interleaved(2))


@pytest.mark.parametrize("index", range(6))
def test_a_dropped_part_of_the_tokens_is_found(index: int):
    """Every part is needed of a receiver that holds every token: 3 parts of k and of v."""
    sources, receivers = engine(partition=interleaved(3)), engine()
    pieces = pieces_for_receiver(sources, receivers[0])
    assert len(pieces) == 6
    prove_receiver(sources, receivers[0], pieces, room=0, receiver=0)
    with pytest.raises(ProofError, match="never written"):
        prove_receiver(sources, receivers[0], pieces[:index] + pieces[index + 1 :], room=0, receiver=0)


def test_state_that_travels_by_part_of_the_tokens_is_found():
    sources, receivers = engine(components=(STATE,), partition=interleaved(2)), engine(components=(STATE,))
    pieces = pieces_for_receiver(sources, receivers[0])
    assert prove_receiver(sources, receivers[0], pieces, room=0, receiver=0).pieces == 1
    changed = tuple(msgspec.structs.replace(part(piece, 0), holders=(0,)) for piece in pieces)
    with pytest.raises(ProofError):
        prove_receiver(sources, receivers[0], changed, room=0, receiver=0)
    with pytest.raises(ProofError, match=r"travels with part 0 of the tokens, where \[None\] are needed"):
        prove_receiver(sources, receivers[0], (*pieces, *changed), room=0, receiver=0)


DEALT: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a part counted one position too far": (
        "local", lambda right: lambda self, positions, *, block: right(self, positions + 1, block=block)
    ),
    "local positions with gaps": (
        "local", lambda right: lambda self, positions, *, block: 2 * right(self, positions, block=block)
    ),
    "the owner of the next part": (
        "holds", lambda right: lambda self, positions, *, block: right(self, positions + block.tokens, block=block)
    ),
    "tokens that two parts hold": (
        "holds", lambda right: lambda self, positions, *, block: (
            right(self, positions, block=block) | (positions == 0)
        )
    ),
    "a block that two parts hold and count": ("_owned", lambda right: lambda self: np.union1d(right(self), [0])),
    "tokens that nobody holds": (
        "holds", lambda right: lambda self, positions, *, block: right(self, positions, block=block) & (positions > 0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", DEALT)
@pytest.mark.parametrize("partition", [interleaved(2, 4), interleaved(3), zigzag(2), contiguous(2, 4)])
def test_a_dealing_that_is_not_one_is_found(
    fault: str, partition: TokenPartition, monkeypatch: pytest.MonkeyPatch, forgetful: None
):
    sources, receivers = engine(partition=partition), engine()
    prove(sources, receivers, room=0)
    vars(proof)["_prove_partition"].cache_clear()
    name, wrong = DEALT[fault]
    monkeypatch.setattr(TokenShare, name, wrong(getattr(TokenShare, name)))
    with pytest.raises(ProofError):
        prove(sources, receivers, room=0)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda right: lambda self, tokens: replace(right(self, tokens), longer=0),
        lambda right: lambda self, tokens: replace(right(self, tokens), longer=right(self, tokens).longer + 1),
        lambda right: lambda self, tokens: replace(right(self, tokens), tokens=right(self, tokens).tokens + 1),
        lambda right: lambda self, tokens: right(msgspec.structs.replace(self, page_tokens=None), tokens),
    ],
    ids=["none is longer", "one more is longer", "no whole pages", "by token"],
)
def test_whole_pages_that_are_given_out_otherwise_are_found(
    wrong: Any, monkeypatch: pytest.MonkeyPatch, forgetful: None
):
    sources, receivers = engine(partition=contiguous(3, 4)), engine()
    prove(sources, receivers, room=0)
    vars(proof)["_prove_partition"].cache_clear()
    monkeypatch.setattr(TokenPartition, "block", wrong(TokenPartition.block))
    with pytest.raises(ProofError):
        prove(sources, receivers, room=0)


# --- wrong places of tokens


def segments(change: Callable[[Any], Any]) -> Callable[[Segments], Segments]:
    return lambda right: Segments(change(right.source), change(right.destination), change(right.lengths))


ROUTED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "the first segment dropped": ("segments_between", segments(lambda values: values[1:])),
    "the last segment twice": ("segments_between", segments(lambda values: np.append(values, values[-1:]))),
    "segments a token on": ("segments_between", lambda right: replace(right, destination=right.destination + 1)),
    "segments a token too short": ("segments_between", lambda right: replace(right, lengths=right.lengths - 1)),
    "segments in the order of another side": (
        "segments_between", lambda right: replace(right, source=right.source[::-1])
    ),
    "the first unit dropped": (
        "units_of",
        lambda right: (Units(right[0].tokens, right[0].source[1:], right[0].destination[1:]), right[1]),
    ),
    "single tokens dropped": (
        "units_of",
        lambda right: (right[0], Units(1, right[1].source[:0], right[1].destination[:0])),
    ),
    "units that go to the next one's place": (
        "units_of",
        lambda right: (Units(right[0].tokens, right[0].source, right[0].destination + 1), right[1]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", ROUTED)
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [(interleaved(2, 4), EVERY_TOKEN), (EVERY_TOKEN, interleaved(3, 8)), (contiguous(2), interleaved(2, 4))],
)
def test_tokens_that_go_astray_are_found(
    fault: str, theirs: TokenPartition, ours: TokenPartition, monkeypatch: pytest.MonkeyPatch, forgetful: None
):
    sources, receivers = engine(partition=theirs), engine(partition=ours)
    prove(sources, receivers, room=0)
    name, change = ROUTED[fault]
    right = getattr(proof, name)
    monkeypatch.setattr(proof, name, lambda *given, **named: change(right(*given, **named)))
    for remembered in ("_prove_route", "_prove_partition"):
        vars(proof)[remembered].cache_clear()
    with pytest.raises(ProofError):
        prove(sources, receivers, room=0)


@pytest.mark.parametrize("unit", [3, 8, 16])
def test_a_unit_that_pages_cut_is_found(unit: int, monkeypatch: pytest.MonkeyPatch, forgetful: None):
    sources, receivers = engine(page_tokens=4), engine(page_tokens=6)
    right = route_between
    monkeypatch.setattr(proof, "route_between", lambda *given: replace(right(*given), unit_tokens=unit))
    with pytest.raises(ProofError, match=r"moved together, but do not always lie in one page|are not a page"):
        prove(sources, receivers, room=0)


# --- wrong runs


@dataclass(frozen=True)
class Pair:
    """A piece and the shards of both sides that hold it."""

    piece: Piece
    source: Shard
    destination: Shard
    unit_tokens: int

    @property
    def runs(self) -> Runs:
        return lower(self.piece.box, self.source, self.destination, unit_tokens=self.unit_tokens)

    def prove(self, runs: Runs) -> None:
        prove_runs(self.piece, self.source, self.destination, runs, unit_tokens=self.unit_tokens)


def shard_of(component: Component, box: Box, dims: Sequence[str], page_tokens: int, *, gap: int = 0) -> Shard:
    """A shard in memory of the given order, with `gap` bytes behind every step of every dimension."""
    counts = {"page": 3, "token": page_tokens, "slot": 3}
    counts |= {axis.name: len(part) for axis, part in zip(component.axes, box, strict=True)}
    strides, step = {}, component.element_bytes
    for name in reversed(dims):
        strides[name] = step
        step = step * counts[name] + gap
    layer = strides.pop("layer", step)
    return Shard(
        component=component,
        box=box,
        addresses=tuple(0x10000 + index * layer for index in range(len(box[0]))),
        strides=tuple(strides[axis.name] for axis in component.axes[1:]),
        paging=Paging(page_tokens, 3, strides.get("page", strides.get("slot", 0)), strides.get("token", 0)),
    )


def boxed(component: Component, layers: tuple[int, int], heads: tuple[int, int]) -> Box:
    return (Interval(*layers), Interval(*heads), *component.whole[2:])


def attention(source: Sequence[str], destination: Sequence[str], pages: tuple[int, int], unit: int) -> Pair:
    component = K.component
    piece = Piece("k", boxed(component, (1, 3), (2, 4)), 0, (0,))
    return Pair(
        piece,
        shard_of(component, boxed(component, (0, 4), (1, 5)), source, pages[0]),
        shard_of(component, boxed(component, (1, 4), (2, 6)), destination, pages[1]),
        unit,
    )


NHD, HND = ("page", "token", "head", "dim"), ("page", "head", "token", "dim")
PAIRS = {
    "nhd to nhd": attention(NHD, NHD, (4, 4), 4),
    "nhd to hnd": attention(NHD, HND, (4, 4), 4),
    "hnd to nhd, layers in a page": attention(("page", "layer", *HND[1:]), NHD, (4, 4), 4),
    "small pages to large": attention(NHD, HND, (4, 12), 4),
    "large pages to small": attention(HND, NHD, (12, 4), 4),
    "unlike pages": attention(("token", "head", "page", "dim"), HND, (4, 6), 2),
    "dims outermost": attention(("dim", "page", "head", "token"), NHD, (4, 4), 4),
}
STATES = Pair(
    Piece("state", boxed(STATE.component, (0, 2), (1, 3)), None, (0,)),
    shard_of(STATE.component, STATE.component.whole, ("slot", "dim", "head"), 1),
    shard_of(STATE.component, boxed(STATE.component, (0, 2), (1, 4)), ("slot", "head", "dim"), 1),
    1,
)


def shifted(values: Any, by: int, at: int | slice = slice(None)) -> Any:
    values = values.copy()
    values[at] = (values[at].astype(np.int64) + by).astype(np.uint64)
    return values


def bases(runs: Runs, change: Callable[[Any], Any], *, source: bool = False, destination: bool = False) -> Runs:
    return replace(
        runs,
        source_bases=change(runs.source_bases) if source else runs.source_bases,
        destination_bases=change(runs.destination_bases) if destination else runs.destination_bases,
    )


def loops(runs: Runs, change: Callable[[list[Loop]], list[Loop]]) -> Runs:
    return replace(runs, loops=tuple(change([*runs.loops])))


def first_loop(runs: Runs, **by: int) -> Runs:
    def change(each: list[Loop]) -> list[Loop]:
        return [replace(each[0], **{name: getattr(each[0], name) + more for name, more in by.items()}), *each[1:]]

    return loops(runs, change)


def steps(runs: Runs, side: str, **by: int) -> Runs:
    of_side = getattr(runs, side)
    return replace(
        runs, **{side: replace(of_side, **{name: getattr(of_side, name) + more for name, more in by.items()})}
    )


FAULTS: dict[str, Callable[[Runs], Runs]] = {
    "layers swapped on the source": lambda runs: bases(runs, lambda each: each[::-1], source=True),
    "layers swapped on the receiver": lambda runs: bases(runs, lambda each: each[::-1], destination=True),
    "a layer twice on the source": lambda runs: bases(runs, lambda each: each[[0, 0]], source=True),
    "a layer twice on both sides": lambda runs: bases(runs, lambda each: each[[0, 0]], source=True, destination=True),
    "a layer too few": lambda runs: bases(runs, lambda each: each[:-1], source=True, destination=True),
    "a layer too few on the receiver": lambda runs: bases(runs, lambda each: each[:-1], destination=True),
    "a layer too many": lambda runs: bases(runs, lambda each: np.append(each, each[:1]), source=True, destination=True),
    "no layers": lambda runs: bases(runs, lambda each: each[:0], source=True, destination=True),
    "all sources an element on": lambda runs: bases(runs, lambda each: shifted(each, ELEMENT), source=True),
    "all destinations an element on": lambda runs: bases(runs, lambda each: shifted(each, ELEMENT), destination=True),
    "both an element on": lambda runs: bases(
        runs, lambda each: shifted(each, ELEMENT), source=True, destination=True
    ),
    "both an element back": lambda runs: bases(
        runs, lambda each: shifted(each, -ELEMENT), source=True, destination=True
    ),
    "the last layer an element on": lambda runs: bases(runs, lambda each: shifted(each, ELEMENT, -1), source=True),
    "half an element on": lambda runs: bases(runs, lambda each: shifted(each, 1), destination=True),
    "a layer outside of the pool": lambda runs: bases(runs, lambda each: shifted(each, 10**6, -1), destination=True),
    "a layer before the pool": lambda runs: bases(runs, lambda each: shifted(each, -(10**4), 0), destination=True),
    "a loop dropped": lambda runs: loops(runs, lambda each: each[:-1]),
    "no loops": lambda runs: loops(runs, lambda each: []),
    "a loop twice": lambda runs: loops(runs, lambda each: [each[0], *each]),
    "a loop once too often": lambda runs: first_loop(runs, count=1),
    "a loop once too little": lambda runs: first_loop(runs, count=-1),
    "a wrong stride on the source": lambda runs: first_loop(runs, source_stride=ELEMENT),
    "a wrong stride on the receiver": lambda runs: first_loop(runs, destination_stride=ELEMENT),
    "wrong strides on both sides": lambda runs: first_loop(runs, source_stride=ELEMENT, destination_stride=ELEMENT),
    "a stride that is not an element's": lambda runs: first_loop(runs, source_stride=1),
    "no stride at all": lambda runs: loops(runs, lambda each: [Loop(each[0].count, 0, 0), *each[1:]]),
    "a stride of two steps": lambda runs: first_loop(
        runs, source_stride=runs.loops[0].source_stride, destination_stride=runs.loops[0].destination_stride
    ),
    "a loop of half the steps of twice the stride": lambda runs: loops(
        runs,
        lambda each: [
            Loop(each[0].count // 2, 2 * each[0].source_stride, 2 * each[0].destination_stride), *each[1:]
        ],
    ),
    "runs too long": lambda runs: replace(runs, length=runs.length + ELEMENT),
    "runs too short": lambda runs: replace(runs, length=runs.length - ELEMENT),
    "half as many runs of twice the length": lambda runs: replace(
        first_loop(runs, count=-(runs.loops[0].count // 2)), length=2 * runs.length
    ),
    "runs of no length": lambda runs: replace(runs, length=0),
    "a page stride too short on the source": lambda runs: steps(runs, "source_steps", page_stride=-ELEMENT),
    "a page stride too long on the receiver": lambda runs: steps(runs, "destination_steps", page_stride=ELEMENT),
    "a unit too many a page": lambda runs: steps(runs, "source_steps", units=1),
    "a unit too few a page": lambda runs: steps(runs, "destination_steps", units=-1),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_right_runs_are_proved(name: str):
    pair = PAIRS[name]
    pair.prove(pair.runs)
    STATES.prove(STATES.runs)


@pytest.mark.parametrize("pair", [*PAIRS, "states"])
@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_runs_are_found(fault: str, pair: str):
    case = PAIRS.get(pair, STATES)
    with pytest.raises(ProofError, match=rf"'{case.piece.component}' layer \[\d, \d\) head"):
        case.prove(FAULTS[fault](case.runs))


def test_swapped_sides_are_found():
    """Where both sides are laid out differently, what is right for one is wrong for the other."""
    pair = PAIRS["large pages to small"]
    runs = pair.runs
    for swapped in (
        loops(runs, lambda each: [Loop(one.count, one.destination_stride, one.source_stride) for one in each]),
        replace(runs, source_bases=runs.destination_bases, destination_bases=runs.source_bases),
        replace(runs, source_steps=runs.destination_steps, destination_steps=runs.source_steps),
    ):
        with pytest.raises(ProofError):
            pair.prove(swapped)


def test_axes_that_are_swapped_on_one_side_are_found():
    """Tokens for heads: of four tokens and four heads every run stays inside of the part."""
    component = K.component
    box = boxed(component, (0, 2), (0, 4))
    pair = Pair(Piece("k", box, 0, (0,)), shard_of(component, box, NHD, 4), shard_of(component, box, HND, 4), 4)
    pair.prove(pair.runs)
    one, other = pair.runs.loops
    crossed = (
        replace(one, destination_stride=other.destination_stride),
        replace(other, destination_stride=one.destination_stride),
    )
    with pytest.raises(ProofError, match="pairs different elements"):
        pair.prove(replace(pair.runs, loops=crossed))


@pytest.mark.parametrize("side", ["source_steps", "destination_steps"])
@pytest.mark.parametrize("by", [-ELEMENT, ELEMENT, 1])
def test_wrong_strides_of_units_are_found(side: str, by: int):
    for pair in PAIRS.values():
        if getattr(pair.runs, side).units > 1:
            with pytest.raises(ProofError, match="step from page to page"):
                pair.prove(steps(pair.runs, side, unit_stride=by))


def test_packed_pages_that_are_cut_are_found():
    (source,) = engine(order=PageOrder.PACKED, components=(K,))[0].shards
    piece = Piece("k", source.box, 0, (0,))
    prove_runs(piece, source, source, lower(source.box, source, source, unit_tokens=4), unit_tokens=4)
    with pytest.raises(ProofError, match="pages that cannot be cut between tokens are cut"):
        prove_runs(piece, source, source, lower(source.box, source, source, unit_tokens=2), unit_tokens=2)


def test_a_page_copied_whole_between_different_layouts_is_found():
    """Its first and last elements are in their places, all others are not."""
    box = K.component.whole
    pair = Pair(Piece("k", box, 0, (0,)), shard_of(K.component, box, NHD, 4), shard_of(K.component, box, HND, 4), 4)
    melted = replace(pair.runs, loops=(), length=4 * HEADS * DIM * ELEMENT)
    with pytest.raises(ProofError, match="pairs different elements"):
        pair.prove(melted)


def test_the_runs_of_another_piece_are_found():
    """Heads [0, 2) and [2, 4) are as large, and both are held."""
    box = K.component.whole
    source, destination = shard_of(K.component, box, NHD, 4), shard_of(K.component, box, HND, 4)
    first, second = (boxed(K.component, (0, LAYERS), heads) for heads in ((0, 2), (2, 4)))
    with pytest.raises(ProofError, match="another element than the first that is owed"):
        Pair(Piece("k", first, 0, (0,)), source, destination, 4).prove(
            lower(second, source, destination, unit_tokens=4)
        )


def test_wrong_runs_of_a_whole_plan_are_found(monkeypatch: pytest.MonkeyPatch):
    """Whatever piece has a wrong run, of whatever component."""
    sources, receivers = engine(3, components=HYBRID), engine(2, components=HYBRID, order=PageOrder.HND)
    pieces = prove(sources, receivers, room=0).pieces
    right = lower
    for wrong in range(pieces):
        calls = 0

        def faulty(*given: Any, **named: Any) -> Runs:
            nonlocal calls
            runs = right(*given, **named)
            calls += 1
            shift = ELEMENT if calls == wrong + 1 else 0  # noqa: B023 - called before the next round
            return replace(runs, destination_bases=shifted(runs.destination_bases, shift, 0))

        monkeypatch.setattr(proof, "lower", faulty)
        with pytest.raises(ProofError):
            prove(sources, receivers, room=0)


# --- nothing wrong is ever proved


def moves(runs: Runs, units: int) -> Counter[tuple[int, int]]:
    """From which address to which every element of so many units goes, in pages 0, 1, 2, ... of both sides."""
    found: Counter[tuple[int, int]] = Counter()
    for number in range(units):
        places = [
            number // side.units * side.page_stride + number % side.units * side.unit_stride
            for side in (runs.source_steps, runs.destination_steps)
        ]
        for here, there in zip(runs.source.tolist(), runs.destination.tolist(), strict=True):
            for byte in range(runs.length):
                found[here + places[0] + byte, there + places[1] + byte] += 1
    return found


def owed(pair: Pair, units: int) -> Counter[tuple[int, int]]:
    """The same by the definition in Shard's docstring."""

    def address(shard: Shard, position: int, index: tuple[int, ...]) -> int:
        held = [each - part.start for each, part in zip(index, shard.box, strict=True)]
        tokens = shard.paging.page_tokens
        place = shard.addresses[held[0]] + position // tokens * shard.paging.page_stride
        if shard.component.entry is Entry.TOKEN:
            place += position % tokens * shard.paging.token_stride
        return place + sum(each * stride for each, stride in zip(held[1:], shard.strides, strict=True))

    element = pair.source.component.element_bytes
    return Counter(
        (address(pair.source, position, index) + byte, address(pair.destination, position, index) + byte)
        for position in range(units * pair.unit_tokens)
        for index in product(*(range(part.start, part.stop) for part in pair.piece.box))
        for byte in range(element)
    )


SMALL = Component(name="k", axes=(Axis("layer", 3), Axis("head", 3), Axis("dim", 2)), dtype="int8")
parts_of_three = st.sampled_from([Interval(0, 1), Interval(1, 2), Interval(0, 2), Interval(1, 3), Interval(0, 3)])
wider = {0: st.just(0), 1: st.integers(0, 1), 2: st.integers(0, 2)}


@st.composite
def small_pairs(draw: st.DrawFn) -> Pair:
    layers, heads = draw(parts_of_three), draw(parts_of_three)
    box: Box = (layers, heads, Interval(0, 2))

    def held() -> Box:
        around = [
            Interval(draw(st.integers(0, part.start)), draw(st.integers(part.stop, 3))) for part in (layers, heads)
        ]
        return (*around, Interval(0, 2))

    def side(page_tokens: int) -> Shard:
        dims = draw(st.permutations(["page", "token", "head", "dim"]))
        dims.insert(draw(st.integers(0, 4)), "layer")
        return shard_of(SMALL, held(), dims, page_tokens, gap=draw(st.integers(0, 1)))

    unit = draw(st.integers(1, 2))
    source, destination = (side(unit * draw(st.integers(1, 2))) for _ in range(2))
    return Pair(Piece("k", box, 0, (0,)), source, destination, unit)


@st.composite
def changed(draw: st.DrawFn, runs: Runs) -> Runs:
    """Runs with some fields changed by a little."""
    by = st.integers(-3, 3)
    for field in draw(st.sets(st.sampled_from(["source_bases", "destination_bases", "loops", "length", "steps"]))):
        if field.endswith("bases"):
            values = getattr(runs, field)
            at = draw(st.integers(0, len(values) - 1))
            runs = replace(runs, **{field: shifted(values, draw(by), at)})
        elif field == "loops" and runs.loops:
            at = draw(st.integers(0, len(runs.loops) - 1))
            loop = runs.loops[at]
            other = Loop(
                max(0, loop.count + draw(by)),
                abs(loop.source_stride + draw(by)),
                abs(loop.destination_stride + draw(by)),
            )
            runs = replace(runs, loops=(*runs.loops[:at], *draw(st.sampled_from([[other], []])), *runs.loops[at + 1 :]))
        elif field == "length":
            runs = replace(runs, length=max(0, runs.length + draw(by)))
        elif field == "steps":
            side = draw(st.sampled_from(["source_steps", "destination_steps"]))
            runs = steps(runs, side, **{draw(st.sampled_from(["unit_stride", "page_stride"])): draw(by)})
    return runs


@settings(max_examples=examples(300))
@given(st.data())
def test_runs_are_proved_only_if_they_move_what_is_owed(data: st.DataObject):
    pair = data.draw(small_pairs())
    runs = data.draw(changed(pair.runs))
    try:
        pair.prove(runs)
    except ProofError:
        return
    assert moves(runs, units=4) == owed(pair, units=4)


@settings(max_examples=examples(200))
@given(small_pairs())
def test_lowered_runs_move_what_is_owed_and_are_proved(pair: Pair):
    pair.prove(pair.runs)
    assert moves(pair.runs, units=4) == owed(pair, units=4)


# --- 64 ranks a side and 128 layers


def large(
    *, tp: int = 1, pp: int = 1, partition: TokenPartition = EVERY_TOKEN, page_tokens: int = 16
) -> dict[int, RankLayout]:
    components = attention_components(num_layers=128, num_kv_heads=64, head_dim=128, dtype="bfloat16")
    return engine(
        tp,
        stages=even_stages(128, pp),
        partition=partition,
        page_tokens=page_tokens,
        components=[sharded(each, "head") for each in components],
    )


LARGE: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "tp to tp": ({"tp": 64}, {"tp": 64}, 64),
    "tp to uneven tp": ({"tp": 61}, {"tp": 64}, 128),
    "tp to one data-parallel rank": ({"tp": 64}, {}, 64),
    "pp to uneven pp": ({"pp": 64}, {"pp": 63}, 128),
    "pp to tp": ({"pp": 64}, {"tp": 64}, 64 * 64),
    "tp to pp with larger pages": ({"tp": 64}, {"pp": 64, "page_tokens": 64}, 64 * 64),
    "cp to the same cp": ({"partition": contiguous(64)}, {"partition": contiguous(64)}, 64),
    "contiguous to interleaved cp": ({"partition": contiguous(64)}, {"partition": interleaved(64)}, 64 * 64),
    "all at once": ({"tp": 4, "pp": 4, "partition": interleaved(4)}, {"tp": 8, "pp": 8}, 256),
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", LARGE)
def test_large_engines_are_proved_piece_by_piece(name: str, monkeypatch: pytest.MonkeyPatch):
    """The work grows with the pieces: each is looked at once, whatever the pools, pages, layers and tokens."""
    source, destination, most_pieces = LARGE[name]
    looked_at = 0
    right = prove_runs

    def counted(piece: Piece, *given: Any, **named: Any) -> None:
        nonlocal looked_at
        looked_at += 1
        right(piece, *given, **named)

    monkeypatch.setattr(proof, "prove_runs", counted)
    found = prove(large(**source), large(**destination), room=7)
    assert found.receivers == len(large(**destination))
    assert looked_at == found.pieces <= 2 * most_pieces


def test_layers_of_a_stage_are_one_piece():
    """A piece stands for all layers that the same ranks hold: 128 layers are no more work than 1."""
    assert prove(large(), large(), room=0).pieces == 2
    assert [len(split(128, 63, stage)) for stage in range(2)] == [2, 2]


@pytest.mark.parametrize("blocks", [(4096, 4096), (4096, 1024), (1 << 20, 1 << 20)])
def test_planner_and_proof_agree_on_the_parts_of_long_blocks(blocks: tuple[int, int]):
    sources, receivers = (
        engine(partition=interleaved(size, block)) for size, block in zip((8, 4), blocks, strict=True)
    )
    prove(sources, receivers, room=1)
