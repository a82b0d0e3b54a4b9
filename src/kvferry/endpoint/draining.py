"""How far an endpoint has drained: whether it still takes rooms, and until when what is open may take.

A drain has two parts. First everyone is told, and rooms are still taken for a while: gateways had sent requests here
before they saw it. Then no new room is taken, and the endpoint is drained once nothing is open. Which rooms are new is
said where they are opened (docs/drain.md).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf

from kvferry.errors import EndpointDrainingError


class Draining:
    """The drain of one endpoint, which may not have begun. For any thread.

    Attributes:
        has_begun: whether the endpoint is to leave.
    """

    def __init__(self, who: str, now: Callable[[], float]) -> None:
        """Begins with no drain.

        Args:
            who: the endpoint's engine, for messages.
            now: the time, in seconds of a steady clock.
        """
        self._who = who
        self._now = now
        # Guards that of two calls the stricter counts, whichever came first.
        self._lock = threading.Lock()
        self._takes_rooms_until = inf
        self._ends_at = inf
        self._timeout_s = inf
        self.has_begun = False

    def begin(self, *, grace_s: float, timeout_s: float | None) -> bool:
        """Begins the drain. Called again, it can only hurry.

        Args:
            grace_s: for how long new rooms are still taken and waited for, in seconds; infinite for a caller that has
                rooms for all that its engine has accepted, and accepts no more: they are taken, and none waited for.
            timeout_s: after how long what is open is aborted, in seconds; None leaves that to the rooms' own deadlines.

        Returns:
            Whether this call has begun it.
        """
        now = self._now()
        with self._lock:
            is_first = not self.has_begun
            self._takes_rooms_until = min(self._takes_rooms_until, now + grace_s)
            if timeout_s is not None and now + timeout_s < self._ends_at:
                self._ends_at, self._timeout_s = now + timeout_s, timeout_s
            self.has_begun = True
            return is_first

    @property
    def takes_rooms(self) -> bool:
        """Whether new rooms are taken."""
        return not self.has_begun or self._now() < min(self._takes_rooms_until, self._ends_at)

    @property
    def awaits_none(self) -> bool:
        """Whether the endpoint has drained as soon as nothing is open: no new room is taken, or none is waited for."""
        return self.has_begun and (self._takes_rooms_until == inf or not self.takes_rooms)

    @property
    def is_overdue(self) -> bool:
        """Whether what is open has had its time."""
        return self.has_begun and self._now() >= self._ends_at

    def refusal(self, room: int) -> EndpointDrainingError:
        """Returns the error for a room that is not taken."""
        return EndpointDrainingError(f"room {room}: {self._who} is draining and takes no new requests: ask another one")

    @property
    def overdue(self) -> str:
        """Says why what is open is aborted."""
        return f"{self._who} drains, and this was still open after {self._timeout_s:g} s (KVFERRY_DRAIN_TIMEOUT_S)"
