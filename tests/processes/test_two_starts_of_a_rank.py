"""A second start of a prefill rank registers while the first one lives: rooms of that end with the reason."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.caches import Model, Shape, pool
from tests.support.containers import container
from tests.support.engines import new_engine_name
from tests.support.real_transport import skip_unless_installed
from tests.support.waiting import PATIENCE_S

from kvferry import DecodeEndpoint, RankCoordinates, Settings
from kvferry.control.registry_server import RegistryServer
from kvferry.errors import TransferFailedError

skip_unless_installed()


@pytest.mark.full
def test_the_rooms_of_the_first_end_with_the_reason_and_the_second_serves_the_next():
    engine, memory = new_engine_name("twice"), pool(Model(), Shape(), RankCoordinates())
    with RegistryServer(port=0, lease_s=1.0) as registry:
        settings = {"registry_url": registry.url}
        with (
            DecodeEndpoint(memory.layout, settings=Settings(**settings)) as decode,
            container(engine, settings, ()) as first,
        ):
            ended = decode.open(1, np.arange(4), engine=engine)
            assert first.say("1") == "1"
            with container(engine, settings, ()) as second:
                with pytest.raises(TransferFailedError, match="was replaced by a newer start at tcp://"):
                    ended.wait(PATIENCE_S)
                assert ended.wait_pages_reusable(PATIENCE_S)
                decode.open(2, np.arange(4), engine=engine)
                assert second.say("2") == "2"
                assert first.process.poll() is None
