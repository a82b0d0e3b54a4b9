"""NIXL's bindings, whichever wheel has them: imported when they are first needed, and no sooner."""

from __future__ import annotations

import importlib
from types import ModuleType

from kvferry.errors import TransportUnavailableError

BINDINGS = ("nixl_cu13._bindings", "nixl_cu12._bindings", "nixl._bindings")
"""Where NIXL's bindings are looked for, in this order. Each of the wheels carries its own."""


def load_bindings() -> ModuleType:
    """Imports NIXL's bindings.

    Raises:
        TransportUnavailableError: if no wheel of NIXL is installed, saying how to install one.
    """
    problems = []
    for name in BINDINGS:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            problems.append(f"{name}: {error}")
    raise TransportUnavailableError(
        "NIXL is not installed: pip install nixl-cu13 (CUDA 13 and machines without CUDA) or nixl-cu12, after the "
        f"torch that you want, or they bring the newest along ({'; '.join(problems)})"
    )
