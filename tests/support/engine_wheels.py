"""Wheels with some modules of an engine, unlike its own in one place: of a release of which no such wheel exists."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from proof.engine_contracts.archives import Read

Change = Callable[[str], str]


def build(wheel: Path, read: Read, modules: Iterable[str], changes: Mapping[str, Change]) -> Path:
    """Writes a wheel, and returns its path.

    Args:
        wheel: its path.
        read: reads the engine's files.
        modules: the names of those that it has; a package's own comes along.
        changes: what is done to the text of a module, by its name.
    """
    assert changes.keys() <= set(modules)
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for module in dict.fromkeys([next(iter(modules)).partition(".")[0], *modules]):
            path = module.replace(".", "/")
            for file in (f"{path}.py", f"{path}/__init__.py"):
                if (text := read(file)) is not None:
                    changed = changes.get(module, str)(text)
                    assert changed != text or module not in changes, f"{module} is as it was"
                    archive.writestr(file, changed)
                    break
    return wheel


def renamed(function: str, other: str) -> Change:
    """Gives a function another name where it is defined."""
    return lambda text: text.replace(f"def {function}(", f"def {other}(")


def moved(method: str, other: str) -> Change:
    """Moves what a method does into another one, which it calls."""
    call = f"def {method}(self, *given):\n        return self.{other}(*given)\n\n    def {other}("
    return lambda text: text.replace(f"def {method}(", call)
