"""Programs in namespaces of their own: with another view of processes, or other numbers, than the tests have."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Sequence

import pytest

UNSHARE = shutil.which("unshare")

NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc")
"""Of a host or a pod: all of these its own."""


@functools.cache
def refusal(*options: str) -> str:
    """Returns why such namespaces cannot be made here; empty if they can."""
    if UNSHARE is None:
        return "there is no unshare (util-linux)"
    tried = subprocess.run([UNSHARE, *options, "true"], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else tried.stderr.strip()


def unshare(*options: str) -> Sequence[str]:
    """Returns how the command line of a program in such namespaces begins; skips where they may not be made."""
    if problem := refusal(*options):
        pytest.skip(f"no namespaces of one's own here: {problem}")
    assert UNSHARE is not None
    return [UNSHARE, *options]
