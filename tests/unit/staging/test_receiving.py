"""The rings that a decode rank offers: memory that may still be written to, or is being read, is no other's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvferry.errors import TransportUnavailableError
from kvferry.layout import Device, RankLayout, attention_components, shard_from_tensors
from kvferry.plan import Piece
from kvferry.protocol.wire.messages import StagingRing
from kvferry.settings import Settings
from kvferry.staging.receiving import ReceivingStaging
from kvferry.staging.resources import MachineResources
from kvferry.staging.rings import Span
from kvferry.transport import InProcessNetwork, InProcessTransport

RING_BYTES = 1 << 20


class Offers:
    """Offers rings to prefill ranks, of a small model."""

    def __init__(self) -> None:
        component, _ = attention_components(num_layers=1, num_kv_heads=1, head_dim=4, dtype="uint8")
        self._memory = np.zeros((4, 2, 1, 4), np.uint8)
        shard = shard_from_tensors(component, [self._memory], dims=("page", "token", "head", "dim"))
        self._layout = RankLayout(shards=(shard,))
        self._pieces = (Piece(component.name, component.whole, 0, (0,)),)
        transport = InProcessTransport(InProcessNetwork())
        transport.register(self._layout.regions(), Device())
        settings = Settings(staging_ring_mib=1.0, staging_chunk_mib=0.25, staging_memory_mib=4.0)
        self.staging = ReceivingStaging(settings, self._layout, transport, MachineResources())

    def offer(self, endpoint: str) -> StagingRing:
        offered = self.staging.offer(endpoint, self._layout, self._pieces, lambda _: None).ring
        assert offered is not None, "there is memory for several"
        return offered

    def read(self, endpoint: str) -> Any:
        """Begins to read something of a rank's ring; returns what ends that."""
        ring, span = self.staging.rings[endpoint], Span(0, 0, 64)
        assert ring.take(span)
        return lambda: ring.give_back(span)


@pytest.fixture
def offers() -> Offers:
    return Offers()


def test_a_rank_that_connects_again_gets_the_memory_that_it_had(offers: Offers):
    first, again = offers.offer("p0"), offers.offer("p0")
    assert (again.address, again.num_bytes) == (first.address, RING_BYTES)
    assert again.epoch != first.epoch


def test_a_ring_that_is_being_read_is_not_offered_again(offers: Offers):
    first = offers.offer("p0")
    end = offers.read("p0")
    second = offers.offer("p0")
    assert second.address != first.address
    end()
    assert offers.offer("p0").address in (first.address, second.address)


def test_all_that_may_be_written_to_is_kept_for_good(offers: Offers):
    """Of a rank that has connected anew, and has not attached since, the ring before that, too."""
    offers.offer("p0")
    offers.read("p0")
    offers.offer("p0")
    offers.offer("p1")
    assert offers.staging.keep_for_good(settled={"p1"}) == 2 * RING_BYTES
    assert offers.staging.keep_for_good(settled={"p0", "p1"}) == RING_BYTES
    offers.staging.attached("p0")
    assert offers.staging.keep_for_good(settled={"p0", "p1"}) == RING_BYTES, "it is still being read"


def test_a_ring_that_was_given_back_is_offered_to_others_once_nothing_of_it_is_read(offers: Offers):
    first = offers.offer("p0")
    end = offers.read("p0")
    offers.staging.closed("p0")
    assert offers.offer("p1").address != first.address
    end()
    assert offers.offer("p2").address == first.address


def test_memory_is_not_lost_where_copies_into_pages_cannot_be_prepared(offers: Offers, monkeypatch: pytest.MonkeyPatch):
    """A rank that asks again and again would take all of it."""

    def fail(*_: object, **__: object) -> None:
        raise TransportUnavailableError("the device does not answer")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(offers.staging.kernels, "prepare", fail)
        for _ in range(5):  # there are four rings
            with pytest.raises(TransportUnavailableError):
                offers.offer("p0")
    offers.offer("p0")
    offers.offer("p1")
