"""What an orchestrator knows of the pods that processes of a simulated system run in: late, in part, and never wrong.

A process that does not answer may lose its object while it lives: somebody deletes the pod by force, or a controller
writes that it has failed. Once it has ended, its kubelet says so, or its node is declared out of service.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.protocol.links.proofs import (
    OUT_OF_SERVICE,
    Condition,
    ContainerState,
    ContainerStatus,
    Metadata,
    Named,
    NodeObject,
    NodeSpec,
    NodeStatus,
    PodObject,
    PodSpec,
    PodStatus,
    Taint,
    Terminated,
)
from kvferry.protocol.wire.field_types import PodIdentity

_ENGINE = "engine"


@dataclass(slots=True)
class _Pod:
    identity: PodIdentity
    is_alive: Callable[[], bool]
    answers: Callable[[], bool]
    is_deleted_by_force: bool  # as soon as it does not answer
    restarts_in_place: bool
    is_missing: bool = False


class SimulatedPods:
    """The pods of one world.

    Attributes:
        exist: whether processes run in pods.
    """

    def __init__(self, seed: int) -> None:
        # Chance of its own: the schedule of a seed is the same with pods and without.
        self._chance = random.Random(f"{seed} pods")
        self.exist = self._chance.random() < 0.9
        self._pods: dict[str, _Pod] = {}

    def start(self, name: str, is_alive: Callable[[], bool], answers: Callable[[], bool]) -> PodIdentity | None:
        """Runs a process in a pod of its own; returns None where processes run in none.

        Args:
            name: the process's, which no other ever has.
            is_alive: whether the process has not ended.
            answers: whether whoever looks after it finds it well.
        """
        identity = PodIdentity(uid=f"uid of {name}", name=name, namespace="simulated", container=f"start of {name}")
        by_force, in_place = self._chance.random() < 0.5, self._chance.random() < 0.5
        if not self.exist:
            return None
        self._pods[name] = _Pod(identity, is_alive, answers, by_force, in_place)
        return identity

    def pod(self, identity: PodIdentity) -> PodObject | None:
        """Returns the object of a pod."""
        pod = self._pods[identity.name]
        is_alive, answers = pod.is_alive(), pod.answers()
        if pod.is_deleted_by_force and not (is_alive and answers):
            pod.is_missing = True
        if pod.is_missing:
            return None
        phase, state, last = "Running", ContainerState(), ContainerState()
        if not is_alive and pod.restarts_in_place:
            last = ContainerState(Terminated("Error", f"kvferry container {pod.identity.container}\n"))
        elif not is_alive:
            phase, state = "Failed", ContainerState(Terminated("Error"))
        elif not answers:
            phase = "Failed"  # a controller says so, the kubelet does not
        return PodObject(
            metadata=Metadata(name=identity.name, uid=identity.uid),
            spec=PodSpec(containers=(Named(_ENGINE),), node_name=identity.name),
            status=PodStatus(phase=phase, container_statuses=(ContainerStatus(_ENGINE, state, last),)),
        )

    def node(self, name: str) -> NodeObject | None:
        """Returns the node of a pod: each has its own, of the same name."""
        pod = self._pods[name]
        is_alive, answers = pod.is_alive(), pod.answers()
        return NodeObject(
            metadata=Metadata(name=name, uid=name),
            spec=NodeSpec(() if is_alive else (Taint(OUT_OF_SERVICE),)),
            status=NodeStatus((Condition("Ready", "True" if is_alive and answers else "Unknown"),)),
        )
