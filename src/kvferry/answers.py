"""Reads the HTTP answers of whoever answers at an address: no more than so many bytes, for no longer than so long.

Nothing is decoded: two kilobytes of nested gzip can become a gigabyte in one step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

_AS_IT_IS = {"accept-encoding": "identity"}


def _cannot_be_seen() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, whatever it says.

    Attributes:
        headers: by their names in lower case.
        has_hung_up: whether the other end has closed, since then, the connection on which the answer came. To be asked
            while nobody else uses it. False where that cannot be seen.
    """

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    has_hung_up: Callable[[], bool] = field(default=_cannot_be_seen, compare=False, repr=False)


def request(
    client: httpx.Client, url: str, *, method: str = "GET", most_bytes: int, timeout_s: float, **arguments: Any
) -> Answer:
    """Makes a request and reads the answer.

    Args:
        most_bytes: that the answer may have.
        timeout_s: for the whole answer, once it has begun; until then the client's own timeout counts.
        arguments: of the request, as httpx has them.

    Raises:
        httpx.HTTPError: if nothing answers in time.
        httpx.RemoteProtocolError: if the answer is encoded, longer, or no HTTP.
    """
    headers = {**_AS_IT_IS, **arguments.pop("headers", {})}
    with client.stream(method, url, headers=headers, **arguments) as response:
        body = _body(response, most_bytes, timeout_s)
    hung_up = partial(_is_readable, response.extensions.get("network_stream"))
    # One that was closed with the answer says nothing about the other end.
    kept = _cannot_be_seen if hung_up() else hung_up
    return Answer(response.status_code, body, dict(response.headers), kept)


def _is_readable(stream: Any) -> bool:
    """Whether there is something to read, where nothing but the connection's end can be."""
    return stream is not None and bool(stream.get_extra_info("is_readable"))


def _body(response: httpx.Response, most_bytes: int, timeout_s: float) -> bytes:
    # Imported where it is needed: it would take most of the time that `import kvferry` takes.
    import httpx

    encoding = response.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise httpx.RemoteProtocolError(f"it encodes its answers ({encoding[:60]!r}), though asked not to")
    deadline = time.monotonic() + timeout_s
    body = bytearray()
    for piece in response.iter_raw():
        body += piece
        if len(body) > most_bytes:
            raise httpx.RemoteProtocolError(f"its answer does not end within {most_bytes} bytes")
        if time.monotonic() > deadline:
            raise httpx.ReadTimeout(f"it did not finish its answer within {timeout_s:g} s")
    return bytes(body)
