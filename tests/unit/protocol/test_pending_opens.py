"""Rooms that decode ranks opened before the prefill side did."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from kvferry.endpoint.prefill.rooms import MOST_EARLY_PAGE_BYTES
from kvferry.errors import QueueFullError
from kvferry.plan.requests.demands import GroupRequest
from kvferry.plan.requests.page_numbers import PageNumbers
from kvferry.protocol.transfer.pending_messages import PendingOpen, PendingOpens
from kvferry.protocol.wire.messages import AbortRoom, OpenRoom


def opened(room: int, generation: int = 1) -> OpenRoom:
    return OpenRoom(room=room, generation=generation, receivers=1, tokens=None, groups=())


def aborted(room: int, generation: int = 1) -> AbortRoom:
    return AbortRoom(room=room, generation=generation, reason="the client went away")


def pending(limit: int = 10, keep_s: float = 5.0, most_page_bytes: int = 2**30) -> PendingOpens:
    return PendingOpens(limit=limit, most_page_bytes=most_page_bytes, keep_s=keep_s)


def is_kept(rooms: PendingOpens, receiver: str, message: OpenRoom, *, now: float) -> bool:
    try:
        rooms.keep(receiver, message, now=now)
    except QueueFullError:
        return False
    return True


def test_what_was_kept_is_taken_once_and_in_order():
    rooms = pending()
    rooms.keep("a", opened(1), now=0.0)
    rooms.keep("b", opened(1, 9), now=0.0)
    rooms.abort("a", aborted(1))
    rooms.keep("a", opened(2), now=0.0)
    assert list(rooms.take(1).items()) == [("a", PendingOpen(opened(1), aborted(1))), ("b", PendingOpen(opened(1, 9)))]
    assert rooms.take(1) == {}
    assert rooms.take(3) == {}
    assert len(rooms) == 1


def test_a_newer_generation_of_the_same_receiver_replaces_the_older_one():
    rooms = pending()
    rooms.keep("a", opened(1, 1), now=0.0)
    rooms.abort("a", aborted(1, 1))
    rooms.keep("a", opened(1, 2), now=0.0)
    rooms.keep("b", opened(1, 7), now=0.0)
    assert rooms.take(1) == {"a": PendingOpen(opened(1, 2)), "b": PendingOpen(opened(1, 7))}


def test_a_newer_generation_is_kept_for_the_whole_time_again():
    rooms = pending(keep_s=5.0)
    rooms.keep("a", opened(1, 1), now=0.0)
    rooms.keep("a", opened(1, 2), now=4.0)
    assert list(rooms.expired(now=8.9)) == []
    assert list(rooms.expired(now=9.0)) == [("a", PendingOpen(opened(1, 2)))]


def test_the_same_open_twice_is_kept_once():
    rooms = pending()
    for _ in range(3):
        assert is_kept(rooms, "a", opened(1), now=0.0)
    assert rooms.take(1) == {"a": PendingOpen(opened(1))}


def test_an_abort_without_its_open_takes_no_place():
    rooms = pending(limit=1)
    rooms.abort("a", aborted(1))
    assert len(rooms) == 0
    assert is_kept(rooms, "a", opened(2), now=0.0)
    rooms.abort("a", aborted(3))
    assert len(rooms) == 1


def test_an_abort_of_another_generation_leaves_the_open_alone():
    rooms = pending()
    rooms.keep("a", opened(1, 2), now=0.0)
    rooms.abort("a", aborted(1, 1))
    assert list(rooms.expired(now=4.9)) == []
    assert rooms.take(1) == {"a": PendingOpen(opened(1, 2))}


def test_an_abort_of_one_receiver_says_nothing_of_another():
    rooms = pending()
    rooms.keep("a", opened(1), now=0.0)
    rooms.abort("b", aborted(1))
    assert rooms.take(1) == {"a": PendingOpen(opened(1))}


def test_too_many_rooms_are_refused_but_known_ones_still_grow():
    rooms = pending(limit=2)
    assert is_kept(rooms, "a", opened(1), now=0.0)
    assert is_kept(rooms, "b", opened(2), now=0.0)
    assert not is_kept(rooms, "c", opened(3), now=0.0)
    assert is_kept(rooms, "c", opened(2), now=0.0)
    rooms.take(1)
    assert is_kept(rooms, "a", opened(3), now=0.0)


def test_a_decode_rank_leaves_half_of_the_places_to_others():
    rooms = pending(limit=4)
    assert [is_kept(rooms, "a", opened(room), now=0.0) for room in range(3)] == [True, True, False]
    assert is_kept(rooms, "a", opened(1, 9), now=0.0), "a newer generation takes the place of the older one"
    assert [is_kept(rooms, "b", opened(room), now=0.0) for room in range(3)] == [True, True, False]
    # However places become free, they are counted.
    rooms.take(0)
    assert is_kept(rooms, "a", opened(5), now=0.0)
    rooms.forget("b")
    assert [is_kept(rooms, "b", opened(room), now=1.0) for room in (6, 7, 8)] == [True, True, False]
    assert len(list(rooms.expired(now=100.0))) == 4
    assert [is_kept(rooms, "a", opened(room), now=0.0) for room in range(3)] == [True, True, False]


def opened_with(room: int, *pages: int) -> OpenRoom:
    numbers = PageNumbers.of(np.array(pages, np.int64))
    return msgspec.structs.replace(opened(room), groups=(GroupRequest("kv", 0, 0, len(pages), 0, numbers),))


def test_page_numbers_that_are_kept_have_a_bound():
    def large(room: int) -> OpenRoom:
        return opened_with(room, 2, 4, 6, 8, 10)  # 40 bytes

    ends: list[Callable[[PendingOpens], object]] = [
        lambda rooms: rooms.take(1),
        lambda rooms: rooms.forget("a"),
        lambda rooms: list(rooms.expired(now=100.0)),
    ]
    for end in ends:
        rooms = pending(limit=100, most_page_bytes=100)
        assert [is_kept(rooms, "a", large(room), now=0.0) for room in (1, 2)] == [True, True]
        with pytest.raises(QueueFullError, match=r"80 bytes .* this one's 40 .* 100: try again when"):
            rooms.keep("a", large(3), now=0.0)
        assert is_kept(rooms, "a", opened(4), now=0.0)
        end(rooms)
        assert is_kept(rooms, "b", large(3), now=0.0)


def test_a_thousand_long_rooms_of_eight_decode_ranks_wait_for_the_prefill_side():
    """128k tokens, one a page: what a room's pages cost depends on how many runs they lie in, not on their number."""
    rooms = pending(limit=10_000, most_page_bytes=MOST_EARLY_PAGE_BYTES)
    pages = PageNumbers.of(np.concatenate([np.arange(first, first + 2**14) for first in range(0, 2**18, 2**15)]))
    assert len(pages) == 2**17
    message = msgspec.structs.replace(opened(0), groups=(GroupRequest("kv", 0, 0, 2**17, 0, pages),))
    for room in range(1000):
        for rank in range(8):
            rooms.keep(f"d{rank}", msgspec.structs.replace(message, room=room), now=0.0)
    assert len(rooms) == 1000


def test_a_refused_room_leaves_nothing_behind():
    rooms = pending(limit=0)
    assert not is_kept(rooms, "a", opened(1), now=0.0)
    assert len(rooms) == 0
    assert rooms.take(1) == {}


def test_rooms_that_nobody_opened_expire_and_their_receivers_are_named():
    rooms = pending(keep_s=5.0)
    rooms.keep("a", opened(1), now=0.0)
    rooms.keep("b", opened(1, 9), now=1.0)
    rooms.keep("a", opened(2), now=1.0)
    assert list(rooms.expired(now=4.9)) == []
    assert list(rooms.expired(now=5.0)) == [("a", PendingOpen(opened(1))), ("b", PendingOpen(opened(1, 9)))]
    assert list(rooms.expired(now=5.0)) == []
    assert len(rooms) == 1


def test_a_receiver_that_is_gone_is_forgotten_everywhere():
    rooms = pending()
    rooms.keep("a", opened(1), now=0.0)
    rooms.keep("b", opened(1), now=0.0)
    rooms.keep("a", opened(2), now=0.0)
    rooms.forget("a")
    assert len(rooms) == 1
    assert rooms.take(2) == {}
    assert rooms.take(1) == {"b": PendingOpen(opened(1))}
    rooms.forget("nobody")
