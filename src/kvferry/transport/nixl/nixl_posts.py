"""NIXL's C interface for compiled code: beside the bindings, whose agent and requests are the same objects.

It says "backend" of every error. So what it cannot do is tried again with the bindings, which say why.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from kvferry.errors import TransportUnavailableError
from kvferry.layout import Device, MemoryKind
from kvferry.loggers import logger_of
from kvferry.transport.base import CompiledWay, TransferHandle, TransferReport
from kvferry.transport.compiled_posts import PostCalls, Posted, SharedLock, Wire
from kvferry.transport.diagnosis import installed_version
from kvferry.transport.nixl.shares import NixlConnection, NixlHandle, Share

log = logger_of(__name__)

_KNOWN = "1.5."
"""Of other versions the functions may take other arguments."""

_MEMORY_TYPES = {MemoryKind.DRAM: 0, MemoryKind.VRAM: 1}


def post_calls(nixl: ModuleType) -> PostCalls:
    """Returns the functions of NIXL's C interface, of the wheel that the bindings are from.

    Raises:
        TransportUnavailableError: if it has none, or one that is not known.
    """
    package = nixl.__name__.partition(".")[0]
    version = installed_version(package) or "?"
    if not version.startswith(_KNOWN):
        raise TransportUnavailableError(f"the C interface of {package} {version} is not known, only that of {_KNOWN}x")
    try:
        packages = Path(str(nixl.__file__)).parent.parent
        library = ctypes.CDLL(str(next(packages.glob(f".{package}.mesonpy.libs/libnixl_capi.so"))))
        if library.nixl_capi_is_stub():
            raise OSError("a stub")
        found = [getattr(library, f"nixl_capi_{name}") for name in PostCalls.NAMES]
    except (StopIteration, OSError, AttributeError) as error:
        raise TransportUnavailableError(f"{package} has no C interface: {error!r}") from error
    return PostCalls(*(ctypes.cast(function, ctypes.c_void_p).value for function in found))


def address_of(agent: Any) -> int:
    """Returns the address of the bindings' agent in C++.

    Raises:
        TransportUnavailableError: if the bindings are not of the kind that is known.
    """
    if [each.__name__ for each in type(agent).__mro__[1:]] != ["pybind11_object", "object"]:
        raise TransportUnavailableError(f"NIXL's bindings are not pybind11's: {type(agent).__mro__}")
    # Behind the head of every Python object, where that has one base.
    return ctypes.c_uint64.from_address(id(agent) + object.__basicsize__).value


AskWhy = Callable[[NixlHandle, Share | None], None]
"""Notes what a share's post has met; or, with None, why there is no other share."""


class NixlWay(CompiledWay):
    """Writes of one range to a peer."""

    def __init__(self, posts: NixlPosts, connection: NixlConnection, ours: Device, ask_why: AskWhy) -> None:
        """Takes a connection.

        Args:
            ours: where our memory is.
        """
        theirs = connection.memory.device
        self.copies_as_it_posts = connection.copies_as_it_posts
        self.wire = Wire(
            ctypes.pointer(posts.calls),
            ctypes.addressof(posts.agent),
            connection.peer.name.encode(),
            _MEMORY_TYPES[ours.kind],
            ours.index,
            theirs.index,
            posts.progress.address,
        )
        self._posts = posts  # the wire has its addresses
        self._connection = connection
        self._ask_why = ask_why

    def adopt(self, posted: Posted, notification: bytes) -> TransferHandle:
        self.copies_as_it_posts = self._connection.copies_as_it_posts = not posted.handles
        report = TransferReport(posted.ended_bytes, posted.ended, posted.posting_s, posted.posting_s)
        shares = [Share(0, report=report, has_ended=True), *(Share(handle) for handle in posted.handles)]
        transfer = NixlHandle(self._connection, shares, b"" if posted.is_notified else notification)
        if posted.is_half_posted or not posted.is_made:
            self._ask_why(transfer, shares[-1] if posted.is_made else None)
        elif not posted.handles:
            transfer.report = report
        return transfer


class NixlPosts:
    """What compiled code posts an agent's writes with. May be used from any thread.

    Attributes:
        progress: held by whoever makes progress: one at a time, and the others sleep.
        calls: what it calls.
        agent: the agent's address, as the C interface has it.
    """

    def __init__(self, nixl: ModuleType, agent: Any, progress: SharedLock) -> None:
        """Takes an agent.

        Raises:
            TransportUnavailableError: if compiled code cannot use it.
        """
        self.progress = progress
        self.calls = post_calls(nixl)
        self._kept = agent  # of which others have the address
        self.agent = ctypes.c_uint64(address_of(agent))  # the C interface has it in a structure of its own


def compiled_posts(nixl: ModuleType, agent: Any, progress: SharedLock) -> NixlPosts | None:
    """Returns what posts an agent's writes; None, which is logged, where compiled code cannot use the agent."""
    try:
        return NixlPosts(nixl, agent, progress)
    except TransportUnavailableError as error:
        log.warning("sub-chunks are posted by the interpreter, which takes its lock more often: %s", error)
        return None
