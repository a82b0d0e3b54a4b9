"""What every transport does: move bytes from our memory into a peer's, and carry small notifications.

The contract, which `tests/contract` checks for every transport:

* `register` and `connect` come first; descriptor lists are prepared once per peer and selected by index many times.
  More memory may be registered later; peers that are to write to it need new metadata.
* `write` needs no list: one range of memory of any length, in one piece.
* `post` starts a write. It may complete at once. The caller must `poll` until `poll` returns a report or raises: a
  notification may leave only when its sender polls.
* A `post` or `write` that raises may have begun: what it had posted goes on, reads our memory and arrives, and nothing
  says when that is over. Where the transport promises `posts_all_or_nothing`, none of it is: a library that fails in
  the middle of a post is then a write that fails, whose `poll` raises once what was posted has ended.
* After `poll` returned a report, all bytes are in the peer's memory and ours is no longer read; then, and not before,
  the peer receives the notification. After `poll` raised, the transport reads our memory no more and sends nothing
  more of the write. What it had sent may still arrive for a moment where the transport says so (`may_deliver_late`):
  the peer's memory is its own again when that is over.
* `release` frees a transfer's resources. It does not stop it; only a finished transfer may be released.
* Notifications from one peer may arrive in any order.
* `take_notifications` must be called now and then, by a side that only writes too: what connections have to do may
  wait for it. It need not be called more often than every 100 microseconds.

All methods may be called from any thread, except that one transfer belongs to one thread at a time, and `close` comes
last. Errors are `TransportError`s whose `__cause__` is the library's own exception.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import msgspec

from kvferry.errors import MessageError, PeerDisconnectedError, SettingsError, TransportError, quoted
from kvferry.layout import Device, Region
from kvferry.plan.descriptors import DescriptorIndices, RowArray
from kvferry.protocol.wire.field_types import MAX_METADATA_BYTES, EndpointName
from kvferry.settings import Settings
from kvferry.transport.compiled_posts import Posted, Wire
from kvferry.transport.diagnosis import Diagnosis


@dataclass(frozen=True, slots=True, eq=False)
class PreparedList:
    """A local handle for a descriptor list; it never travels.

    Attributes:
        peer: whose memory it describes; None for our own.
        handle: the transport's own handle.
        rows: how many rows it was made of.
        count: how many descriptors it has.
    """

    peer: str | None
    handle: Any
    rows: int
    count: int


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What the transport measured of a finished write.

    Attributes:
        total_bytes: bytes that moved.
        descriptors: descriptors after merging.
        post_s: time spent in posting.
        transfer_s: time from post to completion.
    """

    total_bytes: int
    descriptors: int
    post_s: float
    transfer_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Promises:
    """What a transport promises beyond the contract: each measured before it is claimed, and False where it was not.

    What holds pages and staging memory follows from these.

    Attributes:
        can_abort: a write can be taken back: from then on neither memory is used, whether it had ended or not.
        fenced_by_deregistration: once its owner has deregistered memory, no peer's write changes it any more.
        fenced_by_death: once the process that writes has ended, and what the network had for us has arrived
            (KVFERRY_QUARANTINE_S), nothing more of its writes does. Without this no proof of an end gives pages back.
        keeps_order: writes to one peer arrive in the order in which they were posted.
        posts_all_or_nothing: a `post` or `write` that raised has sent nothing, and reads nothing. Without this such a
            write counts as one that failed in the middle, for KVFERRY_QUARANTINE_S, and the peer is connected anew.
    """

    can_abort: bool
    fenced_by_deregistration: bool
    fenced_by_death: bool
    keeps_order: bool
    posts_all_or_nothing: bool = False


class TransferHandle:
    """One write on its way. Each transport has its own kind."""


MOST_REGIONS = 1 << 17
"""Most regions of registered memory that peers may write to."""


class PeerMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """The wire form of an endpoint's transport: what a peer needs to connect.

    Attributes:
        name: identifies the endpoint among all peers.
        device: where its registered memory lives.
        regions: the memory that peers may write to.
        private: the transport's own bytes.
    """

    name: EndpointName
    device: Device
    regions: Annotated[tuple[Region, ...], msgspec.Meta(max_length=MOST_REGIONS)]
    private: Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA_BYTES)]

    def encode(self) -> bytes:
        """Encodes it as it is sent in `Attach`."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> PeerMetadata:
        """Decodes what `encode` encoded.

        Raises:
            MessageError: if the bytes are no such metadata.
        """
        try:
            return _METADATA.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MessageError(f"malformed transport metadata: {quoted(error)}") from error


# Made here, not when it is first needed: msgspec 0.22 crashes if two threads are the first to decode a type.
_METADATA = msgspec.msgpack.Decoder(PeerMetadata)


class CompiledWay(ABC):
    """What compiled code writes to one peer with. For one thread at a time, but that of `wire` any may use.

    Attributes:
        wire: what it calls.
        copies_as_it_posts: whether writes of late have ended with their posts, so that they may go slice by slice.
    """

    wire: Wire
    copies_as_it_posts: bool

    @abstractmethod
    def adopt(self, posted: Posted, notification: bytes) -> TransferHandle:
        """Takes over a write that compiled code has begun: it is polled, and released, as any other. Raises nothing.

        Args:
            notification: what the peer receives once all bytes are there.
        """


class Transport(ABC):
    """Moves bytes. See the module's docstring for the contract."""

    name: str
    """Name of this kind of transport in settings and handshakes."""

    promises: Promises
    """What this kind of transport promises."""

    endpoint_name: str
    """Name of this endpoint among all peers: unique, and new at every start."""

    may_deliver_late: bool = True
    """Whether what was sent of a write may still arrive after `poll` raised: from a socket's buffers, or a network."""

    diagnosis: ClassVar[Diagnosis] = Diagnosis()
    """What `kvferry doctor` is told of it."""

    @classmethod  # noqa: B027 - most have nothing to check
    def check_available(cls) -> None:
        """Checks, before anything is started, that the transport can be used on this machine.

        Raises:
            TransportUnavailableError: if its library is missing, saying how to install it.
        """

    @classmethod
    def from_settings(cls, settings: Settings, endpoint_name: str, *, writes: bool) -> Transport:  # noqa: ARG003
        """Makes the transport of an endpoint that was given none, where the setting `transport` chooses this kind.

        Args:
            settings: the endpoint's.
            endpoint_name: its name.
            writes: whether the endpoint writes into peers' memory, and is never written to; else it is the other way
                round.

        Raises:
            SettingsError: if a setting is impossible, or no settings can make one of this kind.
            TransportUnavailableError: if its library is missing.
        """
        raise SettingsError(
            f"a transport of the kind {cls.name!r} is not made from settings: give one to the endpoint (`transport`)"
        )

    @abstractmethod
    def register(self, regions: Sequence[Region], device: Device) -> None:
        """Registers memory that is read or written. Memory that is registered later must be on the same device.

        Raises:
            RegistrationError: if the memory cannot be registered, or is on another device than what was before.
        """

    @abstractmethod
    def metadata(self) -> bytes:
        """Returns what a peer needs to connect to us, encoded."""

    @abstractmethod
    def connect(self, metadata: bytes) -> str:
        """Connects to a peer and returns its name. A peer that is known under that name is removed first.

        Raises:
            TransportError: if it cannot be connected.
            MessageError: if the metadata is malformed.
        """

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Forgets a peer and its prepared lists. An unknown one is ignored."""

    @abstractmethod
    def prepare(self, rows: RowArray, peer: str | None) -> PreparedList:
        """Prepares a descriptor list for our own memory (peer None) or a peer's.

        Args:
            rows: uint64, shape [rows, 5]; see `DescriptorRows`.

        Raises:
            RegistrationError: if a row leaves registered memory or overlaps itself, naming it, or if there is none.
            PeerDisconnectedError: if the peer is unknown.
        """

    @abstractmethod
    def release_list(self, prepared: PreparedList) -> None:
        """Frees a descriptor list. No transfer may use it any more."""

    @abstractmethod
    def post(
        self,
        local: PreparedList,
        local_indices: DescriptorIndices,
        remote: PreparedList,
        remote_indices: DescriptorIndices,
        notification: bytes,
    ) -> TransferHandle:
        """Starts writing the selected local descriptors to the selected remote ones, index by index.

        Args:
            notification: what the peer receives once all bytes are there; b"" sends none.

        Raises:
            PeerDisconnectedError: if the connection is gone.
            TransportError: for anything else. See `Promises.posts_all_or_nothing` for what may be in flight then.
        """

    @abstractmethod
    def write(self, source: Region, peer: str, address: int, notification: bytes) -> TransferHandle:
        """Starts writing a range of our memory to an address of a peer's, all in one piece.

        Args:
            notification: b"" sends none, as in `post`.

        Raises:
            RegistrationError: if either range lies outside registered memory.
            PeerDisconnectedError: if there is no connection.
            TransportError: for anything else. See `Promises.posts_all_or_nothing` for what may be in flight then.
        """

    @abstractmethod
    def poll(self, transfer: TransferHandle) -> TransferReport | None:
        """Returns the report of a finished write, None while it is on its way.

        Raises:
            PeerDisconnectedError: if the connection broke.
            TransportError: if the write failed.
        """

    @abstractmethod
    def release(self, transfer: TransferHandle) -> None:
        """Frees a finished transfer."""

    @abstractmethod
    def notify(self, peer: str, notification: bytes) -> None:
        """Sends a notification that belongs to no write.

        Raises:
            PeerDisconnectedError: if the connection is gone.
        """

    @abstractmethod
    def take_notifications(self) -> list[tuple[str, bytes]]:
        """Returns the notifications that arrived since the last call: (name of the peer, bytes)."""

    @property
    def has_compiled_ways(self) -> bool:
        """Whether compiled code can write to peers: `compiled_way` says with what."""
        return False

    def compiled_way(self, peer: str) -> CompiledWay | None:
        """Returns what compiled code writes to a peer with; None where only the interpreter does.

        Raises:
            PeerDisconnectedError: if there is no connection.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Disconnects every peer and gives all memory back. Later calls do nothing."""


def peer_written_to(local: PreparedList, remote: PreparedList) -> str:
    """Returns the peer that a write from one list to another goes to.

    Raises:
        TransportError: if it does not go from our own memory to a peer's.
    """
    if local.peer is not None or remote.peer is None:
        raise TransportError("a write goes from a list of our own memory to one of a peer's")
    return remote.peer


def check_counts(local: DescriptorIndices, remote: DescriptorIndices) -> None:
    """Refuses a selection of descriptors that makes no write.

    Raises:
        TransportError: with the number of either side.
    """
    if len(local) != len(remote) or not len(local):
        raise TransportError(
            f"a write needs as many local as remote descriptors and at least one: {len(local)} and {len(remote)}"
        )


def check_lists(
    local: PreparedList, remote: PreparedList, known: Mapping[str | None, Collection[PreparedList]]
) -> None:
    """Refuses lists that were released, or whose peer was disconnected since.

    Args:
        known: the lists that are prepared, by peer.

    Raises:
        PeerDisconnectedError: if the peer's list is not among them.
        TransportError: if our own is not.
    """
    if remote not in known.get(remote.peer, ()):
        raise PeerDisconnectedError(f"the list belongs to an earlier connection to {remote.peer!r}, or was released")
    if local not in known.get(None, ()):
        raise TransportError("the list of our own memory was released")
