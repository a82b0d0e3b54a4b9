"""Reads the HTTP answers of whoever answers at an address: no more than so many bytes, for no longer than so long.

Nothing is decoded: two kilobytes of nested gzip can become a gigabyte in one step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

_AS_IT_IS = {"accept-encoding": "identity"}


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, whatever it says."""

    status: int
    body: bytes


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
        return Answer(response.status_code, _body(response, most_bytes, timeout_s))


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
