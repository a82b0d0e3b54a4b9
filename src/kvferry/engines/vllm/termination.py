"""Notices that vLLM's engine process is told to end, so that what leaves it can be let out first.

vLLM's server sends its engine process a SIGTERM when it gets one itself. With --shutdown-timeout the engine then takes
no new requests, finishes those that it has, and keeps the blocks of those that decode servers have not fetched;
without, the process is killed at once, and nobody can do anything about that from within.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from math import inf
from types import FrameType

from kvferry import Settings

_ENGINE = "vllm."
_LEAVES_S = 2.0
"""What is left of vLLM's time when rooms are given up: to tell the other side, and to close."""


def watch_for_termination(terminated: Callable[[], None]) -> bool:
    """Has a callable called when vLLM's engine process gets a SIGTERM, before vLLM's own handler.

    Nothing is watched where vLLM has no handler, as in a program that has the engine in its own process.

    Args:
        terminated: called on the main thread, between any two of its instructions: it may set a flag, and no more.

    Returns:
        Whether it is watched.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    theirs = signal.getsignal(signal.SIGTERM)
    if not callable(theirs) or not getattr(theirs, "__module__", "").startswith(_ENGINE):
        return False

    def handle(number: int, frame: FrameType | None) -> None:
        terminated()
        theirs(number, frame)

    signal.signal(signal.SIGTERM, handle)
    return True


def letting_all_come(settings: Settings) -> Settings:
    """Returns settings by which an endpoint that an operator drains takes rooms for as long as the engine brings any.

    A room is opened here when the request is computed, which may be long after it came. What is not to come any more is
    for gateways to see. Where KVFERRY_DRAIN_GRACE_S is set, that counts.
    """
    if "drain_grace_s" in settings.model_fields_set:
        return settings
    return settings.model_copy(update={"drain_grace_s": inf})


def drain_timeout_s(settings: Settings, shutdown_timeout_s: float) -> float:
    """Returns how long rooms may stay open after a SIGTERM: what is set, and less than vLLM gives its engine process.

    Args:
        shutdown_timeout_s: vLLM's --shutdown-timeout; 0 where it kills the process at once.
    """
    return min(settings.drain_timeout_s, max(shutdown_timeout_s - _LEAVES_S, shutdown_timeout_s / 2))
