"""Caches described by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvferry.errors import ModelError
from kvferry.layout import Axis, Component, Entry, ShardedComponent
from kvferry.models import FAMILIES, ModelCache, model_cache_from_config, read_model_cache, reading

ROOT = Path(__file__).parents[3]
K = {"name": "k", "layers": "all", "axes": {"head": 8, "dim": 128}, "dtype": "bfloat16", "tp_axis": "head"}


def cache_of(*components: dict[str, Any], num_layers: int = 8) -> ModelCache:
    description = {"name": "mine", "num_layers": num_layers, "components": list(components)}
    return model_cache_from_config({"kvferry": description}, source="mine.json")


def test_everything_that_can_be_said(tmp_path: Path):
    components = [
        K,
        {"name": "state", "layers": {"start": 1, "stop": 8, "step": 3}, "axes": {"head": 4}, "dtype": "float32"}
        | {"entry": "request"},
        {"name": "w", "layers": [0, 5], "axes": {"head": 2, "dim": 4}, "dtype": "int8", "window_tokens": 64},
        {"name": "p", "layers": {"start": 6, "stop": 8}, "axes": {"packed": 9}, "dtype": "uint8"}
        | {"entry": "page", "packing": "odd"},
        {"name": "draft_k", "layers": [8, 9], "axes": {"dim": 4}, "dtype": "int8", "optional": True},
    ]
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"kvferry": {"name": "mine", "num_layers": 8, "components": components}}))
    cache = read_model_cache(file)
    assert (cache.name, cache.num_layers) == ("mine", 8)
    k = Component(name="k", axes=(Axis("layer", 8), Axis("head", 8), Axis("dim", 128)), dtype="bfloat16")
    state = Component(name="state", axes=(Axis("layer", 3), Axis("head", 4)), dtype="float32", entry=Entry.REQUEST)
    window = Component(
        name="w", axes=(Axis("layer", 2), Axis("head", 2), Axis("dim", 4)), dtype="int8", window_tokens=64
    )
    page = Component(
        name="p", axes=(Axis("layer", 2), Axis("packed", 9)), dtype="uint8", entry=Entry.PAGE, packing="odd"
    )
    draft = Component(name="draft_k", axes=(Axis("layer", 2), Axis("dim", 4)), dtype="int8", is_optional=True)
    assert cache.components == (
        ShardedComponent(component=k, layers=tuple(range(8)), tp_axis="head"),
        ShardedComponent(component=state, layers=(1, 4, 7)),
        ShardedComponent(component=window, layers=(0, 5)),
        ShardedComponent(component=page, layers=(6, 7)),
    )
    assert cache.draft == (ShardedComponent(component=draft, layers=(8, 9)),)
    assert cache.layers_per_stage(2) == (4, 6)


def test_a_description_wins_over_the_rest_of_a_configuration():
    description = {"name": "mine", "num_layers": 8, "components": [K]}
    config = {"model_type": "llama", "num_hidden_layers": 0, "kvferry": description}
    assert model_cache_from_config(config) == cache_of(K)


def test_what_the_engine_chooses_stands_in_the_description():
    description = {"name": "mine", "num_layers": 8, "components": [K]}
    with pytest.raises(ModelError, match=r"mine\.json describes its cache by hand: write dtypes"):
        model_cache_from_config({"kvferry": description}, cache_dtype="int8", source="mine.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": None}, r"Expected `str`, got `null` - at `\$\.components\[0\]\.name`"),
        ({"layers": "some"}, r"\$\.components\[0\]\.layers"),
        ({"layers": []}, "component 'k' has no layers"),
        ({"layers": {"start": 5, "stop": 5}}, "component 'k' has no layers"),
        (
            {"layers": {"start": 0, "stop": 5, "step": 0}},
            r"Expected `int` >= 1 - at `\$\.components\[0\]\.layers\.step`",
        ),
        ({"layers": [-1]}, r"Expected `int` >= 0 - at `\$\.components\[0\]\.layers"),
        ({"layers": [1, 0]}, "2 ascending model layers"),
        ({"layers": [8]}, "draft component 'k' of model 'mine' must be optional"),
        ({"layers": [7, 8], "optional": True}, "layers 7 to 8; draft layers come after the model's own"),
        ({"axes": {"head": 0}}, r"Expected `int` >= 1 - at `\$\.components\[0\]\.axes"),
        ({"axes": {"head": 4.5}}, r"Expected `int`, got `float`"),
        ({"axes": {"layer": 4}}, "axes .*each name once"),
        ({"axes": {"token": 4}}, "token, page or slot axis goes without saying"),
        ({"dtype": "fp16"}, "'k' has dtype 'fp16': known are"),
        ({"tp_axis": "heads"}, "has no axis 'heads' to divide"),
        ({"entry": "slot"}, "Invalid enum value 'slot'"),
        ({"entry": "page"}, "packed pages, and only they, name their inner format"),
        ({"window_tokens": 0}, "Expected `int` >= 1"),
        ({"entry": "request", "window_tokens": 4}, "state of a whole request has none"),
        ({"colour": "red"}, "unknown field `colour`"),
    ],
)
def test_a_component_that_is_described_wrongly(change: dict[str, Any], message: str):
    with pytest.raises(ModelError, match=r"(?s)^mine\.json: .*" + message):
        cache_of(K | change)


@pytest.mark.parametrize("description", [None, [], {}, {"name": "mine", "num_layers": 0, "components": [K]}])
def test_a_description_of_another_form_is_shown_the_right_one(description: object):
    with pytest.raises(ModelError) as caught:
        model_cache_from_config({"kvferry": description}, source="mine.json")
    assert str(caught.value).startswith("mine.json: kvferry: ")
    assert reading.EXAMPLE in str(caught.value)


def test_names_that_appear_twice_and_nothing_at_all():
    with pytest.raises(ModelError, match=r"mine\.json: .*several components called \['k'\]"):
        cache_of(K, K)
    with pytest.raises(ModelError, match=r"mine\.json: .*caches nothing"):
        cache_of()


def test_the_document_lists_every_model_type():
    text = (ROOT / "docs/design/models.md").read_text()
    listed = set(re.findall(r"`([a-z0-9_]+)`", text))
    assert {name.removesuffix("_text") for name in FAMILIES} <= listed


def test_the_examples_in_the_documents_are_valid():
    blocks = re.findall(
        r"^```json\n(.*?)^```$", (ROOT / "docs/design/models.md").read_text(), flags=re.MULTILINE | re.DOTALL
    )
    assert len(blocks) >= 2
    for block in blocks:
        assert model_cache_from_config(json.loads(block)).components
    assert reading.__doc__ is not None
    indented = reading.__doc__[reading.__doc__.index("    {") : reading.__doc__.index("`layers`")]
    assert model_cache_from_config(json.loads(indented)) == model_cache_from_config(json.loads(reading.EXAMPLE))
