"""An engine that is installed and a wheel that is made of it, both checked by their sources."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path

import httpx
from proof.engine_contracts.archives import opened
from proof.engine_contracts.page import Report, plugins, report
from proof.engine_contracts.sources import Sources
from tests.support.engine_wheels import Change, build


def installed(package: str) -> str:
    """Returns the folder that a package is installed in."""
    (folder,) = importlib.import_module(package).__path__
    return str(Path(folder).parent)


def checked(package: str, version: str, where: str) -> Report:
    """Returns what a release has of the contract, by its sources."""
    with httpx.Client() as http, opened(where, package, http) as read:
        return report(plugins()[package], version, Sources(read))


def doctored(package: str, version: str, changes: Mapping[str, Change], folder: Path) -> Report:
    """Returns the same of a wheel that is made of what is installed, with changes to the text of modules."""
    with httpx.Client() as http, opened(installed(package), package, http) as read:
        code = Sources(read)
        report(plugins()[package], version, code)
        wheel = build(folder / f"{package}-{version}-py3-none-any.whl", read, code.modules, changes)
    return checked(package, version, str(wheel))
