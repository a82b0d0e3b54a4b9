"""Compiles `staging/blocks.c` as kvferry is installed, or its wheel is built. Without a compiler kvferry does without.

By itself, `python hatch_build.py`, it compiles that of the tree that it lies in.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = "src/kvferry/staging/blocks.so"
FLAGS = ("-O2", "-std=c11", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")


class CompiledCopies(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the library beside its source, and into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles, for a wheel or an editable install."""
        try:
            compile_copies(Path(self.root))
        except (OSError, subprocess.CalledProcessError) as error:
            self.app.display_warning(f"copies on CPUs are not compiled and will be slow: {error}")
            return
        build_data["artifacts"].append(f"/{LIBRARY}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def compile_copies(root: Path) -> None:
    """Compiles with CC, or with `cc` if that is not set.

    Raises:
        OSError: if there is no compiler.
        CalledProcessError: if it fails.
    """
    library = root / LIBRARY
    library.unlink(missing_ok=True)
    being_made = library.with_suffix(f".{os.getpid()}")  # environments are installed side by side
    command = [*shlex.split(os.environ.get("CC", "cc")), *FLAGS, "-o", being_made, library.with_suffix(".c")]
    subprocess.run(command, check=True)  # noqa: S603 - the builder's own compiler
    being_made.replace(library)


if __name__ == "__main__":
    compile_copies(Path(__file__).parent)
