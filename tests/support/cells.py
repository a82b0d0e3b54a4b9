"""What the cells of the fault matrices have in common: a cluster, in which one rank is struck at a step of a room."""

from __future__ import annotations

from tests.support.processes import Rank
from tests.support.victims import Cluster, Engine, Room, Step
from tests.support.waiting import eventually


class Cell:
    """One cell.

    Attributes:
        room: the one that is at the step, between `prefill` and `decode`, of which one is struck.
        standing: rooms of others that are half-way.
    """

    def __init__(
        self, cluster: Cluster, step: Step, *, witness: Engine, struck: Engine, others: list[tuple[Engine, Engine]]
    ) -> None:
        """Reaches the step.

        Args:
            witness: the rank of the two that survives.
            struck: the one that may not.
            others: pairs of ranks that exchange rooms meanwhile.
        """
        self.cluster, self.step = cluster, step
        self.prefill, self.decode = cluster.struck_prefill, cluster.struck_decode
        self._witness, self._struck, self._others = witness, struck, others
        cluster.prepare(step)
        self.standing = [cluster.begin(*pair) for pair in others]
        self._known = self._peers()
        self.room: Room = cluster.reach(step)

    def others_go_on(self) -> None:
        """Rooms of survivors, those that were half-way and new ones, end well."""
        while self.standing:
            self.cluster.finish(self.standing.pop())
        for pair in self._others:
            self.cluster.run(*pair)

    def wait_until_given_up(self) -> None:
        """Waits until the survivor relies no more on the process that was struck."""
        eventually("it was given up", lambda: not self._known & self._peers())

    def _peers(self) -> set[str]:
        peers: set[str] = self._witness.do(Rank.peers, self._struck.name)
        return peers


_MOST_CELLS = 40
"""That a cluster is used for: NIXL keeps some sockets of connections that were lost for good."""


class Clusters:
    """One for every path, and one on TCP, where a write can be on its way for as long as a test likes.

    Between two processes of one machine NIXL copies with a system call that ends whether the other side is frozen or
    not, so that a direct write is never on its way when a test looks.
    """

    def __init__(self) -> None:
        self._begun: dict[tuple[str, str | None], Cluster] = {}
        self._used: dict[Cluster, int] = {}

    def get(self, path: str, step: Step | None = None) -> Cluster:
        """The one for a path at a step."""
        key = path, "tcp,self" if path == "direct" and step is Step.WRITING else None
        if key in self._begun and self._used[self._begun[key]] == _MOST_CELLS:
            self.drop(self._begun[key])
        if key not in self._begun:
            path, wire = key
            self._begun[key] = Cluster(path, wire=wire)
            self._used[self._begun[key]] = 0
        self._used[self._begun[key]] += 1
        return self._begun[key]

    def drop(self, cluster: Cluster) -> None:
        """Ends one in which a test has failed: the next test begins with a new one."""
        self._begun = {key: each for key, each in self._begun.items() if each is not cluster}
        cluster.close()

    def close(self) -> None:
        """Ends all."""
        for cluster in list(self._begun.values()):
            self.drop(cluster)
