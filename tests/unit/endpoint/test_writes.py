"""A worker's writes on their way: an event costs the same however many there are, and every end is found soon."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.watched import Watched

from kvferry.endpoint.runtime.run_queue import Actor, RunQueue
from kvferry.endpoint.runtime.workers import LOOKS_AROUND, MOST_POLLS, Settling, Worker, WritesInFlight
from kvferry.errors import TransportError
from kvferry.transport import InProcessNetwork, InProcessTransport, TransferHandle, TransferReport

REPORT = TransferReport(1, 1, 0.0, 0.0)


class Ends(InProcessTransport):
    """Its writes end when a test says so, and every poll is counted."""

    def __init__(self) -> None:
        super().__init__(InProcessNetwork())
        self.ended: dict[TransferHandle, Exception | None] = {}
        self.polls: Counter[TransferHandle] = Counter()
        self.released: list[TransferHandle] = []

    def poll(self, transfer: TransferHandle) -> TransferReport | None:
        assert transfer not in self.released
        self.polls[transfer] += 1
        if transfer not in self.ended:
            return None
        error = self.ended[transfer]
        if error is not None:
            raise error
        return REPORT

    def release(self, transfer: TransferHandle) -> None:
        self.released.append(transfer)

    def end(self, transfers: Iterable[TransferHandle], error: Exception | None = None) -> None:
        self.ended.update(dict.fromkeys(transfers, error))


class Room(Actor):
    """Posts a write with each event that is one, and notes what becomes of it."""

    def __init__(self, run_queue: RunQueue) -> None:
        super().__init__(run_queue)
        self.done: list[TransferHandle] = []
        self.failed: list[TransferHandle] = []
        self.broke_: list[TransferHandle] = []

    def watched(self, transfer: TransferHandle, peer: str, worker: Worker) -> None:
        worker.watch(
            Watched(
                transfer,
                peer,
                done=lambda _: self.done.append(transfer),
                settled=lambda _: self.failed.append(transfer),  # at once: nothing arrives late within a process
                broke=lambda _: self.broke_.append(transfer),
            )
        )

    def handle(self, event: tuple[TransferHandle, str] | None, worker: Worker) -> None:
        if event is not None:
            self.watched(*event, worker)

    def broke(self, error: BaseException, worker: Worker) -> None:
        raise error


class Bench:
    """A worker without a thread, and writes on their way."""

    def __init__(self, count: int, peers: int = 1) -> None:
        self.transport = Ends()
        run_queue = RunQueue()
        self.worker = Worker(run_queue, self.transport, Settling(0.0, lambda: 0.0))
        self.room = Room(run_queue)
        self.writes = [TransferHandle() for _ in range(count)]
        for number, write in enumerate(self.writes):
            self.room.watched(write, f"decode-{number % peers}", self.worker)
        self.transport.polls.clear()

    def event(self) -> int:
        """A turn with an event; returns how many polls it took."""
        self.room.post(None)
        return self.idle()

    def idle(self) -> int:
        """A turn with nothing to do but to look."""
        before = self.transport.polls.total()
        assert self.worker.turn(may_wait=False)
        return self.transport.polls.total() - before


@pytest.mark.parametrize("peers", [1, pytest.param(64, marks=pytest.mark.full), 512])
def test_an_event_takes_as_many_polls_with_ten_thousand_writes_on_their_way_as_with_a_hundred(peers: int):
    most = {count: max(Bench(count, peers).event() for _ in range(3)) for count in (100, 1_000, 10_000)}
    assert len(set(most.values())) == 1, most
    assert most[10_000] <= MOST_POLLS


@pytest.mark.parametrize("count", [1, MOST_POLLS])
def test_every_look_polls_all_of_a_few_writes(count: int):
    bench = Bench(count)
    for look in (bench.event, bench.idle, bench.event):
        assert look() == count
    assert set(bench.transport.polls.values()) == {3}


@pytest.mark.parametrize("peers", [1, MOST_POLLS // 2])
def test_writes_that_end_in_order_are_found_with_the_next_event(peers: int):
    """As over a connection that keeps order, however many writes are behind them."""
    bench = Bench(5_000, peers)
    for turn in range(50):
        bench.transport.end(bench.writes[turn * peers : (turn + 1) * peers])
        assert bench.event() <= MOST_POLLS + peers
        assert len(bench.room.done) == (turn + 1) * peers


def test_all_that_have_ended_at_one_peer_are_found_with_one_look():
    bench = Bench(1_000)
    bench.transport.end(bench.writes)
    bench.event()
    assert bench.room.done == bench.writes
    assert bench.transport.polls.total() == 1_000


@given(
    peers=st.integers(1, 100),
    ends=st.lists(st.sets(st.integers(0, 199), min_size=1, max_size=20), max_size=5),
    error=st.sampled_from([None, TransportError("it failed")]),
    is_busy=st.booleans(),
)
def test_in_whatever_order_writes_end_each_is_found_once_and_soon(
    peers: int, ends: list[set[int]], error: Exception | None, is_busy: bool
):
    bench = Bench(200, peers)
    ended: set[TransferHandle] = set()
    for ending in [*ends, set(range(200))]:
        now = {bench.writes[number] for number in ending} - ended
        bench.transport.end(now, error)
        ended |= now
        for _ in range(200 // (MOST_POLLS // 2) + 1 if is_busy else LOOKS_AROUND):
            bench.event() if is_busy else bench.idle()
        found = bench.room.failed if error is not None else bench.room.done
        assert set(found) == ended
        assert len(found) == len(ended)


def test_the_last_of_ten_thousand_is_found_in_the_time_that_so_many_looks_take():
    bench = Bench(10_000, 64)
    bench.transport.end([bench.writes[-1]])
    for _ in range(LOOKS_AROUND):
        bench.idle()
    assert bench.room.done == [bench.writes[-1]]


def test_a_write_whose_poll_breaks_delays_none_of_those_behind_it(caplog: pytest.LogCaptureFixture):
    bench = Bench(1_000)
    broken, *others = bench.writes
    bench.transport.end([broken], ValueError("a bug"))
    bench.event()
    assert bench.room.broke_ == [broken]
    for number in range(20):
        bench.transport.end([others[number]])
        bench.event()
        assert bench.room.done == others[: number + 1]
    bench.transport.end([broken])  # it has ended after all
    for _ in range(LOOKS_AROUND + 1):
        bench.idle()
    assert broken in bench.room.done
    assert bench.room.broke_ == [broken]
    assert "the transport broke" in caplog.text


def test_what_has_ended_leaves_nothing_behind():
    transport = Ends()
    writes = WritesInFlight(transport, lambda write, error: None)
    handles = [TransferHandle() for _ in range(200)]
    for number, handle in enumerate(handles):
        writes.add(Watched(handle, str(number % 50)))
    transport.end(handles)
    while len(writes):
        writes.look(has_time=True)
    assert transport.released == sorted(handles, key=transport.released.index)
    assert len(transport.released) == 200
    assert not writes.of_peers
    assert not writes.look(has_time=True)
