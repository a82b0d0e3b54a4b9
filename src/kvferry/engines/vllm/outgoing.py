"""The requests that a worker sends: pages wait here until they may leave.

A page leaves when the device has computed it, and when the decode side has opened its room, or vLLM is through with
the request. Before that, vLLM may preempt the request and give its blocks to another one; what has not left is then
forgotten here, and comes again when it has been computed again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from kvferry import GroupPages, Sender, TransferState
from kvferry.errors import KVFerryError, QueueFullError

log = logging.getLogger(__name__)

_POLL_S = 0.001

Fence: TypeAlias = Callable[[], bool]
"""Returns whether the device has done all that was queued on it when the fence was made."""


@dataclass(frozen=True, slots=True)
class PagesToSend:
    """Pages of one group.

    Attributes:
        start: how many pages of the request come before them.
        pages: their numbers.
    """

    start: int
    pages: tuple[int, ...]


@dataclass(slots=True)
class _Waiting:
    """Pages of one group that have not left.

    Attributes:
        handed_in: how many pages of the request have left, those before the first included.
        pages: the numbers of those that follow.
    """

    handed_in: int
    pages: list[int] = field(default_factory=list)

    def add(self, more: PagesToSend) -> None:
        """Adds pages; after a preemption some that are known already come again."""
        known = self.handed_in + len(self.pages)
        if not self.pages and more.start > known:  # before the window
            self.handed_in = known = more.start
        self.pages += more.pages[max(0, known - more.start) :]


@dataclass(slots=True)
class _Request:
    """A request that is sent.

    Attributes:
        groups: its pages.
        fence: the one of the step that computed the last of them.
        is_last: whether the pages that wait are the rest.
        is_complete: whether the last page has left.
        is_kept: whether vLLM is done with it and keeps its blocks for the transfer.
    """

    sender: Sender
    fence: Fence
    groups: dict[str, _Waiting] = field(default_factory=dict)
    is_last: bool = False
    is_complete: bool = False
    is_kept: bool = False

    @property
    def has_work(self) -> bool:
        """Whether pages wait, or the end of the request."""
        if self.sender.state.is_final or self.is_complete:
            return False
        return self.is_last or any(group.pages for group in self.groups.values())

    @property
    def may_leave(self) -> bool:
        """Whether the pages that wait may be handed in."""
        return (self.is_kept or self.sender.state is not TransferState.BOOTSTRAPPING) and self.fence()


class OutgoingRequests:
    """Hands pages in as soon as they may leave, on a thread of its own, since the engine may be busy, or asleep."""

    def __init__(self) -> None:
        """Starts the thread."""
        self._requests: dict[str, _Request] = {}
        # Guards the requests: pages are handed in, in order, by the engine's thread and by our own.
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._look, name="kvferry-vllm-outgoing", daemon=True)
        self._thread.start()

    def add(
        self,
        request: str,
        open_sender: Callable[[], Sender],
        groups: dict[str, PagesToSend],
        fence: Fence,
        *,
        last: bool,
    ) -> None:
        """Adds pages of a request.

        Args:
            open_sender: opens the request's room; called with its first pages.
            fence: the one of the step that computes the pages.

        Raises:
            KVFerryError: if the room cannot be opened.
        """
        with self._changed:
            known = self._requests.get(request)
            if known is None:
                known = self._requests[request] = _Request(open_sender(), fence)
            for name, pages in groups.items():
                known.groups.setdefault(name, _Waiting(0)).add(pages)
            known.fence, known.is_last = fence, last
            self._hand_in(request, known)
            self._changed.notify()

    def preempt(self, requests: Iterable[str]) -> None:
        """Drops the pages that wait, since vLLM is about to give the blocks to others. Aborts what is being read."""
        with self._changed:
            for name in requests:
                known = self._requests.get(name)
                if known is None:
                    continue
                for group in known.groups.values():
                    group.pages.clear()
                known.is_last = False
                if not known.sender.is_at_rest:
                    known.sender.abort("vLLM preempted the request while its pages were being read")

    def give_up(self, request: str, reason: str) -> None:
        """Aborts a request that is not needed any more."""
        with self._changed:
            known = self._requests.get(request)
            if known is not None:
                known.sender.abort(reason)

    def keep(self, requests: Iterable[str]) -> None:
        """Marks requests that vLLM is done with: it keeps the blocks of those known here until they are sent."""
        with self._changed:
            for name in requests:
                known = self._requests.get(name)
                if known is not None:
                    known.is_kept = True
                    self._hand_in(name, known)
            self._changed.notify()

    def take_ended(self) -> dict[str, Sender]:
        """Returns the kept requests whose blocks are not read any more, once each."""
        with self._changed:
            ended = {
                name: known.sender
                for name, known in self._requests.items()
                if known.is_kept and known.sender.pages_reusable
            }
            for name in ended:
                del self._requests[name]
        return ended

    def close(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _look(self) -> None:
        while True:
            with self._changed:
                if self._is_closed:
                    return
                waiting = [(name, known) for name, known in self._requests.items() if known.has_work]
                for name, known in waiting:
                    self._hand_in(name, known)
                self._changed.wait(_POLL_S if waiting else None)

    def _hand_in(self, name: str, known: _Request) -> None:
        """Hands in what may leave. Must be called with the lock, which submitting holds for microseconds."""
        try:
            if not (known.has_work and known.may_leave):
                return
            parts = {
                group: GroupPages(np.array(waiting.pages, np.int64), waiting.handed_in)
                for group, waiting in known.groups.items()
                if waiting.pages
            }
            known.sender.submit(parts, last=known.is_last)
        except QueueFullError:
            return  # later
        except KVFerryError as error:
            log.error("request %s cannot be sent: %s", name, error)
            known.sender.abort(str(error))
            return
        known.is_complete = known.is_last
        for waiting in known.groups.values():
            waiting.handed_in += len(waiting.pages)
            waiting.pages.clear()
