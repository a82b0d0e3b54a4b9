"""Two releases on one machine: the code of this tree, and one that might follow, which speaks one version more."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

_RAISED = {
    "kvferry/protocol/wire/versions.py": ("PROTOCOL_VERSION = 1\n", "PROTOCOL_VERSION = 2\n"),
    "kvferry/_version.py": ('__version__ = "', '__version__ = "1000.'),
}


@dataclass(frozen=True, slots=True)
class Release:
    """A release that processes can be started from.

    Attributes:
        name: for people.
        source: the folder with the package.
    """

    name: str
    source: Path

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables of a process that runs it."""
        return {**os.environ, "PYTHONPATH": str(self.source)}


THIS_TREE = Release("this tree", ROOT / "src")


def next_release(folder: Path) -> Release:
    """Makes a release that speaks the next version, too: a copy of this tree in which the version is raised."""
    shutil.copytree(THIS_TREE.source, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, (now, then) in _RAISED.items():
        text = (folder / name).read_text()
        assert text.count(now) == 1, name
        (folder / name).write_text(text.replace(now, then))
    return Release("a next release", folder)
