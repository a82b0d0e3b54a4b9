"""Asks a machine with a GPU what is worth knowing, on it, without a network and without setting anything up.

    PYTHONPATH=src python -m benchmarks.gpu_contact --out contact
    python -m benchmarks.gpu_contact --dry-run
    python -m benchmarks.gpu_contact --out contact --sections bulk,kernels
    python -m benchmarks.gpu_contact --out contact --rehearse

Every section runs in a process group of its own, under a limit, with all it prints in NAME.log; contact.json and
contact.md are written anew after each, so that a run that is cut off has left what it knew. Wheels in --wheels are
unpacked and put behind what PYTHONPATH has. A dry run, and a rehearsal on the CPU, need no GPU. The exit code is 0 if
every section ran and all was as expected, 1 if not, and 3 if there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu_contact import page, wheels
from benchmarks.gpu_contact.running import Answer, Outcome, run
from benchmarks.gpu_contact.sections import TOTAL_S, Section, chosen, sections

ROOT = Path(__file__).resolve().parents[2]
NO_GPU = 3

_LOOK_S = 60.0
_LOOK = """
import json, torch
has = torch.cuda.is_available()
found = {"torch": torch.__version__, "CUDA": str(torch.version.cuda), "GPUs": "0"}
if has:
    properties = torch.cuda.get_device_properties(0)
    found["GPUs"] = str(torch.cuda.device_count())
    found["GPU"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
print(json.dumps(found))
"""


def gpu(environment: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Asks torch, in a process of its own, what there is.

    Returns:
        What it says, and why there is no GPU to be used; "" if there is one.
    """
    try:
        run = subprocess.run(
            [sys.executable, "-c", _LOOK],
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=_LOOK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {}, f"torch did not say within {_LOOK_S:g} s whether there is one: the driver hangs"
    if run.returncode:
        return {}, f"torch cannot be asked: {(run.stderr.strip().splitlines() or ['nothing said'])[-1]}"
    found: dict[str, str] = json.loads(run.stdout.strip().splitlines()[-1])
    if found["GPUs"] == "0":
        return found, f"there is none that torch {found['torch']} (CUDA {found['CUDA']}) can use"
    return found, ""


def environment_of(unpacked: Path | None, given: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of all sections: kvferry of this tree first, then PYTHONPATH, then the wheels."""
    paths = [str(ROOT / "src"), str(ROOT), *given.get("PYTHONPATH", "").split(os.pathsep)]
    if unpacked is not None:
        paths.append(str(unpacked))
    return {**given, "PYTHONPATH": os.pathsep.join(path for path in dict.fromkeys(paths) if path)}


def gpu_tests() -> list[str]:
    """Returns the files that have tests marked `gpu`, but for those that are probes of other sections."""
    files = sorted(set((ROOT / "tests").rglob("test_*.py")) - {ROOT / "tests" / "processes" / "test_on_one_gpu.py"})
    return [str(file.relative_to(ROOT)) for file in files if "mark.gpu" in file.read_text(encoding="utf-8")]


def machine(found: Mapping[str, str]) -> dict[str, str]:
    """What kind of machine this is: nothing that names it."""
    processors = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    return {**found, "processors": processors, "Python": platform.python_version()}


def show_plan(asked: Sequence[Section], wheels_from: Path, out: Path | None, no_gpu: str) -> None:
    """Prints what a run would do, step by step."""
    if no_gpu:
        print(f"There is no GPU here: {no_gpu}.")
    count = len(list(wheels_from.glob("*.whl"))) if wheels_from.is_dir() else 0
    print(
        f"First {count} wheels of {wheels_from} would be unpacked"
        if count
        else f"There are no wheels in {wheels_from} (gpu_contact.wheels): what this Python has would have to do"
    )
    for problem in list(wheels.unfit(wheels_from, sys.version_info[:2]))[:1]:
        print(f"They do not fit this Python: {problem}{platform.python_version().rpartition('.')[0]}")
    total = sum(section.limit_s for section in asked)
    print(f"Then {len(asked)} sections would run, one after the other, in {total:g} s at most of {TOTAL_S:g}:\n")
    for number, section in enumerate(asked, 1):
        needs = f"; left out without {section.needs}" if section.needs else ""
        limit = f"step {section.step}, at most {section.limit_s:g} s{needs}"
        print(f"{number:2}. {section.name} ({limit}): {section.question}")
        print(f"    {page.command_line(section)}")
        if section.expected:
            print(f"    expected: {section.expected}")
    print(f"\nLogs, contact.json and contact.md would be written into {out or 'the folder of --out'}.")


def ask(
    asked: Sequence[Section], out: Path, environment: Mapping[str, str], about: Mapping[str, str], *, total_s: float
) -> list[page.Found]:
    """Runs sections one after the other, and writes after each what is known.

    Where an answer makes all others worthless, they are left out.
    """
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + total_s
    found: list[page.Found] = []
    stop = ""
    for section in asked:
        print(f"{section.name}: at most {section.limit_s:g} s", flush=True)
        if stop:
            answer = Answer(Outcome.LEFT_OUT, why=f"{stop}; run it alone, --sections {section.name}")
        else:
            answer = _asked(section, out, environment, min(section.limit_s, end - time.monotonic()))
        print(f"  {answer.outcome.value}, {answer.seconds:.0f} s{': ' + answer.why if answer.why else ''}", flush=True)
        found.append(page.Found(section, answer))
        write(out, about, found)
        for verdict in section.verdicts(answer.result):
            if verdict.stops and verdict.is_so is False:
                stop = f"{section.name} says that what follows is not worth measuring: not so that {verdict.expected}"
    return found


def _asked(section: Section, out: Path, environment: Mapping[str, str], limit_s: float) -> Answer:
    if section.needs and shutil.which(section.needs, path=environment.get("PATH")) is None:
        return Answer(Outcome.LEFT_OUT, why=f"{section.needs} is not on the PATH")
    if limit_s < section.limit_s / 2:
        return Answer(Outcome.LEFT_OUT, why="no time is left for it: run it alone, --sections " + section.name)
    return run(
        section.command,
        out / f"{section.name}.log",
        limit_s=limit_s,
        cwd=ROOT,
        environment={**environment, **section.environment},
    )


def write(out: Path, about: Mapping[str, str], found: Sequence[page.Found]) -> None:
    """Writes the JSON and the page."""
    (out / "contact.json").write_text(json.dumps(page.as_data(about, found), indent=1), encoding="utf-8")
    (out / "contact.md").write_text(page.markdown(about, found), encoding="utf-8")


def is_well(found: Sequence[page.Found]) -> bool:
    """Returns whether every section ran and all was as expected."""
    return all(
        each.answer.outcome in (Outcome.DONE, Outcome.LEFT_OUT)
        and all(verdict.is_so is not False for verdict in each.section.verdicts(each.answer.result))
        for each in found
    )


def unpacked(folder: Path, target: Path) -> Path | None:
    """Unpacks the wheels, if there are any, and returns where they are.

    Ends the program where they were built for another Python.
    """
    if not folder.is_dir() or not list(folder.glob("*.whl")):
        return None
    if problems := list(wheels.unfit(folder, sys.version_info[:2])):
        sys.exit(f"gpu_contact: {problems[0]}{platform.python_version().rpartition('.')[0]}")
    before = time.monotonic()
    if wheels.unpack(folder, target):
        print(f"unpacked the wheels of {folder} in {time.monotonic() - before:.1f} s")
    return target


def main(given: Sequence[str] | None = None) -> None:
    """Asks, or says what it would ask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the folder for logs, contact.json and contact.md")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".gpu-wheels", help="what gpu_contact.wheels has filled")
    parser.add_argument("--sections", help="only some, separated by commas; grid is all sizes of sub-chunk and ring")
    parser.add_argument("--total-s", type=float, default=TOTAL_S, help="what all together may take")
    parser.add_argument("--dry-run", action="store_true", help="run nothing: say what would be run")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with sizes whose figures mean nothing")
    typed = parser.parse_args(given)
    every = sections("cpu" if typed.rehearse else "cuda", gpu_tests())
    try:
        asked = chosen(every, [name for name in (typed.sections or "").split(",") if name])
    except ValueError as error:
        parser.error(f"--sections {error}")
    if typed.rehearse:
        asked = [section for section in asked if not section.is_for_gpu]
    if typed.dry_run:
        show_plan(asked, typed.wheels, typed.out, gpu(environment_of(None, os.environ))[1])
        return
    if typed.out is None:
        parser.error("--out FOLDER is needed, or --dry-run")
    seen, no_gpu = gpu(environment_of(None, os.environ))  # torch is the machine's own
    if no_gpu and not typed.rehearse:
        print(f"gpu_contact: a GPU asked for where {no_gpu}; --dry-run says what it would do", file=sys.stderr)
        sys.exit(NO_GPU)
    environment = environment_of(unpacked(typed.wheels, ROOT / ".gpu-packages"), os.environ)
    found = ask(asked, typed.out, environment, machine(seen), total_s=typed.total_s)
    print(f"written: {typed.out / 'contact.md'}")
    sys.exit(not is_well(found))


if __name__ == "__main__":
    main()
