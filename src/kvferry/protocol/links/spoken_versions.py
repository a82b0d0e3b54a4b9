"""In which version of the protocol a prefill rank answers each decode rank: the one in which it last spoke."""

from __future__ import annotations

from collections import OrderedDict

from kvferry.protocol.bounded import remember
from kvferry.protocol.wire.versions import Versions

_MOST_REMEMBERED = 1 << 16


class SpokenVersions:
    """Versions by decode rank. One thread records them, any thread may read them."""

    def __init__(self, mine: Versions) -> None:
        """Begins with nobody.

        Args:
            mine: the versions that this side speaks.
        """
        self.mine = mine
        self._last: OrderedDict[str, int] = OrderedDict()  # by decode rank, the latest stand last

    def record(self, decode_rank: str, version: int) -> None:
        """Records that a message of this version came from a decode rank."""
        remember(self._last, decode_rank, version, _MOST_REMEMBERED)

    def of(self, decode_rank: str) -> int:
        """Returns in which version to speak to a decode rank; the oldest for one of which nothing is known."""
        return self._last.get(decode_rank, self.mine.oldest)
