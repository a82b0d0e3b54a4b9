"""Staging memory of a worker: slots, of which no receiver gets so many that another has to wait for it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.layout import Device, Region
from kvferry.plan.packing import SEGMENT_ALIGNMENT
from kvferry.staging import StagingMemory
from kvferry.staging.slots import Slot, SourceMemory

SLOT = 1024


class Room:
    def __init__(self) -> None:
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1


def memory_at(address: int, num_slots: int, slot_bytes: int = SLOT) -> StagingMemory:
    return StagingMemory(Region(address, num_slots * slot_bytes), Device(), owner=None)


def nothing_more() -> StagingMemory | None:
    return None


def taken(memory: SourceMemory, receiver: str = "a") -> Slot:
    slot = memory.take(receiver, Room())
    assert slot is not None
    return slot


def wokens(*rooms: Room) -> list[int]:
    return [room.woken for room in rooms]


def test_who_is_due_first_has_the_next_slot_and_of_equals_who_came_first():
    memory = SourceMemory(SLOT, memory_at(0, 1), nothing_more)
    slot = taken(memory)
    rooms = {due_at: Room() for due_at in (3.0, 1.0, 2.0)}
    equal = Room()
    for due_at, room in rooms.items():
        assert memory.take("a", room, due_at) is None
    assert memory.take("a", equal, 2.0) is None
    for room, due_at in ((rooms[1.0], 1.0), (rooms[2.0], 2.0), (equal, 2.0), (rooms[3.0], 3.0)):
        memory.give_back(slot)
        assert wokens(*rooms.values(), equal).count(1) == 1
        assert room.woken == 1
        room.woken = 0
        found = memory.take("a", room, due_at)
        assert found is not None
        slot = found
    assert memory.num_waiting == 0


def test_who_was_woken_and_passed_by_is_woken_again():
    memory = SourceMemory(SLOT, memory_at(0, 1), nothing_more)
    slot = taken(memory)
    patient, urgent = Room(), Room()
    assert memory.take("a", patient, 2.0) is None
    memory.give_back(slot)
    assert patient.woken == 1
    taken_by_urgent = memory.take("b", urgent, 1.0)
    assert taken_by_urgent is not None
    assert memory.take("a", patient, 2.0) is None
    memory.give_back(taken_by_urgent)
    assert patient.woken == 2
    assert memory.take("a", patient, 2.0) is not None


def test_who_was_woken_and_is_due_later_by_now_leaves_its_turn_to_the_next():
    """Found by the simulation: a room had more to write when it asked again, and the slot lay idle."""
    memory = SourceMemory(SLOT, memory_at(0, 1), nothing_more)
    slot = taken(memory)
    first, second = Room(), Room()
    assert memory.take("a", first, 1.0) is None
    assert memory.take("a", second, 2.0) is None
    memory.give_back(slot)
    assert wokens(first, second) == [1, 0]
    assert memory.take("a", first, 3.0) is None
    assert wokens(first, second) == [1, 1]
    assert memory.take("a", second, 2.0) is not None


def test_slots_lie_side_by_side_and_the_last_given_back_is_taken_first():
    memory = SourceMemory(SLOT, memory_at(1 << 20, 8), nothing_more)
    first, second = taken(memory), taken(memory)
    assert [slot.address for slot in (first, second)] == [1 << 20, (1 << 20) + SLOT]
    memory.give_back(first)
    assert taken(memory) == first


@pytest.mark.parametrize("slot_bytes", [SLOT, SLOT - 1, SLOT + 1, 65, 63, 1])
@pytest.mark.parametrize("spare", [0, 1, 63, 5000])
def test_slots_begin_where_large_words_do_and_do_not_overlap(slot_bytes: int, spare: int):
    """A sub-chunk may be of any size: even one that the memory has room for only once."""
    num_bytes = slot_bytes + spare
    memory = SourceMemory(slot_bytes, StagingMemory(Region(4096, num_bytes), Device(), owner=None), nothing_more)
    slots: list[Slot] = []
    while (slot := memory.take(f"receiver {len(slots)}", Room())) is not None:
        slots.append(slot)
    assert slots
    addresses = sorted(slot.address for slot in slots)
    for address, following in zip(addresses, [*addresses[1:], 4096 + num_bytes], strict=True):
        assert address % SEGMENT_ALIGNMENT == 0
        assert address + slot_bytes <= following


def test_one_receiver_gets_a_quarter_of_the_slots_and_the_others_the_rest():
    memory = SourceMemory(SLOT, memory_at(0, 16), nothing_more)
    slots = [taken(memory, "a") for _ in range(4)]
    room = Room()
    assert memory.take("a", room) is None
    for receiver in "bcd":
        slots += [taken(memory, receiver) for _ in range(4)]
    assert len({slot.address for slot in slots}) == 16
    assert memory.take("e", Room()) is None
    memory.give_back(slots[-1])
    assert room.woken == 0, "that slot was another receiver's: this one still has all that it may have"
    memory.give_back(slots[0])
    assert room.woken == 1


def test_two_slots_are_for_one_receiver_however_few_there_are():
    """While one crosses, the next is gathered."""
    memory = SourceMemory(SLOT, memory_at(0, 2), nothing_more)
    assert {taken(memory).address, taken(memory).address} == {0, SLOT}


def test_more_memory_is_taken_when_there_is_none_left():
    more = [memory_at(1 << 30, 2)]
    memory = SourceMemory(SLOT, memory_at(0, 2), lambda: more.pop() if more else None)
    slots = [taken(memory, receiver) for receiver in "abcd"]
    assert sorted(slot.address for slot in slots) == [0, SLOT, 1 << 30, (1 << 30) + SLOT]
    assert memory.take("e", Room()) is None


def test_who_waits_for_a_receiver_that_has_its_share_holds_up_no_room_of_another():
    memory = SourceMemory(SLOT, memory_at(0, 8), nothing_more)
    mine = [taken(memory, "frozen") for _ in range(2)]
    rooms = [Room() for _ in range(3)]
    for room in rooms:
        assert memory.take("frozen", room) is None
    assert all(memory.take(f"alive {number}", Room()) is not None for number in range(6))
    memory.give_back(mine[0])
    assert wokens(*rooms) == [1, 0, 0]


def test_rooms_are_served_in_the_order_of_their_coming():
    memory = SourceMemory(SLOT, memory_at(0, 2), nothing_more)
    slots = [taken(memory, receiver) for receiver in "ab"]
    first, second, third = Room(), Room(), Room()
    assert memory.take("c", first) is None
    assert memory.take("d", second) is None
    memory.give_back(slots[0])
    assert wokens(first, second) == [1, 0]
    assert memory.take("e", third) is None, "the slot is the first's, which has not come yet"
    assert memory.take("c", first) is not None
    assert wokens(second, third) == [0, 0]
    memory.give_back(slots[1])
    assert wokens(second, third) == [1, 0]


def test_who_withdraws_lets_the_next_go():
    memory = SourceMemory(SLOT, memory_at(0, 1), nothing_more)
    slot = taken(memory)
    first, second = Room(), Room()
    assert memory.take("b", first) is None
    assert memory.take("c", second) is None
    memory.give_back(slot)
    memory.withdraw(first)
    memory.withdraw(first)
    assert wokens(first, second) == [1, 1]
    assert memory.take("c", second) is not None


class RoomsAtAMemory(RuleBasedStateMachine):
    """Rooms of three receivers, which come when they like or when they are woken."""

    @initialize(slots=st.integers(1, 12), more=st.integers(0, 2))
    def begin(self, slots: int, more: int) -> None:
        spare = [memory_at((2 + number) << 30, 2) for number in range(more)]
        self.memory = SourceMemory(SLOT, memory_at(1 << 30, slots), lambda: spare.pop() if spare else None)
        self.most = max(2, slots // 4)
        self.spare = spare
        self.free = slots
        self.rooms = [Room() for _ in range(6)]
        self.seen = [0] * 6
        self.queue: list[int] = []
        self.taken: list[Slot] = []

    @staticmethod
    def receiver(number: int) -> str:
        return "abc"[number % 3]

    def held(self, receiver: str) -> int:
        return sum(slot.receiver == receiver for slot in self.taken)

    def may_have_one(self, number: int) -> bool:
        return self.held(self.receiver(number)) < self.most

    def first_in_turn(self) -> int | None:
        return next((number for number in self.queue if self.may_have_one(number)), None) if self.free else None

    @rule(number=st.integers(0, 5))
    def take(self, number: int) -> None:
        has_slots = self.free > 0 or len(self.spare) > 0
        is_served = self.first_in_turn() in (None, number) and self.may_have_one(number) and has_slots
        if is_served and not self.free:
            self.free += 2  # more memory is taken
        self.seen[number] = self.rooms[number].woken
        slot = self.memory.take(self.receiver(number), self.rooms[number])
        assert (slot is not None) is is_served
        if slot is None:
            self.queue += [number] if number not in self.queue else []
            return
        assert slot.address not in {other.address for other in self.taken}
        assert slot.receiver == self.receiver(number)
        self.taken.append(slot)
        self.free -= 1
        self.queue = [other for other in self.queue if other != number]

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.memory.give_back(self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1))))
        self.free += 1

    @rule(number=st.integers(0, 5))
    def withdraw(self, number: int) -> None:
        self.memory.withdraw(self.rooms[number])
        self.queue = [other for other in self.queue if other != number]

    @invariant()
    def whose_turn_it_is_was_woken(self) -> None:
        number = self.first_in_turn()
        assert number is None or self.rooms[number].woken > self.seen[number], "nobody tells it that it may go on"


TestRoomsAtAMemory = RoomsAtAMemory.TestCase


def test_rooms_on_several_threads_never_have_the_same_slot_and_none_waits_for_ever():
    """A room that was woken may have been given up meanwhile, by a thread that does not run it."""
    memory = SourceMemory(SLOT, memory_at(0, 3), nothing_more)
    owners: dict[int, int] = {}
    errors: list[BaseException] = []

    class Sleeper:
        def __init__(self) -> None:
            self.woken = threading.Event()

        def wake(self) -> None:
            self.woken.set()

    def run(number: int) -> None:
        draw, sleeper = random.Random(number), Sleeper()
        for _ in range(300):
            slot = memory.take("ab"[number % 2], sleeper)
            while slot is None:
                if draw.random() < 0.1:
                    memory.withdraw(sleeper)
                else:
                    assert sleeper.woken.wait(60), "nobody woke it"
                    sleeper.woken.clear()
                slot = memory.take("ab"[number % 2], sleeper)
            assert owners.setdefault(slot.address, number) == number
            del owners[slot.address]
            memory.give_back(slot)

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=guarded, args=(lambda number=number: run(number),), daemon=True) for number in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert errors == []
    assert owners == {}
