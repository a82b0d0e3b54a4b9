"""The path of a write, and what its receiver's ring has room for."""

from __future__ import annotations

from unittest.mock import Mock

from kvferry.endpoint.prefill.paths import PathChooser, StagedPath
from kvferry.plan import PathCosts
from kvferry.staging.rings import PeerMemory, SharedRing


def test_a_credit_counts_for_the_ring_that_it_is_for():
    ring = SharedRing(100)
    assert ring.reserve(100, Mock()) is not None
    staged = StagedPath(PeerMemory(0, 2, ring), Mock(), PathCosts(), chunk_bytes=100)
    chooser = PathChooser(Mock(), forced=None, staged=staged, problem="")
    chooser.credited(1, 50)
    assert ring.in_use == 100, "it was for the ring of an earlier attempt to attach"
    chooser.credited(2, 50)
    assert ring.in_use == 50
