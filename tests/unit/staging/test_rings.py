"""A ring that several rooms share: first come, first served, and whoever waits is woken when it is its turn."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.plan.packing import SEGMENT_ALIGNMENT
from kvferry.staging.rings import ReadingRing, SharedRing, Span

LINE = SEGMENT_ALIGNMENT


class Room:
    """Counts how often it was woken."""

    def __init__(self, when_woken: Callable[[], None] | None = None) -> None:
        self.woken = 0
        self._when_woken = when_woken

    def wake(self) -> None:
        self.woken += 1
        if self._when_woken is not None:
            self._when_woken()


class RingThatIsRead(SharedRing):
    """With its reader, who says at once up to where everything was read."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self._reader = threading.Lock()
        self._reading = ReadingRing(num_bytes)

    def release(self, span: Span) -> None:
        with self._reader:
            self._reading.release(span)
            position = self._reading.position
        self.read_until(position)


def full_ring(num_lines: int = 4) -> tuple[RingThatIsRead, list[Span]]:
    """A ring and all its spans, of a line each."""
    ring = RingThatIsRead(num_lines * LINE)
    spans = [ring.reserve(LINE, Room()) for _ in range(num_lines)]
    return ring, [span for span in spans if span is not None]


def wokens(*rooms: Room) -> list[int]:
    return [room.woken for room in rooms]


# ---- one after the other --------------------------------------------------------------------------------------------


def test_who_asks_for_what_is_free_gets_it_and_need_not_be_woken():
    ring, room = RingThatIsRead(4 * LINE), Room()
    span = ring.reserve(3 * LINE, room)
    assert span == Span(0, 0, 3 * LINE)
    assert (ring.num_bytes, ring.in_use, ring.place(span)) == (4 * LINE, 3 * LINE, 0)
    ring.release(span)
    assert (ring.in_use, room.woken) == (0, 0)


def test_who_waits_is_woken_once_there_is_enough_and_not_before():
    ring, spans = full_ring()
    room = Room()
    assert ring.reserve(2 * LINE, room) is None
    ring.release(spans[0])
    assert room.woken == 0
    ring.release(spans[1])
    assert room.woken == 1
    assert ring.reserve(2 * LINE, room) == Span(4 * LINE, 4 * LINE, 6 * LINE)


def test_spans_that_are_released_out_of_order_wake_nobody_until_the_first_is():
    ring, spans = full_ring()
    room = Room()
    assert ring.reserve(LINE, room) is None
    for span in spans[:0:-1]:
        ring.release(span)
        assert (ring.in_use, room.woken) == (4 * LINE, 0)
    ring.release(spans[0])
    assert (ring.in_use, room.woken) == (0, 1)


def test_nobody_overtakes_who_waits_even_for_less():
    ring, spans = full_ring()
    large, small = Room(), Room()
    assert ring.reserve(3 * LINE, large) is None
    ring.release(spans[0])
    assert ring.reserve(LINE, small) is None, "a line is free, but it is not the small one's turn"
    ring.release(spans[1])
    assert wokens(large, small) == [0, 0]
    ring.release(spans[2])
    assert wokens(large, small) == [1, 0]
    assert ring.reserve(LINE, small) is None, "not even now that the large one was woken and has not come yet"
    assert ring.reserve(3 * LINE, large) is not None
    assert wokens(large, small) == [1, 0]
    ring.release(spans[3])
    assert wokens(large, small) == [1, 1]


def test_who_does_not_wait_gets_what_is_free_but_passes_nobody_who_is_due_before_or_then():
    ring, spans = full_ring()
    large = Room()
    assert ring.reserve_now(LINE, due_at=0.0) is None
    assert ring.reserve(3 * LINE, large, 2.0) is None
    ring.release(spans[0])
    assert ring.reserve_now(LINE, due_at=2.0) is None
    assert ring.reserve_now(LINE, due_at=3.0) is None
    assert ring.reserve_now(LINE, due_at=1.0) is not None
    for span in spans[1:]:
        ring.release(span)
    assert (ring.num_waiting, wokens(large)) == (1, [1]), "only the large one waits"


def test_who_comes_later_waits_behind_who_came_earlier():
    ring, spans = full_ring()
    rooms = [Room() for _ in range(4)]
    for room in rooms:
        assert ring.reserve(LINE, room) is None
    for number, span in enumerate(spans):
        ring.release(span)
        assert wokens(*rooms) == [1] * (number + 1) + [0] * (3 - number)
        for later in rooms[number + 1 :]:
            assert ring.reserve(LINE, later) is None
        assert ring.reserve(LINE, rooms[number]) is not None


def test_as_many_as_there_is_room_for_are_woken_one_by_the_other():
    ring, spans = full_ring()
    rooms = [Room() for _ in range(4)]
    for room in rooms:
        assert ring.reserve(LINE, room) is None
    ring.read_until(spans[2].stop)
    for number in range(3):
        assert wokens(*rooms) == [1] * (number + 1) + [0] * (3 - number)
        assert ring.reserve(LINE, rooms[number]) is not None
    assert wokens(*rooms) == [1, 1, 1, 0], "for the fourth there is no room"


def test_asking_again_keeps_the_place_whatever_is_asked_for():
    ring, spans = full_ring()
    first, second = Room(), Room()
    assert ring.reserve(LINE, first) is None
    assert ring.reserve(LINE, second) is None
    assert ring.reserve(2 * LINE, first) is None
    ring.release(spans[0])
    assert wokens(first, second) == [0, 0], "the first wants two lines now"
    ring.release(spans[1])
    assert wokens(first, second) == [1, 0]
    assert ring.reserve(LINE, first) is not None
    assert wokens(first, second) == [1, 1], "it took less, so there is a line for the second"


def test_who_withdraws_lets_the_next_go():
    ring, spans = full_ring()
    large, small = Room(), Room()
    assert ring.reserve(4 * LINE, large) is None
    assert ring.reserve(LINE, small) is None
    ring.release(spans[0])
    assert wokens(large, small) == [0, 0]
    ring.withdraw(large)
    assert wokens(large, small) == [0, 1]
    assert ring.reserve(LINE, small) is not None


def test_who_withdraws_after_it_was_woken_does_not_keep_its_turn():
    ring, spans = full_ring()
    first, second = Room(), Room()
    assert ring.reserve(LINE, first) is None
    assert ring.reserve(LINE, second) is None
    ring.release(spans[0])
    ring.withdraw(first)
    assert wokens(first, second) == [1, 1]
    assert ring.reserve(LINE, second) is not None


def test_who_withdraws_from_the_middle_does_not_disturb_the_order():
    ring, spans = full_ring()
    rooms = [Room() for _ in range(3)]
    for room in rooms:
        assert ring.reserve(LINE, room) is None
    ring.withdraw(rooms[1])
    for number, room in enumerate((rooms[0], rooms[2])):
        ring.release(spans[number])
        assert ring.reserve(LINE, room) is not None
    assert wokens(*rooms) == [1, 0, 1]


def test_who_withdrew_waits_at_the_end_if_it_comes_again():
    ring, spans = full_ring()
    first, second = Room(), Room()
    assert ring.reserve(LINE, first) is None
    assert ring.reserve(LINE, second) is None
    ring.withdraw(first)
    assert ring.reserve(LINE, first) is None
    ring.release(spans[0])
    assert wokens(first, second) == [0, 1]


def test_withdrawing_without_waiting_does_nothing():
    ring, spans = full_ring()
    waiting, stranger = Room(), Room()
    assert ring.reserve(LINE, waiting) is None
    ring.withdraw(stranger)
    ring.withdraw(stranger)
    assert (wokens(waiting), ring.in_use) == ([0], 4 * LINE)
    ring.release(spans[0])
    assert wokens(waiting) == [1]


def test_a_watermark_that_is_late_or_impossible_wakes_nobody():
    ring, spans = full_ring()
    room = Room()
    assert ring.reserve(LINE, room) is None
    ring.read_until(spans[0].stop)
    for position in (spans[0].stop, 0, -1, 5 * LINE, 10**9):
        ring.read_until(position)
    assert (room.woken, ring.in_use) == (1, 3 * LINE)


def test_what_no_ring_of_the_size_has_is_refused_and_not_waited_for():
    ring, spans = full_ring()
    with pytest.raises(ValueError, match="a span of 257 bytes in a ring of 256"):
        ring.reserve(4 * LINE + 1, Room())
    room = Room()
    assert ring.reserve(LINE, room) is None
    ring.release(spans[0])
    assert room.woken == 1


def test_two_that_look_alike_are_two():
    class Twin(Room):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Twin)

        __hash__ = object.__hash__

    ring, spans = full_ring()
    one, other = Twin(), Twin()
    assert ring.reserve(LINE, one) is None
    assert ring.reserve(LINE, other) is None
    ring.release(spans[0])
    assert wokens(one, other) == [1, 0]


def test_who_is_woken_may_come_at_once():
    """From inside of `wake`: the ring has let go of its lock by then."""
    ring, spans = full_ring()
    got: list[Span | None] = []
    eager = Room(lambda: got.append(ring.reserve(LINE, eager)))
    behind = Room(lambda: ring.withdraw(behind))
    assert ring.reserve(LINE, eager) is None
    assert ring.reserve(LINE, behind) is None
    done = threading.Thread(target=ring.read_until, args=(spans[1].stop,), daemon=True)
    done.start()
    done.join(30)
    assert not done.is_alive(), "the ring waits for itself"
    assert got == [Span(4 * LINE, 4 * LINE, 5 * LINE)]
    assert wokens(eager, behind) == [1, 1]


# ---- nobody waits for ever, whatever the order ----------------------------------------------------------------------


class RoomsAtARing(RuleBasedStateMachine):
    """Rooms ask, are woken, come or withdraw; spans are released in any order."""

    @initialize(lines=st.integers(1, 6))
    def begin(self, lines: int) -> None:
        self.lines = lines
        self.ring = RingThatIsRead(lines * LINE)
        self.rooms = [Room() for _ in range(4)]
        self.seen = [0] * 4  # how often each was woken when it last asked
        self.queue: list[tuple[int, int]] = []  # (room, lines), in the order of their coming
        self.unread: list[Span] = []

    def can_reserve(self, lines: int) -> bool:
        """By the ring's own count: `tests/unit/protocol/test_credits.py` checks that."""
        return self.ring.writing.can_reserve(lines * LINE)

    def ask(self, number: int, lines: int) -> None:
        is_first = not self.queue or self.queue[0][0] == number
        has_room = self.can_reserve(lines)
        self.seen[number] = self.rooms[number].woken
        span = self.ring.reserve(lines * LINE, self.rooms[number])
        assert (span is not None) is (is_first and has_room)
        waits = [waiter for waiter, _ in self.queue]
        if span is not None:
            self.unread.append(span)
            self.queue = [each for each in self.queue if each[0] != number]
        elif number in waits:
            self.queue[waits.index(number)] = (number, lines)
        else:
            self.queue.append((number, lines))

    @rule(number=st.integers(0, 3), lines=st.integers(1, 6))
    def ask_at_any_time(self, number: int, lines: int) -> None:
        self.ask(number, min(lines, self.lines))

    @precondition(lambda self: self.queue)
    @rule()
    def come_when_woken(self) -> None:
        number, lines = self.queue[0]
        if self.rooms[number].woken > self.seen[number]:
            self.ask(number, lines)

    @rule(number=st.integers(0, 3))
    def withdraw(self, number: int) -> None:
        self.ring.withdraw(self.rooms[number])
        self.queue = [each for each in self.queue if each[0] != number]

    @precondition(lambda self: self.unread)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.ring.release(self.unread.pop(data.draw(st.integers(0, len(self.unread) - 1))))

    @invariant()
    def the_first_was_woken_if_there_is_enough_for_it(self) -> None:
        if self.queue and self.can_reserve(self.queue[0][1]):
            number = self.queue[0][0]
            assert self.rooms[number].woken > self.seen[number], "nobody tells it that it may go on"

    def teardown(self) -> None:
        """With all spans released, everyone in the queue goes, one after the other."""
        while self.unread or self.queue:
            for span in self.unread:
                self.ring.release(span)
            self.unread = []
            if self.queue:
                number, lines = self.queue[0]
                assert self.rooms[number].woken > self.seen[number]
                self.ask(number, lines)
                assert (number, lines) not in self.queue
        assert self.ring.in_use == 0


TestRoomsAtARing = RoomsAtARing.TestCase


# ---- from several threads -------------------------------------------------------------------------------------------

PATIENCE_S = 60


@pytest.fixture
def threads_that_interrupt_each_other() -> Iterator[None]:
    """Wherever they can, so that what two do at a time shows."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


class Sleeper:
    """A room on a thread of its own, which sleeps until it is woken."""

    def __init__(self, ring: SharedRing) -> None:
        self._ring = ring
        self._woken = threading.Event()

    def wake(self) -> None:
        self._woken.set()

    def reserve(self, num_bytes: int) -> Span:
        while (span := self._ring.reserve(num_bytes, self)) is None:
            assert self._woken.wait(PATIENCE_S), "nobody woke it"
            self._woken.clear()
        return span


def run_all(*work: Callable[[], None]) -> None:
    """Runs each on a thread of its own; raises what the first of them that failed raised."""
    errors: list[BaseException] = []

    def guarded(each: Callable[[], None]) -> None:
        try:
            each()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(each,), daemon=True) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.usefixtures("threads_that_interrupt_each_other")
@pytest.mark.parametrize("seed", range(3))
def test_rooms_on_several_threads_never_have_the_same_memory(seed: int):
    ring, size = RingThatIsRead(8 * LINE), 8 * LINE
    memory = bytearray(size)

    def room(number: int) -> None:
        draw, sleeper = random.Random(f"{seed} {number}"), Sleeper(ring)
        for _ in range(2000):
            span = sleeper.reserve(draw.randint(1, size // 2))
            mine = slice(ring.place(span), ring.place(span) + span.num_bytes)
            assert not any(memory[mine]), "somebody else's memory is handed out"
            memory[mine] = bytes([number]) * span.num_bytes
            assert memory[mine] == bytes([number]) * span.num_bytes, "somebody else was given it as well"
            memory[mine] = bytes(span.num_bytes)
            ring.release(span)

    run_all(*[lambda number=number: room(number) for number in range(1, 5)])
    assert ring.in_use == 0
    assert not any(memory)


@pytest.mark.usefixtures("threads_that_interrupt_each_other")
def test_rooms_that_come_and_withdraw_on_several_threads_leave_nobody_behind():
    ring = RingThatIsRead(4 * LINE)

    def steady(number: int) -> None:
        draw, sleeper = random.Random(number), Sleeper(ring)
        for _ in range(2000):
            ring.release(sleeper.reserve(draw.randint(1, 4 * LINE)))

    def fickle(number: int) -> None:
        draw = random.Random(number)
        for _ in range(4000):
            room = Room()
            span = ring.reserve(draw.randint(1, 4 * LINE), room)
            if span is None:
                ring.withdraw(room)
            else:
                ring.release(span)

    run_all(*[lambda number=number: steady(number) for number in range(3)], lambda: fickle(7), lambda: fickle(8))
    assert ring.in_use == 0


@pytest.mark.usefixtures("threads_that_interrupt_each_other")
def test_rooms_on_several_threads_are_served_in_the_order_of_their_coming():
    ring, spans = full_ring()
    served: list[int] = []
    is_waiting = [threading.Event() for _ in range(6)]
    guard = threading.Lock()

    class Queued(Sleeper):
        def __init__(self, number: int) -> None:
            super().__init__(ring)
            self.number = number

        def run(self) -> None:
            if self.number:
                assert is_waiting[self.number - 1].wait(PATIENCE_S)
            assert ring.reserve(LINE * (1 + self.number % 3), self) is None
            is_waiting[self.number].set()
            assert self._woken.wait(PATIENCE_S)
            with guard:
                span = self.reserve(LINE * (1 + self.number % 3))
                served.append(self.number)
            ring.release(span)

    def reader() -> None:
        assert is_waiting[-1].wait(PATIENCE_S)
        for span in spans:
            ring.release(span)

    run_all(reader, *[Queued(number).run for number in range(6)])
    assert served == list(range(6))
    assert ring.in_use == 0
