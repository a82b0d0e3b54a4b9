"""`kvferry plan --export`: a vector of the two layouts that it is asked about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support import vector_reader
from typer.testing import CliRunner

from kvferry.applications.plan import vector
from kvferry.cli.app import app
from kvferry.errors import SettingsError
from kvferry.plan import SourceGroup
from kvferry.protocol.wire.versions import PROTOCOL_VERSION


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    heads: dict[str, Any] = {"layers": "all", "axes": {"head": 3, "dim": 4}, "dtype": "bfloat16", "tp_axis": "head"}
    components: list[dict[str, Any]] = [{"name": name, **heads} for name in ("k", "v")]
    components.append({"name": "window_k", **heads, "window_tokens": 10})
    file.write_text(json.dumps({"kvferry": {"name": "three-heads", "num_layers": 2, "components": components}}))
    return file


def run(config: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", "--config", str(config), *arguments])


SIDES = ["--prefill", "tp=4", "--decode", "tp=3,pp=2", "--tokens", "37", "--room", "5"]


@pytest.mark.parametrize("pages", ["scattered", "adjacent"])
def test_an_exported_plan_is_a_vector_that_a_second_reader_comes_to_too(pages: str, config: Path, tmp_path: Path):
    file = tmp_path / "vector.json"
    result = run(
        config, *SIDES, "--decode-page-size", "8", "--decode-layout", "hnd", "--pages", pages, "--export", str(file)
    )
    assert result.exit_code == 0, result.output
    assert result.output.endswith(f"exported to {file}\n")
    exported = json.loads(file.read_text())
    assert (exported["protocol"], exported["room"], exported["tokens"]) == (PROTOCOL_VERSION, 5, 37)
    assert exported["title"].startswith("three-heads: TP 4: 4 ranks a request, pages of 16 tokens, NHD, to TP 3, PP 2")
    assert [len(exported[side]) for side in ("prefill", "decode")] == [4, 6]
    assert vector_reader.moves(exported) == exported["moves"]
    steps = {pages[1] - pages[0] for rank in exported["prefill"] for pages in rank["pages"].values()}
    assert steps == {1 if pages == "adjacent" else 2}


def test_moves_end_where_regions_do(config: Path, tmp_path: Path):
    file = tmp_path / "vector.json"
    run(config, "--tokens", "10", "--export", str(file))
    exported = json.loads(file.read_text())
    (prefill,), (decode,) = exported["prefill"], exported["decode"]
    for rank in (prefill, decode):  # without gaps
        for number, shard in enumerate(rank["layout"]["shards"]):
            _, num_pages, page_stride, _ = shard["paging"]
            shard["addresses"] = [(2 * number + layer) * num_pages * page_stride for layer in range(2)]
        rank["regions"] = vector_reader.regions(rank)
    for number, group in enumerate(decode["groups"]):  # the window's page is where one after the other's would be
        group["pages"] = prefill["pages"][group["name"]] = [number]
    moved = msgspec.to_builtins(list(vector.moves_between(msgspec.convert(exported, vector.Vector))))
    assert moved == vector_reader.moves(exported)
    assert [move[1] for move in moved] == [*range(6)]


def test_beside_data_nothing_else_is_printed(config: Path, tmp_path: Path):
    result = run(config, *SIDES, "--json", "--export", str(tmp_path / "vector.json"))
    assert json.loads(result.output)["proved"] is True
    assert (tmp_path / "vector.json").exists()


def test_a_plan_that_is_wrong_is_not_exported(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = SourceGroup.pieces_for
    monkeypatch.setattr(SourceGroup, "pieces_for", lambda group, receiver: whole(group, receiver)[1:])
    result = run(config, *SIDES, "--export", str(tmp_path / "vector.json"))
    assert (result.exit_code, "NOT PROVED" in result.output) == (1, True)
    assert not (tmp_path / "vector.json").exists()


@pytest.mark.parametrize(
    ("file", "sentence"), [("no/vector.json", "there is no directory"), (".", "it is a directory, name a file in it")]
)
def test_a_place_that_cannot_be_written_is_refused_at_once(file: str, sentence: str, config: Path, tmp_path: Path):
    result = run(config, "--export", str(tmp_path / file))
    assert isinstance(result.exception, SettingsError)
    assert sentence in str(result.exception)
    assert result.output == ""


def test_a_request_that_moves_too_much_is_refused_with_its_length(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(vector, "MOST_MOVES", 10)
    result = run(config, *SIDES, "--export", str(tmp_path / "vector.json"))
    assert isinstance(result.exception, SettingsError)
    assert str(result.exception).startswith("--tokens 37: the request moves ")
    assert str(result.exception).endswith("a vector lists 10 at most: export a shorter request")


def test_a_room_that_no_message_can_name_is_refused(config: Path, tmp_path: Path):
    result = run(config, "--room", str(1 << 63), "--export", str(tmp_path / "vector.json"))
    assert isinstance(result.exception, SettingsError)
    assert "--room 9223372036854775808" in str(result.exception)
