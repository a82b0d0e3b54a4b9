"""When pages leave a worker: not before they are computed, not before somebody asked, and not after a preemption."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from tests.support.waiting import eventually

from kvferry.engines.vllm.outgoing import OutgoingRequests, PagesToSend
from kvferry.errors import ChunkError, QueueFullError
from kvferry.protocol.states import TransferState


@dataclass
class Sender:
    """As much of a room as it takes."""

    state: TransferState = TransferState.WAITING_FOR_INPUT
    is_at_rest: bool = True
    pages_reusable: bool = False
    refusal: Exception | None = None
    handed_in: list[tuple[dict[str, tuple[int, list[int]]], bool]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    def submit(self, parts, *, last):
        if self.refusal is not None:
            raise self.refusal
        self.handed_in.append(
            ({name: (part.start, np.asarray(part.pages).tolist()) for name, part in parts.items()}, last)
        )

    def abort(self, reason):
        self.aborted.append(reason)


@pytest.fixture
def outgoing():
    requests = OutgoingRequests()
    yield requests
    requests.close()


def computed() -> bool:
    return True


def add(outgoing: OutgoingRequests, sender: Sender, start: int, *pages: int, last: bool = False, fence=computed):
    groups = {"kv": PagesToSend(start, pages)} if pages else {}
    outgoing.add("r", lambda: sender, groups, fence, last=last)  # type: ignore[arg-type, return-value]


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
    sender.state = TransferState.WAITING_FOR_INPUT
    eventually("they leave", lambda: sender.handed_in == [({"kv": (0, [7, 8, 9])}, False)])


def test_pages_wait_until_the_device_has_computed_them(outgoing: OutgoingRequests):
    sender = Sender()
    done: list[bool] = []
    add(outgoing, sender, 0, 7, fence=lambda: bool(done))
    assert sender.handed_in == []
    done.append(True)
    eventually("they leave", lambda: len(sender.handed_in) == 1)


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


def test_a_preemption_while_pages_are_read_fails_the_request(outgoing: OutgoingRequests):
    """Whoever gets the blocks writes to them at once."""
    sender = Sender(is_at_rest=False)
    add(outgoing, sender, 0, 7, 8)
    outgoing.preempt({"r"})
    assert len(sender.aborted) == 1


def test_the_first_pages_of_a_window_are_not_those_of_the_request(outgoing: OutgoingRequests):
    sender = Sender()
    add(outgoing, sender, 5, 7, 8)
    add(outgoing, sender, 5, 7, 8, 9, last=True)
    assert sender.handed_in == [({"kv": (5, [7, 8])}, False), ({"kv": (7, [9])}, True)]


def test_a_full_queue_is_tried_again(outgoing: OutgoingRequests):
    sender = Sender(refusal=QueueFullError("full"))
    add(outgoing, sender, 0, 7)
    sender.refusal = None
    eventually("they leave", lambda: len(sender.handed_in) == 1)
    assert not sender.aborted


def test_pages_that_are_refused_fail_the_request(outgoing: OutgoingRequests, caplog):
    sender = Sender(refusal=ChunkError("no such order"))
    add(outgoing, sender, 0, 7)
    assert sender.aborted[0] == "no such order"
    assert "request r cannot be sent: no such order" in caplog.text


def test_a_room_that_cannot_be_opened_is_not_known(outgoing: OutgoingRequests):
    def refuse():
        raise QueueFullError("no room")

    with pytest.raises(QueueFullError):
        outgoing.add("r", refuse, {}, computed, last=True)
    outgoing.keep({"r"})
    assert outgoing.take_ended() == {}


def test_a_request_has_ended_when_vllm_is_through_with_it_and_nobody_reads_its_pages(outgoing: OutgoingRequests):
    sender = Sender(pages_reusable=True)
    add(outgoing, sender, 0, 7, last=True)
    assert outgoing.take_ended() == {}, "vLLM would not know why it is told"
    sender.pages_reusable = False
    outgoing.keep({"r"})
    assert outgoing.take_ended() == {}
    sender.pages_reusable = True
    assert list(outgoing.take_ended()) == ["r"]
    assert outgoing.take_ended() == {}


def test_a_request_that_has_failed_takes_no_more_pages(outgoing: OutgoingRequests):
    sender = Sender(TransferState.FAILED)
    add(outgoing, sender, 0, 7, last=True)
    outgoing.give_up("r", "nobody wants it")
    assert sender.handed_in == []
    assert sender.aborted == ["nobody wants it"]
