"""What it costs to import the package, and that every name it promises is there."""

from __future__ import annotations

import inspect
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import kvferry


def test_the_library_needs_neither_torch_nor_transformers():
    script = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; import kvferry; "
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers') and sys.modules[m]))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_importing_loads_no_command_line_no_server_and_no_nixl():
    script = (
        "import sys, kvferry; unwanted = ('typer', 'rich', 'uvicorn', 'prometheus_client', 'nixl_cu13'); "
        "print([m for m in unwanted if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


ENDPOINT = {
    "renew","layout", "engine", "coordinates", "engine_rank", "fingerprint", "settings", "transport"} | {
    "open", "refuse", "open_rooms", "status", "observe_url", "health", "is_healthy", "close",
    "drain", "is_draining", "is_drained", "wait_drained", "not_ready",
}  # fmt: skip
TRANSFER = {
    "room",
    "state",
    "stats",
    "error",
    "pages_reusable",
    "wait",
    "completed",
    "wait_pages_reusable",
    "abort",
} | {"add_change_callback"}
PUBLIC = {
    kvferry.PrefillEndpoint: ENDPOINT
    | {"sender", "control_address", "registry_url", "registry_error", "wait_registered", "announce", "instance"},
    kvferry.DecodeEndpoint: ENDPOINT | {"receiver", "connect", "connecting", "expect", "release"},
    kvferry.Sender: TRANSFER | {"submit", "is_at_rest", "prefix_tokens"},
    kvferry.Receiver: TRANSFER | {"aux"},
}


@cache
def documented_package() -> Any:
    griffe = pytest.importorskip("griffe")
    source = inspect.getsourcefile(kvferry)
    assert source is not None
    return griffe.load("kvferry", search_paths=[Path(source).parents[1]], allow_inspection=False)


@pytest.mark.parametrize("offered", PUBLIC, ids=lambda each: each.__name__)
def test_callers_see_what_callers_need_and_all_of_it_is_documented(offered: type):
    griffe, tree = pytest.importorskip("griffe"), documented_package()
    documented, found = set(), set()
    for each in (each for each in offered.__mro__ if each.__module__.startswith("kvferry.")):
        described = tree[f"{each.__module__}.{each.__qualname__}".removeprefix("kvferry.")]
        found |= {name for name in described.members if not name.startswith("_")}
        documented |= {name for name, member in described.members.items() if member.has_docstring}
        for section in described.docstring.parse("google"):
            if section.kind is griffe.DocstringSectionKind.attributes:
                documented |= {attribute.name for attribute in section.value}
    assert found == PUBLIC[offered]
    assert found <= documented


def test_every_public_name_is_there():
    for name in kvferry.__all__:
        assert hasattr(kvferry, name)
