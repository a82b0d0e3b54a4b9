"""The main job, as a person runs it: `kvferry demo` on real processes over the real transport."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoints import save_checkpoint
from tests.support.commands import CommandProcess, kvferry
from tests.support.real_transport import skip_unless_installed

skip_unless_installed()

UNLIKE_PAGES = (
    "--prefill-tp 2 --decode-tp 1 --arch gemma3 --decode-layout hnd "
    "--prefill-page-size 3 --decode-page-size 16 --chunk-tokens 48"
)
QUICK = ["--requests", "3", "--max-new-tokens", "6", "--json"]


def demo(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvferry", "demo", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def result(commands: CommandProcess, *flags: str) -> dict[str, Any]:
    run = commands.kvferry("demo", *flags, *QUICK)
    assert run.returncode == 0, run.stdout + run.stderr
    loaded = json.loads(run.stdout)
    assert isinstance(loaded, dict)
    return loaded


@pytest.mark.parametrize(
    "flags",
    [
        "--prefill-tp 4 --decode-tp 2 --kv-heads 2",
        *(
            pytest.param(flags, marks=pytest.mark.full)
            for flags in (
                "--prefill-tp 8 --decode-tp 2 --kv-heads 4",
                "--prefill-tp 2 --decode-tp 4 --arch qwen3_next --kv-heads 2",
                "--prefill-tp 2 --decode-tp 1 --arch qwen3_next --prefill-stages 1,3 --decode-stages 2,1,1",
                "--prefill-tp 4 --decode-tp 2 --arch gemma3 --prefill-page-size 16 --decode-page-size 64 "
                "--prefill-layout hnd",
                "--prefill-tp 2 --decode-tp 4 --arch gemma3 --prefill-page-size 64 --decode-page-size 16 "
                "--decode-layout hnd",
                "--prefill-tp 2 --decode-tp 4 --arch mamba2 --kv-heads 6",
            )
        ),
        *(
            pytest.param(flags, marks=pytest.mark.long)  # the README's own commands are alike
            for flags in (
                "--prefill-tp 1 --decode-tp 1",
                "--prefill-tp 2 --decode-tp 4 --kv-heads 4",
                "--prefill-tp 2 --decode-tp 8 --kv-heads 2",
                "--prefill-tp 2 --decode-tp 1 --arch llama --prefill-stages 3,1 --decode-stages 1,2,1",
                "--prefill-tp 4 --decode-tp 2 --arch mamba2 --kv-heads 2",
                "--prefill-tp 1 --decode-tp 2 --prefill-page-size 16 --decode-page-size 48 --decode-layout hnd",
            )
        ),
    ],
)
def test_tokens_and_bytes_are_those_of_the_undivided_model(commands: CommandProcess, flags: str):
    shown = result(commands, *flags.split())
    assert shown["tokens_match"] is True
    assert shown["bytes_mismatched"] == 0
    assert shown["bytes_checked"] > 0
    assert shown["requests"] == 3
    assert shown["transfer_ms"]["p50"] > 0
    assert shown["gb_per_s"] > 0


@pytest.mark.full
def test_pages_that_share_no_bounds_show_where_a_window_begins(commands: CommandProcess):
    """With pages alike on both sides whole pages travel, and a window that begins a token late would pass."""
    shown = result(commands, *UNLIKE_PAGES.split())
    assert shown["tokens_match"] is True
    assert shown["bytes_mismatched"] == 0
    assert (shown["prefill_page_size"], shown["decode_page_size"]) == (3, 16)
    assert (shown["prefill_layout"], shown["decode_layout"]) == ("nhd", "hnd")
    assert shown["groups"] == ["kv", "window-32"]


@pytest.mark.full
def test_two_prefill_and_two_decode_engines_serve_every_pair(commands: CommandProcess):
    shown = result(commands, "--prefill-engines", "2", "--decode-engines", "2", "--prefill-tp", "2", "--requests", "4")
    assert shown["tokens_match"] is True
    assert shown["bytes_mismatched"] == 0


@pytest.mark.full
def test_a_person_sees_a_table_a_picture_and_a_verdict():
    run = demo("--prefill-tp", "2", "--decode-tp", "1", "--requests", "2", "--max-new-tokens", "4")
    assert run.returncode == 0, run.stderr
    for part in (
        "Transfers",
        "16 tokens NHD",
        "Who sent what to whom",
        "head 0-1",
        "yes  tokens equal",
        "yes  bytes exact",
    ):
        assert part in run.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--prefill-tp 0", ["--prefill-tp 0", "at least 1"]),
        pytest.param("--decode-tp -1", ["--decode-tp -1", "at least 1"], marks=pytest.mark.full),
        pytest.param("--prefill-pp 9", ["--prefill-pp 9", "[1, 4]"], marks=pytest.mark.full),
        pytest.param("--prefill-stages 1,1", ["--prefill-stages '1,1'", "4"], marks=pytest.mark.full),
        pytest.param("--prefill-stages x", ["--prefill-stages 'x'", "such as 3,1"], marks=pytest.mark.full),
        pytest.param("--chunk-tokens 20", ["--chunk-tokens 20", "16"], marks=pytest.mark.full),
        pytest.param("--prefill-page-size 48", ["--chunk-tokens 64", "48"], marks=pytest.mark.full),
        pytest.param("--decode-page-size 0", ["--decode-page-size 0", "at least 1"], marks=pytest.mark.full),
        pytest.param("--decode-layout dhn", ["--decode-layout 'dhn'", "nhd, hnd"], marks=pytest.mark.full),
        pytest.param("--arch mamba2 --kv-heads 0", ["num_kv_heads is 0"], marks=pytest.mark.full),
        pytest.param("--arch gemma3 --layers 1", ["num_layers is 1", "at least 2"], marks=pytest.mark.full),
        pytest.param("--requests 0", ["--requests 0"], marks=pytest.mark.full),
        pytest.param("--kv-heads 0", ["num_kv_heads is 0"], marks=pytest.mark.full),
        ("--arch gpt", ["'gpt'", "qwen3"]),
        ("--prompt-file missing.txt", ["missing.txt"]),
    ],
)
def test_a_wrong_option_is_one_clear_sentence(flags: str, words: list[str]):
    run = demo(*flags.split()) if flags == "--arch gpt" else kvferry("demo", *flags.split())
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    sentence = " ".join(run.stderr.split())
    for word in words:
        assert word in sentence


@pytest.mark.full
def test_a_local_checkpoint_runs_with_its_own_tokenizer_and_prompts(commands: CommandProcess, tmp_path: Path):
    prompts = ["the ferry leaves at noon and comes back at night", "who counts the boats on the river"]
    prompt_file = tmp_path / "prompts.txt"
    prompt_file.write_text("\n".join(prompts))
    checkpoint = save_checkpoint(tmp_path / "checkpoint", "llama", prompts)
    shown = result(
        commands, "--model", str(checkpoint), "--prompt-file", str(prompt_file), "--decode-tp", "1", "--page-size", "4"
    )
    assert shown["tokens_match"] is True
    assert shown["bytes_mismatched"] == 0
    assert shown["architecture"] == "llama"


def test_a_model_directory_without_config_is_named(tmp_path: Path):
    run = kvferry("demo", "--model", tmp_path)
    assert run.returncode == 2
    assert "config.json" in run.stderr
