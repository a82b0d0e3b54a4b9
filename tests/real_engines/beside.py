"""What an engine's own backend answers where ours is tried: the same situation, counted in the same words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

BACKENDS = ("nixl", "kvferry")
"""The engine's own, and ours. Of the first nothing is asserted but that it was really tried."""

Note: TypeAlias = Callable[[str], None]
"""The fixture `note`."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What became of requests.

    Attributes:
        asked: how many there were.
        wrong: how many were answered with other tokens than one engine alone gives.
        failed: how many ended without an answer.
        unfinished: how many had not ended when nobody waited any longer.
    """

    asked: int
    wrong: int = 0
    failed: int = 0
    unfinished: int = 0

    @classmethod
    def of(cls, found: Sequence[tuple[int, ...] | None], *right: Sequence[tuple[int, ...]]) -> Answers:
        """Counts answers.

        Args:
            found: their tokens; none of a request that failed, None of one that has not ended.
            right: the tokens of one engine alone; each of several, where any of them is right.
        """
        assert all(len(each) == len(found) for each in right)
        answered = [(tokens, choices) for tokens, *choices in zip(found, *right, strict=True) if tokens]
        return cls(
            asked=len(found),
            wrong=sum(tokens not in choices for tokens, choices in answered),
            failed=sum(tokens == () for tokens in found),
            unfinished=sum(tokens is None for tokens in found),
        )

    @property
    def right(self) -> int:
        return self.asked - self.wrong - self.failed - self.unfinished

    def __str__(self) -> str:
        counts = {name: getattr(self, name) for name in ("right", "wrong", "failed", "unfinished")}
        return f"of {self.asked} " + ", ".join(f"{count} {name}" for name, count in counts.items() if count)
