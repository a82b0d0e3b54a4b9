"""What proves that a prefill rank's process has ended, and the ranks that were lost and of which no proof has come.

An end is proved, never inferred: silence, a broken connection, a lease that ran out and an object that is missing prove
nothing. The settings declare which sources count (KVFERRY_END_PROOFS); this module knows what each needs.

A rank that is lost may be alive, frozen or dead, and may still write. Only three things prove that it will not write
again: its own message, a new connection to it, or the end of its process, once what the network still had of it has had
time to arrive.

Of what the Kubernetes API says, a pod's object is a record that others keep, not the pod. It is proof where the kubelet
has written into it what it saw: that a container has terminated. It is none where it is missing: an object that was
deleted by force is gone at once, and its containers may run on for as long as their node cannot be reached. Then only
the node can prove their end: its object is gone, too, or somebody has declared it out of service. Phases and conditions
are no proof, since controllers write them for nodes that they have lost. The types at the end are the parts of the
API's objects that matter, named as they are there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum

import msgspec

from kvferry.protocol.bounded import forget_oldest
from kvferry.protocol.time_awake import TimeAwake
from kvferry.protocol.wire.field_types import PodIdentity, ProcessIdentity


class Proof(str, Enum):
    """A source of proof that a process has ended."""

    PROCESS = "process"
    """This machine's own table of processes, for one in the same namespace of process numbers."""

    RANK = "rank"
    """A prefill rank in the process's namespace, which looks there."""

    KUBERNETES = "kubernetes"
    """The Kubernetes API, for a process in a pod."""

    OPERATOR = "operator"
    """A person, or a program of theirs: `kvferry release`."""


@dataclass(frozen=True, slots=True)
class Reach:
    """What can be proved from here.

    Attributes:
        declared: the sources that the settings declare.
        machine: of this process, as in `ProcessIdentity`.
    """

    declared: frozenset[Proof]
    machine: str

    def unattended(self, process: ProcessIdentity) -> frozenset[Proof]:
        """Returns the sources that can prove a process's end whatever else ends with it, and without a person.

        A rank beside it is none of them: it may end together with it, as all do whose container does.
        """
        found = {Proof.PROCESS} if process.machine == self.machine else set()
        if process.pod is not None:
            found.add(Proof.KUBERNETES)
        return self.declared & found

    def how(self, process: ProcessIdentity, endpoint: str) -> tuple[str, ...]:
        """Returns what would prove a process's end, in words, the likeliest first.

        Args:
            endpoint: the name of the prefill rank that it is.
        """
        near = self.unattended(process)
        ways = []
        if Proof.PROCESS in near:
            ways.append(f"the end of process {process.pid} on this machine")
        if Proof.KUBERNETES in near and process.pod is not None:
            ways.append(
                f"the Kubernetes API, once it says that pod {process.pod.namespace}/{process.pod.name} has ended"
            )
        if Proof.RANK in self.declared and Proof.PROCESS not in near:
            ways.append("a prefill rank in the same namespace of process numbers, if one connects")
        if Proof.OPERATOR in self.declared:
            ways.append(f"an operator's word: kvferry release {endpoint}")
        return tuple(ways) or (
            "nothing: no source counts here (KVFERRY_END_PROOFS), or the transport does not stop with its process",
        )


def parse_proofs(text: str) -> frozenset[Proof]:
    """Reads a list of sources, with commas between them; empty for none.

    Raises:
        ValueError: if there is no such source.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    return frozenset(Proof(name) for name in names)


def names_of(proofs: Collection[Proof]) -> str:
    """Returns sources as a list, with commas between them."""
    return ",".join(proof.value for proof in Proof if proof in proofs)


@dataclass(slots=True)
class LostRank:
    """A rank that was lost.

    Attributes:
        process: which process it is, or was.
        proof: what has proved that the process has ended; None as long as it may run.
    """

    process: ProcessIdentity
    since: float
    proof: Proof | None = None
    gone_for_s: float | None = None  # None until it was counted for the first time


class LostRanks:
    """The ranks that were lost, by their endpoints' names."""

    def __init__(self, *, settle_s: float) -> None:
        """Starts with no lost ranks.

        Args:
            settle_s: how long after a process has ended what it wrote may still arrive.
        """
        self._settle_s = settle_s
        self._lost: dict[str, LostRank] = {}
        self._awake = TimeAwake(settle_s)

    def __len__(self) -> int:
        return len(self._lost)

    def __contains__(self, endpoint: str) -> bool:
        return endpoint in self._lost

    def add(self, endpoint: str, process: ProcessIdentity, now: float) -> None:
        """Records that a rank is lost."""
        self._lost.setdefault(endpoint, LostRank(process, now))

    def discard(self, endpoint: str) -> None:
        """Forgets a rank that was found again, or can write to no memory of ours."""
        self._lost.pop(endpoint, None)

    def keep_only(self, at_stake: Collection[str]) -> None:
        """Forgets all ranks but those that may still write to memory of ours."""
        for endpoint in [endpoint for endpoint in self._lost if endpoint not in at_stake]:
            del self._lost[endpoint]

    @property
    def all(self) -> list[tuple[str, LostRank]]:
        """All of them, by their endpoints' names. May be read from another thread."""
        return list(self._lost.items())

    @property
    def doubtful(self) -> list[tuple[str, ProcessIdentity]]:
        """The ranks whose processes may still run."""
        return [(endpoint, lost.process) for endpoint, lost in self._lost.items() if lost.proof is None]

    def look(self, is_gone: Callable[[ProcessIdentity], bool], proof: Proof) -> None:
        """Records which of the ranks' processes have ended, by somebody who can tell."""
        for endpoint, process in self.doubtful:
            if is_gone(process):
                self.ended(endpoint, proof)

    def ended(self, endpoint: str, proof: Proof) -> None:
        """Records that a rank's process has ended, if the rank is lost and its process may run."""
        lost = self._lost.get(endpoint)
        if lost is not None and lost.proof is None:
            lost.proof = proof

    def take_settled(self, now: float) -> list[str]:
        """Returns and forgets the ranks that are proved not to write again. Must be called often.

        Of a long time between two calls only a part counts: this process was frozen or suspended, and what the network
        had for it did not arrive.
        """
        passed_s = self._awake.passed_s(now)
        for lost in self._lost.values():
            if lost.proof is not None:  # the time before this was found out does not count
                lost.gone_for_s = 0.0 if lost.gone_for_s is None else lost.gone_for_s + passed_s
        settled = [
            endpoint
            for endpoint, lost in self._lost.items()
            if lost.gone_for_s is not None and lost.gone_for_s >= self._settle_s
        ]
        for endpoint in settled:
            del self._lost[endpoint]
        return settled


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
