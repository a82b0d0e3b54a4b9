"""No thread dies: a turn that fails is counted, shown and followed by the next."""

from __future__ import annotations

import logging
import threading

import pytest
from tests.support.waiting import eventually

from kvferry.endpoint.runtime.threads import Loop, SupervisedThread


class Fails(Loop):
    """Raises in its first turns, then goes on until it is stopped."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.turns = 0
        self.is_stopping = threading.Event()

    def has_work(self) -> bool:
        return True

    def turn(self, *, may_wait: bool) -> bool:
        assert may_wait
        self.turns += 1
        if self.errors:
            raise self.errors.pop(0)
        return not self.is_stopping.wait(0.001)


@pytest.mark.parametrize("error", [ValueError("a bug"), MemoryError(), SystemExit(3), KeyboardInterrupt()])
def test_whatever_a_turn_raises_the_next_one_follows(error: BaseException, caplog: pytest.LogCaptureFixture):
    loop = Fails(error)
    thread = SupervisedThread("a thread", loop)
    eventually("it went on", lambda: loop.turns > 3)
    health = thread.health
    assert (health.name, health.is_alive, health.failures) == ("a thread", True, 1)
    assert type(error).__name__ in health.last_failure
    assert "a thread goes on after an error" in caplog.text
    loop.is_stopping.set()
    eventually("it has ended", lambda: not thread.is_alive)


def test_a_thread_whose_every_turn_fails_does_not_spin():
    loop = Fails(*[ValueError("again")] * 10_000)
    thread = SupervisedThread("a thread", loop)
    threading.Event().wait(0.3)
    assert 3 < loop.turns < 20  # 1, 2, 4, ... milliseconds apart
    loop.errors.clear()
    loop.is_stopping.set()
    eventually("it has ended", lambda: not thread.is_alive)


def test_a_loop_that_never_failed_is_well():
    loop = Fails()
    thread = SupervisedThread("a thread", loop)
    assert thread.health.failures == 0
    assert thread.health.last_failure == ""
    loop.is_stopping.set()
    eventually("it has ended", lambda: not thread.is_alive)


class Unspeakable(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("it cannot be said in words")


class Raises(logging.Handler):
    """Raises for every line, as one that writes to a full disk may."""

    def handle(self, record: logging.LogRecord) -> bool:
        raise SystemExit(3)


def refuses(record: logging.LogRecord) -> bool:
    raise ValueError("a filter's mistake")


def test_a_thread_outlives_what_cannot_even_be_logged():
    logger, handler = logging.getLogger("kvferry.endpoint.runtime.threads"), Raises()
    logger.addHandler(handler)
    loop = Fails(Unspeakable(), ValueError("a bug"))
    try:
        thread = SupervisedThread("a thread", loop)
        eventually("it went on", lambda: loop.turns > 4)
        logger.addFilter(refuses)
        loop.errors.append(Unspeakable())
        eventually("it went on", lambda: thread.health.failures == 3)
        assert thread.health.last_failure == "Unspeakable"
        loop.is_stopping.set()
        eventually("it has ended", lambda: not thread.is_alive)
    finally:
        logger.removeHandler(handler)
        logger.removeFilter(refuses)
