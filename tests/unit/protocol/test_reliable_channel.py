"""Numbered messages come once and in order, whatever connections do."""

from __future__ import annotations

from collections import deque

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.tiers import examples

from kvferry.protocol.links import reliable_channel
from kvferry.protocol.links.reliable_channel import ReliableChannel
from kvferry.protocol.wire.messages import Numbered, Ping, Pong


def body(text: str) -> msgspec.Raw:
    return msgspec.Raw(text.encode())


def texts(bodies: list[msgspec.Raw]) -> list[str]:
    return [bytes(each).decode() for each in bodies]


def numbers(sent: list[Numbered]) -> list[int]:
    return [each.number for each in sent]


def test_messages_are_numbered_from_one_on_and_come_in_order():
    here, there = ReliableChannel(7), ReliableChannel(7)
    first, second = here.send(body("a")) + here.send(body("b"))
    assert (first.epoch, first.number, second.number, here.last_number, here.sent) == (7, 1, 2, 2, 2)
    assert texts(there.receive(first)) == ["a"]
    assert texts(there.receive(second)) == ["b"]
    assert there.received == 2


def test_one_that_comes_again_or_too_early_does_not_count():
    here, there = ReliableChannel(7), ReliableChannel(7)
    first, second = here.send(body("a")) + here.send(body("b"))
    assert there.receive(second) == []
    assert texts(there.receive(first)) == ["a"]
    assert there.receive(first) == []
    assert texts(there.receive(second)) == ["b"]


def test_one_of_another_attempt_to_attach_does_not_count():
    (message,) = ReliableChannel(6).send(body("a"))
    there = ReliableChannel(7)
    assert there.receive(message) == []
    assert there.received == 0


def test_what_is_not_acknowledged_is_sent_again_after_a_break():
    here = ReliableChannel(7)
    for text in "abc":
        here.send(body(text))
    assert here.acknowledged(1) == []
    again = here.resend()
    assert (numbers(again), texts([each.body for each in again])) == ([2, 3], ["b", "c"])
    here.acknowledged(3)
    assert here.resend() == []


def test_an_acknowledgement_that_is_late_or_impossible_changes_nothing():
    here = ReliableChannel(7)
    here.send(body("a"))
    here.acknowledged(1)
    here.send(body("b"))
    here.acknowledged(0)
    here.acknowledged(1)
    assert numbers(here.resend()) == [2]
    here.acknowledged(99)
    assert here.resend() == []
    assert numbers(here.send(body("c"))) == [3]


def test_no_more_than_a_window_is_on_its_way(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reliable_channel, "WINDOW", 2)
    here = ReliableChannel(7)
    assert [numbers(here.send(body(text))) for text in "abcd"] == [[1], [2], [], []]
    assert (here.sent, here.last_number) == (2, 4)
    assert numbers(here.resend()) == [1, 2]
    assert numbers(here.acknowledged(1)) == [3]
    assert numbers(here.acknowledged(3)) == [4]


def test_a_message_that_is_taken_back_before_it_comes_does_not_count():
    here, there = ReliableChannel(7), ReliableChannel(7)
    first, second = here.send(body("a")) + here.send(body("b"))
    assert there.take_back(2)
    assert there.take_back(2), "the same again"
    assert texts(there.receive(first)) == ["a"]
    assert not there.take_back(1), "it has come"
    assert there.receive(second) == []
    assert there.received == 2
    assert not there.take_back(2)


def test_what_waits_for_the_window_is_taken_back_too(monkeypatch: pytest.MonkeyPatch):
    """Its pages come back with the answer: if it counted later, they would be written to."""
    monkeypatch.setattr(reliable_channel, "WINDOW", 2)
    here, there = ReliableChannel(7), ReliableChannel(7)
    sent = [message for text in "abcd" for message in here.send(body(text))]
    assert numbers(sent) == [1, 2]
    assert there.take_back(4)
    for message in sent:
        there.receive(message)
    third, fourth = here.acknowledged(2)
    assert texts(there.receive(third)) == ["c"]
    assert there.receive(fourth) == []


def test_what_a_stranger_takes_back_takes_little_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reliable_channel, "_MOST_TAKEN_BACK", 10)
    there = ReliableChannel(7)
    for number in range(1, 100):
        there.take_back(number)
    assert len(there.taken_back) == 10


def test_an_acknowledgement_is_owed_after_a_part_of_the_window(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reliable_channel, "_ACKNOWLEDGED_UNASKED", 2)
    here, there = ReliableChannel(7), ReliableChannel(7)
    for text in "ab":
        assert not there.owes_acknowledgement
        for message in here.send(body(text)):
            there.receive(message)
    assert there.owes_acknowledgement
    assert there.ping().received == 2
    assert not there.owes_acknowledgement


def test_a_closed_channel_neither_sends_nor_takes_and_knows_what_has_come():
    here, there = ReliableChannel(7), ReliableChannel(7)
    (message,) = here.send(body("a"))
    there.receive(message)
    late = here.send(body("b"))
    for channel in (here, there):
        channel.close()
    assert here.send(body("c")) == here.resend() == here.acknowledged(1) == []
    assert there.receive(late[0]) == []
    assert not there.take_back(1)
    assert there.take_back(2)


class OverALossyLine(RuleBasedStateMachine):
    """Two ends, and between them a line that keeps the order until it breaks, and then loses what it likes.

    Heartbeats go through the same line.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = ReliableChannel(7), ReliableChannel(7)
        self.to_down: deque[Numbered | Ping] = deque()
        self.to_up: deque[Numbered | Pong] = deque()
        self.handed_in: dict[str, list[str]] = {"up": [], "down": []}
        self.taken: dict[str, list[str]] = {"up": [], "down": []}

    @rule(side=st.sampled_from(["up", "down"]))
    def send(self, side: str) -> None:
        text = f"{side}{len(self.handed_in[side])}"
        self.handed_in[side].append(text)
        channel, line = (self.up, self.to_down) if side == "up" else (self.down, self.to_up)
        line.extend(channel.send(body(text)))

    @rule()
    def heartbeat(self) -> None:
        self.to_down.append(self.up.ping())

    @precondition(lambda self: self.to_down)
    @rule()
    def arrives_down(self) -> None:
        match self.to_down.popleft():
            case Numbered() as message:
                self.taken["down"] += texts(self.down.receive(message))
            case Ping() as ping:
                self.to_up.extend(self.down.answer(ping, "down"))

    @precondition(lambda self: self.to_up)
    @rule()
    def arrives_up(self) -> None:
        match self.to_up.popleft():
            case Numbered() as message:
                self.taken["up"] += texts(self.up.receive(message))
            case Pong() as pong:
                self.to_down.extend(self.up.answered(pong))

    @rule(data=st.data(), is_noticed=st.booleans())
    def breaks(self, data: st.DataObject, is_noticed: bool) -> None:
        for line in (self.to_down, self.to_up):
            kept = data.draw(st.integers(0, len(line)))
            while len(line) > kept:
                line.pop()
        if is_noticed:
            self.to_down.extend(self.up.broke())

    @invariant()
    def what_has_come_is_what_was_sent_once_and_in_order(self) -> None:
        assert self.taken["down"] == self.handed_in["up"][: len(self.taken["down"])]
        assert self.taken["up"] == self.handed_in["down"][: len(self.taken["up"])]

    def teardown(self) -> None:
        """With a line that does not break any more, three heartbeats bring everything there."""
        for _ in range(3):
            self.heartbeat()
            while self.to_down or self.to_up:
                if self.to_down:
                    self.arrives_down()
                else:
                    self.arrives_up()
        assert self.taken == {"up": self.handed_in["down"], "down": self.handed_in["up"]}
        assert self.up.resend() == [] == self.down.resend()


TestOverALossyLine = OverALossyLine.TestCase
TestOverALossyLine.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
