"""Lists of descriptors that UCX is given as a whole: known by NIXL's binary, and refused where they are in vain."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tests.support.transports import Kit, arrivals, connected, write

from kvferry.endpoint import construction
from kvferry.errors import TransportUnavailableError
from kvferry.findings import Severity
from kvferry.settings import Settings, environment_with
from kvferry.transport import NixlTransport
from kvferry.transport.nixl import scatter_gather
from kvferry.transport.nixl.scatter_gather import VARIABLE, check_lists, knows_lists, plugin_file

KNOWS = b"\x7fELF ... enabled\0disabled\0NIXL_UCX_SGL_ENABLE\0UCX SGL offload \0"
OLDER = b"\x7fELF ... enabled\0disabled\0device_list\0"
WITHOUT = b"\x7fELF ... NIXL_UCX_SGL_ENABLE\0NIXL_UCX_SGL_ENABLE is set but NIXL was built without UCX SGL support\0"


def package(folder: Path, content: bytes) -> ModuleType:
    """Bindings of a wheel with such a plug-in."""
    plugins = folder / ".nixl_cu99.mesonpy.libs" / "plugins"
    plugins.mkdir(parents=True)
    (plugins / "libplugin_UCX.so").write_bytes(content)
    bindings = ModuleType("nixl_cu99._bindings")
    bindings.__file__ = str(folder / "nixl_cu99" / "_bindings.so")
    return bindings


@pytest.mark.parametrize(("content", "expected"), [(KNOWS, True), (OLDER, False), (WITHOUT, False)])
def test_the_binary_says_whether_the_option_does_anything(tmp_path: Path, content: bytes, expected: bool):
    plugin = plugin_file(package(tmp_path, content), {})
    assert plugin is not None
    assert knows_lists(plugin) is expected
    if not expected:
        with pytest.raises(TransportUnavailableError, match=r"KVFERRY_NIXL_SGL: .*libplugin_UCX.*1\.5\.1, or unset it"):
            check_lists("UCX", plugin)


def test_a_backend_that_was_built_elsewhere_is_looked_at_first_and_one_that_is_not_found_is_believed(tmp_path: Path):
    bindings = package(tmp_path, KNOWS)
    (tmp_path / "own").mkdir()
    own = tmp_path / "own" / "libplugin_UCX.so"
    own.write_bytes(OLDER)
    assert plugin_file(bindings, {"NIXL_PLUGIN_DIR": str(own.parent)}) == own
    assert plugin_file(ModuleType("built into the program"), {}) is None
    check_lists("UCX", None)


def test_other_backends_have_no_such_option():
    with pytest.raises(TransportUnavailableError, match=r"KVFERRY_NIXL_SGL .*KVFERRY_NIXL_BACKEND is 'POSIX'"):
        check_lists("POSIX", None)


@pytest.mark.parametrize("before", [None, "0"])
def test_the_variable_is_set_for_as_long_as_the_backend_starts(monkeypatch: pytest.MonkeyPatch, before: str | None):
    monkeypatch.delenv(VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)
    with pytest.raises(RuntimeError, match="1 is seen"), environment_with(VARIABLE, "1"):
        raise RuntimeError(f"{os.environ[VARIABLE]} is seen")
    assert os.environ.get(VARIABLE) == before


def test_two_starts_at_a_time_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    inside, beside, left = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with environment_with(VARIABLE, "1"):
            inside.set()
            beside.wait(0.2)
        left.set()

    def second() -> None:
        inside.wait(10)
        with environment_with(VARIABLE, "1"):
            beside.set()
            left.wait(10)

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert VARIABLE not in os.environ


@pytest.mark.parametrize(("writes", "expected"), [(True, True), (False, False)])
def test_the_setting_is_that_of_the_side_that_writes(monkeypatch: pytest.MonkeyPatch, writes: bool, expected: bool):
    made: list[bool] = []
    monkeypatch.setattr(NixlTransport, "__init__", lambda self, name, **options: made.append(options["hands_lists"]))
    construction.create_transport(Settings(nixl_sgl=True), "endpoint", writes=writes)
    construction.create_transport(Settings(), "endpoint", writes=writes)
    assert made == [expected, False]


def test_the_doctor_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def said(settings: Settings, content: bytes) -> list[tuple[Severity, str]]:
        file = tmp_path / "plugin"
        file.write_bytes(content)
        monkeypatch.setattr("kvferry.transport.nixl.nixl_diagnosis.plugin_file", lambda *_: file)
        findings = NixlTransport.diagnosis.findings(settings)
        return [(finding.severity, finding.what) for finding in findings if finding.about == "lists"]

    assert [severity for severity, _ in said(Settings(nixl_sgl=True), OLDER)] == [Severity.ERROR]
    ((severity, what),) = said(Settings(nixl_sgl=True), KNOWS)
    assert (severity, "as lists" in what) == (Severity.GOOD, True)
    ((severity, what),) = said(Settings(), KNOWS)
    assert (severity, "is not told to" in what) == (Severity.GOOD, True)
    assert said(Settings(), OLDER) == []


def test_what_is_handed_over_as_a_list_arrives(monkeypatch: pytest.MonkeyPatch):
    kit, seen = Kit("nixl"), []
    told = scatter_gather.told

    def watched(*, hands_lists: bool) -> object:
        seen.append(hands_lists)
        return told(hands_lists=hands_lists)

    monkeypatch.setattr("kvferry.transport.nixl.transport.told", watched)

    def make(name: str) -> NixlTransport:
        made = NixlTransport(name, hands_lists=True)
        kit.made.append(made)
        return made

    monkeypatch.setattr(kit, "make", make)
    try:
        pair = connected(kit)
        lists = pair.lists([(0, 48, 64, 64)], [(0, 48, 64, 64)])
        order = np.arange(64, dtype=np.int32)
        write(pair, lists, order, order[::-1].copy())
        expected = pair.here.memory[: 64 * 64].reshape(64, 64)[::-1, :48]
        assert (pair.there.memory[: 64 * 64].reshape(64, 64)[:, :48] == expected).all()
        assert arrivals(pair.there.transport, 1) == [(pair.name, b"written")]
        assert seen == [True, True]
    finally:
        kit.close()
