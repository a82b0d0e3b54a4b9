"""The path of a write, and what its receiver's ring has room for."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import Mock

import numpy as np

from kvferry.endpoint.prefill.paths import PathChooser, SendingStaging, StagedPath
from kvferry.endpoint.runtime.platform import SystemPlatform
from kvferry.errors import RegistrationError
from kvferry.layout import Device, RankLayout, Region, attention_components, shard_from_tensors
from kvferry.plan import PathCosts
from kvferry.settings import Settings
from kvferry.staging.rings import PeerMemory, SharedRing


def test_a_credit_counts_for_the_ring_that_it_is_for():
    ring = SharedRing(100)
    assert ring.reserve(100, Mock()) is not None
    staged = StagedPath(PeerMemory(0, 2, ring), Mock(), Mock(), PathCosts(), chunk_bytes=100)
    chooser = PathChooser(Mock(), forced=None, staged=staged, problem="")
    chooser.credited(1, 50)
    assert ring.in_use == 100, "it was for the ring of an earlier attempt to attach"
    chooser.credited(2, 50)
    assert ring.in_use == 50


def test_where_memory_cannot_be_registered_none_stays_registered_and_counted():
    registered: list[Region] = []

    def register(regions: Sequence[Region], _: Device) -> None:
        if len(registered) + len(regions) > 1:
            raise RegistrationError("no memory may be locked any more")
        registered.extend(regions)

    component, _ = attention_components(num_layers=1, num_kv_heads=1, head_dim=4, dtype="uint8")
    pages = np.zeros((4, 2, 1, 4), np.uint8)
    layout = RankLayout(shards=(shard_from_tensors(component, [pages], dims=("page", "token", "head", "dim")),))
    staging = SendingStaging(Settings(staging_ring_mib=1.0), layout, Mock(register=register), SystemPlatform())
    assert (registered, staging.taken_bytes, staging.source_memories) == ([], 0, ())
