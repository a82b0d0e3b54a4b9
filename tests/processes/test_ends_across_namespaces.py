"""A prefill rank in a namespace of process numbers of its own is killed hard: what is kept, and what frees it.

So it is between containers: no process here has a number there, and nobody here can look.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.caches import Model, Shape, pool
from tests.support.containers import OWN, Container, container
from tests.support.engines import new_engine_name
from tests.support.kubernetes import KubernetesApi
from tests.support.real_transport import skip_unless_installed
from tests.support.waiting import PATIENCE_S, eventually

from kvferry import DecodeEndpoint, RankCoordinates, Receiver, Settings
from kvferry.control.registry_client import RegistryClient
from kvferry.control.registry_server import RegistryServer
from kvferry.observe.status import LostPeerStatus
from kvferry.testing.probe import probe

skip_unless_installed()

PAGES = 4
TIMES = {"heartbeat_interval_s": 0.1, "peer_timeout_s": 2.5, "quarantine_s": 0.2, "registry_lease_s": 1.0}
"""A busy machine must not have a living rank taken for lost: it would come back, and say that it has ended."""


class Scene:
    """A decode rank here, and a prefill rank in a container that has crashed with a room half-way."""

    def __init__(self, api: KubernetesApi, registry: RegistryServer, scratch: Path, **settings: Any) -> None:
        (scratch / "token").write_text(api.token)
        api.run("prefill-0", uid="uid-0")
        self.api = api
        self.log = scratch / "termination-log"
        self.registry_url = registry.url
        self._settings = {"registry_url": registry.url, **TIMES, **settings}
        self.pod: dict[str, Any] = {
            "pod_uid": "uid-0",
            "pod_name": "prefill-0",
            "pod_namespace": "serving",
            "pod_termination_log": self.log,
        }
        self.engine = ""
        self.namespaces: list[int] = []
        decodes = {"end_proofs": "process,rank,kubernetes,operator", "kubernetes_url": api.url, "close_timeout_s": 0.5}
        self._memory = pool(Model(), Shape(), RankCoordinates())  # it must outlive the endpoint
        self.decode = DecodeEndpoint(
            self._memory.layout,
            settings=Settings(**self._settings, **decodes, kubernetes_token_file=scratch / "token"),
        )

    def contained(self, begin: Sequence[str] = OWN, **pod: Any) -> AbstractContextManager[Container]:
        """Runs a prefill rank of an engine of its own."""
        self.engine = new_engine_name("contained")
        return container(self.engine, {**self._settings, **pod}, begin)

    def crash(self, begin: Sequence[str] = OWN, **pod: Any) -> Receiver:
        """Starts the prefill rank, and kills it with a room half-way; returns the room once the rank is lost."""
        with self.contained(begin, **pod) as prefill:
            # As long as it is open no other namespace gets its number, which would prove that this one is gone.
            self.namespaces.append(os.open(f"/proc/{prefill.inside}/ns/pid", os.O_RDONLY))
            receiver = self.decode.open(1, np.arange(PAGES), engine=self.engine)
            assert prefill.say("1") == "1"
            prefill.kill()
        eventually("the rank is lost", lambda: receiver.state.is_final)
        return receiver

    @property
    def lost(self) -> LostPeerStatus:
        (lost,) = self.decode.status().quarantine
        return lost


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    with KubernetesApi() as api, RegistryServer(port=0, lease_s=1.0) as registry:
        made: list[Scene] = []

        def make(**settings: Any) -> Scene:
            made.append(Scene(api, registry, tmp_path, **settings))
            return made[-1]

        yield make
        for each in made:
            each.decode.close()
            for namespace in each.namespaces:
                os.close(namespace)


def counted_rounds(scene: Scene) -> Callable[[], int]:
    """Counts how often the registry is asked whom operators have released: once in every round of asking."""
    client, asked = probe(scene.decode).registry, itertools.count()
    right, rounds = client.released, [0]

    def released() -> tuple[str, ...]:
        rounds[0] = next(asked) + 1
        return right()

    client.released = released  # type: ignore[method-assign]
    return lambda: rounds[0]


def operator(scene: Scene) -> None:
    scene.decode.release(scene.lost.endpoint)


def operator_at_the_registry(scene: Scene) -> None:
    deadline = time.monotonic() + PATIENCE_S
    with RegistryClient(scene.registry_url) as client:
        while any(engine.registrations for engine in client.engines()):
            assert time.monotonic() < deadline, "the lease of a dead rank runs out"
            time.sleep(0.05)
        client.release(scene.lost.endpoint)


def kubelet(scene: Scene) -> None:
    scene.api.end("prefill-0")


def restart_in_place(scene: Scene) -> None:
    scene.api.restart("prefill-0", scene.log.read_text())


def lost_node(scene: Scene) -> None:
    scene.api.pods.clear()
    scene.api.nodes.clear()


@pytest.mark.parametrize(
    "prove",
    [
        kubelet,
        *(
            pytest.param(each, marks=pytest.mark.full)  # tests/unit/endpoint/test_ends.py has them in one process
            for each in (operator, operator_at_the_registry, restart_in_place, lost_node)
        ),
    ],
)
def test_pages_are_kept_until_the_end_is_proved(scene: Callable[..., Scene], prove: Callable[[Scene], None]):
    its = scene(path="direct")
    receiver = its.crash(**its.pod)
    assert (its.lost.pages, its.lost.proof) == (PAGES, "")
    assert [each.split()[0] for each in its.lost.frees] == ["the", "a", "an"], its.lost.frees
    asked = len(its.api.asked)
    eventually("everybody was asked in vain", lambda: len(its.api.asked) > asked + 4)
    assert not receiver.pages_reusable
    prove(its)
    eventually("the pages come back", lambda: receiver.pages_reusable)
    eventually("nothing is in quarantine", lambda: not its.decode.status().quarantine)


@pytest.mark.full
def test_staged_pages_come_back_at_once_and_the_ring_by_proof(scene: Callable[..., Scene]):
    its = scene(path="staged", staging_ring_mib=0.25, staging_chunk_mib=0.125)
    receiver = its.crash(**its.pod)
    assert receiver.pages_reusable
    assert (its.lost.pages, its.lost.ring_bytes) == (0, 2**18)
    kubelet(its)
    eventually("nothing is in quarantine", lambda: not its.decode.status().quarantine)


@pytest.mark.full
def test_a_rank_beside_it_proves_its_end(scene: Callable[..., Scene]):
    its = scene(path="direct")
    with its.contained() as beside:
        its.decode.connect(its.engine)
        enter = ("nsenter", "--pid", "--mount", f"--target={beside.inside}")
        receiver = its.crash(enter)
        eventually("the pages come back", lambda: receiver.pages_reusable)
        assert not its.api.asked
    eventually("nothing is in quarantine", lambda: not its.decode.status().quarantine)


@pytest.mark.full
def test_nothing_proves_the_end_of_a_rank_in_no_pod_but_an_operator(scene: Callable[..., Scene]):
    its = scene(path="direct")
    receiver = its.crash()
    assert its.lost.pages == PAGES
    with its.contained() as elsewhere:
        its.decode.connect(its.engine)  # it is in another namespace: what it does not see proves nothing
        assert elsewhere.process.poll() is None
        rounds = counted_rounds(its)
        eventually("everybody was asked in vain", lambda: rounds() >= 5)
        assert not receiver.pages_reusable
        assert not its.api.asked
        operator(its)
        eventually("the pages come back", lambda: receiver.pages_reusable)


def test_this_machine_proves_the_end_of_a_rank_beside_us(scene: Callable[..., Scene]):
    its = scene(path="direct")
    receiver = its.crash(())
    eventually("the pages come back", lambda: receiver.pages_reusable)
    eventually("nothing is in quarantine", lambda: not its.decode.status().quarantine)
