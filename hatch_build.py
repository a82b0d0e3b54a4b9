"""Compiles `staging/blocks.c` as kvferry is installed, or its wheel is built. Without a compiler kvferry does without.

`python hatch_build.py` compiles it in a clone.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = "src/kvferry/staging/blocks.so"
FLAGS = ("-O2", "-std=c11", "-Wall", "-Wextra", "-fPIC", "-shared", "-pthread")


class CompiledCopies(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the library beside its source, and into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles, for a wheel or an editable install."""
        try:
            compile_copies(Path(self.root))
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            self.app.display_warning(
                f"copies between pools in CPU memory will be slow: they cannot be compiled: {error}"
            )
            return
        build_data["artifacts"].append(f"/{LIBRARY}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def compile_copies(root: Path, *flags: str) -> None:
    """Compiles with CC, or with `cc` if that is not set. The library tells of which source it was made.

    Raises:
        OSError: if there is no compiler.
        ValueError: if CC is no command line.
        CalledProcessError: if it fails.
    """
    library = root / LIBRARY
    source = library.with_suffix(".c")
    told = f"-DSOURCE_CRC32={zlib.crc32(source.read_bytes())}u"
    # Environments are installed side by side, and processes may have the one before loaded.
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=f"{library.name}.") as folder:
        made = Path(folder, library.name)
        compiler = shlex.split(os.environ.get("CC") or "cc")
        subprocess.run([*compiler, *FLAGS, *flags, told, "-o", made, source], check=True)  # noqa: S603
        made.replace(library)


if __name__ == "__main__":
    compile_copies(Path(__file__).parent, *sys.argv[1:])
