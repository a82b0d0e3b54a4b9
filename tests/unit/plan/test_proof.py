"""The proof accepts right plans and finds planted faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import IncompatiblePeerError
from kvferry.layout import Interval, RankLayout, attention_components, shard_from_tensors, split
from kvferry.plan import Piece, Proof, Runs, lower, pieces_for_receiver, proof, prove, prove_receiver
from kvferry.plan.proof import ProofError

NHD, HND = ("page", "token", "head", "dim"), ("page", "head", "token", "dim")
LAYERS, HEADS, DIM, TOKENS, PAGES = 2, 6, 3, 4, 2
COMPONENTS = attention_components(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype="int16")


def engine(tp: int, dims: tuple[str, ...] = NHD) -> dict[int, RankLayout]:
    layouts = {}
    for rank in range(tp):
        heads = split(HEADS, tp, rank)
        sizes = {"page": PAGES, "token": TOKENS, "head": len(heads), "dim": DIM}
        shards = []
        for component in COMPONENTS:
            tensors = [np.zeros([sizes[name] for name in dims], np.int16) for _ in range(LAYERS)]
            KEPT.extend(tensors)
            shards.append(shard_from_tensors(component, tensors, dims=dims, held={"head": heads}))
        layouts[rank] = RankLayout(shards=tuple(shards))
    return layouts


# Nothing reads the memory, but while it is kept no two pools have one address.
KEPT: list[Any] = []


@pytest.mark.parametrize("dims", [NHD, HND])
@pytest.mark.parametrize(("tp", "other"), [(1, 1), (3, 2), (2, 3), (4, 5), (12, 2), (2, 12)])
def test_right_plans_are_proved(tp: int, other: int, dims: tuple[str, ...]):
    found = prove(engine(tp), engine(other, dims), room=5)
    per_receiver = [len(split(HEADS, other, rank)) for rank in range(other)]
    assert found.receivers == other
    assert found.bytes_per_token == sum(per_receiver) * LAYERS * DIM * 2 * len(COMPONENTS)
    assert found.pieces >= other * len(COMPONENTS)


def test_one_receiver_can_be_proved_alone():
    sources, receivers = engine(3), engine(2)
    pieces = pieces_for_receiver(sources, receivers[0])
    found = prove_receiver(sources, receivers[0], pieces, room=1, receiver=0)
    assert found == Proof(receivers=1, pieces=4, bytes_per_token=3 * LAYERS * DIM * 2 * 2)


def test_sources_that_lack_something_are_no_defect_of_the_plan():
    sources = engine(3)
    del sources[1]
    with pytest.raises(IncompatiblePeerError):
        prove(sources, engine(2), room=0)


# --- wrong pieces


def plan(change: Callable[[list[Piece]], list[Piece]]) -> None:
    sources, receivers = engine(3), engine(2, HND)
    pieces = change(list(pieces_for_receiver(sources, receivers[0])))
    prove_receiver(sources, receivers[0], tuple(pieces), room=0, receiver=0)


def moved(piece: Piece, axis: int, start: int, stop: int) -> Piece:
    box = [*piece.box]
    box[axis] = Interval(box[axis].start + start, box[axis].stop + stop)
    return Piece(piece.component, tuple(box), piece.holders)


def test_the_unchanged_plan_passes():
    plan(lambda pieces: pieces)


@pytest.mark.parametrize("index", range(4))
def test_a_dropped_piece_is_found(index: int):
    with pytest.raises(ProofError, match=r"'[kv]': \d+ of 18 elements a token are never written"):
        plan(lambda pieces: pieces[:index] + pieces[index + 1 :])


@pytest.mark.parametrize("index", range(4))
def test_a_repeated_piece_is_found(index: int):
    with pytest.raises(ProofError, match=r"'[kv]' .* and '[kv]' .* write the same elements"):
        plan(lambda pieces: [*pieces, pieces[index]])


def test_pieces_that_overlap_are_found():
    with pytest.raises(ProofError, match="write the same elements"):
        plan(lambda pieces: [moved(pieces[0], 1, 0, 1), *pieces[1:]])


def test_a_piece_that_is_too_short_is_found():
    with pytest.raises(ProofError, match="6 of 18 elements a token are never written"):
        plan(lambda pieces: [moved(pieces[0], 1, 0, -1), *pieces[1:]])


def test_a_piece_that_leaves_the_receivers_part_is_found():
    with pytest.raises(ProofError, match="leaves the receiver's part"):
        plan(lambda pieces: [pieces[0], moved(pieces[1], 1, 1, 1), *pieces[2:]])


def test_a_writer_that_does_not_hold_its_piece_is_found():
    with pytest.raises(ProofError, match=r"rank 2 was elected to send 'k' .* but does not hold it"):
        plan(lambda pieces: [Piece(pieces[0].component, pieces[0].box, (2,)), *pieces[1:]])


def test_an_election_of_a_stranger_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(proof, "elect_writer", lambda piece, *, room, receiver: (max(piece.holders) + 1) % 3)
    with pytest.raises(ProofError, match="was elected to send"):
        plan(lambda pieces: pieces)


# --- wrong runs


def swapped(values: Any, one: int = 0, other: int = -1) -> Any:
    values = values.copy()
    values[one], values[other] = values[other], values[one]
    return values


def shifted(values: Any, by: int, at: int | slice = slice(None)) -> Any:
    values = values.copy()
    values[at] = (values[at].astype(np.int64) + by).astype(np.uint64)
    return values


def regrouped(runs: Runs, elements: int, *, by_last: bool = False) -> Runs:
    """The same elements in runs of another length that ignore where rows end, right at their first or last element."""
    within = np.arange(0, runs.length, ELEMENT, dtype=np.uint64)
    each = (np.add.outer(starts, within).ravel() for starts in (runs.source, runs.destination))
    if by_last:
        source, destination = (shifted(every[elements - 1 :: elements], (1 - elements) * ELEMENT) for every in each)
    else:
        source, destination = (every[::elements] for every in each)
    return replace(runs, source=source, destination=destination, length=elements * ELEMENT)


ELEMENT = 2
FAULTS: dict[str, Callable[[Runs], Runs]] = {
    "swapped destinations": lambda runs: replace(runs, destination=swapped(runs.destination)),
    "swapped sources": lambda runs: replace(runs, source=swapped(runs.source)),
    "two neighbours swapped": lambda runs: replace(runs, destination=swapped(runs.destination, 0, 1)),
    "a rotated source": lambda runs: replace(runs, source=np.roll(runs.source, 1)),
    "all sources an element on": lambda runs: replace(runs, source=shifted(runs.source, ELEMENT)),
    "all destinations an element on": lambda runs: replace(runs, destination=shifted(runs.destination, ELEMENT)),
    "both an element on": lambda runs: replace(
        runs, source=shifted(runs.source, ELEMENT), destination=shifted(runs.destination, ELEMENT)
    ),
    "both an element back": lambda runs: replace(
        runs, source=shifted(runs.source, -ELEMENT), destination=shifted(runs.destination, -ELEMENT)
    ),
    "the last run an element on": lambda runs: replace(runs, source=shifted(runs.source, ELEMENT, -1)),
    "a run half an element on": lambda runs: replace(runs, source=shifted(runs.source, 1, -1)),
    "a run outside of the pool": lambda runs: replace(runs, destination=shifted(runs.destination, 10**6, -1)),
    "a run before the pool": lambda runs: replace(runs, destination=shifted(runs.destination, -(10**6), 0)),
    "a run twice": lambda runs: replace(
        runs,
        source=np.append(runs.source[:-1], runs.source[0]),
        destination=np.append(runs.destination[:-1], runs.destination[0]),
    ),
    "a run too many": lambda runs: replace(
        runs,
        source=np.append(runs.source, runs.source[0]),
        destination=np.append(runs.destination, runs.destination[0]),
    ),
    "a run too few": lambda runs: replace(runs, source=runs.source[:-1], destination=runs.destination[:-1]),
    "no runs": lambda runs: replace(runs, source=runs.source[:0], destination=runs.destination[:0]),
    "fewer sources than destinations": lambda runs: replace(runs, destination=runs.destination[:-1]),
    "runs too long": lambda runs: replace(runs, length=runs.length + ELEMENT),
    "runs too short": lambda runs: replace(runs, length=runs.length - ELEMENT),
    "half as many runs of twice the length": lambda runs: replace(
        runs, source=runs.source[::2], destination=runs.destination[::2], length=2 * runs.length
    ),
    "runs across the end of a row": lambda runs: regrouped(runs, 2),
    "runs that start in the row before": lambda runs: regrouped(runs, 2, by_last=True),
    "swapped page strides": lambda runs: replace(
        runs, source_page_stride=runs.destination_page_stride, destination_page_stride=runs.source_page_stride
    ),
    "a source page stride too short": lambda runs: replace(runs, source_page_stride=runs.source_page_stride - ELEMENT),
    "a destination page stride too long": lambda runs: replace(
        runs, destination_page_stride=runs.destination_page_stride + ELEMENT
    ),
}


@pytest.mark.parametrize("dims", [NHD, HND])
@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_runs_are_found(fault: str, dims: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    sources, receivers = engine(3, NHD), engine(2, dims)
    prove(sources, receivers, room=0)
    right = lower
    monkeypatch.setattr(proof, "lower", lambda *arguments: FAULTS[fault](right(*arguments)))
    with pytest.raises(ProofError):
        prove(sources, receivers, room=0)


def test_a_page_copied_whole_between_different_layouts_is_found(monkeypatch: pytest.MonkeyPatch):
    """Its first and last elements are in their places, all others are not."""
    sources, receivers = engine(1, NHD), engine(1, HND)

    def melted(box: Any, source: Any, destination: Any) -> Runs:
        right = lower(box, source, destination)
        return replace(
            right,
            source=np.array(source.addresses, np.uint64),
            destination=np.array(destination.addresses, np.uint64),
            length=TOKENS * HEADS * DIM * ELEMENT,
        )

    monkeypatch.setattr(proof, "lower", melted)
    with pytest.raises(ProofError, match="pairs different elements"):
        prove(sources, receivers, room=0)


def test_the_right_bytes_of_another_piece_are_found(monkeypatch: pytest.MonkeyPatch):
    """Two pieces tile the receiver, but the runs of the first are those of the second."""
    sources, receivers = engine(1), engine(1)
    first, second = (
        (Interval(0, LAYERS), heads, Interval(0, DIM))
        for heads in (Interval(0, HEADS // 2), Interval(HEADS // 2, HEADS))
    )
    pieces = tuple(Piece(name, box, (0,)) for name in ("k", "v") for box in (first, second))
    prove_receiver(sources, receivers[0], pieces, room=0, receiver=0)
    monkeypatch.setattr(proof, "lower", lambda box, source, destination: lower(second, source, destination))
    with pytest.raises(ProofError, match="leaves the part that is owed"):
        prove_receiver(sources, receivers[0], pieces, room=0, receiver=0)


@given(st.data())
def test_any_change_of_a_single_run_is_found(data: st.DataObject):
    """Whatever run of whatever piece starts somewhere else on either side, the proof fails."""
    sources, receivers = SOURCES, RECEIVERS
    side = data.draw(st.sampled_from(["source", "destination"]))
    by = data.draw(st.integers(-300, 300).filter(bool))
    number, at = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 500))
    right, calls = lower, 0

    def wrong(*arguments: Any) -> Runs:
        nonlocal calls
        runs = right(*arguments)
        calls += 1
        if calls - 1 != number:
            return runs
        values = getattr(runs, side)
        return replace(runs, **{side: shifted(values, by, at % len(values))})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "lower", wrong)
        with pytest.raises(ProofError):
            prove(sources, receivers, room=0)
    assert calls > number


SOURCES, RECEIVERS = engine(3, NHD), engine(2, HND)
