"""What a release says of itself: its section of CHANGELOG.md, which its tag has to name."""

from __future__ import annotations

import re

from release.commands import ReleaseError


def section(changelog: str, version: str) -> tuple[str, str]:
    """Returns when a version was released, as its heading says, and its notes.

    Raises:
        ReleaseError: if it has no notes.
    """
    found = re.search(rf"^## {re.escape(version)}, ([^\n]+)\n+(.+?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ReleaseError(f"CHANGELOG.md has no section `## {version}, DATE` with notes: write what is new")
    return found[1], found[2].strip() + "\n"


def check_tag(tag: str, version: str, date: str) -> None:
    """Compares the tag that is to be released with what the code and CHANGELOG.md say.

    Raises:
        ReleaseError: if they name another version, or no day.
    """
    if tag != f"v{version}":
        raise ReleaseError(f"the tag is {tag}, and src/kvferry/_version.py says {version}: tag v{version}")
    if re.fullmatch(r"\d{4}-\d{2}-\d{2}", date) is None:
        raise ReleaseError(f"CHANGELOG.md says `## {version}, {date}`: replace {date!r} by the day, as 2030-12-31")
