"""`kvferry trace` of a staged transfer between two processes: gather, wire and scatter overlap, and it shows."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tests.support.caches import Model, Shape
from tests.support.processes import Rank, RankProcess
from tests.support.real_transport import skip_unless_installed

from kvferry.control.registry_server import RegistryServer

skip_unless_installed()

MODEL = Model(layers=8, heads=8, head_dim=64, page_tokens=16)
PAGES = 256
SHAPE = Shape(pages=PAGES)
(PLACE,) = SHAPE.coordinates()


def overlap_us(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> float:
    """For how long something of both was going on, at most added up over pairs."""
    total = 0.0
    for one, other in product(first, second):
        end = min(one["ts"] + one["dur"], other["ts"] + other["dur"])
        total += max(0.0, end - max(one["ts"], other["ts"]))
    return total


@pytest.mark.full
def test_the_phases_of_a_staged_transfer_overlap(tmp_path: Path):
    file = tmp_path / "trace.json"
    prefill, decode = RankProcess(), RankProcess()
    with RegistryServer(port=0) as registry:
        settings = {
            "registry_url": registry.url,
            "observe_port": 0,
            "path": "staged",
            "staging_chunk_mib": 1,
            "staging_ring_mib": 8,
            "scatter_workers": 1,
        }
        try:
            prefill.do(Rank.start_prefill, MODEL, SHAPE, PLACE, "prefill", settings)
            decode.do(Rank.start_decode, MODEL, SHAPE, PLACE, "decode", settings)
            where = [each.do(Rank.observe_url) for each in (prefill, decode)]
            command = [sys.executable, "-m", "kvferry", "trace", *where, "--seconds", "6", "--output", str(file)]
            recording = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            pages = list(range(PAGES))
            for room in itertools.count(1):
                decode.do(Rank.receive, room, pages, "prefill")
                prefill.do(Rank.send, room, pages, [PAGES])
                assert decode.do(Rank.wait, room) == 0
                if recording.poll() is not None:
                    break
            said, _ = recording.communicate()
        finally:
            prefill.close()
            decode.close()
    assert recording.returncode == 0, said
    assert "at 2 endpoints" in said
    events = json.loads(file.read_text())["traceEvents"]
    pieces = {phase: [each for each in events if each.get("cat") == phase] for phase in ("gather", "wire", "scatter")}
    per_room = MODEL.layers * 2 * PAGES * 16 * 8 * 64 * 2
    for phase, each in pieces.items():
        assert sum(piece["args"]["bytes"] for piece in each) >= per_room, phase
        assert all(piece["dur"] > 0 for piece in each)
    assert overlap_us(pieces["gather"], pieces["wire"]) > 0
    assert overlap_us(pieces["wire"], pieces["scatter"]) > 0
    assert overlap_us(pieces["gather"], pieces["scatter"]) > 0
    names = {each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert any(name.startswith("kvferry-prefill-0-gather-") for name in names), names
    assert any(name.startswith("kvferry-decode-0-scatter-") for name in names), names
