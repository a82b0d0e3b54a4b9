"""The servers behind a front: who is well and stays, and whose turn it is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.control.registry import Registry


@dataclass(slots=True, eq=False)
class Server:
    """One server.

    Attributes:
        url: where it answers.
        engine: what its engine is called.
        bootstrap_port: where SGLang's decode servers ask for its caches; 0 for servers that have none.
        registry: where a prefill server's ranks are registered; None if nobody is asked whether they drain.
        ranks: where a decode server's ranks say whether they drain, as hosts and ports; empty if they are not asked.
        is_healthy: whether it answered when last asked.
        is_draining: whether it is about to leave, as the registry or its ranks last said.
    """

    url: str
    engine: str
    bootstrap_port: int = 0
    registry: Registry | None = None
    ranks: Sequence[str] = ()
    is_healthy: bool = False
    is_draining: bool = False

    @property
    def takes_requests(self) -> bool:
        """Whether it may be asked."""
        return self.is_healthy and not self.is_draining


@dataclass(slots=True)
class Pool:
    """Servers of one kind, taken by turns."""

    servers: Sequence[Server]
    _turn: itertools.count[int] = field(default_factory=itertools.count)

    def choose(self, avoided: set[Server]) -> Server | None:
        """One that takes requests, and was not tried for this one if there is such a one; None if none does."""
        able = [server for server in self.servers if server.takes_requests]
        fresh = [server for server in able if server not in avoided] or able
        return fresh[next(self._turn) % len(fresh)] if fresh else None

    def shortage(self, kind: str) -> str:
        """Says why there is none to choose.

        Args:
            kind: what the servers are called.
        """
        if any(server.is_healthy for server in self.servers):
            return f"every {kind} server that is well drains: start another one, or ask again when its successor serves"
        return f"no {kind} server is well"


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
