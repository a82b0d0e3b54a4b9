"""Medians, ratios, and what `kvferry bench` says of them."""

from __future__ import annotations

import json
import time
from io import StringIO
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console
from tests.unit.applications.test_bench_options import options

from kvferry.applications.bench import report
from kvferry.applications.bench.commands import Received, Sent, Way
from kvferry.applications.bench.interpreter_time import counted_platform, interpreter_cpu_s, taken_since
from kvferry.applications.bench.measure import Measured, Round, Run, combined
from kvferry.applications.bench.options import BenchOptions
from kvferry.applications.bench.pattern import Checked
from kvferry.applications.bench.summary import Case, Figures, all_exact, bulk_of, path_and_why, summarise
from kvferry.layout import Device, Region
from kvferry.plan.packing import BlockShape

BOTH = "synchronous,direct"


def run_of(num_bytes: int, seconds: float, path: str = "direct") -> Run:
    return Run(
        num_bytes=num_bytes,
        seconds=seconds,
        latencies_s=(seconds / 2, seconds),
        exposed_s=(seconds / 4, seconds / 2),
        submit_s=(1e-5, 3e-5),
        cpu_s=0.5 * num_bytes / 1e9,
        interpreter_s=0.2 * num_bytes / 1e9,
        descriptors=(100, 100),
        writes=(1, 3),
        ways=(Way(path, "it is faster", num_bytes),),
    )


def round_of(direct_s: float, synchronous_s: float, whole: float, blocks: float) -> Round:
    runs = {"direct": run_of(10**9, direct_s), "synchronous": run_of(10**9, synchronous_s)}
    return Round(runs=runs, bulk_whole=whole, bulk_blocks=blocks, memory_copy=9e9)


ROUNDS = (round_of(1.0, 2.0, 3e9, 2e9), round_of(0.5, 4.0, 3e9, 4e9), round_of(0.25, 1.0, 5e9, 8e9))


def shape(variants: str = BOTH) -> BenchOptions:
    return options(variants=variants, requests=2)


def measured(wrong_bytes: int = 0, checked_bytes: int = 100, rounds: tuple[Round, ...] = ROUNDS) -> Measured:
    checked = {
        "direct": Checked(checked_bytes, wrong_bytes, "k of layer 0" if wrong_bytes else None),
        "synchronous": Checked(100, 0, None),
    }
    return Measured(shape(), rounds, checked, {})


def figures_of(found: Measured) -> dict[str, Figures]:
    figures = {case.variant: case.figures for case in summarise(found)}
    return {name: each for name, each in figures.items() if each is not None}


def refused() -> Measured:
    """A case of which one variant was refused, and one went partly by either path."""
    runs = [run_of(10**9, 1.0), run_of(10**9, 0.5, "staged")]
    rounds = tuple(Round(runs={"auto": run}, bulk_whole=4e9, bulk_blocks=1e9, memory_copy=9e9) for run in runs)
    checked = {"staged": Checked(), "auto": Checked(100)}
    return Measured(shape("staged,auto"), rounds, checked, {"staged": "SettingsError: a [ring] is too small"})


def test_the_bulk_write_is_the_one_with_the_better_median():
    assert bulk_of(ROUNDS) == [2e9, 4e9, 8e9]
    assert bulk_of(ROUNDS[:1]) == [3e9]


def test_efficiency_is_the_median_of_ratios_not_the_ratio_of_medians():
    rounds = (
        round_of(1.0, 1.0, 1e9, 0.0),
        round_of(0.5, 1.0, 4e9, 0.0),
        round_of(0.25, 1.0, 5e9, 0.0),
    )
    direct = figures_of(measured(rounds=rounds))["direct"]
    assert direct.efficiency == pytest.approx(0.8)
    assert direct.bytes_per_s / direct.bulk_bytes_per_s == pytest.approx(0.5)


def test_a_variant_is_compared_with_the_direct_one_round_by_round():
    figures = figures_of(measured())
    assert figures["direct"].to_direct == 1.0
    assert figures["synchronous"].to_direct == pytest.approx(0.25)


def test_without_the_direct_variant_nothing_is_compared_with_it():
    assert figures_of(refused())["auto"].to_direct is None


def test_the_json_has_the_fields_in_their_units():
    cases = summarise(measured())
    shown = json.loads(report.as_json(shape(), cases, shares_clock=True))
    assert shown["exact"] is True
    assert shown["device"] == "cpu"
    assert shown["latency_from"] == "submit"
    synchronous, direct = shown["cases"]
    assert direct["variant"] == "direct"
    assert direct["path"] == synchronous["path"] == "direct"
    assert direct["why"] == "it is faster"
    assert direct["refused"] is None
    assert direct["pages"] == "scattered"
    assert direct["prefill_page_tokens"] == direct["decode_page_tokens"] == 16
    assert direct["block_bytes"] == 2 * 64 * 2
    assert direct["gb_per_s"] == 2.0
    assert direct["bulk_gb_per_s"] == 4.0
    assert direct["efficiency"] == 0.5
    assert direct["submit_us"]["p50"] == pytest.approx(20)
    assert set(direct["submit_us"]) == {"p50", "p99"}
    assert direct["latency_ms"]["p50"] == 375.0
    assert set(direct["latency_ms"]) == {"p50", "p95", "p99"}
    assert direct["cpu_s_per_gb"] == 0.5
    assert direct["interpreter_s_per_gb"] == 0.2
    assert direct["descriptors"] == 100
    assert direct["writes"] == 2
    assert direct["bytes_per_request"] == 10**9 // 2
    assert direct["exact"] is True


@pytest.mark.parametrize(("wrong_bytes", "checked_bytes"), [(1, 100), (0, 0)])
def test_a_wrong_byte_or_none_checked_is_not_exact(wrong_bytes: int, checked_bytes: int):
    cases = summarise(measured(wrong_bytes, checked_bytes))
    shown = json.loads(report.as_json(shape(), cases, shares_clock=True))
    assert shown["exact"] is False
    assert [case["exact"] for case in shown["cases"]] == [True, False]
    assert "NO" in text_of(cases)


def test_the_table_names_the_wrong_byte():
    assert "3 of 100 bytes are wrong, the first in k of layer 0" in text_of(summarise(measured(wrong_bytes=3)))


def test_a_variant_that_was_refused_is_a_row_with_its_reason():
    cases = summarise(refused())
    shown = json.loads(report.as_json(shape(), cases, shares_clock=False))
    staged, auto = shown["cases"]
    assert shown["exact"] is True
    assert shown["latency_from"] == "asking"
    assert set(staged) == set(auto)
    assert staged["refused"] == "SettingsError: a [ring] is too small"
    assert staged["exact"] is staged["gb_per_s"] is staged["path"] is None
    assert "a [ring] is too small" in text_of(cases)


def test_if_all_variants_were_refused_nothing_is_exact():
    nothing = Measured(shape(), (), {"direct": Checked(), "synchronous": Checked()}, dict.fromkeys(BOTH.split(","), ""))
    assert not all_exact(summarise(nothing))


def played(layer_time_ms: float, layer_ranges: int = 2) -> Measured:
    """A prefill that is played, of 4 layers; whole prompts take 100 ms on the wire, and twice as long as by layer."""
    played_shape = options(
        variants="direct", requests=2, layer_time_ms=layer_time_ms, layer_ranges=layer_ranges, in_flight=4
    )
    runs = {"direct": run_of(10**9, 1.0), "direct, by layer": run_of(10**9, 0.5)}
    rounds = (Round(runs=runs, bulk_whole=5e9, bulk_blocks=1e9, memory_copy=9e9),)
    return Measured(played_shape, rounds, dict.fromkeys(runs, Checked(100)), {})


@pytest.mark.parametrize(("layer_time_ms", "least_ms"), [(10.0, 110.0), (100.0, 50.0)])
def test_what_is_left_is_compared_with_the_whole_and_with_what_is_possible(layer_time_ms: float, least_ms: float):
    found = played(layer_time_ms)
    figures = figures_of(found)
    whole, by_layer = (figures[name].exposed for name in ("direct", "direct, by layer"))
    assert whole is not None
    assert by_layer is not None
    assert (whole.share, by_layer.share) == (1.0, 0.5)
    assert whole.limit_s == pytest.approx(0.1)
    assert by_layer.limit_s == pytest.approx(least_ms / 1e3), "what takes longer than computing, and one range"
    shown = json.loads(report.as_json(found.options, summarise(found), shares_clock=True))
    assert (shown["in_flight"], shown["layer_ranges"]) == (1, 2)
    assert [case["exposed"]["share_of_whole"] for case in shown["cases"]] == [1.0, 0.5]
    text = StringIO()
    report.show(found.options, summarise(found), Console(width=200, file=text), shares_clock=True)
    assert "sent whole at the end, or in 2 ranges" in " ".join(text.getvalue().split())


def test_nothing_is_left_out_where_no_prefill_is_played():
    assert all(figures.exposed is None for figures in figures_of(measured()).values())


def text_of(cases: list[Case]) -> str:
    shown = StringIO()
    report.show(shape(), cases, Console(width=200, file=shown), shares_clock=True)
    return shown.getvalue()


def test_the_path_is_what_the_records_say():
    ways = [Way("staged", "small runs", 5), Way("staged", "forced", 10), Way("staged", "small runs", 6)]
    assert path_and_why(ways) == ("staged", "small runs")
    path, why = path_and_why([*ways, Way("direct", "no credit", 7)])
    assert path == "mixed"
    assert why == "direct (25%): no credit; staged (75%): small runs"
    assert figures_of(refused())["auto"].path == "mixed"


def accounts() -> tuple[list[Sent], list[Received]]:
    sent = [
        Sent(
            (1.0, 2.0),
            (2.0, 4.5),
            (1e-6, 2e-6),
            0.5,
            0.25,
            ({"a": 10, "b": 20}, {"a": 10}),
            (3, 4),
            (2, 1),
            (Way("direct", "", 40),),
        ),
        Sent((0.5, 2.5), (1.5, 4.75), (3e-6, 4e-6), 0.25, 0.2, ({"a": 5}, {}), (1, 0), (1, 0), (Way("staged", "", 5),)),
    ]
    return sent, [Received("a", (3.0, 5.0), 0.1, 0.05), Received("b", (4.0, 4.5), 0.15, 0.1)]


def test_times_run_from_the_first_submit_to_the_last_arrival_of_all_ranks():
    result = combined(*accounts(), in_flight=2, asked_at=None)
    assert result.seconds == 4.5
    assert result.latencies_s == (3.5, 3.0)
    assert result.exposed_s == (2.0, 0.25), "from the last submit of any rank to the last arrival"
    assert result.num_bytes == 45
    assert result.cpu_s == pytest.approx(1.0)
    assert result.interpreter_s == pytest.approx(0.6)
    assert result.descriptors == (4, 4)
    assert result.writes == (3, 1)
    assert result.submit_s == (1e-6, 2e-6, 3e-6, 4e-6)
    assert [way.path for way in result.ways] == ["direct", "staged"]


def test_without_a_common_clock_times_run_from_when_the_decode_side_asked():
    result = combined(*accounts(), in_flight=2, asked_at=2.0)
    assert result.seconds == 3.0
    assert result.latencies_s == (2.0, 3.0)
    one_by_one = combined(*accounts(), in_flight=1, asked_at=2.0)
    assert one_by_one.latencies_s == (2.0, 1.0)  # the second takes the place of the first, which arrived at 4.0


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_picture_is_drawn(tmp_path: Path, suffix: str):
    file = tmp_path / f"bench{suffix}"
    report.draw(summarise(measured()), file)
    assert file.stat().st_size > 1000
    if suffix == ".svg":
        assert file.read_text().startswith("<?xml")


def test_every_variant_that_went_is_drawn_beside_the_limit(tmp_path: Path):
    file = tmp_path / "bench.svg"
    report.draw([*summarise(refused()), *summarise(measured())], file)
    drawn = file.read_text()
    for label in ("auto", "direct", "synchronous", "bulk write (limit)"):
        assert f"<!-- {label} -->" in drawn
    assert "<!-- staged -->" not in drawn


def test_a_picture_of_nothing_but_refusals_is_drawn(tmp_path: Path):
    refusals = [case for case in summarise(refused()) if case.figures is None]
    report.draw(refusals, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 1000


def test_nobody_guesses_what_the_interpreters_took():
    sent, received = accounts()
    received[0] = msgspec.structs.replace(received[0], interpreter_s=None)
    assert combined(sent, received, in_flight=2, asked_at=None).interpreter_s is None


def test_what_the_interpreter_takes_is_counted_and_no_more_than_all():
    before, cpu_before = interpreter_cpu_s(), time.process_time()
    if before is None:
        pytest.skip("this system has no /proc/self/task/*/schedstat")
    while time.process_time() < cpu_before + 0.05:
        pass
    taken = taken_since(before)
    assert taken is not None
    assert 0.02 < taken < time.process_time() - cpu_before + 0.02
    assert taken_since(None) is None


def test_what_runs_without_the_interpreters_lock_is_not_counted_as_the_interpreters():
    staging = counted_platform().staging
    tensor = np.ones(64 << 20, np.uint8)
    kernels = staging.kernels([Region(tensor.ctypes.data, tensor.size)], Device())
    half, shape = tensor.size // 2, BlockShape((), 1 << 20)
    starts = tensor.ctypes.data + np.arange(half >> 20, dtype=np.int64) * shape.length
    before, cpu_before = interpreter_cpu_s(), time.process_time()
    while (cpu_s := time.process_time() - cpu_before) < 0.1:
        kernels.gather(starts, shape, tensor.ctypes.data + half)
    taken = taken_since(before)
    assert taken is not None
    assert taken < 0.5 * cpu_s
