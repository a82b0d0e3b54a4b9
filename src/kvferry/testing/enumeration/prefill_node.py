"""A prefill rank of an enumeration: its room table, sender, channels and rings, as its endpoint drives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from kvferry.errors import KVFerryError, TransferFailedError, TransportError
from kvferry.layout import RankCoordinates, TokenShare
from kvferry.plan import Demand, Route
from kvferry.protocol.geometry.demands import WantedGroup
from kvferry.protocol.geometry.moves import ReceiverRequest
from kvferry.protocol.links.decode_channels import DecodeChannels
from kvferry.protocol.pages.chunks import Chunk, ChunkPart
from kvferry.protocol.pages.page_numbers import PageNumbers
from kvferry.protocol.rooms.room_table import RoomMessage, RoomTable
from kvferry.protocol.transfer.credits import Span, WritingRing
from kvferry.protocol.transfer.deadlines import Deadlines
from kvferry.protocol.transfer.sender import SenderMachine
from kvferry.protocol.transfer.sender_events import (
    AwaitTurn,
    ChunkSubmitted,
    FinishSent,
    ReceiverAborted,
    ReceiverOpened,
    ReceiverRefused,
    SendDrained,
    SenderAbortRequested,
    SenderEvent,
    SenderTick,
    SendFailed,
    SendFinish,
    TurnCame,
    Write,
    WriteDone,
    WriteFailed,
)
from kvferry.protocol.transfer.states import TransferState
from kvferry.protocol.wire import codec, messages, notifications
from kvferry.protocol.wire.field_types import Message
from kvferry.protocol.wire.rank_identity import DecodeRank
from kvferry.testing.enumeration.automata import Event, Output

ROOM = 7
EPOCH = 1
RING_EPOCH = 5
SPAN_BYTES = 64
"""Of a part, and of a ring: one part waits for the credit of the one before."""

DEADLINES = Deadlines(bootstrap_s=10.0, waiting_s=20.0, write_s=5.0)
_LATE = float("inf")
_PAGE_TOKENS = 16
_ROUTE = Route(
    source_group="kv",
    destination_group="kv",
    source_page_tokens=_PAGE_TOKENS,
    destination_page_tokens=_PAGE_TOKENS,
    source_share=TokenShare(),
    destination_share=TokenShare(),
    unit_tokens=_PAGE_TOKENS,
    has_slots=False,
)


def decode_name(number: int) -> str:
    """The name of a decode rank."""
    return f"d{number}"


def prefill_name(number: int) -> str:
    """The name of a prefill rank."""
    return f"p{number}"


def writer_of(decode: int, prefills: int) -> int:
    """The prefill rank that writes to a decode rank's pages."""
    return decode % prefills


@dataclass(eq=False)
class _Room:
    """An open room, as the table wants it."""

    room: int
    machine: SenderMachine
    generations: dict[str, int] = field(default_factory=dict)
    next_opens: dict[str, messages.OpenRoom] = field(default_factory=dict)
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
        """Begins attached to every decode rank, with no room."""
        self.use = 1
        self.has_opened = False
        self.has_submitted = False
        self._number = number
        self._prefills = prefills
        self._decodes = decodes
        self._chunks = chunks
        self._table: RoomTable[_Room] = RoomTable(max_pending=8, most_page_bytes=1 << 20, keep_s=10.0)
        self._channels = DecodeChannels(prefill_name(number))
        for decode in range(decodes):
            self._channels.attached(decode_name(decode), EPOCH)
        self._ring = WritingRing(SPAN_BYTES)
        self._opened_room: _Room | None = None  # of this use; it answers what it was given even when it has ended
        self._waiting: list[tuple[int, int, int]] = []  # staged writes without memory: receiver, generation, sequence
        self._broken_off: set[str] = set()

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

    def unacknowledged(self, decode: int) -> bool:
        """Whether a message to a decode rank may be lost."""
        return self._channels.is_unacknowledged(decode_name(decode))

    def handle(self, event: Event) -> list[Output]:
        """Takes an event of the enumeration."""
        out: list[Output] = []
        match event:
            case ("open",):
                self.has_opened = True
                room = _Room(ROOM, SenderMachine(ROOM, rank=self._number, deadlines=DEADLINES, now=0.0))
                self._opened_room = room
                for receiver, message in self._table.add(room):
                    self._deliver(room, receiver, message, out)
            case ("submit",):
                self.has_submitted = True
                for number in range(self._chunks):
                    part = ChunkPart("kv", number, np.array([number], np.int64))
                    chunk = Chunk(number=number, parts=(part,), is_last=number == self._chunks - 1, aux=b"t")
                    self._apply(ChunkSubmitted(chunk), out)
            case ("abort",):
                self._apply(SenderAbortRequested("the client left"), out)
            case ("late",):
                self._apply(SenderTick(), out, now=_LATE)
            case ("message", decode, data):
                self._received(decode, codec.decode_to_prefill(data), out)
            case ("landed", decode, sequence):
                self._apply(WriteDone(decode_name(decode), sequence), out)
            case ("failed", decode, sequence):
                self._broken_off.add(decode_name(decode))
                self._apply(WriteFailed(decode_name(decode), sequence, TransportError("it broke"), True), out)
            case ("settled", decode, sequence, span):
                if span is not None:
                    self._release(decode, Span(*span), out)
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
        ready = self._channels.outgoing(decode_name(decode), message)
        out += [("down", decode, codec.encode(each)) for each in ready]

    def _received(self, decode: int, message: messages.ToPrefill, out: list[Output]) -> None:
        name = decode_name(decode)
        match message:
            case messages.Numbered():
                for each in self._channels.take(name, message) or ():
                    match each:
                        case messages.OpenRoom():
                            self._take_open(name, each, out)
                        case messages.Credit(position=position):
                            self._ring.read_until(position)
                            self._post_waiting(out)
            case messages.Ping():
                out += [("down", decode, codec.encode(each)) for each in self._channels.answer(name, message)]
            case messages.AbortRoom():
                is_unopened = self._channels.take_back(name, message.epoch, message.number)
                self._aborted(name, message, is_unopened, out)

    def _take_open(self, name: str, message: messages.OpenRoom, out: list[Output]) -> None:
        try:
            room = self._table.open_request(name, message, 0.0)
        except KVFerryError as error:
            self._table.refused(name, message, error, 0.0)
            self._fail(name, message, error, out)
        else:
            if room is not None:
                self._opened(room, name, message, out)

    def _deliver(self, room: _Room, name: str, message: RoomMessage, out: list[Output]) -> None:
        match message:
            case messages.OpenRoom():
                self._opened(room, name, message, out)
            case messages.AbortRoom():
                self._apply(ReceiverAborted(name, message.generation, message.reason, message.error), out)
            case messages.RefuseRoom():
                self._apply(ReceiverRefused(name, DecodeRank("decode", message.coordinates), message.reason), out)

    def _opened(self, room: _Room, name: str, message: messages.OpenRoom, out: list[Output]) -> None:
        known = room.generations.get(name)
        is_for_next_use = room.machine.state is TransferState.SUCCESS if known is None else known != message.generation
        if is_for_next_use:
            room.next_opens[name] = message
            return
        room.generations[name] = message.generation
        stop = self._chunks * _PAGE_TOKENS
        wanted: Mapping[str, WantedGroup] = {
            "kv": WantedGroup(Demand(0, 0, stop), 0, PageNumbers.of(np.arange(self._chunks)))
        }
        routes = (_ROUTE,) if writer_of(int(name[1:]), self._prefills) == self._number else ()
        self._apply(
            ReceiverOpened(
                receiver=name,
                generation=message.generation,
                expected_receivers=message.receivers,
                request=ReceiverRequest(tokens=None, wanted=wanted, routes=routes),
                sends_aux=self._number == 0,
                rank=DecodeRank("decode", _coordinates(name, self._decodes)),
            ),
            out,
        )

    def _aborted(self, name: str, message: messages.AbortRoom, is_unopened: bool, out: list[Output]) -> None:
        room = self._table.abort(name, message, 0.0, is_unopened=is_unopened)
        if room is None:
            self._drained(name, message.generation, out)
        else:
            kept = room.next_opens.get(name)
            if kept is not None and kept.generation == message.generation:
                del room.next_opens[name]
            self._apply(ReceiverAborted(name, message.generation, message.reason, message.error), out)
        if is_unopened:
            self._refused(name, message, out)

    def _refused(self, name: str, message: messages.AbortRoom, out: list[Output]) -> None:
        refusal = messages.RefuseRoom(
            endpoint=prefill_name(self._number),
            engine="decode",
            coordinates=_coordinates(name, self._decodes),
            room=message.room,
            generation=message.generation,
            reason=message.reason,
        )
        if self._table.is_new_refusal(name, refusal):
            room = self._table.refused_by(name, refusal, 0.0)
            if room is not None:
                self._deliver(room, name, refusal, out)
                if room.machine.state is TransferState.FAILED:
                    room.generations.setdefault(name, message.generation)

    def _fail(self, name: str, message: messages.OpenRoom, error: KVFerryError, out: list[Output]) -> None:
        failed = messages.RoomFailed(
            room=ROOM,
            generation=message.generation,
            writer=self._number,
            error=type(error).__name__,
            reason="",
        )
        self._send(int(name[1:]), failed, out)
        self._drained(name, message.generation, out)

    def _drained(self, name: str, generation: int, out: list[Output]) -> None:
        drained = messages.Drained(
            endpoint=prefill_name(self._number),
            room=ROOM,
            generation=generation,
            writer=self._number,
            after_failure=name in self._broken_off,
        )
        self._send(int(name[1:]), drained, out)

    # ---- the room -----------------------------------------------------------------------------------------------

    def _apply(self, event: SenderEvent, out: list[Output], now: float = 0.0) -> None:
        room = self._opened_room
        if room is None:
            return
        for command in room.machine.handle(event, now):
            match command:
                case Write(receiver=name, generation=generation, sequence=sequence):
                    self._write(int(name[1:]), generation, sequence, out)
                case AwaitTurn():
                    self._apply(TurnCame(), out)
                case SendFinish(name, generation, chunks, aux):
                    finished = notifications.WriterFinished(
                        room=ROOM, generation=generation, writer=self._number, chunks=chunks, aux=aux
                    )
                    out.append(("notify", int(name[1:]), codec.encode(finished)))
                    self._apply(FinishSent(name), out)
                case SendFailed(name, generation, error):
                    failed = messages.RoomFailed(
                        room=ROOM, generation=generation, writer=self._number, error=type(error).__name__, reason=""
                    )
                    self._send(int(name[1:]), failed, out)
                case SendDrained(name, generation, after_failure):
                    is_another = room.generations.get(name) != generation
                    drained = messages.Drained(
                        endpoint=prefill_name(self._number),
                        room=ROOM,
                        generation=generation,
                        writer=self._number,
                        after_failure=after_failure or (is_another and name in self._broken_off),
                    )
                    self._send(int(name[1:]), drained, out)
        room.was_open |= room.machine.state not in (TransferState.BOOTSTRAPPING, TransferState.FAILED)
        if room.machine.state is TransferState.FAILED:
            waiting, self._waiting = self._waiting, []
            for decode, _, sequence in waiting:
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
        while self._waiting:
            span = self._ring.reserve(SPAN_BYTES)
            if span is None:
                return
            decode, generation, sequence = self._waiting.pop(0)
            out.append(("write", decode, generation, sequence, (span.start, span.begin, span.stop)))

    def _release(self, decode: int, span: Span, out: list[Output]) -> None:
        released = messages.SpanReleased(
            endpoint=prefill_name(self._number),
            epoch=RING_EPOCH,
            start=span.start,
            begin=span.begin,
            stop=span.stop,
            after_failure=True,
        )
        self._send(decode, released, out)


def _coordinates(name: str, decodes: int) -> RankCoordinates:
    return RankCoordinates(tp_rank=int(name[1:]), tp_size=decodes)
