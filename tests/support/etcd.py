"""Real etcd, for tests: members on loopback, each a process that can be killed, frozen and started again."""

from __future__ import annotations

import base64
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.clones import ROOT
from tests.support.ports import free_ports_in_a_row
from tests.support.waiting import eventually

_FILLER = "filler-"
UNPACKED = ROOT / ".etcd/usr/bin/etcd"
"""Where `make environments` puts Debian's."""


def program() -> str:
    """Returns where etcd is; skips the test if it is nowhere."""
    found = str(UNPACKED) if UNPACKED.exists() else shutil.which("etcd")
    if found is None:
        pytest.skip("there is no etcd here: `make environments` gets Debian's, or install it so that it is on the PATH")
    return found


class Member:
    """A process.

    Attributes:
        address: host and port for clients.
        number: which member it is.
    """

    def __init__(self, number: int, address: str, arguments: Sequence[str], log: Path) -> None:
        self.address = address
        self.number = number
        self._arguments = arguments
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it, with the data that it had."""
        assert self._process is None or self._process.poll() is not None, "it runs: nobody would end the first"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._arguments, stdout=log, stderr=log)

    def kill(self) -> None:
        """Ends it at once. May be called again."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def freeze(self) -> None:
        """Stops it: connections stay, and nobody answers, as when a network drops packets."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets it go on."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)


class EtcdCluster:
    """Members that know each other.

    Args:
        folder: for their data.
        size: how many there are.
        arguments: of each, in addition.
        scheme: https if the arguments make them speak TLS.
        verify: what vouches for their certificates then.

    Attributes:
        members: the processes.
    """

    def __init__(self, folder: Path, size: int = 1, *arguments: str, scheme: str = "http", verify: Any = True) -> None:
        etcd, first = program(), free_ports_in_a_row(2 * size)
        peers = [f"http://127.0.0.1:{first + size + number}" for number in range(size)]
        cluster = ",".join(f"m{number}={peer}" for number, peer in enumerate(peers))
        beat_ms = 100 if size > 1 else 30  # a lease lasts at least as long as an election and a half
        self._scheme = scheme
        self._http = httpx.Client(trust_env=False, verify=verify, timeout=5.0)
        self.members = []
        for number, peer in enumerate(peers):
            client = f"{scheme}://127.0.0.1:{first + number}"
            given = {
                "name": f"m{number}",
                "data-dir": folder / f"m{number}",
                "listen-client-urls": client,
                "advertise-client-urls": client,
                "listen-peer-urls": peer,
                "initial-advertise-peer-urls": peer,
                "initial-cluster": cluster,
                "heartbeat-interval": beat_ms,
                "election-timeout": 10 * beat_ms,
                "log-level": "error",
            }
            command = [etcd, *(f"--{name}={value}" for name, value in given.items()), *arguments]
            member = Member(number, f"127.0.0.1:{first + number}", command, folder / f"m{number}.log")
            self.members.append(member)

    @property
    def url(self) -> str:
        """All of them, as a registry's address."""
        scheme = "etcds" if self._scheme == "https" else "etcd"
        return f"{scheme}://{','.join(member.address for member in self.members)}"

    def start(self) -> None:
        """Starts all members, and waits until they have a leader."""
        for member in self.members:
            member.start()
        eventually("the cluster has a leader", lambda: self.has_leader())

    def ask(self, path: str, body: dict[str, Any], member: int = 0, headers: dict[str, str] | None = None) -> Any:
        """Asks a member's gateway."""
        url = f"{self._scheme}://{self.members[member].address}/v3/{path}"
        answer = self._http.post(url, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def has_leader(self, member: int = 0) -> bool:
        """Whether a member would answer a question that all must agree about."""
        try:
            self.ask("kv/range", {"key": "AA=="}, member)
        except (httpx.HTTPError, AssertionError) as error:
            return "user name is empty" in str(error)  # it has, and asks who we are
        return True

    @property
    def leader(self) -> Member:
        """The member that leads, as those that answer see it."""
        for member in self.members:
            try:
                status = self.ask("maintenance/status", {}, member.number)
            except httpx.HTTPError:
                continue
            if status.get("leader") == status["header"]["member_id"]:
                return member
        raise AssertionError("nobody leads")

    def leases(self) -> list[int]:
        """The leases that exist."""
        return [int(each["ID"]) for each in self.ask("lease/leases", {}).get("leases", ())]

    def make_room(self) -> None:
        """Undoes `fill`, as docs/etcd.md says."""
        self.ask("kv/deleterange", {"key": _encoded(_FILLER), "range_end": _encoded(_FILLER + "~")})
        revision = int(self.ask("kv/range", {"key": "AA=="})["header"]["revision"])
        self.ask("kv/compaction", {"revision": revision, "physical": True})
        for member in self.members:
            self.ask("maintenance/defragment", {}, member.number)
        for alarm in self.ask("maintenance/alarm", {"action": "GET"})["alarms"]:
            self.ask("maintenance/alarm", {"action": "DEACTIVATE", **alarm})

    def close(self) -> None:
        """Ends all members."""
        self._http.close()
        for member in self.members:
            member.kill()

    def __enter__(self) -> EtcdCluster:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def fill(cluster: EtcdCluster) -> None:
    """Writes until there is no space left."""

    def write(number: int) -> None:
        cluster.ask("kv/put", {"key": _encoded(f"{_FILLER}{number}"), "value": "A" * 100_000})

    with pytest.raises(AssertionError, match="database space exceeded"):
        list(map(write, range(200)))


def require_passwords(cluster: EtcdCluster, *, user: str, password: str, prefix: str) -> None:
    """Has a cluster let in only root and one user, and that one only to keys that begin with a prefix."""
    first, end = _encoded(f"{prefix}/"), _encoded(f"{prefix}0")
    for path, body in (
        ("user/add", {"name": "root", "password": "the password of root"}),
        ("role/add", {"name": "root"}),
        ("user/grant", {"user": "root", "role": "root"}),
        ("user/add", {"name": user, "password": password}),
        ("role/add", {"name": "keys"}),
        ("role/grant", {"name": "keys", "perm": {"permType": "READWRITE", "key": first, "range_end": end}}),
        ("user/grant", {"user": user, "role": "keys"}),
        ("enable", {}),
    ):
        cluster.ask(f"auth/{path}", body)


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
