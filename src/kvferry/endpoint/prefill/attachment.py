"""What a prefill rank prepares for a decode rank that connects: made once, used by every room between the two."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvferry.endpoint.prefill.paths import PathChooser, SendingStaging
from kvferry.endpoint.runtime.calibration import WriteHangsError
from kvferry.errors import IncompatiblePeerError, TransportError
from kvferry.layout import Interval
from kvferry.loggers import logger_of
from kvferry.plan import (
    ElectedRoute,
    PairPlan,
    Selector,
    TransferPath,
    Unit,
    check_exchangeable,
    check_token_share,
    selectors,
)
from kvferry.plan.descriptors import MERGED_BYTES, DescriptorIndices, PieceNumbers
from kvferry.plan.fingerprint import check_same_fingerprint
from kvferry.plan.requests.moves import Move, ReceiverRequest
from kvferry.protocol.wire.field_types import DecodeRank, Identity
from kvferry.protocol.wire.messages import Attach, OpenRoom
from kvferry.protocol.wire.versions import check_required
from kvferry.staging.digests import DigestMemory
from kvferry.transport import PeerMetadata, PreparedList, Transport

log = logger_of(__name__)

_ChosenLayers: TypeAlias = tuple[tuple[str, Interval], ...] | None

_MOST_SELECTORS = 1024  # of one receiver: ranges of layers may be joined in as many ways as there are pairs of layers


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRows:
    """The lists that a transport made of descriptor rows, and how their descriptors are numbered."""

    pieces: tuple[PieceNumbers, ...]
    local: PreparedList
    remote: PreparedList


@dataclass(frozen=True, slots=True, eq=False)
class Selected:
    """The descriptors of one write, in the order in which they pair up."""

    local: PreparedList
    local_indices: DescriptorIndices
    remote: PreparedList
    remote_indices: DescriptorIndices


class Attachment:
    """A decode rank, ready to be written to.

    Attributes:
        receiver: its endpoint.
        rank: which decode rank it is.
        layout: what it holds and where.
        plan: what this rank may send it.
        paths: chooses the path of every write to it.
        verifies: whether the decode rank confirms that all that arrived is right.
        digests: computes the digests of what is sent; None if the decode rank asks for none.
        moved_at: when a write to it last ended, or a part of one last arrived, of whichever room.
        spans_kept_until: by when the span of the last staged write that failed should be free: until both sides have
            waited for what was sent of it. Whoever waits for the ring till then cannot blame the receiver.
        prepared: descriptor lists that were prepared, by unit.
    """

    def __init__(
        self,
        message: Attach,
        plan: PairPlan,
        transport: Transport,
        paths: PathChooser,
        *,
        digests: DigestMemory | None,
        merged_bytes: int,
    ) -> None:
        self.receiver = message.endpoint
        self.rank = DecodeRank(message.engine, message.coordinates)
        self.layout = message.layout
        self.plan = plan
        self.paths = paths
        self.verifies = message.checksums
        self.digests = digests
        self.moved_at = float("-inf")
        self.spans_kept_until = float("-inf")
        self._transport = transport
        self._merged_bytes = merged_bytes
        # Guards the prepared lists: those of single tokens are made by whichever worker first needs them.
        self._prepare_lock = threading.Lock()
        self.prepared: dict[Unit, PreparedRows] = {}
        self._selectors: dict[tuple[Unit, tuple[int, ...], _ChosenLayers], tuple[Selector, ...]] = {}
        # Guards the two below, which several workers use: no list is given back while a write uses it.
        self._lock = threading.Lock()
        self._writes = 0
        self._when_unused: Callable[[], None] | None = None

    def begin_write(self) -> bool:
        """Holds all lists for one write. Returns False if they are being given back."""
        with self._lock:
            if self._when_unused is not None:
                return False
            self._writes += 1
            return True

    def end_write(self) -> None:
        """Ends a write's hold on the lists."""
        with self._lock:
            self._writes -= 1
            call = self._when_unused if self._writes == 0 else None
        if call is not None:
            call()

    def retire(self, when_unused: Callable[[], None]) -> None:
        """Refuses further writes, and calls back as soon as none uses the lists. To be called once."""
        with self._lock:
            self._when_unused = when_unused
            is_unused = self._writes == 0
        if is_unused:
            when_unused()

    def elected(self, room: int, group_rank: int) -> tuple[ElectedRoute, ...]:
        """Returns the routes by which this rank sends in a room.

        Args:
            group_rank: this rank's.
        """
        return self.plan.elected(room, writer=group_rank, receiver=self.rank.coordinates.group_rank)

    def checked(self, message: OpenRoom, elected: Sequence[ElectedRoute]) -> ReceiverRequest:
        """Returns what an open request of the decode rank asks for, of what this rank sends in the room.

        Raises:
            PageError: if it contradicts itself or the layout, or is not about what this rank sends.
        """
        return message.checked(self.layout, elected, where=f"room {message.room} on {self.receiver}")

    def prepare(self, unit: Unit) -> PreparedRows:
        """Returns the lists for a unit, prepared at the first call.

        Raises:
            LayoutError: if there are more descriptors than can be numbered.
            TransportError: if preparing fails.
        """
        with self._prepare_lock:
            if unit not in self.prepared:
                rows = self.plan.descriptor_rows(unit)
                local = self._transport.prepare(rows.source, None)
                try:
                    remote = self._transport.prepare(rows.destination, self.receiver)
                except BaseException:
                    self._transport.release_list(local)
                    raise
                self.prepared[unit] = PreparedRows(rows.pieces, local, remote)
            return self.prepared[unit]

    def select(self, unit: Unit, elected: Sequence[ElectedRoute], moves: Sequence[Move]) -> Selected:
        """Selects the descriptors of a write. To be called between `begin_write` and `end_write`; raises as `prepare`.

        Args:
            elected: what this rank sends in the room; moves refer to it.
        """
        prepared = self.prepare(unit)
        local, remote = [], []
        for move in moves:
            for selector in self._selectors_of(unit, prepared, elected[move.route].pieces, move.layers):
                here, there = selector.select(
                    move.source_units, move.source_pages, move.destination_units, move.destination_pages
                )
                local.append(here)
                remote.append(there)
        return Selected(prepared.local, _joined(local), prepared.remote, _joined(remote))

    def bytes_of(self, unit: Unit, elected: Sequence[ElectedRoute], moves: Sequence[Move]) -> int:
        """Returns how many bytes a write moves; arguments as in `select`."""
        packed = self.plan.packed_pieces(unit)
        return sum(
            len(move.source_pages) * (stop - first) * packed[piece].block_bytes
            for move in moves
            for piece in elected[move.route].pieces
            for first, stop in [packed[piece].bases(move.layers)]
        )

    def _selectors_of(
        self, unit: Unit, prepared: PreparedRows, pieces: tuple[int, ...], layers: Mapping[str, Interval] | None
    ) -> tuple[Selector, ...]:
        key = unit, pieces, None if layers is None else tuple(layers.items())
        known = self._selectors.get(key)
        if known is None:  # two workers may make the same; either will do
            if len(self._selectors) >= _MOST_SELECTORS:
                self._selectors.clear()
            packed = self.plan.packed_pieces(unit)
            parts = [
                prepared.pieces[piece].part(*packed[piece].bases(layers), packed[piece].num_bases) for piece in pieces
            ]
            known = self._selectors[key] = selectors(parts, range(len(parts)), merged_bytes=self._merged_bytes)
        return known

    def release(self) -> None:
        """Gives all lists back and disconnects. No write may be in flight."""
        with self._prepare_lock:
            for prepared in self.prepared.values():
                self._transport.release_list(prepared.local)
            self.prepared.clear()
            self._selectors.clear()
        self._transport.disconnect(self.receiver)


def _joined(indices: list[DescriptorIndices]) -> DescriptorIndices:
    return indices[0] if len(indices) == 1 else np.concatenate(indices)


def attach(
    message: Attach,
    *,
    mine: Identity,
    transport: Transport,
    staging: SendingStaging,
    merged_bytes: int = MERGED_BYTES,
    broken_off: Callable[[], None] = lambda: None,
) -> Attachment:
    """Checks that a decode rank's open requests can be met, connects the transport to it and prepares what it takes.

    Args:
        mine: who this endpoint is.
        staging: what it has for staged writes.
        merged_bytes: most bytes that neighbours become one descriptor of.
        broken_off: called where a write that measures fails: what was sent of it may arrive yet.

    Raises:
        IncompatiblePeerError: if they cannot, naming both values; or if a side requires a feature that the other one
            does not know.
        LayoutError: if the decode rank's layout and coordinates disagree on context parallelism.
        SettingsError: if it asks for digests and there cannot be any.
        TransportError: if connecting or preparing fails.
        WriteHangsError: if a write that measures does not end; the transport stays connected then.
    """
    tolerated = _tolerated(message, mine, transport)
    pieces = [piece for piece in message.pieces if mine.coordinates.group_rank in piece.holders]
    plan = PairPlan(mine.layout, message.layout, pieces)
    # Checked before connecting, which would end an earlier connection to the endpoint of that name.
    name = PeerMetadata.decode(message.transport_metadata).name
    if name != message.endpoint:
        raise IncompatiblePeerError(f"endpoint {message.endpoint!r} sent the transport metadata of {name!r}")
    digests = staging.digest_memory() if message.checksums and pieces else None
    if pieces or mine.coordinates.is_aux_writer:
        transport.connect(message.transport_metadata)
    try:
        paths = staging.paths_to(message, plan)
        attachment = Attachment(message, plan, transport, paths, digests=digests, merged_bytes=merged_bytes)
        if pieces and paths.forced is not TransferPath.STAGED:
            attachment.prepare(Unit.WHOLE)
    except WriteHangsError:
        raise
    except BaseException as error:
        if isinstance(error, TransportError):
            broken_off()
        transport.disconnect(name)
        raise
    for difference in tolerated:
        log.warning("%s differs because KVFERRY_MAY_DIFFER lets it: %s", message.endpoint, difference)
    return attachment


def _tolerated(message: Attach, mine: Identity, transport: Transport) -> tuple[str, ...]:
    """Refuses a decode rank that keeps something else; returns differences of the fingerprint that may be."""
    decode_rank = f"decode rank {message.coordinates.engine_rank} of {message.engine!r}"
    check_required(message.requires, mine.features, peer=decode_rank)
    tolerated = check_same_fingerprint(
        mine.fingerprint,
        message.fingerprint,
        may_differ=mine.may_differ,
        prefill_name="prefill",
        decode_name="decode",
    )
    check_exchangeable(mine.layout, message.layout, source_name="prefill", destination_name="decode")
    check_token_share(message.layout, message.coordinates)
    if message.transport != transport.name:
        raise IncompatiblePeerError(
            f"transport: prefill uses {transport.name}, decode {message.transport}; KVFERRY_TRANSPORT, and whether "
            "KVFERRY_PATH is mapped, must be the same"
        )
    return tolerated
