"""Threads of our own that wait for an engine's device."""

from __future__ import annotations

from kvferry import Device
from kvferry.staging.choice import bind_thread as _bind_thread


def bind_thread(device: Device) -> None:
    """Makes a GPU the calling thread's own, before it first looks at an event. Nothing where pools are in CPU memory.

    A thread that has not chosen a GPU makes a context on the first one as soon as it asks CUDA anything.
    """
    _bind_thread(device)
