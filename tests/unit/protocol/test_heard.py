"""A wish counts once, however late it comes again."""

from __future__ import annotations

import pytest

from kvferry.protocol import heard
from kvferry.protocol.heard import Heard, HeardWishes


def test_what_comes_again_is_known():
    wishes = HeardWishes()
    assert [wishes.hear("d0", 1, serial) for serial in (1, 2, 2, 1, 3)] == [
        Heard.FIRST,
        Heard.FIRST,
        Heard.AGAIN,
        Heard.AGAIN,
        Heard.FIRST,
    ]
    assert wishes.hear("d1", 1, 1) is Heard.FIRST, "another decode rank's"


def test_what_was_lost_counts_when_it_is_said_again_and_once():
    wishes = HeardWishes()
    assert wishes.hear("d0", 1, 4) is Heard.FIRST
    for serial in (2, 1, 3):
        assert wishes.hear("d0", 1, serial) is Heard.FIRST
        assert wishes.hear("d0", 1, serial) is Heard.AGAIN


def test_with_a_new_attempt_everything_before_is_too_late():
    wishes = HeardWishes()
    wishes.hear("d0", 1, 1)
    wishes.attached("d0", 2)
    assert wishes.hear("d0", 1, 2) is Heard.TOO_LATE
    assert wishes.hear("d0", 2, 1) is Heard.FIRST
    wishes.attached("d0", 2)  # said again
    wishes.attached("d0", 1)  # late
    assert wishes.hear("d0", 2, 1) is Heard.AGAIN


def test_numbers_that_make_no_sense_take_no_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(heard, "MOST_MISSING", 10)
    wishes = HeardWishes()
    assert wishes.hear("d0", 1, 2**62) is Heard.FIRST
    assert wishes.hear("d0", 1, 2**62 - 1) is Heard.FIRST
    assert wishes.hear("d0", 1, 2**62 - 10) is Heard.FIRST
    assert wishes.hear("d0", 1, 2**62 - 11) is Heard.AGAIN, "too old"
    assert wishes.hear("d0", 1, 2**62 + 9) is Heard.FIRST
    assert len(wishes._attempts["d0"].missing) == 10


def test_so_many_decode_ranks_are_known(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(heard, "MOST_RECEIVERS", 2)
    wishes = HeardWishes()
    for receiver in ("d0", "d1", "d0", "d2"):
        wishes.hear(receiver, 1, 1)
    assert wishes.hear("d0", 1, 1) is Heard.AGAIN
    assert wishes.hear("d1", 1, 1) is Heard.FIRST, "it was not heard of for longest"
