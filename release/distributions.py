"""The wheel and the source distribution: built from what is committed, twice, and each with nothing but what it should.

What belongs in them is a rule about committed files, and not a list. Both are built in two folders one after the other;
of equal bytes, so that anyone can build them again from the tag and compare. The compiled copies, too: another version
of the C compiler writes others, and `readelf --string-dump=.comment` says which one it was.
"""

from __future__ import annotations

import os
import sys
import tarfile
import zipfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from release.commands import ReleaseError, run

COMPILED = "kvferry/staging/blocks.so"
METADATA = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
"""What every wheel of ours has beside the package."""

IN_SOURCE = ("src/", "deploy/", "examples/")
"""Folders of the source distribution: to build the wheel, to try and to run it. What proves it stays in the clone."""

BESIDE_SOURCE = (".gitignore", "CHANGELOG.md", "LICENSE", "README.md", "hatch_build.py", "pyproject.toml")


@dataclass(frozen=True, slots=True)
class Commit:
    """What is released.

    Attributes:
        name: its hash.
        at_unix_s: when it was made, which becomes the time of every file.
        files: all of it, as paths.
    """

    name: str
    at_unix_s: int
    files: tuple[str, ...]

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables for tools that write a time into what they make, or call others of this environment."""
        tools = Path(sys.executable).parent
        path = os.pathsep.join((str(tools), os.environ.get("PATH", os.defpath)))
        return {**os.environ, "PATH": path, "SOURCE_DATE_EPOCH": str(self.at_unix_s)}


@dataclass(frozen=True, slots=True)
class Distributions:
    """The two files of a release."""

    wheel: Path
    source: Path


def head(clone: Path) -> Commit:
    """Returns the commit that is checked out.

    Raises:
        ReleaseError: if this is no clone.
    """
    name, at = run("git", "log", "-1", "--format=%H %ct", cwd=clone).split()
    files = run("git", "ls-tree", "-r", "--name-only", "-z", name, cwd=clone)
    return Commit(name, int(at), tuple(filter(None, files.split("\0"))))


def unpack(clone: Path, commit: Commit, folder: Path) -> Path:
    """Puts a commit's files into a folder, as a fresh clone has them, and returns it."""
    packed = folder.with_suffix(".tar")
    run("git", "archive", "--output", packed, commit.name, cwd=clone)
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    packed.unlink()
    return folder


def build(tree: Path, commit: Commit, folder: Path) -> Distributions:
    """Builds both into a folder: the wheel from the source distribution, for every Linux whose C library is new enough.

    Raises:
        ReleaseError: if a tool fails, or nothing was compiled.
    """
    environment = commit.environment
    plain = folder / "plain"
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", plain, tree, environment=environment)
    (built,), (source,) = plain.glob("*.whl"), plain.glob("*.tar.gz")
    if built.name.endswith("-none-any.whl"):
        raise ReleaseError("nothing was compiled: install a C compiler (apt-get install gcc libc6-dev), or set CC")
    run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", folder, built, environment=environment)
    (wheel,) = folder.glob("*.whl")
    return Distributions(wheel, source.replace(folder / source.name))


def members(distribution: Path) -> Mapping[str, bytes]:
    """Returns the files in a wheel or a source distribution; of the latter without the folder that all lie in."""
    if distribution.suffix == ".whl":
        with zipfile.ZipFile(distribution) as wheel:
            return {each.filename: wheel.read(each) for each in wheel.infolist() if not each.is_dir()}
    found = dict[str, bytes]()
    with tarfile.open(distribution) as source:
        for each in source:
            if (content := source.extractfile(each)) is not None:
                found[each.name.partition("/")[2]] = content.read()
    return found


def expected_in_wheel(files: Iterable[str], version: str) -> set[str]:
    """Returns what the wheel of a commit's files has to have: the package, what is compiled, and its description."""
    package = {each.removeprefix("src/") for each in files if each.startswith("src/kvferry/")}
    return package | {COMPILED} | {f"kvferry-{version}.dist-info/{each}" for each in METADATA}


def expected_in_source(files: Iterable[str]) -> set[str]:
    """Returns what the source distribution of a commit's files has to have."""
    return {each for each in files if each.startswith(IN_SOURCE) or each in BESIDE_SOURCE} | {"PKG-INFO"}


def check_contents(name: str, found: Collection[str], expected: Collection[str]) -> None:
    """Compares what is in a distribution with what should be.

    Raises:
        ReleaseError: if something is missing, or too much, by name.
    """
    missing, surplus = sorted({*expected} - {*found}), sorted({*found} - {*expected})
    if missing or surplus:
        raise ReleaseError(f"{name} lacks {missing} and has {surplus} too much: see pyproject.toml and hatch_build.py")


def check_equal(first: Path, second: Path) -> None:
    """Compares a distribution with the same one, built in another folder.

    Raises:
        ReleaseError: if their bytes differ, with the names of the files in which they do.
    """
    if first.read_bytes() != second.read_bytes():
        one, other = members(first), members(second)
        differ = sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
        raise ReleaseError(f"{first.name}, built twice, differs in {differ or 'the times or the order of its files'}")
