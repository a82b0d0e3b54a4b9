"""Prefill ranks that were lost and may still write, and what they might write to, until their end is proved.

What the settings declare as proof is asked for: this machine at once, operators and Kubernetes from a thread of their
own, at most one round at a time. Which answers are proof `protocol.links.proofs` knows.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

from kvferry.control.kubernetes import Orchestrator
from kvferry.endpoint.decode.context import DecodeContext
from kvferry.errors import KVFerryError, OrchestratorError, UsageError
from kvferry.loggers import logger_of
from kvferry.observe.status import LostPeerStatus
from kvferry.protocol.bounded import remember
from kvferry.protocol.links.link import Link
from kvferry.protocol.links.proofs import KnownPods, LostRanks, Proof, Reach, why_ended
from kvferry.protocol.wire.field_types import PodIdentity, ProcessIdentity
from kvferry.protocol.wire.messages import Attached, Welcome

log = logger_of(__name__)

_MOST_WAITED_FOR = 1 << 12  # prefill ranks to be remembered; of one that is forgotten the same is waited for once more


class Quarantine:
    """The prefill ranks that were lost, and the sources of proof that the settings declare.

    For the endpoint's thread, where nothing else is said.

    Attributes:
        lost: ranks that were lost, until they can write no more.
    """

    def __init__(self, context: DecodeContext) -> None:
        """Begins with no lost ranks, and asks nobody yet."""
        settings, platform = context.settings, context.platform
        self._context = context
        self.lost = LostRanks(settle_s=settings.quarantine_s)
        # By endpoint the number of its last failed write, and whether all that was sent of it can only have arrived.
        self._failures: OrderedDict[str, tuple[int, bool]] = OrderedDict()
        # Where a death does not end the transport's writes, nothing proves that they have ended.
        declared = settings.proofs if context.transport.promises.fenced_by_death else frozenset()
        self._reach = Reach(declared, platform.process.machine)
        self._problems: OrderedDict[str, str] = OrderedDict()  # why a source could not be asked, by endpoint
        self._does_without = settings.unproven_path == "auto"
        self._orchestrator: Orchestrator | None = None
        if Proof.KUBERNETES in declared:
            self._orchestrator = platform.orchestrator(settings)
        self._background = platform.background_executor("kvferry-decode-ends")
        # Guards what is known of pods, and what could not be asked: two threads may ask.
        self._lock = threading.Lock()
        self._known = KnownPods()
        self._is_asking = False

    def statuses(self, pages: Mapping[str, int], now: float) -> list[LostPeerStatus]:
        """Returns the ranks that were lost and may still write. May be called from any thread.

        Args:
            pages: how many pages each may write to, by endpoint.
        """
        return [
            LostPeerStatus(
                endpoint=endpoint,
                lost_for_s=max(0.0, now - lost.since),
                pages=pages.get(endpoint, 0),
                ring_bytes=self._context.staging.bytes_of(endpoint),
                proof=lost.proof.value if lost.proof is not None else "",
                frees=self._reach.how(lost.process, endpoint) if lost.proof is None else (),
                problem=self._problems.get(endpoint, "") if lost.proof is None else "",
            )
            for endpoint, lost in self.lost.all
        ]

    # ---- who is in it -------------------------------------------------------------------------------------------

    def add(self, peers: Iterable[Welcome], now: float) -> None:
        """Records that ranks are lost: they may write until they connect anew, or have ended."""
        for peer in peers:
            self.lost.add(peer.endpoint, peer.process, now)

    def connected(self, peer: Welcome) -> None:
        """Forgets a rank that was found again, and learns where its pod runs: its object may be missing later."""
        self.lost.discard(peer.endpoint)
        if self._orchestrator is not None and peer.process.pod is not None:
            self._background.submit(partial(self._learn, peer.endpoint, peer.process.pod))

    def release(self, endpoint: str) -> None:
        """Gives back the rings of a rank that will not write again."""
        self.lost.discard(endpoint)
        self._context.staging.closed(endpoint)

    def has_ring_of(self, link: Link) -> bool:
        """Whether a lost rank may still write into staging memory; its close message may yet come."""
        return any(peer.endpoint in self._context.staging.rings and peer.endpoint in self.lost for peer in link.peers)

    def keep_for_good(self, settled: Collection[str]) -> None:
        """Keeps staging memory for good that a rank may still write to: nothing here could stop that.

        Args:
            settled: ranks that have no write to this one in flight.
        """
        kept = self._context.staging.keep_for_good(settled)
        if kept:
            log.warning("%d bytes of staging memory are kept for good: prefill ranks may still write to them", kept)

    # ---- what failed writes had sent ------------------------------------------------------------------------------

    def has_settled(self, message: Attached) -> bool:
        """Whether nothing can arrive any more of what a rank's failed writes had sent before it has attached."""
        number, is_over = self._failures.get(message.endpoint, (0, True))
        return is_over and message.last_failure <= number

    def settle(self, message: Attached, settled: Callable[[], None]) -> None:
        """Waits until that is so, and calls back, unless this is waited for already."""
        endpoint, number = message.endpoint, message.last_failure
        if number > self._failures.get(endpoint, (0, True))[0]:
            remember(self._failures, endpoint, (number, False), _MOST_WAITED_FOR)
            self._context.settling.add(partial(self._settled, endpoint, number, settled))

    def _settled(self, endpoint: str, number: int, settled: Callable[[], None]) -> None:
        if self._failures.get(endpoint) == (number, False):
            self._failures[endpoint] = (number, True)
        settled()

    # ---- proofs ---------------------------------------------------------------------------------------------------

    def can_prove_end(self, process: ProcessIdentity) -> bool:
        """Whether a source is in reach that could prove a process's end, or the settings do not ask for one."""
        return self._does_without or bool(self._reach.unattended(process))

    def is_gone(self, process: ProcessIdentity) -> bool:
        """Whether this machine shows that a process has ended. Returns at once."""
        return Proof.PROCESS in self._reach.declared and self._context.platform.is_gone(process)

    def gone(self, process: ProcessIdentity) -> None:
        """Takes a rank's word that a process on its machine has ended."""
        if Proof.RANK in self._reach.declared:
            self.lost.look(lambda each: each == process, Proof.RANK)

    def ended(self, endpoint: str, proof: Proof) -> None:
        """Takes a proof that a lost rank has ended; what it might have written to is given back a while later."""
        log.warning("prefill endpoint %s has ended, proof: %s", endpoint, proof.value)
        self.lost.ended(endpoint, proof)

    def take_word(self, endpoint: str) -> None:
        """Takes an operator's word that a lost rank has ended; raises as `DecodeEndpoint.release`. From any thread."""
        if Proof.OPERATOR not in self._context.settings.proofs:
            raise UsageError("an operator's word does not count here: add operator to end_proofs (KVFERRY_END_PROOFS)")
        lost = [each for each, _ in self.lost.all]
        if endpoint not in lost:
            raise UsageError(f"nothing here waits for the end of {endpoint!r}; lost are: {', '.join(lost) or 'none'}")
        self._context.submit(lambda _: self.ended(endpoint, Proof.OPERATOR))

    def take_settled(self, with_rooms: Iterable[Link], now: float) -> list[str]:
        """Returns and forgets the ranks that are proved not to write again.

        Args:
            with_rooms: the links to ranks that may write to pages. Who may write to no memory is forgotten, too.
        """
        if not len(self.lost):
            return []
        at_stake = {peer.endpoint for link in with_rooms for peer in link.peers}
        self.lost.keep_only(at_stake | self._context.staging.writers)
        self.lost.look(self.is_gone, Proof.PROCESS)
        return self.lost.take_settled(now)

    def ask(self) -> tuple[list[str], list[ProcessIdentity]]:
        """Asks about ranks that may still run, unless the last round is under way. Returns at once.

        Returns:
            Their endpoints, and the processes that other ranks are to be asked about.
        """
        doubtful = self.lost.doubtful
        needs_somebody = self._orchestrator is not None or Proof.OPERATOR in self._reach.declared
        if doubtful and needs_somebody and not self._is_asking:
            self._is_asking = True
            self._background.submit(partial(self._ask, tuple(doubtful)))
        asked = doubtful if Proof.RANK in self._reach.declared else ()
        return [endpoint for endpoint, _ in doubtful], [process for _, process in asked]

    def close(self) -> None:
        """Gives up what is being asked."""
        if self._orchestrator is not None:
            self._orchestrator.close()
        self._background.close()

    # ---- in the background ----------------------------------------------------------------------------------------

    def _learn(self, endpoint: str, pod: PodIdentity) -> None:
        try:
            self._look_at(pod)
        except BaseException as error:
            self._failed([endpoint], error)

    def _ask(self, doubtful: Sequence[tuple[str, ProcessIdentity]]) -> None:
        try:
            if Proof.OPERATOR in self._reach.declared:
                self._prove(self._released(doubtful), Proof.OPERATOR)
            for endpoint, process in doubtful if self._orchestrator is not None else ():
                self._ask_about(endpoint, process.pod)
        except BaseException as error:
            self._failed([endpoint for endpoint, _ in doubtful], error)
        self._context.submit(self._asked)

    def _ask_about(self, endpoint: str, pod: PodIdentity | None) -> None:
        """Asks about one pod. That it cannot be asked about, as where a namespace is not ours to read, is its alone."""
        try:
            if pod is not None and (why := self._look_at(pod)):
                log.warning("prefill endpoint %s has ended: the Kubernetes API says that %s", endpoint, why)
                self._prove([endpoint], Proof.KUBERNETES)
            with self._lock:
                self._problems.pop(endpoint, None)
        except OrchestratorError as error:
            self._failed([endpoint], error)

    def _prove(self, endpoints: Sequence[str], proof: Proof) -> None:
        def prove(_: float) -> None:
            for endpoint in endpoints:
                self.ended(endpoint, proof)

        self._context.submit(prove)

    def _asked(self, _: float) -> None:
        self._is_asking = False

    def _released(self, doubtful: Sequence[tuple[str, ProcessIdentity]]) -> list[str]:
        """Returns those that an operator has released at the registry."""
        try:
            released = set(self._context.registry.released())
        except KVFerryError as error:
            log.debug("the registry does not say whom operators have released: %s", error)
            return []
        return [endpoint for endpoint, _ in doubtful if endpoint in released]

    def _look_at(self, pod: PodIdentity) -> str:
        """Returns what proves that a pod's process has ended; empty if nothing does.

        Raises:
            OrchestratorError: if the API cannot be asked.
        """
        assert self._orchestrator is not None
        found = self._orchestrator.pod(pod)
        with self._lock:
            name = self._known.node_of(pod, found)
        node = self._orchestrator.node(name) if name is not None else None
        return why_ended(pod, found, name, node)

    def _failed(self, endpoints: Sequence[str], error: BaseException) -> None:
        problem = str(error) if isinstance(error, OrchestratorError) else f"{type(error).__name__}: {error}"
        with self._lock:
            is_new = problem not in self._problems.values()
            for endpoint in endpoints:
                remember(self._problems, endpoint, problem, _MOST_WAITED_FOR)
        if is_new:
            log.warning("whether lost prefill ranks have ended cannot be asked: %s", problem)
