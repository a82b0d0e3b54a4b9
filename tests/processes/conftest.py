"""What tests of several processes share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from tests.support.cells import Clusters
from tests.support.commands import CommandProcess


@pytest.fixture(scope="session")
def clusters() -> Iterator[Clusters]:
    begun = Clusters()
    yield begun
    begun.close()


@pytest.hookimpl(tryfirst=True)  # while the test still has its fixtures
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends clusters after the last of the tests that strike them: idle, they take a percent of a core for each rank."""
    clusters = item.funcargs.get("clusters") if isinstance(item, pytest.Function) else None
    goes_on = isinstance(nextitem, pytest.Function) and "clusters" in nextitem.fixturenames
    if isinstance(clusters, Clusters) and not goes_on:
        clusters.close()


@pytest.fixture(scope="module")
def commands() -> Iterator[CommandProcess]:
    with closing(CommandProcess()) as process:
        yield process
