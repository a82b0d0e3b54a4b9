"""Change callbacks and signals of the caller's: whatever one raises, or waits for, is its own room's loss alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from tests.support.engines import WAIT_S, Request, Requests
from tests.support.waiting import eventually

from kvferry import DecodeEndpoint, PrefillEndpoint, Receiver, Sender, TransferState
from kvferry.endpoint.decode import driver
from kvferry.endpoint.runtime.callers_code import Callbacks
from kvferry.endpoint.runtime.platform import SystemPlatform
from kvferry.endpoint.transfer import Transfer
from kvferry.errors import TransferFailedError, TransferTimeoutError, UsageError
from kvferry.testing.probe import probe

S = TransferState
SIDES = ["prefill", "decode"]
ANYTHING = [ValueError("a mistake"), asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt(), GeneratorExit()]


class Panic(BaseException):
    """As an extension's that is written in Rust."""

    def __str__(self) -> str:
        raise RuntimeError("nor can it be said in words")


def raised(error: BaseException) -> Any:
    raise error


def opened(requests: Requests, rooms: int, first: int = 1) -> list[Request]:
    """Requests of which both sides know, and nothing was handed in."""
    made = [requests.new(first + number, 2) for number in range(rooms)]
    for each in made:
        requests.open_decode(each)
        requests.open_prefill(each)
    for each in made:
        eventually("it is open", lambda each=each: each.senders[0].state is S.WAITING_FOR_INPUT)
    return made


def transfer_of(request: Request, side: str) -> Sender | Receiver:
    return request.senders[0] if side == "prefill" else request.receivers[0]


def endpoint_of(requests: Requests, side: str) -> PrefillEndpoint | DecodeEndpoint:
    return requests.prefill.endpoints[0] if side == "prefill" else requests.decode.endpoints[0]


def held_up(requests: Requests, side: str) -> str:
    """What the status says threads are held up by."""
    return " ".join(thread.held_up_by for thread in endpoint_of(requests, side).status().threads)


@contextmanager
def running(what: Callable[[], object]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=what, daemon=True)
    thread.start()
    yield thread
    thread.join(WAIT_S)
    assert not thread.is_alive(), "it hangs"


# ---- what raises ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("error", [*ANYTHING, Panic()], ids=lambda error: type(error).__name__)
def test_whatever_a_callback_raises_every_room_completes(
    pair: Callable[..., Requests], error: BaseException, side: str, caplog: pytest.LogCaptureFixture
):
    requests = pair(workers=1)
    made = opened(requests, 12)
    transfer_of(made[3], side).add_change_callback(partial(raised, error))
    requests.prefill.transports[0].held = True
    for each in made:
        requests.submit(each)
    eventually("all are on their way", lambda: requests.prefill.transports[0].in_flight == 12)
    requests.prefill.transports[0].held = False  # all arrive together
    for each in made:
        each.wait(10)
        requests.check(each)
    assert endpoint_of(requests, side).is_healthy
    assert not sum(thread.failures for thread in endpoint_of(requests, side).health)
    eventually("it is logged", lambda: "room 4: the change callback " in caplog.text)
    assert f"{__name__}.raised" in caplog.text


def test_a_callback_that_raises_keeps_none_of_the_others_from_being_called(pair: Callable[..., Requests]):
    requests, seen = pair(), list[TransferState]()
    (request,) = opened(requests, 1)
    request.receivers[0].add_change_callback(partial(raised, SystemExit(1)))
    request.receivers[0].add_change_callback(lambda: seen.append(request.receivers[0].state))
    requests.submit(request)
    request.wait()
    eventually("the end is reported", lambda: S.SUCCESS in seen)


@pytest.mark.parametrize("error", ANYTHING, ids=lambda error: type(error).__name__)
def test_whatever_a_signal_raises_fails_its_room_alone(pair: Callable[..., Requests], error: BaseException):
    requests, goes, breaks = pair(workers=1), threading.Event(), threading.Event()
    made = opened(requests, 12)
    for number, each in enumerate(made):
        look = (lambda: breaks.is_set() and raised(error)) if number == 3 else goes.is_set
        each.senders[0].submit(each.source_pages[0], last=True, aux=b"token", ready=look)
    breaks.set()
    with pytest.raises(TransferFailedError) as failed:
        made[3].senders[0].wait(10)
    assert failed.value.__cause__ is error
    goes.set()
    for each in made[:3] + made[4:]:
        each.wait(10)
        requests.check(each)
    made[3].wait_ended(10)
    assert type(error).__name__ in str(made[3].receivers[0].error)


def test_whatever_a_signal_behind_another_raises_fails_its_room_alone(pair: Callable[..., Requests]):
    requests, goes, error = pair(workers=1), threading.Event(), SystemExit(3)
    first, other = opened(requests, 2)
    for each in (first, other):
        pages = each.source_pages[0]
        each.senders[0].submit(pages[:1], ready=goes.is_set)
        behind = partial(raised, error) if each is first else goes.is_set
        each.senders[0].submit(pages[1:], last=True, aux=b"token", ready=behind)
    goes.set()
    with pytest.raises(TransferFailedError) as failed:
        first.senders[0].wait(10)
    assert failed.value.__cause__ is error
    other.wait(10)
    requests.check(other)


# ---- what blocks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
def test_a_callback_that_blocks_holds_up_other_callbacks_alone_and_is_named(
    pair: Callable[..., Requests], side: str, caplog: pytest.LogCaptureFixture
):
    requests = pair(peer_timeout_s=2.1, heartbeat_interval_s=0.7, workers=1)  # a silence of 1.4 s is reported
    released, entered, seen = threading.Event(), threading.Event(), list[int]()

    def waits_for_somebody() -> None:
        entered.set()
        released.wait(WAIT_S)

    blocked, other = opened(requests, 2)
    transfer_of(blocked, side).add_change_callback(waits_for_somebody)
    transfer_of(other, side).add_change_callback(lambda: seen.append(other.room))
    try:
        requests.submit(blocked)
        assert entered.wait(WAIT_S)
        began = time.monotonic()
        requests.submit(other)
        other.wait(10)
        room = 10
        while time.monotonic() - began < 3 or "has been held up" not in caplog.text:
            requests.run(room)
            room += 1
            released.wait(0.01)  # a room after the other would keep a core for three seconds, and show no more
        assert "silent" not in caplog.text
        assert blocked.receivers[0].state is S.SUCCESS
        said = f"the change callback {__name__}.test_a_callback_that_blocks"
        assert said in held_up(requests, side)
        assert "waits_for_somebody of room 1" in held_up(requests, side)
        assert len([line for line in caplog.messages if said in line]) == 1
        assert endpoint_of(requests, side).is_healthy
        assert not seen
    finally:
        released.set()
    eventually("the other is called", lambda: seen)
    eventually("nothing holds it up", lambda: not held_up(requests, side).strip())


def test_a_signal_that_blocks_is_named_while_it_does(pair: Callable[..., Requests], caplog: pytest.LogCaptureFixture):
    requests, released = pair(workers=1), threading.Event()
    (request,) = opened(requests, 1)

    def looks_long() -> bool:
        return released.wait(WAIT_S)

    request.senders[0].submit(request.source_pages[0], last=True, aux=b"token", ready=looks_long)
    eventually("it is named", lambda: "looks_long of room 1" in caplog.text)
    assert "the signal " in held_up(requests, "prefill")
    released.set()
    request.wait(10)


def test_rooms_whose_worker_is_held_up_are_told_once_that_they_are_overdue(pair: Callable[..., Requests]):
    requests, released = pair(workers=1, queues=1, bootstrap_timeout_s=0.3), threading.Event()
    (request,) = opened(requests, 1)
    prefill = requests.prefill.endpoints[0]
    entered = threading.Event()

    def looks_long() -> bool:
        entered.set()
        return released.wait(WAIT_S)

    request.senders[0].submit(request.source_pages[0], last=True, aux=b"token", ready=looks_long)
    assert entered.wait(WAIT_S)
    alone = [prefill.open(room) for room in range(100, 110)]
    rooms = [each for each in probe(prefill).rooms.all() if each.room >= 100]
    eventually("all are overdue", lambda: all(each.events for each in rooms))
    time.sleep(1.0)  # it looks ten times a second
    assert max(len(each.events) for each in rooms) == 1
    released.set()
    request.wait(10)
    for sender in alone:
        with pytest.raises(TransferTimeoutError):
            sender.wait(10)


def test_changes_are_called_back_in_order_and_the_last_one_is_never_missed(pair: Callable[..., Requests]):
    requests = pair()
    made, seen = opened(requests, 20), list[tuple[int, TransferState, bool]]()

    def note(one: Sender | Receiver) -> None:
        seen.append((id(one), one.state, one.pages_reusable))

    for each in made:
        for one in (each.receivers[0], each.senders[0]):
            one.add_change_callback(partial(note, one))
    for each in made:
        requests.submit(each)
    for each in made:
        each.wait(10)
        for one in (each.receivers[0], each.senders[0]):
            eventually("its end is reported", lambda one=one: (id(one), S.SUCCESS, True) in seen)
            states = [state for transfer, state, _ in seen if transfer == id(one)]
            assert states == sorted(states, key=list(S).index)


def test_an_endpoint_that_calls_nobody_back_has_no_thread_for_it(pair: Callable[..., Requests]):
    requests = pair()
    requests.run(1)
    ends = [endpoint_of(requests, side) for side in SIDES]
    before = [len(each.health) for each in ends]
    for request in opened(requests, 3, first=2):
        for side in SIDES:
            transfer_of(request, side).add_change_callback(lambda: None)
    assert [len(each.health) for each in ends] == [number + 1 for number in before]


# ---- closing, and waiting, on threads of the endpoint ------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
def test_an_endpoint_may_be_closed_by_a_callback(
    pair: Callable[..., Requests], side: str, caplog: pytest.LogCaptureFixture
):
    requests, closed = pair(), threading.Event()
    request, other = opened(requests, 2)
    endpoint, transfer = endpoint_of(requests, side), transfer_of(request, side)

    def close() -> None:
        if transfer.state is S.SUCCESS and not closed.is_set():
            endpoint.close()
            closed.set()

    transfer.add_change_callback(close)
    requests.submit(request)
    assert closed.wait(10)
    other.wait_ended(10)
    with running(endpoint.close):
        pass
    eventually("its threads have ended", lambda: not any(thread.is_alive for thread in endpoint.health))
    assert "closing does not wait" not in caplog.text


@pytest.mark.parametrize("side", SIDES)
def test_an_endpoint_may_be_closed_by_a_callback_and_by_another_thread_at_once(
    pair: Callable[..., Requests], side: str, caplog: pytest.LogCaptureFixture
):
    requests, entered, goes = pair(), threading.Event(), threading.Event()
    (request,) = opened(requests, 1)
    endpoint = endpoint_of(requests, side)

    def close() -> None:
        entered.set()
        goes.wait(WAIT_S)
        endpoint.close()

    transfer_of(request, side).add_change_callback(close)
    requests.submit(request)
    assert entered.wait(WAIT_S)
    with running(endpoint.close):
        eventually("both close", lambda: endpoint.not_ready)
        goes.set()
    eventually("its threads have ended", lambda: not any(thread.is_alive for thread in endpoint.health))
    assert "closing does not wait" not in caplog.text


@pytest.mark.parametrize("side", SIDES)
def test_closing_waits_for_no_callback_that_wants_what_the_closer_holds(
    pair: Callable[..., Requests], side: str, caplog: pytest.LogCaptureFixture
):
    requests, lock, entered = pair(), threading.Lock(), threading.Event()
    (request,) = opened(requests, 1)
    endpoint = endpoint_of(requests, side)

    def wants_the_lock() -> None:
        entered.set()
        with lock:
            pass

    def close() -> None:
        with lock:
            requests.submit(request)
            assert entered.wait(WAIT_S)
            endpoint.close()

    transfer_of(request, side).add_change_callback(wants_the_lock)
    with running(close):
        pass
    assert "wants_the_lock of room 1" in caplog.text
    eventually("its threads have ended", lambda: not any(thread.is_alive for thread in endpoint.health))


def test_closing_has_a_bound_also_where_a_call_of_the_transport_hangs(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(driver, "THREADS_END_S", 0.5)
    requests, released, entered = pair(close_timeout_s=0.5), threading.Event(), threading.Event()
    opened(requests, 1)
    transport, endpoint = requests.decode.transports[0], requests.decode.endpoints[0]

    def hang() -> None:
        entered.set()
        released.wait(WAIT_S)

    transport.on_take = hang
    try:
        assert entered.wait(WAIT_S)
        with running(endpoint.close):
            pass
        assert "threads do not end: kvferry-decode-0. The endpoint stays until close() is called" in caplog.text
        assert not probe(transport).is_closed
    finally:
        released.set()
    eventually("the thread has ended", lambda: not endpoint.health[0].is_alive)
    with running(endpoint.close):
        pass
    assert probe(transport).is_closed


@pytest.mark.parametrize(
    "wait",
    [
        lambda requests, other: requests.prefill.endpoints[0].close(),
        lambda requests, other: requests.prefill.endpoints[0].wait_drained(WAIT_S),
        lambda requests, other: requests.decode.endpoints[0].connect(requests.prefill.name),
        lambda requests, other: other.senders[0].wait(WAIT_S),
        lambda requests, other: other.senders[0].wait_pages_reusable(WAIT_S),
    ],
    ids=["close", "wait_drained", "connect", "wait", "wait_pages_reusable"],
)
def test_a_signal_that_waits_for_the_endpoint_is_told_so_at_once(
    pair: Callable[..., Requests], wait: Callable[[Requests, Request], None]
):
    requests = pair(workers=1)
    request, other = opened(requests, 2)

    def look() -> bool:
        wait(requests, other)
        return True

    request.senders[0].submit(request.source_pages[0], last=True, ready=look)
    with pytest.raises(TransferFailedError) as failed:
        request.senders[0].wait(10)
    assert isinstance(failed.value.__cause__, UsageError)
    assert "kvferry-prefill-0-worker-0" in str(failed.value.__cause__)
    assert "call it on a thread of your own" in str(failed.value.__cause__)
    requests.submit(other)
    other.wait(10)
    with running(requests.prefill.endpoints[0].close):
        pass


def test_a_callback_may_wait_for_other_transfers(pair: Callable[..., Requests]):
    requests, waited = pair(), threading.Event()
    request, other = opened(requests, 2)

    def wait() -> None:
        other.receivers[0].wait(WAIT_S)
        waited.set()

    request.receivers[0].add_change_callback(wait)
    requests.submit(request)
    request.wait(10)
    requests.submit(other)
    assert waited.wait(10)


def test_a_change_that_comes_while_a_callback_runs_is_reported_after_it():
    posted, seen = list[Callable[[], None]](), list[TransferState]()

    class Later(Callbacks):
        def start(self) -> None:
            pass

        def post(self, work: Callable[[], None]) -> None:
            posted.append(work)

    transfer = Transfer(1, lambda reason: None, Later(SystemPlatform(), "nobody"))

    def look() -> None:
        seen.append(transfer.state)
        if transfer.state is S.WAITING_FOR_INPUT:
            probe(transfer).update(S.SUCCESS, None, pages_reusable=True)

    transfer.add_change_callback(look)
    probe(transfer).update(S.BOOTSTRAPPING, None, pages_reusable=False)
    probe(transfer).update(S.WAITING_FOR_INPUT, None, pages_reusable=False)
    probe(transfer).update(S.WAITING_FOR_INPUT, None, pages_reusable=False)
    while posted:
        posted.pop(0)()
    assert seen == [S.WAITING_FOR_INPUT, S.SUCCESS]


# ---- one of many ------------------------------------------------------------------------------------------------


def test_one_notification_with_which_anything_is_raised_loses_none_that_came_with_it(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch
):
    requests = pair(workers=1)
    made = opened(requests, 12)
    taking = requests.decode.transports[0]
    take, kept, flag = taking.take_notifications, list[Any](), threading.Event()

    def take_together() -> list[Any]:
        kept.extend(take())
        if not flag.is_set():
            return []
        given, kept[:] = list(kept), []
        return given

    monkeypatch.setattr(taking, "take_notifications", take_together)
    room = probe(requests.decode.endpoints[0]).rooms.open[4]
    handle = room.machine.handle
    errors = [SystemExit(3)]
    monkeypatch.setattr(
        room.machine, "handle", lambda *args: raised(errors.pop()) if errors and flag.is_set() else handle(*args)
    )
    for each in made:
        requests.submit(each)
    eventually("all have been sent", lambda: all(each.senders[0].state is S.SUCCESS for each in made))
    flag.set()
    for each in made[:3] + made[4:]:
        each.wait(10)
        requests.check(each)
    made[3].wait_ended(10)
    assert made[3].receivers[0].error is not None
    assert isinstance(made[3].receivers[0].error.__cause__, SystemExit)
