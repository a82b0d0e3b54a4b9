"""How the two sides find each other: through SGLang's bootstrap servers, so that users need not run or name a registry.

Every prefill server runs a bootstrap server, and requests name it to the decode side. Beside it runs a registry of
kvferry's, for the ranks of this one engine; the bootstrap server announces its port and the engine's name. Where the
settings name a registry for all engines, that is used instead.
"""

from __future__ import annotations

import platform
import re
import secrets
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
import msgspec

from kvferry import EngineView, Registry, Settings, create_registry_client
from kvferry.answers import Answer, request
from kvferry.errors import EngineEndedError, RegistryError, RegistryUnreachableError

if TYPE_CHECKING:
    from kvferry.control.registry import OnChange
    from kvferry.findings import Finding
    from kvferry.protocol.wire.registrations import RankRegistration

ROUTE = "/kvferry"
"""The bootstrap server's path for announcements."""

_ANSWER_S = 5.0
_ANSWER_AGAIN_S = 2.0
"""Where look-ups of other engines wait behind it: as long as a registry has."""
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Bootstrap servers speak plain HTTP. To load certificates for each question would keep the scheduler's thread from the
interpreter for tenths of a second where requests name many addresses."""
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


def new_engine_name(port: int) -> str:
    """Returns a name for the prefill engine of a bootstrap server that starts on this machine, as no other start has.

    Machines of one name are common, and so is the default port.
    """
    node = re.sub("[^A-Za-z0-9.-]", "-", platform.node()).lstrip("-.")[:80]
    return f"sglang-{node}:{port}@{secrets.token_hex(4)}"


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


def get(bootstrap_address: str, path: str, timeout_s: float = _ANSWER_S) -> Answer:
    """Requests a path of a bootstrap server; reads no more of its answer than one can have, and decodes nothing.

    Args:
        bootstrap_address: host and port. Requests name it: anybody may answer there.

    Raises:
        EngineEndedError: if nobody listens there.
        RegistryUnreachableError: if nothing answers, or what answers does not end.
    """
    url = f"http://{bootstrap_address}{path}"
    try:
        with httpx.Client(timeout=timeout_s, trust_env=False, verify=_NO_TLS) as client:
            return request(client, url, most_bytes=_MOST_ANSWER_BYTES, timeout_s=timeout_s)
    except httpx.HTTPError as error:
        problem = f"the bootstrap server at {bootstrap_address} cannot be reached: {error}"
        if _is_refused(error):
            raise EngineEndedError(f"{problem}; its prefill server has ended, or is at another address") from error
        raise RegistryUnreachableError(problem) from error


def _is_refused(error: BaseException | None) -> bool:
    """Whether a machine has answered that nobody listens there."""
    while error is not None and not isinstance(error, ConnectionRefusedError):
        error = error.__cause__ or error.__context__
    return error is not None


def ask(bootstrap_address: str, timeout_s: float = _ANSWER_S) -> Announcement:
    """Requests a bootstrap server's announcement.

    Raises:
        EngineEndedError, RegistryUnreachableError: as `get`.
        RegistryError: if the bootstrap server does not run kvferry.
    """
    answer = get(bootstrap_address, ROUTE, timeout_s)
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


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an engine is registered.

    Attributes:
        registry: a client of its registry.
        bootstrap_address: of the bootstrap server that announced it.
    """

    registry: Registry
    bootstrap_address: str


class Directory(Registry):
    """The registries of all prefill engines that requests have named, as one; the rest is asked of the settings' own.

    A prefill server that is started again is another engine, behind the same bootstrap address. Where a registry cannot
    be reached, or does not know the engine, its bootstrap server is asked whether it is the same before that counts.
    """

    def __init__(self, settings: Settings, lost: Callable[[str], None] = lambda _: None) -> None:
        """Knows no engine yet.

        Args:
            lost: called, on any thread, with a bootstrap server's address where its engine was lost: it may have ended,
                or another one announces itself there.
        """
        self._named = create_registry_client(settings)  # the one that the settings name
        self._settings = settings
        self._lost = lost
        # Guards the places: the threads that look up prefill servers add, the endpoint's look up ranks.
        self._places_lock = threading.Lock()
        self._places: dict[str, _Place] = {}

    def add(self, engine: str, url: str, bootstrap_address: str) -> None:
        """Remembers where an engine is registered, in the place of one that its bootstrap server announced before.

        Args:
            bootstrap_address: host and port of the bootstrap server that announced it.
        """
        with self._places_lock:
            known = self._places.get(engine)
            is_known = known is not None and known.registry.url == url.rstrip("/")
            registry = known.registry if known and is_known else create_registry_client(self._settings, url)
            earlier = [name for name, each in self._places.items() if each.bootstrap_address == bootstrap_address]
            left = [self._places.pop(name) for name in {engine, *earlier} if name in self._places]
            self._places[engine] = _Place(registry, bootstrap_address)
        for each in left:
            if each.registry is not registry:
                each.registry.close()

    def add_all(self, other: Directory) -> None:
        """Remembers every engine that another directory knew."""
        with other._places_lock:
            places = dict(other._places)
        for engine, place in places.items():
            self.add(engine, place.registry.url, place.bootstrap_address)

    @property
    def url(self) -> str:
        return self._named.url

    def url_for(self, engine: str) -> str:
        """Returns the address of an engine's registry, see `Registry.url_for`."""
        place = self._place(engine)
        return self.url if place is None else place.registry.url

    def engine(self, name: str) -> EngineView:
        """Returns the live ranks of one engine, see `Registry.engine`."""
        place = self._place(name)
        if place is None:
            raise EngineEndedError(f"no bootstrap server that requests have named announces engine {name!r}")
        try:
            view = place.registry.engine(name)
            if view.registrations:
                return view
        except RegistryError:
            self._check_announced(name, place.bootstrap_address)
            raise
        self._check_announced(name, place.bootstrap_address)
        return view

    def lost(self, engine: str) -> None:
        """Has the bootstrap server of an engine looked up anew, see `Registry.lost`."""
        place = self._place(engine)
        if place is not None:
            self._lost(place.bootstrap_address)

    def register(self, registration: RankRegistration) -> float:
        return self._named.register(registration)

    def remove(self, engine: str, engine_rank: int, incarnation: str) -> bool:
        return self._named.remove(engine, engine_rank, incarnation)

    def engines(self) -> tuple[EngineView, ...]:
        return self._named.engines()

    def drain(self, engine: str) -> tuple[str, ...]:
        """Tells an engine to drain, at its own registry, see `Registry.drain`."""
        place = self._place(engine)
        return (self._named if place is None else place.registry).drain(engine)

    def drains(self, endpoint: str) -> bool:
        return self._named.drains(endpoint)

    def release(self, endpoint: str) -> None:
        self._named.release(endpoint)

    def released(self) -> tuple[str, ...]:
        return self._named.released()

    def findings(self) -> Iterator[Finding]:
        return self._named.findings()

    def watch(self, changed: OnChange) -> None:
        self._named.watch(changed)

    def load(self) -> None:
        self._named.load()

    def close(self) -> None:
        with self._places_lock:
            places = list(self._places.values())
        for place in places:
            place.registry.close()
        self._named.close()

    def _place(self, engine: str) -> _Place | None:
        with self._places_lock:
            return self._places.get(engine)

    def _check_announced(self, engine: str, address: str) -> None:
        """Asks a bootstrap server whether it is the engine's still, and nothing where it does not answer.

        Raises:
            EngineEndedError: if it has ended, or another start of it is there now.
        """
        try:
            announced = ask(address, _ANSWER_AGAIN_S).engine
        except EngineEndedError:
            self._lost(address)
            raise
        except RegistryError:
            return
        if announced != engine:
            self._lost(address)
            raise EngineEndedError(
                f"prefill engine {engine!r} has ended: the bootstrap server at {address} announces {announced!r} now"
            )
