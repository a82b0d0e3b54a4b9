"""A lock that compiled code takes, too."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

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
