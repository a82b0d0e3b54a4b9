"""Unified memory, byte for byte between pools of SGLang's own, in each of which all layers share one buffer."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.disaggregation import utils
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_memory_pool import (
    MambaSubPoolSpec,
    MHASubPoolSpec,
    MLASubPoolSpec,
    UnifiedHybridLinearKVPool,
    UnifiedKVPool,
    UnifiedMambaPool,
    UnifiedMLATokenToKVPool,
    UnifiedSWAKVPool,
)
from sglang.srt.server_args import ServerArgs
from tests.real_engines.sglang.pool_ranks import (
    HEADS,
    PAGES,
    SIZES,
    Crossing,
    Part,
    PoolRank,
    assert_request_fails,
    begin,
    by_token,
)
from tests.real_engines.sglang.ranks import Model, plug_in
from tests.real_engines.sglang.test_ranks import Pair, pair
from tests.support.sglang_pools import model_config, remembered

from kvferry import RankCoordinates
from kvferry.engines.sglang.pools import caches_of
from kvferry.errors import LayoutError

__all__ = ["pair"]  # a fixture

pytestmark = pytest.mark.timeout(60)

HEAD_DIM, PAGE = 64, 16
DTYPE = torch.bfloat16


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang's pools ask of the rank that they are on."""
    monkeypatch.setattr(memory_pool, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=1))


def windows(*, tp: int, tp_rank: int, unified: bool = True) -> PoolRank:
    heads = max(1, HEADS // tp)
    layers: dict[str, Any] = {"swa_attention_layer_ids": [0, 2], "full_attention_layer_ids": [1, 3]}
    if unified:
        specs = [
            MHASubPoolSpec(
                name=name, layer_num=2, grow_direction=grow, head_num=heads, head_dim=HEAD_DIM, store_dtype=DTYPE
            )
            for name, grow in (("full", "up"), ("swa", "down"))
        ]
        memory = region(specs, specs[0].entry_bytes() * 2 * PAGES * PAGE)
        pool: Any = UnifiedSWAKVPool(unified_buffer=memory, page_size=PAGE, **layers)
    else:
        pool = SWAKVPool(
            (PAGES - 1) * PAGE,
            (PAGES - 1) * PAGE,
            page_size=PAGE,
            dtype=DTYPE,
            head_num=heads,
            head_dim=HEAD_DIM,
            device="cpu",
            enable_memory_saver=False,
            enable_alt_stream=False,
            **layers,
        )
    first = PAGES if unified else 0
    full, swa = pool.full_kv_pool, pool.swa_kv_pool
    parts = [by_token(each, PAGE) for each in (*full.k_buffer, *full.v_buffer)]
    parts += [by_token(each, PAGE, of="window", first=first) for each in (*swa.k_buffer, *swa.v_buffer)]
    rank = PoolRank(Model(heads=HEADS, page_tokens=PAGE, window_tokens=2 * PAGE), pool, parts, tp=tp, tp_rank=tp_rank)
    rank.first_window = first
    return rank


def region(specs: list[Any], length: int) -> UnifiedKVPool:
    return UnifiedKVPool(
        total_bytes=length, sub_pool_specs=specs, device="cpu", enable_memory_saver=False, page_size=PAGE
    )


def recurrent(*, tp: int, tp_rank: int) -> PoolRank:
    latents = MLASubPoolSpec(
        name="full", layer_num=2, grow_direction="up", kv_lora_rank=32, qk_rope_head_dim=16, store_dtype=DTYPE
    )
    state = MambaSubPoolSpec(
        name="mamba",
        layer_num=2,
        grow_direction="down",
        conv_state_shapes=((4, 3),),
        conv_dtype=DTYPE,
        temporal_state_shape=(4, 8),
        temporal_dtype=torch.float32,
    )
    length = latents.entry_bytes() * PAGES * PAGE
    memory = region([latents, state], 2 * length)
    full = UnifiedMLATokenToKVPool(unified_buffer=memory, sub_pool_name="full", kv_cache_dtype=DTYPE, page_size=PAGE)
    slots = UnifiedMambaPool(unified_buffer=memory, sub_pool_name="mamba", spec_state_size=0, mamba_layer_ids=[0, 2])
    pool = UnifiedHybridLinearKVPool(
        size=full.size,
        dtype=DTYPE,
        page_size=PAGE,
        head_num=1,
        head_dim=48,
        full_attention_layer_ids=[1, 3],
        device="cpu",
        mamba_pool=slots,
        use_mla=True,
        full_kv_pool=full,
    )
    first = -(-length // state.entry_bytes())
    parts = [by_token(each, PAGE, heads=None) for each in full.kv_buffer]
    for layers in (*slots.mamba_cache.conv, slots.mamba_cache.temporal):
        parts += [
            Part(each.view(torch.uint8).numpy()[first : first + 8], None, "slots", first=first) for each in layers
        ]
    rank = PoolRank(Model(heads=None, page_tokens=PAGE), pool, parts, tp=tp, tp_rank=tp_rank)
    rank.first_slot = first
    return rank


@pytest.mark.shows("sglang", "UnifiedMHATokenToKVPool", "UnifiedSWAKVPool")
@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SIZES)
def test_windows_in_unified_memory_arrive_with_the_rest(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, path: str, prefill_tp: int, decode_tp: int
):
    monkeypatch.setenv("KVFERRY_PATH", path)
    begin(pair, windows, prefill_tp, decode_tp)
    Crossing(pair, 1, 5).run()
    Crossing(pair, 2, 7, held=3).run()


@pytest.mark.parametrize("unified", [True, False], ids=["to pools apart", "from pools apart"])
def test_the_other_side_may_have_no_unified_memory(pair: Pair, unified: bool):
    begin(pair, partial(windows, unified=unified), 2, 1, unified=not unified)
    Crossing(pair, 1, 5).run()


@pytest.mark.shows("sglang", "UnifiedMLATokenToKVPool", "UnifiedHybridLinearKVPool", "UnifiedMambaPool")
@pytest.mark.parametrize("tp", [1, 2])
def test_recurrent_state_in_unified_memory_arrives(pair: Pair, tp: int):
    begin(pair, recurrent, tp, tp)
    Crossing(pair, 1, 5).run()
    Crossing(pair, 2, 7, held=3).run()


def test_recurrent_state_in_unified_memory_wants_as_many_ranks(pair: Pair):
    begin(pair, recurrent, 2, 1)
    assert_request_fails(pair, "give both sides the same tensor-parallel size")


def test_sglang_allows_unified_memory_with_kvferry():
    plug_in()
    assert ServerArgs._unified_memory_pd_transfer_backends(None) == {"mooncake", "kvferry"}


@pytest.mark.parametrize("backend", ["kvferry", "mooncake"])
def test_pages_are_not_moved_while_those_of_failed_requests_are_kept(monkeypatch: pytest.MonkeyPatch, backend: str):
    plug_in()
    options = SimpleNamespace(disaggregation_transfer_backend=backend)
    monkeypatch.setattr(runtime_context, "get_disagg", lambda: options)
    held: list[str] = []
    queue = SimpleNamespace(queue=[], has_pending_deferred_releases=lambda: bool(held))
    waiting = SimpleNamespace(has_published_destinations=False)
    scheduler = SimpleNamespace(
        disaggregation_mode=utils.DisaggregationMode.DECODE,
        decode_offload_manager=None,
        disagg_decode_transfer_queue=queue,
        disagg_decode_prealloc_queue=waiting,
    )
    gate = utils.unified_memory_disagg_move_gate(scheduler)
    assert gate()
    held.append("a request")
    assert gate() == (backend != "kvferry")
    held.clear()
    waiting.has_published_destinations = True
    assert not gate()


def test_a_draft_model_in_unified_memory_is_refused():
    rank = windows(tp=1, tp_rank=0)
    args = rank.arguments
    remembered(args, rank.pool, rank.pool)
    with pytest.raises(LayoutError, match="SGLang numbers a draft model's pages otherwise"):
        caches_of(args, model_config(HEADS, HEADS), None, {}, place=RankCoordinates())
