"""What tests of several processes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.clusters import Clusters


@pytest.fixture(scope="session")
def clusters() -> Iterator[Clusters]:
    begun = Clusters()
    yield begun
    begun.close()
