"""The planner against brute force: every byte of a random model, at its place on every rank, before and after.

`proof.oracle.cases` says what is drawn, `memory` what every rank must hold, by definition and with nothing of
`kvferry.plan`, and `ferry` has kvferry move the rooms and compares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import count
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from proof.oracle.cases import Case, Context, Room, Side, Sizes, cases, families_of_model, plain
from proof.oracle.ferry import WrongBytesError, check
from proof.oracle.memory import Elements, hashed, held_positions, holds
from tests.support.tiers import examples

from kvferry.layout import Interval, PageGroup, RankLayout, TokenShare, parallel, sharding
from kvferry.plan import Demand, Piece, Runs, SourceGroup, Units, descriptors, lowering, pair, pieces, routes
from kvferry.plan.lowering import Loop
from kvferry.plan.requests import demands, moves
from kvferry.plan.requests.demands import GroupRequest

EXAMPLES = 250


@pytest.mark.timeout(600)
@settings(max_examples=examples(EXAMPLES))
@given(cases())
def test_every_byte_arrives_once_at_its_place_and_nothing_else_changes(case: Case):
    check(case)


# --- cases with names


def engine(kinds: tuple[str, ...], sizes: Sizes, **settings: Any) -> Side:
    """An engine that has all layers in one stage and stores them plainly, unless the settings say otherwise.

    Args:
        settings: fields of `Side`; and `arranged`, fields of every family's `Arrangement`.
    """
    arranged = settings.pop("arranged", {})
    arrangements = {
        family.name: replace(plain(family), **arranged.get(family.name, {}))
        for family in families_of_model(kinds, sizes)
    }
    return Side(**{"arrangements": arrangements, "stages": (len(kinds),), **settings})


def case(
    kinds: tuple[str, ...],
    sizes: Sizes,
    source: dict[str, Any],
    destination: dict[str, Any],
    *rooms: Room,
) -> Case:
    families = families_of_model(kinds, sizes)
    sides = engine(kinds, sizes, **source), engine(kinds, sizes, **destination)
    return Case(families, *sides, rooms or (Room(tokens=7),))


def arranged(**fields: Any) -> dict[str, Any]:
    return {"attention": fields}


ATTENTION = ("attention",) * 3
HYBRID = ("delta", "delta", "delta", "attention")
SLIDING = ("window", "attention", "window", "attention")
GQA = Sizes(heads=2, dim=2, value_dim=2, dtype="float16")
SIX_HEADS = Sizes(heads=6, dim=2, value_dim=2, dtype="float16")
STATES = Sizes(heads=4, dim=2, value_dim=3, dtype="float16", channels=(2, 2, 4))
WINDOWED = Sizes(heads=4, dim=2, value_dim=2, dtype="uint8", window=4)
HND = ("page", "head", "token", "dim")
SCATTERED = {"seed": 3, "spare_pages": 2}

NAMED = {
    "one rank each": case(ATTENTION, GQA, {}, {}),
    "six heads from three ranks to two, and from two stages to one": case(
        ATTENTION, SIX_HEADS, {"tp": 3, "stages": (1, 2)}, {"tp": 2}
    ),
    "sizes that do not divide and stages that do not match": case(
        ATTENTION, SIX_HEADS, {"tp": 4, "stages": (2, 1)}, {"tp": 5, "stages": (1, 2)}
    ),
    "three stages to two": case(ATTENTION, GQA, {"stages": (1, 1, 1)}, {"stages": (2, 1)}),
    "replicated heads at the source": case(ATTENTION, GQA, {"tp": 4}, {}),
    "replicated heads at the receiver, and a stage without layers": case(
        ATTENTION, GQA, {}, {"tp": 6, "stages": (0, 3)}
    ),
    "latents, which every rank has": case(("latent",) * 3, GQA, {"tp": 4}, {"tp": 4, "stages": (1, 1, 1)}),
    "NHD to padded HND": case(
        ATTENTION, SIX_HEADS, {"tp": 2}, {"tp": 3, "arranged": arranged(order=HND, padded="token"), "page_tokens": 2}
    ),
    "elements before heads before tokens, to NHD": case(
        ATTENTION, GQA, {"arranged": arranged(order=("page", "dim", "head", "token"))}, {}
    ),
    "HND to one tensor for all layers, keys and values": case(
        ATTENTION,
        SIX_HEADS,
        {"tp": 2, "stages": (1, 2), "arranged": arranged(order=HND)},
        {"tp": 2, "stages": (2, 1), "arranged": arranged(joined="component", joint=1, stacked=1)},
    ),
    "rooms in chunks with scattered pages": case(
        ATTENTION,
        SIX_HEADS,
        {"tp": 3, "page_tokens": 2, **SCATTERED},
        {"tp": 2, "page_tokens": 2, **SCATTERED},
        Room(7, 8, cuts=(1, 3)),
        Room(8, 1),
        Room(2**63 - 1, 5, cuts=(2,)),
    ),
    "pages of 16 to pages of 64 with a prefix that ends in a page": case(
        ATTENTION, GQA, {"page_tokens": 16}, {"page_tokens": 64}, Room(tokens=150, prefix=75, cuts=(3, 5))
    ),
    "pages of 64 to pages of 16": case(
        ATTENTION, GQA, {"page_tokens": 64}, {"page_tokens": 16}, Room(tokens=150, prefix=75)
    ),
    "pages of 4 to pages of 6": case(ATTENTION, GQA, {"page_tokens": 4}, {"page_tokens": 6}),
    "pages of 16 to pages of 48 of a request whose length is not said": case(
        ATTENTION, GQA, {"page_tokens": 16}, {"page_tokens": 48}, Room(tokens=150, prefix=75, says_length=False)
    ),
    "windows beside full attention, from pages of 16 to pages of 64": case(
        SLIDING,
        replace(WINDOWED, window=40),
        {"tp": 2, "page_tokens": 16},
        {"tp": 4, "page_tokens": 64},
        Room(tokens=150, begins_late=True),
    ),
    "delta nets with states and convolutions of three channel groups": case(
        HYBRID, STATES, {"tp": 4}, {"tp": 2, "stages": (1, 3)}, Room(tokens=5, cuts=(2,))
    ),
    "channel groups that do not divide": case(
        HYBRID, replace(STATES, channels=(1, 3, 4)), {"tp": 3}, {"tp": 2}, Room(tokens=5)
    ),
    "a sparse attention's keys and scales in the same page": case(
        ("sparse",) * 2,
        GQA,
        {"arranged": {"index": {"joined": "bytes"}}, "page_tokens": 2},
        {"arranged": {"index": {"joined": "bytes", "stacked": 0}}, "page_tokens": 3},
    ),
    "scales beside the values": case(("scaled",) * 2, SIX_HEADS, {"tp": 4}, {"tp": 3}),
    "packed pages, and a window of them": case(
        ("packed", "packed window"), WINDOWED, {"tp": 2, "page_tokens": 2}, {"tp": 4, "page_tokens": 2}
    ),
    "groups in the same tensors, in other pages": case(
        SLIDING,
        WINDOWED,
        {"aliases": True, "arranged": {"attention": {"divided": 2}, "window": {"divided": 1}}, **SCATTERED},
        {"aliases": True, "tp": 2, "page_tokens": 2, **SCATTERED},
        Room(1, 6),
        Room(2, 5, prefix=2),
    ),
    "one rank's ranges to ranks that take turns": case(
        ATTENTION,
        GQA,
        {"context": Context(3, "contiguous"), "page_tokens": 2},
        {"context": Context(2, "interleaved", 2), "page_tokens": 4},
        Room(tokens=19, prefix=3, cuts=(1,)),
    ),
    "zigzag to zigzag of another size": case(
        ATTENTION, GQA, {"context": Context(2, "zigzag")}, {"context": Context(3, "zigzag")}, Room(tokens=19, prefix=3)
    ),
    "whole pages to another number of them": case(
        ATTENTION,
        GQA,
        {"context": Context(3, "whole pages", 4), "page_tokens": 4},
        {"context": Context(2, "whole pages", 2), "page_tokens": 2},
        Room(tokens=19, prefix=3),
    ),
    "zigzag to its like, where pages are of unlike sizes": case(
        ATTENTION,
        GQA,
        {"context": Context(2, "zigzag"), "page_tokens": 4},
        {"context": Context(2, "zigzag"), "page_tokens": 6},
        Room(tokens=19, prefix=3),
    ),
    "packed pages partitioned to ranks that take turns": case(
        ("packed",),
        WINDOWED,
        {"page_tokens": 2},
        {"page_tokens": 2, "context": Context(2, "interleaved", 4)},
        Room(tokens=11),
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_layouts_that_engines_have(name: str):
    check(NAMED[name])


@pytest.mark.parametrize("owner", ["neither", "source", "destination", "both"])
def test_draft_layers_travel_where_both_sides_have_them(owner: str):
    kinds, sizes = ("attention", "attention", "draft"), GQA
    families = families_of_model(kinds, sizes)
    sides = {}
    for side in ("source", "destination"):
        whole = engine(kinds, sizes, tp=2)
        if owner not in ("both", side):
            whole = replace(whole, stages=(2,), arrangements={"attention": whole.arrangements["attention"]})
        sides[side] = whole
    check(Case(families, sides["source"], sides["destination"], (Room(tokens=3),)))


# --- is the oracle what it says?


@given(st.integers(1, 30), st.integers(1, 30))
def test_the_oracle_gives_every_index_to_a_rank_and_every_rank_an_index(size: int, parts: int):
    held = [[index for index in range(size) if holds(index, size, parts, part)] for part in range(parts)]
    owners = Counter(index for indices in held for index in indices)
    assert all(held)
    assert set(owners) == set(range(size))
    if parts <= size:
        assert set(owners.values()) == {1}


@pytest.mark.parametrize(
    ("context", "tokens", "held"),
    [
        (Context(2, "interleaved", 2), 7, [[0, 1, 4, 5], [2, 3, 6]]),
        (Context(3, "contiguous"), 7, [[0, 1, 2], [3, 4, 5], [6]]),
        (Context(3, "whole pages", 2), 7, [[0, 1, 2, 3], [4, 5], [6]]),
        (Context(3, "whole pages", 4), 45, [[*range(16)], [*range(16, 32)], [*range(32, 45)]]),
        (Context(3, "whole pages", 4), 7, [[0, 1, 2, 3], [4, 5, 6], []]),
        (Context(2, "zigzag"), 7, [[0, 1, 6], [2, 3, 4, 5]]),
        (Context(1, "contiguous"), 3, [[0, 1, 2]]),
    ],
)
def test_the_oracle_deals_tokens_out(context: Context, tokens: int, held: list[list[int]]):
    found = [held_positions(context, part, tokens, tokens + 4) for part in range(context.size)]
    assert [[position for position in part if position < tokens] for part in found] == held


def test_no_two_bytes_have_a_label_in_common():
    drawn = replace(NAMED["delta nets with states and convolutions of three channel groups"], rooms=(Room(1), Room(2)))
    elements = Elements(drawn)
    labels = [
        elements.labels(
            cache.component,
            room,
            range(cache.component.axes[0].size),
            np.array([0, 1, 2, 4095]),
            [range(axis.size) for axis in cache.component.axes[1:]],
        ).ravel()
        for family in drawn.families
        for cache in family.caches
        for room in range(2)
    ]
    every = np.concatenate(labels)
    assert len(np.unique(every)) == len(every)
    assert np.unique(hashed(every)).size > 200


# --- can the check fail?

Plant: TypeAlias = Callable[[pytest.MonkeyPatch], None]


def _patched_lowering(change: Callable[[Runs], Runs]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        right = lowering.lower
        monkeypatch.setattr(pair, "lower", lambda *args, **named: change(right(*args, **named)))

    return plant


def _own_strides_for_the_other_side(runs: Runs) -> Runs:
    return replace(runs, loops=tuple(Loop(loop.count, loop.source_stride, loop.source_stride) for loop in runs.loops))


def _loops_of_the_receiver_in_another_order(runs: Runs) -> Runs:
    strides = [(loop.count, loop.destination_stride) for loop in runs.loops]
    counts = {loop.count for loop in runs.loops}
    if len(counts) > 1:
        return runs
    return replace(
        runs,
        loops=tuple(
            Loop(loop.count, loop.source_stride, stride)
            for loop, (_, stride) in zip(runs.loops, reversed(strides), strict=True)
        ),
    )


def _run_short_of_an_element(runs: Runs) -> Runs:
    return replace(runs, length=max(1, runs.length - 1))


def _layers_in_reverse(runs: Runs) -> Runs:
    return replace(runs, source_bases=runs.source_bases[::-1])


def _units_too_close(runs: Runs) -> Runs:
    steps = runs.source_steps
    return replace(runs, source_steps=replace(steps, unit_stride=steps.unit_stride // 2))


def _bases_by(index: Callable[[Interval, Interval], int], layer: Callable[[Interval, Interval], int]) -> Plant:
    """The start of a piece in a shard, worked out in another way than by the distance of their starts."""

    def bases(box: Any, shard: Any) -> Any:
        first = layer(box[0], shard.box[0])
        steps = zip(box[1:], shard.box[1:], shard.strides, strict=True)
        within = sum(index(part, held) * stride for part, held, stride in steps)
        return np.array(shard.addresses[first : first + len(box[0])], np.uint64) + np.uint64(within)

    return lambda monkeypatch: monkeypatch.setattr(lowering, "_bases", bases)


def _distance(part: Interval, held: Interval) -> int:
    return part.start - held.start


def _one_less(part: Interval, held: Interval) -> int:
    return max(0, part.start - held.start - 1)


def _ratio(part: Interval, held: Interval) -> int:
    return part.start % len(held)


def _from_the_other_end(part: Interval, held: Interval) -> int:
    return held.stop - part.stop


def _global(part: Interval, held: Interval) -> int:
    return part.start


def _parts_in_reverse(monkeypatch: pytest.MonkeyPatch) -> None:
    right = parallel.split

    def split(total: int, parts: int, index: int) -> Interval:
        mine, other = right(total, parts, index), right(total, parts, parts - 1 - index)
        return other if len(other) == len(mine) else mine

    monkeypatch.setattr(sharding, "split", split)


def _parts_by_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    right = parallel.split

    def split(total: int, parts: int, index: int) -> Interval:
        length = len(right(total, parts, index))
        start = min(index * length, total - length)
        return Interval(start, start + length)

    monkeypatch.setattr(sharding, "split", split)


def _stages_by_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    def stage_layers(layers_per_stage: Any, stage: int) -> Interval:
        start = stage * layers_per_stage[stage]
        return Interval(start, start + layers_per_stage[stage])

    monkeypatch.setattr(sharding, "stage_layers", stage_layers)


def _stage_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    right = parallel.stage_layers

    def stage_layers(layers_per_stage: Any, stage: int) -> Interval:
        mine = right(layers_per_stage, stage)
        return Interval(mine.start - 1, mine.stop - 1) if mine.start else mine

    monkeypatch.setattr(sharding, "stage_layers", stage_layers)


def _elected_by(election: Callable[[Piece, int, int], Any]) -> Plant:
    return lambda monkeypatch: monkeypatch.setattr(
        pair, "elect_writer", lambda piece, *, room, receiver: election(piece, room, receiver)
    )


class _Everybody(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


def _one_holder_never(piece: Piece, room: int, receiver: int) -> int:
    writer = right_election(piece, room=room, receiver=receiver)
    return writer if len(piece.holders) == 1 or writer != piece.holders[-1] else -1


def _cut_by(change: Callable[[tuple[Piece, ...]], tuple[Piece, ...]]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        right = SourceGroup.pieces_for
        monkeypatch.setattr(SourceGroup, "pieces_for", lambda *args: change(right(*args)))

    return plant


def _share_method(name: str, change: Callable[..., Any]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        right = getattr(TokenShare, name)
        monkeypatch.setattr(
            TokenShare, name, lambda share, *args, **named: change(share, right, *args, **named), raising=True
        )

    return plant


def _next_owner(share: TokenShare, right: Any, low: int, high: int, *, block: int) -> Any:
    return right(TokenShare(share.partition, (share.part + 1) % share.partition.num_parts), low, high, block=block)


def _local_off_by_one(share: TokenShare, right: Any, positions: Any, *, block: int) -> Any:
    local = right(share, positions, block=block)
    return local if share.partition.is_whole else local + (local == 1)


def _units_by(change: Callable[[Units], Units]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        right = routes.units_of

        def units_of(segments: Any, unit_tokens: int) -> tuple[Units, Units]:
            units, tokens = right(segments, unit_tokens)
            return change(units), tokens

        monkeypatch.setattr(moves, "units_of", units_of)

    return plant


def _single_tokens_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    right = routes.units_of

    def units_of(segments: Any, unit_tokens: int) -> tuple[Units, Units]:
        units, tokens = right(segments, unit_tokens)
        return units, replace(tokens, source=tokens.source[1:], destination=tokens.destination[1:])

    monkeypatch.setattr(moves, "units_of", units_of)


def _placed_by(change: Callable[..., Any]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        right = pair.places
        monkeypatch.setattr(moves, "places", lambda numbers, **named: change(right, numbers, **named))

    return plant


def _pages_in_reverse(right: Any, numbers: Any, **named: Any) -> Any:
    return right(numbers, **{**named, "pages": named["pages"][::-1]})


def _pages_of_the_other_size(right: Any, numbers: Any, **named: Any) -> Any:
    units, _ = right(numbers, **named)
    per_page = named["page_tokens"] // named["unit_tokens"]
    order = np.minimum(numbers // max(1, per_page - 1) - named["first_page"], len(named["pages"]) - 1)
    return units, named["pages"][order]


def _start_of_pages_forgotten(right: Any, numbers: Any, **named: Any) -> Any:
    per_page = named["page_tokens"] // named["unit_tokens"]
    return numbers % per_page, named["pages"][np.minimum(numbers // per_page, len(named["pages"]) - 1)]


def _wanted_by(change: Callable[[Demand, PageGroup], Demand]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        right = demands.wanted_groups

        def wanted_groups(groups: Any, layout: RankLayout, **others: Any) -> dict[str, GroupRequest]:
            wanted = right(groups, layout, **others)
            changed = {name: change(each.demand, layout.group(name)) for name, each in wanted.items()}
            return {name: msgspec.structs.replace(each, **asdict(changed[name])) for name, each in wanted.items()}

        monkeypatch.setattr(demands, "wanted_groups", wanted_groups)

    return plant


def _window_too_short(demand: Demand, group: PageGroup) -> Demand:
    if group.window_tokens is None or demand.start == demand.held:
        return demand
    return replace(demand, start=min(demand.start + 1, demand.stop))


def _prefix_ignored(demand: Demand, group: PageGroup) -> Demand:
    return demand if group.has_slots else replace(demand, held=0)


def _prefix_rounded_down(demand: Demand, group: PageGroup) -> Demand:
    if group.has_slots:
        return demand
    start = demand.start // group.page_tokens * group.page_tokens
    return replace(demand, held=min(demand.held, start), start=start)


def _end_too_early(demand: Demand, group: PageGroup) -> Demand:
    return replace(demand, stop=max(demand.start, demand.stop - 1))


def _groups_slots_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    right = demands.wanted_groups

    def wanted_groups(groups: Any, layout: RankLayout, **others: Any) -> dict[str, GroupRequest]:
        wanted = right(groups, layout, **others)
        first = next(iter(wanted.values()))
        return {
            name: msgspec.structs.replace(each, pages=first.pages) if len(each.pages) == len(first.pages) else each
            for name, each in wanted.items()
        }

    monkeypatch.setattr(demands, "wanted_groups", wanted_groups)


def _unit_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets that blocks of context parallelism cut units, and that pages may be of unlike sizes."""
    monkeypatch.setattr(
        routes, "unit_tokens", lambda source, destination, *shares: min(source.page_tokens, destination.page_tokens)
    )


def _numbers_by(change: Callable[[Any, Any], tuple[Any, Any]]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        right = descriptors.Numbers.indices
        monkeypatch.setattr(
            descriptors.Numbers, "indices", lambda numbers, units, pages: right(numbers, *change(units, pages))
        )

    return plant


def _rows_of_other_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = descriptors.joined, count()
    monkeypatch.setattr(
        descriptors, "joined", lambda pieces: right(pieces if next(calls) % 2 else list(reversed(pieces)))
    )


def _order_by(change: Callable[[Any, int], Any]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        right = descriptors.merging_order
        monkeypatch.setattr(
            descriptors, "merging_order", lambda units, pages, most: change(right(units, pages, most), most)
        )

    return plant


def _last_of_a_block_lost(order: Any, most: int) -> Any:
    return np.delete(order, slice(most - 1, None, most)) if len(order) > most > 1 else order


def _first_of_a_block_twice(order: Any, most: int) -> Any:
    return np.concatenate([order, order[:1]]) if len(order) > most else order


def _blocks_shifted(order: Any, most: int) -> Any:
    return np.minimum(order + 1, len(order) - 1) if len(order) > most else order


def _order_of_one_side_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def select(selector: Any, units: Any, pages: Any, to_units: Any, to_pages: Any) -> Any:
        order = descriptors.merging_order(units, pages, selector.merged_units)
        return selector.source.indices(units[order], pages[order]), selector.destination.indices(to_units, to_pages)

    monkeypatch.setattr(descriptors.Selector, "select", select)


def _rows_that_go_on_where_pages_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "_rows_of_run", lambda steps: 1)


right_election = pieces.elect_writer

FAULTS: dict[str, Plant] = {
    "a stride of the other side": _patched_lowering(_own_strides_for_the_other_side),
    "strides in another order": _patched_lowering(_loops_of_the_receiver_in_another_order),
    "a run that is too short": _patched_lowering(_run_short_of_an_element),
    "layers in reverse": _patched_lowering(_layers_in_reverse),
    "units too close to each other": _patched_lowering(_units_too_close),
    "an index off by one": _bases_by(_one_less, _distance),
    "a ratio where an interval belongs": _bases_by(_ratio, _distance),
    "an offset of the model within a shard (channel groups)": _bases_by(_global, _distance),
    "a layer off by one": _bases_by(_distance, _one_less),
    "a layer by a ratio": _bases_by(_distance, _ratio),
    "parts of an axis in reverse": _parts_in_reverse,
    "parts of an axis by a ratio": _parts_by_ratio,
    "stages by a ratio": _stages_by_ratio,
    "a stage off by one": _stage_off_by_one,
    "everybody writes": _elected_by(lambda piece, room, receiver: _Everybody()),
    "nobody writes": _elected_by(lambda piece, room, receiver: -1),
    "a dropped writer": _elected_by(_one_holder_never),
    "swapped intervals": _bases_by(_from_the_other_end, _distance),
    "a dropped piece": _cut_by(lambda cut: cut[:-1]),
    "a piece twice": _cut_by(lambda cut: cut + cut[:1]),
    "a token of the next owner": _share_method("ranges", _next_owner),
    "a local position off by one": _share_method("local", _local_off_by_one),
    "a unit off by one at the receiver": _units_by(
        lambda units: replace(units, destination=np.maximum(units.destination - 1, 0))
    ),
    "units in another order": _units_by(lambda units: replace(units, source=units.source[::-1])),
    "a unit lost": _units_by(lambda units: replace(units, source=units.source[1:], destination=units.destination[1:])),
    "single tokens lost": _single_tokens_lost,
    "a unit too large": _unit_too_large,
    "pages in reverse": _placed_by(_pages_in_reverse),
    "pages of another size": _placed_by(_pages_of_the_other_size),
    "the first pages' place forgotten": _placed_by(_start_of_pages_forgotten),
    "a window too short": _wanted_by(_window_too_short),
    "a prefix ignored": _wanted_by(_prefix_ignored),
    "a prefix rounded down": _wanted_by(_prefix_rounded_down),
    "the last token forgotten": _wanted_by(_end_too_early),
    "pages of another group": _groups_slots_for_all,
    "the page before": _numbers_by(lambda units, pages: (units, np.where(pages > 0, pages - 1, pages))),
    "the first unit of its page": _numbers_by(lambda units, pages: (np.zeros_like(units), pages)),
    "rows of other pieces": _rows_of_other_pieces,
    "the last unit of a block of neighbours lost": _order_by(_last_of_a_block_lost),
    "the first unit of a block twice": _order_by(_first_of_a_block_twice),
    "blocks of neighbours off by one": _order_by(_blocks_shifted),
    "the order of one side alone": _order_of_one_side_alone,
    "rows that go on where pages do not": _rows_that_go_on_where_pages_do_not,
}


def bytes_are_wrong(case: Case) -> bool:
    """Whether the comparison itself fails, without the proof's help.

    Cases that end otherwise, because something refuses what the fault makes, do not count.
    """
    try:
        check(case, with_proof=False)
    except WrongBytesError:
        return True
    except Exception:
        return False
    return False


@pytest.mark.usefixtures("nothing_remembered")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch):
    FAULTS[fault](monkeypatch)
    assert any(bytes_are_wrong(layout) for layout in NAMED.values())


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("nothing_remembered")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught_by_what_is_drawn(fault: str, monkeypatch: pytest.MonkeyPatch):
    """The cases that the law is tested with are those that it takes to find every fault."""

    @settings(
        max_examples=20_000,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(cases())
    def search(case: Case) -> None:
        if bytes_are_wrong(case):
            raise WrongBytesError(fault)

    FAULTS[fault](monkeypatch)
    with pytest.raises(WrongBytesError):
        search()
