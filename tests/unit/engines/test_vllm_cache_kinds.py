"""Every kind of cache that vLLM has is transferred, or refused in words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvferry.engines.vllm.cache_kinds import KINDS, check_on_device, check_transferred
from kvferry.errors import LayoutError

LAYER = "model.layers.3.mixer"
CLASSES = [kind for kind in KINDS.kinds if " with " not in kind.name]


def spec(name: str, **attributes: object) -> object:
    """Stands for a spec of vLLM's of that class."""
    return type(name, (SimpleNamespace,), {})(**attributes)


@pytest.mark.parametrize("name", [kind.name for kind in CLASSES if kind.refusal is None])
def test_a_kind_that_is_transferred_is_not_refused(name: str):
    check_transferred(spec(name), LAYER)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(kind.name, marks=pytest.mark.shows("vllm", kind.name))
        for kind in CLASSES
        if kind.refusal is not None
    ],
)
def test_a_kind_that_is_not_transferred_is_refused_in_words(name: str):
    with pytest.raises(
        LayoutError, match=rf"layers such as '{LAYER}' keep .* \({name}\), which .* does not transfer: "
    ):
        check_transferred(spec(name), LAYER)


def test_a_kind_that_nobody_has_thought_of_is_refused_by_name():
    """Even one that stems from a known one: what it keeps may be something else."""
    with pytest.raises(LayoutError) as raised:
        check_transferred(spec("LatentChunkSpec"), LAYER)
    assert str(raised.value) == (
        "layers such as 'model.layers.3.mixer' keep LatentChunkSpec, which kvferry's plug-in for vLLM 0.32 does not "
        "know. It transfers FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MLAAttentionSpec, "
        "UniformTypeKVCacheSpecs, MambaSpec, AttentionSpec with num_head_slots, AttentionSpec with kv_quant_mode, "
        "AttentionSpec with tokens_per_state, MLAAttentionSpec with cache_role indexer, SlidingWindowMLASpec, "
        "CircularBufferSpec, HiddenStateCacheSpec, RSWASpec; serve this model without kvferry"
    )


@pytest.mark.shows("vllm", "KVCacheGroupSpec with host_resident")
def test_caches_in_host_memory_are_refused():
    check_on_device(SimpleNamespace(host_resident=False, layer_names=[LAYER]))
    with pytest.raises(LayoutError, match="caches in host memory"):
        check_on_device(SimpleNamespace(host_resident=True, layer_names=[LAYER]))
