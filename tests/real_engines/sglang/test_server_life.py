"""What SGLang does with a server's manager while the server lives: memory that goes and comes back, another role."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn
from tests.real_engines.sglang.crossings import Members, Request, wait
from tests.real_engines.sglang.ranks import DECODE, PREFILL, Model, Rank
from tests.real_engines.sglang.test_ranks import Pair, assert_fails, pair
from tests.support.waiting import eventually

from kvferry.applications.up.supervision import free_ports, refuse_taken
from kvferry.engines.sglang.bootstrap import KVFerryBootstrapServer
from kvferry.engines.sglang.manager import KVFerryManager
from kvferry.engines.sglang.prefill_server import PrefillServer
from kvferry.engines.sglang.receiver import KVFerryReceiver
from kvferry.engines.sglang.sender import KVFerrySender
from kvferry.errors import TransferError
from kvferry.transport.inprocess import InProcessTransport

pytestmark = pytest.mark.timeout(60)

__all__ = ["pair"]  # a fixture


# ---- release_memory_occupation and resume_memory_occupation ----------------------------------------------------------


def release(*managers: KVFerryManager) -> None:
    """As SGLang's queues do, before the memory of the caches goes."""
    for manager in managers:
        assert hasattr(manager, "deregister_buffer_to_engine")  # SGLang goes on where there is none
        manager.deregister_buffer_to_engine()


def resume(*managers: KVFerryManager) -> None:
    for manager in managers:
        assert hasattr(manager, "register_buffer_to_engine")
        manager.register_buffer_to_engine()


@pytest.mark.parametrize("side", ["prefill", "decode", "both"])
@pytest.mark.parametrize("path", ["direct", "staged"])
def test_memory_goes_and_comes_back(pair: Pair, monkeypatch: pytest.MonkeyPatch, side: str, path: str):
    monkeypatch.setenv("KVFERRY_PATH", path)
    pair.begin(Model(window_layers=2), prefill_tp=2)
    sides = {"prefill": pair.prefill.managers, "decode": pair.decode.managers}
    managers = [each for name, of in sides.items() for each in of if side in (name, "both")]
    Request(pair, 1).run()
    for room in (2, 3):
        endpoints = [each.prefill if each in pair.prefill.managers else each.decode for each in managers]
        release(*managers)
        assert all(not each.is_healthy for each in endpoints)
        release(*managers)  # SGLang may be asked again
        resume(*managers)
        resume(*managers)
        Request(pair, room).run()


def test_a_role_is_not_left_while_memory_is_away(pair: Pair):
    """SGLang asks before it ends anything. The next role's manager would register memory that is not there."""
    pair.begin(Model())
    managers = (*pair.prefill.managers, *pair.decode.managers)
    for change, may_switch in ((release, False), (resume, True)):
        change(*managers)
        assert [each.supports_role_switch for each in managers] == [may_switch, may_switch]
    Request(pair, 1).run()


def test_what_is_released_is_registered_nowhere(pair: Pair):
    pair.begin(Model())
    Request(pair, 1).run()
    (prefill,), (decode,) = pair.prefill.managers, pair.decode.managers
    engine = prefill.prefill.engine
    assert decode.prefill_servers.directory.engine(engine).registrations
    release(prefill)
    assert not decode.prefill_servers.directory.engine(engine).registrations
    resume(prefill)
    eventually("it is registered again", lambda: decode.prefill_servers.directory.engine(engine).registrations)


def test_a_request_that_comes_while_memory_is_away_is_served_when_it_is_back(pair: Pair):
    """SGLang takes requests while it is paused, and makes their senders."""
    pair.begin(Model())
    release(*pair.prefill.managers)
    request = Request(pair, 1)
    given_up = pair.sender(pair.prefill.managers[0], 2)
    assert request.sent() == [KVPoll.Bootstrapping]
    request.ask()
    given_up.abort()
    resume(*pair.prefill.managers)
    assert given_up.poll() == KVPoll.Failed
    wait(request.sent, KVPoll.WaitingForInput)
    assert pair.prefill.managers[0].prefill.open_rooms == 1
    request.send()
    wait(request.received, KVPoll.Success)
    wait(request.sent, KVPoll.Success)
    request.check()
    request.clear()


def test_pages_are_not_asked_for_into_memory_that_is_away(pair: Pair):
    pair.begin(Model())
    receiver = pair.receiver(pair.decode.managers[0], 1)
    release(*pair.decode.managers)
    receiver.send_metadata(np.arange(3, dtype=np.int32), 0)
    assert_fails(lambda: [receiver.poll()], [receiver], "given away .release_memory_occupation., and is not back yet")


def test_a_request_in_the_middle_ends_on_both_sides_before_memory_goes(pair: Pair):
    pair.begin(Model())
    request = Request(pair, 1)
    request.ask()
    wait(request.sent, KVPoll.WaitingForInput)
    release(*pair.decode.managers)
    assert_fails(request.sent, request.senders, "the decode endpoint was closed")
    (rank,) = pair.decode.ranks
    before = [pool.copy() for kind in rank.kv for pool in kind]
    for sender in request.senders:
        sender.clear()
    resume(*pair.decode.managers)
    assert all((pool == old).all() for pool, old in zip((p for kind in rank.kv for p in kind), before, strict=True))


def begin_a_write_that_hangs(members: Members, hanging: pytest.MonkeyPatch) -> Request:
    """A request, of which something is being written for as long as it is patched."""
    request = Request(members, 1)
    request.ask()
    wait(request.sent, KVPoll.WaitingForInput)
    hanging.setattr(InProcessTransport, "poll", lambda *_: None)
    request.send()
    wait(request.sent, KVPoll.Transferring)
    return request


@pytest.mark.parametrize(("side", "done"), [("prefill", "read"), ("decode", "written")])
def test_memory_does_not_go_while_something_may_still_use_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, side: str, done: str
):
    monkeypatch.setenv("KVFERRY_CLOSE_TIMEOUT_S", "0.5")
    pair.begin(Model())
    (manager,) = pair.prefill.managers if side == "prefill" else pair.decode.managers
    with monkeypatch.context() as hanging:
        begin_a_write_that_hangs(pair, hanging)
        words = f"7 pages of SGLang's caches may still be {done}"
        with pytest.raises(TransferError, match=f"{words}.*KVFERRY_CLOSE_TIMEOUT_S.*must not be given away"):
            manager.deregister_buffer_to_engine()


# ---- weights that are replaced ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_weights_that_are_replaced_meet_no_others_and_end_what_is_open(pair: Pair, side: str):
    pair.begin(Model())
    Request(pair, 1).run()
    (one,), (other,) = (each.managers for each in (pair.prefill, pair.decode)[:: 1 if side == "prefill" else -1])
    request = Request(pair, 2)
    request.ask()
    wait(request.sent, KVPoll.WaitingForInput)
    one.weights.came("7")
    one.renew_weights()
    assert_fails(request.received, request.receivers, f"the {side} server's weights were replaced while it ran")
    assert_fails(request.sent, request.senders, f"the {side} server's weights were replaced while it ran")
    request.clear()
    request = Request(pair, 3)
    assert_fails(request.received, request.receivers, "weights is .*'weight_version 7'")
    assert_fails(request.sent, request.senders, "weights is .*'weight_version 7'")
    request.clear()
    other.weights.came("7")
    other.renew_weights()
    Request(pair, 4).run()
    request = Request(pair, 5)
    request.ask()
    wait(request.sent, KVPoll.WaitingForInput)
    one.weights.came("7")  # others, under a name that was used before
    one.renew_weights()
    assert_fails(request.received, request.receivers, f"the {side} server's weights were replaced while it ran")
    assert_fails(request.sent, request.senders, f"the {side} server's weights were replaced while it ran")
    request.clear()
    pair.decode.ranks.clear()
    pair.decode.managers.clear()
    pair.start(DECODE, Rank(replace(pair.model, weights="weight_version 7"), tp=1, tp_rank=0))
    Request(pair, 6).run()


# ---- requests that the decode side retracted, and that the prefill side computes again ------------------------------


def refuse_at_once(manager: KVFerryManager, receiver: KVFerryReceiver) -> None:
    """SGLang asks for the cache again, and learns at once that it cannot: nobody says where requests are taken."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefillServer, "http_url", lambda *_: None)
        manager.submit_prefill_recompute(receiver, {"rid": "a"})


def test_a_late_refusal_to_compute_again_fails_nobody(pair: Pair):
    """SGLang asks by HTTP. The answer may come when the cache is there, or the number is another request's."""
    pair.begin(Model())
    (manager,) = pair.decode.managers
    first = Request(pair, 1)
    first.ask()
    wait(first.sent, KVPoll.WaitingForInput)
    first.send()
    eventually("the cache is there", lambda: first.receivers[0].is_over)
    refuse_at_once(manager, first.receivers[0])
    wait(first.received, KVPoll.Success)
    wait(first.sent, KVPoll.Success)
    first.check()
    first.clear()
    again = Request(pair, 1)  # of the same request: its number stays
    wait(again.received, KVPoll.WaitingForInput)
    refuse_at_once(manager, first.receivers[0])
    first.receivers[0].abort()
    first.receivers[0].clear()
    again.ask()
    wait(again.sent, KVPoll.WaitingForInput)
    again.send()
    wait(again.received, KVPoll.Success)
    again.check()
    assert not manager.failure_records


def test_a_prefill_server_that_does_not_compute_again_fails_the_request(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        conn.requests.Session, "post", lambda *_, **__: SimpleNamespace(status_code=500, text="it went wrong")
    )
    pair.begin(Model())
    (manager,) = pair.decode.managers
    receiver = pair.receiver(manager, 1)
    receiver.send_metadata(np.arange(3, dtype=np.int32), 0)
    manager.submit_prefill_recompute(receiver, {"rid": "a"})
    assert_fails(lambda: [receiver.poll()], [receiver], "/generate failed for rid=a .status=500.")
    eventually("its pages are safe", lambda: manager.is_abort_release_safe(1, 1))


def test_where_a_prefill_server_takes_requests_is_known_while_another_request_fails(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    """A failure makes the next request look the server up again; SGLang's own then finds no address to ask at."""
    asked: list[str] = []

    def post(_: Any, url: str, **__: Any) -> Any:
        asked.append(url)
        return SimpleNamespace(status_code=200)

    monkeypatch.setattr(conn.requests.Session, "post", post)
    pair.begin(Model())
    (manager,) = pair.decode.managers
    receiver = pair.receiver(manager, 1)
    manager.prefill_servers.forget(pair.address)
    manager.submit_prefill_recompute(receiver, {"rid": "a"})
    eventually("it is asked", lambda: asked == ["http://127.0.0.1:1/generate"])


# ---- --enable-pd-role-switch ---------------------------------------------------------------------------------------


class Switching:
    """Two servers, each with a bootstrap server of its own, of which one prefills and the other decodes."""

    def __init__(self, pair: Pair, patch: pytest.MonkeyPatch) -> None:
        (port,) = free_ports(1)
        self.bootstrap = KVFerryBootstrapServer("127.0.0.1", port)
        self.model = Model(state_layers=2)
        # As their requests name them: by the bootstrap server of the one that prefills.
        self.first: Members = pair
        self.second = Members(patch, port, self.model)
        pair.model = self.model
        self.ranks = [Rank(self.model, tp=1, tp_rank=0) for _ in range(2)]

    def begin(self, prefill: int) -> Members:
        """Each in its role.

        Args:
            prefill: which of the two prefills.
        """
        members = (self.first, self.second)[prefill]
        for side in (members.prefill, members.decode):
            side.ranks.clear()
            side.managers.clear()
        members.start(PREFILL, self.ranks[prefill])
        members.start(DECODE, self.ranks[1 - prefill])
        return members

    def end(self, members: Members) -> None:
        """As SGLang does with a manager whose role is over."""
        for manager in (*members.prefill.managers, *members.decode.managers):
            assert manager.supports_role_switch
            manager.teardown()
            refuse_taken(manager.local_ip, manager.rank_port)

    def close(self) -> None:
        self.second.close()
        self.bootstrap.close()


@pytest.fixture
def switching(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Iterator[Switching]:
    made = Switching(pair, monkeypatch)
    yield made
    made.close()


def names_of_threads() -> list[str]:
    return sorted(each.name for each in threading.enumerate() if each.name.startswith("kvferry"))


def test_two_servers_take_each_others_role_and_go_back(switching: Switching):
    threads: list[list[str]] = []
    for turn in range(5):
        members = switching.begin(prefill=turn % 2)
        for room in (1, 2):
            Request(members, room).run()
        switching.end(members)
        # Threads of look-ups are told to end, and not waited for: one may be asking a server that does not answer.
        eventually("look-ups end", lambda: not any("look-up" in each for each in names_of_threads()))
        threads.append(names_of_threads())
    assert len(threads[-1]) <= len(threads[1]), f"something of an earlier role is left: {threads}"


def test_weights_that_were_replaced_are_no_others_in_another_role(switching: Switching):
    """Before, the server said of them in its next role that they were those of the files that it had started with."""
    members = switching.begin(prefill=0)
    (updated,) = members.prefill.managers
    updated.weights.came("7")
    updated.renew_weights()
    switching.end(members)
    members = switching.begin(prefill=1)
    request = Request(members, 1)
    assert_fails(request.received, request.receivers, "weights is .*'weight_version 7' on this decode rank")
    assert_fails(request.sent, request.senders, "weights is .*'weight_version 7'")
    request.clear()
    for manager in (*members.prefill.managers, *members.decode.managers):
        manager.weights.came("8")
        manager.renew_weights()
    Request(members, 2).run()
    switching.end(members)
    members = switching.begin(prefill=0)
    Request(members, 3).run()


def test_a_server_in_another_role_is_not_asked_for_caches(switching: Switching):
    members = switching.begin(prefill=0)
    Request(members, 1).run()
    (prefill,), (decode,) = members.prefill.managers, members.decode.managers
    prefill.teardown()
    assert not decode.prefill_servers.directory.engine(prefill.prefill.engine).registrations
    receiver = members.receiver(decode, 2)
    receiver.send_metadata(np.arange(3, dtype=np.int32), 0, [[1]])
    assert receiver.poll() == KVPoll.WaitingForInput
    receiver.abort()


def test_a_role_is_not_left_while_pages_may_still_be_written(switching: Switching, monkeypatch: pytest.MonkeyPatch):
    """SGLang calls the server unhealthy then, and does not go on with the pool."""
    monkeypatch.setenv("KVFERRY_CLOSE_TIMEOUT_S", "0.5")
    members = switching.begin(prefill=0)
    (decode,) = members.decode.managers
    with monkeypatch.context() as hanging:
        begin_a_write_that_hangs(members, hanging)
        with pytest.raises(TransferError, match="8 pages of SGLang's caches may still be written"):
            decode.teardown()
    refuse_taken(decode.local_ip, decode.rank_port)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_requests_after_a_switch_that_failed_wait_for_nothing(
    switching: Switching, monkeypatch: pytest.MonkeyPatch, side: str
):
    """SGLang takes them in its earlier role. Before, they waited for memory that never comes back."""
    monkeypatch.setenv("KVFERRY_CLOSE_TIMEOUT_S", "0.5")
    members = switching.begin(prefill=0)
    (prefill,), (decode,) = members.prefill.managers, members.decode.managers
    waiting = members.receiver(decode, 2)
    with monkeypatch.context() as hanging:
        begin_a_write_that_hangs(members, hanging)
        with pytest.raises(TransferError):
            (prefill if side == "prefill" else decode).teardown()

    def fails(request: KVFerrySender | KVFerryReceiver) -> None:
        assert_fails(lambda: [request.poll()], [request], "could not take another role.*start it anew")

    if side == "prefill":
        fails(members.sender(prefill, 3))
    else:
        fails(waiting)
        fails(members.waiting_receiver(decode, 3))
