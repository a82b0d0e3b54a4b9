"""A prefill rank of an enumeration: the room that ships and its table, with channels and rings.

The node is what the room has its commands done by (`RoomPort`): a write is an output, what is posted comes at once, and
time passes where an event says so. How connections are driven is the endpoint's own way, again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np

from kvferry.endpoint.prefill.room import SendingRoom
from kvferry.errors import KVFerryError, PeerDisconnectedError, TransferFailedError, TransportError
from kvferry.layout import TokenShare
from kvferry.plan import Route, elect_writer
from kvferry.plan.requests.chunks import Chunk, ChunkPart
from kvferry.plan.requests.demands import GroupRequest
from kvferry.plan.requests.moves import ReceiverRequest
from kvferry.plan.requests.page_numbers import PageNumbers
from kvferry.protocol.transfer.events import (
    AbortRequested,
    ChunkSubmitted,
    ReceiverLost,
    ReceiverOpened,
    SendDrained,
    SenderEvent,
    SendFailed,
    SendFinish,
    Tick,
    Write,
    WriteDone,
    WriteFailed,
)
from kvferry.protocol.transfer.room_table import RoomMessage, RoomTable
from kvferry.protocol.transfer.sender import SenderMachine
from kvferry.protocol.transfer.states import SenderState, TransferState
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

_Room: TypeAlias = SendingRoom[None]  # no worker runs it

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
        self._through: dict[str, int] = {}  # the connection through which each receiver has opened the room
        self._refused: list[WriteFailed] = []  # writes to those that are not connected any more
        self._now = 0.0
        self._out: list[Output] = []  # of the event that is handled

    @property
    def _room(self) -> _Room | None:
        return self._table.rooms.get(ROOM)

    @property
    def room_state(self) -> SenderState | None:
        """Where its room stands; None before its caller has opened it."""
        return self._opened_room.machine.detailed_state if self._opened_room is not None else None

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
        return self._connections.channels.channel_to(decode_name(decode)).has_unacknowledged

    def handle(self, event: Event) -> list[Output]:
        """Takes an event of the enumeration."""
        out = self._out = []
        self._handle(event)
        self._out = []
        return out

    def _handle(self, event: Event) -> None:
        match event:
            case ("open",):
                self.has_opened = True
                machine = SenderMachine(ROOM, rank=self._number, deadlines=DEADLINES, now=0.0)
                room: _Room = SendingRoom(machine, self)
                self._opened_room = room
                before = self._table.add(room)
                self._table.handled(ROOM)
                for receiver, message in before:
                    self._deliver(room, receiver, message)
            case ("submit",):
                self.has_submitted = True
                for number in range(self._chunks):
                    part = ChunkPart("kv", number, np.array([number], np.int64))
                    chunk = Chunk(number=number, parts=(part,), is_last=number == self._chunks - 1, aux=b"t")
                    self._apply(ChunkSubmitted(chunk))
            case ("abort",):
                self._apply(AbortRequested("the client left"))
            case ("late",):
                self._now = _LATE
                self._apply(Tick())
                self._now = 0.0
            case ("message", decode, data):
                self._received(decode, codec.decode_to_prefill(data))
            case ("lost", decode):
                self._lose(decode_name(decode))
            case ("landed", decode, sequence):
                self._answer(decode, self._connections.end_write(decode_name(decode)))
                self._apply(WriteDone(decode_name(decode), sequence))
            case ("failed", decode, sequence):
                self._connections.broke_off(decode_name(decode))
                self._apply(WriteFailed(decode_name(decode), sequence, TransportError("it broke"), True))
            case ("settled", decode, sequence, span):
                if span is not None:
                    self._release(decode, span)
                self._answer(decode, self._connections.end_write(decode_name(decode)))
                self._apply(WriteFailed(decode_name(decode), sequence, TransportError("it broke")))
            case ("next use",):
                for receiver, message in self._table.expired(_LATE):
                    self._fail(receiver, message, TransferFailedError("nobody came"))
                self.use += 1
                self.has_opened = self.has_submitted = False
                self._opened_room = None
                self._through = {}

    # ---- messages -----------------------------------------------------------------------------------------------

    def _send(self, decode: int, message: Message) -> None:
        ready = self._connections.channels.outgoing(decode_name(decode), message)
        self._out += [("down", decode, codec.encode(each)) for each in ready]

    def _received(self, decode: int, message: messages.ToPrefill) -> None:
        name = decode_name(decode)
        match message:
            case messages.Attach():
                if self._connections.attach(message):
                    rank = decode_rank(decode, self._decodes)
                    for _, generation in self._table.attached(name):
                        self._not_opened(name, rank, generation)
                if self._connections.is_latest(message):
                    self._answer(decode, self._connections.confirmation(name))
            case messages.Numbered():
                taken = self._connections.channels.take(name, message)
                if taken is None:
                    self._answer(decode, [self._connections.not_attached()])
                for each in taken or ():
                    match each:
                        case messages.OpenRoom():
                            self._take_open(name, each)
                        case messages.Credit():
                            self._connections.credited(name, each)
                            self._post_waiting()
            case messages.Ping():
                self._answer(decode, self._connections.answer(name, message))
            case messages.AbortRoom():
                channels = self._connections.channels
                is_unopened = channels.take_back(name, message.epoch, message.number)
                is_unopened |= self._table.is_dropped(name, message)
                self._aborted(name, message, is_unopened)

    def _answer(self, decode: int, answers: Iterable[Message]) -> None:
        self._out += [("down", decode, codec.encode(each)) for each in answers]

    def _take_open(self, name: str, message: messages.OpenRoom) -> None:
        try:
            if self._connections.ready(name) is None:
                raise PeerDisconnectedError(f"{name} must attach before it opens rooms")
            room = self._table.open_request(name, message, 0.0, rank=self._connections.rank(name))
        except KVFerryError as error:
            self._table.ended(name, message.room, message.generation, error)
            self._fail(name, message, error)
            if isinstance(error, PeerDisconnectedError):
                self._not_opened(name, self._connections.rank(name), message.generation)
        else:
            if room is not None:
                self._opened(room, name, message)

    def _deliver(self, room: _Room, name: str, message: RoomMessage) -> None:
        match message:
            case messages.OpenRoom():
                if self._connections.ready(name) is not None:  # else it was lost meanwhile
                    self._opened(room, name, message)
            case messages.AbortRoom():
                room.aborted(name, message, None)
                self._moved(room)
            case messages.RefuseRoom():
                room.refused(name, message, None)
                self._moved(room)

    def _opened(self, room: _Room, name: str, message: messages.OpenRoom) -> None:
        if not room.takes(name, message):
            return
        connection = self._connections.ready(name)
        assert connection is not None
        self._through[name] = connection.number
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
            )
        )

    def _aborted(self, name: str, message: messages.AbortRoom, is_unopened: bool) -> None:
        room = self._table.abort(name, message, 0.0, is_unopened=is_unopened)
        if room is None:
            self._drained(name, message.generation, after_failure=name in self._connections.last_failures)
        else:
            self._deliver(room, name, message)
        if is_unopened:
            self._not_opened(name, self._connections.rank(name), message.generation)

    def _not_opened(self, name: str, rank: DecodeRank | None, generation: int) -> None:
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
            self._refuse(name, refusal)

    def _refuse(self, name: str, message: messages.RefuseRoom) -> None:
        room = self._table.refused_by(name, message, 0.0)
        if room is not None:
            self._deliver(room, name, message)

    def _fail(self, name: str, message: messages.OpenRoom, error: KVFerryError) -> None:
        self._failed(name, message.generation, error)
        self._drained(name, message.generation, after_failure=name in self._connections.last_failures)

    def _failed(self, name: str, generation: int, error: Exception) -> None:
        failed = messages.RoomFailed(
            room=ROOM, generation=generation, writer=self._number, error=type(error).__name__, reason=""
        )
        self._send(number_of(name), failed)

    def _drained(self, name: str, generation: int, *, after_failure: bool) -> None:
        drained = messages.Drained(
            endpoint=prefill_name(self._number),
            room=ROOM,
            generation=generation,
            writer=self._number,
            after_failure=after_failure,
        )
        self._send(number_of(name), drained)

    def _lose(self, name: str) -> None:
        """Gives a decode rank up that may live."""
        rank = self._connections.rank(name)
        self._connections.lose(name)
        rooms, aborts = self._table.forget_receiver(name, 0.0)
        if any(room is self._opened_room for room in rooms):
            self._apply(ReceiverLost(name, PeerDisconnectedError("silent for too long")))
        for message in aborts:
            self._not_opened(name, rank, message.generation)

    # ---- the room -----------------------------------------------------------------------------------------------

    def _apply(self, event: SenderEvent) -> None:
        room = self._opened_room
        if room is not None:
            room.apply(event, None)
            self._moved(room)

    def _moved(self, room: _Room) -> None:
        """Does what follows a turn of the room: fails writes that cannot go on, and forgets the room."""
        refused, self._refused = self._refused, []
        for each in refused:
            self._apply(each)
        if room.machine.state is TransferState.FAILED:
            waiting, self._waiting = self._waiting, []
            for decode, _, sequence in waiting:
                self._answer(decode, self._connections.end_write(decode_name(decode)))
                self._apply(WriteFailed(decode_name(decode), sequence, TransportError("the room has failed")))
        if room.machine.is_done and self._room is room:
            self._table.remove(room, 0.0)
            room.pass_next_on()

    def now(self) -> float:
        return self._now

    def post(self, event: SenderEvent) -> None:
        self._apply(event)

    def write(self, command: Write, _: None) -> None:
        name = command.receiver
        if self._connections.begin_write(name, self._through[name]):
            self._write(number_of(name), command.generation, command.sequence)
        else:
            error = PeerDisconnectedError("not connected any more")
            self._refused.append(WriteFailed(name, command.sequence, error))

    def notify(self, command: SendFinish) -> Exception | None:
        finished = messages.WriterFinished(
            room=ROOM, generation=command.generation, writer=self._number, chunks=command.chunks, aux=command.aux
        )
        self._out.append(("notify", number_of(command.receiver), codec.encode(finished)))
        return None

    def tell_failed(self, command: SendFailed) -> None:
        self._failed(command.receiver, command.generation, command.error)

    def tell_drained(self, command: SendDrained, *, is_another_use: bool) -> None:
        name = command.receiver
        after_failure = command.after_failure or (is_another_use and name in self._connections.last_failures)
        self._drained(name, command.generation, after_failure=after_failure)

    def pass_on(self, receiver: str, message: RoomMessage) -> None:
        match message:
            case messages.OpenRoom():
                self._take_open(receiver, message)
            case messages.AbortRoom():
                self._aborted(receiver, message, is_unopened=False)
            case messages.RefuseRoom():
                self._refuse(receiver, message)

    def _write(self, decode: int, generation: int, sequence: int) -> None:
        """Posts a write: every other one is staged."""
        if sequence % 2 == 0:
            self._out.append(("write", decode, generation, sequence, None))
            return
        self._waiting.append((decode, generation, sequence))
        self._post_waiting()

    def _post_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for decode, generation, sequence in waiting:
            is_behind = any(each == decode for each, _, _ in self._waiting)
            span = None if is_behind else self._connections.reserve(decode_name(decode))
            if span is None:
                self._waiting.append((decode, generation, sequence))
            else:
                self._out.append(("write", decode, generation, sequence, span))

    def _release(self, decode: int, span: RingSpan) -> None:
        name = prefill_name(self._number)
        self._send(decode, messages.SpanReleased(endpoint=name, after_failure=True, **span._asdict()))
