"""The soak itself: keeps rooms in flight, lets faults strike, and keeps account of both."""

from __future__ import annotations

import itertools
import multiprocessing.connection
import random
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from benchmarks.soak.causes import UNKNOWN, cause
from benchmarks.soak.faults import Fault, Faults, Kind
from benchmarks.soak.processes import RankProcess, RegistryProcess
from benchmarks.soak.ranks import Broken, Fate, Order, Ready, Report
from benchmarks.soak.watch import Trend, trend

from kvferry.applications.up.supervision import free_ports

ENGINES = 2
"""Of either kind."""

LEASE_S = 2.0
PEER_TIMEOUT_S = 5.0
"""Twice the longest time for which a whole process was measured to stand still on a busy machine of two cores."""

DEADLINE_S = 10.0
SETTINGS: dict[str, Any] = {
    "heartbeat_interval_s": 0.5,
    "peer_timeout_s": PEER_TIMEOUT_S,
    "registry_lease_s": LEASE_S,
    "bootstrap_timeout_s": DEADLINE_S,
    "waiting_timeout_s": DEADLINE_S,
    "write_timeout_s": DEADLINE_S,
    "staging_ring_mib": 2.0,
    "staging_chunk_mib": 0.5,
    "staging_memory_mib": 64.0,
}
PATHS = ("direct", "staged")
"""Of the prefill engines, in turn."""

STUCK_S = 3 * DEADLINE_S
"""How long a room may take, whatever befalls it: a frozen side has ended it a deadline after it thaws."""

AFTERMATH_S = PEER_TIMEOUT_S + 3.0
"""How long after a fault rooms may still fail for it: until everybody has noticed, and connections are made anew."""

_FATES = {Fate.PLAIN: 90, Fate.ABORTED_BY_DECODE: 4, Fate.ABORTED_BY_PREFILL: 4, Fate.RACE: 2}
_LOOK_EVERY_S = 1.0
_MOST_AT_ONCE = 64
_KEPT_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done.

    Attributes:
        minutes: for how long rooms are begun.
        in_flight: rooms that are open at a time.
        mean_quiet_s: mean time between faults; None for none.
    """

    minutes: float
    in_flight: int
    seed: int
    mean_quiet_s: float | None


@dataclass(slots=True)
class _Room:
    order: Order
    decode: int
    opened_at: float
    ends: dict[str, Report | None] = field(default_factory=dict)  # by role; None where the process was killed


@dataclass(slots=True)
class Account:
    """What was done and measured.

    Attributes:
        ended: rooms that have ended on every living side.
        succeeded: those of them that succeeded on the decode side, byte-exact.
        failures: why rooms failed, by side and cause.
        lost: sides of rooms that ended with their process.
        faults: how many of each kind.
        problems: what must not be; empty if all is well.
        trends: what processes held early and late in their lives.
    """

    seconds: float = 0.0
    ended: int = 0
    succeeded: int = 0
    most_in_flight: int = 0
    failures: dict[str, Counter[str]] = field(default_factory=lambda: {"prefill": Counter(), "decode": Counter()})
    lost: Counter[str] = field(default_factory=Counter)
    fates: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    trends: list[Trend] = field(default_factory=list)

    def problem(self, what: str) -> None:
        """Notes what must not be, unless there is too much of it already."""
        if len(self.problems) < _KEPT_PROBLEMS:
            self.problems.append(what)


@dataclass(frozen=True, slots=True)
class _Struck:
    """When ranks were struck so hard that rooms may fail for it."""

    begin: float
    end: float
    ranks: frozenset[int]


class Soak:
    """Runs a plan."""

    def __init__(self, plan: Plan) -> None:
        self.account = Account()
        self._plan = plan
        self._chance = random.Random(plan.seed)
        self._began = time.monotonic()
        self._registry = RegistryProcess(lease_s=LEASE_S)
        per_pair = max(1, plan.in_flight // ENGINES**2)
        self._free = {
            (prefill, decode): list(range(prefill * per_pair, (prefill + 1) * per_pair))
            for prefill, decode in itertools.product(range(ENGINES), repeat=2)
        }
        # Fixed, as in a deployment: a successor answers where its predecessor did.
        ports = free_ports(ENGINES)
        self._prefills = [
            RankProcess("prefill", number, self._settings(path=PATHS[number % 2], control_port=ports[number]), 0, seed)
            for number, seed in zip(range(ENGINES), itertools.count(plan.seed, 1000), strict=False)
        ]
        self._decodes = [
            RankProcess("decode", number, self._settings(engines=ENGINES), ENGINES * per_pair, seed)
            for number, seed in zip(range(ENGINES), itertools.count(plan.seed + 7, 1000), strict=False)
        ]
        self._ranks = [*self._prefills, *self._decodes]
        self._rooms: dict[int, _Room] = {}
        self._numbers = itertools.count(1)
        self._struck: list[_Struck] = []
        self._frozen: set[int] = set()

    def _settings(self, **own: Any) -> dict[str, Any]:
        return SETTINGS | {"registry_url": self._registry.url} | own

    def run(self) -> Account:
        """Begins rooms for as long as planned, waits for all to end, and closes everything."""
        plan, account = self._plan, self.account
        faults = Faults(
            plan.seed, len(self._ranks), mean_quiet_s=plan.mean_quiet_s or 1.0, long_freeze_s=PEER_TIMEOUT_S + 0.7
        )
        try:
            stop_at = 60.0 * plan.minutes
            self._wait_until_all_are_up()
            self._began = time.monotonic()
            acting = self._no_fault() if plan.mean_quiet_s is None else self._faults(faults, stop_at)
            next_look, is_acting = 0.0, True
            while (now := self._now()) < stop_at or is_acting or (self._rooms and now < stop_at + STUCK_S):
                self._receive(0.005)
                is_acting = next(acting, None) is not None
                if now < stop_at:
                    self._begin_rooms()
                if now >= next_look:
                    next_look = now + _LOOK_EVERY_S
                    self._look(now)
            account.seconds = self._now()
            for number, room in self._rooms.items():
                account.problem(f"room {number} has not ended: {room}")
            self._judge_resources()
        finally:
            self._close()
        return account

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _wait_until_all_are_up(self) -> None:
        deadline = time.monotonic() + 60.0
        while not all(rank.is_up for rank in self._ranks):
            if time.monotonic() > deadline:
                raise RuntimeError("the ranks did not start within a minute")
            self._receive(0.05)

    # ---- rooms --------------------------------------------------------------------------------------------------

    def _begin_rooms(self) -> None:
        batches: dict[int, list[Order]] = defaultdict(list)
        for (prefill, decode), free in self._free.items():
            ranks = prefill, ENGINES + decode
            if not all(self._ranks[rank].is_up and rank not in self._frozen for rank in ranks):
                continue
            while free and len(batches[ranks[0]]) < _MOST_AT_ONCE:
                fate = self._chance.choices(list(_FATES), list(_FATES.values()))[0]
                order = Order(next(self._numbers), free.pop(), prefill, fate)
                self._rooms[order.room] = _Room(order, decode, self._now())
                self.account.fates[fate.value] += 1
                for rank in ranks:
                    batches[rank].append(order)
        self.account.most_in_flight = max(self.account.most_in_flight, len(self._rooms))
        for rank, batch in batches.items():
            if batch:
                self._ranks[rank].connection.send(batch)

    def _receive(self, timeout_s: float) -> None:
        by_connection = {rank.connection: rank for rank in self._ranks if not rank.connection.closed}
        for connection in multiprocessing.connection.wait(list(by_connection), timeout_s):
            rank = by_connection[connection]  # type: ignore[index]
            try:
                reports = rank.connection.recv()
            except (EOFError, ConnectionResetError):
                self.account.problem(f"{rank.name} ended by itself")
                rank.connection.close()
                rank.is_up = False
                continue
            for report in reports:
                match report:
                    case Ready():
                        rank.is_up = True
                    case Broken(what):
                        self.account.problem(f"{rank.name}: {what}")
                    case Report():
                        self._ended(rank.role, report)

    def _ended(self, role: str, report: Report) -> None:
        room = self._rooms.get(report.room)
        if room is None:
            return
        if report.wrong:
            what = "late bytes after the pages were given back" if report.error else "wrong bytes"
            self.account.problem(f"room {report.room}: {report.wrong} elements with {what}: {room.order} {report}")
        if report.error:
            found = cause(report.error)
            self.account.failures[role][found] += 1
            if found == UNKNOWN:
                self.account.problem(f"room {report.room} failed for a reason of its own: {report.error}")
            elif room.order.fate is Fate.PLAIN and not self._is_explained(room):
                self.account.problem(f"room {report.room} failed on the {role} side without a fault: {report.error}")
        room.ends[role] = report
        self._maybe_settle(room)

    def _is_explained(self, room: _Room) -> bool:
        ranks = {room.order.prefill, ENGINES + room.decode}
        return any(each.ranks & ranks and room.opened_at <= each.end + AFTERMATH_S for each in self._struck)

    def _maybe_settle(self, room: _Room) -> None:
        if len(room.ends) < 2:
            return
        del self._rooms[room.order.room]
        self._free[room.order.prefill, room.decode].append(room.order.slot)
        self.account.ended += 1
        decode = room.ends["decode"]
        self.account.succeeded += decode is not None and not decode.error

    def _process_lost(self, struck: int) -> None:
        """All that a killed process had open has ended with it."""
        role = self._ranks[struck].role
        for room in list(self._rooms.values()):
            mine = room.order.prefill if role == "prefill" else ENGINES + room.decode
            if mine == struck and role not in room.ends:
                room.ends[role] = None
                self.account.lost[role] += 1
                self._maybe_settle(room)

    # ---- faults -------------------------------------------------------------------------------------------------

    def _no_fault(self) -> Any:
        yield from ()

    def _faults(self, faults: Faults, stop_at: float) -> Any:
        """Lets one fault after the other strike; a generator that is asked to go on in every turn."""
        while True:
            fault = faults.after(self._now())
            if fault.at >= stop_at:
                return
            yield from self._until(fault.at)
            self.account.faults[fault.kind.value] += 1
            yield from self._strike(fault)

    def _until(self, at: float) -> Any:
        while self._now() < at:
            yield True

    def _strike(self, fault: Fault) -> Any:
        rank, began = self._ranks[fault.rank], self._now()
        if fault.kind is Kind.REGISTRY:
            self._registry.kill()
            yield from self._until(began + fault.steps[0])
            self._registry.start()
        elif fault.kind is Kind.KILL:
            self._struck.append(_Struck(began, float("inf"), frozenset([fault.rank])))
            rank.kill()
            self._process_lost(fault.rank)
            yield from self._until(began + fault.steps[0])
            rank.start()
            while not rank.is_up:
                yield True
            self._struck[-1] = _Struck(began, self._now(), frozenset([fault.rank]))
        else:
            is_noticed = fault.kind is Kind.LONG_FREEZE
            if is_noticed:
                self._struck.append(_Struck(began, float("inf"), frozenset([fault.rank])))
                for each in self._ranks:
                    each.reunions += 1
            for is_frozen, length in zip(itertools.cycle((True, False)), fault.steps, strict=False):
                if is_frozen:
                    rank.freeze()
                    self._frozen.add(fault.rank)
                else:
                    rank.thaw()
                    self._frozen.discard(fault.rank)
                yield from self._until(self._now() + length)
            if is_noticed:
                self._struck[-1] = _Struck(began, self._now(), frozenset([fault.rank]))

    # ---- resources ----------------------------------------------------------------------------------------------

    def _look(self, at: float) -> None:
        for rank in self._ranks:
            if rank.is_up:
                rank.look(at)

    def _judge_resources(self) -> None:
        for rank in self._ranks:
            for number, looks in enumerate(rank.lives, 1):
                is_present = number == len(rank.lives)
                found = trend(f"{rank.role} {rank.number}, process {number}", looks)
                if found is None:
                    continue
                self.account.trends.append(found)
                reunions = rank.reunions if is_present else len(self._struck)
                problem = found.problem(reunions=reunions, lost_peers=bool(self._struck))
                if problem:
                    self.account.problem(f"grown: {problem}")

    def _close(self) -> None:
        decode_first = [*self._decodes, *self._prefills]  # it misses nobody
        for rank in decode_first:
            rank.thaw()
            rank.hang_up()
        for rank in decode_first:
            if not rank.end():
                self.account.problem(f"{rank.name} did not end by itself")
        self._registry.kill()
