"""Whether the engine that is installed is what a plug-in builds on.

Engines import for long, print, and take devices, so that a process of its own asks:
`python -m kvferry.applications.doctor.fits MODULE:FUNCTION`.
"""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress

import msgspec

from kvferry.errors import EngineContractError
from kvferry.findings import Finding, error, good, warning
from kvferry.loggers import logger_of

_LONGEST_S = 300.0
_ABOUT = "contract"
_FINDINGS = msgspec.json.Decoder(list[Finding])


def contract(check: str, engine: str, variables: Mapping[str, str]) -> Iterator[Finding]:
    """Has a process compare the engine with the contract.

    Args:
        check: the function that compares, as module:name. It raises, or logs, what differs.
        engine: its name and version, in words.
        variables: the process's environment.
    """
    command = [sys.executable, "-m", __name__, check]
    try:
        run = subprocess.run(  # noqa: S603 - this interpreter, and a module of ours
            command, env=dict(variables), capture_output=True, text=True, timeout=_LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        yield error(_ABOUT, f"{engine} was not imported within {_LONGEST_S:g} s", "is the machine busy?")
        return
    for line in reversed(run.stdout.splitlines()):
        with suppress(msgspec.MsgspecError):
            found = _FINDINGS.decode(line)
            yield from found or [good(_ABOUT, f"{engine} has all that the plug-in builds on")]
            return
    last = (run.stderr or run.stdout).strip().rpartition("\n")[2]
    yield error(_ABOUT, f"{engine} cannot be imported: {last}", "install it anew")


class _Heard(logging.Handler):
    """Keeps what is logged as findings."""

    def __init__(self, found: list[Finding]) -> None:
        super().__init__(logging.WARNING)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        self._found.append(warning(_ABOUT, record.getMessage(), "docs/vllm.md and docs/sglang.md say what was tried"))


def main() -> None:
    """Compares, and prints a list of findings as a line of JSON."""
    module, _, name = sys.argv[1].partition(":")
    found: list[Finding] = []
    logger_of("kvferry").addHandler(_Heard(found))
    try:
        getattr(importlib.import_module(module), name)()
    except EngineContractError as problem:
        found.append(error(_ABOUT, str(problem), "install a version that was tried"))
    sys.stdout.write("\n" + msgspec.json.encode(found).decode() + "\n")


if __name__ == "__main__":
    main()
