"""What travels between ranks, typed and bounded: messages over the peer channel, notifications with the bytes.

Messages that must come, once and in order, go through the reliable channel of an attachment, numbered (`Numbered`); see
`protocol.links.reliable_channel`. The others are sent as they are: they come before an attachment, outlive it, or are
repeated by themselves. Notifications go over the transport, and say what has arrived, and how it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from kvferry.layout import RankCoordinates, RankLayout
from kvferry.plan import ElectedRoute, Piece, TransferPath, Unit
from kvferry.plan.fingerprint import FingerprintFields, RequestConditions
from kvferry.plan.requests.demands import GroupRequest, Position, wanted_groups
from kvferry.plan.requests.moves import ReceiverRequest
from kvferry.plan.requests.page_numbers import MAX_PAGES
from kvferry.protocol.wire.field_types import (
    MAX_AUX_BYTES,
    MAX_DIGEST_BYTES,
    MAX_EXPECTED,
    MAX_GROUPS,
    MAX_METADATA_BYTES,
    MAX_PIECES,
    MAX_SEGMENTS,
    AboutRoom,
    Attempt,
    Count,
    EndpointName,
    Message,
    ProcessIdentity,
    Random,
    Reason,
    RequiredFeatures,
    ShortText,
    Writer,
    shorten,
)


class Digests(msgspec.Struct, frozen=True, array_like=True):
    """Digests of packed blocks, page by page; see `plan.requests.moved_blocks` and `staging.digests`.

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


class ChunkArrived(AboutRoom, frozen=True, omit_defaults=True):
    """Notification: all bytes of one chunk from one writer are in place.

    Here and below a chunk is what leaves in one write: one that was submitted, or several that waited together.

    Attributes:
        sequence: counts from 0 per receiver.
        unit: what its digests are counted in.
        segments: what the chunk consists of, with its digests, where the decode rank asked for them.
    """

    writer: Writer
    sequence: Count
    unit: Unit = Unit.WHOLE
    segments: Annotated[tuple[StagedSegment, ...], msgspec.Meta(max_length=MAX_SEGMENTS)] = ()


class StagedArrived(AboutRoom, frozen=True):
    """Notification: a part of a chunk from one writer is in staging memory.

    Attributes:
        sequence: the chunk's number, as in `ChunkArrived`.
        part: the part's number in its chunk, from 0.
        is_last: whether it is the last of the chunk.
        epoch: of the ring that it is in.
        start: where its span of the ring starts; see `staging.rings.Span`.
        begin: where its bytes begin.
        stop: where they end.
        unit: what is packed together.
        segments: what the part consists of, in the order in which it is packed.
    """

    writer: Writer
    sequence: Count
    part: Count
    is_last: bool
    epoch: Random
    start: Count
    begin: Count
    stop: Count
    unit: Unit
    segments: Annotated[tuple[StagedSegment, ...], msgspec.Meta(max_length=MAX_SEGMENTS)]


class WriterFinished(AboutRoom, frozen=True):
    """Notification: this writer has finished the room.

    Attributes:
        chunks: how many chunks this writer sent to this receiver; they may arrive after this message.
        aux: the request's aux data, from the one rank that sends it; None from all others.
    """

    writer: Writer
    chunks: Count
    aux: Annotated[bytes, msgspec.Meta(max_length=MAX_AUX_BYTES)] | None = None


Notification: TypeAlias = ChunkArrived | StagedArrived | WriterFinished


class StagingRing(msgspec.Struct, frozen=True):
    """Staging memory of a decode rank that one prefill rank may write to.

    Attributes:
        address: of its first byte.
        epoch: random; distinguishes credits for this ring from those for an earlier one.
    """

    address: Count
    num_bytes: Annotated[Count, msgspec.Meta(description="its size")]
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
        shorten(self, "problem")


class Hello(Message, frozen=True):
    """Decode to prefill: asks for `Welcome`."""


class Welcome(Message, frozen=True):
    """Prefill to decode: answers `Hello` with who the rank is and what it holds.

    Attributes:
        endpoint: new at every start of the rank.
        fingerprint: what its caches are beyond their layout; see `plan.fingerprint`.
        requires: features that the decode rank must know; see `protocol.wire.versions`.
    """

    endpoint: EndpointName
    engine: Annotated[ShortText, msgspec.Meta(description="its engine's name")]
    coordinates: RankCoordinates
    layout: RankLayout
    transport: Annotated[ShortText, msgspec.Meta(description="the transport's name")]
    process: ProcessIdentity
    fingerprint: FingerprintFields = msgspec.field(default_factory=dict)
    requires: RequiredFeatures = ()


class Attach(Message, frozen=True):
    """Decode to prefill: asks the rank to connect its transport to the sender's and to prepare these pieces.

    Attributes:
        attempt: counts up, so that answers to an earlier one are recognised.
        pieces: the receiver's whole plan; the prefill rank prepares those that list its group rank as a holder.
        transport: the transport's name, `transport_metadata` what it needs to connect.
        host: identifies the decode rank's machine.
        checksums: whether the prefill rank must digest what it sends.
        fingerprint: what the decode rank's caches are beyond their layout, as in `Welcome`.
        requires: features that the prefill rank must know, as there.
    """

    endpoint: EndpointName
    attempt: Attempt
    engine: Annotated[ShortText, msgspec.Meta(description="its engine's name")]
    coordinates: RankCoordinates
    layout: RankLayout
    pieces: Annotated[tuple[Piece, ...], msgspec.Meta(max_length=MAX_PIECES)]
    transport: ShortText
    transport_metadata: Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA_BYTES, description="what that needs")]
    host: ShortText = ""
    staging: Staging = Staging()
    checksums: bool = False
    fingerprint: FingerprintFields = msgspec.field(default_factory=dict)
    requires: RequiredFeatures = ()


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
    attempt: Attempt
    only_staged: bool
    last_failure: Count = 0


class Refused(Message, frozen=True):
    """Prefill to decode: the two cannot exchange caches. `error` is the name of an exception of kvferry.errors."""

    attempt: Attempt
    error: Annotated[ShortText, msgspec.Meta(description="the name of an exception")]
    reason: Reason

    def __post_init__(self) -> None:
        shorten(self, "reason")


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
    attempt: Attempt = 2**62


class Numbered(Message, frozen=True):
    """Either way: a message of the reliable channel; see `protocol.links.reliable_channel`.

    Attributes:
        epoch: the attempt to attach that the channel belongs to.
        number: counts from 1 on; the same if it is sent again.
        body: one of `NumberedToPrefill` or `NumberedToDecode`, encoded.
    """

    epoch: Random
    number: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    body: msgspec.Raw


class Ping(Message, frozen=True):
    """Decode to prefill, at regular intervals: shows that the sender is alive, and asks for `Pong`.

    Attributes:
        epoch: of the reliable channel; 0 if there is none.
        sent: the number of the last message that was sent through it.
        received: up to which number the prefill rank's messages have come.
        resends: whether those that have not must be sent again: a connection broke.
    """

    epoch: Random = 0
    sent: Count = 0
    received: Count = 0
    resends: bool = False


class Pong(Message, frozen=True):
    """Prefill to decode: answers `Ping`, and a decode rank that is given up, or sends as if it were attached.

    Attributes:
        attached: whether the decode rank is attached. If not it must connect anew, or its next rooms are lost too.
        reason: why it is not, where it was before.
        epoch: as in `Ping`, or of the attempt to attach that is given up.
        heard_of: the `sent` of the `Ping` that this answers; what has not come of that is lost.
    """

    endpoint: EndpointName
    attached: bool
    reason: Reason = ""
    epoch: Random = 0
    sent: Annotated[Count, msgspec.Meta(description="as in `Ping`, of the prefill rank's messages")] = 0
    received: Annotated[Count, msgspec.Meta(description="as in `Ping`, of the decode rank's messages")] = 0
    heard_of: Count = 0

    def __post_init__(self) -> None:
        shorten(self, "reason")


class WillNotSucceed(AboutRoom, frozen=True):
    """Base of those that say why it will not succeed, in words."""

    reason: Reason

    def __post_init__(self) -> None:
        shorten(self, "reason")


class OpenRoom(AboutRoom, frozen=True, omit_defaults=True):
    """Decode to prefill, numbered: the open request of a room.

    Attributes:
        receivers: how many decode ranks will open this room with the same prefill rank.
        tokens: how many tokens the request has; None where the decode side's caller gave no number.
        groups: what is requested of the groups of pages that this prefill rank fills in the room; none where it sends
            nothing to this decode rank.
        trace: the decode side's trace context, as W3C's `traceparent`; empty without tracing.
        held: tokens at the start of the request that this decode rank holds already, in groups that this prefill rank
            does not fill as well.
        depends_on: what the request's cache depends on; see `plan.fingerprint`.
    """

    receivers: Annotated[int, msgspec.Meta(le=2**31)]
    tokens: Position | None
    groups: Annotated[tuple[GroupRequest, ...], msgspec.Meta(max_length=MAX_GROUPS)]
    trace: ShortText = ""
    held: Position = 0
    depends_on: RequestConditions = msgspec.field(default_factory=dict)

    def checked(self, layout: RankLayout, elected: Sequence[ElectedRoute], *, where: str) -> ReceiverRequest:
        """Returns what is requested from the rank that received this.

        Args:
            layout: the decode rank's.
            elected: what the rank sends in the room.
            where: begins error messages.

        Raises:
            PageError: if it contradicts itself or the layout, or is not about what the rank sends.
        """
        routes = tuple(each.route for each in elected)
        filled = {route.destination_group for route in routes}
        wanted = wanted_groups(
            self.groups, layout, receivers=self.receivers, tokens=self.tokens, filled=filled, where=where
        )
        layers = tuple(each.layers for each in elected)
        return ReceiverRequest(self.tokens, wanted, routes, self.depends_on, layers)


class AbortRoom(WillNotSucceed, frozen=True):
    """Decode to prefill: aborts a room. Repeated until `Drained` answers, once no write of this generation can happen.

    It is not numbered, since it may be for an attachment that either side has given up.

    Attributes:
        error: the name of an exception of kvferry.errors where more than our caller's decision is behind it, else "".
        epoch: of the channel that carried the open request which it takes back; 0 where none was sent.
        number: of that request in the channel; it does not count any more if it has not come.
    """

    error: ShortText = ""
    epoch: Random = 0
    number: Random = 0


class RefuseRoom(WillNotSucceed, frozen=True):
    """Decode to prefill: this rank will never open a room. `Drained` answers. Repeated until then.

    It may go to ranks that have not attached this one, and so says who it comes from.

    Attributes:
        endpoint: the start of the prefill rank that it is for; no other is concerned.
        engine: the decode rank's, as `coordinates` are.
        holder: the generation of another transfer that has the number on the decode rank, and is not refused; None if
            there is none. The refusal is for the use of the number that follows that one.
    """

    endpoint: ShortText
    engine: ShortText
    coordinates: RankCoordinates
    holder: Random | None = None


class ExpectRooms(Message, frozen=True):
    """Decode to prefill, at regular intervals: requests wait here that will open these rooms, or refuse them."""

    rooms: Annotated[tuple[Random, ...], msgspec.Meta(max_length=MAX_EXPECTED, description="their numbers")]


class RoomVerified(AboutRoom, frozen=True):
    """Decode to prefill, numbered: the rank's digests of this generation are all right."""


class RoomFailed(WillNotSucceed, frozen=True):
    """Prefill to decode, numbered: this rank cannot complete the room. `Drained` follows."""

    writer: Writer
    error: Annotated[ShortText, msgspec.Meta(description="the name of an exception")]


class Drained(AboutRoom, frozen=True):
    """Prefill to decode: this rank will not write for this generation again, and none of its writes is in flight.

    It is not numbered, since it may be for an attachment that either side has given up: it answers every `AbortRoom`.

    Attributes:
        endpoint: the rank that sends this. It covers this start of the rank, not earlier ones.
        after_failure: whether a write failed. What had been sent of it may lie in the decode rank's sockets if that was
            frozen meanwhile, and lands once it runs: it counts `quarantine_s` of its own time before it believes this.
        error: as in `RoomFailed`, which is lost where its channel ends first; "" where the room did not fail here.
        reason: likewise.
    """

    endpoint: EndpointName
    writer: Writer
    after_failure: bool = False
    error: ShortText = ""
    reason: Reason = ""

    def __post_init__(self) -> None:
        shorten(self, "reason")


class IsGone(Message, frozen=True):
    """Decode to prefill: asks for `Gone` once a process on the rank's machine has ended. Not answered while it runs."""

    process: ProcessIdentity


class Gone(Message, frozen=True):
    """Prefill to decode: answers `IsGone`; the process has ended."""

    process: ProcessIdentity


class Credit(Message, frozen=True):
    """Decode to prefill, numbered: the ring of staging memory was read up to this position; see `staging.rings`."""

    epoch: Annotated[Random, msgspec.Meta(description="the ring's")]
    position: Annotated[Count, msgspec.Meta(description="the watermark, in bytes")]


class SpanReleased(Message, frozen=True):
    """Prefill to decode, numbered: this span of the ring was given up, and carries nothing; see `staging.rings.Span`.

    Attributes:
        after_failure: as in `Drained`, of the write that was to fill it.
    """

    endpoint: EndpointName
    epoch: Annotated[Random, msgspec.Meta(description="the ring's")]
    start: Annotated[Count, msgspec.Meta(description="where the span starts")]
    begin: Annotated[Count, msgspec.Meta(description="where its bytes begin")]
    stop: Annotated[Count, msgspec.Meta(description="where they end")]
    after_failure: bool = False


ToPrefill: TypeAlias = Hello | Attach | Detach | Ping | Numbered | AbortRoom | RefuseRoom | ExpectRooms | IsGone
NumberedToPrefill: TypeAlias = OpenRoom | RoomVerified | Credit
ToDecode: TypeAlias = Welcome | Attached | Refused | Closed | Pong | Numbered | Drained | Gone
NumberedToDecode: TypeAlias = RoomFailed | SpanReleased
