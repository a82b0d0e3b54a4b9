"""Figures of transfers: failures are told apart by kind, as either side knows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from tests.support.caches import Model
from tests.support.crashes import crash
from tests.support.engines import WAIT_S, Engines, Requests
from tests.support.waiting import eventually

from kvferry import Receiver, Sender, TransferState
from kvferry.engines.vllm.stats import KINDS, NOT_OPENED, OTHER, TransferLog, added, kind_of
from kvferry.errors import KVFerryError, PageError, TransferFailedError


@pytest.fixture
def begin(kvferry_registry_url: str) -> Iterator[Callable[..., Requests]]:
    with ExitStack() as made:

        def make(decode_model: Model | None = None, **settings: Any) -> Requests:
            both = made.enter_context(Engines(kvferry_registry_url, **settings))
            return Requests(both.prefill(Model()), both.decode(decode_model or Model()))

        yield make


def failed(*rooms: Sender | Receiver) -> list[str]:
    for room in rooms:
        with pytest.raises(KVFerryError):
            room.wait(WAIT_S)
    return [kind_of(room.error) for room in rooms]


def opened(both: Requests) -> tuple[Sender, Receiver]:
    (prefill,), (decode,) = both.prefill.endpoints, both.decode.endpoints
    return prefill.open(1), decode.open(1, np.arange(1), engine=both.prefill.name)


def test_a_peer_that_dies_is_a_disconnect(begin: Callable[..., Requests]):
    both = begin(heartbeat_interval_s=0.05, peer_timeout_s=0.8)
    both.decode.endpoints[0].connect(both.prefill.name)
    _, receiver = opened(both)
    crash(both.prefill.endpoints[0])
    assert failed(receiver) == ["disconnect"]


def test_an_engine_that_is_not_there_is_a_disconnect(begin: Callable[..., Requests]):
    both = begin(bootstrap_timeout_s=0.3)
    assert failed(both.decode.endpoints[0].open(1, np.arange(1), engine="nobody")) == ["disconnect"]


def test_a_room_that_nobody_opens_expires(begin: Callable[..., Requests]):
    both = begin(bootstrap_timeout_s=0.3)
    assert failed(both.prefill.endpoints[0].open(1)) == ["expiry"]


def test_a_room_that_the_prefill_side_never_opens_expires(begin: Callable[..., Requests]):
    both = begin(bootstrap_timeout_s=0.5)
    both.decode.endpoints[0].connect(both.prefill.name, timeout_s=30.0)
    assert failed(both.decode.endpoints[0].open(1, np.arange(1), engine=both.prefill.name)) == ["expiry"]


def test_a_deadline_of_the_other_side_is_an_expiry_here(begin: Callable[..., Requests]):
    both = begin(bootstrap_timeout_s=1.0)
    sender = both.prefill.endpoints[0].open(1)
    assert failed(sender) == ["expiry"]
    receiver = both.decode.endpoints[0].open(1, np.arange(1), engine=both.prefill.name)
    assert failed(receiver) == ["expiry"]
    assert receiver.stats.ended_at is not None
    assert "failed with TransferTimeoutError" in str(receiver.error)


def test_caches_that_differ_are_refused_on_both_sides(begin: Callable[..., Requests]):
    assert failed(*opened(begin(Model(head_dim=16)))) == ["refused", "refused"]


def test_a_room_that_the_prefill_side_refuses_is_refused_here(begin: Callable[..., Requests]):
    both = begin()
    both.prefill.endpoints[0].refuse(1, "it ended before it was computed")
    assert failed(both.decode.endpoints[0].open(1, np.arange(1), engine=both.prefill.name)) == ["refused"]


def test_an_abort_is_one_on_both_sides(begin: Callable[..., Requests]):
    both = begin()
    both.decode.endpoints[0].connect(both.prefill.name)
    sender, receiver = opened(both)
    eventually("it has begun", lambda: sender.state is TransferState.WAITING_FOR_INPUT)
    receiver.abort("the client has gone")
    assert failed(sender, receiver) == ["aborted", "aborted"]


def test_what_nobody_has_foreseen_is_another_kind():
    odd = TransferFailedError("odd")
    odd.there = "NotOurs"
    odd.__cause__ = PageError("a page")
    odd.__cause__.__cause__ = odd  # whoever made that
    assert kind_of(odd) == kind_of(None) == OTHER


def test_rooms_that_could_not_be_opened_count_and_figures_are_taken_once():
    log = TransferLog()
    assert log.take() is None
    log.not_sent()
    log.not_received()
    log.not_received("expiry")
    log.not_received()
    figures = log.take()
    assert figures is not None
    assert figures["failed_sends"] == {NOT_OPENED: 1}
    assert figures["failed_receives"] == {NOT_OPENED: 2, "expiry": 1}
    assert log.take() is None


def test_failures_of_several_workers_add_up():
    assert added({"expiry": 1, OTHER: 2}, {OTHER: 3, NOT_OPENED: 1}) == {"expiry": 1, OTHER: 5, NOT_OPENED: 1}
    assert set(KINDS) >= {"disconnect", "expiry", "refused", NOT_OPENED}
