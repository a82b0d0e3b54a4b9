"""A lock that compiled code takes, too."""

from __future__ import annotations

import contextlib
import signal
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from tests.support.steps import interrupted_at

from kvferry.transport.compiled_posts import SharedLock


def test_one_has_it_and_others_wait_or_do_without():
    lock = SharedLock()
    with ThreadPoolExecutor(1) as other:
        with lock:
            assert not other.submit(lock.acquire, blocking=False).result()
            waits = other.submit(lock.acquire)
            assert not wait([waits], timeout=0.05).done
        assert waits.result()
        assert not lock.acquire(blocking=False)
        other.submit(lock.release).result()
    assert lock.acquire(blocking=False)


def is_free(lock: SharedLock) -> bool:
    """Whether another thread can take it."""

    def take() -> bool:
        if is_taken := lock.acquire(blocking=False):
            lock.release()
        return is_taken

    with ThreadPoolExecutor(1) as other:
        return other.submit(take).result()


def test_whoever_is_interrupted_anywhere_leaves_it_free():
    lock, number = SharedLock(), 1

    def take() -> None:
        with lock:
            pass

    while interrupted_at(number, take):
        assert is_free(lock)
        number += 1
    assert number > 1
    with pytest.raises(KeyError), lock:
        raise KeyError("it is passed on")
    assert is_free(lock)


class Interrupt(BaseException):
    """A signal came."""


def test_signals_that_come_at_any_time_leave_it_free():
    lock, until = SharedLock(), time.monotonic() + 0.5

    def interrupt(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        while time.monotonic() < until:
            with contextlib.suppress(Interrupt):
                signal.setitimer(signal.ITIMER_REAL, 1e-4)
                while True:
                    with lock:
                        pass
            assert is_free(lock)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
