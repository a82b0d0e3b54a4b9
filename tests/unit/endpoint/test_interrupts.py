"""Ctrl-C within a call: what nobody was handed ends by itself, and its number and its pages come back."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from tests.support.engines import WAIT_S, Requests
from tests.support.steps import interrupted_at
from tests.support.waiting import eventually

from kvferry import DecodeEndpoint, PrefillEndpoint, Receiver, TransferState
from kvferry.errors import ChunkError, KVFerryError
from kvferry.testing.probe import probe

PAGES = [0, 1, 2]


class Both:
    """A connected pair, and requests of three pages."""

    def __init__(self, requests: Requests) -> None:
        self.engine = requests.prefill.name
        self.prefill: PrefillEndpoint = requests.prefill.endpoints[0]
        self.decode: DecodeEndpoint = requests.decode.endpoints[0]
        requests.connect()

    def open_decode(self, room: int) -> Receiver:
        return self.decode.open(room, PAGES, engine=self.engine)

    def awaited(self, room: int) -> Receiver:
        """Opens a room on the decode side, and waits until the prefill side knows."""
        receiver = self.open_decode(room)
        eventually("the prefill rank knows of it", lambda: self.prefill.status().load.pending_rooms == 1)
        return receiver

    def send(self, room: int) -> None:
        """Sends a room that is open on the decode side, to its end."""
        sender = self.prefill.open(room)
        sender.submit(PAGES, last=True)
        sender.wait(WAIT_S)

    def at_rest(self) -> None:
        """Waits until nothing is open on either side."""
        eventually("no room is open", lambda: not (self.decode.open_rooms or self.prefill.open_rooms))


@pytest.fixture
def both(pair: Callable[..., Requests]) -> Both:
    return Both(pair(workers=1, queues=1, waiting_timeout_s=WAIT_S))


def interruptions(call: Callable[[int], object]) -> Iterator[int]:
    """Calls something with one number after the other, interrupted ever later; yields those that were."""
    for number in itertools.count(1):
        if not interrupted_at(number, partial(call, number)):
            assert number > 3, "nothing was interrupted"
            return
        yield number


def test_a_decode_room_whose_opening_is_interrupted_anywhere_ends_and_its_number_and_pages_come_back(both: Both):
    for room in interruptions(both.open_decode):
        both.at_rest()
        both.open_decode(room).abort()  # which would be refused if the room were open still
        both.at_rest()
    receiver = both.open_decode(100_000)
    both.send(100_000)
    receiver.wait(WAIT_S)
    eventually("the last one is open on this side alone", lambda: both.decode.open_rooms == 1)


def test_a_prefill_room_whose_opening_is_interrupted_anywhere_ends_and_so_does_the_one_that_waits_for_it(both: Both):
    for room in itertools.count(1):
        receiver = both.awaited(room)
        if not interrupted_at(room, partial(both.prefill.open, room)):
            break
        eventually("no room is left of it", lambda: not both.prefill.open_rooms)
        eventually(
            "the decode side's has failed, or waits as before",
            lambda receiver=receiver: receiver.state.is_final or both.prefill.status().load.pending_rooms,
        )
        if receiver.state.is_final:
            assert isinstance(receiver.error, KVFerryError)
            assert "interrupted" in str(receiver.error)
            assert receiver.wait_pages_reusable(WAIT_S)
            receiver = both.open_decode(room)
        both.send(room)
        receiver.wait(WAIT_S)
        both.at_rest()


def test_a_chunk_whose_submitting_is_interrupted_anywhere_fails_its_room_or_is_sent_once(both: Both):
    for room in itertools.count(1):
        receiver, sender = both.open_decode(room), both.prefill.open(room)
        if not interrupted_at(room, partial(sender.submit, PAGES, last=True)):
            break
        with contextlib.suppress(ChunkError):  # where it was taken
            sender.submit(PAGES, last=True)  # it is sent where nothing had happened yet, and dropped where all fails
        eventually("both have ended", lambda r=receiver, s=sender: r.state.is_final and s.state.is_final)
        assert receiver.state is sender.state
        assert sender.error is None or "interrupted" in str(sender.error)
        both.at_rest()
    assert room > 3


def test_an_abort_that_is_interrupted_anywhere_is_finished_by_the_next(both: Both):
    for side in ("prefill", "decode"):
        for number in itertools.count(1):
            room = number if side == "prefill" else 10_000 + number
            receiver, sender = both.open_decode(room), both.prefill.open(room)
            transfer = sender if side == "prefill" else receiver
            is_interrupted = interrupted_at(number, transfer.abort)
            transfer.abort()
            both.at_rest()
            assert receiver.state is TransferState.FAILED
            if not is_interrupted:
                break


def test_a_refusal_that_is_interrupted_anywhere_leaves_no_decode_room_for_ever(pair: Callable[..., Requests]):
    both = Both(pair(workers=1, queues=1, bootstrap_timeout_s=1.0))
    waiting = []
    for room in itertools.count(1):
        waiting.append(both.awaited(room))
        if not interrupted_at(room, partial(both.prefill.refuse, room, "no memory")):
            break
        both.prefill.refuse(room, "no memory")
        eventually("none is pending", lambda: not both.prefill.status().load.pending_rooms)
    both.at_rest()
    assert all(receiver.state is TransferState.FAILED for receiver in waiting)


def test_a_connect_that_is_interrupted_anywhere_leaves_nobody_waiting(both: Both):
    def connect(number: int) -> None:
        both.decode.connect(both.engine, timeout_s=WAIT_S)

    for _ in interruptions(connect):
        links = probe(both.decode).links
        assert not links.are_awaited
    receiver = both.open_decode(1)
    both.send(1)
    receiver.wait(WAIT_S)
