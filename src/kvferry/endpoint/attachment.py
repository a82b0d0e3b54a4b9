"""What a prefill rank prepares for a decode rank that connects: made once, used by every room between the two."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import IncompatiblePeerError
from kvferry.layout import RankCoordinates, RankLayout
from kvferry.layout.interval import covers
from kvferry.plan import Piece, check_exchangeable, descriptor_rows, elect_writer, lower
from kvferry.plan.descriptors import select_rows
from kvferry.protocol.messages import Attach
from kvferry.transport import PeerMetadata, PreparedList, Transport


@dataclass(slots=True, eq=False)
class Attachment:
    """A decode rank, ready to be written to.

    Attributes:
        receiver: its endpoint.
        coordinates: its place in its engine.
        pages: pages in its pool.
        pieces: what this rank may send it, and `piece_rows` the descriptor rows of each.
        local, remote: both sides' prepared lists; None where this rank has nothing to send.
    """

    receiver: str
    coordinates: RankCoordinates
    pages: int
    pieces: tuple[Piece, ...]
    piece_rows: tuple[slice, ...]
    local: PreparedList | None
    remote: PreparedList | None
    _selections: dict[tuple[int, ...], NDArray[np.int32]] = field(default_factory=dict)
    # Guards the two below, which several workers use: no list is given back while a write uses it.
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _writes: int = 0
    _when_unused: Callable[[], None] | None = None

    def begin_write(self) -> bool:
        """Keeps both lists for one write; False if they are being given back."""
        with self._lock:
            if self._when_unused is not None:
                return False
            self._writes += 1
            return True

    def end_write(self) -> None:
        """Says that a write is through with the lists."""
        with self._lock:
            self._writes -= 1
            call = self._when_unused if self._writes == 0 else None
        if call is not None:
            call()

    def retire(self, when_unused: Callable[[], None]) -> None:
        """Begins no more writes, and calls back as soon as none uses the lists. Once only."""
        with self._lock:
            self._when_unused = when_unused
            is_unused = self._writes == 0
        if is_unused:
            when_unused()

    def rows(self, room: int, group_rank: int) -> NDArray[np.int32]:
        """The descriptor rows that this rank sends in a room: those of the pieces it is elected to write."""
        elected = tuple(
            index
            for index, piece in enumerate(self.pieces)
            if elect_writer(piece, room=room, receiver=self.coordinates.group_rank) == group_rank
        )
        if elected not in self._selections:
            self._selections[elected] = select_rows([self.piece_rows[index] for index in elected])
        return self._selections[elected]


def attach(message: Attach, *, layout: RankLayout, coordinates: RankCoordinates, transport: Transport) -> Attachment:
    """Checks that a decode rank's wishes can be met, connects the transport to it and prepares both lists.

    Args:
        layout, coordinates: our own.

    Raises:
        IncompatiblePeerError: if they cannot, naming both values.
        TransportError: if connecting or preparing fails.
    """
    check_exchangeable(layout, message.layout, source_name="prefill", destination_name="decode")
    if message.transport != transport.name:
        raise IncompatiblePeerError(f"transport: prefill uses {transport.name}, decode {message.transport}")
    mine = tuple(piece for piece in message.pieces if coordinates.group_rank in piece.holders)
    runs = []
    for piece in mine:
        source, destination = layout.shard(piece.component), message.layout.shard(piece.component)
        for side, shard in (("prefill", source), ("decode", destination)):
            if len(piece.box) != len(shard.box) or not covers(shard.box, piece.box):
                raise IncompatiblePeerError(
                    f"the plan asks prefill rank {coordinates.engine_rank} for {piece.component!r} "
                    f"{shard.component.describe(piece.box)}, but the {side} rank holds "
                    f"{shard.component.describe(shard.box)}"
                )
        runs.append(lower(piece.box, source, destination))
    rows = descriptor_rows(
        runs,
        source_pages=layout.num_pages,
        destination_pages=message.layout.num_pages,
        source_device=layout.device.index,
        destination_device=message.layout.device.index,
    )
    # Asked before connecting, which would end an earlier connection to whoever has that name.
    name = PeerMetadata.decode(message.transport_metadata).name
    if name != message.endpoint:
        raise IncompatiblePeerError(f"endpoint {message.endpoint!r} sent the transport metadata of {name!r}")
    local = remote = None
    if mine or coordinates.is_aux_writer:
        transport.connect(message.transport_metadata)
    if mine:
        try:
            local = transport.prepare(rows.source, None)
            remote = transport.prepare(rows.destination, name)
        except BaseException:
            if local is not None:
                transport.release_list(local)
            transport.disconnect(name)
            raise
    return Attachment(
        receiver=message.endpoint,
        coordinates=message.coordinates,
        pages=message.layout.num_pages,
        pieces=mine,
        piece_rows=rows.piece_rows,
        local=local,
        remote=remote,
    )


def detach(attachment: Attachment, transport: Transport) -> None:
    """Undoes `attach`. No write to the decode rank may be on its way."""
    if attachment.local is not None:
        transport.release_list(attachment.local)
    transport.disconnect(attachment.receiver)
