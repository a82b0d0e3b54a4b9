"""A decode rank of an enumeration: its receiver, link and rings, as its endpoint drives them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.errors import KVFerryError, PeerDisconnectedError
from kvferry.layout import RankLayout
from kvferry.plan import Piece
from kvferry.protocol.links.link import Link, LinkKey, LinkState
from kvferry.protocol.links.rank_link import Send
from kvferry.protocol.transfer.events import (
    AbortRequested,
    AwaitArrival,
    ConnectFailed,
    Drop,
    PartArrived,
    PartPlaced,
    Place,
    ReceiverEvent,
    SendAbort,
    SenderDrained,
    SenderSettled,
    SendOpen,
    Tick,
)
from kvferry.protocol.transfer.receiver import ReceiverMachine
from kvferry.protocol.transfer.states import TransferState
from kvferry.protocol.wire import codec, messages
from kvferry.protocol.wire.field_types import ProcessIdentity
from kvferry.staging.rings import ReadingRing, Span
from proof.enumeration.automata import Event, Output
from proof.enumeration.ranks import (
    DEADLINES,
    ROOM,
    SPAN_BYTES,
    decode_identity,
    number_of,
    prefill_name,
    registration,
    welcome,
)

_LATE = float("inf")


class _Part(NamedTuple):
    """A part that is in the ring."""

    prefill: int
    epoch: int
    sequence: int
    span: Span


@dataclass(slots=True)
class _Ring:
    """The ring that a prefill rank writes to.

    Attributes:
        epoch: counts up: each attempt to attach offers another, in the same memory.
        is_alone: whether the rank has attached since, so that earlier writes have ended.
    """

    epoch: int
    reading: ReadingRing = field(default_factory=lambda: ReadingRing(SPAN_BYTES))
    is_alone: bool = False


class _Rings:
    """The rings that prefill ranks write to, as a link wants them."""

    def __init__(self) -> None:
        self.by_rank: dict[int, _Ring] = {}

    def offer(self, endpoint: str, source: RankLayout, pieces: tuple[Piece, ...]) -> messages.Staging:
        number = number_of(endpoint)
        earlier = self.by_rank.get(number)
        ring = self.by_rank[number] = _Ring(1 if earlier is None else earlier.epoch + 1)
        return messages.Staging(ring=messages.StagingRing(0, SPAN_BYTES, ring.epoch))

    def metadata(self) -> bytes:
        return b""

    def attached(self, endpoint: str) -> None:
        self.by_rank[number_of(endpoint)].is_alone = True


@dataclass(frozen=True)
class _Attempt:
    """The number of an attempt to attach."""

    number: int

    def __call__(self) -> int:
        return self.number


def _can_prove_end(_: ProcessIdentity) -> bool:
    return True


class DecodeNode:
    """A decode rank, with its caller.

    Attributes:
        use: which use of the room's number it is at, from 1 on.
        has_opened: whether its caller has opened that.
        placed: what bytes its pages have of this use: writer and chunk.
        link: to the prefill ranks, the current one.
    """

    def __init__(self, number: int, prefills: int, decodes: int) -> None:
        """Begins with no room, about to attach to every prefill rank."""
        self.use = 1
        self.has_opened = False
        self.placed: set[tuple[int, int]] = set()
        self._settling: set[int] = set()  # ranks of whose failed writes something may still arrive in pages
        self._settling_spans: list[tuple[int, int, Span]] = []  # or in a ring: the rank, the ring's epoch, the span
        self._settling_attached: dict[int, messages.Attached] = {}  # or anywhere, before it counts as attached
        self._waited_for: dict[int, int] = {}  # the number of the last failed write that cannot arrive any more
        self._number = number
        self._prefills = prefills
        self._decodes = decodes
        self._machine: ReceiverMachine | None = None
        self._rings = _Rings()
        self._attempts = 0
        self.link = self._new_link()
        self._room_link: Link | None = None  # the one through which the room was opened
        self._open_numbers: dict[int, int] = {}

    @property
    def writers(self) -> frozenset[int]:
        """The prefill ranks that write to its pages."""
        return frozenset(self.link.connected(ROOM).writers)

    @property
    def generation(self) -> int:
        """Of this use."""
        return 10 * self.use + self._number

    @property
    def has_ended(self) -> bool:
        """Whether this use of the number has ended here."""
        return self._machine is not None and self._machine.is_done

    @property
    def has_succeeded(self) -> bool:
        """Whether it has ended well."""
        return self._machine is not None and self._machine.state is TransferState.SUCCESS

    @property
    def is_attached(self) -> bool:
        """Whether rooms can be opened."""
        return self.link.state is LinkState.READY

    @property
    def can_fail(self) -> bool:
        """Whether its room runs, and is open."""
        return self._room_link is not None and self._machine is not None and not self._machine.state.is_final

    def holds_pages(self) -> bool:
        """Whether the pages belong to the room of this use."""
        return self._machine is not None and not self._machine.are_pages_reusable

    def ring(self, prefill: int) -> tuple[int, int, bool]:
        """The epoch of a rank's ring, up to which position it was read, and whether earlier ones are given back."""
        ring = self._rings.by_rank[prefill]
        return ring.epoch, ring.reading.position, ring.is_alone

    def awaits(self, prefill: int) -> bool:
        """Whether something sent to a prefill rank may be lost, or an answer."""
        rank = self.link._ranks[prefill]
        is_unanswered = self._machine is not None and prefill in self._machine.unanswered
        is_attaching = not rank.is_attached and prefill not in self._settling_attached
        return is_unanswered or is_attaching or (rank.channel is not None and rank.channel.has_unacknowledged)

    def settles(self, prefill: int) -> bool:
        """Whether it waits for what a prefill rank's failed writes had sent."""
        is_awaited = prefill in self._settling or prefill in self._settling_attached
        return is_awaited or any(each == prefill for each, _, _ in self._settling_spans)

    def handle(self, event: Event) -> list[Output]:
        """Takes an event of the enumeration."""
        out: list[Output] = []
        match event:
            case ("attach",):
                self._attach(out)
            case ("open",):
                self.has_opened = True
                self._machine = ReceiverMachine(ROOM, rank=self._number, deadlines=DEADLINES, now=0.0)
                if self.is_attached:
                    self._open(out)
            case ("abort",):
                self._apply(AbortRequested("the client left"), out)
            case ("late",):
                self._apply(Tick(), out, now=_LATE)
            case ("message", prefill, data):
                try:
                    self._received(prefill, codec.decode_to_decode(data), out)
                except KVFerryError as error:
                    self._give_up(error, out)
            case ("note", prefill, data):
                self._notified(prefill, codec.decode_notification(data), out)
            case ("bytes", prefill, generation, sequence):
                if generation == self.generation:
                    self.placed.add((prefill, sequence))
            case ("settled", prefill):
                self._settled(prefill, out)
            case ("broke", prefill):
                self._send(self.link.broke(prefill_name(prefill), 0.0), out, only=prefill)
                self._repeat_abort(prefill, out)
            case ("heartbeat", prefill):
                self._send(self.link.ask(0.0), out, only=prefill)
                self._repeat_abort(prefill, out)
            case ("give up",):
                self._give_up(PeerDisconnectedError("silent for too long"), out)
            case ("next use",):
                self.use += 1
                self.has_opened = False
                self._machine = None
                self.placed = set()
                self._settling = set()
                self._room_link = None
                self._open_numbers = {}
        return out

    # ---- the link -----------------------------------------------------------------------------------------------

    def _new_link(self) -> Link:
        self._attempts += 1
        return Link(
            LinkKey("prefill", 0),
            decode_identity(self._number, self._decodes),
            self._rings,
            next_attempt=_Attempt(self._attempts),
            can_prove_end=_can_prove_end,
            deadline=0.0,
        )

    def _attach(self, out: list[Output]) -> None:
        """Looks the prefill ranks up and asks them to attach: how they are greeted is left out."""
        self.link.resolved(tuple(registration(each, self._prefills) for each in range(self._prefills)), 0.0)
        for prefill in range(self._prefills):
            answer = welcome(prefill, self._prefills)
            self._send(self.link.received(prefill_name(prefill), answer), out)

    def _give_up(self, error: KVFerryError, out: list[Output]) -> None:
        """Gives the link up, with every room that relies on it, and attaches anew."""
        self.link.is_given_up = True
        if self._room_link is self.link:
            self._apply(ConnectFailed(error), out)
        self.link = self._new_link()
        self._settling_attached = {}
        self._attach(out)

    def _send(self, sends: Iterable[Send], out: list[Output], *, only: int | None = None) -> None:
        """Sends what a link says, or that for one rank. Time is not counted, and so no silence either."""
        for each in sends:
            self.link.record_answer(each.address)
            if only in (None, number_of(each.address)) and not isinstance(each.message, messages.Hello):
                out.append(("up", number_of(each.address), codec.encode(each.message, each.version)))

    def _received(self, prefill: int, message: messages.ToDecode, out: list[Output]) -> None:
        address = prefill_name(prefill)
        match message:
            case messages.Numbered():
                self._take(address, prefill, message, out)
            case messages.Drained():
                if message.generation == self.generation:
                    self._apply(SenderDrained(message.writer, message.after_failure), out)
            case messages.Attached() if message.last_failure > self._waited_for.get(prefill, 0):
                self._settling_attached[prefill] = message
            case _:
                self._send(self.link.received(address, message), out)
                is_waiting = self._machine is not None and not self._machine.state.is_final
                if self.is_attached and is_waiting and self._room_link is None:
                    self._open(out)

    def _take(self, address: str, prefill: int, message: messages.Numbered, out: list[Output]) -> None:
        for link in filter(None, (self.link, self._room_link)):
            if link.attempt == message.epoch:
                taken, sends = link.take(address, message)
                self._send(sends, out)
                for each in taken:
                    match each:
                        case messages.RoomFailed() if each.generation == self.generation:
                            self._apply(each, out)
                        case messages.SpanReleased():
                            self._span_released(prefill, each, out)
                return

    # ---- the room -----------------------------------------------------------------------------------------------

    def _open(self, out: list[Output]) -> None:
        self._room_link = self.link
        self._apply(self.link.connected(ROOM), out)

    def _repeat_abort(self, prefill: int, out: list[Output]) -> None:
        if self._machine is not None and prefill in self._machine.unanswered:
            self._abort(self._machine.abort_of(prefill), out)

    def _abort(self, command: SendAbort, out: list[Output]) -> None:
        link, number = self._room_link, self._open_numbers.get(command.rank, 0)
        if link is None:
            return
        abort = messages.AbortRoom(
            room=ROOM,
            generation=self.generation,
            reason="",
            error=command.error,
            epoch=link.attempt if number else 0,
            number=number,
        )
        self._send(link.send_unnumbered(command.rank, abort), out)

    def _apply(self, event: ReceiverEvent, out: list[Output], now: float = 0.0) -> None:
        machine, link = self._machine, self._room_link
        if machine is None or link is None:
            return
        for command in machine.handle(event, now):
            match command:
                case SendOpen(rank):
                    opened = messages.OpenRoom(
                        room=ROOM, generation=self.generation, receivers=self._decodes, tokens=None, groups=()
                    )
                    self._send(link.send(rank, opened), out)
                    self._open_numbers[rank] = link.last_number(rank)
                case SendAbort():
                    self._abort(command, out)
                case Place(_Part() as part):
                    self.placed.add((part.prefill, part.sequence))
                    self._give_back(part.prefill, part.epoch, part.span, out)
                    self._apply(PartPlaced(part.prefill, part.sequence), out)
                case Drop(_Part() as part):
                    self._give_back(part.prefill, part.epoch, part.span, out)
                case AwaitArrival(rank):
                    self._settling.add(rank)

    # ---- what arrives -------------------------------------------------------------------------------------------

    def _settled(self, prefill: int, out: list[Output]) -> None:
        """Nothing can arrive any more of what a rank's failed writes had sent."""
        if prefill in self._settling:
            self._settling.discard(prefill)
            self._apply(SenderSettled(prefill), out)
        spans = [(epoch, span) for writer, epoch, span in self._settling_spans if writer == prefill]
        self._settling_spans = [entry for entry in self._settling_spans if entry[0] != prefill]
        for epoch, span in spans:
            self._give_back(prefill, epoch, span, out)
        attached = self._settling_attached.pop(prefill, None)
        if attached is not None:
            self._waited_for[prefill] = attached.last_failure
            self._received(prefill, attached, out)

    def _give_back(self, prefill: int, epoch: int, span: Span, out: list[Output]) -> None:
        ring = self._rings.by_rank[prefill]
        if ring.epoch != epoch:
            return
        before = ring.reading.position
        ring.reading.release(span)
        if ring.reading.position != before:
            position = ring.reading.position
            credit = messages.Credit(epoch=epoch, position=position)
            self._send(self.link.send(prefill, credit), out)

    def _span_released(self, prefill: int, message: messages.SpanReleased, out: list[Output]) -> None:
        ring, span = self._rings.by_rank[prefill], Span(message.start, message.begin, message.stop)
        if ring.epoch != message.epoch or not ring.reading.can_hold(span):
            return
        if message.after_failure:
            self._settling_spans.append((prefill, message.epoch, span))
        else:
            self._give_back(prefill, message.epoch, span, out)

    def _notified(self, prefill: int, message: messages.Notification, out: list[Output]) -> None:
        is_ours = message.generation == self.generation and self._machine is not None and not self.has_ended
        match message:
            case messages.StagedArrived():
                if self._rings.by_rank[prefill].epoch != message.epoch:
                    return
                span = Span(message.start, message.begin, message.stop)
                part = _Part(prefill, message.epoch, message.sequence, span)
                if is_ours:
                    self._apply(PartArrived(message.writer, message.sequence, 0, is_last=True, work=part), out)
                else:
                    self._give_back(prefill, message.epoch, span, out)
            case messages.ChunkArrived() | messages.WriterFinished() if is_ours:
                self._apply(message, out)
