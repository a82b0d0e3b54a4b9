"""Memory that is short, descriptor lists and small tables: every schedule of a few threads, up to two preemptions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from tests.simulation.test_interleavings import LAYOUT, NOTHING, Bell, deep
from tests.support.caches import Shape
from tests.support.schedules import Check, Schedule, explore
from tests.support.tiers import Tier
from tests.unit.endpoint.test_staged_writes import CHUNK

from kvferry.endpoint.decode import context as decode_context
from kvferry.endpoint.decode.context import DecodeContext
from kvferry.endpoint.prefill import attachment, staged_writes
from kvferry.endpoint.prefill import context as prefill_context
from kvferry.endpoint.prefill.attachment import Attachment
from kvferry.endpoint.prefill.context import BrokenOff
from kvferry.endpoint.prefill.paths import StagedPath
from kvferry.endpoint.prefill.staged_writes import StagedWrites
from kvferry.endpoint.runtime import run_queue
from kvferry.endpoint.runtime.run_queue import Timers
from kvferry.layout import Device, Region
from kvferry.observe.records import Observer
from kvferry.protocol import bounded
from kvferry.protocol.wire import versions
from kvferry.protocol.wire.versions import SpokenVersions, Versions
from kvferry.staging import StagingMemory, rings, slots
from kvferry.staging.rings import PeerMemory, SharedRing, Span
from kvferry.staging.runs import Comings
from kvferry.staging.slots import Slot, SourceMemory

# ---- memory that is short


class Taker:
    """Takes memory and gives it back."""

    def __init__(self, schedule: Schedule) -> None:
        self._bell = Bell(schedule)

    def wake(self) -> None:
        self._bell.ring()

    def take(self, take: Callable[[], Any]) -> Any:
        while (taken := take()) is None:
            self._bell.wait()
        return taken


def test_whoever_waits_for_a_ring_gets_a_span_of_its_own(tier: Tier):
    def scenario(schedule: Schedule) -> Check:
        ring = SharedRing(CHUNK)
        taken: list[Span] = []

        def use() -> None:
            taker = Taker(schedule)
            span = taker.take(lambda: ring.reserve(CHUNK, taker))
            taken.append(span)
            ring.read_until(span.stop)

        for _ in range(3):
            schedule.thread(use)

        def check() -> None:
            assert sorted(span.begin for span in taken) == [0, CHUNK, 2 * CHUNK]
            assert (ring.in_use, ring.num_waiting) == (0, 0)

        return check

    explore(scenario, lines=[rings], preemptions=deep(tier))


def source_memory(slot_count: int) -> SourceMemory:
    return SourceMemory(CHUNK, StagingMemory(Region(0, slot_count * CHUNK), Device(), None), lambda: None)


def test_whoever_waits_for_a_slot_gets_one_that_nobody_else_has(tier: Tier):
    def scenario(schedule: Schedule) -> Check:
        memory = source_memory(1)
        in_use: list[Slot] = []

        def use(receiver: str) -> None:
            taker = Taker(schedule)
            slot = taker.take(lambda: memory.take(receiver, taker))
            assert not in_use
            in_use.append(slot)
            schedule.point()
            in_use.remove(slot)
            memory.give_back(slot)

        for receiver in ("d0", "d0", "d1"):
            schedule.thread(lambda receiver=receiver: use(receiver))  # type: ignore[misc]

        def check() -> None:
            assert memory.num_waiting == 0
            assert memory.take("d2", NOTHING) is not None

        return check

    explore(scenario, lines=[slots, rings], preemptions=deep(tier))


def test_a_waiter_that_withdraws_when_it_is_woken_passes_that_on(tier: Tier):
    def scenario(schedule: Schedule) -> Check:
        memory = source_memory(1)
        first = memory.take("d0", NOTHING)
        assert first is not None
        withdraws, waits = Taker(schedule), Taker(schedule)
        assert memory.take("d1", withdraws) is None
        assert memory.take("d2", waits) is None
        schedule.thread(lambda: memory.give_back(first))
        schedule.thread(lambda: memory.withdraw(withdraws))
        schedule.thread(lambda: waits.take(lambda: memory.take("d2", waits)))

        def check() -> None:
            assert memory.num_waiting == 0

        return check

    explore(scenario, lines=[slots, rings], preemptions=deep(tier))


def test_two_slots_that_come_back_at_once_go_to_two_who_wait(tier: Tier):
    def scenario(schedule: Schedule) -> Check:
        memory = source_memory(2)
        in_use = [memory.take("d0", NOTHING) for _ in range(2)]
        waits = {receiver: Taker(schedule) for receiver in ("d1", "d2")}
        for receiver, taker in waits.items():
            assert memory.take(receiver, taker) is None

        def give_back() -> None:
            for slot in in_use:
                assert slot is not None
                memory.give_back(slot)

        schedule.thread(give_back)
        for receiver, taker in waits.items():
            schedule.thread(partial(taker.take, partial(memory.take, receiver, taker)))

        def check() -> None:
            assert memory.num_waiting == 0

        return check

    explore(scenario, lines=[slots, rings], preemptions=deep(tier))


RUNS: Any = SimpleNamespace(steps_to=lambda receiver: 1, run=lambda steps, receiver, comings: len(steps))


class Parts:
    """A staged write of so many sub-chunks, each of which fills the ring."""

    submitted_at = 0.0
    left_bytes = CHUNK

    def __init__(self, count: int) -> None:
        self.posted: list[Span] = []
        self._count = count

    @property
    def next_bytes(self) -> int | None:
        return CHUNK if len(self.posted) < self._count else None

    @property
    def is_through(self) -> bool:
        return False

    error = None

    def prepare(self, slot: Slot, span: Span, memory: SourceMemory, *, ready_at: float | None) -> Any:
        self.posted.append(span)
        memory.give_back(slot)
        return SimpleNamespace(write=self, step=None, result=None, begun=lambda worker: None)


def test_a_room_that_waits_for_a_ring_posts_its_next_part_when_that_was_read(tier: Tier):
    def scenario(schedule: Schedule) -> Check:
        ring, memory = SharedRing(CHUNK), source_memory(1)
        turns: deque[object] = deque()
        bell, posted = Bell(schedule), Bell(schedule)

        def post(event: object) -> None:
            turns.append(event)
            bell.ring()

        target: Any = SimpleNamespace(
            receiver="d0",
            context=SimpleNamespace(now=lambda: 0.0, observer=Observer()),
            room=SimpleNamespace(post=post),
            staged=StagedPath(PeerMemory(0, 1, ring), NOTHING, RUNS, NOTHING, CHUNK),
            attachment=SimpleNamespace(digests=None),
        )
        writes, parts = StagedWrites(target), Parts(3)
        writes.writes[0] = cast(Any, parts)
        worker: Any = SimpleNamespace(memory=memory, comings=lambda due_at: Comings())
        writes.wake()

        def take_turns() -> None:
            while len(parts.posted) < 3:
                while not turns:
                    bell.wait()
                turns.popleft()
                writes.post_next(worker)
                posted.ring()

        def read() -> None:
            for count in (1, 2):
                while len(parts.posted) < count:
                    posted.wait()
                ring.read_until(count * CHUNK)

        schedule.thread(take_turns)
        schedule.thread(read)
        return lambda: None

    explore(scenario, lines=[staged_writes, rings], preemptions=deep(tier))


# ---- descriptor lists


def test_lists_are_given_back_once_when_no_write_uses_them():
    def scenario(schedule: Schedule) -> Check:
        message: Any = SimpleNamespace(
            endpoint="d0", engine="decode", coordinates=Shape().coordinates()[0], layout=LAYOUT, checksums=False
        )
        lists = Attachment(message, NOTHING, NOTHING, NOTHING, digests=None, merged_bytes=1)
        users: list[int] = []
        given_back: list[int] = []

        def give_back() -> None:
            assert not users, "under a write"
            given_back.append(1)

        def write(number: int) -> None:
            if lists.begin_write():
                assert not given_back
                users.append(number)
                schedule.point()
                users.remove(number)
                lists.end_write()

        for number in range(2):
            schedule.thread(lambda number=number: write(number))  # type: ignore[misc]
        schedule.thread(lambda: lists.retire(give_back))

        def check() -> None:
            assert given_back == [1]

        return check

    explore(scenario, instructions=[attachment], preemptions=2)


# ---- tables that one thread changes and another reads


def test_a_deadline_that_moves_while_others_come_due_is_kept():
    def scenario(schedule: Schedule) -> Check:
        made: Timers[str] = Timers()
        for key, due_at in (("a", 1.0), ("b", 1.0), ("c", 5.0)):
            made.set(key, due_at)
        found: list[str] = []

        def move() -> None:
            made.set("a", 3.0)
            made.set("c", 2.0)
            made.set("b", None)

        schedule.thread(move)
        schedule.thread(lambda: found.extend(made.due(1.0)))

        def check() -> None:
            assert made.due(1.5) == []
            assert made.due(2.0) == ["c"]
            assert made.due(3.0) == ["c", "a"]
            assert len(made) == 2
            assert set(found) <= {"a", "b"}

        return check

    explore(scenario, instructions=[run_queue], preemptions=2)


def test_failed_writes_of_several_workers_have_numbers_of_their_own():
    def scenario(schedule: Schedule) -> Check:
        broken_off = BrokenOff()
        for name in ("d0", "d1"):
            schedule.thread(lambda name=name: broken_off.add(name))  # type: ignore[misc]

        def check() -> None:
            assert sorted(broken_off.last_failure_to(name) for name in ("d0", "d1")) == [1, 2]
            assert list(broken_off.last_failures) == sorted(broken_off.last_failures, key=broken_off.last_failure_to), (
                "the latest stand last"
            )

        return check

    explore(scenario, instructions=[prefill_context])


def test_who_was_broken_off_and_who_has_spoken_is_never_forgotten_while_it_is_noted_again():
    """Workers look without a lock."""

    def scenario(schedule: Schedule) -> Check:
        broken_off, spoken = BrokenOff(), SpokenVersions(Versions(oldest=1, newest=3))
        broken_off.add("d0")
        spoken.record("d0", 3)
        seen: list[object] = []

        def note_again() -> None:
            broken_off.add("d0")
            spoken.record("d0", 3)

        def look() -> None:
            seen.append(("d0" in broken_off, broken_off.last_failure_to("d0") > 0, spoken.of("d0")))

        schedule.thread(note_again)
        schedule.thread(look)

        def check() -> None:
            assert seen == [(True, True, 3)]

        return check

    explore(scenario, instructions=[bounded, prefill_context, versions])


def test_work_for_the_decode_endpoints_thread_is_found_when_that_is_woken():
    def scenario(schedule: Schedule) -> Check:
        bell = Bell(schedule)
        context: Any = SimpleNamespace(inbox=deque(), end=SimpleNamespace(wake=bell.ring))
        done: list[int] = []

        def submit(number: int) -> None:
            DecodeContext.submit(context, lambda now: done.append(number))

        def turns() -> None:
            while len(done) < 2:
                bell.wait()
                while context.inbox:
                    schedule.point()
                    context.inbox.popleft()(0.0)

        for number in range(2):
            schedule.thread(lambda number=number: submit(number))  # type: ignore[misc]
        schedule.thread(turns)
        return lambda: None

    explore(scenario, lines=[decode_context])
