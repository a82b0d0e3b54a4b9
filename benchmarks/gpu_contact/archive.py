"""One file that brings everything back, whenever a run is cut off: written anew after every section, and at the end.

Where few files come back from a machine, logs beside pages would be lost. Interruptions end the run in order, so that
the log of the section that ran comes along; where the run itself is killed, what it knew after the section before is
there. An archive takes its place as a whole: half of one is never seen.
"""

from __future__ import annotations

import os
import signal
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def pack(folder: Path, archive: Path) -> None:
    """Writes all files of a folder into an archive, in place of an earlier one."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    unfinished = archive.with_name(f".{archive.name}.{os.getpid()}")
    try:
        with tarfile.open(unfinished, "w:gz", compresslevel=6) as packed:
            for file in sorted(folder.iterdir()):
                packed.add(file, f"{archive.name.partition('.')[0]}/{file.name}")
        unfinished.replace(archive)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def packed_at_the_end(archive: Path) -> Iterator[Path]:
    """Yields a folder, and packs it at the end, also where that is an error or a signal."""
    before = {number: signal.signal(number, _end) for number in _ENDING}
    try:
        with tempfile.TemporaryDirectory(prefix="gpu-contact-") as name:
            try:
                yield Path(name)
            finally:
                for number in _ENDING:  # one is enough: a second must not cut off what the first began
                    signal.signal(number, signal.SIG_IGN)
                pack(Path(name), archive)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _: FrameType | None) -> None:
    for each in _ENDING:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)
