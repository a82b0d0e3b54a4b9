"""What tests of several processes share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from tests.support.clusters import Clusters
from tests.support.commands import CommandProcess


@pytest.fixture(scope="package")
def clusters() -> Iterator[Clusters]:
    """Ended with the last test of this folder: idle ranks and registries keep a seventh of a core busy."""
    begun = Clusters()
    yield begun
    begun.close()


@pytest.fixture(scope="module")
def commands() -> Iterator[CommandProcess]:
    with closing(CommandProcess()) as process:
        yield process
