"""Which answers of the Kubernetes API prove an end, and which only look like it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvferry.protocol.links.proofs import KnownPods, NodeObject, PodObject, why_ended
from kvferry.protocol.wire.field_types import PodIdentity

POD = PodIdentity(uid="u-1", name="prefill-0", namespace="serving", container="3f2a")

RUNNING = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
ENDED = {"terminated": {"exitCode": 137, "reason": "Error"}}


def pod(*, uid: str = "u-1", phase: str = "Running", node: str | None = "n-1", **status: Any) -> PodObject:
    """A pod with one container, as the API sends it."""
    spec: dict[str, Any] = {"containers": [{"name": "engine", "image": "i"}], "restartPolicy": "Always"}
    if node is not None:
        spec["nodeName"] = node
    found = {"kind": "Pod", "metadata": {"name": "prefill-0", "uid": uid, "labels": {}}, "spec": spec}
    return msgspec.convert({**found, "status": {"phase": phase, **status}}, PodObject)


def container(state: dict[str, Any], last: dict[str, Any] | None = None, name: str = "engine") -> dict[str, Any]:
    return {"name": name, "state": state, "lastState": last or {}, "ready": False, "restartCount": 1}


def node(*taints: str, ready: str = "Unknown") -> tuple[str, NodeObject]:
    found = {
        "metadata": {"name": "n-1", "uid": "n-u"},
        "spec": {"taints": [{"key": key, "effect": "NoExecute"} for key in taints]} if taints else {},
        "status": {"conditions": [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": ready}]},
    }
    return "n-1", msgspec.convert(found, NodeObject)


def message(text: str) -> dict[str, Any]:
    return {"terminated": {"exitCode": 139, "reason": "Error", "message": text}}


PROVED = {
    "the kubelet has seen every container end": (pod(phase="Failed", containerStatuses=[container(ENDED)]), None),
    "and every one succeed": (pod(phase="Succeeded", containerStatuses=[container(ENDED)]), None),
    "its own start of the container has ended, and the next runs": (
        pod(containerStatuses=[container(RUNNING, message("kvferry container 3f2a\nCUDA error\n"))]),
        node(ready="True"),
    ),
    "its own start has ended, and waits for the next": (
        pod(containerStatuses=[container(message("kvferry container 3f2a\n"))]),
        None,
    ),
    "its node does not exist any more, nor does its object": (None, ("n-1", None)),
    "its node does not exist any more": (pod(containerStatuses=[container(RUNNING)]), ("n-1", None)),
    "its node is out of service, and it was deleted by force": (
        None,
        node("node.kubernetes.io/unreachable", "node.kubernetes.io/out-of-service"),
    ),
}

UNPROVED = {
    "it runs": (pod(containerStatuses=[container(RUNNING)]), node(ready="True")),
    "it was deleted by force, and its node cannot be reached": (None, node("node.kubernetes.io/unreachable")),
    "it was deleted, and its node is well": (None, node(ready="True")),
    "it was deleted, and nobody saw where it ran": (None, None),
    "another pod has its name": (
        pod(uid="u-2", phase="Failed", containerStatuses=[container(ENDED)]),
        node(ready="True"),
    ),
    "a controller says that it has failed, the kubelet does not": (
        pod(phase="Failed", containerStatuses=[container(RUNNING)]),
        node(),
    ),
    "it has failed, and the kubelet says nothing of its containers": (pod(phase="Failed"), node()),
    "one of its containers runs on": (
        pod(
            phase="Failed",
            containerStatuses=[container(ENDED)],
            ephemeralContainerStatuses=[container(RUNNING, name="debugger")],
        ),
        None,
    ),
    "the kubelet has lost sight of its container": (
        pod(phase="Failed", containerStatuses=[container({"terminated": {"reason": "ContainerStatusUnknown"}})]),
        None,
    ),
    "an earlier start of its container has ended": (
        pod(containerStatuses=[container(RUNNING, message("kvferry container 0000\n"))]),
        None,
    ),
    "its container has ended, and the pod is to start it again": (pod(containerStatuses=[container(ENDED)]), None),
    "its node is out of service, and reports all the same": (
        pod(containerStatuses=[container(RUNNING)]),
        node("node.kubernetes.io/out-of-service", ready="True"),
    ),
}


def proof(found: PodObject | None, node: tuple[str, NodeObject | None] | None) -> str:
    return why_ended(POD, found, *(node or (None, None)))


@pytest.mark.parametrize("case", PROVED)
def test_it_has_ended(case: str):
    assert proof(*PROVED[case])


@pytest.mark.parametrize("case", UNPROVED)
def test_it_may_run(case: str):
    assert not proof(*UNPROVED[case])


def test_without_a_word_in_its_message_no_start_is_known_from_another():
    status = [container(RUNNING, message("CUDA error"))]
    assert not why_ended(msgspec.structs.replace(POD, container=""), pod(containerStatuses=status), None, None)


def test_a_node_counts_only_once_the_api_has_put_the_pod_there():
    known = KnownPods()
    assert known.node_of(POD, None) is None
    assert known.node_of(POD, pod(uid="u-2")) is None
    assert known.node_of(POD, pod(node=None)) is None
    assert known.node_of(POD, pod()) == "n-1"
    assert known.node_of(POD, None) == "n-1"
