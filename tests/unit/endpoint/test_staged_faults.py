"""Staged writes that cannot be begun: their rooms end all the same, and everyone gets its pages back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.support.engines import WAIT_S, Requests

from kvferry.errors import KVFerryError, RegistrationError


def test_a_room_whose_worker_gets_no_staging_memory_ends_on_both_sides(pair: Callable[..., Requests]):
    requests = pair(path="staged")
    requests.connect()

    def refuse() -> None:
        raise RegistrationError("the card has no room for more memory")

    transport = requests.prefill.transports[0]
    transport.on_register = refuse
    request = requests.new(1)
    requests.open_decode(request)
    requests.open_prefill(request)
    requests.submit(request, 0, 3, last=False)
    requests.submit(request, 3)
    for transfer in (*request.senders, *request.receivers):
        with pytest.raises(KVFerryError, match="the card has no room for more memory"):
            transfer.wait(WAIT_S)
        assert transfer.wait_pages_reusable(WAIT_S)
    transport.on_register = None
    requests.run(2)
