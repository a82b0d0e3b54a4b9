"""This release beside one that speaks a version more: real processes, both ways round, over either registry."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
from benchmarks.soak.ranks import Fate, Order, Ready, Report
from benchmarks.upgrade.processes import RankHost, RankSpec, RegistryHost, Running
from benchmarks.upgrade.releases import THIS_TREE, Release, next_release
from tests.support.real_transport import skip_unless_installed

from kvferry.control.construction import create_registry_client
from kvferry.protocol.wire.versions import SPOKEN, Versions
from kvferry.settings import Settings

PATIENCE_S = 60.0
SECRET = "the secret of both releases"
ROOMS = 4  # of each pair
PATHS = ("direct", "staged")


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return next_release(tmp_path_factory.mktemp("releases") / "next")


class Releases:
    """A process of either release: at each registry a prefill rank for each path, and a decode rank."""

    def __init__(self, newer: Release, urls: Sequence[str]) -> None:
        common = {"secret": SECRET, "registry_lease_s": 5.0, "bootstrap_timeout_s": 20.0, "staging_memory_mib": 16.0}
        common |= {"staging_ring_mib": 2.0, "staging_chunk_mib": 0.5}
        self.hosts = []
        for first, release in enumerate((THIS_TREE, newer)):
            ranks = []
            for url in urls:
                settings = common | {"registry_url": url}
                ranks += [
                    RankSpec("prefill", 2 * first + number, settings | {"path": path})
                    for number, path in enumerate(PATHS)
                ]
                ranks.append(RankSpec("decode", first, settings | {"engines": 4}, slots=4 * ROOMS))
            self.hosts.append(RankHost(release, ranks))
        self._host_of = {connection: host for host in self.hosts for connection in host.connections}
        self._registries = range(len(urls))

    def wait_up(self) -> None:
        """Waits until all ranks are up, and sees that each runs what it should."""
        up = 0
        while up < len(self._host_of):
            for connection, report in self._reports():
                if isinstance(report, Running):
                    assert self._host_of[connection].runs(report)
                else:
                    assert isinstance(report, Ready), report
                    up += 1

    def _reports(self) -> Iterator[tuple[Any, Any]]:
        ready = wait(list(self._host_of), PATIENCE_S)
        assert ready, "nothing was reported"
        for connection in ready:
            assert isinstance(connection, Connection)
            yield from ((connection, each) for each in connection.recv())

    def exchange(self) -> dict[int, list[Report]]:
        """Sends rooms from all prefill ranks to all decode ranks; returns what both sides say of each."""
        rooms: dict[int, list[Report]] = {}
        numbers = itertools.count(1)
        for registry, decode in itertools.product(self._registries, (0, 1)):
            orders = [
                Order(next(numbers), prefill * ROOMS + count, prefill, Fate.PLAIN)
                for prefill in range(4)
                for count in range(ROOMS)
            ]
            rooms |= {order.room: [] for order in orders}
            self.hosts[decode].connections[3 * registry + 2].send(orders)
            for prefill in range(4):
                mine = [order for order in orders if order.prefill == prefill]
                self.hosts[prefill // 2].connections[3 * registry + prefill % 2].send(mine)
        while not all(len(each) == 2 for each in rooms.values()):
            for _, report in self._reports():
                assert isinstance(report, Report), report
                rooms[report.room].append(report)
        return rooms

    def close(self) -> list[bool]:
        """Ends both processes, and returns whether they ended well."""
        for host in self.hosts:
            host.hang_up()
        return [host.end() for host in self.hosts]


def registered(url: str) -> list[Versions]:
    """Which versions the prefill engines speak, as a registry has it."""
    with create_registry_client(Settings(secret=SECRET, registry_url=url), url) as client:
        views = {each.engine: each.registrations[0].spoken for each in client.engines()}
    return [views[f"prefill-{number}"] for number in range(4)]


@pytest.mark.full
def test_releases_exchange_every_byte_both_ways_round_directly_and_staged(newer: Release):
    """With a secret, so that credentials are derived alike, and at a registry of either release."""
    skip_unless_installed()
    with (
        RegistryHost(THIS_TREE, lease_s=5.0, secret=SECRET) as present,
        RegistryHost(newer, lease_s=5.0, secret=SECRET) as next_one,
    ):
        releases = Releases(newer, [present.url, next_one.url])
        try:
            releases.wait_up()
            spoken = [registered(each.url) for each in (present, next_one)]
            rooms = releases.exchange()
        finally:
            ended = releases.close()
    assert len(rooms) == 2 * 2 * 4 * ROOMS
    assert not [report for both in rooms.values() for report in both if report.error or report.wrong]
    both = Versions(SPOKEN.oldest, SPOKEN.newest + 1)
    assert spoken == [[SPOKEN, SPOKEN, both, both]] * 2
    assert ended == [True, True]
