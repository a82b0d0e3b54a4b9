"""One room on a decode rank: what the driver's thread keeps of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.endpoint.transfer import Receiver
from kvferry.observe.records import PlacedRecord, ReceiverStats
from kvferry.observe.status import RoomStatus
from kvferry.plan.requests.demands import GroupRequest
from kvferry.plan.requests.moved_blocks import UnitPlaces
from kvferry.protocol.links.link import Link, LinkState
from kvferry.protocol.transfer.receiver import ReceiverMachine
from kvferry.protocol.transfer.states import ReceiverState, TransferState


@dataclass(eq=False, slots=True)
class ReceivingRoom:
    """A room's state machine and what belongs to it. Owned by the driver thread.

    Attributes:
        places: where in its pages what arrives belongs.
        instance: the start of the prefill engine that has the request; empty where the caller does not know.
        link: through which it is opened; None until the driver thread has taken the room.
        trace: the context that travels with its open request.
        open_numbers: of its open requests in the ranks' channels, by engine rank.
    """

    machine: ReceiverMachine
    generation: int
    groups: tuple[GroupRequest, ...]
    tokens: int | None
    depends_on: dict[str, bytes]
    receiver: Receiver
    places: UnitPlaces
    instance: str = ""
    link: Link | None = None
    trace: str = ""
    open_numbers: dict[int, int] = field(default_factory=dict)
    _placed: list[PlacedRecord] = field(default_factory=list)

    @property
    def room(self) -> int:
        """Its number."""
        return self.machine.room

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
