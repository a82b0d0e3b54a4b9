"""Staging memory of one prefill worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.plan.packing import aligned
from kvferry.staging.memory import StagingMemory
from kvferry.staging.rings import Waiter, WaitQueue

_FEWEST_FOR_ONE = 2  # one crosses while the next is gathered


@dataclass(frozen=True, slots=True)
class Slot:
    """Staging memory for one sub-chunk.

    Attributes:
        address: where it is.
        receiver: the receiver that it is for.
    """

    address: int
    receiver: str


class SourceMemory:
    """Staging memory of one worker, in slots of one sub-chunk each. No other worker writes to it.

    What was given back last is taken first: it is in the processor's cache still. One receiver gets only a few slots at
    a time, and more memory is taken up to a limit, so that a receiver that has stopped reading holds up no other.

    Attributes:
        kept_until: by when slots that failed writes may read yet should be free. Whoever waits till then cannot blame
            its receiver.
    """

    def __init__(self, slot_bytes: int, first: StagingMemory, grow: Callable[[], StagingMemory | None]) -> None:
        """Begins with some memory.

        Args:
            slot_bytes: bytes of a sub-chunk.
            first: memory to begin with.
            grow: returns more memory; None if there must not be more.
        """
        self.memory = first
        self.slot_bytes = slot_bytes
        self.kept_until = float("-inf")
        self._grow = grow
        self._more: list[StagingMemory] = []
        self._free: list[int] = []
        self._taken: dict[str, int] = {}
        # Its lock guards all of it: a room that waits here may give up on another worker.
        self._queue = WaitQueue(self._grant, self._is_free, may_overtake=True)
        self._add(first)
        self._most_for_one = max(_FEWEST_FOR_ONE, len(self._free) // 4)

    def _add(self, memory: StagingMemory) -> None:
        step = aligned(self.slot_bytes)  # so that every slot begins where large words do
        count = (memory.num_bytes - self.slot_bytes) // step + 1
        self._free += [memory.address + index * step for index in reversed(range(count))]

    def take(self, receiver: str, waiter: Waiter, due_at: float = 0.0) -> Slot | None:
        """Takes a slot. If it returns None, the waiter is woken when there is one for it, unless it `withdraw`s."""
        return self._queue.take(receiver, waiter, due_at)

    def take_now(self, receiver: str, due_at: float) -> Slot | None:
        """Takes a slot if there is one, as `WaitQueue.take_now`."""
        return self._queue.take_now(receiver, due_at)

    def give_back(self, slot: Slot) -> None:
        """Gives back a slot that nothing reads any more."""
        with self._queue.lock:
            self._free.append(slot.address)
            self._taken[slot.receiver] -= 1
            if not self._taken[slot.receiver]:
                del self._taken[slot.receiver]
        self._queue.wake_next()

    def withdraw(self, waiter: Waiter) -> None:
        """Takes a waiter out of the queue. One that does not wait is ignored."""
        self._queue.withdraw(waiter)

    @property
    def num_waiting(self) -> int:
        """How many waiters there are."""
        return len(self._queue)

    def _grant(self, receiver: str) -> Slot | None:
        if not self._is_within_limits(receiver):
            return None
        if not self._free and (more := self._grow()) is not None:
            self._more.append(more)
            self._add(more)
        if not self._free:
            return None
        self._taken[receiver] = self._taken.get(receiver, 0) + 1
        return Slot(self._free.pop(), receiver)

    def _is_free(self, receiver: str) -> bool:
        return bool(self._free) and self._is_within_limits(receiver)

    def _is_within_limits(self, receiver: str) -> bool:
        return self._taken.get(receiver, 0) < self._most_for_one
