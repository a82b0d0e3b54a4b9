"""What moves bytes in tests of several processes: what KVFERRY_TRANSPORT chooses, as everywhere, and NIXL by default.

Tests that are about something else name it here and nowhere else.
"""

from __future__ import annotations

import pytest

from kvferry.errors import TransportUnavailableError
from kvferry.settings import Settings
from kvferry.transport.chosen import transport_class

REAL = transport_class(Settings().transport)

PRELOADED = ["tests.support.nixl_preload"] if REAL.name == "nixl" else []
"""Modules that a fork server imports, so that its processes have the transport's library from the start."""


def skip_unless_installed(name: str = REAL.name) -> None:
    """Skips the test that calls this, or the module while it is imported, if a transport is not installed."""
    try:
        transport_class(name).check_available()
    except TransportUnavailableError as error:
        pytest.skip(str(error), allow_module_level=True)
