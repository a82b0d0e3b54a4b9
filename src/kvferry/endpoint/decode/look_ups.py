"""Looks a prefill engine up at the registry, and says in words what a link to it still waits for."""

from __future__ import annotations

from kvferry.control.credentials import secret_hint
from kvferry.control.registry import Registry
from kvferry.errors import KVFerryError, PeerDisconnectedError, RegistryError
from kvferry.protocol.links.link import Link, LinkKey, LinkState
from kvferry.protocol.wire.registrations import EngineView
from kvferry.settings import Settings


def look_up(registry: Registry, key: LinkKey) -> tuple[EngineView | None, KVFerryError | None]:
    """Looks a group of ranks up, once. Blocks, and never raises.

    Returns:
        What the registry says of the engine, None if it does not answer; and why ranks of the group are missing, None
        if all are there or the engine has no such group.
    """
    try:
        view = registry.engine(key.engine)
        missing = _missing(view, key.dp_rank)
        if missing is None:
            return view, None
        return view, PeerDisconnectedError(f"the registry at {registry.url_for(key.engine)} knows {missing}")
    except RegistryError as error:
        return None, error
    except BaseException as error:  # a registry may be the caller's own
        unexpected = RegistryError(f"looking up {key.engine!r} failed: {type(error).__name__}: {error}")
        unexpected.__cause__ = error
        return None, unexpected


def why_not_ready(link: Link, settings: Settings) -> KVFerryError:
    """Returns the error that says what a link still waits for."""
    if link.state is LinkState.RESOLVING and link.problem is not None:
        return link.problem
    hint = ""
    if link.state is LinkState.GREETING:
        mine = secret_hint(has_secret=settings.has_secret)
        hint = f". Nobody answered, or whoever did has another secret: {mine}"
    return PeerDisconnectedError(
        f"prefill engine {link.key.engine!r}: still {link.state.value} after "
        f"{settings.bootstrap_timeout_s:g} s (KVFERRY_BOOTSTRAP_TIMEOUT_S){hint}"
    )


def why_gone(link: Link, instance: str) -> KVFerryError | None:
    """Returns the error of a room whose prefill engine was started anew since; None if it was not, or nobody knows.

    Args:
        instance: the start of the engine that has the request.
    """
    other = link.in_place_of(instance)
    if other is None:
        return None
    return PeerDisconnectedError(
        f"the start of prefill engine {link.key.engine!r} that has the request ({instance}) has gone: registered is "
        f"{other.instance}, with rank {other.engine_rank} at {other.control_address}; send the request there again"
    )


def _missing(view: EngineView, dp_rank: int) -> str | None:
    """Says how much of a data-parallel group is live; None if all of it is, or if the engine has no such group.

    What the other groups are doing does not matter: no request needs them.
    """
    if not view.registrations:
        return (
            f"0 of an unknown number of ranks of engine {view.engine!r}: nobody of that name is there, {_others(view)}"
        )
    sizes, live = view.registrations[0].coordinates, len(view.group(dp_rank))
    if dp_rank >= sizes.dp_size or live == sizes.group_size:
        return None
    group = f"data-parallel group {dp_rank} of " if sizes.dp_size > 1 else ""
    return f"{live} of {sizes.group_size} ranks of {group}engine {view.engine!r}"


def _others(view: EngineView) -> str:
    """Says which engines are registered where one is not."""
    if not view.others:
        return "and no other engine"
    more = view.num_others - len(view.others)
    return f"but {', '.join(map(repr, view.others))}" + (f" and {more} more" if more > 0 else "")
