"""What the network between hosts does to rooms: late, lossy and slow links, one way cut, hosts that vanish.

Prefill, decode and registry are on hosts of their own, over TCP and with a secret. In every case rooms between others
are half-way when the fault strikes and go on; the struck room ends on both sides, with the cause; its pages come back,
and nothing is written to them afterwards; and once the network is as before, everybody is served by everybody. What
`kvferry doctor --peer` and `kvferry top` say meanwhile is looked at, too.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.hosts import Host, Link, skip_without_hosts
from tests.support.processes import Rank
from tests.support.real_transport import REAL, skip_unless_installed
from tests.support.sites import CONTROL_PORT, SECRET, Site, about, place, v4
from tests.support.victims import (
    END_S,
    LARGE_ROOM_PAGES,
    LATE_WRITE_S,
    PEER_TIMEOUT_S,
    Engine,
    Room,
    Step,
)
from tests.support.waiting import eventually

skip_unless_installed()
skip_without_hosts()
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(REAL.name != "nixl", reason="it is NIXL over TCP that is tried"),
]

log = logging.getLogger(__name__)

SLOW_BYTES_PER_S = 4e6
SLOWEST_BYTES_PER_S = 1e6
DOCTORS_PORT = 7100
SILENT = (
    r"has received nothing from (decode-a|prefill-a)-0-.*stopped, overloaded or cut off\?"
    "|prefill rank 0 of 'prefill-a' has been silent"
)


@pytest.fixture(scope="module")
def begun() -> Iterator[Site]:
    """One site for all of these tests: where a host has vanished, its successor takes its part."""
    with place(v4) as at:
        yield Site(at)


@pytest.fixture
def site(begun: Site) -> Iterator[Site]:
    yield begun
    begun.place.network.heal()


class Struck:
    """Rooms that are half-way when a fault strikes.

    Attributes:
        room: between the two that are struck.
    """

    def __init__(self, site: Site, *others: tuple[Engine, Engine]) -> None:
        """Begins them.

        Args:
            others: pairs that must not notice.
        """
        self._site, self._others = site, others
        self._standing = [site.begin(*pair) for pair in others]
        self.room = site.reach(Step.BETWEEN_CHUNKS)

    def others_go_on(self) -> None:
        """Rooms of others, those that were half-way and new ones, end well."""
        while self._standing:
            self._site.finish(self._standing.pop())
        for pair in self._others:
            self._site.run(*pair)


def pairs_of_others(site: Site) -> list[tuple[Engine, Engine]]:
    """All pairs but the one that is struck."""
    return [
        (source, target)
        for source in site.prefills
        for target in site.decodes
        if (source, target) != (site.struck_prefill, site.struck_decode)
    ]


def ends_with(site: Site, engine: Engine, room: Room, cause: str) -> None:
    """The room has failed there, and says why."""
    end = site.fails(engine, room)
    assert re.search(cause, end.error), end


def nothing_comes_late(room: Room) -> None:
    """The decode rank has its pages back, and uses them: nobody else writes there."""
    assert room.target.do(Rank.reuse, room.number, END_S), "pages are kept that nobody can write to"
    time.sleep(LATE_WRITE_S)
    assert room.target.do(Rank.changed, room.number) == 0, "a late write changed pages that were given back"


def doctor_says(site: Site, here: Engine, there: Engine, words: str) -> str:
    """What it finds on a host of an engine on another, once it has these words."""
    said = ""

    def found() -> bool:
        nonlocal said
        said = about(site.place.doctor(site.host(here), site.host(there)), "peer")
        return words in said

    eventually(f"the doctor says {words!r}", found)
    return said


def test_a_long_way(site: Site):
    """30 ms each way: rooms take longer, and nothing else."""
    site.place.network.between(site.host(site.struck_prefill), site.host(site.struck_decode), Link(delay_s=0.03))
    begun_at = time.monotonic()
    for _ in range(3):
        site.run(site.struck_prefill, site.struck_decode)
    assert time.monotonic() - begun_at > 3 * 0.06
    site.served()
    said = doctor_says(site, site.struck_decode, site.struck_prefill, "that is far")
    (round_trip_ms,) = re.findall(r"10\.77\.0\.2:9470 answers within (\d+\.\d) ms: that is far", said)
    assert float(round_trip_ms) >= 60
    assert "is it in another place than meant" in said
    eventually("top finds nothing wrong", lambda: "!" not in site.place.top(site.place.registry, *site.hosts.values()))


def test_a_lossy_link(site: Site):
    """One packet of twelve is lost, either way."""
    site.place.network.between(site.host(site.struck_prefill), site.host(site.struck_decode), Link(loss=0.08))
    for _ in range(4):
        site.run(site.struck_prefill, site.struck_decode)
    said = doctor_says(site, site.struck_decode, site.struck_prefill, "packets get lost, or it is overloaded")
    assert "`ip -s link`" in said


@contextmanager
def listening_doctor(site: Site, host: Host) -> Iterator[str]:
    """A doctor on a host that lets others measure; yields its address."""
    command = [*host.inside, "env", "KVFERRY_HOST=0.0.0.0", f"KVFERRY_REGISTRY_URL={site.place.registry_url}"]
    command += [f"KVFERRY_SECRET={SECRET}", sys.executable, "-m", "kvferry", "doctor", "--listen", str(DOCTORS_PORT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert "listening on" in process.stdout.readline()
        yield f"{host.address}:{DOCTORS_PORT}"
        (doctor,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(doctor), signal.SIGKILL)


def test_a_slow_link(site: Site):
    """A room of 8 MiB takes seconds, which heartbeats share with it: nobody is taken for lost meanwhile."""
    here, there = site.host(site.struck_prefill), site.host(site.struck_decode)
    site.place.top(site.place.registry, here, there)  # so that there is a process that can look
    site.place.network.links[here, there] = Link(bytes_per_s=SLOWEST_BYTES_PER_S)
    room = site.new_room(site.struck_prefill, site.struck_decode, pages=LARGE_ROOM_PAGES["staged"])
    site.open_target(room)
    site.open_source(room)
    site.submit(room)
    top = site.place.top(site.place.registry, here, there)
    assert re.search(rf"{room.number} p prefill-a/0 transfer", top), top
    assert "keeps" not in top
    site.place.network.links[here, there] = Link(bytes_per_s=SLOW_BYTES_PER_S)
    site.run(site.other_prefill, site.struck_decode)
    site.run(site.struck_prefill, site.other_decode)
    site.succeeds(room)
    with listening_doctor(site, there) as address:
        said = site.place.kvferry(here, "doctor", "--no-wire", "--wire-to", address).text
    assert "0.00 GB/s is slow -> what does the network between them carry?" in said, said


@pytest.mark.parametrize("hears", ["the prefill rank", "the decode rank"])
def test_one_way_is_cut(site: Site, hears: str):
    """Each of the two sends, and one alone receives: neither relies on the other any more."""
    its = Struck(site, *pairs_of_others(site))
    prefill, decode = site.host(site.struck_prefill), site.host(site.struck_decode)
    way = (decode, prefill) if hears == "the decode rank" else (prefill, decode)
    site.place.network.links[way] = Link(is_cut=True)
    watched = site.hosts.values()
    eventually("top names who is silent", lambda: re.search(SILENT, site.place.top(site.place.registry, *watched)))
    said = doctor_says(site, site.struck_decode, site.struck_prefill, "no connection within 2 s")
    assert "packets to it, or its own, get lost on the way" in said
    assert "does a firewall, a NetworkPolicy or a route let both ways through?" in said
    its.others_go_on()
    ends_with(site, site.struck_decode, its.room, "prefill rank 0 of 'prefill-a' has been silent for")
    ends_with(site, site.struck_prefill, its.room, "silent for|is gone|aborted by")
    site.place.network.heal()
    nothing_comes_late(its.room)
    assert its.room.source.do(Rank.wait_reusable, its.room.number, END_S)
    site.served()


def test_the_control_connection_of_two_hosts_is_forgotten(site: Site):
    """Its packets are dropped, either way, without a word; new connections pass. Rooms wait for a moment, and go on."""
    its = Struck(site, *pairs_of_others(site))
    here, there = site.host(site.struck_prefill), site.host(site.struck_decode)
    sockets = site.struck_prefill.do(Rank.resources).descriptors["socket"]
    site.place.network.forget(here, there, port=CONTROL_PORT)
    since = time.monotonic()
    for _ in range(3):
        site.run(site.struck_prefill, site.struck_decode)
        log.info("a room ended well %.2f s after its connection was forgotten", time.monotonic() - since)
    assert time.monotonic() - since < 2 * PEER_TIMEOUT_S
    site.finish(its.room)
    its.others_go_on()
    eventually(
        "the system has ended what the prefill rank has left of it",
        lambda: site.struck_prefill.do(Rank.resources).descriptors["socket"] <= sockets,
    )
    log.info("nothing was left of it after %.1f s", time.monotonic() - since)
    site.served()


def test_a_prefill_host_vanishes_and_another_pod_has_its_address(site: Site):
    """The same address and the same port, and another process: it is not taken for the one before."""
    network, at = site.place.network, site.place
    its = Struck(site, (site.other_prefill, site.struck_decode), (site.other_prefill, site.other_decode))
    (lost,) = site.struck_decode.do(Rank.peers, "prefill-a")
    host = site.host(site.struck_prefill)
    network.vanish(host)
    said = doctor_says(site, site.struck_decode, site.struck_prefill, "no connection within 2 s")
    assert "is the host up" in said
    site.hosts["prefill-c"] = network.host("prefill-c", host.address)
    successor = site.start("prefill-c", site.hosts["prefill-c"])
    site.run(successor, site.other_decode)
    ends_with(site, site.struck_decode, its.room, "prefill rank 0 of 'prefill-a' (has been silent for|does not know)")
    late = site.new_room(site.struck_prefill, site.other_decode)
    site.open_target(late)
    its.others_go_on()
    site.run(successor, site.struck_decode)

    # It sent directly, and nobody on another host can prove that it writes no more: its pages wait for an operator.
    top = at.top(at.registry, site.host(site.struck_decode))
    kept = f"{lost}, lost for .* keeps 8 pages and .* in quarantine until it is proved to have ended"
    assert re.search(kept, top), top
    assert not its.room.target.do(Rank.wait_reusable, its.room.number, 0.0)
    released = at.kvferry(at.registry, "release", "--yes", lost)
    assert released.code == 0, released
    nothing_comes_late(its.room)
    ends_with(site, site.other_decode, late, "knows 0 of an unknown number of ranks of engine 'prefill-a'|silent for")
    site.struck_prefill = successor
    site.served()


def test_a_decode_host_vanishes_and_another_pod_has_its_address(site: Site):
    """No connection is closed. Whoever has the address now gets nothing that was meant for the one before."""
    network, place = site.place.network, site.place
    its = Struck(site, (site.struck_prefill, site.other_decode), (site.other_prefill, site.other_decode))
    large = site.new_room(site.struck_prefill, site.struck_decode, pages=LARGE_ROOM_PAGES["direct"])
    host = site.host(site.struck_decode)
    network.links[site.host(site.struck_prefill), host] = Link(bytes_per_s=SLOW_BYTES_PER_S)
    site.open_target(large)
    site.open_source(large)
    site.submit(large)
    eventually("its bytes are on their way", lambda: large.source.do(Rank.state, large.number)[0] == "TRANSFERRING")
    network.vanish(host)
    network.heal()
    site.hosts["decode-c"] = place.network.host("decode-c", host.address)
    successor = site.start("decode-c", site.hosts["decode-c"])
    gone = r"is gone: .*silent for|connection to .* is gone|the connection for its bytes broke|failed: PeerDisconnected"
    for room in (its.room, large):
        ends_with(site, site.struck_prefill, room, gone)
        assert site.struck_prefill.do(Rank.wait_reusable, room.number, END_S)
    its.others_go_on()
    assert successor.do(Rank.touched) == 0, "bytes of another's room came to whoever has its address"
    doctor_says(site, site.struck_prefill, successor, "answers within")
    site.struck_decode = successor
    site.served()
    assert successor.do(Rank.touched) > 0, "what was meant for it did"
