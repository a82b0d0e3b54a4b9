"""Callers of a decode endpoint that wait, on their own threads, until a link is ready."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field

from kvferry.errors import EndpointClosedError, KVFerryError
from kvferry.protocol.links.link import Link


@dataclass(eq=False, slots=True)
class WaitingCaller:
    """A caller.

    Attributes:
        ready: has a result when the link is ready, and an exception when it failed.
        link: what it waits for; None until the endpoint's thread has taken the call.
    """

    ready: Future[None] = field(default_factory=Future)
    link: Link | None = None

    def wait(self, timeout_s: float) -> bool:
        """Waits until the link is ready. Returns False if it is not in time.

        Raises:
            KVFerryError: why it will not be.
        """
        try:
            self.ready.result(timeout_s)
        except FutureTimeoutError:
            return False
        return True


class WaitingCallers:
    """All callers that wait. `begin` and `end` are called on their threads, the rest on the endpoint's."""

    def __init__(self) -> None:
        """Begins with nobody."""
        self._callers: list[WaitingCaller] = []
        self._is_closed = False

    def __len__(self) -> int:
        """How many wait."""
        return len(self._callers)

    def begin(self) -> WaitingCaller:
        """Adds a caller.

        Raises:
            EndpointClosedError: if nobody is answered any more.
        """
        caller = WaitingCaller()
        self._callers.append(caller)
        if self._is_closed:
            self._callers.remove(caller)
            raise EndpointClosedError("the endpoint was closed")
        return caller

    def end(self, caller: WaitingCaller) -> None:
        """Takes a caller out."""
        self._callers.remove(caller)

    def link_ready(self, link: Link) -> None:
        """Answers those that wait for a link."""
        for caller in self._of(link):
            caller.ready.set_result(None)

    def link_failed(self, link: Link, error: KVFerryError) -> None:
        """Answers those that wait for a link in vain."""
        for caller in self._of(link):
            caller.ready.set_exception(error)

    def close(self) -> None:
        """Answers everybody; nobody is answered any more."""
        self._is_closed = True
        for caller in list(self._callers):
            if not caller.ready.done():
                caller.ready.set_exception(EndpointClosedError("the endpoint was closed"))

    def _of(self, link: Link) -> list[WaitingCaller]:
        return [caller for caller in list(self._callers) if caller.link is link and not caller.ready.done()]
