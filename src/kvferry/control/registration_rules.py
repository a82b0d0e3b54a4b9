"""What every registry demands of the ranks of an engine, and what it says of them.

Nothing here keeps a registration, and nothing knows who does: `leases` for kvferry's own server, `etcd.registry` for
etcd. The rules are those of `leases`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import SequenceMatcher
from functools import lru_cache

from msgspec import structs

from kvferry.errors import RankReplacedError, RegistrationRefusedError
from kvferry.protocol.wire.registrations import MOST_NAMED, EngineView, RankRegistration


def check_is_newest(registration: RankRegistration, held: RankRegistration) -> None:
    """Checks that no later start of a rank has its place. It follows from the two alone, not from who came first.

    Args:
        held: what is registered of the rank, by this start or by another that lives.

    Raises:
        RankReplacedError: if a later start is.
    """
    if (registration.started_at, registration.incarnation) < (held.started_at, held.incarnation):
        raise RankReplacedError(
            f"{named(registration)} at {registration.control_address} (incarnation "
            f"{registration.incarnation!r}) was replaced by a newer start at "
            f"{held.control_address} (incarnation {held.incarnation!r}): end this one, or if both "
            "are meant to run, give the engines different names"
        )


def check_agreement(registration: RankRegistration, other: RankRegistration, lease_s: float) -> None:
    """Checks that a rank agrees with a live one of its engine, and so with all: these agree with one another.

    Args:
        lease_s: within which the other one's lease ends if it is not renewed, in seconds.

    Raises:
        RegistrationRefusedError: if they differ, naming both values.
    """
    differences = [
        f"{name} is {mine!r} here and {its!r} there"
        for name, mine, its in _compared(registration, other)
        if mine != its
    ]
    ours, theirs = registration.spoken, other.spoken
    # While an engine is upgraded rank by rank, releases one version apart stand beside each other in it: decode ranks
    # agree on a version with each rank.
    if ours.shared_with(theirs) is None:
        differences.append(f"{ours} here, {theirs} there, and none in common")
    if differences:
        raise RegistrationRefusedError(
            f"{named(registration)} at {registration.control_address} differs from the live rank "
            f"{other.engine_rank} at {other.control_address}: {'; '.join(differences)}. If that one is "
            f"left over from an earlier start its lease runs out within {lease_s:g} s; if it is "
            "running, stop it or give one of the two engines another name"
        )


def refuse_release(registration: RankRegistration, lease_s: float) -> RegistrationRefusedError:
    """Returns the error for an operator who releases an endpoint that is registered.

    Args:
        lease_s: within which its lease ends if it has ended, in seconds.
    """
    return RegistrationRefusedError(
        f"{registration.incarnation!r} is registered, as {named(registration)} at "
        f"{registration.control_address}: if it has really ended, its lease runs out within "
        f"{lease_s:g} s; try again then"
    )


def refuse_drain(view: EngineView) -> RegistrationRefusedError:
    """Returns the error for an operator who drains an engine of which no rank is live.

    Args:
        view: what is known of it.
    """
    others = f"; there are {', '.join(map(repr, view.others))}" if view.others else "; nor is any other engine"
    return RegistrationRefusedError(f"no rank of an engine named {view.engine!r} is registered{others}")


def named(registration: RankRegistration) -> str:
    """Names a rank in a sentence."""
    return f"rank {registration.engine_rank} of engine {registration.engine!r}"


def view_of(engine: str, live: Iterable[RankRegistration], told_to_drain: Collection[str] = ()) -> EngineView:
    """Returns what a registry says of an engine that has live ranks.

    Args:
        told_to_drain: incarnations that an operator has told to drain: they are shown so before they say so themselves.
    """
    registrations = tuple(
        structs.replace(each, draining=True) if each.incarnation in told_to_drain else each
        for each in sorted(live, key=lambda one: one.engine_rank)
    )
    world_size = registrations[0].world_size
    return EngineView(
        engine=engine,
        registrations=registrations,
        world_size=world_size,
        complete=len(registrations) == world_size,
        draining=any(each.draining for each in registrations),
    )


def unknown(engine: str, names: tuple[str, ...]) -> EngineView:
    """Returns what a registry says of an engine of which no rank is live.

    Args:
        names: of the engines that it knows.
    """
    others, count = _nearest(engine, names), len(names)
    return EngineView(engine=engine, registrations=(), world_size=0, complete=False, others=others, num_others=count)


def _compared(ours: RankRegistration, theirs: RankRegistration) -> Iterable[tuple[str, object, object]]:
    yield "world_size", ours.world_size, theirs.world_size
    for name in ("tp_size", "cp_size", "pp_size", "dp_size"):
        yield name, getattr(ours.coordinates, name), getattr(theirs.coordinates, name)
    yield "layout_digest", ours.layout_digest, theirs.layout_digest


@lru_cache(maxsize=64)  # whoever asks for an unknown engine asks again, and comparing a thousand names takes 10 ms
def _nearest(name: str, names: tuple[str, ...]) -> tuple[str, ...]:
    def likeness(other: str) -> float:
        return SequenceMatcher(None, name.casefold(), other.casefold()).ratio()

    return tuple(sorted(names, key=likeness, reverse=True)[:MOST_NAMED])
