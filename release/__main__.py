"""Builds a release into dist/, and what is known about it into build/: `make release-check`.

Everything is made of what is committed. With a tag it must be right for publishing: the tag is the version's,
CHANGELOG.md has its day, and every package was asked about. Without one, what cannot be known here is said.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from release import bill, distributions, notes, stranger
from release.commands import ReleaseError, run
from release.distributions import Commit, Distributions

ROOT = Path(__file__).parents[1]
DIST, ABOUT = ROOT / "dist", ROOT / "build"
VERSION = "src/kvferry/_version.py"
EXAMPLE, MODEL = "examples/two_processes.py", "tests/data/configs/deepseek-v3.json"


def say(line: str) -> None:
    """Prints a line at once: some take a minute to come."""
    print(line, flush=True)


def build(commit: Commit, trees: tuple[Path, Path], version: str) -> Distributions:
    """Builds both distributions in each of two trees, compares, and puts them into dist/ in place of older ones.

    Raises:
        ReleaseError: if they differ, or have what they should not.
    """
    first, second = (distributions.build(tree, commit, tree.with_name(f"{tree.name}-dist")) for tree in trees)
    for one, other in ((first.wheel, second.wheel), (first.source, second.source)):
        distributions.check_equal(one, other)
    found = distributions.members(first.wheel)
    distributions.check_contents("the wheel", found, distributions.expected_in_wheel(commit.files, version))
    source = distributions.members(first.source)
    distributions.check_contents("the sdist", source, distributions.expected_in_source(commit.files))
    run(sys.executable, "-m", "twine", "check", "--strict", first.wheel, first.source)
    DIST.mkdir(exist_ok=True)
    for older in DIST.glob("kvferry-*"):
        older.unlink()
    (ABOUT / "wheel-files.txt").write_text("".join(f"{name}\n" for name in sorted(found)))
    say(f"built twice from {commit.name[:12]}, of equal bytes; twine finds nothing:")
    for built, content in ((first.wheel, found), (first.source, source)):
        shutil.copy(built, DIST)
        say(f"  {built.name}: {len(content)} files, {built.stat().st_size:,} bytes")
    say(f"the wheel's files, all in {(ABOUT / 'wheel-files.txt').relative_to(ROOT)}:")
    for folder, count in sorted(Counter("/".join(name.split("/")[:2]) for name in found).items()):
        say(f"  {folder}" + (f"/ {count}" if count > 1 else ""))
    return Distributions(DIST / first.wheel.name, DIST / first.source.name)


def try_it(built: Distributions, tree: Path, home: Path, torch: str) -> Path:
    """Goes a stranger's way, and returns the Python of the environment that is there then.

    Raises:
        ReleaseError: where it ends before its time.
    """
    wheels = ABOUT / "wheels"
    stranger.fill(wheels, built.wheel, torch)
    count, size = len(list(wheels.iterdir())), sum(each.stat().st_size for each in wheels.iterdir())
    problem = stranger.no_network()
    way = "where pip may use no index (a network can be reached: " + problem + ")" if problem else "without a network"
    say(f"a stranger's way, {way}, from {count} wheels of {size / 2**20:.0f} MiB:")
    home.mkdir()
    steps = [*stranger.steps(home, wheels, tree / EXAMPLE, tree / MODEL)]
    for name, seconds in stranger.walk(steps, home, () if problem else stranger.APART):
        say(f"  {name:<14} {seconds:5.1f} s")
    return home / "venv/bin/python"


def look_into(python: Path, built: Distributions, tree: Path, version: str, *, is_published: bool) -> None:
    """Writes what came along, says its licences, and what is known to be wrong with it.

    Raises:
        ReleaseError: if a licence is unknown, or something is known to be wrong; to be published, if that is unknown.
    """
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "pip", "setuptools")  # of the environment, not of kvferry
    listed = ABOUT / f"kvferry-{version}.cdx.json"
    bill.write(python, tree, built.wheel, version, listed)
    stated = bill.licences(listed)
    say(f"bill of materials, in {listed.relative_to(ROOT)}, of {len(stated)} packages, and their licences:")
    for name, licence in stated.items():
        say(f"  {name:<36} {licence}")
    audit = bill.audit(listed)
    if audit.vulnerable:
        raise ReleaseError(f"known to be vulnerable: {dict(audit.vulnerable)}: ask for newer ones in pyproject.toml")
    if audit.checked:
        say(f"known vulnerabilities: none, in {len(audit.checked)} packages")
    if audit.unchecked:
        say(f"known vulnerabilities: NOT KNOWN HERE of {len(audit.unchecked)} packages: {', '.join(audit.unchecked)}")
        if is_published:
            raise ReleaseError("what is published has to be asked about: run this where the package index answers")


def check(tag: str, torch: str) -> None:
    """Does everything, in order.

    Raises:
        ReleaseError: at the first that is not right.
    """
    commit = distributions.head(ROOT)
    if changed := run("git", "status", "--porcelain", "--untracked-files=no", cwd=ROOT).splitlines():
        say(f"{len(changed)} changed files are not committed, and not in it")
    ABOUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvferry-release.") as scratch:
        first, second = (distributions.unpack(ROOT, commit, Path(scratch, name)) for name in ("first", "second"))
        (version,) = re.findall(r'^__version__ = "(.+)"$', (first / VERSION).read_text(), re.MULTILINE)
        date, said = notes.section((first / "CHANGELOG.md").read_text(), version)
        if tag:
            notes.check_tag(tag, version, date)
        (ABOUT / "notes.md").write_text(said)
        built = build(commit, (first, second), version)
        python = try_it(built, first, Path(scratch, "home"), torch)
        look_into(python, built, first, version, is_published=bool(tag))


def main() -> None:
    """Checks the release that is committed."""
    parser = argparse.ArgumentParser(prog="python -m release", description="Builds a release, and checks it.")
    parser.add_argument("--tag", default="", help="what is to be published, as v0.1.0; else it is a rehearsal")
    parser.add_argument("--torch", required=True, help="which torch a stranger has, as pip takes it")
    arguments = parser.parse_args()
    begun_at = time.monotonic()
    try:
        check(arguments.tag, arguments.torch)
    except ReleaseError as error:
        sys.exit(f"this is no release: {error}")
    say(f"a release, in {time.monotonic() - begun_at:.0f} s")


if __name__ == "__main__":
    main()
