"""When a rank asks the registry for its lease: after a grant, after a failure, and when the registry was away.

Nothing here waits, asks or reads a clock. `registry_client.LeaseKeeper` does what is said here, one thread for a rank.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from kvferry.control.registry import Grant
from kvferry.errors import SettingsError

LONGEST_BUSY_S = 60.0
"""The longest wait where a registry does not answer in time, again and again: it is reached after a minute."""


class Renewals:
    """How long a rank waits until it asks again.

    With a grant the registry says how many seconds the ranks that it has should take to come back all together. A wait
    after a failure is never shorter than that on average, whatever has failed: so a registry that returns, or has too
    much to do, has no more ranks coming in a second than it said.
    """

    def __init__(
        self, *, shortest_retry_s: float = 0.1, longest_retry_s: float = 2.0, jitter: Callable[[], float] | None = None
    ) -> None:
        """Begins with nothing granted.

        Args:
            shortest_retry_s: the wait after the first failure, in seconds; it doubles with each one that follows.
            longest_retry_s: where the doubling ends, in seconds. Each wait is shortened at random by up to a
                half, so that the ranks of an engine do not all return at once.
            jitter: by what a wait is multiplied; a random number between a half and one by default.

        Raises:
            SettingsError: if the waits are not positive, or the first is above the second.
        """
        if not 0 < shortest_retry_s <= longest_retry_s <= threading.TIMEOUT_MAX:
            raise SettingsError(
                f"shortest_retry_s is {shortest_retry_s} and longest_retry_s is {longest_retry_s}: both must "
                "be positive, and the first not above the second"
            )
        self._shortest_retry_s = shortest_retry_s
        self._longest_retry_s = longest_retry_s
        self._retry_s = shortest_retry_s
        self._return_s = 0.0
        self._jitter = jitter or _jitter

    def granted(self, grant: Grant) -> float:
        """Returns how long to wait after a lease was granted."""
        self._retry_s = self._shortest_retry_s
        self._return_s = grant.return_s
        return grant.renew_s

    def failed(self, *, timed_out: bool = False) -> float:
        """Returns how long to wait after a failure.

        Args:
            timed_out: whether the registry took the request and did not answer in time. It may have more to do than it
                can: what it answers then is answered to those who have given up. What helps is to ask less, so the
                waits begin with the longest of the others, and go on doubling up to `LONGEST_BUSY_S`.
        """
        if timed_out:
            self._retry_s = max(self._retry_s, self._longest_retry_s)
        longest_s = max(LONGEST_BUSY_S, self._longest_retry_s) if timed_out else self._longest_retry_s
        # Shortened by a quarter on average, so that all ranks together take as long as the registry said.
        wait_s = max(min(self._retry_s, longest_s), self._return_s * 4 / 3) * self._jitter()
        self._retry_s = min(2 * self._retry_s, max(LONGEST_BUSY_S, self._longest_retry_s))
        return wait_s

    def hung_up(self) -> float:
        """Returns how long to wait where the registry seems to have restarted: anything up to what it said."""
        return (2 * self._jitter() - 1) * self._return_s


def _jitter() -> float:
    return random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, guards nothing
