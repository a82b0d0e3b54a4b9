"""What compiled code posts a transport's writes with, without the interpreter: the structures of `staging/blocks.c`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64


class PostCalls(ctypes.Structure):
    """Addresses of functions, with the signatures of NIXL's C interface."""

    NAMES = (
        "create_opt_args",
        "destroy_opt_args",
        "opt_args_set_has_notif",
        "opt_args_set_notif_msg",
        "create_xfer_dlist",
        "xfer_dlist_add_desc",
        "destroy_xfer_dlist",
        "create_xfer_req",
        "destroy_xfer_req",
        "post_xfer_req",
        "get_xfer_status",
        "release_xfer_req",
    )
    _fields_ = tuple((name, _POINTER) for name in NAMES)


class Wire(ctypes.Structure):
    """The way to one peer."""

    _fields_ = (
        ("calls", ctypes.POINTER(PostCalls)),
        ("agent", _POINTER),
        ("peer", ctypes.c_char_p),
        ("memory", _NUMBER),
        ("our_device", _NUMBER),
        ("their_device", _NUMBER),
        ("progress", _POINTER),
    )


_C = ctypes.CDLL(None)
_HELD = ctypes.PyDLL(None)  # keeps the interpreter's lock: for what returns at once
# Takes what `with` hands over as it ends, too, which C's functions leave alone.
_UNLOCK = ctypes.PYFUNCTYPE(None, _POINTER, *[ctypes.py_object] * 3)(("pthread_mutex_unlock", _HELD))
_ERROR_CHECK = 2  # PTHREAD_MUTEX_ERRORCHECK, on every Linux


class SharedLock:
    """A lock that compiled code takes, too: a mutex of the C library.

    Who is interrupted (Ctrl-C) as it takes the lock has it not, and in C nobody is as it gives it back.

    Attributes:
        address: the mutex's.
        release: gives it back, on the thread that has it; on others does nothing.
    """

    def __init__(self) -> None:
        """Nobody has it."""
        kind = (ctypes.c_uint64 * 8)()
        self._mutex = (ctypes.c_uint64 * 8)()  # long enough on every Linux
        self.address = ctypes.addressof(self._mutex)
        _HELD.pthread_mutexattr_init(kind)
        _HELD.pthread_mutexattr_settype(kind, _ERROR_CHECK)
        _HELD.pthread_mutex_init(self._mutex, kind)
        self._exit = partial(_UNLOCK, self._mutex)
        self.release: Callable[[], object] = partial(_HELD.pthread_mutex_unlock, self._mutex)

    def acquire(self, *, blocking: bool = True) -> bool:
        """Takes it; returns False if another has it and this is not to wait."""
        try:
            if _HELD.pthread_mutex_trylock(self._mutex) == 0:
                return True
            if blocking:
                _C.pthread_mutex_lock(self._mutex)
            return blocking
        except BaseException:
            self.release()
            raise

    __enter__ = acquire

    @property
    def __exit__(self) -> Callable[..., None]:  # noqa: PLE0302 - asked for before the lock is taken
        return self._exit


@dataclass(frozen=True, slots=True)
class Posted:
    """What compiled code has posted of a write.

    Attributes:
        ended: how many writes of it have ended.
        ended_bytes: how many bytes these had.
        posting_s: how long posting took.
        handles: of requests that have not ended.
        is_notified: whether a request carries the notification, or carried it.
        is_made: whether the last request could be made.
        is_half_posted: whether the last request's post has failed.
    """

    ended: int
    ended_bytes: int
    posting_s: float
    handles: Sequence[int]
    is_notified: bool
    is_made: bool
    is_half_posted: bool
