"""When pages leave a worker: not before they are computed, not before somebody asked, and not after a preemption."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
from tests.support.waiting import eventually

import kvferry
from kvferry import GroupPages, Interval
from kvferry.engines.layer_ranges import LayerRanges
from kvferry.engines.vllm.outgoing import OutgoingRequests, PagesToSend
from kvferry.errors import ChunkError, QueueFullError
from kvferry.protocol.transfer.states import TransferState


class Sender:
    """As much of a room as it takes."""

    def __init__(self, state: TransferState = TransferState.WAITING_FOR_INPUT, *, is_at_rest: bool = True) -> None:
        self.state = state
        self.is_at_rest = is_at_rest
        self.pages_reusable = False
        self.refusal: Exception | None = None
        self.handed_in: list[tuple[dict[str, tuple[int, list[int]]], bool]] = []
        self.layers: list[tuple[int, int] | None] = []
        self.aborted: list[str] = []
        self.callbacks: list[Callable[[], None]] = []

    def submit(self, parts: dict[str, GroupPages], *, last: bool, layers: dict[str, Interval] | None = None) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.layers.append(None if layers is None else (layers["kv"].start, layers["kv"].stop))
        self.handed_in.append(
            ({name: (part.start or 0, np.asarray(part.pages).tolist()) for name, part in parts.items()}, last)
        )

    def abort(self, reason: str) -> None:
        self.aborted.append(reason)

    def add_change_callback(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def change(self, **changed: Any) -> None:
        """Changes as a room does, and calls back."""
        for name, value in changed.items():
            setattr(self, name, value)
        for callback in self.callbacks:
            callback()


class Fence:
    """A point that a device gets to when the test says so."""

    def __init__(self, problem: Exception | None = None) -> None:
        self._problem = problem
        self._reached = threading.Event()

    def reach(self) -> None:
        self._reached.set()

    def synchronize(self) -> None:
        self._reached.wait()
        if self._problem is not None:
            raise self._problem


@pytest.fixture
def outgoing() -> Iterator[OutgoingRequests]:
    requests = OutgoingRequests()
    yield requests
    requests.close()


def add(
    outgoing: OutgoingRequests,
    sender: Sender,
    start: int,
    *pages: int,
    last: bool = False,
    fence: Fence | None = None,
    name: str = "r",
) -> None:
    groups = {"kv": PagesToSend(start, np.array(pages, np.int64))} if pages else {}
    outgoing.add(name, lambda: cast(kvferry.Sender, sender), groups, fence, last=last)


def test_pages_leave_at_once_where_somebody_waits_for_them(outgoing: OutgoingRequests):
    sender = Sender()
    add(outgoing, sender, 0, 7, 8)
    add(outgoing, sender, 2, 9, last=True)
    assert sender.handed_in == [({"kv": (0, [7, 8])}, False), ({"kv": (2, [9])}, True)]


def test_pages_wait_until_the_room_is_asked_for_and_leave_without_the_engine(outgoing: OutgoingRequests):
    sender = Sender(TransferState.BOOTSTRAPPING)
    add(outgoing, sender, 0, 7, 8)
    add(outgoing, sender, 2, 9)
    assert sender.handed_in == []
    sender.change(state=TransferState.WAITING_FOR_INPUT)
    eventually("they leave", lambda: sender.handed_in == [({"kv": (0, [7, 8, 9])}, False)])


def test_pages_wait_until_the_device_has_computed_them(outgoing: OutgoingRequests):
    sender, fence = Sender(), Fence()
    add(outgoing, sender, 0, 7, fence=fence)
    assert sender.handed_in == []
    fence.reach()
    eventually("they leave", lambda: len(sender.handed_in) == 1)


def test_what_one_step_has_computed_leaves_while_the_device_is_at_the_next(outgoing: OutgoingRequests):
    sender, first, second = Sender(), Fence(), Fence()
    add(outgoing, sender, 0, 7, 8, fence=first)
    add(outgoing, sender, 2, 9, last=True, fence=second)
    first.reach()
    eventually("the first leave", lambda: sender.handed_in == [({"kv": (0, [7, 8])}, False)])
    second.reach()
    eventually("the rest leaves", lambda: sender.handed_in[1:] == [({"kv": (2, [9])}, True)])


def test_a_device_that_fails_fails_what_it_was_to_compute_and_nothing_else(
    outgoing: OutgoingRequests, caplog: pytest.LogCaptureFixture
):
    sender, other, broken = Sender(), Sender(), Fence(RuntimeError("an illegal memory access"))
    add(outgoing, sender, 0, 7, fence=broken)
    broken.reach()
    eventually("it is given up", lambda: sender.aborted)
    assert sender.aborted == ["the device failed: an illegal memory access"]
    assert "request r cannot be sent: the device failed: an illegal memory access" in caplog.text
    fence = Fence()
    add(outgoing, other, 0, 8, fence=fence, name="s")
    fence.reach()
    eventually("the other leaves", lambda: other.handed_in)
    assert not sender.handed_in


def test_pages_of_a_preempted_request_that_the_device_computes_later_do_not_leave(outgoing: OutgoingRequests):
    sender, first, again = Sender(), Fence(), Fence()
    add(outgoing, sender, 0, 7, 8, fence=first)
    outgoing.preempt({"r"})
    add(outgoing, sender, 0, 17, fence=again)
    first.reach()
    again.reach()
    eventually("what came again leaves", lambda: sender.handed_in)
    assert sender.handed_in == [({"kv": (0, [17])}, False)]


def test_nothing_looks_at_requests_of_which_nothing_happens(outgoing: OutgoingRequests):
    """A thousand wait for the decode side; one of them is asked for, and only that one is looked at."""
    looks: collections.Counter[str] = collections.Counter()

    class Counted(Sender):
        name = ""

        def __getattribute__(self, attribute: str) -> Any:
            if attribute == "state":
                looks[super().__getattribute__("name")] += 1
            return super().__getattribute__(attribute)

    senders = [Counted(TransferState.BOOTSTRAPPING) for _ in range(1000)]
    for number, sender in enumerate(senders):
        sender.name = str(number)
        add(outgoing, sender, 0, 7, last=True, name=sender.name)
    looks.clear()
    time.sleep(0.02)
    assert not looks
    senders[500].change(state=TransferState.WAITING_FOR_INPUT)
    eventually("its pages leave", lambda: senders[500].handed_in)
    assert outgoing.take_ended() == {}
    assert set(looks) == {"500"}


def test_what_vllm_keeps_for_us_leaves_though_nobody_has_asked_yet(outgoing: OutgoingRequests):
    sender = Sender(TransferState.BOOTSTRAPPING)
    add(outgoing, sender, 0, 7, last=True)
    assert sender.handed_in == []
    outgoing.keep({"r", "another"})
    assert sender.handed_in == [({"kv": (0, [7])}, True)]


def test_what_has_not_left_when_its_request_is_preempted_comes_again(outgoing: OutgoingRequests):
    sender = Sender(TransferState.BOOTSTRAPPING)
    add(outgoing, sender, 0, 7, 8, last=True)
    outgoing.preempt({"r"})
    sender.state = TransferState.WAITING_FOR_INPUT
    add(outgoing, sender, 0, 17)
    add(outgoing, sender, 1, 18, last=True)
    assert sender.handed_in == [({"kv": (0, [17])}, False), ({"kv": (1, [18])}, True)]
    assert not sender.aborted


def test_what_has_left_before_a_preemption_is_not_sent_twice(outgoing: OutgoingRequests):
    sender = Sender()
    add(outgoing, sender, 0, 7, 8)
    outgoing.preempt({"r"})
    add(outgoing, sender, 0, 17, 18, 19)
    add(outgoing, sender, 3, last=True)
    assert sender.handed_in == [({"kv": (0, [7, 8])}, False), ({"kv": (2, [19])}, False), ({}, True)]
    assert not sender.aborted


def test_a_preemption_after_all_has_left_changes_nothing(outgoing: OutgoingRequests):
    """The other ranks of the engine may not be so far: vLLM computes it again, and here it is of no use."""
    sender = Sender(TransferState.TRANSFERRING)
    add(outgoing, sender, 0, 7, 8, last=True)
    outgoing.preempt({"r"})
    add(outgoing, sender, 0, 17, 18)
    add(outgoing, sender, 2, last=True)
    assert sender.handed_in == [({"kv": (0, [7, 8])}, True)]
    assert not sender.aborted


def test_a_preemption_while_pages_are_read_fails_the_request(outgoing: OutgoingRequests):
    """Whoever gets the blocks writes to them at once."""
    sender = Sender(is_at_rest=False)
    add(outgoing, sender, 0, 7, 8)
    outgoing.preempt({"r"})
    assert len(sender.aborted) == 1


@pytest.fixture
def told_late() -> Iterator[OutgoingRequests]:
    """As with vLLM's second model runner, where blocks are cleared for others before a preemption is told of."""
    made = OutgoingRequests(is_told_late=True)
    yield made
    made.close()


def test_told_late_a_preemption_fails_what_was_read_since_the_last_step(told_late: OutgoingRequests):
    """It may have been read when the blocks were cleared for others already."""
    sender = Sender()
    add(told_late, sender, 0, 7, 8)
    told_late.preempt({"r"})
    assert len(sender.aborted) == 1


def test_told_late_a_preemption_spares_what_was_read_before(told_late: OutgoingRequests):
    sender = Sender(is_at_rest=False)
    add(told_late, sender, 0, 7, 8)
    told_late.step_ended()
    sender.is_at_rest = True
    told_late.step_ended()
    told_late.preempt({"r"})
    assert not sender.aborted


def test_told_late_a_preemption_fails_what_was_still_read_when_the_last_step_ended(told_late: OutgoingRequests):
    sender = Sender(is_at_rest=False)
    add(told_late, sender, 0, 7, 8)
    told_late.step_ended()
    sender.is_at_rest = True
    told_late.preempt({"r"})
    assert len(sender.aborted) == 1


def test_the_first_pages_of_a_window_are_not_those_of_the_request(outgoing: OutgoingRequests):
    sender = Sender()
    add(outgoing, sender, 5, 7, 8)
    add(outgoing, sender, 5, 7, 8, 9, last=True)
    assert sender.handed_in == [({"kv": (5, [7, 8])}, False), ({"kv": (7, [9])}, True)]


@pytest.mark.parametrize("state", list(TransferState))
def test_only_a_request_that_nobody_has_asked_for_is_given_up_for_its_memory(
    outgoing: OutgoingRequests, state: TransferState
):
    sender = Sender(state)
    add(outgoing, sender, 0, 7, last=True)
    is_unasked = state is TransferState.BOOTSTRAPPING
    assert outgoing.give_up("r", "needed", unless_asked_for=True) is is_unasked
    assert sender.aborted == (["needed"] if is_unasked else [])
    assert not outgoing.give_up("unknown", "needed", unless_asked_for=True)


def test_a_full_queue_is_tried_again(outgoing: OutgoingRequests):
    sender = Sender()
    sender.refusal = QueueFullError("full")
    add(outgoing, sender, 0, 7)
    sender.change(refusal=None)
    eventually("they leave", lambda: len(sender.handed_in) == 1)
    assert not sender.aborted


def test_pages_that_are_refused_fail_the_request(outgoing: OutgoingRequests, caplog: pytest.LogCaptureFixture):
    sender = Sender()
    sender.refusal = ChunkError("no such order")
    add(outgoing, sender, 0, 7)
    assert sender.aborted[0] == "no such order"
    assert "request r cannot be sent: no such order" in caplog.text


def test_a_room_that_cannot_be_opened_is_not_known(outgoing: OutgoingRequests):
    def refuse() -> kvferry.Sender:
        raise QueueFullError("no room")

    with pytest.raises(QueueFullError):
        outgoing.add("r", refuse, {}, None, last=True)
    outgoing.keep({"r"})
    assert outgoing.take_ended() == {}


def test_a_request_has_ended_when_vllm_is_through_with_it_and_nobody_reads_its_pages(outgoing: OutgoingRequests):
    sender = Sender()
    add(outgoing, sender, 0, 7, last=True)
    outgoing.keep({"r"})
    assert outgoing.take_ended() == {}
    sender.change(pages_reusable=True)
    assert list(outgoing.take_ended()) == ["r"]
    assert outgoing.take_ended() == {}


def test_an_end_that_comes_before_vllm_is_through_with_the_request_is_reported_when_it_is(outgoing: OutgoingRequests):
    sender = Sender()
    add(outgoing, sender, 0, 7, last=True)
    sender.change(pages_reusable=True)
    assert outgoing.take_ended() == {}, "vLLM would not know why it is told"
    outgoing.keep({"r"})
    assert list(outgoing.take_ended()) == ["r"]
    assert outgoing.take_ended() == {}


def test_a_request_that_has_failed_takes_no_more_pages(outgoing: OutgoingRequests):
    sender = Sender(TransferState.FAILED)
    add(outgoing, sender, 0, 7, last=True)
    outgoing.give_up("r", "nobody wants it")
    assert sender.handed_in == []
    assert sender.aborted == ["nobody wants it"]


# ---- layers that leave in ranges ------------------------------------------------------------------------------------


@pytest.fixture
def in_thirds() -> Iterator[OutgoingRequests]:
    """Of six layers."""
    requests = OutgoingRequests(LayerRanges((2, 4), {"kv": 6}))
    yield requests
    requests.close()


def add_layers(
    outgoing: OutgoingRequests, sender: Sender, start: int, *pages: int, ranges: int, fence: Fence | None = None
) -> None:
    groups = {"kv": PagesToSend(start, np.array(pages, np.int64))} if pages else {}
    outgoing.add("r", lambda: cast(kvferry.Sender, sender), groups, fence, last=False, ranges=ranges)


def test_layers_leave_while_the_next_ones_are_computed(in_thirds: OutgoingRequests):
    sender = Sender()
    add_layers(in_thirds, sender, 0, 7, 8, ranges=1)
    add_layers(in_thirds, sender, 0, 7, 8, ranges=2)
    assert (sender.layers, len(sender.handed_in)) == ([(0, 2), (2, 4)], 2)
    add(in_thirds, sender, 0, 7, 8)
    add(in_thirds, sender, 2, 9, last=True)
    assert sender.layers == [(0, 2), (2, 4), (4, 6), None]
    assert sender.handed_in == [({"kv": (0, [7, 8])}, False)] * 3 + [({"kv": (2, [9])}, True)]


def test_the_last_layers_of_the_last_pages_end_the_request(in_thirds: OutgoingRequests):
    sender = Sender()
    add_layers(in_thirds, sender, 0, 7, ranges=2)
    add(in_thirds, sender, 0, 7, last=True)
    assert (sender.layers, [last for _, last in sender.handed_in]) == ([(0, 4), (4, 6)], [False, True])


def test_layers_that_nobody_has_asked_for_leave_together(in_thirds: OutgoingRequests):
    sender = Sender(TransferState.BOOTSTRAPPING)
    add_layers(in_thirds, sender, 0, 7, ranges=1)
    add(in_thirds, sender, 0, 7)
    add(in_thirds, sender, 1, 8)
    sender.change(state=TransferState.WAITING_FOR_INPUT)
    eventually("they leave", lambda: sender.handed_in == [({"kv": (0, [7, 8])}, False)])
    assert sender.layers == [None]


def test_a_room_that_is_asked_for_amid_a_step_gets_the_layers_so_far_and_then_the_others(in_thirds: OutgoingRequests):
    sender = Sender(TransferState.BOOTSTRAPPING)
    add_layers(in_thirds, sender, 0, 7, ranges=1)
    add_layers(in_thirds, sender, 0, 7, ranges=2)
    sender.change(state=TransferState.WAITING_FOR_INPUT)
    eventually("the layers so far leave", lambda: sender.layers == [(0, 4)])
    add(in_thirds, sender, 0, 7)
    assert sender.layers == [(0, 4), (4, 6)]


def test_layers_wait_until_the_device_has_computed_them(in_thirds: OutgoingRequests):
    sender, early, late = Sender(), Fence(), Fence()
    add_layers(in_thirds, sender, 0, 7, ranges=1, fence=early)
    add(in_thirds, sender, 0, 7, last=True, fence=late)
    assert not sender.handed_in
    early.reach()
    eventually("the first layers leave", lambda: sender.layers == [(0, 2)])
    late.reach()
    eventually("the others leave", lambda: sender.layers == [(0, 2), (2, 6)])
    assert [last for _, last in sender.handed_in] == [False, True]


def test_a_preemption_with_some_layers_gone_fails_the_request(in_thirds: OutgoingRequests):
    """The same pages need not come again: another step may compute more of them, or fewer."""
    sender, late = Sender(), Fence()
    add_layers(in_thirds, sender, 0, 7, ranges=1)
    add(in_thirds, sender, 0, 7, fence=late)
    in_thirds.preempt(["r"])
    assert sender.aborted == ["vLLM preempted the request while its pages were being read"]
    late.reach()


def test_a_step_without_new_pages_adds_none_until_it_ends_the_request(in_thirds: OutgoingRequests):
    sender = Sender()
    add(in_thirds, sender, 0, 7)
    add_layers(in_thirds, sender, 0, 7, ranges=1)
    add_layers(in_thirds, sender, 0, 7, ranges=2)
    add(in_thirds, sender, 0, 7, last=True)
    assert sender.handed_in == [({"kv": (0, [7])}, False), ({}, True)]
