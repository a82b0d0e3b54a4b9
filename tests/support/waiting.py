"""Waiting for what a test is about, with one deadline for all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 60.0
"""How long a test waits for what must happen: only a failure takes as long, however busy the machine is."""


def eventually(what: str, holds: Callable[..., object], *arguments: Any) -> None:
    """Waits until something holds of the arguments, and fails with its description if it never does."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds(*arguments):
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.001)
