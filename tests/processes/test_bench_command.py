"""`kvferry bench` between real processes with shapes so small that figures mean nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import CommandProcess, assert_gone, kvferry, wait_for_ranks
from tests.support.real_transport import skip_unless_installed

from kvferry.applications.doctor.machine import has_gpu

skip_unless_installed()

SMALL = ("--preset", "small", "--tokens", "70", "--requests", "3", "--in-flight", "2", "--repetitions", "1")


def result(commands: CommandProcess, *flags: str) -> dict[str, Any]:
    run = commands.kvferry("bench", *SMALL, "--json", *flags)
    assert run.returncode == 0, run.stderr
    shown: dict[str, Any] = json.loads(run.stdout)
    return shown


@pytest.mark.parametrize(
    "flags",
    [
        "--prefill-tp 2 --decode-tp 1",
        pytest.param(
            "--prefill-tp 1 --decode-tp 2 --decode-layout hnd --decode-page-size 48 --chunks 3", marks=pytest.mark.full
        ),
        pytest.param("--prefill-tp 2 --decode-tp 2 --pages contiguous --nixl-threads 2", marks=pytest.mark.full),
        pytest.param(
            "--config tests/data/configs/qwen3-next-80b-a3b.json --chunks 2 --requests 2", marks=pytest.mark.full
        ),
        pytest.param("--config tests/data/configs/gemma-3-4b-it.json --chunks 4 --requests 2", marks=pytest.mark.full),
    ],
)
def test_every_byte_arrives_and_every_figure_is_there(commands: CommandProcess, flags: str):
    shown = result(commands, *flags.split())
    assert shown["exact"] is True
    assert [case["variant"] for case in shown["cases"]] == ["synchronous", "direct", "staged", "auto"]
    went = [case for case in shown["cases"] if case["refused"] is None]
    assert {"synchronous", "direct", "auto"} <= {case["variant"] for case in went}
    for case in went:
        assert case["exact"] is True
        assert case["bytes_checked"] > case["bytes_per_request"] > 0
        assert case["path"] in ("direct", "staged", "mixed")
        assert case["why"]
        assert case["descriptors"] > 0
        assert 0 < case["latency_ms"]["p50"] <= case["latency_ms"]["p95"] <= case["latency_ms"]["p99"]
        assert 0 < case["submit_us"]["p50"] <= case["submit_us"]["p99"]
        for name in ("gb_per_s", "bulk_gb_per_s", "memory_copy_gb_per_s", "efficiency", "cpu_s_per_gb"):
            assert case[name] > 0, name
    by_variant = {case["variant"]: case for case in went}
    assert by_variant["synchronous"]["path"] == by_variant["direct"]["path"] == "direct"
    assert by_variant["direct"]["ratio_to_direct"] == 1.0


@pytest.mark.full
def test_cases_share_processes_and_a_steady_load_is_checked(commands: CommandProcess):
    shown = result(
        commands, "--page-size", "1,16", "--pages", "both", "--variants", "auto,synchronous", "--passes", "3"
    )
    assert [(case["prefill_page_tokens"], case["pages"], case["variant"]) for case in shown["cases"]] == [
        (page_tokens, pages, variant)
        for page_tokens in (1, 16)
        for pages in ("scattered", "contiguous")
        for variant in ("synchronous", "auto")
    ]
    assert shown["exact"] is True
    assert all(case["ratio_to_direct"] is None for case in shown["cases"])


@pytest.mark.full
def test_a_prefill_that_computes_layer_by_layer_is_played(commands: CommandProcess):
    shown = result(
        commands, "--variants", "direct,staged", "--prefill-tp", "2", "--layer-time-ms", "1", "--layer-ranges", "2"
    )
    assert shown["exact"] is True
    assert [case["variant"] for case in shown["cases"]] == [
        *("direct", "direct, by layer"),
        *("staged", "staged, by layer"),
    ]
    for case in shown["cases"]:
        assert 0 < case["exposed"]["ms"]["p50"] < case["latency_ms"]["p50"]
        assert case["latency_ms"]["p50"] > 4.0, "four layers of a millisecond are computed before the last is sent"


@pytest.mark.full
def test_a_wrong_byte_is_seen(commands: CommandProcess):
    run = commands.kvferry("bench", *SMALL, "--json", "--plant-wrong-byte")
    assert run.returncode == 1, run.stderr
    shown = json.loads(run.stdout)
    assert shown["exact"] is False
    went = [case for case in shown["cases"] if case["refused"] is None]
    assert all(case["bytes_wrong"] == 2 for case in went)  # of two repetitions each, one untimed


@pytest.mark.full
def test_cases_are_drawn(commands: CommandProcess, tmp_path: Path):
    file = tmp_path / "bench.svg"
    run = commands.kvferry("bench", *SMALL, "--page-size", "1,16", "--plot", file)
    assert run.returncode == 0, run.stderr
    assert "1-token pages" in run.stdout
    assert file.read_text().startswith("<?xml")


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--requests", "100000000"), "GiB is available"),
        (("--preset", "huge"), "--preset 'huge'"),
        (("--plot", "bench.txt"), "--plot bench.txt"),
        (
            ("--layer-time-ms", "1", "--role", "decode", "--registry", "http://127.0.0.1:9"),
            "--layer-time-ms with --role decode",
        ),
        (("--variants", "fast"), "--variants 'fast': 'fast' is none"),
        (("--prefill-tp", "0"), "--prefill-tp 0: it must be at least 1"),
        (("--role", "decode"), "--role decode needs --registry URL"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(flags: tuple[str, ...], said: str):
    run = kvferry("bench", *SMALL, *flags)
    assert run.returncode == 2
    assert said in " ".join(run.stderr.split())
    assert "Traceback" not in run.stderr


@pytest.mark.skipif(has_gpu(), reason="there is a GPU here")
def test_a_gpu_is_asked_for_where_there_is_none():
    run = kvferry("bench", *SMALL, "--device", "cuda")
    assert run.returncode == 2
    assert "--device cuda: a GPU was asked for" in " ".join(run.stderr.split())


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no GPU here")
def test_every_byte_arrives_in_the_memory_of_a_gpu(commands: CommandProcess):
    shown = result(commands, "--device", "cuda", "--prefill-tp", "2", "--decode-layout", "hnd")
    assert shown["device"] == "cuda"
    assert shown["exact"] is True


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no GPU here; tests/unit/staging/test_mapped.py needs none")
def test_so_it_does_by_kernels_into_mapped_pages(commands: CommandProcess):
    flags = ("--device", "cuda", "--prefill-tp", "2", "--decode-layout", "hnd", "--variants", "mapped")
    shown = result(commands, *flags)
    assert shown["exact"] is True
    assert {case["path"] for case in shown["cases"]} == {"mapped"}


@pytest.mark.full
def test_a_rank_that_dies_ends_the_run_and_leaves_nobody_behind():
    command = [sys.executable, "-m", "kvferry", "bench", *SMALL, "--seconds", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            ranks = wait_for_ranks(process.pid, 2)
            time.sleep(1.0)  # most likely, it measures by now
            os.kill(ranks[0].pid, signal.SIGKILL)
            _, errors = process.communicate()
        finally:
            process.kill()
    assert process.returncode == 2
    assert "rank 0 died with exit code -9" in " ".join(errors.split())
    assert_gone(ranks)


@pytest.mark.full
def test_ranks_do_not_outlive_a_parent_that_was_killed():
    command = [sys.executable, "-m", "kvferry", "bench", *SMALL, "--seconds", "60"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        ranks = wait_for_ranks(process.pid, 2)
        time.sleep(1.0)  # most likely, they measure by now
        process.kill()
    assert_gone(ranks)
