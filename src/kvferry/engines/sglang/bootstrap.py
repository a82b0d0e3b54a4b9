"""SGLang's bootstrap server, with a registry of kvferry's beside it."""

from __future__ import annotations

import msgspec
from aiohttp import web
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

from kvferry.control.construction import create_registry
from kvferry.control.registry_server import RegistryServer
from kvferry.engines.sglang.directory import ROUTE, Announcement, engine_name
from kvferry.settings import Settings


class KVFerryBootstrapServer(CommonKVBootstrapServer):  # type: ignore[misc]
    """Runs in a prefill server's main process, before its ranks start."""

    def __init__(self, host: str, port: int) -> None:
        """Starts both.

        Raises:
            SettingsError: if the registry cannot listen where the settings say.
        """
        settings = Settings()
        self._registry: RegistryServer | None = None
        if settings.registry_url is None:
            # SGLang's own default port is the registry's as well.
            is_chosen = "registry_port" in settings.model_fields_set
            self._registry = create_registry(
                settings if is_chosen else settings.model_copy(update={"registry_port": 0})
            )
            self._registry.start()
        self._announcement = Announcement(
            engine=engine_name(port), registry_port=self._registry.address[1] if self._registry else None
        )
        super().__init__(host, port)

    def close(self) -> None:
        """Ends both."""
        super().close()
        if self._registry is not None:
            self._registry.close()

    def _setup_routes(self) -> None:
        super()._setup_routes()
        self.app.router.add_get(ROUTE, self._announce)

    async def _announce(self, _: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self._announcement), content_type="application/json")
