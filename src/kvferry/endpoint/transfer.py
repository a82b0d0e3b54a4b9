"""One transfer as its caller sees it, on either side: its state to poll, its end to wait for; and what it reports."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import TypeVar

from kvferry.endpoint.runtime.callers_code import Callbacks, Ready, look_of
from kvferry.endpoint.runtime.threads import check_may_wait
from kvferry.errors import KVFerryError, QueueFullError, UsageError
from kvferry.loggers import logger_of
from kvferry.observe.records import Observer, ReceiverStats, SenderStats, WriteRecord
from kvferry.plan.requests.chunks import ChunkSequence, HandedIn, Layers
from kvferry.plan.requests.page_numbers import AnyPages
from kvferry.protocol.transfer.states import TransferState
from kvferry.protocol.wire import field_types

log = logger_of(__name__)

MOST_WAITING_CHUNKS = 65_536
"""Chunks of a room that may wait to be written: an engine hands in one a step, and each takes memory."""


class Transfer:
    """One transfer, as its caller sees it. Methods may be called from any thread."""

    room: int
    """The transfer's number."""
    state: TransferState
    """Where it stands. This and `pages_reusable` are plain reads: a scheduler may poll them in every step, or be called
    back when they change."""
    error: KVFerryError | None
    """Why the transfer failed; None unless `state` is FAILED. `__cause__` is the original exception, if any."""

    def __init__(self, room: int, abort: Callable[[str], None], callbacks: Callbacks) -> None:
        self.room = room
        self._callbacks = callbacks
        self._will_call_back = False  # for what has changed since the last time
        self._abort = abort
        self.state = TransferState.BOOTSTRAPPING
        self.error = None
        self._ended: Future[None] = Future()
        self._is_reusable = False
        self._settled = threading.Event()  # once the pages may be reused, or will never be
        self._change_callbacks: list[Callable[[], None]] = []  # only ever longer, from any thread

    @property
    def pages_reusable(self) -> bool:
        """Whether the pages that were handed in may be used for something else.

        False while the transfer runs, and after a failure for as long as a write may still be on its way.
        """
        return self._is_reusable

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for the end of the transfer. Like `completed` it is for scripts.

        Args:
            timeout_s: the longest wait; None relies on the transfer's own deadlines, which always end it.

        Raises:
            TimeoutError: if the transfer is still running after timeout_s.
            KVFerryError: if it failed; see `error`.
            UsageError: if it is running still, on a thread of kvferry's own: what looks at a `ready` signal, for one.
        """
        if not self._ended.done():
            check_may_wait(f"wait() for room {self.room}")
        try:
            self._ended.result(timeout_s)
        except FutureTimeoutError:
            raise TimeoutError(f"room {self.room} is still {self.state.value} after {timeout_s} s") from None

    async def completed(self) -> None:
        """Like `wait`, for asyncio. Cancelling it does not abort the transfer."""
        await asyncio.shield(asyncio.wrap_future(self._ended))

    def wait_pages_reusable(self, timeout_s: float | None = None) -> bool:
        """Waits until the pages may be reused. UsageError as for `wait`.

        Returns:
            False if they may not after timeout_s, or never will: the endpoint has closed while a write might arrive.
        """
        if not self._settled.is_set():
            check_may_wait(f"wait_pages_reusable() for room {self.room}")
            self._settled.wait(timeout_s)
        return self._is_reusable

    def abort(self, reason: str = "no reason given") -> None:
        """Aborts the transfer on both sides. Returns at once; a transfer that has ended stays as it is.

        The pages may be reused only once `pages_reusable` is True: a write may still be in flight.
        """
        self._abort(reason)

    def add_change_callback(self, callback: Callable[[], None]) -> None:
        """Has a callable called after every change of `state` and `pages_reusable`, so that nobody need poll them.

        A `Sender` also calls it when its queue, which was full, takes chunks again. A change that came before is not
        reported: look at the transfer once after adding. Changes that follow each other closely may be reported once.

        Args:
            callback: called without arguments, on a thread that the endpoint has for the callbacks of all its
                transfers. One that does not return at once keeps the others waiting, and is named in the log and in
                the status; no transfer waits for it. What it raises is logged, and changes nothing. It may call
                whatever other threads may, `close` of the endpoint too.
        """
        self._change_callbacks.append(callback)
        self._callbacks.start()

    def _changed(self) -> None:
        """Has the callbacks called, soon. In the room's turns only."""
        if self._change_callbacks and not self._will_call_back:
            self._will_call_back = True
            self._callbacks.post(self._call_back)

    def _call_back(self) -> None:
        self._will_call_back = False  # first: what changes from now on is for the next time
        for callback in tuple(self._change_callbacks):
            self._callbacks.call(callback, self.room)

    def _update(self, state: TransferState, error: KVFerryError | None, *, pages_reusable: bool) -> None:
        """Takes over the machine's state. For the one thread that runs the machine."""
        # In this order: a caller that sees pages reusable sees the end, and one that the end woke sees pages reusable.
        has_changed = state is not self.state
        is_released = pages_reusable and not self.pages_reusable
        if has_changed:
            log.debug("room %d: %s", self.room, state.value, extra={"room": self.room, "state": state.value})
            self.error = error
            self.state = state
        if is_released:
            self._is_reusable = True
            self._settled.set()
        if has_changed or is_released:
            self._changed()
        if has_changed and state.is_final:
            try:
                self._ended.set_result(None) if error is None else self._ended.set_exception(error)
            except BaseException:  # a log handler that raises where whoever awaits `completed` cannot be told
                log.exception("room %d: somebody who waits for its end could not be told", self.room)

    def _keep_pages(self) -> None:
        """Nobody will hear any more that the pages may be reused. For the one thread that runs the machine."""
        self._settled.set()


class Sender(Transfer):
    """One request's transfer from this prefill rank, as its caller sees it.

    Attributes:
        stats: what it took: bytes, writes and times.
        prefix_tokens: tokens at the start of the request that every decode rank holds already, and that need not be
            handed in. None while `state` is BOOTSTRAPPING.
    """

    def __init__(
        self,
        room: int,
        chunks: ChunkSequence,
        hand_in: Callable[[HandedIn], None],
        abort: Callable[[str], None],
        callbacks: Callbacks,
        *,
        now: Callable[[], float],
        observer: Observer,
        report: RoomReport,
    ) -> None:
        """Made by `PrefillEndpoint.open`.

        Args:
            hand_in: passes a chunk on.
            abort: passes on that the caller gives up, and why.
            callbacks: calls the caller back.
            report: records how long the caller is busy here.
        """
        super().__init__(room, abort, callbacks)
        # Guards the order of chunks: they are handed on in the order of their numbers, whichever threads submit.
        self._lock = threading.Lock()
        self._chunks = chunks
        self._hand_in = hand_in
        self._now = now
        self._observer = observer
        self._report = report
        self._taken_up = 0  # chunks that do not wait any more
        self._was_full = False  # whether a chunk was refused since there was last room for one
        self._through = 0  # chunks that had been handed in when last all of them had been read
        self.prefix_tokens: int | None = None
        self.stats = SenderStats(opened_at=now(), last_submitted_at=None, ended_at=None, writes=())

    def submit(
        self,
        pages: AnyPages,
        *,
        start: int | None = None,
        last: bool = False,
        aux: bytes | None = None,
        ready: Ready | None = None,
        layers: Layers | None = None,
        token_part: int | None = None,
    ) -> None:
        """Hands in the next chunk of the request and returns at once, whatever its size.

        The pages must keep their contents until `pages_reusable`. Chunks may be handed in before the decode side asks
        for them; pages that it already holds are not sent. A room that has already failed accepts chunks and drops
        them: look at `state`. Page numbers are not checked in the caller's time: one that the pool does not have, or
        that appears twice in a chunk, fails the room with a PageError. A worker takes the chunk within a millisecond;
        chunks that wait leave in one write, as large as a sub-chunk at most.
        An exception that interrupts the call, such as Ctrl-C's, aborts the room: nobody knows what it has taken.

        Args:
            pages: page numbers in this rank's pool, in the order of the request. A NumPy array of int64 is fastest.
                With several groups a mapping from their names to page numbers, or to `GroupPages` with a start of their
                own; groups of which the chunk has nothing may be left out. The slot of a request's state is handed in
                once, when the state is final.
            start: position of the first page among the request's pages on this rank. None continues where the chunk
                before ended. The first chunk may start later if the decode side is known to hold what comes before, and
                every chunk of a window if what is left out lies before the window.
            last: whether the request ends with this chunk, which may be empty.
            aux: with the last chunk: the first token and whatever else the decode side needs, as bytes. Taken from the
                first rank of the last pipeline stage; the others' is ignored.
            ready: says when the pages hold what is to be sent, for pages that a device or another thread still writes:
                an event of a device (`query()`), a `threading.Event`, or a callable that returns a bool. Threads of
                kvferry's look at it, every millisecond at least, and read nothing before it says so; chunks behind this
                one wait for it, too. Without it the pages are read at once: whatever writes them must have ended, on a
                device as well. What it raises fails the room, and no other. It must not wait: other rooms would.

            layers: the layers that the chunk has of these pages, for pages that are handed in as a model computes them:
                the same pages once for each range of layers, in any order, and the next pages once all layers were
                handed in. An `Interval` of the model's layers, or a mapping from components to intervals where they
                have different numbers of layers; None for all. Groups that have none of them are left out. The last
                chunk is the one with which all layers are there. Ranges that follow each other may leave in one write.
            token_part: which part of the request's tokens the pages hold, for an engine that deals its ranks another
                part in every request: the first page goes to any rank, and the next ones to those behind it. Every rank
                then has a part of its own, and says it with every chunk. None for that of the layout.

        Raises:
            ChunkError: after the last chunk, or if the chunk does not follow the one before it, in its layers either.
            PageError: if page numbers are not integers, or there is no such group.
            QueueFullError: if too many chunks of the room wait already; this one was not taken. Callbacks of
                `add_change_callback` say when there is room again.
            UsageError: if aux is given before the last chunk, or is too large, or ready is no signal.
        """
        try:
            if aux is not None:
                self._check_aux(aux, last=last)
            is_ready = None if ready is None else look_of(ready, where=f"room {self.room}")
            with self._lock:
                if self._is_full and self._wants_room():
                    full = QueueFullError(
                        f"room {self.room}: {MOST_WAITING_CHUNKS:,} chunks wait to be written already: submit this one "
                        "when some have been"
                    )
                    self._observer.refused(full)
                    raise full
                chunk = self._chunks.hand_in(
                    pages,
                    start=start,
                    is_last=last,
                    aux=aux,
                    now=self._now(),
                    is_ready=is_ready,
                    layers=layers,
                    token_part=token_part,
                )
                self._hand_in(chunk)
            self._report.submitted(self._now() - chunk.submitted_at)
        except KVFerryError:
            raise  # the chunk was refused, which changes nothing
        except BaseException as error:  # Ctrl-C: nobody knows whether the chunk was taken
            self._abort(f"handing in a chunk was interrupted by {type(error).__name__}")
            raise

    @property
    def _is_full(self) -> bool:
        return self._chunks.submitted - self._taken_up >= MOST_WAITING_CHUNKS

    def _wants_room(self) -> bool:
        """Asks to be called back when there is room for a chunk; returns whether there is none still."""
        self._was_full = True
        return self._is_full  # looked at again: whoever made room before that calls nobody back

    def _check_aux(self, aux: bytes, *, last: bool) -> None:
        if not last:
            raise UsageError(f"room {self.room}: aux data goes with the last chunk (last=True)")
        if len(aux) > field_types.MAX_AUX_BYTES:
            raise UsageError(
                f"room {self.room}: {len(aux)} bytes of aux data exceed the limit of {field_types.MAX_AUX_BYTES}"
            )

    @property
    def is_at_rest(self) -> bool:
        """Whether all pages that were handed in so far have been read. False again once another chunk is submitted."""
        return self._through == self._chunks.submitted

    def _proceed(self, handled: int, *, waiting: int, is_drained: bool) -> None:
        """Takes over the room's progress. Called in the room's turns only.

        Args:
            handled: how many chunks the room has taken.
            waiting: how many of them wait to be written.
            is_drained: whether no write is in flight.
        """
        self._taken_up = handled - waiting
        if is_drained and not waiting:
            self._through = handled
        if self._was_full and not self._is_full:
            self._was_full = False
            self._changed()


class Receiver(Transfer):
    """One request's transfer to this decode rank, as its caller sees it.

    Attributes:
        stats: what it took: chunks and times.
        aux: the request's aux data: b"" before it has come, and where the prefill side gave none.
    """

    def __init__(self, room: int, abort: Callable[[str], None], callbacks: Callbacks, now: float) -> None:
        """Made by `DecodeEndpoint.open`."""
        super().__init__(room, abort, callbacks)
        self.aux = b""
        self.stats = ReceiverStats(opened_at=now, first_arrival_at=None, ended_at=None, chunks=0)


REPORT_INTERVAL_S = 0.25
"""Seconds after which a running room reports its writes again."""

_Item = TypeVar("_Item")


class RoomReport:
    """Reports a room's writes and submissions to an observer, many at a time.

    Between two writes the observer's code leaves the processor's cache, so that reporting each alone costs several
    times as much. Any thread may use it, and everything is reported once.
    """

    def __init__(self, room: int, observer: Observer, now: float) -> None:
        """Begins with nothing reported.

        Args:
            now: when the room was opened.
        """
        self._room = room
        self._observer = observer
        self._submit_seconds: deque[float] = deque()
        self._writes: deque[WriteRecord] = deque()
        self._reported_at = now
        self._has_ended = False

    def submitted(self, seconds: float) -> None:
        """Records how long the caller took to hand a chunk in. Costs the caller next to nothing."""
        self._submit_seconds.append(seconds)
        if self._has_ended:
            self._report_submits()

    def wrote(self, record: WriteRecord) -> None:
        """Records a completed write, and reports what waits if that is due."""
        self._writes.append(record)
        if self._has_ended or record.done_at - self._reported_at >= REPORT_INTERVAL_S:
            self._reported_at = record.done_at
            self._report()

    def end(self) -> None:
        """Reports all that is left, and from now on everything at once. Called when the room has ended."""
        self._has_ended = True  # first: what is added now is reported here or by the thread that adds it
        self._report()

    def _report(self) -> None:
        self._report_submits()
        writes = _taken(self._writes)
        if writes:
            self._observer.wrote(self._room, writes)

    def _report_submits(self) -> None:
        seconds = _taken(self._submit_seconds)
        if seconds:
            self._observer.submitted(seconds)


def _taken(waiting: deque[_Item]) -> list[_Item]:
    """Removes and returns everything that waits. Where several threads do so at once, each item goes to one of them."""
    taken = []
    with suppress(IndexError):
        while True:
            taken.append(waiting.popleft())
    return taken
