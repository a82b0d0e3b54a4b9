"""Clusters for the tests of one process, begun when first asked for."""

from __future__ import annotations

from tests.support.victims import Cluster, Step

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
