"""Two prefill and two decode ranks in processes of their own, of which one is struck by a fault at a known step.

`struck_prefill` and `struck_decode` exchange rooms; the other rank of either kind is there for the rooms that must not
notice. Between `struck_prefill` and the decode ranks is a proxy, so that their control connection can be cut.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from tests.support.caches import Model, Shape
from tests.support.processes import End, Rank, RankProcess
from tests.support.proxy import ControlProxy
from tests.support.real_transport import REAL
from tests.support.registries import RegistryProcess
from tests.support.resources import Resources
from tests.support.waiting import PATIENCE_S, eventually

from kvferry import RankCoordinates

HEARTBEAT_S = 0.25
PEER_TIMEOUT_S = 2.5
"""A process of a busy machine must not be taken for a dead one, and most cells wait for as long."""

LEASE_S = 1.0
DEADLINE_S = 8.0
"""How long two ranks look for each other."""

WAITING_S = 12.0
"""Every other longest wait of the protocol's: for input, for one write. Rooms that survive are half-way for seconds."""

END_S = 40.0
"""How long a room may take to end, and pages to come back: longer than all of these. Which of them ended a room, its
error says."""

MOMENT_S = 0.4
"""How long somebody is away whom nobody gives up meanwhile."""

TIMES = {
    "heartbeat_interval_s": HEARTBEAT_S,
    "peer_timeout_s": PEER_TIMEOUT_S,
    "quarantine_s": 0.3,
    "registry_lease_s": LEASE_S,
    "bootstrap_timeout_s": DEADLINE_S,
    "waiting_timeout_s": WAITING_S,
    "write_timeout_s": WAITING_S,
    "close_timeout_s": 1.0,
}

MEMORY_TOLERANCE_BYTES = 12 << 20
"""What a survivor may have more of after a cell. The allocator keeps some of what filling and checking pages takes, and
NIXL some buffers; what is less than this in one cell, and more after many, has a test of its own."""

RECONNECT_SOCKETS = 8
"""What a survivor may have more of after a cell in which two agents of NIXL lose each other and meet again, and both
live: NIXL 1.5.1 closes no connection to an agent that lives, so that either side keeps one socket, or one for each of
its threads, for every time, until one of the two agents ends. Enough for two reunions of two workers."""

LOOK_UPS = 1
"""Threads, and their connections to the registry, that a survivor may have more of after a cell that begins with a
decode rank that knows nobody: two look engines up at most, and the second is made when both are wanted at once."""

PROOFS = 1
"""The thread, and its connection to the registry, with which a survivor asks whether an operator has released a rank
that it lost: made when it first does."""

FAILED_CONNECT_SOCKETS = 2
"""What a survivor may have more of where a process dies: whether it tries to connect to the agent that has just gone is
chance, and NIXL keeps what it had made until then, one socket for each of its workers."""

LANES = 8 if REAL.name == "mooncake" else 0
"""What a survivor may have more of in any cell: Mooncake opens up to four connections to each of its two peers, as more
ranges are on their way at a time, and keeps them while the peer lives."""

MODEL = Model(layers=4, heads=4, head_dim=64, page_tokens=16, dtype="float32")
"""128 KiB stand behind every page number."""

POOL_PAGES = 512
FIRST_SMALL_PAGE = 256
ROOM_PAGES = 8
HALF = ROOM_PAGES // 2

SETTINGS: dict[str, dict[str, Any]] = {
    "direct": {"path": "direct"},
    # A ring of four sub-chunks, so that a large room soon waits for credit. More threads than those, so that
    # one room that a gate holds up holds up no other.
    "staged": {
        "path": "staged",
        "staging_ring_mib": 1.0,
        "staging_chunk_mib": 0.25,
        "scatter_workers": 6,
        "gather_workers": 3,
    },
}

LATE_WRITE_S = 0.3
"""How long a write that must not come any more is given to come."""

LARGE_ROOM_PAGES = {"direct": 256, "staged": 64}
"""More than sockets buffer, and more than the ring holds."""


class Step(Enum):
    """How far a room is when the fault strikes."""

    NOT_CONNECTED = "before the two have connected"
    ATTACHING = "while the prefill rank prepares for the decode rank"
    OPEN_ON_DECODE = "open on the decode rank only"
    OPEN_ON_PREFILL = "open on the prefill rank only"
    BOTH_OPEN = "open on both, nothing submitted"
    BETWEEN_CHUNKS = "one chunk has arrived, the next has not been submitted"
    WRITING = "a write is on its way, or a part of one waits for credit"
    BEFORE_FINISH = "all is written, the decode rank has not been told"
    SUCCEEDED = "it has succeeded on both sides"
    ABORTING = "the decode rank has given it up, the prefill rank has not answered"


BEGIN_ANEW = (Step.NOT_CONNECTED, Step.ATTACHING)
"""The decode rank must not know anybody yet."""


class Fault(Enum):
    """What happens to a process."""

    KILL = "killed"
    RESTART = "killed, and started again at once under the same name"
    SHORT_FREEZE = "frozen, but not so long that anybody gives it up"
    LONG_FREEZE = "frozen until the other side has given it up"
    FREEZE = "frozen for ever"


class Cut(Enum):
    """What happens to the control connection of two ranks; both live."""

    SHORT_CUT = "cut, and healed before anybody gives the other up"
    LONG_CUT = "cut until both sides have given each other up"
    LONG_HOLD = "held up as long: what was sent comes late"


class Engine:
    """One engine of one rank.

    Attributes:
        name: by which it is found; a successor has the same.
        process: where it runs now.
    """

    def __init__(self, name: str, process: RankProcess, *, is_prefill: bool) -> None:
        self.name, self.process, self.is_prefill = name, process, is_prefill

    def do(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Asks the rank and waits."""
        return self.process.do(method, *arguments, **named)


@dataclass(slots=True)
class Room:
    """A room between two engines.

    Attributes:
        submitted: how many of its pages were.
        is_open: on which engines it is.
    """

    number: int
    source: Engine
    target: Engine
    source_pages: list[int]
    target_pages: list[int]
    submitted: int = 0
    is_open: set[str] = field(default_factory=set)


def noticed(since: float) -> None:
    """Waits until every survivor must have noticed what happened at that time."""
    time.sleep(max(0.0, since + PEER_TIMEOUT_S + 0.8 - time.monotonic()))


class Rooms:
    """Two prefill and two decode engines, and rooms between them.

    Attributes:
        path: which way bytes go.
        struck_prefill, struck_decode: those that something happens to.
        other_prefill, other_decode: those that must not notice.
    """

    struck_prefill: Engine
    other_prefill: Engine
    struck_decode: Engine
    other_decode: Engine

    def __init__(self, path: str) -> None:
        self.path = path
        self._rooms = itertools.count(1)
        self._small_pages = itertools.count()
        self._random = np.random.default_rng(5)

    @property
    def prefills(self) -> tuple[Engine, Engine]:
        """Both prefill engines."""
        return self.struck_prefill, self.other_prefill

    @property
    def decodes(self) -> tuple[Engine, Engine]:
        """Both decode engines."""
        return self.struck_decode, self.other_decode

    @property
    def engines(self) -> tuple[Engine, ...]:
        """All four."""
        return (*self.prefills, *self.decodes)

    def served(self) -> None:
        """A room between every pair."""
        for source, target in itertools.product(self.prefills, self.decodes):
            self.run(source, target)

    def begin_anew(self, engine: Engine) -> None:
        """The same process, with an endpoint that has met nobody yet."""
        raise NotImplementedError

    # ---- rooms --------------------------------------------------------------------------------------------------

    def new_room(self, source: Engine, target: Engine, *, pages: int = ROOM_PAGES) -> Room:
        """A room of its own number, with pages that no other room of late has."""
        if pages == ROOM_PAGES:
            slots = (POOL_PAGES - FIRST_SMALL_PAGE) // ROOM_PAGES
            first = FIRST_SMALL_PAGE + next(self._small_pages) % slots * ROOM_PAGES
        else:
            first = 0
        here, there = (self._random.permutation(np.arange(first, first + pages)).tolist() for _ in range(2))
        return Room(next(self._rooms), source, target, here, there)

    def open_source(self, room: Room) -> None:
        """Opens it on the prefill rank."""
        room.source.do(Rank.open_sender, room.number, room.source_pages)
        room.is_open.add(room.source.name)

    def open_target(self, room: Room) -> None:
        """Opens it on the decode rank."""
        room.target.do(Rank.receive, room.number, room.target_pages, room.source.name)
        room.is_open.add(room.target.name)

    def submit(self, room: Room, stop: int | None = None) -> None:
        """Submits up to some page; to the end if None."""
        stop = len(room.source_pages) if stop is None else stop
        is_last = stop == len(room.source_pages)
        room.source.do(Rank.submit, room.number, room.submitted, stop, last=is_last)
        room.submitted = stop

    def begin(self, source: Engine, target: Engine) -> Room:
        """A room that is half-way: its first chunk was submitted."""
        room = self.new_room(source, target)
        self.open_target(room)
        self.open_source(room)
        self.submit(room, HALF)
        return room

    def finish(self, room: Room) -> None:
        """Does with a room what is left to do; it must succeed on both sides, and every byte be right."""
        if room.target.name not in room.is_open:
            self.open_target(room)
        if room.source.name not in room.is_open:
            self.open_source(room)
        if room.submitted < len(room.source_pages):
            self.submit(room)
        self.succeeds(room)

    def succeeds(self, room: Room) -> None:
        """It ends well on both sides, and every byte is right."""
        ends = [each.do(Rank.end, room.number, END_S) for each in (room.source, room.target)]
        assert ends == [End("SUCCESS"), End("SUCCESS")], ends
        assert room.target.do(Rank.wait, room.number) == 0, "bytes are wrong"
        for each in (room.source, room.target):
            assert each.do(Rank.wait_reusable, room.number, END_S)

    def run(self, source: Engine, target: Engine) -> None:
        """A whole room."""
        self.agree(source, target)
        self.finish(self.new_room(source, target))

    def agree(self, source: Engine, target: Engine) -> None:
        """Waits until the decode rank relies on no prefill rank that has given it up.

        It learns of that with a heartbeat, after its process was frozen, or after the machine was busy for as long: a
        room that it opens before is refused.
        """
        name = target.do(Rank.endpoint_name)

        def holds() -> bool:
            return name in source.do(Rank.peers, target.name) or not target.do(Rank.peers, source.name)

        eventually(f"{target.name} knows whether {source.name} has given it up", holds)

    def fails(self, engine: Engine, room: Room) -> End:
        """It ends on that side, and not well."""
        end: End = engine.do(Rank.end, room.number, END_S)
        assert end.state == "FAILED", end
        return end

    # ---- steps --------------------------------------------------------------------------------------------------

    def prepare(self, step: Step) -> None:
        """What must be so before rooms are begun."""
        if step in BEGIN_ANEW:
            self.begin_anew(self.struck_decode)

    def reach(self, step: Step) -> Room:
        """A room between the two that may be struck, at that step. At one step that leaves the decode rank frozen."""
        pages = LARGE_ROOM_PAGES[self.path] if step is Step.WRITING else ROOM_PAGES
        room = self.new_room(self.struck_prefill, self.struck_decode, pages=pages)
        getattr(self, f"_reach_{step.name.lower()}")(room)
        return room

    def _reach_not_connected(self, room: Room) -> None:
        pass

    def _reach_attaching(self, room: Room) -> None:
        room.source.do(Rank.shut_gate, "attach", room.target.name)
        self.open_target(room)
        self.open_source(room)
        self.submit(room, HALF)
        assert room.source.do(Rank.gate_reached, "attach", room.target.name)

    def _reach_open_on_decode(self, room: Room) -> None:
        self.open_target(room)
        eventually("the prefill rank knows of it", lambda: room.source.do(Rank.early_rooms) == 1)

    def _reach_open_on_prefill(self, room: Room) -> None:
        self.open_source(room)
        self.submit(room, HALF)

    def _reach_both_open(self, room: Room) -> None:
        self.open_target(room)
        self.open_source(room)
        for engine in (room.source, room.target):
            eventually("open", lambda each: each.do(Rank.state, room.number)[0] == "WAITING_FOR_INPUT", engine)

    def _reach_between_chunks(self, room: Room) -> None:
        self._reach_both_open(room)
        self.submit(room, HALF)
        eventually("the first chunk has arrived", lambda: room.target.do(Rank.state, room.number)[2] == 1)

    def _reach_writing(self, room: Room) -> None:
        self._reach_both_open(room)
        if self.path == "direct":  # a frozen process takes nothing off its sockets
            room.target.process.freeze()
            self.submit(room)
            eventually("begun", lambda: room.source.do(Rank.state, room.number)[0] == "TRANSFERRING")
        else:
            room.target.do(Rank.shut_gate, "scatter", room.number)
            self.submit(room)
            eventually("it waits for credit", lambda: room.source.do(Rank.waits_for_credit))

    def _reach_before_finish(self, room: Room) -> None:
        room.source.do(Rank.shut_gate, "finish", room.number)
        self._reach_both_open(room)
        self.submit(room)
        assert room.source.do(Rank.gate_reached, "finish", room.number)

    def _reach_succeeded(self, room: Room) -> None:
        self.finish(room)

    def _reach_aborting(self, room: Room) -> None:
        room.source.do(Rank.shut_gate, "abort", room.number)
        self._reach_between_chunks(room)
        room.target.do(Rank.abort, room.number)
        assert room.source.do(Rank.gate_reached, "abort", room.number)


class Cluster(Rooms):
    """The processes, on this machine."""

    def __init__(self, path: str, *, wire: str | None = None) -> None:
        """Args:
        path: which way bytes go.
        wire: what UCX may use, such as "tcp,self"; None leaves it the choice.
        """
        super().__init__(path)
        self._wire = wire
        self._tag = f"{path}-{wire is not None:d}"
        self.registry = RegistryProcess(lease_s=LEASE_S)
        self.proxy = ControlProxy()
        self.struck_prefill, self.other_prefill = (self._engine(f"prefill-{n}", is_prefill=True) for n in "ab")
        self.struck_decode, self.other_decode = (self._engine(f"decode-{n}", is_prefill=False) for n in "ab")
        for each in self.decodes:  # both look-ups at once, so that there are as many threads for them as there ever are
            for room in [self.begin(prefill, each) for prefill in self.prefills]:
                self.finish(room)
        for source, target in itertools.product(self.prefills, self.decodes):
            self.finish(self.new_room(source, target, pages=LARGE_ROOM_PAGES[path]))
        for _ in range(3):
            self.served()

    # ---- processes ----------------------------------------------------------------------------------------------

    def _process(self) -> RankProcess:
        return RankProcess(environment={} if self._wire is None else {"UCX_TLS": self._wire})

    def _engine(self, name: str, *, is_prefill: bool) -> Engine:
        engine = Engine(f"{name}-{self._tag}", self._process(), is_prefill=is_prefill)
        self._begin(engine)
        return engine

    def _begin(self, engine: Engine, *, is_registered: bool = True) -> None:
        settings = SETTINGS[self.path] | TIMES | {"registry_url": self.registry.url}
        is_behind_proxy = engine.is_prefill and engine.name.startswith("prefill-a")
        if engine.is_prefill:
            # One queue: a worker that a gate holds up holds up no other room.
            settings |= {"workers": 4, "queues": 1, "nixl_threads": 1}
        if is_behind_proxy:
            self.proxy.target = None
            settings |= {"advertise_port": self.proxy.port}
        what = MODEL, Shape(pages=POOL_PAGES), RankCoordinates(), engine.name, settings
        if engine.is_prefill:
            engine.do(Rank.start_prefill, *what, is_registered=is_registered)
        else:
            engine.do(Rank.start_decode, *what)
        if is_behind_proxy:
            self.proxy.target = engine.do(Rank.control_port)

    def restart(self, engine: Engine, *, is_registered: bool = True) -> None:
        """Starts an engine that was killed again, under the same name, in a process of its own.

        Args:
            is_registered: whether to wait until the registry knows it, if it is a prefill engine.
        """
        engine.process = self._process()
        self._begin(engine, is_registered=is_registered)

    def begin_anew(self, engine: Engine) -> None:
        """The same process, with an endpoint that has met nobody yet."""
        engine.do(Rank.stop)
        self._begin(engine)

    def close(self) -> None:
        """Ends everything."""
        for engine in self.engines:
            if engine.process.unanswered:
                engine.process.kill()
            engine.process.close()
        self.proxy.close()
        self.registry.kill()

    # ---- afterwards ---------------------------------------------------------------------------------------------

    @contextmanager
    def nothing_left_over(self, *survivors: Engine, step: Step | None = None, sockets: int = 0) -> Iterator[None]:
        """Compares what processes hold after with what they held before.

        Args:
            sockets: how many more may be open.
        """
        threads = PROOFS + (LOOK_UPS if step in BEGIN_ANEW else 0)
        sockets += threads + LANES
        self.served()  # a link that was lost between two tests, since the machine was busy, must not be missing here
        before = {each.name: each.do(Rank.resources) for each in survivors}
        connections = self._connections(survivors)
        yield
        deadline = time.monotonic() + PATIENCE_S / 2
        for each in survivors:
            assert each.do(Rank.is_healthy)
            while problem := self._left_over(
                each, before[each.name], sockets, threads, self._reunions(connections, survivors, each)
            ):
                assert time.monotonic() < deadline, f"{each.name} has more than before: {problem}"
                time.sleep(0.05)

    def _connections(self, engines: tuple[Engine, ...]) -> dict[tuple[str, str], int]:
        """By prefill engine and decode rank, the number of the connection that they have."""
        return {
            (each.name, rank): number
            for each in engines
            if each.is_prefill
            for rank, number in each.do(Rank.connections).items()
        }

    def _reunions(self, before: dict[tuple[str, str], int], survivors: tuple[Engine, ...], engine: Engine) -> int:
        """How many connections of an engine with other survivors were made anew.

        On a busy machine two that both live may fall silent for so long that they lose each other.
        """
        now = self._connections(survivors)
        anew = [pair for pair, number in before.items() if now.get(pair, number) != number]
        return sum(engine.name == prefill or decode.startswith(f"{engine.name}-") for prefill, decode in anew)

    def _left_over(self, engine: Engine, before: Resources, sockets: int, threads: int, reunions: int) -> str:
        sockets += reunions * RECONNECT_SOCKETS
        threads += LOOK_UPS if reunions else 0
        rooms = engine.do(Rank.open_rooms)
        now: Resources = engine.do(Rank.resources)
        problem = now.beyond(before, resident_bytes=MEMORY_TOLERANCE_BYTES, sockets=sockets, threads=threads)
        return f"{rooms} open rooms; {problem}" if rooms else problem
