"""Writes CONTRIBUTING's table of tiers from what their last runs took: `make tiers`.

`make test`, `make test-all` and `make test-long` leave a JUnit file each. A row is a folder of tests, a column a tier:
how many tests ran, and how many seconds they took, added up over all processes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"
MARKS = "<!-- tiers -->\n", "<!-- /tiers -->"

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

PROVES = {
    "tests/unit": "every module does what it says, errors included; documents, layers and settings are as the code is",
    "tests/contract": "every transport keeps one contract",
    "tests/property": "plans and staging write every byte once, by the right source, against an independent oracle",
    "tests/simulation": "whole systems keep every law under seeded faults, and every missing guard is found",
    "tests/fuzz": "nothing that strangers send raises, grows or blocks",
    "tests/applications": "the demo's engine computes what transformers does, from captured caches too",
    "tests/processes": "real processes over NIXL: kills, freezes, secrets, and every command that the documents show",
    "tests/real_engines": "vLLM and SGLang generate the same tokens disaggregated, whatever befalls their peers",
}


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
    yield "| tests | what they prove | " + " | ".join(f"`{command}`" for command in TIERS.values()) + " |"
    yield "|---|---|" + "---|" * len(TIERS)
    for folder, proves in PROVES.items():
        cells = []
        for tier in TIERS:
            parts = [run.folders[folder] for run in found.get(tier, ()) if folder in run.folders]
            count, seconds = sum(part[0] for part in parts), sum(part[1] for part in parts)
            cells.append(f"{count:,} in {seconds:,.0f} s" if count else "-")
        yield f"| `{folder}` | {proves} | {' | '.join(cells)} |"
    walls = []
    for tier in TIERS:
        parts_s = [run.wall_s for run in found.get(tier, ())]
        walls.append(f"**{sum(parts_s) / 60:.1f} min**" if parts_s else "not run")
    yield f"| all | on the clock, on two cores | {' | '.join(walls)} |"


def main() -> None:
    """Writes the table."""
    found = runs(Path(sys.argv[1]))
    if not found:
        sys.exit(f"no tier has left a file in {sys.argv[1]}: run make test or make test-all first")
    lines = "\n".join(table(found))
    before, rest = CONTRIBUTING.read_text().split(MARKS[0])
    _, after = rest.split(MARKS[1])
    CONTRIBUTING.write_text(f"{before}{MARKS[0]}{lines}\n{MARKS[1]}{after}")


if __name__ == "__main__":
    main()
