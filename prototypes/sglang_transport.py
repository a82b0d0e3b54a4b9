"""kvferry behind SGLang's `make_transport()`: any of its transports, which one as the endpoints' own setting says.

What is left to a transport is what kvferry's are: peers, memory, writes that end provably, and events after the bytes.
What does not fit is said where it is not: writes cannot be taken back, peers are not asked after, and memory is given
back all at once, since a transport of ours deregisters when it closes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvferry import Device, MemoryKind, Region, Settings
from kvferry.errors import PeerDisconnectedError, TransportError, UsageError
from kvferry.transport import PeerMetadata, PreparedList, TransferHandle, Transport
from kvferry.transport.chosen import available_transport_class
from prototypes.transport_interface import (
    CancelResult,
    MemoryRegion,
    PeerStatus,
    Progress,
    TransferBlocks,
    TransportCapabilities,
    TransportStatus,
)


def make_transport(settings: Settings, name: str, *, writes: bool) -> KVFerryTransport:
    """Makes the transport of one rank.

    Args:
        settings: as endpoints have them: `transport` (KVFERRY_TRANSPORT) says which of kvferry's moves the bytes.
        name: of the rank; each life of it gets a name of its own.
        writes: whether the rank writes into peers' memory (prefill); else it is written to.

    Raises:
        SettingsError: if there is no such transport, naming the value and those that there are.
        TransportUnavailableError: if its library is missing, saying what to install.
    """
    chosen = available_transport_class(settings.transport)
    return KVFerryTransport(lambda life: chosen.from_settings(settings, f"{name}-{life}", writes=writes))


@dataclass(slots=True, eq=False)
class Peer:
    """One life of a peer.

    Attributes:
        life: its name, which its events come with.
        device: where its memory is.
        is_open: until it is closed, or another life takes its place.
        lists: of our memory, for writes to it whose end nobody knows.
    """

    life: str
    device: Device
    is_open: bool = True
    lists: list[PreparedList] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Write:
    """A write that has begun.

    Attributes:
        transport: that does it.
        transfer: its handle there.
        lists: that it uses.
        status: what `poll` said last.
    """

    transport: Transport
    transfer: TransferHandle
    lists: tuple[PreparedList, ...]
    status: TransportStatus = field(default_factory=lambda: TransportStatus(Progress.IN_FLIGHT))


class KVFerryTransport:
    """What SGLang's protocol drives. A `prototypes.transport_interface.BaseTransport`."""

    def __init__(self, make: Callable[[int], Transport]) -> None:
        """Begins without memory and peers.

        Args:
            make: makes a transport, given which life of the rank it is for: 0, then 1, and so on. Each needs a name
                that no other has had.
        """
        self._make = make
        # Guards the tables below: the protocol's threads open and close peers side by side.
        self._lock = threading.Lock()
        self._lives = 0
        self._transport: Transport | None = None
        self._regions: list[MemoryRegion] = []
        self._device = Device()
        self._peers: dict[str, Peer] = {}

    @property
    def capabilities(self) -> TransportCapabilities:
        """What the chosen transport promises: not known before `init`."""
        moving = self._moving()
        return TransportCapabilities(
            async_submit=True,
            late_arrivals=moving.may_deliver_late,
            fenced_by_deregistration=moving.promises.fenced_by_deregistration,
            fenced_by_death=moving.promises.fenced_by_death,
            submits_all_or_nothing=moving.promises.posts_all_or_nothing,
        )

    @property
    def life(self) -> str:
        """The name of this life."""
        return self._moving().endpoint_name

    def init(self) -> None:
        """Begins a life; nothing where one has begun."""
        if self._transport is None:
            self._transport = self._make(self._lives)
            self._lives += 1

    def close(self) -> None:
        """Ends this life: every peer of it is closed, and its memory is given back."""
        for peer in list(self._peers.values()):
            self.close_peer(peer)
        self._regions.clear()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def register_memory(self, regions: Sequence[MemoryRegion]) -> None:
        """Registers memory, all of it on one device.

        Raises:
            RegistrationError: if it cannot be, or is on another device than what was before.
            UsageError: if one call names several devices.
        """
        devices = {region.device for region in regions} or {None}
        if len(devices) != 1:
            raise UsageError(f"register the memory of one device at a time, not of {sorted(map(str, devices))}")
        (index,) = devices
        device = Device() if index is None else Device(MemoryKind.VRAM, index)
        self._moving().register([Region(each.address, each.length) for each in regions], device)
        self._device = device
        self._regions += regions

    def deregister_memory(self, regions: Sequence[MemoryRegion]) -> None:
        """Gives all memory back, by beginning a new life: peers of the old one are told apart from those of the next.

        Raises:
            UsageError: if it is not all of it.
        """
        if sorted(regions, key=_address) != sorted(self._regions, key=_address):
            raise UsageError(
                f"{len(regions)} of {len(self._regions)} regions are to be given back: kvferry's transports give back "
                "all at once. Give back all, and register what stays anew"
            )
        self.close()
        self.init()

    def local_desc(self) -> bytes:
        """Returns what peers need to connect to this life."""
        return self._moving().metadata()

    def open_peer(self, peer_id: str, desc: bytes) -> Peer:
        """Connects to a peer's life, anew where it was connected before.

        Raises:
            MessageError: if the description is malformed.
            TransportError: if it cannot be reached, or is another one than it says.
        """
        peer = Peer(self._moving().connect(desc), PeerMetadata.decode(desc).device)
        with self._lock:
            before = self._peers.get(peer_id)
            self._peers[peer_id] = peer
        if before is not None:
            self._forget(before, is_connected=before.life != peer.life)
        return peer

    def close_peer(self, peer: Peer) -> None:
        """Forgets a peer's life."""
        with self._lock:
            self._peers = {name: each for name, each in self._peers.items() if each is not peer}
        self._forget(peer, is_connected=True)

    def _forget(self, peer: Peer, *, is_connected: bool) -> None:
        with self._lock:
            was_open, peer.is_open = peer.is_open, False
        if was_open and is_connected:
            self._moving().disconnect(peer.life)
        while peer.lists:
            self._moving().release_list(peer.lists.pop())

    def submit(self, peer: Peer, blocks: TransferBlocks, event: bytes = b"") -> Write:
        """Starts a write. It is in flight even where its bytes have moved already: `poll` says so, and sends its event.

        Raises:
            RegistrationError: if a range leaves registered memory, naming it.
            PeerDisconnectedError: if the peer's life is closed, or over.
            TransportError: for anything else.
        """
        moving, name = self._of(peer), peer.life
        if len(blocks.lengths) == 1:
            source = Region(int(blocks.sources[0]), int(blocks.lengths[0]))
            return Write(moving, moving.write(source, name, int(blocks.destinations[0]), event), ())
        if not len(blocks.lengths):
            raise TransportError("a write has at least one block")
        own = moving.prepare(_rows(blocks.sources, blocks.lengths, self._device), None)
        try:
            theirs = moving.prepare(_rows(blocks.destinations, blocks.lengths, peer.device), name)
        except TransportError:
            moving.release_list(own)
            raise
        every = np.arange(len(blocks.lengths), dtype=np.int32)
        try:
            return Write(moving, moving.post(own, every, theirs, every, event), (own, theirs))
        except TransportError:
            peer.lists += (own, theirs)  # what has begun of it may still use them, until the peer is closed
            raise

    def poll(self, handle: Write) -> TransportStatus:
        """Says how far a write is, and gives back what it used once it is over."""
        if handle.status.progress is not Progress.IN_FLIGHT:
            return handle.status
        try:
            if handle.transport.poll(handle.transfer) is None:
                return handle.status
            handle.status = TransportStatus(Progress.DONE)
        except TransportError as error:
            handle.status = TransportStatus(Progress.FAILED, error)
        handle.transport.release(handle.transfer)
        for prepared in handle.lists:
            handle.transport.release_list(prepared)
        return handle.status

    def cancel(self, handle: Write) -> CancelResult:
        """Says whether a write is over: none of kvferry's transports takes one back."""
        is_over = self.poll(handle).progress is not Progress.IN_FLIGHT
        return CancelResult.ENDED if is_over else CancelResult.IN_FLIGHT

    def probe_peer(self, peer: Peer) -> PeerStatus:
        """Knows of a peer only that it is closed: what has not failed proves nothing."""
        return PeerStatus.UNKNOWN if peer.is_open else PeerStatus.GONE

    def send_event(self, peer: Peer, event: bytes) -> None:
        """Sends an event by itself.

        Raises:
            PeerDisconnectedError: if the peer's life is closed, or over.
        """
        self._of(peer).notify(peer.life, event)

    def drain_events(self) -> list[tuple[str, bytes]]:
        """Returns what has arrived, each event with the life that sent it."""
        return self._moving().take_notifications()

    def _moving(self) -> Transport:
        if self._transport is None:
            raise UsageError("this transport is closed, or was not started: call init() first")
        return self._transport

    def _of(self, peer: Peer) -> Transport:
        if not peer.is_open:
            raise PeerDisconnectedError(f"this life of {peer.life!r} was closed: open the peer anew")
        return self._moving()


def _address(region: MemoryRegion) -> tuple[int, int]:
    return region.address, region.length


def _rows(addresses: NDArray[np.uint64], lengths: NDArray[np.uint64], device: Device) -> NDArray[np.uint64]:
    """Returns a descriptor row for each range: kvferry's transports join those that go on on both sides."""
    ones = np.ones(len(lengths), np.uint64)
    return np.stack([addresses, lengths, ones * np.uint64(device.index), lengths, ones], axis=1)
