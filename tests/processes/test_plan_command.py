"""`kvferry plan`, as an operator runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import kvferry

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
DIVIDED = {"layers": "all", "axes": {"head": 6, "dim": 128}, "dtype": "bfloat16", "tp_axis": "head"}


def plan(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return kvferry("plan", *arguments)


def described(file: Path, **changes: Any) -> Path:
    components = [{"name": name, **DIVIDED, **changes} for name in ("k", "v")]
    file.write_text(json.dumps({"kvferry": {"name": "six-heads", "num_layers": 15, "components": components}}))
    return file


@pytest.fixture
def six_heads(tmp_path: Path) -> Path:
    return described(tmp_path / "six-heads.json")


EXPECTED = {
    # pairs, bytes per token of all pairs, bytes per request of all slots
    "qwen3-32b": (["--prefill", "tp=4", "--decode", "tp=8"], 8, 64 * 2 * 8 * 128 * 2, 0),
    "deepseek-v3": (["--prefill", "tp=8", "--decode", "dp=8"], 1, 61 * 576 * 2, 0),
    "qwen3-next-80b-a3b": (
        ["--prefill", "tp=4", "--decode", "tp=2"],
        4,
        12 * 2 * 2 * 256 * 2,
        36 * (32 * 128 * 128 * 4 + (16 + 16 + 32) * 128 * 3 * 2),
    ),
    "gpt-oss-20b": (
        ["--prefill", "tp=2", "--decode", "tp=4", "--prefill-page-size", "16", "--decode-page-size", "64"],
        4,
        24 * 2 * 8 * 64 * 2,
        0,
    ),
    "six-heads": (["--prefill", "tp=3,stages=7+8", "--decode", "tp=2"], 8, 15 * 2 * 6 * 128 * 2, 0),
}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("name", EXPECTED)
def test_what_must_be_seen_is_proved_and_drawn(name: str, tmp_path: Path, six_heads: Path):
    arguments, num_pairs, bytes_per_token, bytes_per_request = EXPECTED[name]
    config = six_heads if name == "six-heads" else CONFIGS / f"{name}.json"
    picture = tmp_path / "plan.svg"
    run = plan("--config", config, *arguments, "--draw", picture, "--json")
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    sys.stdout.write(
        f"{name}: planned in {result['planning_s'] * 1e3:.1f} ms, proved in {result['proof_s'] * 1e3:.1f} ms" + "\n"
    )
    assert result["proved"] is True
    assert len(result["pairs"]) == num_pairs
    assert sum(pair["bytes_per_token"] for pair in result["pairs"]) == bytes_per_token
    assert sum(pair["bytes_per_request"] for pair in result["pairs"]) == bytes_per_request
    assert all(pair["runs_per_page"] + pair["runs_per_slot"] > 0 for pair in result["pairs"])
    for pair in result["pairs"]:
        if not pair["bytes_per_window_token"]:
            assert pair["bytes"] == pair["bytes_per_token"] * pair["tokens"] + pair["bytes_per_request"]
    assert result["path"] in ("direct", "staged", "mixed")
    assert sum(writer["share"] for writer in result["writers"]) == pytest.approx(1, abs=1e-4)
    assert sum(writer["bytes"] for writer in result["writers"]) == sum(pair["bytes"] for pair in result["pairs"])
    text = picture.read_text()
    for pair in result["pairs"]:
        assert f"prefill {pair['src']}<" in text
        assert f"decode {pair['dst']}<" in text


def test_a_person_sees_who_sends_what_which_way_and_whether_it_is_right(tmp_path: Path):
    picture = tmp_path / "plan.png"
    run = plan("--config", CONFIGS / "qwen3-32b.json", "--prefill", "tp=4", "--decode", "tp=8,ep=8", "--draw", picture)
    assert run.returncode == 0, run.stderr
    assert "who sends to whom" in run.stdout
    assert run.stdout.count("32,768") >= 8
    for said in ("1,032,192 descriptors", "16 bulk writes", "path: staged", "25.0%", "EP 8 divides weights"):
        assert said in run.stdout, said
    assert "proved: every destination byte of 2 components on 8 ranks is written exactly once" in run.stdout
    assert "\x1b" not in run.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_many_ranks_are_summed_up(tmp_path: Path):
    run = plan("--config", CONFIGS / "qwen3-32b.json", "--prefill", "tp=8,pp=8", "--decode", "tp=64")
    assert run.returncode == 0, run.stderr
    assert "48 more" in run.stdout
    assert "512 pairs of ranks" in run.stdout
    assert f"{64 * 64 * 2 * 128 * 2:,}" in run.stdout  # every rank of 64 holds one head


IMPOSSIBLE = {
    "packed pages": (["--prefill-layout", "packed"], ["prefill rank 0 has packed", "decode rank 0 has entries"]),
    "dtypes": (["--decode-dtype", "float8_e4m3fn"], ["prefill rank 0 bfloat16", "decode rank 0 float8_e4m3fn"]),
    "stages": (["--prefill", "stages=7+8"], ["--prefill", "[7, 8]", "64"]),
    "nothing known": (["--prefill", "xp=2"], ["'xp=2'", "stages=7+8"]),
    "picture": (["--draw", "plan.doc"], ["plan.doc", ".svg"]),
    "layout": (["--decode-layout", "dnh"], ["--decode-layout 'dnh'", "nhd, hnd, packed"]),
    "page size": (["--decode-page-size", "0"], ["--decode-page-size 0"]),
    "pages": (["--pages", "somewhere"], ["--pages 'somewhere'", "scattered, adjacent"]),
}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_is_impossible_is_refused_with_the_reason(name: str):
    arguments, reasons = IMPOSSIBLE[name]
    run = plan("--config", CONFIGS / "qwen3-32b.json", *arguments)
    assert run.returncode == 2
    assert run.stdout == ""
    assert "Traceback" not in run.stderr
    for reason in reasons:
        assert reason in " ".join(run.stderr.split()), run.stderr


def test_sides_that_keep_other_windows_are_refused(tmp_path: Path):
    configs = [described(tmp_path / f"{window}.json", window_tokens=window) for window in (128, 256)]
    run = plan("--config", configs[0], "--decode-config", configs[1], "--json")
    assert run.returncode == 2
    said = " ".join(run.stderr.split())
    assert "window of 'k': prefill rank 0 keeps the last 128 tokens, decode rank 0 the last 256 tokens" in said


def test_without_a_configuration_there_is_a_clear_sentence(tmp_path: Path):
    run = plan("--config", tmp_path / "nothing.json")
    assert run.returncode == 2
    assert "does not exist" in " ".join(run.stderr.split())
    assert "Traceback" not in run.stderr


def test_nothing_heavy_is_loaded_without_a_picture():
    command = [sys.executable, "-X", "importtime", "-m", "kvferry", "plan", "--config"]
    run = subprocess.run([*command, str(CONFIGS / "qwen3-32b.json")], capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in run.stderr.splitlines()}
    assert "kvferry" in loaded
    assert loaded.isdisjoint({"matplotlib", "torch", "transformers", "nixl_cu13"})
