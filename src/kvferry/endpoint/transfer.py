"""What a caller holds of one transfer: its state to poll, its end to wait for."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from kvferry.errors import KVFerryError
from kvferry.protocol.states import TransferState

log = logging.getLogger(__name__)


class Transfer:
    """One transfer, as its caller sees it.

    `state` and `pages_reusable` are plain reads: a scheduler may poll them in every step. `wait` and `completed` are
    for scripts. Methods may be called from any thread.

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

    def _update(self, state: TransferState, error: KVFerryError | None, *, pages_reusable: bool) -> None:
        """Takes over the machine's state. For the one thread that runs the machine."""
        # In this order: a caller that sees pages reusable sees the end, and one that the end woke sees pages reusable.
        has_changed = state is not self.state
        if has_changed:
            log.debug("room %d: %s", self.room, state.value, extra={"room": self.room, "state": state.value})
            self._error = error
            self.state = state
        if pages_reusable:
            self._reusable.set()
        if not has_changed:
            return
        if state is TransferState.SUCCESS:
            self._ended.set_result(None)
        elif state is TransferState.FAILED:
            assert error is not None
            self._ended.set_exception(error)
