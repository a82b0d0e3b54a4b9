"""What tests of all engines take: a family's engines, as the module that asks builds them with its `Built`; notes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
from tests.support.families import family_of

NOTES = pytest.StashKey[list[str]]()


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Keeps a line that is printed when all tests have run: what was seen, where nothing of it is asserted."""
    return request.config.stash.setdefault(NOTES, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    notes = config.stash.get(NOTES, [])
    if notes:
        terminalreporter.section("what was seen")
        for line in sorted(notes):
            terminalreporter.write_line(line)


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
