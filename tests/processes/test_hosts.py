"""Prefill, decode and registry on hosts of their own, over TCP and with a secret: every shape, IPv6, two interfaces.

Nobody is told an address but the registry's. What faults of the network do is in `test_network_faults.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from tests.support.caches import Model, Shape
from tests.support.hosts import Host, skip_without_hosts
from tests.support.processes import Answer, Rank, RankProcess
from tests.support.real_transport import REAL, skip_unless_installed
from tests.support.sites import CONTROL_PORT, OBSERVE_PORT, Place, about, place, v4, v6
from tests.support.tiers import Tier
from tests.support.victims import END_S, TIMES
from tests.support.waiting import eventually

skip_unless_installed()
skip_without_hosts()
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(REAL.name != "nixl", reason="it is NIXL's choice of interfaces that is tried"),
]

PAGE_TOKENS, PAGES, ROOMS_AT_ONCE = 8, 6, 20
MODEL = Model(layers=2, heads=4, head_dim=16, page_tokens=PAGE_TOKENS, dtype="float32")
"""With as many heads as the demo's, so that beyond four ranks some hold the same."""

TPS = (1, 2, 4, 8)
SHAPES = {(1, 1), (1, 2), (2, 1), (2, 4), (2, 8), (4, 2), (8, 2)}
"""Those that `test_demo.py` has (`kvferry demo --prefill-tp 8 --decode-tp 2`); the long tier has all of these sizes."""


SMALL = {"workers": 2, "nixl_threads": 1, "staging_ring_mib": 0.25, "staging_chunk_mib": 0.125}
LONG_TIMES = {**TIMES, "peer_timeout_s": 10.0, "bootstrap_timeout_s": 60.0}
"""A busy machine takes a while to connect so many."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine on one host, a process a rank."""

    name: str
    host: Host
    ranks: Sequence[RankProcess]


def start(
    at: Place,
    name: str,
    host: Host,
    tp: int = 1,
    *,
    settings: dict[str, Any] | None = None,
    variables: dict[str, str] | None = None,
) -> Engine:
    """Starts an engine whose name begins with what it is."""
    shape = Shape(tp=tp, pages=ROOMS_AT_ONCE * PAGES)
    ranks = [at.process(host, variables) for _ in range(tp)]
    method = Rank.start_prefill if name.startswith("prefill") else Rank.start_decode
    for rank, coordinates in zip(ranks, shape.coordinates(), strict=True):
        rank.ask(method, MODEL, shape, coordinates, name, SMALL | LONG_TIMES | (settings or {}))
    for rank in ranks:
        answer = rank.answer()
        assert answer.error is None, answer.error
    return Engine(name, host, ranks)


def pages_of(room: int) -> list[int]:
    first = room % ROOMS_AT_ONCE * PAGES
    return list(range(first, first + PAGES))


def begin(room: int, prefill: Engine, decode: Engine) -> None:
    """Opens a room on all ranks, and submits it in two chunks."""
    for rank in decode.ranks:
        rank.do(Rank.receive, room, pages_of(room), prefill.name)
    for rank in prefill.ranks:
        rank.do(Rank.send, room, pages_of(room), [2, PAGES])


def ends_well(room: int, *engines: Engine) -> None:
    """It does so on all ranks, and every byte is right."""
    ranks = [rank for engine in engines for rank in engine.ranks]
    for rank in ranks:
        rank.ask(Rank.wait, room)
    assert [rank.answer() for rank in ranks] == [Answer(0)] * len(ranks)


def served(room: int, prefill: Engine, decode: Engine) -> None:
    """A whole room."""
    begin(room, prefill, decode)
    ends_well(room, prefill, decode)


def test_every_shape_between_two_hosts(tier: Tier):
    """All engines at once, so that each serves several of other sizes."""
    with place(v4) as at:
        hosts = at.host("prefill", 2), at.host("decode", 3)
        prefills = [start(at, f"prefill-{tp}", hosts[0], tp) for tp in TPS]
        decodes = [start(at, f"decode-{tp}", hosts[1], tp) for tp in TPS]
        pairs = [
            (prefill, decode)
            for prefill, decode in itertools.product(prefills, decodes)
            if tier is Tier.LONG or (len(prefill.ranks), len(decode.ranks)) in SHAPES
        ]
        before = at.network.carried[hosts]
        for room, pair in enumerate(pairs, start=1):
            served(room, *pair)
        for engine in prefills:
            for rank in engine.ranks:
                assert rank.do(Rank.control_address).startswith(f"tcp://{v4(2)}:")
        # Each decode engine got every byte, from another host: nothing found a shorter way through this machine.
        payload = len(pairs) * PAGES * PAGE_TOKENS * MODEL.heads * MODEL.head_dim * 4 * 2 * MODEL.layers
        assert at.network.carried[hosts] - before > payload


def test_ipv6_alone():
    """Nothing has an address of the older kind: the registry, both sides, the commands."""
    with place(v6) as at:
        hosts = at.host("prefill", 2), at.host("decode", 3)
        shown = {"observe_port": OBSERVE_PORT}
        prefill = start(at, "prefill", hosts[0], settings={"control_port": CONTROL_PORT, **shown})
        decode = start(at, "decode", hosts[1], settings=shown)
        served(1, prefill, decode)
        assert prefill.ranks[0].do(Rank.control_address) == f"tcp://[{v6(2)}]:{CONTROL_PORT}"
        findings: list[dict[str, str]] = []

        def is_good() -> bool:
            findings[:] = at.doctor(hosts[1], hosts[0])
            return {each["severity"] for each in findings} == {"good"}

        eventually("the doctor finds nothing wrong", is_good)
        assert f"tcp://[{v6(2)}]:{CONTROL_PORT}, which can be connected to from here" in about(findings, "peer")
        told = f"peers are told {v6(3)} on eth0, which packets to the registry leave from"
        assert told in about(findings, "addresses")
        assert f"NIXL uses eth0, which has {v6(3)}: the way to the registry" in about(findings, "devices")
        eventually("top finds both well", lambda: at.top(hosts[0], *hosts).count("1/1 well") == 2)


def test_of_two_interfaces_the_one_that_leads_to_the_registry_is_used():
    """The other has an address and leads nowhere. Two ranks that leave the choice to UCX do not meet."""
    with place(v4, nowhere=True) as at:
        hosts = [at.host(name, number) for number, name in enumerate(("prefill", "decode", "blind"), start=2)]
        prefill, decode = start(at, "prefill", hosts[0]), start(at, "decode", hosts[1])
        served(1, prefill, decode)
        findings = at.doctor(hosts[0])
        assert f"NIXL uses eth0, which has {v4(2)}: the way to the registry" in about(findings, "devices")
        assert not about(findings, "devices", severity="warning")

        blind = {"KVFERRY_NIXL_DEVICE": "all"}
        unsure = start(at, "prefill-unsure", hosts[0], settings=TIMES, variables=blind)
        never = start(at, "decode-never", hosts[2], settings=TIMES, variables=blind)
        begin(2, unsure, never)
        for room in range(3, 6):
            served(room, unsure, decode)  # meanwhile: nobody waits for the one that cannot be reached
        ends = [engine.ranks[0].do(Rank.end, 2, END_S) for engine in (unsure, never)]
        assert [end.state for end in ends] == ["FAILED", "FAILED"], ends
        served(6, unsure, decode)
        said = about(at.doctor(hosts[2], variables=blind), "devices", severity="warning")
        assert "left to UCX (KVFERRY_NIXL_DEVICE is all), and eth0, eth1 have addresses" in said
        assert "set KVFERRY_NIXL_DEVICE to the one that leads to peers" in said
