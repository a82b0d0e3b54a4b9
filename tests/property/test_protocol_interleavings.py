"""The protocol under every schedule that a seeded adversary finds.

Real sender and receiver machines are connected through a simulated medium that is as bad as the real one may be:
control messages keep their order between two ranks and nothing else does, notifications come late, in any order and
more than once, bytes land token by token, writes fail half done, peers die, callers abort, miscount, or never come. A
`World` is one schedule; its seed names it. After every step it checks what must always hold, and raises
`ViolationError`.

The laws:
(a) once a receiver says that its pages are reusable, no byte in them changes on behalf of that room;
(b) a receiver that succeeded has every token behind its prefix from every elected writer, each once, and none before
    it, has heard of every write, and has the aux writer's aux data;
(c) a sender that says it is drained has no write in flight; one that succeeded has written all that it owes;
(d) under a fair scheduler, with time passing, every room ends on both sides and gives its pages back;
(e) a state changes only as the tables say;
(f) nothing raises;
(g) where nothing goes wrong and no time is lost, every room succeeds.

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

from kvferry.errors import PageError, TransferTimeoutError
from kvferry.layout import PageGroup, TokenShare
from kvferry.plan import Demand, Route, Unit
from kvferry.protocol.chunks import ChunkSequence
from kvferry.protocol.deadlines import Deadlines
from kvferry.protocol.demands import WantedGroup
from kvferry.protocol.early import EarlyRooms
from kvferry.protocol.messages import (
    AbortRoom,
    ChunkArrived,
    Drained,
    Message,
    OpenGroup,
    OpenRoom,
    RoomFailed,
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
    ReceiverAbortRequested,
    ReceiverBroke,
    ReceiverCommand,
    ReceiverMachine,
    ReceiverTick,
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
)
from kvferry.protocol.states import RECEIVER_TRANSITIONS, SENDER_TRANSITIONS, TransferState

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
LONGEST_REQUEST = 5
STEPS = 160
PATIENCE = 3000
TROUBLES = (
    "abort",
    "write fails",
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


@dataclass(slots=True)
class Flight:
    """A write on its way: tokens land one by one until none is left, or it breaks."""

    prefill: PrefillRank
    room: SendingRoom
    command: Write
    left: list[tuple[int, int]]  # (place at the source, place at the destination)


@dataclass(slots=True, eq=False)
class SendingRoom:
    machine: SenderMachine
    use: Use
    rank: int
    chunks: deque[tuple[list[int], bool]]
    sequence: ChunkSequence
    first_start: int
    in_flight: int = 0
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
    written: set[tuple[int, int]] = field(default_factory=set)  # (writer, sequence) of every write to this room


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
    is_dead: bool = False


@dataclass(slots=True, eq=False)
class DecodeRank:
    name: str
    free: list[int]
    rooms: dict[int, ReceivingRoom] = field(default_factory=dict)
    owner: dict[int, ReceivingRoom] = field(default_factory=dict)  # of a page
    landed: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)  # (place, writer) -> sources
    notifications: list[bytes] = field(default_factory=list)
    old_notifications: list[bytes] = field(default_factory=list)
    is_dead: bool = False


class World:
    """One schedule."""

    def __init__(
        self,
        seed: int,
        *,
        sender_class: type[SenderMachine] = SenderMachine,
        receiver_class: type[ReceiverMachine] = ReceiverMachine,
        shells: Shells | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.shells = shells or Shells()
        self.sender_class = watched(sender_class, SENDER_TRANSITIONS)
        self.receiver_class = watched(receiver_class, RECEIVER_TRANSITIONS)
        self.now = 0.0
        self.is_ending = False
        self.log: list[str] = []
        self.outcomes: Counter[str] = Counter()
        draw = self.random
        # Every schedule has its own temper, so that each kind of trouble also comes alone.
        kinds = draw.sample(TROUBLES, draw.choice([0, 1, 1, 2, 3]))
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
        self.flights: list[Flight] = []
        self.cut: set[tuple[int, str]] = set()  # pairs whose connection is gone
        self.fenced: set[tuple[int, str]] = set()  # pairs between which no byte can move any more
        self.unnoticed: set[tuple[str, int, str]] = set()  # (who will notice, prefill rank, decode rank)
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
        for _ in range(STEPS):
            self._step(self._opportunities() + self._troubles())
        self.is_ending = True
        for _ in range(PATIENCE):
            opportunities = self._opportunities()
            if not opportunities and not self._jump():
                break
            self._step(opportunities)
        self._check_end()

    def _step(self, opportunities: list[Callable[[], None]]) -> None:
        if self.random.random() < (0.02 if self.is_ending else 0.15):
            self.now += self.random.random() * self.pace
        if opportunities:
            self.random.choice(opportunities)()
        self._tick()

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
        for decode in self._living_decode():
            can += [
                partial(self._connect, decode, receiving)
                for receiving in decode.rooms.values()
                if receiving.is_reachable and not receiving.asked and not receiving.machine.state.is_final
            ]
            can += [partial(self._notify, decode, index) for index in range(len(decode.notifications))]
        can += [partial(self._at_prefill, *pair) for pair, queue in self.to_prefill.items() if queue]
        can += [partial(self._at_decode, *pair) for pair, queue in self.to_decode.items() if queue]
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
                self._control(rank, name, Drained(room=room.use.room, generation=generation, writer=rank.number))

    def _control(self, rank: PrefillRank, name: str, message: Message) -> None:
        if (rank.number, name) not in self.cut:
            self.to_decode.setdefault((rank.number, name), deque()).append(encode(message))

    def _at_prefill(self, name: str, number: int) -> None:
        rank = self.prefill[number]
        message = decode_to_prefill(self.to_prefill[name, number].popleft())
        assert isinstance(message, (OpenRoom, AbortRoom))
        room = rank.rooms.get(message.room)
        self.log.append(f"p{number} hears {message} from {name}")
        if room is not None:
            self._deliver(rank, room, name, message)
        elif isinstance(message, AbortRoom):
            rank.early.keep(name, message, self.now)
            if self.shells.answers_early_aborts:
                self._control(rank, name, Drained(room=message.room, generation=message.generation, writer=number))
        elif not rank.early.keep(name, message, self.now):
            self._refuse(rank, name, message, "too many rooms")

    def _refuse(self, rank: PrefillRank, name: str, message: OpenRoom, reason: str) -> None:
        where = {"room": message.room, "generation": message.generation, "writer": rank.number}
        self._control(rank, name, RoomFailed(error="TransferFailedError", reason=reason, **where))
        self._control(rank, name, Drained(**where))

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
        number, use = command.rank, room.use
        message: OpenRoom | AbortRoom
        match command:
            case SendOpen():
                first = room.prefix // PAGE_TOKENS
                group = OpenGroup(
                    "kv",
                    held=room.prefix,
                    start=room.prefix,
                    stop=max(room.prefix, (first + len(room.pages)) * PAGE_TOKENS) if room.pages else room.prefix,
                    first_page=first,
                    pages=pack_pages(np.array(room.pages, np.int64)),
                )
                message = OpenRoom(
                    room=use.room,
                    generation=room.generation,
                    receivers=len(use.prefix),
                    tokens=None,
                    groups=(group,),
                )
                if self.happens("send fails"):
                    if self.shells.opens_before_it_aborts:
                        unsent.append(number)
                    else:
                        self._tell_receiver(rank, room, SenderLost(number, OSError("too much waits already")))
                    return
            case SendAbort(reason=reason):
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
        self, rank: DecodeRank, message: RoomFailed | Drained | ChunkArrived | WriterFinished
    ) -> ReceivingRoom | None:
        room = rank.rooms.get(message.room)
        if room is None or (self.shells.checks_generation and room.generation != message.generation):
            return None
        return room

    def _notification(self, name: str, message: Message) -> None:
        self.decode[name].notifications.append(encode(message))

    # ---- the medium ----------------------------------------------------------------------------------------------

    def _fly(self, flight: Flight) -> None:
        """A token lands, or the write ends."""
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
        page = place // PAGE_TOKENS
        rank, command = self.decode[flight.command.receiver], flight.command
        if rank.is_dead:
            return
        self.log.append(f"{rank.name} page {page} of generation {command.generation} changes")
        owner = rank.owner.get(page)
        demand(
            owner is not None and owner.generation == command.generation,
            f"(a) {rank.name}'s page {page} changes for a room that was told it is released",
        )
        writer = flight.prefill.number
        rank.landed.setdefault((place, writer), []).append((source, flight.room.use.number))

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
                    expected = [(places_in(source_page(writer, use, order))[within], use.number)]
                found = rank.landed.get((place, writer), [])
                demand(found == expected, f"(b) place {place} has {found} of rank {writer}, not {expected}")
        demand(room.heard == room.written, f"(b) {room.written} was written, but {room.heard} has arrived")
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

    def _receiver_aborted(self, name: str, generation: int, reason: str) -> list[SenderCommand]:
        assert self._receivers[name].opened.generation == generation
        return super()._receiver_aborted(name, generation, reason)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "pages released on abort without waiting for Drained": ({"receiver_class": ReleasesOnAbort}, "(a)"),
    "pages released when one of several writers is drained": ({"receiver_class": ReleasesWhenOneIsDrained}, "(a)"),
    "a duplicate arrival counted twice, so that success is early": ({"receiver_class": CountsDuplicates}, "(b)"),
    "a duplicate arrival counted twice, so that success never comes": ({"receiver_class": CountsDuplicates}, "(g)"),
    "success when the first writer is complete": ({"receiver_class": BelievesTheFirstWriter}, "(b)"),
    "a failed receiver tells nobody": ({"receiver_class": AbortsInSilence}, "(d)"),
    "Drained before the last write is done": ({"sender_class": DrainsTooEarly}, "(a)"),
    "Drained never sent": ({"sender_class": NeverDrains}, "(d)"),
    "WriterFinished before the last write is done": ({"sender_class": FinishesTooEarly}, "(c)"),
    "WriterFinished before the last write is done, and pages released": ({"sender_class": FinishesTooEarly}, "(a)"),
    "writes in flight forgotten": ({"sender_class": ForgetsFlights}, "(c)"),
    "pages written in the wrong order": ({"sender_class": WritesBackwards}, "(b)"),
    "the end of a held prefix overwritten": ({"sender_class": WritesOverThePrefix}, "(b)"),
    "tokens that fill no page forgotten": ({"sender_class": ForgetsTheTokens}, "(b)"),
    "chunks counted where writes should be": ({"sender_class": CountsChunksInsteadOfWrites}, "(b)"),
    "a chunk written twice": ({"sender_class": WritesTwice}, "(b)"),
    "writes counted that were never posted": ({"sender_class": LeavesGhosts}, "(d)"),
    "a final state left": ({"sender_class": MovesFreely}, "(e)"),
    "no deadline on the sender": ({"sender_class": HasNoDeadline}, "(d)"),
    "no tick for the receiver": ({"shells": Shells(ticks_receivers=False)}, "(d)"),
    "a stranger's abort raises": ({"sender_class": RaisesForStrangers}, "KeyError"),
    "generations ignored, and stale arrivals counted": ({"shells": Shells(checks_generation=False)}, "(b)"),
    "generations ignored, and stale words believed": ({"shells": Shells(checks_generation=False)}, "(a)"),
    "aborts of unknown rooms unanswered": ({"shells": Shells(answers_early_aborts=False)}, "(d)"),
    "an abort sent before the open that it follows": ({"shells": Shells(opens_before_it_aborts=False)}, "(a)"),
    "a lost rank called quiet without a fence": ({"shells": Shells(fences_before_it_tells=False)}, "(a)"),
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
