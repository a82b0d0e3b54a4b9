"""Prefill ranks that decode ranks reach under another address than the one they listen on."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.caches import Model, Shape, pool
from tests.support.ports import free_ports_in_a_row
from tests.support.proxy import ControlProxy
from tests.support.waiting import PATIENCE_S

from kvferry import DecodeEndpoint, InProcessNetwork, InProcessTransport, PrefillEndpoint, RankCoordinates, Settings
from kvferry.errors import SettingsError
from kvferry.testing import KnownContents
from kvferry.testing.probe import probe

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
            assert probe(prefill).port != proxy.port
            proxy.target = probe(prefill).port
            settings = Settings(registry_url=prefill.registry_url)
            transport = InProcessTransport(network)
            with DecodeEndpoint(target.layout, settings=settings, transport=transport) as decode:
                receiver = decode.open(1, PAGES)
                prefill.open(1).submit(PAGES, last=True)
                receiver.wait(PATIENCE_S)
                target.check(KnownContents(1), PAGES)
                assert proxy.connections == 1


def test_ranks_of_one_machine_that_are_given_one_port_each_have_their_own():
    base = free_ports_in_a_row(2)
    network, layout = InProcessNetwork(), pool(Model(), Shape(), RankCoordinates()).layout
    settings = Settings(registry_port=0, registry_url=None, control_port=base, advertise_port=9000)
    with PrefillEndpoint(layout, settings=settings, transport=InProcessTransport(network)) as first:
        beside = settings.model_copy(update={"registry_url": first.registry_url})
        second = RankCoordinates(tp_size=2, tp_rank=1)
        layout = pool(Model(), Shape(tp=2), second).layout
        with PrefillEndpoint(
            layout, coordinates=second, settings=beside, transport=InProcessTransport(network)
        ) as other:
            assert (probe(first).port, probe(other).port) == (base, base + 1)
            assert other.control_address == "tcp://127.0.0.1:9001"


@pytest.mark.parametrize("name", ["control_port", "advertise_port"])
def test_a_rank_whose_port_there_is_not_says_so(name: str):
    assert getattr(Settings(**{name: 65530}).of_rank(5), name) == 65535
    with pytest.raises(SettingsError, match=rf"{name} \(KVFERRY_{name.upper()}\) is 65530: rank 6 .* 65536"):
        Settings(**{name: 65530}).of_rank(6)


def test_a_port_that_nobody_has_chosen_stays_any_free_one():
    assert Settings().of_rank(3) == Settings()
