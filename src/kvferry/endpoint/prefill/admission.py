"""How many bytes of direct writes may be on their way at a time, and who is next.

What a wire has been given it carries, whether or not anybody waits for it still: a write that is posted cannot be taken
back. So no more is posted than the wire moves in a moment, to one receiver and in all, and the rest waits in line here.
Rooms are served in the order in which they are due, one write each; one that must wait for its receiver holds up no
room that writes to another. (Staged writes are bounded by their receivers' rings.)

Who is admitted posts in its next turn. Where that does not come for long, since its worker is held up, the leave
lapses, so that others go on, and is asked for anew.

Where rooms wait for the same worker, memory or wire, whoever needs least to end goes first. Where all rooms get on a
little in turn, all of them end at the end. One after the other, half of them have ended after half of the time, and the
last one no later. So a room is due when what it has left would have moved since it was handed in, at a steady rate, and
the one that is due first goes on. Nothing starves: a large request lets those pass that were handed in before it is
due, and no others. (Earliest due date; with all handed in at once it is the shortest remaining processing time, which
has the least mean.)
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.endpoint.runtime.threads import do_each
from kvferry.protocol.time_awake import TimeAwake
from kvferry.settings import Settings
from kvferry.staging.lines import Line, Standing, Turn


@dataclass(frozen=True, slots=True, eq=False)
class Admitted:
    """Leave to put bytes on their way to a receiver, until it is given back."""

    receiver: str
    num_bytes: int


class Applicant(Protocol):
    """Whoever waits to be admitted. Told apart by identity."""

    def admitted(self, admitted: Admitted) -> None:
        """Takes what it asked for. From any thread; returns at once."""


@dataclass(slots=True)
class _Lane:
    """What is on its way to one receiver, and who waits to write to it.

    Attributes:
        num_bytes: that were admitted.
        unused: leaves with which nothing was posted yet.
        used: those with which something was.
        moved_at: when the first of these was used, or one of them last ended; without any, when the first was admitted.
        still_s: how long ago that is, without the time in which this process did not run.
        stands_still: whether that is so long that what is on its way keeps nobody else waiting.
        waiting: those who wait, and the bytes that each needs.
        ready_turn: the last turn that was put among those that only the bound for all keeps waiting.
    """

    num_bytes: int = 0
    unused: set[Admitted] = field(default_factory=set)
    used: set[Admitted] = field(default_factory=set)
    moved_at: float = 0.0
    still_s: float = 0.0
    stands_still: bool = False
    waiting: Line[Applicant, int] = field(default_factory=Line)
    ready_turn: Turn | None = None

    def moves(self, now: float) -> None:
        """Begins anew to count for how long nothing has ended."""
        self.moved_at, self.still_s = now, 0.0


class Admission:
    """Admits direct writes of one prefill rank. Every method may be called from any thread.

    More bytes than a bound are admitted alone.

    Attributes:
        lanes: what was admitted and what waits, by receiver.
        counted: bytes on their way, but for those to receivers that stand still.
        ready: receivers whose next write fitted when it was put here, and by when it is due.
    """

    def __init__(
        self, *, most_bytes: int, most_bytes_of_one: int, stalls_after_s: float, now: Callable[[], float]
    ) -> None:
        """Begins with nothing on its way.

        Args:
            most_bytes: that may be on their way in all.
            most_bytes_of_one: that may be on their way to one receiver.
            stalls_after_s: a receiver to which nothing has ended for so long does not count in all, so that one that
                is frozen keeps only those waiting who write to it. Leaves that nobody uses for so long lapse.
            now: the time, in seconds of a steady clock.
        """
        self._most_bytes = most_bytes
        self._most_bytes_of_one = most_bytes_of_one
        self._stalls_after_s = stalls_after_s
        self._now = now
        # Guards all of it: rooms ask on several workers, and writes end on any.
        self._lock = threading.Lock()
        self.lanes: dict[str, _Lane] = {}
        self.counted = 0  # bytes on their way, but for those to receivers that stand still
        self._moved_at = now()
        self._awake = TimeAwake(stalls_after_s)
        self._comings = itertools.count()
        # Turns of the first in line at receivers that had room for it; stale where another is first, or went first.
        self.ready: list[tuple[Turn, str]] = []

    @classmethod
    def of(cls, settings: Settings, now: Callable[[], float]) -> Admission:
        """Makes one with the bounds that the settings give."""
        return cls(
            most_bytes=int(settings.direct_mib * 2**20),
            most_bytes_of_one=int(settings.direct_receiver_mib * 2**20),
            stalls_after_s=settings.write_timeout_s / 2,
            now=now,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes that are on their way."""
        with self._lock:
            return sum(lane.num_bytes for lane in self.lanes.values())

    @property
    def num_waiting(self) -> int:
        """How many wait."""
        with self._lock:
            return sum(len(lane.waiting) for lane in self.lanes.values())

    def moved_at(self, receiver: str) -> float | None:
        """Returns when something last got on that writes to a receiver wait for; None if they wait for nothing here.

        That is another write to it; or any write at all, if only the bound for all keeps the first in line waiting.
        """
        with self._lock:
            lane = self.lanes.get(receiver)
            if lane is None:
                return None
            first = lane.waiting.first
            fits = first is not None and self._fits_lane(lane, first.need)
            return self._moved_at if fits else lane.moved_at

    def admit(self, receiver: str, num_bytes: int, applicant: Applicant, due_at: float = 0.0) -> Admitted | None:
        """Admits a write; None if it must wait: the applicant gets its leave when it is its turn, or `withdraw`s.

        Whoever has its leave `use`s it, and gives it back.
        Who is due first has the next turn; of those that are due at the same time, who came first.
        """
        with self._lock:
            lane = self.lanes.setdefault(receiver, _Lane())
            nobody_waits = not (lane.waiting or self.ready)
            if nobody_waits and self._fits_lane(lane, num_bytes) and self._fits_all(num_bytes):
                return self._admitted(receiver, lane, num_bytes)
            lane.waiting.join(Standing((due_at, next(self._comings)), applicant, num_bytes))
            self._line_up(receiver, lane)
            served = self._serve()
        own = next((admitted for each, admitted in served if each is applicant), None)
        _hand_out([each for each in served if each[0] is not applicant])
        return own

    def withdraw(self, receiver: str, applicant: Applicant) -> None:
        """Ends a wait. Whoever does not wait is ignored."""
        with self._lock:
            lane = self.lanes.get(receiver)
            if lane is None or lane.waiting.leave(applicant) is None:
                return
            self._line_up(receiver, lane)
            self._drop_if_empty(receiver, lane)
            served = self._serve()
        _hand_out(served)

    def use(self, admitted: Admitted) -> bool:
        """Says that a write is about to be posted; False if its leave has lapsed, so that it may not."""
        with self._lock:
            lane = self.lanes.get(admitted.receiver)
            if lane is None or admitted not in lane.unused:
                return False
            if not lane.used:  # until now nothing could end
                lane.moves(self._now())
            lane.unused.remove(admitted)
            lane.used.add(admitted)
            return True

    def give_back(self, admitted: Admitted) -> None:
        """Takes back a leave, unless it has lapsed: the write has ended, or was not posted."""
        with self._lock:
            lane = self.lanes.get(admitted.receiver)
            if lane is None or not (admitted in lane.unused or admitted in lane.used):
                return
            lane.unused.discard(admitted)
            lane.used.discard(admitted)
            self._moved_at = self._now()
            lane.moves(self._moved_at)
            lane.num_bytes -= admitted.num_bytes
            if lane.stands_still:
                lane.stands_still = False
                self.counted += lane.num_bytes
            else:
                self.counted -= admitted.num_bytes
            self._line_up(admitted.receiver, lane)
            self._drop_if_empty(admitted.receiver, lane)
            served = self._serve()
        _hand_out(served)

    def tick(self) -> None:
        """Finds receivers that stand still, and leaves that lapse. To be called every tenth of a second."""
        with self._lock:
            now = self._now()
            # Without the time in which this process was frozen, and all receivers would seem to have stood still.
            passed_s = self._awake.passed_s(now)
            for receiver, lane in list(self.lanes.items()):
                lane.still_s += min(passed_s, now - lane.moved_at)
                if not lane.num_bytes or lane.stands_still or lane.still_s < self._stalls_after_s:
                    continue
                self.counted -= lane.num_bytes
                if lane.used:
                    lane.stands_still = True
                    continue
                lane.num_bytes = 0  # the leaves have lapsed
                lane.unused.clear()
                self._line_up(receiver, lane)
                self._drop_if_empty(receiver, lane)
            served = self._serve()
        _hand_out(served)

    def _fits_lane(self, lane: _Lane, num_bytes: int) -> bool:
        return not lane.num_bytes or lane.num_bytes + num_bytes <= self._most_bytes_of_one

    def _fits_all(self, num_bytes: int) -> bool:
        return not self.counted or self.counted + num_bytes <= self._most_bytes

    def _admitted(self, receiver: str, lane: _Lane, num_bytes: int) -> Admitted:
        if not lane.num_bytes:
            lane.moves(self._now())
        lane.num_bytes += num_bytes
        if not lane.stands_still:
            self.counted += num_bytes
        admitted = Admitted(receiver, num_bytes)
        lane.unused.add(admitted)
        return admitted

    def _line_up(self, receiver: str, lane: _Lane) -> None:
        """Lets the first in line at a receiver have its turn, if there is room at that receiver."""
        first = lane.waiting.first
        if first is not None and first.turn != lane.ready_turn and self._fits_lane(lane, first.need):
            lane.ready_turn = first.turn
            heapq.heappush(self.ready, (lane.ready_turn, receiver))

    def _serve(self) -> list[tuple[Applicant, Admitted]]:
        """Admits whoever may be admitted now, in the order of their turns."""
        served = []
        while self.ready:
            turn, receiver = self.ready[0]
            lane = self.lanes.get(receiver)
            first = lane.waiting.first if lane is not None else None
            if lane is None or first is None or first.turn != turn or not self._fits_lane(lane, first.need):
                heapq.heappop(self.ready)  # stale, until it is first again, or one that was due before it has ended
                if lane is not None and lane.ready_turn == turn:
                    lane.ready_turn = None
                continue
            if not self._fits_all(first.need):
                break
            heapq.heappop(self.ready)
            lane.waiting.leave(first.who)
            served.append((first.who, self._admitted(receiver, lane, first.need)))
            self._line_up(receiver, lane)
        return served

    def _drop_if_empty(self, receiver: str, lane: _Lane) -> None:
        if not lane.num_bytes and not lane.waiting:
            del self.lanes[receiver]


def _hand_out(served: list[tuple[Applicant, Admitted]]) -> None:
    do_each(served, lambda each: each[0].admitted(each[1]), "a write that was admitted")


_BYTES_PER_S = 1e9
"""A gigabyte counts like a second of waiting."""


def due_at(handed_in_at: float, left_bytes: int) -> float:
    """Returns when a room is due, in seconds of the clock that gave the first.

    Args:
        handed_in_at: since when its next bytes could be sent.
        left_bytes: how many of those that were handed in are not on their way yet.
    """
    return handed_in_at + left_bytes / _BYTES_PER_S
