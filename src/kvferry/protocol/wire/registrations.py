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
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache
from typing import Annotated, TypeAlias

import msgspec

from kvferry.errors import RegistrationRefusedError, SettingsError
from kvferry.layout.parallel import RankCoordinates
from kvferry.protocol.bounded import remember

_ENGINE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")
_VISIBLE_ASCII = re.compile(r"[!-~]+")
_LONGEST_ENGINE_NAME = 128
_LONGEST_INCARNATION = 256
_LONGEST_ADDRESS = 256
_LONGEST_DIGEST = 128
_LARGEST_PROTOCOL_VERSION = 2**31 - 1
_LARGEST_PARALLEL_SIZE = 2**20
_REPLACED_REMEMBERED = 8

MOST_ENGINES = 1024
MOST_RANKS = 16384
"""Most engines and ranks that a registry holds, and that a registry's answer may have."""

MOST_NAMED = 8
"""Engines that the answer about an unknown one names."""

KnownEngine: TypeAlias = Annotated[
    str, msgspec.Meta(max_length=_LONGEST_ENGINE_NAME, pattern=rf"^{_ENGINE_NAME.pattern}\Z")
]
"""The name of an engine that is registered."""

MOST_RELEASED = 4096
"""Endpoints of which an operator's word is kept: the latest."""


def check_engine_name(engine: str) -> None:
    """Checks that a name can stand in a URL, a log line and a metric's label as it is.

    Raises:
        SettingsError: if the name is empty, longer than 128 characters, or has characters other than letters,
            digits and `. _ : @ -`, of which the first must be a letter or a digit.
    """
    if not _ENGINE_NAME.fullmatch(engine):
        raise SettingsError(
            f"{_quoted(engine)} cannot be an engine's name: use 1 to 128 letters, digits and . _ : @ -, "
            "beginning with a letter or a digit"
        )


class RankRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank of a prefill engine registers.

    Attributes:
        engine: name of the prefill engine, the same on all its ranks.
        incarnation: random id of this start of the endpoint; every start draws a new one.
        coordinates: where the rank stands in its engine; the engine rank and world size follow from it.
        control_address: where decode endpoints reach the rank, such as "tcp://127.0.0.1:41234".
        layout_digest: digest of what all ranks of the engine must have in common to serve one request.
        protocol_version: version of the messages between peers.

    Raises:
        SettingsError: if a text is empty, too long or has unprintable characters, or a number is out of
            range.
    """

    engine: str
    incarnation: str
    coordinates: RankCoordinates
    control_address: str
    layout_digest: str
    protocol_version: int

    def __post_init__(self) -> None:
        check_engine_name(self.engine)
        _check_text("incarnation", self.incarnation, _LONGEST_INCARNATION)
        _check_text("control_address", self.control_address, _LONGEST_ADDRESS)
        _check_text("layout_digest", self.layout_digest, _LONGEST_DIGEST)
        # Numbers of thousands of digits arrive from JSON unharmed, and then cannot be printed.
        coordinates = self.coordinates
        sizes = (coordinates.tp_size, coordinates.cp_size, coordinates.pp_size, coordinates.dp_size)
        if max(sizes) > _LARGEST_PARALLEL_SIZE:
            raise SettingsError(f"one of tp_size, cp_size, pp_size and dp_size is above {_LARGEST_PARALLEL_SIZE}")
        if not 0 <= self.protocol_version <= _LARGEST_PROTOCOL_VERSION:
            raise SettingsError(f"protocol_version is {self.protocol_version}: it must lie in [0, 2**31)")

    @property
    def engine_rank(self) -> int:
        """The rank's number in its engine, in [0, world_size)."""
        return self.coordinates.engine_rank

    @property
    def world_size(self) -> int:
        """How many ranks the engine has."""
        return self.coordinates.world_size


class EngineView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An engine as the registry has it at one moment.

    Attributes:
        engine: the engine's name.
        registrations: the live ranks, by engine rank. Empty if no rank of this name is live.
        world_size: how many ranks the engine has, live or not; 0 if none is live.
        complete: whether every rank of the engine is live.
        others: names of other engines, where none of this one's ranks is live: the nearest first, at most `MOST_NAMED`.
        num_others: how many others there are.
    """

    engine: Annotated[str, msgspec.Meta(max_length=_LONGEST_ENGINE_NAME)]
    registrations: Annotated[tuple[RankRegistration, ...], msgspec.Meta(max_length=MOST_RANKS)]
    world_size: int
    complete: bool
    others: Annotated[tuple[KnownEngine, ...], msgspec.Meta(max_length=MOST_NAMED)] = ()
    num_others: Annotated[int, msgspec.Meta(ge=0, le=MOST_ENGINES)] = 0

    def group(self, dp_rank: int) -> tuple[RankRegistration, ...]:
        """Returns the live ranks of one data-parallel group, by engine rank."""
        return tuple(each for each in self.registrations if each.coordinates.dp_rank == dp_rank)


@dataclass(frozen=True, slots=True)
class _Lease:
    registration: RankRegistration
    expires_at: float
    replaced_incarnations: tuple[str, ...]


class Registrations:
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

    def release(self, incarnation: str, now: float) -> None:
        """Keeps an operator's word that this start of a rank has ended, whatever became of it.

        Raises:
            RegistrationRefusedError: if it holds a lease: it lives, or has died just now.
            SettingsError: if no endpoint can have that name.
        """
        _check_text("the endpoint", incarnation, _LONGEST_INCARNATION)
        self._drop_expired(now)
        for leases in self._leases_by_engine.values():
            for lease in leases.values():
                if lease.registration.incarnation == incarnation:
                    raise RegistrationRefusedError(
                        f"{incarnation!r} is registered, as {_named(lease.registration)} at "
                        f"{lease.registration.control_address}: if it has really ended, its lease runs out within "
                        f"{self._lease_s:g} s; try again then"
                    )
        remember(self._released, incarnation, None, MOST_RELEASED)

    def released(self) -> tuple[str, ...]:
        """Returns the starts of ranks that operators have released."""
        return tuple(self._released)

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
            replaced = held.replaced_incarnations
            if registration.incarnation in replaced:
                raise RegistrationRefusedError(
                    f"{_named(registration)} at {registration.control_address} (incarnation "
                    f"{registration.incarnation!r}) was replaced by a newer start at "
                    f"{held.registration.control_address} (incarnation {held.registration.incarnation!r}): if both "
                    "are meant to run, give the engines different names"
                )
            if registration.incarnation != held.registration.incarnation:
                replaced = (*replaced, held.registration.incarnation)[-_REPLACED_REMEMBERED:]
        # The live others agree with one another, so to agree with one of them is to agree with all.
        other = next((lease.registration for number, lease in leases.items() if number != rank), None)
        if other is not None:
            self._check_agreement(registration, other)
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
            return _view(name, leases.values())
        self._drop_expired(now)
        names = tuple(sorted(self._leases_by_engine))
        others, count = _nearest(name, names), len(names)
        return EngineView(engine=name, registrations=(), world_size=0, complete=False, others=others, num_others=count)

    def engines(self, now: float) -> tuple[EngineView, ...]:
        """Returns every engine that has a live rank, by name."""
        self._drop_expired(now)
        return tuple(_view(name, leases.values()) for name, leases in sorted(self._leases_by_engine.items()))

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

    def _check_agreement(self, registration: RankRegistration, other: RankRegistration) -> None:
        differences = [
            f"{name} is {ours!r} here and {theirs!r} there"
            for name, ours, theirs in _compared(registration, other)
            if ours != theirs
        ]
        if differences:
            raise RegistrationRefusedError(
                f"{_named(registration)} at {registration.control_address} differs from the live rank "
                f"{other.engine_rank} at {other.control_address}: {'; '.join(differences)}. If that one is "
                f"left over from an earlier start its lease runs out within {self._lease_s:g} s; if it is "
                "running, stop it or give one of the two engines another name"
            )

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
                f"there is no room for {_named(registration)}: the registry holds {self._rank_count()} live "
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


def _compared(ours: RankRegistration, theirs: RankRegistration) -> Iterable[tuple[str, object, object]]:
    yield "world_size", ours.world_size, theirs.world_size
    for name in ("tp_size", "cp_size", "pp_size", "dp_size"):
        yield name, getattr(ours.coordinates, name), getattr(theirs.coordinates, name)
    yield "layout_digest", ours.layout_digest, theirs.layout_digest
    yield "protocol_version", ours.protocol_version, theirs.protocol_version


def _named(registration: RankRegistration) -> str:
    return f"rank {registration.engine_rank} of engine {registration.engine!r}"


def _view(engine: str, leases: Iterable[_Lease]) -> EngineView:
    registrations = tuple(sorted((lease.registration for lease in leases), key=lambda one: one.engine_rank))
    world_size = registrations[0].world_size
    complete = len(registrations) == world_size
    return EngineView(engine=engine, registrations=registrations, world_size=world_size, complete=complete)


@lru_cache(maxsize=64)  # whoever asks for an unknown engine asks again, and comparing a thousand names takes 10 ms
def _nearest(name: str, names: tuple[str, ...]) -> tuple[str, ...]:
    def likeness(other: str) -> float:
        return SequenceMatcher(None, name.casefold(), other.casefold()).ratio()

    return tuple(sorted(names, key=likeness, reverse=True)[:MOST_NAMED])


def _check_text(name: str, text: str, longest: int) -> None:
    if len(text) > longest or not _VISIBLE_ASCII.fullmatch(text):
        raise SettingsError(
            f"{name} is {_quoted(text)}: it must be 1 to {longest} printable ASCII characters without spaces"
        )


def _quoted(text: str) -> str:
    """Quotes a text as in a program, cut short: a message stays readable whatever the text."""
    return repr(text) if len(text) <= 80 else f"{text[:80]!r}... ({len(text)} characters)"
