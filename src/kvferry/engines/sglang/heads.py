"""How many KV heads the whole model has in a layer, as the projections say that make them.

SGLang's configuration has a number for layers with full attention and one for windows; whether a layer goes by it is
the model's own affair. A projection loads its weights by the whole number, so that it knows. An attention layer does
not know the module that it is in, and a manager is not given the model; but modules know their children, and Python
knows all modules.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping

from torch.nn import Module


def loaded_modules(*, apart_from: Iterable[Module] = ()) -> Iterator[Module]:
    """Yields every module of this process that has been made to the end.

    Args:
        apart_from: modules to leave out: those of a draft model, which numbers its layers from 0 again.
    """
    others = {id(each) for each in apart_from}
    return (
        each
        for each in gc.get_objects()
        if issubclass(type(each), Module) and "_modules" in vars(each) and id(each) not in others
    )


def totals_by_layer(modules: Iterable[Module]) -> Mapping[int, frozenset[int]]:
    """Returns what is said of each layer: how many KV heads it has over all ranks, by the layer's number.

    Two numbers may be said of one layer where another model is in the process.
    """
    totals: dict[int, frozenset[int]] = {}
    for module in modules:
        children = list(module.children())
        for attention in children:
            layer, held = getattr(attention, "layer_id", None), getattr(attention, "tp_k_head_num", None)
            if isinstance(layer, int) and isinstance(held, int):
                said = (getattr(each, "total_num_kv_heads", None) for each in (module, *children))
                totals[layer] = totals.get(layer, frozenset()) | {each for each in said if isinstance(each, int)}
    return totals


def total_of(totals: Mapping[int, frozenset[int]], layers: Iterable[int] | None, configured: int | None) -> int | None:
    """Returns how many KV heads the layers of one pool have; None if they differ, or nobody knows.

    Args:
        totals: what projections say of each layer.
        layers: those of the pool; None for all.
        configured: what the configuration says; it counts where no projection says anything.
    """
    ours = totals.keys() if layers is None else layers
    said = frozenset[int]().union(*(totals.get(layer, frozenset()) for layer in ours))
    if not said:
        return configured
    return next(iter(said)) if len(said) == 1 else None
