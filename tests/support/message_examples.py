"""A message of every type, as tests and docs/specification have them."""

from __future__ import annotations

import numpy as np

from kvferry.layout import (
    Device,
    Interval,
    MemoryKind,
    Paging,
    RankCoordinates,
    RankLayout,
    Shard,
    attention_components,
)
from kvferry.plan import Piece, TransferPath, Unit
from kvferry.plan.requests.demands import GroupRequest
from kvferry.plan.requests.moved_blocks import pack_units
from kvferry.plan.requests.page_numbers import PageNumbers
from kvferry.protocol.wire.codec import encode, encode_body
from kvferry.protocol.wire.field_types import Message, ProcessIdentity
from kvferry.protocol.wire.messages import (
    AbortRoom,
    Attach,
    Attached,
    ChunkArrived,
    Closed,
    Credit,
    Detach,
    Drained,
    ExpectRooms,
    Gone,
    Hello,
    IsGone,
    Numbered,
    NumberedToDecode,
    NumberedToPrefill,
    OpenRoom,
    Ping,
    Pong,
    Refused,
    RefuseRoom,
    RoomFailed,
    RoomVerified,
    SpanReleased,
    StagedArrived,
    StagedSegment,
    Staging,
    StagingRing,
    Welcome,
    WriterFinished,
)

COORDINATES = RankCoordinates(tp_rank=1, tp_size=2, pp_rank=0, pp_size=3, dp_rank=3, dp_size=4)
LAYOUT = RankLayout(
    shards=tuple(
        Shard(
            component=component,
            box=(Interval(0, 2), Interval(1, 2), Interval(0, 4)),
            addresses=(4096 + number * 65536, 8192 + number * 65536),
            strides=(8, 2),
            paging=Paging(page_tokens=16, num_pages=10, page_stride=128, token_stride=8),
            device=Device(MemoryKind.VRAM, 3),
        )
        for number, component in enumerate(
            attention_components(num_layers=2, num_kv_heads=2, head_dim=4, dtype="bfloat16")
        )
    )
)
PIECES = (Piece("k", (Interval(0, 2), Interval(1, 2), Interval(0, 4)), 0, (0, 1)), Piece("v", (), None, ()))
GROUPS = (
    GroupRequest("kv", held=40, start=40, stop=70, first_page=2, pages=PageNumbers.of(np.arange(5))),
    GroupRequest("state", held=0, start=0, stop=1, first_page=0, pages=PageNumbers.of(np.array([7]))),
)
PROCESS = ProcessIdentity(machine="a machine", pid=7, started=2**40)
EXAMPLES: list[Message] = [
    Hello(),
    Attach(
        endpoint="d0",
        attempt=3,
        engine="decode",
        coordinates=COORDINATES,
        layout=LAYOUT,
        pieces=PIECES,
        transport="inprocess",
        transport_metadata=b"\x00\xff",
        host="somewhere",
        staging=Staging(
            path=TransferPath.STAGED, ring=StagingRing(address=4096, num_bytes=8192, epoch=7), problem="none"
        ),
        fingerprint={"weights": "3f9a", "cache_dtype": "float8_e5m2"},
        requires=("longer rooms",),
    ),
    Detach(endpoint="d0"),
    Ping(epoch=3, sent=5, received=4, resends=True),
    Numbered(epoch=3, number=4, body=encode_body(RoomVerified(room=1, generation=2))),
    OpenRoom(
        room=2**63 - 1,
        generation=2**63 - 1,
        receivers=2,
        tokens=70,
        groups=GROUPS,
        depends_on={"prompt": b"\x00" * 32, "LoRA adapter": b"\xff"},
    ),
    AbortRoom(room=0, generation=0, reason="the client went away: \N{SNOWMAN}"),
    Welcome(
        endpoint="p0", engine="prefill", coordinates=COORDINATES, layout=LAYOUT, transport="inprocess", process=PROCESS
    ),
    Attached(endpoint="p0", attempt=3, only_staged=True),
    Refused(attempt=3, error="IncompatiblePeerError", reason="page size 16 here, 32 there"),
    Closed(endpoint="p0"),
    Pong(endpoint="p0", attached=False),
    RoomFailed(room=1, generation=2, writer=3, error="PageError", reason="page 7 is out of range"),
    Drained(endpoint="p0", room=1, generation=2, writer=3),
    RefuseRoom(
        endpoint="p0", engine="decode", coordinates=COORDINATES, room=1, generation=2, reason="no memory", holder=3
    ),
    RoomVerified(room=1, generation=2),
    IsGone(process=PROCESS),
    ExpectRooms(rooms=(5, 2**63 - 1)),
    Gone(process=PROCESS),
    Credit(epoch=2**63 - 1, position=2**40),
    SpanReleased(endpoint="p0", epoch=5, start=1, begin=64, stop=128),
    StagedArrived(
        room=1,
        generation=2,
        writer=3,
        sequence=4,
        part=0,
        is_last=True,
        epoch=5,
        start=0,
        begin=64,
        stop=192,
        unit=Unit.TOKEN,
        segments=(StagedSegment(piece=1, first_base=0, stop_base=2, units=pack_units(np.array([3, 4]))),),
    ),
    ChunkArrived(room=1, generation=2, writer=3, sequence=0),
    WriterFinished(room=1, generation=2, writer=3, chunks=4),
    WriterFinished(room=1, generation=2, writer=3, chunks=0, aux=b"\x00"),
]


def encoded(message: Message) -> bytes:
    """The message as it travels."""
    if isinstance(message, NumberedToPrefill | NumberedToDecode):
        return encode(Numbered(epoch=3, number=4, body=encode_body(message)))
    return encode(message)
