"""One client of a registry for all endpoints of a process: one connection, one watch, and one look-up at a time.

Every endpoint gets a `SharedRegistry`, which it closes; the client itself is closed with the last of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from kvferry.control.registry import Grant, OnChange, Registry
from kvferry.errors import UsageError
from kvferry.findings import Finding
from kvferry.protocol.wire.registrations import EngineView, RankRegistration


@dataclass(eq=False, slots=True)
class _LookUps:
    """Look-ups of one engine.

    Attributes:
        turn: held by whoever asks the registry.
        next: what those get who came since that one began to ask; None if nobody has.
        users: how many have not got their answers.
    """

    turn: threading.Lock = field(default_factory=threading.Lock)
    next: Future[EngineView] | None = None
    users: int = 0


@dataclass(eq=False, slots=True)
class _Shared:
    """A client, and who uses it.

    Attributes:
        users: who has not closed it; the lock of `SharedRegistries` guards them.
        lock: guards the rest.
        look_ups: by engine, while any are made.
        watchers: who wants to hear of changes.
    """

    client: Registry
    users: set[SharedRegistry] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    look_ups: dict[str, _LookUps] = field(default_factory=dict)
    watchers: dict[SharedRegistry, list[OnChange]] = field(default_factory=dict)
    is_watching: bool = False

    def tell(self, engine: str | None) -> None:
        """Tells everybody of a change."""
        with self.lock:
            watchers = [changed for mine in self.watchers.values() for changed in mine]
        for changed in watchers:
            changed(engine)


class SharedRegistries:
    """The clients of a process, by what they were made with. May be used from several threads at once.

    Attributes:
        shared: what all clients of one registry share.
    """

    def __init__(self) -> None:
        """Begins with none."""
        self._lock = threading.Lock()
        self.shared: dict[Hashable, _Shared] = {}

    def registry(self, key: Hashable, make: Callable[[], Registry]) -> SharedRegistry:
        """Returns a registry for one user, to be closed by it.

        Args:
            key: what the client is made with: the same for those that can share one.
            make: makes it.
        """
        with self._lock:
            shared = self.shared.get(key)
            if shared is None:
                shared = self.shared[key] = _Shared(make())
            user = SharedRegistry(shared, partial(self._leave, key, shared))
            shared.users.add(user)
        return user

    def _leave(self, key: Hashable, shared: _Shared, user: SharedRegistry) -> None:
        with self._lock:
            shared.users.discard(user)
            is_unused = not shared.users
            if is_unused and self.shared.get(key) is shared:
                del self.shared[key]
        if is_unused:
            shared.client.close()


class SharedRegistry(Registry):
    """One user's share of a client that the whole process has.

    Attributes:
        client: that all share.
    """

    def __init__(self, shared: _Shared, leave: Callable[[SharedRegistry], None]) -> None:
        """Takes the client, and what is called when this user closes it, as often as it does."""
        self.shared = shared
        self._leave = leave
        self._is_closed = False

    @property
    def client(self) -> Registry:
        if self._is_closed:
            raise UsageError(f"the client of the registry at {self.shared.client.url} was closed")
        return self.shared.client

    @property
    def url(self) -> str:
        return self.shared.client.url

    def url_for(self, engine: str) -> str:
        return self.shared.client.url_for(engine)

    def register(self, registration: RankRegistration) -> float:
        return self.client.register(registration)

    def grant(self, registration: RankRegistration) -> Grant:
        return self.client.grant(registration)

    @property
    def has_hung_up(self) -> bool:
        return self.client.has_hung_up

    def remove(self, engine: str, engine_rank: int, incarnation: str) -> bool:
        return self.client.remove(engine, engine_rank, incarnation)

    def engine(self, name: str) -> EngineView:
        """Returns the live ranks of one engine, see `Registry.engine`.

        Of those that ask at the same time one asks the registry for all; what it says is never older than the question.
        """
        client, shared = self.client, self.shared
        with shared.lock:
            look_ups = shared.look_ups.setdefault(name, _LookUps())
            look_ups.users += 1
            # An answer that is on its way may have been given before we came: who comes now takes the next.
            is_mine = look_ups.next is None
            answer = look_ups.next = look_ups.next or Future()
        try:
            if is_mine:
                with look_ups.turn:
                    with shared.lock:
                        look_ups.next = None
                    try:
                        answer.set_result(client.engine(name))
                    except BaseException as error:
                        answer.set_exception(error)
            return answer.result()
        finally:
            with shared.lock:
                look_ups.users -= 1
                if not look_ups.users:
                    del shared.look_ups[name]

    def engines(self) -> tuple[EngineView, ...]:
        return self.client.engines()

    def drain(self, engine: str) -> tuple[str, ...]:
        return self.client.drain(engine)

    def drains(self, endpoint: str) -> bool:
        return self.client.drains(endpoint)

    def release(self, endpoint: str) -> None:
        self.client.release(endpoint)

    def released(self) -> tuple[str, ...]:
        return self.client.released()

    def findings(self) -> Iterator[Finding]:
        return self.client.findings()

    def watch(self, changed: OnChange) -> None:
        """Has changes told, see `Registry.watch`. The client watches once, however many do."""
        client, shared = self.client, self.shared
        with shared.lock:
            shared.watchers.setdefault(self, []).append(changed)
            is_first, shared.is_watching = not shared.is_watching, True
        if is_first:
            try:
                client.watch(shared.tell)
            except BaseException:
                with shared.lock:
                    shared.is_watching = False
                    shared.watchers.pop(self, None)  # it tries again
                raise
        else:
            changed(None)  # what happened before was told to others

    def load(self) -> None:
        self.client.load()

    def close(self) -> None:
        """Ends this user's share, see `Registry.close`. Where an exception interrupted it, the next call finishes."""
        with self.shared.lock:
            self._is_closed = True
            self.shared.watchers.pop(self, None)
        self._leave(self)
