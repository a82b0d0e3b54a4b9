"""Two releases on one machine: the code of this tree, and the release before, taken from the history."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PREVIOUS = ROOT / "tests/data/previous_release.txt"


class MissingReleaseError(Exception):
    """The release before is not in this clone. The message says how to get it."""


@dataclass(frozen=True, slots=True)
class Release:
    """A release that processes can be started from.

    Attributes:
        name: a tag, or the beginning of a commit; "this tree" for the code at hand.
        source: the folder with the package.
    """

    name: str
    source: Path

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables of a process that runs it."""
        return {**os.environ, "PYTHONPATH": str(self.source)}

    @property
    def has_drain(self) -> bool:
        """Whether its endpoints drain when they are told to."""
        return (self.source / "kvferry/applications/drain").is_dir()


THIS_TREE = Release("this tree", ROOT / "src")


def previous_release(folder: Path, root: Path = ROOT) -> Release:
    """Unpacks the release before into a folder: that of the newest tag, or where there is none the commit on file.

    Raises:
        MissingReleaseError: if it is not in this clone.
    """
    name = _newest_tag(root) or _commit_on_file()
    found = subprocess.run(["git", "archive", name, "src"], cwd=root, capture_output=True, check=False)
    if found.returncode:
        raise MissingReleaseError(
            f"the release before ({name[:12]}) is not in this clone: `git fetch --unshallow` gets it "
            f"({found.stderr.decode(errors='replace').strip()})"
        )
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return Release(name[:12], folder / "src")


def _newest_tag(root: Path) -> str | None:
    found = subprocess.run(
        ["git", "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() if found.returncode == 0 else None


def _commit_on_file() -> str:
    lines = PREVIOUS.read_text(encoding="ascii").splitlines()
    (commit,) = (line for line in lines if line and not line.startswith("#"))
    return commit
