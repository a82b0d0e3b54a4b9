"""Looks prefill engines up at the registry, which blocks: on a small pool."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvferry.control.registry_client import RegistryClient
from kvferry.endpoint.runtime.platform import Platform
from kvferry.errors import KVFerryError, PeerDisconnectedError, RegistryAccessError, RegistryError
from kvferry.protocol.links.link import Link
from kvferry.protocol.wire.registrations import EngineView, RankRegistration


class LookUps:
    """The look-ups of a decode endpoint. Each ends with one call, on the endpoint's thread."""

    def __init__(
        self,
        registry: RegistryClient,
        *,
        platform: Platform,
        submit: Callable[[Callable[[float], None]], None],
        resolved: Callable[[Link, tuple[RankRegistration, ...], float], None],
        looked_up: Callable[[Link, tuple[RankRegistration, ...], float], None],
        not_resolved: Callable[[Link, KVFerryError, float], None],
        refused: Callable[[Link, KVFerryError, float], None],
    ) -> None:
        """Starts the pool.

        Args:
            platform: the machine.
            submit: runs work soon, on the endpoint's thread, with the time as its argument.
            resolved: takes all ranks of an engine.
            looked_up: takes some ranks of a link's group, before `not_resolved`.
            not_resolved: takes why it must be asked again.
            refused: takes why asking again would not help.
        """
        self._registry = registry
        self._submit = submit
        self._resolved = resolved
        self._looked_up = looked_up
        self._not_resolved = not_resolved
        self._refused = refused
        self._pool = platform.background_executor("kvferry-decode-resolver")

    def begin(self, link: Link) -> None:
        """Looks a link's engine up, once."""
        self._pool.submit(partial(self._look_up, link))

    def close(self) -> None:
        """Ends the pool."""
        self._pool.close()

    def _look_up(self, link: Link) -> None:
        problem: KVFerryError
        try:
            view = self._registry.engine(link.key.engine)
            missing = _missing(view, link.key.dp_rank)
            if missing is None:
                self._submit(partial(self._resolved, link, view.registrations))
                return
            problem = PeerDisconnectedError(
                f"the registry at {self._registry.url_for(link.key.engine)} knows {missing}"
            )
            if view.registrations:
                self._submit(partial(self._looked_up, link, view.group(link.key.dp_rank)))
        except RegistryAccessError as error:  # asking again would not help
            self._submit(partial(self._refused, link, error))
            return
        except RegistryError as error:
            problem = error
        except Exception as error:
            problem = RegistryError(f"looking up {link.key.engine!r} failed: {type(error).__name__}: {error}")
            problem.__cause__ = error
        self._submit(partial(self._not_resolved, link, problem))


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
