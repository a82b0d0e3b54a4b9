"""Names of settings that nobody has: which ones they are, and which were likely meant."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches

PREFIX = "KVFERRY_"
_NEARLY = 0.9
"""How much a name without the prefix must be like a variable to be taken for it; 1 is the same."""


def hint(name: str, known: Collection[str], prefix: str = "") -> str:
    """Returns which of the known names was likely meant, as words for an error.

    Args:
        prefix: what the known names begin with: it would make any name like any other, and is not compared.
    """
    near = get_close_matches(name.removeprefix(prefix), [each.removeprefix(prefix) for each in known], n=1)
    return f"did you mean {prefix}{near[0]}?" if near else "docs/settings.md lists all"


def meaningless(variables: Collection[str], known: Collection[str]) -> Mapping[str, str]:
    """Returns the variables that are named like settings and are none, each with a hint.

    Another version may have them, so that they stop nothing. A misspelled prefix is found as well.

    Args:
        variables: the names in an environment.
        known: the names of all variables that mean something, in upper case.
    """
    found = dict[str, str]()
    for name in sorted(variables):
        upper = name.upper()
        if upper in known:
            continue
        if upper.startswith(PREFIX):
            found[name] = hint(upper, known, PREFIX)
        elif near := get_close_matches(upper, known, n=1, cutoff=_NEARLY):
            found[name] = f"did you mean {near[0]}?"
    return found
