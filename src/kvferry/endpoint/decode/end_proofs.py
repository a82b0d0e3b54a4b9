"""Asks who can prove that lost prefill ranks have ended, without holding up the endpoint's thread.

What the settings declare is asked: this machine at once, operators and Kubernetes from a thread of their own, at most
one round at a time. Which answers are proof `protocol.links.proofs` and `protocol.links.pods` know.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from kvferry.control.kubernetes import Orchestrator
from kvferry.control.registry_client import RegistryClient
from kvferry.endpoint.runtime.platform import Platform
from kvferry.errors import KVFerryError, OrchestratorError
from kvferry.protocol.links.pods import KnownPods, NodeAnswer, why_ended
from kvferry.protocol.links.proofs import Proof, Reach
from kvferry.protocol.wire.field_types import PodIdentity, ProcessIdentity
from kvferry.settings import Settings
from kvferry.transport import Promises

log = logging.getLogger(__name__)

Ended = Callable[[str, Proof, float], None]


class EndProofs:
    """The sources of proof that the settings declare.

    Attributes:
        reach: what they can prove.
        problem: why one of them could not be asked; empty if all could. May be read from any thread.
    """

    def __init__(
        self,
        settings: Settings,
        platform: Platform,
        registry: RegistryClient,
        *,
        promises: Promises,
        submit: Callable[[Callable[[float], None]], None],
        ended: Ended,
    ) -> None:
        """Asks nobody yet.

        Args:
            promises: of the transport: where a death does not end its writes, nothing proves that they have ended.
            submit: runs work on the endpoint's thread.
            ended: takes a proof: the endpoint that has ended, the source, the time. Called on the endpoint's thread.
        """
        declared = settings.proofs if promises.fenced_by_death else frozenset()
        self.reach = Reach(declared, platform.process.machine)
        self.problem = ""
        self._does_without = settings.unproven_path == "auto"
        self._platform = platform
        self._registry = registry
        self._submit = submit
        self._ended = ended
        self._orchestrator: Orchestrator | None = None
        if Proof.KUBERNETES in declared:
            self._orchestrator = platform.orchestrator(settings)
        self._background = platform.background_executor("kvferry-decode-ends")
        # Guards what is known of pods: two threads may ask.
        self._lock = threading.Lock()
        self._known = KnownPods()
        self._is_asking = False

    def is_declared(self, proof: Proof) -> bool:
        """Whether a source counts."""
        return proof in self.reach.declared

    def can_prove_end(self, process: ProcessIdentity) -> bool:
        """Whether a source is in reach that could prove a process's end, or the settings do not ask for one."""
        return self._does_without or bool(self.reach.unattended(process))

    def is_gone(self, process: ProcessIdentity) -> bool:
        """Whether this machine shows that a process has ended. Returns at once."""
        return self.is_declared(Proof.PROCESS) and self._platform.is_gone(process)

    def connected(self, process: ProcessIdentity) -> None:
        """Learns where a rank's pod runs while it does: its object may be missing when that matters."""
        if self._orchestrator is not None and process.pod is not None:
            self._background.submit(partial(self._learn, process.pod))

    def ask(self, doubtful: Sequence[tuple[str, ProcessIdentity]]) -> None:
        """Asks about ranks whose processes may still run, unless the last round is under way. Returns at once."""
        needs_nobody = self._orchestrator is None and not self.is_declared(Proof.OPERATOR)
        if not doubtful or needs_nobody or self._is_asking:
            return
        self._is_asking = True
        self._background.submit(partial(self._ask, tuple(doubtful)))

    def close(self) -> None:
        """Gives up what is being asked."""
        if self._orchestrator is not None:
            self._orchestrator.close()
        self._background.close()

    # ---- in the background ----------------------------------------------------------------------------------------

    def _learn(self, pod: PodIdentity) -> None:
        try:
            self._look_at(pod)
        except Exception as error:
            self._failed(error)

    def _ask(self, doubtful: tuple[tuple[str, ProcessIdentity], ...]) -> None:
        proved: list[tuple[str, Proof]] = []
        try:
            if self.is_declared(Proof.OPERATOR):
                proved += self._released(doubtful)
            for endpoint, process in doubtful if self._orchestrator is not None else ():
                if process.pod is not None and (why := self._look_at(process.pod)):
                    log.warning("prefill endpoint %s has ended: the Kubernetes API says that %s", endpoint, why)
                    proved.append((endpoint, Proof.KUBERNETES))
            self.problem = ""
        except Exception as error:
            self._failed(error)
        self._submit(partial(self._asked, proved))

    def _asked(self, proved: list[tuple[str, Proof]], now: float) -> None:
        self._is_asking = False
        for endpoint, proof in proved:
            self._ended(endpoint, proof, now)

    def _released(self, doubtful: tuple[tuple[str, ProcessIdentity], ...]) -> list[tuple[str, Proof]]:
        """Returns those that an operator has released at the registry."""
        try:
            released = set(self._registry.released())
        except KVFerryError as error:
            log.debug("the registry does not say whom operators have released: %s", error)
            return []
        return [(endpoint, Proof.OPERATOR) for endpoint, _ in doubtful if endpoint in released]

    def _look_at(self, pod: PodIdentity) -> str:
        """Returns what proves that a pod's process has ended; empty if nothing does.

        Raises:
            OrchestratorError: if the API cannot be asked.
        """
        assert self._orchestrator is not None
        found = self._orchestrator.pod(pod)
        with self._lock:
            self._known.saw(pod, found)
            name = self._known.node_of(pod)
        node = NodeAnswer(name, self._orchestrator.node(name)) if name is not None else None
        return why_ended(pod, found, node)

    def _failed(self, error: Exception) -> None:
        problem = str(error) if isinstance(error, OrchestratorError) else f"{type(error).__name__}: {error}"
        if problem != self.problem:
            log.warning("whether lost prefill ranks have ended cannot be asked: %s", problem)
        self.problem = problem
