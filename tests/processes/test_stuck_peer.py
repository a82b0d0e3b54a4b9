"""A decode rank that stands still is named, with since when, by everything that an operator may look at."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import httpx
import pytest
from tests.support.caches import Model, Shape
from tests.support.processes import Rank, RankProcess
from tests.support.real_transport import skip_unless_installed
from tests.support.waiting import eventually

from kvferry.control.registry_server import RegistryServer

skip_unless_installed()

SHAPE = Shape(pages=16)
(PLACE,) = SHAPE.coordinates()
MODEL = Model()


@pytest.fixture
def ranks() -> Iterator[tuple[RankProcess, RankProcess]]:
    """A prefill and a decode rank that show themselves, with a room open between them."""
    with RegistryServer(port=0) as registry:
        settings = {
            "registry_url": registry.url,
            "observe_port": 0,
            "heartbeat_interval_s": 0.3,
            "peer_timeout_s": 60.0,
            "waiting_timeout_s": 60.0,
            "close_timeout_s": 1.0,
        }
        prefill, decode = RankProcess(), RankProcess()
        try:
            prefill.do(Rank.start_prefill, MODEL, SHAPE, PLACE, "prefill", settings)
            decode.do(Rank.start_decode, MODEL, SHAPE, PLACE, "decode", settings)
            decode.do(Rank.receive, 7, [1, 2, 3], "prefill")
            prefill.do(Rank.open_sender, 7, [4, 5, 6])
            yield prefill, decode
        finally:
            decode.thaw()
            prefill.close()
            decode.close()


def top(*addresses: str) -> str:
    """What the command prints into a terminal of 80 columns."""
    command = [sys.executable, "-m", "kvferry", "top", "--once", *addresses]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env={"COLUMNS": "80", "PATH": ""})
    assert run.returncode == 0, run.stderr
    return run.stdout


def doctor(address: str) -> tuple[int, list[dict[str, Any]]]:
    """What the command finds, and its exit code."""
    command = [sys.executable, "-m", "kvferry", "doctor", "--json", "--no-wire", address]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.returncode, json.loads(run.stdout)["findings"]


def seconds_before(moment: datetime, words: str) -> float:
    """How long before `moment` "since 2026-11-22 10:00:00Z" was."""
    found = re.search(r"since\s+(\d{4}-\d\d-\d\d)\s+(\d\d:\d\d:\d\d)Z", words)
    assert found is not None, words
    return (moment - datetime.fromisoformat(f"{found[1]}T{found[2]}+00:00")).total_seconds()


@pytest.mark.full
def test_everything_names_it(ranks: tuple[RankProcess, RankProcess]):
    prefill, decode = ranks
    here, there = (each.do(Rank.observe_url).removeprefix("http://") for each in ranks)
    eventually("they are connected", lambda: "waiting" in top(here, there))
    (name,) = prefill.do(Rank.peers, "decode")
    eventually("all is calm", lambda: "!" not in top(here, there))  # a busy machine may hold up either for a moment
    calm = top(here, there)
    assert all(len(line) <= 80 for line in calm.splitlines()), calm
    frozen = datetime.now(timezone.utc)
    decode.freeze()

    def metrics() -> str:
        return httpx.get(f"http://{here}/metrics").text

    eventually("a metric names it", lambda: f'kvferry_peer_silent_seconds{{peer="{name}"}}' in metrics())
    assert 'kvferry_peers{state="silent"} 1.0' in metrics()
    said = top(here)
    joined = " ".join(said.split())
    assert f"! prefill prefill/0 has received nothing from {name} for" in joined
    assert -2 < seconds_before(frozen, joined) < 30
    assert "missing peers" in said
    *_, line = [each for each in prefill.do(Rank.logged) if "silent" in each]  # a busy machine may have said so before
    assert line.startswith(f"decode rank {name} has been silent for")
    assert -2 < seconds_before(frozen, line) < 30
    code, findings = doctor(here)
    assert code == 2
    (named,) = [each["what"] for each in findings if each["severity"] == "error"]
    assert f"prefill prefill/0 has received nothing from {name} for" in named
    assert -2 < seconds_before(frozen, named) < 30
    assert f"{there} does not answer" in " ".join(top(here, there).split())
    decode.thaw()
    eventually("it is back", lambda: "!" not in top(here, there))
