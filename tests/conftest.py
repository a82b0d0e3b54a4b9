"""Settings of the whole suite."""

from __future__ import annotations

import pytest
from hypothesis import settings

# Examples share their cores with whatever else runs: how long one took says nothing about the code. A failure prints
# what reproduces it on another machine.
settings.register_profile("kvferry", deadline=None, print_blob=True)
settings.load_profile("kvferry")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-seconds", type=float, default=60.0, help="How long each fuzzer of tests/fuzz runs, in seconds."
    )
    parser.addoption("--fuzz-seed", help="Replays one input, or one round, of a fuzzer: what a failure printed.")
