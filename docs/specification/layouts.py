"""What docs/specification/layouts.md says of the code, and the files of its vectors."""

from __future__ import annotations

from functools import cache

from docs.specification.tables import table
from docs.specification.vectors import CASES, made

from kvferry.applications.plan.vector import as_text
from kvferry.layout.component import BYTES_PER_ELEMENT


@cache
def vector_files() -> dict[str, str]:
    """Makes the files of all vectors, by name."""
    return {f"{name}.json": as_text(made(case)) for name, case in CASES.items()}


def parts() -> dict[str, str]:
    """Makes what layouts.md says of the code, by the marks between which it stands."""
    return {"vectors": _vectors(), "dtypes": _dtypes()}


def _vectors() -> str:
    rows = ((f"[{name}](vectors/{name}.json)", case.title) for name, case in CASES.items())
    return table(("vector", "what"), rows)


def _dtypes() -> str:
    by_size: dict[int, list[str]] = {}
    for name, size in BYTES_PER_ELEMENT.items():
        by_size.setdefault(size, []).append(f"`{name}`")
    return table(("bytes", "dtype"), ((str(size), ", ".join(names)) for size, names in by_size.items()))
