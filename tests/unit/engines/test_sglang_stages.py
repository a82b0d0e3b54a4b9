"""Which layers of each kind a pipeline stage of SGLang's has, and how many heads its draft model has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.sglang_pools import Lists, heads_pool, mamba_pool, model_config, named, remembered

from kvferry import RankCoordinates
from kvferry.engines.sglang.caches import Heads, Stage, Stages
from kvferry.engines.sglang.layers import stages_of
from kvferry.engines.sglang.pools import caches_of
from kvferry.errors import LayoutError

MODEL = SimpleNamespace(
    num_hidden_layers=8, full_attention_layer_ids=[1, 3, 5, 7], swa_attention_layer_ids=[0, 2, 4, 6]
)
RECURRENT = SimpleNamespace(
    full_attention_layer_ids=[3, 7], mamba2_cache_params=SimpleNamespace(layers=[0, 1, 2, 4, 5, 6])
)


def windows(full: tuple[int, ...], windowed: tuple[int, ...]) -> Any:
    pools = (heads_pool(1, model_layer_ids=full), heads_pool(1, model_layer_ids=windowed))
    return named("SWAKVPool", full_kv_pool=pools[0], swa_kv_pool=pools[1])


def hybrid(full: tuple[int, ...]) -> Any:
    mapping = {layer: index for index, layer in enumerate(full)}
    return named("HybridLinearKVPool", full_attention_layer_id_mapping=mapping, mamba_pool=mamba_pool([], []))


def test_a_stage_of_a_model_with_one_kind_of_layer_begins_where_its_pool_does():
    assert stages_of(None, MODEL, None, heads_pool(1, start_layer=5)) == Stages(Stage(5, 8))


def test_layers_of_each_kind_are_counted_among_themselves():
    assert stages_of(None, MODEL, None, windows((5, 7), (4, 6))) == Stages(Stage(2, 4), Stage(2, 4))
    args = SimpleNamespace(state_types=[SimpleNamespace(value="mamba")], state_layer_ids=[[4, 5, 6, 4, 5, 6]])
    assert stages_of(args, MODEL, RECURRENT, hybrid((7,))) == Stages(Stage(1, 2), state=Stage(3, 6))


def test_a_stage_may_have_none_of_a_kind():
    assert stages_of(None, MODEL, None, windows((), (4,))) == Stages(Stage(0, 4), Stage(2, 4))


@pytest.mark.parametrize("layers", [(5, 9), (1, 5)])
def test_layers_that_are_no_neighbours_are_refused(layers: tuple[int, ...]):
    with pytest.raises(LayoutError, match=r"layers \[., .\] with full attention, which are not neighbours"):
        stages_of(None, MODEL, None, windows(layers, (4,)))


def test_a_stage_without_recurrent_state_in_a_model_that_has_some_is_refused():
    with pytest.raises(LayoutError, match="no layer of this pipeline stage has recurrent state"):
        stages_of(
            SimpleNamespace(state_types=[SimpleNamespace(value="mamba")], state_layer_ids=[[]]),
            MODEL,
            RECURRENT,
            hybrid((3,)),
        )


# ---- draft models ---------------------------------------------------------------------------------------------------


def drafted(draft: Any, config: Any) -> Any:
    """The KVArgs of a rank with a draft model of one layer."""
    lists = Lists()
    lists.attention(2, 8)
    lists.attention(1, 8)
    lists.args.num_draft_entries = 2
    args = lists.in_pools(heads_pool(1), draft)
    remembered(args, heads_pool(1), draft, draft_runners=[SimpleNamespace(model_config=config)])
    return args


def read(args: Any, tp: int) -> Heads | None:
    return caches_of(args, model_config(2), None, {}, place=RankCoordinates(tp_size=tp)).draft_heads


def test_a_draft_models_heads_are_counted_by_its_own_configuration():
    assert read(drafted(heads_pool(2), model_config(4)), 2) == Heads(2, 4, 8, 8)
    assert read(drafted(heads_pool(1), model_config(1)), 2) == Heads(1, 1, 8, 8)


def test_a_draft_models_heads_that_its_pool_does_not_confirm_are_unknown():
    assert read(drafted(heads_pool(1), model_config(4)), 2) == Heads(1, None, 8, 8)
    args = drafted(heads_pool(1), model_config(2))
    remembered(args, heads_pool(1), heads_pool(1))
    assert read(args, 2) == Heads(1, None, 8, 8)


def test_a_draft_models_latents_have_no_heads():
    assert read(drafted(named("MLATokenToKVPool"), model_config(1)), 2) is None
