"""Asks endpoints where they stand, and what they do for a while."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.markup import escape

from kvferry._version import __version__
from kvferry.answers import request
from kvferry.errors import ConfigurationError
from kvferry.observe.server import PORTS
from kvferry.observe.status import EndpointStatus
from kvferry.observe.tracing import Window, chrome_trace

_ANSWER_S = 2.0
_LARGEST_ANSWER_BYTES = 64 * 1024 * 1024
_LONGER_S = 10.0
_LARGEST_TRACE_BYTES = 1024 * 1024 * 1024
_LONGEST_REASON = 200  # whoever answers may be anybody
_MOST_PORTS = 256
_ADDRESS = re.compile(r"(?:(?P<host>\[[^\]]+\]|[^:\[\]]*):)?(?P<first>\d{1,5})(?:-(?P<last>\d{1,5}))?")
_STATUS = msgspec.json.Decoder(EndpointStatus)
_WINDOW = msgspec.json.Decoder(Window)


IS_IT_STARTED = "is the endpoint started, with KVFERRY_OBSERVE_PORT, and does KVFERRY_OBSERVE_HOST let you in?"
"""What may help where nobody listens."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What an endpoint has answered, or not.

    Attributes:
        address: host and port.
        taken_at: when, by a steady clock.
        status: where it stands; None if it did not say.
        problem: why not.
        remedy: what may help.
        sent_bytes: of its counters.
        is_refused: whether nobody listens there.
    """

    address: str
    taken_at: float
    status: EndpointStatus | None
    problem: str = ""
    remedy: str = ""
    sent_bytes: float = 0.0
    is_refused: bool = False


def addresses(given: Sequence[str]) -> list[str]:
    """The addresses that a user means: 9470, host:9470, host:9470-9477, [::1]:9470.

    Raises:
        ConfigurationError: if one makes no sense.
    """
    found: list[str] = []
    for each in given:
        match = _ADDRESS.fullmatch(each.removeprefix("http://").rstrip("/"))
        first = int(match["first"]) if match else 0
        last = int(match["last"] or first) if match else 0
        if match is None or not 0 < first <= last <= 65535 or last - first >= _MOST_PORTS:
            raise ConfigurationError(
                f"{each!r} is no address of endpoints: write host:port, or host:9470-9477 for {_MOST_PORTS} ports at "
                "most; the port is KVFERRY_OBSERVE_PORT plus the rank"
            )
        host = match["host"] or "127.0.0.1"
        found += [f"{host}:{port}" for port in range(first, last + 1)]
    return list(dict.fromkeys(found))


def present(port: int) -> list[str]:
    """The addresses of this machine, on a port or behind it, where somebody listens; the port itself if nobody does.

    An endpoint that is too busy to answer is among them.
    """
    targets = [f"127.0.0.1:{each}" for each in range(port, min(port + PORTS, 65536))]
    return [sample.address for sample in ask_once(targets) if not sample.is_refused] or targets[:1]


def ask_once(targets: Sequence[str]) -> list[Sample]:
    """Where endpoints stand now, in the order of their hosts and ports."""
    with closing(Asker(targets)) as asker:
        return asker.ask()


class Asker:
    """Asks many endpoints at a time."""

    def __init__(self, targets: Sequence[str]) -> None:
        """Makes a client and a thread for each of up to 32 endpoints.

        Args:
            targets: hosts and ports.
        """
        self._targets = targets
        self._client = httpx.Client(timeout=_ANSWER_S, trust_env=False)
        self._threads = ThreadPoolExecutor(min(32, max(1, len(targets))), "kvferry-top")

    def ask(self) -> list[Sample]:
        """Where all of them stand now, in the order of their addresses."""
        return list(self._threads.map(self._ask, self._targets))

    def close(self) -> None:
        """Asks no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _ask(self, address: str) -> Sample:
        try:
            found = _STATUS.decode(self._get(address, "status"))
            sent_bytes = _sent_bytes(self._get(address, "metrics").decode())
        except httpx.HTTPError as error:
            what, remedy = why_unanswered(error)
            return Sample(
                address, time.monotonic(), None, f"does not answer: {what}", remedy, is_refused=is_refused(error)
            )
        except (msgspec.MsgspecError, ValueError) as error:
            return Sample(address, time.monotonic(), None, f"is no endpoint of kvferry {__version__}: {error}")
        return Sample(address, time.monotonic(), found, sent_bytes=sent_bytes)

    def _get(self, address: str, page: str) -> bytes:
        answer = request(
            self._client, f"http://{address}/{page}", most_bytes=_LARGEST_ANSWER_BYTES, timeout_s=_ANSWER_S
        )
        if answer.status != 200:
            raise ValueError(f"status {answer.status} for /{page}")
        return answer.body


def is_refused(error: httpx.HTTPError) -> bool:
    """Whether the host is there, and nobody listens."""
    return isinstance(error, httpx.ConnectError) and "refused" in str(error).lower()


def why_unanswered(error: httpx.HTTPError) -> tuple[str, str]:
    """What it means that an endpoint did not answer, and what may help: the ways of it call for different people."""
    if isinstance(error, httpx.ConnectTimeout):
        return (
            f"no connection within {_ANSWER_S:g} s: packets to it, or its own, get lost on the way",
            "is the host up, and does a firewall, a NetworkPolicy or a route let both ways through? docs/hosts.md",
        )
    if isinstance(error, httpx.ReadTimeout):
        return (
            f"it takes the connection, and says nothing within {_ANSWER_S:g} s",
            "is its process stopped or overloaded, or does the network lose much? docs/hosts.md",
        )
    if is_refused(error):
        return (
            f"{error}: the host is there, and nobody listens",
            IS_IT_STARTED,
        )
    return str(error), "is the name or address right, and is there a route to it? `ip route get` says"


def _sent_bytes(text: str) -> float:
    """Of a metrics page, over all paths."""
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == "kvferry_sent_bytes_total")


def record(given: Sequence[str], *, seconds: float, output: Path, console: Console) -> bool:
    """Records at all endpoints at the same time; writes what they have done, and says how much that is.

    Returns:
        Whether all of them answered.

    Raises:
        ConfigurationError: if an address makes no sense.
    """
    targets = addresses(given)
    with ThreadPoolExecutor(len(targets)) as threads:
        answers = list(threads.map(partial(_recorded, seconds=seconds), targets))
    windows = [answer for answer in answers if isinstance(answer, Window)]
    for target, answer in zip(targets, answers, strict=True):
        if isinstance(answer, str):
            console.print(f"[red]{target}[/] {escape(answer)}", highlight=False)
        elif answer.left_out:
            console.print(f"{target} had no space for {answer.left_out:,} more: record for a shorter time")
    spans = sum(len(window.spans) for window in windows)
    output.write_bytes(msgspec.json.encode(chrome_trace(windows)))
    console.print(
        f"{spans:,} pieces of work at {len(windows)} endpoints in {output}: open it at ui.perfetto.dev",
        highlight=False,
    )
    if not spans:
        console.print("Nothing ended within that time: are requests on their way?")
    return len(windows) == len(targets)


def _recorded(address: str, *, seconds: float) -> Window | str:
    try:
        with httpx.Client(timeout=seconds + _LONGER_S, trust_env=False) as client:
            url = f"http://{address}/trace?seconds={seconds}"
            answer = request(client, url, most_bytes=_LARGEST_TRACE_BYTES, timeout_s=_LONGER_S)
        if answer.status != 200:
            return f"refuses: {answer.body.decode(errors='replace')[:_LONGEST_REASON]} ({answer.status})"
        return _WINDOW.decode(answer.body)
    except httpx.HTTPError as error:
        return f"does not answer: {error}"
    except msgspec.MsgspecError as error:
        return f"answers something else: {error}"
