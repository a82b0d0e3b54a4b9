"""The messages between peers: typed, versioned, bounded.

Control messages travel over the peer channel, notifications with the bytes over the transport. Every message is the
four bytes of `MAGIC`, the protocol version as two bytes, and a MessagePack body whose type is tagged.
"""

from __future__ import annotations

import struct
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from kvferry.errors import ConfigurationError, MessageError, VersionError, quoted
from kvferry.layout import RankCoordinates, RankLayout
from kvferry.plan import Piece, TransferPath, Unit
from kvferry.protocol.pages.page_numbers import MAX_PAGES, PageNumbers
from kvferry.protocol.wire.fingerprint import FingerprintFields
from kvferry.protocol.wire.request_conditions import RequestConditions

PROTOCOL_VERSION = 10
MAGIC = b"kvfy"
MAX_MESSAGE_BYTES = 32 * 1024 * 1024
MAX_AUX_BYTES = 1024 * 1024
MAX_POSITION = 2**48
MAX_REASON = 8000
"""Characters of a reason. Longer ones are cut before they are sent."""

MAX_GROUPS = 512
MAX_PIECES = 2**17
MAX_SEGMENTS = 2**16
MAX_DIGEST_BYTES = 2**20
MAX_METADATA_BYTES = 16 * 1024 * 1024

_HEADER = struct.Struct("<4sH")

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
"""A number that is refused on arrival if it is negative."""


Random: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number drawn at random, or a room's."""

EndpointName: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=255, pattern=r"^[!-~]+\Z")]
"""Identifies one start of an endpoint: visible ASCII, which ZMQ requires and a log can show."""

ShortText: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]
"""A name for people."""

Reason: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
"""A sentence for people."""

Position: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_POSITION)]
"""A position in a request, in tokens or pages. No request is nearly that long, and none makes 64 bits overflow."""


def shortened(text: str) -> str:
    """Cuts a reason that is too long to be sent, and notes its length at the end."""
    text = text.encode(errors="replace").decode()  # half a character, as in some files' names, cannot be sent
    if len(text) <= MAX_REASON:
        return text
    ending = f"... ({len(text)} characters)"
    return text[: MAX_REASON - len(ending)] + ending


def _shorten(struct: msgspec.Struct, field: str) -> None:
    """Shortens a sentence of a new struct, so that its length alone does not keep the struct from being sent."""
    msgspec.structs.force_setattr(struct, field, shortened(getattr(struct, field)))


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages."""


class StagingRing(msgspec.Struct, frozen=True):
    """Staging memory of a decode rank that one prefill rank may write to.

    Attributes:
        address: of its first byte.
        num_bytes: its size.
        epoch: random; distinguishes credits for this ring from those for an earlier one.
    """

    address: Count
    num_bytes: Count
    epoch: Random


class Staging(msgspec.Struct, frozen=True):
    """What a decode rank offers to one prefill rank for staged transfers.

    Attributes:
        path: the path that its settings force; None leaves the choice to the prefill rank.
        ring: where staged bytes go; None if they cannot.
        problem: why there is no ring.
        scatter_bytes_per_s: how fast the largest piece is put into its pages; 0 where it was not measured.
        unproven: whether nothing the decode rank has in reach could prove that this prefill rank has ended: then all is
            staged, unless a path is forced or there is no staged one.
    """

    path: TransferPath | None = None
    ring: StagingRing | None = None
    problem: Reason = ""
    scatter_bytes_per_s: Annotated[float, msgspec.Meta(ge=0, le=1e18)] = 0.0
    unproven: bool = False

    def __post_init__(self) -> None:
        _shorten(self, "problem")


class PodIdentity(msgspec.Struct, frozen=True):
    """Identifies a Kubernetes pod, and one start of a container in it.

    Attributes:
        uid: the pod's; never used again.
        name: the pod's.
        namespace: the pod's.
        container: in the termination message of the container that the process runs in, once that has ended; empty
            where nothing was put there.
    """

    uid: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    namespace: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    container: ShortText = ""


class ProcessIdentity(msgspec.Struct, frozen=True):
    """Identifies a process among all machines, even after its number was reused.

    Attributes:
        machine: identifies its machine, and the namespace of process numbers there.
        pid: its number.
        started: when it was started, in whatever unit the machine counts.
        pod: the pod that it runs in, if it does and says so.
    """

    machine: ShortText
    pid: Count
    started: Count
    pod: PodIdentity | None = None


class Hello(Message, frozen=True):
    """Decode to prefill: asks for `Welcome`."""

    endpoint: EndpointName
    engine: ShortText
    coordinates: RankCoordinates


class Welcome(Message, frozen=True):
    """Prefill to decode: answers `Hello` with who the rank is and what it holds.

    Attributes:
        endpoint: new at every start of the rank.
        fingerprint: what its caches are beyond their layout; see `protocol.wire.fingerprint`.
    """

    endpoint: EndpointName
    engine: ShortText
    coordinates: RankCoordinates
    layout: RankLayout
    transport: ShortText
    process: ProcessIdentity
    fingerprint: FingerprintFields = {}


class Attach(Message, frozen=True):
    """Decode to prefill: asks the rank to connect its transport to the sender's and to prepare these pieces.

    Attributes:
        attempt: counts up, so that answers to an earlier one are recognised.
        pieces: the receiver's whole plan; the prefill rank prepares those that list its group rank as a holder.
        transport: the transport's name, `transport_metadata` what it needs to connect.
        host: identifies the decode rank's machine.
        staging: what the decode rank offers for staged transfers.
        checksums: whether the prefill rank must digest what it sends.
        fingerprint: what the decode rank's caches are beyond their layout, as in `Welcome`.
    """

    endpoint: EndpointName
    attempt: Count
    engine: ShortText
    coordinates: RankCoordinates
    layout: RankLayout
    pieces: Annotated[tuple[Piece, ...], msgspec.Meta(max_length=MAX_PIECES)]
    transport: ShortText
    transport_metadata: Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA_BYTES)]
    host: ShortText = ""
    staging: Staging = Staging()
    checksums: bool = False
    fingerprint: FingerprintFields = {}


class Attached(Message, frozen=True):
    """Prefill to decode: the rank is ready to send.

    Attributes:
        attempt: the attempt of the `Attach` that this answers.
        only_staged: whether this rank will write to staging memory alone, and never to pages.
        last_failure: the number of the last write to this decode rank that failed, among all failed writes of this
            start of the rank; 0 if none has. What had been sent of it lands as after a `Drained` that says so, so that
            the decode rank counts `quarantine_s` of its own time, once, before it takes the rank for attached.
    """

    endpoint: EndpointName
    attempt: Count
    only_staged: bool
    last_failure: Count = 0


class Refused(Message, frozen=True):
    """Prefill to decode: the two cannot exchange caches. `error` is the name of an exception of kvferry.errors."""

    endpoint: EndpointName
    attempt: Count
    error: ShortText
    reason: Reason

    def __post_init__(self) -> None:
        _shorten(self, "reason")


class Closed(Message, frozen=True):
    """Prefill to decode: this rank was closed. None of its writes is in flight, and none will be.

    Attributes:
        after_failure: as in `Drained`, of any write to this decode rank.
    """

    endpoint: EndpointName
    after_failure: bool = False


class Detach(Message, frozen=True):
    """Decode to prefill: detaches the decode rank, which opens no more rooms.

    Attributes:
        attempt: a later attempt stays attached: this message may arrive late, by another connection.
    """

    endpoint: EndpointName
    attempt: Count = 2**62


class Ping(Message, frozen=True):
    """Decode to prefill, at regular intervals: shows that the sender is alive, and asks for `Pong`."""

    endpoint: EndpointName


class Pong(Message, frozen=True):
    """Prefill to decode: answers `Ping`, and a room of a decode rank that is not attached.

    Attributes:
        attached: whether the decode rank is attached. If not it must connect anew, or its next rooms are lost too.
    """

    endpoint: EndpointName
    attached: bool


class OpenGroup(msgspec.Struct, frozen=True, array_like=True):
    """What a decode rank requests of one group of pages. Positions are those of tokens in the request.

    Attributes:
        name: the group's name on the decode side.
        held: the decode rank has the tokens before this position; they must not be touched.
        start: the first token that it needs.
        stop: the first after those that it needs.
        first_page: how many pages of the request come before the given ones on this rank.
        pages: page numbers on the decode side.
    """

    name: ShortText
    held: Position
    start: Position
    stop: Position
    first_page: Position
    pages: PageNumbers


class OpenRoom(Message, frozen=True, omit_defaults=True):
    """Decode to prefill: the open request of a room.

    Attributes:
        room: the transfer's number.
        generation: random; distinguishes this use of the number from earlier ones.
        attempt: the last attempt to connect, in which the prefill rank attached.
        serial: number of the open request within that attempt, from 1 on; a retransmission has the same.
        receivers: how many decode ranks will open this room with the same prefill rank.
        tokens: how many tokens the request has; None where the decode side's caller gave no number.
        groups: what is requested of the groups of pages that this prefill rank fills in the room; none where it sends
            nothing to this decode rank.
        trace: the decode side's trace context, as W3C's `traceparent`; empty without tracing.
        held: tokens at the start of the request that this decode rank holds already, in groups that this prefill rank
            does not fill as well.
        depends_on: what the request's cache depends on; see `protocol.wire.request_conditions`.
    """

    room: Random
    generation: Random
    attempt: Random
    serial: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    receivers: Annotated[int, msgspec.Meta(le=2**31)]
    tokens: Position | None
    groups: Annotated[tuple[OpenGroup, ...], msgspec.Meta(max_length=MAX_GROUPS)]
    trace: ShortText = ""
    held: Position = 0
    depends_on: RequestConditions = {}


class AbortRoom(Message, frozen=True):
    """Decode to prefill: aborts a room. `Drained` answers once no write of this generation can happen any more.

    Attributes:
        error: the name of an exception of kvferry.errors where more than our caller's decision is behind it, else "".
        attempt: of the open request that it takes back, which does not count any more however late it comes. 0 where no
            open request was sent through a link, and when it is passed on within a prefill rank.
        serial: likewise.
    """

    room: Random
    generation: Random
    reason: Reason
    error: ShortText = ""
    attempt: Random = 0
    serial: Random = 0

    def __post_init__(self) -> None:
        _shorten(self, "reason")


class RefuseRoom(Message, frozen=True):
    """Decode to prefill: this rank will never open a room. `Drained` answers. Repeated until then.

    It may go to ranks that have not attached this one, and so says who it comes from.

    Attributes:
        endpoint: the start of the prefill rank that it is for; no other is concerned.
        engine: the decode rank's.
        coordinates: its place there.
        generation: random; distinguishes this refusal from others of the number.
        holder: the generation of another transfer that has the number on the decode rank, and is not refused; None if
            there is none. The refusal is for the use of the number that follows that one.
    """

    endpoint: ShortText
    engine: ShortText
    coordinates: RankCoordinates
    room: Random
    generation: Random
    reason: Reason
    holder: Random | None = None

    def __post_init__(self) -> None:
        _shorten(self, "reason")


class RoomVerified(Message, frozen=True):
    """Decode to prefill: the rank's digests of this generation are all right. Repeated until `Confirmed`."""

    room: Random
    generation: Random


class RoomFailed(Message, frozen=True):
    """Prefill to decode: this rank cannot complete the room. `Drained` follows."""

    room: Random
    generation: Random
    writer: Count
    error: ShortText
    reason: Reason

    def __post_init__(self) -> None:
        _shorten(self, "reason")


class Drained(Message, frozen=True):
    """Prefill to decode: this rank will not write for this generation again, and none of its writes is in flight.

    Attributes:
        endpoint: the rank that sends this. It covers this start of the rank, not earlier ones.
        after_failure: whether a write failed. What had been sent of it may lie in the decode rank's sockets if that was
            frozen meanwhile, and lands once it runs: it counts `quarantine_s` of its own time before it believes this.
    """

    endpoint: EndpointName
    room: Random
    generation: Random
    writer: Count
    after_failure: bool = False


class Confirmed(Message, frozen=True):
    """Prefill to decode: answers `RoomVerified`."""

    endpoint: EndpointName
    room: Random
    generation: Random
    writer: Count


class IsGone(Message, frozen=True):
    """Decode to prefill: asks for `Gone` once a process on the rank's machine has ended. Not answered while it runs."""

    process: ProcessIdentity


class Gone(Message, frozen=True):
    """Prefill to decode: answers `IsGone`; the process has ended."""

    process: ProcessIdentity


class Credit(Message, frozen=True):
    """Decode to prefill: the rank's ring of staging memory was read up to this position. Repeated now and then."""

    endpoint: EndpointName
    epoch: Random
    position: Count


class SpanReleased(Message, frozen=True):
    """Prefill to decode: this span of the ring was given up, and carries nothing; see `credits.Span`.

    Repeated until a credit shows that it arrived.

    Attributes:
        after_failure: as in `Drained`, of the write that was to fill it.
    """

    endpoint: EndpointName
    epoch: Random
    start: Count
    begin: Count
    stop: Count
    after_failure: bool = False


class Digests(msgspec.Struct, frozen=True, array_like=True):
    """Digests of packed blocks, page by page; see `protocol.geometry.digest_rows`.

    Attributes:
        row_bytes: least bytes that a digest covers, where pages are small.
        values: the digests, 8 bytes each, one after the other.
    """

    row_bytes: Count
    values: Annotated[bytes, msgspec.Meta(max_length=MAX_DIGEST_BYTES)]


class StagedSegment(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one piece, packed one after the other; see `plan.packing`.

    Attributes:
        piece: the piece's number among those of `Attach` that this writer may send.
        first_base: first index of the piece's first axis.
        stop_base: the one after the last.
        units: which units they are on the decode side, as ranges of numbers (local position divided by the unit's
            tokens): first and count of each, int64 little-endian.
        digests: digests of the packed bytes, where the decode rank requested them.
    """

    piece: Count
    first_base: Count
    stop_base: Count
    units: Annotated[bytes, msgspec.Meta(max_length=8 * MAX_PAGES)]
    digests: Digests | None = None


class ChunkArrived(Message, frozen=True, omit_defaults=True):
    """Notification: all bytes of one chunk from one writer are in place.

    Attributes:
        sequence: counts from 0 per receiver.
        unit: what its digests are counted in.
        segments: what the chunk consists of, with its digests, where the decode rank asked for them.
    """

    room: Random
    generation: Random
    writer: Count
    sequence: Count
    unit: Unit = Unit.WHOLE
    segments: Annotated[tuple[StagedSegment, ...], msgspec.Meta(max_length=MAX_SEGMENTS)] = ()


class StagedArrived(Message, frozen=True):
    """Notification: a part of a chunk from one writer is in staging memory.

    Attributes:
        sequence: the chunk's number, as in `ChunkArrived`.
        part: the part's number in its chunk, from 0.
        is_last: whether it is the last of the chunk.
        epoch: of the ring that it is in.
        start: where its span of the ring starts; see `credits.Span`.
        begin: where its bytes begin.
        stop: where they end.
        unit: what is packed together.
        segments: what the part consists of, in the order in which it is packed.
    """

    room: Random
    generation: Random
    writer: Count
    sequence: Count
    part: Count
    is_last: bool
    epoch: Random
    start: Count
    begin: Count
    stop: Count
    unit: Unit
    segments: Annotated[tuple[StagedSegment, ...], msgspec.Meta(max_length=MAX_SEGMENTS)]


class WriterFinished(Message, frozen=True):
    """Notification: this writer has finished the room.

    Attributes:
        chunks: how many chunks this writer sent to this receiver; they may arrive after this message.
        aux: the request's aux data, from the one rank that sends it; None from all others.
    """

    room: Random
    generation: Random
    writer: Count
    chunks: Count
    aux: Annotated[bytes, msgspec.Meta(max_length=MAX_AUX_BYTES)] | None = None


ToPrefill: TypeAlias = (
    Hello | Attach | Detach | Ping | OpenRoom | AbortRoom | RefuseRoom | RoomVerified | IsGone | Credit
)
ToDecode: TypeAlias = (
    Welcome | Attached | Refused | Closed | Pong | RoomFailed | Drained | Confirmed | Gone | SpanReleased
)
Notification: TypeAlias = ChunkArrived | StagedArrived | WriterFinished

_Body = TypeVar("_Body")

_encoder = msgspec.msgpack.Encoder()
_to_prefill: msgspec.msgpack.Decoder[ToPrefill] = msgspec.msgpack.Decoder(ToPrefill)
_to_decode: msgspec.msgpack.Decoder[ToDecode] = msgspec.msgpack.Decoder(ToDecode)
_notification: msgspec.msgpack.Decoder[Notification] = msgspec.msgpack.Decoder(Notification)


def encode(message: Message) -> bytes:
    """Encodes a message.

    Raises:
        MessageError: if it is larger than the peer would accept, or holds what cannot be encoded.
    """
    try:
        body = _encoder.encode(message)
    except (UnicodeEncodeError, OverflowError) as error:
        raise MessageError(f"{type(message).__name__} cannot travel: {error}") from error
    if len(body) > MAX_MESSAGE_BYTES:
        raise MessageError(f"{type(message).__name__} of {len(body)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    return _HEADER.pack(MAGIC, PROTOCOL_VERSION) + body


def _body(data: bytes) -> memoryview:
    if len(data) < _HEADER.size or data[:4] != MAGIC:
        raise MessageError(f"{len(data)} bytes that are no message of kvferry: {bytes(data[:16])!r}")
    if len(data) > MAX_MESSAGE_BYTES + _HEADER.size:
        raise MessageError(f"a message of {len(data)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    version = _HEADER.unpack_from(data)[1]
    if version != PROTOCOL_VERSION:
        raise VersionError(
            f"the peer speaks protocol version {version}, this side {PROTOCOL_VERSION}: run the same kvferry on both"
        )
    return memoryview(data)[_HEADER.size :]


def _decode(decoder: msgspec.msgpack.Decoder[_Body], data: bytes, what: str) -> _Body:
    try:
        return decoder.decode(_body(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ConfigurationError) as error:
        raise MessageError(f"a malformed {what}: {quoted(error)}") from error


def decode_to_prefill(data: bytes) -> ToPrefill:
    """Decodes a message from a decode rank.

    Raises:
        MessageError: if the bytes are no such message, or describe an impossible layout.
        VersionError: if they are of another protocol version.
    """
    return _decode(_to_prefill, data, "message to a prefill rank")


def decode_to_decode(data: bytes) -> ToDecode:
    """Decodes a message from a prefill rank; errors as in `decode_to_prefill`."""
    return _decode(_to_decode, data, "message to a decode rank")


def decode_notification(data: bytes) -> Notification:
    """Decodes a notification that came with the bytes; errors as in `decode_to_prefill`."""
    return _decode(_notification, data, "notification")
