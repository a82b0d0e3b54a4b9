"""How quantised and divided caches are read, against the specs and the views that vLLM's own backends make.

Backends whose modules need a GPU's packages are read as `tests/unit/engines/test_vllm_parts.py` has them.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim, nvfp4_split_data_scale
from vllm.v1.attention.backends.b12x import B12xPagedAttentionBackend, B12xPagedAttentionImpl
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.attention.backends.rocm_attn import RocmAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend
from vllm.v1.attention.ops.paged_attn import PagedAttention
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    KVQuantMode,
    MLAAttentionSpec,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvferry.engines.vllm.forms import CacheForm, forms_of, parts_of
from kvferry.engines.vllm.identity import _SCALES_BY_TOKEN

BLOCKS, TOKENS, HEADS, HEAD_DIM = 3, 16, 4, 64


def spec(dtype: torch.dtype, mode: KVQuantMode = KVQuantMode.NONE, **more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD_DIM, dtype=dtype, kv_quant_mode=mode, **more
    )


def cache(made: Any, layout: str = "LBHNC") -> torch.Tensor:
    """A layer's cache, as vLLM views it."""
    page = made.page_size_bytes
    raw = torch.zeros(BLOCKS * page, dtype=torch.int8)
    placed = KVCacheTensor(size=raw.numel(), layers=["a"], layer_stride=raw.numel(), block_stride=page)
    view: torch.Tensor = create_kv_cache_views(raw, made, BLOCKS, KVCacheLayout[layout], placed)[0]
    return view


def places(view: torch.Tensor) -> torch.Tensor:
    """The address of every byte of a view, in the order of its dimensions."""
    size = view.element_size()
    found = torch.full(view.shape, view.data_ptr(), dtype=torch.int64)
    for dimension, (length, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        shape = [1] * view.ndim
        shape[dimension] = length
        found += (torch.arange(length) * stride * size).view(shape)
    return (found[..., None] + torch.arange(size)).flatten(-2)


def test_b12x_reads_the_heads_of_a_token_where_a_part_has_them():
    made = B12xPagedAttentionBackend.customize_spec(spec(torch.bfloat16))
    whole = cache(made)
    impl = SimpleNamespace(num_kv_heads=HEADS, head_size=HEAD_DIM, kv_cache_dtype="auto", kv_torch_dtype=torch.bfloat16)
    theirs = B12xPagedAttentionImpl._kv_cache_views(impl, whole)  # (block, token, head, content)
    ours = parts_of(made, B12xPagedAttentionBackend.get_name())
    assert [part.is_packed for part in ours] == [False, False]
    for their_view, part in zip(theirs, ours, strict=True):
        assert torch.equal(places(their_view.transpose(1, 2)), places(part.view(whole)))


@pytest.mark.parametrize("layout", ["LHBNC", "LBHNC"])
def test_rocms_kernels_read_a_head_in_one_piece_where_a_part_has_it(layout: str):
    made = RocmAttentionBackend.customize_spec(spec(torch.bfloat16))
    assert KVCacheLayout[layout] in RocmAttentionBackend.supported_kv_cache_layouts()
    whole = cache(made, layout) if layout == "LBHNC" else _planes_outside(made)
    theirs = PagedAttention.split_kv_cache(whole.transpose(0, 1), HEADS, HEAD_DIM) if layout == "LHBNC" else None
    ours = parts_of(made, RocmAttentionBackend.get_name())
    assert [part.is_packed for part in ours] == [True, True]
    for side, part in enumerate(ours):
        view = part.view(whole)
        assert torch.equal(places(view).flatten().sort().values, places(whole[:, side]).flatten().sort().values)
        if theirs is not None:
            mine, their_head = places(view)[2, 1].flatten().sort().values, places(theirs[side][2, 1])
            assert torch.equal(mine, their_head.flatten().sort().values)


def _planes_outside(made: Any) -> torch.Tensor:
    """All keys of a layer, then all values: what the native kernels need."""
    content = made.state_content_bytes // made.dtype.itemsize
    return torch.zeros(2, BLOCKS, TOKENS, content, dtype=made.dtype).transpose(0, 1)


def test_nvfp4_has_its_scales_where_vllm_splits_them_off():
    """As FLASHINFER publishes and views it (`customize_spec`, `_nvfp4_kv_views`); its module needs a GPU's packages."""
    content = nvfp4_kv_cache_full_dim(HEAD_DIM)
    made = spec(torch.uint8, KVQuantMode.NVFP4, num_head_slots=2 * HEADS, state_content_bytes=content)
    whole = cache(made)
    parts = [part.view(whole) for part in parts_of(made, "FLASHINFER")]
    for side in range(2):
        theirs = nvfp4_split_data_scale(whole[:, side * HEADS : (side + 1) * HEADS])
        for their_view, part in zip(theirs, parts[2 * side : 2 * side + 2], strict=True):
            assert torch.equal(places(their_view), places(part))


def test_vllm_orders_nvfp4s_scales_by_the_generations_that_are_compared():
    """`flashinfer._nvfp4_kv_on_fa2`, read as text: its module needs a GPU's packages."""
    source = (Path(vllm.__file__).parent / "v1/attention/backends/flashinfer.py").read_text()
    families = re.search(r"def _nvfp4_kv_on_fa2.*?for f in \(([\d, ]+)\)\)", source, re.DOTALL)
    assert families is not None
    assert {int(each) // 10 for each in families[1].split(",")} == _SCALES_BY_TOKEN


PER_TOKEN_HEAD = {
    KVQuantMode.INT8_PER_TOKEN_HEAD: torch.int8,
    KVQuantMode.FP8_PER_TOKEN_HEAD: torch.uint8,
    KVQuantMode.INT4_PER_TOKEN_HEAD: torch.uint8,
}


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("mode", PER_TOKEN_HEAD)
def test_scales_of_a_token_and_head_lie_in_its_own_entry(mode: KVQuantMode, layout: str):
    made = TritonAttentionBackend.customize_spec(spec(PER_TOKEN_HEAD[mode], mode))
    assert forms_of("model.layers.0.attn", made, SimpleNamespace(), "TRITON_ATTN") == (CacheForm(),)
    whole, impl = cache(made, layout), SimpleNamespace(_k_scale_cache=None)
    TritonAttentionImpl._ensure_scale_caches(impl, whole)
    entries = places(whole)
    for scales in (impl._k_scale_cache, impl._v_scale_cache):  # (block, token, head)
        theirs = places(scales[..., None].transpose(1, 2))
        assert torch.isin(theirs[1, 2, 3], entries[1, 2, 3]).all()
        assert ((theirs >= entries.amin(-1, keepdim=True)) & (theirs <= entries.amax(-1, keepdim=True))).all()


@pytest.mark.parametrize("mode", PER_TOKEN_HEAD)
def test_scales_of_a_latent_lie_in_its_own_entry(mode: KVQuantMode):
    latent = MLAAttentionSpec(
        block_size=TOKENS, num_kv_heads=1, head_size=576, dtype=PER_TOKEN_HEAD[mode], kv_quant_mode=mode
    )
    made = TritonMLABackend.customize_spec(latent)
    assert made.state_content_bytes is not None
    assert forms_of("model.layers.0.attn", made, SimpleNamespace(), "TRITON_MLA") == (CacheForm(),)


@pytest.mark.parametrize("cache_dtype", ["fp8_ds_mla", "nvfp4_ds_mla"])
def test_records_of_deepseek_v3_are_those_that_vllm_lays_out_token_by_token(cache_dtype: str):
    layer = SimpleNamespace(
        kv_cache_dtype=cache_dtype,
        head_size=576,
        sliding_window=None,
        indexer=None,
        non_causal_multi_token_decode=False,
    )
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=64), model_config=None)
    made = MLAAttention.get_kv_cache_spec(layer, config)
    assert forms_of("model.layers.0.attn", made, SimpleNamespace(), "FLASHMLA_SPARSE") == (CacheForm(),)


@pytest.mark.parametrize("mode", ["TURBOQUANT_K8V4", "TURBOQUANT_4BIT_NC", "TURBOQUANT_K3V4_NC", "TURBOQUANT_3BIT_NC"])
def test_what_only_a_kernel_knows_is_a_page_in_one_piece(mode: str):
    backend = TurboQuantAttentionBackend
    made = backend.customize_spec(spec(torch.uint8, KVQuantMode[mode]))
    (form,) = forms_of("model.layers.0.attn", made, SimpleNamespace(), backend.get_name())
    assert (form.packing, form.has_heads) == (f"vLLM's {backend.get_name()}", False)
    assert form.part is not None
    for layout in backend.supported_kv_cache_layouts():
        whole = cache(made, layout.name)
        piece = places(form.part(whole))
        assert torch.equal(piece.flatten().sort().values, places(whole).flatten().sort().values)
        assert (piece[1].flatten().diff() == 1).all(), "its bytes lie behind each other"
