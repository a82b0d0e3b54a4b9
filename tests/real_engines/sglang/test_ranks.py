"""SGLang's manager, sender and receiver with unequal ranks on both sides, byte for byte.

All ranks are in one process, which NIXL's bindings do not bear: its agents would wait for each other. Bytes move in
process therefore; `test_disaggregated` and `test_unequal` have processes, and NIXL.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.checksum import page_indices_for_request
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer, KVTransferError
from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue, SchedulerDisaggregationPrefillMixin
from tests.real_engines.sglang.crossings import WAIT_S, Members, Request, wait
from tests.real_engines.sglang.ranks import DECODE, PREFILL, Model, Rank
from tests.support.waiting import eventually

from kvferry import DecodeEndpoint, InProcessNetwork, Sender
from kvferry.applications.up.supervision import free_ports, refuse_taken
from kvferry.endpoint import base
from kvferry.engines.sglang.bootstrap import KVFerryBootstrapServer
from kvferry.engines.sglang.receiver import KVFerryReceiver
from kvferry.engines.sglang.sender import KVFerrySender
from kvferry.errors import UsageError
from kvferry.transport.inprocess import InProcessTransport

pytestmark = pytest.mark.timeout(40)


class Pair(Members):
    """A prefill and a decode engine in one process."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        network = InProcessNetwork()
        patch.setattr(base, "create_transport", lambda _, name, **__: InProcessTransport(network, name))
        super().__init__(patch, free_ports(1)[0], Model())
        self._bootstrap = KVFerryBootstrapServer("127.0.0.1", self.port)

    def begin(
        self,
        model: Model,
        *,
        prefill_tp: int = 1,
        decode_tp: int = 1,
        prefill_pp: int = 1,
        decode_pp: int = 1,
        **decode: Any,
    ) -> None:
        """Starts both.

        Args:
            decode: what is different in the decode side's model.
        """
        self.model = model
        sides = ((PREFILL, model, prefill_tp, prefill_pp), (DECODE, replace(model, **decode), decode_tp, decode_pp))
        for mode, of_side, tp, pp in sides:
            for stage in range(pp):
                for tp_rank in range(tp):
                    self.start(mode, Rank(of_side, tp=tp, tp_rank=tp_rank, stage=(stage, pp)), pp=pp, stage=stage)

    def end_prefill(self) -> None:
        for manager in self.prefill.managers:
            manager.close()
        self.prefill.ranks.clear()
        self.prefill.managers.clear()
        self._bootstrap.close()

    def restart_prefill(self) -> None:
        """Ends the prefill engine, and starts one at the same bootstrap address: its registry is elsewhere."""
        self.end_prefill()
        self._bootstrap = KVFerryBootstrapServer("127.0.0.1", self.port)
        self.start(PREFILL, Rank(self.model, tp=1, tp_rank=0))

    def close(self) -> None:
        super().close()
        self._bootstrap.close()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setenv("KVFERRY_HEARTBEAT_INTERVAL_S", "0.5")
    monkeypatch.setenv("KVFERRY_STAGING_RING_MIB", "2")  # a hundred ranks, one after the other, would take 32 MiB each
    monkeypatch.setenv("KVFERRY_STAGING_CHUNK_MIB", "0.5")
    started = Pair(monkeypatch)
    yield started
    started.close()


MODELS = {
    "heads": Model(),
    "latents": Model(heads=None, head_bytes=24),
    "a window": Model(window_layers=2),
    "recurrent state": Model(state_layers=2),
    "few heads": Model(heads=1),
    "heads by layer": Model(heads=1, window_layers=2, window_heads=4),
    "a mixer's groups": Model(state_layers=2, groups=4),
    "one group": Model(state_layers=2, groups=1),
    "recurrent state alone": Model(layers=0, state_layers=2),
}


SHOWN = {"latents": ("MLATokenToKVPool",), "recurrent state": ("StateType.MAMBA",)}
"""Which kinds of cache they try, as docs/design/caches.md has them."""


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2), (4, 2)])
@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize(
    "model",
    [pytest.param(name, marks=[pytest.mark.shows("sglang", kind) for kind in SHOWN.get(name, ())]) for name in MODELS],
)
def test_caches_arrive(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, model: str, path: str, prefill_tp: int, decode_tp: int
):
    monkeypatch.setenv("KVFERRY_PATH", path)
    pair.begin(MODELS[model], prefill_tp=prefill_tp, decode_tp=decode_tp)
    Request(pair, 1).run()
    Request(pair, 2, held_pages=3).run()
    Request(pair, 1).run()  # the number again


@pytest.mark.parametrize(("here", "there"), [(4, 1), (1, 4), (4, 6)])
@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize("model", ["heads", "latents", "a window", "recurrent state", "recurrent state alone"])
def test_pages_may_differ_in_size(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, model: str, path: str, here: int, there: int
):
    """Of prompts that fill neither side's last page, behind prefixes that are no whole pages of the other side."""
    monkeypatch.setenv("KVFERRY_PATH", path)
    pair.begin(replace(MODELS[model], page_tokens=here), prefill_tp=2, decode_tp=1, page_tokens=there)
    for room, (tokens, held) in enumerate([(27, 0), (29, 1), (29, 3), (31, 5), (13, 2), (26, 4)], 1):
        Request(pair, room, tokens=tokens, held_tokens=held * there).run()


@pytest.mark.parametrize("method", ["follow_bootstrap_room", "round_robin"])
def test_each_replica_of_the_prefill_side_takes_its_own_requests(pair: Pair, method: str):
    """Plain --dp-size: SGLang compares a rank with the room, by which it has chosen the replica, or registers it."""
    for dp_rank in range(2):
        where = {"dp_size": 2, "num_dp_ranks": 2, "system_dp_rank": dp_rank, "load_balance_method": method}
        pair.start(PREFILL, Rank(pair.model, tp=1, tp_rank=0, options=where))
    pair.start(DECODE, Rank(pair.model, tp=1, tp_rank=0))
    for room in range(1, 5):
        request = Request(pair, room, dp_rank=room % 2, dp_size=2)
        if method == "round_robin":
            assert KVFerryReceiver.query_prefill_dp_ranks(pair.address, [room]) == {str(room): room % 2}
        request.run()


@pytest.mark.parametrize(("here", "there"), [(4, 1), (1, 4)])
def test_what_fills_a_page_is_not_all_of_it_a_request(pair: Pair, here: int, there: int):
    """What lies behind a prompt in its last page stays as it was, and so does what the decode side has."""
    pair.begin(Model(page_tokens=here), page_tokens=there)
    (rank,) = pair.decode.ranks
    for pool in (each for kind in rank.kv for each in kind):
        pool[:] = 77
    request = Request(pair, 1, tokens=27, held_tokens=3 * there)
    request.run()
    *_, last = request.destination[0]
    behind = rank.kv[0][0][last, 27 % there or there :]
    assert (behind == 77).all()
    others = [page for page in range(40) if page not in request.destination[0]]
    assert (rank.kv[0][0][others] == 77).all()


def test_each_rank_gets_its_own_heads_in_every_room(pair: Pair):
    # Each of two ranks has one head of either kind of layer: of full attention the same, of windows its own.
    pair.begin(Model(heads=1, window_layers=2, window_heads=2), prefill_tp=2, decode_tp=2)
    for room in range(1, 7):
        Request(pair, room).run()


def test_a_prefill_server_that_was_started_again_is_found_though_no_request_failed(pair: Pair):
    """Decode ranks kept its old registry's port, and rooms waited there for 300 s."""
    pair.begin(Model())
    Request(pair, 1).run()
    pair.restart_prefill()
    Request(pair, 2).run()


def test_what_is_closed_lets_go_of_its_port(pair: Pair):
    pair.begin(Model())
    managers = [*pair.prefill.managers, *pair.decode.managers]
    pair.close()
    for manager in managers:
        refuse_taken(manager.local_ip, manager.rank_port)


STAGED = {
    "heads": Model(layers=4),
    "latents": Model(layers=4, heads=None, head_bytes=24),
    "a window": Model(layers=3, window_layers=5, window_heads=2),
    "recurrent state": Model(layers=4, state_layers=6),
    "a mixer's groups": Model(layers=2, state_layers=4, groups=4),
    "recurrent state alone": Model(layers=0, state_layers=4),
}


@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize(("prefill", "decode"), [((1, 2), (2, 1)), ((2, 1), (1, 2)), ((2, 2), (1, 2))])
@pytest.mark.parametrize("model", STAGED)
def test_pipeline_stages_send_and_receive_their_layers(
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    prefill: tuple[int, int],
    decode: tuple[int, int],
    path: str,
):
    """Of every kind, on either side: with other numbers of stages and of tensor-parallel ranks."""
    monkeypatch.setenv("KVFERRY_PATH", path)
    (prefill_tp, prefill_pp), (decode_tp, decode_pp) = prefill, decode
    pair.begin(STAGED[model], prefill_tp=prefill_tp, prefill_pp=prefill_pp, decode_tp=decode_tp, decode_pp=decode_pp)
    Request(pair, 1).run()
    Request(pair, 2, held_pages=3).run()


def test_any_number_of_stages_meets_any_other(pair: Pair):
    pair.begin(Model(layers=6, window_layers=6), prefill_pp=3, decode_pp=2)
    Request(pair, 1).run()


@pytest.mark.parametrize(("full", "windows"), [(1, 3), (3, 1)])
def test_a_stage_may_lack_layers_of_a_kind(pair: Pair, full: int, windows: int):
    pair.begin(Model(layers=full, window_layers=windows), prefill_pp=2, decode_pp=3)
    Request(pair, 1).run()


def test_the_first_stage_begins_when_its_own_room_is_open(pair: Pair):
    """SGLang polls the first stage alone until a request is computed, and hands its answer to the others."""
    pair.begin(Model(layers=4), prefill_pp=2)
    request = Request(pair, 1)
    wait(request.received, KVPoll.WaitingForInput)
    request.ask()
    wait(lambda: [request.senders[0].poll_pp_consensus()], KVPoll.WaitingForInput)
    request.send()
    wait(request.received, KVPoll.Success)
    wait(request.sent, KVPoll.Success)
    request.check()


def test_sglangs_page_numbers_are_copied_once_where_they_are_kept(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """On the scheduler's thread: what stands between only passes them on, and SGLang may use its array again."""
    given: dict[str, list[np.ndarray[Any, Any]]] = {"asked": [], "sent": []}
    opens, submit, asks, send = DecodeEndpoint.open, Sender.submit, KVFerryReceiver.send_metadata, KVFerrySender.send

    def opening(endpoint: Any, room: int, pages: Any, **more: Any) -> Any:
        given["asked"].append(pages["kv"].pages)
        return opens(endpoint, room, pages, **more)

    def submitting(sender: Any, pages: Any, **more: Any) -> None:
        given["sent"].append(pages["kv"].pages)
        submit(sender, pages, **more)

    def again(call: Callable[..., None]) -> Callable[..., None]:
        def calling(this: Any, indices: np.ndarray[Any, Any], *others: Any, **more: Any) -> None:
            call(this, indices, *others, **more)
            assert any(each is indices for each in [*given["asked"][-1:], *given["sent"][-1:]]), (
                "they were copied before"
            )
            indices[:] = 39

        return calling

    monkeypatch.setattr(DecodeEndpoint, "open", opening)
    monkeypatch.setattr(Sender, "submit", submitting)
    monkeypatch.setattr(KVFerryReceiver, "send_metadata", again(asks))
    monkeypatch.setattr(KVFerrySender, "send", again(send))
    pair.begin(Model(window_layers=2))
    Request(pair, 1).run()
    assert [len(each) for each in (given["asked"], given["sent"])] == [1, 2]


def test_pages_that_the_decode_side_holds_do_not_travel(pair: Pair):
    pair.begin(Model())
    request = Request(pair, 1, pages=8, held_pages=5)
    request.run()
    per_page = 2 * 3 * 4 * 4 * 8
    assert request.senders[0].get_transfer_metric().transfer_total_bytes == 3 * per_page


class Checksums:
    """SGLang's checksum of a request on one rank, by SGLang's own functions but for the arithmetic."""

    def __init__(self, rank: Rank, request: Request, pages: list[int]) -> None:
        """Gives a scheduler as much as those functions look at.

        Args:
            pages: all of the request's on this rank.
        """
        tokens = rank.model.page_tokens
        slots = [page * tokens + offset for page in pages for offset in range(tokens)]
        self._rank, self.digest = rank, 0
        self.scheduler = SimpleNamespace(
            kv_checksum_computer=self,
            req_to_token_pool=SimpleNamespace(req_to_token=torch.tensor([slots])),
            token_to_kv_pool_allocator=SimpleNamespace(page_size=tokens, get_kvcache=object),
            disagg_prefill_bootstrap_queue=SimpleNamespace(kv_checksum_signature=1),
            disagg_metadata_buffers=SimpleNamespace(set_kv_checksum=self._set),
            _send_kv_chunk=lambda *_, **__: None,
            ensure_metadata_buffer=lambda _: True,
            _num_pages_to_send=lambda *_: request.pages - request.held_pages,
        )
        self.req = SimpleNamespace(
            rid="a request",
            origin_input_ids=[0] * len(slots),
            extend_end=len(slots),
            kv=SimpleNamespace(req_pool_idx=0, cache_protected_len=request.held_pages * tokens),
            pending_bootstrap=True,
            metadata_buffer_index=request.aux_index,
            time_stats=SimpleNamespace(set_bootstrap_done_time=lambda: None),
        )

    def _set(self, _: Any, digest: int, signature: int) -> None:
        self.digest = digest

    def compute(self, pages: Any, state: Any) -> int:
        digest = 1
        for pool in (pool for kind in self._rank.kv for pool in kind):
            for page in pages.tolist():
                digest = zlib.adler32(pool[page].tobytes(), digest)
        return digest

    def sent(self, sender: KVFerrySender) -> int:
        """The prefill side's, which it sends along."""
        self.req.disagg_kv_sender = sender
        PrefillBootstrapQueue.finalize_bootstrap(self.scheduler, self.req)
        SchedulerDisaggregationPrefillMixin.send_kv_chunk(self.scheduler, self.req, last_chunk=True)
        return self.digest

    def found(self) -> int:
        """The decode side's, which it compares with that."""
        start = self.req.kv.cache_protected_len
        pages = page_indices_for_request(self.scheduler, self.req, len(self.req.origin_input_ids), start_idx=start)
        return self.compute(pages, None)


@pytest.mark.parametrize("held_pages", [0, 5])
def test_sglangs_checksum_is_of_what_the_decode_side_lacked(pair: Pair, held_pages: int):
    """Before, it was of the whole prompt, so that SGLang failed every request whose prefix hit with status 500."""
    pair.begin(Model())
    request = Request(pair, 1, pages=8, held_pages=held_pages)
    request.ask()
    wait(request.sent, KVPoll.WaitingForInput)
    sent = Checksums(pair.prefill.ranks[0], request, request.source[0]).sent(request.senders[0])
    request.send()
    wait(request.received, KVPoll.Success)
    held = [page for page in range(40) if page not in request.destination[0]][:held_pages]
    decode = Checksums(pair.decode.ranks[0], request, [*held, *request.destination[0]])
    assert decode.found() == sent
    pair.decode.ranks[0].kv[0][0][request.destination[0][1], 0, 0] ^= 1
    assert decode.found() != sent
    assert pair.decode.managers[0].should_verify_kv_checksum(pair.address)


def test_sglangs_checksum_is_the_first_ranks_alone(pair: Pair):
    """It comes with the first token: before, every other rank compared it with its own bytes, and failed."""
    pair.begin(Model(), prefill_tp=2, decode_tp=2)
    Request(pair, 1).run()
    assert [each.should_verify_kv_checksum(pair.address) for each in pair.decode.managers] == [True, False]


def test_sglangs_checksum_is_not_compared_between_pages_of_unequal_size(pair: Pair):
    """It is of whole pages."""
    pair.begin(Model(), page_tokens=2)
    Request(pair, 1).run()
    assert not pair.decode.managers[0].should_verify_kv_checksum(pair.address)


@pytest.mark.parametrize("stages", [{"prefill_pp": 2}, {"decode_pp": 2}, {"prefill_pp": 2, "decode_pp": 2}])
def test_sglangs_checksum_is_not_compared_between_pipeline_stages(pair: Pair, stages: dict[str, int]):
    """It is of the last stage's layers, which have as many bytes as another one's."""
    pair.begin(Model(layers=4), **stages)
    Request(pair, 1).run()
    assert not any(manager.should_verify_kv_checksum(pair.address) for manager in pair.decode.managers)


def test_a_request_without_pages_ends(pair: Pair):
    pair.begin(Model())
    request = Request(pair, 1, pages=4, held_pages=4)
    request.run()


def test_a_page_that_is_another_ones_shows(pair: Pair):
    pair.begin(Model())
    request = Request(pair, 1)
    request.source[0][2] = next(page for page in range(40) if page not in request.source[0])
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        request.run()


def test_an_abort_on_the_prefill_side_fails_both(pair: Pair):
    pair.begin(Model(), prefill_tp=2)
    request = Request(pair, 1)
    request.ask()
    wait(request.sent, KVPoll.WaitingForInput)
    request.senders[0].abort()
    assert request.senders[0].poll() == KVPoll.Failed
    assert_fails(request.received, request.receivers, "SGLang gave the request up")
    assert_reusable(pair, request)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_when_the_first_rank_reports_a_failure_every_rank_knows_why(pair: Pair, side: str):
    """SGLang ends a request on all ranks with the first that reports it, and tells the client what rank 0 knows."""
    pair.begin(Model(), prefill_tp=2, decode_tp=2)
    request = Request(pair, 1)
    request.ask()
    wait(request.sent, KVPoll.WaitingForInput)
    polls, ranks = (request.sent, request.senders) if side == "prefill" else (request.received, request.receivers)
    transfer = ranks[1].transfer
    assert transfer is not None
    transfer.abort("rank 1 hears of it first")
    deadline = time.monotonic() + WAIT_S
    while min(polls()) != KVPoll.Failed:
        assert time.monotonic() < deadline
    for rank in ranks:
        with pytest.raises(KVTransferError, match="rank 1 hears of it first"):
            rank.failure_exception()
    assert_reusable(pair, request)


def test_a_rank_whose_pages_may_still_be_written_to_has_its_reason_ready(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """Without SGLang's deferred release it says nothing until they are free, and the other ranks do not wait for it."""
    pair.begin(Model(), decode_tp=2)
    request = Request(pair, 1)
    request.ask()
    wait(request.sent, KVPoll.WaitingForInput)
    first, second = (receiver.transfer for receiver in request.receivers)
    monkeypatch.setattr(type(first), "pages_reusable", property(lambda transfer: transfer is not first))
    for manager in pair.decode.managers:
        monkeypatch.setattr(manager, "enable_deferred_decode_kv_release", False)
    assert second is not None
    second.abort("rank 1 hears of it first")
    deadline = time.monotonic() + WAIT_S
    while request.received()[1] != KVPoll.Failed:
        assert time.monotonic() < deadline
    assert request.received()[0] == KVPoll.Transferring
    with pytest.raises(KVTransferError, match="rank 1 hears of it first"):
        request.receivers[0].failure_exception()


def test_an_abort_on_the_decode_side_fails_both(pair: Pair):
    pair.begin(Model(), decode_tp=2)
    request = Request(pair, 1)
    request.ask()
    wait(request.sent, KVPoll.WaitingForInput)
    request.receivers[0].abort()
    assert request.receivers[0].poll() == KVPoll.Failed
    assert request.receivers[0].abort_notified
    assert_fails(request.sent, request.senders, "SGLang gave the request up")
    for receiver in request.receivers:
        receiver.ensure_abort_notified(force_arm=True)
    assert_reusable(pair, request)


def assert_fails(polls: Callable[[], list[int]], sides: list[Any], why: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while min(polls()) != KVPoll.Failed:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    failed = [side for side in sides if side.poll() == KVPoll.Failed]
    with pytest.raises(KVTransferError, match=why):
        failed[-1].failure_exception()


def assert_reusable(pair: Pair, request: Request) -> None:
    deadline = time.monotonic() + WAIT_S
    for manager in pair.decode.managers:
        while not manager.is_abort_release_safe(request.room, 1):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        manager.clear_deferred_abort_state(request.room)


def test_pages_are_kept_until_nobody_writes(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    pair.begin(Model())
    request = Request(pair, 1)
    request.ask()
    wait(request.sent, KVPoll.WaitingForInput)
    (receiver,), (manager,) = request.receivers, pair.decode.managers
    monkeypatch.setattr(type(receiver.transfer), "pages_reusable", property(lambda _: False))
    receiver.abort()
    assert receiver.poll() == KVPoll.Failed  # SGLang hears of it at once, and keeps the pages
    with pytest.raises(KVTransferError):
        receiver.failure_exception()
    assert not receiver.is_abort_release_safe()
    assert not manager.is_abort_release_safe(1, 0)
    monkeypatch.undo()
    assert_reusable(pair, request)


def asked_without_deferred_release(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Request:
    """A request whose cache a decode server has asked for that takes pages back as soon as it hears of a failure."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE", "0")
    pair.begin(Model())
    request = Request(pair, 1)
    request.ask()
    wait(request.sent, KVPoll.WaitingForInput)
    return request


def test_without_deferred_release_sglang_hears_of_a_failure_when_pages_are_safe(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    request = asked_without_deferred_release(pair, monkeypatch)
    (receiver,) = request.receivers
    with monkeypatch.context() as held:
        held.setattr(type(receiver.transfer), "pages_reusable", property(lambda _: False))
        request.senders[0].abort()
        deadline = time.monotonic() + WAIT_S
        while receiver.transfer is None or not receiver.transfer.state.is_final:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        assert receiver.poll() == KVPoll.Transferring
    assert_fails(request.received, request.receivers, "SGLang gave the request up")


def test_without_deferred_release_a_client_that_aborts_frees_no_page_that_may_be_written_to(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    request = asked_without_deferred_release(pair, monkeypatch)
    (receiver,) = request.receivers
    with monkeypatch.context() as held:
        held.setattr(type(receiver.transfer), "pages_reusable", property(lambda _: False))
        receiver.abort()
        transfer = receiver.transfer
        assert transfer is not None
        eventually("it has ended", lambda: transfer.state.is_final)
        assert receiver.poll() == KVPoll.Transferring
    assert_fails(request.received, request.receivers, "SGLang gave the request up")
    assert_fails(request.sent, request.senders, "SGLang gave the request up")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"page_tokens": 8, "order": "vectorized_5d"},
            "--page-size, since pages of k, v cannot be cut between tokens, is 4 there and 8 here",
        ),
        ({"layers": 2}, "layer 3|layer"),
        ({"heads": 2}, "head 4|head"),
        ({"window_layers": 1}, "window"),
        ({"weights": "others"}, "weights.*'the same'.*'others'|weights.*'others'.*'the same'"),
    ],
)
def test_engines_that_cannot_work_together_say_so_on_both_sides(pair: Pair, changes: dict[str, Any], words: str):
    pair.begin(Model(order=str(changes.get("order", "nhd"))), **changes)
    manager = pair.decode.managers[0]
    sender = pair.sender(pair.prefill.managers[0], 1)
    receiver = pair.receiver(manager, 1, tokens=3 * pair.decode.ranks[0].model.page_tokens)
    if receiver.poll() != KVPoll.Failed:
        state: list[Any] = [[]] * bool(changes.get("window_layers"))
        receiver.send_metadata(np.arange(3, dtype=np.int32), 0, state)
    assert_fails(lambda: [receiver.poll()], [receiver], words)
    assert_fails(lambda: [sender.poll()], [sender], f"decode rank 0 of 'sglang-decode' refused it: .*({words})")
    assert sender.transfer is not None
    assert sender.transfer.pages_reusable


@pytest.mark.parametrize("how", ["abort", "clear"])
def test_a_request_that_the_decode_side_gives_up_before_it_has_pages_ends_on_the_other(pair: Pair, how: str):
    pair.begin(Model(), decode_tp=2)
    sender = pair.sender(pair.prefill.managers[0], 1)
    receivers = [pair.receiver(manager, 1) for manager in pair.decode.managers]
    getattr(receivers[1], how)()
    assert_fails(lambda: [sender.poll()], [sender], "decode rank 1 of 'sglang-decode' refused it: SGLang")


def test_a_room_that_cannot_be_opened_on_the_prefill_side_ends_on_the_other(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KVFERRY_MAX_ROOMS", "1")
    pair.begin(Model())
    pair.sender(pair.prefill.managers[0], 1)
    sender = pair.sender(pair.prefill.managers[0], 2)
    receiver = pair.receiver(pair.decode.managers[0], 2)
    receiver.send_metadata(np.arange(3, dtype=np.int32), 0)
    assert_fails(lambda: [sender.poll()], [sender], "KVFERRY_MAX_ROOMS")
    assert_fails(lambda: [receiver.poll()], [receiver], "refused by the prefill side: .*KVFERRY_MAX_ROOMS")


def test_a_request_with_another_salt_is_refused_by_name(pair: Pair):
    pair.begin(Model())
    (manager,) = pair.decode.managers
    sender = pair.sender(pair.prefill.managers[0], 1)
    receiver = pair.receiver(manager, 1, salt="tenant b")
    receiver.send_metadata(np.arange(3, dtype=np.int32), 0)
    assert_fails(lambda: [receiver.poll()], [receiver], "cache salt")
    assert_fails(lambda: [sender.poll()], [sender], "cache salt")


def test_without_its_hook_a_request_is_not_sent(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    pair.begin(Model())
    with monkeypatch.context() as lost:
        lost.setattr(pair, "_made", lambda _, make, **__: make())
        sender = pair.sender(pair.prefill.managers[0], 1)
        receiver = pair.receiver(pair.decode.managers[0], 2)
    assert_fails(lambda: [sender.poll()], [sender], r"hook on .*PrefillBootstrapQueue.create_sender was not called")
    assert_fails(
        lambda: [receiver.poll()],
        [receiver],
        r"hook on .*DecodePreallocQueue._create_receiver_and_enqueue was not called",
    )


def test_metadata_rows_of_other_sizes_fail_the_request(pair: Pair):
    pair.begin(Model())
    manager = pair.decode.managers[0]
    manager.metadata_rows = replace(manager.metadata_rows, row_bytes=(64, 128))
    request = Request(pair, 1)
    request.ask()
    wait(request.sent, KVPoll.WaitingForInput)
    request.send()
    assert_fails(request.received, request.receivers, r"metadata rows of \[64, 64\] bytes, this side of \[64, 128\]")


def test_a_bootstrap_server_without_kvferry_is_named(pair: Pair):
    pair.begin(Model())
    (port,) = free_ports(1)
    other, address = CommonKVBootstrapServer("127.0.0.1", port), f"127.0.0.1:{port}"
    manager = pair.decode.managers[0]

    def is_named() -> bool:
        assert not manager.try_ensure_parallel_info(address)
        return "knows nothing of kvferry" in (
            manager.prefill_servers.why_not_found(address, 0.0, time.monotonic()) or ""
        )

    try:
        eventually("it was asked", is_named)
    finally:
        other.close()


def test_a_request_that_comes_while_the_decode_sides_memory_is_away_goes_on_when_it_is_back(pair: Pair):
    """No bootstrap server was known any more that announces its engine."""
    pair.begin(Model())
    Request(pair, 1).run()
    (manager,) = pair.decode.managers
    manager.deregister_buffer_to_engine()
    request = Request(pair, 2)
    assert request.received() == [KVPoll.Bootstrapping]
    manager.register_buffer_to_engine()
    request.run()
    Request(pair, 3).run()


@pytest.mark.parametrize("mode", [PREFILL, DECODE])
def test_metadata_rows_that_are_too_large_to_travel_are_refused_at_the_start(pair: Pair, mode: Any):
    """Every request failed."""
    rank = Rank(pair.model, tp=1, tp_rank=0)
    rank.tokens = np.zeros((8, 300_000), np.int32)
    with pytest.raises(UsageError, match=r"1200064 bytes .*lower --sampling-mask-max-tokens"):
        pair.start(mode, rank)


def test_metadata_rows_travel_as_far_as_they_are_not_refused(pair: Pair):
    for mode in (PREFILL, DECODE):
        rank = Rank(pair.model, tp=1, tp_rank=0)
        rank.tokens = np.zeros((8, (2**20 - 1024 - 64) // 4), np.int32)
        pair.start(mode, rank)
    Request(pair, 1).run()
