"""Asks a machine with a GPU what is worth knowing, on it, without a network and without setting anything up.

    PYTHONPATH=src python -m benchmarks.gpu_contact --part 1 --out contact
    PYTHONPATH=src python -m benchmarks.gpu_contact --part 2 --out contact
    python -m benchmarks.gpu_contact --part 1 --dry-run
    python -m benchmarks.gpu_contact --out contact --sections bulk,kernels
    python -m benchmarks.gpu_contact --out contact --rehearse

Every section runs in a process group of its own, under a limit. One file comes of it, contact-1.tar.gz (-2, or
contact.tar.gz): a page, the same as JSON, and all that each section has printed. It is written anew after every section
and when the run is cut off. GPU_CONTACT_COMMIT names the commit where there is no git to ask. Wheels in --wheels are
unpacked and put behind what PYTHONPATH has. A dry run, and a rehearsal on the CPU, which judges no figures, need no
GPU. The exit code is 0 if every section ran and all was as expected, 1 if not, 3 if there is no GPU, and 128 and the
signal's number if it was cut off.
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
from benchmarks.gpu_contact.archive import pack, packed_at_the_end
from benchmarks.gpu_contact.probes.common import FOLDER
from benchmarks.gpu_contact.running import Answer, Outcome, run
from benchmarks.gpu_contact.sections import NAMED_S, TOTAL_S, Section, chosen, of_part, sections

ROOT = Path(__file__).resolve().parents[2]
NO_GPU = 3

_SAY_S = 20.0
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
    """What kind of machine this is, and which code ran: nothing that names the machine."""
    processors = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    driver = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    commit = _said("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12")
    about = {"driver": driver, "commit": commit or os.environ.get("GPU_CONTACT_COMMIT", "not known")}
    return {**found, **about, "processors": processors, "Python": platform.python_version()}


def _said(*command: str) -> str:
    """Returns the first line that a program prints; "" where there is no such program, or it fails."""
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_SAY_S, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return ""
    return said[0].strip() if said else ""


def show_plan(asked: Sequence[Section], wheels_from: Path, archive: str, no_gpu: str, total_s: float) -> None:
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
    print(f"Then {len(asked)} sections would run, one after the other, in {total:g} s at most of {total_s:g}:\n")
    for number, section in enumerate(asked, 1):
        needs = f"; left out without {section.needs}" if section.needs else ""
        limit = f"step {section.step}, at most {section.limit_s:g} s{needs}"
        print(f"{number:2}. {section.name} ({limit}): {section.question}")
        print(f"    {page.command_line(section)}")
        if section.expected:
            print(f"    expected: {section.expected}")
    print(f"\nAll of it would come back in one file: {archive}.")


def ask(
    asked: Sequence[Section],
    out: Path,
    environment: Mapping[str, str],
    about: Mapping[str, str],
    *,
    total_s: float,
    archive: Path | None = None,
) -> list[page.Found]:
    """Runs sections one after the other, and writes after each what is known, also of one that is cut off.

    Where an answer makes others worthless, they are left out: what needs a wire, where software emulates it.
    """
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + total_s
    found: list[page.Found] = []
    stop = ""
    for section in asked:
        print(f"{section.name}: at most {section.limit_s:g} s", flush=True)
        if stop and section.needs_wire:
            answer = Answer(Outcome.LEFT_OUT, why=f"{stop}; run it alone, --sections {section.name}")
        else:
            try:
                answer = _asked(section, out, environment, min(section.limit_s, end - time.monotonic()))
            except BaseException:
                found.append(page.Found(section, Answer(Outcome.OVERTIME, why="the run was cut off")))
                write(out, about, found)
                raise
        print(f"  {answer.outcome.value}, {answer.seconds:.0f} s{': ' + answer.why if answer.why else ''}", flush=True)
        found.append(page.Found(section, answer))
        write(out, about, found)
        if archive is not None:
            pack(out, archive)
        for verdict in section.verdicts(answer.result):
            if verdict.stops and verdict.is_so is False:
                stop = f"{section.name} says that a wire is not worth measuring: not so that {verdict.expected}"
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
        environment={**environment, FOLDER: str(out), **section.environment},
    )


def write(out: Path, about: Mapping[str, str], found: Sequence[page.Found]) -> None:
    """Writes the JSON and the page."""
    (out / "contact.json").write_text(json.dumps(page.as_data(about, found), indent=1), encoding="utf-8")
    (out / "contact.md").write_text(page.markdown(about, found), encoding="utf-8")


def is_well(found: Sequence[page.Found], *, judges: bool = True) -> bool:
    """Returns whether every section ran and, unless figures mean nothing, all was as expected."""
    return all(
        each.answer.outcome in (Outcome.DONE, Outcome.LEFT_OUT)
        and not (judges and any(verdict.is_so is False for verdict in each.section.verdicts(each.answer.result)))
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
    parser.add_argument(
        "--part", type=int, choices=sorted(TOTAL_S), help="of a visit: what is right, or how fast it is"
    )
    parser.add_argument("--out", type=Path, help="the folder for the archive")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".gpu-wheels", help="what gpu_contact.wheels has filled")
    parser.add_argument("--sections", help="only some, separated by commas, in this order")
    parser.add_argument("--total-s", type=float, help="what all together may take")
    parser.add_argument("--dry-run", action="store_true", help="run nothing: say what would be run")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with sizes whose figures mean nothing")
    begun_at, typed = time.monotonic(), parser.parse_args(given)
    if typed.part is None and typed.sections is None and not typed.rehearse:
        parser.error("--part 1, --part 2, or --sections")
    every = sections("cpu" if typed.rehearse else "cuda", gpu_tests())
    try:
        asked = chosen(every, typed.sections.split(",")) if typed.sections else of_part(every, typed.part)
    except ValueError as error:
        parser.error(f"--sections {error}")
    total_s = typed.total_s or TOTAL_S.get(
        typed.part, sum(each.limit_s for each in asked) if typed.rehearse else NAMED_S
    )
    name = "contact.tar.gz" if typed.part is None else f"contact-{typed.part}.tar.gz"
    if typed.dry_run:
        no_gpu = gpu(environment_of(None, os.environ))[1]
        show_plan(asked, typed.wheels, str(typed.out / name if typed.out else name), no_gpu, total_s)
        return
    if typed.out is None:
        parser.error("--out FOLDER is needed, or --dry-run")
    with packed_at_the_end(typed.out / name) as folder:
        print(f"all of it: {typed.out / name}", flush=True)
        seen, no_gpu = gpu(environment_of(None, os.environ))  # torch is the machine's own
        if no_gpu and not typed.rehearse:
            print(f"gpu_contact: a GPU asked for where {no_gpu}; --dry-run says what it would do", file=sys.stderr)
            sys.exit(NO_GPU)
        environment = environment_of(unpacked(typed.wheels, ROOT / ".gpu-packages"), os.environ)
        found = ask(
            asked,
            folder,
            environment,
            machine(seen),
            total_s=total_s - (time.monotonic() - begun_at),
            archive=typed.out / name,
        )
    sys.exit(not is_well(found, judges=not typed.rehearse))


if __name__ == "__main__":
    main()
