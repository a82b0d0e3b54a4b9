"""The members of an etcd cluster, asked through etcd3gw: one after the other until one answers, and the same one next.

etcd3gw speaks etcd's JSON gateway to one member. What an application with several needs is here: the next member where
one does not answer, an end to it all, a user's token, and sentences for what etcd refuses. What is kept in etcd, and
why, is `registry`'s.
"""

from __future__ import annotations

import importlib.util
import io
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from kvferry.control.etcd.address import EtcdSettings, EtcdUrl
from kvferry.control.etcd.messages import Token, converted
from kvferry.control.owning_process import OwningProcess
from kvferry.errors import (
    RegistryAccessError,
    RegistryError,
    RegistryUnreachableError,
    SettingsError,
    UsageError,
    quoted,
)

if TYPE_CHECKING:
    from etcd3gw import Etcd3Client
    from requests import PreparedRequest, Response, Session

Answer = TypeVar("Answer")

_API_PATH = "/v3/"  # of etcd 3.4 and later
_LARGEST_ANSWER_BYTES = 64 * 1024 * 1024
_PIECE_BYTES = 64 * 1024
_PAUSE_S = 0.1
_MEMBER_S = 1.0  # how long one member may take to be reached, and to answer
_DEADLINE_S = 3.0  # after that no further member is asked

# How gRPC numbers what goes wrong; the gateway passes the numbers on.
_INVALID, _DEADLINE, _NOT_FOUND, _DENIED, _EXHAUSTED, _UNAVAILABLE, _UNAUTHENTICATED = 3, 4, 5, 7, 8, 14, 16


class EtcdLeaseNotFoundError(RegistryError):
    """A lease has run out, or was revoked."""


class _Refusal(msgspec.Struct, frozen=True):
    """What a member says that does not do what it was asked for; why has either name, by its version."""

    code: int
    error: str = ""
    message: str = ""


_REFUSAL = msgspec.json.Decoder(_Refusal)


class _AwayError(Exception):
    """A member does not answer, or cannot at present: another one may."""


class _TokenExpiredError(Exception):
    """A member knows our token no more."""


class EtcdMembers:
    """The members of a cluster. May be used from several threads at once.

    Args:
        address: where they are.
        own: how they let us in.
        trusted: PEM file of the certificates that may vouch for members; None trusts those that requests trusts.

    Raises:
        SettingsError: if etcd3gw is not installed, or a certificate cannot be used.

    Attributes:
        token: with which requests are allowed; None where none is needed.
    """

    def __init__(self, address: EtcdUrl, own: EtcdSettings, trusted: Path | None) -> None:
        if importlib.util.find_spec("etcd3gw") is None:
            raise SettingsError(
                f"the registry's url is {address.url}, and etcd3gw, through which kvferry asks an etcd, is not "
                "installed: pip install etcd3gw"
            )
        self._process = OwningProcess()
        self._address = address
        self._own = own
        self._trusted = trusted
        if address.has_tls:
            own.check_certificates(trusted)
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._clients: tuple[Etcd3Client, ...] = ()
        self._is_closed = False
        self._current = 0  # of the members, the one that answered last
        self.token: str | None = None
        self._streams: set[Response] = set()

    def load(self) -> None:
        """Loads what requests need, without making one."""
        self._connections()

    def ask(self, path: str, body: dict[str, Any], kind: type[Answer]) -> Answer:
        """Asks whichever member answers.

        A member that did not answer may have done what it was asked for all the same: what is asked must bear to be
        asked twice.

        Args:
            path: of etcd's JSON gateway, such as "kv/txn".
            body: of the request.
            kind: what the answer is.

        Raises:
            EtcdLeaseNotFoundError: if it is about a lease that does not exist.
            RegistryAccessError: if the cluster does not let us in, or not to these keys.
            RegistryUnreachableError: if no member answers.
            RegistryError: if what answers is no etcd, or it refuses.
        """
        deadline = time.monotonic() + _DEADLINE_S
        away: dict[str, str] = {}
        while True:
            clients = self._connections()
            first, is_hopeless = self._current, True
            for number in ((first + each) % len(clients) for each in range(len(clients))):
                try:
                    answer = self._ask_one(clients[number], path, body, kind)
                except _AwayError as error:
                    why = away[self._address.members[number]] = str(error)
                    is_hopeless &= "refused" in why or "SSL" in why
                    if time.monotonic() >= deadline:
                        raise self._unreachable(away) from error.__cause__
                    continue
                self._current = number
                return answer
            if is_hopeless:  # all said so at once, and will say so again
                raise self._unreachable(away)
            time.sleep(_PAUSE_S)

    def ask_each(self, path: str, kind: type[Answer]) -> Iterator[tuple[str, Answer | str]]:
        """Asks every member the same, and yields its host and port with the answer, or why there is none."""
        for member, client in zip(self._address.members, self._connections(), strict=True):
            try:
                yield member, self._ask_one(client, path, {}, kind)
            except _AwayError as error:
                yield member, str(error)

    def stream(self, path: str, body: dict[str, Any], kind: type[Answer], quiet_s: float) -> Iterator[Answer]:
        """Yields what the member that answered last says from now on, until it cannot go on or we are closed.

        Where it fails, or is silent for so long, another one is asked next.

        Raises:
            RegistryError: if it cannot be asked, or refuses.
        """
        number = self._current
        client = self._connections()[number]
        import requests

        response = None
        try:
            # Else one that has lost the others would go on in silence.
            headers = {**self._authorization(client), "grpc-metadata-hasleader": "true"}
            response = client.session.post(
                client.get_url(path), json=body, headers=headers, stream=True, timeout=(_MEMBER_S, quiet_s)
            )
            with self._lock:
                self._streams.add(response)
            if self._is_closed:
                return
            if response.status_code != 200:
                raise self._refused(next(_lines(response), b"").decode(errors="replace"))
            for line in _lines(response):
                answer = json.loads(line)
                if not isinstance(answer, dict) or "result" not in answer:
                    raise _AwayError(quoted(Exception(line.decode(errors="replace"))))
                yield converted(answer["result"], kind)
        except _TokenExpiredError:
            self.token = None
        except (requests.RequestException, ValueError, OSError, _AwayError) as error:
            if self._current == number:
                self._current = (number + 1) % len(self._address.members)
            why = str(error) if isinstance(error, _AwayError) else _why(error)
            raise RegistryUnreachableError(f"the registry at {self._address.url} fell silent: {why}") from error
        finally:
            if response is not None:
                with self._lock:
                    self._streams.discard(response)
                response.close()

    def forget_token(self) -> None:
        """Has the user get a new token with the next request."""
        self.token = None

    def close(self) -> None:
        """Closes the connections, and ends what is read from them. May be called again."""
        if not self._process.is_this:
            return
        with self._lock:
            self._is_closed = True
            session, streams = self._session, list(self._streams)
        for each in streams:
            getattr(each.raw, "shutdown", each.raw.close)()  # before urllib3 2.3 the reader notices later
        if session is not None:
            session.close()  # may be closed again: the call before may have been interrupted here

    def _connections(self) -> tuple[Etcd3Client, ...]:
        self._process.check(f"the client of the registry at {self._address.url}")
        with self._lock:
            if self._is_closed:
                raise UsageError(f"the client of the registry at {self._address.url} was closed")
            if self._session is None:
                # Imported at the first request, as httpx is for the other registry.
                from etcd3gw import Etcd3Client

                self._session = _session(self._own, self._trusted)
                self._clients = tuple(
                    Etcd3Client(
                        host=urlsplit(f"//{member}").hostname or "",
                        port=urlsplit(f"//{member}").port or 0,
                        protocol="https" if self._address.has_tls else "http",
                        timeout=_MEMBER_S,
                        api_path=_API_PATH,
                        session=self._session,
                    )
                    for member in self._address.members
                )
            return self._clients

    def _ask_one(self, client: Etcd3Client, path: str, body: dict[str, Any], kind: type[Answer]) -> Answer:
        try:
            return self._post(client, path, body, kind, self._authorization(client))
        except _TokenExpiredError:  # every member has forgotten it when all were started again
            self.token = None
        try:
            return self._post(client, path, body, kind, self._authorization(client))
        except _TokenExpiredError as error:
            raise _AwayError(str(error)) from error

    def _authorization(self, client: Etcd3Client) -> dict[str, str]:
        if self._own.etcd_user is None:
            return {}
        token = self.token
        if token is None:
            body = {"name": self._own.etcd_user, "password": self._own.password}
            token = self.token = self._post(client, "auth/authenticate", body, Token, {}).token
        return {"authorization": token}

    def _post(
        self, client: Etcd3Client, path: str, body: dict[str, Any], kind: type[Answer], headers: dict[str, str]
    ) -> Answer:
        import requests
        from etcd3gw.exceptions import Etcd3Exception

        try:
            return converted(client.post(client.get_url(path), json=body, headers=headers), kind)
        except Etcd3Exception as error:
            if isinstance(error.__context__, requests.RequestException):
                raise _AwayError(_why(error.__context__)) from error
            raise self._refused(error.detail_text or str(error)) from error
        except (ValueError, requests.exceptions.ContentDecodingError) as error:
            raise self._no_etcd(str(error)) from error
        except (requests.RequestException, OSError) as error:
            raise _AwayError(_why(error)) from error
        except RegistryError as error:
            raise self._no_etcd(str(error)) from error

    def _refused(self, text: str) -> Exception:
        """Returns the error for what a member says that does not do what it was asked for."""
        try:
            refusal = _REFUSAL.decode(text.encode())
        except (msgspec.MsgspecError, UnicodeEncodeError):
            return self._no_etcd(text)
        why, user, url = quoted(Exception(refusal.message or refusal.error)), self._own.etcd_user, self._address.url
        if refusal.code in (_UNAVAILABLE, _DEADLINE):
            return _AwayError(why)
        if refusal.code == _UNAUTHENTICATED or "auth store is old" in why:
            return _TokenExpiredError(why)
        if refusal.code == _NOT_FOUND and "lease" in why:
            return EtcdLeaseNotFoundError(f"the registry at {url}: {why}")
        if refusal.code == _DENIED or (refusal.code == _INVALID and ("user" in why or "auth" in why)):
            mine = "this side has no user" if user is None else f"this side is user {user!r}"
            return RegistryAccessError(
                f"the registry at {url} does not let this side in ({why}), and {mine}: give it KVFERRY_ETCD_USER and "
                f"KVFERRY_ETCD_PASSWORD_FILE, and the user a role that reads and writes {self._address.prefix}/"
            )
        if refusal.code == _EXHAUSTED and "space" in why:
            return RegistryError(
                f"the registry at {url} has no space left and takes no new registration ({why}): compact and "
                "defragment it, then `etcdctl alarm disarm`; docs/etcd.md has the commands"
            )
        return RegistryError(f"the registry at {url} refused: {why}")

    def _no_etcd(self, text: str) -> RegistryError:
        return RegistryError(
            f"what answers at {self._address.url} is no etcd of version 3.4 or newer with its JSON gateway (it says "
            f"{text[:60]!r}): check the registry's url"
        )

    def _unreachable(self, away: dict[str, str]) -> RegistryUnreachableError:
        members = "; ".join(f"{member}: {away[member]}" for member in self._address.members if member in away)
        remedy = "check that most members run, that the url is right, and that no firewall stands between"
        if "SSL" in members or "certificate" in members:
            remedy = (
                "check that they speak TLS, that their certificates name these hosts, that KVFERRY_REGISTRY_TLS_CA "
                "vouches for them, and that KVFERRY_ETCD_CERTIFICATE is set if they ask for one"
            )
        elif "disconnected" in members or "reset" in members:
            remedy += "; members with TLS have an etcds url"
        return RegistryUnreachableError(f"the registry at {self._address.url} cannot be reached ({members}): {remedy}")


def _session(own: EtcdSettings, trusted: Path | None) -> Session:
    """Makes the connections: past all proxies, and with an end to every answer."""
    import requests
    from requests.adapters import HTTPAdapter
    from requests.exceptions import ContentDecodingError

    class BoundedAdapter(HTTPAdapter):  # type: ignore[misc]
        """Reads the whole answer here, unless it is to be streamed: so many bytes, for so long, never compressed."""

        def send(self, request: PreparedRequest, stream: bool = False, **arguments: Any) -> Response:
            response = super().send(request, stream=True, **arguments)
            if not stream:
                body, deadline = bytearray(), time.monotonic() + _MEMBER_S
                try:
                    for piece in response.raw.stream(_PIECE_BYTES, decode_content=False):
                        body += piece
                        if len(body) > _LARGEST_ANSWER_BYTES:
                            raise ContentDecodingError(f"it does not end within {_LARGEST_ANSWER_BYTES} bytes")
                        if time.monotonic() > deadline:
                            raise requests.Timeout(f"it did not finish its answer within {_MEMBER_S:g} s")
                except requests.RequestException:
                    response.close()
                    raise
                except Exception as error:  # of urllib3, which requests would translate only while it reads itself
                    response.close()
                    raise requests.ConnectionError(str(error)) from error
                # The connection is free for the next request now: it was read to the end.
                if response.headers.pop("content-encoding", "identity").lower() != "identity":
                    raise ContentDecodingError("it encodes its answers, though asked not to")
                response.raw = io.BytesIO(body)
            return response

    session = requests.Session()
    session.trust_env = False
    session.max_redirects = 0
    session.headers["accept-encoding"] = "identity"
    session.verify = True if trusted is None else str(trusted)
    session.cert = own.own_certificate and tuple(map(str, own.own_certificate))
    adapter = BoundedAdapter()
    for scheme in ("http://", "https://"):
        session.mount(scheme, adapter)
    return session


def _lines(response: Response) -> Iterator[bytes]:
    """Yields the lines of an answer as they come, however they were cut into packets."""
    rest = b""
    for piece in response.iter_content(chunk_size=None):
        *lines, rest = (rest + piece).split(b"\n")
        yield from filter(None, lines)
        if len(rest) > _LARGEST_ANSWER_BYTES:
            raise ValueError(f"a line does not end within {_LARGEST_ANSWER_BYTES} bytes")


def _why(error: BaseException) -> str:
    """Says in a few words why a member did not answer, always the same: no object's address is in it."""
    import requests

    text = str(error)
    if isinstance(error, requests.Timeout) or "timed out" in text:
        return "it does not answer in time"
    for pattern in (r"\[SSL[^\n]*?(?=\)|$)", r"\[Errno -?\d+\] ([^'\")\n]+)", r"(\w+ closed connection [^'\")\n]+)"):
        found = re.search(pattern, text)
        if found:
            return found[1] if found.groups() else found[0]
    if "Connection aborted" in text or "RemoteDisconnected" in text:
        return "it disconnected"
    return text if len(text) < 100 and " at 0x" not in text else type(error).__name__
