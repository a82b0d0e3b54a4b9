"""Says early what rooms wait for in vain, long before they fail for it: a side that the other does not find."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

from kvferry.loggers import logger_of
from kvferry.protocol.bounded import forget_oldest
from kvferry.protocol.wire.field_types import DecodeRank

log = logger_of(__name__)

UNASKED_S = 2.0
"""How long a room may be open until it is said that nobody has asked for it, where no decode rank is connected."""

QUEUED_S = 10.0
"""The same where some are: a room may wait for its turn there, and on a busy server that takes seconds."""

_PERIOD_S = 30.0
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
        self._say_at: dict[str, float] = {}  # when to say that each is missed; never again once it was said

    def missed(self, engine: str, problem: Exception, now: float) -> None:
        """Takes a look-up that did not find an engine.

        Args:
            problem: why, in words.
        """
        say_at = self._say_at.setdefault(engine, now + MISSED_S)
        forget_oldest(self._say_at, _MOST_MISSED)
        if now >= say_at:
            self._say_at[engine] = float("inf")
            log.warning(
                "prefill engine %r is not found: %s. Its rooms wait for it for %g s (KVFERRY_BOOTSTRAP_TIMEOUT_S)",
                engine,
                problem,
                self._bootstrap_s,
            )

    def found(self, engine: str) -> None:
        """Takes a look-up that found an engine."""
        self._say_at.pop(engine, None)


class UnaskedRooms:
    """Rooms that were opened a moment ago and nobody may have asked for. Its owner has a lock for `opened`."""

    def __init__(self, who: str, hint: str) -> None:
        """Begins with none.

        Args:
            who: the prefill rank, as it stands in the line.
            hint: where a decode rank would have to look for it, likewise.
        """
        self._who = who
        self._hint = hint
        self._young: deque[tuple[float, int]] = deque()  # with when they were opened
        self._queued: deque[tuple[float, int]] = deque()  # unasked for at first sight, while some were connected
        self._found: list[tuple[int, float]] = []  # with how long each had been open at least
        self._next_line_at = float("-inf")

    def opened(self, room: int, now: float) -> None:
        """Takes a room that was just opened."""
        self._young.append((now, room))

    def look(
        self, now: float, *, is_unasked: Callable[[int], bool], connected: Callable[[], Iterable[DecodeRank | None]]
    ) -> None:
        """Logs the rooms that nobody has asked for, one line for all of them and no more than one in a while.

        Each is looked at once after two seconds, and if decode ranks are connected then, once more after ten.

        Args:
            is_unasked: whether a room is open, and no decode rank has opened it.
            connected: returns which decode ranks are connected; None for one that has not said who it is.
        """
        may_say = self._found and now >= self._next_line_at
        if not (may_say or self._is_due(self._young, now, UNASKED_S) or self._is_due(self._queued, now, QUEUED_S)):
            return
        ranks = tuple(connected())
        while self._is_due(self._young, now, UNASKED_S):
            opened_at, room = self._young.popleft()
            if is_unasked(room):
                if ranks:
                    self._queued.append((opened_at, room))
                else:
                    self._found.append((room, UNASKED_S))
        while self._is_due(self._queued, now, QUEUED_S):
            _, room = self._queued.popleft()
            if is_unasked(room):
                self._found.append((room, QUEUED_S))
        if self._found and now >= self._next_line_at:
            self._next_line_at = now + _PERIOD_S
            self._say(ranks)

    @staticmethod
    def _is_due(rooms: deque[tuple[float, int]], now: float, after_s: float) -> bool:
        return bool(rooms) and now - rooms[0][0] >= after_s

    def _say(self, ranks: Iterable[DecodeRank | None]) -> None:
        named = ", ".join(str(room) for room, _ in self._found[:_NAMED])
        more = len(self._found) - _NAMED
        log.warning(
            "%s: no decode rank has asked for room %s, opened %g s ago or earlier; %s. Rooms wait until "
            "KVFERRY_BOOTSTRAP_TIMEOUT_S. %s",
            self._who,
            named + (f" and {more} more" if more > 0 else ""),
            min(open_s for _, open_s in self._found),
            _in_words(ranks),
            self._hint,
        )
        self._found = []


def _in_words(ranks: Iterable[DecodeRank | None]) -> str:
    """Says which decode ranks are connected, by engine."""
    counts = Counter("engines not yet known" if rank is None else repr(rank.engine) for rank in ranks)
    if not counts:
        return "no decode rank is connected"
    named = ", ".join(f"{count} of {engine}" for engine, count in counts.most_common(_NAMED))
    others = len(counts) - _NAMED
    named += f" and of {others} more engines" if others > 0 else ""
    return f"connected are decode ranks, {named}, where rooms may wait for their turn"
