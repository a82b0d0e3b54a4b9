"""The ring that one prefill rank writes to, on the decode side: each span is read once, and the writer hears of it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.shards import byte_shard

from kvferry.layout import RankLayout
from kvferry.plan import PairPlan
from kvferry.protocol.wire.messages import Credit
from kvferry.staging.receiving import WriterRing
from kvferry.staging.resources import MachineResources
from kvferry.staging.rings import Span

LAYOUT = RankLayout(shards=(byte_shard(),))
NOTHING = PairPlan(LAYOUT, LAYOUT, [])


class Memory:
    address = 1 << 20
    num_bytes = 800


class Credits:
    """What the prefill rank hears."""

    def __init__(self) -> None:
        self.sent: list[Credit] = []

    def send(self, message: Credit) -> None:
        self.sent.append(message)

    @property
    def positions(self) -> list[int]:
        return [credit.position for credit in self.sent]


def ring_and_credits() -> tuple[WriterRing, Credits]:
    credits_ = Credits()
    memory: Any = Memory()
    return WriterRing(memory, NOTHING, epoch=7, send=credits_.send), credits_


def spans(*lengths: int) -> list[Span]:
    made: list[Span] = []
    for length in lengths:
        start = made[-1].stop if made else 0
        made.append(Span(start, start, start + length))
    return made


def test_the_writer_hears_of_what_was_read_once_nothing_is_left_to_read():
    ring, credits_ = ring_and_credits()
    (span,) = spans(10)
    idle = [ring.is_idle]
    assert ring.take(span)
    idle.append(ring.is_idle)
    ring.give_back(span)
    ring.send_credit()
    assert [*idle, ring.is_idle] == [True, False, True]
    assert credits_.sent == [Credit(epoch=ring.epoch, position=10)]


def test_the_writer_hears_of_a_quarter_of_the_ring_at_a_time_while_more_is_being_read():
    ring, credits_ = ring_and_credits()
    every = spans(*[80] * 8)
    for span in every:
        assert ring.take(span)
    sent = []
    for span in every:
        ring.give_back(span)
        ring.send_credit()
        sent.append(credits_.positions[-1:])
    assert sent == [[], [], [240], [240], [240], [480], [480], [640]]


def test_what_was_read_since_the_last_look_is_told_in_one_message():
    ring, credits_ = ring_and_credits()
    every = spans(*[200] * 4)
    for span in every:
        assert ring.take(span)
        ring.give_back(span)
    ring.send_credit()
    ring.send_credit()
    assert credits_.positions == [800]


def test_spans_that_are_read_out_of_order_are_told_together():
    ring, credits_ = ring_and_credits()
    first, second = spans(300, 300)
    assert ring.take(second)
    ring.give_back(second)
    ring.send_credit()
    assert credits_.sent == [], "nothing is news while the first has not come"
    assert ring.take(first)
    ring.give_back(first)
    ring.send_credit()
    assert credits_.positions == [600]


def test_a_span_that_is_being_read_is_not_read_a_second_time():
    """A repeated notification must not give memory back that a thread is still reading."""
    ring, credits_ = ring_and_credits()
    first, second = spans(400, 400)
    assert ring.take(first)
    assert ring.take(second)
    assert not ring.take(first)
    ring.give_back(second)
    ring.send_credit()
    assert credits_.sent == []
    ring.give_back(first)
    ring.send_credit()
    assert credits_.positions == [800]
    for span in (first, second):
        assert not ring.take(span)


def test_a_span_that_was_read_before_its_turn_is_not_read_again():
    ring, _ = ring_and_credits()
    _, second = spans(400, 400)
    assert ring.take(second)
    ring.give_back(second)
    assert not ring.take(second)
    assert ring.is_idle


@pytest.mark.parametrize("span", [Span(0, 0, 801), Span(700, 700, 900), Span(0, 50, 50), Span(-1, 0, 10)])
def test_a_span_that_the_writer_cannot_have_been_given_is_not_read(span: Span):
    ring, _ = ring_and_credits()
    assert not ring.take(span)
    assert ring.is_idle


def test_a_span_lies_in_the_ring_whatever_its_round():
    ring, _ = ring_and_credits()
    assert ring.address(Span(0, 0, 10)) == 1 << 20
    assert ring.address(Span(1500, 1600, 1700)) == 1 << 20
    assert ring.address(Span(1700, 1700, 1800)) == (1 << 20) + 100


def test_every_ring_has_an_epoch_of_its_own():
    assert len({MachineResources().epoch() for _ in range(20)}) == 20
