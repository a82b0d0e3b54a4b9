"""Rules of who holds which part of a component, for every rank of an engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LayoutError
from kvferry.layout import (
    Axis,
    Component,
    Interval,
    RankCoordinates,
    ShardedComponent,
    all_coordinates,
    attention_components,
    even_stages,
    latent_component,
    stage_of,
    state_component,
)

K, _ = attention_components(num_layers=3, num_kv_heads=4, head_dim=2, dtype="int8")
STATE = state_component("state", num_layers=3, axes=(Axis("head", 6), Axis("dim", 2)), dtype="int8")


def test_tensor_parallelism_divides_one_axis_and_no_other():
    sharded = ShardedComponent(component=K, layers=(0, 1, 2), tp_axis="head")
    rank = RankCoordinates(tp_rank=1, tp_size=2)
    assert sharded.held(rank, Interval(0, 3)) == (Interval(0, 3), Interval(2, 4), Interval(0, 2))


def test_without_an_axis_every_rank_holds_all():
    latent = latent_component(num_layers=3, latent_dim=8, dtype="int8")
    sharded = ShardedComponent(component=latent, layers=(0, 1, 2))
    boxes = {sharded.held(rank, Interval(0, 3)) for rank in all_coordinates(tp_size=4, cp_size=2)}
    assert boxes == {latent.whole}


def test_more_ranks_than_heads_hold_the_same_head():
    sharded = ShardedComponent(component=K, layers=(0, 1, 2), tp_axis="head")
    heads = [sharded.held(rank, Interval(0, 3))[1] for rank in all_coordinates(tp_size=8)]
    assert heads == [Interval(head, head + 1) for head in (0, 0, 1, 1, 2, 2, 3, 3)]


def test_an_axis_is_divided_by_its_name_wherever_it_stands():
    sharded = ShardedComponent(component=STATE, layers=(0, 1, 2), tp_axis="dim")
    assert sharded.held(RankCoordinates(tp_rank=1, tp_size=2), Interval(0, 3))[1:] == (Interval(0, 6), Interval(1, 2))


@pytest.mark.parametrize(
    ("stage", "held"),
    [((0, 4), (0, 2)), ((4, 8), (2, 3)), ((0, 3), (0, 1)), ((3, 4), (1, 2)), ((4, 7), (2, 2)), ((8, 9), (3, 3))],
)
def test_a_hybrid_holds_the_layers_that_the_stage_has_of_its_kind(stage: tuple[int, int], held: tuple[int, int]):
    """Attention in layers 0, 3 and 7 of 8."""
    sharded = ShardedComponent(component=K, layers=(0, 3, 7), tp_axis="head")
    assert sharded.held(RankCoordinates(), Interval(*stage))[0] == Interval(*held)


@st.composite
def divided_models(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Layers per stage, and the layers of one kind."""
    stages = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any))
    return tuple(stages), tuple(sorted(draw(st.sets(st.integers(0, sum(stages) - 1), min_size=1))))


@given(divided_models())
def test_stages_hold_every_layer_of_a_kind_once(model: tuple[tuple[int, ...], tuple[int, ...]]):
    stages, layers = model
    component = Component(name="k", axes=(Axis("layer", len(layers)),), dtype="int8")
    sharded = ShardedComponent(component=component, layers=layers)
    found: list[int] = []
    for rank in all_coordinates(pp_size=len(stages)):
        stage = stage_of(rank, stages)
        (held,) = sharded.held(rank, stage)
        assert all(stage.start <= layers[index] < stage.stop for index in range(held.start, held.stop))
        found += range(held.start, held.stop)
    assert found == list(range(len(layers)))


@pytest.mark.parametrize("layers", [(0, 1), (0, 1, 2, 3), (0, 2, 1), (0, 1, 1)])
def test_layers_that_do_not_fit_the_component_are_refused(layers: tuple[int, ...]):
    with pytest.raises(LayoutError, match="component 'k' has layer 3: that takes 3 ascending model layers") as caught:
        ShardedComponent(component=K, layers=layers)
    assert str(list(layers)) in str(caught.value)


@pytest.mark.parametrize("axis", ["heads", "layer"])
def test_an_axis_that_cannot_be_divided_is_refused(axis: str):
    message = rf"'k' has no axis '{axis}' to divide: its axes are \['head', 'dim'\] besides 'layer'"
    with pytest.raises(LayoutError, match=message):
        ShardedComponent(component=K, layers=(0, 1, 2), tp_axis=axis)


def test_even_stages():
    assert even_stages(8, 4) == (2, 2, 2, 2)
    assert even_stages(15, 2) == (7, 8)
    assert even_stages(3, 3) == (1, 1, 1)


@pytest.mark.parametrize("stages", [0, 4, -1])
def test_more_stages_than_layers_are_refused(stages: int):
    with pytest.raises(LayoutError, match=f"3 layers cannot be divided into {stages} pipeline stages"):
        even_stages(3, stages)


def test_the_stage_of_a_rank():
    rank = RankCoordinates(pp_rank=1, pp_size=3)
    assert stage_of(rank, (7, 8, 1)) == Interval(7, 15)
    with pytest.raises(LayoutError, match=r"2 stages \[7, 8\] for pp_size 3"):
        stage_of(rank, (7, 8))
