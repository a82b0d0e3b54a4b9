"""What the processes hold over time, and whether it grows."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MEMORY_TOLERANCE_MIB = 16.0
"""By how much a process' memory may end above where it was when it had warmed up: what the allocator keeps."""

THREADS_TOLERANCE = 1
"""One aborts and submits at the same time, now and then; it may be seen at one look and not at another."""

DESCRIPTORS_TOLERANCE = 8
"""Connections that are just being made or given up."""

SOCKETS_FOR_REUNION = 6
"""NIXL 1.5.1 closes no connection to an agent that lives: two that lose each other and meet again, as after a long
freeze, keep the sockets of before, until one of them ends."""

MEMORY_FOR_LOST_PEERS_MIB = 70.0
"""A process that has lost a peer may keep so much more: 66 MiB was seen, in two of eleven soaks, and no more in 200
crashes in a row. It is about what a connection to a peer on the machine takes; who keeps it is not known."""

_SHORTEST_LIFE = 20
"""Looks at a process, before anything is said of it: it must have warmed up in a quarter of them."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a process held at one moment.

    Attributes:
        at: seconds since the soak began.
    """

    at: float
    memory_mib: float
    threads: int
    descriptors: int


def look(pid: int, at: float) -> Look | None:
    """At a process of this machine; None if it is gone."""
    root = Path("/proc") / str(pid)
    try:
        pages = int((root / "statm").read_text(encoding="ascii").split()[1])
        threads, descriptors = (sum(1 for _ in (root / each).iterdir()) for each in ("task", "fd"))
    except OSError:
        return None
    return Look(at, pages * os.sysconf("SC_PAGE_SIZE") / 2**20, threads, descriptors)


@dataclass(frozen=True, slots=True)
class Trend:
    """What a process held when it had warmed up, and at the end of its life: medians over a quarter of its looks,
    the second and the last."""

    name: str
    looks: int
    pending: Look
    late: Look

    def problem(self, *, reunions: int, lost_peers: bool) -> str:
        """What has grown, in words; empty if nothing.

        Args:
            reunions: how often it lost a peer that lived.
            lost_peers: whether any rank was lost or killed in the soak.
        """
        grown = []
        allowed_mib = MEMORY_TOLERANCE_MIB + (MEMORY_FOR_LOST_PEERS_MIB if lost_peers else 0.0)
        if self.late.memory_mib > self.pending.memory_mib + allowed_mib:
            grown.append(f"memory from {self.pending.memory_mib:.1f} to {self.late.memory_mib:.1f} MiB")
        if self.late.threads > self.pending.threads + THREADS_TOLERANCE:
            grown.append(f"threads from {self.pending.threads} to {self.late.threads}")
        allowed = DESCRIPTORS_TOLERANCE + SOCKETS_FOR_REUNION * reunions
        if self.late.descriptors > self.pending.descriptors + allowed:
            grown.append(f"descriptors from {self.pending.descriptors} to {self.late.descriptors}, {allowed} allowed")
        return f"{self.name}: {', '.join(grown)}" if grown else ""


def trend(name: str, looks: Sequence[Look]) -> Trend | None:
    """The trend of one process; None if it lived too short."""
    if len(looks) < _SHORTEST_LIFE:
        return None
    part = len(looks) // 4
    return Trend(name, len(looks), _median(looks[part : 2 * part]), _median(looks[-part:]))


def _median(looks: Sequence[Look]) -> Look:
    return Look(
        at=looks[0].at,
        memory_mib=statistics.median(each.memory_mib for each in looks),
        threads=round(statistics.median(each.threads for each in looks)),
        descriptors=round(statistics.median(each.descriptors for each in looks)),
    )
