"""What tests of all engines take: a family's engines, as the module that asks builds them with its `Built`."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
from tests.support.families import family_of


@pytest.fixture(scope="module")
def latest_family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Keeps one family's engines, by its name, for all tests in a row that are of it.

    A parametrized fixture would not: it tells its cases apart by their place, and each test of a family has another.
    """
    build = request.module.Built
    return lru_cache(maxsize=1)(lambda name: build(family_of(name), tmp_path_factory.mktemp("family")))


@pytest.fixture
def built(request: pytest.FixtureRequest, latest_family: Callable[[str], Any]) -> Any:
    """The engines of the family that a test is given."""
    return latest_family(request.param.name)
