"""Prints what the last run of each tier took, as a table: `make tiers`.

`make test`, `make test-all` and `make test-long` leave a JUnit file each. A row is a folder of tests, a column a tier:
how many tests ran, and how many seconds they took, added up over all processes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

TIERS = {"quick": "make test", "full": "make test-all", "long": "make test-long"}
FILES = {
    "transport": "full",
    "vllm": "full",
    "vllm-servers": "full",
    "sglang": "full",
    "sglang-servers": "full",
    "vllm-long": "long",
    "sglang-long": "long",
}
"""Runs that are part of a tier under another name: over another transport, and in environments of their own."""

FOLDERS = ("unit", "contract", "property", "simulation", "fuzz", "applications", "processes", "real_engines")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of pytest.

    Attributes:
        wall_s: what it took.
        folders: by folder of tests: how many ran, and the seconds that they took together.
    """

    wall_s: float
    folders: Mapping[str, tuple[int, float]]


def read(file: Path) -> Run:
    """Reads what a run took from its JUnit file."""
    suite = ElementTree.parse(file).getroot().find("testsuite")
    assert suite is not None, f"{file} holds no test suite"
    folders: dict[str, tuple[int, float]] = {}
    for case in suite.iter("testcase"):
        folder = "/".join(case.attrib["classname"].split(".")[:2])
        count, seconds = folders.get(folder, (0, 0.0))
        folders[folder] = count + 1, seconds + float(case.attrib["time"])
    return Run(float(suite.attrib["time"]), folders)


def runs(durations: Path) -> dict[str, list[Run]]:
    """Reads the runs of every tier that has left a file."""
    found: dict[str, list[Run]] = {}
    for name in (*TIERS, *FILES):
        file = durations / f"{name}.xml"
        if file.exists():
            found.setdefault(FILES.get(name, name), []).append(read(file))
    return found


def table(found: Mapping[str, list[Run]]) -> Iterator[str]:
    """Yields the lines of the table."""
    yield "| tests | " + " | ".join(f"`{command}`" for command in TIERS.values()) + " |"
    yield "|---|" + "---|" * len(TIERS)
    for folder in (f"tests/{name}" for name in FOLDERS):
        cells = []
        for tier in TIERS:
            parts = [run.folders[folder] for run in found.get(tier, ()) if folder in run.folders]
            count, seconds = sum(part[0] for part in parts), sum(part[1] for part in parts)
            cells.append(f"{count:,} in {seconds:,.0f} s" if count else "-")
        yield f"| `{folder}` | {' | '.join(cells)} |"
    walls = []
    for tier in TIERS:
        parts_s = [run.wall_s for run in found.get(tier, ())]
        walls.append(f"**{sum(parts_s) / 60:.1f} min**" if parts_s else "not run")
    yield f"| all, on the clock | {' | '.join(walls)} |"


def main() -> None:
    """Prints the table."""
    found = runs(Path(sys.argv[1]))
    if not found:
        sys.exit(f"no tier has left a file in {sys.argv[1]}: run make test or make test-all first")
    sys.stdout.write("\n".join(table(found)) + "\n")


if __name__ == "__main__":
    main()
