"""Layers that leave while the model computes the next ones, through SGLang's manager and sender, byte for byte.

Real engines send them so in `test_disaggregated`.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from tests.real_engines.sglang.crossings import Request, wait
from tests.real_engines.sglang.ranks import Model
from tests.real_engines.sglang.test_early_pages import DeviceEvent
from tests.real_engines.sglang.test_ranks import Pair, assert_fails, assert_reusable, pair
from tests.support.waiting import eventually

from kvferry.engines.sglang.layer_steps import LayerSteps, ranges_of

pytestmark = pytest.mark.timeout(40)

__all__ = ["pair"]  # a fixture

LAYERS = 3


class StepRequest(Request):
    """A request of which the model computes one layer after the other, in one step."""

    def __init__(self, pair: Pair, room: int, event: DeviceEvent | None = None) -> None:
        super().__init__(pair, room)
        self.rank, self.manager = pair.prefill.ranks[0], pair.prefill.managers[0]
        self._computed = [[pool.copy() for pool in kind] for kind in self.rank.kv]
        for kind in self.rank.kv:
            for pool in kind:
                pool[:] = 0
        self.pool = SimpleNamespace(start_layer=0, layer_transfer_counter=None)
        self.pool.register_layer_transfer_counter = lambda counter: setattr(
            self.pool, "layer_transfer_counter", counter
        )
        ids = [*range(len(self.rank.layers))]
        ranges = ranges_of(self.manager.caches.layout, LAYERS)
        made = (lambda: event) if event is not None else None
        self.steps = self.manager.layer_steps = LayerSteps(self.pool, ranges, ids, made)
        self.ask()
        wait(self.sent, KVPoll.WaitingForInput)
        (self.sender,) = self.senders
        self.sender.init(self.pages, self.aux_index)

    def begin_step(self) -> None:
        self.steps.announce(self.sender, np.array(self.source[0]), None)

    def compute(self, *layers: int) -> None:
        """Computes layers: each is written, and then read."""
        for layer in layers:
            for pools, computed in zip(self.rank.kv, self._computed, strict=True):
                pools[layer][:] = computed[layer]
            self.pool.layer_transfer_counter.wait_until(layer)

    def end(self, pages: list[int] | None = None) -> None:
        """SGLang hands in what the step has computed."""
        given = np.array(self.source[0] if pages is None else pages, np.int32)
        self.sender.send(given, self.state_indices(self.source))

    def succeed(self) -> None:
        wait(self.received, KVPoll.Success)
        wait(self.sent, KVPoll.Success)
        self.check()
        self.clear()

    @property
    def arrived(self) -> list[bool]:
        """Of which layers something has arrived."""
        (rank,) = self.pair.decode.ranks
        return [
            any(pools[layer][self.destination[0]].any() for pools in rank.kv) for layer in range(len(self.rank.layers))
        ]


def assert_both_fail(pair: Pair, request: StepRequest, words: str) -> None:
    """Both sides fail and say why, and all pages come back."""
    assert_fails(request.sent, request.senders, words)
    assert_fails(request.received, request.receivers, words)
    assert_reusable(pair, request)


MODELS = {
    "heads": Model(layers=4),
    "latents": Model(layers=4, heads=None, head_bytes=24),
    "a window": Model(layers=4, window_layers=2),
    "recurrent state": Model(layers=4, state_layers=2),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("path", ["direct", "staged"])
def test_layers_arrive_while_the_next_ones_are_computed(
    pair: Pair, model: Model, path: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KVFERRY_PATH", path)
    pair.begin(model)
    request = StepRequest(pair, 1)
    request.begin_step()
    request.compute(0, 1)
    eventually("the first layer has arrived", lambda: request.arrived == [True, False, False, False])
    request.compute(2)
    eventually("the second has, too", lambda: request.arrived == [True, True, False, False])
    request.compute(3)
    time.sleep(0.1)
    assert request.arrived == [True, True, False, False], "the last range leaves with the step"
    request.end()
    request.succeed()


def test_steps_of_one_prompt_follow_each_other(pair: Pair):
    pair.begin(Model(layers=4))
    request = StepRequest(pair, 1)
    pages = request.source[0]
    for given in (pages[:3], pages[3:5], pages[5:]):
        request.steps.announce(request.sender, np.array(given), None)
        request.compute(0, 1, 2, 3)
        request.end(given)
    request.succeed()


def test_layers_leave_once_the_device_has_computed_them(pair: Pair):
    pair.begin(Model(layers=4))
    event = DeviceEvent()
    request = StepRequest(pair, 1, event)
    request.begin_step()
    request.compute(0, 1, 2, 3)
    time.sleep(0.1)
    assert request.arrived == [False] * 4
    event.happen()
    eventually("two ranges have arrived", lambda: request.arrived == [True, True, False, False])
    request.end()
    request.succeed()


def test_layers_wait_for_a_prefix_that_is_still_being_written(pair: Pair):
    """It was handed in early, and its pages come before theirs."""
    pair.begin(Model(layers=4))
    request = StepRequest(pair, 1)
    prefix = DeviceEvent()
    request.sender._early_send_wait_event = prefix
    request.sender.send(np.array(request.source[0][:3], np.int32))
    request.steps.announce(request.sender, np.array(request.source[0][3:]), None)
    request.compute(0, 1, 2, 3)
    time.sleep(0.1)
    assert request.arrived == [False] * 4
    prefix.happen()
    request.end(request.source[0][3:])
    request.succeed()


def test_other_pages_than_those_whose_layers_have_left_fail_the_request(pair: Pair):
    pair.begin(Model(layers=4))
    request = StepRequest(pair, 1)
    request.begin_step()
    request.compute(0, 1)
    request.end(request.source[0][::-1])
    assert_both_fail(pair, request, "after a step that was to compute 7 pages")


def test_a_model_that_comes_back_to_a_layer_fails_what_has_left(pair: Pair):
    pair.begin(Model(layers=4))
    request = StepRequest(pair, 1)
    request.begin_step()
    request.compute(0, 1, 2, 1)
    assert_both_fail(pair, request, "the model came back to layer 1 in one step")


def test_nothing_leaves_of_a_request_that_was_aborted_in_the_middle_of_a_step(pair: Pair):
    pair.begin(Model(layers=4))
    request = StepRequest(pair, 1)
    request.begin_step()
    request.compute(0)
    request.sender.abort()
    request.compute(1, 2, 3)
    assert_fails(request.received, request.receivers, "SGLang gave the request up")
    assert request.arrived == [False] * 4
    assert_reusable(pair, request)
