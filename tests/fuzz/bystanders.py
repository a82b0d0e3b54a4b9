"""A good pair of engines, before whose eyes everything else happens: afterwards nothing about them may have changed."""

from __future__ import annotations

import itertools
import threading
from typing import Any

from tests.support.caches import Model, Shape
from tests.support.engines import WAIT_S, Engines, Request, Requests
from tests.support.waiting import eventually

from kvferry.control.registry_client import RegistryClient
from kvferry.control.registry_server import RegistryServer
from kvferry.protocol.transfer.states import TransferState
from kvferry.protocol.wire.registrations import EngineView
from kvferry.testing.probe import probe

FIRST_ROOM = 1 << 40
UNGUESSED_ROOM = 0x5DEE_CE66_D15E_A5E7
"""Mutated numbers do not get there by chance."""


class Bystanders:
    """One registry, one prefill and one decode rank in this process, with one room that waits for either side."""

    def __init__(self, token: str | None = None, **settings: Any) -> None:
        self.registry = RegistryServer(port=0, token=token)
        self.registry.start()
        self.client = RegistryClient(self.registry.url, token=token, timeout_s=20)
        waits = {"bootstrap_timeout_s": 3600, "waiting_timeout_s": 3600, "peer_timeout_s": 60}
        self.engines = Engines(self.registry.url, **{**waits, **settings})
        # So many that no request of the next hours takes the pages of those that wait all the time.
        model, shape = Model(), Shape(pages=4096)
        self.pair = Requests(self.engines.prefill(model, shape), self.engines.decode(model, shape))
        self._rooms = itertools.count(FIRST_ROOM)
        self.connects: list[str] = []
        self.transfer()
        # Of these two nobody else may take notice, or give any.
        # Who is told the number of the first guesses its neighbours, and whoever is connected may refuse a room whose
        # decode side has not come: the number of the second is none that comes of mutations.
        self.half_open = [self.pair.new(room) for room in (next(self._rooms), UNGUESSED_ROOM)]
        self.pair.open_decode(self.half_open[0])
        self.pair.open_prefill(self.half_open[1])
        eventually("the room is kept", lambda: len(probe(self.prefill).pending) == 1)
        self._threads = {thread for thread in threading.enumerate() if thread.name.startswith("kvferry")}
        self._attachment = probe(self.prefill).ranks.peer(self.decode.transport.endpoint_name)
        self._registrations = self.registered()
        transport = self.prefill.transport
        connect = transport.connect

        def counting(metadata: bytes) -> str:
            self.connects.append(connect(metadata))
            return self.connects[-1]

        transport.connect = counting

    @property
    def prefill(self) -> Any:
        return self.pair.prefill.endpoints[0]

    @property
    def decode(self) -> Any:
        return self.pair.decode.endpoints[0]

    @property
    def control_port(self) -> int:
        return int(self.prefill.control_address.rpartition(":")[2])

    @property
    def registry_port(self) -> int:
        return self.registry.address[1]

    def registered(self) -> tuple[EngineView, ...]:
        return self.client.engines()

    def transfer(self) -> None:
        """A whole request, checked byte by byte."""
        self.pair.run(next(self._rooms), 2)

    def check(self, *, strangers: str = "") -> None:
        """Nothing has changed, and a request gets through.

        Args:
            strangers: how the names of peers begin that may be connected as well.
        """
        for endpoint in (self.prefill, self.decode):
            assert endpoint.is_healthy
        dead = [thread.name for thread in self._threads if not thread.is_alive()]
        assert not dead, f"threads have ended: {dead}"
        for transfer in (*self.half_open[0].receivers, *self.half_open[1].senders):
            assert not transfer.state.is_final, transfer.error
            assert transfer.state is not TransferState.TRANSFERRING
        peers = {peer.name for peer in probe(self.prefill).peers}
        known = self.decode.transport.endpoint_name
        assert known in peers
        others = {peer for peer in peers - {known} if not strangers or not peer.startswith(strangers)}
        assert not others, others
        assert probe(self.prefill).ranks.peer(known) is self._attachment, "the good pair's connection was made anew"
        assert self.registered() == self._registrations
        self.transfer()
        assert (self.prefill.open_rooms, self.decode.open_rooms) == (1, 1)
        for transport in (*self.pair.prefill.transports, *self.pair.decode.transports):
            assert transport.misused == []

    def finish(self) -> None:
        """What waited all the time succeeds as well, byte by byte."""
        waited: list[Request] = self.half_open
        self.pair.open_prefill(waited[0])
        self.pair.open_decode(waited[1])
        for request in waited:
            self.pair.submit(request)
            request.wait(WAIT_S)
            self.pair.check(request)

    def __enter__(self) -> Bystanders:
        return self

    def __exit__(self, *error: object) -> None:
        self.engines.__exit__(None, None, None)
        self.client.close()
        self.registry.close(WAIT_S)
