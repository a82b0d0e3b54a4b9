"""What `kvferry demo` is told of the transport, and refuses before a model is read."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from kvferry.applications.demo import options as module
from kvferry.applications.demo.options import DemoArguments
from kvferry.applications.demo.reference.specification import ModelSpec
from kvferry.errors import SettingsError, TransportUnavailableError
from kvferry.testing.transports import FaultyTransport

# Not by importing it, which every process that collects tests would wait for.
pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

OWN = "kvferry.testing.transports:FaultyTransport"


@pytest.mark.parametrize("way", ["option", "variable"])
def test_every_rank_is_told_the_transport(way: str, monkeypatch: pytest.MonkeyPatch):
    if way == "variable":
        monkeypatch.setenv("KVFERRY_TRANSPORT", OWN)
    options = module.prepare(DemoArguments(transport=OWN if way == "option" else None, requests=1))
    assert options.transport == OWN


def test_a_transport_that_cannot_be_used_is_refused_before_a_model_is_read(monkeypatch: pytest.MonkeyPatch):
    def never(*arguments: Any, **named: Any) -> None:
        pytest.fail("a model was read before")

    def fails() -> None:
        raise TransportUnavailableError("pip install it")

    monkeypatch.setattr(ModelSpec, "small", never)
    with pytest.raises(SettingsError, match="'pigeons': known are"):
        module.prepare(DemoArguments(transport="pigeons"))
    monkeypatch.setattr(FaultyTransport, "check_available", fails)
    with pytest.raises(TransportUnavailableError, match="pip install it"):
        module.prepare(DemoArguments(transport=OWN))
