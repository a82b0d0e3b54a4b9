"""The manifests' containers, started as they stand there, in namespaces: the registry, the gateway, and ranks.

Engines have stand-ins here, in the engines' pods and with their environment: real ones are started as they stand by
`tests/real_engines/*/test_kubernetes.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.clones import ROOT
from tests.support.manifests import Pod, pods, rendered
from tests.support.pods import RunningPods, image_of_this_environment, running
from tests.support.real_transport import skip_unless_installed
from tests.support.stand_in_engine import ARRIVED

from kvferry.settings import Settings

skip_unless_installed()

pytestmark = pytest.mark.full

SECRET = "a secret of at least sixteen characters"
READY_S = 240.0
GATEWAY, REGISTRY = "gateway-5c7d9f6b8-00000", "registry-5c7d9f6b8-00000"
TRANSPORT = {"KVFERRY_TRANSPORT": Settings().transport}


def image() -> dict[str, str]:
    return image_of_this_environment(ROOT / "src", ROOT) | TRANSPORT


def stand_in(pod: Pod, rank: int = 0) -> list[str]:
    """What runs in an engine's pod instead of the engine."""
    side = pod.labels["app.kubernetes.io/component"]
    return [sys.executable, "-m", "tests.support.stand_in_engine", side, pod.name, str(rank)]


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPods]:
    manifests, scratch = rendered("vllm"), tmp_path_factory.mktemp("pods")
    with running(manifests, scratch, image(), {"kvferry": {"secret": SECRET}}) as all_of_them:
        for pod in pods(manifests):
            all_of_them.start(pod, stand_in(pod) if pod.workload["kind"] == "StatefulSet" else ())
        for started in all_of_them.running.values():
            started.wait_ready(READY_S)
        yield all_of_them


def _answers(deployed: RunningPods, url: str) -> bool:
    curl = [*deployed.node.enter, "curl", "--silent", "--fail", "--output", os.devnull, url]
    return subprocess.run(curl, check=False).returncode == 0


def ask(deployed: RunningPods) -> Any:
    return json.loads(deployed.ask("gateway", "/v1/completions", json.dumps({"model": "m", "prompt": "w1"})))


def test_a_request_goes_through_the_gateway_and_its_cache_from_pod_to_pod(deployed: RunningPods):
    assert ask(deployed)["choices"][0]["text"] == ARRIVED


def test_pods_connect_only_as_the_network_policies_allow(deployed: RunningPods):
    ask(deployed)
    flows = deployed.flows()
    assert {(source.partition("-")[0], target.partition("-")[0]) for source, target, _ in flows} >= {
        ("decode", "prefill"),
        ("prefill", "decode"),
        ("decode", "registry"),
        ("gateway", "registry"),
    }
    assert (GATEWAY, "decode-0", 9470) in flows
    assert ("decode-0", "prefill-0", 9440) in flows
    assert deployed.closed_flows() == set()


def test_a_stranger_reaches_a_registry_that_answers_and_says_nothing(deployed: RunningPods):
    url = f"http://{deployed.places[REGISTRY].address}:8998/v1/engines"
    curl = [*deployed.node.enter, "curl", "--silent", "--output", os.devnull, "--write-out", "%{http_code}", url]
    assert subprocess.run(curl, capture_output=True, text=True, check=True).stdout == "401"


def test_a_pod_says_which_start_of_its_container_it_is(deployed: RunningPods):
    said = (deployed.running["prefill-0"].scratch / "termination-log").read_text()
    assert said.startswith("kvferry container ")


def test_every_container_ends_in_time_and_the_gateway_is_live_without_servers(deployed: RunningPods):
    gateway = deployed.running[GATEWAY]
    assert gateway.probe("readinessProbe") == ""
    deployed.terminate("prefill-0", "decode-0")
    gateway.wait_until("it is not ready any more", lambda: "503" in gateway.probe("readinessProbe"))
    curl = [*deployed.node.enter, "curl", "--silent", f"http://{deployed.places[GATEWAY].address}:8080/health"]
    shown = json.loads(subprocess.run(curl, capture_output=True, text=True, check=True).stdout)
    assert [server["is_draining"] for side in ("prefill", "decode") for server in shown[side]] == [True, True]
    assert gateway.probe("livenessProbe") == ""
    deployed.terminate(GATEWAY, REGISTRY)
    ends = {name: pod.process.returncode for name, pod in deployed.running.items()}
    assert set(ends.values()) == {0}, f"{ends}\n{deployed.said()}"


def test_probes_of_a_pod_with_two_ranks_ask_both(tmp_path: Path):
    """Of a prefill pod whose second rank is not there, then is, as it stands with `components/tensor-parallel-2`."""
    manifests = rendered("vllm", "tensor-parallel-2")
    pod = next(each for each in pods(manifests) if each.name == "prefill-0")
    registry = next(each for each in pods(manifests) if each.name == REGISTRY)
    with running(manifests, tmp_path, image(), {"kvferry": {"secret": SECRET}}) as deployed:
        deployed.start(registry)
        prefill = deployed.start(pod, stand_in(pod))
        first = f"http://{prefill.place.address}:9470/readyz"
        prefill.wait_until("rank 0 is ready", lambda: _answers(deployed, first))
        for name in ("livenessProbe", "readinessProbe"):
            assert prefill.probe(name) != "", f"{name}: rank 1 is missing"
        with prefill.started_beside(*stand_in(pod, rank=1)):
            for name in ("livenessProbe", "readinessProbe"):
                prefill.wait_until(f"{name} succeeds", lambda name=name: prefill.probe(name) == "")  # type: ignore[misc]
            assert deployed.listening("prefill-0") >= {9440, 9441, 9470, 9471}
        prefill.wait_until("it is not live any more", lambda: prefill.probe("livenessProbe") != "")
