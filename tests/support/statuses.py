"""What an endpoint says of itself when all is well."""

from __future__ import annotations

from kvferry.observe.status import EndpointStatus, PeerStatus, Side, StagingStatus, ThreadStatus

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
