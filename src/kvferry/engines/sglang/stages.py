"""Which layers of each kind a pipeline stage has: full and sparse attention, sliding windows, recurrent state.

A stage has neighbouring layers of the model, and of each kind as many as are among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry.engines.sglang.caches import Stage, Stages
from kvferry.engines.sglang.minimax import MINIMAX_POOLS, layers_of_model
from kvferry.errors import LayoutError


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
        dense, sparse = layers_of_model(model)
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
