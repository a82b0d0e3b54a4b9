"""Where an endpoint stands at a moment, as data that travels: what `kvferry top` and the gauges are made of."""

from __future__ import annotations

from enum import Enum

import msgspec

MOST_ROOMS = 500
"""Shown of an endpoint: those that have been open longest."""


class Side(str, Enum):
    """Which of the two an endpoint is."""

    PREFILL = "prefill"
    DECODE = "decode"


class RoomStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A room that is open.

    Attributes:
        room: its number.
        state: where its transfer stands.
        age_s: since it was opened.
        chunks: that were handed in on the prefill side, or have arrived on the decode side.
        path: which way its last write went; empty where none has, and on the decode side.
        moved_bytes: that were written so far, or put into pages from staging memory.
        waits_for: what it waits for, in words.
        peers: the endpoints on the other side that it knows.
        quarantined_pages: pages of a transfer that has failed, which a write may still touch.
        failed_for_s: since it failed; 0 if it has not.
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
    """Somebody on the other side.

    Attributes:
        name: its endpoint, or what is known of it so far.
        state: how far the connection is.
        is_ready: whether rooms can use it.
        silent_s: for how long it has not been heard, though it should have been.
    """

    name: str
    state: str
    is_ready: bool
    silent_s: float


class StagingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Staging memory.

    Attributes:
        total_bytes: that there is for chunks: of peers' rings on the prefill side, of our own rings on the decode side.
        used_bytes: of those, the bytes that hold something, or are reserved.
        waiting_rooms: rooms that wait for some.
    """

    total_bytes: int = 0
    used_bytes: int = 0
    waiting_rooms: int = 0


class ThreadStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A thread; see `ThreadHealth`."""

    name: str
    is_alive: bool
    failures: int
    last_failure: str


class EndpointStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint.

    Attributes:
        side: which of the two it is.
        engine, rank: whose, and which.
        endpoint: its name, as peers know it.
        version: of kvferry.
        process: its number.
        at_unix_s: when this was.
        up_s: for how long the endpoint has run.
        peer_timeout_s: the silence after which a peer is given up.
        heartbeat_s: how often peers should be heard.
        problem: what is wrong with it; empty if nothing is.
        states: how many rooms there are in each state.
        oldest_room_s: how long the oldest one has been open.
        quarantined_pages, quarantine_s: over all rooms; the age is that of the oldest failure.
        rooms: the oldest of them, at most `MOST_ROOMS`.
        peers: everyone on the other side.
        staging: memory for the staged path.
        threads: how they are.
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

    @property
    def is_healthy(self) -> bool:
        """Whether all threads run."""
        return all(thread.is_alive for thread in self.threads)

    @property
    def is_well(self) -> bool:
        """Whether all threads run, and nothing else is wrong."""
        return self.is_healthy and not self.problem

    @property
    def silent_peers(self) -> tuple[PeerStatus, ...]:
        """Peers that have missed two heartbeats: longest first."""
        late = [peer for peer in self.peers if peer.silent_s > 2 * self.heartbeat_s]
        return tuple(sorted(late, key=lambda peer: -peer.silent_s))
