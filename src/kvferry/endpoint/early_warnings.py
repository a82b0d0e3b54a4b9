"""Says early what rooms wait for in vain, long before they fail for it: a side that the other does not find."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from kvferry.protocol.bounded import forget_oldest

log = logging.getLogger(__name__)

UNASKED_S = 2.0
"""How long a room may be open until it is said that nobody has asked for it."""

_PERIOD_S = 10.0
_NAMED = 5

MISSED_S = 1.0
"""How long an engine may be missed until it is said. Look-ups are about a second apart by then."""

_MOST_MISSED = 1024


class MissedEngines:
    """Prefill engines that were looked up and not found: each is said once, until it is found."""

    def __init__(self, bootstrap_s: float) -> None:
        """Begins with none.

        Args:
            bootstrap_s: how long rooms wait for an engine.
        """
        self._bootstrap_s = bootstrap_s
        self._since: dict[str, float] = {}  # since when each is missed
        self._said: dict[str, None] = {}

    def missed(self, engine: str, problem: Exception, now: float) -> None:
        """Takes a look-up that did not find an engine.

        Args:
            problem: why, in words.
        """
        since = self._since.setdefault(engine, now)
        forget_oldest(self._since, _MOST_MISSED)
        if now - since >= MISSED_S and engine not in self._said:
            self._said[engine] = None
            forget_oldest(self._said, _MOST_MISSED)
            log.warning(
                "prefill engine %r is not found: %s. Its rooms wait for it for %g s (KVFERRY_BOOTSTRAP_TIMEOUT_S)",
                engine,
                problem,
                self._bootstrap_s,
            )

    def found(self, engine: str) -> None:
        """Takes a look-up that found an engine."""
        self._since.pop(engine, None)
        self._said.pop(engine, None)


class UnaskedRooms:
    """Rooms that were opened a moment ago. Each is looked at once; its owner has a lock for `opened`."""

    def __init__(self, who: str, hint: str) -> None:
        """Begins with none.

        Args:
            who: the prefill rank, as it stands in the line.
            hint: where a decode rank would have to look for it, likewise.
        """
        self._who = who
        self._hint = hint
        self._young: deque[tuple[float, int]] = deque()  # with when they were opened
        self._found: list[int] = []
        self._num_found = 0
        self._next_line_at = float("-inf")

    def opened(self, room: int, now: float) -> None:
        """Takes a room that was just opened."""
        self._young.append((now, room))

    def look(self, now: float, *, is_unasked: Callable[[int], bool], decode_ranks: int) -> None:
        """Logs the rooms that nobody has asked for, one line for all of them and no more than one in a while.

        Args:
            is_unasked: whether a room is open, and no decode rank has opened it.
            decode_ranks: how many are connected. With some, rooms may wait for their turn there: that is no warning.
        """
        while self._young and now - self._young[0][0] >= UNASKED_S:
            _, room = self._young.popleft()
            if is_unasked(room):
                self._num_found += 1
                self._found = [*self._found, room][:_NAMED]
        if not self._num_found or now < self._next_line_at:
            return
        self._next_line_at = now + _PERIOD_S
        more = self._num_found - len(self._found)
        rooms = ", ".join(map(str, self._found)) + (f" and {more} more" if more else "")
        log.log(
            logging.INFO if decode_ranks else logging.WARNING,
            "%s: no decode rank has asked for room %s, opened %g s ago or earlier; %d decode ranks are connected. "
            "Rooms wait until KVFERRY_BOOTSTRAP_TIMEOUT_S. %s",
            self._who,
            rooms,
            UNASKED_S,
            decode_ranks,
            self._hint,
        )
        self._found, self._num_found = [], 0
