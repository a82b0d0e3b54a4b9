"""What is kept at a registry, asked of it or shown to tools is read by two releases: each skips what it does not know.

Between peers: tests/unit/protocol/test_messages.py. Between whole releases: tests/processes.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.support.registries import rank
from tests.support.statuses import WELL

from kvferry.control.leases import Leases
from kvferry.control.registry_messages import EngineList, Health, Lease, Problem, Released, Removal
from kvferry.layout import Paging, RankLayout, Shard, latent_component
from kvferry.layout.parallel import RankCoordinates
from kvferry.observe.status import (
    EndpointStatus,
    LostPeerStatus,
    PeerStatus,
    RoomStatus,
    StagingStatus,
    ThreadStatus,
)
from kvferry.protocol.wire.registrations import EngineView, RankRegistration
from kvferry.protocol.wire.versions import Versions

NEW = rank(protocol_version=1, newest_protocol_version=2)
VIEW = EngineView(engine="prefill", registrations=(NEW,), world_size=2, complete=False)
STATUS = msgspec.structs.replace(
    WELL,
    rooms=(RoomStatus(room=1, state="s", age_s=1.0, chunks=1, path="", moved_bytes=1, waits_for="", peers=("p",)),),
    quarantine=(LostPeerStatus(endpoint="p", lost_for_s=1.0, pages=1, ring_bytes=1, proof="", frees=()),),
)
EXAMPLES: list[msgspec.Struct] = [
    NEW,
    VIEW,
    EngineList(engines=(VIEW,)),
    Lease(lease_s=5.0),
    Removal(removed=True),
    Released(endpoints=("p0",)),
    Health(version="0.1", api_version=1, uptime_s=3.0),
    Problem(error="X", message="no"),
    STATUS,
]

REQUIRED: dict[Any, str] = {
    RankRegistration: "engine incarnation coordinates control_address layout_digest started_at protocol_version",
    RankCoordinates: "",
    EngineView: "engine registrations world_size complete",
    EngineList: "engines",
    Lease: "lease_s",
    Removal: "removed",
    Released: "endpoints",
    Health: "version api_version uptime_s",
    Problem: "error message",
    EndpointStatus: (
        "side engine rank endpoint version process at_unix_s up_s peer_timeout_s heartbeat_s problem states "
        "oldest_room_s quarantined_pages quarantine_s rooms peers staging threads"
    ),
    RoomStatus: "room state age_s chunks path moved_bytes waits_for peers",
    PeerStatus: "name state is_ready silent_s",
    StagingStatus: "",
    ThreadStatus: "name is_alive failures last_failure",
    LostPeerStatus: "endpoint lost_for_s pages ring_bytes proof frees",
}
"""What the first release says of each. What is added later must have a default."""


@pytest.mark.parametrize("kind", REQUIRED, ids=lambda kind: kind.__name__)
def test_what_is_added_has_a_default(kind: Any):
    required = {each.name for each in msgspec.structs.fields(kind) if each.required}
    assert required == set(REQUIRED[kind].split())


def with_novelties(value: Any) -> Any:
    """The same as a newer release might say it: every object has a field more."""
    if isinstance(value, dict):
        return {name: with_novelties(each) for name, each in value.items()} | {"novelty": [1, {"two": None}]}
    return [with_novelties(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_what_is_new_to_us_is_skipped(example: msgspec.Struct):
    said = with_novelties(msgspec.json.decode(msgspec.json.encode(example)))
    if isinstance(example, EndpointStatus):
        del said["states"]["novelty"], said["fingerprint"]["novelty"]  # not fields, but names of their own
    assert msgspec.json.decode(msgspec.json.encode(said), type=type(example)) == example


def test_ranks_of_an_engine_may_be_of_releases_that_share_a_version():
    """While it is upgraded rank by rank."""
    leases = Leases(10.0)
    leases.register(rank(0, protocol_version=12), now=0.0)
    leases.register(rank(1, protocol_version=12, newest_protocol_version=13), now=0.0)
    leases.register(rank(0, incarnation="second", protocol_version=13, newest_protocol_version=14), now=0.0)
    assert [each.spoken for each in leases.engine("prefill", 0.0).registrations] == [Versions(13, 14), Versions(12, 13)]


def test_the_digest_of_a_layout_stays_what_it_was_in_the_first_release():
    """Else a registry refuses the ranks of an engine that is upgraded rank by rank."""
    component = latent_component(num_layers=1, latent_dim=8, dtype="uint8")
    paging = Paging(page_tokens=1, num_pages=1, page_stride=8, token_stride=8)
    shard = Shard(component=component, box=component.whole, addresses=(0,), strides=(1,), paging=paging)
    assert RankLayout(shards=(shard,)).digest == "e0f9f54390b10d0f"
