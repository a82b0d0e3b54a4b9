"""How many processors this process may use: what its affinity and its control groups leave of the machine's.

A container sees all processors of its machine, whatever its share of them is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def usable_cpus(root: Path = Path("/")) -> int:
    """Returns how many processors' worth of time the calling thread and those that it starts may take; at least 1.

    Args:
        root: where the system's files begin.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Rounded down: what spins beyond a quota stops everything else of the process for the rest of a period.
    return max(1, min([affinity, *(int(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Yields every limit on this process's time, in processors: of its own control groups and of those around them."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not path.startswith("/"):
            continue
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            within = str(group).lstrip("/")
            if not controllers:  # version 2
                limits = [_text(root / "sys/fs/cgroup" / within / "cpu.max").split()]
            elif "cpu" in controllers.split(","):
                folder = root / "sys/fs/cgroup" / controllers / within
                limits = [[_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]]
            else:
                limits = []
            for limit in limits:
                if len(limit) == 2 and all(each.isdecimal() for each in limit) and int(limit[1]):
                    yield int(limit[0]) / int(limit[1])


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
