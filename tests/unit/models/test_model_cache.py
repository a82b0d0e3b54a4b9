"""Whole caches: stages of pipelines, draft layers, scales."""

from __future__ import annotations

import pytest

from kvferry.errors import LayoutError, ModelError
from kvferry.layout import Axis, Component, Entry, ShardedComponent
from kvferry.models import ModelCache, with_block_scales


def sharded(
    name: str, *layers: int, dtype: str = "int8", tp_axis: str | None = None, optional: bool = False
) -> ShardedComponent:
    axes = (Axis("layer", len(layers)), Axis("head", 4), Axis("dim", 6))
    component = Component(name=name, axes=axes, dtype=dtype, is_optional=optional)
    return ShardedComponent(component=component, layers=layers, tp_axis=tp_axis)


def cache(*components: ShardedComponent, draft: tuple[ShardedComponent, ...] = ()) -> ModelCache:
    return ModelCache(name="mine", num_layers=7, components=components, draft=draft)


def test_stages_are_even_or_as_they_are_given():
    plain, drafting = cache(sharded("k", 0)), cache(sharded("k", 0), draft=(sharded("d", 7, 9, optional=True),))
    assert plain.num_draft_layers == 0
    assert plain.layers_per_stage() == (7,)
    assert plain.layers_per_stage(3) == (2, 2, 3)
    assert drafting.num_draft_layers == 3
    assert drafting.layers_per_stage(3) == (2, 2, 6)
    assert drafting.layers_per_stage([4, 3]) == (4, 6)
    assert drafting.layers_per_stage([7, 0]) == (7, 3)


@pytest.mark.parametrize("stages", [[4, 4], [], [8, -1], [3, 3]])
def test_stages_that_do_not_have_the_models_layers(stages: list[int]):
    with pytest.raises(LayoutError, match="'mine' has 7, its draft layers not counted"):
        cache(sharded("k", 0)).layers_per_stage(stages)


def test_more_stages_than_layers():
    with pytest.raises(LayoutError, match="7 layers cannot be divided into 8 pipeline stages"):
        cache(sharded("k", 0)).layers_per_stage(8)


def test_layers_that_are_on_the_wrong_side():
    with pytest.raises(ModelError, match="has layers 0 to 6, its component 'k' layers 6 to 7"):
        cache(sharded("k", 6, 7))
    with pytest.raises(ModelError, match="must be optional, with layers from 7 on; it has layers from 6 on"):
        cache(sharded("k", 0), draft=(sharded("d", 6, optional=True),))
    with pytest.raises(ModelError, match="draft component 'd' of model 'mine' must be optional"):
        cache(sharded("k", 0), draft=(sharded("d", 7),))
    with pytest.raises(ModelError, match=r"several components called \['k'\]"):
        cache(sharded("k", 0), draft=(sharded("k", 7, optional=True),))


@pytest.mark.parametrize(("block", "blocks"), [(None, 1), (1, 6), (2, 3), (4, 2), (6, 1), (100, 1)])
def test_one_scale_for_each_block_of_the_last_axis(block: int | None, blocks: int):
    scaled = with_block_scales(cache(sharded("k", 0, 2, tp_axis="head")), block=block)
    k, scale = scaled.components
    assert k == sharded("k", 0, 2, tp_axis="head")
    assert scale.component.axes == (Axis("layer", 2), Axis("head", 4), Axis("block", blocks))
    assert (scale.layers, scale.tp_axis, scale.component.dtype) == ((0, 2), "head", "float32")


def test_only_what_is_quantised_and_has_no_scales_gets_them():
    state = Component(name="s", axes=(Axis("layer", 1), Axis("head", 4)), dtype="int8", entry=Entry.REQUEST)
    original = cache(
        sharded("k", 0),
        sharded("wide", 0, dtype="bfloat16"),
        ShardedComponent(component=state, layers=(0,)),
        sharded("v", 0),
        sharded("v_scale", 0, dtype="uint8"),
    )
    names = [each.component.name for each in with_block_scales(original).components]
    assert names == ["k", "k_scale", "wide", "s", "v", "v_scale"]
    assert with_block_scales(with_block_scales(cache(sharded("k", 0)), dtype="uint8"), block=2).components == (
        with_block_scales(cache(sharded("k", 0)), dtype="uint8").components
    )


def test_scales_that_cannot_be():
    with pytest.raises(ModelError, match="caches bfloat16: there is nothing to scale"):
        with_block_scales(cache(sharded("k", 0, dtype="bfloat16")))
    with pytest.raises(ModelError, match="scales are for blocks of the last axis, which must not be the layer or be"):
        with_block_scales(cache(sharded("k", 0, tp_axis="dim")))
    with pytest.raises(ModelError, match="block is 0"):
        with_block_scales(cache(sharded("k", 0)), block=0)
