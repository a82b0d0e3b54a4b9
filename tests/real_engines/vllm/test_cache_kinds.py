"""The table of caches against the vLLM that is installed. No engine is started."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvferry.engines.cache_kinds import names_missing
from kvferry.engines.vllm import KVFerryConnector
from kvferry.engines.vllm.cache_kinds import KINDS

BASES = {"KVCacheSpec"}
"""What no layer keeps by itself."""


def test_every_spec_of_vllms_is_in_the_table_and_nothing_else():
    specs = [
        name
        for name, each in vars(kv_cache_interface).items()
        if isinstance(each, type)
        and (issubclass(each, kv_cache_interface.KVCacheSpec) or name == "KVCacheGroupSpec")
        and name not in BASES
    ]
    assert names_missing(KINDS, specs) == []


@pytest.mark.parametrize(("is_latent", "layout"), [(False, KVCacheLayout.LBHNC), (True, None)])
def test_heads_are_asked_for_outside_of_tokens(is_latent: bool, layout: KVCacheLayout | None):
    config = SimpleNamespace(model_config=SimpleNamespace(use_mla=is_latent))
    asked = KVFerryConnector.get_required_kvcache_layout(config)
    assert asked == (layout and layout.name)
