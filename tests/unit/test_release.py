"""A release is refused for what it should not be: `release`, which `make release-check` runs with its own tools."""

from __future__ import annotations

import io
import json
import re
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from release import bill, distributions, notes, stranger
from release.commands import ReleaseError, run
from release.stranger import Step
from tests.support.clones import ROOT
from tests.support.namespaces import unshare

from kvferry import __version__

FILES = ("src/kvferry/a.py", "proof/b.py", "tests/c.py", "deploy/d.yaml", "docs/e.md", "LICENSE", "pyproject.toml")
IN_WHEEL = {"kvferry/a.py", "kvferry/staging/blocks.so"} | {
    f"kvferry-1.2.dist-info/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
}


def wheel(path: Path, *names: str, content: str = "") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(zipfile.ZipInfo(name), content)
    return path


def bill_of(folder: Path, *licences: Any) -> Path:
    listed = folder / "bill.json"
    packages = [{"name": f"p{number}", "version": "1", "licenses": each} for number, each in enumerate(licences)]
    listed.write_text(json.dumps({"components": packages}))
    return listed


def named(name: str) -> dict[str, Any]:
    return {"license": {"name": name}}


def test_a_wheel_has_the_package_and_neither_tests_nor_proof():
    assert distributions.expected_in_wheel(FILES, "1.2") == IN_WHEEL


def test_a_source_distribution_has_what_builds_and_runs_and_neither_tests_nor_proof():
    expected = {"src/kvferry/a.py", "deploy/d.yaml", "LICENSE", "pyproject.toml", "PKG-INFO"}
    assert distributions.expected_in_source(FILES) == expected


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (IN_WHEEL - {"kvferry/staging/blocks.so"}, r"lacks \['kvferry/staging/blocks.so'\] and has \[\] too much"),
        (IN_WHEEL | {"proof/b.py"}, r"lacks \[\] and has \['proof/b.py'\] too much"),
    ],
)
def test_what_is_missing_or_too_much_in_a_wheel_is_named(found: set[str], says: str, tmp_path: Path):
    built = distributions.members(wheel(tmp_path / "k.whl", *found, "kvferry/"))
    with pytest.raises(ReleaseError, match=says):
        distributions.check_contents("the wheel", built, IN_WHEEL)
    distributions.check_contents("the wheel", IN_WHEEL, IN_WHEEL)


def test_a_source_distributions_files_are_named_as_in_the_clone(tmp_path: Path):
    with tarfile.open(tmp_path / "k-1.2.tar.gz", "w:gz") as archive:
        entry = tarfile.TarInfo("k-1.2/src/kvferry/a.py")
        entry.size = 3
        archive.addfile(entry, io.BytesIO(b"abc"))
    assert distributions.members(tmp_path / "k-1.2.tar.gz") == {"src/kvferry/a.py": b"abc"}


def test_what_differs_between_two_builds_is_named(tmp_path: Path):
    first, same = (wheel(tmp_path / f"{name}.whl", "a", "b") for name in ("first", "same"))
    distributions.check_equal(first, same)
    with pytest.raises(ReleaseError, match=r"differs in \['a', 'b'\]"):
        distributions.check_equal(first, wheel(tmp_path / "other.whl", "a", "b", content="built at noon"))
    with pytest.raises(ReleaseError, match="differs in the times or the order"):
        distributions.check_equal(first, wheel(tmp_path / "turned.whl", "b", "a"))


def test_a_release_is_made_of_what_is_committed_and_of_its_time(tmp_path: Path):
    clone = tmp_path / "clone"
    clone.mkdir()
    (clone / "a.txt").write_text("committed")
    by = ("-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false")
    for command in (("init", "--quiet"), ("add", "a.txt"), (*by, "commit", "--quiet", "--message", "first")):
        run("git", *command, cwd=clone)
    (clone / "a.txt").write_text("changed")
    (clone / "b.txt").write_text("new")
    commit = distributions.head(clone)
    tree = distributions.unpack(clone, commit, tmp_path / "tree")
    assert commit.files == ("a.txt",)
    assert [(each.name, each.read_text(), each.stat().st_mtime) for each in tree.iterdir()] == [
        ("a.txt", "committed", commit.at_unix_s)
    ]
    assert commit.environment["SOURCE_DATE_EPOCH"] == str(commit.at_unix_s)


def test_a_command_that_fails_says_what_it_was_and_what_it_said():
    with pytest.raises(ReleaseError, match=r"(?s)-c 'exit\(\"no disk\"\)' ended with 1:\nno disk"):
        run(sys.executable, "-c", 'exit("no disk")')


# ---- what it says of itself --------------------------------------------------------------------------------------


def test_the_changelog_has_notes_of_this_version():
    date, said = notes.section((ROOT / "CHANGELOG.md").read_text(), __version__)
    assert date == "unreleased" or re.fullmatch(r"\d{4}-\d{2}-\d{2}", date)
    assert "\n## " not in said


def test_notes_end_where_the_version_before_begins():
    changelog = "# Changelog\n\n## 0.2.0, 2030-01-02\n\n- New.\n\n## 0.1.0, 2029-01-01\n\n- First.\n"
    assert notes.section(changelog, "0.2.0") == ("2030-01-02", "- New.\n")
    assert notes.section(changelog, "0.1.0") == ("2029-01-01", "- First.\n")
    with pytest.raises(ReleaseError, match=r"no section `## 0\.3\.0, DATE`"):
        notes.section(changelog, "0.3.0")


@pytest.mark.parametrize(
    ("tag", "date", "says"),
    [
        ("v0.2.0", "2030-01-02", r"the tag is v0\.2\.0, .* says 0\.1\.0"),
        ("v0.1.0", "unreleased", "replace 'unreleased'"),
    ],
)
def test_a_tag_of_another_version_or_of_no_day_is_refused(tag: str, date: str, says: str):
    notes.check_tag("v0.1.0", "0.1.0", "2030-01-02")
    with pytest.raises(ReleaseError, match=says):
        notes.check_tag(tag, "0.1.0", date)


# ---- what comes along --------------------------------------------------------------------------------------------


def test_licences_are_listed_in_spdxs_words_where_they_are_stated_so(tmp_path: Path):
    classifier = named("License :: OSI Approved :: BSD License")
    listed = bill_of(tmp_path, [{"expression": "MIT AND Zlib"}], [classifier, {"license": {"id": "MIT"}}], [classifier])
    assert bill.licences(listed) == {"p0 1": "MIT AND Zlib", "p1 1": "MIT", "p2 1": "BSD License"}


@pytest.mark.parametrize("stated", [[], [named("see our web site")], [named("License :: Other/Proprietary License")]])
def test_a_package_that_states_no_known_licence_is_refused_by_name(stated: list[Any], tmp_path: Path):
    with pytest.raises(ReleaseError, match=r"no known licence is stated by p1 1: read theirs"):
        bill.licences(bill_of(tmp_path, [{"license": {"id": "MIT"}}], stated))


def test_a_licence_that_was_read_is_that_of_one_version(tmp_path: Path):
    (read,) = bill.READ
    name, version = read.split()
    listed = tmp_path / "bill.json"
    listed.write_text(json.dumps({"components": [{"name": name, "version": version}]}))
    assert bill.licences(listed) == bill.READ
    listed.write_text(json.dumps({"components": [{"name": name, "version": f"{version}.1"}]}))
    with pytest.raises(ReleaseError, match=re.escape(f"{read}.1")):
        bill.licences(listed)


def test_a_package_that_nobody_could_be_asked_about_does_not_count_as_sound():
    audit = bill.audited(
        {
            "dependencies": [
                {"name": "sound", "version": "1", "vulns": []},
                {"name": "weak", "version": "2", "vulns": [{"id": "PYSEC-0"}]},
                {"name": "unknown", "skip_reason": "not found"},
            ]
        }
    )
    assert (audit.checked, audit.unchecked) == (("sound", "weak"), ("unknown",))
    assert audit.vulnerable == {"weak 2": ("PYSEC-0",)}


# ---- a stranger's way --------------------------------------------------------------------------------------------


def test_a_stranger_installs_from_the_folder_alone_and_sees_what_the_readme_shows(tmp_path: Path):
    steps = {each.name: each for each in stranger.steps(tmp_path, Path("/wheels"), Path("two.py"), Path("config.json"))}
    assert list(steps) == ["environment", "install", "two processes", "doctor", "plan"]
    assert {"--no-index", Path("/wheels")} <= {*steps["install"].command}
    assert all(step.says for name, step in steps.items() if name not in ("environment", "install"))


def test_a_step_that_does_not_say_what_it_must_is_no_step(tmp_path: Path):
    said = Step("says", (sys.executable, "-c", "print('arrived: 8')"), "arrived: 8")
    assert [name for name, _ in stranger.walk([said], tmp_path, ())] == ["says"]
    with pytest.raises(ReleaseError, match="'arrived: 9' is not in what it says:\narrived: 8"):
        list(stranger.walk([Step("says", said.command, "arrived: 9")], tmp_path, ()))


def test_a_stranger_has_no_network_and_nothing_of_ours(tmp_path: Path):
    unshare("--map-root-user", "--net")
    look = "import os, socket; print(sorted(os.environ), [name for _, name in socket.if_nameindex()])"
    says = "['HOME', 'LC_CTYPE', 'PATH', 'PIP_NO_COMPILE', 'PWD'] ['lo']"
    assert list(stranger.walk([Step("looks", (sys.executable, "-c", look), says)], tmp_path))
