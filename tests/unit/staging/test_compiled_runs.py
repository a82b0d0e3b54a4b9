"""Runs of sub-chunks in compiled code: what is written, what is told, and what is left where something fails."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.errors import PeerDisconnectedError, RegistrationError, TransportError
from kvferry.layout import Region
from kvferry.plan.packing import BlockShape
from kvferry.staging import compiled_runs
from kvferry.staging.compiled_runs import SLICE_BYTES, CompiledRuns
from kvferry.staging.host import HostKernels, fastest
from kvferry.staging.kernels import PackedBlocks
from kvferry.staging.resources import MachineResources
from kvferry.staging.runs import Comings, Runs, Step
from kvferry.transport import InProcessNetwork, InProcessTransport, TransferHandle, Transport
from kvferry.transport.base import CompiledWay
from kvferry.transport.compiled_posts import PostCalls, Posted, SharedLock, Wire

POINTER, NUMBER = ctypes.c_void_p, ctypes.c_int
KIB = 1 << 10
ENDED, MOVES, FAILS = 0, 1, -2


@dataclass
class Write:
    """A write that compiled code has asked for."""

    source: int
    to: int
    length: int
    notification: bytes


@dataclass
class Calls:
    """What stands for NIXL's C interface: writes that end, or go on, or fail, one after the other.

    Attributes:
        outcomes: what posts of writes return, the first one's first; those behind end at once.
        look: what the status of a write is.
        on_call: called with what is called: "make", "post" or "look".
        unmade: the numbers of requests that cannot be made.
        made: requests that were made and not destroyed yet.
    """

    outcomes: list[int] = field(default_factory=list)
    unmade: set[int] = field(default_factory=set)
    writes: list[Write] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    objects: dict[int, Any] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)
    look: int = MOVES
    number: int = 0
    on_call: Callable[[str], None] = lambda name: None

    def __post_init__(self) -> None:
        self._lists: dict[int, tuple[int, int]] = {}
        self._notification: bytes | None = None
        self._requests: dict[int, Write] = {}
        pointer_to = ctypes.POINTER(POINTER)
        kinds: dict[str, Sequence[Any]] = {
            "create_opt_args": (pointer_to,),
            "destroy_opt_args": (POINTER,),
            "opt_args_set_has_notif": (POINTER, ctypes.c_bool),
            "opt_args_set_notif_msg": (POINTER, POINTER, ctypes.c_size_t),
            "create_xfer_dlist": (NUMBER, pointer_to),
            "xfer_dlist_add_desc": (POINTER, POINTER, ctypes.c_size_t, ctypes.c_uint64),
            "destroy_xfer_dlist": (POINTER,),
            "create_xfer_req": (POINTER, NUMBER, POINTER, POINTER, ctypes.c_char_p, pointer_to, POINTER),
            "destroy_xfer_req": (POINTER,),
            "post_xfer_req": (POINTER, POINTER, POINTER),
            "get_xfer_status": (POINTER, POINTER),
            "release_xfer_req": (POINTER, POINTER),
        }
        self._functions = [ctypes.CFUNCTYPE(NUMBER, *kinds[name])(getattr(self, name)) for name in PostCalls.NAMES]
        self.table = PostCalls(*(ctypes.cast(function, POINTER).value for function in self._functions))

    def _made(self, what: str, where: Any) -> int:
        self.number += 1
        kept = ctypes.c_uint64(self.number)
        self.objects[ctypes.addressof(kept)] = what, kept
        where[0] = ctypes.addressof(kept)
        return 0

    def _gone(self, what: str, address: int) -> int:
        assert self.objects.pop(address)[0] == what
        return 0

    def create_opt_args(self, where: Any) -> int:
        return self._made("options", where)

    def destroy_opt_args(self, address: int) -> int:
        return self._gone("options", address)

    def opt_args_set_has_notif(self, _: int, has: bool) -> int:
        self._notification = b"" if has else None
        return 0

    def opt_args_set_notif_msg(self, _: int, data: int, length: int) -> int:
        self._notification = ctypes.string_at(data, length)
        return 0

    def create_xfer_dlist(self, memory: int, where: Any) -> int:
        assert memory == 0
        return self._made("list", where)

    def xfer_dlist_add_desc(self, at: int, address: int, length: int, device: int) -> int:
        assert device == 0
        self._lists[at] = address, length
        return 0

    def destroy_xfer_dlist(self, address: int) -> int:
        return self._gone("list", address)

    def create_xfer_req(
        self, agent: int, operation: int, ours: int, theirs: int, peer: bytes, where: Any, _: int
    ) -> int:
        self.on_call("make")
        assert (agent, operation, peer) == (AGENT, 1, b"decode"), "a write of ours to the peer"
        assert self._notification is None, "a request that is made takes none"
        if len(self._requests) in self.unmade:
            self._requests[-len(self._requests) - 1] = Write(0, 0, 0, b"")
            return FAILS
        source, length = self._lists[ours]
        to, same = self._lists[theirs]
        assert length == same
        self._made("request", where)
        self._requests[self.number] = Write(source, to, length, b"")
        return 0

    def destroy_xfer_req(self, address: int) -> int:
        assert ctypes.c_uint64.from_address(address).value == 0, "the handle is the caller's, or was released"
        return self._gone("request", address)

    def post_xfer_req(self, _: int, request: int, __: int) -> int:
        handle = ctypes.c_uint64.from_address(request).value
        write = self._requests[handle]
        write.notification = self._notification or b""
        outcome = self.outcomes[len(self.writes)] if len(self.writes) < len(self.outcomes) else ENDED
        self.writes.append(write)
        if outcome != FAILS:
            ctypes.memmove(write.to, write.source, write.length)
        self.on_call("post")
        return outcome

    def get_xfer_status(self, _: int, request: int) -> int:
        self.asked.append(ctypes.c_uint64.from_address(request).value)
        self.on_call("look")
        return self.look

    def release_xfer_req(self, _: int, request: int) -> int:
        kept = ctypes.c_uint64.from_address(request)
        self.released.append(kept.value)
        kept.value = 0
        return 0


AGENT = 77


class Way(CompiledWay):
    def __init__(self, calls: Calls) -> None:
        self.copies_as_it_posts = True
        self._table = calls.table
        self.wire = Wire(ctypes.pointer(self._table), AGENT, b"decode", 0, 0, 0)
        self.adopted: list[Posted] = []

    def adopt(self, posted: Posted, notification: bytes) -> TransferHandle:
        self.adopted.append(posted)
        return TransferHandle()


class OneWay:
    """A transport that has the way; writes of the interpreter's own are kept, or fail."""

    has_compiled_ways = True

    def __init__(self, calls: Calls) -> None:
        self.way: Way | None = Way(calls)
        self.written: list[tuple[Region, str, int, bytes]] = []
        self.problem: Exception | None = None

    def compiled_way(self, peer: str) -> Way | None:
        assert peer == "decode"
        return self.way

    def write(self, source: Region, peer: str, address: int, notification: bytes) -> TransferHandle:
        if self.problem is not None:
            raise self.problem
        self.written.append((source, peer, address, notification))
        ctypes.memmove(address, source.address, source.length)
        return TransferHandle()


SHAPE = BlockShape(((4, 96 * KIB),), 24 * KIB)
BLOCKS = 20


class World:
    """A pool, staging memory, a receiver's memory, and steps between them."""

    def __init__(self) -> None:
        if fastest()[1]:
            pytest.fail(f"compiled code is not installed: {fastest()[1]}")
        random = np.random.default_rng(0)
        self.pool = random.integers(0, 256, 24 << 20, np.uint8)
        self.packed, self.memory = np.zeros((3, 5 << 20), np.uint8), np.zeros((3, 5 << 20), np.uint8)
        self.calls = Calls()
        self.transport = OneWay(self.calls)
        self.kernels = HostKernels([Region(self.pool.ctypes.data, self.pool.size)], fastest()[0])
        self.clock = 0.0
        self.runs = CompiledRuns(self.kernels, cast(Any, self.transport), self.now)
        self.comings = Comings()
        order = random.permutation(self.pool.size // (96 * KIB) // 4)
        self.steps = [self._step(number, order[number * BLOCKS :]) for number in range(3)]

    def now(self) -> float:
        self.clock += 1
        return self.clock

    def _step(self, number: int, order: NDArray[np.int64]) -> Step:
        starts = self.pool.ctypes.data + order[:BLOCKS] * 4 * 96 * KIB
        longer = BlockShape((), 300 * KIB + 5)
        second = PackedBlocks(starts[:3], longer, -(-len(starts) * SHAPE.num_bytes // 256) * 256 + 256)
        blocks = [PackedBlocks(starts, SHAPE, 0), second]
        source = Region(self.packed[number].ctypes.data, second.stop)
        return Step(blocks, source, self.memory[number].ctypes.data, f"step {number}".encode())

    def expected(self, number: int) -> list[NDArray[np.uint8]]:
        """What the blocks of a step have, one group after the other."""
        step, packed = self.steps[number], np.zeros(5 << 20, np.uint8)
        for each in step.blocks:
            self.kernels.gather(each.starts, each.shape, packed.ctypes.data + each.offset)
        return [packed[each.offset : each.stop] for each in step.blocks]

    def check(self, number: int) -> None:
        """A step's bytes are where they belong."""
        for each, expected in zip(self.steps[number].blocks, self.expected(number), strict=True):
            assert np.array_equal(self.memory[number][each.offset : each.stop], expected)

    def run(self) -> int:
        begun = self.runs.run(self.steps, "decode", self.comings)
        assert not [what for what, _ in self.calls.objects.values()], "what was made is destroyed"
        return begun


@pytest.fixture
def world() -> World:
    return World()


def test_steps_that_end_with_their_posts_go_in_slices_and_only_the_last_of_a_step_tells(world: World):
    assert world.run() == 3
    for number in range(3):
        world.check(number)
    told = [write.notification for write in world.calls.writes]
    assert [each for each in told if each] == [b"step 0", b"step 1", b"step 2"]
    assert told[-1] == b"step 2"
    assert len(told) > 2 * 3
    assert max(write.length for write in world.calls.writes) <= SLICE_BYTES
    assert {write.source for write in world.calls.writes} == {step.source.address for step in world.steps}
    assert world.transport.way is not None
    for step, posted in zip(world.steps, world.transport.way.adopted, strict=True):
        assert (posted.ended_bytes, posted.handles, posted.is_notified) == (step.source.length, [], True)
        assert step.gathered_at is not None
        assert step.gathered_at <= step.posted_at
    assert len(world.calls.released) == len(told)


def test_each_call_of_compiled_code_is_watched_for_it_runs_without_the_interpreters_lock(world: World):
    begun: list[int] = []

    def watch(call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*given: Any) -> Any:
            begun.append(call(*given))
            return begun[-1]

        return watched

    world.runs = CompiledRuns(world.kernels, cast(Any, world.transport), world.now, watch=watch)
    assert world.run() == 3
    assert begun == [3]
    world.check(0)


def test_once_a_slice_is_on_its_way_the_rest_of_its_step_follows_in_one_piece_and_nobody_is_told_before_both(
    world: World,
):
    world.calls.outcomes = [ENDED, MOVES, MOVES]
    assert world.run() == 3
    first, second, rest = world.calls.writes[:3]
    assert rest.to + rest.length == world.steps[0].address + world.steps[0].source.length
    assert rest.source >= second.source + second.length, "what is on its way is not overwritten"
    assert [each.notification for each in (first, second, rest)] == [b"", b"", b""]
    world.check(0)
    assert world.transport.way is not None
    posted = world.transport.way.adopted[0]
    assert (len(posted.handles), posted.is_notified, posted.ended) == (2, False, 1)
    assert not set(posted.handles) & set(world.calls.released)
    assert world.calls.asked[-1] == posted.handles[-1], "what is on its way gets on while the next is gathered"


def test_where_writes_do_not_end_with_their_posts_steps_go_in_one_piece(world: World):
    assert world.transport.way is not None
    world.transport.way.copies_as_it_posts = False
    assert world.run() == 3
    assert [write.length for write in world.calls.writes] == [step.source.length for step in world.steps]
    assert [write.notification for write in world.calls.writes] == [step.notification for step in world.steps]


def test_a_slice_whose_end_the_look_after_its_post_finds_has_ended(world: World):
    world.calls.outcomes, world.calls.look = [MOVES] * 100, ENDED
    assert world.run() == 3
    assert max(write.length for write in world.calls.writes) <= SLICE_BYTES
    assert world.transport.way is not None
    assert [posted.handles for posted in world.transport.way.adopted] == [[], [], []]
    assert len(world.calls.released) == len(world.calls.writes)
    for number in range(3):
        world.check(number)


def test_whoever_makes_progress_waits_for_posts_and_looks_and_for_nothing_else(world: World):
    progress, held = SharedLock(), set[tuple[str, bool]]()

    def look(name: str) -> None:
        if is_free := progress.acquire(blocking=False):
            progress.release()
        held.add((name, not is_free))

    assert world.transport.way is not None
    world.transport.way.wire.progress = progress.address
    world.calls.outcomes, world.calls.on_call = [ENDED, MOVES, MOVES], look
    assert world.run() == 3
    assert held == {("make", False), ("post", True), ("look", True)}
    assert progress.acquire(blocking=False)


def test_it_is_told_when_each_step_began_and_how_long_its_posts_took(world: World):
    begun_at = time.monotonic()
    assert world.run() == 3
    assert world.transport.way is not None
    for step, posted in zip(world.steps, world.transport.way.adopted, strict=True):
        assert step.begun_at is not None
        assert step.gathered_at is not None
        assert begun_at <= step.begun_at < step.gathered_at
        assert step.posted_at - step.gathered_at == pytest.approx(posted.posting_s)
        begun_at = step.posted_at


def test_what_was_gathered_beforehand_keeps_the_times_of_that(world: World):
    step = world.steps[0]
    for each in step.blocks:
        world.kernels.gather(each.starts, each.shape, step.source.address + each.offset)
    before = Step([], step.source, step.address, b"", begun_at=1.0, gathered_at=2.0)
    assert world.runs.run([before], "decode", world.comings) == 1
    assert (before.begun_at, before.gathered_at) == (1.0, 2.0)
    world.check(0)


def test_where_taking_over_a_write_raises_those_before_it_are_known(world: World):
    problem = RuntimeError("planted")

    def adopt(posted: Posted, notification: bytes) -> TransferHandle:
        if notification == b"step 1":
            raise problem
        return TransferHandle()

    assert world.transport.way is not None
    world.transport.way.adopt = adopt  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="planted"):
        world.run()
    assert [step.transfer is None for step in world.steps] == [False, True, True]


def test_only_where_compiled_code_can_write_a_run_has_several_steps(world: World):
    resources = MachineResources()
    assert resources.runs(world.kernels, cast(Any, world.transport), world.now).most_steps > 1
    in_process = InProcessTransport(InProcessNetwork(), "prefill")
    assert resources.runs(world.kernels, in_process, world.now).most_steps == 1


def test_a_run_ends_after_a_step_when_somebody_comes(world: World):
    def come(name: str) -> None:
        if name == "post":
            world.comings.come()

    world.calls.on_call = come
    assert world.run() == 1
    assert world.steps[1].transfer is None
    world.check(0)
    assert not world.memory[1].any()


def test_where_somebody_has_come_before_a_run_does_one_step(world: World):
    world.comings.come()
    assert world.run() == 1


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_post_that_fails_ends_the_run_and_is_handed_over_as_half_posted(world: World, failing: int):
    world.calls.outcomes = [ENDED] * failing + [FAILS]
    assert world.run() == 1
    assert len(world.calls.writes) == failing + 1
    assert world.transport.way is not None
    (posted,) = world.transport.way.adopted
    assert (posted.is_half_posted, posted.is_made, len(posted.handles), posted.ended) == (True, True, 1, failing)
    assert world.steps[1].gathered_at is None


def test_a_request_that_cannot_be_made_is_the_interpreters_which_writes_all_of_the_step_or_says_why(world: World):
    world.calls.unmade = {2}
    assert world.run() == 1
    assert [(to, told) for _, _, to, told in world.transport.written] == [(world.steps[0].address, b"step 0")]
    world.check(0)
    assert world.steps[0].error is None
    world.transport.problem = PeerDisconnectedError("it has gone")
    world.calls.unmade = {len(world.calls.writes) + 1}
    world.steps = world.steps[1:]
    assert world.run() == 1
    assert world.steps[0].error is world.transport.problem
    assert world.steps[0].gathered_at is not None


def test_a_request_that_cannot_be_made_while_a_slice_is_on_its_way_is_no_end_of_that(world: World):
    world.calls.outcomes, world.calls.unmade = [MOVES], {1}
    assert world.run() == 1
    assert world.transport.way is not None
    (posted,) = world.transport.way.adopted
    assert (posted.is_made, len(posted.handles), posted.is_notified) == (False, 1, False)
    assert world.transport.written == []


def test_blocks_outside_the_pool_are_refused_before_anything_is_copied(world: World):
    world.steps[1].blocks = [PackedBlocks(np.array([64], np.int64), SHAPE, 0)]
    assert world.run() == 1
    world.check(0)
    world.steps = world.steps[1:]
    assert world.run() == 1
    assert world.calls.writes == []
    assert isinstance(world.steps[0].error, RegistrationError)
    assert world.steps[0].gathered_at is None


def test_without_a_way_the_interpreter_does_one_a_run_since_nothing_is_polled_in_between(world: World):
    assert world.runs.steps_to("decode") > 1
    world.transport.way = None
    assert world.runs.steps_to("decode") == 1
    assert world.run() == 1
    world.check(0)
    assert world.steps[1].transfer is None
    assert world.calls.writes == []


@pytest.mark.parametrize("failing", ["compiled_way", "described"])
def test_whatever_is_raised_before_anything_is_posted_leaves_a_step_to_the_interpreter(
    world: World, monkeypatch: pytest.MonkeyPatch, failing: str
):
    """Else it would not be known what was posted, and all of the run would keep its memory for good."""

    def fails(_: object) -> None:
        raise MemoryError("planted")

    monkeypatch.setattr(world.transport if failing == "compiled_way" else compiled_runs, failing, fails)
    assert world.run() == 1
    world.check(0)
    assert world.calls.writes == []


def test_the_interpreter_ends_a_run_with_a_step_that_fails(world: World):
    runs = Runs(world.kernels, cast(Transport, world.transport), world.now, most_steps=3)
    world.transport.problem = TransportError("no")
    assert runs.run(world.steps, "decode", world.comings) == 1
    assert (world.steps[0].error, world.steps[0].transfer) == (world.transport.problem, None)
