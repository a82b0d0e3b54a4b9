"""Gives out times at which to come back, so that no more come in a second than can be served.

Whoever answers gives each its turn, one after the other. So a thousand that come at once come apart the next time, and
the more there are, the less often each comes.

Nothing here reads a clock: the time is an argument, in seconds of any clock that never goes back.
"""

from __future__ import annotations


class Pacer:
    """Gives out turns, at most so many a second."""

    def __init__(self, per_s: float) -> None:
        """Begins with no turn given.

        Args:
            per_s: turns in a second.
        """
        self._apart_s = 1 / per_s
        self._latest = float("-inf")

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
