"""A prefill rank of an enumeration: its room table, sender, channels and rings, as its endpoint drives them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from kvferry.errors import KVFerryError, PeerDisconnectedError, TransferFailedError, TransportError
from kvferry.layout import TokenShare
from kvferry.plan import Route, elect_writer
from kvferry.plan.requests.chunks import Chunk, ChunkPart
from kvferry.plan.requests.demands import GroupRequest
from kvferry.plan.requests.moves import ReceiverRequest
from kvferry.plan.requests.page_numbers import PageNumbers
from kvferry.protocol.transfer.events import (
    AbortRequested,
    AwaitTurn,
    ChunkSubmitted,
    FinishSent,
    ReceiverLost,
    ReceiverMessage,
    ReceiverOpened,
    SendDrained,
    SenderEvent,
    SendFailed,
    SendFinish,
    Tick,
    TurnCame,
    Write,
    WriteDone,
    WriteFailed,
)
from kvferry.protocol.transfer.room_table import RoomMessage, RoomTable
from kvferry.protocol.transfer.sender import SenderMachine
from kvferry.protocol.transfer.states import TransferState
from kvferry.protocol.wire import codec, messages
from kvferry.protocol.wire.field_types import DecodeRank, Message
from proof.enumeration.automata import Event, Output
from proof.enumeration.prefill_connections import Connections
from proof.enumeration.ranks import (
    DEADLINES,
    PAGE_TOKENS,
    ROOM,
    RingSpan,
    decode_name,
    decode_rank,
    number_of,
    prefill_name,
)

_LATE = float("inf")
_ROUTE = Route(
    source_group="kv",
    destination_group="kv",
    source_page_tokens=PAGE_TOKENS,
    destination_page_tokens=PAGE_TOKENS,
    source_share=TokenShare(),
    destination_share=TokenShare(),
    unit_tokens=PAGE_TOKENS,
    has_slots=False,
)


@dataclass(eq=False)
class _Room:
    """An open room, as the table wants it."""

    room: int
    machine: SenderMachine
    generations: dict[str, int] = field(default_factory=dict)
    next_opens: dict[str, messages.OpenRoom] = field(default_factory=dict)
    connections: dict[str, int] = field(default_factory=dict)  # those through which it was opened
    was_open: bool = False  # for every receiver

    @property
    def failed_alone(self) -> bool:
        """Whether it failed before every receiver had opened it."""
        return self.machine.state is TransferState.FAILED and not self.was_open

    @property
    def error(self) -> KVFerryError | None:
        """Why it failed, once it has."""
        return self.machine.error


class PrefillNode:
    """A prefill rank, with its caller.

    Attributes:
        use: which use of the room's number it is at, from 1 on.
        has_opened: whether its caller has opened that.
        has_submitted: whether its caller has handed in the chunks.
    """

    def __init__(self, number: int, prefills: int, decodes: int, chunks: int) -> None:
        """Begins with no decode rank attached, and no room."""
        self.use = 1
        self.has_opened = False
        self.has_submitted = False
        self._number = number
        self._prefills = prefills
        self._decodes = decodes
        self._chunks = chunks
        self._table: RoomTable[_Room] = RoomTable(max_rooms=8, max_pending=8, most_page_bytes=1 << 20, keep_s=10.0)
        self._connections = Connections(prefill_name(number), decodes)
        self._opened_room: _Room | None = None  # of this use; it answers what it was given even when it has ended
        self._waiting: list[tuple[int, int, int]] = []  # staged writes without memory: receiver, generation, sequence

    @property
    def _room(self) -> _Room | None:
        return self._table.rooms.get(ROOM)

    @property
    def has_ended(self) -> bool:
        """Whether this use of the number has ended here: all pages are back."""
        return self.has_opened and self._room is None

    @property
    def can_fail(self) -> bool:
        """Whether its room runs."""
        return self._room is not None and not self._room.machine.state.is_final

    def holds_pages(self) -> bool:
        """Whether the source pages belong to the room."""
        return self._room is not None

    def has_attached(self, decode: int) -> bool:
        """Whether a decode rank is attached, or about to be."""
        return self._connections.has_attached(decode_name(decode))

    def unacknowledged(self, decode: int) -> bool:
        """Whether a message to a decode rank may be lost."""
        return self._connections.channels.is_unacknowledged(decode_name(decode))

    def handle(self, event: Event) -> list[Output]:
        """Takes an event of the enumeration."""
        out: list[Output] = []
        match event:
            case ("open",):
                self.has_opened = True
                room = _Room(ROOM, SenderMachine(ROOM, rank=self._number, deadlines=DEADLINES, now=0.0))
                self._opened_room = room
                before = self._table.add(room)
                self._table.handled(ROOM)
                for receiver, message in before:
                    self._deliver(room, receiver, message, out)
            case ("submit",):
                self.has_submitted = True
                for number in range(self._chunks):
                    part = ChunkPart("kv", number, np.array([number], np.int64))
                    chunk = Chunk(number=number, parts=(part,), is_last=number == self._chunks - 1, aux=b"t")
                    self._apply(ChunkSubmitted(chunk), out)
            case ("abort",):
                self._apply(AbortRequested("the client left"), out)
            case ("late",):
                self._apply(Tick(), out, now=_LATE)
            case ("message", decode, data):
                self._received(decode, codec.decode_to_prefill(data), out)
            case ("lost", decode):
                self._lose(decode_name(decode), out)
            case ("landed", decode, sequence):
                self._answer(decode, self._connections.end_write(decode_name(decode)), out)
                self._apply(WriteDone(decode_name(decode), sequence), out)
            case ("failed", decode, sequence):
                self._connections.broke_off(decode_name(decode))
                self._apply(WriteFailed(decode_name(decode), sequence, TransportError("it broke"), True), out)
            case ("settled", decode, sequence, span):
                if span is not None:
                    self._release(decode, span, out)
                self._answer(decode, self._connections.end_write(decode_name(decode)), out)
                self._apply(WriteFailed(decode_name(decode), sequence, TransportError("it broke")), out)
            case ("next use",):
                for receiver, message in self._table.expired(_LATE):
                    self._fail(receiver, message, TransferFailedError("nobody came"), out)
                self.use += 1
                self.has_opened = self.has_submitted = False
                self._opened_room = None
        return out

    # ---- messages -----------------------------------------------------------------------------------------------

    def _send(self, decode: int, message: Message, out: list[Output]) -> None:
        ready = self._connections.channels.outgoing(decode_name(decode), message)
        out += [("down", decode, codec.encode(each)) for each in ready]

    def _received(self, decode: int, message: messages.ToPrefill, out: list[Output]) -> None:
        name = decode_name(decode)
        match message:
            case messages.Attach():
                if self._connections.attach(message):
                    rank = decode_rank(decode, self._decodes)
                    for _, generation in self._table.attached(name):
                        self._not_opened(name, rank, generation, out)
                if self._connections.is_latest(message):
                    self._answer(decode, self._connections.confirmation(name), out)
            case messages.Numbered():
                taken = self._connections.channels.take(name, message)
                if taken is None:
                    self._answer(decode, [self._connections.not_attached()], out)
                for each in taken or ():
                    match each:
                        case messages.OpenRoom():
                            self._take_open(name, each, out)
                        case messages.Credit():
                            self._connections.credited(name, each)
                            self._post_waiting(out)
            case messages.Ping():
                self._answer(decode, self._connections.answer(name, message), out)
            case messages.AbortRoom():
                channels = self._connections.channels
                is_unopened = channels.take_back(name, message.epoch, message.number)
                is_unopened |= self._table.is_dropped(name, message)
                self._aborted(name, message, is_unopened, out)

    def _answer(self, decode: int, answers: Iterable[Message], out: list[Output]) -> None:
        out += [("down", decode, codec.encode(each)) for each in answers]

    def _take_open(self, name: str, message: messages.OpenRoom, out: list[Output]) -> None:
        try:
            if self._connections.ready(name) is None:
                raise PeerDisconnectedError(f"{name} must attach before it opens rooms")
            room = self._table.open_request(name, message, 0.0, rank=self._connections.rank(name))
        except KVFerryError as error:
            self._table.ended(name, message.room, message.generation, error)
            self._fail(name, message, error, out)
            if isinstance(error, PeerDisconnectedError):
                self._not_opened(name, self._connections.rank(name), message.generation, out)
        else:
            if room is not None:
                self._opened(room, name, message, out)

    def _deliver(self, room: _Room, name: str, message: RoomMessage, out: list[Output]) -> None:
        match message:
            case messages.OpenRoom():
                if self._connections.ready(name) is not None:  # else it was lost meanwhile
                    self._opened(room, name, message, out)
            case messages.AbortRoom() | messages.RefuseRoom():
                self._apply(ReceiverMessage(name, message), out)

    def _opened(self, room: _Room, name: str, message: messages.OpenRoom, out: list[Output]) -> None:
        known = room.generations.get(name)
        is_for_next_use = room.machine.state is TransferState.SUCCESS if known is None else known != message.generation
        if is_for_next_use:
            room.next_opens[name] = message
            return
        connection = self._connections.ready(name)
        assert connection is not None
        room.generations[name] = message.generation
        room.connections[name] = connection.number
        stop = self._chunks * PAGE_TOKENS
        wanted: Mapping[str, GroupRequest] = {
            "kv": GroupRequest("kv", 0, 0, stop, 0, PageNumbers.of(np.arange(self._chunks)))
        }
        rank = decode_rank(number_of(name), self._decodes)
        receiver = rank.coordinates.group_rank
        writers = {elect_writer(each, room=ROOM, receiver=receiver) for each in connection.request.pieces}
        self._apply(
            ReceiverOpened(
                receiver=name,
                generation=message.generation,
                expected_receivers=message.receivers,
                request=ReceiverRequest(tokens=None, wanted=wanted, routes=(_ROUTE,) * (self._number in writers)),
                sends_aux=self._number == 0,
                rank=rank,
            ),
            out,
        )

    def _aborted(self, name: str, message: messages.AbortRoom, is_unopened: bool, out: list[Output]) -> None:
        room = self._table.abort(name, message, 0.0, is_unopened=is_unopened)
        if room is None:
            self._drained(name, message.generation, out, after_failure=name in self._connections.last_failures)
        else:
            kept = room.next_opens.get(name)
            if kept is not None and kept.generation == message.generation:
                del room.next_opens[name]
            self._apply(ReceiverMessage(name, message), out)
        if is_unopened:
            self._not_opened(name, self._connections.rank(name), message.generation, out)

    def _not_opened(self, name: str, rank: DecodeRank | None, generation: int, out: list[Output]) -> None:
        """Ends a room that a decode rank will not open, if it is known which that is."""
        if rank is None:
            return
        refusal = messages.RefuseRoom(
            endpoint=prefill_name(self._number),
            engine=rank.engine,
            coordinates=rank.coordinates,
            room=ROOM,
            generation=generation,
            reason="",
        )
        if self._table.is_new_refusal(name, refusal):
            room = self._table.refused_by(name, refusal, 0.0)
            if room is not None:
                self._deliver(room, name, refusal, out)
                if room.machine.state is TransferState.FAILED:
                    room.generations.setdefault(name, generation)

    def _fail(self, name: str, message: messages.OpenRoom, error: KVFerryError, out: list[Output]) -> None:
        self._failed(name, message.generation, error, out)
        self._drained(name, message.generation, out, after_failure=name in self._connections.last_failures)

    def _failed(self, name: str, generation: int, error: Exception, out: list[Output]) -> None:
        failed = messages.RoomFailed(
            room=ROOM, generation=generation, writer=self._number, error=type(error).__name__, reason=""
        )
        self._send(number_of(name), failed, out)

    def _drained(self, name: str, generation: int, out: list[Output], *, after_failure: bool) -> None:
        drained = messages.Drained(
            endpoint=prefill_name(self._number),
            room=ROOM,
            generation=generation,
            writer=self._number,
            after_failure=after_failure,
        )
        self._send(number_of(name), drained, out)

    def _lose(self, name: str, out: list[Output]) -> None:
        """Gives a decode rank up that may live."""
        rank = self._connections.rank(name)
        self._connections.lose(name)
        rooms, aborts = self._table.forget_receiver(name, 0.0)
        if any(room is self._opened_room for room in rooms):
            self._apply(ReceiverLost(name, PeerDisconnectedError("silent for too long")), out)
        for message in aborts:
            self._not_opened(name, rank, message.generation, out)

    # ---- the room -----------------------------------------------------------------------------------------------

    def _apply(self, event: SenderEvent, out: list[Output], now: float = 0.0) -> None:
        room = self._opened_room
        if room is None:
            return
        refused: list[WriteFailed] = []
        for command in room.machine.handle(event, now):
            match command:
                case Write(receiver=name, generation=generation, sequence=sequence):
                    if self._connections.begin_write(name, room.connections[name]):
                        self._write(number_of(name), generation, sequence, out)
                    else:
                        refused.append(WriteFailed(name, sequence, PeerDisconnectedError("not connected any more")))
                case AwaitTurn():
                    self._apply(TurnCame(), out)
                case SendFinish(name, generation, chunks, aux):
                    finished = messages.WriterFinished(
                        room=ROOM, generation=generation, writer=self._number, chunks=chunks, aux=aux
                    )
                    out.append(("notify", number_of(name), codec.encode(finished)))
                    self._apply(FinishSent(name), out)
                case SendFailed(name, generation, error):
                    self._failed(name, generation, error, out)
                case SendDrained(name, generation, after_failure):
                    is_another = room.generations.get(name) != generation
                    after_failure |= is_another and name in self._connections.last_failures
                    self._drained(name, generation, out, after_failure=after_failure)
        for each in refused:
            self._apply(each, out)
        room.was_open |= room.machine.state not in (TransferState.BOOTSTRAPPING, TransferState.FAILED)
        if room.machine.state is TransferState.FAILED:
            waiting, self._waiting = self._waiting, []
            for decode, _, sequence in waiting:
                self._answer(decode, self._connections.end_write(decode_name(decode)), out)
                self._apply(WriteFailed(decode_name(decode), sequence, TransportError("the room has failed")), out)
        if room.machine.is_done and self._room is room:
            self._table.remove(room, 0.0)
            for name, opened in room.next_opens.items():
                self._take_open(name, opened, out)

    def _write(self, decode: int, generation: int, sequence: int, out: list[Output]) -> None:
        """Posts a write: every other one is staged."""
        if sequence % 2 == 0:
            out.append(("write", decode, generation, sequence, None))
            return
        self._waiting.append((decode, generation, sequence))
        self._post_waiting(out)

    def _post_waiting(self, out: list[Output]) -> None:
        waiting, self._waiting = self._waiting, []
        for decode, generation, sequence in waiting:
            is_behind = any(each == decode for each, _, _ in self._waiting)
            span = None if is_behind else self._connections.reserve(decode_name(decode))
            if span is None:
                self._waiting.append((decode, generation, sequence))
            else:
                out.append(("write", decode, generation, sequence, span))

    def _release(self, decode: int, span: RingSpan, out: list[Output]) -> None:
        name = prefill_name(self._number)
        self._send(decode, messages.SpanReleased(endpoint=name, after_failure=True, **span._asdict()), out)
