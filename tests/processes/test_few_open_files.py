"""An endpoint in a process that may open few files more: an error that says so, and neither death nor a leak.

libzmq and UCX end the process where they get no descriptor for what they cannot do without.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from tests.support.real_transport import REAL, skip_unless_installed

skip_unless_installed()
pytestmark = pytest.mark.full

ONE = (5,)
SOME = (0, 2, 16, 22, 40)
"""Where today's libraries were seen to end the process, or to let an error of theirs out."""

ALL = tuple(range(65))
SIDES = pytest.mark.parametrize("side", ["prefill", "decode"])
NUMBERS = pytest.mark.parametrize(
    "numbers",
    [ONE, SOME, pytest.param(ALL, marks=pytest.mark.long)],
    ids=["one number", "some numbers", "all numbers"],
)


def said(side: str, phase: str, numbers: tuple[int, ...]) -> list[dict[str, Any]]:
    """What processes with so many files to spare say of themselves."""
    command = [sys.executable, "-m", "tests.support.few_files", side, phase, *map(str, numbers)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=120 * len(numbers) + 60, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]  # UCX writes there, too
    assert [each["spare"] for each in answers] == list(numbers)
    return answers


@SIDES
@NUMBERS
@pytest.mark.skipif(REAL.name != "nixl", reason="the helper makes endpoints over NIXL")
def test_an_endpoint_is_made_or_says_which_limit_to_raise(side: str, numbers: tuple[int, ...]):
    for each in said(side, "construct", (*numbers, 200)):
        assert each["exit"] == 0, each
        assert not each["outcome"] or each["outcome"].startswith("SettingsError: "), each
        assert not each["outcome"] or "ulimit -n" in each["outcome"], each
        assert each["left_over"] == 0, each
    assert not each["outcome"], "with enough of them it is made"


@SIDES
@NUMBERS
@pytest.mark.skipif(REAL.name != "nixl", reason="the helper makes endpoints over NIXL")
def test_the_first_connection_is_made_or_fails_alone(side: str, numbers: tuple[int, ...]):
    for each in said(side, "connect", (*numbers, 100)):
        assert each["exit"] == 0, each
        assert "not ours" not in each["outcome"], each
        assert each["again"] == "", "once there are enough it connects"
        assert each["is_healthy"], each
    assert not each["outcome"], "with enough of them it connects"
