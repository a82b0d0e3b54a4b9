"""Pages of the documentation, followed word for word in what looks like a fresh clone."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def make_clone(folder: Path, environment: str) -> Path:
    """Puts into a folder all that a clone has, and this environment as the one that `make` has made.

    Args:
        environment: under what name.
    """
    for each in ROOT.iterdir():
        if not each.name.startswith("."):
            (folder / each.name).symlink_to(each)
    (folder / environment).symlink_to(sys.prefix)
    return folder


def bash_blocks(text: str) -> list[str]:
    """What a reader is told to type."""
    return re.findall(r"^```bash\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
