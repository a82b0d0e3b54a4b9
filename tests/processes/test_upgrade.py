"""The upgrade under load, so short that it is a test: no request fails, and one that does is told."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from benchmarks.upgrade.__main__ import as_data, latencies, main, shown
from benchmarks.upgrade.releases import ROOT
from benchmarks.upgrade.upgrade import Account, Ended, Replacement
from tests.support.commands import called
from tests.support.etcd import program
from tests.support.real_transport import skip_unless_installed


@pytest.mark.full
def test_engines_and_a_member_of_the_registry_are_replaced_and_no_request_fails():
    skip_unless_installed()
    program()
    flags = ("--requests", "300", "--rate", "60", "--replaced", "1", "--members", "1", "--quiet", "0.5", "--json")
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.upgrade", *flags], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.stdout, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    assert (run.returncode, found["problems"], found["failed"]) == (0, [], {}), found["problems"]
    assert found["requests"] >= 300
    replaced = [each["what"] for each in found["replacements"]]
    assert replaced == ["prefill-0", "decode-0", "registry, process 0", "prefill-0 leaves"]
    assert all(found["latencies"][each["what"]]["requests"] for each in found["replacements"])


def test_what_failed_is_shown():
    account = Account(seconds=2.0, requests=[Ended(0.5, 0.01), Ended(1.5, 0.03)])
    account.replacements.append(Replacement("prefill-0", 1.0, 2.0, drained_s=0.1, ended_s=0.2, started_s=0.7))
    account.failed["decode"] += 1
    account.problem("request 7 failed")
    data = as_data(account, {"first": "v1", "then": "this tree"})
    assert data["requests"] == 3
    assert data["latencies"]["before"] == {"requests": 1, "p50_ms": 10.0, "p99_ms": 10.0}
    assert data["latencies"]["prefill-0"] == {"requests": 1, "p50_ms": 30.0, "p99_ms": 30.0}
    lines = shown(data).splitlines()
    assert "3 requests in 2 s, from v1 to this tree: 1 failed" in lines[0]
    assert lines[3].split() == ["prefill-0", "0.10", "s", "0.20", "s", "0.70", "s", "1", "30.0", "ms", "30.0", "ms"]
    assert lines[-2:] == ["PROBLEM: request 7 failed", "NOT well"]


def test_latencies_of_a_time_without_requests_are_none():
    assert latencies([], 0.0, 1.0)["requests"] == 0


@pytest.mark.parametrize("flags", [("--requests", "0"), ("--replaced", "3"), ("--members", "4")])
def test_impossible_plans_are_refused(flags: tuple[str, str]):
    run = called(main, "upgrade", *flags)
    assert run.returncode == 2
    assert flags[0] in run.stderr
