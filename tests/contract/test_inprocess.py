"""What is particular to the in-process transport: the moment of the copy is known."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.transports import MEMORY, POISON, End, Kit, Pair, connected, numbers

from kvferry.errors import PeerDisconnectedError
from kvferry.transport import InProcessNetwork, InProcessTransport, TransferHandle


class TestInProcess:
    """Within a process the moment of the copy is known: it is `poll`."""

    @pytest.fixture
    def pair(self) -> Pair:
        return connected(Kit("inprocess"))

    @pytest.fixture
    def transfer(self, pair: Pair) -> TransferHandle:
        lists = pair.lists([(0, 64, 64, 4)], [(0, 64, 64, 4)])
        return pair.here.transport.post(lists[0], numbers(0), lists[1], numbers(0), b"late")

    def test_nothing_has_arrived_before_the_first_poll(self, pair: Pair, transfer: TransferHandle):
        assert set(pair.there.memory.tolist()) == {POISON}
        assert pair.there.transport.take_notifications() == []
        assert pair.here.transport.poll(transfer) is not None
        assert pair.there.transport.take_notifications() == [(pair.name, b"late")]

    def test_a_write_to_a_peer_that_closed_fails_and_touches_nothing(self, pair: Pair, transfer: TransferHandle):
        pair.there.transport.close()
        with pytest.raises(PeerDisconnectedError):
            pair.here.transport.poll(transfer)
        with pytest.raises(PeerDisconnectedError):
            pair.here.transport.notify(pair.peer, b"hello")
        lists = pair.lists([(0, 64, 64, 4)], [(0, 64, 64, 4)])
        with pytest.raises(PeerDisconnectedError):
            pair.here.transport.post(lists[0], numbers(0), lists[1], numbers(0), b"late")
        assert set(pair.there.memory.tolist()) == {POISON}

    def test_a_write_to_a_peer_that_started_anew_meanwhile_touches_neither_memory(
        self, pair: Pair, transfer: TransferHandle
    ):
        pair.there.transport.close()
        reborn = End(pair.kit.make(pair.peer), np.full(MEMORY, POISON, np.uint8))
        with pytest.raises(PeerDisconnectedError, match="started anew"):
            pair.here.transport.poll(transfer)
        for memory in (pair.there.memory, reborn.memory):
            assert set(memory.tolist()) == {POISON}
        assert reborn.transport.take_notifications() == []

    def test_a_peer_that_left_cannot_be_connected(self, pair: Pair):
        metadata = pair.there.transport.metadata()
        pair.there.transport.close()
        with pytest.raises(PeerDisconnectedError, match="no endpoint"):
            pair.here.transport.connect(metadata)

    def test_endpoints_without_a_name_get_one_of_their_own(self):
        network = InProcessNetwork()
        one, other = InProcessTransport(network), InProcessTransport(network)
        assert one.endpoint_name != other.endpoint_name
        assert network.member(one.endpoint_name) is one
