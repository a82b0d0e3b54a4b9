"""Runs the tools of a release: what they print is kept, and shown where one fails."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path


class ReleaseError(Exception):
    """Says why this is no release, and what to do."""


def run(
    *command: str | Path,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    accepted: Collection[int] = (0,),
) -> str:
    """Returns what a command prints, its complaints last.

    Args:
        cwd: where it runs, unless here.
        environment: all of its variables, unless ours.
        accepted: exit statuses that are no failure.

    Raises:
        ReleaseError: if it fails, with what it has said.
    """
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if done.returncode not in accepted:
        raise ReleaseError(f"{shlex.join(words)} ended with {done.returncode}:\n{said}".rstrip())
    return said
