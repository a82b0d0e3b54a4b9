"""How many bytes of direct writes are on their way at a time, and who is next."""

from __future__ import annotations

import random
from collections.abc import Callable
from threading import Event

import pytest
from tests.support.caches import Model, Shape
from tests.support.engines import WAIT_S, Engines, Requests
from tests.support.waiting import eventually

from kvferry.endpoint.prefill.admission import Admission, Admitted
from kvferry.errors import KVFerryError, PageError, TransferFailedError, TransferTimeoutError
from kvferry.observe.records import SenderStats
from kvferry.protocol.transfer.states import TransferState
from kvferry.testing.probe import probe

SMALL = Model(layers=1, heads=2, head_dim=4, page_tokens=2)
PAGE_BYTES = 128  # keys and values of a page of that model


class Room:
    """Somebody who writes one write after the other, if it is not `held_up`."""

    def __init__(
        self, admission: Admission, receiver: str, *sizes: int, due_at: float = 0.0, held_up: bool = False
    ) -> None:
        self.got: list[Admitted] = []
        self._is_held_up = held_up
        self._due_at = due_at
        self._admission, self._receiver, self.sizes = admission, receiver, list(sizes)
        self.go_on()

    def go_on(self) -> None:
        while self.sizes:
            admitted = self._admission.admit(self._receiver, self.sizes.pop(0), self, self._due_at)
            if admitted is None:
                return
            self._take(admitted)

    def admitted(self, admitted: Admitted) -> None:
        self._take(admitted)
        self.go_on()

    def _take(self, admitted: Admitted) -> None:
        self.got.append(admitted)
        if not self._is_held_up:
            assert self._admission.use(admitted)

    def end(self, count: int = 1) -> None:
        for _ in range(count):
            self._admission.give_back(self.got.pop(0))

    def withdraw(self) -> None:
        self._admission.withdraw(self._receiver, self)


class Clock:
    now = 0.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def admission(clock: Clock) -> Admission:
    """Ten bytes in all, five to one receiver."""
    return Admission(most_bytes=10, most_bytes_of_one=5, stalls_after_s=3.0, now=lambda: clock.now)


def run_until(at: float, admission: Admission, clock: Clock) -> None:
    """Lets time pass, with a tick every tenth of a second."""
    while clock.now < at - 1e-6:
        clock.now = min(clock.now + 0.1, at)
        admission.tick()


def counts(*rooms: Room) -> list[int]:
    return [len(room.got) for room in rooms]


def test_a_receiver_gets_no_more_than_its_bound(admission: Admission):
    room = Room(admission, "d0", 2, 2, 2, 2)
    assert counts(room) == [2]
    assert admission.num_bytes == 4
    room.end()
    assert (counts(room), admission.num_bytes) == ([2], 4)


def test_all_receivers_together_get_no_more_than_the_bound_for_all(admission: Admission):
    rooms = [Room(admission, f"d{number}", 4) for number in range(4)]
    assert counts(*rooms) == [1, 1, 0, 0]
    rooms[0].end()
    assert counts(*rooms) == [0, 1, 1, 0]
    rooms[1].end()
    assert counts(*rooms) == [0, 0, 1, 1]


@pytest.mark.parametrize("size", [6, 11])
def test_more_bytes_than_a_bound_are_admitted_alone(admission: Admission, size: int):
    before = Room(admission, "d0", 1)
    large = Room(admission, "d0", size)
    behind = Room(admission, "d0", 1)
    assert counts(before, large, behind) == [1, 0, 0]
    before.end()
    assert counts(large, behind) == [1, 0]
    assert admission.num_bytes == size
    large.end()
    assert counts(behind) == [1]


def test_rooms_take_turns_whatever_they_have_to_write(admission: Admission):
    many, few = Room(admission, "d0", *[5] * 10), Room(admission, "d0", 5)
    for _ in range(3):
        many.end() if many.got else few.end()
    assert counts(few) == [0]
    assert len(many.sizes) <= 7


def test_who_is_due_first_is_admitted_first(admission: Admission):
    first = Room(admission, "d0", 5)
    late, early, between = (Room(admission, "d0", 5, due_at=due_at) for due_at in (3.0, 1.0, 2.0))
    elsewhere = Room(admission, "d1", 5, 5, due_at=4.0)
    assert counts(first, late, early, between, elsewhere) == [1, 0, 0, 0, 1]
    for writing, following in ((first, early), (early, between), (between, late)):
        writing.end()
        assert counts(late, early, between) == [int(room is following) for room in (late, early, between)]
    late.end()
    elsewhere.end()
    assert counts(elsewhere) == [1]


def test_who_is_due_first_is_admitted_at_once_where_only_others_need_too_much(admission: Admission):
    writing, large = Room(admission, "d0", 2), Room(admission, "d0", 5, due_at=2.0)
    assert counts(writing, large, Room(admission, "d0", 3, due_at=1.0)) == [1, 0, 1]


def test_who_was_passed_by_one_that_gave_up_is_admitted(admission: Admission):
    """Who is first at a receiver, and is not any more, loses its turn among those that wait for the bound for all."""
    writing = [Room(admission, "d0", 5), Room(admission, "d1", 3), Room(admission, "d2", 2)]
    waits = Room(admission, "d2", 3, due_at=2.0)
    passes = Room(admission, "d2", 4, due_at=1.0)
    assert counts(*writing, waits, passes) == [1, 1, 1, 0, 0]
    passes.withdraw()
    writing[0].end()
    assert counts(waits) == [1]


def test_who_was_overtaken_waits_for_room_and_holds_up_nobody_who_writes_to_another(admission: Admission):
    others = [Room(admission, f"d{number}", 5) for number in (1, 2)]
    overtaken, overtaker = (Room(admission, "d0", size, due_at=due_at) for size, due_at in ((5, 2.0), (2, 1.0)))
    elsewhere = Room(admission, "d3", 2, due_at=3.0)
    others[0].end()
    assert counts(overtaker, overtaken, elsewhere) == [1, 0, 1]
    others[1].end()
    assert counts(overtaken) == [0], "more than its receiver's bound"
    overtaker.end()
    assert counts(overtaken) == [1]


def test_who_waits_for_a_receiver_holds_up_nobody_who_writes_to_another(admission: Admission):
    stuck = Room(admission, "d0", 5, 5)
    assert counts(stuck) == [1]
    assert counts(Room(admission, "d1", 5)) == [1]


def test_nobody_overtakes_who_waits_for_the_bound_for_all(admission: Admission):
    first, second = Room(admission, "d0", 5), Room(admission, "d1", 4)
    large, small = Room(admission, "d2", 5), Room(admission, "d3", 1)
    assert counts(first, second, large, small) == [1, 1, 0, 0], "one byte is free, but it is not the small one's turn"
    second.end()
    assert counts(large, small) == [1, 0]
    first.end()
    assert counts(small) == [1]


def test_who_gives_up_lets_those_behind_it_go_on(admission: Admission):
    first = Room(admission, "d0", 4)
    second, third = Room(admission, "d0", 4), Room(admission, "d0", 1)
    assert counts(first, second, third) == [1, 0, 0]
    second.withdraw()
    second.withdraw()
    assert counts(second, third) == [0, 1]
    Room(admission, "d1").withdraw()


def test_all_are_admitted_for_whom_an_end_makes_room(admission: Admission):
    first = Room(admission, "d0", 5)
    second, third, fourth = Room(admission, "d0", 2), Room(admission, "d0", 2), Room(admission, "d0", 2)
    assert counts(first, second, third, fourth) == [1, 0, 0, 0]
    first.end()
    assert counts(second, third, fourth) == [1, 1, 0]


def test_who_gives_up_in_front_of_the_line_for_all_lets_others_go_on(admission: Admission):
    first, second = Room(admission, "d0", 5), Room(admission, "d1", 4)
    large, small = Room(admission, "d2", 5), Room(admission, "d2", 1)
    large.withdraw()
    assert counts(first, second, large, small) == [1, 1, 0, 1]


class Waiting:
    """Somebody who asks once."""

    def __init__(self, receiver: str, size: int, due_at: float) -> None:
        self.receiver, self.size, self.due_at = receiver, size, due_at
        self.got: Admitted | None = None

    def admitted(self, admitted: Admitted) -> None:
        self.got = admitted


@pytest.mark.parametrize("seed", range(40))
def test_nobody_waits_for_room_that_is_there_and_nobody_gets_more_than_there_is(seed: int, admission: Admission):
    """By an own account of who has what: whoever is due first, of the first at each receiver that has room, must go."""
    chance = random.Random(seed)
    waiting: list[Waiting] = []
    moving: list[Waiting] = []
    for _ in range(300):
        if chance.random() < 0.5 and len(waiting) < 12:
            asks = Waiting(f"d{chance.randrange(4)}", chance.randint(1, 6), float(chance.randrange(5)))
            asks.got = admission.admit(asks.receiver, asks.size, asks, asks.due_at)
            waiting.append(asks)
        elif waiting and chance.random() < 0.2:
            admission.withdraw((gives_up := chance.choice(waiting)).receiver, gives_up)
            waiting.remove(gives_up)
        elif moving:
            ended = moving.pop(chance.randrange(len(moving)))
            assert ended.got is not None
            admission.give_back(ended.got)
        moving += [each for each in waiting if each.got is not None]
        waiting = [each for each in waiting if each.got is None]  # in the order in which they came
        by_receiver = {
            f"d{number}": [each.size for each in moving if each.receiver == f"d{number}"] for number in range(4)
        }
        assert all(sum(sizes) <= 5 or len(sizes) == 1 for sizes in by_receiver.values())
        total = sum(each.size for each in moving)
        assert total <= 10 or len(moving) == 1
        in_turn = sorted(waiting, key=lambda each: each.due_at)
        firsts = {each.receiver: each for each in reversed(in_turn)}.values()
        has_room = [each for each in firsts if not (sizes := by_receiver[each.receiver]) or sum(sizes) + each.size <= 5]
        due = min(has_room, key=in_turn.index, default=None)
        assert due is None or total + due.size > 10, "waits for nothing"


def test_a_receiver_that_stands_still_does_not_count_in_all(admission: Admission, clock: Clock):
    stuck = [Room(admission, f"d{number}", 5) for number in range(2)]
    others = Room(admission, "d2", 5, 5)
    run_until(2.9, admission, clock)
    assert counts(*stuck, others) == [1, 1, 0]
    run_until(3.1, admission, clock)
    assert counts(others) == [1]
    again = Room(admission, "d0", 1)
    assert counts(again) == [0], "its own bound holds on"
    stuck[0].end()
    stuck[1].end()
    others.end()
    assert counts(others, again) == [1, 1]
    others.end()
    again.end()
    assert admission.num_bytes == admission.counted == 0


def test_a_receiver_that_gets_on_does_not_stand_still(admission: Admission, clock: Clock):
    slow, waiting = Room(admission, "d0", 2, 2), Room(admission, "d1", 5)
    third = Room(admission, "d2", 5)
    run_until(2.0, admission, clock)
    slow.end()
    run_until(4.0, admission, clock)
    assert counts(slow, waiting, third) == [1, 1, 1], "d1 stands still"
    assert admission.counted == 2 + 5


def test_a_receiver_does_not_stand_still_before_anything_is_posted_to_it(admission: Admission, clock: Clock):
    """Found by the simulation: more was on its way than may be, since a room posted a while after it was admitted."""
    late, moving = Room(admission, "d0", 5, held_up=True), Room(admission, "d1", 5)
    run_until(1.0, admission, clock)
    moving.end()
    waiting = [Room(admission, f"d{number}", 5) for number in (2, 3)]
    run_until(2.0, admission, clock)
    assert admission.use(late.got[0])
    run_until(3.5, admission, clock)
    assert counts(*waiting) == [1, 0], "d0 has had its write for a second and a half"
    run_until(4.1, admission, clock)
    assert counts(*waiting) == [1, 1], "d2 stands still"


def test_a_receiver_does_not_stand_still_where_all_that_was_posted_has_ended(admission: Admission, clock: Clock):
    late, moving, waiting = Room(admission, "d0", 2, held_up=True), Room(admission, "d0", 3), Room(admission, "d1", 5)
    run_until(2.0, admission, clock)
    moving.end()
    last = Room(admission, "d2", 5)
    run_until(4.0, admission, clock)
    assert admission.use(late.got[0])
    waiting.end()
    run_until(6.0, admission, clock)
    assert (counts(last), admission.counted) == ([1], 2 + 5)


def test_a_leave_that_nobody_uses_for_long_lapses(admission: Admission, clock: Clock):
    """A room whose worker is held up keeps nobody waiting, and posts nothing in others' place."""
    held_up = [Room(admission, f"d{number}", 5, held_up=True) for number in range(2)]
    same, another = Room(admission, "d0", 5), Room(admission, "d2", 5)
    run_until(2.9, admission, clock)
    assert counts(same, another) == [0, 0]
    run_until(3.1, admission, clock)
    assert counts(same, another) == [1, 1]
    assert not any(admission.use(room.got[0]) for room in held_up)
    for room in held_up:
        room.end()
    assert admission.num_bytes == admission.counted == 10, "what has lapsed was given back"
    same.end()
    another.end()
    assert (admission.num_bytes, admission.lanes) == (0, {})


def test_no_receiver_stood_still_while_this_process_did(admission: Admission, clock: Clock):
    """Found by the simulation: after a freeze of its own a rank had twice the bytes on their way that it may have."""
    moving, waiting = [Room(admission, f"d{number}", 5) for number in range(2)], Room(admission, "d2", 5)
    run_until(1.0, admission, clock)
    clock.now = 100.0
    admission.tick()
    assert counts(*moving, waiting) == [1, 1, 0]
    run_until(101.4, admission, clock)
    assert counts(waiting) == [0], "of the freeze half a second counts"
    run_until(101.7, admission, clock)
    assert counts(waiting) == [1], "now they stand still"


def test_when_something_got_on_is_known_by_receiver_or_in_all(admission: Admission, clock: Clock):
    assert admission.moved_at("d0") is None
    clock.now = 1.0
    first, second = Room(admission, "d0", 4, 4), Room(admission, "d1", 5, 1)
    clock.now = 2.0
    second.end()
    assert admission.moved_at("d0") == 1.0, "waits for its receiver"
    assert admission.moved_at("d1") == 2.0
    behind = Room(admission, "d2", 5)
    assert counts(behind) == [1]
    last = Room(admission, "d3", 5)
    clock.now = 3.0
    second.end()
    assert counts(last) == [0]
    assert admission.moved_at("d3") == 3.0, "waits for all"
    for room in (first, first, behind, last):
        room.end()
    assert admission.moved_at("d0") is None
    assert not admission.lanes


def test_what_an_end_costs_does_not_grow_with_those_who_wait(admission: Admission):
    """None of them is looked at but the first."""
    running = Room(admission, "d0", 5)
    waiting = [Room(admission, f"d{number % 2}", 5, 5) for number in range(1000)]
    assert len(admission.ready) <= 2
    for _ in range(500):
        next(room for room in (running, *waiting) if room.got).end()
        assert len(admission.ready) <= 3


# ---- endpoints -------------------------------------------------------------------------------------------------------


def pages(count: int) -> float:
    """So many pages, in MiB."""
    return count * PAGE_BYTES / 2**20


def test_an_endpoint_posts_no_more_than_may_be_on_its_way(pair: Callable[..., Requests]):
    requests = pair(SMALL, Shape(pages=64), Shape(pages=64), path="direct", direct_receiver_mib=pages(3))
    transport = requests.prefill.transports[0]
    request = requests.new(1, 12)
    requests.open_decode(request)
    requests.open_prefill(request)
    transport.held = True
    for start in range(0, 12, 2):
        requests.submit(request, start, start + 2, last=start == 10)
    prefill = probe(requests.prefill.endpoints[0])
    sending = prefill.table.rooms[1]
    eventually("one is on its way", lambda: transport.in_flight == 1)
    eventually("all others are deferred", lambda: (sending.chunks, sending.waiting_chunks) == (6, 5))
    assert transport.in_flight == prefill.admission.num_waiting == 1
    transport.held = False
    request.wait()
    requests.check(request)
    stats: SenderStats = request.senders[0].stats
    assert [write.total_bytes for write in stats.writes] == [2 * PAGE_BYTES] * 6
    assert probe(requests.prefill.endpoints[0]).admission.num_bytes == 0


def test_a_write_that_waits_is_dropped_with_a_room_that_the_next_chunk_fails_once_it_is_ready(
    pair: Callable[..., Requests],
):
    """A schedule of the simulation: the room's pages were given back, and read when the write's turn came."""
    requests, is_ready = pair(SMALL, Shape(pages=64), Shape(pages=64), path="direct", direct_mib=pages(2)), Event()
    transport = requests.prefill.transports[0]
    blocking, failing = requests.new(1, 2), requests.new(2, 4)
    transport.held = True
    for request in (blocking, failing):
        requests.open_decode(request)
        requests.open_prefill(request)
    requests.submit(blocking)
    eventually("one is on its way", lambda: transport.in_flight == 1)
    (sender,), (source,) = failing.senders, failing.source_pages
    sender.submit(source[:2])
    admission = probe(requests.prefill.endpoints[0]).admission
    eventually("the other is deferred", lambda: admission.num_waiting == 1)
    others = [page for page in range(64) if page not in source]
    sender.submit([*source[2:], others[0]], last=True, ready=is_ready)
    is_ready.set()
    with pytest.raises(PageError, match="5 pages of 2 tokens of the request where the receiver has room for 4"):
        sender.wait(WAIT_S)
    assert sender.wait_pages_reusable(WAIT_S)
    transport.held = False
    blocking.wait()
    requests.run(3)
    assert transport.posted == 2, "what waited was written although its pages are somebody else's"


def test_a_room_whose_receiver_takes_no_more_holds_up_no_other(engines: Callable[..., Engines]):
    both = engines(path="direct", direct_mib=pages(8), direct_receiver_mib=pages(2), workers=1)
    prefill = both.prefill(SMALL, Shape(pages=256))
    slow, fast = (Requests(prefill, both.decode(SMALL, Shape(pages=256))) for _ in range(2))
    fast.connect()
    transport = prefill.transports[0]
    stuck = slow.new(1, 12)
    slow.open_decode(stuck)
    slow.open_prefill(stuck)
    eventually("it is open", lambda: stuck.senders[0].state is TransferState.WAITING_FOR_INPUT)
    (peer,) = probe(prefill.endpoints[0]).table.rooms[1].generations
    transport.held = {peer}
    for start in range(12):
        slow.submit(stuck, start, start + 1, last=start == 11)
    for room in range(2, 6):
        fast.run(room)
    assert transport.in_flight == 2
    transport.held = False
    stuck.wait()
    slow.check(stuck)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_writes_that_wait_are_not_posted_after_their_room_has_failed(pair: Callable[..., Requests], side: str):
    requests = pair(SMALL, Shape(pages=64), Shape(pages=64), path="direct", direct_receiver_mib=pages(1))
    transport = requests.prefill.transports[0]
    request, other = requests.new(1, 4), requests.new(2, 4)
    transport.held = True
    for each in (request, other):
        requests.open_decode(each)
        requests.open_prefill(each)
        for start in range(4):
            requests.submit(each, start, start + 1, last=start == 3)
        eventually("the first one's is on its way", lambda: transport.in_flight == 1)
    sending = probe(requests.prefill.endpoints[0]).table.rooms[1]
    eventually("all chunks are taken", lambda: sending.chunks == 4)
    (request.senders if side == "prefill" else request.receivers)[0].abort("the client went away")
    with pytest.raises(KVFerryError):
        request.senders[0].wait()
    transport.held = False
    other.wait()
    requests.check(other)
    for transfer in (*request.senders, *request.receivers):
        assert transfer.wait_pages_reusable(10)
    assert transport.posted in (4, 5), "of the room that failed no more than the one that was on its way"
    admission = probe(requests.prefill.endpoints[0]).admission
    assert (admission.num_bytes, admission.num_waiting) == (0, 0)


def test_what_fails_to_be_posted_or_on_its_way_makes_room_for_others(pair: Callable[..., Requests]):
    requests = pair(SMALL, Shape(pages=64), Shape(pages=64), path="direct", direct_receiver_mib=pages(6))
    transport = requests.prefill.transports[0]

    def fail(_: str) -> None:
        raise OSError("link down")

    for room, hook in enumerate(("on_post", "on_poll")):
        setattr(transport, hook, fail)
        request = requests.new(room)
        requests.open_decode(request)
        requests.open_prefill(request)
        requests.submit(request)
        with pytest.raises(TransferFailedError, match="link down"):
            request.senders[0].wait()
        setattr(transport, hook, None)
        eventually("it is gone", lambda: requests.prefill.endpoints[0].open_rooms == 0)
        assert probe(requests.prefill.endpoints[0]).admission.num_bytes == 0
        requests.run(100 + room)


def test_a_write_that_waits_does_so_longer_than_one_may_be_on_its_way(pair: Callable[..., Requests]):
    """Its time begins when it may move; and while nothing moves at all, the wait has an end."""
    requests = pair(
        SMALL,
        Shape(pages=64),
        Shape(pages=64),
        path="direct",
        direct_receiver_mib=pages(1),
        write_timeout_s=0.3,
        waiting_timeout_s=1.0,
    )
    transport = requests.prefill.transports[0]
    first, behind = requests.new(1, 1), requests.new(2, 1)
    for each in (first, behind):
        requests.open_prefill(each)
    requests.connect()
    transport.held = True
    for each in (first, behind):
        requests.open_decode(each)
        requests.submit(each)
        eventually("it is taken", lambda each: each.senders[0].state is TransferState.TRANSFERRING, each)
    with pytest.raises(TransferTimeoutError, match=r"did not end within 0.3 s \(KVFERRY_WRITE_TIMEOUT_S\)"):
        first.senders[0].wait()
    assert behind.senders[0].state is TransferState.TRANSFERRING
    with pytest.raises(KVFerryError, match="KVFERRY_WAITING_TIMEOUT_S"):
        behind.senders[0].wait()
    assert behind.senders[0].wait_pages_reusable(10), "nothing was posted for it"
    assert not first.senders[0].pages_reusable
    transport.held = False
    assert first.senders[0].wait_pages_reusable(10)


def test_a_room_whose_worker_is_held_up_when_it_is_admitted_lets_others_go_on_and_then_has_its_turn(
    pair: Callable[..., Requests],
):
    requests = pair(
        SMALL,
        Shape(pages=64),
        Shape(pages=64),
        path="direct",
        direct_mib=pages(1),
        workers=2,
        queues=2,
        write_timeout_s=2.0,  # of which a leave is good for half
    )
    transport = requests.prefill.transports[0]
    first, other, late, busy = (requests.new(room, 1) for room in (0, 1, 2, 3))  # two on each worker
    begun, gate = Event(), Event()

    def blocks() -> bool:
        begun.set()
        return gate.wait(WAIT_S)

    for each in (first, other, late, busy):
        requests.open_decode(each)
        requests.open_prefill(each)
        eventually("it is open", lambda each: each.senders[0].state is TransferState.WAITING_FOR_INPUT, each)
    transport.held = True
    requests.submit(first)
    eventually("it is on its way", lambda: transport.in_flight == 1)
    requests.submit(late)
    eventually("it waits", lambda: probe(requests.prefill.endpoints[0]).admission.num_waiting == 1)
    busy.senders[0].submit(busy.source_pages[0], last=True, aux=b"token", ready=blocks)
    assert begun.wait(WAIT_S)
    transport.held = False
    first.wait()
    requests.submit(other)
    other.wait()
    assert late.senders[0].state is TransferState.TRANSFERRING
    gate.set()
    for each in (late, busy):
        each.wait()
        requests.check(each)
    admission = probe(requests.prefill.endpoints[0]).admission
    assert (admission.num_bytes, admission.num_waiting) == (0, 0)


def test_a_write_asks_for_as_many_bytes_as_it_moves(pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch):
    requests = pair(SMALL, Shape(tp=2, pages=64), Shape(pages=64), path="direct")
    asked: list[int] = []
    right = Admission.admit

    def admit(admission: Admission, receiver: str, num_bytes: int, applicant: Room, due_at: float) -> Admitted | None:
        asked.append(num_bytes)
        return right(admission, receiver, num_bytes, applicant, due_at)

    monkeypatch.setattr(Admission, "admit", admit)
    request = requests.new(1, 5)
    requests.open_decode(request)
    requests.open_prefill(request)
    requests.submit(request, 0, 1, last=False)
    requests.let_leave(request, 1)
    requests.submit(request, 1, 5)
    request.wait()
    moved = [write.total_bytes for sender in request.senders for write in sender.stats.writes]
    assert sorted(asked) == sorted(moved) == [PAGE_BYTES // 2] * 2 + [4 * PAGE_BYTES // 2] * 2
