"""One room on a decode rank: the state machine behind the caller's `Receiver`, and what its commands do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.endpoint.transfer import Receiver
from kvferry.errors import MessageError
from kvferry.observe.records import PlacedRecord, ReceiverStats
from kvferry.observe.status import RoomStatus
from kvferry.plan.requests.demands import GroupRequest
from kvferry.plan.requests.moved_blocks import UnitPlaces
from kvferry.protocol.links.link import Link, LinkState
from kvferry.protocol.links.rank_link import Send
from kvferry.protocol.transfer.events import (
    AwaitArrival,
    Broke,
    Drop,
    PartArrived,
    Place,
    ReceiverCommand,
    ReceiverEvent,
    SendAbort,
    SendOpen,
    SendVerified,
)
from kvferry.protocol.transfer.receiver import ReceiverMachine
from kvferry.protocol.transfer.states import ReceiverState, TransferState
from kvferry.protocol.wire import messages


class RoomPort(Protocol):
    """What a room has done outside of itself. Called in its turns only."""

    def send(self, sends: Iterable[Send]) -> None:
        """Sends what a link says."""

    def place(self, work: object) -> None:
        """Has what has arrived for the room put into its pages, or verified there: `PartPlaced` follows."""

    def drop(self, work: object) -> None:
        """Gives back the memory of what has arrived and is not wanted."""

    def settle(self, room: ReceivingRoom, rank: int) -> None:
        """Waits for what failed writes of a rank had sent: `SenderSettled` follows."""

    def moved(self, room: ReceivingRoom, now: float) -> None:
        """Takes what has changed: the room's deadline, its end, and what its caller sees of it."""

    def raised(self, room: ReceivingRoom, error: BaseException) -> None:
        """Takes what the room's machine should not have raised, while it is handled. The room fails of it."""


@dataclass(eq=False, slots=True)
class ReceivingRoom:
    """A room's state machine and what belongs to it. Owned by the driver thread, where its turns are.

    Attributes:
        room: its number.
        places: where in its pages what arrives belongs.
        port: does what it wants done outside of itself.
        receivers: how many decode ranks open it.
        instance: the start of the prefill engine that has the request; empty where the caller does not know.
        link: through which it is opened; None until the driver thread has taken the room.
        trace: the context that travels with its open request.
        open_numbers: of its open requests in the ranks' channels, by engine rank.
    """

    machine: ReceiverMachine
    room: int = field(init=False)
    generation: int
    groups: tuple[GroupRequest, ...]
    tokens: int | None
    depends_on: dict[str, bytes]
    receiver: Receiver
    places: UnitPlaces
    port: RoomPort
    receivers: int = 1
    instance: str = ""
    link: Link | None = None
    trace: str = ""
    open_numbers: dict[int, int] = field(default_factory=dict)
    _placed: list[PlacedRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.room = self.machine.room

    @property
    def waits_for_link(self) -> bool:
        """Whether its link has not become ready: once that has, it stays so, even if it is given up."""
        return self.link is None or self.link.state is not LinkState.READY

    def is_meant(self, generation: int) -> bool:
        """Whether a message means this use of the number. None does while the room waits for its link."""
        return self.generation == generation and not self.waits_for_link

    def is_rank(self, engine_rank: int, endpoint: str) -> bool:
        """Whether an endpoint is that rank of the group through which the room is opened."""
        return self.link is not None and self.link.endpoint_of(engine_rank) == endpoint

    def apply(self, event: ReceiverEvent, now: float) -> None:
        """Passes an event to the machine, and executes its commands."""
        try:
            commands = self.machine.handle(event, now)
        except BaseException as error:
            self.port.raised(self, error)
            commands = self.machine.handle(Broke(error), now)
            if isinstance(event, PartArrived):
                commands.append(Drop(event.work))
        self.port.moved(self, now)
        for command in commands:
            # A room that could not be opened at one rank has failed, and its aborts were sent already.
            if not (isinstance(command, SendOpen) and self.machine.state.is_final):
                self._execute(command, now)

    def ask_to_stop(self, rank: int, now: float) -> None:
        """Repeats the abort to a rank that has not answered."""
        self._execute(self.machine.abort_of(rank), now)

    def _execute(self, command: ReceiverCommand, now: float) -> None:
        link = self.link
        assert link is not None  # no machine wants anything before it is connected
        match command:
            case SendOpen(rank, filled):
                self._send(link, rank, self._open_request(filled), now)
                self.open_numbers[rank] = link.last_number(rank)
            case SendAbort(rank, reason, error):
                number = self.open_numbers.get(rank, 0)
                message = messages.AbortRoom(
                    room=self.room,
                    generation=self.generation,
                    reason=reason,
                    error=error,
                    epoch=link.attempt if number else 0,
                    number=number,
                )
                self.port.send(link.send_unnumbered(rank, message))
            case SendVerified(rank):
                self._send(link, rank, messages.RoomVerified(room=self.room, generation=self.generation), now)
            case Place(work):
                self.port.place(work)
            case Drop(work):
                self.port.drop(work)
            case AwaitArrival(rank):
                self.port.settle(self, rank)

    def _open_request(self, filled: frozenset[str]) -> messages.OpenRoom:
        return messages.OpenRoom(
            room=self.room,
            generation=self.generation,
            receivers=self.receivers,
            tokens=self.tokens,
            groups=tuple(group for group in self.groups if group.name in filled),
            trace=self.trace,
            held=max((group.held for group in self.groups), default=0),
            depends_on=self.depends_on,
        )

    def _send(self, link: Link, rank: int, message: messages.NumberedToPrefill, now: float) -> None:
        """Sends a message of the room, which fails if it is one that cannot be sent."""
        try:
            sends = link.send(rank, message)
        except MessageError as error:
            self.apply(Broke(error), now)
        else:
            self.port.send(sends)

    def placed(self, record: PlacedRecord) -> None:
        """Records what was put into the room's pages, or verified there."""
        self._placed.append(record)

    @property
    def pages(self) -> int:
        """How many pages it has, over all groups."""
        return sum(len(group.pages) for group in self.groups)

    @property
    def is_quarantined(self) -> bool:
        """Whether it has failed, and a write may still touch its pages. May be read from any thread."""
        return self.machine.detailed_state in (ReceiverState.QUARANTINED, ReceiverState.SETTLING)

    @property
    def state(self) -> TransferState:
        """The state of its transfer; this and what follows may be read from any thread."""
        return self.machine.state

    @property
    def chunks(self) -> int:
        """Chunks that have arrived."""
        return self.machine.chunks

    @property
    def quarantined_pages(self) -> int:
        """Pages that a write may still touch, though it has failed."""
        return self.pages if self.is_quarantined else 0

    def age_s(self, now: float) -> float:
        """Returns how long ago it was opened, in seconds."""
        return now - self.receiver.stats.opened_at

    def failed_for_s(self, now: float) -> float:
        """Returns how long ago it ended, in seconds; 0 if it has not."""
        ended_at = self.receiver.stats.ended_at
        return now - ended_at if ended_at is not None else 0.0

    def status(self, now: float) -> RoomStatus:
        """Returns the room's status. May be called from any thread."""
        machine, link = self.machine, self.link
        moved_bytes = sum(placed.num_bytes for placed in list(self._placed))
        return RoomStatus(
            room=self.room,
            state=machine.state.value,
            age_s=self.age_s(now),
            chunks=machine.chunks,
            path="staged" if moved_bytes else "",
            moved_bytes=moved_bytes,
            waits_for=machine.waits_for,
            peers=() if link is None or self.waits_for_link else tuple(peer.endpoint for peer in link.peers),
            quarantined_pages=self.quarantined_pages,
            failed_for_s=self.failed_for_s(now),
        )

    def show(self, now: float) -> None:
        """Updates what the caller sees of the room."""
        stats, chunks = self.receiver.stats, self.machine.chunks
        self.receiver.stats = ReceiverStats(
            opened_at=stats.opened_at,
            first_arrival_at=now if chunks and stats.first_arrival_at is None else stats.first_arrival_at,
            ended_at=now if self.machine.state.is_final and stats.ended_at is None else stats.ended_at,
            chunks=chunks,
            placed=tuple(self._placed) if self.machine.state.is_final else (),
            absent=frozenset() if self.link is None else self.link.absent,
        )
        self.receiver.aux = self.machine.aux or b""
        self.receiver._update(self.machine.state, self.machine.error, pages_reusable=self.machine.are_pages_reusable)
