"""Waits for the device, on a thread of its own, so that SGLang's scheduler need not."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.loggers import logger_of

log = logger_of(__name__)

Callback = Callable[[Exception | None], None]


class DeviceEvent(Protocol):
    """An event on a stream of the device, such as torch.cuda.Event."""

    def synchronize(self) -> None:
        """Waits until the device has come to it."""


@dataclass(frozen=True, slots=True)
class AllOf:
    """The event after several events."""

    events: Sequence[DeviceEvent]

    def synchronize(self) -> None:
        """Waits until the device has come to all of them."""
        for event in self.events:
            event.synchronize()


class DeviceEvents:
    """Calls back when the device has come to an event. Events are waited for in the order in which they are given."""

    def __init__(self, bind_thread: Callable[[], None] = lambda: None) -> None:
        """Waits for nothing; the thread starts with the first event.

        Args:
            bind_thread: makes the device the thread's.
        """
        self._bind_thread = bind_thread
        self._awaited: queue.SimpleQueue[tuple[DeviceEvent, Callback] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name="kvferry-sglang-device", daemon=True)

    def when(self, event: DeviceEvent, callback: Callback) -> None:
        """Calls back, on the thread, when the device has come to an event.

        Args:
            callback: called with None, or with what the device raised instead.
        """
        if self._thread.ident is None:
            self._thread.start()
        self._awaited.put((event, callback))

    def close(self) -> None:
        """Ends the thread when it has come to here. A device that never comes to an event holds nobody up."""
        self._awaited.put(None)

    def _wait(self) -> None:
        self._bind_thread()
        while (awaited := self._awaited.get()) is not None:
            event, callback = awaited
            try:
                callback(_problem_at(event))
            except Exception:  # whatever it was, the thread goes on
                log.exception("what was to be done when the device had come to an event failed")


def _problem_at(event: DeviceEvent) -> Exception | None:
    try:
        event.synchronize()
    except Exception as error:
        return error
    return None
