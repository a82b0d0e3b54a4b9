"""What there is in one simulated world, for those who act in it: time, chance, processes, requests and wires."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from proof.simulated_transport import SimulatedTransport, SimulatedWire
from proof.simulation.circumstances import LEASE_S, Engine, Limits, drawn, drawn_apart, for_healing
from proof.simulation.control_network import ControlNetwork
from proof.simulation.machines import RegistryProcess, Thread
from proof.simulation.processes import Process
from proof.simulation.raised import Raised
from proof.simulation.requests import Computing, RankSide, Request


@dataclass(slots=True, eq=False)
class Restart:
    """A rank that will be started again."""

    engine: Engine
    rank: int
    at: float


class Universe:
    """The things of one world, which `World` sets in motion.

    Attributes:
        seed: what all of it comes of.
        limits: how large it is.
        now: the time, in seconds.
        is_ending: whether nothing goes wrong any more.
        trace: what happened, in words, if it was asked for.
        outcomes: how many sides of transfers ended how, and how often what went wrong.
        circumstances: what there is.
        order: chance, about the order of things.
        fate: chance, about what goes wrong. Of its own, so that a world from which something is left out is like the
            whole one otherwise.
        processes: every life of every rank.
        restarts: ranks that will be started again.
        requests: those that were made so far.
        sides: these requests on all ranks.
        wire: carries bytes between processes.
        network: carries messages between processes.
        registry: where processes find each other.
        raised: what endpoints logged of errors that they did not expect.
        hands_layers_in: whether callers hand chunks in by ranges of layers, some of them before they are computed.
        names_starts: whether a start of a prefill engine of one rank has a name, and requests say which has them: ranks
            of others are started one by one here.
        computing: what models are computing.
        proves_no_end: whether every process is in a namespace of its own, and nobody ever proves that one has ended.
    """

    wire: SimulatedWire
    network: ControlNetwork

    def __init__(self, seed: int, limits: Limits, *, traces: bool) -> None:
        """Draws what there is, by the seed."""
        self.seed = seed
        self.limits = limits
        self.now = 0.0
        self.is_ending = False
        self.trace: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self._draw = random.Random(seed)
        self.order = random.Random(seed + 1)
        self.fate = random.Random(seed + 2)
        self.circumstances = drawn(self._draw, self.limits)
        self.circumstances.odds.update(drawn_apart(seed, self.limits))
        self.circumstances = for_healing(self.circumstances)
        self.processes: list[Process] = []
        self.restarts: list[Restart] = []
        self.requests: list[Request] = []
        self.sides: list[RankSide] = []
        self._sides_of: dict[Process, list[RankSide]] = {}
        self._process_of: dict[SimulatedTransport, Process] = {}
        self.registry = RegistryProcess(LEASE_S, lambda: self.now)
        self.raised = Raised()
        self._traces = traces
        self._running: Thread | None = None
        self._blocked: list[Thread] = []
        self._known_threads: list[tuple[Process, Thread, bool]] | None = None
        # Chances of their own, so that other worlds are as they were without them.
        self.hands_layers_in = random.Random(f"{seed} hands layers in").random() < 0.2
        self.names_starts = random.Random(f"{seed} names starts").random() < 0.5
        self.computing: list[Computing] = []
        self.proves_no_end = "unproved end" in self.circumstances.odds

    @property
    def troubles(self) -> frozenset[str]:
        """Kinds of faults that there are."""
        return frozenset(self.circumstances.odds)

    def threads_changed(self) -> None:
        """A process began, froze, thawed or ended, or one of its threads did."""
        self._known_threads = None

    def block(self, seconds: float, why: str) -> None:
        """Code of a caller's does not return for so long: the thread that runs it has no turn till then."""
        if self._running is None:
            return
        self._running.blocked_until = self.now + seconds
        self._blocked.append(self._running)
        self.threads_changed()
        self.note("%s keeps %s until %.3f", why, self._running.name, self._running.blocked_until)

    def note(self, text: str, *values: object) -> None:
        """Writes something that happened to the trace, if there is one."""
        if self._traces:
            self.trace.append(f"{self.now:8.3f}  " + (text % values if values else text))

    def process_of(self, transport: SimulatedTransport) -> Process:
        """Whose transport it is."""
        return self._process_of[transport]

    def add(self, request: Request) -> None:
        """A request was made."""
        self.requests.append(request)
        for side in request.sides:
            self.sides.append(side)
            self._sides_of[side.process].append(side)

    def sides_of(self, process: Process) -> list[RankSide]:
        """All requests there, those that are over, too."""
        return self._sides_of[process]
