"""The table of caches, and the options that are refused, against the SGLang that is installed. No engine is started."""

from __future__ import annotations

import ast
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.arg_groups import pd_disaggregation_hook
from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.mem_cache import memory_pool, unified_draft_pool
from tests.real_engines.sglang.ranks import DECODE, PREFILL, Model, place
from tests.support.collecting import shown_in, unshown

from kvferry.engines.cache_kinds import names_missing
from kvferry.engines.sglang.cache_kinds import KINDS, check_order, check_pool
from kvferry.engines.sglang.options import INSTEAD, check_options, unset_variables
from kvferry.errors import LayoutError, UsageError

ROOTS = {"KVCache", "BaseSWAKVPool", "MambaPool"}
BASES = ROOTS - {"MambaPool"}
"""Of which there is never a pool."""


def pools() -> set[str]:
    """The names of SGLang's pools, by its sources: some can be imported on an NPU alone."""
    bases: dict[str, set[str]] = {}
    for file in Path(memory_pool.__file__).parents[1].rglob("*.py"):
        source = file.read_text()
        if "Pool(" in source or "KVCache)" in source:
            classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
            bases |= {each.name: {base.id for base in each.bases if isinstance(base, ast.Name)} for each in classes}
    found: set[str] = set()
    while more := {name for name, each in bases.items() if each & (ROOTS | found)} - found:
        found |= more
    return {name for name in (found | ROOTS) - BASES if not name.startswith("_")}


def test_every_pool_and_state_of_sglangs_is_in_the_table_and_nothing_else():
    assert names_missing(KINDS, [*pools(), *(f"StateType.{each.name}" for each in StateType)]) == []


def test_rows_that_real_engines_show_are_those_that_their_tests_try(pytestconfig: pytest.Config):
    folder = "tests/real_engines/sglang"
    assert [*unshown("sglang", KINDS.kinds, folder, shown_in(folder, KINDS.kinds, pytestconfig))] == []


def pool_of_heads(**more: Any) -> Any:
    return memory_pool.MHATokenToKVPool(
        size=32,
        page_size=16,
        dtype=torch.float32,
        head_num=1,
        head_dim=8,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
        **more,
    )


def test_sglang_itself_lists_no_heads_before_tokens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    pool = pool_of_heads()
    with pytest.raises(AssertionError, match=r"HND KV cache .* is not supported with disagg yet"):
        pool.get_contiguous_buf_infos()
    with pytest.raises(LayoutError, match="SGLang itself does not list them for any backend"):
        check_order(pool, "layers")


@pytest.mark.parametrize(
    "kind",
    [
        unified_draft_pool.UnifiedDraftKVPool,
        unified_draft_pool.UnifiedDraftSWAKVPool,
        unified_draft_pool.UnifiedDraftMambaPool,
    ],
)
def test_sglang_itself_lists_no_draft_in_unified_memory(kind: Any):
    pool = object.__new__(kind)
    with pytest.raises(NotImplementedError, match="unsupported"):
        pool.get_contiguous_buf_infos()
    with pytest.raises(LayoutError, match="SGLang itself can list them for no backend"):
        check_pool(pool, "layers")


def test_sglang_itself_makes_no_pool_with_all_layers_in_a_page():
    with pytest.raises(NotImplementedError, match="temporarily unsupported"):
        memory_pool.PageMajorMHATokenToKVPool._create_buffers(object.__new__(memory_pool.PageMajorMHATokenToKVPool))


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Turns an option on and looks at the options of a rank."""

    def look(mode: Any = DECODE, *, ib_device: str | None = None, **changed: Any) -> None:
        with place(monkeypatch, 1, Model(), tp=1, tp_rank=0, pp=1, pp_rank=0, **changed):
            check_options(SimpleNamespace(ib_device=ib_device), mode)

    return look


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"attn_cp_size": 2}, "attention context parallelism on the decode side"),
        ({"enable_dsa_cache_layer_split": True}, "--enable-dsa-cache-layer-split"),
        ({"enable_hisparse": True, "mode": PREFILL}, r"--enable-hisparse on the prefill side \(it is about decoding\)"),
    ],
)
def test_what_kvferry_does_not_do_is_refused_at_the_start(on: Any, changed: dict[str, Any], words: str):
    with pytest.raises(UsageError, match=f"kvferry does not do this with SGLang yet: .*{words}"):
        on(**changed)


def test_a_device_of_anothers_is_said_to_mean_nothing_here(on: Any, caplog: pytest.LogCaptureFixture):
    on(ib_device="mlx5_0")
    assert "kvferry does not read --disaggregation-ib-device mlx5_0: KVFERRY_NIXL_DEVICE" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"), [("SGLANG_DISAGG_STAGING_BUFFER", "1"), ("SGLANG_MOONCAKE_CUSTOM_MEM_POOL", "INTRA_NODE_NVLINK")]
)
def test_what_sglangs_scheduler_would_follow_is_unset_before_it_looks(
    on: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, value: str
):
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"{name}, which kvferry could not unset before SGLang read it"):
        on()
    unset_variables()
    assert name not in os.environ
    assert f"kvferry does not read {name}, and unsets it for this rank" in caplog.text
    on()


def test_what_sglang_does_with_mooncake_alone_is_refused_as_sglangs(on: Any):
    words = "SGLang itself does not do this with kvferry: --disaggregation-decode-allocation-policy prefill_complete"
    with pytest.raises(UsageError, match=f"{words} .*mooncake.*Use early"):
        on(disaggregation_decode_allocation_policy="prefill_complete")


@pytest.mark.parametrize("backend", ["kvferry", "nixl"])
def test_sglang_refuses_prefill_complete_by_the_backends_name(monkeypatch: pytest.MonkeyPatch, backend: str):
    """If it did no more, our own refusal would have no reason."""
    sizes = dict.fromkeys(("pp_size", "attn_cp_size", "dcp_size", "tp_size", "dp_size"), 1)
    features = ("enable_dp_attention", "enable_pdmux", "enable_pd_role_switch", "encoder_only", "language_only")
    caches = ("enable_hisparse", "enable_hierarchical_cache", "disaggregation_decode_enable_radix_cache")
    given = SimpleNamespace(
        **sizes,
        **dict.fromkeys((*features, *caches), False),
        decoupled_spec_role="null",
        disaggregation_mode="decode",
        disaggregation_transfer_backend="mooncake",
        disaggregation_decode_host_receive_threshold=1.0,
    )
    monkeypatch.setattr(pd_disaggregation_hook, "resolving_view", lambda options: options)
    pd_disaggregation_hook._validate_prefill_complete(given)
    given.disaggregation_transfer_backend = backend
    with pytest.raises(ValueError, match=r"does not yet support transfer backends other than Mooncake$"):
        pd_disaggregation_hook._validate_prefill_complete(given)


def test_a_variable_that_kvferry_does_not_read_is_said(
    on: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    for name in INSTEAD:
        monkeypatch.setenv(name, "1")
    with caplog.at_level(logging.WARNING):
        on(PREFILL)
    assert [record.getMessage() for record in caplog.records] == [
        f"kvferry does not read {name}: {instead}" for name, instead in INSTEAD.items()
    ]


def test_usual_options_are_taken_without_a_word(on: Any, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        on(PREFILL)
        on(DECODE)
    assert not caplog.records
