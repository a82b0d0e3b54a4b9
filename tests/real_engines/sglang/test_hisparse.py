"""A decode server with HiSparse: caches arrive in host memory and on the device, between pools of SGLang's own.

On a CPU both are main memory. The kernels that fetch from the host do not run there.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.disaggregation import decode, utils
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll, StateType
from sglang.srt.disaggregation.utils import KVClassType, TransferBackend
from sglang.srt.mem_cache import hisparse_memory_pool, memory_pool
from sglang.srt.mem_cache.hisparse_memory_pool import HiSparseDSATokenToKVPool
from sglang.srt.mem_cache.memory_pool import MiniMaxSparseKVPool
from sglang.srt.mem_cache.pool_host.mha import HiSparseMHATokenToKVPoolHost, MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from tests.real_engines.sglang import test_companions, test_indexed
from tests.real_engines.sglang.crossings import wait
from tests.real_engines.sglang.pool_ranks import HEADS, LAYERS, PAGES, Crossing, PoolRank, by_token, part
from tests.real_engines.sglang.ranks import DECODE, PREFILL, Model
from tests.real_engines.sglang.test_ranks import Pair, assert_fails, pair
from tests.support.waiting import eventually

from kvferry.engines.sglang.hisparse import JointReceiver, is_hisparse
from kvferry.engines.sglang.receiver import KVFerryReceiver
from kvferry.errors import LayoutError
from kvferry.transport.inprocess import InProcessTransport

pytestmark = pytest.mark.timeout(60)

__all__ = ["pair"]  # a fixture

PAGE, MORE_ON_HOST = 64, 2
MINIMAX = replace(test_indexed.MINIMAX, sparse=(2, 3, 4, 5))
"""With HiSparse SGLang wants the layers without sparse attention to come first."""


def hisparse_pools(layers: int) -> tuple[HiSparseDSATokenToKVPool, MLATokenToKVPoolHost]:
    """DeepSeek V3.2's, on the device and on the host."""
    device = HiSparseDSATokenToKVPool(
        size=(PAGES - 1) * PAGE,
        page_size=PAGE,
        kv_lora_rank=32,
        dtype=torch.bfloat16,
        qk_rope_head_dim=16,
        layer_num=layers,
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=48,
        start_layer=0,
        end_layer=layers,
        host_to_device_ratio=MORE_ON_HOST,
    )
    host = MLATokenToKVPoolHost(
        buffer_info=device.get_device_pool_infos()[0].buffer_info,
        device_capacity_tokens=device.size,
        start_layer=0,
        end_layer=layers,
        target_layer_num=layers,
        host_to_device_ratio=MORE_ON_HOST,
        host_size=0,
        page_size=PAGE,
        layout="layer_first",
        override_kv_cache_dim=48,
        pin_memory=False,
    )
    return device, host


@pytest.fixture
def pools(alone: None) -> tuple[HiSparseDSATokenToKVPool, MLATokenToKVPoolHost]:
    return hisparse_pools(LAYERS)


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


# ---- byte for byte


class HiSparseRank(PoolRank):
    """A decode rank with pools of SGLang's on the device and in host memory."""

    def __init__(self, model: Model, pool: Any, host: Any, listed: Any, parts: Any, *, tp: int, tp_rank: int) -> None:
        super().__init__(model, pool, parts, tp=tp, tp_rank=tp_rank)
        self._host, self._listed = host, listed

    def listed(self) -> Any:
        """What SGLang's decode side lists of the host pool (`test_one_room_has_pages_on_...` has it from there)."""
        return self._listed(self._host)


class HiSparseCrossing(Crossing):
    """A request whose pages of host memory have other numbers than those on the device."""

    asks_for = "host"

    def __init__(self, pair: Pair, room: int, pages: int, *, tokens: int | None = None) -> None:
        super().__init__(pair, room, pages, tokens=tokens)
        numbers = np.random.default_rng([room, 1]).permutation(MORE_ON_HOST * (PAGES - 1))[:pages]
        self.sides[1]["host"] = numbers


def latents(*, tp: int, tp_rank: int) -> HiSparseRank:
    """As `sparse` of test_companions, with HiSparse."""
    device, host = hisparse_pools(LAYERS)
    rows = len(host.data_refs[0]) // PAGE
    parts = [
        replace(part(each, *shape, of=of), label=100 * kind + layer)
        for kind, (buffers, shape, of) in enumerate(
            ((host.data_refs, (rows, PAGE * 96), "host"), (device.index_k_with_scale_buffer, (), "pages"))
        )
        for layer, each in enumerate(buffers)
    ]
    model = Model(heads=None, page_tokens=PAGE, layers=LAYERS)
    return HiSparseRank(model, device, host, utils.get_kv_transfer_buf_infos, parts, tp=tp, tp_rank=tp_rank)


def keys_and_values(*, tp: int, tp_rank: int) -> HiSparseRank:
    """As `sparse` of test_indexed, with HiSparse: it wants one KV head a rank."""
    page, model = 16, MINIMAX
    dense = [layer for layer in range(model.layers) if layer not in model.sparse]
    pool = MiniMaxSparseKVPool(
        (PAGES - 1) * page,
        page,
        torch.bfloat16,
        max(1, HEADS // tp),
        test_indexed.HEAD_DIM,
        test_indexed.INDEX_DIM,
        dense,
        [*model.sparse],
        "cpu",
        [*model.sparse],
        start_layer=0,
        end_layer=model.layers,
        enable_hisparse=True,
        host_to_device_ratio=MORE_ON_HOST,
    )
    host = MHATokenToKVPoolHost(
        pool.main_pool.get_device_pool_infos()[0].buffer_info,
        MORE_ON_HOST,
        0,
        page,
        "layer_first",
        pin_memory=False,  # a CPU cannot; the class that SGLang takes pins it, and differs in nothing else
        device_capacity_tokens=pool.main_pool.size,
        start_layer=0,
        end_layer=len(model.sparse),
    )
    kinds = (
        (host.k_data_refs, model.sparse, 1, 0, "host"),
        (host.v_data_refs, model.sparse, 1, 1, "host"),
        (pool.dense_pool.k_buffer, dense, 1, 0, "pages"),
        (pool.dense_pool.v_buffer, dense, 1, 1, "pages"),
        (pool.index_k_pool.k_buffer, model.sparse, None, 2, "pages"),
    )
    parts = [
        replace(by_token(each, page, heads=heads, of=of, count=len(each) // page), label=100 * label + layer)
        for buffers, layers, heads, label, of in kinds
        for layer, each in zip(layers, buffers, strict=True)
    ]
    listed = HiSparseMHATokenToKVPoolHost.get_contiguous_buf_infos
    return HiSparseRank(replace(model, page_tokens=page), pool, host, listed, parts, tp=tp, tp_rank=tp_rank)


def begin_hisparse(pair: Pair, prefill: Any, decode: Any, prefill_tp: int, decode_tp: int) -> None:
    for mode, make, tp in ((PREFILL, prefill, prefill_tp), (DECODE, decode, decode_tp)):
        for tp_rank in range(tp):
            rank = make(tp=tp, tp_rank=tp_rank)
            pair.model = rank.model if mode is PREFILL else pair.model
            pair.start(mode, rank)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang's pools ask of the rank that they are on."""
    monkeypatch.setattr(memory_pool, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=1))


@pytest.mark.shows("sglang", "HiSparseDSATokenToKVPool")
@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2)])
def test_latents_arrive_in_host_memory_and_their_index_on_the_device(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, path: str, prefill_tp: int, decode_tp: int
):
    monkeypatch.setenv("KVFERRY_PATH", path)
    begin_hisparse(pair, partial(test_companions.sparse, 1), latents, prefill_tp, decode_tp)
    for room in range(1, 4):
        HiSparseCrossing(pair, room, 3, tokens=3 * PAGE - 5).run()
    HiSparseCrossing(pair, 1, 1).run()  # the number again


@pytest.mark.shows("sglang", "HiSparseMHAMainPool")
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, HEADS), (2, HEADS), (1, 2 * HEADS)])
def test_keys_and_values_arrive_in_host_memory_and_all_else_on_the_device(pair: Pair, prefill_tp: int, decode_tp: int):
    begin_hisparse(pair, partial(test_indexed.sparse, model=MINIMAX), keys_and_values, prefill_tp, decode_tp)
    for room in range(1, 3):
        HiSparseCrossing(pair, room, 4).run()


def joint(receiver: KVFerryReceiver) -> JointReceiver:
    assert isinstance(receiver.transfer, JointReceiver)
    return receiver.transfer


def test_a_request_that_one_memory_cannot_take_ends_in_both(pair: Pair):
    begin_hisparse(pair, partial(test_companions.sparse, 1), latents, 1, 1)
    (manager,) = pair.decode.managers
    sender = pair.sender(pair.prefill.managers[0], 1, tokens=PAGE)
    receiver = pair.receiver(manager, 1, tokens=PAGE)
    beyond = np.array([10_000], np.int32)
    receiver.send_metadata(np.array([0], np.int32), 1, [beyond])
    assert len(joint(receiver).parts) == 1, "host pages are not safe before the prefill side has said so"
    assert_fails(lambda: [receiver.poll()], [receiver], "page")
    assert_fails(lambda: [sender.poll()], [sender], "page")
    eventually("host pages are safe", receiver.is_abort_release_safe)
    for each in (manager.host, manager.decode):
        eventually("nothing is left", lambda each=each: not each.status().rooms)
    HiSparseCrossing(pair, 2, 2).run()


def test_host_pages_and_the_devices_are_kept_until_nobody_writes(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    begin_hisparse(pair, partial(test_companions.sparse, 1), latents, 1, 1)
    crossing = HiSparseCrossing(pair, 1, 2)
    (sending,), (receiving,) = pair.prefill.managers, pair.decode.managers
    sender, receiver = pair.sender(sending, 1, tokens=2 * PAGE), pair.receiver(receiving, 1, tokens=2 * PAGE)
    receiver.send_metadata(crossing.sides[1]["host"].astype(np.int32), 1, crossing.states(receiving, 1))
    wait(lambda: [sender.poll()], KVPoll.WaitingForInput)
    polled = InProcessTransport.poll

    def poll(transport: Any, transfer: Any) -> Any:
        into_host = transfer.connection.peer.name.startswith("sglang-decode-0-")
        return None if into_host else polled(transport, transfer)

    with monkeypatch.context() as hanging:
        hanging.setattr(InProcessTransport, "poll", poll)
        sender.init(2, 1)
        sender.send(crossing.sides[0]["pages"].astype(np.int32), crossing.states(sending, 0))
        wait(lambda: [sender.poll()], KVPoll.Transferring)
        receiver.abort()
        assert_fails(lambda: [receiver.poll()], [receiver], "Aborted")
        on_device = joint(receiver).parts[1]
        eventually("the device's pages are free", lambda: on_device.pages_reusable)
        assert not receiver.is_abort_release_safe()
    eventually("the writes have ended", receiver.is_abort_release_safe)
    receiver.clear()


def test_pages_of_the_device_that_are_not_as_many_are_refused(pair: Pair):
    begin_hisparse(pair, partial(test_companions.sparse, 1), latents, 1, 1)
    receiver = pair.receiver(pair.decode.managers[0], 1, tokens=2 * PAGE)
    receiver.send_metadata(np.array([0, 1], np.int32), 1, [np.array([3], np.int32)])
    assert_fails(lambda: [receiver.poll()], [receiver], "2 pages of host memory and .1. of the device for .'DSA'.")


@pytest.mark.parametrize(
    ("pools", "words"),
    [
        ({"target": SimpleNamespace(c4_kv_pool=type("HiSparseC4DevicePool", (), {})())}, "DeepSeek V4 with HiSparse"),
        ({"target": type("HiSparseDSATokenToKVPool", (), {})(), "draft": object()}, "a draft model's cache beside"),
    ],
)
def test_what_sglang_transfers_with_mooncake_alone_is_refused(pools: dict[str, Any], words: str):
    with pytest.raises(LayoutError, match=f"SGLang itself transfers {words}.* Mooncake backend alone: leave"):
        is_hisparse(SimpleNamespace(**{"draft": None, **pools}))


# ---- what SGLang itself does


def test_sglang_itself_does_deepseek_v4_and_drafts_with_mooncake_alone():
    source = inspect.getsource(decode.DecodePreallocQueue)
    refusal = source.index("HiSparse device-only PD transfer currently requires the")
    before = source[:refusal].rsplit("device_page_indices = None", 1)[1]
    for words in ("DeepSeekV4TokenToKVPool", "draft_token_to_kv_pool is not None", "!= TransferBackend.MOONCAKE"):
        assert words in before


def test_what_comes_to_the_host_is_read_by_kernels_that_a_cpu_has_not():
    with pytest.raises(RuntimeError, match=r"requires sgl_kernel.kvcacheio .CUDA/ROCm/XPU.. It is not available"):
        hisparse_memory_pool.transfer_kv_all_layer_mla()
