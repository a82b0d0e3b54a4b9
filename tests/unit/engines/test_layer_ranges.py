"""Which layers leave together, and after which layer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry import Axis, Component, Entry, Interval, RankLayout, shard_from_tensors
from kvferry.engines.layer_ranges import LayerRanges
from kvferry.engines.vllm.caches import ModelShape
from kvferry.engines.vllm.layouts import numbers_in_turn


def component(name: str, layers: int, entry: Entry = Entry.TOKEN, *, is_optional: bool = False) -> Component:
    return Component(
        name=name, axes=(Axis("layer", layers), Axis("content", 2)), dtype="uint8", entry=entry, is_optional=is_optional
    )


def layout(*held: tuple[Component, int, int]) -> RankLayout:
    """Of components of which a rank holds some layers, each in a group of its own."""
    shards = []
    for each, start, stop in held:
        dims: tuple[str, ...] = ("page", "token", "content")
        shape: tuple[int, ...] = (4, 8, 2)
        if each.entry is Entry.REQUEST:
            dims, shape = ("slot", "content"), (4, 2)
        tensors = [np.zeros(shape, np.uint8) for _ in range(start, stop)]
        shards.append(
            shard_from_tensors(each, tensors, dims=dims, held={"layer": Interval(start, stop)}, group=each.name)
        )
    return RankLayout(shards=tuple(shards))


ATTENTION = component("kv", 12)


@pytest.mark.parametrize(
    ("most", "bounds"), [(1, ()), (2, (7,)), (3, (6, 8)), (6, (5, 6, 7, 8, 9)), (100, (5, 6, 7, 8, 9))]
)
def test_a_stages_layers_are_divided_evenly(most: int, bounds: tuple[int, ...]):
    assert LayerRanges.of(layout((ATTENTION, 4, 10)), most).bounds == bounds


def test_a_range_ends_before_the_layer_that_the_model_is_through_with():
    ranges = LayerRanges.of(layout((ATTENTION, 4, 10)), 3)
    assert [ranges.before(number) for number in range(4, 10)] == [0, 0, 1, 1, 2, 2]


def test_states_and_drafts_leave_with_the_last_range():
    state = component("state", 12, Entry.REQUEST)
    draft = component("draft", 1, is_optional=True)
    ranges = LayerRanges.of(layout((ATTENTION, 0, 12), (state, 0, 12), (draft, 0, 1)), 2)
    assert ranges.layers(0, 1) == {"kv": Interval(0, 6)}
    assert ranges.layers(1, 2) == {"kv": Interval(6, 12), "state": Interval(0, 12), "draft": Interval(0, 1)}
    assert ranges.before(11) < ranges.count, "only the step's end is the end of the last range"


@given(st.data())
def test_every_layer_leaves_once_and_not_before_the_model_is_through_with_it(data: st.DataObject):
    start = data.draw(st.integers(0, 10))
    stop = data.draw(st.integers(start + 1, 12))
    ranges = LayerRanges.of(layout((ATTENTION, start, stop)), data.draw(st.integers(1, 20)))
    told = data.draw(st.lists(st.integers(start, stop - 1), unique=True).map(sorted))
    taken: list[int] = []
    left = 0
    for number in told:
        if ranges.before(number) > left:
            interval = ranges.layers(left, ranges.before(number))["kv"]
            assert interval.stop <= number
            taken += range(interval.start, interval.stop)
            left = ranges.before(number)
    interval = ranges.layers(left, ranges.count)["kv"]
    taken += range(interval.start, interval.stop)
    assert taken == list(range(12))


def test_names_with_two_numbers_say_nothing_of_the_order():
    model = ModelShape(4, None, ("drafts.0.attn",))
    names = ["model.layers.0.attn", "model.layers.1.attn"]
    assert numbers_in_turn([*names, "drafts.0.attn"], model) == {names[0]: 0, names[1]: 1}
    assert numbers_in_turn([*names, "model.layers.1.attn.1"], model) == {}
