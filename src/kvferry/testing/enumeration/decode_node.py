"""A decode rank of an enumeration: its receiver, channels and rings, as its endpoint drives them."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.plan import Unit
from kvferry.protocol.links.reliable_channel import ReliableChannel
from kvferry.protocol.transfer.credits import ReadingRing, Span
from kvferry.protocol.transfer.receiver import ReceiverMachine
from kvferry.protocol.transfer.receiver_events import (
    Arrived,
    AwaitArrival,
    Connected,
    Drop,
    Finished,
    PartArrived,
    PartScattered,
    ReceiverAbortRequested,
    ReceiverEvent,
    ReceiverTick,
    Scatter,
    SendAbort,
    SenderDrained,
    SenderFailed,
    SenderSettled,
    SendOpen,
)
from kvferry.protocol.transfer.states import TransferState
from kvferry.protocol.wire import codec, messages, notifications
from kvferry.testing.enumeration.automata import Event, Output
from kvferry.testing.enumeration.prefill_node import (
    DEADLINES,
    EPOCH,
    RING_EPOCH,
    ROOM,
    SPAN_BYTES,
    writer_of,
)

_LATE = float("inf")


class _Part(NamedTuple):
    """A part that is in the ring."""

    prefill: int
    sequence: int
    span: Span


class DecodeNode:
    """A decode rank, with its caller.

    Attributes:
        use: which use of the room's number it is at, from 1 on.
        has_opened: whether its caller has opened that.
        placed: what bytes its pages have of this use: writer and chunk.
        settling: ranks of whose failed writes something may still arrive here, and spans.
    """

    def __init__(self, number: int, prefills: int, decodes: int) -> None:
        """Begins attached to every prefill rank, with no room."""
        self.use = 1
        self.has_opened = False
        self.placed: set[tuple[int, int]] = set()
        self.settling: set[int] = set()
        self._settling_spans: list[tuple[int, Span]] = []
        self._number = number
        self._decodes = decodes
        self._machine: ReceiverMachine | None = None
        self._channels = {prefill: ReliableChannel(EPOCH) for prefill in range(prefills)}
        self._rings = {prefill: ReadingRing(SPAN_BYTES) for prefill in range(prefills)}
        self._open_numbers: dict[int, int] = {}

    @property
    def writer(self) -> int:
        """The prefill rank that writes to its pages."""
        return writer_of(self._number, len(self._channels))

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
    def can_fail(self) -> bool:
        """Whether its room runs."""
        return self._machine is not None and not self._machine.state.is_final

    def holds_pages(self) -> bool:
        """Whether the pages belong to the room of this use."""
        return self._machine is not None and not self._machine.are_pages_reusable

    def read(self, prefill: int) -> int:
        """Up to which position a rank's ring was read."""
        return self._rings[prefill].position

    def awaits(self, prefill: int) -> bool:
        """Whether something sent to a prefill rank may be lost, or an answer."""
        is_unanswered = self._machine is not None and prefill in self._machine.unanswered
        return self._channels[prefill].has_unacknowledged or is_unanswered

    def settles(self, prefill: int) -> bool:
        """Whether it waits for what a prefill rank's failed writes had sent."""
        return prefill in self.settling or any(each == prefill for each, _ in self._settling_spans)

    def handle(self, event: Event) -> list[Output]:
        """Takes an event of the enumeration."""
        out: list[Output] = []
        match event:
            case ("open",):
                self.has_opened = True
                self._machine = ReceiverMachine(ROOM, rank=self._number, deadlines=DEADLINES, now=0.0)
                writers = {self.writer: frozenset({"kv"})}
                self._apply(
                    Connected(
                        ranks=frozenset(self._channels),
                        writers=writers,
                        into_pages=frozenset(writers),
                        aux_writer=0,
                    ),
                    out,
                )
            case ("abort",):
                self._apply(ReceiverAbortRequested("the client left"), out)
            case ("late",):
                self._apply(ReceiverTick(), out, now=_LATE)
            case ("message", prefill, data):
                self._received(prefill, codec.decode_to_decode(data), out)
            case ("note", prefill, data):
                self._notified(prefill, codec.decode_notification(data), out)
            case ("bytes", prefill, generation, sequence):
                if generation == self.generation:
                    self.placed.add((prefill, sequence))
            case ("settled", prefill):
                if prefill in self.settling:
                    self.settling.discard(prefill)
                    self._apply(SenderSettled(prefill), out)
                spans = [span for writer, span in self._settling_spans if writer == prefill]
                self._settling_spans = [entry for entry in self._settling_spans if entry[0] != prefill]
                for span in spans:
                    self._give_back(prefill, span, out)
            case ("broke", prefill):
                out += [("up", prefill, codec.encode(each)) for each in self._channels[prefill].broke()]
                self._repeat_abort(prefill, out)
            case ("heartbeat", prefill):
                out.append(("up", prefill, codec.encode(self._channels[prefill].ping())))
                self._repeat_abort(prefill, out)
            case ("next use",):
                self.use += 1
                self.has_opened = False
                self._machine = None
                self.placed = set()
                self.settling = set()
                self._open_numbers = {}
        return out

    def _repeat_abort(self, prefill: int, out: list[Output]) -> None:
        if self._machine is not None and prefill in self._machine.unanswered:
            self._abort(self._machine.abort_of(prefill), out)

    def _abort(self, command: SendAbort, out: list[Output]) -> None:
        number = self._open_numbers.get(command.rank, 0)
        abort = messages.AbortRoom(
            room=ROOM,
            generation=self.generation,
            reason="",
            error=command.error,
            epoch=EPOCH if number else 0,
            number=number,
        )
        out.append(("up", command.rank, codec.encode(abort)))

    def _send(self, prefill: int, message: messages.NumberedToPrefill, out: list[Output]) -> None:
        ready = self._channels[prefill].send(codec.encode_body(message))
        out += [("up", prefill, codec.encode(each)) for each in ready]

    def _apply(self, event: ReceiverEvent, out: list[Output], now: float = 0.0) -> None:
        machine = self._machine
        if machine is None:
            return
        for command in machine.handle(event, now):
            match command:
                case SendOpen(rank):
                    opened = messages.OpenRoom(
                        room=ROOM, generation=self.generation, receivers=self._decodes, tokens=None, groups=()
                    )
                    self._send(rank, opened, out)
                    self._open_numbers[rank] = self._channels[rank].last_number
                case SendAbort():
                    self._abort(command, out)
                case Scatter(_Part() as part):
                    self.placed.add((part.prefill, part.sequence))
                    self._give_back(part.prefill, part.span, out)
                    self._apply(PartScattered(part.prefill, part.sequence, 0), out)
                case Drop(_Part() as part):
                    self._give_back(part.prefill, part.span, out)
                case AwaitArrival(rank):
                    self.settling.add(rank)

    def _give_back(self, prefill: int, span: Span, out: list[Output]) -> None:
        ring = self._rings[prefill]
        before = ring.position
        ring.release(span)
        if ring.position != before:
            credit = messages.Credit(epoch=RING_EPOCH, position=ring.position)
            self._send(prefill, credit, out)

    def _received(self, prefill: int, message: messages.ToDecode, out: list[Output]) -> None:
        channel = self._channels[prefill]
        match message:
            case messages.Numbered():
                for body in channel.receive(message):
                    match codec.decode_numbered_to_decode(body):
                        case messages.RoomFailed() as failed if failed.generation == self.generation:
                            self._apply(SenderFailed(failed.writer, failed.error, failed.reason), out)
                        case messages.SpanReleased() as released:
                            self._span_released(prefill, released, out)
            case messages.Drained() if message.generation == self.generation:
                self._apply(SenderDrained(message.writer, message.after_failure), out)
            case messages.Pong():
                out += [("up", prefill, codec.encode(each)) for each in channel.answered(message)]

    def _span_released(self, prefill: int, message: messages.SpanReleased, out: list[Output]) -> None:
        span = Span(message.start, message.begin, message.stop)
        if not self._rings[prefill].can_hold(span):
            return
        if message.after_failure:
            self._settling_spans.append((prefill, span))
        else:
            self._give_back(prefill, span, out)

    def _notified(self, prefill: int, message: notifications.Notification, out: list[Output]) -> None:
        is_ours = message.generation == self.generation and self._machine is not None and not self.has_ended
        match message:
            case notifications.StagedArrived():
                span = Span(message.start, message.begin, message.stop)
                part = _Part(prefill, message.sequence, span)
                if is_ours:
                    self._apply(PartArrived(message.writer, message.sequence, 0, is_last=True, work=part), out)
                else:
                    self._give_back(prefill, span, out)
            case notifications.ChunkArrived() if is_ours:
                self._apply(Arrived(message.writer, message.sequence), out)
            case notifications.WriterFinished() if is_ours:
                self._apply(Finished(message.writer, message.chunks, message.aux), out)


def staged_arrived(writer: int, generation: int, sequence: int, span: tuple[int, int, int]) -> bytes:
    """Encodes the notification of a part."""
    start, begin, stop = span
    return codec.encode(
        notifications.StagedArrived(
            room=ROOM,
            generation=generation,
            writer=writer,
            sequence=sequence,
            part=0,
            is_last=True,
            epoch=RING_EPOCH,
            start=start,
            begin=begin,
            stop=stop,
            unit=Unit.WHOLE,
            segments=(),
        )
    )


def chunk_arrived(writer: int, generation: int, sequence: int) -> bytes:
    """Encodes the notification of a chunk that was written directly."""
    return codec.encode(notifications.ChunkArrived(room=ROOM, generation=generation, writer=writer, sequence=sequence))
