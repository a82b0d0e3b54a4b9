"""A decode rank of an enumeration: the room that ships, its link and rings.

The node is what the room has its commands done by (`RoomPort`): what it sends is an output, bytes are in its pages once
they are placed, and time passes where an event says so. Links and rings are driven as the endpoint does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from msgspec import structs

from kvferry.endpoint.decode.room import ReceivingRoom
from kvferry.endpoint.transfer import Receiver
from kvferry.errors import KVFerryError, PeerDisconnectedError
from kvferry.layout import RankLayout
from kvferry.plan import Piece
from kvferry.plan.requests.moved_blocks import UnitPlaces
from kvferry.protocol.links.link import Link, LinkKey, LinkState
from kvferry.protocol.links.rank_link import Send
from kvferry.protocol.transfer.events import (
    AbortRequested,
    ConnectFailed,
    PartArrived,
    PartPlaced,
    ReceiverEvent,
    SenderDrained,
    SenderSettled,
    Tick,
)
from kvferry.protocol.transfer.receiver import ReceiverMachine
from kvferry.protocol.transfer.states import ReceiverState, TransferState
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
        self._room: ReceivingRoom | None = None
        self._out: list[Output] = []  # of the event that is handled
        self._rings = _Rings()
        self._attempts = 0
        self.link = self._new_link()

    @property
    def _machine(self) -> ReceiverMachine | None:
        return self._room.machine if self._room is not None else None

    @property
    def _room_link(self) -> Link | None:
        """The one through which the room was opened."""
        return self._room.link if self._room is not None else None

    @property
    def writers(self) -> frozenset[int]:
        """The prefill ranks that write to its pages."""
        return frozenset(self.link.connected(ROOM).writers)

    @property
    def generation(self) -> int:
        """Of this use."""
        return 10 * self.use + self._number

    @property
    def room_state(self) -> ReceiverState | None:
        """Where its room stands; None before its caller has opened it."""
        return self._machine.detailed_state if self._machine is not None else None

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
        rank = self.link.ranks[prefill]
        is_unanswered = self._machine is not None and prefill in self._machine.unanswered
        is_attaching = not rank.is_attached and prefill not in self._settling_attached
        return is_unanswered or is_attaching or (rank.channel is not None and rank.channel.has_unacknowledged)

    def settles(self, prefill: int) -> bool:
        """Whether it waits for what a prefill rank's failed writes had sent."""
        is_awaited = prefill in self._settling or prefill in self._settling_attached
        return is_awaited or any(each == prefill for each, _, _ in self._settling_spans)

    def handle(self, event: Event) -> list[Output]:
        """Takes an event of the enumeration."""
        out = self._out = []
        self._handle(event)
        self._out = []
        return out

    def _handle(self, event: Event) -> None:
        match event:
            case ("attach",):
                self._attach()
            case ("open",):
                self.has_opened = True
                self._room = self._new_room()
                if self.is_attached:
                    self._open()
            case ("abort",):
                self._apply(AbortRequested("the client left"))
            case ("late",):
                self._apply(Tick(), now=_LATE)
            case ("message", prefill, data):
                try:
                    self._received(prefill, codec.decode_to_decode(data))
                except KVFerryError as error:
                    self._give_up(error)
            case ("note", prefill, data):
                self._notified(prefill, codec.decode_notification(data))
            case ("bytes", prefill, generation, sequence):
                if generation == self.generation:
                    self.placed.add((prefill, sequence))
            case ("settled", prefill):
                self._settled(prefill)
            case ("broke", prefill):
                self._send(self.link.broke(prefill_name(prefill), 0.0), only=prefill)
                self._repeat_abort(prefill)
            case ("heartbeat", prefill):
                self._send(self.link.ask(0.0), only=prefill)
                self._repeat_abort(prefill)
            case ("give up",):
                self._give_up(PeerDisconnectedError("silent for too long"))
            case ("next use",):
                self.use += 1
                self.has_opened = False
                self._room = None
                self.placed = set()
                self._settling = set()

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

    def _attach(self) -> None:
        """Looks the prefill ranks up and asks them to attach: how they are greeted is left out."""
        self.link.resolved(tuple(registration(each, self._prefills) for each in range(self._prefills)), 0.0)
        for prefill in range(self._prefills):
            answer = welcome(prefill, self._prefills)
            self._send(self.link.received(prefill_name(prefill), answer))

    def _give_up(self, error: KVFerryError) -> None:
        """Gives the link up, with every room that relies on it, and attaches anew."""
        self.link.is_given_up = True
        if self._room_link is self.link:
            self._apply(ConnectFailed(error))
        self.link = self._new_link()
        self._settling_attached = {}
        self._attach()

    def _send(self, sends: Iterable[Send], *, only: int | None = None) -> None:
        """Sends what a link says, or that for one rank. Time is not counted, and so no silence either."""
        for each in sends:
            self.link.record_answer(each.address)
            if only in (None, number_of(each.address)) and not isinstance(each.message, messages.Hello):
                message = each.message
                if isinstance(message, messages.AbortRoom):
                    message = structs.replace(message, reason="")  # for people, and many
                self._out.append(("up", number_of(each.address), codec.encode(message, each.version)))

    def _received(self, prefill: int, message: messages.ToDecode) -> None:
        address = prefill_name(prefill)
        match message:
            case messages.Numbered():
                self._take(address, prefill, message)
            case messages.Drained():
                if message.generation == self.generation:
                    self._apply(SenderDrained(message.writer, message.after_failure))
            case messages.Attached() if message.last_failure > self._waited_for.get(prefill, 0):
                self._settling_attached[prefill] = message
            case _:
                self._send(self.link.received(address, message))
                is_waiting = self._machine is not None and not self._machine.state.is_final
                if self.is_attached and is_waiting and self._room_link is None:
                    self._open()

    def _take(self, address: str, prefill: int, message: messages.Numbered) -> None:
        for link in filter(None, (self.link, self._room_link)):
            if link.attempt == message.epoch:
                taken, sends = link.take(address, message)
                self._send(sends)
                for each in taken:
                    match each:
                        case messages.RoomFailed() if each.generation == self.generation:
                            self._apply(each)
                        case messages.SpanReleased():
                            self._span_released(prefill, each)
                return

    # ---- the room -----------------------------------------------------------------------------------------------

    def _new_room(self) -> ReceivingRoom:
        """Makes the room, of which nobody looks at what a caller would see."""
        return ReceivingRoom(
            ReceiverMachine(ROOM, rank=self._number, deadlines=DEADLINES, now=0.0),
            generation=self.generation,
            groups=(),
            tokens=None,
            depends_on={},
            receiver=cast(Receiver, None),
            places=cast(UnitPlaces, None),
            port=self,
            receivers=self._decodes,
        )

    def _open(self) -> None:
        assert self._room is not None
        self._room.link = self.link
        self._apply(self.link.connected(ROOM))

    def _repeat_abort(self, prefill: int) -> None:
        if self._room is not None and self._room_link is not None and prefill in self._room.machine.unanswered:
            self._room.ask_to_stop(prefill, 0.0)

    def _apply(self, event: ReceiverEvent, now: float = 0.0) -> None:
        if self._room is not None and self._room_link is not None:
            self._room.apply(event, now)

    def send(self, sends: Iterable[Send]) -> None:
        self._send(sends)

    def place(self, work: object) -> None:
        assert isinstance(work, _Part)
        self.placed.add((work.prefill, work.sequence))
        self.drop(work)
        self._apply(PartPlaced(work.prefill, work.sequence))

    def drop(self, work: object) -> None:
        assert isinstance(work, _Part)
        self._give_back(work.prefill, work.epoch, work.span)

    def settle(self, room: ReceivingRoom, rank: int) -> None:
        self._settling.add(rank)

    def moved(self, room: ReceivingRoom, now: float) -> None:
        """Nothing of it is looked at."""

    def raised(self, room: ReceivingRoom, error: BaseException) -> None:
        raise error

    # ---- what arrives -------------------------------------------------------------------------------------------

    def _settled(self, prefill: int) -> None:
        """Nothing can arrive any more of what a rank's failed writes had sent."""
        if prefill in self._settling:
            self._settling.discard(prefill)
            self._apply(SenderSettled(prefill))
        spans = [(epoch, span) for writer, epoch, span in self._settling_spans if writer == prefill]
        self._settling_spans = [entry for entry in self._settling_spans if entry[0] != prefill]
        for epoch, span in spans:
            self._give_back(prefill, epoch, span)
        attached = self._settling_attached.pop(prefill, None)
        if attached is not None:
            self._waited_for[prefill] = attached.last_failure
            self._received(prefill, attached)

    def _give_back(self, prefill: int, epoch: int, span: Span) -> None:
        ring = self._rings.by_rank[prefill]
        if ring.epoch != epoch:
            return
        before = ring.reading.position
        ring.reading.release(span)
        if ring.reading.position != before:
            position = ring.reading.position
            credit = messages.Credit(epoch=epoch, position=position)
            self._send(self.link.send(prefill, credit))

    def _span_released(self, prefill: int, message: messages.SpanReleased) -> None:
        ring, span = self._rings.by_rank[prefill], Span(message.start, message.begin, message.stop)
        if ring.epoch != message.epoch or not ring.reading.can_hold(span):
            return
        if message.after_failure:
            self._settling_spans.append((prefill, message.epoch, span))
        else:
            self._give_back(prefill, message.epoch, span)

    def _notified(self, prefill: int, message: messages.Notification) -> None:
        is_ours = message.generation == self.generation and self._machine is not None and not self.has_ended
        match message:
            case messages.StagedArrived():
                if self._rings.by_rank[prefill].epoch != message.epoch:
                    return
                span = Span(message.start, message.begin, message.stop)
                part = _Part(prefill, message.epoch, message.sequence, span)
                if is_ours:
                    self._apply(PartArrived(message.writer, message.sequence, 0, is_last=True, work=part))
                else:
                    self._give_back(prefill, message.epoch, span)
            case messages.ChunkArrived() | messages.WriterFinished() if is_ours:
                self._apply(message)
