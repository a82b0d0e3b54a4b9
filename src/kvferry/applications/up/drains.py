"""Which servers are about to leave, as their registries or their ranks say: they get no new requests.

A server that drains is well, and ends what it has: its own `/health` says nothing of it. The registry knows prefill
engines; decode ranks say so themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import httpx

from kvferry.applications.top.asking import IS_IT_STARTED
from kvferry.applications.up.servers import Server
from kvferry.control.registry import Registry
from kvferry.errors import KVFerryError, ObserveError
from kvferry.loggers import logger_of

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
