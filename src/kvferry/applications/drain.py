"""`kvferry drain`: tells engines and endpoints to leave without a failed request, and waits until they have."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TypeAlias

import httpx
import msgspec

from kvferry.answers import request
from kvferry.applications.top.asking import IS_IT_STARTED, addresses, is_refused, present
from kvferry.control.construction import create_registry_client, credentials_of
from kvferry.control.credentials import bearing
from kvferry.control.registry import Registry
from kvferry.errors import ConfigurationError, ObserveError, RegistryError
from kvferry.observe.settings import ObserveSettings
from kvferry.observe.status import LoadStatus
from kvferry.settings import Settings

_LOOK_S = 0.25
_SAY_S = 5.0
_ANSWER_S = 5.0
_MOST_ANSWER_BYTES = 64 * 1024 * 1024


class _Engine:
    """A prefill engine, at the registry."""

    def __init__(self, registry: Registry, name: str) -> None:
        self._registry = registry
        self._name = name
        self._told: frozenset[str] = frozenset()
        self._drained: set[str] = set()

    def begin(self) -> str:
        """Tells it to drain. Returns what that means, in a sentence."""
        self._told = frozenset(self._registry.drain(self._name))
        return f"engine {self._name!r} drains: {len(self._told)} ranks hear of it when they renew their registration"

    def open(self) -> list[str]:
        """Returns what is open still, a sentence each; nothing if it has drained, or left."""
        try:
            view = self._registry.engine(self._name)
        except RegistryError as problem:
            return [str(problem)]
        self._drained |= {each.incarnation for each in view.registrations if each.drained}
        listed = {each.incarnation: each for each in view.registrations}
        still = []
        for incarnation in sorted(self._told - self._drained):
            if (each := listed.get(incarnation)) is None:
                still.append(f"{incarnation!r} of {self._name!r} left without saying that it has drained")
                continue
            again = "" if each.draining else "; the registry has forgotten that it is to drain: drain it again"
            still.append(
                f"rank {each.engine_rank} of {self._name!r} has not said that it has drained: {each.open_rooms} rooms "
                f"open{again}"
            )
        return still


class _Seen(msgspec.Struct, frozen=True):
    """What is needed of an endpoint's status."""

    side: str
    engine: str
    rank: int
    is_drained: bool
    load: LoadStatus


_SEEN = msgspec.json.Decoder(_Seen)


class _Endpoint:
    """An endpoint of either side, at its observe server."""

    def __init__(self, client: httpx.Client, address: str, token: str | None) -> None:
        self._client = client
        self._address = address
        self._headers = bearing(token)

    def begin(self) -> str:
        try:
            seen = self._ask("POST", "drain", 202)
        except httpx.HTTPError as error:
            raise ObserveError(f"nobody answers at {self._address} ({error}): {IS_IT_STARTED}") from error
        return f"{seen.side} rank {seen.rank} of {seen.engine!r} at {self._address} drains"

    def open(self) -> list[str]:
        try:
            seen = self._ask("GET", "status", 200)
        except httpx.HTTPError as error:
            if is_refused(error):
                return []  # it has left: it answered when it was told to drain
            return [f"{self._address} does not answer: {error}"]
        if seen.is_drained:
            return []
        load = seen.load
        waits = f", {load.pending_rooms} that decode ranks wait for" if load.pending_rooms else ""
        return [
            f"{seen.side} rank {seen.rank} of {seen.engine!r} at {self._address}: {load.open_rooms} rooms open{waits}"
        ]

    def _ask(self, method: str, page: str, expected: int) -> _Seen:
        url = f"http://{self._address}/{page}"
        answer = request(
            self._client,
            url,
            method=method,
            most_bytes=_MOST_ANSWER_BYTES,
            timeout_s=_ANSWER_S,
            headers=self._headers if method == "POST" else {},
        )
        try:
            if answer.status == expected:
                return _SEEN.decode(answer.body)
        except msgspec.MsgspecError:
            pass
        said = answer.body[:300].decode(errors="replace")
        raise ObserveError(f"{self._address} does not drain, and answers with status {answer.status}: {said}")


_Target: TypeAlias = _Engine | _Endpoint


def run(given: Sequence[str], *, timeout_s: float, say: Callable[[str], None]) -> bool:
    """Drains engines and endpoints, and waits until they have.

    Args:
        given: names of engines, and addresses of endpoints; all endpoints of this machine if empty.
        timeout_s: how long to wait.
        say: prints a line.

    Returns:
        Whether nothing is open any more.

    Raises:
        ConfigurationError: if nothing is named, or an address makes no sense.
        ObserveError: if an endpoint does not answer, or lets only others drain it.
        RegistryError: if the registry cannot be asked, or knows no such engine.
    """
    settings = Settings()
    with ExitStack() as opened:
        targets = list(_targets(given, settings, opened))
        for target in targets:
            say(target.begin())
        return _wait(targets, timeout_s, say)


def _targets(given: Sequence[str], settings: Settings, opened: ExitStack) -> Iterator[_Target]:
    urls = [each.removeprefix("http://") for each in given if each.startswith("http://")]
    names = [each for each in given if not each.startswith("http://")]
    if not given:
        port = settings.of(ObserveSettings).observe_port
        if not port:
            raise ConfigurationError(
                "nothing to drain: name a prefill engine, or endpoints as http://host:9470, or set "
                "KVFERRY_OBSERVE_PORT for those of this machine"
            )
        urls = present(port)
    if names:
        registry = opened.enter_context(create_registry_client(settings))
        yield from (_Engine(registry, name) for name in names)
    if urls:
        credentials = credentials_of(settings)
        token = None if credentials is None else credentials.observe_token
        client = opened.enter_context(httpx.Client(timeout=_ANSWER_S, trust_env=False))
        yield from (_Endpoint(client, address, token) for address in addresses(urls))


def _wait(targets: Sequence[_Target], timeout_s: float, say: Callable[[str], None]) -> bool:
    """Waits until nothing is open, and says every few seconds what is."""
    begun_at = said_at = time.monotonic()
    while True:
        still = [line for target in targets for line in target.open()]
        now = time.monotonic()
        if not still:
            say(f"nothing is open any more, after {now - begun_at:.1f} s")
            return True
        is_over = now - begun_at >= timeout_s
        if is_over or now - said_at >= _SAY_S:
            said_at = now
            for line in still:
                say(line)
        if is_over:
            say(f"this was open after {timeout_s:g} s (--timeout)")
            return False
        time.sleep(_LOOK_S)
