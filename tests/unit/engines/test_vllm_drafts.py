"""Which layers are a draft model's, by the modules around them."""

from __future__ import annotations

import pytest
from torch.nn import Linear, Module, ModuleList

from kvferry.engines.vllm.modules import draft_layers
from kvferry.errors import LayoutError


class Decoder(Module):
    """A model of some layers, each with an attention layer inside."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.embed_tokens = Linear(2, 2)
        self.layers = ModuleList()
        for _ in range(count):
            self.layers.append(Module())
            self.layers[-1].attn = Linear(2, 2)

    def named(self, prefix: str) -> dict[str, Module]:
        """Its attention layers, as vLLM lists them."""
        return {
            f"{prefix}.layers.{number}.attn": layer.get_submodule("attn") for number, layer in enumerate(self.layers)
        }


class Whole(Module):
    """A decoder within a module for another kind of input, say."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.model = Decoder(count)


def modules(*models: Module) -> list[Module]:
    return [each for model in models for each in model.modules()]


@pytest.mark.parametrize("prefix", ["draft_model.model", "mtp", "model"])
def test_layers_of_another_tree_are_a_draft_models_in_vllms_order(prefix: str):
    model, draft = Whole(3), Whole(2)
    drafts = {name.replace("1", "9"): layer for name, layer in draft.model.named(prefix).items()}
    if prefix == "model":  # numbered behind those of the model
        drafts = {f"model.layers.{number + 3}.attn": layer for number, layer in enumerate(drafts.values())}
    draft.model.embed_tokens = model.model.embed_tokens  # which drafts share
    layers = {**model.model.named("model"), **drafts, "model.layers.0.moe": Linear(2, 2)}
    cached = set(layers) - {"model.layers.0.moe"}
    assert draft_layers(cached, layers, lambda: modules(model, draft)) == tuple(drafts)


def test_layers_that_vllm_has_marked_are_a_draft_models_and_no_module_is_looked_for():
    model, draft = Whole(3), Whole(2)
    marked = draft.model.named("model.extra")
    for layer in marked.values():
        vars(layer)["is_draft_layer"] = True
    first, *others = model.model.named("model").items()
    layers = dict([first, *marked.items(), *others])  # as one tree has them, which could not be told

    def modules() -> list[Module]:
        pytest.fail("all modules of the process are gone through")

    assert draft_layers(set(layers), layers, modules) == tuple(marked)


def test_without_a_draft_model_none_is():
    model = Whole(2)
    assert draft_layers(set(model.model.named("m")), model.model.named("m"), lambda: modules(model)) == ()


def test_modules_that_compilers_put_around_a_layer_change_nothing():
    model, draft = Whole(2), Whole(2)
    wrapped = [Module() for _ in range(3)]
    wrapped[0].inner, wrapped[1].inner = model.model.layers[1], draft.model.layers[1]
    wrapped[2].inner = model
    layers = {**model.model.named("model"), **draft.model.named("draft_model")}
    found = draft_layers(set(layers), layers, lambda: [*modules(model, draft), *wrapped])
    assert found == tuple(draft.model.named("draft_model"))


def test_what_cannot_be_told_is_refused():
    model, draft = Whole(2), Whole(1)
    layers = {**model.model.named("model"), **draft.model.named("mtp")}
    with pytest.raises(LayoutError, match=r"no module is around layer 'mtp.layers.0.attn'"):
        draft_layers(set(layers), layers, lambda: modules(model))
    with pytest.raises(LayoutError, match=r"does not list layer 'other'"):
        draft_layers({*layers, "other"}, layers, lambda: modules(model, draft))
    first, last = model.model.named("model").items()
    mixed = dict([first, *draft.model.named("mtp").items(), last])
    with pytest.raises(LayoutError, match=r"'model.layers.1.attn' is one of the model's and was made after 'mtp.lay"):
        draft_layers(set(mixed), mixed, lambda: modules(model, draft))
