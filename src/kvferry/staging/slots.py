"""Staging memory of one prefill worker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.plan.packing import aligned
from kvferry.staging.memory import StagingMemory
from kvferry.staging.rings import Waiter

_FEWEST_FOR_ONE = 2  # one crosses while the next is gathered


@dataclass(frozen=True, slots=True)
class Slot:
    """Staging memory for one sub-chunk.

    Attributes:
        address: where it is.
        receiver: whom it is for.
    """

    address: int
    receiver: str


class SourceMemory:
    """Staging memory of one worker, in slots of one sub-chunk each. No other worker writes to it.

    What was given back last is taken first: it is in the processor's cache still. One receiver gets only a few slots at
    a time, and there are more slots as long as there may be, so that one that has stopped reading holds up nobody else.
    """

    def __init__(self, slot_bytes: int, first: StagingMemory, grow: Callable[[], StagingMemory | None]) -> None:
        """Args:
        slot_bytes: of a sub-chunk.
        first: memory to begin with.
        grow: takes more memory; None if there must not be more.
        """
        # Guards all of it: a room that waits here may give up on another worker.
        self._lock = threading.Lock()
        self.memory = first
        self.slot_bytes = slot_bytes
        self._grow = grow
        self._more: list[StagingMemory] = []
        self._free: list[int] = []
        self._taken: dict[str, int] = {}
        self._waiting: dict[Waiter, str] = {}  # in the order of their coming, with the receiver that each writes to
        self._add(first)
        self._most_for_one = max(_FEWEST_FOR_ONE, len(self._free) // 4)

    def _add(self, memory: StagingMemory) -> None:
        step = aligned(self.slot_bytes)  # so that every slot begins where large words do
        count = (memory.num_bytes - self.slot_bytes) // step + 1
        self._free += [memory.address + index * step for index in reversed(range(count))]

    def take(self, receiver: str, waiter: Waiter) -> Slot | None:
        """A slot, or None: then the waiter is woken when there is one for it, or `withdraw`s."""
        with self._lock:
            if self._next_to_wake() not in (None, waiter) or not self._is_within_limits(receiver):
                self._waiting[waiter] = receiver
                return None
            if not self._free and (more := self._grow()) is not None:
                self._more.append(more)
                self._add(more)
            if not self._free:
                self._waiting[waiter] = receiver
                return None
            self._waiting.pop(waiter, None)
            self._taken[receiver] = self._taken.get(receiver, 0) + 1
            slot = Slot(self._free.pop(), receiver)
            woken = self._next_to_wake()
        if woken is not None:
            woken.wake()
        return slot

    def give_back(self, slot: Slot) -> None:
        """Says that nothing reads a slot any more."""
        with self._lock:
            self._free.append(slot.address)
            self._taken[slot.receiver] -= 1
            if not self._taken[slot.receiver]:
                del self._taken[slot.receiver]
            woken = self._next_to_wake()
        if woken is not None:
            woken.wake()

    def withdraw(self, waiter: Waiter) -> None:
        """Waits no more. Whoever does not wait is ignored."""
        with self._lock:
            if self._waiting.pop(waiter, None) is None:
                return
            woken = self._next_to_wake()
        if woken is not None:
            woken.wake()

    def _is_within_limits(self, receiver: str) -> bool:
        return self._taken.get(receiver, 0) < self._most_for_one

    def _next_to_wake(self) -> Waiter | None:
        """Whoever waits longest of those that could have a slot now."""
        if not self._free:
            return None
        return next((waiter for waiter, receiver in self._waiting.items() if self._is_within_limits(receiver)), None)
