"""A transport between GPUs of one host: peers' pools are mapped, and a kernel copies from pages straight into pages.

It keeps the contract of `transport/base.py`, so that the endpoints' direct writes run over it as they are. There is no
wire in it: notifications, and what tells who is connected, are those of another transport that it is put around. A
prepared list is in the GPU's memory, a peer's with the addresses at which it is mapped. The numbers that a write
selects are uploaded at once, and the kernel finds the addresses: one launch, or one for each length and
alignment that descriptors have. The write has ended when the event behind them has come, and only then the peer is
notified.

Launching needs no event of the engine's: a chunk is handed in ready, or its event has come, before a write begins.

What is launched cannot be taken back, and a mapping must not be closed under a kernel. So a peer that is disconnected
keeps its mapping until what was launched into it is seen to have ended; a process that is gone has none.
"""

from __future__ import annotations

import contextlib
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
from kvferry.loggers import logger_of
from kvferry.plan.descriptors import DescriptorIndices, RowArray
from kvferry.protocol.wire.field_types import MAX_METADATA_BYTES, ShortText
from kvferry.staging.accelerator import DeviceRows, RunsLaunch, Stream, StreamEvent
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
from kvferry.transport.copies import DIFFERENT_LENGTHS, check_selection

log = logger_of(__name__)

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


@dataclass(frozen=True, slots=True, eq=False)
class _List:
    """A prepared list.

    Attributes:
        rows: its rows in the GPU's memory, as they are mapped.
        firsts: the number of each row's first descriptor.
        lengths: of each row's descriptors, in bytes.
        alignments: bytes that divide all addresses and lengths of each row, powers of two up to 16.
        kind: length and alignment of all of them; None if they differ.
    """

    rows: DeviceRows
    firsts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    alignments: NDArray[np.int64]
    kind: tuple[int, int] | None

    def kinds_of(self, numbers: DescriptorIndices) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the length and the alignment of every descriptor that is selected."""
        row = np.searchsorted(self.firsts, numbers, side="right") - 1
        return self.lengths[row], self.alignments[row]


class _MappedWrite(TransferHandle):
    """A write.

    Attributes:
        connection: to the peer.
        total_bytes: what it copies.
        descriptors: in how many runs.
        notification: what the peer receives when it has ended.
        stream: where its kernels run.
        keeps: what they read beside the runs, kept until they have ended.
        event: behind its kernels; None if it could not be recorded.
        post_s: what launching took.
        problem: why it is not complete, once it is known.
        has_ended: whether no kernel of it runs any more.
        report: the report of a complete one.
    """

    def __init__(self, connection: MappedConnection, descriptors: int, notification: bytes, stream: Stream) -> None:
        self.connection = connection
        self.total_bytes = 0
        self.descriptors = descriptors
        self.notification = notification
        self.stream = stream
        self.posted_at = time.perf_counter()
        self.keeps: tuple[object, ...] = ()
        self.event: StreamEvent | None = None
        self.post_s = 0.0
        self.problem: TransportError | None = None
        self.has_ended = False
        self.report: TransferReport | None = None


class MappedTransport(RangeTransport[MappedConnection]):
    """Copies into peers' mapped memory by kernels, and notifies by another transport.

    It promises that a post which raises has launched nothing, and no more: a kernel runs to its end, whatever its
    process or the owner of the memory does meanwhile. When a GPU is through with the kernels of a process that was
    killed has not been measured, and NVIDIA's kernel module may clean up after such a process some time after it has
    ended.
    """

    name = "mapped"
    promises = Promises(
        can_abort=False,
        fenced_by_deregistration=False,
        fenced_by_death=False,
        keeps_order=False,
        posts_all_or_nothing=True,
    )
    may_deliver_late = False
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
    def copies(self) -> MappedCopies:
        """What copies through mapped memory, known once memory is registered."""
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
        _check_offer(peer, offer, self.copies.sharing.host)
        name = self._notifies.connect(offer.notifies)
        try:
            if name != peer.name:
                raise TransportError(f"a peer that calls itself {peer.name!r} sent the metadata of {name!r}")
            return MappedConnection(peer, Mappings(self.copies.sharing, offer.shared))
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

    def make_list(self, rows: RowArray, peer: str | None) -> PreparedList:
        made = self._on_device(rows, None if peer is None else self.connection(peer).mappings)
        return PreparedList(peer, made, len(rows), int(rows[:, 4].sum()))

    def _on_device(self, rows: RowArray, mappings: Mappings | None) -> _List:
        """Uploads rows, and compiles the kernel that they need, so that no write waits for that.

        Raises:
            TransportError: if the device refuses.
        """
        starts, lengths, _, strides, counts = (column.copy().view(np.int64) for column in rows.T)
        if mappings is not None:
            starts = mappings.here(starts)
        strides[counts == 1] = 0
        bits = starts | lengths | strides | VECTOR_BYTES
        alignments = bits & -bits
        are_alike = lengths.min() == lengths.max() and alignments.min() == alignments.max()
        firsts = np.cumsum(counts) - counts
        try:
            stream = self.copies.streams.own()
            made = DeviceRows(stream.upload(np.concatenate([firsts, starts, strides])), len(rows))
            for alignment in set(np.unique(alignments).tolist()) - self._compiled:
                numbers = stream.upload(np.zeros(1, np.int32))
                stream.launch_runs(RunsLaunch(made, made, numbers, 0, 0, 0, alignment, alignment))
                self._compiled.add(alignment)
            stream.synchronize()  # other threads' streams read it
        except Exception as error:
            raise TransportError(f"{len(rows)} descriptor rows could not be prepared on the GPU: {error}") from error
        return _List(made, firsts, lengths, alignments, (int(lengths[0]), int(alignments[0])) if are_alike else None)

    # ---- writes

    def start_selected(
        self,
        connection: MappedConnection,
        local: PreparedList,
        local_indices: DescriptorIndices,
        remote: PreparedList,
        remote_indices: DescriptorIndices,
        notification: bytes,
    ) -> TransferHandle:
        check_selection(local, local_indices, remote, remote_indices)
        return self._started(connection, local.handle, local_indices, remote.handle, remote_indices, notification)

    def start(self, connection: MappedConnection, copies: Copies, notification: bytes) -> TransferHandle:
        """Starts a write that no list is prepared for."""
        nowhere, once = np.zeros_like(copies.lengths), np.ones_like(copies.lengths)
        here, there = (
            self._on_device(np.stack([starts, copies.lengths, nowhere, nowhere, once], axis=1), mappings)
            for starts, mappings in ((copies.sources, None), (copies.destinations, connection.mappings))
        )
        numbers = np.arange(len(copies), dtype=np.int32)
        return self._started(connection, here, numbers, there, numbers, notification)

    def _started(
        self,
        connection: MappedConnection,
        here: _List,
        sources: DescriptorIndices,
        there: _List,
        destinations: DescriptorIndices,
        notification: bytes,
    ) -> TransferHandle:
        write = _MappedWrite(connection, len(sources), notification, self.copies.streams.own())
        with self._lock:
            if connection.is_hung_up:
                raise PeerDisconnectedError(f"{connection.peer.name!r} was disconnected")
            connection.in_flight += 1
        try:
            launches = self._uploaded(write, here, sources, there, destinations)
            write.stream.launch_runs(next(launches))
        except TransportError:
            self._ended(write)
            raise
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

    def _uploaded(
        self,
        write: _MappedWrite,
        here: _List,
        sources: DescriptorIndices,
        there: _List,
        destinations: DescriptorIndices,
    ) -> Iterator[RunsLaunch]:
        """Uploads which descriptors are selected. Yields what is launched, for each length and alignment they have.

        One misaligned row is a launch of its own, so that it alone is copied slowly.

        Raises:
            TransportError: if those of the two sides differ in length. Nothing is uploaded then.
        """
        count = len(sources)
        if here.kind is not None and there.kind is not None and here.kind[0] == there.kind[0]:
            groups = [(0, count, *min(here.kind, there.kind))]
        else:
            (lengths, alignments), (others, those) = here.kinds_of(sources), there.kinds_of(destinations)
            if not np.array_equal(lengths, others):
                raise TransportError(DIFFERENT_LENGTHS)
            kinds = lengths * (2 * VECTOR_BYTES) + np.minimum(alignments, those)
            order = np.argsort(kinds, kind="stable")
            kinds, sources, destinations = kinds[order], sources[order], destinations[order]
            firsts = [0, *(np.flatnonzero(kinds[1:] != kinds[:-1]) + 1).tolist(), count]
            groups = [(first, stop, *divmod(int(kinds[first]), 2 * VECTOR_BYTES)) for first, stop in pairwise(firsts)]
        numbers = write.stream.upload(np.concatenate([sources, destinations]))
        write.keeps = numbers, here, there
        write.total_bytes = sum((stop - first) * length for first, stop, length, _ in groups)
        for first, stop, length, alignment in groups:
            yield RunsLaunch(here.rows, there.rows, numbers, first, count + first, stop - first, length, alignment)

    def poll(self, transfer: TransferHandle) -> TransferReport | None:
        assert isinstance(transfer, _MappedWrite)
        if not transfer.has_ended:
            self.copies.streams.bind()
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
        write.keeps = ()
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
