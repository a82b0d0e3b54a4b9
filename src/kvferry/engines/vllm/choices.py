"""Requests that vLLM makes of one: the choices of a request with `n` > 1 have one prompt, one cache and one room.

vLLM calls them "0_<name>", "1_<name>" and so on, gives each the parameters of the one that was asked for, and schedules
them like any others. A room is opened once: the first choice sends, or fetches, for all of them. On the decode side the
others wait for it and copy its blocks; on the prefill side they answer with its room.

A caller's own requests may have such names as well, or one name twice. They have come in at other times: all choices of
one request have its time.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from kvferry.engines.vllm.caches import Request
from kvferry.engines.vllm.parameters import ReceiveParameters, SendParameters

MOST_REMEMBERED = 4096
"""A choice may be scheduled long after the first one has ended. Those of older requests are taken for first ones."""

_CHOICE = re.compile(r"\d+_(?P<whole>.+)", re.DOTALL)

First = TypeVar("First")


def whole_request(name: str, arrival_time: float) -> tuple[str, float] | None:
    """Returns what tells the request that one of vLLM's is a choice of from all others; None if it is no choice."""
    match = _CHOICE.fullmatch(name)
    return None if match is None else (match["whole"], arrival_time)


class FetchState(Enum):
    """How far the first choice of a request is with what it fetches."""

    FETCHING = "fetching"
    FETCHED = "fetched"
    FAILED = "failed"


@dataclass(slots=True)
class Fetch:
    """The fetch that serves all choices of a request.

    Attributes:
        request: the first choice, which fetches; None once it has lost what it had, or where it had it from elsewhere.
    """

    request: Request | None
    state: FetchState


class FirstChoices(Generic[First]):
    """What is known of the first choices of the latest requests, by whatever tells requests apart."""

    def __init__(self) -> None:
        self._first: OrderedDict[Hashable, First] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._first

    def get(self, key: Hashable) -> First | None:
        """Returns what is known; None if this is the first choice."""
        return self._first.get(key)

    def add(self, key: Hashable, first: First) -> None:
        """Remembers what later choices need to know of the first one."""
        self._first[key] = first
        while len(self._first) > MOST_REMEMBERED:
            self._first.popitem(last=False)


def send_key(request: Request, params: SendParameters) -> Hashable | None:
    """Returns what all choices of a request have in common, and no two requests; None if it is no choice."""
    whole = whole_request(request.request_id, request.arrival_time)
    return None if whole is None else (whole, params.room if params.is_known else None)


def fetch_key(request: Request, params: ReceiveParameters) -> Hashable | None:
    """Returns what all choices of a request have in common, and no two requests; None if it is no choice."""
    whole = whole_request(request.request_id, request.arrival_time)
    return None if whole is None else (whole, params.engine, params.room)
