"""An open request counts once, however late it comes again."""

from __future__ import annotations

import pytest

from kvferry.protocol.rooms import deduplication
from kvferry.protocol.rooms.deduplication import Delivery, OpenDeduplicator


def test_what_comes_again_is_known():
    opens = OpenDeduplicator()
    assert [opens.receive("d0", 1, serial) for serial in (1, 2, 2, 1, 3)] == [
        Delivery.FIRST,
        Delivery.FIRST,
        Delivery.DUPLICATE,
        Delivery.DUPLICATE,
        Delivery.FIRST,
    ]
    assert opens.receive("d1", 1, 1) is Delivery.FIRST, "another decode rank's"


def test_what_was_lost_counts_when_it_is_said_again_and_once():
    opens = OpenDeduplicator()
    assert opens.receive("d0", 1, 4) is Delivery.FIRST
    for serial in (2, 1, 3):
        assert opens.receive("d0", 1, serial) is Delivery.FIRST
        assert opens.receive("d0", 1, serial) is Delivery.DUPLICATE


def test_with_a_new_attempt_everything_before_is_too_late():
    opens = OpenDeduplicator()
    opens.receive("d0", 1, 1)
    assert opens.attached("d0", 2)
    assert opens.receive("d0", 1, 2) is Delivery.STALE
    assert opens.receive("d0", 2, 1) is Delivery.FIRST
    assert not opens.attached("d0", 2), "the same again"
    assert not opens.attached("d0", 1), "late"
    assert opens.receive("d0", 2, 1) is Delivery.DUPLICATE


def test_numbers_that_make_no_sense_take_no_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deduplication, "MOST_MISSING", 10)
    opens = OpenDeduplicator()
    assert opens.receive("d0", 1, 2**62) is Delivery.FIRST
    assert opens.receive("d0", 1, 2**62 - 1) is Delivery.FIRST
    assert opens.receive("d0", 1, 2**62 - 10) is Delivery.FIRST
    assert opens.receive("d0", 1, 2**62 - 11) is Delivery.DUPLICATE, "too old"
    assert opens.receive("d0", 1, 2**62 + 9) is Delivery.FIRST
    assert len(opens._attempts["d0"].missing) == 10


def test_so_many_decode_ranks_are_known(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deduplication, "MOST_RECEIVERS", 2)
    opens = OpenDeduplicator()
    for receiver in ("d0", "d1", "d0", "d2"):
        opens.receive(receiver, 1, 1)
    assert opens.receive("d0", 1, 1) is Delivery.DUPLICATE
    assert opens.receive("d1", 1, 1) is Delivery.FIRST, "it was not heard of for longest"
