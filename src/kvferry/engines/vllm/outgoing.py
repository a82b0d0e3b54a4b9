"""The requests that a worker sends: pages wait here until they may leave.

A page leaves when the device has computed it, and when the decode side has opened its room, or vLLM is through with
the request. Before that, vLLM may preempt the request and give its blocks to another one; what has not left is then
forgotten here, and comes again when it has been computed again. Where layers leave in ranges, a step's pages are added
once for each range that the model is through with.

Nothing here looks at a request of which nothing has happened, however many wait: rooms call back when they change, and
one thread waits for the device, which cannot.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvferry import Device, GroupPages, Sender, TransferState
from kvferry.engines.device_events import DeviceEvent, DeviceEvents
from kvferry.engines.layer_ranges import LayerRanges
from kvferry.errors import KVFerryError, QueueFullError
from kvferry.loggers import logger_of

log = logger_of(__name__)

Pages: TypeAlias = "NDArray[np.int64]"


@dataclass(frozen=True, slots=True, eq=False)
class PagesToSend:
    """Pages of one group.

    Attributes:
        start: how many pages of the request come before them.
        pages: their numbers.
    """

    start: int
    pages: Pages

    @property
    def stop(self) -> int:
        """How many pages of the request come before the next ones."""
        return self.start + len(self.pages)


@dataclass(slots=True, eq=False)
class _Batch:
    """Pages that one step computes.

    Attributes:
        groups: those of each group, which follow what came before.
        is_last: whether they are the rest of the request.
        computed: how many ranges of layers the device has computed of them.
        left: how many of these have been handed in.
    """

    groups: dict[str, PagesToSend]
    is_last: bool
    computed: int = 0
    left: int = 0

    @property
    def stops(self) -> dict[str, int]:
        """By group, how many pages of the request come before the next ones."""
        return {name: pages.stop for name, pages in self.groups.items()}


@dataclass(slots=True, eq=False)
class _Request:
    """A request that is sent.

    Attributes:
        ranges: how many ranges of layers there are.
        waiting: what has not left, in order.
        being_computed: the pages of the step that runs, once some of their layers were added.
        handed_in: by group, how many pages of the request have left, those before the first included.
        known: likewise, those that wait included.
        is_kept: whether vLLM is done with it and keeps its blocks for the transfer.
        is_through: whether its last pages have left. After a preemption they come again all the same.
    """

    sender: Sender
    ranges: int
    waiting: deque[_Batch] = field(default_factory=deque)
    being_computed: _Batch | None = None
    handed_in: dict[str, int] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)
    is_kept: bool = False
    is_through: bool = False

    def add(self, groups: Mapping[str, PagesToSend], *, last: bool) -> _Batch:
        """Adds the pages of a step, but for those that are known: after a preemption some come again."""
        new = {name: _from(pages, self.known.get(name, 0)) for name, pages in groups.items()}
        batch = _Batch({name: pages for name, pages in new.items() if len(pages.pages)}, last)
        if batch.groups or (last and not self.is_through):
            self.waiting.append(batch)
        self.known |= batch.stops
        return batch

    def begin(self, groups: Mapping[str, PagesToSend]) -> _Batch:
        """Adds the pages of a step that runs, or finds them again."""
        if self.being_computed is None:
            self.being_computed = self.add(groups, last=False)
        return self.being_computed

    def complete(self, groups: Mapping[str, PagesToSend], *, last: bool) -> _Batch:
        """Adds the pages of a step that is over, or finds them again."""
        batch, self.being_computed = self.being_computed, None
        if batch is None or (last and not batch.groups):
            return self.add(groups, last=last)
        batch.is_last = last
        return batch

    def forget(self) -> None:
        """Drops what waits; it may come again."""
        self.waiting.clear()
        self.being_computed = None
        self.known = dict(self.handed_in)

    @property
    def has_begun(self) -> bool:
        """Whether some layers of the first pages that wait have left, and others have not."""
        return bool(self.waiting and self.waiting[0].left)

    @property
    def may_leave(self) -> bool:
        """Whether of the first pages that wait something may be handed in."""
        if not self.waiting or self.waiting[0].computed == self.waiting[0].left:
            return False
        state = self.sender.state
        return not state.is_final and (self.is_kept or state is not TransferState.BOOTSTRAPPING)

    @property
    def leaves_in_part(self) -> bool:
        """Whether of the first pages that wait only some layers leave next: others have left, or are still computed."""
        return self.has_begun or self.waiting[0].computed < self.ranges

    def computed(self) -> list[_Batch]:
        """Returns the first of what waits, as far as it is computed and each group's pages follow each other.

        That is one alone where it leaves in part.
        """
        if self.leaves_in_part:
            return [self.waiting[0]]
        taken: list[_Batch] = []
        stops: dict[str, int] = {}
        for batch in self.waiting:
            follows = all(stops.get(name, pages.start) == pages.start for name, pages in batch.groups.items())
            if batch.computed < self.ranges or not follows:
                break
            stops |= batch.stops
            taken.append(batch)
        return taken

    def left(self, batches: list[_Batch]) -> None:
        """Notes that of the first batches has left what is computed of them."""
        for batch in batches:
            batch.left = batch.computed
            if batch.left == self.ranges:
                self.waiting.popleft()
                self.handed_in |= batch.stops
                self.is_through |= batch.is_last


def _from(pages: PagesToSend, first: int) -> PagesToSend:
    """Returns the pages from a position on; all of them where they begin behind it, as a window's do."""
    skipped = max(0, first - pages.start)
    return PagesToSend(pages.start + skipped, pages.pages[skipped:]) if skipped else pages


def _merged(batches: list[_Batch]) -> dict[str, GroupPages]:
    """Returns the pages of batches that follow each other, as they are handed in."""
    parts: dict[str, list[PagesToSend]] = {}
    for batch in batches:
        for name, pages in batch.groups.items():
            parts.setdefault(name, []).append(pages)
    return {
        name: GroupPages(np.concatenate([part.pages for part in each]), each[0].start) for name, each in parts.items()
    }


class OutgoingRequests:
    """Hands pages in as soon as they may leave, on threads of its own, since the engine may be busy, or asleep."""

    def __init__(
        self,
        ranges: LayerRanges = LayerRanges(),  # noqa: B008 - immutable
        device: Device | None = None,
        *,
        is_told_late: bool = False,
    ) -> None:
        """Starts the thread that follows rooms. The one that waits for the device starts with its first fence.

        Args:
            ranges: of layers, that may leave one by one.
            device: that computes the pages; None if there are no fences.
            is_told_late: whether a step may write to a preempted request's blocks before this hears of it: vLLM's
                second model runner clears and copies blocks first.
        """
        self._is_told_late = is_told_late
        self._leaving: set[str] = set()  # whose pages have left, and were still read when the last step ended
        self._ranges = ranges
        self._requests: dict[str, _Request] = {}
        # Guards the requests: pages are handed in, in order, by the engine's thread and by our own.
        self._lock = threading.Lock()
        self._ready: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # names whose pages may leave; None ends
        self._reusable: deque[str] = deque()  # names of requests whose pages are not read any more
        self._device_events = DeviceEvents(device)
        self._follower = threading.Thread(target=self._follow_rooms, name="kvferry-vllm-outgoing", daemon=True)
        self._follower.start()

    def add(
        self,
        request: str,
        open_sender: Callable[[], Sender],
        groups: Mapping[str, PagesToSend],
        fence: DeviceEvent | None,
        *,
        last: bool,
        ranges: int | None = None,
    ) -> None:
        """Adds pages of a request, or their first layers, which the same pages follow once their step is over.

        Args:
            open_sender: opens the request's room; called with its first pages.
            fence: of the step, or of the layers, that compute the pages; None if they are computed.
            ranges: how many ranges of layers these are; None for all of them.

        Raises:
            KVFerryError: if the room cannot be opened.
        """
        with self._lock:
            known = self._requests.get(request)
            if known is None:
                known = self._requests[request] = _Request(open_sender(), self._ranges.count)
                known.sender.add_change_callback(partial(self._room_changed, request, known))
            batch = known.complete(groups, last=last) if ranges is None else known.begin(groups)
            computed = self._ranges.count if ranges is None else ranges
            if fence is None:
                batch.computed = computed
            else:
                self._device_events.when(fence, partial(self._reached, request, known, batch, computed))
            self._hand_in(request, known)

    def preempt(self, requests: Iterable[str]) -> None:
        """Drops the pages that wait, since vLLM is about to give the blocks to others. Aborts what is being read.

        So it does with what was read until a moment ago where it is told too late: that may have been written to.
        """
        with self._lock:
            for name in requests:
                known = self._requests.get(name)
                if known is None:
                    continue
                has_begun = known.has_begun
                known.forget()
                was_read = self._is_told_late and name in self._leaving
                if has_begun or was_read or not known.sender.is_at_rest:
                    known.sender.abort("vLLM preempted the request while its pages were being read")

    def step_ended(self) -> None:
        """Takes that the device has a whole step queued: what is not read any more was read in time."""
        if not self._leaving:  # most steps wait for no other thread; what leaves just now is looked at after the next
            return
        with self._lock:
            self._leaving = {name for name in self._leaving if not self._is_read_in_time(name)}

    def _is_read_in_time(self, name: str) -> bool:
        known = self._requests.get(name)
        return known is None or known.sender.is_at_rest

    def give_up(self, request: str, reason: str, *, unless_asked_for: bool = False) -> bool:
        """Aborts a request that is not needed any more. Returns whether it has.

        Args:
            unless_asked_for: whether it goes on where a decode rank has opened its room.
        """
        with self._lock:
            known = self._requests.get(request)
            if known is None or (unless_asked_for and known.sender.state is not TransferState.BOOTSTRAPPING):
                return False
            known.sender.abort(reason)
            return True

    def keep(self, requests: Iterable[str]) -> None:
        """Marks requests that vLLM is done with: it keeps the blocks of those known here until they are sent."""
        with self._lock:
            for name in requests:
                known = self._requests.get(name)
                if known is not None:
                    known.is_kept = True
                    self._hand_in(name, known)
                    self._room_changed(name, known)  # what has ended before was not reported

    def take_ended(self) -> dict[str, Sender]:
        """Returns the kept requests whose blocks are not read any more, once each."""
        ended: dict[str, Sender] = {}
        while self._reusable:
            name = self._reusable.popleft()
            with self._lock:
                known = self._requests.get(name)
                if known is not None and known.is_kept and known.sender.pages_reusable:
                    ended[name] = self._requests.pop(name).sender
        return ended

    def close(self) -> None:
        """Ends the threads. A device that never gets to a fence holds nobody up."""
        self._ready.put(None)
        self._device_events.close()
        self._follower.join()

    def _room_changed(self, name: str, known: _Request) -> None:
        """Notes what is to be done. On any thread and without the lock, since rooms wait for it."""
        if known.sender.pages_reusable:
            self._reusable.append(name)
        elif known.waiting:
            self._ready.put(name)

    def _follow_rooms(self) -> None:
        while (name := self._ready.get()) is not None:
            with self._lock:
                known = self._requests.get(name)
                if known is not None:
                    self._hand_in(name, known)

    def _reached(self, name: str, known: _Request, batch: _Batch, ranges: int, problem: Exception | None) -> None:
        """Takes that the device has computed so many ranges of a batch, or has failed. On the thread that waits."""
        with self._lock:
            if problem is None:
                batch.computed = ranges
                self._hand_in(name, known)
            else:
                self._give_up_sending(name, known, f"the device failed: {problem}")

    def _hand_in(self, name: str, known: _Request) -> None:
        """Hands in what may leave. Must be called with the lock, which submitting holds for microseconds."""
        try:
            while known.may_leave:
                batches = known.computed()
                first, last = batches[0], batches[-1]
                known.sender.submit(
                    _merged(batches),
                    last=last.is_last and last.computed == known.ranges,
                    layers=self._ranges.layers(first.left, first.computed) if known.leaves_in_part else None,
                )
                known.left(batches)
                if self._is_told_late:
                    self._leaving.add(name)
        except QueueFullError:
            return  # the room calls back when it takes more
        except KVFerryError as error:
            self._give_up_sending(name, known, str(error))
        except Exception as error:  # whatever it was, the thread goes on
            log.exception("request %s met an unexpected error", name)
            self._give_up_sending(name, known, f"{type(error).__name__}: {error}")

    @staticmethod
    def _give_up_sending(name: str, known: _Request, reason: str) -> None:
        log.error("request %s cannot be sent: %s", name, reason)
        known.forget()
        known.sender.abort(reason)
