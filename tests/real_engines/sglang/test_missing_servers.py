"""Prefill servers that have ended, that do not answer, or that look alike: what a decode rank's scheduler sees of them.

Ranks as in `test_ranks`.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.common.conn import KVTransferError
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from tests.real_engines.sglang.crossings import Members, Request
from tests.real_engines.sglang.ranks import PREFILL, Model, Rank, plug_in
from tests.real_engines.sglang.test_ranks import Pair, assert_fails, pair
from tests.support.waiting import eventually

from kvferry import RegistryServer, Settings, create_registry, create_registry_client
from kvferry.engines.sglang.bootstrap import KVFerryBootstrapServer
from kvferry.engines.sglang.look_ups import take_over
from kvferry.engines.sglang.receiver import KVFerryReceiver

pytestmark = pytest.mark.timeout(60)

ROUNDS = 3

__all__ = ["pair"]  # a fixture


class Scheduler:
    """What SGLang's decode scheduler does for a request until it gives it pages."""

    def __init__(self, members: Members) -> None:
        self._members = members
        (self._manager,) = members.decode.managers

    def add(self, room: int) -> KVFerryReceiver:
        receiver = self._members.waiting_receiver(self._manager, room)
        if self._manager.prefill_info_table.get(self._members.address) is not None:
            receiver.init(0)
            receiver.is_inited = True
        return receiver

    def poll(self, receiver: KVFerryReceiver) -> int:
        if not hasattr(receiver, "is_inited") and self._manager.try_ensure_parallel_info(self._members.address):
            receiver.init(0)
            receiver.is_inited = True
        return receiver.poll()


@pytest.fixture
def silent() -> Iterator[list[str]]:
    """Addresses that take connections, and never say a word."""
    with ExitStack() as open_sockets:
        listening = [open_sockets.enter_context(socket.socket()) for _ in range(12 * ROUNDS)]
        for each in listening:
            each.bind(("127.0.0.1", 0))
            each.listen(64)
        yield [f"127.0.0.1:{each.getsockname()[1]}" for each in listening]


# ---- servers that have ended -----------------------------------------------------------------------------------------


def test_a_request_for_a_server_that_ended_while_idle_gets_no_pages_and_fails_at_once(pair: Pair):
    """It had pages for 300 s before, and requests of other servers waited behind it."""
    pair.begin(Model())
    Request(pair, 1).run()
    pair.end_prefill()
    (manager,), scheduler = pair.decode.managers, Scheduler(pair)
    eventually("the look-up is forgotten", lambda: not manager.prefill_info_table)
    receiver = scheduler.add(2)
    seen: set[int] = set()

    def polled() -> list[int]:
        seen.add(scheduler.poll(receiver))
        return [receiver.poll()]

    assert_fails(polled, [receiver], f"bootstrap server at {pair.address} cannot be reached: .*refused")
    assert seen <= {KVPoll.Bootstrapping, KVPoll.Failed}


# ---- servers that do not answer --------------------------------------------------------------------------------------


def test_the_scheduler_waits_for_no_server(pair: Pair, silent: list[str], monkeypatch: pytest.MonkeyPatch):
    """0.1 s at every look for every address before, and anybody may name any."""
    pair.begin(Model())
    (manager,), scheduler = pair.decode.managers, threading.get_ident()
    waits = threading.Condition.wait

    def waiting(condition: Any, timeout: float | None = None) -> bool:
        assert not timeout or threading.get_ident() != scheduler, f"the scheduler waits for up to {timeout:g} s"
        return waits(condition, timeout)

    with monkeypatch.context() as watched:
        watched.setattr(threading.Condition, "wait", waiting)
        for _ in range(3):
            assert not manager.try_ensure_parallel_info(silent[0])
    Request(pair, 1).run()


@pytest.mark.parametrize("count", [4, 12])
def test_addresses_that_do_not_answer_leave_no_gap_between_the_schedulers_turns(
    pair: Pair, silent: list[str], count: int, record_property: Callable[[str, object], None]
):
    """The longest was 0.42 s in every second with 4, and 1.24 s with 12."""
    pair.begin(Model())
    (manager,) = pair.decode.managers

    def longest_gap_ms(addresses: list[str]) -> float:
        """Between the turns of a second and some, from the first look at them on."""
        longest, begun_at = 0.0, time.monotonic()
        turn_at = begun_at
        while turn_at - begun_at < 1.2:
            assert {manager.try_ensure_parallel_info(each) for each in addresses} == {False}
            now = time.monotonic()
            longest, turn_at = max(longest, now - turn_at), now
            time.sleep(0.0005)
        return 1000 * longest

    gaps_ms = [longest_gap_ms(silent[number * count :][:count]) for number in range(ROUNDS)]
    record_property("longest gaps in ms", [round(each, 1) for each in gaps_ms])
    # Half of what it was. What a busy machine adds is not in all of them.
    assert min(gaps_ms) < 50 * count, gaps_ms
    Request(pair, 1).run()


# ---- servers that look alike -----------------------------------------------------------------------------------------


@pytest.fixture(params=["a registry each", "a shared registry"])
def shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[RegistryServer | None]:
    """The registry of all engines, if there is one."""
    if request.param == "a registry each":
        yield None
        return
    server = create_registry(Settings(registry_port=0))
    server.start()
    monkeypatch.setenv("KVFERRY_REGISTRY_URL", server.url)
    yield server
    server.close()


def test_two_hosts_of_one_name_and_port_are_two_engines(
    shared: RegistryServer | None, pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    """Every request of the second was for the first one's ranks, and with a shared registry it replaced the first."""
    pair.begin(Model())
    monkeypatch.setenv("KVFERRY_REGISTRY_HOST", "127.0.0.2")
    bootstrap = KVFerryBootstrapServer("127.0.0.2", pair.port)
    other = Members(monkeypatch, pair.port, pair.model, host="127.0.0.2")
    try:
        other.start(PREFILL, Rank(pair.model, tp=1, tp_rank=0))
        other.decode = pair.decode
        Request(pair, 1).run()
        Request(other, 2).run()
        Request(pair, 3).run()
        if shared is not None:
            with create_registry_client(Settings()) as client:
                registered = [view.engine for view in client.engines() if view.registrations]
            assert registered == sorted(each.prefill.managers[0].prefill.engine for each in (pair, other))
    finally:
        other.close()
        bootstrap.close()


# ---- requests of one number ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["prefill", "decode", "both"])
def test_a_second_request_of_a_number_fails_alone(pair: Pair, side: str):
    """Both died, and so did the next of that number."""
    pair.begin(Model())
    first = Request(pair, 1)
    (prefill,), (decode,) = pair.prefill.managers, pair.decode.managers
    if side != "decode":
        sender = pair.sender(prefill, 1)
        assert_fails(lambda: [sender.poll()], [sender], "room 1 .*another request")
        sender.clear()
    if side != "prefill":
        receiver = pair.receiver(decode, 1)
        receiver.send_metadata(np.arange(3, dtype=np.int32), 0)
        assert_fails(lambda: [receiver.poll()], [receiver], "room 1 .*another request")
        receiver.abort()
        receiver.clear()
    first.run()
    Request(pair, 1).run()


# ---- several ranks ---------------------------------------------------------------------------------------------------


def reasons(polls: Callable[[], list[int]], receivers: list[KVFerryReceiver]) -> list[str]:
    """What each rank says when SGLang asks it, as it does all of them once one has failed."""
    eventually("a rank reports it", lambda: min(polls()) == KVPoll.Failed)
    found = []
    for each in receivers:
        with pytest.raises(KVTransferError) as raised:
            each.failure_exception()
        found.append(str(raised.value))
    return found


@pytest.mark.parametrize("slow", [0, 1])
def test_all_ranks_know_that_a_server_is_not_there_when_one_reports_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, slow: int
):
    """The first one answers the client, and said that another rank had an unknown reason."""
    pair.begin(Model(), decode_tp=2)
    Request(pair, 1).run()
    pair.end_prefill()
    eventually("forgotten", lambda: not any(each.prefill_info_table for each in pair.decode.managers))
    servers = pair.decode.managers[slow].prefill_servers
    why_not_found = servers.why_not_found

    def slowly(address: str, since: float, now: float) -> str | None:
        return why_not_found(address, since, now) if now > since + 0.05 else None

    monkeypatch.setattr(servers, "why_not_found", slowly)
    receivers = [pair.waiting_receiver(each, 2) for each in pair.decode.managers]
    for reason in reasons(lambda: [each.poll() for each in receivers], receivers):
        assert "cannot be reached" in reason


@pytest.mark.parametrize("slow", [0, 1])
def test_all_ranks_know_that_two_servers_differ_when_one_reports_it(pair: Pair, slow: int):
    pair.begin(Model(), decode_tp=2)
    for each in pair.decode.managers:
        each.kv_cache_dtype_str = "another"
        eventually("found", each.try_ensure_parallel_info, pair.address)
    receivers = [pair.waiting_receiver(each, 1) for each in pair.decode.managers]
    turns = 0

    def polls() -> list[int]:
        nonlocal turns
        turns += 1
        for number, each in enumerate(receivers):
            if turns == (3 if number == slow else 1):
                each.init(0)
        return [each.poll() for each in receivers]

    for reason in reasons(polls, receivers):
        assert "--kv-cache-dtype" in reason


# ---- requests that their server does not know ------------------------------------------------------------------------


def test_a_request_whose_data_parallel_rank_is_not_said_does_not_call_its_server_missing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KVFERRY_BOOTSTRAP_TIMEOUT_S", "1")
    pair.begin(Model())
    (manager,) = pair.decode.managers
    eventually("found", manager.try_ensure_parallel_info, pair.address)
    receiver = pair.waiting_receiver(manager, 1)  # SGLang asks for the rank, and would tell it by `init`
    assert_fails(lambda: [receiver.poll()], [receiver], r"was found, and has not said within 1.* which of its data-par")


def test_addresses_that_requests_name_are_not_kept(pair: Pair):
    """SGLang noted each, for as long as the server ran."""
    pair.begin(Model())
    (manager,) = pair.decode.managers
    queue = SimpleNamespace(kv_manager=manager, _ensure_retry_count={}, _ensure_last_attempt_time={})
    queue.prefetch_prefill_dp_rank_queries, queue._prefill_dp_rank_queries = lambda: None, {}
    queue._resolve_prefill_dp_rank = lambda _: 0
    take_over(queue)
    waiting = SimpleNamespace(req=None)
    for _ in range(2):
        for port in range(1, 100):
            ready, left = DecodePreallocQueue._ensure_prefill_info(queue, {f"127.0.0.1:{port}": [waiting]})
            assert (ready, left) == ({}, [waiting])
    assert not queue._ensure_retry_count
    assert not queue._ensure_last_attempt_time
    found = {pair.address: [waiting]}
    eventually("found", lambda: DecodePreallocQueue._ensure_prefill_info(queue, found) == (found, []))


# ---- servers that do not say which of their data-parallel ranks has a request ----------------------------------------


class Queue(DecodePreallocQueue):  # type: ignore[misc]
    """SGLang's, of requests to a server that is found, and whose data-parallel ranks are asked for."""

    def __init__(self, pool: ThreadPoolExecutor, *rooms: int) -> None:
        info = SimpleNamespace(dp_size=2, follow_bootstrap_room=False)
        self.kv_manager = SimpleNamespace(
            prefill_info_table={"server:1": info},
            try_ensure_parallel_info=lambda _: True,
            _ensure_prefill_recompute_executor=lambda: pool,
        )
        take_over(self)
        self._prefill_dp_rank_queries: dict[str, Any] = {}
        self.pending_reqs = [self.request(room) for room in rooms]
        self.ranks: dict[int, int] = {}

    def request(self, room: int) -> Any:
        named = {"bootstrap_host": "server", "bootstrap_port": 1, "disagg_prefill_dp_rank": None}
        return SimpleNamespace(req=SimpleNamespace(bootstrap_room=room, **named))

    def _init_receiver(self, decode_req: Any, prefill_dp_rank: int) -> None:
        self.ranks[decode_req.req.bootstrap_room] = prefill_dp_rank

    def turn(self) -> None:
        began = time.monotonic()
        self._resolve_pending_reqs()
        assert time.monotonic() - began < 2.0, "the scheduler waited"

    def has(self, ranks: dict[int, int]) -> bool:
        self.turn()
        return self.ranks == ranks


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """What stands for a server's answers: None until there is one."""
    plug_in()
    stand = SimpleNamespace(answer=threading.Event(), said={"1": 0, "2": 1, "3": 1}, pool=ThreadPoolExecutor(2))

    def query(_: str, rooms: list[int]) -> Any:
        stand.answer.wait(5.0)
        if not isinstance(stand.said, dict):
            return stand.said
        return {str(room): stand.said[str(room)] for room in rooms}

    monkeypatch.setattr(conn.CommonKVReceiver, "query_prefill_dp_ranks", staticmethod(query))
    yield stand
    stand.answer.set()
    stand.pool.shutdown()


def test_a_server_that_does_not_say_which_rank_has_a_request_holds_up_no_other(asked: SimpleNamespace):
    """Before, the scheduler waited for it: 5 s with each turn."""
    queue = Queue(asked.pool, 1)
    queue.turn()
    queue.pending_reqs.append(queue.request(2))
    queue.turn()
    gone = queue.pending_reqs.pop(0)
    queue.turn()
    queue.pending_reqs.insert(0, gone)
    queue.pending_reqs.append(queue.request(3))
    assert not queue.ranks
    asked.answer.set()
    eventually("each has its rank", queue.has, {1: 0, 2: 1, 3: 1})
    assert not queue.pending_reqs


@pytest.mark.parametrize("said", [[1, 2], "none", {"1": "many"}, {"1": None}, 7])
def test_an_answer_that_is_none_leaves_its_requests_waiting(asked: SimpleNamespace, said: object):
    """Before, it ended the scheduler."""
    asked.said = said
    asked.answer.set()
    queue = Queue(asked.pool, 1)
    for _ in range(20):
        queue.turn()
        queue.prefetch_prefill_dp_rank_queries()
        for _, answer in queue._prefill_dp_rank_queries.values():
            wait_for([answer])
    assert not queue.ranks
    assert len(queue.pending_reqs) == 1
