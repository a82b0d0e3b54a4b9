"""Pages for who comes from an engine's own connector, and drafts for its documentation, held against its sources."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from tests.support.clones import ROOT, blocks


def sources(package: str, *patterns: str) -> str:
    """Returns the text of files of an installed package, which is not imported."""
    root = package_root(package)
    return "\n".join(file.read_text() for pattern in patterns for file in sorted(root.glob(pattern)))


def package_root(package: str) -> Path:
    """Returns where an installed package lies."""
    found = find_spec(package)
    assert found is not None
    assert found.submodule_search_locations
    return Path(found.submodule_search_locations[0])


def named(document: str, tables: Sequence[tuple[str, int]]) -> Iterator[str]:
    """Yields what stands in code in a column of the tables below some headings: of an option the name and the value."""
    page = (ROOT / document).read_text()
    for heading, column in tables:
        section = page[page.index(f"## {heading}\n") :].split("\n## ")[0]
        rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
        for row in rows[1:]:
            for code in re.findall(r"`([^`]+)`", row[column]):
                yield from code.split()


def missing(names: Iterable[str], text: str) -> list[str]:
    """Returns the names that an engine's sources do not have; options count as the fields that they are made of."""
    absent, found = [], 0
    for name in names:
        spellings = {name, name.removeprefix("--").replace("-", "_")}
        found += 1
        if not any(re.search(rf"(?<![\w-]){re.escape(each)}(?![\w-])", text) for each in spellings):
            absent.append(name)
    assert found > 5, "there is something to look for"
    return absent


def patched(document: str, package: str, to: Path) -> Path:
    """Applies the diff of a draft to copies of the installed files that it names; returns the folder they are in."""
    (diff,) = blocks((ROOT / document).read_text(), "diff")
    for name in re.findall(r"^--- a/(\S+)$", diff, flags=re.MULTILINE):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(package_root(package).parent / name, to / name)
    run = subprocess.run(["git", "apply", "-"], input=diff, cwd=to, text=True, capture_output=True, check=False)
    assert run.returncode == 0, run.stderr
    return to
