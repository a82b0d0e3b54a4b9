"""What comes along with an installation: its bill of materials, their licences, and what is known to be wrong.

The bill is CycloneDX's, made from what is installed. Licences are read from it, and are those that the packages'
own metadata state.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from release.commands import ReleaseError, run

DYNAMIC = 'dynamic = ["version"]\n'
OPEN_SOURCE = "License :: OSI Approved :: "
READ = {"supervisor 4.3.0": "BSD-3-Clause-Modification"}
"""What SPDX calls the texts of packages that state theirs in words of their own. Another version is read again."""


def write(python: Path, project: Path, wheel: Path, version: str, bill: Path) -> None:
    """Writes the bill of all that is installed beside a Python, with kvferry's wheel as what it is of.

    Args:
        project: the folder with `pyproject.toml`, in which the version is stated elsewhere.

    Raises:
        ReleaseError: if the tool fails, or finds its own bill to be none.
    """
    described = (project / "pyproject.toml").read_text()
    if described.count(DYNAMIC) != 1:
        raise ReleaseError(f"pyproject.toml does not say {DYNAMIC.strip()!r} once: release/bill.py replaces it")
    stated = bill.with_suffix(".toml")
    stated.write_text(described.replace(DYNAMIC, f'version = "{version}"\n'))
    tool = Path(sys.executable).with_name("cyclonedx-py")
    options = ("--output-reproducible", "--pyproject", stated, "--mc-type", "library", "--output-file", bill)
    run(tool, "environment", *options, python)
    stated.unlink()
    content = json.loads(bill.read_text())
    content["metadata"]["component"]["hashes"] = [
        {"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}
    ]
    bill.write_text(json.dumps(content, indent=2) + "\n")


def components(bill: Path) -> list[dict[str, Any]]:
    """Returns the packages of a bill."""
    found: list[dict[str, Any]] = json.loads(bill.read_text())["components"]
    return found


def licences(bill: Path) -> dict[str, str]:
    """Returns the licences of all packages in a bill, by name and version.

    Raises:
        ReleaseError: naming those that state none that is known: an SPDX name or one of the classifiers that PyPI has.
    """
    stated = {f"{each['name']} {each['version']}": _licence(each) for each in components(bill)}
    found = {name: licence or READ.get(name, "") for name, licence in stated.items()}
    if unknown := sorted(name for name, licence in found.items() if not licence):
        raise ReleaseError(f"no known licence is stated by {', '.join(unknown)}: read theirs, or do without them")
    return found


def _licence(component: Mapping[str, Any]) -> str:
    """What a package states: in SPDX's words, or else as a classifier; empty if neither."""
    classified = ""
    for stated in component.get("licenses", ()):
        named = stated.get("license", {})
        if expression := stated.get("expression") or named.get("id"):
            return str(expression)
        if named["name"].startswith(OPEN_SOURCE):
            classified = named["name"].removeprefix(OPEN_SOURCE)
    return classified


@dataclass(frozen=True, slots=True)
class Audit:
    """What a database of known vulnerabilities says.

    Attributes:
        checked: packages that it knows.
        unchecked: those that it does not.
        vulnerable: what is wrong, by package.
    """

    checked: tuple[str, ...]
    unchecked: tuple[str, ...]
    vulnerable: Mapping[str, tuple[str, ...]]


def audit(bill: Path) -> Audit:
    """Asks the package index for what is known of the packages in a bill, by pip-audit.

    Raises:
        ReleaseError: if it cannot be asked.
    """
    asked, answer = bill.with_suffix(".txt"), bill.with_suffix(".audit.json")
    # What "+cpu" was built with is known to whoever built it, not to the database.
    asked.write_text("".join(f"{each['name']}=={each['version'].partition('+')[0]}\n" for each in components(bill)))
    options = ("--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json", "--output", answer)
    # It ends with 1 if it has found something, and if it cannot ask: then it writes nothing.
    said = run(sys.executable, "-m", "pip_audit", *options, "--requirement", asked, accepted=(0, 1))
    if not answer.exists():
        raise ReleaseError(f"pip-audit could not ask: {said}")
    return audited(json.loads(answer.read_text()))


def audited(answer: Mapping[str, Any]) -> Audit:
    """Reads what pip-audit writes as JSON: a package that it could not check counts for nothing."""
    known = [each for each in answer["dependencies"] if "skip_reason" not in each]
    return Audit(
        checked=tuple(each["name"] for each in known),
        unchecked=tuple(each["name"] for each in answer["dependencies"] if "skip_reason" in each),
        vulnerable={
            f"{each['name']} {each['version']}": tuple(vulnerability["id"] for vulnerability in each["vulns"])
            for each in known
            if each["vulns"]
        },
    )
