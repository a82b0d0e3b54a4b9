"""One room on a prefill rank: the caller's `Sender`, and the actor behind it that runs the state machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvferry.endpoint.actors import Actor, RunQueue
from kvferry.endpoint.attachment import Attachment
from kvferry.endpoint.stats import SenderStats, WriteRecord
from kvferry.endpoint.transfer import Transfer
from kvferry.endpoint.workers import Worker
from kvferry.errors import PeerDisconnectedError, UsageError
from kvferry.plan import descriptor_indices
from kvferry.protocol import messages
from kvferry.protocol.chunks import ChunkSequence
from kvferry.protocol.sender import (
    ChunkSubmitted,
    FinishFailed,
    FinishSent,
    ReceiverOpened,
    SendDrained,
    SenderAbortRequested,
    SenderBroke,
    SenderCommand,
    SenderEvent,
    SenderMachine,
    SendFailed,
    SendFinish,
    Write,
    WriteDone,
    WriteFailed,
)
from kvferry.transport import FlightReport, Transport


class Surroundings(Protocol):
    """What a sending room needs of its endpoint. All of it may be called from any worker."""

    transport: Transport
    engine_rank: int
    group_rank: int
    pool_pages: int

    def attachment(self, receiver: str) -> Attachment | None:
        """The decode rank of that name, if it is connected."""

    def send(self, receiver: str, message: messages.Message) -> None:
        """Sends a control message."""

    def forget_room(self, room: SendingRoom) -> None:
        """Drops a room that is done."""


class Sender(Transfer):
    """One request's transfer from this prefill rank, as its caller sees it."""

    def __init__(
        self,
        room: int,
        chunks: ChunkSequence,
        post: Callable[[SenderEvent], None],
        *,
        settle: Callable[[], object] | None,
    ) -> None:
        """For `PrefillEndpoint.open`.

        Args:
            settle: in synchronous mode, waits until what was submitted is written.
        """
        super().__init__(room)
        self._chunks = chunks
        self._post = post
        self._settle = settle
        self.stats = SenderStats(opened_at=time.monotonic(), last_submitted_at=None, ended_at=None, writes=())

    def submit(
        self, pages: ArrayLike, *, start: int | None = None, last: bool = False, aux: bytes | None = None
    ) -> None:
        """Hands in the next chunk of the request and returns at once, whatever its size.

        The pages must keep their contents until `pages_reusable`. Chunks may be handed in before the decode side asks
        for them; pages that it already holds are not sent. A room that has already failed takes chunks in silence:
        `state` says so.

        Args:
            pages: page numbers in this rank's pool, in the order of the request. A NumPy array of int64 is fastest.
            start: position of the first page in the request. None continues where the chunk before ended. The first
                chunk may start later if the decode side is known to hold what comes before.
            last: whether the request ends with this chunk, which may be empty.
            aux: with the last chunk: the first token and whatever else the decode side needs, as bytes. Taken from the
                first rank of the last pipeline stage; the others' is ignored.

        Raises:
            ChunkError: after the last chunk, or if the chunk does not follow the one before it.
            PageError: if page numbers are not integers, out of range or repeated.
            UsageError: if aux is given before the last chunk, or is too large.
        """
        if aux is not None and not last:
            raise UsageError(f"room {self.room}: aux data goes with the last chunk (last=True)")
        if aux is not None and len(aux) > messages.MAX_AUX_BYTES:
            raise UsageError(
                f"room {self.room}: {len(aux)} bytes of aux data exceed the limit of {messages.MAX_AUX_BYTES}"
            )
        self._post(ChunkSubmitted(self._chunks.chunk(pages, start=start, is_last=last, aux=aux)))
        if self._settle is not None:
            self._settle()

    def abort(self, reason: str = "no reason given") -> None:
        """Gives the transfer up, on both sides. Returns at once; a transfer that has ended stays as it is."""
        self._post(SenderAbortRequested(reason))


class SendingRoom(Actor):
    """Runs one room's state machine on whichever worker is free, and does what it says."""

    def __init__(
        self, machine: SenderMachine, run_queue: RunQueue, surroundings: Surroundings, *, synchronous: bool
    ) -> None:
        super().__init__(run_queue)
        self.room = machine.room
        self.next_deadline = machine.deadline
        self._machine = machine
        self._surroundings = surroundings
        self._rows: dict[str, NDArray[np.int32]] = {}
        self._submitted_at: dict[int, float] = {}
        self._writes: list[WriteRecord] = []
        self._last_submitted_at: float | None = None
        self._settled = threading.Event()
        self._turn_started_at = 0.0
        self.sender = Sender(
            machine.room,
            ChunkSequence(machine.room, surroundings.pool_pages),
            self._post_from_caller,
            settle=self._settled.wait if synchronous else None,
        )

    def _post_from_caller(self, event: SenderEvent) -> None:
        self._settled.clear()
        if isinstance(event, ChunkSubmitted):
            now = time.monotonic()
            self._submitted_at[event.chunk.number] = now
            if event.chunk.is_last:
                self._last_submitted_at = now
        self.post(event)

    def opened_by(self, attachment: Attachment, message: messages.OpenRoom, *, sends_aux: bool) -> ReceiverOpened:
        """The event for a decode rank's wish to get this room."""
        rows = attachment.rows(self.room, self._surroundings.group_rank)
        self._rows[attachment.receiver] = rows
        return ReceiverOpened(
            receiver=attachment.receiver,
            generation=message.generation,
            expected_receivers=message.receivers,
            prefix_pages=message.prefix_pages,
            pages=messages.unpack_pages(message.pages),
            is_writer=len(rows) > 0,
            sends_aux=sends_aux,
        )

    def handle(self, event: SenderEvent, worker: Worker) -> None:
        """Tells the machine what happened, does what it says, and shows the caller where the room stands."""
        self._turn_started_at = time.monotonic()
        for command in self._machine.handle(event, self._turn_started_at):
            self._execute(command, worker)
        self._show()

    def broke(self, error: Exception, worker: Worker) -> None:
        """Fails the room for an error that should not have been."""
        for command in self._machine.handle(SenderBroke(error), time.monotonic()):
            self._execute(command, worker)
        self._show()

    def _show(self) -> None:
        machine = self._machine
        self.next_deadline = machine.deadline
        ended_at = self.sender.stats.ended_at
        if machine.state.is_final and ended_at is None:
            ended_at = time.monotonic()
        self.sender.stats = SenderStats(
            opened_at=self.sender.stats.opened_at,
            last_submitted_at=self._last_submitted_at,
            ended_at=ended_at,
            writes=tuple(self._writes) if machine.state.is_final else (),
        )
        if machine.is_done:
            self._surroundings.forget_room(self)
        self.sender._update(machine.state, machine.error, pages_reusable=machine.is_done)
        if machine.is_drained and not self.has_events:
            self._settled.set()

    def _execute(self, command: SenderCommand, worker: Worker) -> None:
        match command:
            case Write():
                self._write(command, worker)
            case SendFinish():
                self._finish(command)
            case SendFailed(receiver, generation, error):
                self._surroundings.send(
                    receiver,
                    messages.RoomFailed(
                        room=self.room,
                        generation=generation,
                        writer=self._surroundings.engine_rank,
                        error=type(error).__name__,
                        reason=str(error),
                    ),
                )
            case SendDrained(receiver, generation):
                self._surroundings.send(
                    receiver,
                    messages.Drained(room=self.room, generation=generation, writer=self._surroundings.engine_rank),
                )

    def _write(self, command: Write, worker: Worker) -> None:
        surroundings = self._surroundings
        attachment = surroundings.attachment(command.receiver)
        posted_at = time.monotonic()
        try:
            if attachment is None or attachment.local is None or attachment.remote is None:
                raise PeerDisconnectedError(f"{command.receiver} is not connected any more")
            rows = self._rows[command.receiver]
            flight = surroundings.transport.post(
                attachment.local,
                descriptor_indices(rows, command.source_pages, pool_pages=surroundings.pool_pages),
                attachment.remote,
                descriptor_indices(rows, command.destination_pages, pool_pages=attachment.pages),
                messages.encode(
                    messages.ChunkArrived(
                        room=self.room,
                        generation=command.generation,
                        writer=surroundings.engine_rank,
                        sequence=command.sequence,
                    )
                ),
            )
        except Exception as error:
            self.post(WriteFailed(command.receiver, command.sequence, error))
            return

        submitted_at = self._submitted_at.get(command.chunk, posted_at)

        def done(report: FlightReport) -> None:
            self._writes.append(
                WriteRecord(
                    receiver=command.receiver,
                    total_bytes=report.total_bytes,
                    descriptors=report.descriptors,
                    submitted_at=submitted_at,
                    posted_at=posted_at,
                    done_at=time.monotonic(),
                    transport_post_s=report.post_s,
                    transport_transfer_s=report.transfer_s,
                )
            )
            self.post(WriteDone(command.receiver, command.sequence))

        def failed(error: Exception) -> None:
            self.post(WriteFailed(command.receiver, command.sequence, error))

        worker.watch(flight, done, failed)

    def _finish(self, command: SendFinish) -> None:
        message = messages.WriterFinished(
            room=self.room,
            generation=command.generation,
            writer=self._surroundings.engine_rank,
            chunks=command.chunks,
            aux=command.aux,
        )
        try:
            self._surroundings.transport.notify(command.receiver, messages.encode(message))
        except Exception as error:
            self.post(FinishFailed(command.receiver, error))
        else:
            self.post(FinishSent(command.receiver))
