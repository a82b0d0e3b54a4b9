"""Stops the build of the site where a docstring would lose a table: `hooks` in mkdocs.yml.

A section whose entries are not indented under its heading is plain text to the parser, and the reference silently
shows no table. The site's own parser reads every docstring here, whether a page shows it or not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import griffe
from mkdocs.exceptions import Abort

PACKAGE = Path(__file__).parents[1] / "src" / "kvferry"

_HEADING = re.compile(r"^([A-Z]\w*):$", re.MULTILINE)
_KINDS = {
    "Args": griffe.DocstringSectionKind.parameters,
    "Attributes": griffe.DocstringSectionKind.attributes,
    "Raises": griffe.DocstringSectionKind.raises,
    "Returns": griffe.DocstringSectionKind.returns,
    "Yields": griffe.DocstringSectionKind.yields,
}


def on_pre_build(**_: object) -> None:
    """Fails the build if any docstring would lose a table."""
    found = problems(PACKAGE)
    if found:
        raise Abort("\n".join(found))


def problems(package: Path) -> list[str]:
    """Says which docstrings of a package have a section that is not parsed, or names what does not exist."""
    loaded = griffe.load(package.name, search_paths=[package.parent], allow_inspection=False)
    assert isinstance(loaded, griffe.Module)
    return [problem for each in _documented(loaded) for problem in _problems_of(each)]


def _documented(parent: griffe.Object) -> Iterator[griffe.Object]:
    """Yields whatever in a module or class may have a docstring, private names included."""
    yield parent
    for member in parent.members.values():
        if isinstance(member, griffe.Object):  # the others are imported names
            yield from _documented(member)


def _problems_of(documented: griffe.Object) -> Iterator[str]:
    if documented.docstring is None:
        return
    parsed = documented.docstring.parse("google", warnings=False)
    sections: dict[griffe.DocstringSectionKind, griffe.DocstringSection] = {each.kind: each for each in parsed}
    for heading in _HEADING.findall(documented.docstring.value):
        kind = _KINDS.get(heading)
        if kind is None:
            yield f"{documented.path}: {heading}: is no heading of a section; there are {', '.join(_KINDS)}"
        elif kind not in sections:
            yield f"{documented.path}: {heading}: is not parsed: a sentence before it, and its entries indented"
        elif heading in ("Args", "Attributes"):
            named = {str(entry.name) for entry in sections[kind].value}
            for name in sorted(named - _names(documented, heading)):
                yield f"{documented.path}: {heading}: names {name!r}, which does not exist"


def _names(documented: griffe.Object, heading: str) -> set[str]:
    """Returns the names that entries under a heading may have."""
    if heading == "Attributes":
        return set(documented.all_members)
    assert isinstance(documented, (griffe.Class, griffe.Function))
    return {parameter.name for parameter in documented.parameters}
