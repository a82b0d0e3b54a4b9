"""Three real members of etcd are the registry: killed, frozen, restarted, compacted and filled under endpoints at work.

A member that is frozen (SIGSTOP) is a member that is partitioned: its connections stay, and nothing passes them, to
clients or to other members. The endpoints are real ones of this process, over a transport that copies within it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from tests.support.etcd import EtcdCluster, Member, fill
from tests.support.waiting import PATIENCE_S, eventually
from tests.unit.testing.models import pool

from kvferry import DecodeEndpoint, PrefillEndpoint
from kvferry.control.etcd.registry import EtcdRegistry
from kvferry.errors import RegistryError
from kvferry.testing import KnownContents, LocalNetwork, Pair

LEASE_S = 2.0
ATTACHED_S = 2.0
"""How long after the cluster's return endpoints may take to find each other that did not before."""

_rooms = itertools.count(1)
_prefixes = itertools.count()


class Newcomers:
    """A prefill and a decode rank that start without waiting for the registry, and a room that the latter asks for.

    Attributes:
        prefill: the one.
        decode: the other.
    """

    def __init__(self, scene: Scene, engine: str = "new", *, prefill: Pair | None = None) -> None:
        """Starts both, or only the decode rank, which then looks for a prefill rank that has been there for long."""
        network = scene.network
        self._source, self._destination = prefill.prefill_pool if prefill else pool(), pool()
        if prefill is None:
            self.prefill = PrefillEndpoint(
                self._source.layout, engine=engine, settings=network.settings(), transport=network.transport()
            )
            scene.resources.callback(self.prefill.close)
        else:
            self.prefill = prefill.prefill
        self.decode = DecodeEndpoint(
            self._destination.layout, engine="late", settings=network.settings(), transport=network.transport()
        )
        scene.resources.callback(self.decode.close)
        self._room, self._tokens = next(_rooms), 8
        self._pages = self._destination.pages_for(self._tokens)
        self._destination.mark()
        self._receiver = self.decode.open(self._room, self._pages, engine=self.prefill.engine, tokens=self._tokens)

    @property
    def have_met(self) -> bool:
        """Whether the decode rank is connected."""
        return any(peer.is_ready for peer in self.decode.status().peers)

    def exchange(self) -> None:
        """Sends the room that waits, and checks every byte."""
        contents, pages = KnownContents(self._room), self._source.pages_for(self._tokens, whole_windows=True)
        self._source.fill(contents, pages, tokens=self._tokens)
        self.prefill.open(self._room, tokens=self._tokens).submit(pages, last=True)
        self._receiver.wait(PATIENCE_S)
        self._destination.check(contents, self._pages, tokens=self._tokens)


class Scene:
    """A pair of endpoints that are connected, and whatever joins them.

    Attributes:
        cluster: the registry.
        network: the endpoints'.
        pair: those that know each other.
        resources: what is closed with the scene.
    """

    def __init__(self, cluster: EtcdCluster, resources: ExitStack) -> None:
        self.cluster = cluster
        self.resources = resources
        url = f"{cluster.url}/{next(_prefixes)}"
        self.network = resources.enter_context(LocalNetwork(url, registry_lease_s=LEASE_S, bootstrap_timeout_s=40.0))
        self.pair = self.network.pair(pool(), pool())
        self.serve()

    def serve(self) -> None:
        """The pair exchanges a room, exactly."""
        self.pair.transfer(next(_rooms), tokens=8)

    def serve_for(self, seconds: float) -> None:
        """The same, one room after the other."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.serve()

    def serves_until_return_of(self, member: Member) -> float:
        """Serves until a member answers what all must agree about; returns when."""
        while not self.cluster.has_leader(member.number):
            self.serve()
        return time.monotonic()

    def meet(self, newcomers: Newcomers, returned_at: float) -> None:
        """The newcomers find each other soon after the return."""
        newcomers.exchange()
        took_s = time.monotonic() - returned_at
        assert took_s < ATTACHED_S, f"attached {took_s:.2f} s after the registry's return"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd"), 3, f"--quota-backend-bytes={4 * 2**20}") as running:
        yield running


@contextmanager
def scene_of(cluster: EtcdCluster) -> Iterator[Scene]:
    with ExitStack() as resources:
        yield Scene(cluster, resources)


@pytest.fixture
def scene(cluster: EtcdCluster) -> Iterator[Scene]:
    with scene_of(cluster) as built:
        yield built


def others(cluster: EtcdCluster, member: Member) -> list[Member]:
    return [each for each in cluster.members if each is not member]


def heal(cluster: EtcdCluster) -> None:
    """Every member answers again."""
    for member in cluster.members:
        eventually("it answers", cluster.has_leader, member.number)


def test_the_leader_is_killed(cluster: EtcdCluster, scene: Scene):
    leader = cluster.leader
    leader.kill()
    try:
        newcomers = Newcomers(scene)
        returned_at = scene.serves_until_return_of(others(cluster, leader)[0])
        scene.meet(newcomers, returned_at)
        scene.serve_for(LEASE_S)  # on two members, in which every lease is renewed
        assert scene.pair.prefill.registry_error is None
        scene.meet(Newcomers(scene, prefill=scene.pair), time.monotonic())
    finally:
        leader.start()
        heal(cluster)


@pytest.mark.full
def test_a_member_is_partitioned(cluster: EtcdCluster, scene: Scene):
    """The leader, with which clients are connected too."""
    leader = cluster.leader
    leader.freeze()
    try:
        newcomers = Newcomers(scene)
        scene.meet(newcomers, scene.serves_until_return_of(others(cluster, leader)[0]))
        scene.serve_for(LEASE_S)
    finally:
        leader.thaw()
    heal(cluster)
    scene.serve()
    scene.meet(Newcomers(scene, "again"), time.monotonic())


@pytest.mark.full
def test_most_members_are_partitioned(cluster: EtcdCluster, scene: Scene):
    """The one that is left answers nothing: nobody attaches, and whoever is connected goes on."""
    away = others(cluster, cluster.members[0])
    for each in away:
        each.freeze()
    try:
        newcomers = [Newcomers(scene), Newcomers(scene, prefill=scene.pair)]
        scene.serve_for(1.5 * LEASE_S)
        assert not any(each.have_met for each in newcomers)
        # Not before every member has been asked, and the last given up.
        eventually("the newcomer says why", lambda: newcomers[0].prefill.registry_error is not None)
        assert isinstance(newcomers[0].prefill.registry_error, RegistryError)
        assert "cannot be reached" in str(newcomers[0].prefill.registry_error)
    finally:
        for each in away:
            each.thaw()
    returned_at = scene.serves_until_return_of(cluster.members[0])
    for pair in newcomers:
        scene.meet(pair, returned_at)
    heal(cluster)


@pytest.mark.full
def test_all_members_are_restarted(cluster: EtcdCluster, scene: Scene):
    """With the data that they had, after longer than a lease."""
    for each in cluster.members:
        each.kill()
    try:
        newcomers = [Newcomers(scene), Newcomers(scene, prefill=scene.pair)]
        scene.serve_for(1.5 * LEASE_S)
        assert not any(each.have_met for each in newcomers)
        assert "cannot be reached" in str(scene.pair.prefill.registry_error)
    finally:
        for each in cluster.members:
            each.start()
    returned_at = scene.serves_until_return_of(cluster.members[0])
    for pair in newcomers:
        scene.meet(pair, returned_at)
    assert scene.pair.prefill.wait_registered(PATIENCE_S)
    assert scene.pair.prefill.registry_error is None
    heal(cluster)


@pytest.mark.full
def test_members_are_compacted_and_defragmented(cluster: EtcdCluster, scene: Scene):
    revision = int(cluster.ask("kv/range", {"key": "AA=="})["header"]["revision"])
    cluster.ask("kv/compaction", {"revision": revision, "physical": True})
    for member in cluster.members:
        cluster.ask("maintenance/defragment", {}, member.number)
        scene.serve()
    scene.meet(Newcomers(scene), time.monotonic())
    assert scene.pair.prefill.registry_error is None


@pytest.mark.full
def test_the_disk_is_full(cluster: EtcdCluster, scene: Scene):
    """The last test: what is new is refused in words, what is there stays, and room is made as docs/etcd.md says."""
    fill(cluster)
    newcomers = Newcomers(scene)
    eventually("the new rank is refused", lambda: newcomers.prefill.registry_error)
    assert "no space left" in str(newcomers.prefill.registry_error)
    assert "etcdctl alarm disarm" in str(newcomers.prefill.registry_error)
    scene.serve_for(1.5 * LEASE_S)
    assert scene.pair.prefill.registry_error is None
    scene.meet(Newcomers(scene, prefill=scene.pair), time.monotonic())
    with EtcdRegistry(scene.network.registry_url) as registry:
        assert registry.engine(scene.pair.prefill.engine).complete
    cluster.make_room()
    newcomers.exchange()
    assert newcomers.prefill.wait_registered(PATIENCE_S)
