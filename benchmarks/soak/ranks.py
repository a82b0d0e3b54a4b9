"""What runs in a rank's process: one endpoint, and a loop that does what it is ordered and reports how it ended."""

from __future__ import annotations

import logging
import random
import threading
import time
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from benchmarks.soak.memory import POISON, SOURCE_PAGES, contents, pool, source_pages, target_pages

import kvferry as kf

_TURN_S = 0.002
_REST_S = 0.2
"""How long pages of a failed room are watched after they were given back."""

_LONGEST_DELAY_S = 0.03


class Fate(Enum):
    """What a room's callers do to it."""

    PLAIN = "none"
    ABORTED_BY_DECODE = "aborted by the decode side"
    ABORTED_BY_PREFILL = "aborted by the prefill side"
    RACE = "aborted by the prefill side while another thread submits"


@dataclass(frozen=True, slots=True)
class Order:
    """A room to open.

    Attributes:
        slot: its place on the decode side.
        prefill: number of the prefill engine.
    """

    room: int
    slot: int
    prefill: int
    fate: Fate


@dataclass(frozen=True, slots=True)
class Drain:
    """The endpoint is to drain."""


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing is open any more on an endpoint that drains."""


@dataclass(frozen=True, slots=True)
class Report:
    """A room that has ended and whose pages may be used again.

    Attributes:
        error: why it failed; empty after success.
        wrong: elements that were not as they should be after success, or changed after they were given back.
    """

    room: int
    error: str
    wrong: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """The endpoint is up."""


@dataclass(frozen=True, slots=True)
class Broken:
    """Something that should never be: an error that nobody expected, or a thread that has ended."""

    what: str


class _Unexpected(logging.Handler):
    """Keeps what endpoints log together with an exception."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Broken] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.found.append(Broken(f"{record.getMessage()}: {record.exc_info[1]!r}"))


@dataclass(slots=True)
class _Running:
    order: Order
    transfer: Any
    acts_at: list[tuple[float, str]] = field(default_factory=list)  # what is still to be done, in order
    submitted: int = 0
    rests_until: float | None = None


def engine_name(role: str, number: int) -> str:
    """By which an engine is known to the others."""
    return f"{role}-{number}"


def run_rank(connection: Connection, role: str, number: int, settings: dict[str, Any], slots: int, seed: int) -> None:
    """Runs until the other end of the connection is closed."""
    unexpected = _Unexpected()
    log = logging.getLogger("kvferry")
    log.propagate = False
    log.addHandler(unexpected)
    side = (_Prefill if role == "prefill" else _Decode)(number, settings, slots, random.Random(seed))
    try:
        connection.send([Ready()])
        is_draining = False
        while True:
            if connection.poll(_TURN_S):
                for order in connection.recv():
                    if isinstance(order, Drain):
                        side.endpoint.drain()
                        is_draining = True
                    else:
                        side.open(order)
            reports = side.look(time.monotonic()) + unexpected.found
            if is_draining and side.endpoint.is_drained:
                is_draining = False
                reports.append(Drained())
            unexpected.found.clear()
            if not side.endpoint.is_healthy:
                reports.append(Broken("a thread of the endpoint has ended"))
            if reports:
                connection.send(reports)
    except (EOFError, OSError):
        pass
    finally:
        side.endpoint.close()


def _settings(given: dict[str, Any]) -> kf.Settings:
    """Makes the settings that this release has: one that is older lacks some."""
    return kf.Settings(**{name: value for name, value in given.items() if name in kf.Settings.model_fields})


class _Prefill:
    def __init__(self, number: int, settings: dict[str, Any], slots: int, chance: random.Random) -> None:
        self._memory, layout = pool(SOURCE_PAGES)
        for region, tensor in enumerate(self._memory):
            tensor[...] = contents(number, region)
        self._chance = chance
        self._running: dict[int, _Running] = {}
        self.endpoint = kf.PrefillEndpoint(layout, engine=engine_name("prefill", number), settings=_settings(settings))
        self.endpoint.wait_registered(1.0)

    def open(self, order: Order) -> None:
        """Opens a room, and plans when its chunks are submitted and when it is given up."""
        now, sender = time.monotonic(), self.endpoint.open(order.room)
        running = _Running(order, sender)
        chunks = self._chance.choice((1, 1, 2, 3))
        for _ in range(chunks):
            running.acts_at.append((now + self._chance.uniform(0, _LONGEST_DELAY_S), "submit"))
        if order.fate is Fate.ABORTED_BY_PREFILL:
            running.acts_at.append((now + self._chance.uniform(0, _LONGEST_DELAY_S), "abort"))
        elif order.fate is Fate.RACE:
            running.acts_at = [(now, "race")]
        running.acts_at.sort()
        self._running[order.room] = running

    def look(self, now: float) -> list[Any]:
        """Does what is due, and reports what has ended."""
        reports = []
        for room, running in list(self._running.items()):
            while running.acts_at and running.acts_at[0][0] <= now:
                self._act(running, running.acts_at.pop(0)[1])
            transfer = running.transfer
            if transfer.pages_reusable:
                del self._running[room]
                reports.append(Report(room, _why(transfer.error)))
        return reports

    def _act(self, running: _Running, what: str) -> None:
        if what == "submit":
            self._submit(running, last=not any(each == "submit" for _, each in running.acts_at))
        elif what == "abort":
            running.transfer.abort("the soak wants it so")
        else:
            other = threading.Thread(target=self._submit, args=(running,), kwargs={"last": True})
            other.start()
            running.transfer.abort("the soak wants it so")
            other.join()

    def _submit(self, running: _Running, *, last: bool) -> None:
        pages = source_pages(running.order.room)
        stop = len(pages) if last else min(len(pages), running.submitted + 2)
        running.transfer.submit(pages[running.submitted : stop], last=last, aux=b"aux" if last else None)
        running.submitted = stop


class _Decode:
    def __init__(self, number: int, settings: dict[str, Any], slots: int, chance: random.Random) -> None:
        self._memory, layout = pool(len(target_pages(0)) * slots)
        self._expected = [
            [contents(engine, region) for region in range(len(self._memory))] for engine in range(settings["engines"])
        ]
        self._chance = chance
        self._running: dict[int, _Running] = {}
        self.endpoint = kf.DecodeEndpoint(layout, engine=engine_name("decode", number), settings=_settings(settings))

    def open(self, order: Order) -> None:
        """Spoils the pages and asks for a room; plans when it is given up, if so."""
        pages = target_pages(order.slot)
        self._spoil(pages)
        receiver = self.endpoint.open(order.room, pages, engine=engine_name("prefill", order.prefill))
        running = _Running(order, receiver)
        if order.fate is Fate.ABORTED_BY_DECODE:
            running.acts_at.append((time.monotonic() + self._chance.uniform(0, _LONGEST_DELAY_S), "abort"))
        self._running[order.room] = running

    def look(self, now: float) -> list[Any]:
        """Does what is due, and reports what has ended."""
        reports = []
        for room, running in list(self._running.items()):
            if running.acts_at and running.acts_at[0][0] <= now:
                running.acts_at.clear()
                running.transfer.abort("the soak wants it so")
            if not running.transfer.pages_reusable:
                continue
            report = self._ended(running, now)
            if report is not None:
                del self._running[room]
                reports.append(report)
        return reports

    def _ended(self, running: _Running, now: float) -> Report | None:
        order, error = running.order, running.transfer.error
        pages = target_pages(order.slot)
        if error is None:
            source, expected = source_pages(order.room), self._expected[order.prefill]
            wrong = sum(
                int(np.count_nonzero(tensor[pages] != right[source]))
                for tensor, right in zip(self._memory, expected, strict=True)
            )
            return Report(order.room, "", wrong + (running.transfer.aux != b"aux"))
        if running.rests_until is None:
            self._spoil(pages)
            running.rests_until = now + _REST_S
            return None
        if now < running.rests_until:
            return None
        late = sum(int(np.count_nonzero(tensor[pages] != POISON)) for tensor in self._memory)
        return Report(order.room, _why(error), late)

    def _spoil(self, pages: Any) -> None:
        for tensor in self._memory:
            tensor[pages] = POISON


def _why(error: Exception | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"
