"""Who goes first where rooms wait for the same worker, memory or wire: whoever needs least to end.

Where all rooms get on a little in turn, all of them end at the end. One after the other, half of them have ended after
half of the time, and the last one no later. So a room is due when what it has left would have moved since it was handed
in, at a steady rate, and the one that is due first goes on. Nothing starves: a large request lets those pass that were
handed in before it is due, and no others. (Earliest due date; with all handed in at once it is the shortest remaining
processing time, which has the least mean.)
"""

from __future__ import annotations

_BYTES_PER_S = 1e9
"""A gigabyte counts like a second of waiting."""


def due_at(handed_in_at: float, left_bytes: int) -> float:
    """Returns when a room is due, in seconds of the clock that gave the first.

    Args:
        handed_in_at: since when its next bytes could be sent.
        left_bytes: how many of those that were handed in are not on their way yet.
    """
    return handed_in_at + left_bytes / _BYTES_PER_S
