"""What a release is made of fits together: the version, dependencies, the container files and the workflows."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from release import distributions
from release.stranger import EXTRAS
from tests.support.clones import ROOT

from kvferry import __version__

PROJECT = (ROOT / "pyproject.toml").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
IMAGES = sorted((ROOT / "deploy/images").glob("*.Dockerfile"))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
SHOWN = sorted([*ROOT.glob("deploy/**/*.yaml"), *IMAGES, *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def requirements() -> dict[str, list[Requirement]]:
    """What pyproject.toml asks for, by extra; "" for what kvferry always needs."""
    always = PROJECT.partition("\ndependencies = ")[2].partition("\n]")[0]
    extras = PROJECT.partition("\n[project.optional-dependencies]\n")[2].partition("\n[project.scripts]")[0]
    found = {"": [Requirement(each) for each in re.findall(r'^    "(.+)",$', always, re.MULTILINE)]}
    for name, listed in re.findall(r"^([a-z0-9-]+) = \[(.*?)\]$", extras, re.MULTILINE | re.DOTALL):
        found[name] = [Requirement(each) for each in re.findall(r'"(.+?)"(?:,|$)', listed, re.MULTILINE)]
    return found


def workflow(path: Path) -> dict[Any, Any]:
    read: dict[Any, Any] = yaml.safe_load(path.read_text())
    return read


def steps(path: Path) -> list[dict[str, Any]]:
    return list(itertools.chain.from_iterable(job["steps"] for job in workflow(path)["jobs"].values()))


# ---- the version -------------------------------------------------------------------------------------------------


def test_the_version_stands_in_one_place_and_whoever_repeats_it_is_held_to_it():
    assert 'dynamic = ["version"]' in PROJECT
    assert '[tool.hatch.version]\npath = "src/kvferry/_version.py"' in PROJECT
    repeated = {
        f"{file.relative_to(ROOT)}: {version}"
        for file in SHOWN
        for version in re.findall(r"\bkvferry-[a-z-]+:(\S+)|\bnewTag: ([^\s}]+)", file.read_text())
        for version in filter(None, version)
        if file.suffix != ".md" or version[0].isdigit()
    }
    assert len(repeated) > 5
    assert {each.partition(": ")[2] for each in repeated} == {__version__}, repeated


# ---- dependencies ------------------------------------------------------------------------------------------------


def test_every_dependency_has_a_lowest_version():
    for name, needed in requirements().items():
        for each in needed:
            assert any(bound.operator in (">=", "==") for bound in each.specifier), f"{name}: {each}"


def test_a_package_has_one_range_wherever_it_is_asked_for():
    """The extras of both CUDA versions, too: of `nixl-cu12` and `nixl-cu13` only one can be tested at both ends."""
    ranges: dict[str, set[str]] = defaultdict(set)
    for each in itertools.chain.from_iterable(requirements().values()):
        ranges[re.sub(r"(-transfer-engine|nixl)-.+", r"\1", each.name)].add(str(each.specifier))
    assert {"nixl", "mooncake-transfer-engine"} <= ranges.keys()
    assert [(name, found) for name, found in ranges.items() if len(found) > 1] == []


def test_both_ends_are_tested_of_every_extra_but_those_of_another_cuda_and_of_tests():
    tested = set(re.findall(r"^EXTRAS := (.*)$", MAKEFILE, re.MULTILINE)[0].split())
    left_out = set(requirements()) - tested
    assert left_out == {"", "dev", "kubernetes", "nixl-cu12", "mooncake-cu12", "mooncake-cu13"}
    assert tested <= requirements().keys()


def test_what_builds_a_release_is_pinned():
    pins = [line for line in (ROOT / "release/requirements.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(pins) == len([line for line in pins if re.fullmatch(r"[a-z-]+==[\d.]+", line)]) > 5


# ---- container files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("image", IMAGES, ids=lambda each: each.stem)
def test_a_container_file_adds_the_wheel_of_a_release_to_the_engine_that_was_tried(image: Path):
    text = image.read_text()
    engine, version = re.findall(r"^ARG ENGINE=\S+/(vllm|sglang)\S*:v(\S+)$", text, re.MULTILINE)[0]
    assert re.search(rf"^{engine.upper()} \?= {engine}(-cpu)?=={re.escape(version)}\b", MAKEFILE, re.MULTILINE)
    assert "\nFROM ${ENGINE}\nCOPY dist/kvferry-*.whl /tmp/\n" in text
    assert f'pip install --no-cache-dir "$(ls /tmp/kvferry-*.whl)[{EXTRAS}]"' in text
    assert set(EXTRAS.split(",")) <= requirements().keys()
    built = f"dist/kvferry-{__version__}-py3-none-manylinux_2_17_x86_64.whl"
    assert fnmatch(built, re.findall(r"^COPY (\S+)", text, re.MULTILINE)[0])
    assert "#   make release-check " in text


def test_container_files_are_in_the_source_distribution():
    names = [str(image.relative_to(ROOT)) for image in IMAGES]
    assert len(names) == 2
    assert set(names) <= distributions.expected_in_source(names)


# ---- workflows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda each: each.stem)
def test_a_workflow_runs_targets_that_people_type_and_nothing_else(path: Path):
    """But for the one command that writes a release's page, for which there is no target: it needs GitHub's token."""
    ran = [step["run"] for step in steps(path) if "run" in step]
    assert ran
    for command in ran:
        if not (path.stem == "publish" and command.startswith("gh release create ")):
            words = re.fullmatch(r'make ([a-z-]+)((?: [A-Z]+="\$[A-Z_]+")*)', command)
            assert words is not None, command
            assert words[1] in TARGETS, command


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda each: each.stem)
def test_a_workflow_uses_actions_by_commit_and_may_only_read(path: Path):
    used = re.findall(r"^ +- uses: (.+)$", path.read_text(), re.MULTILINE)
    assert len(used) == len([step for step in steps(path) if "uses" in step]) > 0
    for each in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each), each
    assert workflow(path)["permissions"] == {"contents": "read"}
    checkouts = [step for step in steps(path) if step.get("uses", "").startswith("actions/checkout@")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_an_action_has_one_version_in_all_workflows():
    used = {each for path in WORKFLOWS for each in re.findall(r"uses: (\S+)", path.read_text())}
    assert len(used) == len({each.partition("@")[0] for each in used})


def test_ci_runs_what_a_commit_has_to_pass_with_the_oldest_and_the_newest_python():
    ci = workflow(ROOT / ".github/workflows/ci.yml")
    assert {"make check", "make test", "make release-check"} == {
        step["run"] for step in steps(ROOT / ".github/workflows/ci.yml") if "run" in step
    }
    pythons = ci["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert f'requires-python = ">={pythons[0]}"' in PROJECT
    classified = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    assert [pythons[0], pythons[-1]] == [classified[0], classified[-1]]


def test_only_what_a_tag_was_checked_as_is_published_and_without_a_password():
    path = ROOT / ".github/workflows/publish.yml"
    publish, text = workflow(path), path.read_text()
    jobs = publish["jobs"]
    # YAML takes the word "on" for a truth.
    assert publish[True] == {"push": {"tags": ["v*"]}}
    assert 'make release-check TAG="$GITHUB_REF_NAME"' in {step.get("run") for step in jobs["build"]["steps"]}
    assert jobs["pypi"]["needs"] == "build"
    assert jobs["pypi"]["permissions"] == {"id-token": "write"}
    assert jobs["pypi"]["environment"] == "pypi"
    assert "secrets." not in text
    assert "password" not in text.partition("\nname:")[2]
    writers = {name for name, job in jobs.items() if "write" in job.get("permissions", {}).values()}
    assert writers == {"pypi", "page"}
    for name in writers:
        assert not [step for step in jobs[name]["steps"] if "checkout" in step.get("uses", "")], (
            "it runs no code of ours"
        )
