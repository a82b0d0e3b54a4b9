"""Which tests say that they try a kind of cache, by collecting them: what stands behind the rows of docs/caches.md.

A test says so by `@pytest.mark.shows("vllm", "MLAAttentionSpec")`, or a case of one by the same mark. A row whose test
does not, or whose test runs in `make test-long` alone, is one that nobody shows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from tests.support.clones import ROOT

from kvferry.engines.cache_kinds import CacheKind

FILE = "KVFERRY_SHOWN"
"""The environment variable with the name of the file that is written."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What one test, or one case of it, says that it tries.

    Attributes:
        test: as rows name it, without its case.
        engine: whose kinds of cache.
        kinds: their names.
        is_long: whether it runs in the longest tier alone.
    """

    test: str
    engine: str
    kinds: tuple[str, ...]
    is_long: bool


def collected(files: Collection[str]) -> list[Shown]:
    """What the tests in some files say, in a process of its own: files are imported, and no test runs."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "--tier", "long", "-p", __name__, *sorted(files)]
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "shown.json"
        environment = {**os.environ, FILE: str(written)}
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
        found = json.loads(written.read_text())
    return [Shown(each["test"], each["engine"], tuple(each["kinds"]), each["is_long"]) for each in found]


def files_of(rows: Sequence[CacheKind], folder: str) -> set[str]:
    """The files in a folder whose tests rows name."""
    return {row.test.partition("::")[0] for row in rows if row.test.startswith(f"{folder}/")}


def problems(engine: str, rows: Sequence[CacheKind], folder: str, shown: Collection[Shown]) -> Iterator[str]:
    """Yields what is wrong with rows of an engine's table, and with tests that speak of its kinds.

    Args:
        rows: of the whole table.
        folder: only rows whose tests lie there are looked at.
        shown: what all tests in the files of these rows say.
    """
    for row in rows:
        if not row.test.startswith(f"{folder}/"):
            continue
        behind = [each for each in shown if each.engine == engine and row.name in each.kinds and each.test == row.test]
        if not behind:
            yield f"{row.name}: {row.test} does not say that it tries it"
        elif all(each.is_long for each in behind):
            yield f"{row.name}: {row.test} runs in make test-long alone"
    known = {row.name for row in rows}
    for each in shown:
        if each.engine == engine and (unknown := sorted(set(each.kinds) - known)):
            yield f"{each.test} tries {unknown}, which no row names"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Writes down what was collected."""
    found = [
        asdict(Shown(item.nodeid.partition("[")[0], engine, tuple(kinds), item.get_closest_marker("long") is not None))
        for item in session.items
        for engine, *kinds in (mark.args for mark in item.iter_markers("shows"))
    ]
    Path(os.environ[FILE]).write_text(json.dumps(found))
