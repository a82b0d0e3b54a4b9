"""The documentation: its pages, followed word for word in what looks like a fresh clone, and the programs beside it."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def make_clone(folder: Path, environment: str) -> Path:
    """Puts into a folder all that a clone has, and this environment as the one that `make` has made.

    Args:
        environment: under what name.
    """
    for each in ROOT.iterdir():
        if not each.name.startswith(".") and each.name != "pyproject.toml":
            (folder / each.name).symlink_to(each)
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    os.utime(folder / "pyproject.toml", (0, 0))  # older than any environment: `make` makes that no second time
    (folder / environment).symlink_to(sys.prefix)
    return folder


def blocks(text: str, language: str) -> list[str]:
    """The blocks of code in a language, by the name that stands at their fence; "" for those without one."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [block for name, block in found if name == language]


def docs_program(name: str) -> ModuleType:
    """Loads docs/NAME.py, which lies in no package."""
    specification = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
