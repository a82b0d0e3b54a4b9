"""Waiting with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def eventually(what: str, holds: Callable[..., object], *arguments: Any, within_s: float = 5.0) -> None:
    """Waits until something holds of the arguments, and fails with its description if it does not in time."""
    deadline = time.monotonic() + within_s
    while not holds(*arguments):
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.001)
