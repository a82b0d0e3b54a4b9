"""Strangers at every port of a prefill rank: those who know each other notice nothing, and who comes anew gets in."""

from __future__ import annotations

import itertools
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.caches import Model, Shape
from tests.support.processes import End, Rank, RankProcess
from tests.support.real_transport import REAL, skip_unless_installed
from tests.support.strangers import open_files, ports_of
from tests.support.waiting import PATIENCE_S, eventually

from kvferry import RankCoordinates

skip_unless_installed()

MODEL = Model(layers=2, heads=2, head_dim=16, page_tokens=16, dtype="float32")
FILES = 1024
"""What most systems let a process open unless it is told otherwise."""

ENGINES = 128
"""Files that are left for the engine, at least. Ports are shut at three quarters of `FILES`; on a machine with more
to do the thread that shuts them runs late (844 were open once, at 833 strangers a second).
"""

ATTACH_S = 5.0
SECRET = "the secret of these tests"
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "default": {"registry_port": 0},
    # As deploy/kubernetes has it, with a registry in the same process all the same.
    "manifests": {"registry_port": 0, "observe_host": "0.0.0.0", "observe_port": 0, "secret": SECRET},
}


@pytest.fixture
def ranks() -> Iterator[list[RankProcess]]:
    started = [RankProcess() for _ in range(3)]
    yield started
    for each in started:
        each.close()


@pytest.mark.parametrize(
    ("count", "seconds"), [(4000, 5.0), pytest.param(10_000, 12.0, marks=pytest.mark.full)], ids=["some", "many"]
)
@pytest.mark.parametrize("name", [pytest.param("default", marks=pytest.mark.full), "manifests"])
@pytest.mark.skipif(REAL.name != "nixl", reason="the ports are NIXL's")
def test_strangers_at_every_port_keep_nobody_out(ranks: list[RankProcess], name: str, count: int, seconds: float):
    prefill, decode, newcomer = ranks
    settings = CONFIGURATIONS[name]
    _, hard = resource.prlimit(prefill.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(prefill.pid, resource.RLIMIT_NOFILE, (FILES, hard))
    prefill.do(Rank.start_prefill, MODEL, Shape(), RankCoordinates(), "prefill", settings)
    theirs = {"registry_url": prefill.do(Rank.registry_url), "secret": settings.get("secret")}
    decode.do(Rank.start_decode, MODEL, Shape(), RankCoordinates(), "decode", theirs)
    rooms = itertools.count(1)

    def move(target: RankProcess) -> None:
        room = next(rooms)
        target.do(Rank.receive, room, [room % 8], "prefill")
        prefill.do(Rank.send, room, [room % 8], [1])
        assert [each.do(Rank.end, room, PATIENCE_S) for each in (prefill, target)] == [End("SUCCESS")] * 2

    move(decode)
    before = open_files(prefill.pid)
    ports = [f"{host}:{port}" for host, port in ports_of(prefill.pid)]
    command = [sys.executable, "-m", "tests.support.strangers", str(count), str(seconds), *ports]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as strangers:
        assert strangers.stdin is not None
        assert strangers.stdout is not None
        begun_at, most = time.monotonic(), 0
        while time.monotonic() < begun_at + seconds / 2:  # they keep coming
            move(decode)
            most = max(most, open_files(prefill.pid))
        begun_at = time.monotonic()
        newcomer.do(Rank.start_decode, MODEL, Shape(), RankCoordinates(), "newcomer", theirs)
        started_at = time.monotonic()
        move(newcomer)
        took_s = time.monotonic() - started_at
        strangers.stdout.readline()  # all are there, and stay
        move(decode)
        most = max(most, open_files(prefill.pid))
        strangers.stdin.close()
        came = strangers.stdout.read()
    sys.stdout.write(f"{name}: files before {before}, at most {most}; first room of a new rank {took_s:.2f} s; {came}")
    move(decode)
    eventually("descriptors come back", lambda: open_files(prefill.pid) <= before + 8)
    assert took_s < ATTACH_S
    assert most <= FILES - ENGINES
