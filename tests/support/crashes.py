"""Prefill ranks of another machine, and how they crash, in this process."""

from __future__ import annotations

import itertools
from typing import Any

from tests.support.caches import Model, Shape, pool
from tests.support.engines import WAIT_S

from kvferry import PrefillEndpoint, RankCoordinates
from kvferry.endpoint.runtime.platform import SystemPlatform
from kvferry.protocol.wire.field_types import ProcessIdentity
from kvferry.testing import LocalNetwork
from kvferry.testing.probe import probe

_machines = itertools.count(1)


class Elsewhere(SystemPlatform):
    """This machine under another name, so that nobody here can see its processes."""

    def __init__(self) -> None:
        super().__init__()
        self.process = ProcessIdentity(machine=f"machine {next(_machines)}, far away", pid=7, started=7)


def prefill_elsewhere(
    network: LocalNetwork, *, engine: str, model: Model | None = None, shape: Shape | None = None, **settings: Any
) -> PrefillEndpoint:
    """Starts a prefill rank that seems to run on a machine of its own. Its memory lives as long as it does."""
    its_pool = pool(model or Model(), shape or Shape(), RankCoordinates())
    endpoint = PrefillEndpoint(
        its_pool.layout,
        engine=engine,
        settings=network.settings(**settings),
        transport=network.transport(),
        platform=Elsewhere(),
    )
    endpoint.its_pool = its_pool  # type: ignore[attr-defined]
    assert endpoint.wait_registered(WAIT_S)
    return endpoint


def crash(endpoint: PrefillEndpoint) -> None:
    """Ends a prefill rank as its peers see a crash: not a word comes from it any more."""
    probe(endpoint).driver.channel.connection.send = lambda *_: None  # type: ignore[method-assign]
    endpoint.close()
