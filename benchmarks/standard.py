"""The standard set: measures what docs/design/benchmarks.md shows, and writes its section for this kind of device.

    python -m benchmarks.standard                 # in main memory, as `make bench`
    python -m benchmarks.standard --device cuda   # in the memory of one GPU
    python -m benchmarks.standard --device cuda --part 1 --into parts   # a part of it, in under 8 minutes
    python -m benchmarks.standard --device cuda --load parts/*.json     # the page from all parts

One step after the other, each in processes of its own, so that none disturbs another. A step that fails is shown as
such, and the others go on. The exit code is 0 only if every step ran and every byte was right; whether targets were
reached is for the page to say.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.standard_page import is_exact, section, with_section

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "design" / "benchmarks.md"
LONGEST_STEP_S = 240.0

PARTS = (("equal", "2->1", "one-token"), ("1->2", "4->2", "steady"), ("submit", "idle", "first", "growth"))
"""Steps that are run together where a command may take only so long: on a GPU that is lent."""

LONGEST_PART_S = 450.0

_REQUEST = "--preset qwen3-32b --tokens 2048 --in-flight 4"
_PACKAGES = ("numpy", "nixl-cu13", "nixl-cu12")
_GPU_PACKAGES = ("torch", "triton")


def steps(device: str) -> dict[str, str]:
    """The command line of every step, by its name.

    Where the direct path moves half a million descriptors a request, a round may take longer than all others together:
    there are as many as fit into a few seconds, and one at least. Pages of one token leave it out.
    """
    shape = f"kvferry bench {_REQUEST}" + (f" --device {device}" if device != "cpu" else "")
    unequal = f"{shape} --page-size 16 --variants direct,staged,auto --repetitions 1 --seconds 8"
    return {
        "equal": f"{shape} --page-size 16,64 --pages both --variants direct,auto --repetitions 2 --json",
        "one-token": f"{shape} --page-size 1 --pages both --variants auto --repetitions 3 --json",
        "2->1": f"{unequal} --prefill-tp 2 --decode-tp 1 --json",
        "1->2": f"{unequal} --prefill-tp 1 --decode-tp 2 --json",
        "4->2": f"{unequal} --prefill-tp 4 --decode-tp 2 --json",
        "steady": f"{shape} --requests 5 --passes 20 --variants synchronous,auto --repetitions 1 --json",
        "submit": "python benchmarks/submit.py --json",
        "idle": "python benchmarks/idle.py --json",
        "first": "python benchmarks/first_transfer.py --pairs 3 --json",
        "growth": "python benchmarks/memory_growth.py --transfers 6000 --json",
    }


def run_step(command: str, longest_s: float = LONGEST_STEP_S) -> dict[str, Any]:
    """Runs a step; returns its command with what it printed, or with why there is nothing."""
    program, *arguments = shlex.split(command)
    module = ["-m", "kvferry"] if program == "kvferry" else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))}
    try:
        done = subprocess.run(
            [sys.executable, *module, *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=longest_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"command": command, "error": f"not through after {longest_s:g} s"}
    try:
        return {"command": command, "result": json.loads(done.stdout.strip().splitlines()[-1])}
    except (IndexError, ValueError):
        said = done.stderr.strip().splitlines()
        return {"command": command, "error": f"exit code {done.returncode}: {said[-1] if said else 'nothing said'}"}


def machine(device: str) -> dict[str, str]:
    """What kind of machine this is: nothing that names it."""
    memory_kib = next(
        int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal")
    )
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    described = {
        "processor": f"{model}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{memory_kib / 2**20:.0f} GiB",
        "system": f"{platform.system()} {platform.release().partition('-')[0]}, Python {platform.python_version()}",
    }
    if device == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(0)
        described["GPU"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    return described | {"packages": ", ".join(_versions(_PACKAGES + (_GPU_PACKAGES if device == "cuda" else ())))}


def _versions(packages: tuple[str, ...]) -> list[str]:
    from kvferry import __version__

    found = [f"kvferry {__version__}"]
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return found


def check_device(device: str) -> None:
    """Ends the program where a GPU is asked for and there is none."""
    if device == "cpu":
        return
    try:
        import torch
    except ImportError:
        sys.exit("a GPU was asked for, and torch, which is needed to use one, is not installed")
    if not torch.cuda.is_available():
        sys.exit(f"a GPU was asked for where there is none that torch {torch.__version__} can use")


def measure(device: str, wanted: Sequence[str] | None, longest_s: float = LONGEST_STEP_S) -> dict[str, Any]:
    """Runs all steps, or those that are named, none for longer than that."""
    started = time.monotonic()
    found: dict[str, Any] = {}
    for name, command in steps(device).items():
        if wanted is not None and name not in wanted:
            continue
        print(f"{time.monotonic() - started:5.0f} s  {command}", file=sys.stderr, flush=True)
        found[name] = run_step(command, longest_s)
        if "error" in found[name]:
            print(f"         {found[name]['error']}", file=sys.stderr, flush=True)
    return {"device": device, "machine": machine(device), "seconds": time.monotonic() - started, "steps": found}


def together(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Makes one run of several, of which each has some of the steps; of a step that two have, the later counts.

    Raises:
        ValueError: if they are not of one kind of machine, with what differs.
    """
    first, *others = runs
    for other in others:
        for what in ("device", "machine"):
            if other[what] != first[what]:
                raise ValueError(f"figures of two machines make no page: {what} is {first[what]} and {other[what]}")
    steps_of_all = {name: step for run in runs for name, step in run["steps"].items()}
    return {**first, "seconds": sum(run["seconds"] for run in runs), "steps": steps_of_all}


def write(page: Path, run: Mapping[str, Any]) -> None:
    """Writes a run's section of the page."""
    before = page.read_text(encoding="utf-8") if page.exists() else "# Benchmarks\n"
    page.write_text(with_section(before, run["device"], section(run)), encoding="utf-8")


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, default=PAGE, help="the page; docs/design/benchmarks.md by default")
    parser.add_argument("--steps", help=f"only some, separated by commas: {', '.join(steps('cpu'))}")
    parser.add_argument("--part", type=int, choices=range(1, len(PARTS) + 1), help="only a part, in under 8 minutes")
    parser.add_argument("--into", type=Path, help="a folder for a part's JSON and page, instead of --save and --output")
    parser.add_argument("--save", type=Path, help="also write what was measured, as JSON")
    parser.add_argument(
        "--load", type=Path, nargs="+", help="measure nothing: write the page from what --save wrote, all parts of it"
    )
    typed = parser.parse_args()
    wanted = None if typed.steps is None else typed.steps.split(",")
    longest_s = LONGEST_STEP_S
    if typed.part is not None:
        wanted = list(PARTS[typed.part - 1])
        longest_s = LONGEST_PART_S / len(wanted)
    if typed.into is not None:
        typed.into.mkdir(parents=True, exist_ok=True)
        name = f"bench-{typed.device}" + (f"-{typed.part}" if typed.part is not None else "")
        typed.save, typed.output = typed.into / f"{name}.json", typed.into / f"{name}.md"
    if wanted is not None and (unknown := set(wanted) - set(steps(typed.device))):
        parser.error(f"--steps {typed.steps}: {', '.join(sorted(unknown))} is none of {', '.join(steps('cpu'))}")
    if typed.load is not None:
        try:
            run = together([json.loads(file.read_text(encoding="utf-8")) for file in typed.load])
        except ValueError as error:
            parser.error(f"--load: {error}")
    else:
        check_device(typed.device)
        run = measure(typed.device, wanted, longest_s)
    if typed.save is not None:
        typed.save.write_text(json.dumps(run, indent=1), encoding="utf-8")
    write(typed.output, run)
    print(section(run))
    failed = [name for name, step in run["steps"].items() if "error" in step]
    sys.exit(bool(failed) or not is_exact(run))


if __name__ == "__main__":
    main()
