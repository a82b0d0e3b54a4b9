"""Notifications over a transport of short texts: whatever their bytes, whatever order their pieces arrive in."""

from __future__ import annotations

import logging
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import MessageError, TransportError
from kvferry.transport import TextNotifications
from kvferry.transport import text_notifications as module

ALPHABET = set(string.ascii_letters + string.digits + ".+/=")


def texts(**options: int) -> TextNotifications:
    return TextNotifications(**{"longest": 64, **options})


@given(st.binary(max_size=700), st.integers(module.SHORTEST_PIECE, 200))
def test_any_bytes_become_short_plain_texts_and_come_back(notification: bytes, longest: int):
    here, there = texts(longest=longest), texts(longest=longest)
    pieces = here.pieces(notification)
    assert all(len(piece) <= longest and set(piece) <= ALPHABET for piece in pieces)
    came = [there.add("here", piece) for piece in pieces]
    assert came == [None] * (len(pieces) - 1) + [notification]
    assert there.num_incomplete == 0


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=5), st.data())
def test_pieces_of_several_senders_arrive_in_any_order_and_some_twice(sent: list[bytes], data: st.DataObject):
    senders = [texts() for _ in range(2)]
    there = texts()
    cut = [(number % 2, each, senders[number % 2].pieces(each)) for number, each in enumerate(sent)]
    pieces = [(sender, piece) for sender, _, of_one in cut for piece in of_one]
    again = data.draw(st.lists(st.sampled_from(pieces), max_size=3))
    came: list[tuple[int, bytes]] = []
    for sender, piece in [*data.draw(st.permutations(pieces)), *again]:
        whole = there.add(f"sender {sender}", piece)
        came += [] if whole is None else [(sender, whole)]
    # What came again as a whole may be told again: receivers know what they have heard.
    whole_again = {
        (sender, each) for sender, each, of_one in cut if {(sender, piece) for piece in of_one} <= set(again)
    }
    expected = sorted((sender, each) for sender, each, _ in cut)
    assert set(came) == set(expected)
    assert sorted(each for each in came if each not in whole_again) == [
        each for each in expected if each not in whole_again
    ]


def test_pieces_make_the_same_in_whatever_order_they_come():
    notification = bytes(range(200))
    here, there = texts(), texts()
    first, *rest = here.pieces(notification)
    came = [there.add("here", piece) for piece in (*reversed(rest), first)]
    assert came == [None] * len(rest) + [notification]


def test_two_starts_of_one_sender_are_not_mixed():
    first, second, there = texts(), texts(), texts()
    long = bytes(60)
    assert there.add("same", first.pieces(long)[0]) is None
    (came,) = [whole for piece in second.pieces(b"x" * 60) if (whole := there.add("same", piece)) is not None]
    assert came == b"x" * 60


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "0" * 16 + ".0.1.===",
        "0" * 16 + ".0.1.a",
        "0" * 16 + ".1.1.",
        "0" * 16 + ".0.0.",
        "0" * 15 + "G.0.1.",
        "0" * 16 + ".-1.1.",
        "0" * 16 + ".0.1.aaaa\n",
        "0" * 16 + ".0.1." + "a" * 400,
        "\u0660" * 16 + ".0.1.aaaa",
        "0" * 16 + ".\u0660.1.aaaa",
    ],
)
def test_what_is_no_piece_is_refused_and_leaves_nothing(text: str):
    there = texts()
    with pytest.raises(MessageError):
        there.add("stranger", text)
    assert there.senders == {}


def test_what_is_never_completed_is_bounded_and_costs_nobody_else(caplog: pytest.LogCaptureFixture):
    there, good, bad = texts(most_incomplete_bytes=10_000), texts(), texts()
    *begun, last = good.pieces(bytes(100))
    for piece in begun:
        there.add("good", piece)
    oldest = bad.pieces(b"y" * 100)
    there.add("bad", oldest[0])
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            there.add("bad", bad.pieces(bytes(100))[0])
    kept = there.num_incomplete
    assert 10 < kept < 100
    assert there.senders["bad"].cost <= 10_000
    assert there.senders["bad"].cost == sum(each.cost for each in there.senders["bad"].begun.values())
    assert "bad left a notification of" in caplog.text
    assert [there.add("bad", piece) for piece in oldest[1:]] == [None] * (len(oldest) - 1), "it was the oldest"
    assert there.add("good", last) == bytes(100)
    there.forget("bad")
    assert there.num_incomplete == 0


def test_a_piece_that_comes_again_and_again_takes_no_more_memory():
    here, there = texts(), texts(most_incomplete_bytes=1000)
    *begun, last = here.pieces(bytes(60))
    for piece in begun:
        assert there.add("here", piece) is None
    cost = there.senders["here"].cost
    for piece in begun:
        assert there.add("here", piece) is None
    assert there.senders["here"].cost == cost
    assert there.add("here", last) == bytes(60)
    assert there.senders == {}


def test_a_notification_that_alone_is_too_large_is_lost_and_not_kept():
    there, here = texts(most_incomplete_bytes=1000), texts()
    assert all(there.add("here", piece) is None for piece in here.pieces(bytes(5000)))
    assert there.num_incomplete <= 1
    (piece,) = here.pieces(b"short")
    assert there.add("here", piece) == b"short"


def test_pieces_need_room_and_numbers(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="has no room for anything"):
        texts(longest=module.SHORTEST_PIECE - 1)
    monkeypatch.setattr(module, "_MOST_PIECES", 3)
    with pytest.raises(TransportError, match="too long"):
        texts().pieces(bytes(500))
