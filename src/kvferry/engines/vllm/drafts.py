"""Which layers are a draft model's: of its own, EAGLE's, or MTP modules.

Names and numbers do not say it: some drafts number their layers behind the model's, some from 0 again, under prefixes
that each has for itself. vLLM tells them apart by when it makes them: it loads the model, then the draft, and lists
layers in that order. Here each is told by the modules around it: a draft model is another tree of modules than the
model, whose layers are the first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch.nn import Module

from kvferry.engines.vllm.heads import live_modules, parents_of
from kvferry.errors import LayoutError


def draft_layers(
    cached: Collection[str],
    layers: Mapping[str, Any],
    modules: Callable[[], Iterable[Module]] = live_modules,
) -> tuple[str, ...]:
    """Returns the names of the layers that are a draft model's, in the order in which vLLM has made them.

    Args:
        cached: the names of all layers that have a cache.
        layers: the layers, as vLLM lists them (`static_forward_context`): those of the model first.
        modules: returns modules among which are those around the layers.

    Raises:
        LayoutError: if it is not clear of a layer whose it is, naming the layer.
    """
    if missing := sorted(set(cached) - layers.keys()):
        raise LayoutError(f"vLLM does not list layer {missing[0]!r}: whether it is a draft model's cannot be told")
    parents = parents_of(modules())
    tops = {name: _tops(layer, parents) for name, layer in layers.items() if name in cached}
    model: set[int] = set()
    drafts: list[str] = []
    for name, own in tops.items():
        if id(layers[name]) in own:
            raise LayoutError(f"no module is around layer {name!r}: whether it is a draft model's cannot be told")
        if not model or (not drafts and model & own):
            model |= own
        elif not model & own:
            drafts.append(name)
        else:
            raise LayoutError(
                f"layer {name!r} is one of the model's and was made after {drafts[0]!r}, which is not: whose layers "
                "these are cannot be told. Let this server draft without a model, and please report this"
            )
    return tuple(drafts)


def _tops(layer: Any, parents: Mapping[int, list[Module]]) -> set[int]:
    """Returns the outermost modules around a layer, by their ids. Compilers put modules of their own around some."""
    seen, level = {id(layer)}, [id(layer)]
    tops: set[int] = set()
    while level:
        around = {id(parent) for each in level for parent in parents.get(each, ())}
        tops.update(each for each in level if each not in parents)
        level = sorted(around - seen)
        seen |= around
    return tops
