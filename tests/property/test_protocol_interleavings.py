"""The protocol under every schedule that a seeded adversary finds.

Real sender and receiver machines are connected through a simulated medium that is as bad as the real one may be:
control messages keep their order between two ranks and nothing else does, notifications come late, in any order and
more than once, bytes land token by token, writes fail half done, peers die, callers abort, miscount, or never come. A
`World` is one schedule; its seed names it. After every step it checks what must always hold, and raises
`ViolationError`.

Some writes go through staging memory: real queues cut them into parts, real rings and slots hold these, tokens cross
from slot to ring one by one, and threads that take their time put them into pages. Credits come late, twice, or, over a
connection that is cut, never. All staging memory is modelled token by token.

The laws:
(a) once a receiver says that its pages are reusable, no byte in them changes on behalf of that room;
(b) a receiver that succeeded has every token behind its prefix from every elected writer, each once, and none before
    it, has heard of every write, and has the aux writer's aux data;
(c) a sender that says it is drained has no write in flight; one that succeeded has written all that it owes;
(d) under a fair scheduler, with time passing, every room ends on both sides and gives its pages back;
(e) a state changes only as the tables say;
(f) nothing raises;
(g) where nothing goes wrong and no time is lost, every room succeeds;
(h) no part of a ring is overwritten before it was read, and no slot while a write reads it;
(i) once everything has ended and nobody died or was cut off, all staging memory is free again;
(j) whoever waits for staging memory is woken when there is some, and one receiver that stands still holds up no write
    to another.

The last part plants faults, in the machines and in their shell, and demands that the adversary finds each.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvferry.errors import MessageError, PageError, PeerDisconnectedError, TransferFailedError, TransferTimeoutError
from kvferry.layout import Device, PageGroup, Region, TokenShare
from kvferry.plan import Demand, ElectedRoute, Route, Unit
from kvferry.plan.blocks import BlockShape
from kvferry.plan.lowering import PageSteps
from kvferry.plan.packing import PackedPiece, PackedSide, aligned
from kvferry.protocol.chunks import ChunkSequence
from kvferry.protocol.credits import ReadingRing, Span
from kvferry.protocol.deadlines import Deadlines
from kvferry.protocol.demands import WantedGroup, wanted_of
from kvferry.protocol.early import EarlyRooms
from kvferry.protocol.loads import places_of_units, unpack_units
from kvferry.protocol.messages import (
    AbortRoom,
    ChunkArrived,
    Credit,
    Drained,
    Message,
    OpenGroup,
    OpenRoom,
    RoomFailed,
    SpanVoid,
    StagedArrived,
    WriterFinished,
    decode_notification,
    decode_to_decode,
    decode_to_prefill,
    encode,
    pack_pages,
    unpack_pages,
)
from kvferry.protocol.moves import Move, ReceiverRequest
from kvferry.protocol.receiver import (
    Arrived,
    Connected,
    ConnectFailed,
    Finished,
    PartArrived,
    PartScattered,
    ReceiverAbortRequested,
    ReceiverBroke,
    ReceiverCommand,
    ReceiverMachine,
    ReceiverTick,
    Scatter,
    SendAbort,
    SenderDrained,
    SenderFailed,
    SenderLost,
    SendOpen,
)
from kvferry.protocol.sender import (
    ChunkSubmitted,
    FinishFailed,
    FinishSent,
    ReceiverAborted,
    ReceiverLost,
    ReceiverOpened,
    SendDrained,
    SenderAbortRequested,
    SenderBroke,
    SenderCommand,
    SenderMachine,
    SenderTick,
    SendFailed,
    SendFinish,
    Write,
    WriteDone,
    WriteFailed,
    WriteProgressed,
)
from kvferry.protocol.states import RECEIVER_TRANSITIONS, SENDER_TRANSITIONS, TransferState
from kvferry.staging import StagingMemory
from kvferry.staging.gathering import Packing, PeerMemory, Posted, StagedQueue, StagedWrite
from kvferry.staging.receiving import WriterRing
from kvferry.staging.rings import SharedRing
from kvferry.staging.slots import Slot, SourceMemory

DEADLINES = Deadlines(bootstrap_s=20.0, waiting_s=30.0, write_s=10.0)
POOL_PAGES = 12
PAGE_TOKENS = 2  # so that a prefix may end inside a page, and a chunk take two writes
GROUP = PageGroup(name="kv", page_tokens=PAGE_TOKENS, num_pages=1 << 16, has_slots=False, window_tokens=None)
ROUTE = Route(
    source_group="kv",
    destination_group="kv",
    source_page_tokens=PAGE_TOKENS,
    destination_page_tokens=PAGE_TOKENS,
    source_share=TokenShare(),
    destination_share=TokenShare(),
    granule_tokens=PAGE_TOKENS,
    has_slots=False,
)
TOKEN_BYTES = 32
PAGE_BYTES = PAGE_TOKENS * TOKEN_BYTES  # as much as large words ask for, so that a ring of few pages has no gaps
LONGEST_REQUEST = 5
STEPS = 160
PATIENCE = 3000
TROUBLES = (
    "abort",
    "write fails",
    "scatter fails",
    "finish fails",
    "send fails",
    "duplicate",
    "death",
    "cut",
    "miscount",
    "unreachable",
)


class ViolationError(AssertionError):
    """One of the laws was broken."""


def demand(holds: bool, law: str) -> None:
    if not holds:
        raise ViolationError(law)


@dataclass(slots=True)
class Shells:
    """What a careful shell does. Each may be turned off, to show that it matters."""

    checks_generation: bool = True
    answers_early_aborts: bool = True
    ticks_receivers: bool = True
    opens_before_it_aborts: bool = True
    fences_before_it_tells: bool = True
    gives_up_spans: bool = True
    gives_back_what_nobody_wants: bool = True
    keeps_slots_until_parts_land: bool = True
    cancels_what_has_failed: bool = True


@dataclass(frozen=True, slots=True)
class Classes:
    """What is put together. Each may be a faulty one."""

    sender: type[SenderMachine] = SenderMachine
    receiver: type[ReceiverMachine] = ReceiverMachine
    queue: type[StagedQueue] = StagedQueue
    write: type[StagedWrite] = StagedWrite
    shared_ring: type[SharedRing] = SharedRing
    source_memory: type[SourceMemory] = SourceMemory
    writer_ring: type[WriterRing] = WriterRing
    reading_ring: type[ReadingRing] = ReadingRing


@dataclass(slots=True)
class Flight:
    """A write on its way: tokens land one by one until none is left, or it breaks."""

    prefill: PrefillRank
    room: SendingRoom
    command: Write
    left: list[tuple[int, int]]  # (place at the source, place at the destination)


@dataclass(slots=True, eq=False)
class PartFlight:
    """A part of a staged write on its way.

    Attributes:
        left: (token's place in the slots, in the ring, and what it was when the part was posted).
        span: where it goes.
    """

    prefill: PrefillRank
    room: SendingRoom
    receiver: str
    left: list[tuple[int, int, int]]
    span: Span
    notification: bytes
    queue: StagedQueue | None = None
    write: StagedWrite | None = None
    posted: Posted | None = None


@dataclass(frozen=True, slots=True)
class PostNextPart:
    """It is a room's turn to post a part to a receiver."""

    receiver: str


@dataclass(frozen=True, slots=True)
class PartLanded:
    """A part is in the ring, or its write failed."""

    receiver: str
    sequence: int
    error: Exception | None


@dataclass(slots=True, eq=False)
class ScatterTask:
    """A part that is to be put into its pages, by a thread that takes its time."""

    room: ReceivingRoom
    message: StagedArrived
    has_begun: bool = False
    is_wanted: bool = True


@dataclass(slots=True, eq=False)
class RingMemory:
    """The ring that one prefill rank writes to on one decode rank: its memory, and what both say of it.

    Attributes:
        tokens: by place, the start of the span that was written there last, and the token.
        unread: places of which the reading side has not said that it is through with them, and their spans' starts.
    """

    writing: SharedRing
    reading: WriterRing
    tokens: dict[int, tuple[int, int]] = field(default_factory=dict)
    unread: dict[int, int] = field(default_factory=dict)
    old_credits: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class SendingRoom:
    machine: SenderMachine
    use: Use
    rank: int
    chunks: deque[tuple[list[int], bool]]
    sequence: ChunkSequence
    first_start: int
    in_flight: int = 0
    staged: dict[str, StagedQueue] = field(default_factory=dict)  # by receiver
    finish_generations: set[tuple[str, int]] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class ReceivingRoom:
    machine: ReceiverMachine
    use: Use
    generation: int
    pages: list[int]
    prefix: int  # in tokens
    is_reachable: bool  # whether the prefill engine is ever found
    asked: bool = False
    heard: set[tuple[int, int]] = field(default_factory=set)  # (writer, sequence) of every arrival
    written: set[tuple[int, int]] = field(default_factory=set)  # (writer, sequence) of every direct write to this room
    posted: set[tuple[int, int, int]] = field(default_factory=set)  # (writer, sequence, part) of all staged ones
    scattered: set[tuple[int, int, int]] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Use:
    """One request under some room number, as both sides' callers see it."""

    room: int
    number: int
    total: int  # pages of the request
    writers: dict[str, frozenset[int]]  # by decode rank
    prefix: dict[str, int]  # in tokens, by decode rank
    is_sent: bool  # whether the prefill side's callers ever come
    is_hasty: bool  # whether callers take the number while its last use has ended but is not forgotten
    aux: bytes
    sent: dict[int, int] = field(default_factory=dict)  # pages of the request, as each prefill rank counts them
    received_by: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class PrefillRank:
    number: int
    early: EarlyRooms
    rooms: dict[int, SendingRoom] = field(default_factory=dict)
    events: list[tuple[SendingRoom, Any]] = field(default_factory=list)  # from its own workers, in any order
    slots: list[SourceMemory] = field(default_factory=list)  # of every worker
    tokens: dict[int, int] = field(default_factory=dict)  # in these slots, by place
    is_dead: bool = False


@dataclass(slots=True, eq=False)
class DecodeRank:
    name: str
    free: list[int]
    rooms: dict[int, ReceivingRoom] = field(default_factory=dict)
    owner: dict[int, ReceivingRoom] = field(default_factory=dict)  # of a page
    landed: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # (place, writer) -> sources
    notifications: list[bytes] = field(default_factory=list)
    old_notifications: list[bytes] = field(default_factory=list)
    arriving: ScatterTask | None = None  # while its room is told of it
    scattering: list[ScatterTask] = field(default_factory=list)
    is_dead: bool = False


class World:
    """One schedule."""

    def __init__(
        self,
        seed: int,
        *,
        classes: Classes | None = None,
        shells: Shells | None = None,
        troubles: tuple[str, ...] | None = None,
    ) -> None:
        """Args:
        classes, shells: what is put together; all as it should be, unless a fault is planted.
        troubles: what goes wrong; None lets the seed choose.
        """
        self.random = random.Random(seed)
        self.shells = shells or Shells()
        self.classes = classes or Classes()
        self.sender_class = watched(self.classes.sender, SENDER_TRANSITIONS)
        self.receiver_class = watched(self.classes.receiver, RECEIVER_TRANSITIONS)
        self.now = 0.0
        self.is_ending = self.is_frozen = False
        self.log: list[str] = []
        self.outcomes: Counter[str] = Counter()
        draw = self.random
        # Every schedule has its own temper, so that each kind of trouble also comes alone.
        kinds = draw.sample(TROUBLES, draw.choice([0, 1, 1, 2, 3])) if troubles is None else troubles
        self.trouble = {kind: draw.choice([0.02, 0.1, 0.3]) for kind in kinds}
        self.pace = draw.choice([0.0, 0.0, 0.5, 4.0])  # seconds that pass at once, at most
        prefill = draw.randint(1, 3)
        decode = draw.randint(1, 3)
        self.prefill = [PrefillRank(number, EarlyRooms(limit=3, keep_s=20.0)) for number in range(prefill)]
        self.decode = {
            f"d{number}": DecodeRank(f"d{number}", draw.sample(range(POOL_PAGES), POOL_PAGES))
            for number in range(decode)
        }
        self.to_prefill: dict[tuple[str, int], deque[bytes]] = {}
        self.to_decode: dict[tuple[int, str], deque[bytes]] = {}
        self.flights: list[Flight | PartFlight] = []
        self.cut: set[tuple[int, str]] = set()  # pairs whose connection is gone
        self.fenced: set[tuple[int, str]] = set()  # pairs between which no byte can move any more
        self.unnoticed: set[tuple[str, int, str]] = set()  # (who will notice, prefill rank, decode rank)
        self.staged = draw.choice([0.0, 0.5, 1.0])  # how many writes go through staging memory
        self.chunk_bytes = PAGE_BYTES * draw.choice([1, 1, 2])
        for rank in self.prefill:
            rank.slots = [self._slots(worker) for worker in range(draw.randint(1, 2))]
        self.rings = {(rank.number, name): self._ring(rank, name) for rank in self.prefill for name in self.decode}
        self.frozen = draw.choice([*self.decode, *[None] * 3]) if decode > 1 and self.staged else None
        self.freezes_after = draw.randrange(STEPS // 2)
        self.aux_writer = draw.randrange(prefill)
        self.uses = [
            [self._use(room, number) for number in range(draw.randint(1, 2))] for room in range(draw.randint(1, 2))
        ]
        everyone = [use for uses in self.uses for use in uses]
        self.is_calm = (
            self.pace == 0.0
            and set(self.trouble) <= {"duplicate"}
            and all(use.is_sent and not use.is_hasty for use in everyone)
        )

    def _slots(self, worker: int) -> SourceMemory:
        region = Region((1 + worker) << 20, self.chunk_bytes * self.random.randint(1, 3))
        return self.classes.source_memory(self.chunk_bytes, StagingMemory(region, Device(), None), lambda: None)

    def _ring(self, rank: PrefillRank, name: str) -> RingMemory:
        num_bytes = self.chunk_bytes + PAGE_BYTES * self.random.randint(0, 2)
        memory = StagingMemory(Region(0, num_bytes), Device(), None)
        no_plan: Any = None  # what is packed how is known here
        send = partial(self._send_credit, rank, name)
        reading = self.classes.writer_ring(memory, no_plan, epoch=1 + len(name), endpoint=name, send=send)
        reading._reading = self.classes.reading_ring(num_bytes)
        return RingMemory(self.classes.shared_ring(num_bytes), reading)

    def _use(self, room: int, number: int) -> Use:
        draw = self.random
        total = draw.choice([0, 1, 3, draw.randint(0, LONGEST_REQUEST)])
        ranks = range(len(self.prefill))
        writers: dict[str, frozenset[int]] = {}
        for name in self.decode:
            # Writers are elected by room, so they are the same for every use of a number.
            chosen = random.Random(f"{room} {name} {len(ranks)}").choices([True, True, False], k=len(ranks))
            writers[name] = frozenset(rank for rank, writes in zip(ranks, chosen, strict=True) if writes)
        tokens = total * PAGE_TOKENS
        same = draw.randint(0, tokens)
        prefix = {name: same if draw.random() < 0.5 else draw.randint(0, tokens) for name in self.decode}
        return Use(
            room,
            number,
            total,
            writers,
            prefix,
            is_sent=draw.random() < 0.9,
            is_hasty=draw.random() < 0.2,
            aux=draw.randbytes(2),
        )

    def happens(self, kind: str) -> bool:
        return not self.is_ending and self.random.random() < self.trouble.get(kind, 0.0)

    # ---- the scheduler -------------------------------------------------------------------------------------------

    def run(self) -> None:
        for step in range(STEPS):
            self.is_frozen = self.frozen is not None and step >= self.freezes_after
            self._step(self._opportunities() + self._troubles())
        if self.is_frozen:
            self._go_on_without_the_frozen()
        self.is_frozen, self.is_ending = False, True
        for _ in range(PATIENCE):
            opportunities = self._opportunities()
            if not opportunities and not self._jump():
                break
            self._step(opportunities)
        self._check_end()

    def _go_on_without_the_frozen(self) -> None:
        """As far as it goes without it, and in no time."""
        for _ in range(PATIENCE):
            opportunities = self._opportunities()
            if not opportunities:
                break
            self.random.choice(opportunities)()
            self._check_waiting()
        for prefill in self._living_prefill():
            for room in prefill.rooms.values():
                held_up = [name for name, queue in room.staged.items() if queue._posted and name != self.frozen]
                demand(not held_up, f"(j) {self.frozen} holds up {held_up} in room {room.use.room}")

    def _step(self, opportunities: list[Callable[[], None]]) -> None:
        if self.random.random() < (0.02 if self.is_ending else 0.15):
            self.now += self.random.random() * self.pace
        if opportunities:
            self.random.choice(opportunities)()
        self._tick()
        self._check_waiting()

    def _jump(self) -> bool:
        """To the next deadline; False if there is none."""
        deadlines = [room.machine.deadline for rank in self._living_prefill() for room in rank.rooms.values()]
        deadlines += [self.now + 20.0 for rank in self._living_prefill() if len(rank.early)]
        if self.shells.ticks_receivers:
            deadlines += [room.machine.deadline for rank in self._living_decode() for room in rank.rooms.values()]
        due = [deadline for deadline in deadlines if deadline is not None]
        if due:
            self.now = max(self.now, min(due))
        return bool(due)

    def _living_prefill(self) -> list[PrefillRank]:
        return [rank for rank in self.prefill if not rank.is_dead]

    def _living_decode(self) -> list[DecodeRank]:
        return [rank for rank in self.decode.values() if not rank.is_dead]

    def _opportunities(self) -> list[Callable[[], None]]:
        """All that may happen next if nothing goes wrong."""
        can: list[Callable[[], None]] = []
        for uses in self.uses:
            can += self._openings(uses)
        for prefill in self._living_prefill():
            for sending in prefill.rooms.values():
                if sending.chunks and not sending.machine.state.is_final:
                    can.append(partial(self._submit, prefill, sending))
                if sending.machine.is_done:
                    can.append(partial(self._forget, prefill, sending))
            can += [partial(self._own_event, prefill, index) for index in range(len(prefill.events))]
        frozen = self.frozen if self.is_frozen else None
        for decode in self._living_decode():
            if decode.name == frozen:
                continue
            can += [
                partial(self._connect, decode, receiving)
                for receiving in decode.rooms.values()
                if receiving.is_reachable and not receiving.asked and not receiving.machine.state.is_final
            ]
            can += [partial(self._notify, decode, index) for index in range(len(decode.notifications))]
            can += [partial(self._go_on_scattering, decode, task) for task in decode.scattering]
        can += [partial(self._at_prefill, *pair) for pair, queue in self.to_prefill.items() if queue]
        can += [
            partial(self._at_decode, *pair) for pair, queue in self.to_decode.items() if queue and pair[1] != frozen
        ]
        can += [partial(self._fly, flight) for flight in self.flights]
        can += [partial(self._notice, *unnoticed) for unnoticed in sorted(self.unnoticed)]
        return can

    def _openings(self, uses: list[Use]) -> list[Callable[[], None]]:
        """Callers take a number again once its last use has ended everywhere."""
        for use in uses:
            sending = [rank.rooms[use.room] for rank in self._living_prefill() if use.room in rank.rooms]
            receiving = [rank.rooms[use.room] for rank in self._living_decode() if use.room in rank.rooms]
            if any(room.use.number < use.number for room in sending) and not use.is_hasty:
                return []
            waiting = [rank for rank in self._living_prefill() if use.is_sent and rank.number not in use.sent]
            asking = [rank for rank in self._living_decode() if rank.name not in use.received_by]
            if waiting or asking:
                can: list[Callable[[], None]] = [
                    partial(self._open_sender, rank, use) for rank in waiting if use.room not in rank.rooms
                ]
                return can + [
                    partial(self._open_receiver, rank, use)
                    for rank in asking
                    if len(rank.free) >= use.total - use.prefix[rank.name] // PAGE_TOKENS + 1
                ]
            is_received = all(room.use is not use for room in receiving)
            is_sent = all(room.use is not use or room.machine.state.is_final for room in sending)
            if not (is_received and is_sent):
                return []
        return []

    def _troubles(self) -> list[Callable[[], None]]:
        can: list[Callable[[], None]] = []
        if self.happens("abort"):
            sender_events = [SenderAbortRequested("the client went away"), SenderBroke(ZeroDivisionError())]
            receiver_events = [ReceiverAbortRequested("the client went away"), ReceiverBroke(ZeroDivisionError())]
            can += [
                partial(self._tell_sender, prefill, sending, self.random.choice(sender_events))
                for prefill in self._living_prefill()
                for sending in prefill.rooms.values()
            ]
            can += [
                partial(self._tell_receiver, decode, receiving, self.random.choice(receiver_events))
                for decode in self._living_decode()
                for receiving in decode.rooms.values()
            ]
        if self.happens("death") and self.random.random() < 0.2:
            can += [partial(self._kill_prefill, rank) for rank in self._living_prefill()]
            can += [partial(self._kill_decode, rank) for rank in self._living_decode()]
        if self.happens("cut") and self.random.random() < 0.2:
            can += [partial(self._cut, rank.number, name) for rank in self.prefill for name in self.decode]
        if self.happens("duplicate"):
            can += [
                partial(self._notified, decode, old)
                for decode in self._living_decode()
                for old in [*decode.old_notifications[-3:], *decode.old_notifications[:1]]
            ]
            can += [
                partial(self._part_arrived, decode, task.message)
                for decode in self._living_decode()
                for task in decode.scattering
            ]
            can += [
                partial(ring.writing.read_until, position)
                for ring in self.rings.values()
                for position in ring.old_credits[-2:]
            ]
        return can

    def _tick(self) -> None:
        for prefill in self._living_prefill():
            for sending in list(prefill.rooms.values()):
                if sending.machine.deadline is not None and self.now >= sending.machine.deadline:
                    self._tell_sender(prefill, sending, SenderTick())
            for name, message in list(prefill.early.expired(self.now)):
                self._refuse(prefill, name, message, "nobody opened it")
        if self.shells.ticks_receivers:
            for decode in self._living_decode():
                for receiving in list(decode.rooms.values()):
                    if receiving.machine.deadline is not None and self.now >= receiving.machine.deadline:
                        self._tell_receiver(decode, receiving, ReceiverTick())

    # ---- the prefill side's shell --------------------------------------------------------------------------------

    def _open_sender(self, rank: PrefillRank, use: Use) -> None:
        draw = self.random
        start = draw.randint(0, min(use.prefix.values()) // PAGE_TOKENS)
        stop = use.total
        if self.happens("miscount"):
            start, stop = draw.randint(0, use.total), use.total + draw.choice([-1, 0, 1])
        start = max(0, min(start, stop))
        use.sent[rank.number] = max(start, stop)
        left = [source_page(rank.number, use, position) for position in range(start, max(start, stop))]
        chunks: deque[tuple[list[int], bool]] = deque()
        while left or draw.random() < 0.2:
            size = draw.randint(0, len(left))
            chunks.append((left[:size], False))
            left = left[size:]
        chunks.append((chunks.pop()[0], True) if chunks and draw.random() < 0.5 else ([], True))
        room = SendingRoom(
            machine=self.sender_class(use.room, rank=rank.number, deadlines=DEADLINES, now=self.now),
            use=use,
            rank=rank.number,
            chunks=chunks,
            sequence=ChunkSequence(use.room, [GROUP]),
            first_start=start,
        )
        rank.rooms[use.room] = room
        self.log.append(f"p{rank.number} opens {use.room}.{use.number}")
        for name, message in rank.early.take(use.room):
            self._deliver(rank, room, name, message)

    def _submit(self, rank: PrefillRank, room: SendingRoom) -> None:
        pages, is_last = room.chunks.popleft()
        start = room.first_start if room.sequence._next_number == 0 else None
        aux = room.use.aux if is_last else None
        chunk = room.sequence.hand_in(pages, start=start, is_last=is_last, aux=aux, now=self.now).chunk()
        self._tell_sender(rank, room, ChunkSubmitted(chunk))

    def _forget(self, rank: PrefillRank, room: SendingRoom) -> None:
        self._ended("sender", room.machine)
        del rank.rooms[room.use.room]

    def _own_event(self, rank: PrefillRank, index: int) -> None:
        room, event = rank.events.pop(index)
        self._tell_sender(rank, room, event)

    def _tell_sender(self, rank: PrefillRank, room: SendingRoom, event: Any) -> None:
        match event:
            case PostNextPart(name):
                self._post_next_part(rank, room, name)
            case PartLanded():
                self._part_landed(rank, room, event)
            case _:
                self._tell_machine(rank, room, event)
        if room.machine.state is TransferState.FAILED and self.shells.cancels_what_has_failed:
            for queue in room.staged.values():
                for write in queue.cancel(room.machine.error or TransferFailedError("it has failed")):
                    self._maybe_end(rank, room, write)

    def _tell_machine(self, rank: PrefillRank, room: SendingRoom, event: Any) -> None:
        self.log.append(f"p{rank.number} {room.use.room}.{room.use.number} {room.machine.state.name}: {event}")
        for command in room.machine.handle(event, self.now):
            self._do_for_sender(rank, room, command)
        machine = room.machine
        demand(not machine.is_drained or room.in_flight == 0, "(c) a drained sender has a write in flight")
        demand((machine.error is not None) == (machine.state is TransferState.FAILED), "(e) an error and no failure")
        if machine.state is TransferState.SUCCESS:
            self._check_sent(rank, room)

    def _do_for_sender(self, rank: PrefillRank, room: SendingRoom, command: SenderCommand) -> None:
        self.log.append(f"    {command}")
        match command:
            case Write(receiver=name):
                if (rank.number, name) in self.fenced:
                    rank.events.append((room, WriteFailed(name, command.sequence, OSError("disconnected"))))
                    return
                if self.random.random() < self.staged:
                    self._write_staged(rank, room, command)
                    return
                room.in_flight += 1
                target = self.decode[name].rooms.get(room.use.room)
                if target is not None and target.generation == command.generation:
                    target.written.add((rank.number, command.sequence))
                left = [pair for move in command.moves for pair in places_of(command.unit, move)]
                self.random.shuffle(left)
                self.flights.append(Flight(rank, room, command, left))
            case SendFinish(name, generation, chunks, aux):
                if (rank.number, name) in self.cut or self.happens("finish fails"):
                    rank.events.append((room, FinishFailed(name, OSError("disconnected"))))
                    return
                demand((name, generation) not in room.finish_generations, "a receiver is told twice")
                room.finish_generations.add((name, generation))
                where = {"room": room.use.room, "generation": generation, "writer": rank.number}
                self._notification(name, WriterFinished(chunks=chunks, aux=aux, **where))
                rank.events.append((room, FinishSent(name)))
            case SendFailed(name, generation, error):
                self._control(
                    rank,
                    name,
                    RoomFailed(
                        room=room.use.room,
                        generation=generation,
                        writer=rank.number,
                        error=type(error).__name__,
                        reason=str(error),
                    ),
                )
            case SendDrained(name, generation):
                self._control(
                    rank, name, Drained(endpoint="p", room=room.use.room, generation=generation, writer=rank.number)
                )

    def _write_staged(self, rank: PrefillRank, room: SendingRoom, command: Write) -> None:
        name = command.receiver
        if name not in room.staged:
            room.staged[name] = self._staged_queue(rank, room, name)
        queue = room.staged[name]
        queue.add(self.classes.write(room.use.room, command, queue.packing))
        rank.events.append((room, PostNextPart(name)))

    def _staged_queue(self, rank: PrefillRank, room: SendingRoom, name: str) -> StagedQueue:
        ring = self.rings[rank.number, name]
        copier: Any = Copier(rank)
        wire: Any = Wire(self, rank, room)
        packing = Packing(
            receiver=name,
            elected=(ElectedRoute(ROUTE, (0,)),),
            packed=packed_pieces,
            kernels=copier,
            transport=wire,
            peer=PeerMemory(0, ring.reading.epoch, ring.writing),
            chunk_bytes=self.chunk_bytes,
            writer=rank.number,
            give_up=partial(self._give_up, rank, name),
            now=lambda: 0.0,
        )
        return self.classes.queue(packing, lambda: rank.events.append((room, PostNextPart(name))))

    def _give_up(self, rank: PrefillRank, name: str, span: Span) -> None:
        if self.shells.gives_up_spans:
            epoch = self.rings[rank.number, name].reading.epoch
            where = {"start": span.start, "begin": span.begin, "stop": span.stop}
            self._control(rank, name, SpanVoid(endpoint=f"p{rank.number}", epoch=epoch, **where))

    def _post_next_part(self, rank: PrefillRank, room: SendingRoom, name: str) -> None:
        """On whichever worker has time."""
        queue = room.staged[name]
        found = queue.post_next(self.random.choice(rank.slots)) if not room.machine.state.is_final else None
        if found is None:
            return
        write, posted = found
        if posted is None:
            self._maybe_end(rank, room, write)
        else:
            flight: Any = posted.flight
            flight.queue, flight.write, flight.posted = queue, write, posted
            if not self.shells.keeps_slots_until_parts_land:
                posted.memory.give_back(posted.slot)
        if queue.has_more:
            rank.events.append((room, PostNextPart(name)))

    def _part_landed(self, rank: PrefillRank, room: SendingRoom, event: PartLanded) -> None:
        write = room.staged[event.receiver].landed(event.sequence, event.error)
        if event.error is None:
            self._tell_machine(rank, room, WriteProgressed(event.receiver, event.sequence))
        self._maybe_end(rank, room, write)

    def _maybe_end(self, rank: PrefillRank, room: SendingRoom, write: StagedWrite) -> None:
        name, sequence = write.command.receiver, write.command.sequence
        if not write.has_ended:
            return
        room.staged[name].ended(write)
        error = write.error
        self._tell_machine(
            rank, room, WriteDone(name, sequence) if error is None else WriteFailed(name, sequence, error)
        )

    def _control(self, rank: PrefillRank, name: str, message: Message) -> None:
        if (rank.number, name) not in self.cut:
            self.to_decode.setdefault((rank.number, name), deque()).append(encode(message))

    def _at_prefill(self, name: str, number: int) -> None:
        rank = self.prefill[number]
        message = decode_to_prefill(self.to_prefill[name, number].popleft())
        self.log.append(f"p{number} hears {message} from {name}")
        if isinstance(message, Credit):
            ring = self.rings[number, name]
            ring.old_credits.append(message.position)
            ring.writing.read_until(message.position)
            return
        assert isinstance(message, (OpenRoom, AbortRoom))
        room = rank.rooms.get(message.room)
        if room is not None:
            self._deliver(rank, room, name, message)
        elif isinstance(message, AbortRoom):
            rank.early.keep(name, message, self.now)
            if self.shells.answers_early_aborts:
                self._control(
                    rank, name, Drained(endpoint="p", room=message.room, generation=message.generation, writer=number)
                )
        elif not rank.early.keep(name, message, self.now):
            self._refuse(rank, name, message, "too many rooms")

    def _refuse(self, rank: PrefillRank, name: str, message: OpenRoom, reason: str) -> None:
        where = {"room": message.room, "generation": message.generation, "writer": rank.number}
        self._control(rank, name, RoomFailed(error="TransferFailedError", reason=reason, **where))
        self._control(rank, name, Drained(endpoint="p", **where))

    def _deliver(self, rank: PrefillRank, room: SendingRoom, name: str, message: OpenRoom | AbortRoom) -> None:
        if isinstance(message, AbortRoom):
            self._tell_sender(rank, room, ReceiverAborted(name, message.generation, message.reason))
            return
        (group,) = message.groups
        demand_ = Demand(group.held, group.start, group.stop)
        request = ReceiverRequest(
            tokens=message.tokens,
            wanted={"kv": WantedGroup(demand_, group.first_page, unpack_pages(group.pages))},
            routes=(ROUTE,) if rank.number in room.use.writers[name] else (),
        )
        opened = ReceiverOpened(
            receiver=name,
            generation=message.generation,
            expected_receivers=message.receivers,
            request=request,
            sends_aux=rank.number == self.aux_writer,
        )
        self._tell_sender(rank, room, opened)

    # ---- the decode side's shell ---------------------------------------------------------------------------------

    def _open_receiver(self, rank: DecodeRank, use: Use) -> None:
        use.received_by.add(rank.name)
        prefix = use.prefix[rank.name]
        wanted = use.total - prefix // PAGE_TOKENS if prefix < use.total * PAGE_TOKENS else 0
        if self.happens("miscount"):
            wanted += self.random.choice([-1, 1]) if wanted else 1
        pages = [rank.free.pop() for _ in range(wanted)]
        room = ReceivingRoom(
            machine=self.receiver_class(use.room, rank=int(rank.name[1:]), deadlines=DEADLINES, now=self.now),
            use=use,
            generation=self.random.getrandbits(63),
            pages=pages,
            prefix=prefix,
            is_reachable=not self.happens("unreachable"),
        )
        rank.rooms[use.room] = room
        for page in pages:
            rank.owner[page] = room
        self.log.append(f"{rank.name} opens {use.room}.{use.number} with {pages} behind {prefix}")

    def _connect(self, rank: DecodeRank, room: ReceivingRoom) -> None:
        room.asked = True
        known = [pair for pair in self.cut if pair[1] == rank.name and (rank.name, *pair) not in self.unnoticed]
        if known or self.happens("send fails"):
            self._tell_receiver(rank, room, ConnectFailed(OSError("no such peer")))
            return
        connected = Connected(
            ranks=frozenset(range(len(self.prefill))),
            writers=room.use.writers[rank.name],
            into_pages=room.use.writers[rank.name],
            aux_writer=self.aux_writer,
        )
        self._tell_receiver(rank, room, connected)

    def _tell_receiver(self, rank: DecodeRank, room: ReceivingRoom, event: Any) -> None:
        if rank.rooms.get(room.use.room) is not room:
            return  # over and done with
        machine = room.machine
        was = machine.state
        self.log.append(f"{rank.name} {room.use.room}.{room.use.number} {was.name}: {event}")
        unsent: list[int] = []
        for command in machine.handle(event, self.now):
            self._do_for_receiver(rank, room, command, unsent)
        if machine.state is TransferState.SUCCESS and was is not TransferState.SUCCESS:
            self._check_received(rank, room)
        demand((machine.error is not None) == (machine.state is TransferState.FAILED), "(e) an error and no failure")
        if machine.are_pages_reusable:
            self._release(rank, room)
        for number in unsent:
            self._tell_receiver(rank, room, SenderLost(number, OSError("too much waits already")))

    def _do_for_receiver(
        self, rank: DecodeRank, room: ReceivingRoom, command: ReceiverCommand, unsent: list[int]
    ) -> None:
        self.log.append(f"    {command}")
        use = room.use
        message: OpenRoom | AbortRoom
        match command:
            case Scatter():
                assert rank.arriving is not None
                rank.scattering.append(rank.arriving)
                rank.arriving = None
                return
            case SendOpen(number):
                message = OpenRoom(
                    room=use.room,
                    generation=room.generation,
                    attempt=1,
                    serial=1,
                    receivers=len(use.prefix),
                    tokens=None,
                    groups=(asked_for(room),),
                )
                if self.happens("send fails"):
                    if self.shells.opens_before_it_aborts:
                        unsent.append(number)
                    else:
                        self._tell_receiver(rank, room, SenderLost(number, OSError("too much waits already")))
                    return
            case SendAbort(number, reason):
                message = AbortRoom(room=use.room, generation=room.generation, reason=reason)
        if (number, rank.name) not in self.cut:
            self.to_prefill.setdefault((rank.name, number), deque()).append(encode(message))

    def _release(self, rank: DecodeRank, room: ReceivingRoom) -> None:
        """Pages go back to the pool and soon to another room."""
        self._ended("receiver", room.machine)
        self.log.append(f"{rank.name} releases {room.pages}")
        del rank.rooms[room.use.room]
        for page in room.pages:
            del rank.owner[page]
            for place in places_in(page):
                for writer in range(len(self.prefill)):
                    rank.landed.pop((place, writer), None)
        rank.free += room.pages

    def _at_decode(self, number: int, name: str) -> None:
        rank = self.decode[name]
        message = decode_to_decode(self.to_decode[number, name].popleft())
        if isinstance(message, SpanVoid):
            self._span_void(rank, number, message)
            return
        assert isinstance(message, (RoomFailed, Drained))
        room = self._room_of(rank, message)
        if room is None:
            return
        if isinstance(message, Drained):
            self._tell_receiver(rank, room, SenderDrained(message.writer))
        else:
            self._tell_receiver(rank, room, SenderFailed(message.writer, message.error, message.reason))

    def _notify(self, rank: DecodeRank, index: int) -> None:
        data = rank.notifications.pop(index)
        rank.old_notifications.append(data)
        self._notified(rank, data)

    def _notified(self, rank: DecodeRank, data: bytes) -> None:
        message = decode_notification(data)
        if isinstance(message, StagedArrived):
            self._part_arrived(rank, message)
            return
        room = self._room_of(rank, message)
        if room is None:
            return
        if isinstance(message, ChunkArrived):
            if message.generation == room.generation:
                room.heard.add((message.writer, message.sequence))
            self._tell_receiver(rank, room, Arrived(message.writer, message.sequence))
        else:
            self._tell_receiver(rank, room, Finished(message.writer, message.chunks, message.aux))

    def _room_of(
        self, rank: DecodeRank, message: RoomFailed | Drained | ChunkArrived | StagedArrived | WriterFinished
    ) -> ReceivingRoom | None:
        room = rank.rooms.get(message.room)
        if room is None or (self.shells.checks_generation and room.generation != message.generation):
            return None
        return room

    def _notification(self, name: str, message: Message) -> None:
        self.decode[name].notifications.append(encode(message))

    # ---- staging memory on the decode side ------------------------------------------------------------------------

    def _part_arrived(self, rank: DecodeRank, message: StagedArrived) -> None:
        ring = self.rings[message.writer, rank.name]
        self.log.append(f"{rank.name} hears {message}")
        if not ring.reading.take(span_of(message)):
            return
        room = self._room_of(rank, message)
        if room is not None:
            task = rank.arriving = ScatterTask(room, message)
            event = PartArrived(message.writer, message.sequence, message.part, message.is_last)
            self._tell_receiver(rank, room, event)
            if task in rank.scattering:
                return
            rank.arriving = None
        if self.shells.gives_back_what_nobody_wants:
            self._give_back(ring, span_of(message))

    def _go_on_scattering(self, rank: DecodeRank, task: ScatterTask) -> None:
        """A thread begins, or has come to the end."""
        if not task.has_begun:
            task.has_begun, task.is_wanted = True, not task.room.machine.state.is_final
            return
        rank.scattering.remove(task)
        message, error = task.message, None
        if task.is_wanted:
            try:
                self._scatter(rank, task)
            except (MessageError, OSError) as problem:
                error = problem
        self._give_back(self.rings[message.writer, rank.name], span_of(message))
        event = PartScattered(message.writer, message.sequence, message.part, error)
        self._tell_receiver(rank, task.room, event)

    def _scatter(self, rank: DecodeRank, task: ScatterTask) -> None:
        room, message = task.room, task.message
        ring, span = self.rings[message.writer, rank.name], span_of(message)
        (piece,) = packed_pieces(message.unit)
        address = ring.reading.address(span)
        offset = 0
        for segment in message.segments:
            numbers = unpack_units(segment.units, most=len(room.pages) * PAGE_TOKENS)
            wanted = wanted_of(asked_for(room))
            units, pages = places_of_units(numbers, ROUTE, wanted, TokenShare(), unit=message.unit, tokens=None)
            starts = piece.destination.starts(segment.first_base, segment.stop_base, units, pages)
            offset = aligned(offset)
            places = tokens_at(starts, piece.destination.shape)
            for index, place in enumerate(places):
                start, source = ring.tokens[(address + offset) // TOKEN_BYTES + index]
                demand(start == span.start, f"(h) {span} of {rank.name}'s ring was overwritten before it was read")
                if self.happens("scatter fails"):
                    raise OSError("an illegal memory access")
                self._put(rank, room.generation, message.writer, source, place)
            offset += len(places) * TOKEN_BYTES
        demand(offset == span.num_bytes, f"(b) {span} holds {offset} bytes")
        room.scattered.add((message.writer, message.sequence, message.part))

    def _span_void(self, rank: DecodeRank, number: int, message: SpanVoid) -> None:
        self.log.append(f"{rank.name} hears {message}")
        ring = self.rings[number, rank.name]
        if ring.reading.take(span_of(message)):
            self._give_back(ring, span_of(message))

    def _give_back(self, ring: RingMemory, span: Span) -> None:
        ring.unread = {place: start for place, start in ring.unread.items() if start != span.start}
        ring.reading.give_back(span)

    def _send_credit(self, rank: PrefillRank, name: str, data: bytes) -> None:
        if (rank.number, name) in self.cut:
            raise PeerDisconnectedError("no connection")
        self.to_prefill.setdefault((name, rank.number), deque()).append(data)

    # ---- the medium ----------------------------------------------------------------------------------------------

    def _fly(self, flight: Flight | PartFlight) -> None:
        """A token lands, or the write ends."""
        if isinstance(flight, PartFlight):
            self._fly_to_the_ring(flight)
            return
        command, rank = flight.command, flight.prefill
        pair = (rank.number, command.receiver)
        if pair in self.fenced or self.happens("write fails"):
            event: Any = WriteFailed(command.receiver, command.sequence, OSError("remote access error"))
        elif flight.left:
            self._land(flight, *flight.left.pop())
            return
        else:
            event = WriteDone(command.receiver, command.sequence)
            arrived = ChunkArrived(
                room=flight.room.use.room,
                generation=command.generation,
                writer=rank.number,
                sequence=command.sequence,
            )
            self._notification(command.receiver, arrived)
        self.flights.remove(flight)
        flight.room.in_flight -= 1
        if not rank.is_dead:
            rank.events.append((flight.room, event))

    def _land(self, flight: Flight, source: int, place: int) -> None:
        """A dead rank's last writes land as well as any."""
        rank, command = self.decode[flight.command.receiver], flight.command
        if not rank.is_dead:
            self._put(rank, command.generation, flight.prefill.number, source, place)

    def _put(self, rank: DecodeRank, generation: int, writer: int, source: int, place: int) -> None:
        page = place // PAGE_TOKENS
        self.log.append(f"{rank.name} page {page} of generation {generation} changes")
        owner = rank.owner.get(page)
        demand(
            owner is not None and owner.generation == generation,
            f"(a) {rank.name}'s page {page} changes for a room that was told it is released",
        )
        rank.landed.setdefault((place, writer), []).append(source)

    def _fly_to_the_ring(self, flight: PartFlight) -> None:
        """As `_fly`, from a slot to the receiver's ring."""
        rank, name = flight.prefill, flight.receiver
        queue, write, posted = flight.queue, flight.write, flight.posted
        assert queue is not None
        assert write is not None
        assert posted is not None
        error: Exception | None = None
        if (rank.number, name) in self.fenced or self.happens("write fails"):
            error = OSError("remote access error")
        elif flight.left:
            self._land_in_the_ring(flight, *flight.left.pop())
            return
        else:
            self.decode[name].notifications.append(flight.notification)
        self.flights.remove(flight)
        flight.room.in_flight -= 1
        if rank.is_dead:
            return
        if self.shells.keeps_slots_until_parts_land:
            posted.memory.give_back(posted.slot)
        if error is not None:
            queue.packing.give_up(posted.span)
        rank.events.append((flight.room, PartLanded(name, write.command.sequence, error)))

    def _land_in_the_ring(self, flight: PartFlight, slot: int, place: int, source: int) -> None:
        ring, start = self.rings[flight.prefill.number, flight.receiver], flight.span.start
        demand(flight.prefill.tokens[slot] == source, "(h) a slot is filled again while a write still reads it")
        demand(ring.unread.get(place, start) == start, f"(h) place {place} of a ring is overwritten, and was not read")
        ring.tokens[place] = start, source
        ring.unread[place] = start

    def _kill_prefill(self, rank: PrefillRank) -> None:
        self.log.append(f"p{rank.number} dies")
        rank.is_dead = True
        rank.rooms.clear()
        rank.events.clear()
        for name in self.decode:
            self._cut(rank.number, name)

    def _kill_decode(self, rank: DecodeRank) -> None:
        self.log.append(f"{rank.name} dies")
        rank.is_dead = True
        rank.rooms.clear()
        rank.notifications.clear()
        rank.scattering.clear()
        for prefill in self.prefill:
            self._cut(prefill.number, rank.name)
            self.fenced.add((prefill.number, rank.name))

    def _cut(self, number: int, name: str) -> None:
        """Nothing crosses any more between two ranks, except bytes; both will notice, each in its time."""
        if (number, name) in self.cut:
            return
        self.log.append(f"p{number} and {name} are cut")
        self.cut.add((number, name))
        self.to_prefill.pop((name, number), None)
        self.to_decode.pop((number, name), None)
        self.unnoticed |= {(f"p{number}", number, name), (name, number, name)}

    def _notice(self, who: str, number: int, name: str) -> None:
        self.unnoticed.discard((who, number, name))
        gone = OSError("no heartbeat")
        if who != name:
            prefill = self.prefill[number]
            if not prefill.is_dead:
                prefill.early.forget(name)
                for sending in list(prefill.rooms.values()):
                    self._tell_sender(prefill, sending, ReceiverLost(name, gone))
            return
        decode = self.decode[name]
        if decode.is_dead:
            return
        for receiving in list(decode.rooms.values()):
            if receiving.asked:
                self._tell_receiver(decode, receiving, SenderLost(number, gone))
        # The fence: the connection is torn down, so that no write can come over it, and only then are rooms told.
        if self.shells.fences_before_it_tells:
            self.fenced.add((number, name))
        for receiving in list(decode.rooms.values()):
            if number in receiving.machine.undrained:
                self._tell_receiver(decode, receiving, SenderDrained(number))

    # ---- the laws ------------------------------------------------------------------------------------------------

    def _check_received(self, rank: DecodeRank, room: ReceivingRoom) -> None:
        use = room.use
        for number in use.writers[rank.name]:  # who writes nothing does not count
            stop = max(room.prefix, (room.prefix // PAGE_TOKENS + len(room.pages)) * PAGE_TOKENS if room.pages else 0)
            sent, expected_pages = use.sent[number], -(-stop // PAGE_TOKENS)
            is_right = sent == expected_pages if room.pages else sent <= expected_pages
            demand(is_right, "(b) success in spite of miscounted pages")
        for writer in range(len(self.prefill)):
            for position, place in enumerate(
                (place for page in room.pages for place in places_in(page)), room.prefix // PAGE_TOKENS * PAGE_TOKENS
            ):
                expected = []
                if writer in use.writers[rank.name] and position >= room.prefix:
                    order, within = divmod(position, PAGE_TOKENS)
                    expected = [places_in(source_page(writer, use, order))[within]]
                found = rank.landed.get((place, writer), [])
                demand(found == expected, f"(b) place {place} has {found} of rank {writer}, not {expected}")
        demand(room.heard == room.written, f"(b) {room.written} was written, but {room.heard} has arrived")
        demand(room.scattered == room.posted, f"(b) {room.posted} was posted, but {room.scattered} is in its pages")
        demand(room.machine.aux == use.aux, f"(b) aux is {room.machine.aux!r}, not {use.aux!r}")

    def _check_sent(self, rank: PrefillRank, room: SendingRoom) -> None:
        told = {name for name, _ in room.finish_generations}
        owed = {
            name
            for name, writers in room.use.writers.items()
            if rank.number in writers or rank.number == self.aux_writer
        }
        demand(told == owed, f"(c) success, but {owed} are owed and {told} told")
        demand(not room.chunks, "(c) success before the last chunk")
        demand(room.in_flight == 0, "(c) success with a write in flight")
        demand(not any(queue._posted for queue in room.staged.values()), "(c) success with parts to be posted")

    def _check_waiting(self) -> None:
        """Whoever has something to post is about to, or waits where there is nothing for it."""
        for rank in self._living_prefill():
            about_to = {(id(room), event.receiver) for room, event in rank.events if isinstance(event, PostNextPart)}
            for room in rank.rooms.values():
                for name, queue in room.staged.items():
                    if queue.has_more and not room.machine.state.is_final and (id(room), name) not in about_to:
                        demand(self._waits_in_vain(rank, name, queue), f"(j) nobody wakes {name} in {room.use.room}")

    def _waits_in_vain(self, rank: PrefillRank, name: str, queue: StagedQueue) -> bool:
        ring = self.rings[rank.number, name].writing
        if queue in ring._waiting:
            return ring._next_to_wake() is not queue
        return any(queue in slots._waiting and slots._next_to_wake() is not queue for slots in rank.slots)

    def _check_staging_memory(self) -> None:
        for rank in self._living_prefill():
            for slots in rank.slots:
                demand(not slots._taken and not slots._waiting, f"(i) slots of p{rank.number} are lost")
        for (number, name), ring in self.rings.items():
            if not (self.prefill[number].is_dead or self.decode[name].is_dead or (number, name) in self.cut):
                in_use = ring.writing.in_use
                demand(in_use == 0, f"(i) {in_use} bytes of {name}'s ring for p{number} are lost")
                demand(ring.reading.is_idle and not ring.writing._waiting, f"(i) {name}'s ring is still waited for")

    def _ended(self, side: str, machine: SenderMachine | ReceiverMachine) -> None:
        ending = "timed out" if isinstance(machine.error, TransferTimeoutError) else machine.state.value
        self.outcomes[f"{side}: {ending}"] += 1
        demand(not self.is_calm or machine.error is None, f"(g) a room failed for no reason: {machine.error}")

    def _check_end(self) -> None:
        for prefill in self._living_prefill():
            for sending in prefill.rooms.values():
                demand(sending.machine.state.is_final, f"(d) p{prefill.number}'s room {sending.use.room} never ends")
                demand(sending.machine.is_done, f"(d) p{prefill.number}'s room {sending.use.room} is never done")
            demand(not prefill.rooms, "(d) the schedule was too short")
            demand(not prefill.events, "(d) the schedule was too short")
            demand(len(prefill.early) == 0, "(d) early rooms are kept for ever")
        for decode in self._living_decode():
            for receiving in decode.rooms.values():
                demand(receiving.machine.state.is_final, f"(d) {decode.name}'s room {receiving.use.room} never ends")
                demand(receiving.machine.are_pages_reusable, f"(d) {decode.name} never gets its pages back")
            demand(len(decode.free) == POOL_PAGES, "(d) pages are lost")
        demand(not self.flights, "(d) the schedule was too short")
        demand(not any(rank.scattering for rank in self._living_decode()), "(d) the schedule was too short")
        self._check_staging_memory()


class Copier:
    """Gathers tokens into the slots of a prefill rank."""

    def __init__(self, rank: PrefillRank) -> None:
        self._rank = rank

    def gather(self, starts: Any, shape: BlockShape, address: int) -> None:
        for index, source in enumerate(tokens_at(starts, shape)):
            self._rank.tokens[address // TOKEN_BYTES + index] = source


class Wire:
    """Writes slots of a prefill rank to rings, for one room."""

    def __init__(self, world: World, rank: PrefillRank, room: SendingRoom) -> None:
        self._world, self._rank, self._room = world, rank, room

    def write(self, region: Region, name: str, address: int, notification: bytes) -> PartFlight:
        world, rank = self._world, self._rank
        if (rank.number, name) in world.fenced or world.happens("write fails"):
            raise OSError("remote access error")
        message = decode_notification(notification)
        assert isinstance(message, StagedArrived)
        target = world.decode[name].rooms.get(message.room)
        if target is not None and target.generation == message.generation:
            target.posted.add((rank.number, message.sequence, message.part))
        slot, place = region.address // TOKEN_BYTES, address // TOKEN_BYTES
        left = [(slot + i, place + i, rank.tokens[slot + i]) for i in range(region.length // TOKEN_BYTES)]
        world.random.shuffle(left)
        flight = PartFlight(rank, self._room, name, left, span_of(message), notification)
        world.flights.append(flight)
        self._room.in_flight += 1
        return flight


def packed_pieces(unit: Unit) -> tuple[PackedPiece, ...]:
    """The only piece: whole pages, or single tokens, which lie one after the other."""
    tokens = PAGE_TOKENS if unit is Unit.GRANULE else 1
    shape = BlockShape((), tokens * TOKEN_BYTES)
    steps = PageSteps(PAGE_TOKENS // tokens, shape.length, PAGE_BYTES)
    side = PackedSide(np.zeros(1, np.int64), shape, steps, GROUP.num_pages)
    return (PackedPiece(side, side, num_bases=1, block_bytes=shape.length, block_runs=1),)


def tokens_at(starts: Any, shape: BlockShape) -> list[int]:
    """The places of all tokens of blocks."""
    return [
        start // TOKEN_BYTES + token for start in starts.tolist() for token in range(shape.num_bytes // TOKEN_BYTES)
    ]


def span_of(message: StagedArrived | SpanVoid) -> Span:
    return Span(message.start, message.begin, message.stop)


def asked_for(room: ReceivingRoom) -> OpenGroup:
    first = room.prefix // PAGE_TOKENS
    return OpenGroup(
        "kv",
        held=room.prefix,
        start=room.prefix,
        stop=max(room.prefix, (first + len(room.pages)) * PAGE_TOKENS) if room.pages else room.prefix,
        first_page=first,
        pages=pack_pages(np.array(room.pages, np.int64)),
    )


def source_page(rank: int, use: Use, position: int) -> int:
    """The page on a prefill rank that holds a position of a request: another one everywhere."""
    return ((rank * 8 + use.room) * 8 + use.number) * 16 + position


def places_in(page: int) -> range:
    """Where the tokens of a page lie."""
    return range(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)


def places_of(unit: Unit, move: Move) -> list[tuple[int, int]]:
    """The tokens that a move writes: from where to where."""
    tokens = PAGE_TOKENS if unit is Unit.GRANULE else 1
    return [
        (source, destination)
        for from_page, from_unit, to_page, to_unit in zip(
            move.source_pages.tolist(),
            move.source_units.tolist(),
            move.destination_pages.tolist(),
            move.destination_units.tolist(),
            strict=True,
        )
        for source, destination in zip(
            places_in(from_page)[from_unit * tokens :][:tokens],
            places_in(to_page)[to_unit * tokens :][:tokens],
            strict=True,
        )
    ]


def watched(base: Any, table: Any) -> Any:
    """The same machine, but every change of its state is held against the table."""

    class Watched(base):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "state" and hasattr(self, "state"):
                demand(value in table[self.state].values(), f"(e) {self.state} -> {value} is not in the table")
            super().__setattr__(name, value)

    return Watched


def explore(seeds: Iterable[int], **world: Any) -> Counter[str]:
    """Runs schedules and returns how their rooms ended."""
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        schedule = World(seed, **world)
        try:
            schedule.run()
        except Exception as error:
            story = "\n".join(schedule.log[-60:])
            error.args = (f"seed {seed}: {error}\n{story}",)
            raise
        outcomes += schedule.outcomes
    return outcomes


BLOCKS = 5
SCHEDULES = 500


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_schedule_breaks_a_law(block: int):
    outcomes = explore(range(block * SCHEDULES, (block + 1) * SCHEDULES))
    for ending in (
        "sender: success",
        "sender: failed",
        "sender: timed out",
        "receiver: success",
        "receiver: failed",
        "receiver: timed out",
    ):
        assert outcomes[ending] > SCHEDULES / 50, f"these schedules do not cover enough: {outcomes}"


def test_a_seed_names_its_schedule():
    one, other = World(11), World(11)
    one.run()
    other.run()
    assert one.log == other.log


# ---- planted faults: the adversary must find each ------------------------------------------------------------------


class ReleasesOnAbort(ReceiverMachine):
    """Gives pages back as soon as the room failed, whatever is still in flight."""

    @property
    def are_pages_reusable(self) -> bool:
        return self.state.is_final


class ReleasesWhenOneIsDrained(ReceiverMachine):
    """Takes one rank's word for all."""

    @property
    def are_pages_reusable(self) -> bool:
        quiet = [writer.is_drained or writer.finished_chunks is not None for writer in self._expected.values()]
        return self.state.is_final and (any(quiet) or not quiet)


class Tally(set[int]):
    """Counts every arrival, also a repeated one."""

    count = 0

    def add(self, element: int) -> None:
        super().add(element)
        self.count += 1

    def __contains__(self, element: object) -> bool:
        return False

    def __len__(self) -> int:
        return self.count


class CountsDuplicates(ReceiverMachine):
    def handle(self, event: Any, now: float) -> list[ReceiverCommand]:
        commands = super().handle(event, now)
        for writer in self._expected.values():
            if not isinstance(writer.arrived, Tally):
                writer.arrived = Tally()
        return commands


class BelievesTheFirstWriter(ReceiverMachine):
    """Succeeds when one writer is complete."""

    def _maybe_succeed(self, rank: int, writer: Any) -> list[ReceiverCommand]:
        self._expected = {rank: writer} if writer.is_complete else self._expected
        return super()._maybe_succeed(rank, writer)


class AbortsInSilence(ReceiverMachine):
    """Fails without asking anyone to stop."""

    def _fail(self, error: Any) -> list[ReceiverCommand]:
        super()._fail(error)
        return []


class DrainsTooEarly(SenderMachine):
    """Says drained while writes are in flight."""

    def _tell_drained(self) -> list[SenderCommand]:
        flying = {name: receiver.writes_in_flight for name, receiver in self._receivers.items()}
        for receiver in self._receivers.values():
            receiver.writes_in_flight = {}
        commands = super()._tell_drained()
        for name, receiver in self._receivers.items():
            receiver.writes_in_flight = flying[name]
        return commands


class NeverDrains(SenderMachine):
    def _tell_drained(self) -> list[SenderCommand]:
        return []


class FinishesTooEarly(SenderMachine):
    """Tells receivers that all is done while writes are in flight."""

    is_looking_away = False

    @property
    def is_drained(self) -> bool:
        return self.is_looking_away or super().is_drained

    def _maybe_finish(self) -> list[SenderCommand]:
        self.is_looking_away = True
        commands = super()._maybe_finish()
        self.is_looking_away = False
        return commands


class ForgetsFlights(SenderMachine):
    """Believes to be drained once one write has ended."""

    def handle(self, event: Any, now: float) -> list[SenderCommand]:
        if isinstance(event, WriteDone):
            self._receivers[event.receiver].writes_in_flight.clear()
        return super().handle(event, now)


class WritesBackwards(SenderMachine):
    """Pairs source and destination pages wrongly."""

    def _send_chunk(self, chunk: Any, now: float) -> list[SenderCommand]:
        return [
            replace(
                command,
                moves=tuple(replace(move, destination_pages=move.destination_pages[::-1]) for move in command.moves),
            )
            if isinstance(command, Write)
            else command
            for command in super()._send_chunk(chunk, now)
        ]


class WritesOverThePrefix(SenderMachine):
    """Widens a write to whole pages although the receiver holds the front of the first."""

    def _receiver_opened(self, event: ReceiverOpened, now: float) -> list[SenderCommand]:
        kv = event.request.wanted["kv"]
        kv = replace(kv, demand=replace(kv.demand, held=0))
        return super()._receiver_opened(replace(event, request=replace(event.request, wanted={"kv": kv})), now)


class ForgetsTheTokens(SenderMachine):
    """Writes whole pages and leaves out what does not fill one."""

    def _send_chunk(self, chunk: Any, now: float) -> list[SenderCommand]:
        commands = super()._send_chunk(chunk, now)
        kept = [each for each in commands if not (isinstance(each, Write) and each.unit is Unit.TOKEN)]
        for command in commands:
            if isinstance(command, Write) and command.unit is Unit.TOKEN:
                self._receivers[command.receiver].writes_in_flight.pop(command.sequence)
                self._receivers[command.receiver].chunks_sent -= 1
        return kept + (self._maybe_finish() if len(kept) < len(commands) else [])


class CountsChunksInsteadOfWrites(SenderMachine):
    """Says how many chunks it sent where one took two writes."""

    def _maybe_finish(self) -> list[SenderCommand]:
        return [
            replace(command, chunks=min(command.chunks, self._last_chunk.number + 1))
            if isinstance(command, SendFinish) and self._last_chunk is not None
            else command
            for command in super()._maybe_finish()
        ]


class WritesTwice(SenderMachine):
    """Posts a write twice."""

    def _send_chunk(self, chunk: Any, now: float) -> list[SenderCommand]:
        commands = super()._send_chunk(chunk, now)
        again = [command for command in commands if isinstance(command, Write)][:1]
        return again + commands


class LeavesGhosts(SenderMachine):
    """Counts writes to some receivers and then drops them for the miscount of another: a bug that this code had."""

    def _send_chunk(self, chunk: Any, now: float) -> list[SenderCommand]:
        commands = super()._send_chunk(chunk, now)
        if isinstance(self.error, PageError):
            for earlier in list(self._receivers.values())[:-1]:
                earlier.writes_in_flight[-1] = 0.0
        return commands


class MovesFreely(SenderMachine):
    """Leaves a final state."""

    def _fail(self, error: Any) -> list[SenderCommand]:
        if self.state is TransferState.SUCCESS:
            self.state = TransferState.FAILED
            self.error = error
        return super()._fail(error)


class HasNoDeadline(SenderMachine):
    @property
    def deadline(self) -> float | None:
        return None


class RaisesForStrangers(SenderMachine):
    """Raises for a stranger's abort."""

    def _receiver_aborted(self, event: ReceiverAborted) -> list[SenderCommand]:
        assert self._receivers[event.receiver].opened.generation == event.generation
        return super()._receiver_aborted(event)


class ForgetsTheScattering(ReceiverMachine):
    """Gives pages back while a thread still puts bytes into them."""

    @property
    def are_pages_reusable(self) -> bool:
        return self.state.is_final and not self.undrained


class CompletesWithTheLastPart(ReceiverMachine):
    """Takes a chunk for complete when all its parts have arrived, though some are not in their pages."""

    def _part_arrived(self, event: PartArrived, now: float) -> list[ReceiverCommand]:
        commands = super()._part_arrived(event, now)
        writer = self._expected.get(event.writer)
        parts = writer.partial.get(event.sequence) if writer is not None else None
        if writer is not None and parts is not None and parts.count == len(parts.arrived):
            commands += self._arrived(event.writer, event.sequence, now)
        return commands


class CompletesWithAnyPart(ReceiverMachine):
    """Counts a part that was scattered for all of its chunk."""

    def _part_scattered(self, event: PartScattered, now: float) -> list[ReceiverCommand]:
        if not self.state.is_final:
            self._expected[event.writer].partial[event.sequence].count = 1
        return super()._part_scattered(event, now)


class CountsPartsTwice(ReceiverMachine):
    def _part_scattered(self, event: PartScattered, now: float) -> list[ReceiverCommand]:
        if not self.state.is_final:
            self._expected[event.writer].partial[event.sequence].scattered += 1
        return super()._part_scattered(event, now)


class IgnoresWhatCouldNotBeScattered(ReceiverMachine):
    def _part_scattered(self, event: PartScattered, now: float) -> list[ReceiverCommand]:
        return super()._part_scattered(replace(event, error=None), now)


class ReadsOutOfOrder(ReadingRing):
    """Says that all was read up to the last span that was."""

    def release(self, span: Span) -> None:
        self.position = max(self.position, span.stop)


class ReadsOnlyInOrder(ReadingRing):
    """Forgets spans that are read before their turn."""

    def release(self, span: Span) -> None:
        if span.start == self.position:
            self.position = span.stop


class ReadsTwiceAtATime(WriterRing):
    """Takes a span again that a thread still reads: a fault that this code had."""

    def take(self, span: Span) -> bool:
        if span.start in self._being_read and self._reading.can_hold(span):
            return True
        return super().take(span)


class CreditsInAdvance(WriterRing):
    """Says that a span was read once it has come."""

    def take(self, span: Span) -> bool:
        is_taken = super().take(span)
        if is_taken:
            super().give_back(span)
        return is_taken

    def give_back(self, span: Span) -> None:
        pass


class WakesNobody(SharedRing):
    """Forgets who waits behind the first."""

    def reserve(self, num_bytes: int, waiter: Any) -> Span | None:
        span = super().reserve(num_bytes, waiter)
        if span is None and waiter is not next(iter(self._waiting)):
            del self._waiting[waiter]
        return span


class GivesAwayWhatIsRead(SourceMemory):
    """Has a slot twice."""

    def take(self, receiver: str, waiter: Any) -> Slot | None:
        slot = super().take(receiver, waiter)
        if slot is not None and slot.address not in self._free:
            self._free.append(slot.address)
        return slot


class TakesTheSlotFirst(StagedQueue):
    """Keeps a slot, which any receiver could use, while it waits for a certain one's memory."""

    slot: tuple[SourceMemory, Slot] | None = None

    def post_next(self, memory: SourceMemory) -> Any:
        if self.slot is None and self.has_more and (slot := memory.take(f"{id(self)}", self)) is not None:
            self.slot = memory, slot
        if self.slot is None:
            self._waits_at = memory if self.has_more else None
            return None
        found = super().post_next(KeptSlot(self.slot))  # type: ignore[arg-type]
        if found is not None:
            self.slot = None
        return found

    def cancel(self, error: Exception) -> list[StagedWrite]:
        if self.slot is not None:
            self.slot[0].give_back(self.slot[1])
            self.slot = None
        return super().cancel(error)


class KeptSlot:
    """Looks like the memory that a slot is of, and gives that slot."""

    def __init__(self, kept: tuple[SourceMemory, Slot]) -> None:
        self._memory, self._slot = kept

    def take(self, receiver: str, waiter: Any) -> Slot:
        return self._slot

    def give_back(self, slot: Slot) -> None:
        self._memory.give_back(slot)


class KeepsItsSpan(StagedQueue):
    """Gives up in silence what it has reserved."""

    def cancel(self, error: Exception) -> list[StagedWrite]:
        self._span = None
        return super().cancel(error)


class KeepsItsPlace(StagedQueue):
    """Gives up, but stays in the queue for memory."""

    def _stop_waiting(self) -> None:
        self._waits_at = None


class EndsWithTheLastPost(StagedWrite):
    """Takes a write for through when its last part is posted."""

    @property
    def has_ended(self) -> bool:
        return self.next_bytes is None


# With the troubles that bring a fault to light, where it would take long to find among all.
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "pages released on abort without waiting for Drained": ({"classes": Classes(receiver=ReleasesOnAbort)}, "(a)"),
    "pages released when one of several writers is drained": (
        {"classes": Classes(receiver=ReleasesWhenOneIsDrained)},
        "(a)",
    ),
    "a duplicate arrival counted twice, so that success is early": (
        {"troubles": ("duplicate",), "classes": Classes(receiver=CountsDuplicates)},
        "(b)",
    ),
    "a duplicate arrival counted twice, so that success never comes": (
        {"troubles": ("duplicate",), "classes": Classes(receiver=CountsDuplicates)},
        "(g)",
    ),
    "success when the first writer is complete": ({"classes": Classes(receiver=BelievesTheFirstWriter)}, "(b)"),
    "a failed receiver tells nobody": ({"classes": Classes(receiver=AbortsInSilence)}, "(d)"),
    "Drained before the last write is done": ({"classes": Classes(sender=DrainsTooEarly)}, "(a)"),
    "Drained never sent": ({"classes": Classes(sender=NeverDrains)}, "(d)"),
    "WriterFinished before the last write is done": ({"classes": Classes(sender=FinishesTooEarly)}, "(c)"),
    "WriterFinished before the last write is done, and pages released": (
        {"classes": Classes(sender=FinishesTooEarly)},
        "(a)",
    ),
    "writes in flight forgotten": ({"classes": Classes(sender=ForgetsFlights)}, "(c)"),
    "pages written in the wrong order": ({"classes": Classes(sender=WritesBackwards)}, "(b)"),
    "the end of a held prefix overwritten": ({"classes": Classes(sender=WritesOverThePrefix)}, "(b)"),
    "tokens that fill no page forgotten": ({"classes": Classes(sender=ForgetsTheTokens)}, "(b)"),
    "chunks counted where writes should be": ({"classes": Classes(sender=CountsChunksInsteadOfWrites)}, "(b)"),
    "a chunk written twice": ({"classes": Classes(sender=WritesTwice)}, "(b)"),
    "writes counted that were never posted": ({"classes": Classes(sender=LeavesGhosts)}, "(d)"),
    "a final state left": ({"classes": Classes(sender=MovesFreely)}, "(e)"),
    "no deadline on the sender": ({"classes": Classes(sender=HasNoDeadline)}, "(d)"),
    "no tick for the receiver": ({"shells": Shells(ticks_receivers=False)}, "(d)"),
    "a stranger's abort raises": ({"classes": Classes(sender=RaisesForStrangers)}, "KeyError"),
    "generations ignored, and stale arrivals counted": ({"shells": Shells(checks_generation=False)}, "(b)"),
    "generations ignored, and stale words believed": ({"shells": Shells(checks_generation=False)}, "(a)"),
    "aborts of unknown rooms unanswered": ({"shells": Shells(answers_early_aborts=False)}, "(d)"),
    "an abort sent before the open that it follows": ({"shells": Shells(opens_before_it_aborts=False)}, "(a)"),
    "a lost rank called quiet without a fence": (
        {"troubles": ("cut", "death"), "shells": Shells(fences_before_it_tells=False)},
        "(a)",
    ),
    "pages released while a part is scattered": (
        {"troubles": ("abort",), "classes": Classes(receiver=ForgetsTheScattering)},
        "(a)",
    ),
    "a chunk complete when its last part arrives": ({"classes": Classes(receiver=CompletesWithTheLastPart)}, "(b)"),
    "a chunk complete when any part is scattered": ({"classes": Classes(receiver=CompletesWithAnyPart)}, "(b)"),
    "a part counted twice": ({"troubles": (), "classes": Classes(receiver=CountsPartsTwice)}, "(b)"),
    "a part that could not be scattered": (
        {"troubles": ("scatter fails",), "classes": Classes(receiver=IgnoresWhatCouldNotBeScattered)},
        "(b)",
    ),
    "a watermark that counts spans out of order": ({"classes": Classes(reading_ring=ReadsOutOfOrder)}, "(h)"),
    "a watermark that forgets spans out of order": ({"classes": Classes(reading_ring=ReadsOnlyInOrder)}, "(i)"),
    "a span read twice at a time": (
        {"troubles": ("duplicate",), "classes": Classes(writer_ring=ReadsTwiceAtATime)},
        "(h)",
    ),
    "a span credited before it is read": ({"classes": Classes(writer_ring=CreditsInAdvance)}, "(h)"),
    "a slot given to two": ({"classes": Classes(source_memory=GivesAwayWhatIsRead)}, "(h)"),
    "a slot given back when its part is posted": ({"shells": Shells(keeps_slots_until_parts_land=False)}, "(h)"),
    "void spans forgotten": ({"shells": Shells(gives_up_spans=False)}, "(i)"),
    "parts that nobody wants kept": ({"shells": Shells(gives_back_what_nobody_wants=False)}, "(i)"),
    "a cancelled write keeps its span": ({"classes": Classes(queue=KeepsItsSpan)}, "(i)"),
    "a cancelled write keeps its place": ({"classes": Classes(queue=KeepsItsPlace)}, "(j)"),
    "failed rooms that go on waiting": ({"shells": Shells(cancels_what_has_failed=False)}, "(d)"),
    "who waits is forgotten": ({"classes": Classes(shared_ring=WakesNobody)}, "(j)"),
    "a slot kept while credit is waited for": ({"classes": Classes(queue=TakesTheSlotFirst)}, "(j)"),
    "a write through with parts on their way": ({"classes": Classes(write=EndsWithTheLastPost)}, "(c)"),
}
ENOUGH = 3000


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str):
    world, law = FAULTS[fault]
    assert schedules_to_find(law, world) <= ENOUGH


def schedules_to_find(law: str, world: dict[str, Any]) -> int:
    """How many schedules it takes until one breaks a law."""
    for seed in range(ENOUGH):
        try:
            World(seed, **world).run()
        except Exception as error:
            if law in f"{type(error).__name__}: {error}":
                return seed + 1
    return ENOUGH + 1
