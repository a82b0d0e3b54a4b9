"""The GPU's kernels keep the law on a CPU as well: its twin of test_on_gpu.py, under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.tiers import Tier

HERE = Path(__file__).parent


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_kernels_keep_the_law_under_tritons_interpreter(tier: Tier):
    pytest.importorskip("triton", reason="Triton has no wheels for this platform")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tier", tier.value, str(HERE / "interpreted.py")],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
