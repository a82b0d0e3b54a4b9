"""Clusters for one test module, begun when first asked for."""

from __future__ import annotations

from tests.support.victims import Cluster, Step


class Clusters:
    """One for every path, and one on TCP, where a write can be on its way for as long as a test likes.

    Between two processes of one machine NIXL copies with a system call that ends whether the other side is frozen or
    not, so that a direct write is never on its way when a test looks.
    """

    def __init__(self) -> None:
        self._begun: dict[tuple[str, str | None], Cluster] = {}

    def get(self, path: str, step: Step | None = None) -> Cluster:
        """The one for a path at a step."""
        wire = "tcp,self" if path == "direct" and step is Step.WRITING else None
        if (path, wire) not in self._begun:
            self._begun[path, wire] = Cluster(path, wire=wire)
        return self._begun[path, wire]

    def drop(self, cluster: Cluster) -> None:
        """Ends one in which a test has failed: the next test begins with a new one."""
        self._begun = {key: each for key, each in self._begun.items() if each is not cluster}
        cluster.close()

    def close(self) -> None:
        """Ends all."""
        for cluster in list(self._begun.values()):
            self.drop(cluster)
