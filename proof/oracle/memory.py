"""What every rank must hold before and after, by definition, byte by byte. Nothing here comes from `kvferry.plan`.

Every byte of every logical element (component, room, layer, token, head, dim, ...) has a label of its own. Each rank
has its memory twice: the bytes themselves, which a transport moves, and a label for each of them, which the test moves.
The bytes are a hash of the labels, so that types of any width hold them; poisons are labels that no element has.

Which heads, layers and tokens a rank holds is asked head by head, layer by layer and token by token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvferry.layout import Component, Entry, ShardedComponent
from proof.oracle.cases import Arrangement, Case, Context, Family, Room, Side

SOURCE_POISON, DESTINATION_POISON = -2, -1
UNTOUCHED, FREE, DUE = 0, 1, 2
"""What may become of a byte: nothing, its own value if kvferry likes to widen its writes, or nothing but its value."""

_KEYS = 1 << 12
_BEYOND = 1 << 10  # keys of what a rank counts behind the end of a request that is partitioned in one cycle

Labels: TypeAlias = NDArray[np.int64]


# --- who holds what


def holds(index: int, size: int, parts: int, part: int) -> bool:
    """Whether a rank holds an index of an axis that its engine splits: as even as possible, else replicated."""
    if parts <= size:
        # Index i ends at (i + 1) / size of the axis, which lies in (part / parts, (part + 1) / parts].
        return part * size < (index + 1) * parts <= (part + 1) * size
    return index * parts <= part * size < (index + 1) * parts


def owner(context: Context, position: int, tokens: int) -> int | None:
    """The rank of context parallelism that has a token position of a request; None beyond the only cycle."""
    match context.kind:
        case "interleaved":
            return position // context.block % context.size
        case "contiguous":
            part = position // -(-tokens // context.size)
            return part if part < context.size else None
        case "whole pages":
            # Page by page: of what does not divide evenly the first ranks have one more.
            pages = -(-tokens // context.block)
            owners = [part for part in range(context.size) for page in range(pages) if page % context.size == part]
            page = position // context.block
            return owners[page] if page < pages else None
        case _:
            slice_ = position // -(-tokens // (2 * context.size))
            if slice_ < context.size:
                return slice_
            return 2 * context.size - 1 - slice_ if slice_ < 2 * context.size else None


@lru_cache(maxsize=4096)
def held_positions(context: Context, part: int, tokens: int, count: int) -> tuple[int, ...]:
    """The first positions of a rank, in ascending order; behind the only cycle, numbers that mean no position."""
    if context.size == 1:
        return tuple(range(count))
    held: list[int] = []
    position = 0
    while len(held) < count and (who := owner(context, position, tokens)) is not None:
        if who == part:
            held.append(position)
        position += 1
    return (*held, *(_BEYOND * (1 + part) + local for local in range(len(held), count)))


@lru_cache(maxsize=4096)
def count_before(context: Context, part: int, tokens: int, position: int) -> int:
    """How many positions before one a rank has."""
    if context.size == 1:
        return position
    return sum(owner(context, each, tokens) == part for each in range(position))


# --- logical elements


class Elements:
    """Labels of all bytes of all elements."""

    def __init__(self, case: Case) -> None:
        self._first: dict[tuple[str, int], int] = {}
        first = 0
        for family in case.families:
            for cache in family.caches:
                for room in range(len(case.rooms)):
                    self._first[cache.component.name, room] = first
                    shape = [axis.size for axis in cache.component.axes]
                    first += prod(shape) * _KEYS * cache.component.element_bytes

    def labels(
        self, component: Component, room: int, layers: Sequence[int], keys: Labels, indices: Sequence[Sequence[int]]
    ) -> Labels:
        """Labels of shape [layers, *keys, *indices, bytes of an element]."""
        numbers = np.array(layers, np.int64)
        parts = [keys, *(np.array(each, np.int64) for each in indices)]
        sizes = [_KEYS, *(axis.size for axis in component.axes[1:])]
        for part, size in zip(parts, sizes, strict=True):
            numbers = np.add.outer(numbers * size, part)
        width = component.element_bytes
        labels: Labels = self._first[component.name, room] + np.add.outer(numbers * width, np.arange(width))
        return labels

    def describe(self, case: Case, label: int) -> str:
        """What a label is of."""
        if label < 0:
            return "the source's poison" if label == SOURCE_POISON else "the receiver's poison"
        name, room = max((each for each in self._first if self._first[each] <= label), key=self._first.__getitem__)
        caches = [cache for family in case.families for cache in family.caches]
        component = next(cache.component for cache in caches if cache.component.name == name)
        axes = component.axes
        sizes = [axes[0].size, _KEYS, *(axis.size for axis in axes[1:]), component.element_bytes]
        names = [axes[0].name, "token", *(axis.name for axis in axes[1:]), "byte"]
        where = np.unravel_index(label - self._first[name, room], sizes)
        return f"{name!r} of room {room}, " + " ".join(f"{n} {int(i)}" for n, i in zip(names, where, strict=True))


def hashed(labels: Labels) -> NDArray[np.uint8]:
    """The byte that stands for a label."""
    return (((labels + 3) * 0x9E3779B1) >> 13).astype(np.uint8)


# --- memory


@dataclass(eq=False)
class Field:
    """One component's layers of one group on one rank.

    Attributes:
        layers: by their indices in the component.
        indices: of every further axis, which the rank holds.
        offsets: where the first byte of each layer is.
        shape, strides: by the names of dimensions; a page, a token, and the axes.
    """

    family: Family
    cache: ShardedComponent
    group: str
    layers: list[int]
    indices: list[list[int]]
    dims: tuple[str, ...]
    offsets: list[int]
    shape: dict[str, int]
    strides: dict[str, int]

    @cached_property
    def places(self) -> Labels:
        """Where every byte is: shape [layers, pages, entries, *axes, bytes of an element]."""
        places = np.array(self.offsets, np.int64)
        for name in ("page", "token", *self.family.axes):
            places = np.add.outer(places, np.arange(self.shape.get(name, 1)) * self.strides.get(name, 0))
        return np.add.outer(places, np.arange(self.cache.component.element_bytes))


@dataclass(frozen=True)
class Given:
    """Pages of one group that a room has on one rank.

    Attributes:
        start: how many pages come before them.
        pages: their numbers.
        positions: of every entry of every page, shape [pages, tokens of a page].
        rules: what may become of each.
    """

    start: int
    pages: list[int]
    positions: Labels
    rules: NDArray[np.int8]


class Memory:
    """One rank's memory."""

    def __init__(self, case: Case, side: Side, place: tuple[int, int, int], *, is_source: bool) -> None:
        """Args:
        place: the rank's tensor-parallel and context-parallel rank, and its stage.
        """
        self.case, self.side, self.is_source = case, side, is_source
        self.tp_rank, self.part, self.stage = place
        self.poison = SOURCE_POISON if is_source else DESTINATION_POISON
        self._stage_layers = [
            layer for stage, count in enumerate(side.stages) for layer in [stage] * count
        ]  # the stage of every model layer
        self._size = 0
        self._storages: dict[object, list[tuple[int, set[str]]]] = {}
        self._groups: dict[str, tuple[Family, int]] = {}
        self.empty: list[tuple[Family, ShardedComponent]] = []
        held = [(family, *self._held(family)) for family in case.families_of(side)]
        for family, by_group, _ in held:
            for group in by_group or [side.group_of(family, 0)]:
                self._groups.setdefault(group, (family, side.page_tokens_of(family)))
        self.given: dict[str, list[Given]] = {group: [] for group in self._groups}
        self.num_pages = self._hand_out_pages()
        self.fields: list[Field] = []
        for family, by_group, indices in held:
            if not by_group:
                self.empty += [(family, cache) for cache in family.caches]
            for group, layers in by_group.items():
                self._store(family, group, layers, indices)
        self.buffer = np.zeros(max(1, self._size), np.uint8)
        self.labels = np.full(len(self.buffer), self.poison, np.int64)

    def _held(self, family: Family) -> tuple[dict[str, list[int]], list[list[list[int]]]]:
        """The layers of a family, by group, and the indices of every component's further axes."""
        by_group: dict[str, list[int]] = {}
        for index, layer in enumerate(family.caches[0].layers):
            if self._stage_layers[layer] == self.stage:
                by_group.setdefault(self.side.group_of(family, index), []).append(index)
        tp, rank = self.side.tp, self.tp_rank
        indices = [
            [
                [i for i in range(axis.size) if axis.name != cache.tp_axis or holds(i, axis.size, tp, rank)]
                for axis in cache.component.axes[1:]
            ]
            for cache in family.caches
        ]
        return by_group, indices

    # --- pages

    def _hand_out_pages(self) -> dict[str, int]:
        """Gives every room its pages; returns how many every group's pools have."""
        wanted = {
            group: [self._plan(family, page_tokens, room) for room in self.case.rooms]
            for group, (family, page_tokens) in self._groups.items()
        }
        pools: dict[object, list[str]] = {}
        for group, (family, _) in self._groups.items():
            pools.setdefault(family.entry is Entry.REQUEST if self.side.aliases else group, []).append(group)
        num_pages: dict[str, int] = {}
        for groups in pools.values():
            count = self.side.spare_pages + sum(len(each[1]) for group in groups for each in wanted[group])
            free = list(range(max(1, count)))
            if self.side.seed:
                random.Random(self.side.seed + self.tp_rank + 7 * self.stage + 49 * self.part).shuffle(free)
            for room in range(len(self.case.rooms)):
                for group in groups:
                    start, positions, rules = wanted[group][room]
                    mine, free = free[: len(positions)], free[len(positions) :]
                    self.given[group].append(Given(start, mine, positions, rules))
            num_pages |= dict.fromkeys(groups, max(1, count))
        return num_pages

    def _plan(self, family: Family, page_tokens: int, room: Room) -> tuple[int, Labels, NDArray[np.int8]]:
        """The pages that a room takes of a group: where they start, their positions and rules."""
        if family.entry is Entry.REQUEST:
            count = 1 if self.is_source or room.wants_state else 0
            return 0, np.zeros((count, 1), np.int64), np.full((count, 1), DUE, np.int8)
        context, tokens = self.side.context, room.tokens
        needed = start_of_needs(room, family.window)
        first_page, low = first_page_and_start(room, family.window, page_tokens)
        high = count_before(context, self.part, tokens, tokens)
        if self.is_source:
            late = late_start(self.case, room, family.window)
            start = count_before(context, self.part, tokens, late) // page_tokens if room.begins_late else 0
        elif room.says_length:
            before = count_before(context, self.part, tokens, needed)
            start = 0 if room.begins_early else before // page_tokens
            high = 0 if before == high else high  # where nothing is due, no page is given
        else:
            start = first_page
            high = 0 if low >= tokens else high
        stop = max(start, -(-high // page_tokens))
        held = held_positions(context, self.part, tokens, stop * page_tokens)[start * page_tokens :]
        positions = np.array(held, np.int64).reshape(-1, page_tokens)
        rules = np.full(positions.shape, UNTOUCHED, np.int8)
        due = (positions >= low) & (positions < tokens)
        rules[due] = DUE
        # Behind the end, and in the page of the window's first token, there is nothing that matters.
        rules[positions >= tokens] = FREE
        has_first = np.flatnonzero(due.any(axis=1))[:1]
        skipped = (positions[has_first] >= room.prefix) & (positions[has_first] < low)
        rules[has_first] = np.where(skipped, FREE, rules[has_first])
        return start, positions, rules

    # --- tensors

    def _reserve(self, size: int, key: object, group: str) -> int:
        """Room for a tensor. Groups may share it, in other pages, where theirs are alike."""
        known = self._storages.setdefault((key, size), [])
        for offset, groups in known:
            if self.side.aliases and group not in groups:
                groups.add(group)
                return offset
        offset = self._size
        self._size += -(-size // 16) * 16
        known.append((offset, {group}))
        return offset

    def _store(self, family: Family, group: str, layers: list[int], indices: list[list[list[int]]]) -> None:
        arrangement = self.side.arrangements[family.name]
        sizes = [
            {
                "page": self.num_pages[group],
                "token": self._groups[group][1],
                **{axis: len(held) for axis, held in zip(family.axes, each, strict=True)},
            }
            for each in indices
        ]
        store = self._end_to_end if arrangement.joined == "bytes" else self._in_tensors
        for number, (dims, offsets, strides) in store(family, arrangement, group, len(layers), sizes):
            shape = {name: sizes[number][name] for name in dims}
            cache = family.caches[number]
            self.fields.append(Field(family, cache, group, layers, indices[number], dims, offsets, shape, strides))

    def _end_to_end(
        self, family: Family, arrangement: Arrangement, group: str, layers: int, sizes: list[dict[str, int]]
    ) -> Iterator[tuple[int, tuple[tuple[str, ...], list[int], dict[str, int]]]]:
        """A page is one block of every component after the other, of one layer or of all."""
        dims = tuple(name for name in arrangement.order if name != "page")
        strides, starts, block = [], [], 0
        for cache, size in zip(family.caches, sizes, strict=True):
            steps, step = {}, cache.component.element_bytes
            for name in reversed(dims):
                steps[name] = step
                step *= size[name]
            strides.append(steps)
            starts.append(block)
            block += step
        padding = 0 if arrangement.padded is None else 3
        is_stacked = arrangement.stacked is not None
        page = block * (layers if is_stacked else 1) + padding
        pages = sizes[0]["page"]
        if is_stacked:
            base = self._reserve(page * pages, "blocks", group)
            bases = [base + layer * block for layer in range(layers)]
        else:
            bases = [self._reserve(page * pages, "blocks", group) for _ in range(layers)]
        for number, (steps, start) in enumerate(zip(strides, starts, strict=True)):
            yield number, (("page", *dims), [base + start for base in bases], {**steps, "page": page})

    def _in_tensors(
        self, family: Family, arrangement: Arrangement, group: str, layers: int, sizes: list[dict[str, int]]
    ) -> Iterator[tuple[int, tuple[tuple[str, ...], list[int], dict[str, int]]]]:
        """Tensors with the dimensions of the order; components that are joined follow each other along one of them."""
        joined = arrangement.joined
        dims = list(arrangement.order)
        if arrangement.stacked is not None:
            dims.insert(arrangement.stacked, "layer")
        if joined == "component":
            dims.insert(arrangement.joint, "component")
        alike: dict[object, list[int]] = {}
        for number, cache in enumerate(family.caches):
            others = tuple((name, size) for name, size in sizes[number].items() if name != joined)
            alone = number if joined is None else None
            alike.setdefault((cache.component.dtype, others, alone), []).append(number)
        for numbers in alike.values():
            width = family.caches[numbers[0]].component.element_bytes
            extents = dict(sizes[numbers[0]]) | {"layer": layers, "component": len(numbers)}
            if joined is not None and joined != "component":
                extents[joined] = sum(sizes[number][joined] for number in numbers)
            shape = [extents[name] + (name == arrangement.padded) for name in dims]
            steps, step = {}, width
            for name, size in zip(reversed(dims), reversed(shape), strict=True):
                steps[name] = step
                step *= size
            key = (tuple(dims), tuple(shape))
            if arrangement.stacked is not None:
                base = self._reserve(step, key, group)
                bases = [base + layer * steps["layer"] for layer in range(layers)]
            else:
                bases = [self._reserve(step, key, group) for _ in range(layers)]
            start = 0
            for number in numbers:
                shift = start * steps[joined] if joined is not None else 0
                start += 1 if joined in (None, "component") else sizes[number][joined]
                yield number, (tuple(arrangement.order), [base + shift for base in bases], steps)

    # --- contents

    def _each_part(self) -> Iterator[tuple[Field, int, Given]]:
        for each in self.fields:
            for room, given in enumerate(self.given[each.group]):
                if given.pages:
                    yield each, room, given

    def fill(self, elements: Elements) -> None:
        """Writes what a source has: every entry of the pages that it hands in."""
        for each, room, given in self._each_part():
            positions, _ = entries(each.family, given)
            labels = elements.labels(each.cache.component, room, each.layers, positions, each.indices)
            self.labels[each.places[:, given.pages]] = labels
        self.buffer[:] = hashed(self.labels)

    def expected(self, elements: Elements, sent: Callable[[Family], bool]) -> tuple[Labels, NDArray[np.int8]]:
        """The right label of every byte, and what may become of it.

        Args:
            sent: whether the source has a family.
        """
        right = np.full(len(self.buffer), self.poison, np.int64)
        rules = np.full(len(self.buffer), UNTOUCHED, np.int8)
        for each, room, given in self._each_part():
            if not sent(each.family):
                continue
            positions, rule = entries(each.family, given)
            places = each.places[:, given.pages]
            right[places] = elements.labels(each.cache.component, room, each.layers, positions, each.indices)
            rules[places] = rule.reshape(1, *rule.shape, *[1] * (places.ndim - 3))
        return right, rules


def entries(family: Family, given: Given) -> tuple[Labels, NDArray[np.int8]]:
    """Positions and rules of entries: a packed page is one, known by its first token, and due if any token is."""
    if family.entry is not Entry.PAGE:
        return given.positions, given.rules
    due = (given.rules == DUE).any(axis=1, keepdims=True)
    return given.positions[:, :1], np.where(due, DUE, UNTOUCHED).astype(np.int8)


# --- requests


def start_of_needs(room: Room, window: int | None) -> int:
    """The first token that a receiver needs, if it says how many there are."""
    return max(room.prefix, room.tokens - (room.tokens if window is None else window))


def first_page_and_start(room: Room, window: int | None, page_tokens: int) -> tuple[int, int]:
    """The first page that a receiver without context parallelism gives, and the first token that it asks for."""
    needed = start_of_needs(room, window)
    if room.says_length:
        return needed // page_tokens, needed
    first_page = 0 if room.begins_early else needed // page_tokens
    return first_page, max(room.prefix, first_page * page_tokens)


def late_start(case: Case, room: Room, window: int | None) -> int:
    """The first token of a kind of which any receiver asks."""
    side = case.destination
    sizes = {side.page_tokens_of(family) for family in case.families_of(side) if family.window == window}
    return min([room.tokens, *(first_page_and_start(room, window, size)[1] for size in sizes)])


def with_prefix_in_whole_pages(case: Case, room: Room) -> Room:
    """Rounds a prefix down to where no rank of the receiving side has to go on inside of a packed page."""
    side = case.destination
    packed = [family for family in case.families_of(side) if family.entry is Entry.PAGE]
    prefix = room.prefix
    while any(
        count_before(side.context, part, room.tokens, prefix) % side.page_tokens_of(family)
        for family in packed
        for part in range(side.context.size)
    ):
        prefix -= 1
    return replace(room, prefix=prefix)
