"""The client of kvferry's own registry, over HTTP."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from kvferry._version import __version__
from kvferry.answers import Answer
from kvferry.control.credentials import bearing, client_context
from kvferry.control.http_connections import HttpConnections
from kvferry.control.registry import Grant, Registry
from kvferry.control.registry_messages import (
    LONGEST_RETRY_S,
    UNKNOWN_ENGINE,
    EngineList,
    Health,
    Lease,
    Problem,
    Released,
    Removal,
    ToldToDrain,
)
from kvferry.errors import (
    KVFerryError,
    RankReplacedError,
    RegistrationRefusedError,
    RegistryAccessError,
    RegistryError,
    RegistryUnreachableError,
    SettingsError,
)
from kvferry.findings import Finding, good, warning
from kvferry.hosts import is_loopback
from kvferry.loggers import logger_of
from kvferry.protocol.bounded import remember
from kvferry.protocol.wire.registrations import EngineView, RankRegistration, check_engine_name

AnswerT = TypeVar("AnswerT")

# Made here, in one thread: msgspec 0.22 crashes the process where two threads are the first to decode a type.
_LEASE = msgspec.json.Decoder(Lease)
_REMOVAL = msgspec.json.Decoder(Removal)
_ENGINE = msgspec.json.Decoder(EngineView)
_ENGINES = msgspec.json.Decoder(EngineList)
_TOLD_TO_DRAIN = msgspec.json.Decoder(ToldToDrain)
_RELEASED = msgspec.json.Decoder(Released)
_HEALTH = msgspec.json.Decoder(Health)
_PROBLEM = msgspec.json.Decoder(Problem)

# Sixteen thousand registrations take about five MiB: more than this did not come from a registry.
_LARGEST_ANSWER_BYTES = 64 * 1024 * 1024
# Shorter than the server keeps an idle connection, so that a request meets none that is about to close.
_KEEP_ALIVE_S = 170.0
_MOST_VIEWS = 64


class RegistryClient(Registry):
    """A client of kvferry's own registry, over HTTP: what it is asked, and the errors that it raises, are `Registry`'s.

    Args:
        url: the registry's address, such as "http://127.0.0.1:8998"; a path stands before the registry's own.
        timeout_s: how long each step of a request may take: to connect, to send, to wait for the answer, to
            read it.
        token: the one that the registry requires, if any; see `credentials`.
        trusted_certificates: PEM file of the certificates that may vouch for a registry with https; None trusts those
            that httpx trusts.

    Raises:
        SettingsError: if the url is no http or https address, the timeout is not positive and finite, or the
            certificates cannot be read.
    """

    def __init__(
        self, url: str, timeout_s: float = 2.0, *, token: str | None = None, trusted_certificates: Path | None = None
    ) -> None:
        _check_url(url)
        if not 0 < timeout_s <= threading.TIMEOUT_MAX:
            raise SettingsError(f"the registry's timeout_s is {timeout_s}: it must be positive and finite")
        self._url = url.rstrip("/")
        self._token = token
        # Loading certificates takes long, and without TLS there are none to verify.
        has_tls = self._url.lower().startswith("https:")
        verify = client_context(trusted_certificates) if has_tls else False
        if token is not None and not has_tls and not is_loopback(urlsplit(url).hostname or ""):
            logger_of(__name__).warning(
                "the registry at %s is asked without TLS: whoever listens on that network can register there as well; "
                "see docs/security.md",
                self._url,
            )
        what = f"the client of the registry at {self._url}"
        self._connections = HttpConnections(what, timeout_s, lambda: verify, idle_s=_KEEP_ALIVE_S)
        self._lock = threading.Lock()  # guards the views
        # By engine: what the registry said of it, and the tag with which it says whether that is still so.
        self._views: OrderedDict[str, tuple[EngineView, str]] = OrderedDict()
        self._granted: Answer | None = None  # the last that granted a lease
        self._told_to_drain: set[str] = set()  # endpoints that were registered here

    @property
    def url(self) -> str:
        return self._url

    def register(self, registration: RankRegistration) -> float:
        return self.grant(registration).lease_s

    def grant(self, registration: RankRegistration) -> Grant:
        path = _rank_path(registration.engine, registration.engine_rank)
        answer = self.exchange("PUT", path, content=msgspec.json.encode(registration))
        lease = self._answer_or_refusal(answer, _LEASE)
        self._granted = answer
        if lease.draining:
            self._told_to_drain.add(registration.incarnation)
        return Grant(lease.lease_s, lease.lease_s / 3 if lease.renew_s is None else lease.renew_s, lease.return_s)

    @property
    def has_hung_up(self) -> bool:
        return self._granted is not None and self._granted.has_hung_up()

    def remove(self, engine: str, engine_rank: int, incarnation: str) -> bool:
        check_engine_name(engine)
        query = {"incarnation": incarnation}
        return self._answer(self.exchange("DELETE", _rank_path(engine, engine_rank), params=query), _REMOVAL).removed

    def engine(self, name: str) -> EngineView:
        check_engine_name(name)
        known = self._views.get(name)
        headers = {} if known is None else {"if-none-match": known[1]}
        answer = self.exchange("GET", f"/v1/engines/{quote(name, safe='')}", headers=headers)
        retry_s = _seconds(answer.headers.get("retry-after", ""))
        if answer.status == 304 and known is not None:
            return msgspec.structs.replace(known[0], retry_s=retry_s)
        if answer.status == 404:
            problem = self._problem(answer.body)
            if problem is not None and problem.error == UNKNOWN_ENGINE:
                return EngineView(
                    engine=name,
                    registrations=(),
                    world_size=0,
                    complete=False,
                    others=problem.others,
                    num_others=problem.num_others,
                    retry_s=retry_s,
                )
        view = self._answer(answer, _ENGINE)
        tag = answer.headers.get("etag")
        if tag is not None:
            with self._lock:
                remember(self._views, name, (view, tag), _MOST_VIEWS)
        return msgspec.structs.replace(view, retry_s=retry_s)

    def engines(self) -> tuple[EngineView, ...]:
        return self._answer(self.exchange("GET", "/v1/engines"), _ENGINES).engines

    def drain(self, engine: str) -> tuple[str, ...]:
        check_engine_name(engine)
        answer = self.exchange("PUT", f"/v1/draining/{quote(engine, safe='')}")
        return self._answer_or_refusal(answer, _TOLD_TO_DRAIN).endpoints

    def drains(self, endpoint: str) -> bool:
        return endpoint in self._told_to_drain

    def release(self, endpoint: str) -> None:
        self._answer_or_refusal(self.exchange("PUT", f"/v1/released/{quote(endpoint, safe='')}"), _RELEASED)

    def released(self) -> tuple[str, ...]:
        return self._answer(self.exchange("GET", "/v1/released"), _RELEASED).endpoints

    def health(self) -> Health:
        """Returns the registry's version, and how long it has been up.

        Raises:
            RegistryUnreachableError: if nothing answered.
            RegistryError: if what answered is no registry, or it failed.
        """
        return self._answer(self.exchange("GET", "/health"), _HEALTH)

    def findings(self) -> Iterator[Finding]:
        health = self.health()
        yield good("registry", f"{self._url} answers, version {health.version}, up for {health.uptime_s:.0f} s")
        if health.version != __version__:
            what = f"it runs {health.version}, this is {__version__}"
            yield warning("registry", what, "upgrade it before the engines, and these to the same release")

    def load(self) -> None:
        self._connections.client()

    def close(self) -> None:
        self._connections.close()

    def exchange(self, method: str, path: str, *, headers: Mapping[str, str] | None = None, **arguments: Any) -> Answer:
        """Makes a request; returns the answer, whatever it is."""
        import httpx

        arguments |= {"method": method, "headers": {**bearing(self._token), **(headers or {})}}
        try:
            answer = self._connections.ask(self._url + path, most_bytes=_LARGEST_ANSWER_BYTES, **arguments)
        except httpx.RemoteProtocolError as error:
            # A registry that is stopped between request and answer looks like this. httpx has no class for
            # it.
            if "disconnected" in str(error):
                raise self._unreachable(error) from error
            raise RegistryError(
                f"what answers at {self._url} is no registry ({error}): check the registry's url, and any proxy in "
                "between"
            ) from error
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        # A url that reads well may still hold a name that no host can have.
        except (httpx.InvalidURL, UnicodeError) as error:
            raise SettingsError(f"the registry's url {self._url!r} cannot be used: {error}") from error
        if answer.status == 401:
            raise self._no_access()
        return answer

    def _unreachable(self, error: Exception) -> RegistryUnreachableError:
        import httpx

        cause = str(error) or type(error).__name__
        remedy = "check that it runs, that the url is right, and that no firewall stands between"
        if "SSL" in cause:
            remedy = (
                "check that it speaks TLS, that its certificate names that host, and that KVFERRY_REGISTRY_TLS_CA "
                "vouches for the certificate"
            )
        elif "disconnected" in cause:
            remedy += "; one with TLS has an https url"
        unreachable = RegistryUnreachableError(
            f"the registry at {self._url} cannot be reached ({type(error).__name__}: {cause}): {remedy}"
        )
        unreachable.timed_out = isinstance(error, httpx.TimeoutException)
        return unreachable

    def _no_access(self) -> RegistryAccessError:
        mine = "this side knows none" if self._token is None else "this side knows another"
        return RegistryAccessError(
            f"the registry at {self._url} answers only to those who know its secret, and {mine}: give both the same "
            "one, in a file (KVFERRY_SECRET_FILE) or as KVFERRY_SECRET"
        )

    def _answer_or_refusal(self, answer: Answer, decoder: msgspec.json.Decoder[AnswerT]) -> AnswerT:
        problem = self._problem(answer.body) if 400 <= answer.status < 500 else None
        if problem is not None:
            is_replaced = problem.error == RankReplacedError.__name__
            kind = RankReplacedError if is_replaced else RegistrationRefusedError
            raise kind(f"the registry at {self._url} refused: {problem.message}")
        return self._answer(answer, decoder)

    def _answer(self, answer: Answer, decoder: msgspec.json.Decoder[AnswerT]) -> AnswerT:
        status, body = answer.status, answer.body
        if status == 200:
            try:
                return decoder.decode(body)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KVFerryError) as error:
                raise self._no_registry(status, body) from error
        problem = self._problem(body)
        if problem is None:
            raise self._no_registry(status, body)
        raise RegistryError(
            f"the registry at {self._url} answered with status {status}, {problem.error}: {problem.message}"
        )

    def _problem(self, body: bytes) -> Problem | None:
        try:
            return _PROBLEM.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

    def _no_registry(self, status: int, body: bytes) -> RegistryError:
        return RegistryError(
            f"what answers at {self._url} is not a registry of this version (status {status}, body beginning "
            f"{body[:60]!r}): check the registry's url"
        )


def _seconds(text: str) -> float:
    """Reads a `Retry-After`; one that is a date, or nonsense, counts as none."""
    return min(float(text), LONGEST_RETRY_S) if text.isascii() and text.isdecimal() and len(text) <= 9 else 0.0


def _rank_path(engine: str, engine_rank: int) -> str:
    return f"/v1/engines/{quote(engine, safe='')}/ranks/{engine_rank}"


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good or not url.isascii() or not url.isprintable() or " " in url:
        raise SettingsError(
            f"{url!r} is no address of a registry: it must read like http://127.0.0.1:8998 (IPv6 in brackets)"
        )
    if parts.query or parts.fragment or "?" in url or "#" in url:
        raise SettingsError(f"the registry's url {url!r} has a query or a fragment: leave them out")
    if parts.username is not None or parts.password is not None:
        # Not quoted: every message about the registry, this one too, would carry the password into logs.
        raise SettingsError("the registry's url carries a user name or a password: leave them out")
