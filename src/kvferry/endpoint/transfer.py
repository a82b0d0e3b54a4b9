"""What a caller holds of one transfer: its state to poll, its end to wait for."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from kvferry.errors import KVFerryError
from kvferry.protocol.states import TransferState

log = logging.getLogger(__name__)


class Transfer:
    """One transfer, as its caller sees it.

    `state` and `pages_reusable` are plain reads: a scheduler may poll them in every step, or be called back when they
    change. `wait` and `completed` are for scripts. Methods may be called from any thread.

    Attributes:
        room: the transfer's number.
        state: where it stands.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.state = TransferState.BOOTSTRAPPING
        self._error: KVFerryError | None = None
        self._ended: Future[None] = Future()
        self._reusable = threading.Event()
        self._change_callbacks: tuple[Callable[[], None], ...] = ()

    @property
    def error(self) -> KVFerryError | None:
        """Why the transfer failed; None unless `state` is FAILED. `__cause__` is the original exception, if any."""
        return self._error

    @property
    def pages_reusable(self) -> bool:
        """Whether the pages that were handed in may be used for something else.

        False while the transfer runs, and after a failure for as long as a write may still be on its way.
        """
        return self._reusable.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for the end of the transfer.

        Args:
            timeout_s: the longest wait; None relies on the transfer's own deadlines, which always end it.

        Raises:
            TimeoutError: if the transfer is still running after timeout_s.
            KVFerryError: if it failed; see `error`.
        """
        try:
            self._ended.result(timeout_s)
        except FutureTimeoutError:
            raise TimeoutError(f"room {self.room} is still {self.state.value} after {timeout_s} s") from None

    async def completed(self) -> None:
        """Like `wait`, for asyncio. Cancelling it does not abort the transfer."""
        await asyncio.shield(asyncio.wrap_future(self._ended))

    def wait_pages_reusable(self, timeout_s: float | None = None) -> bool:
        """Waits until the pages may be reused; False if they may not after timeout_s."""
        return self._reusable.wait(timeout_s)

    def add_change_callback(self, callback: Callable[[], None]) -> None:
        """Has a callable called after every change of `state` and `pages_reusable`, so that nobody need poll them.

        A `Sender` also calls it when its queue, which was full, takes chunks again. A change that came before is not
        reported: look at the transfer once after adding. Changes that follow each other closely may be reported once.

        Args:
            callback: called without arguments, on a thread of kvferry's that moves bytes or messages. It must return at
                once: put something into a queue there, or set an event. What it raises is logged, and changes nothing.
        """
        self._change_callbacks += (callback,)

    def _call_back(self) -> None:
        for callback in self._change_callbacks:
            try:
                callback()
            except Exception:
                log.exception("room %d: a change callback failed; the transfer goes on", self.room)

    def _update(self, state: TransferState, error: KVFerryError | None, *, pages_reusable: bool) -> None:
        """Takes over the machine's state. For the one thread that runs the machine."""
        # In this order: a caller that sees pages reusable sees the end, and one that the end woke sees pages reusable.
        has_changed = state is not self.state
        is_released = pages_reusable and not self.pages_reusable
        if has_changed:
            log.debug("room %d: %s", self.room, state.value, extra={"room": self.room, "state": state.value})
            self._error = error
            self.state = state
        if is_released:
            self._reusable.set()
        if has_changed and state is TransferState.SUCCESS:
            self._ended.set_result(None)
        elif has_changed and state is TransferState.FAILED:
            assert error is not None
            self._ended.set_exception(error)
        if has_changed or is_released:
            self._call_back()
