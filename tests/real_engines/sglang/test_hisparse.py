"""What a decode server with HiSparse would need of kvferry, by SGLang's own pools and code; docs/sglang.md says it.

Such servers are refused at their start (`test_cache_kinds`).
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from sglang.srt.disaggregation import decode
from sglang.srt.disaggregation.base.conn import KVArgs, StateType
from sglang.srt.disaggregation.utils import KVClassType, TransferBackend
from sglang.srt.mem_cache import hisparse_memory_pool, memory_pool
from sglang.srt.mem_cache.hisparse_memory_pool import HiSparseDSATokenToKVPool
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from kvferry import Device, MemoryKind, RankCoordinates, RankLayout
from kvferry.engines.sglang.caches import Attention, Buffers, Caches, Uncut
from kvferry.engines.sglang.layouts import INDEX_GROUP, describe
from kvferry.errors import LayoutError

PAGE, PAGES, LAYERS, MORE_ON_HOST = 64, 5, 2, 2


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> tuple[HiSparseDSATokenToKVPool, MLATokenToKVPoolHost]:
    """DeepSeek V3.2's, on the device and on the host."""
    monkeypatch.setattr(memory_pool, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=1))
    device = HiSparseDSATokenToKVPool(
        size=(PAGES - 1) * PAGE,
        page_size=PAGE,
        kv_lora_rank=32,
        dtype=torch.bfloat16,
        qk_rope_head_dim=16,
        layer_num=LAYERS,
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=48,
        start_layer=0,
        end_layer=LAYERS,
        host_to_device_ratio=MORE_ON_HOST,
    )
    host = MLATokenToKVPoolHost(
        buffer_info=device.get_device_pool_infos()[0].buffer_info,
        device_capacity_tokens=device.size,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
        host_to_device_ratio=MORE_ON_HOST,
        host_size=0,
        page_size=PAGE,
        layout="layer_first",
        override_kv_cache_dim=48,
        pin_memory=False,
    )
    return device, host


@pytest.fixture
def listed(pools: Any, monkeypatch: pytest.MonkeyPatch) -> KVArgs:
    """What SGLang's decode side lists for its NIXL backend."""
    device, host = pools
    given: list[KVArgs] = []

    def manager(args: KVArgs, *_: Any) -> Any:
        given.append(args)
        return SimpleNamespace()

    classes = {KVClassType.KVARGS: KVArgs, KVClassType.MANAGER: manager}
    monkeypatch.setattr(decode, "get_kv_class", lambda _, kind: classes[kind])
    monkeypatch.setattr(decode, "get_parallel", lambda: SimpleNamespace(attn_tp_size=1, dp_rank=0))
    disagg = SimpleNamespace(disaggregation_decode_host_receive_threshold=1.0, disaggregation_ib_device=None)
    monkeypatch.setattr(decode, "get_disagg", lambda: disagg)
    monkeypatch.setattr(decode, "get_device", lambda: SimpleNamespace(gpu_id=0))
    scheduler = SimpleNamespace(
        enable_hisparse=True,
        sliding_window_size=None,
        hisparse_coordinator=SimpleNamespace(mem_pool_host=host),
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(kv_cache_dtype_str="auto")),
        model_config=SimpleNamespace(num_hidden_layers=LAYERS),
        server_args=None,
    )
    queue = SimpleNamespace(
        transfer_backend=TransferBackend.NIXL,
        tp_rank=0,
        pp_rank=0,
        scheduler=scheduler,
        token_to_kv_pool=device,
        draft_token_to_kv_pool=None,
        metadata_buffers=SimpleNamespace(get_buf_infos=lambda: ([], [], [])),
        is_mla_backend=True,
        enable_staging=False,
    )
    decode.DecodePreallocQueue._init_kv_manager(queue)
    return given[0]


def test_one_room_has_pages_on_the_host_and_on_the_device(pools: Any, listed: KVArgs):
    device, host = pools
    assert listed.kv_data_mem_kinds == ["DRAM"] * LAYERS
    assert listed.kv_data_ptrs == [each.data_ptr() for each in host.data_refs]
    assert listed.state_types == [StateType.DSA]
    assert listed.state_data_ptrs[0] == [each.data_ptr() for each in device.index_k_with_scale_buffer]
    # Latents of the device are not among them: they are a buffer that a kernel fills from the host, token by token.
    assert not {each.data_ptr() for each in device.kv_buffer} & {*listed.kv_data_ptrs, *listed.state_data_ptrs[0]}


def test_an_endpoint_of_kvferrys_is_on_one_device(listed: KVArgs):
    """All else it can say: latents and their index may have page numbers of their own."""

    def buffers(*lists: Any) -> Buffers:
        return Buffers(*(tuple(each) for each in lists))

    latents = buffers(listed.kv_data_ptrs, listed.kv_data_lens, listed.kv_item_lens)
    index = buffers(listed.state_data_ptrs[0], listed.state_data_lens[0], listed.state_item_lens[0])
    uncut = Uncut("index", (0, 1), LAYERS, index, "an order", INDEX_GROUP)
    caches = Caches(kv=Attention(latents, None), page_tokens=PAGE, uncut=(uncut,))
    layout = describe(caches, RankCoordinates(), Device())
    latent, index_of_it = layout.shards
    apart = replace(index_of_it, group=INDEX_GROUP)
    assert len(RankLayout(shards=(latent, apart)).groups) == 2
    with pytest.raises(LayoutError, match="'index' is on VRAM:0, 'latent' on DRAM:0: the pools of a rank share"):
        RankLayout(shards=(latent, replace(apart, device=Device(MemoryKind.VRAM))))


def test_sglang_itself_does_deepseek_v4_and_drafts_with_mooncake_alone():
    source = inspect.getsource(decode.DecodePreallocQueue)
    refusal = source.index("HiSparse device-only PD transfer currently requires the")
    before = source[:refusal].rsplit("device_page_indices = None", 1)[1]
    for words in ("DeepSeekV4TokenToKVPool", "draft_token_to_kv_pool is not None", "!= TransferBackend.MOONCAKE"):
        assert words in before


def test_what_comes_to_the_host_is_read_by_kernels_that_a_cpu_has_not():
    with pytest.raises(RuntimeError, match=r"requires sgl_kernel.kvcacheio .CUDA/ROCm/XPU.. It is not available"):
        hisparse_memory_pool.transfer_kv_all_layer_mla()
