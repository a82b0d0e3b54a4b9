"""Looks are frequent right after something has happened, and ever fewer the longer nothing has."""

from __future__ import annotations

import pytest

from kvferry.endpoint.runtime.threads import SleepBounds


def test_sleeps_grow_with_the_quiet_up_to_a_bound():
    sleeps = SleepBounds(shortest_s=1e-4, of_quiet=1 / 16, longest_s=0.01)
    assert [sleeps.next_s(quiet_s) for quiet_s in (0.0, 0.016, 0.08, 10.0)] == pytest.approx([1e-4, 1e-3, 5e-3, 0.01])
