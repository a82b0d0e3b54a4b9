"""Where a fault of the catalogue is planted: in the file that it names, or wherever its function has moved since."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from proof.planted.catalogue import PlantedFault

_SHIFTS = (0, 4, -4, 8, -8)
"""By how many columns a function may have moved, as into a class or out of one."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a fault is planted.

    Attributes:
        file: which file of the package.
        text: what the file has without the fault.
        wrong: what it has with it.
    """

    file: Path
    text: str
    wrong: str


def place_of(fault: PlantedFault, package: Path) -> Place:
    """Returns where a fault is planted.

    Args:
        package: the folder below which its file is, or was.

    Raises:
        LookupError: if its line is nowhere, or in several places.
    """
    # Few have moved: the whole package is read for those alone.
    for pattern in (fault.file, f"**/*{Path(fault.file).suffix}"):
        texts = {file: file.read_text() for file in sorted(package.glob(pattern))}
        for shift in _SHIFTS:
            right = _shifted(fault.right, shift)
            found = {file: text for file, text in texts.items() if right in text}
            if sum(text.count(right) for text in found.values()) > 1:
                raise LookupError(f"{fault.name}: {right!r} is in several places of {[str(file) for file in found]}")
            for file, text in found.items():
                return Place(file, text, text.replace(right, _shifted(fault.wrong, shift)))
    raise LookupError(f"{fault.name}: {fault.right!r} is nowhere")


def _shifted(text: str, by: int) -> str:
    """Moves lines to the right or left; a first one that begins within a line stays."""
    if by >= 0:
        return re.sub(r"^(?= )|(?<=\n)(?=[^\n])", " " * by, text)
    return re.sub(rf"(?m)^ {{{-by}}}", "", text)
