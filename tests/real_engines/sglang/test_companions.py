"""What SGLang keeps beside keys, values and latents, byte for byte between pools of SGLang's own, cut by any rank."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPoolMXFP8
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from tests.real_engines.sglang.pool_ranks import (
    HEAD_DIM,
    HEADS,
    LAYERS,
    PAGES,
    SIZES,
    Crossing,
    Part,
    PoolRank,
    begin,
    part,
)
from tests.real_engines.sglang.ranks import Model
from tests.real_engines.sglang.test_ranks import Pair, assert_fails, pair

__all__ = ["pair"]  # a fixture

pytestmark = pytest.mark.timeout(60)


def sparse(kpool: int, *, tp: int, tp_rank: int, skipped: bool = False, order: int = 128) -> PoolRank:
    page = 64 * kpool
    skip = [False, skipped, False]
    pool = DSATokenToKVPool(
        (PAGES - 1) * page,
        page,
        kv_lora_rank=32,
        dtype=torch.bfloat16,
        qk_rope_head_dim=16,
        layer_num=LAYERS,
        device="cpu",
        index_head_dim=order,
        enable_memory_saver=False,
        kv_cache_dim=48,
        index_buf_size=(PAGES - 1) * page,
        index_kpool=kpool,
        index_kpool_compress=kpool > 1,
        tail_extra_slots=1,
        max_running_requests=5,
        skip_topk_layers=skip,
    )
    parts = [part(each, PAGES, page * 96) for each in pool.kv_buffer]
    parts += [part(each) for each in pool.index_k_with_scale_buffer if len(each)]
    if kpool > 1:
        tails = (*pool._compress_tail_k, *pool._compress_tail_score)
        parts += [part(each, of="slots") for each in tails if len(each)]
    return PoolRank(Model(heads=None, page_tokens=page, layers=LAYERS), pool, parts, tp=tp, tp_rank=tp_rank)


def blocks(pool: Any, page: int, of: str = "pages") -> Iterator[Part]:
    for each in (*pool.k_buffer, *pool.v_buffer):
        yield part(each, len(each) // page, page, *each.shape[1:], heads=1, of=of)
    for each in (*pool.k_scale_buffer, *pool.v_scale_buffer):
        shape = each.shape if pool.mxfp8_sf_interleaved else (len(each) // page, page, *each.shape[1:])
        yield part(each, *shape, heads=0 if pool.mxfp8_sf_interleaved else 1, of=of)


def scaled(page: int, *, tp: int, tp_rank: int, window: bool = False) -> PoolRank:
    common: dict[str, Any] = {
        "page_size": page,
        "dtype": torch.float8_e4m3fn,
        "head_num": max(1, HEADS // tp),
        "head_dim": HEAD_DIM,
        "device": "cpu",
        "enable_memory_saver": False,
        "enable_alt_stream": False,
    }
    size = (PAGES - 1) * page
    if not window:
        pool: Any = MHATokenToKVPoolMXFP8(size, layer_num=LAYERS, **common)
        parts = [*blocks(pool, page)]
    else:
        pool = SWAKVPool(
            size,
            size,
            swa_attention_layer_ids=[0],
            full_attention_layer_ids=[1, 2],
            **common,
            token_to_kv_pool_class=MHATokenToKVPoolMXFP8,
        )
        parts = [*blocks(pool.full_kv_pool, page), *blocks(pool.swa_kv_pool, page, of="window")]
    model = Model(heads=HEADS, page_tokens=page, layers=LAYERS, window_tokens=2 * page if window else 8)
    return PoolRank(model, pool, parts, tp=tp, tp_rank=tp_rank)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang's pools ask of the rank that they are on."""
    monkeypatch.setattr(memory_pool, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=1))


@pytest.mark.shows("sglang", "DSATokenToKVPool", "StateType.DSA", "StateType.DSA_TAIL")
@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SIZES)
@pytest.mark.parametrize(("kpool", "skipped"), [(1, False), (2, True)], ids=["plain", "pooled, a layer without"])
def test_the_index_goes_with_its_latents(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, path: str, prefill_tp: int, decode_tp: int, kpool: int, skipped: bool
):
    monkeypatch.setenv("KVFERRY_PATH", path)
    begin(pair, lambda **where: sparse(kpool, skipped=skipped, **where), prefill_tp, decode_tp)
    Crossing(pair, 1, 5).run()
    Crossing(pair, 2, 7, held=3).run()


@pytest.mark.shows("sglang", "MHATokenToKVPoolMXFP8", "StateType.BLOCK_SCALE")
@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SIZES)
@pytest.mark.parametrize("page", [16, 128], ids=["by token", "interleaved"])
def test_scales_go_with_their_heads(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, path: str, prefill_tp: int, decode_tp: int, page: int
):
    monkeypatch.setenv("KVFERRY_PATH", path)
    begin(pair, lambda **where: scaled(page, **where), prefill_tp, decode_tp)
    Crossing(pair, 1, 5).run()
    Crossing(pair, 2, 7, held=3).run()


@pytest.mark.parametrize("side", [0, 1])
def test_an_index_in_other_pages_than_its_latents_is_not_exchanged(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, side: int
):
    begin(pair, lambda **where: sparse(1, **where), 1, 1)
    crossing = Crossing(pair, 1, 5)
    states = crossing.states

    def others(manager: Any, of: int) -> list[Any]:
        return [each[::-1] if of == side else each for each in states(manager, of)]

    monkeypatch.setattr(crossing, "states", others)
    with pytest.raises(AssertionError, match="it failed"):
        crossing.run()


@pytest.mark.parametrize(
    ("make", "there", "words"),
    [
        (lambda **where: sparse(where.pop("kpool", 1), **where), {"kpool": 2}, "--page-size, since pages of index"),
        (
            lambda **where: scaled(where.pop("page", 128), **where),
            {"page": 16},
            "layout of 'scale of k': .* has packed pages .SGLang's MXFP8_INTERLEAVED., .* has entries for every token",
        ),
    ],
)
def test_what_cannot_be_cut_alike_is_refused(pair: Pair, make: Any, there: dict[str, int], words: str):
    begin(pair, make, 1, 1, **there)
    (manager,) = pair.decode.managers
    pair.sender(pair.prefill.managers[0], 1)
    receiver = pair.receiver(manager, 1, tokens=16)
    if receiver.poll() != KVPoll.Failed:
        receiver.send_metadata(np.array([0], np.int32), 1, [[0]])
    assert_fails(lambda: [receiver.poll()], [receiver], words)


@pytest.mark.shows("sglang", "StateType.BLOCK_SCALE_SWA")
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SIZES)
def test_scales_of_a_window_go_with_it(pair: Pair, prefill_tp: int, decode_tp: int):
    begin(pair, lambda **where: scaled(128, window=True, **where), prefill_tp, decode_tp)
    Crossing(pair, 1, 5).run()
