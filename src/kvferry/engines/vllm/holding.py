"""Requests that a prefill engine has computed, and holds until decode engines have fetched them.

Each is held for a while in any case. Beyond that it is held as long as a request waits for it on a decode engine, which
the endpoints see to, and as long as vLLM has other blocks to give, and is not paused: a queue that is long costs
nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf


@dataclass(slots=True)
class _Held:
    since: float
    blocks: int
    is_needed: bool = False


class HeldRequests:
    """What is held, the oldest first."""

    def __init__(self, hold_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """Begins with none.

        Args:
            hold_s: how long each is held in any case.
        """
        self._hold_s = hold_s
        self._now = now
        self._held: dict[str, _Held] = {}
        self._unserved_blocks = 0

    def add(self, request: str, blocks: int) -> None:
        """Takes a request that is computed, with so many blocks."""
        self._held[request] = _Held(self._now(), blocks)

    def forget(self, request: str) -> None:
        """Drops a request whose blocks are vLLM's again."""
        self._held.pop(request, None)

    def asked(self, blocks: int) -> None:
        """Takes how many blocks the request takes that vLLM would schedule next."""
        self._unserved_blocks = blocks

    def served(self) -> None:
        self._unserved_blocks = 0

    def to_give_up(self, free_blocks: int, *, is_paused: bool = False) -> list[str]:
        """Returns those to be given up for a request that has got no blocks in a step, or for a pause, each once.

        They are no more than are needed; what was given up before and has not come back yet counts as coming.

        Args:
            free_blocks: how many vLLM has.
            is_paused: whether vLLM waits until nothing is held. Who would fetch it may be paused as well.
        """
        unserved, self._unserved_blocks = self._unserved_blocks, 0
        if unserved <= free_blocks and not is_paused:
            return []
        coming = sum(held.blocks for held in self._held.values() if held.is_needed)
        missing = inf if is_paused else unserved - free_blocks - coming
        latest, chosen = self._now() - self._hold_s, []
        for request, held in self._held.items():
            if missing <= 0 or held.since > latest:
                break
            if not held.is_needed:
                held.is_needed = True
                missing -= held.blocks
                chosen.append(request)
        return chosen
