"""One room on a prefill rank: the state machine behind the caller's `Sender`, and what its commands do."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from kvferry.errors import KVFerryError
from kvferry.protocol.transfer.events import (
    AwaitTurn,
    FinishSent,
    ReceiverMessage,
    SendDrained,
    SenderCommand,
    SenderEvent,
    SendFailed,
    SendFinish,
    TurnCame,
    Write,
)
from kvferry.protocol.transfer.room_table import RoomMessage
from kvferry.protocol.transfer.sender import SenderMachine
from kvferry.protocol.transfer.states import TransferState
from kvferry.protocol.wire import messages

WorkerT = TypeVar("WorkerT", contravariant=True)
"""Who runs the room's turn."""


class RoomPort(Protocol[WorkerT]):
    """What a room has done outside of itself. Called in its turns only."""

    def now(self) -> float:
        """Returns the time, in seconds of a steady clock."""

    def post(self, event: SenderEvent) -> None:
        """Queues an event for one of the room's next turns."""

    def write(self, command: Write, worker: WorkerT) -> None:
        """Begins a write: `WriteDone` or `WriteFailed` follows."""

    def notify(self, command: SendFinish) -> Exception | None:
        """Tells a receiver that all is written; returns why it cannot, if so."""

    def tell_failed(self, command: SendFailed) -> None:
        """Tells a decode rank that the room cannot be completed."""

    def tell_drained(self, command: SendDrained, *, is_another_use: bool) -> None:
        """Tells a decode rank that nothing will be written again: for a use of the number that may be another one."""

    def pass_on(self, receiver: str, message: RoomMessage) -> None:
        """Takes a decode rank's message for whoever has the number now, or will have it."""


class SendingRoom(Generic[WorkerT]):
    """A room's state machine, and what belongs to its use of the number. Only the room's own turns change it.

    Attributes:
        machine: decides what is done.
        room: its number.
        generations: of the decode ranks that have opened the room, and of those that refused it.
        all_open_at: when every receiver had opened it; None if not all have.
    """

    def __init__(self, machine: SenderMachine, port: RoomPort[WorkerT]) -> None:
        """Begins with no receivers.

        Args:
            port: does what the room wants done outside of itself.
        """
        self.machine = machine
        self.room = machine.room
        self.generations: dict[str, int] = {}
        self.all_open_at: float | None = None
        self.port = port
        self._next_opens: dict[str, messages.OpenRoom] = {}

    @property
    def failed_alone(self) -> bool:
        """Whether the room failed before every receiver had opened it, so that some were not notified yet."""
        return self.machine.state is TransferState.FAILED and self.all_open_at is None

    @property
    def error(self) -> KVFerryError | None:
        """Why it failed, once it has."""
        return self.machine.error

    def apply(self, event: SenderEvent, worker: WorkerT) -> None:
        """Passes an event to the machine, and executes its commands."""
        now = self.port.now()
        commands = self.machine.handle(event, now)
        if self.all_open_at is None and self.machine.state not in (TransferState.BOOTSTRAPPING, TransferState.FAILED):
            self.all_open_at = now
        notified = [answer for command in commands if (answer := self._execute(command, worker)) is not None]
        for answer in notified:
            self.apply(answer, worker)

    def _execute(self, command: SenderCommand, worker: WorkerT) -> FinishSent | None:
        """Executes a command; returns what came of it, where that is known at once."""
        match command:
            case Write():
                self.port.write(command, worker)
            case AwaitTurn():
                self.port.post(TurnCame())
            case SendFinish():
                return FinishSent(command.receiver, self.port.notify(command))
            case SendFailed():
                self.port.tell_failed(command)
            case SendDrained(receiver, generation):
                is_another_use = self.generations.get(receiver) != generation
                self.port.tell_drained(command, is_another_use=is_another_use)
        return None

    def takes(self, receiver: str, message: messages.OpenRoom) -> bool:
        """Whether an open request is for this transfer, which counts it in. One for the next of this number is kept.

        A decode rank may end a room before this rank does, and open the next one.
        """
        known = self.generations.get(receiver)
        is_for_next_use = self.machine.state is TransferState.SUCCESS if known is None else known != message.generation
        if is_for_next_use:
            self._next_opens[receiver] = message
        else:
            self.generations[receiver] = message.generation
        return not is_for_next_use

    def aborted(self, receiver: str, message: messages.AbortRoom, worker: WorkerT) -> None:
        """Takes a decode rank's abort."""
        if self.machine.is_done and self.generations.get(receiver) != message.generation:
            # Came while this room ended. The open request that it aborts was passed on already; so is the abort.
            self.port.pass_on(receiver, message)
            return
        kept = self._next_opens.get(receiver)
        if kept is not None and kept.generation == message.generation:
            del self._next_opens[receiver]
        self.apply(ReceiverMessage(receiver, message), worker)

    def refused(self, receiver: str, message: messages.RefuseRoom, worker: WorkerT) -> None:
        """Takes a decode rank's refusal."""
        if self.machine.is_done:  # came while this room ended, and may be for the next one
            self.port.pass_on(receiver, message)
            return
        self.apply(ReceiverMessage(receiver, message), worker)
        if self.machine.state is TransferState.FAILED:  # it is not to be notified: the next that it opens is another
            self.generations.setdefault(receiver, message.generation)

    def pass_next_on(self) -> None:
        """Passes on what came for the next use of the number. Once the room is done, and forgotten."""
        while self._next_opens:
            self.port.pass_on(*self._next_opens.popitem())
