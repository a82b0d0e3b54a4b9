"""The scripts of the standard set, so short that their figures mean nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.real_transport import REAL, skip_unless_installed

skip_unless_installed()

ROOT = Path(__file__).parents[2]


ALSO_SAID = re.compile(r"no decode rank has asked for|^[IWE]\d{4} |InitGoogleLogging")
"""By a rank that waits for its peer on a busy machine, and by Mooncake."""


def printed(script: str, *flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", f"benchmarks.{script.removesuffix('.py')}", "--json", *flags]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert not [line for line in run.stderr.splitlines() if not ALSO_SAID.search(line)]
    result: dict[str, Any] = json.loads(run.stdout)
    return result


@pytest.mark.full
def test_the_first_transfer_takes_longer_than_a_later_one():
    found = printed("first_transfer.py", "--pairs", "1")
    assert (found["regions"], found["pages"], found["exact"]) == (128, 6144, True)
    assert found["first_ms"] > 0 < found["later_ms"]
    assert found["more_ms"] == pytest.approx(found["all_more_ms"][0])


@pytest.mark.full
def test_transports_are_measured_side_by_side():
    found = printed("transports.py", "--transports", REAL.name, "--shapes", "MLA", "--tokens", "64", "--pairs", "1")
    assert [(row["transport"], row["variant"], row["exact"]) for row in found["rows"]] == [
        (REAL.name, "direct", True),
        (REAL.name, "auto", True),
    ]
    assert found["first_ms"][REAL.name] > 0


@pytest.mark.full
def test_memory_is_read_on_both_sides_after_the_warm_up_and_at_the_end():
    found = printed("memory_growth.py", "--transfers", "200")
    assert (found["transfers"], found["counted"], found["exact"]) == (200, 180, True)
    for side in ("prefill", "decode"):
        samples = found[f"{side}_resident_mib"]
        assert len(samples) == 10
        assert all(20 < sample < 1000 for sample in samples)
        assert found[f"{side}_growth_bytes"] / 2**20 == pytest.approx(samples[-1] - samples[0], abs=0.02)
        assert found[f"{side}_steady_growth_bytes"] <= found[f"{side}_growth_bytes"] + (1 << 20)
        assert found[f"{side}_open_rooms"] == 0


@pytest.mark.full
def test_checksums_are_measured_beside_what_goes_without():
    found = printed("checksums.py", "--rounds", "1", "--layers", "2")
    assert (found["mib"], found["rounds"]) == (8, 1)
    for path in ("direct", "staged"):
        assert found[path]["time_ratio"] > 0 < found[path]["cpu_ratio"]
        assert found[path]["off_ms"] > 0 < found[path]["on_ms"]


@pytest.mark.full
def test_the_bytes_of_open_requests_depend_on_how_pages_lie_and_go_to_one_rank_each():
    found = printed("open_requests.py", "--ranks", "4", "--tokens", "16384")
    for each in found.values():
        assert (each["messages"], each["with pages"]) == (16, 4)
    pages = 16384 // 16
    assert 4 * 8 * pages < found["scattered"]["bytes"] < 4 * 8 * pages + 16 * 250
    assert found["together"]["bytes"] < 16 * 250
    assert found["runs of 64"]["bytes"] < 16 * 250 + 4 * 16 * pages / 64


@pytest.mark.full
def test_opening_a_request_is_measured_by_its_parts():
    found = printed("opening.py", "--pages", "1,100", "--repeats", "3")
    assert list(found) == ["scattered", "in runs of 64"]
    for by_count in found.values():
        assert list(by_count) == ["1", "100"]
        for parts in by_count.values():
            assert all(part > 0 for part in parts.values())
            assert max(parts["copying and checking"], parts["packing"]) < parts["open"], "it does both"


@pytest.mark.full
def test_sharing_a_write_is_measured_beside_what_goes_without():
    found = printed("shared_writes.py", "--rounds", "1", "--block-bytes", "4096", "--counts", "2", "256")
    assert [each["blocks"] for each in found["writes"]] == [2, 256]
    for each in found["writes"]:
        assert all(0 < each["fastest_ms"][name] <= each["slowest_ms"][name] for name in each["median_ms"])
        assert each["shared_to_caller"] > 0 < each["shared_to_nixls_own"]


@pytest.mark.full
def test_bounds_on_direct_writes_are_measured_beside_each_other():
    found = printed("admission.py", "--rounds", "1", "--seconds", "0.5", "--mib", "64", "1", "--request-mib", "4")
    assert list(found["bounds"]) == ["1", "64"]
    for each in found["bounds"].values():
        assert each["gb_per_s"] > 0 < each["of_loosest"]
        assert 0 < each["small_p50_ms"] <= each["small_p99_ms"]
        assert each["small_requests"] > 0
    assert found["bounds"]["64"]["of_loosest"] == 1.0


@pytest.mark.full
@pytest.mark.sampled(one_in=2, full=2)
@pytest.mark.parametrize("request_mib", [1, 3])
def test_what_computing_loses_beside_transfers_is_compared_with_both(request_mib: int):
    flags = ("--side", "prefill", "--path", "direct", "--rounds", "1", "--seconds", "2")
    (found,) = printed("compute_beside_transfers.py", *flags, "--request-mib", str(request_mib)).values()
    assert found["phases"]["alone"]["gb_per_s"] == 0
    for name in ("beside", "apart"):
        phase = found["phases"][name]
        assert phase["gb_per_s"] > 0, "nothing was transferred"
        # One round: a ratio over rounds is that of its figures.
        assert phase["p99_of_alone"] == pytest.approx(phase["p99_us"] / found["phases"]["alone"]["p99_us"])
    for base, lost in found["lost_beside_against"].items():
        for kind in ("p50", "p99", "mean"):
            least, most = (found["phases"][name][f"{kind}_us"] for name in (base, "beside"))
            assert lost[kind] == pytest.approx(1 - least / most)
    assert list(found["lost_beside_against"]) == ["alone", "apart"]


@pytest.mark.full
def test_an_engines_steps_are_measured_without_the_engine():
    found = printed("engine_steps.py", "--engine", "vllm", "--requests", "0,3", "--steps", "3")
    assert list(found) == ["a prefill worker", "a decode worker", "a prefill engine's scheduler"]
    for sides in found.values():
        assert list(sides["kvferry"]) == ["0", "3"]
        for step in sides["kvferry"].values():
            assert step["microseconds"] > 0 <= step["wake_ups"]
            assert step["locks"] == 0, "an engine's step waits for no other thread"


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    "flags",
    [
        ("memory_growth.py", "--transfers", "3"),
        ("first_transfer.py", "--pairs", "0"),
        ("compute_beside_transfers.py", "--request-mib", "0"),
    ],
)
def test_too_few_are_refused(flags: tuple[str, ...]):
    script, *rest = flags
    run = subprocess.run(
        [sys.executable, f"benchmarks/{script}", *rest], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert rest[0] in run.stderr


@pytest.mark.full
def test_the_registry_and_attaching_are_measured_with_many_ranks():
    flags = ("--ranks", "128", "--lease-s", "3", "--start-s", "1", "--settle-s", "0.5", "--seconds", "2")
    found = printed("control_plane.py", *flags, "--away-s", "0.5", "--attach", "4x4")
    assert found["steady"]["renewals_per_s"] > 0 < found["steady"]["us_a_renewal"]
    assert found["steady"]["failed"] == 0
    assert found["restart"]["all_registered_s"] > 0 < found["restart"]["busiest_second"]
    assert found["look_ups"]["us_new"] > 0 < found["look_ups"]["us_unchanged"]
    assert [(each["shape"], each["attachments"]) for each in found["attach"]] == [("GQA", 16), ("MLA", 16)]
    assert all(each["seconds"] > 0 < each["prefill_cpu_s"] for each in found["attach"])


@pytest.mark.full
def test_the_standard_set_writes_its_section_from_real_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from benchmarks import standard

    small = "kvferry bench --preset small --tokens 70 --requests 3 --in-flight 2 --repetitions 1 --variants auto --json"
    commands = {
        "equal": f"{small} --page-size 16",
        "one-token": f"{small} --preset huge",
        "growth": "python benchmarks/memory_growth.py --transfers 100 --json",
    }
    monkeypatch.setattr(standard, "steps", lambda device: commands)
    page, saved = tmp_path / "page.md", tmp_path / "run.json"
    monkeypatch.setattr(sys, "argv", ["standard", "--output", str(page), "--save", str(saved)])
    with pytest.raises(SystemExit) as ended:
        standard.main()
    assert ended.value.code == 1  # since a step failed
    written = page.read_text()
    assert "| equal TP, 16-token pages, scattered | 0.9 of the bulk write | " in written
    assert (
        "| equal TP, 1-token pages, scattered | 0.35 of the bulk write | exit code 2: kvferry: SettingsError" in written
    )
    assert "| growth of memory with the number of transfers | none | prefill " in written
    assert all(command in written for command in commands.values())
    again = tmp_path / "again.md"
    monkeypatch.setattr(sys, "argv", ["standard", "--output", str(again), "--load", str(saved)])
    with pytest.raises(SystemExit):
        standard.main()
    assert again.read_text() == written


@pytest.mark.full
def test_what_is_left_of_a_prompt_is_measured_whole_and_by_layer():
    flags = ("--cases", "GQA, TP 1", "--request-mb", "4", "--ranges", "4", "--variants", "direct", "--repetitions", "1")
    (row,) = printed("layer_by_layer.py", *flags)["rows"]
    assert (row["ranges"], row["exact"]) == (4, True)
    assert row["whole_ms"] > 0 < row["by_layer_ms"]
