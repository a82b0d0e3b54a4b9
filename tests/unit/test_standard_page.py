"""docs/design/benchmarks.md says what was measured, and what was not."""

from __future__ import annotations

import dataclasses
import platform
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
from benchmarks import standard
from benchmarks.memory_growth import steady_growth
from benchmarks.standard_page import figures_of, is_exact, number, rows, section, with_section

from kvferry.applications.bench.options import BenchArguments, prepare
from kvferry.applications.bench.pool import needed_bytes
from kvferry.applications.bench.run import checked_place
from kvferry.cli.app import app

ROOT = Path(__file__).parents[2]


def case(variant: str, page_tokens: int, pages: str, **changes: Any) -> dict[str, Any]:
    return {
        "case": f"TP 1->1, {page_tokens}-token pages, {pages}",
        "variant": variant,
        "prefill_page_tokens": page_tokens,
        "pages": pages,
        "refused": None,
        "exact": True,
        "bytes_wrong": 0,
        "path": "staged",
        "gb_per_s": 4.75,
        "bulk_gb_per_s": 5.0,
        "efficiency": 0.95,
        "ratio_to_direct": 5.0,
        "submit_us": {"p50": 10.0, "p99": 30.0},
        "latency_ms": {"p50": 100.0, "p95": 110.0, "p99": 150.0},
        "cpu_s_per_gb": 0.8,
        "descriptors": 16384,
    } | changes


def bench(*cases: dict[str, Any]) -> dict[str, Any]:
    return {
        "command": "kvferry bench --json",
        "result": {"exact": all(each["exact"] for each in cases), "cases": cases},
    }


def growth(*, prefill: int = 0, decode: int = 0, decode_steady: int = 0) -> dict[str, int]:
    return {
        "prefill_growth_bytes": prefill,
        "prefill_steady_growth_bytes": 0,
        "decode_growth_bytes": decode,
        "decode_steady_growth_bytes": decode_steady,
        "counted": 9000,
    }


def both(page_tokens: int, **changes: Any) -> tuple[dict[str, Any], ...]:
    return tuple(case("auto", page_tokens, pages, **changes) for pages in ("scattered", "contiguous"))


def run_of(**steps: Any) -> dict[str, Any]:
    """A run in which every target was reached, but for what is changed; None leaves a step out."""
    waiting = {"p50": 2e5, "p99": 3e5}
    unequal = bench(case("auto", 16, "scattered"), case("staged", 16, "scattered"))
    found = {
        "equal": bench(*both(16), *both(64)),
        "one-token": bench(*both(1)),
        "2->1": unequal,
        "1->2": unequal,
        "4->2": unequal,
        "steady": bench(case("synchronous", 16, "scattered", submit_us=waiting), case("auto", 16, "scattered")),
        "submit": {
            "command": "submit",
            "result": {"sizes": [{"pages": 1, "submit_us": {"p50": 3, "p99": 9}}, {"submit_us": {"p50": 4, "p99": 8}}]},
        },
        "idle": {"command": "idle", "result": {"prefill_percent": 0.4, "decode_percent": 0.3}},
        "first": {"command": "first", "result": {"more_ms": 41.234}},
        "growth": {
            "command": "growth",
            "result": growth(decode=7 << 20),
        },
    } | steps
    return {
        "device": "cpu",
        "machine": {"processor": "a fast one, 2 cores"},
        "seconds": 200.4,
        "steps": {name: step for name, step in found.items() if step is not None},
    }


def verdicts(run: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Case, what was measured and the verdict, of every line of the first table."""
    table = section(run).split("### What must be reached")[1].split("###")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    return [(line[0], line[2], line[3]) for line in cells]


def not_reached(run: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    return {name: (measured, verdict) for name, measured, verdict in verdicts(run) if verdict != "yes"}


def test_a_run_that_reached_everything_says_so_in_every_row():
    run = run_of()
    assert len(verdicts(run)) == len(rows("cpu")) == 21
    assert not_reached(run) == {}


@pytest.mark.parametrize(
    ("steps", "name", "measured"),
    [
        ({"equal": bench(*both(16, efficiency=0.899), *both(64))}, "equal TP, 16-token pages", "0.899"),
        ({"one-token": bench(*both(1, efficiency=0.5))}, "equal TP, 1-token pages, contiguous", "0.500"),
        ({"2->1": bench(case("auto", 16, "scattered", cpu_s_per_gb=1.2))}, "TP 2->1, 16-token pages", "1.20 CPU-s/GB"),
        ({"1->2": bench(case("auto", 16, "scattered", ratio_to_direct=3.9))}, "TP 1->2, 16-token pages", "3.90x"),
        (
            {
                "submit": {
                    "command": "",
                    "result": {"sizes": [{"submit_us": {"p50": 3, "p99": 51}}, {"submit_us": {"p50": 2, "p99": 9}}]},
                }
            },
            "caller's time for a submit",
            "p50 3.00 us, p99 51.0 us",
        ),
        ({"idle": {"command": "", "result": {"prefill_percent": 0.9, "decode_percent": 0.2}}}, "idle pair", "1.10 %"),
        ({"first": {"command": "", "result": {"more_ms": 50.01}}}, "first transfer", "50.0 ms more"),
        (
            {"growth": {"command": "", "result": growth(decode=2 << 20, decode_steady=(1 << 20) + 1)}},
            "growth of memory",
            "prefill 0.000 MiB (steadily 0.000), decode 2.00 MiB (steadily 1.00) in 9,000 transfers",
        ),
        ({"growth": {"command": "", "result": growth(prefill=9 << 20)}}, "growth of memory", "prefill 9.00 MiB"),
    ],
)
def test_a_target_that_was_missed_says_so(steps: dict[str, Any], name: str, measured: str):
    missed = not_reached(run_of(**steps))
    assert missed
    for case_name, (said, verdict) in missed.items():
        assert case_name.startswith(name)
        assert said.startswith(measured)
        assert verdict == "**no**"


def test_blocking_and_steadiness_come_from_the_steady_load():
    waiting, returning = {"p50": 900.0, "p99": 1.0}, {"p50": 1.0, "p99": 1.0}
    slow = {"p50": 10.0, "p95": 15.0, "p99": 20.1}
    steady = bench(
        case("synchronous", 16, "scattered", submit_us=waiting),
        case("auto", 16, "scattered", submit_us=returning, latency_ms=slow),
    )
    missed = not_reached(run_of(steady=steady))
    assert [said for said, _ in missed.values()] == ["900x (900 us against 1.00 us)", "2.01"]


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (None, "left out"),
        ({"command": "kvferry bench", "error": "exit code 2: no | NIXL\nhere"}, "exit code 2: no / NIXL here"),
        (bench(case("auto", 16, "scattered", refused="SettingsError: small")), "refused: SettingsError: small"),
        (bench(case("auto", 16, "scattered", exact=False, bytes_wrong=7)), "7 bytes were wrong"),
        (bench(case("direct", 16, "scattered")), "no auto variant"),
        ({"command": "kvferry bench", "result": {"other": 1}}, "an output without what is looked for"),
    ],
)
def test_what_was_not_measured_is_never_reached_and_says_why(step: Any, said: str):
    missed = not_reached(run_of(**{"2->1": step}))
    assert set(missed) == {"TP 2->1, 16-token pages, scattered"}
    measured, verdict = missed["TP 2->1, 16-token pages, scattered"]
    assert measured.startswith(said)
    assert verdict == "not measured"


def test_a_ratio_without_the_direct_variant_is_not_measured():
    missed = not_reached(run_of(**{"4->2": bench(case("auto", 16, "scattered", ratio_to_direct=None))}))
    assert missed == {"TP 4->2, 16-token pages, scattered": ("no ratio_to_direct", "not measured")}


def test_a_wrong_byte_anywhere_shows_at_the_top():
    assert is_exact(run_of())
    wrong = run_of(first={"command": "", "result": {"more_ms": 1, "exact": False}})
    assert not is_exact(wrong)
    assert "every byte checked: SOME WRONG" in section(wrong)


def test_a_gpu_has_rows_of_its_own():
    run = run_of() | {"device": "cuda"}
    assert section(run).startswith("## One GPU\n")
    staged = [name for name, _, verdict in verdicts(run) if name.endswith("staged") and verdict == "yes"]
    assert len(staged) == 3


def test_every_case_and_every_command_is_shown():
    shown = section(run_of())
    table = shown.split("### All cases")[1]
    assert "| TP 1->1, 16-token pages, scattered (steady) | synchronous | staged | 4.75 | 5.00 | 0.950 |" in table
    assert shown.count("\nkvferry bench --json") == 6
    refused = bench(case("auto", 16, "scattered"), case("staged", 16, "scattered", refused="too small"))
    assert "| staged | refused: too small |" in section(run_of(**{"2->1": refused}))


def test_a_section_is_replaced_and_everything_else_stays():
    page = (
        "# Benchmarks\n\nBy hand.\n\n<!-- cpu -->\nold\n<!-- /cpu -->\n\nBetween.\n\n<!-- cuda -->\ng\n<!-- /cuda -->\n"
    )
    written = with_section(page, "cpu", "new\n")
    assert written == page.replace("old", "new")
    assert with_section(written, "cpu", "new\n") == written
    assert with_section("# Benchmarks\n", "cuda", "g\n") == "# Benchmarks\n\n<!-- cuda -->\ng\n<!-- /cuda -->\n"


@pytest.mark.parametrize(("value", "shown"), [(0.0349, "0.035"), (9.994, "9.99"), (12.34, "12.3"), (-2755.4, "-2,755")])
def test_numbers_have_three_digits(value: float, shown: str):
    assert number(value) == shown


def test_a_figure_is_looked_up_by_its_case():
    run = run_of(equal=bench(*both(16, efficiency=0.5), *both(64, efficiency=0.6)))
    assert figures_of(run, "equal", "auto", 64, "contiguous")["efficiency"] == 0.6


@pytest.mark.parametrize("name", list(standard.steps("cpu")))
def test_every_step_is_a_command_that_there_is_and_fits_into_memory(name: str):
    program, *arguments = shlex.split(standard.steps("cpu")[name])
    if program == "python":
        assert (ROOT / arguments[0]).is_file()
        return
    assert "--json" in arguments
    group = typer.main.get_command(app)
    with group.make_context("kvferry", arguments) as context:
        command = group.commands["bench"]  # type: ignore[attr-defined]
        with command.make_context("bench", arguments[1:], parent=context) as parsed:
            values = parsed.params
    known = {field.name for field in dataclasses.fields(BenchArguments)}
    for options in prepare(BenchArguments(**{key: value for key, value in values.items() if key in known})):
        assert needed_bytes(options) < 20e9
        assert options.tokens == 2048
        assert options.model.name == "qwen3-32b"
        assert options.in_flight == 4
    assert checked_place("both", None).registry_url is None


def test_the_steps_of_a_gpu_use_it():
    for command in standard.steps("cuda").values():
        assert ("--device cuda" in command) is command.startswith("kvferry")


def test_the_machine_is_described_and_not_named():
    described = standard.machine("cpu")
    assert {"processor", "memory", "system", "packages"} <= set(described)
    text = " ".join(described.values())
    assert platform.node() not in text
    assert "/" not in text.replace(" / ", " ")


def test_a_step_that_fails_says_its_last_words():
    assert standard.run_step("kvferry bench --preset huge")["error"].startswith("exit code 2: kvferry: SettingsError")
    assert standard.run_step("python -c 'import time; time.sleep(5)'", 0.01)["error"] == "not through after 0.01 s"


def test_parts_have_all_steps_and_end_in_under_eight_minutes():
    assert sorted(step for part in standard.PARTS for step in part) == sorted(standard.steps("cuda"))
    assert standard.LONGEST_PART_S < 480


def test_parts_make_one_run_if_they_are_of_one_machine():
    first = {"device": "cuda", "machine": {"GPU": "A"}, "seconds": 3.0, "steps": {"equal": {"result": 1}, "idle": 0}}
    second = {"device": "cuda", "machine": {"GPU": "A"}, "seconds": 4.0, "steps": {"idle": {"result": 2}}}
    run = standard.together([first, second])
    assert run["steps"] == {"equal": {"result": 1}, "idle": {"result": 2}}
    assert run["seconds"] == 7
    with pytest.raises(ValueError, match=r"machine is .*A.* and .*B"):
        standard.together([first, {**second, "machine": {"GPU": "B"}}])


def test_a_gpu_that_is_not_there_ends_the_command(monkeypatch: pytest.MonkeyPatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="a GPU was asked for where there is none"):
        standard.check_device("cuda")


def test_the_page_names_no_place_on_this_machine():
    page = (ROOT / "docs" / "design" / "benchmarks.md").read_text()
    assert not re.search(r"(?<![\w.])/(?:home|root|tmp|work|usr)\b", page)
    assert page.count("<!-- cpu -->") == page.count("<!-- /cpu -->") == 1


def test_growth_with_every_transfer_is_told_from_what_is_made_once():
    assert steady_growth([100, 110, 120, 130, 140]) == 40
    assert steady_growth([100, 100, 350, 350, 350, 400]) == 0
    assert steady_growth([100, 101, 351, 352, 353]) == 4
    assert steady_growth([100, 90, 80]) == -20
