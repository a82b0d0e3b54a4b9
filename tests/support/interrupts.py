"""Runs a call step by step, a bytecode each: what another thread may see of it, and where Ctrl-C may end it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


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
