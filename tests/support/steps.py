"""A call in steps, a bytecode each: how many it takes, what others may see in between, where Ctrl-C may end it."""

from __future__ import annotations

import concurrent.futures
import gc
import itertools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar


def steps_of(call: Callable[[], object]) -> int:
    """Instructions of Python's that a call executes on this thread. Loops in C count as one.

    The garbage collector waits meanwhile: what it finalizes was left by whoever ran before, not by the call.
    """
    taken = itertools.count()
    collects = gc.isenabled()
    gc.disable()
    try:
        at_every_step(call, lambda: next(taken))
    finally:
        if collects:
            gc.enable()
    return next(taken)


ResultT = TypeVar("ResultT")

_LEFT_ALONE = (threading.__file__, concurrent.futures._base.__file__)


def at_every_step(call: Callable[[], ResultT], step: Callable[[], object]) -> ResultT:
    """Calls something, and something else before every bytecode of it and of what it calls, on this thread."""

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode":
            step()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return call()
    finally:
        sys.settrace(before)


def interrupted_at(nth: int, call: Callable[[], object]) -> bool:
    """Interrupts a call as Ctrl-C would, the n-th time that Python looks for a signal. Returns whether it got there.

    It looks when a function begins, and when one that is written in C has returned: never between the last step under
    a lock and the lock's release. Conditions of the standard library cannot bear that, and are left alone. Nothing is
    collected meanwhile: Python drops what a callback of its collector raises (Hypothesis has one), a Ctrl-C too.
    """
    looks = 0

    def profile(frame: FrameType, event: str, function: Any) -> None:
        nonlocal looks
        if frame.f_code.co_filename in _LEFT_ALONE:
            return
        if event == "call" or (event == "c_return" and function is not sys.setprofile):
            looks += 1
            if looks == nth:
                raise KeyboardInterrupt

    before = sys.getprofile()
    gc.disable()
    sys.setprofile(profile)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(before)
        gc.enable()
    return False
