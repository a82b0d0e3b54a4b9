"""Which servers are about to leave, as their registries or their ranks say: they get no new requests.

A server that drains is well, and ends what it has: its own `/health` says nothing of it. The registry knows prefill
engines; decode ranks say so themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvferry.applications.top.asking import Asker
from kvferry.applications.up.servers import Server
from kvferry.control.registry import Registry
from kvferry.errors import KVFerryError, ObserveError

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Well within what endpoints that are told to drain still take new rooms for (KVFERRY_DRAIN_GRACE_S)."""


class DrainWatch:
    """Asks whether a server drains, again and again, off the event loop."""

    def __init__(self, server: Server, drains: Callable[[], bool | None]) -> None:
        """Asks nobody yet.

        Args:
            server: told what the answer is.
            drains: asks, and waits for the answer; None is no answer.
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
            drains = await asyncio.to_thread(self._drains)
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


def registered(registry: Registry, engine: str) -> bool | None:
    """Asks a registry whether an engine drains; None if it knows no rank of it.

    Raises:
        RegistryError: if it does not answer.
    """
    view = registry.engine(engine)
    return view.draining if view.registrations else None


def of_any(ranks: Asker) -> bool:
    """Asks an engine's ranks whether any of them drains.

    Raises:
        ObserveError: if one does not answer, and no other drains.
    """
    samples = ranks.ask()
    if any(sample.status is not None and sample.status.is_draining for sample in samples):
        return True
    for sample in samples:
        if sample.status is None:
            raise ObserveError(f"{sample.address} {sample.problem}; {sample.remedy}")
    return False
