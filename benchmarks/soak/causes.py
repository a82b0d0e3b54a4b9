"""Why rooms fail, told apart by their errors' words."""

from __future__ import annotations

import re

_CAUSES = {
    "aborted by a caller": "the soak wants it so",
    "restarted": "does not know this endpoint any more|must attach before",
    "dead peer": "has ended: its process",
    "silent peer": "silent for",
    "connection gone": "connection to .* is gone|NIXL_ERR_REMOTE_DISCONNECT|is not connected any more",
    "no answer while connecting": "still (asking|waiting for|looking up)",
    "registry": "the registry at",
    "not opened in time": "opened it within|was not asked to send|KVFERRY_BOOTSTRAP_TIMEOUT_S",
    "no progress": "KVFERRY_WAITING_TIMEOUT_S|KVFERRY_WRITE_TIMEOUT_S",
    "closed": "was closed",
    "aborted by the other side": "was aborted by",
    "ended without a reason that arrived": "stopped without saying why|already complete",
}

UNKNOWN = "of another kind"


def cause(error: str) -> str:
    """The first that fits, in this order: an error quotes those that led to it."""
    return next((name for name, pattern in _CAUSES.items() if re.search(pattern, error)), UNKNOWN)
