"""How commands end that run until they are told to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_STOPPING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raises KeyboardInterrupt in the block upon Ctrl-C and upon SIGTERM, so that either ends it in order.

    SIGINT counts even where it was ignored at the start: a shell lets what it starts in the background ignore it. For
    the main thread only.
    """

    def stop(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, stop) for number in _STOPPING}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
