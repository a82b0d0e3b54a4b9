"""What uses all cores runs alone: `tests/runs.py` runs only others side by side."""

from __future__ import annotations

import os


def check_alone() -> None:
    """Raises in a process of pytest that has others beside it, before a server starts there."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        raise AssertionError("this test starts an engine's server beside other tests: mark it pytest.mark.servers")
