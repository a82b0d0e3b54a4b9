"""What is remembered, as threads see it that look without a lock while another one remembers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.steps import at_every_step

from kvferry.endpoint.prefill.context import BrokenOff
from kvferry.protocol.bounded import ForAWhile, remember
from kvferry.protocol.wire.versions import SpokenVersions, Versions


def seen_during(change: Callable[[], None], look: Callable[[], Any]) -> set[Any]:
    """Everything that a thread may see which looks at any moment of a change."""
    seen = {look()}
    at_every_step(change, lambda: seen.add(look()))
    return seen | {look()}


def test_a_reader_without_a_lock_always_finds_an_entry_that_becomes_the_youngest() -> None:
    known = OrderedDict(a=1, b=2)
    assert seen_during(lambda: remember(known, "a", 3, 2), lambda: known.get("a")) == {1, 3}
    assert list(known) == ["b", "a"]


def test_a_reader_of_another_entry_finds_it_while_the_oldest_is_dropped() -> None:
    known = OrderedDict(a=1, b=2)
    assert seen_during(lambda: remember(known, "c", 3, 2), lambda: known.get("b")) == {2}
    assert list(known) == ["b", "c"]


def test_a_decode_rank_is_spoken_to_in_its_version_while_another_message_of_it_comes() -> None:
    spoken = SpokenVersions(Versions(12, 13))
    spoken.record("decode-0", 13)
    assert seen_during(lambda: spoken.record("decode-0", 13), lambda: spoken.of("decode-0")) == {13}


@pytest.mark.parametrize(
    ("look", "seen"),
    [
        (lambda broken_off: "decode-0" in broken_off, {True}),
        (lambda broken_off: broken_off.last_failure_to("decode-0"), {1, 2}),
    ],
)
def test_a_rank_that_was_broken_off_stays_so_while_another_write_to_it_fails(
    look: Callable[[BrokenOff], Any], seen: set[Any]
) -> None:
    broken_off = BrokenOff()
    broken_off.add("decode-0")
    assert seen_during(lambda: broken_off.add("decode-0"), lambda: look(broken_off)) == seen


def test_what_is_kept_for_a_while_is_there_while_it_is_renewed() -> None:
    kept: ForAWhile[str, int] = ForAWhile(10.0)
    kept.put("a", 1, 0.0, limit=2)
    assert seen_during(lambda: kept.put("a", 2, 1.0, limit=2), lambda: kept.get("a")) == {1, 2}
