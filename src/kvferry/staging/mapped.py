"""A transport between GPUs of one host: peers' pools are mapped, and a kernel copies from pages straight into pages.

It keeps the contract of `transport/base.py`, so that the endpoints' direct writes run over it as they are. There is no
wire in it: notifications, and what tells who is connected, are those of another transport that it is put around. What a
write selects is uploaded at once and copied by one launch, or by one for each length that descriptors have. The write
has ended when the event behind them has come, and only then the peer is notified.

Launching needs no event of the engine's: a chunk is handed in ready, or its event has come, before a write begins.

What is launched cannot be taken back, and a mapping must not be closed under a kernel. So a peer that is disconnected
keeps its mapping until what was launched into it is seen to have ended; a process that is gone has none.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.errors import PeerDisconnectedError, RegistrationError, TransportError, quoted
from kvferry.layout import Device, MemoryKind, Region
from kvferry.plan.descriptors import RowArray
from kvferry.protocol.wire.field_types import MAX_METADATA_BYTES, ShortText
from kvferry.staging.accelerator import DeviceStarts, RunsLaunch, Stream, StreamEvent
from kvferry.staging.gpu import VECTOR_BYTES
from kvferry.staging.resources import StagingResources
from kvferry.staging.sharing import MappedCopies, SharedAllocation, Sharing
from kvferry.transport import (
    Connection,
    Copies,
    PeerMetadata,
    PreparedList,
    Promises,
    RangeTransport,
    TransferHandle,
    TransferReport,
    Transport,
)
from kvferry.transport.base import MOST_REGIONS

log = logging.getLogger(__name__)

Addresses = NDArray[np.int64]


class _Offer(msgspec.Struct, frozen=True):
    """What a peer needs beside our name and memory.

    Attributes:
        notifies: the metadata of the transport that notifies.
        host: the machine on which handles mean something.
        shared: the allocations that our memory lies in; none if it is not offered.
    """

    notifies: Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA_BYTES)]
    host: ShortText
    shared: Annotated[tuple[SharedAllocation, ...], msgspec.Meta(max_length=MOST_REGIONS)]


# Made here, not when it is first needed: msgspec 0.22 crashes if two threads are the first to decode a type.
_OFFER = msgspec.msgpack.Decoder(_Offer)


class Mappings:
    """A peer's allocations, and where they are mapped."""

    def __init__(self, sharing: Sharing, shared: Sequence[SharedAllocation]) -> None:
        """Maps all of them.

        Raises:
            TransportError: if one cannot be mapped. None is then.
        """
        self._sharing = sharing
        self._mapped: list[int] = []
        shared = sorted(shared, key=lambda each: each.memory)
        try:
            for each in shared:
                self._mapped.append(sharing.map(each))
        except BaseException:
            self.close()
            raise
        self._starts: Addresses = np.array([each.memory.address for each in shared], np.int64)
        self._moved: Addresses = np.array(self._mapped, np.int64) - self._starts

    def here(self, addresses: Addresses) -> Addresses:
        """Returns where a peer's addresses are in this process. Each must lie in an allocation that is mapped."""
        place = np.searchsorted(self._starts, addresses, side="right") - 1
        return addresses + self._moved[place]

    def close(self) -> None:
        """Ends the mappings. Nothing that was launched may use them."""
        while self._mapped:
            address = self._mapped.pop()
            try:
                self._sharing.unmap(address)
            except TransportError as error:
                log.warning("a mapping is kept until this process ends: %s", error)


@dataclass(slots=True, eq=False)
class MappedConnection(Connection):
    """A peer whose memory is mapped.

    Attributes:
        mappings: where.
        in_flight: writes whose end was not seen yet.
        is_hung_up: whether the mappings are closed as soon as there are none.
    """

    mappings: Mappings
    in_flight: int = 0
    is_hung_up: bool = False


class _MappedWrite(TransferHandle):
    """A write.

    Attributes:
        connection: to the peer.
        total_bytes: what it copies.
        descriptors: in how many runs.
        notification: what the peer receives when it has ended.
        stream: where its kernels run.
        addresses: what they read runs' addresses from, kept until they have ended.
        event: behind its kernels; None if it could not be recorded.
        post_s: what launching took.
        problem: why it is not complete, once it is known.
        has_ended: whether no kernel of it runs any more.
        report: the report of a complete one.
    """

    def __init__(self, connection: MappedConnection, copies: Copies, notification: bytes, stream: Stream) -> None:
        self.connection = connection
        self.total_bytes = copies.total_bytes
        self.descriptors = len(copies)
        self.notification = notification
        self.stream = stream
        self.posted_at = time.perf_counter()
        self.addresses: DeviceStarts | None = None
        self.event: StreamEvent | None = None
        self.post_s = 0.0
        self.problem: TransportError | None = None
        self.has_ended = False
        self.report: TransferReport | None = None


class MappedTransport(RangeTransport[MappedConnection]):
    """Copies into peers' mapped memory by kernels, and notifies by another transport.

    It promises nothing: a kernel runs to its end, whatever its process or the owner of the memory does meanwhile. When
    a GPU is through with the kernels of a process that was killed has not been measured, and NVIDIA's kernel module may
    clean up after such a process some time after it has ended.
    """

    name = "mapped"
    promises = Promises(can_abort=False, fenced_by_deregistration=False, fenced_by_death=False, keeps_order=False)
    may_deliver_late = False
    merges = False
    memory_kinds: ClassVar[frozenset[MemoryKind]] = frozenset(MemoryKind)

    def __init__(self, notifies: Transport, resources: StagingResources, *, offers: bool) -> None:
        """Puts it around another transport, which it closes with itself.

        Args:
            notifies: carries the notifications; no memory is registered with it.
            resources: what maps memory and copies.
            offers: whether peers write to this endpoint's memory, which then must be of a kind that they can map.
        """
        super().__init__(notifies.endpoint_name)
        self.name = f"{self.name}-{notifies.name}"
        self._notifies = notifies
        self._resources = resources
        self._offers = offers
        self._made: MappedCopies | None = None
        self._shared: tuple[SharedAllocation, ...] = ()
        self._of_thread = threading.local()
        self._compiled: set[int] = set()  # alignments

    # ---- memory and peers

    def register(self, regions: Sequence[Region], device: Device) -> None:
        super().register([], device)  # refuses another device
        if self._made is None:
            self._made = self._resources.mapped_copies(device)
        if self._offers:
            new = [each for each in regions if not any(shared.memory.contains(each) for shared in self._shared)]
            self._shared += self._made.sharing.offer(new)
        super().register(regions, device)

    @property
    def _copies(self) -> MappedCopies:
        if self._made is None:
            raise RegistrationError("register memory first: it says which GPU copies")
        return self._made

    def private_metadata(self) -> bytes:
        host = self._made.sharing.host if self._made is not None else ""
        return msgspec.msgpack.encode(_Offer(self._notifies.metadata(), host, self._shared))

    def connect(self, metadata: bytes) -> str:
        # First, since an earlier connection and a new one are the same to the transport that notifies.
        self.disconnect(PeerMetadata.decode(metadata).name)
        return super().connect(metadata)

    def open(self, peer: PeerMetadata) -> MappedConnection:
        try:
            offer = _OFFER.decode(peer.private)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TransportError(f"malformed metadata of {peer.name}'s mapped memory: {quoted(error)}") from error
        _check_offer(peer, offer, self._copies.sharing.host)
        name = self._notifies.connect(offer.notifies)
        try:
            if name != peer.name:
                raise TransportError(f"a peer that calls itself {peer.name!r} sent the metadata of {name!r}")
            return MappedConnection(peer, Mappings(self._copies.sharing, offer.shared))
        except BaseException:
            self._notifies.disconnect(name)
            raise

    def hang_up(self, connection: MappedConnection) -> None:
        with self._lock:
            connection.is_hung_up = True
            is_unused = not connection.in_flight
        self._notifies.disconnect(connection.peer.name)
        if is_unused:
            connection.mappings.close()

    def prepare(self, rows: RowArray, peer: str | None) -> PreparedList:
        prepared = super().prepare(rows, peer)
        # Those that a write selects may happen to be better aligned than all that there are.
        strides = np.where(rows[:, 4] > 1, rows[:, 3], np.uint64(0))
        alignment = _alignment(*(each.view(np.int64) for each in (rows[:, 0].copy(), rows[:, 1].copy(), strides)))
        while alignment <= VECTOR_BYTES:
            self._compile(alignment)
            alignment *= 2
        return prepared

    def _compile(self, alignment: int) -> None:
        if alignment not in self._compiled:
            stream = self._stream()
            addresses = stream.upload(np.zeros(1, np.int64))
            stream.launch_runs(RunsLaunch(addresses, 0, 0, 0, alignment, alignment))
            stream.synchronize()
            self._compiled.add(alignment)

    # ---- writes

    def start(self, connection: MappedConnection, copies: Copies, notification: bytes) -> TransferHandle:
        write = _MappedWrite(connection, copies, notification, self._stream())
        with self._lock:
            if connection.is_hung_up:
                raise PeerDisconnectedError(f"{connection.peer.name!r} was disconnected")
            connection.in_flight += 1
        try:
            launches = self._uploaded(write, copies)
            write.stream.launch_runs(next(launches))
        except Exception as error:
            self._ended(write)
            raise TransportError(f"copying to {connection.peer.name} could not be launched: {error}") from error
        try:  # something runs from here on
            for launch in launches:
                write.stream.launch_runs(launch)
        except Exception as error:
            write.problem = TransportError(f"not all of a write to {connection.peer.name} was launched: {error}")
            write.problem.__cause__ = error
        with contextlib.suppress(Exception):  # `poll` tries again
            write.event = write.stream.record()
        write.post_s = time.perf_counter() - write.posted_at
        return write

    def _uploaded(self, write: _MappedWrite, copies: Copies) -> Iterator[RunsLaunch]:
        """Uploads where all runs begin and go. Yields what is launched, for each length that there is."""
        lengths = copies.lengths.view(np.int64)
        sources = copies.sources.view(np.int64)
        destinations = write.connection.mappings.here(copies.destinations.view(np.int64))
        if lengths.min() != lengths.max():
            order = np.argsort(lengths, kind="stable")
            lengths, sources, destinations = lengths[order], sources[order], destinations[order]
        write.addresses = write.stream.upload(np.concatenate([sources, destinations]))
        firsts = np.concatenate([[0], np.flatnonzero(lengths[1:] != lengths[:-1]) + 1, [len(lengths)]]).tolist()
        for first, stop in pairwise(firsts):
            length, which = int(lengths[first]), slice(first, stop)
            alignment = _alignment(sources[which], destinations[which], lengths[first : first + 1])
            yield RunsLaunch(write.addresses, first, len(lengths) + first, stop - first, length, alignment)

    def poll(self, transfer: TransferHandle) -> TransferReport | None:
        assert isinstance(transfer, _MappedWrite)
        if not transfer.has_ended:
            self._bind()
            if transfer.event is None:
                transfer.event = transfer.stream.record()
            # What this raises is the device's, and says nothing of whether the kernel has ended.
            if not transfer.event.query():
                return None
            self._ended(transfer)
            self._notify(transfer)
        if transfer.problem is not None:
            raise transfer.problem
        return transfer.report

    def _ended(self, write: _MappedWrite) -> None:
        """Takes note that no kernel of a write runs any more, or ever will."""
        write.has_ended = True
        write.addresses = None
        connection = write.connection
        with self._lock:
            connection.in_flight -= 1
            is_last = connection.is_hung_up and not connection.in_flight
        if is_last:
            connection.mappings.close()

    def _notify(self, write: _MappedWrite) -> None:
        if write.problem is None and write.notification:
            try:
                self.notify(write.connection.peer.name, write.notification)
            except TransportError as error:
                write.problem = error
        if write.problem is None:
            taken = time.perf_counter() - write.posted_at
            write.report = TransferReport(write.total_bytes, write.descriptors, write.post_s, taken)

    def _stream(self) -> Stream:
        self._bind()
        stream: Stream | None = getattr(self._of_thread, "stream", None)
        if stream is None:
            stream = self._of_thread.stream = self._copies.accelerator.stream()
        return stream

    def _bind(self) -> None:
        if not getattr(self._of_thread, "is_bound", False):
            self._copies.accelerator.bind_thread()
            self._of_thread.is_bound = True

    # ---- notifications

    def notify(self, peer: str, notification: bytes) -> None:
        self._notifies.notify(peer, notification)

    def take_notifications(self) -> list[tuple[str, bytes]]:
        return self._notifies.take_notifications()

    def close(self) -> None:
        super().close()
        self._notifies.close()


def _check_offer(peer: PeerMetadata, offer: _Offer, host: str) -> None:
    """Refuses a peer whose memory cannot be mapped.

    Raises:
        TransportError: saying why, and what to do.
    """
    if not host or offer.host != host:
        raise TransportError(
            f"the memory of {peer.name} cannot be mapped: it is on another host, or nothing shows that it is on this "
            "one. KVFERRY_PATH=mapped is for ranks of one host: take auto, direct or staged"
        )
    missing = next((each for each in peer.regions if not any(one.memory.contains(each) for one in offer.shared)), None)
    if missing is not None:
        raise TransportError(f"{peer.name} does not offer its memory at {missing.address:#x} to be mapped")


def _alignment(*numbers: Addresses) -> int:
    """Returns the largest power of two, up to a vector's bytes, that divides all of the numbers."""
    bits = VECTOR_BYTES
    for each in numbers:
        bits |= int(np.bitwise_or.reduce(each))
    return bits & -bits
