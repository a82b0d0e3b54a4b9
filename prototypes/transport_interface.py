"""What SGLang is assumed to ask of a transport, once rooms, chunks, bootstrap and aborts are its own protocol's.

Its plan is RFC 33861, tracked in issue 34510. The names of the first twelve members and of the first seven capabilities
are the issue's; what they mean where it leaves that open, and all that is marked as ours, is our proposal. Nothing
outside of this module knows more of the plan: when SGLang settles it, this is what changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Progress(Enum):
    """How far a write is.

    Attributes:
        IN_FLIGHT: it goes on.
        DONE: all its bytes are in the peer's memory, and ours is read no more. Its event leaves then, and not before.
        FAILED: ours is read no more, and nothing more is sent. What was sent may arrive for a while where the
            transport's capabilities say so.
    """

    IN_FLIGHT = "in flight"
    DONE = "done"
    FAILED = "failed"


class CancelResult(Enum):
    """What came of giving a write up.

    Attributes:
        CANCELLED: neither memory is used from now on.
        ENDED: it was over already; `poll` says how.
        IN_FLIGHT: it cannot be taken back. Its pages belong to it until `poll` says that it is over.
    """

    CANCELLED = "cancelled"
    ENDED = "ended"
    IN_FLIGHT = "in flight"


class PeerStatus(Enum):
    """What is known of a peer that was asked after."""

    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class TransportStatus:
    """The answer of `poll`.

    Attributes:
        error: why it failed; None unless it did.
    """

    progress: Progress
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """Memory that is read or written.

    Attributes:
        length: in bytes.
        device: the number of its GPU; None in host memory.
    """

    address: int
    length: int
    device: int | None = None


class OpenedPeer(Protocol):
    """One life of a peer."""

    @property
    def life(self) -> str:
        """Its name, new at every start: events come with it. Ours."""


class TransferBlocks(Protocol):
    """The ranges of one write. Ours: the issue has a list of objects, a step of Python for each page."""

    @property
    def sources(self) -> NDArray[np.uint64]:
        """The addresses that are read."""

    @property
    def destinations(self) -> NDArray[np.uint64]:
        """The addresses that are written."""

    @property
    def lengths(self) -> NDArray[np.uint64]:
        """In bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportCapabilities:
    """What a transport can do, and what it promises. Each is False where it was not measured.

    Attributes:
        async_submit: `submit` returns before the bytes have moved.
        cancel: `cancel` may answer CANCELLED.
        staging_memory: it brings memory of its own to gather and scatter in.
        dcp_safe_copy: it can copy for a peer whose ranks divide the tokens.
        mixed_memory: one write may have sources on a GPU and in host memory.
        prepared_descriptors: what repeats is prepared once a peer.
        peer_probe: `probe_peer` may answer otherwise than UNKNOWN.
        late_arrivals: ours, as the next three. What was sent of a write may still arrive after it was FAILED.
        fenced_by_deregistration: no write changes memory any more that its owner has deregistered.
        fenced_by_death: nor does one whose writer's process has ended, once what the network had has arrived.
        submits_all_or_nothing: a `submit` that raises has sent nothing.
    """

    async_submit: bool = False
    cancel: bool = False
    staging_memory: bool = False
    dcp_safe_copy: bool = False
    mixed_memory: bool = False
    prepared_descriptors: bool = False
    peer_probe: bool = False
    late_arrivals: bool = True
    fenced_by_deregistration: bool = False
    fenced_by_death: bool = False
    submits_all_or_nothing: bool = False


class BaseTransport(Protocol):
    """Names remote memory, moves bytes into it, and says how far they are. It knows no room, request or page.

    `submit` and `poll` do not wait. One write belongs to one thread at a time; otherwise any thread may call.
    """

    @property
    def capabilities(self) -> TransportCapabilities:
        """What it can do and promises."""

    def init(self) -> None:
        """Starts it."""

    def close(self) -> None:
        """Forgets every peer and gives all memory back. Called once no write is in flight."""

    def register_memory(self, regions: Sequence[MemoryRegion]) -> None:
        """Makes memory known. Peers that are to write to it need `local_desc` anew."""

    def deregister_memory(self, regions: Sequence[MemoryRegion]) -> None:
        """Gives memory back: once no write from or to it is in flight, unless deregistration fences."""

    def local_desc(self) -> bytes:
        """Returns what a peer needs to reach this life of ours, opaque to SGLang's protocol."""

    def open_peer(self, peer_id: str, desc: bytes) -> OpenedPeer:
        """Connects to one life of a peer. One that was opened under this name before is closed by it."""

    def close_peer(self, peer: Any) -> None:
        """Forgets a peer; one that is closed already is ignored. Called once no write to it is in flight."""

    def submit(self, peer: Any, blocks: TransferBlocks, event: bytes = b"") -> Any:
        """Starts a write and returns its handle.

        Where it raises, part of the write may go on (`submits_all_or_nothing`), and nobody says until when: the peer
        is closed, and its pages are held until a fence.

        Args:
            event: ours: what the peer's `drain_events` has once all bytes are there; b"" for none.
        """

    def poll(self, handle: Any) -> TransportStatus:
        """Says how far a write is, and drives it. A handle that is over answers the same for ever."""

    def cancel(self, handle: Any) -> CancelResult:
        """Gives a write up, and says whether that ended it. It is polled on where it did not."""

    def probe_peer(self, peer: Any) -> PeerStatus:
        """Asks after a peer."""

    def send_event(self, peer: Any, event: bytes) -> None:
        """Sends an event that belongs to no write, such as a failure. Ours, as the next two."""

    def drain_events(self) -> list[tuple[str, bytes]]:
        """Returns the events that arrived since the last call, each with the life that it comes from."""

    @property
    def life(self) -> str:
        """The name of this life among all transports, by which peers see whose an event is: new at every start."""
