"""The table of caches, and what specs say of heads, against the vLLM that is installed. No engine is started."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.shown import collected, files_of, problems
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvferry import Interval, RankCoordinates
from kvferry.engines.cache_kinds import names_missing
from kvferry.engines.vllm.cache_kinds import KINDS
from kvferry.engines.vllm.connector import KVFerryConnector, groups_of, heads_of
from kvferry.engines.vllm.layouts import HeldHeads
from kvferry.errors import LayoutError

BASES = {"KVCacheSpec"}
"""What no layer keeps by itself."""

SIZES: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class LocalSpec(FullAttentionSpec):  # type: ignore[misc]
    """A spec of somebody else's, as vLLM's registry lets them add."""


ALONE = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)


def config(*specs: Any) -> KVCacheConfig:
    """A group for every spec, of one layer."""
    groups = [KVCacheGroupSpec([f"model.layers.{number}.attn"], spec) for number, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)


def test_every_spec_of_vllms_is_in_the_table_and_nothing_else():
    specs = [
        name
        for name, each in vars(kv_cache_interface).items()
        if isinstance(each, type)
        and (issubclass(each, kv_cache_interface.KVCacheSpec) or name == "KVCacheGroupSpec")
        and name not in BASES
    ]
    assert names_missing(KINDS, specs) == []


def test_rows_that_real_engines_show_are_those_that_their_tests_try():
    folder = "tests/real_engines/vllm"
    shown = collected(files_of(KINDS.kinds, folder))
    assert [*problems("vllm", KINDS.kinds, folder, shown)] == []


def test_vllms_own_specs_are_taken_or_refused_by_name():
    taken = groups_of(
        config(
            FullAttentionSpec(**SIZES),
            SlidingWindowSpec(**SIZES, sliding_window=8),
            ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=32),
            MambaSpec(16, ((4, 4),), (torch.float32,)),
        ),
        ALONE,
    )
    assert [(group.block_tokens, group.window_tokens, group.chunk_tokens, group.has_state) for group in taken] == [
        (16, None, None, False),
        (16, 7, None, False),
        (16, None, 32, False),
        (16, None, None, True),
    ]
    with pytest.raises(LayoutError, match=r"'model.layers.1.attn' keep .* of an encoder \(CrossAttentionSpec\)"):
        groups_of(config(FullAttentionSpec(**SIZES), CrossAttentionSpec(**SIZES)), ALONE)
    with pytest.raises(LayoutError, match=r"'model.layers.0.attn' keep LocalSpec, which kvferry's plug-in .* not know"):
        groups_of(config(LocalSpec(**SIZES)), ALONE)
    with pytest.raises(LayoutError, match="keep LocalSpec"):
        groups_of(config(UniformTypeKVCacheSpecs(16, {"model.layers.0.attn": LocalSpec(**SIZES)})), ALONE)


def test_heads_are_those_of_each_layers_own_spec(caplog: pytest.LogCaptureFixture):
    """Without any module around a layer, two ranks know of what is the same on both of them alone."""
    larger = FullAttentionSpec(**SIZES | {"num_kv_heads": 4})
    slots = FullAttentionSpec(**SIZES, num_head_slots=2, state_content_bytes=512)
    latent = MLAAttentionSpec(**SIZES | {"num_kv_heads": 1}, max_tp_shards=1)
    kept = config(
        FullAttentionSpec(**SIZES), UniformTypeKVCacheSpecs(16, {"model.layers.1.attn": larger}), slots, latent
    )
    vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    with caplog.at_level(logging.WARNING, "kvferry.engines.vllm.connector"):
        one = heads_of(vllm_config, kept, RankCoordinates())
        two = heads_of(vllm_config, kept, RankCoordinates(tp_rank=1, tp_size=2))
    assert list(one.values()) == [
        HeldHeads(2, Interval(0, 2)),
        HeldHeads(4, Interval(0, 4)),
        None,
        HeldHeads(1, Interval(0, 1)),
    ]
    assert list(two.values()) == [None, None, None, HeldHeads(1, Interval(0, 1))]
    assert caplog.messages[1] == (
        "it is not known which KV heads this rank holds in 3 of 4 layers, such as 'model.layers.0.attn': their caches "
        "can be exchanged with engines of tensor-parallel size 2 alone, and with others the first request is refused"
    )


@pytest.mark.parametrize(("is_latent", "layout"), [(False, KVCacheLayout.LBHNC), (True, None)])
def test_heads_are_asked_for_outside_of_tokens(is_latent: bool, layout: KVCacheLayout | None):
    vllm_config = SimpleNamespace(model_config=SimpleNamespace(use_mla=is_latent))
    asked = KVFerryConnector.get_required_kvcache_layout(vllm_config)
    assert asked == (layout and layout.name)
