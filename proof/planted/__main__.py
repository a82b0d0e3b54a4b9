"""Plants every fault of the catalogue in a copy of the tree, and says which tier finds it: `python -m proof.planted`.

python -m proof.planted                 all of them
python -m proof.planted window prefix   those whose names or files have one of the words
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from proof.planted.catalogue import CATALOGUE, PlantedFault
from proof.planted.places import place_of

ROOT = Path(__file__).parents[2]
LONGEST_S = 1800.0

TIERS = ("make test", "make test-all", "nothing")
"""What may find a fault, the first that does."""


def copy(target: Path) -> None:
    """Copies what git knows of, links to this environment, and compiles."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        file = target / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes((ROOT / name).read_bytes())
    (target / ".venv").symlink_to(sys.prefix)
    compile_copies(target)


def compile_copies(tree: Path) -> None:
    """Compiles what is not Python, as installing does."""
    subprocess.run([sys.executable, tree / "hatch_build.py"], check=True)


def fails(tree: Path, *arguments: str) -> bool:
    """Runs tests in a copy until one fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    done = subprocess.run(
        [*command, *arguments], cwd=tree, env=environment, capture_output=True, check=False, timeout=LONGEST_S
    )
    if done.returncode not in (0, 1, 2):  # pytest's own trouble; 2 is a module that cannot be imported any more
        raise RuntimeError(done.stdout.decode() + done.stderr.decode())
    return done.returncode != 0


ALL_CORES = ("-n", "auto", "--dist", "loadscope", "--no-loadscope-reorder")


def found_by(fault: PlantedFault, tree: Path) -> str:
    """Plants a fault and takes it away again; returns what finds it."""
    place = place_of(fault, tree / "src/kvferry")
    is_compiled = place.file.suffix == ".c"
    place.file.write_text(place.wrong)
    try:
        if is_compiled:
            compile_copies(tree)
        # The nearest alone, in one process: to collect all tests in several takes longer than most faults live.
        if fails(tree, *fault.nearest.split()) or fails(tree, *ALL_CORES):
            return "make test"
        return "make test-all" if fails(tree, *ALL_CORES, "--tier", "full") else "nothing"
    finally:
        place.file.write_text(place.text)
        if is_compiled:
            compile_copies(tree)


def markdown(found: Mapping[PlantedFault, str]) -> str:
    """Renders what found which fault as a table, layer by layer."""
    lines = ["| layer | faults | " + " | ".join(f"found by {tier}" for tier in TIERS) + " |", "|---|---|---|---|---|"]
    for layer in dict.fromkeys(fault.layer for fault in found):
        counts = Counter(tier for fault, tier in found.items() if fault.layer == layer)
        cells = [counts.total(), *(counts[tier] for tier in TIERS)]
        lines.append(f"| `{layer}` | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> int:
    """Says which fault is found by what; the exit code is 0 only if each is found by something."""
    words = sys.argv[1:]
    faults = [each for each in CATALOGUE if not words or any(word in f"{each.name} {each.file}" for word in words)]
    found: dict[PlantedFault, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy(tree)
        for nearest in dict.fromkeys(fault.nearest for fault in faults):
            if fails(tree, *nearest.split()):
                sys.stderr.write(f"{nearest} fails without any fault: mend that first\n")
                return 1
        for fault in faults:
            begun = time.monotonic()
            found[fault] = tier = found_by(fault, tree)
            sys.stdout.write(f"{fault.layer:10} {fault.name}: found by {tier} ({time.monotonic() - begun:.0f} s)\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(faults)} faults:\n{markdown(found)}\n")
    return int("nothing" in found.values())


if __name__ == "__main__":
    sys.exit(main())
