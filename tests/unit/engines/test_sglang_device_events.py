"""Waiting for a device on a thread of its own."""

from __future__ import annotations

import queue
import threading

from kvferry.engines.device_events import DeviceEvents

WAIT_S = 10.0


class Event:
    """An event of a device, which happens when the test says so."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.happens = threading.Event()
        self._problem = problem

    def synchronize(self) -> None:
        assert self.happens.wait(WAIT_S)
        if self._problem is not None:
            raise self._problem


def test_it_calls_back_in_order_and_says_what_the_device_raised():
    events, heard = DeviceEvents(), queue.SimpleQueue[tuple[str, Exception | None]]()
    problem = RuntimeError("an illegal memory access")
    first, second = Event(), Event(problem)
    events.when(first, lambda found: heard.put(("first", found)))
    events.when(second, lambda found: heard.put(("second", found)))
    second.happens.set()
    assert heard.empty()
    first.happens.set()
    assert [heard.get(timeout=WAIT_S) for _ in range(2)] == [("first", None), ("second", problem)]
    events.close()


def test_a_callback_that_fails_ends_nothing():
    events, heard = DeviceEvents(), queue.SimpleQueue[str]()
    event = Event()
    event.happens.set()

    def fail(_: Exception | None) -> None:
        raise ValueError("a mistake of ours")

    events.when(event, fail)
    events.when(event, lambda _: heard.put("called"))
    assert heard.get(timeout=WAIT_S) == "called"
    events.close()


def test_a_device_that_hangs_holds_nobody_up():
    events, hanging = DeviceEvents(), Event()
    events.when(hanging, lambda _: None)
    events.close()  # returns
    hanging.happens.set()
    DeviceEvents().close()  # one that never waited
