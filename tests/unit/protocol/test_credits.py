"""Credits for staging memory: what is handed out is free, and what was read comes back, whatever order it was read in.

The naive model at the end looks at every byte by itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from kvferry.plan.packing import SEGMENT_ALIGNMENT
from kvferry.staging.rings import ReadingRing, Span, WritingRing

LINE = SEGMENT_ALIGNMENT


def reserved(ring: WritingRing, num_bytes: int) -> Span:
    span = ring.reserve(num_bytes)
    assert span is not None
    return span


# ---- the side that writes -------------------------------------------------------------------------------------------


def test_spans_follow_each_other_until_the_ring_is_full():
    ring = WritingRing(4 * LINE)
    spans = [reserved(ring, LINE) for _ in range(4)]
    assert [(span.start, span.begin, span.stop) for span in spans] == [
        (number * LINE, number * LINE, (number + 1) * LINE) for number in range(4)
    ]
    assert [ring.place(span) for span in spans] == [0, LINE, 2 * LINE, 3 * LINE]
    assert ring.in_use == 4 * LINE
    assert ring.reserve(1) is None
    assert not ring.can_reserve(1)


def test_what_was_read_is_handed_out_again():
    ring = WritingRing(4 * LINE)
    for _ in range(4):
        reserved(ring, LINE)
    assert ring.read_until(2 * LINE)
    assert not ring.can_reserve(3 * LINE)
    span = reserved(ring, 2 * LINE)
    assert (ring.place(span), span.num_bytes) == (0, 2 * LINE)
    assert ring.reserve(1) is None


def test_a_span_that_does_not_fit_at_the_end_leaves_the_end_out():
    ring = WritingRing(4 * LINE)
    reserved(ring, 3 * LINE)
    ring.read_until(3 * LINE)
    span = reserved(ring, 2 * LINE)
    assert (span.start, span.begin, span.stop) == (3 * LINE, 4 * LINE, 6 * LINE)
    assert (ring.place(span), span.num_bytes) == (0, 2 * LINE)


def test_what_is_left_out_counts_as_used_until_its_span_is_read():
    ring = WritingRing(4 * LINE)
    reserved(ring, 2 * LINE)
    reserved(ring, LINE)
    ring.read_until(2 * LINE)
    span = reserved(ring, 2 * LINE)
    assert (span.start, span.begin) == (3 * LINE, 4 * LINE)
    assert ring.in_use == 4 * LINE
    assert ring.reserve(1) is None
    ring.read_until(3 * LINE)
    assert ring.in_use == 3 * LINE
    assert ring.can_reserve(LINE)
    assert not ring.can_reserve(LINE + 1), "what was left out is still before the last span"


def test_an_empty_ring_begins_in_front_and_what_it_leaves_out_is_in_nobodys_way():
    ring = WritingRing(4 * LINE)
    ring.read_until(reserved(ring, 3 * LINE).stop)
    span = reserved(ring, LINE)
    assert (span.start, span.begin, span.stop) == (3 * LINE, 4 * LINE, 5 * LINE)
    assert ring.in_use == LINE
    assert ring.can_reserve(3 * LINE)


@pytest.mark.parametrize("used", range(1, 4 * LINE, 7))
def test_an_empty_ring_gives_its_whole_size_wherever_it_stands(used: int):
    ring = WritingRing(4 * LINE)
    ring.read_until(reserved(ring, used).stop)
    assert ring.in_use == 0
    span = reserved(ring, 4 * LINE)
    assert (ring.place(span), span.num_bytes) == (0, 4 * LINE)
    assert ring.reserve(1) is None
    assert ring.read_until(span.stop)
    assert ring.can_reserve(4 * LINE)


def test_a_refused_span_changes_nothing():
    ring = WritingRing(4 * LINE)
    reserved(ring, 3 * LINE)
    assert ring.reserve(2 * LINE) is None
    assert ring.in_use == 3 * LINE
    assert reserved(ring, LINE).begin == 3 * LINE


def test_asking_whether_there_is_room_takes_none():
    ring = WritingRing(4 * LINE)
    assert ring.can_reserve(4 * LINE)
    assert ring.in_use == 0


@pytest.mark.parametrize("num_bytes", [0, -1, 4 * LINE + 1])
def test_a_span_that_no_ring_of_the_size_has_is_refused(num_bytes: int):
    ring = WritingRing(4 * LINE)
    with pytest.raises(ValueError, match=f"a span of {num_bytes} bytes in a ring of {4 * LINE}"):
        ring.reserve(num_bytes)
    assert not ring.can_reserve(num_bytes)


@pytest.mark.parametrize("position", [-5, 0, LINE, 2 * LINE, 3 * LINE + 1, 10**9])
def test_a_watermark_that_is_no_news_or_that_nobody_can_have_sent_is_ignored(position: int):
    ring = WritingRing(4 * LINE)
    reserved(ring, 3 * LINE)
    ring.read_until(2 * LINE)
    assert not ring.read_until(position)
    assert ring.in_use == LINE


def test_spans_begin_where_large_words_do():
    """Segments begin so within a sub-chunk, which lies in a span."""
    ring = WritingRing(8 * LINE + 5)
    spans = [reserved(ring, num_bytes) for num_bytes in (1, LINE + 1, 3, 2 * LINE - 1)]
    assert [ring.place(span) for span in spans] == [0, LINE, 3 * LINE, 4 * LINE]
    assert [span.num_bytes for span in spans] == [1, LINE + 1, 3, 2 * LINE - 1]
    assert [span.start for span in spans] == [0, 1, 2 * LINE + 1, 3 * LINE + 3]
    ring.read_until(spans[2].stop)
    assert reserved(ring, LINE).begin == 6 * LINE
    assert reserved(ring, LINE + 6).begin == 8 * LINE + 5, "in the next round it begins in front again"


# ---- the side that reads --------------------------------------------------------------------------------------------


def test_spans_are_read_in_any_order_and_the_position_follows_the_first():
    ring = ReadingRing(100)
    first, second, third = Span(0, 0, 30), Span(30, 30, 60), Span(60, 60, 90)
    for span, position in ((third, 0), (first, 30), (second, 90)):
        ring.release(span)
        assert ring.position == position


def test_what_was_left_out_at_the_end_is_read_with_the_span_behind_it():
    ring = ReadingRing(100)
    ring.release(Span(0, 0, 70))
    ring.release(Span(70, 100, 150))
    assert ring.position == 150


@pytest.mark.parametrize(
    ("span", "is_possible"),
    [
        (Span(250, 250, 300), True),
        (Span(250, 300, 400), True),
        (Span(260, 260, 300), True),
        (Span(249, 249, 300), False),  # read already
        (Span(250, 249, 300), False),
        (Span(250, 250, 250), False),
        (Span(250, 250, 301), False),  # wraps around
        (Span(350, 400, 451), False),  # further than a whole ring after an empty one
        (Span(300, 300, 340), False),  # read before its turn
        (Span(-10, -10, 5), False),
    ],
)
def test_only_a_span_that_the_writer_may_have_been_given_is_read(span: Span, is_possible: bool):
    ring = ReadingRing(100, position=250)
    ring.release(Span(300, 300, 340))
    assert ring.can_hold(span) is is_possible


# ---- both sides, against the naive model ----------------------------------------------------------------------------


@dataclass
class NaiveRing:
    """Every byte by itself.

    Attributes:
        used: the positions of every span that the writer has not heard to be read, in their order. What was left out
            before a span belongs to it, unless there was nothing before that could be overwritten.
        next: the position that is handed out next.
    """

    size: int
    used: deque[range] = field(default_factory=deque)
    next: int = 0

    def next_span(self, num_bytes: int) -> Span:
        begin = self.next
        while not self._may_begin(begin % self.size, num_bytes):
            begin += 1
        return Span(self.next, begin, begin + num_bytes)

    def _may_begin(self, place: int, num_bytes: int) -> bool:
        if not self.used:
            return place == 0
        return place % LINE == 0 and place + num_bytes <= self.size

    def has_room(self, num_bytes: int) -> bool:
        span = self.next_span(num_bytes)
        taken = {position % self.size for positions in self.used for position in positions}
        return not any(position % self.size in taken for position in range(span.start, span.stop))

    def hand_out(self, span: Span) -> None:
        self.used.append(range(span.start if self.used else span.begin, span.stop))
        self.next = span.stop

    def free_until(self, position: int) -> None:
        """The writer hears that all spans that end there were read."""
        while self.used and self.used[0].stop <= position:
            self.used.popleft()

    @property
    def in_use(self) -> int:
        return self.next - self.used[0].start if self.used else 0


class RingsAgainstTheNaiveModel(RuleBasedStateMachine):
    unread = Bundle("unread")
    watermarks = Bundle("watermarks")

    @initialize(lines=st.integers(1, 6), rest=st.integers(0, LINE - 1))
    def begin(self, lines: int, rest: int) -> None:
        self.size = lines * LINE + rest
        self.writing = WritingRing(self.size)
        self.reading = ReadingRing(self.size)
        self.naive = NaiveRing(self.size)
        self.handed_out: list[Span] = []
        self.read: set[Span] = set()

    @rule(target=unread, data=st.data())
    def reserve(self, data: st.DataObject) -> Any:
        num_bytes = data.draw(st.integers(1, self.size))
        has_room = self.naive.has_room(num_bytes)
        assert self.writing.can_reserve(num_bytes) is has_room
        span = self.writing.reserve(num_bytes)
        assert span == (self.naive.next_span(num_bytes) if has_room else None)
        if span is None:
            return multiple()
        assert self.writing.place(span) == span.begin % self.size
        assert self.reading.can_hold(span)
        self.naive.hand_out(span)
        self.handed_out.append(span)
        return span

    @rule(target=watermarks, span=consumes(unread))
    def release(self, span: Span) -> int:
        self.reading.release(span)
        self.read.add(span)
        assert not self.reading.can_hold(span)
        return self.reading.position

    @rule(position=watermarks)
    def hear(self, position: int) -> None:
        """At once, late, out of order or again."""
        assert self.writing.read_until(position) is (position > self.naive.next - self.naive.in_use)
        self.naive.free_until(position)

    @invariant()
    def as_much_is_in_use_as_was_not_heard_of(self) -> None:
        assert self.writing.in_use == self.naive.in_use

    @invariant()
    def everything_before_the_position_was_read_and_what_follows_was_not(self) -> None:
        unread = [span.start for span in self.handed_out if span not in self.read]
        assert self.reading.position == min(unread, default=self.naive.next)

    def teardown(self) -> None:
        """Once all is read and heard of, the ring is as free as a new one."""
        for span in self.handed_out:
            if span not in self.read:
                self.reading.release(span)
        self.writing.read_until(self.reading.position)
        assert self.writing.in_use == 0
        assert self.writing.can_reserve(self.size)


TestRingsAgainstTheNaiveModel = RingsAgainstTheNaiveModel.TestCase


@given(st.lists(st.integers(1, 5 * LINE), max_size=60))
def test_a_ring_that_is_read_at_once_never_says_no(sizes: list[int]):
    ring, reading = WritingRing(5 * LINE), ReadingRing(5 * LINE)
    for num_bytes in sizes:
        reading.release(reserved(ring, num_bytes))
        assert ring.read_until(reading.position)
    assert ring.in_use == 0
