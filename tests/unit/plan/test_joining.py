"""Ranges of layers, and pages that follow each other, that become one chunk: all of it, and nothing else."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from tests.support.caches import Model, Shape, pool

from kvferry import GroupPages, RankCoordinates
from kvferry.layout import Interval
from kvferry.plan.requests.chunks import (
    Chunk,
    ChunkPart,
    ChunkSequence,
    HandedIn,
    components_by_group,
    joined,
    take_together,
)

LAYERS = 6
LAYOUTS = [
    pool(model, Shape(), RankCoordinates(), seed=0).layout
    for model in (Model(layers=LAYERS), Model(layers=LAYERS, window_tokens=8, has_state=True))
]


def contents(chunks: list[HandedIn], components: Mapping[str, frozenset[str]]) -> set[tuple[str, str, int, int, int]]:
    """Every layer of every page: group, component, layer, position and page."""
    found = set()
    for handed_in in chunks:
        chunk = handed_in.chunk()
        assert chunk.layers is not None
        for part in chunk.parts:
            for name in components[part.group] & chunk.layers.keys():
                for layer in range(chunk.layers[name].start, chunk.layers[name].stop):
                    for number, page in enumerate(part.pages.tolist(), start=part.start):
                        entry = part.group, name, layer, number, page
                        assert entry not in found
                        found.add(entry)
    return found


def all_joined(chunks: list[HandedIn], components: Mapping[str, frozenset[str]]) -> list[HandedIn]:
    made: list[HandedIn] = []
    for chunk in chunks:
        together = joined(made[-1], chunk, components) if made else None
        if together is None:
            made.append(chunk)
        else:
            made[-1] = together
    return made


@given(some.data())
def test_joined_chunks_hold_what_their_parts_hold(data: some.DataObject):
    layout = data.draw(some.sampled_from(LAYOUTS))
    components, groups = components_by_group(layout.shards), {group.name: group for group in layout.groups}
    totals = {component.name: component.axes[0].size for component in layout.components}
    sequence, chunks = ChunkSequence(1, layout.groups, layout.shards), list[HandedIn]()
    for step in range(data.draw(some.integers(1, 3))):
        is_last = data.draw(some.booleans())
        pages = {name: [3 * step, 3 * step + 1] for name, group in groups.items() if not group.has_slots}
        if is_last:
            pages |= {name: [0] for name, group in groups.items() if group.has_slots}
        ranges: list[dict[str, Interval]] = [{} for _ in range(data.draw(some.integers(1, 4)))]
        for name in sorted({name for group in pages for name in components[group]}):
            inner = data.draw(
                some.lists(some.integers(0, totals[name]), min_size=len(ranges) - 1, max_size=len(ranges) - 1)
            )
            for part, (low, high) in zip(ranges, pairwise([0, *sorted(inner), totals[name]]), strict=True):
                if low < high:
                    part[name] = Interval(low, high)
        ranges = data.draw(some.permutations([part for part in ranges if part]))
        for number, layers in enumerate(ranges):
            ends = is_last and number == len(ranges) - 1
            chunks.append(sequence.hand_in(pages, start=None, is_last=ends, aux=None, now=0.0, layers=layers))
        if is_last:
            break
    made = all_joined(chunks, components)
    assert contents(made, components) == contents(chunks, components)
    assert made[-1].is_last == chunks[-1].is_last
    assert [each.number for each in made] == sorted(each.number for each in made)


def handed_in(*ranges: tuple[int, int], pages: tuple[int, ...] = (4, 5)) -> list[HandedIn]:
    layout = LAYOUTS[0]
    sequence = ChunkSequence(1, layout.groups, layout.shards)
    return [
        sequence.hand_in(list(pages), start=None, is_last=False, aux=None, now=float(low), layers=Interval(low, high))
        for low, high in ranges
    ]


def test_ranges_that_follow_each_other_are_one_chunk_with_the_first_ones_number():
    made = all_joined(handed_in((0, 2), (2, 3), (3, LAYERS)), components_by_group(LAYOUTS[0].shards))
    assert [(each.number, each.layers, each.completes) for each in made] == [
        (0, {"k": Interval(0, LAYERS), "v": Interval(0, LAYERS)}, True)
    ]


def test_ranges_may_come_from_the_last_layer_to_the_first():
    made = all_joined(handed_in((4, LAYERS), (2, 4), (0, 2)), components_by_group(LAYOUTS[0].shards))
    assert [each.layers for each in made] == [{"k": Interval(0, LAYERS), "v": Interval(0, LAYERS)}]


@pytest.mark.parametrize("ranges", [((0, 2), (3, LAYERS)), ((4, LAYERS), (0, 2))])
def test_ranges_with_a_gap_between_them_stay_apart(ranges: tuple[tuple[int, int], ...]):
    chunks = handed_in(*ranges)
    assert all_joined(chunks, components_by_group(LAYOUTS[0].shards)) == chunks


def test_layers_of_the_next_pages_stay_apart():
    layout = LAYOUTS[0]
    sequence = ChunkSequence(1, layout.groups, layout.shards)
    chunks = [
        sequence.hand_in([page], start=None, is_last=False, aux=None, now=0.0, layers=Interval(low, high))
        for page in (4, 5)
        for low, high in ((0, 3), (3, LAYERS))
    ]
    assert [each.number for each in all_joined(chunks, components_by_group(layout.shards))] == [0, 2]


def windows_chunks(*given: tuple[dict[str, list[int]], dict[str, tuple[int, int]]]) -> list[HandedIn]:
    """Chunks of a layout that has layers with windows, too: pages by group, and ranges by component."""
    layout = LAYOUTS[1]
    sequence = ChunkSequence(1, layout.groups, layout.shards)
    return [
        sequence.hand_in(
            pages,
            start=None,
            is_last=False,
            aux=None,
            now=0.0,
            layers={name: Interval(*part) for name, part in layers.items()},
        )
        for pages, layers in given
    ]


def test_layers_that_one_group_lacks_pages_of_are_not_taken_for_handed_in():
    first, second = windows_chunks(
        ({"kv": [1]}, {"k": (0, 1), "v": (0, 3), "window k": (0, 1)}),
        ({"kv": [1], "window-8": [2]}, {"k": (1, 3), "window k": (1, 3)}),
    )
    assert joined(first, second, components_by_group(LAYOUTS[1].shards)) is None


def test_the_next_pages_of_a_group_that_is_further_stay_apart():
    every = {"k": (0, 1), "v": (0, 3), "window k": (0, 1)}
    _, second, third = windows_chunks(
        ({"kv": [1], "window-8": [2]}, every),
        ({"kv": [1], "window-8": [2]}, {"k": (1, 3)}),
        ({"kv": [3], "window-8": [2]}, {"k": (0, 1), "window k": (1, 3)}),
    )
    assert not second.completes
    assert joined(second, third, components_by_group(LAYOUTS[1].shards)) is None


def test_what_a_request_has_once_joins_its_last_layers():
    state = dict.fromkeys(("state", "conv q", "conv k", "conv v"), (0, LAYERS))
    first, second = windows_chunks(
        ({"kv": [1]}, {"k": (0, 2), "v": (0, 2)}),
        ({"kv": [1], "state": [2]}, {"k": (2, 3), "v": (2, 3), **state}),
    )
    components = components_by_group(LAYOUTS[1].shards)
    together = joined(first, second, components)
    assert together is not None
    assert together.completes
    assert contents([together], components) == contents([first, second], components)


# ---- pages that follow each other ------------------------------------------------------------------------------------


def all_together(chunks: list[Chunk], most_pages: int) -> list[Chunk]:
    waiting, made = deque(chunks), list[Chunk]()
    while waiting:
        made.append(take_together(waiting, most_pages))
    return made


def pages_of(chunks: list[Chunk]) -> dict[str, list[tuple[int, int]]]:
    """By group: positions and page numbers, in order."""
    found: dict[str, list[tuple[int, int]]] = {}
    for chunk in chunks:
        for part in chunk.parts:
            found.setdefault(part.group, []).extend(enumerate(part.pages.tolist(), start=part.start))
    return found


@given(some.lists(some.tuples(some.integers(0, 3), some.integers(0, 3), some.integers(0, 2)), min_size=1, max_size=6))
def test_chunks_are_joined_as_far_as_their_pages_follow_each_other(given: list[tuple[int, int, int]]):
    """Of each chunk: how many pages of either group it has, and how many of a window are left out before it."""
    layout = LAYOUTS[1]
    sequence, chunks, position, leaves_out = ChunkSequence(1, layout.groups, layout.shards), list[Chunk](), 0, False
    for number, (of_all, of_window, skipped) in enumerate(given):
        leaves_out |= number > 0 and skipped > 0 and of_window > 0
        position += skipped if of_window else 0
        windows = GroupPages(list(range(100, 100 + of_window)), start=position if of_window else None)
        pages = {"kv": GroupPages(list(range(10 * number, 10 * number + of_all))), "window-8": windows}
        is_last = number == len(given) - 1
        position += of_window
        chunks.append(sequence.hand_in(pages, start=None, is_last=is_last, aux=b"t" * is_last, now=0.0).chunk())
    for most_pages in (1, 4, 100):
        made = all_together(chunks, most_pages)
        assert pages_of(made) == pages_of(chunks)
        assert (made[-1].is_last, made[-1].aux, made[0].number) == (True, b"t", 0)
        assert all(chunk.num_pages <= most_pages or chunk in chunks for chunk in made)
    assert (len(made) > 1) == leaves_out


def one(start: int, page: int, **other: Any) -> Chunk:
    return Chunk(number=start, parts=(ChunkPart("kv", start, np.array([page])),), is_last=False, **other)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (one(0, 7), one(2, 8)),
        (one(0, 7), one(1, 8, token_part=1)),
        (one(0, 7), one(1, 8, layers={"k": Interval(0, LAYERS)})),
        (one(0, 7, layers={"k": Interval(0, LAYERS)}), one(1, 8)),
    ],
    ids=["a gap", "of another part of the tokens", "some layers behind all", "some layers before all"],
)
def test_chunks_that_do_not_go_on_where_the_first_ends_stay_apart(first: Chunk, second: Chunk):
    assert all_together([first, second], 100) == [first, second]
