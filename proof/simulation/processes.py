"""The processes of a simulated system: starting, freezing, killing and closing them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.endpoint import DecodeEndpoint, PrefillEndpoint
from kvferry.endpoint.decode.links import Caller
from kvferry.endpoint.runtime.platform import Closing
from kvferry.protocol.links.link import LinkKey
from kvferry.testing.probe import probe
from proof.simulated_transport import SimulatedTransport
from proof.simulation.machines import SimulatedPlatform
from proof.simulation.memory import Pool


@dataclass(slots=True, eq=False)
class Process:
    """A rank in a process of its own, in one of its lives.

    Attributes:
        name: what traces call it.
        engine: the engine that it belongs to.
        rank: its number there.
        life: how often the rank was started before.
        pid: its number on its machine; no two processes ever have the same.
        thaws_at: until when it is frozen; None if it is not.
        awake_since: when its last freeze ends, or ended.
        died_at: when it was killed; None if it was not.
        is_closed_in_order: whether it was closed in order.
        has_acted: whether anything of it ran since its callers last looked.
        waiting: callers who wait until an engine is connected.
        changes: grows whenever anything of it ran or its time went on: only then its loops find other work.
    """

    name: str
    engine: str
    rank: int
    life: int
    pid: int
    platform: SimulatedPlatform
    pool: Pool
    transport: SimulatedTransport
    endpoint: PrefillEndpoint | DecodeEndpoint
    address: str
    thaws_at: float | None = None
    awake_since: float = 0.0
    died_at: float | None = None
    is_closed_in_order: bool = False
    has_acted: bool = True
    changes: int = 0
    closing: Closing | None = None
    closing_waits_for: tuple[Callable[[], bool], float] | None = None
    waiting: list[Caller] = field(default_factory=list)

    @property
    def is_prefill(self) -> bool:
        """Whether it is a prefill rank."""
        return isinstance(self.endpoint, PrefillEndpoint)

    @property
    def is_alive(self) -> bool:
        """Whether it was neither killed nor closed."""
        return self.died_at is None and not self.is_closed_in_order

    @property
    def runs(self) -> bool:
        """Whether its threads have turns."""
        return self.died_at is None and self.thaws_at is None and not self.is_closed_in_order

    @property
    def hears_nobody(self) -> bool:
        """Whether the threads of a decode rank that was closed have ended, though callbacks may run on."""
        is_closed = self.closing is not None and self.closing_waits_for is None
        return is_closed and isinstance(self.endpoint, DecodeEndpoint) and probe(self.endpoint).driver.has_ended

    @property
    def takes_work(self) -> bool:
        """Whether its callers may open rooms."""
        return self.runs and self.closing is None

    @property
    def has_input(self) -> bool:
        """Whether messages or notifications wait to be read."""
        return bool(self.transport.arrived) or self.platform.has_input

    def acts(self) -> None:
        """Anything of it runs: a turn of a thread, or a call of its owner or its callers."""
        self.has_acted = True
        self.changes += 1

    def awaits_link_to(self, engine: str) -> None:
        """Has a caller wait, on a thread of their own, until an engine is connected (`DecodeEndpoint.connect`)."""
        assert isinstance(self.endpoint, DecodeEndpoint)
        self.waiting.append(Caller())
        probe(self.endpoint).links.begin_waiting(self.waiting[-1], LinkKey(engine, 0))

    def begin_closing(self) -> None:
        """Its owner closes the endpoint."""
        self.acts()
        self.closing = self.endpoint._closing()
        self.closing_waits_for = (lambda: True), 0.0

    def go_on_closing(self, now: float) -> bool:
        """Takes the next step if it may; returns whether it has left."""
        assert self.closing is not None
        self.acts()
        if self.closing_waits_for is not None:
            holds, until = self.closing_waits_for
            if not holds() and now < until:
                return False
            self.closing_waits_for = next(self.closing, None)
        # Where writes hang, threads outlive the call.
        self.is_closed_in_order = self.closing_waits_for is None and all(
            thread.has_ended for thread in self.platform.threads
        )
        return self.is_closed_in_order
