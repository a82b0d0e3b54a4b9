"""Rooms and decode ranks that come and go on several threads at once: every schedule with up to two preemptions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.simulation.test_interleavings import LAYOUT, NOTHING, deep, work
from tests.support.caches import Shape
from tests.support.schedules import Check, Schedule, explore
from tests.support.tiers import Tier

from kvferry.endpoint.prefill import decode_ranks, rooms
from kvferry.endpoint.prefill.decode_ranks import DecodeRanks
from kvferry.endpoint.prefill.room_actor import OpenReceived
from kvferry.endpoint.prefill.rooms import SendingRooms
from kvferry.endpoint.runtime import run_queue
from kvferry.endpoint.runtime.run_queue import RunQueue
from kvferry.errors import EndpointClosedError
from kvferry.observe.records import Observer
from kvferry.protocol.transfer import room_table
from kvferry.protocol.wire.messages import AbortRoom, Attach, OpenRoom
from kvferry.settings import Settings

SETTINGS = Settings()
RANK = SimpleNamespace(can_be_beside=lambda ranks: False)


ATTACH = Attach(
    endpoint="d0",
    attempt=1,
    engine="decode",
    coordinates=Shape().coordinates()[0],
    layout=LAYOUT,
    pieces=(),
    transport="none",
    transport_metadata=b"",
)


class Connections:
    """What a transport has of one decode rank: at most one connection."""

    def __init__(self) -> None:
        self.open = 0

    def attach(self, message: Any, **given: Any) -> Any:
        assert self.open == 0, "the earlier connection is undone first"
        self.open = 1
        paths = SimpleNamespace(forced=None)
        return SimpleNamespace(paths=paths, retire=lambda undo: undo(), release=self._release)

    def _release(self) -> None:
        self.open -= 1


def test_a_decode_rank_that_connects_again_and_again_is_connected_once(monkeypatch: pytest.MonkeyPatch, tier: Tier):
    """A worker makes and undoes connections, the control thread asks for them."""

    def scenario(schedule: Schedule) -> Check:
        connections, queue = Connections(), RunQueue()
        monkeypatch.setattr(decode_ranks, "attach", connections.attach)
        nothing = SimpleNamespace(last_failure_to=lambda name: 0)
        context: Any = SimpleNamespace(
            identity=SimpleNamespace(endpoint="p0"),
            settings=SimpleNamespace(max_decode_ranks=2),
            transport=NOTHING,
            staging=NOTHING,
            spoken=SimpleNamespace(of=lambda name: 1),
            broken_off=nothing,
            send=lambda receiver, message: None,
        )
        ranks = DecodeRanks(context, queue_of=lambda name: queue)

        def control() -> None:
            for attempt in (1, 2, 3):
                ranks.attach(msgspec.structs.replace(ATTACH, attempt=attempt), 0.0)
            queue.put(None)

        def take_turns() -> None:
            work(queue)
            while queue.has_any:  # what came of the last turns
                queue.put(None)
                work(queue)

        schedule.thread(control)
        schedule.thread(take_turns)

        def check() -> None:
            assert connections.open == 1
            assert len(ranks) == 1
            assert [peer.attempt for peer in ranks.peers() if peer.attachment is not None] == [3]

        return check

    # Two take longer than any other test may: for the long tier, which has the time.
    explore(scenario, lines=[decode_ranks, run_queue], preemptions=tier.amount(quick=1, full=1, long=2))


class Room:
    """A room of the prefill side, as the table sees it, and what it was given."""

    failed_alone = False
    error = None

    def __init__(self, machine: Any, *others: Any, **given: Any) -> None:
        self.room = machine.room
        self.machine = SimpleNamespace(deadline=None)
        self.generations: dict[str, int] = {}
        self.sender = self
        self.given: list[Any] = []
        self.post = self.given.append


class Answers:
    """The answers to decode ranks."""

    def __init__(self) -> None:
        self.failed: list[Exception] = []
        self.drained: list[int] = []

    def tell_failed(self, receiver: str, room: int, generation: int, error: Exception) -> None:
        self.failed.append(error)

    def tell_drained(self, receiver: str, room: int, generation: int, **_: object) -> None:
        self.drained.append(room)


def sending_rooms(answers: Answers) -> SendingRooms:
    attachment = SimpleNamespace(
        elected=lambda room, group_rank: (),
        checked=lambda message, elected: message.checked(LAYOUT, elected, where="room 1 on d0"),
        rank=RANK,
    )
    ranks: Any = SimpleNamespace(attachment=lambda name: attachment, given_up=lambda name: None, rank=lambda name: RANK)
    context: Any = SimpleNamespace(
        staging=SimpleNamespace(joined_pages=1),
        identity=SimpleNamespace(engine="p", layout=LAYOUT, coordinates=Shape().coordinates()[0], endpoint="p0"),
        settings=SETTINGS,
        now=lambda: 0.0,
        engine_rank=0,
        observer=Observer(),
        broken_off=(),
        tell_failed=answers.tell_failed,
        tell_drained=answers.tell_drained,
    )
    unasked: Any = SimpleNamespace(opened=lambda room, now: None)
    return SendingRooms(context, ranks, NOTHING, unasked)


def opened_in(made: SendingRooms) -> Any:
    """Opens room 1, and returns it."""
    room = made.made(1, None, None, None)
    made.add(room)
    return room


REQUEST = OpenRoom(room=1, generation=5, receivers=1, tokens=None, groups=())


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[Any]]:
    """Has rooms keep what they are given, and returns that of one."""
    monkeypatch.setattr(rooms, "RoomActor", Room)
    return lambda room: room.given


def test_an_open_request_and_the_caller_find_each_other_whoever_is_first(given: Callable[[Any], list[Any]], tier: Tier):
    def scenario(schedule: Schedule) -> Check:
        answers = Answers()
        made = sending_rooms(answers)
        opened: list[Any] = []
        schedule.thread(lambda: opened.append(opened_in(made)))
        schedule.thread(lambda: made.take_open("d0", REQUEST))

        def check() -> None:
            (event,) = given(opened[0])
            assert isinstance(event, OpenReceived)
            assert (made.table.num_pending, answers.failed) == (0, [])

        return check

    explore(scenario, lines=[rooms, room_table], preemptions=deep(tier))


def test_an_open_request_is_answered_though_the_endpoint_closes(given: Callable[[Any], list[Any]], tier: Tier):
    """By its room, or at once; and an abort behind it is answered as well."""

    def scenario(schedule: Schedule) -> Check:
        answers = Answers()
        made = sending_rooms(answers)
        opened: list[Any] = []

        def open_room() -> None:
            with contextlib.suppress(EndpointClosedError):
                opened.append(opened_in(made))

        def control() -> None:
            made.take_open("d0", REQUEST)
            made.take_abort("d0", AbortRoom(room=1, generation=5, reason="no more", error=""))

        for each in (open_room, control, made.close):
            schedule.thread(each)

        def check() -> None:
            events = [type(event).__name__ for room in opened for event in given(room)]
            assert made.table.num_pending == 0 or not opened
            assert "ReceiverMessage" in events or answers.drained

        return check

    explore(scenario, lines=[rooms], preemptions=deep(tier))
