"""Which layers of a step's pages leave while SGLang's model reads one layer after the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvferry import Axis, Component, Interval, RankLayout, shard_from_tensors
from kvferry.engines.layer_ranges import LayerRanges
from kvferry.engines.sglang.layer_steps import LayerSteps, announce


@dataclass
class Pool:
    """SGLang's: it asks a counter before a layer is read."""

    start_layer: int = 0
    layer_transfer_counter: Any = None

    def register_layer_transfer_counter(self, counter: Any) -> None:
        self.layer_transfer_counter = counter

    def read(self, *layers: int) -> None:
        for layer in layers:
            self.layer_transfer_counter.wait_until(layer - self.start_layer)


@dataclass
class Sender:
    kv_mgr: Any = None
    is_ready: bool = True
    pages: list[list[int]] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def begin_step(self, pages: NDArray[Any], ready: Any) -> bool:
        assert ready is None
        if self.is_ready:
            self.pages.append(pages.tolist())
        return self.is_ready

    def layers_computed(self, ranges: int, event: Any) -> None:
        assert event is None
        self.sent.append(ranges)

    def give_step_up(self, reason: str) -> None:
        self.reasons.append(reason)


PAGES = np.arange(4)


def ranges(first: int, stop: int, most: int) -> LayerRanges:
    component = Component(name="key", axes=(Axis("layer", 12), Axis("content", 2)), dtype="uint8")
    tensors = [np.zeros((4, 8, 2), np.uint8) for _ in range(first, stop)]
    held = {"layer": Interval(first, stop)}
    shard = shard_from_tensors(component, tensors, dims=("page", "token", "content"), held=held)
    return LayerRanges.of(RankLayout(shards=(shard,)), most)


def steps(pool: Pool, layer_ids: list[int], *, first: int = 0, most: int = 3) -> LayerSteps:
    return LayerSteps(pool, ranges(first, first + len(layer_ids), most), layer_ids, None)


def test_a_range_leaves_when_a_layer_behind_it_is_read():
    pool, sender = Pool(), Sender()
    follows = steps(pool, [*range(6)])
    follows.announce(sender, PAGES, None)
    seen = []
    for layer in range(6):
        pool.read(layer, layer)  # its keys, and its values
        seen.append(list(sender.sent))
    assert seen == [[], [], [1], [1], [1, 2], [1, 2]], "the last range leaves with the step"


def test_layers_without_pages_say_how_far_the_model_has_come():
    """As in a hybrid: layers 0, 4 and 8 alone have keys and values in pages; others are read, too."""
    pool, sender = Pool(), Sender()
    follows = steps(pool, [0, 4, 8])
    follows.announce(sender, PAGES, None)
    pool.read(0, 1, 2)
    assert sender.sent == [1]
    pool.read(4)
    assert sender.sent == [1]
    pool.read(5, 8, 9)
    assert sender.sent == [1, 2]


def test_the_layers_of_a_pipeline_stage_have_the_numbers_of_the_model():
    pool, sender = Pool(start_layer=6), Sender()
    follows = steps(pool, [6, 7, 8], first=6)
    follows.announce(sender, PAGES, None)
    pool.read(6)
    assert sender.sent == []
    pool.read(7, 8)
    assert sender.sent == [1, 2]


def test_each_step_begins_anew():
    pool, first, second, idle = Pool(), Sender(), Sender(), Sender(is_ready=False)
    follows = steps(pool, [*range(3)])
    follows.announce(first, PAGES, None)
    pool.read(0, 1, 2)
    pool.read(0, 1, 2)  # a step of which nothing was announced, as where data-parallel ranks wait for each other
    follows.announce(second, PAGES, None)
    follows.announce(idle, PAGES, None)
    pool.read(0, 1, 2)
    assert (first.sent, second.sent, idle.sent) == ([1, 2], [1, 2], [])


def test_a_model_that_comes_back_to_a_layer_is_noticed_and_sends_nothing_early_any_more(
    caplog: pytest.LogCaptureFixture,
):
    pool, sender, later = Pool(), Sender(), Sender()
    follows = steps(pool, [*range(3)])
    follows.announce(sender, PAGES, None)
    pool.read(0, 1, 2, 1)
    assert ["the model came back to layer 1" in reason for reason in sender.reasons] == [True]
    assert "came back to layer 1" in caplog.text
    follows.announce(later, PAGES, None)
    pool.read(0, 1, 2)
    assert (later.pages, later.sent) == ([], [])


def test_sglangs_own_counter_is_still_asked_whenever_it_comes():
    """A cache on the host brings one of its own: caches are loaded layer by layer, and the model waits for it."""

    class Counter:
        consumer_index = 7

        def __init__(self) -> None:
            self.asked: list[int] = []

        def wait_until(self, threshold: int) -> None:
            self.asked.append(threshold)

    before, after = Counter(), Counter()
    pool, sender = Pool(), Sender()
    pool.register_layer_transfer_counter(before)
    follows = steps(pool, [*range(3)])
    pool.read(0, 1)
    assert before.asked == [0, 1]
    assert pool.layer_transfer_counter.consumer_index == 7
    pool.register_layer_transfer_counter(after)
    follows.announce(sender, PAGES, None)
    pool.read(0, 1)
    assert (after.asked, sender.sent) == ([0, 1], [1])


# ---- which pages a step will compute --------------------------------------------------------------------------------


class Announced:
    def __init__(self) -> None:
        self.pages: list[list[int]] = []
        self.ready: list[Any] = []

    def announce(self, sender: Any, pages: NDArray[Any], ready: Any) -> None:
        del sender
        self.pages.append(pages.tolist())
        self.ready.append(ready)


class OnADevice(torch.Tensor):
    """Numbers that the scheduler would have to wait for."""

    is_cuda = True

    def cpu(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("the scheduler waits for the device")


ROWS = torch.arange(80, 200).reshape(1, -1)


def announced(follows: Announced, *, rows: torch.Tensor = ROWS, may_leave: bool = True, **changes: Any) -> None:
    """Announces a prompt of 40 tokens in pages of 8 tokens, whose numbers are 10, 11 and so on."""
    request = {
        "disagg_kv_sender": SimpleNamespace(kv_mgr=SimpleNamespace(layer_steps=follows)),
        "pending_bootstrap": False,
        "start_send_idx": 0,
        "extend_end": 40,
        "prefix_len": 0,
        "origin_input_ids": [0] * 40,
        "kv": SimpleNamespace(req_pool_idx=0),
        **changes,
    }
    scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(page_size=8, translate_kv_indices_for_transfer=lambda rows: rows),
        req_to_token_pool=SimpleNamespace(req_to_token=rows),
    )
    announce(None, scheduler, SimpleNamespace(**request), allow_send=may_leave)


@pytest.mark.parametrize(
    ("changes", "pages"),
    [
        ({}, [10, 11, 12, 13, 14]),
        ({"origin_input_ids": [0] * 37, "extend_end": 37}, [10, 11, 12, 13, 14]),  # the last page may be part full
        ({"extend_end": 21}, [10, 11]),  # but not one that the next step fills
        ({"start_send_idx": 16, "prefix_len": 21, "extend_end": 40}, [12, 13, 14]),
        ({"start_send_idx": 24, "prefix_len": 16}, [13, 14]),  # the decode side has more than this one
        ({"extend_end": 41}, [10, 11, 12, 13, 14]),  # a token that was generated before the request was taken back
    ],
)
def test_the_pages_of_a_step_are_those_that_sglang_hands_in_after_it(changes: dict[str, Any], pages: list[int]):
    follows = Announced()
    announced(follows, **changes)
    assert (follows.pages, follows.ready) == ([pages], [None])


def test_nobody_waits_for_page_numbers_on_a_device(monkeypatch: pytest.MonkeyPatch):
    """And whoever waits for the event behind them sleeps."""
    recorded, empty = list[object](), torch.empty
    event = SimpleNamespace()
    event.record = lambda: recorded.append(event)
    monkeypatch.setattr(torch.cuda, "Event", lambda *, blocking=False: event if blocking else None)
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory, **how: empty(*sizes, **how))
    follows = Announced()
    announced(follows, rows=ROWS.as_subclass(OnADevice))
    assert (follows.pages, follows.ready, recorded) == ([[10, 11, 12, 13, 14]], [event], [event])


@pytest.mark.parametrize(
    "changes",
    [
        {"extend_end": 7},
        {"start_send_idx": 8, "prefix_len": 16},  # the step before has not been handed in
        {"pending_bootstrap": True},
        {"disagg_kv_sender": None},
        {"disagg_kv_sender": SimpleNamespace(kv_mgr=SimpleNamespace(layer_steps=None))},
        {"may_leave": False},
    ],
)
def test_a_step_is_not_announced_where_its_pages_may_not_leave(changes: dict[str, Any]):
    follows = Announced()
    announced(follows, **changes)
    assert follows.pages == []
