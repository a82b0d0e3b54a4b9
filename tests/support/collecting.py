"""What tests there are, and what they say that they try: what stands behind the tables of docs/design/families.md and
docs/design/caches.md.

A test says what it tries by `@pytest.mark.shows("vllm", "MLAAttentionSpec")`, or a case of one by the same mark.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from tests.support.clones import ROOT
from tests.support.family_cells import Cell

from kvferry.engines.cache_kinds import CacheKind

FILE = "KVFERRY_COLLECTED"
"""The environment variable with the name of the file that a process that only collects writes."""


class CollectedTest(msgspec.Struct, frozen=True):
    """A test, or one case of it, as pytest collected it.

    Attributes:
        name: as pytest has it, with the case.
        is_long: whether it runs in the longest tier alone: whether `make test-all` leaves it out.
        shows: the kinds of cache that it says that it tries: an engine and their names, for each mark.
    """

    name: str
    is_long: bool
    shows: tuple[tuple[str, ...], ...] = ()

    @property
    def test(self) -> str:
        """As tables name it, without the case."""
        return self.name.partition("[")[0]

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]


COLLECTED: pytest.StashKey[list[CollectedTest]] = pytest.StashKey()
"""What a run has collected, before anything was left out."""


def collected_item(item: pytest.Item, *, is_long: bool) -> CollectedTest:
    return CollectedTest(item.nodeid, is_long, tuple(mark.args for mark in item.iter_markers("shows")))


def collected_tests(files: Collection[str], config: pytest.Config) -> list[CollectedTest]:
    """All tests in some files, and cases of them. None runs.

    A run that is of these files as well knows them; otherwise a process collects them.
    """
    known = config.stash[COLLECTED]
    of_single_tests = any("::" in argument for argument in config.args)
    if of_single_tests or not {each.file for each in known}.issuperset(files):
        known = _collected_elsewhere(files)
    return [each for each in known if each.file in files]


def _collected_elsewhere(files: Collection[str]) -> list[CollectedTest]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", __name__, *sorted(files)]
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "collected.json"
        environment = {**os.environ, FILE: str(written)}
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
        return msgspec.json.decode(written.read_bytes(), type=list[CollectedTest])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Writes down what was collected, in a process that only does that."""
    Path(os.environ[FILE]).write_bytes(msgspec.json.encode(session.config.stash[COLLECTED]))


# ---- docs/design/families.md ----------------------------------------------------------------------------------------


def missing_tests(cells: Iterable[Cell], folder: str, config: pytest.Config) -> list[str]:
    """The tests in a folder that cells name and `make test-all` does not run.

    Args:
        folder: relative to the repository, such as "tests/unit".
    """
    named = {cell.test for cell in cells if cell.test.startswith(f"{folder}/")}
    run = [each for each in collected_tests({test.partition("::")[0] for test in named}, config) if not each.is_long]
    return sorted(named - {each.name for each in run} - {each.test for each in run})


# ---- docs/design/caches.md ------------------------------------------------------------------------------------------


def shown_in(folder: str, rows: Sequence[CacheKind], config: pytest.Config) -> list[CollectedTest]:
    """The tests in all files of a folder that rows name."""
    files = {row.test.partition("::")[0] for row in rows if row.test.startswith(f"{folder}/")}
    return collected_tests(files, config)


def unshown(engine: str, rows: Sequence[CacheKind], folder: str, tests: Collection[CollectedTest]) -> Iterator[str]:
    """Yields what is wrong with rows of an engine's table, and with tests that speak of its kinds.

    A row is shown by a test that says so and that `make test-all` runs.

    Args:
        rows: of the whole table.
        folder: only rows whose tests lie there are looked at.
        tests: all those in the files of these rows.
    """
    said = [(each, kinds) for each in tests for named, *kinds in each.shows if named == engine]
    for row in rows:
        if not row.test.startswith(f"{folder}/"):
            continue
        behind = [each for each, kinds in said if row.name in kinds and each.test == row.test]
        if not behind:
            yield f"{row.name}: {row.test} does not say that it tries it"
        elif all(each.is_long for each in behind):
            yield f"{row.name}: {row.test} runs in the long tier alone"
    known = {row.name for row in rows}
    for each, kinds in said:
        if unknown := sorted(set(kinds) - known):
            yield f"{each.test} tries {unknown}, which no row names"
