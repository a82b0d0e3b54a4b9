"""How the two sides find each other: through SGLang's bootstrap servers, so that users need not run or name a registry.

Every prefill server runs a bootstrap server, and requests name it to the decode side. Beside it runs a registry of
kvferry's, for the ranks of this one engine; the bootstrap server announces its port and the engine's name. Where the
settings name a registry for all engines, that is used instead.
"""

from __future__ import annotations

import platform
import re
import threading
from collections.abc import Iterable
from urllib.parse import urlsplit

import httpx
import msgspec

from kvferry import EngineView, RegistryClient, Settings, create_registry_client
from kvferry.answers import Answer, request
from kvferry.errors import RegistryError, RegistryUnreachableError

ROUTE = "/kvferry"
"""The bootstrap server's path for announcements."""

_ANSWER_S = 5.0
_MOST_ANSWER_BYTES = 2**20
"""SGLang's have some hundred bytes."""


class Announcement(msgspec.Struct, frozen=True):
    """What a bootstrap server announces.

    Attributes:
        engine: the prefill engine's name.
        registry_port: its registry's port, on the same host; None where the settings name another registry.
    """

    engine: str
    registry_port: int | None


_ANNOUNCEMENT = msgspec.json.Decoder(Announcement)


def engine_name(port: int) -> str:
    """Returns the name of the prefill engine whose bootstrap server listens on a port of this machine."""
    return f"sglang-{re.sub('[^A-Za-z0-9.-]', '-', platform.node())[:100]}:{port}"


def difference(address: str, pairs: Iterable[tuple[str, object, object]]) -> str | None:
    """Says in which options a prefill server and this one differ that must be the same; None if in none.

    Args:
        address: of its bootstrap server.
        pairs: an option's name, its value there and here; None where a side does not say it.
    """
    problems = [
        f"{name} is {theirs} there and {ours} here"
        for name, theirs, ours in pairs
        if theirs is not None and ours is not None and theirs != ours
    ]
    return f"the prefill server at {address} and this one differ: {'; '.join(problems)}" if problems else None


def get(bootstrap_address: str, path: str) -> Answer:
    """Requests a path of a bootstrap server; reads no more of its answer than one can have, and decodes nothing.

    Args:
        bootstrap_address: host and port. Requests name it: anybody may answer there.

    Raises:
        RegistryUnreachableError: if nothing answers, or what answers does not end.
    """
    url = f"http://{bootstrap_address}{path}"
    try:
        with httpx.Client(timeout=_ANSWER_S, trust_env=False) as client:
            return request(client, url, most_bytes=_MOST_ANSWER_BYTES, timeout_s=_ANSWER_S)
    except httpx.HTTPError as error:
        raise RegistryUnreachableError(
            f"the bootstrap server at {bootstrap_address} cannot be reached: {error}"
        ) from error


def ask(bootstrap_address: str) -> Announcement:
    """Requests a bootstrap server's announcement.

    Args:
        bootstrap_address: host and port.

    Raises:
        RegistryUnreachableError: if nothing answers.
        RegistryError: if the bootstrap server does not run kvferry.
    """
    answer = get(bootstrap_address, ROUTE)
    try:
        if answer.status == 200:
            return _ANNOUNCEMENT.decode(answer.body)
    except msgspec.MsgspecError:
        pass
    raise RegistryError(
        f"the bootstrap server at {bootstrap_address} knows nothing of kvferry (status {answer.status}): give both "
        "sides the same --disaggregation-transfer-backend, and install kvferry on both"
    )


def registry_url(bootstrap_address: str, announcement: Announcement, settings: Settings) -> str:
    """Returns the address of the registry that has an engine's ranks."""
    if settings.registry_url is not None or announcement.registry_port is None:
        return settings.registry_address
    host = urlsplit(f"//{bootstrap_address}").hostname or ""
    scheme = urlsplit(settings.registry_address).scheme
    return str(httpx.URL(scheme=scheme, host=host, port=announcement.registry_port))


class Directory(RegistryClient):
    """The registries of all prefill engines that requests have named, as one."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.registry_address)
        self._settings = settings
        # Guards the clients: the threads that look up prefill servers add, the endpoint's look up ranks.
        self._clients_lock = threading.Lock()
        self._by_engine: dict[str, RegistryClient] = {}

    def add(self, engine: str, url: str) -> None:
        """Remembers where an engine is registered."""
        with self._clients_lock:
            known = self._by_engine.get(engine)
            if known is not None and known.url == url.rstrip("/"):
                return
            self._by_engine[engine] = create_registry_client(self._settings, url)
        if known is not None:
            known.close()

    def url_for(self, engine: str) -> str:
        """Returns the address of an engine's registry, see `RegistryClient.url_for`."""
        with self._clients_lock:
            client = self._by_engine.get(engine)
        return self.url if client is None else client.url

    def engine(self, name: str) -> EngineView:
        """Returns the live ranks of one engine, see `RegistryClient.engine`."""
        with self._clients_lock:
            client = self._by_engine.get(name)
        if client is None:
            raise RegistryUnreachableError(f"no request has named a bootstrap server of engine {name!r} yet")
        return client.engine(name)

    def close(self) -> None:
        """Closes all connections."""
        with self._clients_lock:
            clients = list(self._by_engine.values())
        for client in clients:
            client.close()
        super().close()
