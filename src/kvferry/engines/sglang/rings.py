"""Where DeepSeek V4's rings have a request's last tokens: each token by its position, whatever a ring's length.

A ring has a token at its position modulo the ring's length, which is longer with speculative decoding. What travels
is therefore told by positions, place by place, and never as a ring; only the last tokens, which every ring still has,
do. Rings are a request's, or a page's of the window: then each of the request's pages there has its own last tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry import GroupPages
from kvferry.errors import EngineContractError

OVERLAP_TOKENS = 8
"""How many tokens are kept of what layers compress by 4: each time 4 of them, with the 4 before."""

PAIR_TOKENS = 2
"""How many are kept of what layers compress by 2."""


@dataclass(frozen=True, slots=True)
class Rings:
    """The lengths of a rank's rings, in tokens.

    Attributes:
        page_tokens: tokens a page of the window.
        window: of a request's window; None if windows are in pages.
        overlap: of what layers have not compressed by 4 yet; None if no layer does. They are the request's where its
            window is in a ring, else a page's.
        pair: of what layers have not compressed by 2 yet; None if no layer does.
    """

    page_tokens: int
    window: int | None = None
    overlap: int | None = None
    pair: int | None = None

    def window_places(self, given: NDArray[Any], tokens: int) -> GroupPages:
        """Returns where the window's tokens are.

        Args:
            given: the places that SGLang names, in the order of positions.
            tokens: how many the request has.

        Raises:
            EngineContractError: if they are not the places of the request's last tokens.
        """
        if self.window is None or len(given) > tokens:
            raise EngineContractError(f"SGLang hands in {len(given)} places of a window's ring of {self.window}")
        if not np.array_equal(given, _places(self.window, self._slot(given), tokens, len(given))):
            raise EngineContractError(
                f"SGLang hands in places {given[:4].tolist()}... of a window's ring of {self.window}: they are not "
                f"those of the last {len(given)} of {tokens} tokens in one ring"
            )
        return GroupPages(given, tokens - len(given), held_tokens=0)

    def overlap_places(self, window_places: NDArray[Any], tokens: int) -> GroupPages:
        """Returns where a request's ring has what is not compressed by 4 yet.

        Args:
            window_places: where its window is: in the ring of the same number.
        """
        assert self.overlap is not None
        count = min(tokens, OVERLAP_TOKENS)
        places = _places(self.overlap, self._slot(window_places), tokens, count)
        return GroupPages(places, tokens - count, held_tokens=0)

    def overlap_in_pages(self, pages: NDArray[Any], first: int, tokens: int) -> GroupPages:
        """Returns where the rings of the window's pages have what is not compressed by 4 yet.

        They are numbered by themselves: as many for each page of the request.

        Args:
            pages: of the window, up to the request's last one.
            first: how many of the request's pages come before them.

        Raises:
            EngineContractError: if the request's last page is another one.
        """
        assert self.overlap is not None
        if len(pages) and first + len(pages) != -(-tokens // self.page_tokens):
            raise EngineContractError(
                f"SGLang hands in pages {first} to {first + len(pages)} of a window's, and the request has {tokens} "
                f"tokens in pages of {self.page_tokens}"
            )
        filled = np.minimum(tokens - (first + np.arange(len(pages))) * self.page_tokens, self.page_tokens)
        offsets = filled[:, None] - OVERLAP_TOKENS + np.arange(OVERLAP_TOKENS)
        if len(pages) and filled[-1] < OVERLAP_TOKENS:
            offsets[-1] += OVERLAP_TOKENS - filled[-1]  # its first ones; what is behind them is left out
        places = (pages[:, None].astype(np.int64) * self.overlap + offsets % self.overlap).reshape(-1)
        stop = len(places) - max(0, OVERLAP_TOKENS - int(filled[-1])) if len(pages) else 0
        return GroupPages(places[:stop], first * OVERLAP_TOKENS, held_tokens=0)

    def pair_places(self, slots: NDArray[Any], tokens: int) -> GroupPages:
        """Returns where a request's ring has what is not compressed by 2 yet.

        Args:
            slots: the request's; none where nothing is left to be compressed.
        """
        assert self.pair is not None
        if not len(slots):
            return GroupPages(slots, held_tokens=0)
        count = min(tokens, PAIR_TOKENS)
        return GroupPages(_places(self.pair, int(slots[0]), tokens, count), tokens - count, held_tokens=0)

    def _slot(self, window_places: NDArray[Any]) -> int:
        return int(window_places[0]) // (self.window or 1) if len(window_places) else 0


def _places(length: int, slot: int, tokens: int, count: int) -> NDArray[np.int64]:
    """Returns the places that one request's last tokens have in its ring."""
    return slot * length + np.arange(tokens - count, tokens, dtype=np.int64) % length
