"""The published reference has a table for every section of a docstring: what docs/hooks.py demands of the site."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.clones import ROOT, docs_program

pytest.importorskip("griffe")


def test_every_section_of_every_docstring_is_parsed():
    assert docs_program("hooks").problems(ROOT / "src" / "kvferry") == []


def test_the_site_is_built_with_these_checks():
    assert "\nhooks: [docs/hooks.py]\n" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.parametrize(
    ("docstring", "problem"),
    [
        ('"""Args:\n        pages: which.\n        """', "Args: is not parsed"),
        ('"""Sends.\n\n        Args:\n        pages: which.\n        """', "Args: is not parsed"),
        ('"""Raises:\n        OSError: always.\n        """', "Raises: is not parsed"),
        (
            '"""Sends.\n\n        Args:\n            page: which.\n        """',
            "Args: names 'page', which does not exist",
        ),
        ('"""Sends.\n\n        Args:\n            pages, room: which.\n        """', "Args: names 'pages, room'"),
        ('"""Sends.\n\n        Arguments:\n            pages: which.\n        """', "Arguments: is no heading"),
        ('"""Sends.\n\n        Args:\n            pages: which.\n            room: whose.\n        """', None),
    ],
)
def test_a_docstring_that_would_lose_its_table_is_found(docstring: str, problem: str | None, tmp_path: Path):
    package = tmp_path / "planted"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sending.py").write_text(
        f"class Sender:\n    def send(self, pages: int, room: int) -> None:\n        {docstring}\n"
    )
    found = docs_program("hooks").problems(package)
    if problem is None:
        assert found == []
    else:
        (only,) = found
        assert only.startswith(f"planted.sending.Sender.send: {problem}")


def test_an_attribute_that_does_not_exist_is_found(tmp_path: Path):
    package = tmp_path / "planted"
    package.mkdir()
    (package / "__init__.py").write_text(
        'class Room:\n    """A room.\n\n    Attributes:\n        number: its own.\n    """\n\n    size: int = 1\n'
    )
    assert docs_program("hooks").problems(package) == ["planted.Room: Attributes: names 'number', which does not exist"]
