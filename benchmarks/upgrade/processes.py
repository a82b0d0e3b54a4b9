"""Ranks and registries as processes of one release or the other."""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from benchmarks.soak.ranks import engine_name
from benchmarks.upgrade.releases import ROOT, THIS_TREE, Release

_END_S = 15.0


@dataclass(frozen=True, slots=True)
class Running:
    """A rank's first report: which code its process runs."""

    source: str


@dataclass(frozen=True, slots=True)
class RankSpec:
    """A rank to start.

    Attributes:
        role: prefill or decode.
        number: of its engine among those of its role.
        slots: how many rooms a decode rank has memory for.
    """

    role: str
    number: int
    settings: dict[str, Any]
    slots: int = 0

    @property
    def engine(self) -> str:
        """The engine's name."""
        return engine_name(self.role, self.number)


class RankHost:
    """A process of one release, with a rank or more.

    Attributes:
        release: what it runs.
        connections: to its ranks, in their order.
    """

    def __init__(self, release: Release, ranks: Sequence[RankSpec], *, seed: int = 0) -> None:
        """Starts it. Its ranks report as those of the soak do, once they are up."""
        self.release = release
        self.connections: list[Connection] = []
        theirs = []
        for _ in ranks:
            ours, other = multiprocessing.Pipe()
            self.connections.append(ours)
            theirs.append(other)
        descriptors = [each.fileno() for each in theirs]
        command = [sys.executable, "-m", "benchmarks.upgrade.rank", *map(str, descriptors)]
        self._process = subprocess.Popen(command, cwd=ROOT, env=release.environment, pass_fds=descriptors)
        for other, ours, rank in zip(theirs, self.connections, ranks, strict=True):
            other.close()
            ours.send((rank.role, rank.number, rank.settings, rank.slots, seed + rank.number))

    def runs(self, report: Running) -> bool:
        """Whether a rank's first report is of the release that was asked for."""
        return report.source.startswith(f"{self.release.source}/")

    @property
    def has_ended(self) -> bool:
        """Whether the process has."""
        return self._process.poll() is not None

    def hang_up(self) -> None:
        """Tells it to close its endpoints and end."""
        for connection in self.connections:
            connection.close()

    def end(self) -> bool:
        """Whether it ends by itself and well; it ends in any case."""
        self.hang_up()
        try:
            return self._process.wait(_END_S) == 0
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False


class DrainCommand:
    """`kvferry drain NAME`, as an operator runs it."""

    def __init__(self, engine: str, registry_url: str, secret: str, timeout_s: float) -> None:
        """Starts it."""
        command = [sys.executable, "-m", "kvferry", "drain", engine, "--timeout", str(timeout_s)]
        variables = {"KVFERRY_REGISTRY_URL": registry_url, "KVFERRY_SECRET": secret}
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**THIS_TREE.environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def has_ended(self) -> bool:
        """Whether it has."""
        return self._process.poll() is not None

    def problem(self) -> str:
        """Says what went wrong, once it has ended; nothing if the engine has drained."""
        code = self._process.wait()
        assert self._process.stdout is not None
        return "" if code == 0 else f"kvferry drain: exit code {code}: {self._process.stdout.read()}"

    def close(self) -> None:
        """Ends it, if it has not ended."""
        self._process.kill()
        with self._process:
            pass


class RegistryHost:
    """`kvferry registry` of one release.

    Attributes:
        url: where it answers.
    """

    def __init__(self, release: Release, *, lease_s: float, secret: str | None = None, port: int = 0) -> None:
        """Starts it, and returns when it answers."""
        command = [sys.executable, "-m", "kvferry", "registry", "--lease-s", str(lease_s), "--port", str(port)]
        environment = {**release.environment, **({} if secret is None else {"KVFERRY_SECRET": secret})}
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        said = re.search(r"http://127\.0\.0\.1:\d+", self._process.stdout.readline())
        if said is None:
            self.close()
            raise RuntimeError("the registry did not start")
        self.url = said[0]

    def close(self) -> None:
        """Ends it."""
        self._process.terminate()
        self._process.communicate(timeout=_END_S)

    def __enter__(self) -> RegistryHost:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
