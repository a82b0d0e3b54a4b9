"""The servers behind a front: who is well, who is about to leave, and whose turn it is.

A server that drains is well, and ends what it has: its own `/health` says nothing of it. The registry knows prefill
engines; decode ranks say so themselves.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import httpx

from kvferry.applications.top.asking import IS_IT_STARTED
from kvferry.control.registry import Registry
from kvferry.errors import KVFerryError, ObserveError
from kvferry.loggers import logger_of


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


log = logger_of(__name__)

INTERVAL_S = 1.0
"""Well within what endpoints that are told to drain still take new rooms for (KVFERRY_DRAIN_GRACE_S)."""

_ANSWER_S = 2.0


class DrainWatch:
    """Asks whether a server drains, again and again."""

    def __init__(self, server: Server, drains: Callable[[], Awaitable[bool | None]]) -> None:
        """Asks nobody yet.

        Args:
            server: told what the answer is.
            drains: asks; None is no answer.
        """
        self._server = server
        self._drains = drains
        self._problem = ""

    async def run(self) -> None:
        """Asks until it is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(INTERVAL_S)

    async def look(self) -> None:
        """Asks once. What was known stays where nobody answers."""
        try:
            drains = await self._drains()
        except KVFerryError as error:
            if str(error) != self._problem:
                log.warning("nobody says whether %s drains: %s", self._server.engine, error)
            self._problem = str(error)
            return
        self._problem = ""
        if drains is not None and drains != self._server.is_draining:
            self._server.is_draining = drains
            what = "drains, and gets no new requests" if drains else "takes requests again"
            log.warning("%s at %s %s", self._server.engine, self._server.url, what)


async def registered(registry: Registry, name: Callable[[], str]) -> bool | None:
    """Asks a registry whether an engine drains; None if it knows no rank of it.

    Args:
        registry: is asked on another thread.
        name: returns the engine's, there as well.

    Raises:
        RegistryError: if it does not answer.
    """
    view = await asyncio.to_thread(lambda: registry.engine(name()))
    return view.draining if view.registrations else None


async def any_drains(client: httpx.AsyncClient, ranks: Sequence[str]) -> bool:
    """Asks a decode engine's ranks whether any of them drains.

    Args:
        client: asks them.
        ranks: where they show what they do: hosts and ports.

    Raises:
        ObserveError: if one does not answer, and no other drains.
    """
    answers = await asyncio.gather(*(_drains(client, rank) for rank in ranks), return_exceptions=True)
    problems = [answer for answer in answers if isinstance(answer, BaseException)]
    if problems and True not in answers:
        raise problems[0]
    return True in answers


async def _drains(client: httpx.AsyncClient, rank: str) -> bool:
    """Whether a decode rank takes no new rooms: that alone makes it not ready."""
    try:
        answer = await client.get(f"http://{rank}/readyz", timeout=_ANSWER_S)
    except httpx.HTTPError as error:
        raise ObserveError(f"{rank} does not answer: {type(error).__name__} {error}; {IS_IT_STARTED}") from error
    if answer.status_code not in (200, 503):
        raise ObserveError(f"{rank} is no endpoint of kvferry's: status {answer.status_code} for /readyz")
    return answer.status_code == 503
