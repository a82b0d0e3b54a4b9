"""How many files this process may still open, sockets included, and who may take how many of them.

A library that gets no descriptor may end the process: libzmq aborts when it makes a thread without one, UCX when it
makes a worker, and UCX closes its listening socket for good when it cannot accept. So what is needed is looked for
before such a library is asked, and ports together leave some for the engine.
"""

from __future__ import annotations

import os
import resource

REMEDY = "raise the limit (ulimit -n, LimitNOFILE= of a service)"

START = 64
"""What a rank takes until it is connected, without the threads that share writes: some 45 with NIXL, a registry and an
observe server, and a few that are held for a moment only, to import modules and read the system's files."""
SHARE = 8
"""What each thread that shares writes takes more of: a worker of UCX."""
CONNECTION = 32
"""What must be free for one more peer, some of them to spare: three for the peer channel, and for each of UCX's workers
a few sockets."""


def most_open() -> int | None:
    """Returns how many files this process may have open; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def share_of(parts: int, of: int, *, most: int) -> int:
    """Returns a share of the files that this process may have open, and `most` where the share is more."""
    limit = most_open()
    return most if limit is None else min(most, limit * parts // of)


def num_open() -> int:
    """Returns how many files this process has open.

    Raises:
        OSError: if it may open none more, and the system does not count them by itself.
    """
    # Linux 6.2 and newer count in the size; a listing takes a microsecond for each, and its own is closed again.
    return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd")) - 1


def lack(needed: int) -> str:
    """Says what is missing for so many more files; empty if nothing is."""
    limit = most_open()
    if limit is None:
        return ""
    try:
        free = max(0, limit - num_open())
    except OSError:  # there is none left even for this
        free = 0
    if free >= needed:
        return ""
    return (
        f"{free} of the {limit} files and sockets that this process may have open are free, and {needed} must be: "
        f"{REMEDY}"
    )
