"""Fixtures for the tests of an engine: `pytest_plugins = ["kvferry.testing.pytest_plugin"]` in a `conftest.py`.

pytest loads it for those who ask and for nobody else: it is no entry point, which every run of pytest would import, and
kvferry with it, wherever kvferry is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import pytest

from kvferry.control.registry_server import RegistryServer
from kvferry.pools.pool import Pool
from kvferry.testing.network import LocalNetwork, Pair


class MakePair(Protocol):
    """What the fixture `kvferry_pair` is."""

    def __call__(self, prefill: Pool, decode: Pool, **settings: object) -> Pair:
        """Starts a prefill and a decode rank. See `LocalNetwork.pair`."""


@pytest.fixture(scope="session")
def kvferry_registry_url() -> Iterator[str]:
    """One registry on a free port, for all tests: its end takes longer than most tests."""
    with RegistryServer(port=0) as registry:
        yield registry.url


@pytest.fixture
def kvferry_network(kvferry_registry_url: str) -> Iterator[LocalNetwork]:
    """What endpoints need to find and reach one another; closed, with all that it started, when the test ends."""
    with LocalNetwork(kvferry_registry_url) as network:
        yield network


@pytest.fixture
def kvferry_pair(kvferry_network: LocalNetwork) -> MakePair:
    """Starts a prefill and a decode rank with the given pools, and settings if any."""
    return kvferry_network.pair
