"""To which room a decode rank's message goes, when it comes early, late, twice or in the wrong order."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from kvferry.errors import EndpointClosedError, KVFerryError, QueueFullError, TransferAbortedError, TransferFailedError
from kvferry.layout import RankCoordinates
from kvferry.protocol.transfer.room_table import REMEMBERED, RoomTable
from kvferry.protocol.wire.messages import AbortRoom, OpenRoom, RefuseRoom
from kvferry.settings import Settings

KEEP_S = 10.0


@dataclass(eq=False)
class Room:
    room: int
    failed_alone: bool = False
    error: KVFerryError | None = None
    generations: dict[str, int] = field(default_factory=dict)


def table(max_pending: int = 3, max_rooms: int = 100) -> RoomTable[Room]:
    return RoomTable(max_rooms=max_rooms, max_pending=max_pending, most_page_bytes=2**20, keep_s=KEEP_S)


def open_request(room: int = 1, generation: int = 7) -> OpenRoom:
    return OpenRoom(room=room, generation=generation, receivers=1, tokens=None, groups=())


def abort(room: int = 1, generation: int = 7) -> AbortRoom:
    return AbortRoom(room=room, generation=generation, reason="no")


def refusal(room: int = 1, generation: int = 7) -> RefuseRoom:
    return RefuseRoom(
        endpoint="p0-start",
        engine="decode",
        coordinates=RankCoordinates(),
        room=room,
        generation=generation,
        reason="no",
    )


def test_a_open_request_goes_to_its_room_or_waits_for_it():
    rooms = table()
    assert rooms.open_request("d0", open_request(), now=0.0) is None
    assert not rooms.is_quiet
    room = Room(1)
    assert rooms.add(room) == [("d0", open_request())]
    assert rooms.open_request("d1", open_request(), now=0.0) is room
    rooms.remove(room, now=0.0)
    assert rooms.is_quiet


def test_an_abort_that_overtakes_its_open_request_is_remembered():
    rooms = table()
    assert rooms.abort("d0", abort(), now=0.0) is None
    with pytest.raises(TransferAbortedError, match="aborted by d0: no"):
        rooms.open_request("d0", open_request(), now=1.0)
    assert rooms.add(Room(1)) == []


def test_also_where_the_room_is_open():
    rooms, room = table(), Room(1)
    rooms.add(room)
    assert rooms.abort("d0", abort(), now=0.0) is room
    with pytest.raises(TransferAbortedError):
        rooms.open_request("d0", open_request(), now=1.0)
    assert rooms.open_request("d0", open_request(generation=8), now=1.0) is room
    assert rooms.open_request("d1", open_request(), now=1.0) is room


def test_a_open_request_that_comes_twice_is_not_taken_for_the_next_transfer():
    rooms, room = table(), Room(1, generations={"d0": 7})
    rooms.add(room)
    rooms.remove(room, now=0.0)
    assert rooms.open_request("d0", open_request(), now=1.0) is None
    assert rooms.add(Room(1)) == []


def test_who_asks_again_for_what_failed_is_told_again():
    """The first time may have been lost."""
    rooms, room = table(), Room(1, error=TransferFailedError("no"), generations={"d0": 7})
    rooms.add(room)
    rooms.remove(room, now=0.0)
    for _ in range(2):
        with pytest.raises(TransferFailedError):
            rooms.open_request("d0", open_request(), now=1.0)


def test_a_open_request_that_comes_twice_while_its_room_is_open_goes_there():
    rooms, room = table(), Room(1, generations={"d0": 7})
    rooms.add(room)
    rooms.abort("d0", abort(), now=0.0)
    assert rooms.open_request("d0", open_request(), now=0.0) is room  # which knows what it is


def test_what_is_over_is_remembered_however_late_it_is_and_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    """A message of an earlier use may come late, and none so late that it would count for the next."""
    monkeypatch.setattr("kvferry.protocol.transfer.room_table.REMEMBERED", 2)
    rooms = table()
    rooms.abort("d0", abort(), now=0.0)
    rooms.expired(now=1e6)
    with pytest.raises(TransferAbortedError):
        rooms.open_request("d0", open_request(), now=1e6)
    assert rooms.is_quiet
    for receiver in ("d1", "d2"):
        rooms.abort(receiver, abort(), now=1e6)
    assert rooms.open_request("d0", open_request(), now=1e6) is None
    assert not rooms.is_quiet


def test_who_comes_late_to_a_room_that_failed_without_them_learns_why_once():
    rooms, error = table(), TransferFailedError("no")
    room = Room(1, failed_alone=True, error=error, generations={"d0": 1})
    rooms.add(room)
    rooms.remove(room, now=0.0)
    with pytest.raises(TransferFailedError):
        rooms.open_request("d1", open_request(), now=0.0)
    assert rooms.open_request("d1", open_request(generation=8), now=0.0) is None
    assert not rooms.is_quiet


def test_who_was_answered_by_the_room_itself_is_not_told_again_of_its_failure():
    """A room that ends at the first of two open requests answers the second, too, but has not noted it by then."""
    rooms, room = table(), Room(1, failed_alone=True, error=TransferFailedError("no"))
    rooms.open_request("d0", open_request(), now=0.0)
    rooms.add(room)
    rooms.open_request("d1", open_request(), now=0.0)
    rooms.remove(room, now=0.0)
    for receiver in ("d0", "d1"):
        assert rooms.open_request(receiver, open_request(generation=8), now=0.0) is None


def test_a_number_means_its_room_as_long_as_somebody_may_be_refused_or_has_refused_it():
    rooms, room = table(), Room(1, failed_alone=True, error=TransferFailedError("no"))
    assert not rooms.holds(1)
    rooms.add(room)
    rooms.remove(room, now=0.0)
    assert rooms.holds(1)
    assert not rooms.holds(2)
    rooms.expired(now=10.0)
    assert not rooms.holds(1)
    assert rooms.refused_by("d0", refusal(), now=11.0) is None
    assert rooms.holds(1)
    rooms.expired(now=21.0)
    assert not rooms.holds(1)


def test_too_many_are_refused_by_name():
    rooms = table(max_pending=1)
    rooms.open_request("d0", open_request(room=1), now=0.0)
    with pytest.raises(QueueFullError, match="KVFERRY_MAX_ROOMS of the prefill side"):
        rooms.open_request("d0", open_request(room=2), now=0.0)


def test_closed_takes_no_open_requests_and_names_whom_to_tell():
    rooms = table()
    rooms.open_request("d0", open_request(), now=0.0)
    assert rooms.close() == [("d0", open_request())]
    with pytest.raises(EndpointClosedError):
        rooms.open_request("d0", open_request(generation=9), now=0.0)


def test_removing_what_was_replaced_does_nothing():
    rooms, first, second = table(), Room(1), Room(1)
    rooms.add(first)
    rooms.remove(first, now=0.0)
    rooms.add(second)
    rooms.remove(first, now=0.0)
    assert rooms.rooms == {1: second}


def test_who_gave_up_without_asking_is_not_told_of_a_use_that_failed():
    """What it asks for under the number afterwards is the next transfer."""
    rooms, error = table(), TransferFailedError("no")
    room = Room(1, failed_alone=True, error=error, generations={"d0": 1})
    rooms.add(room)
    rooms.remove(room, now=0.0)
    rooms.abort("d1", abort(generation=5), now=0.0, is_unopened=True)
    assert rooms.open_request("d1", open_request(generation=6), now=0.0) is None
    assert not rooms.is_quiet


def test_a_late_abort_of_an_earlier_use_leaves_its_rank_to_be_told_of_the_next_that_failed():
    """Found by enumeration: the rank would have waited for its deadline."""
    rooms, error = table(), TransferFailedError("no")
    rooms.add(room := Room(1, failed_alone=True, error=error))
    rooms.remove(room, now=0.0)
    rooms.abort("d1", abort(generation=5), now=0.0)
    with pytest.raises(TransferFailedError):
        rooms.open_request("d1", open_request(generation=6), now=0.0)


def test_of_as_many_rooms_as_may_be_open_decode_ranks_hear_that_they_failed_alone():
    rooms, error = table(max_pending=3, max_rooms=20), TransferFailedError("no")
    for number in range(21):
        rooms.add(room := Room(number, failed_alone=True, error=error))
        rooms.remove(room, now=0.0)
    for number in range(1, 21):
        with pytest.raises(TransferFailedError):
            rooms.open_request("d0", open_request(room=number), now=0.0)
    assert rooms.open_request("d0", open_request(room=0), now=0.0) is None, "the oldest is forgotten"


def test_a_decode_rank_may_open_as_many_rooms_early_as_it_may_have():
    settings = Settings()
    rooms = table(max_pending=2 * settings.max_rooms)
    for number in range(settings.max_rooms):
        assert rooms.open_request("d0", open_request(room=number), now=0.0) is None
    assert rooms.num_pending == settings.max_rooms


def test_what_is_remembered_is_bounded():
    rooms = table()
    for room in range(REMEMBERED + 100):
        rooms.abort("d0", abort(room=room), now=0.0)
    assert len(rooms.over) == REMEMBERED
    with pytest.raises(TransferAbortedError):
        rooms.open_request("d0", open_request(room=REMEMBERED + 99), now=0.0)


def test_what_is_remembered_of_wide_rooms_is_bounded():
    rooms = table()
    for number in range(REMEMBERED + 50):
        room = Room(number, generations={"d0": 7, "d1": 7, "d2": 7})
        rooms.add(room)
        rooms.remove(room, now=0.0)
    assert len(rooms.over) == 3 * REMEMBERED


def test_who_connects_anew_takes_back_what_nobody_has_opened_yet():
    rooms = table()
    assert rooms.attached("d0") == []
    waiting = open_request()
    rooms.open_request("d0", waiting, now=0.0)
    rooms.open_request("d1", open_request(), now=0.0)
    assert rooms.attached("d0") == [(waiting.room, waiting.generation)]
    assert rooms.attached("d0") == []
    assert [receiver for receiver, _ in rooms.add(Room(waiting.room))] == ["d1"]


def test_an_abort_of_what_was_dropped_with_a_lost_rank_is_told_from_that_of_any_other():
    rooms = table()
    waiting, taken_back = open_request(), open_request(room=2)
    for message in (waiting, taken_back):
        rooms.open_request("d0", message, now=0.0)
    assert not rooms.is_dropped("d0", abort())
    rooms.abort("d0", abort(room=2), now=0.0)
    assert rooms.forget_receiver("d0", now=0.0) == ([], [abort(room=2)])
    assert rooms.add(Room(1)) == [], "a successor may open it"
    assert rooms.is_dropped("d0", abort())
    assert rooms.holds(1)
    assert not rooms.is_dropped("d0", abort(generation=99)), "of another use of the number"
    rooms.abort("d0", abort(), now=1.0)
    assert not rooms.is_dropped("d0", abort()), "the same again"
    assert not rooms.holds(1)


def test_a_dropped_open_request_is_remembered_for_as_long_as_it_would_have_waited():
    rooms = table()
    for receiver in ("d0", "d1"):
        rooms.open_request(receiver, open_request(), now=0.0)
        rooms.forget_receiver(receiver, now=0.0 if receiver == "d0" else KEEP_S / 2)
    rooms.expired(KEEP_S)
    assert [rooms.is_dropped(receiver, abort()) for receiver in ("d0", "d1")] == [False, True]


def test_a_open_request_that_was_refused_is_refused_for_the_same_reason():
    rooms = table()
    rooms.ended("d0", 1, 7, QueueFullError("too many"))
    with pytest.raises(QueueFullError, match="too many"):
        rooms.open_request("d0", open_request(), now=1.0)


def test_who_aborted_is_not_told_that_the_room_expired():
    rooms = table()
    rooms.open_request("d0", open_request(), now=0.0)
    rooms.abort("d0", abort(), now=0.0)
    rooms.open_request("d1", open_request(generation=9), now=0.0)
    assert rooms.expired(KEEP_S) == [("d1", open_request(generation=9))]


def test_so_does_one_of_an_open_request_that_never_came_and_comes_twice():
    """Found by enumeration with three faults, once 20,000,000 states were known."""
    rooms, error = table(), TransferFailedError("no")
    rooms.abort("d1", abort(generation=5), now=0.0, is_unopened=True)
    rooms.add(room := Room(1, failed_alone=True, error=error))
    rooms.remove(room, now=0.0)
    rooms.abort("d1", abort(generation=5), now=0.0, is_unopened=True)
    with pytest.raises(TransferFailedError):
        rooms.open_request("d1", open_request(generation=6), now=0.0)


def sent_once(rooms: RoomTable[Room]) -> None:
    """Room 1 was sent to d0."""
    room = Room(1, generations={"d0": 7})
    rooms.add(room)
    rooms.remove(room, now=0.0)


def test_of_a_room_that_was_sent_others_are_told_at_once():
    rooms = table()
    sent_once(rooms)
    with pytest.raises(TransferFailedError, match=r"room 1 was sent to d0 2\.0 s ago"):
        rooms.open_request("d1", open_request(generation=8), now=2.0)
    assert rooms.is_quiet, "nothing waits for the caller"


def test_whoever_has_received_it_may_open_the_next_use_of_its_number():
    rooms = table()
    sent_once(rooms)
    assert rooms.open_request("d0", open_request(generation=8), now=2.0) is None
    assert rooms.num_pending == 1


def test_others_may_once_the_caller_has_used_the_number_again_or_after_a_while():
    rooms = table()
    sent_once(rooms)
    failed = Room(1, generations={"d1": 8}, error=TransferAbortedError("no"))
    rooms.add(failed)
    rooms.remove(failed, now=1.0)
    assert rooms.open_request("d2", open_request(generation=9), now=2.0) is None
    rooms = table()
    sent_once(rooms)
    rooms.expired(KEEP_S)
    assert rooms.open_request("d1", open_request(generation=8), now=KEEP_S) is None
