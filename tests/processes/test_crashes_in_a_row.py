"""Crashes in a row of prefill ranks whose ends nothing proves leave nothing behind, and let the decode rank sleep."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.namespaces import unshare
from tests.support.real_transport import skip_unless_installed

skip_unless_installed()
ROOT = Path(__file__).parent.parent.parent


@pytest.mark.full
@pytest.mark.timeout(600)
def test_rooms_pages_threads_descriptors_and_idle_time_are_as_before():
    unshare("--pid", "--fork", "--mount-proc")  # skips where it must not be made
    command = [sys.executable, "-m", "benchmarks.crashes", "--cycles", "3", "--rooms", "200"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
