"""Chunks of some layers alone: the same pages once for each range of layers, and the next pages behind the last."""

from __future__ import annotations

import pytest
from tests.support.caches import Model, Shape, pool

from kvferry import RankCoordinates, RankLayout
from kvferry.errors import ChunkError
from kvferry.layout import Interval
from kvferry.plan.requests.chunks import Chunk, ChunkSequence, Layers
from kvferry.plan.requests.page_numbers import AnyPages

KEYS_AND_VALUES = Model(layers=4)
WITH_DRAFT = Model(layers=4, draft_layers=1)
LOW, HIGH = Interval(0, 2), Interval(2, 4)


def sequence_of(layout: RankLayout) -> ChunkSequence:
    return ChunkSequence(7, layout.groups, layout.shards)


def layout_of(model: Model, shape: Shape | None = None, coordinates: RankCoordinates | None = None) -> RankLayout:
    return pool(model, shape or Shape(), coordinates or RankCoordinates(), seed=0).layout


def hand_in(
    sequence: ChunkSequence,
    pages: AnyPages,
    layers: Layers | None = None,
    *,
    start: int | None = None,
    is_last: bool = False,
) -> Chunk:
    return sequence.hand_in(pages, start=start, is_last=is_last, aux=None, now=0.0, layers=layers).chunk()


def placed(chunk: Chunk) -> list[tuple[str, int, list[int]]]:
    return [(part.group, part.start, part.pages.tolist()) for part in chunk.parts]


def test_the_same_pages_come_once_for_each_range_and_in_any_order():
    sequence = sequence_of(layout_of(KEYS_AND_VALUES))
    for layers in (HIGH, LOW):
        assert placed(hand_in(sequence, [5, 6], layers)) == [("kv", 0, [5, 6])]
    made = [hand_in(sequence, [9], layers, is_last=layers is HIGH) for layers in (LOW, HIGH)]
    assert [placed(each) for each in made] == 2 * [[("kv", 2, [9])]]
    assert [each.number for each in made] == [2, 3]
    assert made[1].layers == {"k": HIGH, "v": HIGH}


def test_all_layers_may_come_together_before_or_after():
    sequence = sequence_of(layout_of(KEYS_AND_VALUES))
    hand_in(sequence, [1])
    hand_in(sequence, [2], LOW)
    hand_in(sequence, [2], HIGH)
    assert placed(hand_in(sequence, [3], is_last=True)) == [("kv", 2, [3])]


def test_a_request_may_begin_behind_what_the_other_side_has():
    sequence = sequence_of(layout_of(KEYS_AND_VALUES))
    hand_in(sequence, [1], LOW, start=4)
    assert placed(hand_in(sequence, [1], HIGH)) == [("kv", 4, [1])]
    assert placed(hand_in(sequence, [2], is_last=True)) == [("kv", 5, [2])]


@pytest.mark.parametrize(
    ("pages", "layers", "is_last", "message"),
    [
        ([5], LOW, False, r"room 7, group 'kv': layers \[0, 1\] of 'k' of pages 0 to 1 were handed in already"),
        ([5], Interval(1, 3), False, r"layers \[1\] of 'k' of pages 0 to 1 were handed in already"),
        ([5], None, False, r"layers \[0, 1\] of 'k' of pages 0 to 1 were handed in already"),
        (
            [5, 6],
            HIGH,
            False,
            r"pages 0 to 2 of the request where layers \[2, 3\] of 'k' and layers \[2, 3\] of 'v' of pages 0 to 1 come",
        ),
        (
            [],
            None,
            True,
            r"room 7: the last chunk comes before layers \[2, 3\] of 'k' and layers \[2, 3\] of 'v' of pag",
        ),
        ([5], Interval(2, 3), True, r"the last chunk comes before layers \[3\] of 'k'"),
        ([5], Interval(2, 9), False, r"room 7: layers \[2, 9\) of 'k', which has 4"),
        ([5], {"w": HIGH}, False, r"room 7: layers of 'w': this rank's components are \['k', 'v'\]"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    pages: list[int], layers: Layers | None, is_last: bool, message: str
):
    sequence = sequence_of(layout_of(KEYS_AND_VALUES))
    hand_in(sequence, [5], LOW)
    with pytest.raises(ChunkError, match=message):
        hand_in(sequence, pages, layers, is_last=is_last)
    assert placed(hand_in(sequence, [5], HIGH, is_last=True)) == [("kv", 0, [5])]
    with pytest.raises(ChunkError, match="a chunk after the last one"):
        hand_in(sequence, [6], LOW)


def test_components_with_other_numbers_of_layers_are_named():
    sequence = sequence_of(layout_of(WITH_DRAFT))
    with pytest.raises(ChunkError, match=r"have different numbers of them, .*'draft k': 1.*: say which layers of each"):
        hand_in(sequence, [5], LOW)
    model, draft = {"k": Interval(0, 4), "v": Interval(0, 4)}, {"draft k": Interval(0, 1), "draft v": Interval(0, 1)}
    hand_in(sequence, [5], model)
    assert hand_in(sequence, [5], draft, is_last=True).layers == draft


def test_a_stage_leaves_out_layers_that_it_does_not_have():
    layout = layout_of(KEYS_AND_VALUES, Shape(pp=2), RankCoordinates(pp_rank=1, pp_size=2))
    sequence = sequence_of(layout)
    assert placed(hand_in(sequence, [5], LOW)) == []
    assert placed(hand_in(sequence, [5], HIGH, is_last=True)) == [("kv", 0, [5])]


def test_a_group_without_such_layers_is_left_out():
    model = Model(layers=4, window_tokens=8)  # layers 1 and 3 have windows, and a group of their own
    layout = layout_of(model)
    sequence, pages = sequence_of(layout), {group.name: [5] for group in layout.groups}
    full, window = (group.name for group in layout.groups)
    ranges = {"k": LOW, "v": LOW}, {"window k": Interval(0, 2), "window v": Interval(0, 2)}
    assert placed(hand_in(sequence, pages, {name: Interval(0, 1) for name in ranges[0]})) == [(full, 0, [5])]
    assert placed(hand_in(sequence, pages, ranges[1])) == [(window, 0, [5])]
    assert placed(hand_in(sequence, pages, {name: Interval(1, 2) for name in ranges[0]}, is_last=True)) == [
        (full, 0, [5])
    ]
