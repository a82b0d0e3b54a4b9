"""What vLLM's scheduler needs to know of requests, and does not wait for: it is found out on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Found = TypeVar("Found")


class FoundAside(Generic[Key, Found]):
    """What was found out, or is being found out, by what it is about. For the scheduler's thread."""

    def __init__(self, thread: str, *, most: int) -> None:
        """Begins with nothing.

        Args:
            thread: the name of the thread.
            most: how much is remembered: requests may end before they are scheduled, and are never asked about again.
        """
        self._found: dict[Key, Future[Found]] = {}  # the youngest last
        self._thread = ThreadPoolExecutor(1, thread)
        self._most = most

    def __len__(self) -> int:
        return len(self._found)

    def look(self, key: Key, find: Callable[[], Found]) -> Future[Found]:
        """Returns what is found; if nobody has asked for it, that begins."""
        known = self._found.get(key)
        if known is None:
            known = self._found[key] = self._thread.submit(find)
            while len(self._found) > self._most:
                del self._found[next(iter(self._found))]
        return known

    def forget(self, key: Key) -> None:
        """Drops what was found of one thing: it is found out anew when somebody asks."""
        self._found.pop(key, None)

    def forget_all(self) -> None:
        """Drops all."""
        self._found.clear()
