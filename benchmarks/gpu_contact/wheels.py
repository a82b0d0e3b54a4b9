"""A folder of wheels for a machine without a network: fills it, checks its size, and unpacks it there.

    python -m benchmarks.gpu_contact.wheels --to .gpu-wheels --python-version 3.12 --cuda 13

torch, Triton and NumPy are that machine's own. NIXL's wheel carries a library for expert parallelism, headers and
programs that nothing here uses, as much as all the rest: they are left out, or the folder would be too heavy to carry.
Imports nothing but Python's own library, since it runs where nothing is installed.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

MOST_BYTES = 60 << 20
"""Of all wheels together: what can be carried to a machine that is lent."""

NIXL = "nixl-cu{cuda}==1.5.1"
KVFERRY = (
    "httpx>=0.27",
    "msgspec>=0.21",
    "prometheus-client>=0.20",
    "pydantic>=2.11",
    "pydantic-settings>=2.3",
    "pyzmq>=26",
    "rich>=13",
    "starlette>=0.40",
    "typer>=0.18",
    "uvicorn>=0.30",
    "xxhash>=3.5",
)
"""What kvferry needs, but for NumPy, as pyproject.toml has it."""

BEFORE_3_11 = ("exceptiongroup", "tomli")
"""What these need on an older Python: pip asks the Python that it runs in whether they do, not the other machine's."""

TESTS = ("hypothesis>=6.100", "pytest>=8.3", "pytest-timeout>=2.3")

_PLATFORMS = ("manylinux_2_28_{machine}", "manylinux_2_17_{machine}", "manylinux2014_{machine}")
_DROPPED = re.compile(r"^nixl_ep(_cu\d+)?/|\.data/headers/|\.scripts/|/libucx_perftest")
_DATA = re.compile(r"^[^/]+\.data/(?:purelib|platlib)/")
_ELSEWHERE = re.compile(r"^[^/]+\.data/")
_NAME = re.compile(r"^(?P<package>[^-]+)-(?P<version>[^-]+)-(?:\d[^-]*-)?(?P<python>[^-]+)-(?P<abi>[^-]+)-[^-]+\.whl$")
_MARK = "unpacked.txt"


class TooHeavyError(Exception):
    """All wheels together are more than can be carried."""


def commands(folder: Path, python_version: str, cuda: str, machine: str) -> list[list[str]]:
    """Returns the calls of pip that fill a folder: NIXL alone, since it asks for torch, and the others with theirs."""
    where = ["--only-binary=:all:", "--python-version", python_version, "--dest", str(folder)]
    for name in _PLATFORMS:
        where += ["--platform", name.format(machine=machine)]
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", *where]
    older = BEFORE_3_11 if tuple(int(part) for part in python_version.split(".")[:2]) < (3, 11) else ()
    return [[*download, "--no-deps", NIXL.format(cuda=cuda)], [*download, *KVFERRY, *TESTS, *older]]


def fill(folder: Path, python_version: str, cuda: str, machine: str) -> None:
    """Makes the folder anew.

    Raises:
        TooHeavyError: if the wheels are too heavy all together.
        subprocess.CalledProcessError: if pip cannot have one.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for command in commands(folder, python_version, cuda, machine):
        subprocess.run(command, check=True)
    for wheel in folder.glob("nixl_cu*.whl"):
        slim(wheel)
    check_weight(folder)


def slim(wheel: Path) -> None:
    """Leaves out of NIXL's wheel what nothing here uses, and its lines in the wheel's list of files."""
    lighter = wheel.with_suffix(".lighter")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(lighter, "w", zipfile.ZIP_DEFLATED) as target:
        for member in source.infolist():
            if _DROPPED.search(member.filename):
                continue
            content = source.read(member)
            if member.filename.endswith(".dist-info/RECORD"):
                lines = content.decode().splitlines(keepends=True)
                content = "".join(line for line in lines if not _DROPPED.search(line)).encode()
            target.writestr(member, content)
    lighter.replace(wheel)


def check_weight(folder: Path, most_bytes: int = MOST_BYTES) -> int:
    """Returns the bytes of all wheels together.

    Raises:
        TooHeavyError: naming the largest, if they are too many.
    """
    sizes = {wheel.name: wheel.stat().st_size for wheel in folder.glob("*.whl")}
    total = sum(sizes.values())
    if total > most_bytes:
        largest = max(sizes, key=lambda name: sizes[name])
        raise TooHeavyError(
            f"{len(sizes)} wheels in {folder} are {total / 2**20:.1f} MiB, and at most {most_bytes / 2**20:.0f} MiB "
            f"can be carried; the largest is {largest} with {sizes[largest] / 2**20:.1f} MiB"
        )
    return total


def unfit(folder: Path, version: tuple[int, int]) -> Iterator[str]:
    """Yields, in words, what in a folder was built for another Python."""
    this = f"cp{version[0]}{version[1]}"
    for wheel in sorted(folder.glob("*.whl")):
        found = _NAME.match(wheel.name)
        if found is None:
            yield f"{wheel.name} is not named as a wheel is"
        elif found["abi"] not in ("none", "abi3") and this not in found["python"].split("."):
            yield f"{wheel.name} is for another Python than {version[0]}.{version[1]}: --python-version "


def unpack(folder: Path, target: Path) -> bool:
    """Unpacks all wheels into a folder for PYTHONPATH: in seconds, without pip. Returns whether there was a need to."""
    wheels = sorted(folder.glob("*.whl"))
    contents = "".join(f"{wheel.name} {wheel.stat().st_size}\n" for wheel in wheels)
    mark = target / _MARK
    if mark.is_file() and mark.read_text() == contents:
        return False
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                member.filename = _DATA.sub("", member.filename)
                if not _ELSEWHERE.match(member.filename):
                    archive.extract(member, target)
    mark.write_text(contents)
    return True


def main(given: Sequence[str] | None = None) -> None:
    """Fills a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True, help="the folder; made anew")
    parser.add_argument("--python-version", default="3.12", help="of the other machine")
    parser.add_argument("--cuda", choices=("12", "13"), default="13", help="its CUDA's major version")
    parser.add_argument("--machine", default=platform.machine(), help="its processors, such as x86_64 or aarch64")
    parser.add_argument("--unpack", type=Path, help="fill nothing: unpack this folder of wheels into the one of --to")
    typed = parser.parse_args(given)
    if typed.unpack is not None:
        if problem := next(unfit(typed.unpack, sys.version_info[:2]), None):
            sys.exit(f"{problem}{platform.python_version().rpartition('.')[0]}")
        unpack(typed.unpack, typed.to)
        print(f"PYTHONPATH={typed.to.resolve()}")
        return
    try:
        fill(typed.to, typed.python_version, typed.cuda, typed.machine)
    except subprocess.CalledProcessError as error:
        sys.exit(f"gpu_contact.wheels: pip could not have what is needed (exit code {error.returncode}), see above")
    except TooHeavyError as error:
        sys.exit(f"gpu_contact.wheels: {error}")
    wheels = sorted(typed.to.glob("*.whl"))
    total = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels in {typed.to}, {total / 2**20:.1f} of at most {MOST_BYTES / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
