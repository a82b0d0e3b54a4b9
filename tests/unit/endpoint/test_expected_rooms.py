"""Rooms that requests wait for on the decode side: the prefill side keeps them, until nobody says so any more."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from tests.support.caches import Model, Shape
from tests.support.engines import WAIT_S, Engines, Requests
from tests.support.waiting import eventually

from kvferry import TransferState
from kvferry.errors import TransferTimeoutError
from kvferry.protocol.wire.field_types import MAX_EXPECTED
from kvferry.testing.probe import probe

HOLD_S = 1.0
QUICK = {"bootstrap_timeout_s": HOLD_S, "heartbeat_interval_s": 0.1, "peer_timeout_s": 5.0}


def wait_for_time_to_pass(seconds: float) -> None:
    until = time.monotonic() + seconds
    eventually("the time is over", lambda: time.monotonic() >= until)


def connected(both: Requests) -> Requests:
    for endpoint in both.decode.endpoints:
        endpoint.connect(both.prefill.name)
    return both


@pytest.mark.parametrize("tp", [1, 2])
def test_a_room_that_is_expected_is_kept_and_others_are_not(pair: Callable[..., Requests], tp: int):
    both = connected(pair(None, Shape(tp=tp), Shape(tp=tp), **QUICK))
    kept = [endpoint.open(1) for endpoint in both.prefill.endpoints]
    for endpoint in both.decode.endpoints:
        endpoint.expect(1, engine=both.prefill.name)
    lost = [endpoint.open(2) for endpoint in both.prefill.endpoints]
    for sender in lost:
        with pytest.raises(TransferTimeoutError, match="0 of an unknown number of decode ranks opened it within 1 s"):
            sender.wait(WAIT_S)
    wait_for_time_to_pass(2 * HOLD_S)
    assert {sender.state for sender in kept} == {TransferState.BOOTSTRAPPING}
    receivers = [endpoint.open(1, np.arange(1), engine=both.prefill.name) for endpoint in both.decode.endpoints]
    for sender in kept:
        sender.submit(np.arange(1), last=True)
    for receiver in receivers:
        receiver.wait(WAIT_S)


def test_a_room_that_is_refused_after_it_was_expected_ends_at_once(pair: Callable[..., Requests]):
    both = connected(pair(**QUICK))
    (prefill,), (decode,) = both.prefill.endpoints, both.decode.endpoints
    sender = prefill.open(1)
    decode.expect(1, engine=both.prefill.name)
    wait_for_time_to_pass(2 * HOLD_S)
    assert sender.state is TransferState.BOOTSTRAPPING
    decode.refuse(1, "the client has gone", engine=both.prefill.name)
    with pytest.raises(Exception, match="the client has gone"):
        sender.wait(WAIT_S)
    eventually("nothing is said of it", lambda: not probe(decode).rooms.expected.rooms)


def test_the_rooms_that_a_decode_rank_expected_end_after_it_has_gone(engines: Callable[..., Engines]):
    both = engines(**QUICK)
    prefill, decode = both.prefill(Model()), both.decode(Model())
    connected(Requests(prefill, decode))
    sender = prefill.endpoints[0].open(1)
    decode.endpoints[0].expect(1, engine=prefill.name)
    wait_for_time_to_pass(2 * HOLD_S)
    assert sender.state is TransferState.BOOTSTRAPPING
    decode.endpoints[0].close()
    with pytest.raises(TransferTimeoutError):
        sender.wait(WAIT_S)


def test_a_room_that_failed_while_it_was_expected_says_why_whenever_it_is_opened(pair: Callable[..., Requests]):
    both = connected(pair(**QUICK))
    (prefill,), (decode,) = both.prefill.endpoints, both.decode.endpoints
    sender = prefill.open(1)
    decode.expect(1, engine=both.prefill.name)
    sender.abort("its memory was needed")
    wait_for_time_to_pass(2 * HOLD_S)
    with pytest.raises(Exception, match="its memory was needed"):
        decode.open(1, np.arange(1), engine=both.prefill.name).wait(WAIT_S)


def test_more_rooms_than_one_message_takes_are_all_said(pair: Callable[..., Requests]):
    both = connected(pair(**QUICK))
    (prefill,), (decode,) = both.prefill.endpoints, both.decode.endpoints
    last = prefill.open(MAX_EXPECTED + 7)
    for room in range(MAX_EXPECTED + 8):
        decode.expect(room, engine=both.prefill.name)
    wait_for_time_to_pass(2 * HOLD_S)
    assert last.state is TransferState.BOOTSTRAPPING
    last.abort()
