"""Goes a stranger's way on a fresh machine: a folder of wheels, an empty environment, no network, nothing set."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from release.commands import ReleaseError, run

EXTRAS = "nixl,up"
"""Those that the container files install."""

APART = ("unshare", "--map-root-user", "--net", "sh", "-ec", 'ip link set lo up; exec "$@"', "sh")
"""What comes before a command that has a network of its own, with loopback alone."""


@dataclass(frozen=True, slots=True)
class Step:
    """Something that a stranger does.

    Attributes:
        name: for people.
        command: with the programs of the new environment.
        says: what must be in its output; empty for anything.
    """

    name: str
    command: Sequence[str | Path]
    says: str = ""


def fill(folder: Path, wheel: Path, torch: str) -> None:
    """Puts into a folder all wheels that installing one needs, anew.

    Args:
        torch: which one, as pip takes it: without a choice NIXL's wheel brings the newest for CUDA.
    """
    shutil.rmtree(folder, ignore_errors=True)
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
    run(*download, "--dest", folder, torch, f"{wheel}[{EXTRAS}]")


def steps(home: Path, wheels: Path, example: Path, model: Path) -> Iterator[Step]:
    """Yields what a stranger does, in this order.

    Args:
        home: an empty folder, in which the environment will be.
        wheels: the folder of wheels.
        example: the program that the README shows.
        model: a model's `config.json`.
    """
    programs = home / "venv/bin"
    install = ("-m", "pip", "install", "--quiet", "--no-index", "--find-links", wheels)
    # Not the running Python: that of the tools' environment would bring their packages along.
    yield Step("environment", (f"{sys.base_prefix}/bin/python3", "-m", "venv", home / "venv"))
    yield Step("install", (programs / "python", *install, f"kvferry[{EXTRAS}]"))
    yield Step("two processes", (programs / "python", example), "first token: 42 - tensors that arrived: 8")
    yield Step("doctor", (programs / "kvferry", "doctor"), "\n0 wrong, ")
    plan = ("plan", "--config", model, "--prefill", "tp=2", "--decode", "tp=1")
    yield Step("plan", (programs / "kvferry", *plan), "proved: every destination byte")


def no_network() -> str:
    """Returns why no network of one's own can be made here; empty if it can."""
    try:
        run(*APART, "true")
    except ReleaseError as error:
        return str(error)
    return ""


def walk(chosen: Sequence[Step], home: Path, apart: Sequence[str] = APART) -> Iterator[tuple[str, float]]:
    """Does these steps, and yields the name and the seconds of each.

    Args:
        home: the stranger's, where each begins.
        apart: what comes before each command.

    Raises:
        ReleaseError: if one fails, or does not say what it must.
    """
    environment = {"HOME": str(home), "PATH": os.defpath, "PIP_NO_COMPILE": "0"}
    for step in chosen:
        begun_at = time.monotonic()
        said = run(*apart, *step.command, cwd=home, environment=environment)
        if step.says not in said:
            raise ReleaseError(f"{step.name}: {step.says!r} is not in what it says:\n{said}")
        yield step.name, time.monotonic() - begun_at
