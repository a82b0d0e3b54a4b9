"""What a crashed prefill rank on another machine keeps from being used, who is told, and what frees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.caches import Model, Shape, pool
from tests.support.crashes import crash, prefill_elsewhere
from tests.support.engines import new_engine_name
from tests.support.kubernetes import KubernetesApi
from tests.support.tiers import Tier
from tests.support.waiting import eventually
from typer.testing import CliRunner

from kvferry import DecodeEndpoint, PrefillEndpoint, RankCoordinates, Receiver, TransferState
from kvferry.cli.app import app
from kvferry.errors import RegistrationRefusedError, UsageError
from kvferry.observe.status import LostPeerStatus
from kvferry.testing import FaultyTransport, LocalNetwork
from kvferry.testing.probe import probe

PAGES = 4
QUICK = {"heartbeat_interval_s": 0.05, "peer_timeout_s": 0.8, "quarantine_s": 0.0, "close_timeout_s": 0.2}
STAGED = {"path": "auto", "staging_ring_mib": 0.25, "staging_chunk_mib": 0.125, "staging_memory_mib": 0.75}


class Scene:
    """A decode rank, and prefill ranks elsewhere, one after the other, under one engine's name."""

    def __init__(self, network: LocalNetwork, **settings: Any) -> None:
        self.network = network
        self.engine = new_engine_name("prefill")
        self.settings = {"end_proofs": "process,operator", **settings}
        self.decode: DecodeEndpoint = network.decode(pool(Model(), Shape(), RankCoordinates()), **self.settings)
        self._rooms = 0

    def connected(self, **settings: Any) -> PrefillEndpoint:
        """Starts a prefill rank, and has a room open with it that nothing is sent in."""
        prefill = prefill_elsewhere(
            self.network, engine=self.engine, **{**self.settings, "peer_timeout_s": 5.0, **settings}
        )
        self.decode.connect(self.engine)
        return prefill

    def open(self) -> Receiver:
        """Opens a room of some pages on the decode side."""
        self._rooms += 1
        return self.decode.open(self._rooms, np.arange(PAGES), engine=self.engine)

    def struck(self, **settings: Any) -> Receiver:
        """Has a prefill rank crash that a room is open with; returns the room once the rank is lost."""
        prefill = self.connected(**settings)
        receiver = self.open()
        sender = prefill.open(receiver.room)
        eventually("both have it open", lambda: sender.state is TransferState.WAITING_FOR_INPUT)
        crash(prefill)
        eventually("the rank is lost", lambda: receiver.state.is_final)
        return receiver

    @property
    def lost(self) -> tuple[LostPeerStatus, ...]:
        return self.decode.status().quarantine


@pytest.fixture
def scene(registry_url: str) -> Iterator[Callable[..., Scene]]:
    with ExitStack() as made:

        def make(**settings: Any) -> Scene:
            return Scene(made.enter_context(LocalNetwork(registry_url)), **{**QUICK, **settings})

        yield make


def frees(scene: Scene, receiver: Receiver) -> None:
    """What was in quarantine comes back, and nothing is left of it."""
    eventually("the pages come back", lambda: receiver.pages_reusable)
    eventually("nothing is in quarantine", lambda: not scene.lost)
    assert scene.decode.status().quarantined_pages == 0


def test_what_is_in_quarantine_is_shown_with_what_would_free_it(scene: Callable[..., Scene]):
    its = scene()
    receiver = its.struck()
    (lost,) = its.lost
    assert (lost.pages, lost.ring_bytes, lost.proof) == (PAGES, 0, "")
    assert lost.frees == (f"an operator's word: kvferry release {lost.endpoint}",)
    assert not receiver.pages_reusable


def test_an_operators_word_frees_it(scene: Callable[..., Scene]):
    its = scene()
    receiver = its.struck()
    its.decode.release(its.lost[0].endpoint)
    frees(its, receiver)


def test_an_operators_word_at_the_registry_frees_it(scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch):
    its = scene()
    receiver = its.struck()
    monkeypatch.setenv("KVFERRY_REGISTRY_URL", its.network.registry_url)
    name = its.lost[0].endpoint
    said = CliRunner().invoke(app, ["release", name], input="n\n")
    assert said.exit_code == 1, "nothing is released without a yes"
    said = CliRunner().invoke(app, ["release", name], input="y\n")
    assert said.exit_code == 0, said.output
    assert f"{name} is released" in said.output
    frees(its, receiver)


def test_an_operators_word_does_not_count_where_it_is_not_declared(scene: Callable[..., Scene]):
    its = scene(end_proofs="process")
    its.struck()
    (lost,) = its.lost
    assert [each.partition(":")[0] for each in lost.frees] == ["nothing"]
    with pytest.raises(UsageError, match="KVFERRY_END_PROOFS"):
        its.decode.release(lost.endpoint)


def test_nobody_is_released_who_is_not_lost(scene: Callable[..., Scene]):
    its = scene()
    prefill = its.connected()
    name = prefill.transport.endpoint_name
    with pytest.raises(UsageError, match="lost are: none"):
        its.decode.release(name)
    with pytest.raises(RegistrationRefusedError, match="is registered"):
        probe(its.decode).registry.release(name)
    prefill.close()


# ---- Kubernetes ---------------------------------------------------------------------------------------------------


@pytest.fixture
def api() -> Iterator[KubernetesApi]:
    with KubernetesApi() as api:
        yield api


def in_a_pod(api: KubernetesApi, tmp_path: Path, name: str = "prefill-0", **more: Any) -> dict[str, Any]:
    """Settings of both sides where prefill ranks run in pods."""
    (tmp_path / "token").write_text(api.token)
    api.run(name, uid=f"uid of {name}")
    return {
        "end_proofs": "process,kubernetes",
        "kubernetes_url": api.url,
        "kubernetes_token_file": tmp_path / "token",
        "pod_uid": f"uid of {name}",
        "pod_name": name,
        "pod_namespace": "serving",
        **more,
    }


def asked_again(api: KubernetesApi) -> Callable[[], bool]:
    """Whether the API was asked a few times since."""
    before = len(api.asked)
    return lambda: len(api.asked) >= before + 6


def test_a_pod_that_has_ended_frees_it(scene: Callable[..., Scene], api: KubernetesApi, tmp_path: Path):
    its = scene(**in_a_pod(api, tmp_path))
    receiver = its.struck()
    assert its.lost[0].frees[0] == "the Kubernetes API, once it says that pod serving/prefill-0 has ended"
    eventually("the API was asked", asked_again(api))
    assert not receiver.pages_reusable, "the pod runs, as far as anybody knows"
    api.end("prefill-0")
    frees(its, receiver)


def test_the_next_start_of_its_container_frees_it(scene: Callable[..., Scene], api: KubernetesApi, tmp_path: Path):
    its = scene(**in_a_pod(api, tmp_path, pod_termination_log=tmp_path / "termination-log"))
    receiver = its.struck()
    api.restart("prefill-0", "kvferry container of an earlier start\n")
    eventually("the API was asked", asked_again(api))
    assert not receiver.pages_reusable, "that was another start of the container"
    api.restart("prefill-0", (tmp_path / "termination-log").read_text())
    frees(its, receiver)


def test_a_pod_deleted_by_force_frees_nothing_until_its_node_is_fenced(
    scene: Callable[..., Scene], api: KubernetesApi, tmp_path: Path
):
    its = scene(**in_a_pod(api, tmp_path))
    receiver = its.struck()
    eventually("the API was asked", asked_again(api))
    api.pods.clear()
    api.nodes["node-a"]["status"]["conditions"] = [{"type": "Ready", "status": "Unknown"}]
    eventually("the API was asked", asked_again(api))
    assert not receiver.pages_reusable, "nobody has seen the pod end"
    api.nodes["node-a"]["spec"] = {"taints": [{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}]}
    frees(its, receiver)


def test_an_api_that_cannot_be_asked_is_named(scene: Callable[..., Scene], api: KubernetesApi, tmp_path: Path):
    its = scene(**in_a_pod(api, tmp_path))
    api.token = "another"
    receiver = its.struck()
    eventually("why is shown", lambda: "401" in its.lost[0].problem)
    assert not receiver.pages_reusable
    api.token = "a token"
    api.end("prefill-0")
    frees(its, receiver)


def test_a_pod_that_cannot_be_asked_about_keeps_no_other_from_being_proved(
    scene: Callable[..., Scene], api: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    answer = api.answer

    def confined(path: str, authorization: str) -> tuple[int, bytes]:
        if "/namespaces/foreign/" in path:
            return 403, b'{"kind": "Status", "reason": "Forbidden"}'
        return answer(path, authorization)

    monkeypatch.setattr(api, "answer", confined)
    its = scene(**in_a_pod(api, tmp_path))
    its.struck(pod_namespace="foreign")
    its.engine = new_engine_name("prefill")
    its.struck()
    api.end("prefill-0")
    eventually("only the foreign one is left", lambda: ["status 403" in each.problem for each in its.lost] == [True])


# ---- the path that needs no proof -----------------------------------------------------------------------------------


def test_without_a_proof_in_reach_all_is_staged_and_pages_come_back_at_once(scene: Callable[..., Scene]):
    its = scene(**STAGED)
    receiver = its.struck()
    assert receiver.pages_reusable
    (lost,) = its.lost
    assert (lost.pages, lost.ring_bytes) == (0, 2**18), "what waits for the proof is the ring"


@pytest.mark.parametrize("settings", [{"unproven_path": "auto"}, {"path": "direct"}])
def test_settings_can_do_without_a_proof(scene: Callable[..., Scene], settings: dict[str, Any]):
    its = scene(**{**STAGED, **settings})
    receiver = its.struck()
    assert not receiver.pages_reusable
    assert its.lost[0].pages == PAGES


def test_a_proof_in_reach_leaves_the_choice_to_the_cost_model(
    scene: Callable[..., Scene], api: KubernetesApi, tmp_path: Path
):
    its = scene(**{**STAGED, **in_a_pod(api, tmp_path)})
    receiver = its.struck()
    assert not receiver.pages_reusable, "it might have written directly"
    api.end("prefill-0")
    frees(its, receiver)


def test_nothing_proves_an_end_where_the_transport_goes_on_without_its_process(
    scene: Callable[..., Scene], api: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    unfenced = replace(FaultyTransport.promises, fenced_by_death=False)
    monkeypatch.setattr(FaultyTransport, "promises", unfenced)
    its = scene(**{**STAGED, **in_a_pod(api, tmp_path)})
    receiver = its.struck()
    assert receiver.pages_reusable, "all was staged"
    (lost,) = its.lost
    assert [each.partition(":")[0] for each in lost.frees] == ["nothing"]
    assert not api.asked


# ---- capacity -------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("path", "proof"), [("direct", "operator"), ("staged", "kubernetes")])
def test_capacity_is_the_same_after_crashes(
    proof: str, path: str, scene: Callable[..., Scene], api: KubernetesApi, tmp_path: Path, tier: Tier
):
    """Staging memory is enough for two rings beside the one that is in use: it would not last for three crashes."""
    its = scene(**{**STAGED, "path": path, **in_a_pod(api, tmp_path), "end_proofs": proof})
    for number in range(tier.amount(quick=4, full=30, long=100)):
        name = f"prefill-{number}"
        api.run(name, uid=f"uid of {name}")
        receiver = its.struck(pod_name=name, pod_uid=f"uid of {name}")
        assert receiver.pages_reusable is (path == "staged")
        (lost,) = its.lost
        if path == "staged":
            assert lost.ring_bytes == 2**18
        api.end(name)
        if proof == "operator":
            its.decode.release(lost.endpoint)
        frees(its, receiver)
