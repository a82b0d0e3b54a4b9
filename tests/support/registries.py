"""What tests of the registry share: ranks as they register, it as a process that ends, a client that is counted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from kvferry.control.registry import Grant
from kvferry.control.registry_client import RegistryClient
from kvferry.layout.parallel import RankCoordinates
from kvferry.protocol.wire.registrations import RankRegistration


def counted_registrations(client: RegistryClient) -> Callable[[], int]:
    """Counts what a client registers from now on, refused or not; returns how to ask for the number."""
    count = 0
    grant = client.grant

    def counted(registration: RankRegistration) -> Grant:
        nonlocal count
        count += 1
        return grant(registration)

    client.grant = counted  # type: ignore[method-assign]
    return lambda: count


class RegistryProcess:
    """The process.

    Attributes:
        url: where it answers; the same after every start.
    """

    def __init__(self, *, lease_s: float, secret: str | None = None) -> None:
        self._lease_s = lease_s
        self._variables = {} if secret is None else {"KVFERRY_SECRET": secret}
        self._port = 0
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "kvferry", "registry", "--port", str(self._port)]
        command += ["--lease-s", str(self._lease_s)]
        variables = os.environ | self._variables
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)
        assert self._process.stdout is not None
        said = re.search(r"http://127\.0\.0\.1:(\d+)", self._process.stdout.readline())
        assert said is not None, "the registry did not start"
        self.url, self._port = said[0], int(said[1])

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def kill(self) -> None:
        """Ends it at once. May be called again."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def restart(self) -> None:
        """Starts it again, without anything that it knew."""
        self._start()

    def freeze(self) -> None:
        """Stops it."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> RegistryProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


_IN_ORDER = ("first", "old", "older", "second", "new", "newer")
"""Starts, the earliest first."""


def rank(tp_rank: int = 0, tp_size: int = 2, incarnation: str = "first", **changes: Any) -> RankRegistration:
    """A rank of the engine "prefill", with whatever is changed of it."""
    fields = {
        "engine": "prefill",
        "incarnation": incarnation,
        "coordinates": RankCoordinates(tp_rank=tp_rank, tp_size=tp_size),
        "control_address": f"tcp://127.0.0.1:{40000 + tp_rank}",
        "layout_digest": "digest",
        "started_at": float(_IN_ORDER.index(incarnation)) if incarnation in _IN_ORDER else 0.0,
        "protocol_version": 1,
    }
    return RankRegistration(**{**fields, **changes})
