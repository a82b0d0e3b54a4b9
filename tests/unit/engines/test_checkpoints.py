"""Weights are told apart by what they are, not by where they lie or how they are spread over files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvferry.engines import checkpoints
from kvferry.engines.checkpoints import adapter_identity, model_directory, weights_identity
from kvferry.errors import ModelError

COMMIT = "c0ffee" + "0" * 34
WEIGHTS = {f"layer.{number}.weight": bytes([number]) * 5000 for number in range(8)} | {"norm": b"\x01" * 16}


def safetensors(file: Path, tensors: Mapping[str, bytes], *, dtype: str = "U8") -> None:
    header: dict[str, Any] = {"__metadata__": {"format": file.name}}
    position = 0
    for name, data in tensors.items():
        header[name] = {"dtype": dtype, "shape": [len(data)], "data_offsets": [position, position + len(data)]}
        position += len(data)
    text = json.dumps(header).encode()
    file.parent.mkdir(exist_ok=True, parents=True)
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


def checkpoint(directory: Path, tensors: Mapping[str, bytes] = WEIGHTS, **how: Any) -> Path:
    safetensors(directory / "model.safetensors", tensors, **how)
    return directory


def test_the_same_weights_elsewhere_and_in_other_files_are_the_same(tmp_path: Path):
    whole = weights_identity(checkpoint(tmp_path / "a"))
    again = checkpoint(tmp_path / "b", dict(reversed(WEIGHTS.items())))
    (again / "README.md").write_text("copied")
    os.utime(again / "model.safetensors", (1, 1))
    names = list(WEIGHTS)
    for part, chosen in enumerate((names[::2], names[1::2])):
        safetensors(tmp_path / "c" / f"part-{part}.safetensors", {name: WEIGHTS[name] for name in chosen})
    parts = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(names)}
    (tmp_path / "c" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    safetensors(tmp_path / "c" / "consolidated.safetensors", {"all": b"once more"})
    assert whole == weights_identity(again) == weights_identity(tmp_path / "c")
    assert whole.endswith("(9 tensors or files, 40,016 bytes)")


def test_weights_are_called_today_what_they_were_called_before(tmp_path: Path):
    """Two servers may have two versions of kvferry."""
    said = weights_identity(checkpoint(tmp_path / "a"))
    assert said == "19653574f3faf5a38b8a25816ae56355 (9 tensors or files, 40,016 bytes)"


@pytest.mark.parametrize("name", WEIGHTS)
def test_one_tensor_with_other_numbers_is_another_checkpoint(tmp_path: Path, name: str):
    trained = {**WEIGHTS, name: bytes(255 - each for each in WEIGHTS[name])}
    assert weights_identity(checkpoint(tmp_path / "a")) != weights_identity(checkpoint(tmp_path / "b", trained))


def test_names_types_and_shapes_count(tmp_path: Path):
    found = {
        weights_identity(checkpoint(tmp_path / "a")),
        weights_identity(checkpoint(tmp_path / "b", dtype="F8_E4M3")),
        weights_identity(checkpoint(tmp_path / "c", {f"model.{name}": data for name, data in WEIGHTS.items()})),
        weights_identity(checkpoint(tmp_path / "d", {**WEIGHTS, "norm": b"\x01" * 17})),
    }
    assert len(found) == 4


def test_reads_are_bounded_however_many_tensors_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    read = []
    right = checkpoints.read_sample

    def counted(descriptor: int, sample: Any) -> bytes:
        read.append(sample.size)
        return right(descriptor, sample)

    monkeypatch.setattr(checkpoints, "read_sample", counted)
    many = {f"expert.{number:05}": number.to_bytes(4, "little") * 256 for number in range(5000)}
    first = weights_identity(checkpoint(tmp_path / "a", many))
    assert len(read) == checkpoints.MOST_READS
    assert max(read) <= checkpoints.SAMPLE_BYTES * checkpoints.READS_A_TENSOR
    trained = {name: data[::-1] for name, data in many.items()}
    assert first != weights_identity(checkpoint(tmp_path / "b", trained))


def test_weights_in_another_format_are_sampled_file_by_file(tmp_path: Path):
    for name, data in (("a", bytes(100_000)), ("b", bytes(100_000)), ("c", bytes(50_000) + b"\1" * 50_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pytorch_model.bin").write_bytes(data)
    identities = [weights_identity(tmp_path / name) for name in "abc"]
    assert identities[0] == identities[1] != identities[2]


def test_a_directory_without_weights_and_a_broken_file_are_named(tmp_path: Path):
    with pytest.raises(ModelError, match=rf"{tmp_path} has no weights: no \*.safetensors"):
        weights_identity(tmp_path)
    file = checkpoint(tmp_path / "a") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3000])
    with pytest.raises(
        ModelError, match=r"the weights in .* cannot be read: ValueError: model.safetensors ends before"
    ):
        weights_identity(tmp_path / "a")
    file.write_bytes(b"\xff" * 20)
    with pytest.raises(ModelError, match="has a header of"):
        weights_identity(tmp_path / "a")


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        "7",
        '{"w": []}',
        "[" * 100_000,
        '{"w": {"dtype": "U8", "shape": [], "data_offsets": []}}',
        '{"w": {"dtype": "U8", "shape": [], "data_offsets": [1' + "0" * 30 + ", 1" + "0" * 30 + "]}}",
    ],
)
def test_whatever_is_wrong_with_a_file_is_an_error_of_the_model(tmp_path: Path, header: str):
    """It may be written while an engine runs, whose scheduler would end with any other."""
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(ModelError, match="cannot be read"):
        weights_identity(tmp_path)


@pytest.mark.parametrize("name", ["a" * 5000, "a\0", "\ud800"], ids=["too long", "null", "half a character"])
def test_a_path_that_no_file_can_have_is_not_here(name: str):
    assert model_directory(name, None) is None


def adapter(directory: Path, *, alpha: int = 16, base: str = "/a", weights: bytes = b"1" * 900) -> str:
    safetensors(directory / "adapter_model.safetensors", {"lora_A": weights})
    configuration = {"r": 8, "lora_alpha": alpha, "base_model_name_or_path": base}
    (directory / "adapter_config.json").write_text(json.dumps(configuration))
    return adapter_identity(directory)


def test_an_adapter_is_its_weights_and_how_they_are_used(tmp_path: Path):
    mine = adapter(tmp_path / "a")
    assert mine == adapter(tmp_path / "b", base="/somewhere/else")
    assert mine != adapter(tmp_path / "c", alpha=32)
    assert mine != adapter(tmp_path / "d", weights=b"2" * 900)
    (tmp_path / "a" / "adapter_config.json").unlink()
    with pytest.raises(ModelError, match=r"the adapter in .* cannot be read: FileNotFoundError"):
        adapter_identity(tmp_path / "a")


def in_the_hubs_cache(cache: Path, name: str, commit: str = COMMIT) -> Path:
    """A model as the hub's client keeps it."""
    kept = cache / f"models--{name.replace('/', '--')}"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text(commit)
    return checkpoint(kept / "snapshots" / commit)


def test_a_name_of_the_hubs_is_the_directory_in_its_cache(tmp_path: Path):
    kept = in_the_hubs_cache(tmp_path, "org/model")
    elsewhere = str(tmp_path / "elsewhere")
    assert model_directory("org/model", None, str(tmp_path)) == kept
    assert model_directory("org/model", COMMIT, str(tmp_path)) == kept
    assert model_directory(str(kept), None, elsewhere) == kept
    assert model_directory("org/model", None, elsewhere) is None
    assert model_directory("org/model", "another", str(tmp_path)) is None
