"""`kvferry doctor` measures NIXL between two processes, and says which way bytes went."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("nixl_cu13")


def doctor(**environment: str) -> tuple[int, list[dict[str, Any]]]:
    """What it finds with these variables, and its exit code."""
    command = [sys.executable, "-m", "kvferry", "doctor", "--json"]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=90, check=False, env={**os.environ, **environment}
    )
    return run.returncode, json.loads(run.stdout)["findings"]


def test_memory_is_the_way_within_a_machine():
    code, found = doctor()
    (wire,) = [each for each in found if each["about"] == "wire"]
    assert code == 0, found
    assert "GB/s in bulk" in wire["what"]
    assert "UCX takes" in wire["what"]
    assert "tcp" not in wire["what"]


def test_a_transport_that_fell_back_to_tcp_is_noticed():
    code, found = doctor(UCX_TLS="tcp,self")
    wire = [each for each in found if each["about"] == "wire"]
    assert code == 1
    assert "UCX takes tcp/" in wire[0]["what"]
    assert wire[1]["severity"] == "warning"
    assert "UCX_TLS" in wire[1]["remedy"]


def test_a_wire_that_cannot_be_is_an_error():
    code, found = doctor(UCX_TLS="rc_x")
    (wire,) = [each for each in found if each["about"] == "wire"]
    assert (code, wire["severity"]) == (2, "error")
