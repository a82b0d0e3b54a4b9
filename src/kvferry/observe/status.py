"""A snapshot of an endpoint, as data that travels: what `kvferry top` and the gauges are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import msgspec

from kvferry.protocol.transfer.states import TransferState

MOST_ROOMS = 500
"""Largest number of rooms in a status: those that have been open longest."""


class Side(str, Enum):
    """The side of an endpoint."""

    PREFILL = "prefill"
    DECODE = "decode"


class RoomStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A room that is open.

    Attributes:
        room: its number.
        state: the state of its transfer.
        age_s: seconds since it was opened.
        chunks: those that were handed in on the prefill side, or have arrived on the decode side.
        path: the path of its last write; empty where there is none, and on the decode side without staged writes.
        moved_bytes: bytes that were written so far, or put into pages from staging memory.
        waits_for: what it waits for, in words.
        peers: the endpoints on the other side that take part.
        quarantined_pages: pages of a transfer that has failed, which a write may still touch.
        failed_for_s: seconds since it failed; 0 if it has not.
    """

    room: int
    state: str
    age_s: float
    chunks: int
    path: str
    moved_bytes: int
    waits_for: str
    peers: tuple[str, ...]
    quarantined_pages: int = 0
    failed_for_s: float = 0.0


class PeerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A peer on the other side.

    Attributes:
        name: its endpoint, or what is known of it so far.
        state: the state of the connection.
        is_ready: whether rooms can use it.
        silent_s: for how long no message has come from it, though one was due.
        problem: why it was not found so far; empty if it was.
    """

    name: str
    state: str
    is_ready: bool
    silent_s: float
    problem: str = ""


class LostPeerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill rank that was lost, and may still write to memory of this decode rank.

    Attributes:
        endpoint: its name.
        lost_for_s: seconds since it was lost.
        pages: pages of failed transfers that it may write to directly.
        ring_bytes: staging memory that it may write to.
        proof: what has proved that it has ended, so that these come back soon; empty if nothing has.
        frees: what would prove it, a sentence each, the likeliest first; empty once something has.
        problem: why one that could was not asked; empty if all were.
    """

    endpoint: str
    lost_for_s: float
    pages: int
    ring_bytes: int
    proof: str
    frees: tuple[str, ...]
    problem: str = ""


class StagingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Staging memory.

    Attributes:
        total_bytes: bytes for chunks: of peers' rings on the prefill side, of its own rings on the decode side.
        used_bytes: those of them that hold something, or are reserved.
        waiting_rooms: rooms that wait for staging memory.
    """

    total_bytes: int = 0
    used_bytes: int = 0
    waiting_rooms: int = 0


class ThreadStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The health of a thread of an endpoint.

    Attributes:
        failures: turns that raised an exception, which none should.
        last_failure: the last of them, in words; empty if there was none.
        held_up_by: the engine's own code that the thread has been in for long, in words; empty if there is none.
    """

    name: str
    is_alive: bool
    failures: int
    last_failure: str
    held_up_by: str = ""


class LoadStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How much an endpoint has to do: what an autoscaler goes by.

    Attributes:
        open_rooms: rooms whose transfers have not ended.
        waiting_rooms: those of them that wait for the other side, or for pages: nothing of them moves.
        pending_rooms: on the prefill side, rooms that decode ranks have opened and the engine has not: its queue.
        bytes_in_flight: on the prefill side, bytes that are on their way, or lie in rings where nobody has taken them.
        outstanding_exports: on the prefill side, rooms with pages that no decode rank has come for.
    """

    open_rooms: int = 0
    waiting_rooms: int = 0
    pending_rooms: int = 0
    bytes_in_flight: int = 0
    outstanding_exports: int = 0


class CountedRoom(Protocol):
    """What a status needs of every room, on either side. Safe to read from any thread; named as in `RoomStatus`."""

    @property
    def state(self) -> TransferState:
        """The state of its transfer."""

    @property
    def chunks(self) -> int:
        """Those that were handed in, or have arrived."""

    @property
    def quarantined_pages(self) -> int:
        """Pages of a transfer that has failed, which a write may still touch."""

    def age_s(self, now: float) -> float:
        """Returns how long ago it was opened, in seconds."""

    def failed_for_s(self, now: float) -> float:
        """Returns how long ago it failed, in seconds; 0 if it has not."""

    def status(self, now: float) -> RoomStatus:
        """Returns all of it."""


class RoomCounts(msgspec.Struct, frozen=True):
    """What a status says of all rooms together; the attributes are those of an `EndpointStatus`.

    Attributes:
        outstanding: those with chunks that nobody on the other side has opened.
    """

    states: dict[str, int]
    quarantined_pages: int
    quarantine_s: float
    outstanding: int

    @classmethod
    def of(cls, rooms: Sequence[CountedRoom], now: float) -> RoomCounts:
        """Counts rooms, for next to nothing each: there may be tens of thousands."""
        states: Counter[TransferState] = Counter()
        pages = outstanding = 0
        quarantine_s = 0.0
        for room in rooms:
            state = room.state
            states[state] += 1
            if state is TransferState.BOOTSTRAPPING:
                outstanding += room.chunks > 0
            elif state.is_final and (held := room.quarantined_pages):
                pages += held
                quarantine_s = max(quarantine_s, room.failed_for_s(now))
        return cls({state.value: count for state, count in states.items()}, pages, quarantine_s, outstanding)

    def load(self, side: Side, *, pending_rooms: int, bytes_in_flight: int) -> LoadStatus:
        """Returns what an endpoint has to do.

        Args:
            side: which of the two it is.
            pending_rooms: as in `LoadStatus`; likewise the bytes.
        """
        unopened, idle, moving = (self.states.get(each.value, 0) for each in _OPEN)
        return LoadStatus(
            open_rooms=unopened + idle + moving,
            waiting_rooms=unopened + idle,
            pending_rooms=pending_rooms,
            bytes_in_flight=bytes_in_flight,
            outstanding_exports=self.outstanding if side is Side.PREFILL else 0,
        )


_OPEN = (TransferState.BOOTSTRAPPING, TransferState.WAITING_FOR_INPUT, TransferState.TRANSFERRING)


class EndpointStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of an endpoint.

    Attributes:
        side: which of the two it is.
        engine: the engine's name.
        rank: which of its ranks.
        endpoint: its name, as peers know it.
        version: of kvferry.
        process: its number.
        at_unix_s: when this was.
        up_s: for how long the endpoint has run.
        peer_timeout_s: the silence after which a peer is given up.
        heartbeat_s: seconds between two heartbeats.
        problem: what is wrong with it; empty if nothing is.
        states: how many rooms there are in each state.
        oldest_room_s: how long the oldest one has been open.
        quarantined_pages: over all rooms.
        quarantine_s: how long ago the oldest of their transfers failed.
        rooms: the oldest of them, at most `MOST_ROOMS`.
        peers: all on the other side.
        staging: memory for the staged path.
        threads: the health of each.
        quarantine: prefill ranks that were lost and may still write, on the decode side.
        fingerprint: what its caches are beyond their layout; peers that say something else are refused.
        address: that decode ranks are told to connect to; empty on the decode side, to which nobody connects.
        not_ready: why it takes no new rooms; empty if it does.
        is_draining: whether it is about to leave.
        is_drained: whether nothing is open any more, besides.
        load: how much it has to do.
    """

    side: Side
    engine: str
    rank: int
    endpoint: str
    version: str
    process: int
    at_unix_s: float
    up_s: float
    peer_timeout_s: float
    heartbeat_s: float
    problem: str
    states: dict[str, int]
    oldest_room_s: float
    quarantined_pages: int
    quarantine_s: float
    rooms: tuple[RoomStatus, ...]
    peers: tuple[PeerStatus, ...]
    staging: StagingStatus
    threads: tuple[ThreadStatus, ...]
    quarantine: tuple[LostPeerStatus, ...] = ()
    fingerprint: dict[str, str] = {}
    address: str = ""
    not_ready: str = ""
    is_draining: bool = False
    is_drained: bool = False
    load: LoadStatus = LoadStatus()

    @property
    def is_healthy(self) -> bool:
        """Whether all threads run, and nothing else is wrong."""
        return all(thread.is_alive for thread in self.threads) and not self.problem

    @property
    def silent_peers(self) -> tuple[PeerStatus, ...]:
        """Peers that have missed two heartbeats: longest first."""
        late = [peer for peer in self.peers if peer.silent_s > 2 * self.heartbeat_s]
        return tuple(sorted(late, key=lambda peer: -peer.silent_s))
