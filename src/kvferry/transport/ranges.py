"""The part of a transport that is the same for all that are told ranges of bytes, from this address to that.

Such a transport has no descriptor lists of its own: those are kept and expanded here, as are the memory of either side
and the connections. What is left to it is to connect, to start copies, to say when they have ended, and to notify. One
that has lists of its own, as NIXL does, makes and selects from them, and has the rest kept here.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

from kvferry.errors import PeerDisconnectedError, RegistrationError
from kvferry.layout import Device, MemoryKind, Region
from kvferry.plan.descriptors import DescriptorIndices, RowArray
from kvferry.transport.base import (
    PeerMetadata,
    PreparedList,
    TransferHandle,
    Transport,
    check_lists,
    peer_written_to,
)
from kvferry.transport.copies import Copies, copies_between, list_of_rows
from kvferry.transport.registered import RegisteredMemory


@dataclass(slots=True, eq=False)
class Connection:
    """What a transport keeps of a peer, until either side ends it. Each kind of transport adds what it needs.

    Attributes:
        peer: what it was connected with.
        memory: what the peer has registered.
    """

    peer: PeerMetadata
    memory: RegisteredMemory = field(init=False)

    def __post_init__(self) -> None:
        self.memory = RegisteredMemory(self.peer.name, self.peer.device, self.peer.regions)


ConnectionT = TypeVar("ConnectionT", bound=Connection)


class RangeTransport(Transport, Generic[ConnectionT]):
    """A transport that copies ranges. A kind of it implements `open`, `start` and what is still abstract.

    Where memory must be registered with a library, `register` is extended; where peers need more than a name and the
    memory to connect, `private_metadata` is overridden; where a connection holds anything, `hang_up`; where lists are
    more than rows to expand, `make_list`, `drop_list` and `start_selected`.
    """

    memory_kinds: ClassVar[frozenset[MemoryKind]] = frozenset({MemoryKind.DRAM})
    """The kinds of memory that it can copy."""

    merges: ClassVar[bool] = True
    """Whether `start` is given ranges joined that go on on both sides."""

    def __init__(self, endpoint_name: str) -> None:
        """Begins without memory and peers.

        Args:
            endpoint_name: its name among all peers, as the contract asks.
        """
        self.endpoint_name = endpoint_name
        self._memory = RegisteredMemory("this endpoint")
        # Guards the tables below: several worker threads connect and prepare.
        self._lock = threading.Lock()
        self._connections: dict[str, ConnectionT] = {}
        self._lists: dict[str | None, set[PreparedList]] = {}

    @abstractmethod
    def open(self, peer: PeerMetadata) -> ConnectionT:
        """Connects to a peer.

        Raises:
            TransportError: if it cannot be connected, or is another than its metadata says.
        """

    @abstractmethod
    def start(self, connection: ConnectionT, copies: Copies, notification: bytes) -> TransferHandle:
        """Starts a write: as `Transport.post`, with ranges that are known to lie in registered memory of both sides.

        Args:
            connection: to the peer; it may have ended.
            copies: at least one range; `Copies.batches` divides them where a library takes only so many.
            notification: what the peer receives once all bytes are there; b"" sends none.

        Raises:
            PeerDisconnectedError: if the connection is gone.
            TransportError: for anything else. See `Promises.posts_all_or_nothing` for what may be in flight then.
        """

    def make_list(self, rows: RowArray, peer: str | None) -> PreparedList:
        """Makes a list of rows that were checked: by default one that is expanded where a write selects from it.

        Args:
            rows: as `prepare` is given them; likewise the peer.

        Raises:
            PeerDisconnectedError: if the peer is unknown.
            TransportError: if the list cannot be made.
        """
        return list_of_rows(rows, peer)

    def drop_list(self, prepared: PreparedList) -> None:
        """Gives back what a list that `make_list` made holds. It has been forgotten already, and is used no more."""

    def start_selected(
        self,
        connection: ConnectionT,
        local: PreparedList,
        local_indices: DescriptorIndices,
        remote: PreparedList,
        remote_indices: DescriptorIndices,
        notification: bytes,
    ) -> TransferHandle:
        """Starts a write between lists that `make_list` made and that are still prepared; else as `start`."""
        copies = copies_between(local, local_indices, remote, remote_indices, merges=self.merges)
        return self.start(connection, copies, notification)

    def private_metadata(self) -> bytes:
        """Returns what peers need to connect beside our name and memory."""
        return b""

    def hang_up(self, connection: ConnectionT) -> None:
        """Gives back what a connection holds. It has been forgotten already; nothing raised here is of any use."""

    def connection(self, peer: str) -> ConnectionT:
        """Returns the connection to a peer.

        Raises:
            PeerDisconnectedError: if there is none.
        """
        with self._lock:
            found = self._connections.get(peer)
        if found is None:
            raise PeerDisconnectedError(f"no connection to {peer!r}: connect first")
        return found

    def register(self, regions: Sequence[Region], device: Device) -> None:
        if device.kind not in self.memory_kinds:
            kinds = ", ".join(sorted(kind.value for kind in self.memory_kinds))
            raise RegistrationError(f"the {self.name} transport copies {kinds} only, not {device}")
        self._memory.check_device(device)
        self._memory.add(regions, device)

    def metadata(self) -> bytes:
        return PeerMetadata(
            name=self.endpoint_name,
            device=self._memory.device,
            regions=self._memory.regions,
            private=self.private_metadata(),
        ).encode()

    def connect(self, metadata: bytes) -> str:
        peer = PeerMetadata.decode(metadata)
        connection = self.open(peer)
        self.disconnect(peer.name)
        with self._lock:
            self._connections[peer.name] = connection
        return peer.name

    def disconnect(self, peer: str) -> None:
        with self._lock:
            connection = self._connections.pop(peer, None)
            lists = self._lists.pop(peer, set())
        for prepared in lists:
            self.drop_list(prepared)
        if connection is not None:
            self.hang_up(connection)

    def prepare(self, rows: RowArray, peer: str | None) -> PreparedList:
        memory = self._memory if peer is None else self.connection(peer).memory
        memory.check_rows(rows)
        prepared = self.make_list(rows, peer)
        with self._lock:
            self._lists.setdefault(peer, set()).add(prepared)
        return prepared

    def release_list(self, prepared: PreparedList) -> None:
        with self._lock:
            lists = self._lists.get(prepared.peer, set())
            is_known = prepared in lists
            lists.discard(prepared)
            if not lists:
                self._lists.pop(prepared.peer, None)
        if is_known:
            self.drop_list(prepared)

    def post(
        self,
        local: PreparedList,
        local_indices: DescriptorIndices,
        remote: PreparedList,
        remote_indices: DescriptorIndices,
        notification: bytes,
    ) -> TransferHandle:
        connection = self.connection(peer_written_to(local, remote))
        with self._lock:
            check_lists(local, remote, self._lists)
        return self.start_selected(connection, local, local_indices, remote, remote_indices, notification)

    def write(self, source: Region, peer: str, address: int, notification: bytes) -> TransferHandle:
        connection = self.connection(peer)
        self._memory.check_range(source)
        connection.memory.check_range(Region(address, source.length))
        return self.start(connection, Copies.one(source.address, address, source.length), notification)

    def release(self, transfer: TransferHandle) -> None:
        """Does nothing: what a finished write held is gone with its handle."""

    def close(self) -> None:
        with self._lock:
            peers = list(self._connections)
        for peer in peers:
            self.disconnect(peer)
        for prepared in self._lists.pop(None, set()):
            self.drop_list(prepared)
