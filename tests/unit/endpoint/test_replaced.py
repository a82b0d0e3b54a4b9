"""A prefill rank in whose place another start has registered serves nobody any more, and both sides say why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from tests.support.caches import Model, Shape, pool
from tests.support.engines import WAIT_S, new_engine_name
from tests.support.etcd import EtcdCluster
from tests.support.waiting import eventually

from kvferry import DecodeEndpoint, PrefillEndpoint, RankCoordinates, Receiver, Sender, TransferState
from kvferry.applications.up.supervision import free_ports
from kvferry.control.registry_server import RegistryServer
from kvferry.errors import EndpointDrainingError, PeerDisconnectedError, TransferAbortedError, TransferFailedError
from kvferry.testing import LocalNetwork
from kvferry.testing.probe import probe

LEASE_S = 1.0
WHY = r"rank 0 of engine .{0}. .* was replaced by a newer start at {1} .*end this one, or .* different names"


class Scene:
    """A decode rank, and prefill ranks under one engine's name, one after the other."""

    def __init__(self, network: LocalNetwork) -> None:
        self.network, self.engine = network, new_engine_name("prefill")
        self.decode: DecodeEndpoint = network.decode(pool(Model(), Shape(), RankCoordinates()))
        self._rooms = 0

    def prefill(self) -> PrefillEndpoint:
        """Starts one, which replaces the one before."""
        return self.network.prefill(pool(Model(), Shape(), RankCoordinates()), engine=self.engine)

    def opened(self, prefill: PrefillEndpoint) -> tuple[Sender, Receiver]:
        """A room that both sides have open."""
        self._rooms += 1
        receiver = self.decode.open(self._rooms, np.arange(2), engine=self.engine)
        sender = prefill.open(self._rooms)
        eventually("both have it open", lambda: sender.state is TransferState.WAITING_FOR_INPUT)
        return sender, receiver

    def run(self, prefill: PrefillEndpoint) -> None:
        """A room that succeeds, by a prefill rank."""
        sender, receiver = self.opened(prefill)
        self.finish(sender, receiver)

    def finish(self, sender: Sender, receiver: Receiver) -> None:
        sender.submit(np.arange(2), last=True)
        receiver.wait(WAIT_S)
        sender.wait(WAIT_S)

    def why(self, newer: PrefillEndpoint) -> str:
        return WHY.format(self.engine, newer.control_address)


@pytest.fixture
def scene() -> Iterator[Callable[[str], Scene]]:
    """Makes a scene at a registry; None stands for one of its own."""
    with ExitStack() as made:

        def make(url: str | None = None) -> Scene:
            url = url or made.enter_context(RegistryServer(port=0, lease_s=LEASE_S)).url
            network = LocalNetwork(url, registry_lease_s=LEASE_S, heartbeat_interval_s=30.0, peer_timeout_s=60.0)
            return Scene(made.enter_context(network))

        yield make


@pytest.fixture
def etcd_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield f"{cluster.url}/replaced"


@pytest.mark.parametrize("kind", ["http", "etcd"])
def test_what_is_open_on_a_replaced_rank_ends_on_both_sides_with_the_reason_and_the_newer_one_is_found(
    scene: Callable[..., Scene], kind: str, request: pytest.FixtureRequest
):
    its = scene(request.getfixturevalue("etcd_url") if kind == "etcd" else None)
    older = its.prefill()
    its.run(older)
    sender, receiver = its.opened(older)
    alone = older.open(1000)
    newer = its.prefill()
    with pytest.raises(TransferFailedError, match=its.why(newer)):
        receiver.wait(WAIT_S)
    for each in (sender, alone):
        with pytest.raises(TransferAbortedError, match=its.why(newer)):
            each.wait(WAIT_S)
        assert each.wait_pages_reusable(WAIT_S)
    assert receiver.wait_pages_reusable(WAIT_S)
    its.run(newer)
    with pytest.raises(EndpointDrainingError, match=its.why(newer)):
        older.open(7)
    assert "was replaced by a newer start" in older.not_ready
    assert "was replaced by a newer start" in older.status().problem
    assert newer.not_ready == newer.status().problem == ""


def test_a_room_that_only_the_decode_side_has_opened_on_a_replaced_rank_ends_with_the_reason(
    scene: Callable[..., Scene],
):
    its = scene()
    older = its.prefill()
    its.run(older)
    receiver = its.decode.open(99, np.arange(2), engine=its.engine)
    eventually("it is asked for", lambda: older.status().load.pending_rooms)
    newer = its.prefill()
    with pytest.raises(TransferFailedError, match=its.why(newer)):
        receiver.wait(WAIT_S)


def test_a_decode_rank_that_finds_a_replaced_rank_is_refused_with_the_reason(scene: Callable[..., Scene]):
    its = scene()
    older = its.prefill()
    newer = its.prefill()
    eventually("the older knows", lambda: probe(older).rooms.replaced)
    stale = probe(older).registration.rank
    assert stale is not None
    view = probe(its.decode).registry.engine(its.engine)
    probe(its.decode).registry.engine = lambda name: type(view)(  # type: ignore[method-assign]
        engine=name, registrations=(stale,), world_size=1, complete=True
    )
    with pytest.raises(PeerDisconnectedError, match=its.why(newer)):
        its.decode.connect(its.engine, timeout_s=WAIT_S)


def test_a_replaced_rank_serves_again_once_the_newer_one_has_left(scene: Callable[..., Scene]):
    its = scene()
    older, newer = its.prefill(), its.prefill()
    eventually("the older knows", lambda: probe(older).rooms.replaced)
    its.run(newer)
    newer.close()
    assert older.wait_registered(WAIT_S)
    eventually("it serves", lambda: not probe(older).rooms.replaced)
    its.run(older)
    assert older.not_ready == ""


def test_what_is_open_on_a_rank_that_drains_goes_on_when_its_successor_registers(scene: Callable[..., Scene]):
    its = scene()
    older = its.prefill()
    sender, receiver = its.opened(older)
    older.drain()
    its.prefill()
    eventually("the older knows", lambda: "was replaced" in str(older.registry_error))
    probe(older).driver.wake()
    its.finish(sender, receiver)
    eventually("it has drained", lambda: older.is_drained)


def test_a_registry_that_forgets_costs_a_rank_nothing_and_brings_no_replaced_one_back(
    scene: Callable[..., Scene],
):
    (port,) = free_ports(1)
    with RegistryServer(port=port, lease_s=LEASE_S) as registry:
        its = scene(registry.url)
        older = its.prefill()
        newer = its.prefill()
        eventually("the older knows", lambda: probe(older).rooms.replaced)
        sender, receiver = its.opened(newer)
    eventually("the lease has run out", lambda: not probe(newer).registration.is_registered)
    with RegistryServer(port=port, lease_s=LEASE_S):
        assert newer.wait_registered(WAIT_S)
        eventually("the older was refused", lambda: "was replaced" in str(older.registry_error))
        assert not probe(newer).rooms.replaced
        its.finish(sender, receiver)
        its.run(newer)
