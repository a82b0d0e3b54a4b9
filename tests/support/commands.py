"""Commands of `kvferry` in this process: what they print and how they end, without an interpreter of their own."""

from __future__ import annotations

import contextlib
import io
import subprocess
import traceback
from pathlib import Path

import pytest

from kvferry.cli import main


def kvferry(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a command, for tests of what it says. What starts processes or handles signals is run in a process."""
    command = ["kvferry", *map(str, arguments)]
    code = 0
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("sys.argv", command)
                main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except Exception:
            traceback.print_exc()
            code = 1
    return subprocess.CompletedProcess(command, code, output.getvalue(), errors.getvalue())
