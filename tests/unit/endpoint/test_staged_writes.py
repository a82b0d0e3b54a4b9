"""A room's staged writes to one receiver: what it keeps while it waits for memory, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from kvferry.endpoint.prefill import room_actor
from kvferry.endpoint.prefill.paths import StagedPath
from kvferry.endpoint.prefill.staged_writes import PostNextPart, StagedPart, StagedWrites
from kvferry.errors import KVFerryError, TransferTimeoutError, TransportError
from kvferry.layout import Device, Region
from kvferry.protocol.transfer.events import Broke
from kvferry.protocol.transfer.states import TransferState
from kvferry.protocol.wire.messages import SpanReleased
from kvferry.staging import StagingMemory
from kvferry.staging.rings import PeerMemory, SharedRing, Span
from kvferry.staging.runs import Comings, Step
from kvferry.staging.slots import Slot, SourceMemory
from kvferry.transport import TransferHandle, TransferReport

CHUNK = 256
REPORT = TransferReport(CHUNK, 1, 0.0, 0.0)


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

        self.ends: list[Exception | None] = []

    @property
    def is_through(self) -> bool:
        return self.next_bytes is None or self.error is not None

    def prepare(self, slot: object, span: Span, memory: object, *, ready_at: float | None) -> object:
        self.next_bytes = None
        return SimpleNamespace(write=self, step=None, result=None, begun=lambda worker: self.posted.append(span))

    def end(self, error: Exception | None) -> None:
        self.ends.append(error)


class Room:
    """A line with one write, a ring of one sub-chunk that it goes to, and a worker's memory of one slot."""

    def __init__(self) -> None:
        self.ring = SharedRing(CHUNK)
        self.memory = SourceMemory(CHUNK, StagingMemory(Region(0, CHUNK), Device(), None), lambda: None)
        self.void: list[SpanReleased] = []
        self.turns: list[object] = []
        self.deferred: list[str] = []
        self.given_up: list[Exception] = []
        self.now = 0.0
        context = SimpleNamespace(
            now=lambda: self.now,
            settings=SimpleNamespace(write_timeout_s=10.0),
            write_failed=lambda attachment, error: self.given_up.append(error),
            send=lambda receiver, message: self.void.append(message),
            identity=SimpleNamespace(endpoint="p0"),
            observer=SimpleNamespace(deferred=self.deferred.append),
        )
        nothing: Any = None
        runs: Any = SimpleNamespace(steps_to=lambda receiver: 1, run=lambda steps, receiver, comings: len(steps))
        target: Any = SimpleNamespace(
            receiver="d0",
            context=context,
            room=SimpleNamespace(post=self.turns.append, apply=None),
            attachment=SimpleNamespace(moved_at=0.0, digests=None),
            staged=StagedPath(PeerMemory(0, 1, self.ring), nothing, runs, nothing, CHUNK),
        )
        self.line = StagedWrites(target)
        self.write = OneChunk()
        self.line.writes[0] = cast(Any, self.write)
        self.line.wake()
        self.turns.clear()

    def posts_next(self) -> bool:
        """Whether it posts, in a turn of the room, what it could not before."""
        before = len(self.write.posted)
        self.line.post_next(cast(Any, SimpleNamespace(memory=self.memory, comings=lambda due_at: Comings())))
        return len(self.write.posted) > before

    def cancel(self, error: KVFerryError | None = None) -> list[Exception | None]:
        self.line.cancel(error or KVFerryError("the room failed"), cast(Any, None))
        return self.write.ends


def test_who_waits_for_a_receivers_memory_keeps_no_slot_that_others_could_use():
    room = Room()
    unread = room.ring.reserve(CHUNK, Waiter())
    assert unread is not None
    assert not room.posts_next()
    assert room.memory.take("d1", Waiter()) is not None


def test_who_waits_for_a_slot_keeps_its_turn_at_the_receivers_memory():
    room, behind = Room(), Waiter()
    slot = room.memory.take("d1", Waiter())
    assert slot is not None
    assert not room.posts_next()
    assert room.ring.reserve(CHUNK, behind) is None
    room.memory.give_back(slot)
    assert len(room.turns) == 1
    assert room.posts_next()
    assert [span.num_bytes for span in room.write.posted] == [CHUNK]
    assert not behind.woken


def test_who_gives_up_while_it_waits_for_a_slot_says_that_its_span_is_void_and_lets_the_next_go():
    room, behind = Room(), Waiter()
    slot = room.memory.take("d1", Waiter())
    assert slot is not None
    assert not room.posts_next()
    assert room.memory.take("d2", behind) is None
    assert [str(error) for error in room.cancel()] == ["the room failed"]
    assert [span.stop - span.begin for span in room.void] == [CHUNK]
    room.memory.give_back(slot)
    assert (len(room.turns), behind.woken) == (0, 1)


def test_who_gives_up_while_it_waits_for_a_receivers_memory_lets_the_next_go():
    room, behind = Room(), Waiter()
    unread = room.ring.reserve(CHUNK, Waiter())
    assert unread is not None
    assert not room.posts_next()
    assert room.ring.reserve(CHUNK, behind) is None
    assert [str(error) for error in room.cancel()] == ["the room failed"]
    assert not room.void
    room.ring.read_until(unread.stop)
    assert (len(room.turns), behind.woken) == (0, 1)


def test_what_waits_is_said_once():
    room = Room()
    unread = room.ring.reserve(CHUNK, Waiter())
    assert unread is not None
    assert not room.posts_next()
    assert room.line.is_waiting
    assert not room.posts_next()
    assert room.deferred == ["d0"]
    room.ring.read_until(unread.stop)
    assert room.posts_next()
    assert not room.line.is_waiting


def test_a_span_that_was_kept_for_a_write_that_failed_meanwhile_is_given_up_with_the_room():
    room = Room()
    slot = room.memory.take("d1", Waiter())
    assert slot is not None
    assert not room.posts_next()
    room.write.error = OSError("an earlier part of it")
    assert not room.posts_next()
    room.cancel()
    room.cancel()
    assert [span.stop - span.begin for span in room.void] == [CHUNK]


SLOW = TransferTimeoutError("writes did not end")


def test_a_receiver_is_given_up_whose_ring_stayed_full_while_nothing_got_on_there():
    """What tells it of parts was lost: no credit comes, and nothing is posted that could meet the loss."""
    room = Room()
    assert room.ring.reserve(CHUNK, Waiter()) is not None
    assert not room.posts_next()
    room.now = 10.0
    room.cancel(SLOW)
    room.cancel(SLOW)
    assert room.given_up == [SLOW]


@pytest.mark.parametrize(("now", "error"), [(9.9, SLOW), (10.0, KVFerryError("aborted"))])
def test_a_receiver_is_kept_where_others_get_on_there_or_a_room_ends_for_another_reason(
    now: float, error: KVFerryError
):
    room = Room()
    assert room.ring.reserve(CHUNK, Waiter()) is not None
    assert not room.posts_next()
    room.now = now
    room.cancel(error)
    assert not room.given_up


def test_a_receiver_is_kept_where_it_is_a_slot_that_a_room_has_waited_for():
    room = Room()
    assert room.memory.take("d1", Waiter()) is not None
    assert not room.posts_next()
    room.now = 10.0
    room.cancel(SLOW)
    assert not room.given_up


class Chunks:
    """A write of several sub-chunks, each of which can be gathered."""

    submitted_at, sequence = 5.0, 0

    def __init__(self, count: int, target: Any) -> None:
        self.target, self.command, self.receiver = target, self, "d0"
        self.error: Exception | None = None
        self.in_flight = 0
        self.ends: list[Exception | None] = []
        self.on_prepare: Callable[[], None] = lambda: None
        self._left = count

    @property
    def left_bytes(self) -> int:
        return CHUNK * self._left

    @property
    def next_bytes(self) -> int | None:
        return CHUNK if self._left and self.error is None else None

    @property
    def is_through(self) -> bool:
        return self.next_bytes is None and self.in_flight == 0

    def prepare(self, slot: Slot, span: Span, memory: SourceMemory, *, ready_at: float | None) -> StagedPart:
        self.on_prepare()
        self._left -= 1
        self.in_flight += 1
        step = Step([], Region(slot.address, CHUNK), span.begin, b"")
        return StagedPart(cast(Any, self), step, slot, memory, span, cast(Any, None))

    def dropped(self, error: Exception | None) -> None:
        self.in_flight -= 1
        self.error = self.error or error

    def landed(self, part: StagedPart) -> None:
        self.dropped(part.result if isinstance(part.result, Exception) else None)

    def end(self, error: Exception | None) -> None:
        self.ends.append(error)


class Several:
    """A line with a write of four sub-chunks, memory for three on both sides, and runs of at most three."""

    def __init__(self, run: Callable[[Sequence[Step]], int], *, digests: object = None) -> None:
        self.runs: list[list[int]] = []
        self.ring = SharedRing(3 * CHUNK)
        memory = StagingMemory(Region(0, 12 * CHUNK), Device(), None)  # of which one receiver gets a quarter
        self.memory = SourceMemory(CHUNK, memory, lambda: None)
        self.void: list[SpanReleased] = []
        self.watched: list[StagedPart] = []
        self.events: list[object] = []
        self.applied: list[object] = []
        self.comings = Comings()
        self.turns_due_at: list[float] = []

        def go(steps: Sequence[Step], receiver: str, comings: object) -> int:
            self.runs.append([step.address // CHUNK for step in steps])
            return run(steps)

        context = SimpleNamespace(
            now=lambda: 0.0,
            send=lambda receiver, message: self.void.append(message),
            identity=SimpleNamespace(endpoint="p0"),
            observer=SimpleNamespace(deferred=lambda receiver: None),
        )
        runs, nothing = cast(Any, SimpleNamespace(steps_to=lambda receiver: 3, run=go)), cast(Any, None)
        self.target: Any = SimpleNamespace(
            receiver="d0",
            context=context,
            room=SimpleNamespace(post=self.events.append, apply=lambda event, worker: self.applied.append(event)),
            attachment=SimpleNamespace(moved_at=0.0, digests=digests),
            staged=StagedPath(PeerMemory(0, 1, self.ring), nothing, runs, nothing, CHUNK),
        )
        self.line = StagedWrites(cast(Any, self.target))
        self.write = Chunks(4, self.target)
        self.line.writes[0] = cast(Any, self.write)

    def watch(self, part: StagedPart) -> None:
        self.watched.append(part)

    def turn(self) -> None:
        def comings(due_at: float) -> Comings:
            self.turns_due_at.append(due_at)
            return self.comings

        worker = SimpleNamespace(memory=self.memory, comings=comings, watch=lambda part: self.watch(part))
        self.line.post_next(cast(Any, worker))

    def free_slots(self) -> int:
        """How many the receiver may have beside those that are kept for it."""
        return sum(self.memory.take_now("d0", 0.0) is not None for _ in range(4))

    def broken(self) -> list[BaseException]:
        """What the room was told of writes of which nobody knows whether they have ended."""
        return [event.error for event in self.events if isinstance(event, Broke)]


def posted(steps: Sequence[Step]) -> None:
    for step in steps:
        step.transfer = TransferHandle()


def all_posted(steps: Sequence[Step]) -> int:
    posted(steps)
    return len(steps)


def one_posted(steps: Sequence[Step]) -> int:
    posted(steps[:1])
    return 1


def test_a_turn_runs_all_for_which_there_is_memory_and_those_that_were_not_begun_come_first_in_the_next():
    def two(steps: Sequence[Step]) -> int:
        posted(steps[:2])
        return min(2, len(steps))

    line = Several(two)
    line.turn()
    line.turn()
    assert line.runs == [[0, 1, 2], [2]]
    assert len(line.watched) == 3
    assert line.write.in_flight == 3


def test_once_somebody_has_come_who_is_due_before_no_more_is_prepared():
    line = Several(all_posted)
    line.write.on_prepare = line.comings.come
    line.turn()
    assert line.runs == [[0]]
    line.comings = Comings()
    line.write.on_prepare = lambda: None
    line.turn()
    assert line.runs == [[0], [1, 2]]


def test_what_keeps_memory_and_was_not_begun_goes_before_everybody_who_may_wait_for_that():
    line = Several(one_posted)
    line.turn()
    assert line.line.turn_due_at == 0.0
    line.turn()
    line.turn()
    assert line.runs == [[0, 1, 2], [1, 2], [2]], "it prepares no more meanwhile"
    assert line.turns_due_at == [0.0, 0.0, 0.0]
    assert line.line.turn_due_at == 5.0 + CHUNK / 1e9, "what is left is due as any other"


def test_what_is_woken_in_its_own_turn_goes_first_all_the_same_with_what_was_not_begun():
    line = Several(one_posted)
    line.line.write(cast(Any, line.write))
    assert line.line.turn_due_at > 5.0
    line.write.on_prepare = line.line.wake
    line.turn()
    assert line.line.turn_due_at == 0.0


def test_what_was_digested_as_it_was_gathered_is_posted_before_the_next_is():
    line = Several(all_posted, digests=object())
    line.turn()
    line.turn()
    assert line.runs == [[0], [1]]


def test_a_room_that_is_given_up_gives_back_what_was_prepared_and_not_begun():
    line = Several(one_posted)
    line.turn()
    line.line.cancel(KVFerryError("aborted"), cast(Any, None))
    assert [span.begin // CHUNK for span in line.void] == [1, 2]
    assert line.free_slots() == 2
    assert (line.write.in_flight, line.write.ends) == (1, []), "one is on its way"


def test_what_is_behind_a_sub_chunk_that_cannot_be_gathered_is_dropped_and_the_write_has_ended():
    problem = OSError("the pool has gone")

    def fails(steps: Sequence[Step]) -> int:
        steps[0].error = problem
        return 1

    line = Several(fails)
    line.turn()
    assert [span.begin // CHUNK for span in line.void] == [0, 1, 2]
    assert line.free_slots() == 3
    assert line.write.ends == [problem]
    assert line.line.writes == {}


def test_of_a_write_that_has_failed_nothing_is_posted_that_was_prepared():
    line, problem = Several(one_posted), TransportError("the first has failed")
    line.turn()
    (first,) = line.watched
    first.settled(problem)
    line.line.landed(first, cast(Any, None))
    assert [span.begin // CHUNK for span in line.void] == [0, 1, 2]
    assert problem in line.write.ends
    assert line.line.writes == {}
    line.turn()
    assert line.runs == [[0, 1, 2]]


def test_where_a_run_raises_what_is_known_to_be_posted_is_watched_and_the_rest_keeps_its_memory():
    problem = RuntimeError("planted")

    def raises(steps: Sequence[Step]) -> int:
        posted(steps[:1])
        raise problem

    line = Several(raises)
    line.turn()
    assert [part.span.begin for part in line.watched] == [0]
    assert line.broken() == [problem, problem]
    line.line.cancel(KVFerryError("the room broke"), cast(Any, None))
    assert line.void == []
    assert line.free_slots() == 0
    assert line.write.ends == []


def test_where_watching_a_sub_chunk_raises_those_behind_it_are_watched_and_their_ends_are_heard_of():
    line, problem = Several(all_posted), RuntimeError("planted")

    def watch(part: StagedPart) -> None:
        line.watched.append(part)
        if len(line.watched) == 1:
            raise problem

    line.watch = watch  # type: ignore[method-assign]
    line.turn()
    assert len(line.watched) == 3
    assert line.broken() == [problem]
    for part in line.watched:
        part.done(REPORT)
    assert [event for event in line.events if event in line.watched] == line.watched


def test_where_the_end_of_a_sub_chunk_is_more_than_its_room_can_take_those_behind_it_are_watched():
    line, problem = Several(all_posted), RuntimeError("planted")

    def watch(part: StagedPart) -> None:
        line.watched.append(part)
        part.done(REPORT)

    def apply(event: object, worker: object) -> None:
        line.applied.append(event)
        if len(line.applied) == 1:
            raise problem

    line.watch = watch  # type: ignore[method-assign]
    line.target.room.apply = apply
    line.turn()
    assert len(line.watched) == 3
    assert line.broken() == [problem]
    assert (line.write.in_flight, len(line.applied)) == (0, 3)


def test_a_room_lines_up_for_the_receiver_that_is_due_first_though_another_turn_stands_before(
    monkeypatch: pytest.MonkeyPatch,
):
    lines = {"d0": SimpleNamespace(turn_due_at=5.0), "d1": SimpleNamespace(turn_due_at=0.0)}
    monkeypatch.setattr(
        room_actor,
        "ReceiverWrites",
        lambda target: Mock(staged=lines[target.receiver], direct=Mock(deferred_chunk=None)),
    )
    machine = Mock(room=7, state=TransferState.WAITING_FOR_INPUT, is_done=False, first_waiting=None, held_tokens=0)
    machine.handle.return_value = []
    workers, context = Mock(), Mock()
    context.now.return_value, context.identity.layout = 0.0, Mock(groups=(), shards=())
    room = room_actor.RoomActor(machine, workers, context, Mock())
    for receiver in lines:
        request = room_actor.OpenReceived(Mock(receiver=receiver), Mock(generation=1, receivers=2))
        room.handle(request, cast(Any, None))
    room.post(PostNextPart("d0"))
    workers.gathering.put.assert_called_once_with(room, 0.0)
