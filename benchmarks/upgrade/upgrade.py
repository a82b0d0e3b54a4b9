"""The upgrade itself: keeps requests coming, replaces one process after the other, and keeps account of both."""

from __future__ import annotations

import itertools
import multiprocessing.connection
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.soak.ranks import Broken, Drain, Drained, Fate, Order, Ready, Report
from benchmarks.upgrade.gateway import Gateway
from benchmarks.upgrade.processes import DrainCommand, RankHost, RankSpec, Running
from benchmarks.upgrade.registries import Member, Restarted
from benchmarks.upgrade.releases import Release

from kvferry import Settings

ENGINES = 2
"""Of either kind."""

PATHS = ("direct", "staged")
"""Of the prefill engines, in turn."""

STUCK_S = 60.0
"""How long a step of a replacement may take, or a request."""

SETTINGS: dict[str, Any] = {
    "secret": "the secret of the upgrade",
    "heartbeat_interval_s": 0.5,
    "registry_lease_s": 4.0,
    "staging_ring_mib": 2.0,
    "staging_chunk_mib": 0.5,
    "staging_memory_mib": 32.0,
    "drain_grace_s": 2.0,
}
_KEPT_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done.

    Attributes:
        requests: how many, at least; more come as long as something is being replaced.
        rate: how many come in a second.
        replaced: how many engines of each side are replaced, and how many members of the registry.
        quiet_s: how long requests come before anything is replaced, and after.
        slots: requests that one decode engine may have at a time.
    """

    requests: int
    rate: float
    replaced: int
    members: int
    quiet_s: float = 3.0
    slots: int = 64


@dataclass(frozen=True, slots=True)
class Replacement:
    """What was replaced, from when to when, in seconds since the requests began.

    Attributes:
        drained_s: how long it took to end the requests that it had.
        ended_s: how long its process took to end after that.
        started_s: how long its successor took, until it got requests.
    """

    what: str
    begin: float
    end: float
    drained_s: float
    ended_s: float
    started_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has ended: when it came, and how long it took until the last byte was checked."""

    at: float
    seconds: float


@dataclass(slots=True)
class Account:
    """What was done and measured.

    Attributes:
        failed: requests that failed, by side.
        replacements: in order.
        requests: those that ended well.
        problems: what must not be; empty if all is well.
        registry_problems: how often the gateway could not ask the registry.
    """

    seconds: float = 0.0
    failed: Counter[str] = field(default_factory=Counter)
    replacements: list[Replacement] = field(default_factory=list)
    requests: list[Ended] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    registry_problems: int = 0

    def problem(self, what: str) -> None:
        """Notes what must not be, unless there is too much of it already."""
        if len(self.problems) < _KEPT_PROBLEMS:
            self.problems.append(what)


@dataclass(slots=True)
class _Engine:
    """An engine of one rank, in one process after the other."""

    spec: RankSpec
    host: RankHost
    is_up: bool = False
    has_drained: bool = False
    load: int = 0


@dataclass(slots=True)
class _Request:
    order: Order
    prefill: _Engine
    decode: _Engine
    at: float
    unreported: set[str] = field(default_factory=lambda: {"prefill", "decode"})


class Upgrade:
    """Runs a plan."""

    def __init__(self, plan: Plan, first: Release, then: Release, registry: Restarted) -> None:
        """Starts every process with the first release; the other one replaces it."""
        self.account = Account()
        self._plan = plan
        self._then = then
        self._registry = registry
        settings = SETTINGS | {"registry_url": registry.url}
        self._gateway = Gateway(Settings(**settings))
        self._prefills = [
            self._started(RankSpec("prefill", number, settings | {"path": PATHS[number % 2]}), first)
            for number in range(ENGINES)
        ]
        self._decodes = [
            self._started(RankSpec("decode", number, settings | {"engines": ENGINES}, plan.slots), first)
            for number in range(ENGINES)
        ]
        self._free = {number: list(range(plan.slots)) for number in range(ENGINES)}
        self._requests: dict[int, _Request] = {}
        self._numbers = itertools.count(1)
        self._begun = 0
        self._closed: set[str] = set()  # decode engines that get no requests, by name
        self._began = time.monotonic()

    @staticmethod
    def _started(spec: RankSpec, release: Release) -> _Engine:
        return _Engine(spec, RankHost(release, [spec]))

    @property
    def _engines(self) -> list[_Engine]:
        return [*self._prefills, *self._decodes]

    def _now(self) -> float:
        return time.monotonic() - self._began

    def run(self) -> Account:
        """Sends requests until there were enough and everything is replaced, waits for their ends, and closes all."""
        with self._gateway:
            try:
                for _ in self._until(lambda: all(each.is_up for each in self._engines)):
                    self._receive(0.05)
                self._began = time.monotonic()
                replacing, is_replacing = self._replacements(), True
                while is_replacing or self._begun < self._plan.requests or self._requests:
                    self._receive(0.002)
                    is_replacing = is_replacing and next(replacing, None) is not None
                    if is_replacing or self._begun < self._plan.requests:
                        self._begin_requests()
                    self._check_ends()
            except _StuckError as error:
                self.account.problem(str(error))
            finally:
                self.account.seconds = self._now()
                self.account.registry_problems = self._gateway.problems
                for each in (*self._decodes, *self._prefills):  # a decode engine first: it misses nobody
                    if not each.host.end():
                        self.account.problem(f"{each.spec.engine} did not end by itself")
        return self.account

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _begin_requests(self) -> None:
        due = self._plan.rate * self._now()
        while self._begun < due:
            decode = self._choose_decode()
            chosen = self._gateway.choose({each.spec.engine: each.load for each in self._prefills})
            if decode is None or chosen is None:
                return
            prefill = next(each for each in self._prefills if each.spec.engine == chosen)
            order = self._begin(prefill, decode).order
            for each in (prefill, decode):
                each.host.connections[0].send([order])

    def _choose_decode(self) -> _Engine | None:
        able = (each for each in self._decodes if each.spec.engine not in self._closed and self._free[each.spec.number])
        return min(able, key=lambda each: each.load, default=None)

    def _begin(self, prefill: _Engine, decode: _Engine) -> _Request:
        """Counts a request, of which nobody is told yet."""
        order = Order(next(self._numbers), self._free[decode.spec.number].pop(), prefill.spec.number, Fate.PLAIN)
        request = _Request(order, prefill, decode, self._now())
        self._requests[order.room] = request
        self._begun += 1
        for each in (prefill, decode):
            each.load += 1
        return request

    def _receive(self, timeout_s: float) -> None:
        by_connection = {
            connection: each for each in self._engines for connection in each.host.connections if not connection.closed
        }
        for connection in multiprocessing.connection.wait(list(by_connection), timeout_s):
            assert isinstance(connection, Connection)
            engine = by_connection[connection]
            try:
                reports = connection.recv()
            except (EOFError, ConnectionResetError):
                raise _StuckError(f"{engine.spec.engine} ended by itself") from None
            for report in reports:
                match report:
                    case Running() if not engine.host.runs(report):
                        raise _StuckError(
                            f"{engine.spec.engine} runs {report.source}, not {engine.host.release.source}"
                        )
                    case Ready():
                        engine.is_up = True
                    case Drained():
                        engine.has_drained = True
                    case Broken(what):
                        self.account.problem(f"{engine.spec.engine}: {what}")
                    case Report():
                        self._ended(engine, report)

    def _ended(self, engine: _Engine, report: Report) -> None:
        request, side, now = self._requests[report.room], engine.spec.role, self._now()
        engine.load -= 1
        request.unreported.discard(side)
        if report.error or report.wrong:
            self.account.failed[side] += 1
            self.account.problem(f"request {report.room} at {request.at:.1f} s, {side} side: {report}: {request.order}")
        elif side == "decode":
            self.account.requests.append(Ended(request.at, now - request.at))
        if not request.unreported:
            del self._requests[report.room]
            self._free[request.decode.spec.number].append(request.order.slot)

    def _check_ends(self) -> None:
        oldest = next(iter(self._requests.values()), None)
        if oldest is not None and self._now() - oldest.at > STUCK_S:
            raise _StuckError(f"a request has not ended within {STUCK_S:g} s: {oldest.order}")

    # ---- replacements -----------------------------------------------------------------------------------------------

    def _replacements(self) -> Iterator[bool]:
        """Replaces one after the other; a generator that is asked to go on in every turn."""
        plan = self._plan
        yield from self._for(plan.quiet_s)
        for engine in (*self._prefills[: plan.replaced], *self._decodes[: plan.replaced]):
            yield from self._replace(engine)
        for number, member in enumerate(self._registry.members[: plan.members]):
            yield from self._restart(number, member)
        yield from self._for(plan.quiet_s)
        yield from self._leave()

    def _replace(self, engine: _Engine) -> Iterator[bool]:
        """Replaces an engine: no new requests, those that it has end, its process ends, the other release starts."""
        name, is_prefill, begin = engine.spec.engine, engine.spec.role == "prefill", self._now()
        before = self._gateway.incarnation(name)
        yield from self._drain(engine)
        yield from self._until(lambda: engine.load == 0)
        drained = self._now()
        engine.host.hang_up()
        yield from self._until(lambda: engine.host.has_ended)
        if not engine.host.end():
            self.account.problem(f"{name} did not end well")
        ended = self._now()
        engine.is_up, engine.has_drained, engine.host = False, False, RankHost(self._then, [engine.spec])
        yield from self._until(lambda: engine.is_up)
        if is_prefill:
            yield from self._until(lambda: self._gateway.incarnation(name) not in (None, before))
        self._closed.discard(name)
        self._note(name, begin, drained, ended)

    def _drain(self, engine: _Engine) -> Iterator[bool]:
        if engine.spec.role == "decode":  # the registry knows prefill engines alone
            self._closed.add(engine.spec.engine)
            engine.host.connections[0].send([Drain()])
            yield from self._until(lambda: engine.has_drained)
        else:
            yield from self._drain_by_command(engine)

    def _drain_by_command(self, engine: _Engine, late: _Request | None = None) -> Iterator[bool]:
        """Drains a prefill engine as an operator does. The gateway hears of it from the registry alone.

        Args:
            late: a request that the prefill engine has, and whose decode side comes when nothing new is taken any more.
        """
        name = engine.spec.engine
        command = DrainCommand(name, self._registry.url, SETTINGS["secret"], STUCK_S)
        try:
            yield from self._until(lambda: command.has_ended or self._gateway.is_draining(name))
            if late is not None:
                # The rank has heard of it with its next renewal, and its grace is over after that.
                yield from self._for(SETTINGS["registry_lease_s"] / 3 + SETTINGS["drain_grace_s"] + 1.0)
                if command.has_ended:
                    self.account.problem(f"{name}: kvferry drain ended while a room was open: {command.problem()}")
                late.decode.host.connections[0].send([late.order])
            yield from self._until(lambda: command.has_ended)
            if problem := command.problem():
                self.account.problem(f"{name}: {problem}")
        finally:
            command.close()

    def _leave(self) -> Iterator[bool]:
        """Has a prefill engine leave for good while requests come, with one of which the decode side comes late."""
        # On a slow machine every slot may be taken just now.
        yield from self._until(lambda: self._choose_decode() is not None)
        engine, decode = self._prefills[0], self._choose_decode()
        assert decode is not None
        begin, late = self._now(), self._begin(engine, decode)
        engine.host.connections[0].send([late.order])
        yield from self._drain_by_command(engine, late)
        yield from self._until(lambda: engine.load == 0)
        drained = self._now()
        self._prefills.remove(engine)
        if not engine.host.end():
            self.account.problem(f"{engine.spec.engine} did not end well")
        self._note(f"{engine.spec.engine} leaves", begin, drained, self._now())

    def _restart(self, number: int, member: Member) -> Iterator[bool]:
        """Ends a process of the registry and starts it again, until all engines are registered there as before."""
        begin = self._now()
        member.kill()
        yield from self._for(0.5)  # the others notice, and choose a leader if it was that
        member.start()
        yield from self._until(lambda: self._registry.has_leader(number), every_s=0.2)
        looks = self._gateway.looks + 2  # one may have begun before
        names = [each.spec.engine for each in self._prefills]
        yield from self._until(lambda: self._gateway.looks >= looks and all(map(self._gateway.incarnation, names)))
        self._note(f"registry, process {number}", begin, begin, begin)

    def _note(self, what: str, begin: float, drained: float, ended: float) -> None:
        now = self._now()
        self.account.replacements.append(Replacement(what, begin, now, drained - begin, ended - drained, now - ended))

    def _for(self, seconds: float) -> Iterator[bool]:
        until = self._now() + seconds
        while self._now() < until:
            yield True

    def _until(self, holds: Callable[[], bool], *, every_s: float = 0.0) -> Iterator[bool]:
        began = looked = time.monotonic()
        while not holds():
            while True:
                if time.monotonic() - began > STUCK_S:
                    raise _StuckError(f"a step of the upgrade took more than {STUCK_S:g} s")
                yield True
                if time.monotonic() - looked >= every_s:
                    break
            looked = time.monotonic()


class _StuckError(Exception):
    """It cannot go on."""
