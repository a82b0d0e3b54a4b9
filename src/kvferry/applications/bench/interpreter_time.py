"""How much CPU time the interpreter's threads have taken, apart from those of a transport, of CUDA, or of torch."""

from __future__ import annotations

import threading
from pathlib import Path

_THREADS = Path("/proc/self/task")


def interpreter_cpu_s() -> float | None:
    """Returns the CPU time of all threads that Python knows of, with what they call; None where nobody says.

    On a GPU, where these threads copy nothing, it is what a transfer costs beside the engine's own Python.
    """
    nanoseconds = 0
    for thread in threading.enumerate():
        if thread.native_id is None:
            continue
        try:
            nanoseconds += int((_THREADS / str(thread.native_id) / "schedstat").read_text(encoding="ascii").split()[0])
        except (OSError, ValueError, IndexError):
            return None
    return nanoseconds / 1e9


def taken_since(before: float | None) -> float | None:
    """Returns how much more it has become; None where nobody says."""
    now = interpreter_cpu_s()
    return None if before is None or now is None else max(0.0, now - before)
