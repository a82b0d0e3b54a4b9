"""Requests that ask for what cannot be: each fails alone, with words, and the schedulers go on.

What makes their senders and receivers is SGLang's own; ranks as in `test_ranks`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.disaggregation import decode, prefill
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
from sglang.srt.disaggregation.utils import TransferBackend
from sglang.srt.elastic_ep.elastic_ep import ElasticEPStateManager
from sglang.srt.managers import scheduler
from tests.real_engines.sglang.crossings import Request
from tests.real_engines.sglang.ranks import Model, place
from tests.real_engines.sglang.test_ranks import Pair, assert_fails, pair
from tests.support.waiting import eventually

from kvferry.engines.sglang import conditions
from kvferry.engines.sglang.conditions import conditions_of
from kvferry.engines.sglang.receiver import KVFerryReceiver
from kvferry.engines.sglang.sender import KVFerrySender

pytestmark = pytest.mark.timeout(60)

__all__ = ["pair"]  # a fixture

RAGGED = [[0.5, 0.5], [0.5], [0.5]]


def asked(pair: Any, room: int, **more: Any) -> Any:
    """As much of a request of SGLang's as its queues look at."""
    return SimpleNamespace(
        **{
            "rid": "a request",
            "bootstrap_room": room,
            "bootstrap_host": pair.host,
            "bootstrap_port": pair.port,
            "disagg_prefill_dp_rank": None,
            "origin_input_ids": [1, 2, 3],
            "output_ids": [],
            "input_embeds": None,
            "multimodal_inputs": None,
            "lora_id": None,
            "extra_key": None,
            "cache_salt": None,
            "sampling_params": SimpleNamespace(max_new_tokens=9),
            **more,
        }
    )


def polling(side: Any) -> Callable[[], list[int]]:
    return lambda: [side.poll()]


class Queues:
    """As much of SGLang's two queues as make a request's sender and receiver."""

    def __init__(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prefill, "get_kv_class", lambda *_: KVFerrySender)
        monkeypatch.setattr(decode, "get_kv_class", lambda *_: KVFerryReceiver)
        self._pair, self._monkeypatch = pair, monkeypatch

    def sender(self, req: Any) -> KVFerrySender:
        pair = self._pair
        queue = SimpleNamespace(
            kv_manager=pair.prefill.managers[0],
            transfer_backend=TransferBackend.NIXL,
            bootstrap_port=pair.port,
            scheduler=None,
            _check_if_req_exceed_kv_capacity=lambda _: False,
            _process_req=lambda _: None,
        )
        with place(self._monkeypatch, pair.port, pair.model, tp=1, tp_rank=0, pp=1, pp_rank=0):
            PrefillBootstrapQueue.create_sender(queue, req, 4)
        sender: KVFerrySender = req.disagg_kv_sender
        return sender

    def receiver(self, req: Any, dp_rank: int = 0) -> KVFerryReceiver:
        """One that SGLang has told the data-parallel rank, as soon as the prefill server was looked up."""
        (manager,) = self._pair.decode.managers
        eventually("the prefill server is found", lambda: manager.try_ensure_parallel_info(self._pair.address))
        queue = SimpleNamespace(kv_manager=manager, transfer_backend=TransferBackend.NIXL, scheduler=None, queue=[])
        DecodePreallocQueue._create_receiver_and_enqueue(queue, req)
        receiver: KVFerryReceiver = queue.queue[0].kv_receiver
        receiver.init(dp_rank)
        return receiver


@pytest.fixture
def queues(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Queues:
    return Queues(pair, monkeypatch)


@pytest.mark.parametrize("given", [RAGGED, [["a"]]], ids=["ragged", "text"])
def test_embeddings_that_cannot_be_digested_fail_their_request_alone(pair: Pair, queues: Queues, given: Any):
    """It ended both servers."""
    pair.begin(Model())
    sender = queues.sender(asked(pair, 1, input_embeds=given))
    receiver = queues.receiver(asked(pair, 2, input_embeds=given))
    for each in (sender, receiver):
        assert_fails(polling(each), [each], "cache depends on cannot be digested")
        each.clear()
    Request(pair, 1).run()


def test_embeddings_are_compared_as_float32():
    """As they are on servers of an earlier version, which read them through NumPy."""
    given = [[0.1, 2, float("inf")], [1e-45, -0.0, 3.5e-46]]

    def digest(rows: Any) -> bytes:
        return conditions_of(asked(SimpleNamespace(host="", port=0), 1, input_embeds=rows))["prompt embedding"]

    assert digest(given) == digest(np.asarray(given, np.float32).tolist())
    assert digest([[1e300]]) == digest([[float("inf")]])
    assert digest(given) != digest([[0.1, 2, float("inf")], [1e-45, 0.0, 3.5e-46]])


@pytest.mark.parametrize("room", [-5, -2, 0, 2**63, 2**64 + 1])
def test_a_number_that_no_room_has_fails_its_request_alone(pair: Pair, queues: Queues, room: int):
    """It ended both servers. The others of such numbers have them within SGLang's tables, where all must have one."""
    pair.begin(Model())
    sides: list[Any] = [each(asked(pair, room)) for each in (queues.sender, queues.receiver) for _ in range(2)]
    for each in sides:
        assert_fails(polling(each), [each], f"bootstrap_room {room} .*from 1 to 2")
    for receiver in sides[2:]:
        receiver.send_metadata(np.arange(3, dtype=np.int32), 0)
    for each in sides:
        each.abort()
        each.clear()
    Request(pair, 1).run()


@pytest.mark.parametrize("dp_rank", [-1, 5, 2**64])
@pytest.mark.parametrize("differs", [False, True])
def test_a_data_parallel_rank_that_is_not_there_fails_its_request_alone(
    pair: Pair, queues: Queues, dp_rank: int, differs: bool
):
    """With a server that differs, it ended the decode server."""
    pair.begin(Model())
    (manager,) = pair.decode.managers
    sender = queues.sender(asked(pair, 1))
    right = manager.kv_cache_dtype_str
    if differs:
        manager.kv_cache_dtype_str = "another"
    eventually("the prefill server is found", lambda: manager.try_ensure_parallel_info(pair.address))
    receiver = queues.receiver(asked(pair, 1), dp_rank)
    words = f"disagg_prefill_dp_rank {dp_rank} is none of the 1 .*from 0 to 0"
    for each in (receiver, sender):
        assert_fails(polling(each), [each], words)
        each.clear()
    manager.kv_cache_dtype_str = right
    manager.prefill_servers.forget(pair.address)
    Request(pair, 1).run()


@pytest.mark.parametrize("given", [{}, {"extra_key": "tenant"}, {"extra_key": "tenant adapter", "lora_id": "adapter"}])
def test_how_many_ranks_have_experts_is_no_salt(monkeypatch: pytest.MonkeyPatch, given: dict[str, str]):
    """Of two servers with --elastic-ep-backend, one whose cache shares no prefixes exchanged nothing with the other."""
    monkeypatch.setattr(scheduler, "get_exec", lambda: SimpleNamespace(moe=SimpleNamespace(elastic_ep_backend="nixl")))
    monkeypatch.setattr(ElasticEPStateManager, "instance", lambda: object())
    monkeypatch.setattr(conditions, "adapter_loaded", lambda *_: "")

    def side(ranks: int | None) -> dict[str, bytes]:
        monkeypatch.setattr(ElasticEPStateManager, "get_effective_ep_size", lambda: ranks)
        cache = SimpleNamespace(supports_prefix_sharing=lambda: ranks is not None)
        within = SimpleNamespace(tree_cache=cache, _last_logged_elastic_radix_namespace=None)
        req = asked(SimpleNamespace(host="", port=0), 1, **given)
        scheduler.Scheduler._maybe_namespace_elastic_radix_cache(within, req)
        assert ("elastic_ep_size" in (req.extra_key or "")) == (ranks is not None)
        return conditions_of(req)

    assert side(8) == side(12) == side(None)
    assert ("cache salt" in side(8)) == bool(given)
