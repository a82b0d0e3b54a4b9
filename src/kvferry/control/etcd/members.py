"""The members of an etcd cluster, asked by its JSON gateway: one after the other until one answers, the same one next.

What is asked, and what answers, is in `messages`; what is kept in etcd, and why, in `registry`. Here are the next
member where one does not answer, an end to it all, a user's token, and sentences for what etcd refuses.
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvferry.control.etcd.address import EtcdSettings, EtcdUrl
from kvferry.control.etcd.messages import NOT_DECODED, News, Token, Watched, decoded
from kvferry.control.http_connections import HttpConnections
from kvferry.errors import RegistryAccessError, RegistryError, RegistryUnreachableError, quoted

if TYPE_CHECKING:
    import httpx

Answer = TypeVar("Answer")

_API_PATH = "v3"  # of etcd 3.4 and later
_LARGEST_ANSWER_BYTES = 64 * 1024 * 1024
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
        trusted: PEM file of the certificates that may vouch for members; None trusts those that httpx trusts.

    Raises:
        SettingsError: if a certificate cannot be used.

    Attributes:
        token: with which requests are allowed; None where none is needed.
    """

    def __init__(self, address: EtcdUrl, own: EtcdSettings, trusted: Path | None) -> None:
        self._address = address
        self._own = own
        self._trusted = trusted
        if address.has_tls:
            own.context(trusted)
        what = f"the client of the registry at {address.url}"
        self._connections = HttpConnections(what, _MEMBER_S, self._verify)
        self._current = 0  # of the members, the one that answered last
        self.token: str | None = None

    def load(self) -> None:
        """Loads what requests need, without making one."""
        self._connections.client()

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
            first, count, is_hopeless = self._current, len(self._address.members), True
            for number in ((first + each) % count for each in range(count)):
                try:
                    answer = self._ask_one(number, path, body, kind)
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
        for number, member in enumerate(self._address.members):
            try:
                yield member, self._ask_one(number, path, {}, kind)
            except _AwayError as error:
                yield member, str(error)

    def watch(self, body: dict[str, Any], quiet_s: float) -> Iterator[Watched]:
        """Yields what the member that answered last tells from now on, until it cannot go on or we are closed.

        Where it fails, or is silent for so long, another one is asked next.

        Raises:
            RegistryError: if it cannot be asked, or refuses.
        """
        number = self._current
        import httpx

        timeout = httpx.Timeout(_MEMBER_S, read=quiet_s)
        try:
            # Else one that has lost the others would go on in silence.
            headers = {**self._authorization(number), "grpc-metadata-hasleader": "true"}
            with self._connections.stream(
                self._url(number, "watch"), method="POST", json=body, headers=headers, timeout=timeout
            ) as news:
                if news.status_code != 200:
                    raise self._refused(next(_lines(news), b"").decode(errors="replace"))
                for line in _lines(news):
                    told = decoded(line, News).result
                    if told is None:
                        raise _AwayError(quoted(Exception(line.decode(errors="replace"))))
                    yield told
        except _TokenExpiredError:
            self.token = None
        except (httpx.HTTPError, httpx.StreamError, OSError, _AwayError, *NOT_DECODED) as error:
            if self._current == number:
                self._current = (number + 1) % len(self._address.members)
            why = str(error) if isinstance(error, _AwayError) else _why(error)
            raise RegistryUnreachableError(f"the registry at {self._address.url} fell silent: {why}") from error

    def forget_token(self) -> None:
        """Has the user get a new token with the next request."""
        self.token = None

    def close(self) -> None:
        """Closes the connections, and ends what is read from them. May be called again."""
        self._connections.close()

    def _url(self, number: int, path: str) -> str:
        scheme = "https" if self._address.has_tls else "http"
        return f"{scheme}://{self._address.members[number]}/{_API_PATH}/{path}"

    def _verify(self) -> ssl.SSLContext | bool:
        return self._own.context(self._trusted) if self._address.has_tls else False

    def _ask_one(self, number: int, path: str, body: dict[str, Any], kind: type[Answer]) -> Answer:
        try:
            return self._post(number, path, body, kind, self._authorization(number))
        except _TokenExpiredError:  # every member has forgotten it when all were started again
            self.token = None
        try:
            return self._post(number, path, body, kind, self._authorization(number))
        except _TokenExpiredError as error:
            raise _AwayError(str(error)) from error

    def _authorization(self, number: int) -> dict[str, str]:
        if self._own.etcd_user is None:
            return {}
        token = self.token
        if token is None:
            body = {"name": self._own.etcd_user, "password": self._own.password}
            token = self.token = self._post(number, "auth/authenticate", body, Token, {}).token
        return {"authorization": token}

    def _post(
        self, number: int, path: str, body: dict[str, Any], kind: type[Answer], headers: dict[str, str]
    ) -> Answer:
        import httpx

        most_bytes = _LARGEST_ANSWER_BYTES
        try:
            answer = self._connections.ask(
                self._url(number, path), method="POST", json=body, headers=headers, most_bytes=most_bytes
            )
            if answer.status == 200:
                return decoded(answer.body, kind)
        except NOT_DECODED as error:
            raise self._no_etcd(answer.body.decode(errors="replace")) from error
        except (httpx.HTTPError, OSError) as error:
            if isinstance(error, httpx.RemoteProtocolError) and "disconnected" not in str(error):
                raise self._no_etcd(str(error)) from error
            raise _AwayError(_why(error)) from error
        raise self._refused(answer.body.decode(errors="replace"))

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


def _lines(response: httpx.Response) -> Iterator[bytes]:
    """Yields the lines of an answer as they come, however they were cut into packets."""
    rest = b""
    for piece in response.iter_raw():
        *lines, rest = (rest + piece).split(b"\n")
        yield from filter(None, lines)
        if len(rest) > _LARGEST_ANSWER_BYTES:
            raise ValueError(f"a line does not end within {_LARGEST_ANSWER_BYTES} bytes")


def _why(error: Exception) -> str:
    """Says in a few words why a member did not answer."""
    import httpx

    if isinstance(error, httpx.TimeoutException):
        return "it does not answer in time"
    text = str(error)
    for pattern in (r"\[SSL[^\n]*?(?=\)|$)", r"\[Errno -?\d+\] ([^'\")\n]+)"):
        found = re.search(pattern, text)
        if found:
            return found[1] if found.groups() else found[0]
    if isinstance(error, httpx.RemoteProtocolError) and "disconnected" in text:
        return "it disconnected"
    return text if 0 < len(text) < 100 else type(error).__name__
