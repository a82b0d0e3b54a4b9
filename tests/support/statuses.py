"""What observers are told and say: an endpoint that is well, a write that has completed, metrics as they are read."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from kvferry.observe.records import PartRecord, WriteRecord
from kvferry.observe.status import EndpointStatus, PeerStatus, Side, StagingStatus, ThreadStatus
from kvferry.plan import TransferPath

WELL = EndpointStatus(
    side=Side.PREFILL,
    engine="prefill",
    rank=3,
    endpoint="prefill-3-abc",
    version="1",
    process=1,
    at_unix_s=0.0,
    up_s=100.0,
    peer_timeout_s=15.0,
    heartbeat_s=2.0,
    problem="",
    states={"transferring": 1},
    oldest_room_s=1.0,
    quarantined_pages=0,
    quarantine_s=0.0,
    rooms=(),
    peers=(PeerStatus(name="decode-0-xyz", state="ready", is_ready=True, silent_s=0.5),),
    staging=StagingStatus(total_bytes=100, used_bytes=40),
    threads=(ThreadStatus(name="kvferry-control", is_alive=True, failures=0, last_failure=""),),
)


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


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Every sample, by its name without the prefix and the values of its labels."""
    return {
        (sample.name.removeprefix("kvferry_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
