"""The requests that `benchmarks/engine_steps.py` makes, of kvferry's kind and of SGLang's, fit the SGLang installed."""

from __future__ import annotations

import pytest
from benchmarks.engine_steps import CASES


@pytest.mark.parametrize("case", CASES["sglang"])
def test_a_step_looks_at_every_open_request(case: str):
    for _, grow, step in CASES["sglang"][case]():
        grow(1, 4)
        seen = step()
        assert isinstance(seen, list)
        assert len(seen) == 3
        assert step() == seen, "nothing happens to them"
