"""What it costs to import the package, and that every name it promises is there."""

from __future__ import annotations

import subprocess
import sys

import kvferry


def test_the_library_needs_neither_torch_nor_transformers():
    script = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; import kvferry; "
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers') and sys.modules[m]))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "[]\n"


def test_importing_loads_no_command_line_no_server_and_no_nixl():
    script = (
        "import sys, kvferry; unwanted = ('typer', 'rich', 'uvicorn', 'prometheus_client', 'nixl_cu13'); "
        "print([m for m in unwanted if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "[]\n"


def test_every_public_name_is_there():
    for name in kvferry.__all__:
        assert hasattr(kvferry, name)
