"""Which process made something that a forked child cannot use: threads, and connections that two would read at once."""

from __future__ import annotations

import os

from kvferry.errors import UsageError


class OwningProcess:
    """The process that made this object, and no child that was forked from it."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_this(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._pid

    def check(self, what: str) -> None:
        """Checks that this is that process. Takes no lock: in a forked child nobody may be left to release one.

        Args:
            what: begins the error's sentence, such as "this endpoint".

        Raises:
            UsageError: if it is a child of it.
        """
        if not self.is_this:
            raise UsageError(
                f"{what} belongs to process {self._pid}, and this is process {os.getpid()}, forked from it: its "
                "threads and connections are the parent's. Make it after the fork, or start processes by spawn"
            )
