"""What the cells of the fault matrices have in common: one rank is struck at a step of a room, and others go on."""

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
