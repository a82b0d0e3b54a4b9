"""What the modules around a layer say of it: how many KV heads it has and which a rank holds, and whose layer it is.

vLLM's configuration has one number for the whole model, and layers may differ from it; an attention layer knows only
its own rank's number, and that does not tell whether it is a part of a larger one or the same on several ranks. What
does know is the projection that makes the keys and values: it loads its weights by the whole number. So that is asked,
and so is the module around it and what the layer says of its cache, each for itself. If they contradict each other, the
server does not start; if none of them knows, the number is unknown, and is not guessed.

Nor do names and numbers say which layers are a draft model's (of its own, EAGLE's, MTP modules): some drafts number
their layers behind the model's, some from 0 again, under prefixes that each has for itself. vLLM tells them apart by
when it makes them: it loads the model, then the draft, and lists layers in that order; from 0.33 on it marks them, in
0.32 its second model runner does. Where none is marked each is told by the modules around it: a draft model is another
tree of modules than the model, whose layers are the first.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from torch.nn import Module

from kvferry import Interval, RankCoordinates
from kvferry.engines.vllm.caches import HeldPart
from kvferry.errors import LayoutError

_FURTHEST = 2
"""How far from an attention layer its projection is looked for: in the attention, then in the decoder layer."""


@dataclass(frozen=True, slots=True)
class CachedHeads:
    """What a layer says of its own cache, by its spec.

    Attributes:
        count: KV heads on this rank.
        are_slots: whether a backend keeps something else than one slot a KV head, such as all keys and then all values.
        most_shards: on how many tensor-parallel ranks the cache differs; None where the layer does not say.
    """

    count: int
    are_slots: bool = False
    most_shards: int | None = None


@dataclass(frozen=True, slots=True)
class _Witness:
    """What one object says.

    Attributes:
        name: how messages call it.
        total: heads of the layer over all ranks.
        held: those of this rank; None where the object does not know.
    """

    name: str
    total: int
    held: Interval | None


def live_modules() -> list[Module]:
    """Returns all modules of this process. An attention layer knows no module around it, and a connector no model."""
    return [each for each in gc.get_objects() if issubclass(type(each), Module)]


def parents_of(modules: Iterable[Module]) -> dict[int, list[Module]]:
    """Returns the modules right around each, by the identity of the inner one."""
    parents: dict[int, list[Module]] = {}
    for each in modules:
        for child in vars(each).get("_modules", {}).values():
            parents.setdefault(id(child), []).append(each)
    return parents


def held_heads(
    cached: Mapping[str, CachedHeads],
    attention: Mapping[str, Any],
    coordinates: RankCoordinates,
    modules: Callable[[], Iterable[Module]] = live_modules,
) -> dict[str, HeldPart | None]:
    """Finds the KV heads of every layer, by its name; None where they are not known.

    On a single rank all heads are there, and nothing needs to be asked.

    Args:
        cached: what each layer says of its own cache.
        attention: the layers of the model, as vLLM lists them (`static_forward_context`).
        modules: returns modules among which are those around the attention layers. On a single rank it is not called.

    Raises:
        LayoutError: if two objects contradict each other, naming the layer, both, and what they say.
    """
    is_divided = coordinates.tp_size > 1
    # vLLM lists other layers too; and what is the same on every rank needs no projection, that of an index, say.
    layers = {id(attention[name]) for name, each in cached.items() if name in attention and each.most_shards != 1}
    parents = parents_of(modules()) if is_divided else {}
    found: dict[str, HeldPart | None] = {}
    for name, layer in cached.items():
        if layer.are_slots:
            found[name] = None
        elif not is_divided:
            found[name] = HeldPart.whole(layer.count)
        else:
            near = _near(attention[name], layers, parents) if name in attention else ()
            found[name] = _agreed(name, list(_witnesses(name, layer, near, coordinates)))
    return found


def _agreed(name: str, witnesses: list[_Witness]) -> HeldPart | None:
    for one, other in combinations(witnesses, 2):
        is_held_by_both = one.held is not None and other.held is not None
        if one.total != other.total or (is_held_by_both and one.held != other.held):
            raise _contradiction(name, f"{_said(one)}, {_said(other)}")
    held = next((witness.held for witness in witnesses if witness.held is not None), None)
    return None if held is None else HeldPart(witnesses[0].total, held)


def _said(witness: _Witness) -> str:
    held = "" if witness.held is None else f", of which this rank has {witness.held}"
    return f"{witness.name} says {witness.total} over all ranks{held}"


def _contradiction(name: str, what: str) -> LayoutError:
    return LayoutError(
        f"how the KV heads of layer {name!r} are divided is not clear: {what}. kvferry sends nothing that it may take "
        "for something else; serve this model without it, and please report this"
    )


def _witnesses(
    name: str, layer: CachedHeads, near: Iterable[Module], coordinates: RankCoordinates
) -> Iterator[_Witness]:
    if layer.most_shards == 1:
        yield _Witness("its cache", layer.count, Interval(0, layer.count))
    for module in near:
        total, own = getattr(module, "total_num_kv_heads", None), getattr(module, "num_kv_heads", None)
        replicas = getattr(module, "num_kv_head_replicas", None)
        if not isinstance(total, int) or not isinstance(own, int):
            continue
        kind = type(module).__name__
        if isinstance(replicas, int):
            if own != layer.count:
                raise _contradiction(name, f"its cache has {layer.count} on this rank, its {kind} makes {own}")
            yield _Witness(f"its {kind}", total, _projected(name, module, total, own, replicas, coordinates))
        elif own == layer.count:  # otherwise the number means something else there
            yield _Witness(f"its {kind}", total, _divided(total, own, coordinates))


def _projected(
    name: str, projection: Module, total: int, own: int, replicas: int, coordinates: RankCoordinates
) -> Interval:
    """Returns the heads that a projection makes on this rank: neighbouring ranks make the same, if several do."""
    if own == total:
        return Interval(0, total)
    rank, size = getattr(projection, "tp_rank", None), getattr(projection, "tp_size", None)
    is_here = (rank, size) == (coordinates.tp_rank, coordinates.tp_size)
    if not is_here or own * coordinates.tp_size != total * replicas:
        raise _contradiction(
            name,
            f"its {type(projection).__name__} makes {own} of {total}, each on {replicas} ranks, as rank {rank} of "
            f"{size}, and this is rank {coordinates.tp_rank} of {coordinates.tp_size}",
        )
    first = coordinates.tp_rank // replicas * own
    return Interval(first, first + own)


def _divided(total: int, own: int, coordinates: RankCoordinates) -> Interval | None:
    """Returns the heads of this rank where no other has them, or all have all; None where only a loader knows."""
    if own == total:
        return Interval(0, total)
    if own * coordinates.tp_size == total:
        return Interval(coordinates.tp_rank * own, (coordinates.tp_rank + 1) * own)
    return None


def _near(layer: Any, attention: Collection[int], parents: Mapping[int, Sequence[Module]]) -> list[Module]:
    """Returns the modules around a layer that say how many heads there are, unless another layer is among them.

    Those of its own attention come first; what is further away counts only if they say nothing.

    Args:
        attention: attention layers, by their ids.
        parents: as of `parents_of`.
    """
    level = [layer]
    for _ in range(_FURTHEST):
        around = {id(parent): parent for each in level for parent in parents.get(id(each), ())}
        level = [each for each in around.values() if not _has_another(each, layer, attention)]
        inside = {id(each): each for parent in level for each in parent.modules()}
        if near := [each for each in inside.values() if hasattr(each, "total_num_kv_heads")]:
            return near
    return []


def _has_another(parent: Module, layer: Any, attention: Collection[int]) -> bool:
    return any(id(each) in attention and each is not layer for each in parent.modules())


def draft_layers(
    cached: Collection[str],
    layers: Mapping[str, Any],
    modules: Callable[[], Iterable[Module]] = live_modules,
) -> tuple[str, ...]:
    """Returns the names of the layers that are a draft model's, in the order in which vLLM has made them.

    The mark on a layer is asked, not the `is_draft` of its cache's spec, which vLLM takes from it: layers share specs.
    The layer of `extract_hidden_states` has no mark in vLLM's first model runner.

    Args:
        cached: the names of all layers that have a cache.
        layers: the layers, as vLLM lists them (`static_forward_context`): those of the model first.
        modules: returns modules among which are those around the layers.

    Raises:
        LayoutError: if it is not clear of a layer whose it is, naming the layer.
    """
    if missing := sorted(set(cached) - layers.keys()):
        raise LayoutError(f"vLLM does not list layer {missing[0]!r}: whether it is a draft model's cannot be told")
    if marked := tuple(
        name for name, layer in layers.items() if name in cached and getattr(layer, "is_draft_layer", False)
    ):
        return marked
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
