"""kvferry's prototype behind SGLang's planned interface, each time with one thing wrong that tests must find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from prototypes.sglang_transport import KVFerryTransport, Peer, Write
from prototypes.transport_interface import (
    CancelResult,
    MemoryRegion,
    PeerStatus,
    Progress,
    TransferBlocks,
    TransportCapabilities,
    TransportStatus,
)

from kvferry.errors import TransportError
from kvferry.transport import Transport


class DoneOnceBegun(KVFerryTransport):
    """Says that a write is done that has begun."""

    def poll(self, handle: Write) -> TransportStatus:
        said = super().poll(handle)
        return TransportStatus(Progress.DONE) if said.progress is Progress.IN_FLIGHT else said


class EventBeforeBytes(KVFerryTransport):
    """Sends a write's event when the write begins."""

    def submit(self, peer: Peer, blocks: TransferBlocks, event: bytes = b"") -> Write:
        begun = super().submit(peer, blocks)
        if event:
            self.send_event(peer, event)
        return begun


class FailedWhileItGoesOn(KVFerryTransport):
    """Says now and then that a write has failed that goes on."""

    polls = 0

    def poll(self, handle: Write) -> TransportStatus:
        said = super().poll(handle)
        self.polls += 1
        if said.progress is Progress.IN_FLIGHT and self.polls % 7 == 1:
            handle.status = said = TransportStatus(Progress.FAILED, TransportError("planted"))
        return said


class EventsOfNoLife(KVFerryTransport):
    """Says of events which rank they come from, and not of which life of it."""

    def drain_events(self) -> list[tuple[str, bytes]]:
        return [(f"{life.rpartition('-life')[0]}-life0", event) for life, event in super().drain_events()]


class WholeSubmits(KVFerryTransport):
    """Promises that a submit that raises has sent nothing."""

    @property
    def capabilities(self) -> TransportCapabilities:
        return replace(super().capabilities, submits_all_or_nothing=True)


class NothingLate(KVFerryTransport):
    """Promises that nothing arrives of a write once it has failed."""

    @property
    def capabilities(self) -> TransportCapabilities:
        return replace(super().capabilities, late_arrivals=False)


class CancelsWhatGoesOn(KVFerryTransport):
    """Says of a write that goes on that it was cancelled."""

    def cancel(self, handle: Write) -> CancelResult:
        said = super().cancel(handle)
        return CancelResult.CANCELLED if said is CancelResult.IN_FLIGHT else said


class FailsSilently(KVFerryTransport):
    """Says of a write that failed that it is on its way."""

    def poll(self, handle: Write) -> TransportStatus:
        said = super().poll(handle)
        return TransportStatus(Progress.IN_FLIGHT) if said.progress is Progress.FAILED else said


class ForgetsNoPeer(KVFerryTransport):
    """Goes on with a peer that is closed, and keeps what was prepared for it."""

    def _forget(self, peer: Peer, *, is_connected: bool) -> None:
        pass

    def probe_peer(self, peer: Peer) -> PeerStatus:
        return PeerStatus.ALIVE


class KeepsItsLife(KVFerryTransport):
    """Says that memory is given back, and goes on with it."""

    def deregister_memory(self, regions: Sequence[MemoryRegion]) -> None:
        pass


class SaysItAgain(KVFerryTransport):
    """Looks at a write again that is over."""

    def poll(self, handle: Write) -> TransportStatus:
        handle.status = TransportStatus(Progress.IN_FLIGHT)
        return super().poll(handle)


class LosesLists(KVFerryTransport):
    """Does not give back what a write used."""

    def __init__(self, make: Callable[[int], Transport]) -> None:
        def losing(life: int) -> Transport:
            made = make(life)
            made.release_list = lambda prepared: None  # type: ignore[method-assign]
            return made

        super().__init__(losing)
