"""What vLLM refuses for connectors that it knows by name is refused for ours, in words that say what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry import RankCoordinates
from kvferry.engines.vllm.caches import CacheGroup, ModelShape
from kvferry.engines.vllm.guards import held_back_tokens, refuse_what_would_be_wrong
from kvferry.engines.vllm.layouts import describe
from kvferry.errors import LayoutError, SettingsError


def configuration(
    *,
    experts: bool = False,
    hisparse: object = None,
    lookahead: int = 0,
    has_parts: bool = False,
    sleeps: bool = False,
    is_elastic: bool = False,
    stages: int = 1,
    drafts: bool = False,
    is_second_runner: bool = False,
) -> Any:
    """As much of vLLM's as it takes; `CONTRACTS` say that vLLM's has the same."""
    return SimpleNamespace(
        aux_output_config=SimpleNamespace(enable_return_routed_experts=experts),
        attention_config=SimpleNamespace(hisparse_config=hisparse),
        model_config=SimpleNamespace(enable_sleep_mode=sleeps),
        num_prefill_lookahead_tokens=lookahead,
        parallel_config=SimpleNamespace(
            use_ubatching=has_parts, pipeline_parallel_size=stages, enable_elastic_ep=is_elastic
        ),
        speculative_config=SimpleNamespace() if drafts else None,
        use_v2_model_runner=is_second_runner,
    )


def test_what_is_right_is_not_refused():
    refuse_what_would_be_wrong(configuration())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"experts": True},
            "--enable-return-routed-experts: the experts of a prompt's tokens stay on the prefill server",
        ),
        ({"hisparse": object()}, "leave out hisparse_config and the HiSparseConnector"),
        ({"sleeps": True}, "--enable-sleep-mode: waking replaces the KV cache's memory"),
        ({"is_elastic": True}, "--enable-elastic-ep: /scale_elastic_ep replaces ranks"),
        ({"stages": 2, "drafts": True}, "--pipeline-parallel-size and --speculative-config: where vLLM drafts"),
    ],
)
def test_what_would_be_wrong_is_refused_by_name(changes: dict[str, Any], said: str):
    with pytest.raises(SettingsError, match="kvferry's connector for vLLM cannot serve like this: ") as caught:
        refuse_what_would_be_wrong(configuration(**changes))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "changes", [{"stages": 2}, {"drafts": True}, {"stages": 2, "drafts": True, "is_second_runner": True}]
)
def test_stages_or_drafts_alone_or_with_the_second_model_runner_are_served(changes: dict[str, Any]):
    refuse_what_would_be_wrong(configuration(**changes))


def test_a_vllm_that_tells_of_sleep_may_sleep():
    refuse_what_would_be_wrong(configuration(sleeps=True), follows_sleep=True)


def test_all_of_it_is_said_at_once():
    with pytest.raises(SettingsError) as caught:
        refuse_what_would_be_wrong(configuration(experts=True, hisparse=object()))
    assert "routed-experts" in str(caught.value)
    assert "hisparse_config" in str(caught.value)


def test_layers_leave_one_by_one_where_a_step_is_one_part():
    refuse_what_would_be_wrong(configuration(), sends_layers=True)
    refuse_what_would_be_wrong(configuration(has_parts=True))
    with pytest.raises(SettingsError, match=r"--enable-dbo and --ubatch-size .* leave them out, or KVFERRY_LAYER"):
        refuse_what_would_be_wrong(configuration(has_parts=True), sends_layers=True)


@pytest.mark.parametrize(("lookahead", "held_back"), [(0, 1), (1, 1), (2, 2), (3, 3)])
def test_a_model_that_drafts_with_several_modules_holds_back_as_many_tokens(lookahead: int, held_back: int):
    """One module, as EAGLE's, reads one token ahead, which is known for all but the last."""
    assert held_back_tokens(configuration(lookahead=lookahead)) == held_back


@pytest.mark.parametrize("drafts", [(), ("draft_model.model.layers.0.self_attn.attn",)])
def test_layers_of_one_number_that_are_no_draft_models_are_refused_by_name(drafts: tuple[str, ...]):
    """Its number would be the place of another layer."""
    names = ("model.layers.0.self_attn.attn", *drafts, "mtp.layers.0.self_attn.attn")
    caches = {name: torch.zeros(4, 2, 16, 8) for name in names}
    group, model = CacheGroup("group 0", names, block_tokens=16), ModelShape(1, drafts=drafts)
    with pytest.raises(LayoutError, match=r"'model.layers.0.self_attn.attn' and 'mtp.layers.0.* the same number"):
        describe(caches, [group], model, RankCoordinates(), heads=dict.fromkeys(names, None), num_blocks=4)
