"""What endpoints show of themselves: metrics that add up, and a status that says who waits for what."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.caches import Model, Shape
from tests.support.engines import Engines, Requests
from tests.support.ports import free_ports_in_a_row
from tests.support.statuses import samples
from tests.support.waiting import eventually

from kvferry import DecodeEndpoint, PrefillEndpoint, TransferState
from kvferry.errors import QueueFullError, RoomExistsError, SettingsError
from kvferry.observe.metrics import MOST_NAMED_PEERS, PHASES, WAYS, Metrics
from kvferry.observe.records import Outcome
from kvferry.observe.status import MOST_ROOMS, EndpointStatus, PeerStatus, Side
from kvferry.testing.probe import probe

KIB = 1 / 1024  # of a MiB
ATTENTION = Model(layers=4, heads=4)
TIGHT: dict[str, Any] = {"path": "staged", "staging_chunk_mib": 0.5 * KIB, "staging_ring_mib": 1 * KIB}


def metrics_of(endpoint: PrefillEndpoint | DecodeEndpoint) -> dict[tuple[str, ...], float]:
    """Every sample that is served, by its name and the values of its labels."""
    assert endpoint.observe_url is not None
    return samples(httpx.get(f"{endpoint.observe_url}/metrics").text)


def status_of(endpoint: PrefillEndpoint | DecodeEndpoint) -> EndpointStatus:
    """As it is served."""
    assert endpoint.observe_url is not None
    return msgspec.json.decode(httpx.get(f"{endpoint.observe_url}/status").content, type=EndpointStatus)


@pytest.fixture
def free_base() -> int:
    """A port with two free ones behind it."""
    return free_ports_in_a_row(3)


@pytest.fixture
def watched(pair: Callable[..., Requests]) -> Callable[..., Requests]:
    """A pair whose endpoints serve metrics."""

    def make(**settings: Any) -> Requests:
        return pair(ATTENTION, observe_port=0, **settings)

    return make


@pytest.mark.parametrize("settings", [{"path": "direct"}, TIGHT], ids=["direct", "staged"])
def test_transfers_add_up(watched: Callable[..., Requests], settings: dict[str, Any]):
    requests = watched(**settings)
    begun_at = time.monotonic()
    for room in range(3):
        requests.run(room, 6, cuts=(2,))
    took_s = time.monotonic() - begun_at
    sent = metrics_of(requests.prefill.endpoints[0])
    received = metrics_of(requests.decode.endpoints[0])
    expected_bytes = 3 * 6 * requests.prefill.pools[0].bytes_per_page
    path = settings["path"]
    assert sent["sent_bytes_total", path] == expected_bytes
    assert sent["writes_total", path] == 6
    assert sent["transfers_total", "success", path] == received["transfers_total", "success", path] == 3
    assert sent["transfer_seconds_count",] == received["transfer_seconds_count",] == 3
    assert sent["submit_seconds_count",] == 6
    assert 0 < sent["wire_busy_seconds_total",] <= took_s
    assert sent["runs_total", path] >= sent["descriptors_total", path] >= 6
    assert sent["phase_seconds_count", "queue"] == 6
    assert sent["phase_seconds_count", "wire"] == sent["phase_seconds_count", "gather"] >= 6
    assert sent["phase_seconds_sum", "wire"] + sent["phase_seconds_sum", "gather"] < 10 * took_s
    if path == "staged":
        assert sent["phase_seconds_count", "wire"] > 6, "in sub-chunks"
        assert received["phase_seconds_count", "scatter"] == sent["phase_seconds_count", "wire"]
        assert received["placed_bytes_total",] >= expected_bytes
        assert sent["deferrals_total",] > 0, "a ring of two sub-chunks is too small for six pages"
        assert sent["staging_bytes",] == 1024
    assert sent["rooms", TransferState.TRANSFERRING.value] == 0
    assert sent["healthy",] == received["healthy",] == 1


def test_every_way_to_end_is_counted(watched: Callable[..., Requests]):
    requests = watched(bootstrap_timeout_s=1.5)
    requests.connect()
    prefill, decode = requests.prefill.endpoints[0], requests.decode.endpoints[0]
    aborted = requests.new(1)
    requests.open_decode(aborted)
    aborted.receivers[0].abort("enough")
    aborted.wait_ended()
    alone = prefill.open(2)
    with pytest.raises(RoomExistsError):
        prefill.open(2)
    eventually("it fails for nobody came", lambda: alone.state.is_final)
    requests.run(3)
    assert metrics_of(decode)["transfers_total", "aborted", "none"] == 1
    counted = metrics_of(prefill)
    assert counted["transfers_total", "timed_out", "none"] == 1
    assert counted["transfers_total", "success", "direct"] == 1
    assert counted["refusals_total", "RoomExistsError"] == 1


def test_what_is_refused_for_a_full_queue_is_counted(watched: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvferry.endpoint.transfer.MOST_WAITING_CHUNKS", 1)
    requests = watched()
    prefill = requests.prefill.endpoints[0]
    sender = prefill.open(1)
    sender.submit([0])
    with pytest.raises(QueueFullError):
        sender.submit([1])
    assert metrics_of(prefill)["refusals_total", "QueueFullError"] == 1


def test_a_status_says_who_waits_for_what(watched: Callable[..., Requests]):
    requests = watched()
    prefill, decode = requests.prefill.endpoints[0], requests.decode.endpoints[0]
    requests.connect()
    lonely = requests.new(7)
    requests.open_prefill(lonely)
    (room,) = status_of(prefill).rooms
    assert (room.room, room.state, room.waits_for) == (
        7,
        TransferState.BOOTSTRAPPING.value,
        "0 of some decode ranks have opened it",
    )
    requests.open_decode(lonely)
    eventually("both know", lambda: status_of(prefill).states == {TransferState.WAITING_FOR_INPUT.value: 1})
    assert status_of(prefill).rooms[0].waits_for == "the next chunk of the caller"
    assert status_of(decode).rooms[0].waits_for == "prefill ranks [0]"
    transport = requests.prefill.transports[0]
    transport.held = True
    requests.submit(lonely)
    eventually("a write is on its way", lambda: transport.in_flight == 1)
    (room,) = status_of(prefill).rooms
    assert room.waits_for == f"writes to {decode.transport.endpoint_name}"
    assert room.peers == (decode.transport.endpoint_name,)
    assert [(peer.name, peer.is_ready) for peer in status_of(prefill).peers] == [(decode.transport.endpoint_name, True)]
    assert [(peer.name, peer.is_ready) for peer in status_of(decode).peers] == [(prefill.transport.endpoint_name, True)]
    transport.held = False
    lonely.wait()
    assert status_of(prefill).rooms == ()


def test_quarantined_pages_are_shown_until_they_are_safe(watched: Callable[..., Requests]):
    requests = watched()
    prefill, decode = requests.prefill.endpoints[0], requests.decode.endpoints[0]
    request = requests.begin_held()
    request.receivers[0].abort("not wanted any more")
    request.wait_ended()
    for endpoint in (prefill, decode):
        eventually("six pages are quarantined", lambda at=endpoint: metrics_of(at)["quarantined_pages",] == 6)
        assert metrics_of(endpoint)["quarantine_seconds",] > 0
    requests.prefill.transports[0].held = False
    for endpoint in (prefill, decode):
        eventually("they are safe", lambda at=endpoint: metrics_of(at)["quarantined_pages",] == 0)


def test_silent_peers_are_named(watched: Callable[..., Requests], caplog: pytest.LogCaptureFixture):
    requests = watched(heartbeat_interval_s=0.4, peer_timeout_s=30.0)
    prefill, decode = requests.prefill.endpoints[0], requests.decode.endpoints[0]
    requests.connect()
    eventually("both are heard", lambda: not status_of(prefill).silent_peers)
    probe(decode).driver.next_ping_at = float("inf")  # as if it had stopped
    name = decode.transport.endpoint_name
    eventually("it is noticed", lambda: [peer.name for peer in status_of(prefill).silent_peers] == [name])
    assert metrics_of(prefill)["peer_silent_seconds", name] > 0.8
    assert metrics_of(prefill)["peers", "silent"] == 1

    def lines() -> list[str]:
        return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]

    eventually("the log names it", lambda: any(f"decode rank {name} has been silent for" in each for each in lines()))
    assert len([each for each in lines() if "silent" in each]) == 1, "once"
    probe(decode).driver.next_ping_at = 0.0
    eventually("it is back", lambda: not status_of(prefill).silent_peers)


def test_health_says_what_is_wrong(engines: Callable[..., Engines]):
    both = engines(observe_port=0)
    decode = both.decode(ATTENTION).endpoints[0]
    assert httpx.get(f"{decode.observe_url}/health").status_code == 200
    probe(decode).driver.is_stopping.set()
    eventually("a thread has ended", lambda: not decode.is_healthy)
    assert httpx.get(f"{decode.observe_url}/health").status_code == 503
    assert metrics_of(decode)["healthy",] == 0


def test_every_rank_has_a_port_of_its_own(engines: Callable[..., Engines], free_base: int):
    both = engines(observe_port=free_base)
    ranks = both.prefill(ATTENTION, Shape(tp=2)).endpoints
    assert [each.observe_url for each in ranks] == [f"http://127.0.0.1:{free_base + rank}" for rank in range(2)]
    (other,) = both.decode(ATTENTION).endpoints
    assert other.observe_url == f"http://127.0.0.1:{free_base + 2}", "the next that is free"


def test_a_host_that_is_not_ours_is_refused(engines: Callable[..., Engines]):
    with pytest.raises(SettingsError, match=r"192\.0\.2\.77.*no address of this machine"):
        engines(observe_port=0, observe_host="192.0.2.77").decode(ATTENTION)


def test_ports_that_are_all_taken_are_named(engines: Callable[..., Engines], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvferry.observe.server.PORTS", 1)
    both = engines(observe_port=0)
    (first,) = both.decode(ATTENTION).endpoints
    port = int(str(first.observe_url).rpartition(":")[2])
    with pytest.raises(SettingsError, match=rf"{port}: the port is taken.*KVFERRY_OBSERVE_PORT"):
        both.decode(ATTENTION, observe_port=port)


def test_nothing_is_served_unless_it_is_asked_for(pair: Callable[..., Requests]):
    requests = pair(ATTENTION)
    assert requests.prefill.endpoints[0].observe_url is None
    assert requests.prefill.endpoints[0].status().side is Side.PREFILL


def test_a_closed_endpoint_lets_go_of_its_port(watched: Callable[..., Requests]):
    requests = watched()
    for endpoint in (requests.prefill.endpoints[0], requests.decode.endpoints[0]):
        url = endpoint.observe_url
        endpoint.close()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


def test_labels_are_bounded(pair: Callable[..., Requests]):
    status = pair(ATTENTION).prefill.endpoints[0].status()
    many = tuple(PeerStatus(name=f"d{each}", state="ready", is_ready=True, silent_s=99.0) for each in range(1000))
    crowded = msgspec.structs.replace(status, peers=many)
    metrics = Metrics(lambda: crowded)
    for number in range(1000):
        metrics.refused(type(f"Strange{number}Error", (Exception,), {})())
    families = list(text_string_to_metric_families(metrics.exposition().decode()))
    values: dict[str, int] = {family.name: len(family.samples) for family in families}
    assert values["kvferry_peer_silent_seconds"] == MOST_NAMED_PEERS
    assert values["kvferry_refusals"] <= 2, "how many, and since when"
    assert values["kvferry_transfers"] == len(Outcome) * len(WAYS)
    assert {each.labels["phase"] for f in families if f.name == "kvferry_phase_seconds" for each in f.samples} == set(
        PHASES
    )


def test_only_the_oldest_rooms_are_shown(watched: Callable[..., Requests]):
    prefill = watched().prefill.endpoints[0]
    for room in range(MOST_ROOMS + 5):
        prefill.open(room)
    status = status_of(prefill)
    assert status.states == {TransferState.BOOTSTRAPPING.value: MOST_ROOMS + 5}
    assert [room.room for room in status.rooms[:3]] == [0, 1, 2]
    assert len(status.rooms) == MOST_ROOMS


def test_a_failure_is_one_line_with_its_cause(watched: Callable[..., Requests], caplog: pytest.LogCaptureFixture):
    requests = watched(bootstrap_timeout_s=0.3)
    alone = requests.prefill.endpoints[0].open(77)
    eventually("it fails for nobody came", lambda: alone.state.is_final)
    eventually("the log says so", lambda: any("room 77" in each.getMessage() for each in caplog.records))
    (line,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "room 77 failed on prefill rank 0 of" in line.getMessage()
    assert "KVFERRY_BOOTSTRAP_TIMEOUT_S" in line.getMessage(), "what to do"
    assert (line.__dict__["room"], line.__dict__["side"]) == (77, "prefill")


def test_who_gives_up_fills_no_log(watched: Callable[..., Requests], caplog: pytest.LogCaptureFixture):
    requests = watched()
    request = requests.new(5)
    requests.open_prefill(request)
    request.senders[0].abort("the client went away")
    eventually("it has ended", lambda: request.senders[0].state.is_final)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_every_state_is_a_line_at_debug(watched: Callable[..., Requests], caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, logger="kvferry.endpoint.transfer")
    watched().run(9)
    states = [each.__dict__["state"] for each in caplog.records if each.__dict__.get("room") == 9]
    assert states.count("success") == 2
    assert states.count("transferring") == 2


def test_a_trace_is_recorded_for_a_sensible_time(watched: Callable[..., Requests]):
    url = watched().decode.endpoints[0].observe_url
    for seconds in ("0", "-1", "61", "nan", "soon"):
        assert httpx.get(f"{url}/trace", params={"seconds": seconds}).status_code == 400
    assert httpx.get(f"{url}/trace", params={"seconds": "0.01"}).json()["spans"] == []


def test_nobody_writes_there(watched: Callable[..., Requests]):
    url = watched().decode.endpoints[0].observe_url
    for path in ("metrics", "status", "health", "trace"):
        assert httpx.post(f"{url}/{path}").status_code == 405


def test_metrics_that_break_break_no_transfer(
    watched: Callable[..., Requests], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def breaks(*_: Any) -> None:
        raise ValueError("no counter")

    for name in ("submitted", "wrote", "sent", "received"):
        monkeypatch.setattr(Metrics, name, breaks)
    watched().run(1)
    assert "Metrics met an error" in caplog.text
