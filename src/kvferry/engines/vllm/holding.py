"""Requests that a prefill engine has computed, and holds until decode engines have fetched them.

Each is held for a while in any case. Beyond that it is held as long as a request waits for it on a decode engine, which
the endpoints see to, and as long as vLLM has other blocks to give: a queue that is long costs nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


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
            now: the time.
        """
        self._hold_s = hold_s
        self._now = now
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, request: str, blocks: int) -> None:
        """Takes a request that is computed, with so many blocks."""
        self._held[request] = _Held(self._now(), blocks)

    def forget(self, request: str) -> None:
        """Drops a request whose blocks are vLLM's again."""
        self._held.pop(request, None)

    def to_give_up(self, missing_blocks: int) -> list[str]:
        """Returns those to be given up so that as many blocks come back, each once; no more than are needed.

        Args:
            missing_blocks: how many vLLM lacks. Those of earlier calls that have not come back yet count as coming.
        """
        missing = missing_blocks - sum(held.blocks for held in self._held.values() if held.is_needed)
        latest, chosen = self._now() - self._hold_s, []
        for request, held in self._held.items():
            if missing <= 0 or held.since > latest:
                break
            if not held.is_needed:
                held.is_needed = True
                missing -= held.blocks
                chosen.append(request)
        return chosen
