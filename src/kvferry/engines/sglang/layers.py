"""What is said of a model's layers: which of each kind a pipeline stage has, and how many KV heads they have in all.

A stage has neighbouring layers of the model, and of each kind as many as are among them: with full and sparse
attention, sliding windows, recurrent state.

Of KV heads SGLang's configuration has a number for layers with full attention and one for windows; whether a layer goes
by it is the model's own affair. A projection loads its weights by the whole number, so that it knows. An attention
layer does not know the module that it is in, and a manager is not given the model; but modules know their children, and
Python knows all modules.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.nn import Module

from kvferry.engines.sglang.caches import NOTHING, Attention, Stage, Stages
from kvferry.errors import LayoutError

MINIMAX_POOLS = ("MiniMaxSparseKVPool", "MiniMaxM3Nvfp4KVPool")

INDEX, DENSE = "minimax_index_k", "minimax_dense_kv"
"""What SGLang lists apart beside these, in pages of the same numbers, by the values of its StateType."""


# ---- KV heads -------------------------------------------------------------------------------------------------------


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


# ---- pipeline stages ------------------------------------------------------------------------------------------------


def stages_of(args: Any, model: Any, recurrent: Any, pool: Any) -> Stages:
    """Returns which layers of each kind a pipeline stage has.

    Args:
        args: the rank's KVArgs.
        model: its ModelConfig.
        recurrent: the configuration of its layers with recurrent state; None if it has none.
        pool: what the rank keeps keys and values in.

    Raises:
        LayoutError: if SGLang does not say which layers are of which kind.
    """
    name = type(pool).__name__
    if name == "SWAKVPool":
        full, windows = model.full_attention_layer_ids, model.swa_attention_layer_ids
        return Stages(
            attention=_stage(full, getattr(pool.full_kv_pool, "model_layer_ids", None), "full attention"),
            window=_stage(windows, getattr(pool.swa_kv_pool, "model_layer_ids", None), "sliding windows"),
        )
    if name in MINIMAX_POOLS:
        dense, sparse = _minimax_layers(model)
        return Stages(
            attention=_stage(sparse, sorted(pool.sparse_layer_id_mapping), "sparse attention"),
            dense=_stage(dense, sorted(pool._dense_layer_ids), "dense attention"),
        )
    if name in ("HybridLinearKVPool", "QSATokenToKVPool"):
        full, states = recurrent.full_attention_layer_ids, recurrent.mamba2_cache_params.layers
        listed = zip(args.state_types, args.state_layer_ids, strict=True)
        held = sorted({layer for kind, layers in listed if kind.value == "mamba" for layer in layers})
        if not held:
            raise LayoutError(
                "no layer of this pipeline stage has recurrent state, and nothing says how long it is elsewhere: "
                "divide layers so that every stage has one (SGLANG_PP_LAYER_PARTITION)"
            )
        return Stages(
            attention=_stage(full, [*pool.full_attention_layer_id_mapping], "full attention"),
            state=_stage(states, held, "recurrent state"),
        )
    return Stages(attention=Stage(pool.start_layer, model.num_hidden_layers))


def _stage(of_model: Sequence[int] | None, held: Sequence[int] | None, kind: str) -> Stage:
    """Returns which of a model's layers of one kind a rank has.

    Args:
        of_model: their numbers in the whole model, ascending.
    """
    if of_model is None or held is None:
        raise LayoutError(
            f"SGLang does not say which layers of this pipeline stage have {kind}, nor can it be told: --pp-size 1"
        )
    numbers = [*of_model]
    if not held:
        return Stage(0, len(numbers))
    first = numbers.index(held[0]) if held[0] in numbers else -1
    if first < 0 or numbers[first : first + len(held)] != [*held]:
        raise LayoutError(
            f"this pipeline stage has layers {[*held]} with {kind}, which are not neighbours among the model's "
            f"{numbers}"
        )
    return Stage(first, len(numbers))


def minimax_of_stage(apart: dict[str, Attention], full: Attention, model: Any) -> dict[str, Attention]:
    """Returns what a pipeline stage has of what SGLang lists apart; nothing where none of its layers have any.

    Args:
        apart: what SGLang lists of the stage.
        full: its keys and values of layers with sparse attention.
        model: the ModelConfig.
    """
    nothing = {INDEX: replace(NOTHING, pages=full.pages)}
    if len(_minimax_layers(model)[0]):
        nothing[DENSE] = replace(NOTHING, heads=full.heads, pages=full.pages)
    return nothing | apart


def _minimax_layers(model: Any) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the numbers of a model's layers without sparse attention, and of those with it."""
    from sglang.srt.configs.model_config import get_minimax_sparse_attention_config, get_minimax_sparse_layer_ids

    dense, sparse = get_minimax_sparse_layer_ids(get_minimax_sparse_attention_config(model.hf_config))
    return dense, sparse
