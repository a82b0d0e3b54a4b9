"""Parameters of a request that come too late or twice: its cache was sent already, or its prefill engine has gone."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest
from tests.support.caches import Model, Shape
from tests.support.engines import WAIT_S, Engines, Requests, new_engine_name

from kvferry import TransferState
from kvferry.errors import SettingsError, TransferFailedError

# Far longer than a test waits: whoever waited for it would fail the test.
PATIENT = {"bootstrap_timeout_s": 10 * WAIT_S}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_decode_engine_is_told_at_once_that_a_room_was_sent(
    engines: Callable[..., Engines], ranks: int, caplog: pytest.LogCaptureFixture
):
    both = engines(**PATIENT)
    prefill, first, second = both.prefill(Model(), Shape(tp=ranks)), both.decode(Model()), both.decode(Model())
    Requests(prefill, first).run(7)
    retried = Requests(prefill, second)
    retried.connect()
    request = retried.new(7)
    with caplog.at_level(logging.WARNING, logger="kvferry"):
        retried.open_decode(request)
        with pytest.raises(TransferFailedError, match=r"room 7 was sent to .* s ago.*to the prefill side again"):
            request.receivers[0].wait(WAIT_S)
    assert first.transports[0].endpoint_name in str(request.receivers[0].error)
    assert "refused room 7 of " + second.transports[0].endpoint_name in caplog.text, "the prefill side says so, too"
    assert request.receivers[0].wait_pages_reusable(WAIT_S)


def test_the_number_is_a_second_engines_once_the_prefill_side_has_opened_it_again(engines: Callable[..., Engines]):
    both = engines(**PATIENT)
    prefill, first, second = both.prefill(Model()), both.decode(Model()), both.decode(Model())
    Requests(prefill, first).run(7)
    again = Requests(prefill, second)
    request = again.new(7)
    again.open_prefill(request)
    again.open_decode(request)
    again.submit(request)
    request.wait()
    again.check(request)


def test_an_engine_that_has_received_a_room_may_open_its_number_again_first(pair: Callable[..., Requests]):
    requests = pair(**PATIENT)
    requests.run(7)
    requests.run(7)


def test_a_room_of_a_start_that_has_gone_fails_as_soon_as_another_is_found(engines: Callable[..., Engines]):
    both, name = engines(**PATIENT), new_engine_name("restarted")
    both.prefill(Model(), Shape(tp=2), name=name, instance="second")
    decode = both.decode(Model()).endpoints[0]
    receiver = decode.open(1, np.arange(3), engine=name, instance="first")
    with pytest.raises(TransferFailedError, match=r"\(first\) has gone: registered is second, with rank 0 at tcp://"):
        receiver.wait(WAIT_S)
    assert receiver.pages_reusable
    decode.connect(name, timeout_s=WAIT_S)
    late = decode.open(2, np.arange(3), engine=name, instance="first")
    with pytest.raises(TransferFailedError, match="first"):
        late.wait(WAIT_S)
    assert decode.open_rooms == 0


@pytest.mark.parametrize(("registered", "named"), [("now", "now"), (None, "first"), ("now", None)])
def test_the_start_that_is_there_or_has_no_name_serves(
    engines: Callable[..., Engines], registered: str | None, named: str | None
):
    both, name = engines(**PATIENT), new_engine_name("prefill")
    prefill = both.prefill(Model(), name=name, instance=registered)
    assert prefill.endpoints[0].instance == registered
    receiver = both.decode(Model()).endpoints[0].open(1, np.arange(3), engine=name, instance=named)
    prefill.endpoints[0].open(1).submit(np.arange(3), last=True)
    receiver.wait(WAIT_S)
    assert receiver.state is TransferState.SUCCESS


def test_a_start_needs_a_name_that_can_stand_in_a_log(engines: Callable[..., Engines]):
    with pytest.raises(SettingsError, match="instance is 'of monday'"):
        engines().prefill(Model(), instance="of monday")


def test_whoever_was_not_asked_to_send_says_who_it_is(pair: Callable[..., Requests]):
    requests = pair(bootstrap_timeout_s=0.3)
    requests.connect()
    request = requests.new(1)
    requests.open_decode(request)
    endpoint = requests.prefill.transports[0].endpoint_name
    with pytest.raises(TransferFailedError, match=rf"was not asked to send room 1 .*{endpoint}, which has run for"):
        request.receivers[0].wait(WAIT_S)
