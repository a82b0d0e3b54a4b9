"""Which ranks of which engines are alive: the registry's whole state, as leases.

Nothing here does I/O, reads a clock or takes a lock: the time is an argument, in seconds of any clock that
never goes back, and there is one caller at a time.

The rules:

1. A rank registers and gets a lease. It registers again to renew it. A lease that is not renewed runs out.
2. Live ranks of one engine agree on the parallel sizes, the layout and the protocol version. A registration
   is compared with the live *other* ranks of its engine, never with its own rank's earlier ones. A refusal
   changes nothing.
3. A new incarnation of a rank replaces the one before at once: the process restarted. The replaced
   incarnation can neither remove nor replace its successor for as long as the successor's lease lives. So
   when two engines carry one name by mistake the older is refused, instead of the two taking turns.
4. An engine that restarts with another layout is refused while other ranks of the earlier start hold leases.
   A rank that was closed removed its own; a rank that died cannot renew. So after one lease at most the new
   start is accepted, if it keeps trying. Refusals that last longer mean that the earlier start is still
   running, and they name its address.
5. An operator's word that an engine is to drain is for the starts of its ranks that are live then. They are told when
   they renew, and shown as draining from then on. A start that comes later is not meant.
6. An engine is one lease: any of its ranks renews it, and where none has for as long as a lease lasts, the whole
   engine is forgotten. Its ranks renew by turns, evenly spread, at least three of them in the time of a lease. The more
   ranks there are in all, the less often each has a turn, so that all together renew `RENEWALS_PER_S` times a second at
   most, or three times a lease an engine where that is more. A rank that has missed its turn is forgotten soon after,
   though the others of its engine live. Of a forgotten engine some may live, whose turns come later: none of its ranks
   counts as ended before its own lease has run out.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.control.registration_rules import (
    check_agreement,
    check_is_newest,
    named,
    refuse_drain,
    refuse_release,
    unknown,
    view_of,
)
from kvferry.control.registry import Grant
from kvferry.errors import RegistrationRefusedError, SettingsError
from kvferry.loggers import logger_of
from kvferry.protocol.bounded import remember
from kvferry.protocol.wire.registrations import (
    LONGEST_INCARNATION,
    MOST_ENGINES,
    MOST_RANKS,
    MOST_RELEASED,
    EngineView,
    RankRegistration,
    check_text,
)

log = logger_of(__name__)

RENEWALS_PER_S = 120
"""How many ranks renew in a second, at most, where there are more than three in the time of a lease for each engine."""

RETURNS_PER_S = 1000
"""Over how long the ranks come back to a registry that was away: so many a second on average."""

_GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of it, without their whole parts, lie evenly between 0 and 1, however many they are."""


class Pacer:
    """Gives out times at which to come back, so that no more come in a second than can be served.

    So a thousand that come at once come apart the next time, and the more there are, the less often each comes.
    """

    def __init__(self, per_s: float) -> None:
        """Begins with no turn given.

        Args:
            per_s: turns in a second.
        """
        self._apart_s = 1 / per_s
        self._latest = -math.inf

    def turn_in_s(self, now: float, *, soonest_s: float, longest_s: float) -> float:
        """Gives the next turn.

        Args:
            soonest_s: how long it takes at least.
            longest_s: how long it takes at most, however many turns are given: not all come when they are told to.

        Returns:
            In how many seconds it is.
        """
        self._latest = min(max(now + soonest_s, self._latest + self._apart_s), now + longest_s)
        return self._latest - now


@dataclass(frozen=True, slots=True)
class _Lease:
    """That a rank is registered.

    Attributes:
        turn_at: when it is to renew.
        expires_at: when it is forgotten if it does not.
    """

    registration: RankRegistration
    turn_at: float
    expires_at: float


@dataclass(slots=True)
class _Engine:
    """An engine that has, or had a moment ago, live ranks.

    Attributes:
        num_ranks: how many it has, live or not.
        latest_turn_at: the latest turn that one of them was given.
        expires_at: when it is forgotten if none of them renews.
        leases: of those that live, by engine rank.
        revision: grows with every change of what is registered.
        holds_until: before which no rank's lease runs out.
    """

    num_ranks: int = 0
    latest_turn_at: float = -math.inf
    expires_at: float = math.inf
    leases: dict[int, _Lease] = field(default_factory=dict)
    revision: int = 0
    holds_until: float = math.inf


class Leases:
    """The leases of all ranks of all engines.

    Args:
        lease_s: how long a registration lasts without being renewed, in seconds.
        max_engines: how many engines may be live at once.
        max_ranks: how many ranks may be live at once, over all engines.

    Raises:
        SettingsError: if the lease is not a positive, finite time, or a limit is not positive.
    """

    def __init__(self, lease_s: float, *, max_engines: int = MOST_ENGINES, max_ranks: int = MOST_RANKS) -> None:
        if not (math.isfinite(lease_s) and lease_s > 0):
            raise SettingsError(f"lease_s is {lease_s}: a lease lasts a positive, finite number of seconds")
        for name, limit in (("max_engines", max_engines), ("max_ranks", max_ranks)):
            if limit < 1:
                raise SettingsError(f"{name} is {limit}: it must be at least 1")
        self._lease_s = lease_s
        self._max_engines = max_engines
        self._max_ranks = max_ranks
        self._engines: dict[str, _Engine] = {}
        self._silent: OrderedDict[str, _Lease] = OrderedDict()  # of engines forgotten before these ran out
        self._num_ranks = 0  # those that live
        self._num_declared = 0  # those that their engines have
        self._num_begun = 0  # those that were new when they registered, ever
        self._revisions = itertools.count(1)  # one for all engines: one that is forgotten and returns has another
        self._released: OrderedDict[str, None] = OrderedDict()  # in the order in which they were
        self._told_to_drain: OrderedDict[str, None] = OrderedDict()  # likewise

    def release(self, incarnation: str, now: float) -> None:
        """Keeps an operator's word that this start of a rank has ended, whatever became of it.

        Raises:
            RegistrationRefusedError: if it holds a lease, though its engine may be forgotten: it lives, or has died
                just now.
            SettingsError: if no endpoint can have that name.
        """
        check_text("the endpoint", incarnation, LONGEST_INCARNATION)
        self._drop_expired(now)
        listed = (lease for engine in self._engines.values() for lease in engine.leases.values())
        for lease in (*listed, *self._silent.values()):
            if lease.registration.incarnation == incarnation and now < lease.expires_at:
                raise refuse_release(lease.registration, self._within_s(lease, now))
        remember(self._released, incarnation, None, MOST_RELEASED)

    def released(self) -> tuple[str, ...]:
        """Returns the starts of ranks that operators have released."""
        return tuple(self._released)

    def drain(self, engine: str, now: float) -> tuple[str, ...]:
        """Keeps an operator's word that the live ranks of an engine are to drain.

        Returns:
            The starts of ranks that are meant.

        Raises:
            RegistrationRefusedError: if there are none.
        """
        known = self._live(engine, now)
        if not known.leases:
            raise refuse_drain(self.engine(engine, now))
        told = tuple(lease.registration.incarnation for _, lease in sorted(known.leases.items()))
        for incarnation in told:
            remember(self._told_to_drain, incarnation, None, self._max_ranks)
        known.revision = next(self._revisions)
        return told

    def drains(self, incarnation: str) -> bool:
        """Whether an operator has told a start of a rank to drain."""
        return incarnation in self._told_to_drain

    def register(self, registration: RankRegistration, now: float) -> Grant:
        """Grants or renews a rank's lease. Its times count from `now`.

        Raises:
            RegistrationRefusedError: if the rank disagrees with live ranks of its engine, was replaced by a
                newer start of the same rank, or there is no room. The registrations are as they were before.
        """
        name, rank = registration.engine, registration.engine_rank
        engine = self._live(name, now)
        held = engine.leases.get(rank)
        if held is not None:
            check_is_newest(registration, held.registration)
        # The live others agree with one another, so to agree with one of them is to agree with all.
        other = next((lease for number, lease in engine.leases.items() if number != rank), None)
        if other is not None:
            check_agreement(registration, other.registration, self._lease_s)
        if held is None:
            self._check_room(registration, now)
            self._num_ranks += 1
            self._num_begun += 1
        if held is None or held.registration != registration:
            engine.revision = next(self._revisions)
        self._num_declared += registration.world_size - engine.num_ranks
        engine.num_ranks = registration.world_size
        engine.expires_at = now + self._lease_s
        self._engines[name] = engine
        return_s = self._num_ranks / RETURNS_PER_S
        turn_at = self._turn_at(engine, held, now)
        # Time to try again where a renewal fails, as those do that wait for their turn to come back.
        lease_s = max(self._lease_s, turn_at - now + self._lease_s / 2 + 2 * return_s)
        engine.leases[rank] = _Lease(registration, turn_at, now + lease_s)
        self._silent.pop(registration.incarnation, None)
        if registration.incarnation in self._released:
            # Accepted while this registry had no lease of it, as after a restart: nobody else is to hear it.
            del self._released[registration.incarnation]
            log.error(
                "%s (%s) was released, and lives: pages that it may write to may be in use again",
                named(registration),
                registration.incarnation,
            )
        engine.holds_until = min(engine.holds_until, now + lease_s)
        return Grant(lease_s, turn_at - now, return_s)

    def _turn_at(self, engine: _Engine, held: _Lease | None, now: float) -> float:
        """Returns when a rank is to renew: the next turn of its engine, or the one that it has.

        Whoever comes without being due keeps its turn: else all turns of an engine whose ranks have all something new
        to say would move to its end, and nobody would renew it meanwhile.
        """
        third_s = self._lease_s / 3
        if held is not None and held.turn_at > now + third_s / 2:
            return held.turn_at
        # No more are declared than may live, except where engines wait for ranks that cannot come.
        all_take_s = max(third_s, min(self._num_declared, self._max_ranks) / RENEWALS_PER_S)
        apart_s = min(all_take_s / engine.num_ranks, third_s)
        # Engines of one rank each that start at the same moment come apart by when they are to renew first.
        soonest_at = now + third_s * (1.0 if held is not None else self._num_begun * _GOLDEN % 1.0)
        latest_at = now + third_s + engine.num_ranks * apart_s
        engine.latest_turn_at = min(max(soonest_at, engine.latest_turn_at + apart_s), latest_at)
        return engine.latest_turn_at

    def remove(self, engine: str, engine_rank: int, incarnation: str) -> bool:
        """Ends a rank's lease, if this incarnation holds it.

        A removal that arrives late, after the rank restarted, leaves the new incarnation alone.

        Returns:
            Whether a lease was ended.
        """
        known = self._engines.get(engine)
        held = known.leases.get(engine_rank) if known is not None else None
        if known is None or held is None or held.registration.incarnation != incarnation:
            return False
        self._drop(known, engine_rank)
        if not known.leases:
            self._forget(engine)
        return True

    def engine(self, name: str, now: float) -> EngineView:
        """Returns the live ranks of one engine; a view without any, and with others' names, if there are none."""
        leases = self._live(name, now).leases
        if leases:
            return self._view(name, leases.values())
        self._drop_expired(now)
        return unknown(name, tuple(sorted(self._engines)))

    def revision(self, name: str, now: float) -> int:
        """Returns a number that is another one whenever what `engine` returns has changed; 0 without live ranks."""
        return self._live(name, now).revision

    def engines(self, now: float) -> tuple[EngineView, ...]:
        """Returns every engine that has a live rank, by name."""
        self._drop_expired(now)
        return tuple(self._view(name, engine.leases.values()) for name, engine in sorted(self._engines.items()))

    def _live(self, name: str, now: float) -> _Engine:
        """Returns an engine without the leases that have run out; a new one if none is left."""
        engine = self._engines.get(name)
        if engine is None:
            return _Engine()
        if engine.expires_at <= now:
            self._keep_silent(engine, now)
            self._forget(name)
            return _Engine()
        if engine.holds_until <= now:
            for rank in [rank for rank, lease in engine.leases.items() if lease.expires_at <= now]:
                self._drop(engine, rank)
            if not engine.leases:  # the rank that renewed last has closed
                self._forget(name)
                return _Engine()
            engine.holds_until = min(lease.expires_at for lease in engine.leases.values())
        return engine

    def _keep_silent(self, engine: _Engine, now: float) -> None:
        """Keeps the leases of an engine that is about to be forgotten: some may live, whose turn is yet to come."""
        while self._silent and next(iter(self._silent.values())).expires_at <= now:
            self._silent.popitem(last=False)
        for lease in engine.leases.values():
            if now < lease.expires_at:
                remember(self._silent, lease.registration.incarnation, lease, self._max_ranks)

    def _forget(self, name: str) -> None:
        engine = self._engines.pop(name)
        self._num_ranks -= len(engine.leases)
        self._num_declared -= engine.num_ranks

    def _drop(self, engine: _Engine, rank: int) -> None:
        del engine.leases[rank]
        engine.revision = next(self._revisions)
        self._num_ranks -= 1

    def _drop_expired(self, now: float) -> None:
        for name in list(self._engines):
            self._live(name, now)

    def _within_s(self, lease: _Lease, now: float) -> float:
        """Within how many seconds a lease runs out if it is not renewed, for people: rounded up."""
        return max(self._lease_s, math.ceil(lease.expires_at - now))

    def _check_room(self, registration: RankRegistration, now: float) -> None:
        if registration.world_size > self._max_ranks:
            raise RegistrationRefusedError(
                f"engine {registration.engine!r} has {registration.world_size} ranks, and this registry has "
                f"room for {self._max_ranks} in all"
            )
        if not self._is_full_for(registration.engine):
            return
        self._drop_expired(now)
        if self._is_full_for(registration.engine):
            raise RegistrationRefusedError(
                f"there is no room for {named(registration)}: the registry holds {self._num_ranks} live "
                f"ranks of at most {self._max_ranks}, in {len(self._engines)} engines of at most "
                f"{self._max_engines}"
            )

    def _is_full_for(self, name: str) -> bool:
        is_new_engine = name not in self._engines
        if is_new_engine and len(self._engines) >= self._max_engines:
            return True
        return self._num_ranks >= self._max_ranks

    def _view(self, engine: str, leases: Iterable[_Lease]) -> EngineView:
        return view_of(engine, (lease.registration for lease in leases), self._told_to_drain)
