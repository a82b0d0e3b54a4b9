"""What a process holds: threads, descriptors, mapped files, memory."""

from __future__ import annotations

import gc
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Resources:
    """What a process held at one moment.

    Attributes:
        threads: by name.
        descriptors: by what they are: files by their path, sockets and the like by their kind.
        mapped_files: paths of files that are mapped into memory.
        resident_bytes: memory in use.
    """

    threads: Counter[str]
    descriptors: Counter[str]
    mapped_files: frozenset[str]
    resident_bytes: int

    def beyond(self, before: Resources, *, resident_bytes: int) -> str:
        """What there is more of than before, in words; empty if nothing.

        Args:
            resident_bytes: growth of memory that is not mentioned.
        """
        found = []
        for what, now, then in (
            ("threads", self.threads, before.threads),
            ("descriptors", self.descriptors, before.descriptors),
        ):
            if now.total() > then.total():
                found.append(f"{now.total() - then.total()} {what}: {dict(now - then)}")
        if new := self.mapped_files - before.mapped_files:
            found.append(f"mapped files: {sorted(new)}")
        grown = self.resident_bytes - before.resident_bytes
        if grown > resident_bytes:
            found.append(f"{grown / 2**20:.1f} MiB of memory")
        return "; ".join(found)


def resources(pid: int | str = "self") -> Resources:
    """Of a process of this machine; its own by default, after collecting garbage."""
    if pid == "self":
        gc.collect()
    root = Path("/proc") / str(pid)
    descriptors: Counter[str] = Counter()
    for entry in (root / "fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:  # the listing's own
            continue
        descriptors[target.split(":[")[0]] += 1
    threads: Counter[str] = Counter()
    for task in (root / "task").iterdir():
        try:
            threads[(task / "comm").read_text().strip()] += 1
        except (FileNotFoundError, ProcessLookupError):  # it ended just now
            continue
    mapped = {line.split(maxsplit=5)[5].strip() for line in (root / "maps").read_text().splitlines() if "/" in line}
    pages = int((root / "statm").read_text().split()[1])
    return Resources(threads, descriptors, frozenset(mapped), pages * os.sysconf("SC_PAGE_SIZE"))
