"""What an endpoint that was given no transport says where the one that is set cannot be made."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.endpoint.construction import create_transport
from kvferry.errors import TransportUnavailableError
from kvferry.settings import Settings
from kvferry.transport import NixlTransport
from kvferry.transport.chosen import transport_class


@pytest.mark.parametrize("has_library", [False, True])
def test_what_is_installed_instead_is_named_where_the_library_is_missing(
    monkeypatch: pytest.MonkeyPatch, has_library: bool
):
    def fails(*_: Any, **__: Any) -> None:
        raise TransportUnavailableError("it cannot be used")

    monkeypatch.setattr(NixlTransport, "from_settings", fails)
    monkeypatch.setattr(NixlTransport, "check_available", (lambda: None) if has_library else fails)
    monkeypatch.setattr(transport_class("mooncake"), "check_available", lambda: None)
    with pytest.raises(TransportUnavailableError) as caught:
        create_transport(Settings(), "endpoint")
    assert ("KVFERRY_TRANSPORT=mooncake" in str(caught.value)) is not has_library
