"""What vLLM's scheduler needs to know of requests, and does not wait for: it is found out on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Found = TypeVar("Found")


class FoundAside(Generic[Found]):
    """What was found out, or is being found out, of requests, for the scheduler's thread.

    All that have not ended: were some forgotten for others' sake, more of them than are kept would have each other
    forgotten, as vLLM asks about all that wait, one after the other, and none of them would ever be scheduled.
    """

    def __init__(self, thread: str) -> None:
        """Begins with nothing."""
        self._found: dict[str, tuple[object, Future[Found]]] = {}  # by request
        self._thread = ThreadPoolExecutor(1, thread)

    def __len__(self) -> int:
        return len(self._found)

    def look(self, request: str, find: Callable[[], Found], *, about: object = None) -> Future[Found]:
        """Returns what is found; if nobody has asked for it, that begins.

        Args:
            about: what is asked about it: only the last thing is remembered.
        """
        known = self._found.get(request)
        if known is None or known[0] != about:
            self.forget(request)
            known = self._found[request] = about, self._thread.submit(find)
        return known[1]

    def forget(self, request: str) -> None:
        """Drops what was found of a request, which has ended; or it is found out anew when somebody asks."""
        _, future = self._found.pop(request, (None, None))
        if future is not None:
            future.cancel()

    def forget_all(self) -> None:
        """Drops all."""
        for request in list(self._found):
            self.forget(request)
