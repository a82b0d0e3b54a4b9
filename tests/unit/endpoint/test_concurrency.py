"""Many rooms, many threads, one after the other and side by side."""

from __future__ import annotations

import collections
import gc
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import pytest
from tests.support.caches import Model, Shape
from tests.support.engines import WAIT_S, Engines, Requests
from tests.support.tiers import Tier
from tests.support.waiting import eventually
from tests.unit.endpoint.test_life_of_a_room import nothing_left

from kvferry import Sender, Settings
from kvferry.endpoint.prefill.driver import PrefillDriver
from kvferry.endpoint.runtime.run_queue import Actor, RunQueue, Waker
from kvferry.endpoint.runtime.threads import SupervisedThread
from kvferry.endpoint.runtime.workers import Worker
from kvferry.errors import ChunkError
from kvferry.plan.requests.chunks import Chunk, ChunkSequence, HandedIn
from kvferry.protocol.transfer.room_table import REMEMBERED
from kvferry.testing import KnownContents
from kvferry.testing.probe import probe


def wait_for(event: threading.Event) -> None:
    event.wait(WAIT_S)


SMALL = Model(layers=1, heads=2, head_dim=4, page_tokens=2)
APART_MIB = 64 / 2**20
"""A sub-chunk so small that no two of its pages leave in one write."""


def test_thousands_of_rooms_at_once(pair: Callable[..., Requests], tier: Tier):
    requests = pair(SMALL, Shape(tp=2, pages=4096), Shape(pages=4096))
    requests.connect()
    both = [requests.new(room, 1) for room in range(tier.amount(quick=300, full=2000, long=2000))]
    for request in both:
        requests.open_decode(request)
    for request in both:
        requests.open_prefill(request)
        requests.submit(request)
    for request in both:
        request.wait(WAIT_S)
        requests.check(request)
    assert nothing_left(requests)


def test_many_rooms_one_after_the_other_leave_nothing_behind(pair: Callable[..., Requests], tier: Tier):
    requests = pair(SMALL, Shape(), Shape())
    source, destination = requests.prefill.endpoints[0], requests.decode.endpoints[0]
    pages = np.arange(2)

    def run(rooms: range) -> None:
        for room in rooms:
            receiver = destination.open(room, pages, engine=requests.prefill.name)
            sender = source.open(room)
            sender.submit(pages, last=True)
            receiver.wait(WAIT_S)
            sender.wait(WAIT_S)

    def objects() -> dict[str, int]:
        gc.collect()
        counts: dict[str, int] = {}
        for each in gc.get_objects():
            if str(type(each).__module__).startswith("kvferry"):
                counts[type(each).__name__] = counts.get(type(each).__name__, 0) + 1
        return counts

    run(range(200))
    before, files = objects(), psutil.Process().num_fds()
    run(range(200, tier.amount(quick=450, full=2200, long=2200)))
    after = objects()
    assert nothing_left(requests)
    assert after.pop("_Sent", 0) <= REMEMBERED  # rooms that went well: for a while, and bounded
    assert after.pop("_Over", 0) <= REMEMBERED  # uses that are over, of which open requests may still come; bounded
    assert {name: count for name, count in after.items() if count > before.get(name, 0) + 20} == {}
    assert psutil.Process().num_fds() <= files + 2


def test_callers_on_several_threads(pair: Callable[..., Requests]):
    requests = pair(SMALL, Shape(tp=2, pages=2048), Shape(pages=2048), workers=4, queues=2)
    lock, problems = threading.Lock(), []

    def call(first: int) -> None:
        try:
            for room in range(first, first + 40):
                with lock:
                    request = requests.new(room, 4)
                requests.open_prefill(request)
                requests.submit(request, 0, 2, last=False)
                requests.open_decode(request)
                requests.submit(request, 2, 4)
                request.wait()
                requests.check(request)
        except BaseException as error:
            problems.append(error)
            raise

    threads = [threading.Thread(target=call, args=(1000 * number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not problems
    assert not any(thread.is_alive() for thread in threads)


def test_several_threads_may_submit_to_one_room(pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch):
    """Which of them is first is theirs to say; but no page is sent twice or to the wrong place."""
    requests = pair(SMALL, Shape(pages=512), Shape(pages=512))
    endpoint, destination = requests.prefill.endpoints[0], requests.decode.endpoints[0]
    order: list[Chunk] = []
    hand_in = ChunkSequence.hand_in

    def recording(chunks: ChunkSequence, pages: Any, **arguments: Any) -> HandedIn:
        handed_in = hand_in(chunks, pages, **arguments)
        order.append(handed_in.chunk())
        return handed_in

    monkeypatch.setattr(ChunkSequence, "hand_in", recording)
    for room in range(5):
        sender = endpoint.open(room)
        order.clear()
        pages = np.arange(400).reshape(8, 50)

        def submit(own: Any, sender: Sender = sender) -> None:
            for page in own:
                sender.submit(np.array([page]) if page % 2 else [page])

        threads = [threading.Thread(target=submit, args=(own,)) for own in pages]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        sender.submit([], last=True)
        assert [each.number for each in order] == list(range(401))
        parts = [part for each in order for part in each.parts]
        assert [part.start for part in parts] == [*range(400), 400]
        sent = np.concatenate([part.pages for part in parts])
        requests.prefill.pools[0].fill(KnownContents(room), sent)
        receiver = destination.open(room, np.arange(400), engine=requests.prefill.name)
        receiver.wait(WAIT_S)
        sender.wait(WAIT_S)
        requests.decode.pools[0].check(KnownContents(room), np.arange(400), elsewhere=False)


def test_chunks_of_a_room_are_posted_in_order(pair: Callable[..., Requests]):
    requests = pair(SMALL, Shape(pages=256), Shape(pages=256), workers=4, queues=2, staging_chunk_mib=APART_MIB)
    request = requests.new(1, 200)
    requests.open_decode(request)
    requests.open_prefill(request)
    for start in range(200):
        requests.submit(request, start, start + 1, last=start == 199)
    request.wait()
    requests.check(request)
    posted = [write.posted_at for write in sorted(request.senders[0].stats.writes, key=lambda each: each.submitted_at)]
    assert len(posted) == 200
    assert posted == sorted(posted)


@pytest.mark.parametrize(("workers", "queues", "used"), [(1, 4, 1), (2, 2, 2), (5, 3, 3), (8, 1, 1)])
def test_any_number_of_workers_and_queues(pair: Callable[..., Requests], workers: int, queues: int, used: int):
    requests = pair(SMALL, workers=workers, queues=queues)
    assert len(probe(requests.prefill.endpoints[0]).driver.workers.queues) == used
    for room in range(20):
        requests.run(room)
    assert requests.prefill.endpoints[0].is_healthy


def test_a_small_request_does_not_wait_for_all_of_a_large_one(pair: Callable[..., Requests]):
    """A room takes one event a turn: of 200 chunks that are there already, the small room waits for a few."""
    requests = pair(SMALL, Shape(pages=256), Shape(pages=256), workers=1, staging_chunk_mib=APART_MIB)
    transport = requests.prefill.transports[0]
    large, small = requests.new(1, 200), requests.new(2, 1)
    for request in (large, small):
        requests.open_decode(request)
        requests.open_prefill(request)
        eventually("it is open", lambda request: request.senders[0].state.name == "WAITING_FOR_INPUT", request)
    gate = threading.Event()
    transport.on_post = lambda _: wait_for(gate)
    for start in range(200):
        requests.submit(large, start, start + 1, last=start == 199)
    requests.submit(small)
    gate.set()
    small.wait()
    large.wait()
    (write,) = small.senders[0].stats.writes
    others = large.senders[0].stats.writes
    assert len(others) == 200
    assert sum(each.posted_at < write.posted_at for each in others) < 10


def test_a_small_request_does_not_wait_for_all_that_a_large_one_kept_until_it_was_opened(pair: Callable[..., Requests]):
    """Nor while the chunks leave that were handed in before the decode rank came."""
    requests = pair(SMALL, Shape(pages=256), Shape(pages=256), workers=1, staging_chunk_mib=APART_MIB)
    transport = requests.prefill.transports[0]
    large, small = requests.new(1, 200), requests.new(2, 1)
    requests.open_prefill(large)
    for start in range(200):
        requests.submit(large, start, start + 1, last=start == 199)
    eventually("all chunks are kept", lambda: kept(requests, 1) == 200)
    requests.open_prefill(small)
    requests.open_decode(small)
    eventually("it is open", lambda: small.senders[0].state.name == "WAITING_FOR_INPUT")
    gate, has_begun = threading.Event(), threading.Event()

    def hold(_: str) -> None:
        has_begun.set()
        wait_for(gate)

    transport.on_post = hold
    requests.open_decode(large)
    wait_for(has_begun)
    requests.submit(small)
    gate.set()
    small.wait()
    large.wait()
    requests.check(large)
    (write,) = small.senders[0].stats.writes
    others = large.senders[0].stats.writes
    assert len(others) == 200
    assert sum(each.posted_at < write.posted_at for each in others) < 10


def kept(requests: Requests, room: int) -> int:
    """Chunks of a room that wait for a decode rank to open it."""
    return probe(requests.prefill.endpoints[0]).table.rooms[room].machine.waiting_chunks


class Hops(Actor):
    """Does nothing but stand in the queue again, as often as it has events."""

    def handle(self, event: Any, worker: Any) -> None: ...

    def broke(self, error: BaseException, worker: Any) -> None: ...


def test_a_turn_is_told_of_whoever_is_due_before_it_and_of_nobody_else():
    run_queue = RunQueue()
    hops = [Hops(run_queue) for _ in range(4)]
    alone, told = run_queue.comings(5.0), []
    for hop, due_at in zip(hops, [6.0, 5.0, 4.0], strict=False):
        run_queue.put(hop, due_at)
        told.append(alone.any)
    assert told == [False, False, True]
    assert run_queue.comings(5.0).any, "somebody waits already"
    assert run_queue.take(0.0) is hops[2]
    assert not run_queue.comings(5.0).any


def test_the_turn_of_each_worker_is_told_of_those_who_are_due_before_its_own():
    run_queue = RunQueue()
    with ThreadPoolExecutor(1) as other:
        late = other.submit(run_queue.comings, 100.0).result()
        early = run_queue.comings(5.0)
        run_queue.put(Hops(run_queue), 50.0)
    assert (late.any, early.any) == (True, False)


def test_waiting_in_the_run_queue_has_an_end_whoever_else_waits():
    """A worker that has a write on its way must look at it again, also if another took what it was woken for."""
    run_queue, stop, tries = RunQueue(), threading.Event(), 0

    def work(timeout_s: float | None) -> None:
        nonlocal tries
        while not stop.is_set():
            tries += timeout_s is not None
            try:
                actor = run_queue.take(timeout_s)
            except queue.Empty:
                continue
            if actor is not None:
                actor.take_turn(None)

    threads = [threading.Thread(target=work, args=(timeout_s,)) for timeout_s in (None, 20e-6)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        actors = [Hops(run_queue) for _ in range(2)]
        for actor in actors:
            for _ in range(20):
                actor.post(None)
        eventually("all is done", lambda *each: not any(one.events for one in each), *actors)
        before = tries
        eventually("the worker looked again", lambda before: tries > before + 1, before)
    stop.set()
    for _ in threads:
        run_queue.put(None)
    for thread in threads:
        thread.join(WAIT_S)


@pytest.mark.full
def test_waiting_for_a_few_microseconds_has_an_end():
    """The time may run out between any two steps; `queue.SimpleQueue` waits for ever then, in one of 30,000 times."""
    run_queue, rounds = RunQueue(), 0

    def work() -> None:
        nonlocal rounds
        while rounds < 50_000:
            with pytest.raises(queue.Empty):
                run_queue.take(20e-6)
            run_queue.put(None)
            assert run_queue.take(20e-6) is None
            rounds += 1

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while thread.is_alive():
        before = rounds
        thread.join(WAIT_S)
        assert not thread.is_alive() or rounds > before


def take_all(run_queue: RunQueue, timeout_s: float | None, use: Callable[[Actor], None]) -> None:
    """Takes actors as workers do, until told to stop."""
    while True:
        try:
            actor = run_queue.take(timeout_s)
        except queue.Empty:
            continue
        if actor is None:
            return
        use(actor)


@pytest.mark.parametrize("timeout_s", [None, 1e-5])
def test_everything_that_is_put_is_taken_once_and_wakes_somebody(timeout_s: float | None):
    """Several put while several take; at the end of every round nobody sleeps beside something to do."""
    run_queue, rounds, puts = RunQueue(), 300, 20
    taken: list[Any] = []

    takers = [threading.Thread(target=take_all, args=(run_queue, timeout_s, taken.append)) for _ in range(3)]
    for thread in takers:
        thread.start()
    for number in range(rounds):
        actors = [Hops(run_queue) for _ in range(puts)]

        def put(start: int, actors: list[Hops] = actors) -> None:
            for actor in actors[start::2]:
                run_queue.put(actor)

        putters = [threading.Thread(target=put, args=(start,)) for start in range(2)]
        for thread in putters:
            thread.start()
        for thread in putters:
            thread.join(WAIT_S)
        eventually("all are taken", lambda number: len(taken) == (number + 1) * puts, number)
        assert set(taken[-puts:]) == set(actors)
    for _ in takers:
        run_queue.put(None)
    for thread in takers:
        thread.join(WAIT_S)
        assert not thread.is_alive()


# ---- handing in without waking anybody ---------------------------------------------------------------------------


class Records(Actor):
    """Keeps its events in the order in which it handled them."""

    def __init__(self, run_queue: RunQueue) -> None:
        super().__init__(run_queue)
        self.handled: list[Any] = []

    def handle(self, event: Any, worker: Any) -> None:
        self.handled.append(event)

    def broke(self, error: BaseException, worker: Any) -> None:
        raise error


@pytest.fixture
def takers() -> Iterator[Callable[[RunQueue, float | None], threading.Thread]]:
    """Starts threads that run actors, as workers do."""
    started: list[tuple[RunQueue, threading.Thread]] = []

    def start(run_queue: RunQueue, timeout_s: float | None) -> threading.Thread:
        def take_turn(actor: Actor) -> None:
            actor.take_turn(None)

        thread = threading.Thread(target=take_all, args=(run_queue, timeout_s, take_turn))
        thread.start()
        started.append((run_queue, thread))
        return thread

    yield start
    for run_queue, _ in started:
        run_queue.put(None)
    for _, thread in started:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_what_is_handed_in_wakes_nobody_until_a_waker_does(takers: Callable[..., threading.Thread]):
    run_queue = RunQueue()
    actor = Records(run_queue)
    takers(run_queue, None)
    eventually("it sleeps", lambda: run_queue.waiting)
    run_queue.hand_in(actor, "event")
    time.sleep(0.02)
    assert actor.handled == []
    run_queue.rouse()
    eventually("it was handled", lambda: actor.handled == ["event"])
    eventually("it sleeps again", lambda: run_queue.waiting)
    run_queue.rouse()
    time.sleep(0.01)
    assert len(run_queue.waiting) == 1, "nothing was handed in, so nobody was woken"


def test_who_looks_at_writes_finds_what_is_handed_in_without_a_waker(takers: Callable[..., threading.Thread]):
    run_queue = RunQueue()
    actor = Records(run_queue)
    takers(run_queue, 1e-3)
    run_queue.hand_in(actor, "event")
    eventually("it was handled", lambda: actor.handled == ["event"])


def test_what_is_handed_in_is_found_before_anything_is_waited_for():
    """Also by a worker that was about to sleep for ever."""
    run_queue = RunQueue()
    actor = Records(run_queue)
    run_queue.hand_in(actor, "event")
    assert run_queue.take(None) is actor
    with pytest.raises(queue.Empty):
        run_queue.take(0)


@pytest.mark.parametrize("timeout_s", [None, 1e-5])
def test_events_keep_their_order_whoever_takes_them(takers: Callable[..., threading.Thread], timeout_s: float | None):
    """Several workers of one queue, several callers with rooms of their own."""
    run_queue, count = RunQueue(), 3000
    for _ in range(3):
        takers(run_queue, timeout_s)
    waker = Waker([run_queue])
    SupervisedThread("test", waker)
    actors = [Records(run_queue) for _ in range(4)]

    def call(mine: list[Records]) -> None:
        for number in range(count):
            for actor in mine:
                run_queue.hand_in(actor, number)

    callers = [threading.Thread(target=call, args=(actors[start::2],)) for start in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(WAIT_S)
    for actor in actors:
        eventually("all were handled", lambda actor: len(actor.handled) == count, actor)
        assert actor.handled == list(range(count))
    waker.stop()


def test_a_waker_looks_while_events_are_handed_in_and_rests_otherwise(takers: Callable[..., threading.Thread]):
    looks = 0

    class Counting(RunQueue):
        def rouse(self) -> None:
            nonlocal looks
            looks += 1
            super().rouse()

    run_queue = Counting()
    waker = Waker([run_queue])
    thread = SupervisedThread("test", waker)
    takers(run_queue, None)
    for round_number in range(3):
        actor = Records(run_queue)
        eventually("the taker sleeps", lambda: run_queue.waiting)
        eventually("it rests", lambda: waker.is_resting)
        before = looks
        time.sleep(0.02)
        assert looks == before
        run_queue.hand_in(actor, round_number)
        eventually("it was handled", lambda actor: actor.handled, actor)
        assert looks > before
    assert thread.is_alive
    waker.stop()
    eventually("it has ended", lambda: not thread.is_alive)


def test_no_thread_wakes_every_millisecond_while_rooms_wait_for_the_other_side(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch
):
    """Counts turns of the prefill side's loops during 50 ms, and asks how long the decode side's would wait."""
    requests = pair(SMALL)
    requests.connect()
    prefill, decode = requests.prefill.endpoints[0], requests.decode.endpoints[0]
    senders = [prefill.open(room) for room in range(1, 201)]
    for sender in senders:
        sender.submit(np.arange(1), last=True)
        decode.open(1000 + sender.room, np.arange(1), engine=requests.prefill.name)
    eventually("all were taken", lambda: all(room.chunks for room in probe(prefill).rooms.all()))
    eventually("all were asked for", lambda: len(probe(prefill).pending) == len(senders))
    eventually("the waker rests", lambda: probe(prefill).driver.waker.is_resting)
    probe(prefill).driver.answers.connecting_until = 0.0
    probe(decode).rooms.last_news_at -= 10.0
    time.sleep(0.005)  # the turns that have begun
    turns: collections.Counter[type] = collections.Counter()
    waits_ms: list[int] = []
    right_wait = probe(decode).context.end.wait

    def wait(timeout_ms: int) -> Any:
        waits_ms.append(timeout_ms)
        return right_wait(timeout_ms)

    monkeypatch.setattr(probe(decode).context.end, "wait", wait)
    for loop in (Waker, Worker, PrefillDriver):
        right = loop.turn

        def turn(self: Any, *, may_wait: bool, right: Callable[..., bool] = right) -> bool:
            turns[type(self)] += 1
            return right(self, may_wait=may_wait)

        monkeypatch.setattr(loop, "turn", turn)
    time.sleep(0.05)
    assert turns[Waker] == turns[Worker] == 0
    assert turns[PrefillDriver] <= 2
    eventually("the decode side's thread waits", lambda: len(waits_ms) > 2)
    assert min(waits_ms) == 10


def test_submit_wakes_no_thread(pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch):
    """To wake one takes longer than all the rest of it."""
    requests = pair(SMALL)
    requests.run(0)
    is_submitting, woken = threading.local(), 0
    right_submit, right_wake = Sender.submit, RunQueue.wake_one

    def submit(sender: Sender, *args: Any, **named: Any) -> None:
        is_submitting.now = True
        right_submit(sender, *args, **named)
        is_submitting.now = False

    def wake_one(run_queue: RunQueue) -> None:
        nonlocal woken
        woken += 1
        assert not getattr(is_submitting, "now", False)
        right_wake(run_queue)

    monkeypatch.setattr(Sender, "submit", submit)
    monkeypatch.setattr(RunQueue, "wake_one", wake_one)
    for room in range(1, 6):
        requests.run(room, 6, cuts=(1, 4))
    assert woken


def test_chunks_that_are_refused_change_nothing(engines: Callable[..., Engines]):
    both = engines()
    assert isinstance(both.settings(), Settings)
    requests = Requests(both.prefill(SMALL), both.decode(SMALL))
    request = requests.new(1, 4)
    requests.open_decode(request)
    requests.open_prefill(request)
    requests.submit(request, 0, 2, last=False)
    with pytest.raises(ChunkError, match="starts at page 3 of the request where page 2 is next"):
        request.senders[0].submit(request.source_pages[0][3:], start=3)
    requests.submit(request, 2, 4)
    request.wait()
    requests.check(request)
