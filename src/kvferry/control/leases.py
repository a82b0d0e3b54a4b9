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
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.control.registration_rules import (
    check_agreement,
    named,
    refuse_drain,
    refuse_release,
    replaced_by,
    unknown,
    view_of,
)
from kvferry.errors import RegistrationRefusedError, SettingsError
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


@dataclass(frozen=True, slots=True)
class _Lease:
    registration: RankRegistration
    expires_at: float
    replaced_incarnations: tuple[str, ...]


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
        self._leases_by_engine: dict[str, dict[int, _Lease]] = {}
        self._released: dict[str, None] = {}  # in the order in which they were
        self._told_to_drain: dict[str, None] = {}  # likewise

    def release(self, incarnation: str, now: float) -> None:
        """Keeps an operator's word that this start of a rank has ended, whatever became of it.

        Raises:
            RegistrationRefusedError: if it holds a lease: it lives, or has died just now.
            SettingsError: if no endpoint can have that name.
        """
        check_text("the endpoint", incarnation, LONGEST_INCARNATION)
        self._drop_expired(now)
        for leases in self._leases_by_engine.values():
            for lease in leases.values():
                if lease.registration.incarnation == incarnation:
                    raise refuse_release(lease.registration, self._lease_s)
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
        leases = self._live_leases(engine, now)
        if not leases:
            raise refuse_drain(self.engine(engine, now))
        told = tuple(lease.registration.incarnation for _, lease in sorted(leases.items()))
        for incarnation in told:
            remember(self._told_to_drain, incarnation, None, self._max_ranks)
        return told

    def drains(self, incarnation: str) -> bool:
        """Whether an operator has told a start of a rank to drain."""
        return incarnation in self._told_to_drain

    def register(self, registration: RankRegistration, now: float) -> float:
        """Grants or renews a rank's lease.

        Returns:
            How long the lease lasts from `now`, in seconds.

        Raises:
            RegistrationRefusedError: if the rank disagrees with live ranks of its engine, was replaced by a
                newer start of the same rank, or there is no room. The registrations are as they were before.
        """
        engine, rank = registration.engine, registration.engine_rank
        leases = self._live_leases(engine, now)
        held = leases.get(rank)
        replaced: tuple[str, ...] = ()
        if held is not None:
            replaced = replaced_by(registration, held.registration, held.replaced_incarnations)
        # The live others agree with one another, so to agree with one of them is to agree with all.
        other = next((lease.registration for number, lease in leases.items() if number != rank), None)
        if other is not None:
            check_agreement(registration, other, self._lease_s)
        if held is None:
            self._check_room(registration, now)
        lease = _Lease(registration, now + self._lease_s, replaced)
        self._leases_by_engine.setdefault(engine, {})[rank] = lease
        return self._lease_s

    def remove(self, engine: str, engine_rank: int, incarnation: str) -> bool:
        """Ends a rank's lease, if this incarnation holds it.

        A removal that arrives late, after the rank restarted, leaves the new incarnation alone.

        Returns:
            Whether a lease was ended.
        """
        leases = self._leases_by_engine.get(engine, {})
        held = leases.get(engine_rank)
        if held is None or held.registration.incarnation != incarnation:
            return False
        del leases[engine_rank]
        if not leases:
            del self._leases_by_engine[engine]
        return True

    def engine(self, name: str, now: float) -> EngineView:
        """Returns the live ranks of one engine; a view without any, and with others' names, if there are none."""
        leases = self._live_leases(name, now)
        if leases:
            return self._view(name, leases.values())
        self._drop_expired(now)
        return unknown(name, tuple(sorted(self._leases_by_engine)))

    def engines(self, now: float) -> tuple[EngineView, ...]:
        """Returns every engine that has a live rank, by name."""
        self._drop_expired(now)
        return tuple(self._view(name, leases.values()) for name, leases in sorted(self._leases_by_engine.items()))

    def _live_leases(self, engine: str, now: float) -> dict[int, _Lease]:
        leases = self._leases_by_engine.get(engine, {})
        for rank in [rank for rank, lease in leases.items() if lease.expires_at <= now]:
            del leases[rank]
        if not leases:
            self._leases_by_engine.pop(engine, None)
        return leases

    def _drop_expired(self, now: float) -> None:
        for engine in list(self._leases_by_engine):
            self._live_leases(engine, now)

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
                f"there is no room for {named(registration)}: the registry holds {self._rank_count()} live "
                f"ranks of at most {self._max_ranks}, in {len(self._leases_by_engine)} engines of at most "
                f"{self._max_engines}"
            )

    def _is_full_for(self, engine: str) -> bool:
        is_new_engine = engine not in self._leases_by_engine
        if is_new_engine and len(self._leases_by_engine) >= self._max_engines:
            return True
        return self._rank_count() >= self._max_ranks

    def _rank_count(self) -> int:
        return sum(map(len, self._leases_by_engine.values()))

    def _view(self, engine: str, leases: Iterable[_Lease]) -> EngineView:
        return view_of(engine, (lease.registration for lease in leases), self._told_to_drain)
