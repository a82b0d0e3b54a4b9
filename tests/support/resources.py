"""What a process holds: threads, descriptors, mapped files, memory."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Resources:
    """What a process held at one moment.

    Attributes:
        threads: by name.
        descriptors: by what they are: files by their path, sockets and the like by their kind; as below.
        mapped_files: files that are mapped into memory, by path without what is drawn at random in it.
        resident_bytes: memory in use.
    """

    threads: Counter[str]
    descriptors: Counter[str]
    mapped_files: Counter[str]
    resident_bytes: int

    def beyond(self, before: Resources, *, resident_bytes: int, sockets: int = 0, threads: int = 0) -> str:
        """What there is more of than before, in words; empty if nothing.

        Args:
            resident_bytes: growth of memory that is not mentioned.
            sockets, threads: as many more are not mentioned either.
        """
        found = []
        for what, now, then in (
            ("threads", self.threads, before.threads + Counter(python=threads)),
            ("descriptors", self.descriptors, before.descriptors + Counter(socket=sockets)),
            ("mapped files", self.mapped_files, before.mapped_files),
        ):
            if more := now - then:
                found.append(f"{more.total()} {what}: {dict(more)}")
        grown = self.resident_bytes - before.resident_bytes
        if grown > resident_bytes:
            found.append(f"{grown / 2**20:.1f} MiB of memory")
        return "; ".join(found)


def _shape(path: str) -> str:
    """A path without what is drawn at random in it. UCX draws any number of up to 32 bits: a short one as well."""
    return re.sub(r"(?<=ucx_shm_posix_)[0-9a-f]+|[0-9a-f]{6,}", "*", path)


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
        descriptors[_shape(target.split(":[")[0])] += 1
    threads: Counter[str] = Counter()
    for task in (root / "task").iterdir():
        try:
            threads[(task / "comm").read_text().strip()] += 1
        except (FileNotFoundError, ProcessLookupError):  # it ended just now
            continue
    paths = {line.split(maxsplit=5)[5].strip() for line in (root / "maps").read_text().splitlines() if "/" in line}
    mapped = Counter(map(_shape, paths))
    pages = int((root / "statm").read_text().split()[1])
    return Resources(threads, descriptors, mapped, pages * os.sysconf("SC_PAGE_SIZE"))


@contextmanager
def only_descriptors(spare: int) -> Iterator[None]:
    """Leaves this process so many file descriptors and no more."""
    with ExitStack() as opened:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
        files = []
        with contextlib.suppress(OSError):
            while True:
                files.append(opened.enter_context(open(os.devnull)))
        for file in files[:spare]:
            file.close()
        yield
