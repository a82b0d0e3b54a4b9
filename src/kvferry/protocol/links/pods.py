"""What the Kubernetes API says of a pod and its node, and which of it proves that a process has ended.

A pod's object is a record that others keep, not the pod. It is proof where the kubelet has written into it what it saw:
that a container has terminated. It is none where it is missing: an object that was deleted by force is gone at once,
and its containers may run on for as long as their node cannot be reached. Then only the node can prove their end: its
object is gone, too, or somebody has declared it out of service. Phases and conditions are no proof, since controllers
write them for nodes that they have lost.

The types are the parts of the API's objects that matter, named as they are there.
"""

from __future__ import annotations

import msgspec

from kvferry.protocol.bounded import forget_oldest
from kvferry.protocol.wire.field_types import PodIdentity

OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
"""The taint of a node that is shut down or fenced, as its operators say (Kubernetes, non-graceful node shutdown)."""

LOST_CONTAINER = "ContainerStatusUnknown"
"""The reason of a container whose end nobody saw: the kubelet did not find it, and assumes the worst."""

_FINAL = ("Succeeded", "Failed")
_MOST_KNOWN = 4096


class Terminated(msgspec.Struct, frozen=True):
    """How a container ended, as the kubelet saw it."""

    reason: str | None = None
    message: str | None = None


class ContainerState(msgspec.Struct, frozen=True):
    """A container's state; `terminated` is None while it waits or runs."""

    terminated: Terminated | None = None


class ContainerStatus(msgspec.Struct, frozen=True):
    """A container: how it is, and how its last start ended."""

    name: str
    state: ContainerState | None = None
    last_state: ContainerState | None = msgspec.field(name="lastState", default=None)


class PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    """What the kubelet reports of a pod, and controllers of its phase."""

    phase: str | None = None
    container_statuses: tuple[ContainerStatus, ...] | None = None
    init_container_statuses: tuple[ContainerStatus, ...] | None = None
    ephemeral_container_statuses: tuple[ContainerStatus, ...] | None = None

    @property
    def all(self) -> tuple[ContainerStatus, ...]:
        """Every container's status."""
        return (
            *(self.container_statuses or ()),
            *(self.init_container_statuses or ()),
            *(self.ephemeral_container_statuses or ()),
        )


class Named(msgspec.Struct, frozen=True):
    """Something with a name."""

    name: str


class Metadata(msgspec.Struct, frozen=True):
    """Which object it is."""

    name: str
    uid: str


class PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    """What a pod was to be, and where it was put."""

    containers: tuple[Named, ...]
    node_name: str | None = None


class PodObject(msgspec.Struct, frozen=True):
    """A pod."""

    metadata: Metadata
    spec: PodSpec
    status: PodStatus = PodStatus()


class Taint(msgspec.Struct, frozen=True):
    """Why pods should not run on a node."""

    key: str


class NodeSpec(msgspec.Struct, frozen=True):
    """What a node should be."""

    taints: tuple[Taint, ...] | None = None


class Condition(msgspec.Struct, frozen=True):
    """One thing that is said of a node."""

    type: str
    status: str


class NodeStatus(msgspec.Struct, frozen=True):
    """What is said of a node."""

    conditions: tuple[Condition, ...] | None = None


class NodeObject(msgspec.Struct, frozen=True):
    """A node."""

    metadata: Metadata
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()

    @property
    def is_ready(self) -> bool:
        """Whether its kubelet reports."""
        return any(each.type == "Ready" and each.status == "True" for each in self.status.conditions or ())


class KnownPods:
    """Where pods were seen to run: a node can prove the end of a pod only if the API itself has put the pod there."""

    def __init__(self) -> None:
        self._nodes: dict[str, str] = {}  # by the pod's UID

    def node_of(self, pod: PodIdentity, found: PodObject | None) -> str | None:
        """Takes what the API says of a pod. Returns the node that it was ever seen on: a pod never moves."""
        if found is not None and found.metadata.uid == pod.uid and found.spec.node_name:
            self._nodes[pod.uid] = found.spec.node_name
            forget_oldest(self._nodes, _MOST_KNOWN)
        return self._nodes.get(pod.uid)


def why_ended(pod: PodIdentity, found: PodObject | None, node_name: str | None, node: NodeObject | None) -> str:
    """Returns what proves that a process in a pod has ended, a sentence; empty if nothing does.

    Args:
        pod: the pod, and the start of its container.
        found: the object of the pod's name; None if there is none.
        node_name: the node that the pod was seen on; None if that is not known.
        node: its object; None if there is none.
    """
    if found is not None and found.metadata.uid == pod.uid:
        if found.status.phase in _FINAL and _all_terminated(found):
            return f"every container of pod {pod.namespace}/{pod.name} has terminated"
        if pod.container and any(_was(status, pod.container) for status in found.status.all):
            return f"its container in pod {pod.namespace}/{pod.name} has terminated"
    if node_name is None:
        return ""
    if node is None:
        return f"node {node_name} of pod {pod.namespace}/{pod.name} does not exist any more"
    is_out = any(taint.key == OUT_OF_SERVICE for taint in node.spec.taints or ())
    if is_out and not node.is_ready:
        return f"node {node_name} of pod {pod.namespace}/{pod.name} is out of service"
    return ""


def _all_terminated(found: PodObject) -> bool:
    reported = {status.name for status in found.status.container_statuses or ()}
    return {each.name for each in found.spec.containers} <= reported and all(
        status.state is not None
        and status.state.terminated is not None
        and status.state.terminated.reason != LOST_CONTAINER
        for status in found.status.all
    )


def _was(status: ContainerStatus, container: str) -> bool:
    """Whether the start of a container that has terminated is the one that left this word in its message."""
    return any(
        state is not None and state.terminated is not None and container in (state.terminated.message or "")
        for state in (status.state, status.last_state)
    )
