"""Prefill ranks that decode ranks reach under another address than the one they listen on."""

from __future__ import annotations

import numpy as np
from tests.support.caches import Model, Shape, pool
from tests.support.proxy import ControlProxy
from tests.support.waiting import PATIENCE_S

from kvferry import DecodeEndpoint, InProcessNetwork, InProcessTransport, PrefillEndpoint, RankCoordinates, Settings
from kvferry.testing import KnownContents

PAGES = np.arange(4)


def test_decode_ranks_connect_to_the_port_that_is_advertised():
    network, model = InProcessNetwork(), Model()
    source, target = (pool(model, Shape(), RankCoordinates()) for _ in range(2))
    source.fill(KnownContents(1), PAGES)
    with ControlProxy() as proxy:
        settings = Settings(registry_port=0, registry_url=None, advertise_port=proxy.port)
        transport = InProcessTransport(network)
        with PrefillEndpoint(source.layout, settings=settings, transport=transport) as prefill:
            assert prefill.control_address == f"tcp://127.0.0.1:{proxy.port}"
            assert prefill._driver.port != proxy.port
            proxy.target = prefill._driver.port
            settings = Settings(registry_url=prefill.registry_url)
            transport = InProcessTransport(network)
            with DecodeEndpoint(target.layout, settings=settings, transport=transport) as decode:
                receiver = decode.open(1, PAGES)
                prefill.open(1).submit(PAGES, last=True)
                receiver.wait(PATIENCE_S)
                target.check(KnownContents(1), PAGES)
                assert proxy.connections == 1
