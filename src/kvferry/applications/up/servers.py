"""The servers behind a front: who is well, and whose turn it is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Server:
    """One server.

    Attributes:
        url: where it answers.
        engine: what its engine is called.
        bootstrap_port: where SGLang's decode servers ask for its caches; 0 for servers that have none.
        is_healthy: whether it answered when last asked.
    """

    url: str
    engine: str
    bootstrap_port: int = 0
    is_healthy: bool = False


@dataclass(slots=True)
class Pool:
    """Servers of one kind, taken by turns."""

    servers: Sequence[Server]
    _turn: itertools.count[int] = field(default_factory=itertools.count)

    def choose(self, avoided: set[Server]) -> Server | None:
        """One that is well, and was not tried for this request if there is such a one; None if none is well."""
        well = [server for server in self.servers if server.is_healthy]
        fresh = [server for server in well if server not in avoided] or well
        return fresh[next(self._turn) % len(fresh)] if fresh else None


class TryAnotherError(Exception):
    """A server failed before anything had gone to the client.

    Attributes:
        server: which.
        is_lost: whether it did not even say so.
    """

    def __init__(self, server: Server, problem: str, *, is_lost: bool = False) -> None:
        super().__init__(f"{server.engine}: {problem}")
        self.server = server
        self.is_lost = is_lost
