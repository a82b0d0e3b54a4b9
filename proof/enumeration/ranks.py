"""Who the ranks of an enumeration are, and what they hold: one small cache, the same on all of them."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.layout import (
    RankCoordinates,
    RankLayout,
    ShardedComponent,
    VirtualPools,
    latent_component,
    virtual_layout,
)
from kvferry.plan import Unit
from kvferry.protocol.transfer.states import Deadlines
from kvferry.protocol.wire import codec, messages
from kvferry.protocol.wire.field_types import DecodeRank, Identity, ProcessIdentity
from kvferry.protocol.wire.registrations import RankRegistration
from kvferry.protocol.wire.versions import SPOKEN

ROOM = 7
PAGE_TOKENS = 16
SPAN_BYTES = 64
"""Of a part, and of a ring: one part waits for the credit of the one before."""

DEADLINES = Deadlines(bootstrap_s=10.0, waiting_s=20.0, write_s=5.0)
_TRANSPORT = "enumerated"


class RingSpan(NamedTuple):
    """A span of a decode rank's ring.

    Attributes:
        epoch: the ring's.
        start: as in `Span`, and so on.
    """

    epoch: int
    start: int
    begin: int
    stop: int


def decode_name(number: int) -> str:
    """The name of a decode rank."""
    return f"d{number}"


def prefill_name(number: int) -> str:
    """The name of a prefill rank, and its address."""
    return f"p{number}"


def number_of(name: str) -> int:
    """The number of a rank with that name."""
    return int(name[1:])


def layout(coordinates: RankCoordinates) -> RankLayout:
    """What every rank holds: any prefill rank may send it."""
    latents = ShardedComponent(
        component=latent_component(num_layers=1, latent_dim=16, dtype="float16"), layers=(0,), tp_axis=None
    )
    pools = VirtualPools(num_pages=8, page_tokens=PAGE_TOKENS, layers_per_stage=(1,))
    return virtual_layout([latents], coordinates, pools)


def decode_rank(number: int, decodes: int) -> DecodeRank:
    """A decode rank's place."""
    return DecodeRank("decode", RankCoordinates(tp_rank=number, tp_size=decodes))


def decode_identity(number: int, decodes: int) -> Identity:
    """How a decode rank identifies itself."""
    rank = decode_rank(number, decodes)
    return Identity(
        endpoint=decode_name(number),
        engine=rank.engine,
        coordinates=rank.coordinates,
        layout=layout(rank.coordinates),
        transport=_TRANSPORT,
        host="here",
    )


def registration(number: int, prefills: int) -> RankRegistration:
    """What the registry says of a prefill rank."""
    return RankRegistration(
        engine="prefill",
        incarnation="1",
        coordinates=RankCoordinates(tp_rank=number, tp_size=prefills),
        control_address=prefill_name(number),
        layout_digest="1",
        started_at=0.0,
        protocol_version=SPOKEN.oldest,
        newest_protocol_version=SPOKEN.newest,
    )


def welcome(number: int, prefills: int) -> messages.Welcome:
    """How a prefill rank answers `Hello`."""
    coordinates = RankCoordinates(tp_rank=number, tp_size=prefills)
    return messages.Welcome(
        endpoint=prefill_name(number),
        engine="prefill",
        coordinates=coordinates,
        layout=layout(coordinates),
        transport=_TRANSPORT,
        process=ProcessIdentity("there", number, 0),
    )


def staged_arrived(writer: int, generation: int, sequence: int, span: RingSpan) -> bytes:
    """Encodes the notification of a part."""
    return codec.encode(
        messages.StagedArrived(
            room=ROOM,
            generation=generation,
            writer=writer,
            sequence=sequence,
            part=0,
            is_last=True,
            epoch=span.epoch,
            start=span.start,
            begin=span.begin,
            stop=span.stop,
            unit=Unit.WHOLE,
            segments=(),
        )
    )


def chunk_arrived(writer: int, generation: int, sequence: int) -> bytes:
    """Encodes the notification of a chunk that was written directly."""
    return codec.encode(messages.ChunkArrived(room=ROOM, generation=generation, writer=writer, sequence=sequence))
