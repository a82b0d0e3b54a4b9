"""The tree is what the picture says: rooms import only rooms below them, and the documents name the same rooms."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import kvferry
from kvferry.models.families import FAMILIES

PACKAGE = Path(kvferry.__file__).parent
ROOT = PACKAGE.parent.parent

ROOMS = (
    "layout",
    "plan",
    "protocol",
    "transport",
    "staging",
    "control",
    "observe",
    "endpoint",
    "simulation",
    "models",
    "engines",
    "cli",
)
"""From the ground up."""

SANS_IO = ("layout", "plan", "protocol")
FORBIDDEN_WITHOUT_IO = {"asyncio", "httpx", "logging", "os", "queue", "random", "secrets", "socket", "subprocess"} | {
    "threading",
    "time",
    "zmq",
}


def imports(file: Path) -> set[str]:
    """Every module that a file imports, anywhere in it, but not for type checking alone."""
    found = set()
    tree = ast.parse(file.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} uses a relative import"
            assert node.module is not None
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room_files(room: str) -> list[Path]:
    return sorted((PACKAGE / room).rglob("*.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_below_it(room: str):
    allowed = ROOMS[: ROOMS.index(room) + 1]
    for file in room_files(room):
        for module in imports(file):
            parts = module.split(".")
            if parts[0] == "kvferry" and len(parts) > 1 and parts[1] in ROOMS:
                assert parts[1] in allowed, f"{file.relative_to(ROOT)} imports {module}, a room above it"


@pytest.mark.parametrize("room", SANS_IO)
def test_rooms_without_io_import_nothing_that_does_any(room: str):
    for file in room_files(room):
        for module in imports(file):
            assert module.split(".")[0] not in FORBIDDEN_WITHOUT_IO, f"{file.relative_to(ROOT)} imports {module}"


def words_of_code(file: Path) -> set[str]:
    """Every name and every text in a file's code, in lower case: not its documentation."""
    words = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""  # a docstring
        for text in (getattr(node, field, None) for field in ("id", "attr", "arg", "name", "value")):
            if isinstance(text, str):
                words.add(text.lower())
    return words


@pytest.mark.parametrize("room", ["layout", "plan", "protocol", "transport", "staging", "control", "endpoint"])
def test_no_room_below_models_knows_a_model_family(room: str):
    families = {re.match("[a-z]+", family).group() for family in FAMILIES} | {"mla", "gqa"}  # type: ignore[union-attr]
    assert {"qwen", "deepseek", "mamba"} <= families
    for file in room_files(room):
        found = {family for family in families for word in words_of_code(file) if family in word}
        assert not found, f"{file.relative_to(ROOT)} speaks of {found}"


def test_every_folder_is_a_room():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(ROOMS)


def test_only_settings_read_the_environment():
    for file in PACKAGE.rglob("*.py"):
        if file != PACKAGE / "settings.py":
            assert not re.search(r"os\.(environ|getenv)", file.read_text()), f"{file.relative_to(ROOT)}"


@pytest.mark.parametrize("document", ["README.md", "docs/architecture.md"])
def test_the_picture_names_the_rooms_in_order(document: str):
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / document).read_text(), flags=re.MULTILINE)
    assert tuple(rows) == ROOMS
