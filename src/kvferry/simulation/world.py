"""One schedule: what happens next, and what goes wrong, as a seed says."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial

from kvferry.endpoint import DecodeEndpoint, PrefillEndpoint
from kvferry.errors import KVFerryError, PeerDisconnectedError, RoomExistsError, TransportError
from kvferry.protocol.holding import Side, Waits, holding
from kvferry.protocol.messages import ProcessIdentity, decode_notification
from kvferry.protocol.states import TransferState
from kvferry.settings import Settings
from kvferry.simulation.laws import Law, ViolationError, demand
from kvferry.simulation.machines import RegistryProcess, SimulatedPlatform, Thread
from kvferry.simulation.memory import Arena, Shape
from kvferry.simulation.office import Line, Office
from kvferry.simulation.processes import Process
from kvferry.simulation.requests import AnySide, ReceiveSide, Request, SendSide, new_request
from kvferry.transport.simulated import Notification, Piece, SimulatedFlight, SimulatedTransport, SimulatedWire

FRESH, SOURCE_GONE, DESTINATION_GONE, HELD = 0x11, 0xEE, 0xDD, 0x77
"""What fills pages: at the start, after a prefill and a decode rank gave them back, before something is received."""

TROUBLES = (
    "crash",
    "freeze",
    "close",
    "cut",
    "registry",
    "abort",
    "write fails",
    "post fails",
    "notify fails",
    "connect fails",
    "send fails",
    "late",
    "duplicate",
    "reorder",
    "clock",
    "absent",
    "miscount",
)
"""What may go wrong. Every world has its own few, so that each also comes alone."""

LINGER_S = 2.5
"""For how long the wire may carry on with the writes of a process that was killed."""

_PAGES = 16
_WAITS = Waits(bootstrap_s=3.0, waiting_s=4.0, write_s=2.0, peer_s=1.5, heartbeat_s=0.5, quarantine_s=1.2 * LINGER_S)
_MOST_PROGRESS = 8  # how often a transfer may get on while its state stays the same: a few chunks and parts
_SLACK_S = 1.5  # until somebody has a turn, and looks
_BURST = 6
_LOOKS_A_CHECK = 8  # nothing is missed in between: pages are compared again before somebody gets them
_LEASE_S = 1.0
_RECOVERY_S = 2.0  # until all have noticed that they live: several heartbeats
_END_S = 20.0
"""How long, after the last trouble, until everything must be over: the deadlines of all states in a row."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a world is, and what of it is left out: for shrinking.

    Attributes:
        steps: before the end is begun.
        without: kinds of trouble, and numbers of requests and of single faults, that are left out.
    """

    steps: int = 400
    without_troubles: frozenset[str] = frozenset()
    without_requests: frozenset[int] = frozenset()
    without_faults: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class _Engine:
    """An engine of either kind: its ranks in their present lives.

    Attributes:
        shapes: of the ranks.
    """

    name: str
    is_prefill: bool
    shapes: list[Shape]
    settings: Settings
    ranks: list[Process] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Restart:
    """A rank that will be started again."""

    engine: _Engine
    rank: int
    at: float


class _Raised(logging.Handler):
    """Notes what the endpoints log of errors that they did not expect."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(f"{record.getMessage()}: {self.format(record)}")


@contextmanager
def _listening() -> Iterator[_Raised]:
    """Hears what is logged by kvferry, and lets nobody else hear it."""
    logger, handler = logging.getLogger("kvferry"), _Raised()
    before = logger.propagate, logger.level
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.ERROR)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.propagate, level = before[0], before[1]
        logger.setLevel(level)


class World:
    """One schedule.

    Attributes:
        now: the time, in seconds.
        trace: what happened, in words, if it was asked for.
        outcomes: how many sides of transfers ended how, and how often what went wrong.
        faults: how many there were so far; those that were left out count, too.
        troubles: kinds of faults that there are in this world.
        most_requests: how many requests may come.
    """

    def __init__(
        self, seed: int, *, limits: Limits | None = None, arena: Arena | None = None, traces: bool = False
    ) -> None:
        """Args:
        limits: how large it is.
        arena: pools of earlier worlds.
        traces: whether to note what happens.
        """
        self.seed = seed
        self.now = 0.0
        self.trace: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self._limits = limits or Limits()
        self._arena = arena or Arena()
        self._traces = traces
        # Of their own, so that a world from which something is left out is like the whole one otherwise.
        self._draw = random.Random(seed)
        self._order = random.Random(seed + 1)
        self._fate = random.Random(seed + 2)
        self._pids = 0
        self.faults = 0
        self._looks = 0
        self._known_threads: list[tuple[Process, Thread]] | None = None
        self._is_ending = False
        self._raised = _Raised()
        self._about: dict[SimulatedFlight, tuple[int, int]] = {}  # room and generation
        self._doomed: dict[SimulatedFlight, float] = {}  # until when writes of dead processes go on
        self._held: dict[SimulatedFlight, float] = {}  # until when writes do not get on
        self.wire = SimulatedWire(self._check_piece, self._transport_fails)
        self.office = Office(self._sending_fails)
        self._configure()

    # ---- what there is ------------------------------------------------------------------------------------------

    def _configure(self) -> None:
        draw = self._draw
        kinds = draw.sample(TROUBLES, draw.choice([0, 1, 2, 2, 3, 4, 5]))
        self._odds = {kind: draw.choice([0.003, 0.01, 0.03]) for kind in kinds}
        for kind in self._limits.without_troubles:
            self._odds.pop(kind, None)
        self.troubles = frozenset(self._odds)
        self._pace_s = draw.choice([0.001, 0.01, 0.05])
        self._mail_odds = draw.choice([0.15, 0.15, 0.03])  # how often messages get on
        self._wire_runs_alone = draw.random() < 0.5  # a network card goes on while its process is frozen
        self.registry = RegistryProcess(_LEASE_S)
        layers = draw.choice([1, 2])
        self._layers = layers
        self._path = draw.choice(["auto", "direct", "staged"])
        self._engines: dict[str, _Engine] = {}
        for kind in ("prefill", "decode"):
            for number in range(draw.choice([1, 1, 1, 2])):
                tp = draw.choice([1, 1, 2])
                pp = draw.choice([1, 1, layers]) if tp == 1 else 1
                stages = (layers,) if pp == 1 else (1,) * pp
                page_tokens = draw.choice([2, 4])
                shapes = [Shape(layers, tp, rank, stages, page_tokens, _PAGES) for rank in range(tp * pp)]
                name = f"{kind}{number}"
                self._engines[name] = _Engine(name, kind == "prefill", shapes, self._settings(draw))
        self._machines = draw.choice([1, 1, 2])
        self._restarts: list[_Restart] = []
        self.processes: list[Process] = []  # every life of every rank
        self._lines_heal: dict[Line, float] = {}
        self._late_up = 0
        self._coming = draw.randint(1, 5)  # requests that were not made yet
        self.most_requests = self._coming
        self._comes_within_s = draw.choice([0.0, 0.5, 6.0])  # of each other
        self._next_comes_at = 0.0
        self._unwell_until = 0.0
        self._all_in_reach_since = 0.0
        self.requests: list[Request] = []
        self._rooms = draw.choice([1, 2, 8])

    def _settings(self, draw: random.Random) -> Settings:
        chunk = draw.choice([64, 128, 256])
        return _settings(
            path=draw.choice(["auto", self._path]),
            chunk_bytes=chunk,
            ring_bytes=chunk * draw.choice([1, 2, 3]),
            workers=draw.choice([1, 2]),
            gather_workers=draw.choice([1, 1, 2]),
            scatter_workers=draw.choice([0, 1, 2]),
            checksums=draw.random() < 0.2,
        )

    def _start(self, engine: _Engine, rank: int) -> None:
        """Begins a life of a rank."""
        life = sum(process.engine == engine.name and process.rank == rank for process in self.processes)
        self._pids += 1
        machine = f"machine {(rank + len(engine.name)) % self._machines}"
        # A rank that starts again may listen where it listened before.
        port = 1000 + 10 * list(self._engines).index(engine.name) + rank + (life * 100 if self._draw_bit(life) else 0)
        address = f"tcp://127.0.0.1:{port}"
        platform = SimulatedPlatform(
            machine,
            lambda: self.now,
            random.Random(self._draw.getrandbits(32)),
            self.office,
            self.registry,
            address=address,
            pid=self._pids,
            is_gone=self._is_gone,
        )
        transport = SimulatedTransport(self.wire, f"{engine.name}-{rank}-life{life}")
        pool = self._arena.take(engine.shapes[rank])
        pool.wipe(FRESH)
        make: type[PrefillEndpoint] | type[DecodeEndpoint] = PrefillEndpoint if engine.is_prefill else DecodeEndpoint
        named = {"host_registry": False} if engine.is_prefill else {}
        endpoint = make(
            pool.layout,
            engine=engine.name,
            coordinates=pool.coordinates,
            settings=engine.settings,
            transport=transport,
            platform=platform,
            **named,
        )
        name = f"{engine.name}.{rank}" + (f"#{life}" if life else "")
        process = Process(name, engine.name, rank, life, self._pids, platform, pool, transport, endpoint, address)
        engine.ranks[rank : rank + 1] = [process]
        self.processes.append(process)
        self._known_threads = None
        self._note("%s starts on %s at %s", name, machine, address)

    def _is_gone(self, identity: ProcessIdentity) -> bool:
        return any(process.pid == identity.pid and not process.is_alive for process in self.processes)

    def _draw_bit(self, number: int) -> bool:
        return random.Random(f"{self.seed} {number}").random() < 0.5

    def _note(self, text: str, *values: object) -> None:
        if self._traces:
            self.trace.append(f"{self.now:8.3f}  " + (text % values if values else text))

    # ---- running ------------------------------------------------------------------------------------------------

    def run(self) -> Counter[str]:
        """Runs it all.

        Raises:
            ViolationError: if a law was broken.
        """
        with _listening() as self._raised:
            try:
                for engine in self._engines.values():
                    for rank in range(len(engine.shapes)):
                        self._start(engine, rank)
                for count in range(self._limits.steps):
                    self.step()
                    if count % 20 == 0 and not self._coming and all(request.is_over for request in self.requests):
                        break
                self._end()
            except ViolationError:
                raise
            except Exception as error:
                raise ViolationError(Law.NEVER_RAISES, f"{type(error).__name__}: {error}") from error
            finally:
                for process in self.processes:
                    self._arena.give_back(process.pool)
        return self.outcomes

    def step(self) -> None:
        """Something happens."""
        lot = self._order.random()
        if lot < 0.45:
            happened = self._turn()
        elif lot < 0.45 + self._mail_odds:
            happened = self._message()
        elif lot < 0.75:
            happened = self._bytes()
        elif lot < 0.82:
            happened = self._notification()
        elif lot < 0.92:
            happened = self._caller()
        else:
            happened = False
        if not happened:
            happened = self._anything()
        if not happened or lot >= 0.92:
            self._pass_time(is_idle=not happened)
        if self._odds and not self._is_ending:
            self._go_wrong()

    def _anything(self) -> bool:
        """Whatever there is to do, in an order of chance."""
        kinds = (self._turn, self._bytes, self._notification, self._caller)
        first = int(self._order.random() * len(kinds))
        if any(kinds[(first + index) % len(kinds)]() for index in range(len(kinds))):
            return True
        return self._message()

    def _pass_time(self, *, is_idle: bool) -> None:
        longest = 0.3 if is_idle else 0.1 if self._is_ending else self._pace_s
        self.now += self._order.random() * longest + 1e-4
        for process in self.processes:
            if process.thaws_at is not None and self.now >= process.thaws_at:
                process.thaws_at = None
                self._unwell_until = self.now + _RECOVERY_S
                self._note("%s thaws", process.name)
            keeper = process.platform.keeper
            if process.runs and keeper is not None and not keeper.is_closed and process.platform.now() >= keeper.due_at:
                keeper.due_at = process.platform.now() + keeper.renew()
            if process.runs and process.closing is not None:
                self._go_on_closing(process)
        for restart in [restart for restart in self._restarts if self.now >= restart.at]:
            self._restarts.remove(restart)
            self._start(restart.engine, restart.rank)
        for line in self.office.lines:
            if line.is_cut and self.now >= self._lines_heal.get(line, 0.0):
                line.is_cut = False
                self._note("the connection of %s to %s heals", line.identity, line.address)
        self.office.forget()
        self._end_doomed()
        self._check_holdings()

    def _go_on_closing(self, process: Process) -> None:
        if process.go_on_closing(process.platform.now()):
            self._note("%s has left", process.name)
            self._left(process)

    def _check_holdings(self) -> None:
        """No state holds pages for longer than the table says."""
        if self._is_anyone_out_of_reach():
            self._all_in_reach_since = self.now
        for side in self._open_sides():
            transfer = side.transfer
            assert transfer is not None
            if side.process.thaws_at is not None or transfer.state is not side.state:
                side.state, side.held_since = transfer.state, self.now
                continue
            row = holding(Side.PREFILL if isinstance(side, SendSide) else Side.DECODE, transfer.state)
            since = side.held_since
            times = 1 if transfer.state in (TransferState.BOOTSTRAPPING, TransferState.SUCCESS) else _MOST_PROGRESS
            if transfer.state is TransferState.FAILED:
                since, times = max(since, self._all_in_reach_since), 1
            longest_s = row.longest_s(_WAITS) * times + _SLACK_S
            demand(
                self.now - since <= longest_s,
                Law.GIVES_BACK,
                f"{side.process.name}: {side.request} holds pages for more than {longest_s:g} s while it is "
                f"{transfer.state.value}, against the table",
            )

    def _is_anyone_out_of_reach(self) -> bool:
        """Whether somebody is frozen, cut off or not replaced, or a write does not get on: then pages may be held."""
        return (
            any(process.thaws_at is not None for process in self.processes)
            or any(line.is_cut for line in self.office.lines)
            or any(until > self.now for until in (*self._held.values(), *self._doomed.values()))
            or any(not process.is_alive for engine in self._engines.values() for process in engine.ranks)
            or not self.registry.is_alive
            or self.registry.is_frozen
        )

    # ---- turns --------------------------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """A thread has a few turns."""
        if self._order.random() < 0.05 and self._aside():
            return True
        threads = self._threads()
        first = int(self._order.random() * len(threads))
        for index in range(len(threads)):
            process, thread = threads[first - index]
            if not process.runs or thread.has_ended:
                continue
            if not (thread.loop.has_work() or (thread.loop.reads_input and process.has_input)):
                continue
            for _ in range(1 + int(self._order.random() * _BURST)):
                thread.turn()
                if thread.has_ended or not (thread.loop.has_work() or process.has_input):
                    break
            self._look(process)
            return True
        return self._aside()

    def _aside(self) -> bool:
        """What takes long is done, such as asking the registry."""
        for process in self.processes:
            for aside in process.platform.asides if process.runs else ():
                if aside.work:
                    aside.work.popleft()()
                    return True
        return False

    def _threads(self) -> list[tuple[Process, Thread]]:
        """Of all processes that live."""
        if self._known_threads is None:
            living = [process for process in self.processes if process.is_alive]
            self._known_threads = [(process, thread) for process in living for thread in process.platform.threads]
        return self._known_threads

    def _look(self, process: Process) -> None:
        """What a process's callers see after it did something, and what its memory holds."""
        if self._raised.found:
            raise ViolationError(Law.NEVER_RAISES, f"{process.name}: {self._raised.found[0]}")
        if self.wire.breaches:
            raise ViolationError(Law.CONTRACT, self.wire.breaches[0])
        self._looks += 1
        if self._looks % _LOOKS_A_CHECK == 0 and not process.is_prefill:
            process.pool.check_free(process.name)
        for request in self.requests:
            for sending in request.senders:
                if sending.process is process and not sending.is_released and sending.sender is not None:
                    self._look_at_sender(sending)
            for receiving in request.receivers:
                if receiving.process is process and not receiving.is_released and receiving.receiver is not None:
                    self._look_at_receiver(receiving)

    def _look_at_sender(self, side: SendSide) -> None:
        assert side.sender is not None
        if side.sender.error is not None:
            self._check_error(side.sender.error)
        if side.sender.pages_reusable:
            self._note(
                "%s: %s gives back pages %s (%s)", side.process.name, side.request, side.pages, side.sender.state.value
            )
            side.is_released = True
            side.process.pool.give_back(side.pages, SOURCE_GONE)
            self.outcomes[f"sent: {side.sender.state.value}"] += 1
            if side.sender.state is TransferState.FAILED:
                self._failed(side.request, side.process, str(side.sender.error))

    def _look_at_receiver(self, side: ReceiveSide) -> None:
        receiver = side.receiver
        assert receiver is not None
        if receiver.error is not None:
            self._check_error(receiver.error)
        if receiver.state is TransferState.SUCCESS and not side.is_checked:
            side.is_checked = True
            who = f"{side.process.name}: {side.request}"
            side.process.pool.check(side.pages, side.request.contents, side.first_token, side.held, HELD, who)
            demand(receiver.aux == side.request.aux, Law.EXACT, f"{who}: aux data is {receiver.aux!r}")
        if receiver.pages_reusable:
            self._note(
                "%s: %s gives back pages %s (%s)", side.process.name, side.request, side.pages, receiver.state.value
            )
            side.is_released = True
            side.process.pool.give_back(side.pages, DESTINATION_GONE)
            self.outcomes[f"received: {receiver.state.value}"] += 1
            if receiver.state is TransferState.FAILED:
                self._failed(side.request, side.process, str(receiver.error))

    def _check_error(self, error: KVFerryError) -> None:
        demand("unexpected error" not in str(error), Law.NEVER_RAISES, str(error))

    def _failed(self, request: Request, process: Process, why: str) -> None:
        self._note("%s: %s failed: %s", process.name, request, why)
        demand(
            bool(request.excuse), Law.ISOLATED, f"{process.name}: {request} failed although nothing went wrong: {why}"
        )

    # ---- messages, bytes, notifications -------------------------------------------------------------------------

    def _message(self) -> bool:
        """A message arrives."""
        lines = [
            line
            for line in self.office.lines
            if not line.is_cut and (line.down or self.office.can_go_up(line)) and self._listener_runs(line)
        ]
        if not lines:
            return False
        line = self._order.choice(lines)
        goes_up = self.office.can_go_up(line) and (not line.down or self._order.random() < 0.5)
        queue = line.up if goes_up else line.down
        index = self._fate.randrange(len(queue)) if self._strikes("reorder") else 0
        if self._strikes("duplicate"):
            queue.insert(index, queue[index])
        (self.office.go_up if goes_up else self.office.go_down)(line, index)
        return True

    def _listener_runs(self, line: Line) -> bool:
        return True  # a frozen process's kernel takes messages all the same

    def _bytes(self) -> bool:
        """A piece of a write lands."""
        flights = [flight for flight in self.wire.flights if self._gets_on(flight)]
        if not flights:
            return False
        flight = self._order.choice(flights)
        if not flight.target.is_mapped:
            self.wire.fail(flight, PeerDisconnectedError(f"{flight.target.endpoint_name} is dead"))
            return True
        for _ in range(self._order.choice([1, 1, 2, len(flight.left)])):
            if flight.left:
                self.wire.land(flight, self._order.randrange(len(flight.left)))
        return True

    def _gets_on(self, flight: SimulatedFlight) -> bool:
        if self.now < self._held.get(flight, 0.0):
            return False
        owner = self._process_of(flight.source)
        return self._wire_runs_alone or owner.thaws_at is None or owner.died_at is not None

    def _notification(self) -> bool:
        """A notification arrives."""
        if not self.wire.notifications:
            return False
        notification = self._order.choice(self.wire.notifications)
        if self._strikes("duplicate"):
            self.wire.notifications.append(Notification(notification.sender, notification.target, notification.data))
        self.wire.deliver(notification)
        return True

    def _check_piece(self, flight: SimulatedFlight, piece: Piece) -> None:
        """A piece is about to land: whose is what it reads and what it overwrites?"""
        about = self._about.get(flight)
        if about is None:
            message = decode_notification(flight.notification)
            about = self._about[flight] = message.room, message.generation
        source, target = self._process_of(flight.source), self._process_of(flight.target)
        if source.died_at is None and source.pool.holds(piece.source):
            page, owner = source.pool.owner_at(piece.source)
            demand(
                isinstance(owner, SendSide) and owner.request.room == about[0],
                Law.NO_REUSE_UNDER_A_READ,
                f"{source.name}: page {page} is read for room {about[0]}, but belongs to {_owner_name(owner)}",
            )
        if target.pool.holds(piece.destination):
            page, owner = target.pool.owner_at(piece.destination)
            demand(
                isinstance(owner, ReceiveSide) and owner.generation == about[1],
                Law.NO_WRITE_AFTER_RELEASE if owner is None else Law.OWN_PAGES_ONLY,
                f"{target.name}: page {page} is written to by {source.name} for room {about[0]}, but belongs to "
                f"{_owner_name(owner)}",
            )

    def _process_of(self, transport: SimulatedTransport) -> Process:
        return next(process for process in reversed(self.processes) if process.transport is transport)

    # ---- callers ------------------------------------------------------------------------------------------------

    def _caller(self) -> bool:
        """A caller does something."""
        todo: list[Callable[[], None]] = []
        if self._coming and not self._is_ending and self.now >= self._next_comes_at:
            todo.append(self._new_request)
        for request in self.requests:
            for sending in request.senders:
                if sending.is_released or not sending.process.takes_work:
                    continue
                if sending.sender is None:
                    todo.append(partial(self._open_sender, sending))
                elif sending.chunks:
                    todo.append(partial(self._submit, sending))
            for receiving in request.receivers:
                is_waited_for = not receiving.is_released and receiving.receiver is None
                if is_waited_for and receiving.process.takes_work:
                    todo.append(partial(self._open_receiver, receiving))
        if not todo:
            return False
        self._order.choice(todo)()
        return True

    def _new_request(self) -> None:
        draw = random.Random(f"{self.seed} request {self._coming}")
        number = self._coming
        self._coming -= 1
        self._next_comes_at = self.now + draw.random() * self._comes_within_s
        room = draw.randrange(self._rooms)
        prefill = draw.choice([engine for engine in self._engines.values() if engine.is_prefill])
        decode = draw.choice([engine for engine in self._engines.values() if not engine.is_prefill])
        if number in self._limits.without_requests:
            return
        if any(request.room == room and not request.is_over for request in self.requests):
            return  # a number is used again only when its last use is over
        if len(prefill.ranks) < len(prefill.shapes) or len(decode.ranks) < len(decode.shapes):
            return
        if not all(process.is_alive for process in (*prefill.ranks, *decode.ranks)):
            return
        request = new_request(number, room, prefill.ranks, decode.ranks, self._layers, draw)
        self.requests.append(request)
        for process in (*prefill.ranks, *decode.ranks):
            if not process.takes_work or self._is_wronged(process):
                request.excused(f"{process.name} was not well")
        if self.now < self._unwell_until:
            request.excused("peers took each other for lost just now")
        if any(line.is_cut for line in self.office.lines) or not self.registry.is_alive or self.registry.is_frozen:
            request.excused("the network was not well")
        if "absent" in self._odds and draw.random() < 0.3:
            side = draw.choice(request.sides)
            side.is_released = True
            request.is_abandoned = True
            request.excused(f"nobody comes on {side.process.name}")
        if "miscount" in self._odds and draw.random() < 0.3:
            request.senders[0].chunks[-1] += draw.choice([-1, 1])
            request.excused("one side miscounts")

    def _is_wronged(self, process: Process) -> bool:
        return any(kind in self._odds for kind in ("crash", "close", "freeze", "cut")) and process.life > 0

    def _open_sender(self, side: SendSide) -> None:
        endpoint = side.process.endpoint
        assert isinstance(endpoint, PrefillEndpoint)
        count = sum(side.chunks)
        pages = side.process.pool.take(count, side)
        if pages is None:
            return
        try:
            side.sender = endpoint.open(side.request.room)
        except RoomExistsError:
            side.process.pool.give_back(pages, SOURCE_GONE)  # its last use is not quite over here: later
            return
        side.pages = pages
        side.process.pool.fill(pages, side.request.contents, 0)
        self._note("%s: %s opens, pages %s", side.process.name, side.request, pages)

    def _open_receiver(self, side: ReceiveSide) -> None:
        endpoint = side.process.endpoint
        assert isinstance(endpoint, DecodeEndpoint)
        pages = side.process.pool.take(side.count, side)
        if pages is None:
            return
        try:
            side.receiver = endpoint.open(
                side.request.room,
                pages,
                engine=side.request.prefill,
                prefix_tokens=side.held,
                tokens=side.request.tokens,
            )
        except RoomExistsError:
            side.process.pool.give_back(pages, DESTINATION_GONE)
            return
        side.pages = pages
        side.generation = side.process.platform.last_bits
        side.process.pool._memory[:, :, pages] = HELD
        self._note(
            "%s: %s opens, pages %s, %d of %d tokens held",
            side.process.name, side.request, pages, side.held, side.request.tokens,
        )  # fmt: skip

    def _submit(self, side: SendSide) -> None:
        assert side.sender is not None
        count = side.chunks.pop(0)
        is_last = not side.chunks
        side.sender.submit(
            side.pages[side.position : side.position + count],
            start=None,
            last=is_last,
            aux=side.request.aux if is_last else None,
        )
        side.position += count
        self._note("%s: %s submits %d pages%s", side.process.name, side.request, count, ", the last" if is_last else "")

    # ---- what goes wrong ----------------------------------------------------------------------------------------

    def _strikes(self, kind: str) -> bool:
        """Whether it goes wrong this time."""
        odds = self._odds.get(kind)
        if odds is None or self._is_ending or self._fate.random() >= 10 * odds:
            return False
        return self._counts(kind)

    def _counts(self, kind: str) -> bool:
        """Numbers a fault; False if it is left out."""
        self.faults += 1
        if self.faults in self._limits.without_faults:
            return False
        self.outcomes[f"trouble: {kind}"] += 1
        self._note("fault %d: %s", self.faults, kind)
        return True

    def _sending_fails(self) -> bool:
        if not self._strikes("send fails"):
            return False
        self._excuse_all("sending failed")
        return True

    def _transport_fails(self, what: str) -> Exception | None:
        if not self._strikes(f"{what} fails"):
            return None
        self._excuse_all(f"{what} failed")
        return TransportError(f"the simulation lets {what} fail")

    def _go_wrong(self) -> None:
        for kind, odds in self._odds.items():
            happens = _HAPPENINGS.get(kind)
            if happens is not None and self._fate.random() < odds and self._counts(kind):
                happens(self)

    def _excuse_all(self, why: str) -> None:
        for request in self.requests:
            if not request.is_over:
                request.excused(why)

    def _excuse_those_with(self, process: Process, why: str) -> None:
        for request in self.requests:
            if not request.is_over and process.engine in (request.prefill, request.decode):
                request.excused(why)

    def _someone(self) -> Process | None:
        """A process to strike: half of the time one that is in the middle of a write."""
        running = [process for process in self.processes if process.runs and process.closing is None]
        writing = {flight.source for flight in self.wire.flights}
        busy = [process for process in running if process.transport in writing]
        if busy and self._fate.random() < 0.5:
            return self._fate.choice(busy)
        return self._fate.choice(running) if running else None

    def _crash(self) -> None:
        process = self._someone()
        if process is not None:
            self._kill(process)
            if self._fate.random() < 0.7:
                self._restart_later(process)

    def _kill(self, process: Process) -> None:
        self._note("%s is killed", process.name)
        process.died_at = self.now
        process.thaws_at = None
        process.transport.is_mapped = False
        self._excuse_those_with(process, f"{process.name} was killed")
        if process.is_prefill:
            self.office.listener_died(process.address)
            for line in self.office.lines:
                if line.address == process.address:
                    self.office.break_line(line, self._fate.randint(0, len(line.up)), 0)
        elif process.platform.connecting is not None:
            for line in process.platform.connecting.lines:
                line.is_closed = True
                self.office.break_line(line, self._fate.randint(0, len(line.up)), 0)
        for flight in list(self.wire.flights):
            if flight.source is process.transport:
                if self._fate.random() < 0.5:
                    self.wire.drop(flight)
                else:
                    self._held[flight] = self.now + self._fate.random() * LINGER_S
                    self._doomed[flight] = self.now + LINGER_S
        self._left(process)

    def _end_doomed(self) -> None:
        for flight in list(self.wire.flights):
            if self.now >= self._doomed.get(flight, float("inf")):
                self.wire.drop(flight)

    def _left(self, process: Process) -> None:
        """Whoever had to do with it on this process does not any more: its memory is gone, or its owner's again."""
        self._known_threads = None
        for request in self.requests:
            for side in request.sides:
                if side.process is process and not side.is_released:
                    side.is_released = True
                    request.excused(f"{process.name} left")

    def _restart_later(self, process: Process) -> None:
        engine = self._engines[process.engine]
        self._restarts.append(_Restart(engine, process.rank, self.now + self._fate.choice([0.0, 0.2, 1.0, 3.0])))

    def _freeze(self) -> None:
        process = self._someone()
        if process is not None:
            process.thaws_at = self.now + self._fate.choice([0.05, 0.5, 2.0, 4.0, 1e9])
            self._note("%s freezes until %.3f", process.name, process.thaws_at)
            self._excuse_those_with(process, f"{process.name} froze")

    def _close(self) -> None:
        process = self._someone()
        if process is not None:
            self._note("%s is closed", process.name)
            self._excuse_those_with(process, f"{process.name} was closed")
            process.begin_closing()
            self._restart_later(process)

    def _cut(self) -> None:
        if self.office.lines:
            line = self._fate.choice(self.office.lines)
            self._note("the connection of %s to %s breaks", line.identity, line.address)
            self.office.break_line(line, self._fate.randint(0, len(line.up)), self._fate.randint(0, len(line.down)))
            seconds = self._fate.choice([0.0, 0.0, 0.5, 3.0])
            if seconds:
                line.is_cut = True
                self._lines_heal[line] = self.now + seconds
            self._excuse_all("a connection broke")

    def _registry(self) -> None:
        self._excuse_all("the registry failed")
        lot = self._fate.random()
        if not self.registry.is_alive or self.registry.is_frozen or lot < 0.4:
            self.registry.restart()
        elif lot < 0.7:
            self.registry.is_alive = False
        else:
            self.registry.is_frozen = True

    def _abort(self) -> None:
        sides: list[AnySide] = [
            side
            for request in self.requests
            for side in request.sides
            if not side.is_released and side.process.takes_work
        ]
        if not sides:
            return
        side = self._fate.choice(sides)
        transfer = side.transfer
        if transfer is not None:
            self._note("%s: %s is aborted", side.process.name, side.request)
            side.request.excused("it was aborted")
            transfer.abort("the simulation says so")

    def _fail_write(self) -> None:
        if self.wire.flights:
            flight = self._fate.choice(self.wire.flights)
            self._excuse_all("a write failed")
            self.wire.fail(flight, TransportError("the simulation lets it fail"))

    def _delay_write(self) -> None:
        if self.wire.flights:
            flight = self._fate.choice(self.wire.flights)
            self._held[flight] = self.now + self._fate.choice([0.5, 3.0, 8.0])
            self._excuse_all("a write came late")

    def _jump(self) -> None:
        process = self._someone()
        if process is not None:
            process.platform.skew_s += self._fate.choice([0.1, 1.0, 10.0])
            self._unwell_until = self.now + _RECOVERY_S
            self._excuse_all("a clock jumped")

    # ---- the end ------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """No more trouble: whatever is frozen for ever stays so for a while, and then everything must be over."""
        self._is_ending = True
        self._note("no more trouble")
        self.registry.restart()
        for line in self.office.lines:
            line.is_cut = False
        self._replace_the_dead()
        self._run_until(self.now + _END_S, is_over=lambda: self._is_over(but_for_frozen=True))
        self._check_over(but_for_frozen=True)
        for process in self.processes:
            if process.thaws_at is not None:
                if self._fate.random() < 0.5:
                    self._kill(process)
                else:
                    process.thaws_at = self.now
        self._held.clear()
        self._replace_the_dead()
        self._run_until(self.now + _END_S, is_over=lambda: self._is_over(but_for_frozen=False))
        self._check_over(but_for_frozen=False)
        self._check_nothing_left()

    def _replace_the_dead(self) -> None:
        """Somebody who looks after the engines starts again what was killed."""
        for engine in self._engines.values():
            for process in engine.ranks:
                is_coming = any(each.engine is engine and each.rank == process.rank for each in self._restarts)
                if process.died_at is not None and not is_coming:
                    self._restarts.append(_Restart(engine, process.rank, self.now + 0.1))

    def _run_until(self, until: float, *, is_over: Callable[[], bool]) -> None:
        count = 0
        while self.now < until:
            self.step()
            count += 1
            if count % 20 == 0 and is_over():
                return

    def _open_sides(self) -> Iterator[AnySide]:
        for request in self.requests:
            for sending in request.senders:
                if not sending.is_released and sending.sender is not None and sending.process.is_alive:
                    yield sending
            for receiving in request.receivers:
                if not receiving.is_released and receiving.receiver is not None and receiving.process.is_alive:
                    yield receiving

    def _is_over(self, *, but_for_frozen: bool) -> bool:
        return self._what_is_open(but_for_frozen=but_for_frozen) is None

    def _what_is_open(self, *, but_for_frozen: bool) -> tuple[Law, str] | None:
        is_someone_frozen = any(process.thaws_at is not None for process in self.processes)
        for side in self._open_sides():
            transfer = side.transfer
            assert transfer is not None
            if side.process.thaws_at is not None:
                continue
            if not transfer.state.is_final:
                return Law.ENDS, f"{side.process.name}: {side.request} is still {transfer.state.value}"
            # Whoever is frozen may write or be written to when it thaws, and nothing says when.
            if not (but_for_frozen and is_someone_frozen):
                return Law.GIVES_BACK, f"{side.process.name}: {side.request} ended, but keeps its pages"
        for process in self.processes:
            if process.is_alive and process.endpoint.open_rooms and not is_someone_frozen:
                return Law.LEAVES_NOTHING, f"{process.name}: {process.endpoint.open_rooms} rooms are left"
        return None

    def _check_over(self, *, but_for_frozen: bool) -> None:
        found = self._what_is_open(but_for_frozen=but_for_frozen)
        if found is not None:
            raise ViolationError(*found)

    def _check_nothing_left(self) -> None:
        for process in self.processes:
            if process.is_alive:
                process.pool.check_free(process.name)
                rooms = process.endpoint.open_rooms
                demand(rooms == 0, Law.LEAVES_NOTHING, f"{process.name}: {rooms} rooms are left")


def _owner_name(owner: object | None) -> str:
    if owner is None:
        return "nobody"
    assert isinstance(owner, (SendSide, ReceiveSide))
    return f"{owner.request} on {owner.process.name}"


_HAPPENINGS: dict[str, Callable[[World], None]] = {
    "crash": World._crash,
    "freeze": World._freeze,
    "close": World._close,
    "cut": World._cut,
    "registry": World._registry,
    "abort": World._abort,
    "write fails": World._fail_write,
    "late": World._delay_write,
    "clock": World._jump,
}


@lru_cache(maxsize=1024)
def _settings(
    *,
    path: str,
    chunk_bytes: int,
    ring_bytes: int,
    workers: int,
    gather_workers: int,
    scatter_workers: int,
    checksums: bool,
) -> Settings:
    return Settings(
        registry_url="http://registry:1",
        path=path,
        staging_chunk_mib=chunk_bytes / 2**20,
        staging_ring_mib=ring_bytes / 2**20,
        staging_memory_mib=ring_bytes * 8 / 2**20,
        workers=workers,
        gather_workers=gather_workers,
        scatter_workers=scatter_workers,
        queues=2,
        checksums=checksums,
        registry_lease_s=_LEASE_S,
        bootstrap_timeout_s=_WAITS.bootstrap_s,
        waiting_timeout_s=_WAITS.waiting_s,
        write_timeout_s=_WAITS.write_s,
        heartbeat_interval_s=_WAITS.heartbeat_s,
        peer_timeout_s=_WAITS.peer_s,
        close_timeout_s=1.0,
        quarantine_s=_WAITS.quarantine_s,
        max_early_rooms=4,
    )
