"""Pages that SGLang hands in before its device has computed them: its manager, sender and receiver, byte for byte."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from tests.real_engines.sglang.crossings import WAIT_S, Request, wait
from tests.real_engines.sglang.ranks import Model, Rank
from tests.real_engines.sglang.test_ranks import Pair, assert_fails, assert_reusable, pair
from tests.support.waiting import eventually

from kvferry.engines.sglang.manager import KVFerryManager

pytestmark = pytest.mark.timeout(40)

__all__ = ["pair"]  # a fixture


class DeviceEvent:
    """Stands in for an event of CUDA's."""

    def __init__(self) -> None:
        self._happens = threading.Event()
        self._problem: Exception | None = None

    def happen(self, problem: Exception | None = None) -> None:
        self._problem = problem
        self._happens.set()

    def synchronize(self) -> None:
        assert self._happens.wait(WAIT_S)
        if self._problem is not None:
            raise self._problem


class EarlyRequest(Request):
    """A request whose first three pages come early, before the device has written them."""

    def __init__(self, pair: Pair, room: int) -> None:
        super().__init__(pair, room)
        self.ask()
        wait(self.sent, KVPoll.WaitingForInput)
        (self.sender,) = self.senders
        self.sender.init(self.pages, self.aux_index)
        self.rank.kv[0][0][self.source[0][:3]] = 0
        self.event = self.hand_in_early(0, 3)

    @property
    def rank(self) -> Rank:
        return self.pair.prefill.ranks[0]

    def hand_in_early(self, start: int, stop: int) -> DeviceEvent:
        """As SGLang does: the event, then the pages, in an array that it may use again."""
        event = DeviceEvent()
        self.sender._early_send_wait_event = event
        pages = np.array(self.source[0][start:stop], np.int32)
        self.sender.send(pages)
        pages[:] = 39
        return event

    def compute(self) -> None:
        self.rank.fill(self.whole, *self.source)

    def end(self, start: int) -> None:
        """The last call of SGLang's, once the device is through with all of it."""
        self.sender.send(np.array(self.source[0][start:], np.int32), self.state_indices(self.source))
        wait(self.received, KVPoll.Success)
        self.check()
        self.clear()

    @property
    def arrived(self) -> int:
        """How many pages have arrived whole, of all layers."""
        (rank,) = self.pair.decode.ranks
        pools = [pool[self.destination[0]] for kind in rank.kv for pool in kind]
        return sum(all(pool[page].any() for pool in pools) for page in range(self.pages))


def test_what_is_early_leaves_once_the_device_has_written_it(pair: Pair):
    pair.begin(Model())
    request = EarlyRequest(pair, 1)
    later = request.hand_in_early(3, 5)
    time.sleep(0.2)
    assert (request.sender.poll(), request.arrived) == (KVPoll.WaitingForInput, 0)
    request.compute()
    request.event.happen()
    eventually("the first three have arrived", lambda: request.arrived == 3)
    time.sleep(0.1)
    assert request.arrived == 3
    later.happen()
    eventually("the next two have arrived", lambda: request.arrived == 5)
    request.end(5)


def test_what_is_early_leaves_with_the_next_pages_if_these_come_first(pair: Pair):
    """SGLang hands the next ones in when the device is through with all of it: the thread may be late to hear."""
    pair.begin(Model())
    request = EarlyRequest(pair, 1)
    request.compute()
    request.end(3)
    request.event.happen()
    Request(pair, 2).run()  # and the thread goes on
    again = EarlyRequest(pair, 3)
    again.compute()
    again.event.happen()
    again.end(3)


def test_page_numbers_may_come_later_than_the_call(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """SGLang's scheduler need not wait for the device to copy them, in its last call either."""
    pair.begin(Model(window_layers=2))
    assert not pair.sender(pair.prefill.managers[0], 7).supports_host_tensor_indices  # which takes pinned memory
    monkeypatch.setattr(KVFerryManager, "is_on_device", True)
    request = Request(pair, 1)
    request.ask()
    wait(request.sent, KVPoll.WaitingForInput)
    (sender,) = request.senders
    assert sender.supports_host_tensor_indices
    sender.init(request.pages, request.aux_index)
    numbers = [torch.full((count,), 39, dtype=torch.int64) for count in (3, request.pages - 3)]
    copied, computed = [DeviceEvent(), DeviceEvent()], DeviceEvent()
    sender._early_send_wait_event = computed
    sender.send(numbers[0], None, indices_event=copied[0])
    sender.send(numbers[1], request.state_indices(request.source), indices_event=copied[1])
    pages = torch.tensor(request.source[0])
    for event in (*copied, computed):
        time.sleep(0.1)
        assert sender.poll() == KVPoll.WaitingForInput
        numbers[0][:], numbers[1][:] = pages[:3], pages[3:]
        event.happen()
    wait(request.received, KVPoll.Success)
    wait(request.sent, KVPoll.Success)
    request.check()
    request.clear()


def test_what_is_early_does_not_leave_once_the_request_has_ended(pair: Pair):
    """SGLang gives its pages to others at once."""
    pair.begin(Model())
    request = EarlyRequest(pair, 1)
    request.sender.abort()
    request.event.happen()
    assert_fails(request.received, request.receivers, "SGLang gave the request up")
    assert request.arrived == 0
    assert_reusable(pair, request)


def test_a_device_that_fails_fails_the_request_whose_pages_are_early(pair: Pair):
    pair.begin(Model())
    request = EarlyRequest(pair, 1)
    request.event.happen(RuntimeError("an illegal memory access"))
    words = "the device failed: an illegal memory access"
    assert_fails(request.sent, request.senders, words)
    assert_fails(request.received, request.receivers, words)
    assert_reusable(pair, request)
    Request(pair, 2).run()
