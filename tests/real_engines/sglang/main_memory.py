"""A plug-in of SGLang's for benchmarks, which lets its own NIXL backend move caches in main memory.

That backend tells NIXL that every pool is a GPU's memory. Where there is none, NIXL is told what it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from tests.real_engines import plugins


def install(directory: Path) -> Path:
    """Makes the plug-in findable in a directory, which goes on SGLang's module path; returns it."""
    return plugins.install(directory, "main_memory", __name__)


def register() -> None:
    """Called by SGLang."""
    from nixl._api import nixl_agent

    def told(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def telling(*arguments: Any, **named: Any) -> Any:
            return method(*map(_kind, arguments), **{name: _kind(value) for name, value in named.items()})

        return telling

    for name in ("register_memory", "get_reg_descs", "get_xfer_descs", "prep_xfer_dlist"):
        setattr(nixl_agent, name, told(getattr(nixl_agent, name)))


def _kind(given: Any) -> Any:
    return "DRAM" if isinstance(given, str) and given == "VRAM" else given
