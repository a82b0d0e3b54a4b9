"""The planner against brute force: every element of a random model, at its place on every rank, before and after.

Each logical element (component, layer, token, head, dim) has a number of its own, and an element of a pool *is* that
number. What a rank must hold is written down by definition, one page and one head at a time, with nothing of
`kvferry.plan`: which heads a rank holds is asked head by head. Everything else is poison, another one on either side.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.layout import (
    Axis,
    Component,
    Device,
    Interval,
    RankLayout,
    attention_components,
    empty_shard,
    interval,
    latent_component,
    parallel,
    shard_from_tensors,
)
from kvferry.plan import descriptors, elect_writer, lower, lowering, pieces, pieces_for_receiver, prove
from kvferry.transport import InProcessNetwork, InProcessTransport

SOURCE_POISON, DESTINATION_POISON = -2, -1
EXAMPLES = 600


# --- what is drawn


@dataclass(frozen=True)
class Side:
    """One engine. `order` is its memory's order of dimensions, outermost first.

    Where 'layer' or 'component' is not in it, layers or components have arrays of their own.
    """

    tp: int = 1
    stages: tuple[int, ...] = (2,)
    order: tuple[str, ...] = ("page", "token", "head", "dim")
    spare_pages: int = 0
    padded: str | None = None
    page_seed: int = 0


@dataclass(frozen=True)
class Room:
    number: int = 0
    pages: int = 2
    cuts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Scenario:
    components: tuple[Component, ...] = field(
        default_factory=lambda: attention_components(num_layers=2, num_kv_heads=4, head_dim=2, dtype="int32")
    )
    page_tokens: int = 2
    source: Side = Side()
    destination: Side = Side()
    rooms: tuple[Room, ...] = (Room(),)


def model(layers: int, heads: int, dim: int, dtype: str, kind: str) -> tuple[Component, ...]:
    if kind == "latent":
        return (latent_component(num_layers=layers, latent_dim=dim, dtype=dtype),)
    k, v = attention_components(
        num_layers=layers, num_kv_heads=heads, head_dim=dim, value_head_dim=dim + (kind == "unlike"), dtype=dtype
    )
    return (k, v)


@st.composite
def sides(draw: st.DrawFn, layers: int, axes: tuple[str, ...], can_stack: bool) -> Side:
    order = draw(st.permutations(["page", "token", *axes]))
    for name in ("layer", "component") if can_stack else ("layer",):
        at = draw(st.none() | st.integers(0, len(order) - 1))
        if at is not None:
            order.insert(at, name)
    cuts = sorted(draw(st.lists(st.integers(0, layers), max_size=2)))
    bounds = [0, *cuts, layers]
    return Side(
        tp=draw(st.integers(1, 6)),
        stages=tuple(stop - start for start, stop in pairwise(bounds)),
        order=tuple(order),
        spare_pages=draw(st.integers(0, 3)),
        padded=draw(st.none() | st.sampled_from(order)),
        page_seed=draw(st.integers(0, 50)),
    )


@st.composite
def rooms(draw: st.DrawFn) -> Room:
    pages = draw(st.integers(1, 4))
    cuts = draw(st.sets(st.integers(1, pages - 1))) if pages > 1 else ()
    return Room(draw(st.integers(0, 2**63 - 1)), pages, tuple(sorted(cuts)))


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    kind = draw(st.sampled_from(["alike", "unlike", "latent"]))
    layers = draw(st.integers(1, 4))
    dtype = draw(st.sampled_from(["int32", "int64", "int16", "float32", "float64"]))
    components = model(layers, draw(st.integers(1, 6)), draw(st.integers(1, 3)), dtype, kind)
    axes = ("latent",) if kind == "latent" else ("head", "dim")
    return Scenario(
        components=components,
        page_tokens=draw(st.integers(1, 4)),
        source=draw(sides(layers, axes, kind == "alike")),
        destination=draw(sides(layers, axes, kind == "alike")),
        rooms=tuple(draw(st.lists(rooms(), min_size=1, max_size=3, unique_by=lambda room: room.number))),
    )


# --- the oracle


def holds(index: int, size: int, parts: int, part: int) -> bool:
    """Whether a rank holds an index of an axis that its engine splits: as even as possible, else replicated."""
    if parts <= size:
        # Index i ends at (i + 1) / size of the axis, which lies in (part / parts, (part + 1) / parts].
        return part * size < (index + 1) * parts <= (part + 1) * size
    return index * parts <= part * size < (index + 1) * parts


class Oracle:
    """Numbers every element and fills pools by definition."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        tokens = scenario.page_tokens * sum(room.pages for room in scenario.rooms)
        self.ids: dict[str, Any] = {}
        first = 0
        for component in scenario.components:
            layers, *others = (axis.size for axis in component.axes)
            shape = (layers, tokens, *others)
            ids = np.arange(first, first + math.prod(shape)).reshape(shape)
            first += ids.size
            self.ids[component.name] = ids.astype(component.dtype)
            assert np.array_equal(self.ids[component.name], ids), f"{component.dtype} cannot number {first} elements"

    def layers(self, side: Side, stage: int) -> list[int]:
        numbers = [stage for stage, count in enumerate(side.stages) for _ in range(count)]
        return [layer for layer, of_stage in enumerate(numbers) if of_stage == stage]

    def indices(self, axis: Axis, side: Side, tp_rank: int) -> list[int]:
        if axis.name != "head":
            return list(range(axis.size))
        return [index for index in range(axis.size) if holds(index, axis.size, side.tp, tp_rank)]


class Pools:
    """The arrays of one rank."""

    def __init__(self, oracle: Oracle, side: Side, tp_rank: int, stage: int, poison: int) -> None:
        scenario = oracle.scenario
        self.oracle = oracle
        self.layers = oracle.layers(side, stage)
        self.num_pages = side.spare_pages + sum(room.pages for room in scenario.rooms)
        self.held = {
            (component.name, axis.name): oracle.indices(axis, side, tp_rank)
            for component in scenario.components
            for axis in component.axes[1:]
        }
        self.dims = tuple(name for name in side.order if name not in ("layer", "component"))
        self.arrays: list[Any] = []
        self.views: dict[tuple[str, int], Any] = {}
        names = [component.name for component in scenario.components]
        groups = [names] if "component" in side.order else [[name] for name in names]
        for group in groups:
            sizes = {"page": self.num_pages, "token": scenario.page_tokens, "component": len(group)}
            sizes |= {axis: len(held) for (name, axis), held in self.held.items() if name == group[0]}
            for layers in [self.layers] if "layer" in side.order else [[layer] for layer in self.layers]:
                shape = [{**sizes, "layer": len(layers)}[name] for name in side.order]
                padded = [size + (name == side.padded) for name, size in zip(side.order, shape, strict=True)]
                array = np.full(padded, poison, scenario.components[0].dtype)
                self.arrays.append(array)
                inside = array[tuple(slice(size) for size in shape)]
                for at, component in enumerate(group):
                    for index, layer in enumerate(layers):
                        chosen = {"component": at, "layer": index}
                        self.views[component, layer] = inside[tuple(chosen.get(d, slice(None)) for d in side.order)]
        # Every rank has pages of its own for a room, in an order of its own.
        free = np.random.default_rng(side.page_seed + tp_rank + 7 * stage).permutation(self.num_pages).tolist()
        if not side.page_seed:
            free = list(range(self.num_pages))
        self.pages = [[free.pop(0) for _ in range(room.pages)] for room in scenario.rooms]

    def fill(self) -> None:
        """Writes what the rooms' pages must hold."""
        page_tokens = self.oracle.scenario.page_tokens
        token = 0
        for pages in self.pages:
            for page in pages:
                for (name, layer), view in self.views.items():
                    axes = [axis for component, axis in self.held if component == name]
                    logical = view.transpose([self.dims.index(dim) for dim in ("page", "token", *axes)])
                    ids = self.oracle.ids[name][layer, token : token + page_tokens]
                    for at, axis in enumerate(axes):
                        ids = ids.take(self.held[name, axis], axis=1 + at)
                    logical[page] = ids
                token += page_tokens

    def bytes_in(self, pages: int) -> int:
        return sum(int(view.nbytes) for view in self.views.values()) // self.num_pages * pages


# --- the system under test


class Rank:
    """One rank's pools, described to kvferry."""

    def __init__(self, oracle: Oracle, side: Side, tp_rank: int, stage: int, poison: int) -> None:
        self.pools = Pools(oracle, side, tp_rank, stage, poison)
        shards = []
        for component in oracle.scenario.components:
            layers = parallel.stage_layers(side.stages, stage)
            held = {"layer": layers}
            for axis in component.axes[1:]:
                held[axis.name] = (
                    parallel.split(axis.size, side.tp, tp_rank) if axis.name == "head" else Interval(0, axis.size)
                )
            views = [self.pools.views[component.name, layer] for layer in self.pools.layers]
            shards.append(
                shard_from_tensors(component, views, dims=self.pools.dims, held=held)
                if views
                else empty_shard(component, page_tokens=oracle.scenario.page_tokens, num_pages=self.pools.num_pages)
            )
        self.layout = RankLayout(shards=tuple(shards))
        self.before = [array.copy() for array in self.pools.arrays]

    def join(self, network: InProcessNetwork) -> None:
        self.transport = InProcessTransport(network)
        self.transport.register(self.layout.regions(), Device())


def ranks(oracle: Oracle, side: Side, poison: int) -> dict[int, Rank]:
    return {
        stage * side.tp + tp_rank: Rank(oracle, side, tp_rank, stage, poison)
        for stage in range(len(side.stages))
        for tp_rank in range(side.tp)
    }


def ferry(scenario: Scenario, sources: dict[int, Rank], receiver: int, destination: Rank) -> int:
    """Sends every room to one receiver as endpoints do; returns the bytes that the transports say they moved."""
    layouts = {rank: source.layout for rank, source in sources.items()}
    plan = pieces_for_receiver(layouts, destination.layout)
    moved, posts = 0, 0
    for rank, source in sources.items():
        mine = [piece for piece in plan if rank in piece.holders]
        if not mine:
            continue
        peer = source.transport.connect(destination.transport.metadata())
        rows = descriptors.descriptor_rows(
            [
                lower(piece.box, source.layout.shard(piece.component), destination.layout.shard(piece.component))
                for piece in mine
            ],
            source_pages=source.layout.num_pages,
            destination_pages=destination.layout.num_pages,
            source_device=0,
            destination_device=0,
        )
        local, remote = source.transport.prepare(rows.source, None), source.transport.prepare(rows.destination, peer)
        for index, room in enumerate(scenario.rooms):
            elected = [elect_writer(piece, room=room.number, receiver=receiver) == rank for piece in mine]
            selected = descriptors.select_rows(
                [r for r, chosen in zip(rows.piece_rows, elected, strict=True) if chosen]
            )
            if not len(selected):
                continue
            bounds = [0, *room.cuts, room.pages]
            for start, stop in pairwise(bounds):
                here, there = (np.array(side.pools.pages[index][start:stop]) for side in (source, destination))
                flight = source.transport.post(
                    local,
                    descriptors.descriptor_indices(selected, here, pool_pages=source.layout.num_pages),
                    remote,
                    descriptors.descriptor_indices(selected, there, pool_pages=destination.layout.num_pages),
                    b"chunk",
                )
                report = source.transport.poll(flight)
                assert report is not None
                source.transport.release(flight)
                moved, posts = moved + report.total_bytes, posts + 1
    assert len(destination.transport.take_notifications()) == posts
    return moved


def check(scenario: Scenario) -> None:
    """Moves the scenario's rooms from every source to every receiver and compares all memory with the oracle."""
    oracle = Oracle(scenario)
    sources = ranks(oracle, scenario.source, SOURCE_POISON)
    destinations = ranks(oracle, scenario.destination, DESTINATION_POISON)
    network = InProcessNetwork()
    for rank in (*sources.values(), *destinations.values()):
        rank.join(network)
    for source in sources.values():
        source.pools.fill()
        source.before = [array.copy() for array in source.pools.arrays]
    total_pages = sum(room.pages for room in scenario.rooms)
    for number, destination in destinations.items():
        moved = ferry(scenario, sources, number, destination)
        found = [array.copy() for array in destination.pools.arrays]
        for array, clean in zip(destination.pools.arrays, destination.before, strict=True):
            array[...] = clean
        destination.pools.fill()
        for array, expected in zip(found, destination.pools.arrays, strict=True):
            np.testing.assert_array_equal(array, expected)
        # All bytes are there, and no more bytes moved than are there: each was written once.
        assert moved == destination.pools.bytes_in(total_pages)
    for source in sources.values():
        for array, before in zip(source.pools.arrays, source.before, strict=True):
            np.testing.assert_array_equal(array, before)
    layouts = [{number: rank.layout for number, rank in side.items()} for side in (sources, destinations)]
    for room in scenario.rooms:
        proof = prove(*layouts, room=room.number)
        assert proof.bytes_per_token * scenario.page_tokens == sum(
            rank.pools.bytes_in(1) for rank in destinations.values()
        )


@settings(max_examples=EXAMPLES)
@given(scenarios())
def test_every_element_arrives_once_at_its_place_and_nowhere_else(scenario: Scenario):
    check(scenario)


NHD, HND = ("page", "token", "head", "dim"), ("page", "head", "token", "dim")
PACKED = ("page", "layer", "component", "token", "head", "dim")
GQA = model(3, 2, 2, "int32", "alike")
SIX_HEADS = model(3, 6, 2, "int32", "alike")
LATENT = model(3, 1, 3, "int32", "latent")
LATENT_ORDER = ("page", "token", "latent")


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(Scenario(), id="one rank each"),
        pytest.param(
            Scenario(SIX_HEADS, source=Side(tp=3, stages=(3,)), destination=Side(tp=2, stages=(3,))),
            id="six heads from three ranks to two",
        ),
        pytest.param(
            Scenario(SIX_HEADS, source=Side(tp=4, stages=(2, 1)), destination=Side(tp=5, stages=(1, 2))),
            id="sizes that do not divide and stages that do not match",
        ),
        pytest.param(
            Scenario(GQA, source=Side(tp=4, stages=(3,)), destination=Side(tp=1, stages=(3,))),
            id="replicated heads at the source",
        ),
        pytest.param(
            Scenario(GQA, source=Side(tp=1, stages=(3,)), destination=Side(tp=6, stages=(0, 3))),
            id="replicated heads at the receiver, and a stage without layers",
        ),
        pytest.param(
            Scenario(
                LATENT,
                source=Side(tp=4, stages=(3,), order=LATENT_ORDER),
                destination=Side(tp=4, stages=(1, 1, 1), order=LATENT_ORDER),
            ),
            id="MLA",
        ),
        pytest.param(
            Scenario(SIX_HEADS, source=Side(2, (3,), NHD), destination=Side(3, (3,), HND, padded="token")),
            id="NHD to padded HND",
        ),
        pytest.param(
            Scenario(SIX_HEADS, source=Side(2, (1, 2), HND), destination=Side(2, (2, 1), PACKED)),
            id="HND to one tensor for all layers, keys and values",
        ),
        pytest.param(
            Scenario(
                SIX_HEADS,
                rooms=(Room(7, 4, (1, 3)), Room(8, 1), Room(2**63 - 1, 3, (2,))),
                source=Side(3, (3,), spare_pages=2, page_seed=3),
                destination=Side(2, (3,), spare_pages=5, page_seed=4),
            ),
            id="rooms in chunks with scattered pages",
        ),
    ],
)
def test_layouts_that_engines_have(scenario: Scenario):
    check(scenario)


@given(st.integers(1, 30), st.integers(1, 30))
def test_the_oracle_gives_every_index_to_a_rank_and_every_rank_an_index(size: int, parts: int):
    held = [[index for index in range(size) if holds(index, size, parts, part)] for part in range(parts)]
    owners = Counter(index for indices in held for index in indices)
    assert all(held)
    assert set(owners) == set(range(size))
    if parts <= size:
        assert set(owners.values()) == {1}


# --- can the check fail?


def _offset_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def offset(box: Any, shard: Any) -> int:
        steps = [part.start - held.start for part, held in zip(box[1:], shard.box[1:], strict=True)]
        return sum(max(0, step - 1) * stride for step, stride in zip(steps, shard.strides, strict=True))

    monkeypatch.setattr(lowering, "_offset", offset)


def _layer_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def bases(box: Any, shard: Any) -> Any:
        first = max(0, box[0].start - shard.box[0].start - 1)
        return np.array(shard.addresses[first : first + len(box[0])], np.uint64)

    monkeypatch.setattr(lowering, "_bases", bases)


def _next_part(monkeypatch: pytest.MonkeyPatch) -> None:
    right = parallel.split
    monkeypatch.setattr(parallel, "split", lambda total, parts, index: right(total, parts, (index + 1) % parts))


def _other_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    right = parallel.stage_layers
    monkeypatch.setattr(parallel, "stage_layers", lambda counts, stage: right(counts, (stage + 1) % len(counts)))


def _next_page(monkeypatch: pytest.MonkeyPatch) -> None:
    right = descriptors.descriptor_indices
    monkeypatch.setattr(
        descriptors,
        "descriptor_indices",
        lambda rows, pages, *, pool_pages: right(rows, (pages + 1) % pool_pages, pool_pages=pool_pages),
    )


def _next_row(monkeypatch: pytest.MonkeyPatch) -> None:
    right = descriptors.descriptor_indices
    monkeypatch.setattr(
        descriptors,
        "descriptor_indices",
        lambda rows, pages, *, pool_pages: right(rows[::-1] if pool_pages == 3 else rows, pages, pool_pages=pool_pages),
    )


def _forgotten_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    right = interval.cut
    monkeypatch.setattr(pieces, "cut", lambda box, by: right(box, by)[:-1])


def _doubled_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    right = interval.cut
    monkeypatch.setattr(pieces, "cut", lambda box, by: [*right(box, by), right(box, by)[0]])


def _melted_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    right = lowering.lower

    def melted(box: Any, source: Any, destination: Any) -> Any:
        runs = right(box, source, destination)
        return replace(runs, source=runs.source[::2], destination=runs.destination[::2], length=runs.length * 2)

    monkeypatch.setitem(globals(), "lower", melted)


@pytest.mark.parametrize(
    "plant",
    [
        _offset_off_by_one,
        _layer_off_by_one,
        _next_part,
        _other_stage,
        _next_page,
        _next_row,
        _forgotten_piece,
        _doubled_piece,
        _melted_too_far,
    ],
)
def test_a_planted_off_by_one_is_caught(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch):
    """The check passes without the fault, and the comparison itself fails with it."""
    scenario = Scenario(
        model(4, 4, 2, "int32", "alike"),
        source=Side(tp=2, stages=(2, 2), spare_pages=1),
        destination=Side(tp=4, stages=(4,), order=HND, spare_pages=2),
    )
    check(scenario)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(scenario)
