"""NIXL's bindings, whichever wheel has them: imported when they are first needed, and no sooner; and its errors."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from kvferry.errors import PeerDisconnectedError, RegistrationError, TransportError, TransportUnavailableError

BINDINGS = ("nixl_cu13._bindings", "nixl_cu12._bindings", "nixl._bindings")
"""Where NIXL's bindings are looked for, in this order. Each of the wheels carries its own."""


PROGRESS_DELAY_US = 50_000
"""The longest that NIXL's progress thread sleeps."""


def torch_cuda_major() -> int | None:
    """Returns the major version of CUDA that torch was built for; None if torch was not imported, or has none.

    A pool in a GPU's memory is torch's, and the one CUDA runtime of a process should serve both. Pools in CPU memory do
    without torch: it is not imported for this.
    """
    version = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    return int(version.partition(".")[0]) if version else None


def in_order(cuda_major: int | None) -> tuple[str, ...]:
    """Returns where the bindings are looked for, those first that were built for a version of CUDA."""
    return tuple(sorted(BINDINGS, key=lambda name: name != f"nixl_cu{cuda_major}._bindings"))


def load_bindings() -> ModuleType:
    """Imports NIXL's bindings: those for torch's CUDA, if they are installed.

    Raises:
        TransportUnavailableError: if no wheel of NIXL is installed, saying how to install one.
    """
    problems = []
    for name in in_order(torch_cuda_major()):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            problems.append(f"{name}: {error}")
    raise TransportUnavailableError(
        "NIXL is not installed: pip install nixl-cu13 (CUDA 13 and machines without CUDA) or nixl-cu12, after the "
        f"torch that you want, or they bring the newest along ({'; '.join(problems)})"
    )


def why_other_cuda(loaded: str) -> str:
    """Returns why bindings are not those for torch's CUDA; empty if they may be.

    Args:
        loaded: the module's name.
    """
    major, package = torch_cuda_major(), loaded.partition(".")[0]
    if major is None or not package.startswith("nixl_cu") or package == f"nixl_cu{major}":
        return ""
    return f"torch is built for CUDA {major}, and NIXL's wheel ({package.replace('_', '-')}) for another one"


def agent_config(nixl: ModuleType, *, only_writes: bool) -> Any:
    """Returns how an agent is to work."""
    config = nixl.nixlAgentConfig()
    config.useProgThread = not only_writes
    config.useListenThread = False
    config.pthrDelay = PROGRESS_DELAY_US
    # Reader-writer: workers post side by side, only connecting and registering exclude each other.
    config.syncMode = nixl.NIXL_THREAD_SYNC_RW
    config.captureTelemetry = True
    return config


@contextmanager
def translated(nixl: ModuleType, what: str, peer: str | None = None) -> Iterator[None]:
    """Turns NIXL's exceptions into ours. They have only a code, so that `what` must describe the operation."""
    try:
        yield
    except nixl.nixlRemoteDisconnectError as error:
        raise PeerDisconnectedError(f"{what}: the connection to {peer} is gone ({error})") from error
    except nixl.nixlNotFoundError as error:
        raise RegistrationError(f"{what}: memory or peer {peer} is not known to NIXL ({error})") from error
    except (
        nixl.nixlBackendError,
        nixl.nixlCancelledError,
        nixl.nixlInvalidParamError,
        nixl.nixlMismatchError,
        nixl.nixlNotAllowedError,
        nixl.nixlNotPostedError,
        nixl.nixlNotSupportedError,
        nixl.nixlRepostActiveError,
        nixl.nixlUnknownError,
    ) as error:
        raise TransportError(f"{what}: {type(error).__name__}: {error}") from error


def as_transport_error(error: Exception, what: str) -> TransportError:
    """Returns an error as ours: itself, if it is."""
    if isinstance(error, TransportError):
        return error
    ours = TransportError(f"{what}: {type(error).__name__}: {error}")
    ours.__cause__ = error
    return ours
