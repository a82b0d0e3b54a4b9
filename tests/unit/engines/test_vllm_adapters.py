"""A LoRA adapter is what vLLM has loaded, as far as anybody can know."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.waiting import eventually

from kvferry.engines.vllm import adapters
from kvferry.engines.vllm.adapters import Adapters, files_in

_names = itertools.count()


def write(directory: Path, content: bytes) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_model.bin").write_bytes(content)
    (directory / "adapter_config.json").write_text("{}")
    return directory


def downloaded(cache: Path, revision: str, content: bytes) -> None:
    """What the hub's client leaves of an adapter called org/a, whose newest revision is this one."""
    kept = cache / "models--org--a"
    (kept / "refs").mkdir(parents=True, exist_ok=True)
    (kept / "refs" / "main").write_text(revision)
    (kept / "snapshots").mkdir(exist_ok=True)
    write(kept / "snapshots" / revision, content)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the hub's client keeps what it has downloaded."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def lora(path: Path | str, name: str = "a", number: int = 1, *, in_place: bool = False) -> Any:
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path), load_inplace=in_place)


def request(of: Any) -> Any:
    return SimpleNamespace(request_id=f"request-{next(_names)}", lora_request=of)


def load(known: Adapters, given: Any) -> None:
    """What happens when vLLM is told to load one."""
    known.loaded(given, files_in(given.lora_path))


@pytest.fixture
def known() -> Any:
    found: Any = Adapters()
    found.names = []
    found.replaced = found.names.append
    return found


def test_it_is_its_files_whatever_it_is_called(known: Any, tmp_path: Path):
    each = [
        lora(write(tmp_path / name, content), name, number)
        for number, (name, content) in enumerate((("a", b"1"), ("b", b"1"), ("c", b"2")), start=1)
    ]
    first, second, third = (known.identity(request(of)) for of in each)
    assert first == second != third
    assert known.identity(SimpleNamespace(request_id="none", lora_request=None)) == ""


def test_what_vllm_told_nobody_is_what_was_loaded_until_it_is_loaded_anew(
    known: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    given = lora(write(tmp_path / "a", b"1"))
    first = known.identity(request(given))
    write(tmp_path / "a", b"22")
    unknown = {known.identity(request(given)) for _ in range(2)}
    assert len({first, *unknown}) == 3, "nobody knows which of the two vLLM has"
    assert "load it again with load_inplace, on every server" in caplog.text
    load(known, given)
    assert known.identity(request(given)).startswith("unknown "), "vLLM loads nothing that it has"
    load(known, lora(tmp_path / "a", in_place=True))
    second = known.identity(request(given))
    assert second == Adapters().identity(request(given)), "as a server says that starts now"
    assert known.names == ["a"]


def test_files_that_are_gone_are_those_that_were_loaded(known: Any, tmp_path: Path):
    given = lora(write(tmp_path / "a", b"1"))
    first = known.identity(request(given))
    (tmp_path / "a" / "adapter_model.bin").unlink()
    assert known.identity(request(given)) == first


def test_files_that_were_written_once_more_with_what_they_had_are_the_same(known: Any, tmp_path: Path):
    given = lora(write(tmp_path / "a", b"1"))
    first = known.identity(request(given))
    (tmp_path / "a" / "adapter_model.bin").unlink()
    assert known.identity(request(lora(write(tmp_path / "a", b"1")))) == first


def test_a_request_that_loads_it_anew_waits_until_nobody_finds_what_it_was(known: Any, tmp_path: Path):
    """vLLM has looked into its prefix cache before it asks."""
    known.identity(request(lora(write(tmp_path / "a", b"1"))))
    write(tmp_path / "a", b"22")
    asking = request(lora(tmp_path / "a", in_place=True))
    eventually("it is another", lambda: known.is_known(asking) or known.names)
    assert known.names == ["a"]
    eventually("it is known", lambda: known.is_known(asking))
    assert known.identity(asking) == Adapters().identity(asking)
    assert known.names == ["a"]


def test_another_one_by_the_name_of_one_that_was_dropped_replaces_it(known: Any, tmp_path: Path):
    known.identity(request(lora(write(tmp_path / "a", b"1"))))
    known.unloaded(1)
    known.identity(request(lora(write(tmp_path / "b", b"1"), number=2)))
    assert known.names == []
    known.identity(request(lora(write(tmp_path / "c", b"2"), number=3)))
    assert known.names == ["a"]


def test_files_that_are_written_while_they_are_loaded_are_nobodys(known: Any, tmp_path: Path):
    given = lora(write(tmp_path / "a", b"1"))
    before = files_in(given.lora_path)
    write(tmp_path / "a", b"22")
    known.loaded(given, before)
    assert known.identity(request(given)).startswith("unknown ")


def test_files_that_are_written_before_the_request_that_loads_them_is_scheduled_are_read_again(
    known: Any, tmp_path: Path
):
    """It may wait for long once they were read."""
    asking = request(lora(write(tmp_path / "a", b"1")))
    eventually("it is known", lambda: known.is_known(asking))
    write(tmp_path / "a", b"22")
    assert not known.is_known(asking)
    eventually("it is known anew", lambda: known.is_known(asking))
    assert known.identity(asking) == Adapters().identity(asking)


def test_files_that_are_written_while_the_request_is_computed_that_loads_them_are_nobodys(known: Any, tmp_path: Path):
    given = lora(write(tmp_path / "a", b"1"))
    loading = request(given)
    first = known.identity(loading)
    assert not known.are_proved
    write(tmp_path / "a", b"22")
    known.computed(loading)
    assert known.names == ["a"]
    assert known.are_proved
    later = {known.identity(request(given)) for _ in range(2)}
    assert len({first, *later}) > 1
    assert all(each.startswith("unknown ") for each in later)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("earlier_ends_first", [True, False])
def test_what_is_loaded_for_several_requests_is_nobodys_whichever_of_them_ends_first(
    known: Any, tmp_path: Path, in_place: bool, earlier_ends_first: bool
):
    """In place every step of theirs loads it."""
    given = lora(write(tmp_path / "a", b"1"), in_place=in_place)
    both = request(given), request(given)
    eventually("it is known", lambda: known.is_known(both[1]))
    for each in both:
        known.identity(each)
    write(tmp_path / "a", b"22")
    known.computed(both[not earlier_ends_first])
    assert known.names == ["a"]
    assert known.are_proved


def test_files_that_are_written_once_it_was_loaded_change_nothing_of_what_was_computed(known: Any, tmp_path: Path):
    given = lora(write(tmp_path / "a", b"1"))
    loading = request(given)
    first = known.identity(loading)
    known.computed(loading)
    write(tmp_path / "a", b"22")
    known.computed(loading)
    assert known.names == []
    write(tmp_path / "a", b"1")
    assert known.identity(request(given)) == first


def test_one_that_was_read_for_a_request_is_what_vllm_is_told_to_load_before_that_is_scheduled(
    known: Any, tmp_path: Path
):
    asking = request(lora(write(tmp_path / "a", b"1")))
    eventually("it is known", lambda: known.is_known(asking))
    write(tmp_path / "a", b"22")
    load(known, lora(tmp_path / "a"))
    assert known.identity(request(lora(tmp_path / "a"))) == Adapters().identity(asking)


def test_it_is_read_aside(known: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On a disk that takes its time, vLLM's scheduler goes on."""
    may_go_on = threading.Event()

    def slow(directory: Path) -> str:
        assert may_go_on.wait(30)
        return f"read by {threading.current_thread().name}"

    monkeypatch.setattr(adapters, "adapter_identity", slow)
    given = request(lora(tmp_path))
    assert known.is_known(request(None))
    assert not known.is_known(given)
    assert not known.is_known(given), "it is being read"
    may_go_on.set()
    eventually("it was read", lambda: known.is_known(given))
    assert known.identity(given) == "read by kvferry-vllm-adapters_0"


# ---- paths that vLLM resolves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("user", ["~", "org/a"])
def test_it_is_what_lies_where_vllm_looks(
    known: Any, tmp_path: Path, hub: Path, monkeypatch: pytest.MonkeyPatch, user: str
):
    """In the user's directory, or in the hub's cache: it is the same as by its whole path, and another afterwards."""
    monkeypatch.setenv("HOME", str(tmp_path))

    def wrote(content: bytes) -> str:
        write(tmp_path / "a", content)
        downloaded(hub, f"of {content!r}", content)
        return Adapters().identity(request(lora(tmp_path / "a")))

    path = "~/a" if user == "~" else user
    first = wrote(b"1")
    assert known.identity(request(lora(path))) == first
    second = wrote(b"22")
    assert known.identity(request(lora(path))).startswith("unknown ")
    load(known, lora(path, in_place=True))
    assert known.identity(request(lora(path))) == second != first
    assert known.names == ["a"]


def test_one_that_vllm_downloads_to_load_it_is_what_it_has_downloaded(known: Any, tmp_path: Path, hub: Path):
    given = lora("org/a")
    before = files_in(given.lora_path)
    downloaded(hub, "1", b"1")
    known.loaded(given, before)
    assert known.identity(request(given)) == Adapters().identity(request(lora(write(tmp_path / "a", b"1"))))


def test_one_that_a_request_has_vllm_download_is_what_it_has_downloaded_from_then_on(
    known: Any, tmp_path: Path, hub: Path
):
    given = lora("org/a")
    loading = request(given)
    first = known.identity(loading)
    downloaded(hub, "1", b"1")
    known.computed(loading)
    whole = Adapters().identity(request(lora(write(tmp_path / "a", b"1"))))
    assert known.identity(request(given)) == whole != first
    assert known.names == ["a"], "nobody finds what was computed under its name alone"


@pytest.mark.parametrize("path", ["org/nowhere", "without weights"])
def test_one_that_cannot_be_read_is_its_name_until_it_is_loaded_anew(
    known: Any, tmp_path: Path, hub: Path, path: str, caplog: pytest.LogCaptureFixture
):
    if path == "without weights":
        (tmp_path / path).mkdir()
        path = str(tmp_path / path)
    given = lora(path)
    load(known, given)
    first = known.identity(request(given))
    assert first == known.identity(request(given)) == Adapters().identity(request(given))
    load(known, lora(path, in_place=True))
    second = known.identity(request(given))
    assert second.startswith("unknown ")
    assert "the adapter 'a' cannot be read" in caplog.text
    known.unloaded(1)
    load(known, given)
    assert len({first, second, known.identity(request(given))}) == 3
    assert known.names == ["a", "a"]
