"""A site of several hosts: a registry, two prefill and two decode engines, each on a host of its own, with a secret.

Every rank listens on all of its host's addresses, and is told no other than the registry's: what it is reached by, and
through which interface its bytes go, it finds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.caches import Shape
from tests.support.hosts import Host, Network
from tests.support.processes import Rank, RankProcess
from tests.support.victims import MODEL, POOL_PAGES, SETTINGS, TIMES, Engine, Rooms

from kvferry import RankCoordinates
from kvferry.hosts import bracketed

CONTROL_PORT = 7000
OBSERVE_PORT = 9470
REGISTRY_PORT = 8998
SECRET = "a secret of all hosts"

PATHS = {"prefill-a": "direct", "decode-a": "direct"}
"""Of engines that were told one. Of others no end is proved on another host, and all that they exchange is staged."""


@dataclass(frozen=True, slots=True)
class Looked:
    """What a command has said.

    Attributes:
        code: its exit code.
        text: in one line.
    """

    code: int
    text: str


class Place:
    """A network with a registry on a host, and processes on others.

    Attributes:
        network: between the hosts.
        registry: where the registry runs.
    """

    def __init__(self, network: Network, address: Callable[[int], str], *, nowhere: bool = False) -> None:
        """Starts the registry.

        Args:
            network: without hosts.
            address: of the host of that number.
            nowhere: whether every other host has a second interface, which leads nowhere.
        """
        self.network = network
        self._address, self._nowhere = address, nowhere
        self._tools: dict[tuple[Host, tuple[tuple[str, str], ...]], RankProcess] = {}
        self._processes: list[RankProcess] = []
        self.registry = network.host("registry", address(1))
        self._is_v6 = ":" in self.registry.address
        self.anywhere = "::" if self._is_v6 else "0.0.0.0"
        self.registry_url = f"http://{bracketed(self.registry.address)}:{REGISTRY_PORT}"
        self._registry = subprocess.Popen(
            [*self.registry.inside, sys.executable, "-m", "kvferry", "registry"],
            env={
                **os.environ,
                "KVFERRY_REGISTRY_HOST": self.anywhere,
                "KVFERRY_REGISTRY_PORT": str(REGISTRY_PORT),
                "KVFERRY_REGISTRY_LEASE_S": str(TIMES["registry_lease_s"]),
                "KVFERRY_SECRET": SECRET,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._registry.stdout is not None
        assert "answers at" in self._registry.stdout.readline()

    def host(self, name: str, number: int) -> Host:
        """Starts a host of that number."""
        nowhere = {"eth1": f"10.66.0.{number}"} if self._nowhere else None
        return self.network.host(name, self._address(number), nowhere=nowhere)

    def process(self, host: Host, variables: Mapping[str, str] | None = None) -> RankProcess:
        """Starts a process on a host, with the variables that ranks and commands have there.

        Args:
            variables: more of them.
        """
        environment = {
            "KVFERRY_HOST": self.anywhere,
            "KVFERRY_OBSERVE_HOST": self.anywhere,
            "KVFERRY_REGISTRY_URL": self.registry_url,
            "KVFERRY_SECRET": SECRET,
            **(variables or {}),
        }
        self._processes.append(RankProcess(environment=environment, host=host))
        return self._processes[-1]

    def kvferry(self, host: Host, *arguments: str, variables: Mapping[str, str] | None = None) -> Looked:
        """Runs a command on a host, where a rank with these variables would."""
        key = host, tuple(sorted((variables or {}).items()))
        if key not in self._tools:
            self._tools[key] = self.process(host, variables)
        code, text = self._tools[key].do(Rank.command, *arguments)
        return Looked(code, " ".join(text.split()))

    def doctor(
        self, host: Host, peer: Host | None = None, *, variables: Mapping[str, str] | None = None
    ) -> list[dict[str, str]]:
        """What the doctor finds on a host, of another one if that is given: nothing moves."""
        to = ["--peer", peer.address] if peer is not None else []
        found = self.kvferry(host, "doctor", "--json", "--no-wire", *to, variables=variables)
        findings: list[dict[str, str]] = json.loads(found.text)["findings"]
        return findings

    def top(self, here: Host, *hosts: Host) -> str:
        """What `kvferry top` shows on a host of the endpoints of some, in one line."""
        addresses = [f"{bracketed(each.address)}:{OBSERVE_PORT}" for each in hosts]
        return self.kvferry(here, "top", "--once", *addresses).text

    def close(self) -> None:
        """Ends the registry, and all processes on hosts with the hosts."""
        self._registry.kill()  # what it has entered the host with; the registry itself ends with the host
        self._registry.wait()
        assert self._registry.stdout is not None
        self._registry.stdout.close()
        for process in self._processes:
            process.kill()


def about(findings: list[dict[str, str]], subject: str, *, severity: str | None = None) -> str:
    """What findings say of a subject, with their remedies."""
    return " | ".join(
        f"{each['severity']}: {each['what']} -> {each['remedy']}"
        for each in findings
        if each["about"] == subject and severity in (None, each["severity"])
    )


class Site(Rooms):
    """Four engines of one rank, each on its host.

    Attributes:
        place: where they are.
        hosts: of the engines, by name.
    """

    def __init__(self, place: Place) -> None:
        """Starts them, and runs a room between each two."""
        super().__init__("staged")
        self.place = place
        self.hosts: dict[str, Host] = {}
        names = ("prefill-a", "prefill-b", "decode-a", "decode-b")
        for number, name in enumerate(names, start=2):
            self.hosts[name] = place.host(name, number)
        self.struck_prefill, self.other_prefill, self.struck_decode, self.other_decode = (
            self.start(name, self.hosts[name]) for name in names
        )
        self.served()

    def start(self, name: str, host: Host) -> Engine:
        """Starts an engine on a host."""
        engine = Engine(name, self.place.process(host), is_prefill=name.startswith("prefill"))
        self.begin_anew(engine)
        return engine

    def begin_anew(self, engine: Engine) -> None:
        settings: dict[str, Any] = SETTINGS["staged"] | TIMES | {"path": PATHS.get(engine.name, "auto")}
        settings |= {"observe_port": OBSERVE_PORT}
        what = MODEL, Shape(pages=POOL_PAGES), RankCoordinates(), engine.name, settings
        if engine.is_prefill:
            settings |= {"control_port": CONTROL_PORT, "workers": 2, "queues": 1, "nixl_threads": 1}
            engine.do(Rank.start_prefill, *what)
        else:
            engine.do(Rank.start_decode, *what)

    def host(self, engine: Engine) -> Host:
        """Where an engine runs."""
        return self.hosts[engine.name]


@contextmanager
def place(address: Callable[[int], str], *, nowhere: bool = False) -> Iterator[Place]:
    """A place with a network of its own, until the end.

    Args:
        address: of the host of that number.
        nowhere: whether hosts have a second interface, which leads nowhere.
    """
    with Network() as network:
        made = Place(network, address, nowhere=nowhere)
        try:
            yield made
        finally:
            made.close()


def v4(number: int) -> str:
    """The address of a host, of a private network."""
    return f"10.77.0.{number}"


def v6(number: int) -> str:
    """The same, of IPv6."""
    return f"fd00:77::{number}"
