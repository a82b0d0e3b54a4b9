"""From the setting `transport` to the class that it names."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tests.support.caches import Model, Shape, pool

from kvferry import DecodeEndpoint, PrefillEndpoint, RankCoordinates
from kvferry.endpoint import base
from kvferry.endpoint.runtime.platform import SystemPlatform
from kvferry.errors import SettingsError, TransportUnavailableError
from kvferry.settings import Settings
from kvferry.transport import InProcessTransport, NixlTransport, Transport
from kvferry.transport.chosen import TRANSPORTS, available_transport_class, transport_class


def refused(chosen: str) -> str:
    with pytest.raises(SettingsError) as caught:
        transport_class(chosen)
    said = str(caught.value)
    assert said.startswith(f"transport (KVFERRY_TRANSPORT) is {chosen!r}: ")
    return said


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_name_of_the_table_is_that_of_its_class(name: str):
    assert transport_class(name).name == name


def test_nixl_is_the_default():
    assert transport_class(Settings().transport) is NixlTransport


def test_where_the_library_is_missing_the_other_one_is_named(monkeypatch: pytest.MonkeyPatch):
    def missing() -> None:
        raise TransportUnavailableError("it is not installed: install it")

    mooncake = transport_class("mooncake")
    monkeypatch.setattr(NixlTransport, "check_available", missing)
    monkeypatch.setattr(mooncake, "check_available", lambda: None)
    with pytest.raises(TransportUnavailableError, match=r"install it\. What is .*KVFERRY_TRANSPORT=mooncake, on both"):
        available_transport_class("nixl")
    assert available_transport_class("mooncake") is mooncake
    monkeypatch.setattr(mooncake, "check_available", missing)
    for name in ("nixl", "mooncake"):
        with pytest.raises(TransportUnavailableError, match=r"install it$"):
            available_transport_class(name)


def test_a_class_of_ones_own_is_named_by_where_it_is():
    assert transport_class("kvferry.transport.nixl:NixlTransport") is NixlTransport


@pytest.mark.parametrize("chosen", ["nixle", "NIXL", "", "package.module", ":Class", "package.module:"])
def test_a_name_that_means_nothing_is_refused_with_those_that_do(chosen: str):
    said = refused(chosen)
    assert "known are: nixl" in said
    assert "package.module:ClassName" in said


def test_a_module_that_is_not_there_is_refused_with_the_reason():
    said = refused("no_such_package.transport:Transport")
    assert "ModuleNotFoundError: No module named 'no_such_package'" in said
    assert "install it" in said


def test_a_module_that_breaks_while_it_is_imported_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "a_broken_transport.py").write_text("raise RuntimeError('no card here')")
    monkeypatch.syspath_prepend(tmp_path)
    assert "RuntimeError: no card here" in refused("a_broken_transport:Transport")


@pytest.mark.parametrize("what", ["Settings", "PREFIX", "NoSuchThing"])
def test_what_is_no_transport_is_refused(what: str):
    assert f"{what} in kvferry.settings is no class that derives" in refused(f"kvferry.settings:{what}")


def test_a_transport_that_is_not_complete_is_refused_with_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    methods: dict[str, Any] = dict.fromkeys(Transport.__abstractmethods__ - {"poll", "notify"}, lambda self: None)
    module = types.ModuleType("half_a_module")
    monkeypatch.setattr(module, "Half", type("Half", (Transport,), methods), raising=False)
    monkeypatch.setitem(sys.modules, "half_a_module", module)
    assert "Half lacks what every transport does: notify, poll" in refused("half_a_module:Half")


@pytest.mark.parametrize("name", ["", "x" * 65, None])
def test_a_transport_that_peers_could_not_name_is_refused(name: str | None, monkeypatch: pytest.MonkeyPatch):
    module = types.ModuleType("a_module")
    methods: dict[str, Any] = dict.fromkeys(Transport.__abstractmethods__, lambda self: None)
    own = methods if name is None else {**methods, "name": name}
    monkeypatch.setattr(module, "Nameless", type("Nameless", (Transport,), own), raising=False)
    monkeypatch.setitem(sys.modules, "a_module", module)
    assert "Nameless has no `name` of 1 to 64 characters" in refused("a_module:Nameless")


def test_a_transport_that_settings_cannot_make_says_how_it_is_given():
    with pytest.raises(SettingsError, match="'inprocess' is not made from settings: give one to the endpoint"):
        InProcessTransport.from_settings(Settings(), "x", writes=True)


@pytest.mark.parametrize("kind", [PrefillEndpoint, DecodeEndpoint])
def test_an_endpoint_refuses_it_before_it_takes_anything(kind: Any, monkeypatch: pytest.MonkeyPatch):
    def never(*arguments: Any, **named: Any) -> None:
        pytest.fail("something was taken before the setting was looked at")

    monkeypatch.setattr(base, "EndpointTelemetry", never)
    for what in ("start", "listen", "connect_as", "registry", "serve_registry", "background_executor"):
        monkeypatch.setattr(SystemPlatform, what, never)
    layout = pool(Model(), Shape(), RankCoordinates()).layout
    with pytest.raises(SettingsError, match="is 'carrier-pigeon': known are: nixl"):
        kind(layout, engine="p", settings=Settings(transport="carrier-pigeon", registry_url="http://localhost:1"))
