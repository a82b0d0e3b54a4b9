"""A write that has completed, for those who are told of writes."""

from __future__ import annotations

from kvferry.observe.records import PartRecord, WriteRecord
from kvferry.plan import TransferPath

PART = PartRecord(
    ready_at=1.0, begun_at=1.0, gathered_at=1.1, posted_at=1.2, landed_at=1.5, num_bytes=1000, runs=10, thread="t"
)
WRITE = WriteRecord(
    receiver="d",
    path=TransferPath.DIRECT,
    why="it is",
    total_bytes=1000,
    descriptors=4,
    submitted_at=0.5,
    posted_at=1.2,
    done_at=1.5,
    transport_post_s=0.0,
    transport_transfer_s=0.0,
    parts=(PART,),
)
