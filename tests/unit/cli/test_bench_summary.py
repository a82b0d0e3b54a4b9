"""Medians, ratios, and what `kvferry bench` says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.cli.test_bench_options import options

from kvferry.cli.bench import report
from kvferry.cli.bench.drawing import draw
from kvferry.cli.bench.measure import Measured, Round, Run, combined
from kvferry.cli.bench.pattern import Checked
from kvferry.cli.bench.ranks import Received, Sent
from kvferry.cli.bench.summary import bulk_of, summarise


def run_of(num_bytes: int, seconds: float) -> Run:
    return Run(
        num_bytes=num_bytes,
        seconds=seconds,
        latencies_s=(seconds / 2, seconds),
        submit_s=(1e-5, 3e-5),
        cpu_s=0.5 * num_bytes / 1e9,
        descriptors=(100, 100),
    )


def round_of(direct_s: float, synchronous_s: float, whole: float, blocks: float) -> Round:
    runs = {"direct": run_of(10**9, direct_s), "synchronous": run_of(10**9, synchronous_s)}
    return Round(runs=runs, bulk_whole=whole, bulk_blocks=blocks, memory_copy=9e9)


ROUNDS = (round_of(1.0, 2.0, 3e9, 2e9), round_of(0.5, 4.0, 3e9, 4e9), round_of(0.25, 1.0, 5e9, 8e9))


def measured(wrong_bytes: int = 0, checked_bytes: int = 100) -> Measured:
    checked = {
        "direct": Checked(checked_bytes, wrong_bytes, "k of layer 0" if wrong_bytes else None),
        "synchronous": Checked(100, 0, None),
    }
    return Measured(options(), ROUNDS, checked)


def test_the_bulk_write_is_the_one_with_the_better_median():
    assert bulk_of(ROUNDS) == [2e9, 4e9, 8e9]
    assert bulk_of(ROUNDS[:1]) == [3e9]


def test_efficiency_is_the_median_of_ratios_not_the_ratio_of_medians():
    rounds = (
        round_of(1.0, 1.0, 1e9, 0.0),
        round_of(0.5, 1.0, 4e9, 0.0),
        round_of(0.25, 1.0, 5e9, 0.0),
    )
    direct, _ = summarise(Measured(options(), rounds, {name: Checked(1) for name in ("direct", "synchronous")}))
    assert direct.efficiency == pytest.approx(0.8)
    assert direct.bytes_per_s / direct.bulk_bytes_per_s == pytest.approx(0.5)


def test_a_variant_is_compared_with_the_direct_one_round_by_round():
    direct, synchronous = summarise(measured())
    assert direct.to_direct == 1.0
    assert synchronous.to_direct == pytest.approx(0.25)


def test_the_json_has_the_fields_in_their_units():
    cases = summarise(measured())
    shown = json.loads(report.as_json(options(), cases))
    assert shown["exact"] is True
    direct, synchronous = shown["cases"]
    assert direct["variant"] == "direct"
    assert direct["path"] == synchronous["path"] == "direct"
    assert direct["gb_per_s"] == 2.0
    assert direct["bulk_gb_per_s"] == 4.0
    assert direct["efficiency"] == 0.5
    assert direct["submit_us"]["p50"] == pytest.approx(20)
    assert set(direct["submit_us"]) == {"p50", "p99"}
    assert direct["latency_ms"]["p50"] == 375.0
    assert set(direct["latency_ms"]) == {"p50", "p95", "p99"}
    assert direct["cpu_s_per_gb"] == 0.5
    assert direct["descriptors"] == 100
    assert direct["exact"] is True


@pytest.mark.parametrize(("wrong_bytes", "checked_bytes"), [(1, 100), (0, 0)])
def test_a_wrong_byte_or_none_checked_is_not_exact(wrong_bytes: int, checked_bytes: int):
    cases = summarise(measured(wrong_bytes, checked_bytes))
    shown = json.loads(report.as_json(options(), cases))
    assert shown["exact"] is False
    assert [case["exact"] for case in shown["cases"]] == [False, True]
    console = Console(width=200, record=True, quiet=True)
    report.show(options(), cases, console)


def test_the_table_names_the_wrong_byte():
    console = Console(width=200, record=True)
    report.show(options(), summarise(measured(wrong_bytes=3)), console)
    assert "3 of 100 bytes are wrong, the first in k of layer 0" in console.export_text()


def test_times_run_from_the_first_submit_to_the_last_arrival_of_all_ranks():
    sent = [
        Sent((1.0, 2.0), (1e-6, 2e-6), 0.5, ({"a": 10, "b": 20}, {"a": 10}), (3, 4)),
        Sent((0.5, 2.5), (3e-6, 4e-6), 0.25, ({"a": 5}, {}), (1, 0)),
    ]
    received = [Received("a", (3.0, 5.0), 0.1), Received("b", (4.0, 4.5), 0.15)]
    result = combined(sent, received)
    assert result.seconds == 4.5
    assert result.latencies_s == (3.5, 3.0)
    assert result.num_bytes == 45
    assert result.cpu_s == pytest.approx(1.0)
    assert result.descriptors == (4, 4)
    assert result.submit_s == (1e-6, 2e-6, 3e-6, 4e-6)


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_picture_is_drawn(tmp_path: Path, suffix: str):
    file = tmp_path / f"bench{suffix}"
    draw(summarise(measured()), file)
    assert file.stat().st_size > 1000
    if suffix == ".svg":
        assert file.read_text().startswith("<?xml")
