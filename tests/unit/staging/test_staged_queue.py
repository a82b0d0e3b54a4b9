"""A room's staged writes to one receiver: what it keeps while it waits for memory, and what it gives back."""

from __future__ import annotations

from typing import Any, cast

from kvferry.layout import Device, Region
from kvferry.protocol.transfer.credits import Span
from kvferry.staging import StagingMemory
from kvferry.staging.gathering import Packing, PeerMemory, StagedQueue, StagedWrite
from kvferry.staging.rings import SharedRing
from kvferry.staging.slots import SourceMemory

CHUNK = 256


class Waiter:
    """Somebody else who wants memory."""

    def __init__(self) -> None:
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1


class OneChunk:
    """A write of one sub-chunk. What it is posted with is kept."""

    def __init__(self) -> None:
        self.next_bytes: int | None = CHUNK
        self.error: Exception | None = None
        self.posted: list[Span] = []
        self.command: Any = self
        self.sequence = 0

    @property
    def has_ended(self) -> bool:
        return self.next_bytes is None or self.error is not None

    def post(self, slot: object, memory: object, span: Span, *, ready_at: float | None) -> list[Span]:
        self.next_bytes = None
        self.posted.append(span)
        return self.posted


class Room:
    """A queue with one write, a ring of one sub-chunk that it goes to, and a worker's memory of one slot."""

    def __init__(self) -> None:
        self.ring = SharedRing(CHUNK)
        self.memory = SourceMemory(CHUNK, StagingMemory(Region(0, CHUNK), Device(), None), lambda: None)
        self.void: list[Span] = []
        self.turns = 0
        nothing: Any = None
        packing = Packing(
            receiver="d0",
            elected=(),
            packed=nothing,
            kernels=nothing,
            transport=nothing,
            peer=PeerMemory(0, 1, self.ring),
            chunk_bytes=CHUNK,
            writer=0,
            give_up=self.void.append,
            now=lambda: 0.0,
        )
        self.queue: StagedQueue[StagedWrite] = StagedQueue(packing, self._wake)
        self.write = OneChunk()
        self.queue.add(cast(Any, self.write))

    def _wake(self) -> None:
        self.turns += 1

    def post_next(self) -> object:
        return self.queue.post_next(self.memory)


def test_who_waits_for_a_receivers_memory_keeps_no_slot_that_others_could_use():
    room = Room()
    unread = room.ring.reserve(CHUNK, Waiter())
    assert unread is not None
    assert room.post_next() is None
    assert room.memory.take("d1", Waiter()) is not None


def test_who_waits_for_a_slot_keeps_its_turn_at_the_receivers_memory():
    room, behind = Room(), Waiter()
    slot = room.memory.take("d1", Waiter())
    assert slot is not None
    assert room.post_next() is None
    assert room.ring.reserve(CHUNK, behind) is None
    room.memory.give_back(slot)
    assert room.turns == 1
    assert room.post_next() is not None
    assert [span.num_bytes for span in room.write.posted] == [CHUNK]
    assert not behind.woken


def test_who_gives_up_while_it_waits_for_a_slot_says_that_its_span_is_void_and_lets_the_next_go():
    room, behind = Room(), Waiter()
    slot = room.memory.take("d1", Waiter())
    assert slot is not None
    assert room.post_next() is None
    assert room.memory.take("d2", behind) is None
    assert len(room.queue.cancel(OSError("the room failed"))) == 1
    assert [span.num_bytes for span in room.void] == [CHUNK]
    room.memory.give_back(slot)
    assert (room.turns, behind.woken) == (0, 1)


def test_who_gives_up_while_it_waits_for_a_receivers_memory_lets_the_next_go():
    room, behind = Room(), Waiter()
    unread = room.ring.reserve(CHUNK, Waiter())
    assert unread is not None
    assert room.post_next() is None
    assert room.ring.reserve(CHUNK, behind) is None
    assert len(room.queue.cancel(OSError("the room failed"))) == 1
    assert not room.void
    room.ring.read_until(unread.stop)
    assert (room.turns, behind.woken) == (0, 1)
