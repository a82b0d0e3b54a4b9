"""Runs `kvferry trace`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import msgspec
from rich.console import Console
from rich.markup import escape

from kvferry.answers import request
from kvferry.applications.top.asking import addresses
from kvferry.observe.tracing import Window, chrome_trace

_LONGER_S = 10.0
_LARGEST_TRACE_BYTES = 1024 * 1024 * 1024
_LONGEST_REASON = 200  # whoever answers may be anybody
_WINDOW = msgspec.json.Decoder(Window)


def record(given: Sequence[str], *, seconds: float, output: Path, console: Console) -> bool:
    """Records at all endpoints at the same time; writes what they have done, and says how much that is.

    Returns:
        Whether all of them answered.

    Raises:
        ConfigurationError: if an address makes no sense.
    """
    targets = addresses(given)
    with ThreadPoolExecutor(len(targets)) as threads:
        answers = list(threads.map(partial(_ask, seconds=seconds), targets))
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


def _ask(address: str, *, seconds: float) -> Window | str:
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
