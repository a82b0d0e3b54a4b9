"""One schedule: whose turn it is, what arrives, how time passes, as a seed says."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial

from kvferry.control.process_identity import Sight
from kvferry.endpoint import DecodeEndpoint, PrefillEndpoint
from kvferry.errors import PeerDisconnectedError
from kvferry.protocol.wire.field_types import ProcessIdentity
from kvferry.protocol.wire.versions import SPOKEN, Versions
from kvferry.transport import Transport
from proof.simulated_transport import Notification, SimulatedHandle, SimulatedTransport, SimulatedWire
from proof.simulation.adversary import RECOVERY_S, Adversary
from proof.simulation.callers import Callers
from proof.simulation.circumstances import Engine, Limits
from proof.simulation.control_network import NEXT_RELEASE, ControlNetwork
from proof.simulation.inspector import LOSES_NOTHING, Inspector
from proof.simulation.laws import Law, ViolationError, demand
from proof.simulation.machines import SimulatedPlatform, Thread
from proof.simulation.memory import FRESH, Arena
from proof.simulation.pods import SimulatedPods
from proof.simulation.processes import Process
from proof.simulation.raised import is_of_a_caller, listening
from proof.simulation.rare_troubles import RareTroubles
from proof.simulation.universe import Restart, Universe

_BURST = 6
_STEPS_A_LOOK = 20
_LISTENED = 4  # in one world of so many that lose nothing every message is read
_FAIR_MAIL_ODDS = 0.2
_FAIR_PACE_S = 0.05  # of time, so that no deadline passes while everybody has something to do
_END_S = 20.0
"""How long, after the last trouble, until everything must be over: the deadlines of all states in a row."""


class World(Universe):
    """One schedule: whose turn it is, what arrives, how time passes.

    Attributes:
        adversary: decides what goes wrong.
        pods: what an orchestrator knows of the processes.
    """

    def __init__(
        self, seed: int, *, limits: Limits | None = None, arena: Arena | None = None, traces: bool = False
    ) -> None:
        """Makes the world of one seed; nothing has happened in it yet.

        Args:
            limits: how large it is.
            arena: pools of earlier worlds.
            traces: whether to note what happens.
        """
        super().__init__(seed, limits or Limits(), traces=traces)
        self.adversary = Adversary(self)
        self._rare = RareTroubles(self, self.adversary, self.start)
        self._callers = Callers(self, self.adversary)
        self._inspector = Inspector(self, self.adversary)
        self.wire = SimulatedWire(
            on_post=self._inspector.check_post,
            on_piece=self._inspector.check_piece,
            fails_to=self.adversary.transport_fails,
            breaks_off=self._rare.post_raises,
            on_forgotten=self._rare.is_cut,
            on_broken=self._rare.excuse_once,
        )
        self.network = ControlNetwork(self.adversary.sending_fails)
        if self.troubles <= LOSES_NOTHING and seed % _LISTENED == 0:
            self.network.on_sent = self._inspector.check_sent
        self.pods = SimulatedPods(seed)
        self._lot = self.order.random
        self._arena = arena or Arena()
        self._pids = 0
        self._wire_is_busy_until = 0.0
        self._known_threads: list[tuple[Process, Thread, bool]] | None = None
        self._kinds = (self._turn, self._bytes, self._notification, self._callers.act)
        # Chances of their own, so that other worlds are as they were without them.
        self._mixes_releases = random.Random(f"{seed} mixes releases").random() < 0.25
        self._hides_processes = random.Random(f"{seed} hides processes").random() < 0.25
        if self.proves_no_end and random.Random(f"{seed} does without proofs").random() < 0.5:
            for engine in self.circumstances.engines.values():
                engine.settings = engine.settings.model_copy(update={"unproven_path": "auto"})

    def start(self, engine: Engine, rank: int) -> None:
        """Begins a life of a rank."""
        life = sum(process.engine == engine.name and process.rank == rank for process in self.processes)
        self._pids += 1
        machine = f"machine {(rank + len(engine.name)) % self.circumstances.machines}"
        port = 1000 + 10 * list(self.circumstances.engines).index(engine.name) + rank
        address = f"tcp://127.0.0.1:{port}"
        # A rank that starts again may listen where it listened before, unless its predecessor still does.
        if address in self.network.listening or self._draw_bit(life):
            address = f"tcp://127.0.0.1:{port + life * 100}"
        name = f"{engine.name}.{rank}" + (f"#{life}" if life else "")
        lives: list[Process] = []  # this one, once it is made
        pod = self.pods.start(name, lambda: lives[0].is_alive, lambda: self._answers(lives[0]))
        if self.proves_no_end:
            machine, pod = f"the namespace of {name}", None
        platform = SimulatedPlatform(
            machine,
            lambda: self.now,
            random.Random(self._draw.getrandbits(32)),
            self.network,
            self.registry,
            address=address,
            pid=self._pids,
            see=self._see,
            pods=self.pods,
            pod=pod,
            copying_fails=self.adversary.copying_fails,
            measuring=self._rare.measure,
            versions=self._spoken(f"{engine.name} {rank} {life}"),
            of_runs=random.Random(f"{self.seed} {engine.name} {rank} {life} runs"),
        )
        transport = SimulatedTransport(self.wire, f"{engine.name}-{rank}-life{life}")
        pool = self._arena.take(engine.shapes[rank])
        pool.wipe(FRESH)
        make: Callable[..., PrefillEndpoint | DecodeEndpoint]
        make = DecodeEndpoint
        if engine.is_prefill:
            instance = f"start-{life}" if self.names_starts and len(engine.shapes) == 1 else None
            make = partial(PrefillEndpoint, host_registry=False, instance=instance)
        endpoint = make(
            pool.layout,
            engine=engine.name,
            coordinates=pool.coordinates,
            settings=engine.settings,
            transport=self.moves_by(transport),
            platform=platform,
        )
        process = Process(name, engine.name, rank, life, self._pids, platform, pool, transport, endpoint, address)
        lives.append(process)
        self._process_of[transport] = process
        self._sides_of[process] = []
        engine.ranks[rank : rank + 1] = [process]
        self.processes.append(process)
        self.threads_changed()
        self.note("%s starts on %s at %s", name, machine, address)

    def moves_by(self, transport: SimulatedTransport) -> Transport:
        """Returns what a rank's endpoint is given: in worlds that try another interface, one on top of its own."""
        return transport

    def _spoken(self, life: str) -> Versions:
        """Returns which versions a life of a rank speaks: in some worlds some are of a release that is to come."""
        is_older = self._mixes_releases and random.Random(f"{self.seed} {life} is older").random() < 0.5
        return NEXT_RELEASE if self._mixes_releases and not is_older else SPOKEN

    def _see(self, identity: ProcessIdentity) -> Sight:
        """Returns what its machine shows of a process, which lives until it is killed, or closed with no write left."""
        if not next(process for process in self.processes if process.pid == identity.pid).is_alive:
            return Sight(is_in_use=False)
        return Sight(is_in_use=True, started=None if self._hides_processes else identity.started)

    def _answers(self, process: Process) -> bool:
        """Whether whoever looks after a process finds it well: it is neither frozen nor cut off from anybody."""
        lines = (line for line in self.network.lines if line.address == process.address)
        return process.thaws_at is None and not any(line.is_cut for line in lines)

    def _draw_bit(self, number: int) -> bool:
        return random.Random(f"{self.seed} {number}").random() < 0.5

    def run(self) -> Counter[str]:
        """Runs it all.

        Raises:
            ViolationError: if a law was broken.
        """
        with listening() as self.raised:
            try:
                for engine in self.circumstances.engines.values():
                    for rank in range(len(engine.shapes)):
                        self.start(engine, rank)
                for count in range(self.limits.steps):
                    self.step()
                    if count % _STEPS_A_LOOK == 0 and self._is_idle():
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

    def _is_idle(self) -> bool:
        """Whether nothing is left to be done for anybody."""
        return not self._callers.coming and all(request.is_over for request in self.requests)

    def step(self) -> None:
        """Something happens."""
        lot = self._lot()
        if lot < 0.45:
            happened = self._turn()
        elif lot < 0.45 + (_FAIR_MAIL_ODDS if self.is_ending else self.circumstances.mail_odds):
            happened = self._message()
        elif lot < 0.75:
            happened = self._bytes()
        elif lot < 0.82:
            happened = self._notification()
        elif lot < 0.92:
            happened = self._callers.act()
        else:
            happened = False
        if not happened:
            happened = self._anything()
        if not happened or lot >= 0.92:
            self._pass_time(is_idle=not happened)
        if self.circumstances.odds and not self.is_ending:
            self.adversary.go_wrong()
            self._rare.go_wrong()

    def _anything(self) -> bool:
        """Whatever there is to do, in an order of chance."""
        kinds = self._kinds
        first = int(self._lot() * 4)
        for index in range(first - 4, first):
            if kinds[index]():
                return True
        return self._message()

    def _pass_time(self, *, is_idle: bool) -> None:
        longest = 0.3 if is_idle else _FAIR_PACE_S if self.is_ending else self.circumstances.pace_s
        passes_s = self.order.random() * longest
        if is_idle and self._wire_is_busy_until > self.now:  # a wire that lies idle is slower than was drawn
            passes_s = min(passes_s, self._wire_is_busy_until - self.now)
        self.now += passes_s + 1e-4
        for process in self.processes:
            process.changes += 1
            if process.thaws_at is not None and self.now >= process.thaws_at:
                process.thaws_at = None
                self.threads_changed()
                self.adversary.upset_until(self.now + RECOVERY_S)
                self.adversary.thawed(process)
                self.note("%s thaws", process.name)
            keeper = process.platform.keeper
            if process.runs and keeper is not None and not keeper.is_closed and process.platform.now() >= keeper.due_at:
                keeper.due_at = process.platform.now() + keeper.renew()
            if process.runs and process.closing is not None:
                self._go_on_closing(process)
        if self._blocked and any(each.blocked_until <= self.now for each in self._blocked):
            self._blocked = [each for each in self._blocked if each.blocked_until > self.now]
            self.threads_changed()
        if "leave" in self.circumstances.odds:
            self._rare.leave_if_drained()
        if self.wire.lost:
            self._rare.break_lost()
        for computing in [each for each in self.computing if self.now >= each.until]:
            self.computing.remove(computing)
            computing.end()
        for restart in [restart for restart in self.restarts if self.now >= restart.at]:
            self.restarts.remove(restart)
            self.start(restart.engine, restart.rank)
        for line in self.network.lines:
            if line.is_cut and self.now >= self.adversary.lines_heal.get(line, 0.0):
                line.is_cut = False
                self.adversary.upset_until(self.now + RECOVERY_S)
                self.note("the connection of %s to %s heals", line.identity, line.address)
        self.network.forget()
        self.adversary.end_doomed()
        self._inspector.check_holdings()

    def _go_on_closing(self, process: Process) -> None:
        if process.go_on_closing(process.platform.now()):
            for caller in process.waiting:
                demand(caller.ready.done(), Law.ENDS, f"{process.name} has left, and somebody waits for a link of its")
            self.note("%s has left", process.name)
            self.adversary.left(process)

    def _turn(self) -> bool:
        """A thread has a few turns."""
        if self._lot() < 0.05 and self._executor():
            return True
        threads = self._threads()
        first = int(self._lot() * len(threads))
        for index in range(first, first - len(threads), -1):
            process, thread, reads_input = threads[index]
            if not self._finds_work(process, thread, reads_input):
                continue
            left = 1 + int(self._lot() * _BURST)
            while True:
                process.acts()
                self._running = thread
                thread.looked_at = self.now
                try:
                    thread.turn()
                except BaseException as error:
                    if is_of_a_caller(error):
                        raise ViolationError(Law.NEVER_RAISES, f"{thread.name}: {type(error).__name__}") from error
                    raise
                self._running = None
                if thread.has_ended:
                    self.threads_changed()
                    break
                left -= 1
                if thread.blocked_until > self.now or not (left and self._finds_work(process, thread, reads_input)):
                    break
            self._inspector.look(process)
            return True
        return self._executor()

    def _finds_work(self, process: Process, thread: Thread, reads_input: bool) -> bool:
        """Whether a turn of a thread might find something to do."""
        if thread.asked_at != process.changes:
            thread.ask(process.changes)
        return (
            thread.has_work
            or (reads_input and process.has_input)
            or (thread.polls and (thread.looked_at != self.now or bool(process.transport.unreported)))
        )

    def _executor(self) -> bool:
        """What takes long is done, such as asking the registry."""
        for process in self.processes:
            for background_executor in process.platform.executors:
                if background_executor.work and process.runs:
                    process.acts()
                    background_executor.work.popleft()()
                    return True
        return False

    def _threads(self) -> list[tuple[Process, Thread, bool]]:
        """Those that may have a turn, and whether they read input."""
        if self._known_threads is None:
            self._known_threads = [
                (process, thread, thread.loop.reads_input)
                for process in self.processes
                if process.runs
                for thread in process.platform.threads
                if not thread.has_ended and thread.blocked_until <= self.now
            ]
        return self._known_threads

    def _message(self) -> bool:
        """A message arrives."""
        listening = self.network.listening
        lines = [
            line
            for line in self.network.lines
            if (line.down or (line.up and line.address in listening)) and not line.is_cut
        ]
        if not lines:
            return False
        line = self.order.choice(lines)
        goes_up = self.network.can_go_up(line) and (not line.down or self.order.random() < 0.5)
        queue = line.up if goes_up else line.down
        index = self.fate.randrange(len(queue)) if self.adversary.strikes("reorder") else 0
        if self.adversary.strikes("duplicate"):
            queue.insert(index, queue[index])
        (self.network.go_up if goes_up else self.network.go_down)(line, index)
        return True

    def _bytes(self) -> bool:
        """A piece of a write lands."""
        if self.now < self._wire_is_busy_until:
            return False
        transfers = [transfer for transfer in self.wire.transfers if self._gets_on(transfer)]
        if not transfers:
            return False
        transfer = self.order.choice(transfers)
        if not transfer.target.is_mapped:
            self.wire.fail(transfer, PeerDisconnectedError(f"{transfer.target.endpoint_name} is dead"))
            return True
        for _ in range(self.order.choice([1, 1, 2, len(transfer.left)])):
            if transfer.left:
                index = self.order.randrange(len(transfer.left))
                if self.circumstances.wire_bytes_per_s is not None:
                    busy_s = transfer.left[index].num_bytes / self.circumstances.wire_bytes_per_s
                    self._wire_is_busy_until = max(self.now, self._wire_is_busy_until) + busy_s
                self.wire.land(transfer, index)
        return True

    def _gets_on(self, transfer: SimulatedHandle) -> bool:
        if self.now < self.adversary.held.get(transfer, 0.0):
            return False
        if self.adversary.lies_in_sockets(transfer) or self.wire.is_lost(transfer):
            return False
        if transfer.has_ended:
            return True  # it was sent: nothing else holds it up
        owner = self.process_of(transfer.source)
        return self.circumstances.wire_runs_alone or owner.thaws_at is None or owner.died_at is not None

    def _notification(self) -> bool:
        """A notification arrives."""
        if not self.wire.notifications:
            return False
        notification = self.order.choice(self.wire.notifications)
        if self.adversary.strikes("duplicate"):
            self.wire.notifications.append(Notification(notification.sender, notification.target, notification.data))
        self.wire.deliver(notification)
        return True

    def _end(self) -> None:
        """No more trouble: whatever is frozen for ever stays so for a while, and then everything must be over."""
        self.is_ending = True
        self.note("no more trouble")
        self.registry.restart()
        for process in self.processes:
            if process.is_alive and process not in self.circumstances.engines[process.engine].ranks:
                self.adversary.excuse_those_with(process, "the registry has forgotten who was replaced")
        for line in self.network.lines:
            line.is_cut = False
        self._replace_the_dead()
        self._run_until(self.now + _END_S, is_over=lambda: self._inspector.what_is_open(but_for_frozen=True) is None)
        self._inspector.check_over(but_for_frozen=True)
        for process in self.processes:
            if process.thaws_at is not None:
                if self.fate.random() < 0.5:
                    self.adversary.kill(process)
                else:
                    process.thaws_at = self.now
        self.adversary.held.clear()
        self._replace_the_dead()
        self._run_until(self.now + _END_S, is_over=lambda: self._inspector.what_is_open(but_for_frozen=False) is None)
        self._inspector.check_over(but_for_frozen=False)
        self._inspector.check_memory()

    def _replace_the_dead(self) -> None:
        """Somebody who looks after the engines starts again what was killed."""
        for engine in self.circumstances.engines.values():
            for process in engine.ranks:
                is_coming = any(each.engine is engine and each.rank == process.rank for each in self.restarts)
                if process.died_at is not None and not is_coming:
                    self.restarts.append(Restart(engine, process.rank, self.now + 0.1))

    def _run_until(self, until: float, *, is_over: Callable[[], bool]) -> None:
        count = 0
        while self.now < until:
            self.step()
            count += 1
            if count % _STEPS_A_LOOK == 0 and is_over():
                return
