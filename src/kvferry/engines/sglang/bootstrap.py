"""SGLang's bootstrap server, with a registry of kvferry's beside it."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web
from sglang.srt.disaggregation.base.conn import BaseKVBootstrapServer
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

from kvferry import RegistryServer, Settings, create_registry, create_registry_client
from kvferry.engines.sglang.directory import ROUTE, Announcement, new_engine_name
from kvferry.errors import SettingsError


class KVFerryBootstrapServer(BaseKVBootstrapServer):  # type: ignore[misc]
    """Runs in a prefill server's main process, before its ranks start.

    It is none of SGLang's own, it has one: with SGLANG_RUST_SERVER, SGLang's server in Rust stands in for those that
    are, and would leave this one out.
    """

    def __init__(self, host: str, port: int) -> None:
        """Starts the bootstrap server and, unless the settings name another one, the registry.

        Raises:
            SettingsError: if the registry cannot listen where the settings say.
        """
        self._settings = settings = Settings()
        self._engine = new_engine_name(port)
        self._registry = None if settings.registry_url is not None else _registry(settings, host, port)
        registry_port = self._registry.address[1] if self._registry else None
        self._routes = _Routes(host, port, Announcement(engine=self._engine, registry_port=registry_port))

    def drain(self) -> None:
        """Tells the engine's ranks to drain, at their registry.

        Raises:
            RegistryError: if that cannot be asked, or knows none of them.
        """
        url = None if self._registry is None else self._registry.url
        with create_registry_client(self._settings, url) as client:
            client.drain(self._engine)

    def close(self) -> None:
        self._routes.close()
        if self._registry is not None:
            self._registry.close()


class _Routes(CommonKVBootstrapServer):  # type: ignore[misc]
    """SGLang's bootstrap server, which announces kvferry as well."""

    _loop: Any = None  # its thread sets it, after whoever closes the server at once has looked for it

    def __init__(self, host: str, port: int, announcement: Announcement) -> None:
        self._announcement = announcement
        super().__init__(host, port)

    def _setup_routes(self) -> None:
        super()._setup_routes()
        self.app.router.add_get(ROUTE, self._announce)

    async def _announce(self, _: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self._announcement), content_type="application/json")


def _registry(settings: Settings, host: str, bootstrap_port: int) -> RegistryServer:
    """Starts a registry on a port of its own: a free one where none is chosen, as the default is SGLang's as well.

    It listens where the bootstrap server does, under whose name it is asked, if ranks are reached from other machines.
    """
    unchosen: dict[str, object] = {"registry_port": 0}
    if not settings.is_on_loopback:
        unchosen["registry_host"] = host
    chosen = settings.model_fields_set
    settings = settings.model_copy(update={name: value for name, value in unchosen.items() if name not in chosen})
    registry = create_registry(settings)
    registry.start()
    if registry.address[1] != bootstrap_port:
        return registry
    if settings.registry_port:
        registry.close()
        raise SettingsError(
            f"registry_port (KVFERRY_REGISTRY_PORT) is {bootstrap_port}, and so is --disaggregation-bootstrap-port: "
            "choose another for one of them"
        )
    other = _registry(settings, host, bootstrap_port)
    registry.close()
    return other
