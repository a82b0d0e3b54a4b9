"""The soak, so short that it is a test: it must find nothing, and find what is planted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.soak.__main__ import main
from benchmarks.soak.causes import UNKNOWN, cause
from benchmarks.soak.faults import Faults, Kind
from benchmarks.soak.watch import (
    DESCRIPTORS_TOLERANCE,
    MEMORY_FOR_LOST_PEERS_MIB,
    MEMORY_TOLERANCE_MIB,
    SOCKETS_FOR_REUNION,
    Look,
    Trend,
    trend,
)
from tests.support.commands import called
from tests.support.real_transport import skip_unless_installed

skip_unless_installed()

ROOT = Path(__file__).parents[2]


def soaked(*flags: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.soak", "--json", *flags]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.stdout, run.stderr
    result: dict[str, Any] = json.loads(run.stdout)
    return run.returncode, result


@pytest.mark.full
def test_rooms_survive_random_faults_or_say_why():
    code, found = soaked("--minutes", "0.75", "--in-flight", "200", "--seed", "9", "--quiet", "2")
    assert not found["problems"], "\n".join(found["problems"])
    assert code == 0
    assert found["ended"] > 1000
    assert found["succeeded"] > found["ended"] / 2
    assert found["most_in_flight"] == 200
    assert len(found["faults"]) == len(Kind)
    assert set(found["failures"]) == {"prefill", "decode"}
    assert len(found["trends"]) >= 2


def test_causes_are_told_apart():
    assert cause("TransferFailedError: room 1: prefill rank 0 is gone: silent for 3.0 s") == "silent peer"
    assert cause("TransferAbortedError: room 1 was aborted by x: the soak wants it so") == "aborted by a caller"
    assert cause("ValueError: something else") == UNKNOWN


def test_a_seed_gives_the_same_faults_again():
    def drawn(seed: int) -> list[Any]:
        faults = Faults(seed, 4, mean_quiet_s=2.0, long_freeze_s=3.0)
        return [faults.after(10.0 * number) for number in range(200)]

    assert drawn(3) == drawn(3) != drawn(4)
    assert {fault.kind for fault in drawn(3)} == set(Kind)
    assert {fault.rank for fault in drawn(3)} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("grown", "what"),
    [
        (Look(0, 2 * MEMORY_TOLERANCE_MIB, 0, 0), "memory from"),
        (Look(0, 0, 4, 0), "threads from"),
        (Look(0, 0, 0, 2 * DESCRIPTORS_TOLERANCE), "descriptors from"),
    ],
)
def test_what_grows_is_seen_and_what_stays_is_not(grown: Look, what: str):
    def looks(share: float) -> list[Look]:
        return [
            Look(
                at,
                100.0 + share * grown.memory_mib * at / 60,
                8 + round(share * grown.threads * at / 60),
                40 + round(share * grown.descriptors * at / 60),
            )
            for at in range(60)
        ]

    flat, growing = trend("rank", looks(0.0)), trend("rank", looks(2.0))
    assert flat is not None
    assert growing is not None
    assert flat.problem(reunions=0, lost_peers=False) == ""
    assert what in growing.problem(reunions=0, lost_peers=False)
    assert trend("rank", looks(1.0)[:5]) is None


def test_sockets_that_nixl_keeps_are_allowed_for():
    looks = [Look(at, 100.0, 8, 40 + (at > 30) * (DESCRIPTORS_TOLERANCE + SOCKETS_FOR_REUNION)) for at in range(60)]
    found = trend("rank", looks)
    assert found is not None
    assert found.problem(reunions=0, lost_peers=False)
    assert not found.problem(reunions=1, lost_peers=False)


def test_memory_that_stays_of_a_lost_peer_is_allowed_for_once():
    def found(more_mib: float) -> Trend:
        of_a_life = trend("rank", [Look(at, 100.0 + (at > 30) * more_mib, 8, 40) for at in range(60)])
        assert of_a_life is not None
        return of_a_life

    assert found(MEMORY_FOR_LOST_PEERS_MIB).problem(reunions=0, lost_peers=False)
    assert not found(MEMORY_FOR_LOST_PEERS_MIB).problem(reunions=0, lost_peers=True)
    assert found(2 * MEMORY_FOR_LOST_PEERS_MIB).problem(reunions=0, lost_peers=True)


@pytest.mark.parametrize("flags", [("--minutes", "0"), ("--in-flight", "3"), ("--quiet", "-1")])
def test_impossible_open_requests_are_refused(flags: tuple[str, str]):
    run = called(main, "soak", *flags)
    assert run.returncode == 2
    assert flags[0] in run.stderr
