"""Waits for an engine's device, on a thread of its own, so that the engine's need not."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry import Device
from kvferry.loggers import logger_of
from kvferry.staging.choice import bind_thread

__all__ = ["AllOf", "DeviceEvent", "DeviceEvents", "bind_thread"]

log = logger_of(__name__)

Callback = Callable[[Exception | None], None]


class DeviceEvent(Protocol):
    """A point in what is queued on the device. A recorded `torch.Event` is one."""

    def synchronize(self) -> None:
        """Waits until the device has come to it, without the interpreter's lock."""


@dataclass(frozen=True, slots=True)
class AllOf:
    """The event after several events."""

    events: Sequence[DeviceEvent]

    def synchronize(self) -> None:
        for event in self.events:
            event.synchronize()


class DeviceEvents:
    """Calls back when the device has come to an event. Events are waited for in the order in which they are given."""

    def __init__(self, device: Device | None = None) -> None:
        """Waits for nothing; the thread starts with the first event.

        Args:
            device: whose events they are. The thread makes it its own: one that has not chosen a GPU makes a context on
                the first one as soon as it asks CUDA anything.
        """
        self._device = device
        self._awaited: queue.SimpleQueue[tuple[DeviceEvent, Callback] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name="kvferry-engine-device", daemon=True)

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
        if self._device is not None:
            bind_thread(self._device)
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
