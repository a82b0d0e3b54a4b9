"""Which prefill servers are about to leave, as their registries say: they get no new requests.

A server that drains is well, and ends what it has: its own `/health` says nothing of it.
"""

from __future__ import annotations

import asyncio
import logging

from kvferry.applications.up.servers import Server
from kvferry.control.registry import Registry
from kvferry.errors import KVFerryError

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Well within what endpoints that are told to drain still take new rooms for (KVFERRY_DRAIN_GRACE_S)."""


class DrainWatch:
    """Asks a registry for one engine, again and again, off the event loop."""

    def __init__(self, server: Server, registry: Registry, engine: str) -> None:
        """Asks nobody yet.

        Args:
            server: told what the registry says.
            engine: what its ranks are registered under.
        """
        self._server = server
        self._registry = registry
        self._engine = engine
        self._problem = ""

    async def run(self) -> None:
        """Asks until it is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(INTERVAL_S)

    async def look(self) -> None:
        """Asks once. What was known stays where the registry does not answer, or knows no rank of the engine."""
        try:
            view = await asyncio.to_thread(self._registry.engine, self._engine)
        except KVFerryError as error:
            if str(error) != self._problem:
                log.warning("nobody says whether %s drains: %s", self._server.engine, error)
            self._problem = str(error)
            return
        self._problem = ""
        if view.registrations and view.draining != self._server.is_draining:
            self._server.is_draining = view.draining
            what = "drains, and gets no new requests" if view.draining else "takes requests again"
            log.warning("%s at %s %s", self._server.engine, self._server.url, what)
