"""Who decides what goes wrong, and when: everything that may befall processes, connections and writes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from kvferry.errors import PeerDisconnectedError, TransportError
from kvferry.protocol.wire.codec import decode_notification
from kvferry.protocol.wire.messages import StagedArrived
from proof.simulated_transport import SimulatedHandle
from proof.simulation.circumstances import LINGER_S, THAW_S, WAITS
from proof.simulation.control_network import NEXT_RELEASE, Line
from proof.simulation.processes import Process
from proof.simulation.requests import RankSide
from proof.simulation.universe import Restart, Universe

RECOVERY_S = 2.0
"""Until all have noticed that they live: several heartbeats."""

_FAILURES = (TransportError, PeerDisconnectedError)
_FREEZE_COUNTS_S = 0.5
"""Of each freeze but the first so much counts as waited: docs/reliability.md, "What is not promised"."""


class Adversary:
    """What goes wrong in one world.

    Attributes:
        faults: how many there were so far; those that were left out count, too.
        doomed: until when writes of dead processes go on.
        in_sockets: writes that failed, or whose writers died: the receiver's sockets hold what was sent while it is
            frozen.
        held: until when writes do not get on.
        of_frozen: chance, about what receivers that freeze have not read.
        lines_heal: when connections that are cut come back.
        broken_off: prefill and decode processes between which a write failed: to connect anew takes them longer.
        kept_until: until when a decode rank's ring may be kept, on either side, for what a failed write of a prefill
            rank had sent, or the two may not have connected anew, by the two processes: others have no space till then.
        lost_at: when a message last failed to be sent.
        unwell_until: until when peers may take each other for lost that are not, or may not find each other.
    """

    def __init__(self, world: Universe) -> None:
        self._world = world
        self._lingering = random.Random(world.seed + 3)  # what becomes of a write that fails
        odds_of = world.circumstances.odds
        self._happenings = [(kind, odds, _HAPPENINGS[kind]) for kind, odds in odds_of.items() if kind in _HAPPENINGS]
        # Of its own, so that worlds stay as they are in which nothing freezes.
        self.of_frozen = random.Random(f"{world.seed} frozen receivers")
        self.faults = 0
        self.doomed: dict[SimulatedHandle, float] = {}
        self.held: dict[SimulatedHandle, float] = {}
        self.in_sockets: set[SimulatedHandle] = set()
        self.lines_heal: dict[Line, float] = {}
        self.lost_at = 0.0
        self.unwell_until = 0.0
        self.broken_off: set[tuple[Process, Process]] = set()
        self.kept_until: dict[tuple[Process, Process], float] = {}
        self._jumped_at: dict[Process, float] = {}
        # Of writes that lie in sockets: until when, and for how long, a receiver that thaws need read at the most.
        self._left_until: dict[SimulatedHandle, float] = {}
        self._left_s: dict[SimulatedHandle, float] = {}

    def strikes(self, kind: str) -> bool:
        """Whether it goes wrong this time."""
        odds = self._world.circumstances.odds.get(kind)
        if odds is None or self._world.is_ending or self._world.fate.random() >= 10 * odds:
            return False
        return self.counts(kind)

    def counts(self, kind: str) -> bool:
        """Numbers a fault; False if it is left out."""
        self.faults += 1
        if self.faults in self._world.limits.without_faults:
            return False
        self._world.outcomes[f"trouble: {kind}"] += 1
        self._world.note("fault %d: %s", self.faults, kind)
        return True

    def sending_fails(self) -> bool:
        """Whether a message cannot be sent, since its queue is full."""
        if not self.strikes("send fails"):
            return False
        self.lost_at = self._world.now
        self.excuse_all("sending failed")
        self.upset_until(self._world.now + WAITS.peer_s + RECOVERY_S)  # a heartbeat may be lost, and others with it
        return True

    def transport_fails(self, what: str) -> Exception | None:
        """Why something that a transport was asked for fails, if it does."""
        if not self.strikes(f"{what} fails"):
            return None
        self.excuse_all(f"{what} failed")
        if what == "connect":  # whoever waits for the same link soon after fails with it
            self.upset_until(self._world.now + RECOVERY_S)
        return TransportError(f"the simulation lets {what} fail")

    def copying_fails(self) -> Exception | None:
        """Why bytes cannot be copied to or from staging memory, if so."""
        if not self.strikes("copy fails"):
            return None
        self.excuse_all("copying failed")
        return RuntimeError("the simulation lets a copy fail")

    def go_wrong(self) -> None:
        """Whatever befalls this step."""
        draw = self._world.fate.random
        for kind, odds, happens in self._happenings:
            if draw() < odds and self.counts(kind):
                happens(self)

    def upset_until(self, time_s: float) -> None:
        """Requests that come before then may fail for what has happened now."""
        self.unwell_until = max(self.unwell_until, time_s)

    def excuse_all(self, why: str) -> None:
        for request in self._world.requests:
            if not request.is_over:
                request.excused(why)

    def excuse_those_with(self, process: Process, why: str) -> None:
        for request in self._world.requests:
            if not request.is_over and process.engine in (request.prefill, request.decode):
                request.excused(why)

    def _someone(self) -> Process | None:
        """A process to strike: half of the time one that is in the middle of a write."""
        running = [process for process in self._world.processes if process.runs and process.closing is None]
        writing = {transfer.source for transfer in self._world.wire.moving}
        busy = [process for process in running if process.transport in writing]
        if busy and self._world.fate.random() < 0.5:
            return self._world.fate.choice(busy)
        return self._world.fate.choice(running) if running else None

    def _crash(self) -> None:
        process = self._someone()
        if process is not None:
            self.kill(process)
            if self._world.fate.random() < 0.7:
                self.restart_later(process)

    def kill(self, process: Process) -> None:
        """A process ends in the middle of everything. Some of what it wrote may land for a while."""
        self._world.note("%s is killed", process.name)
        process.died_at = self._world.now
        process.thaws_at = None
        process.transport.is_mapped = False
        self.excuse_those_with(process, f"{process.name} was killed")
        if process.is_prefill:
            self._world.network.listener_died(process.address)
            for line in self._world.network.lines:
                if line.address == process.address:
                    self._world.network.break_line(line, self._world.fate.randint(0, len(line.up)), 0)
        elif process.platform.connecting is not None:
            for line in process.platform.connecting.lines:
                line.is_closed = True
                self._world.network.break_line(line, self._world.fate.randint(0, len(line.up)), 0)
        for transfer in list(self._world.wire.transfers):
            if transfer.source is process.transport and not transfer.has_ended:
                if self._world.fate.random() < 0.5:
                    self._world.wire.fail(transfer, None)
                else:
                    self.held[transfer] = self._world.now + self._world.fate.random() * LINGER_S
                    self.doomed[transfer] = self._left_until[transfer] = self._world.now + LINGER_S
                    self.in_sockets.add(transfer)
        self.left(process)

    def end_doomed(self) -> None:
        """Writes of dead processes end. What the sockets of a frozen process hold does not."""
        for transfer in list(self._world.wire.transfers):
            if self._world.now >= self.doomed.get(transfer, float("inf")):
                if self.lies_in_sockets(transfer):
                    self._is_read(transfer)
                else:
                    self._world.wire.fail(transfer, None)

    def _is_read(self, transfer: SimulatedHandle) -> None:
        """What a post that raised had posted is read by now: for no longer than `Promises` gives it."""
        if transfer.is_orphan and not transfer.has_ended:
            self._world.wire.fail(transfer, None, sent=len(transfer.left))

    def left(self, process: Process) -> None:
        """Whoever had to do with it on this process does not any more: its memory is gone, or its owner's again."""
        self._world.threads_changed()
        for request in self._world.requests:
            for side in request.sides:
                if side.process is process and not side.is_released:
                    side.is_released = True
                    request.excused(f"{process.name} left")

    def restart_later(self, process: Process) -> None:
        engine = self._world.circumstances.engines[process.engine]
        self._world.restarts.append(
            Restart(engine, process.rank, self._world.now + self._world.fate.choice([0.0, 0.2, 1.0, 3.0]))
        )

    def _freeze(self) -> None:
        process = self._someone()
        if process is not None:
            self.freeze_until(process, self._world.now + self._world.fate.choice([0.05, 0.5, 2.0, 4.0, 1e9]))

    def freeze_until(self, process: Process, thaws_at: float) -> None:
        process.thaws_at = process.awake_since = thaws_at
        is_another = self._world.now - self._jumped_at.get(process, float("-inf")) < WAITS.quarantine_s
        for transfer, until in self._left_until.items():
            if transfer.target is process.transport:  # what it has read of its sockets before it freezes it has read
                left_s = until - self._world.now - (_FREEZE_COUNTS_S if is_another else 0.0)
                self._left_s[transfer] = min(THAW_S, max(0.0, left_s))
        self._world.threads_changed()
        self._world.note("%s freezes until %.3f", process.name, process.thaws_at)
        self.excuse_those_with(process, f"{process.name} froze")

    def _close(self) -> None:
        process = self._someone()
        if process is not None:
            self.close(process)
            if self._world.fate.random() < 0.3:  # perhaps it is closed since its writes hang
                for transfer in self._world.wire.moving:
                    if transfer.source is process.transport:
                        self.hold_up(transfer)

    def close(self, process: Process) -> None:
        """A process's owner closes its endpoint, and starts another one later."""
        self._world.note("%s is closed", process.name)
        self.excuse_those_with(process, f"{process.name} was closed")
        process.begin_closing()
        self.restart_later(process)

    def _cut(self) -> None:
        if self._world.network.lines:
            line = self._world.fate.choice(self._world.network.lines)
            self._world.note("the connection of %s to %s breaks", line.identity, line.address)
            self._world.network.break_line(
                line, self._world.fate.randint(0, len(line.up)), self._world.fate.randint(0, len(line.down))
            )
            seconds = self._world.fate.choice([0.0, 0.0, 0.5, 3.0, 6.0])
            if seconds:
                line.is_cut = True
                self.lines_heal[line] = self._world.now + seconds
            self.excuse_all("a connection broke")

    def _registry(self) -> None:
        self.excuse_all("the registry failed")
        # One that is back knows nobody, and whoever asked in vain asks again only after a while.
        self.upset_until(self._world.now + RECOVERY_S)
        lot = self._world.fate.random()
        if not self._world.registry.answers or lot < 0.4:
            self._world.registry.restart()
        elif lot < 0.7:
            self._world.registry.is_alive = False
        else:
            self._world.registry.is_frozen = True

    def _abort(self) -> None:
        sides: list[RankSide] = [
            side
            for request in self._world.requests
            for side in request.sides
            if not side.is_released and side.process.takes_work
        ]
        if not sides:
            return
        side = self._world.fate.choice(sides)
        transfer = side.transfer
        if transfer is not None:
            self._world.note("%s: %s is aborted", side.process.name, side.request)
            side.request.excused("it was aborted")
            side.process.acts()
            transfer.abort("the simulation says so")

    def of_the_living(self) -> list[SimulatedHandle]:
        """Writes that may fail. What a process that has died had sent just ends: nobody is there to be told."""
        return [each for each in self._world.wire.moving if each not in self.doomed]

    def _fail_write(self) -> None:
        writes = self.of_the_living()
        if writes:
            self.break_off(self._world.fate.choice(writes), self._lingering)

    def break_off(
        self,
        transfer: SimulatedHandle,
        draw: random.Random,
        *,
        within_s: float = LINGER_S / 2,
        is_disconnected: bool = False,
    ) -> None:
        """A write fails. What was sent of it lands yet: soon, or once its receiver thaws where that is frozen."""
        kinds = (PeerDisconnectedError,) if is_disconnected else _FAILURES
        problem = self.excused_break(transfer, draw, kinds=kinds)
        sent = draw.randint(0, len(transfer.left))
        draw.shuffle(transfer.left)
        self._world.wire.fail(transfer, problem, sent=sent)
        self.ends_soon(transfer, draw, within_s=within_s)

    def excused_break(
        self,
        transfer: SimulatedHandle,
        draw: random.Random,
        *,
        is_given_up: bool = False,
        kinds: Sequence[type[TransportError]] = _FAILURES,
    ) -> Exception:
        """Excuses what suffers from a write's failure, and returns why it fails.

        Args:
            is_given_up: whether its two ranks have to connect anew, whatever it fails with.
            kinds: what it may fail with.
        """
        self.excuse_all("a write failed")
        # Sometimes the connection broke, so that the receiver is given up; what was sent lands all the same.
        kind = draw.choice(kinds)
        both = self._world.process_of(transfer.source), self._world.process_of(transfer.target)
        self.broken_off.add(both)
        settled_at = max(self._world.now + WAITS.quarantine_s, both[1].thaws_at or 0.0) + WAITS.quarantine_s
        if is_given_up or kind is PeerDisconnectedError:
            self.upset_until(self._world.now + RECOVERY_S)
            self.kept_until[both] = settled_at + RECOVERY_S
        elif not transfer.notification or isinstance(
            decode_notification(transfer.notification, NEXT_RELEASE), StagedArrived
        ):
            self.kept_until[both] = max(settled_at, self.kept_until.get(both, 0.0))
        return kind("the simulation lets it fail")

    def ends_soon(self, transfer: SimulatedHandle, draw: random.Random, *, within_s: float = LINGER_S / 2) -> None:
        """Lets what is left of a failed write land in a moment, or once its receiver thaws."""
        # Sooner than after a death: whoever waits for it may be frozen meanwhile, or its clock may jump.
        self.held[transfer] = self._world.now + draw.random() * within_s
        self.doomed[transfer] = self._left_until[transfer] = self._world.now + within_s
        self.in_sockets.add(transfer)

    def lies_in_sockets(self, transfer: SimulatedHandle) -> bool:
        """Whether what is left of a write that has ended waits for its receiver to thaw: it alone reads its sockets."""
        return transfer in self.in_sockets and self._world.process_of(transfer.target).thaws_at is not None

    def thawed(self, process: Process) -> None:
        """What a process's sockets hold lands soon. That it was frozen is a jump of its clock, too."""
        self._jumped_at[process] = self._world.now
        for transfer in self._world.wire.transfers:
            if transfer in self.in_sockets and transfer.target is process.transport:
                self._is_read(transfer)
                left_s = self._left_s.get(transfer, THAW_S)
                self.held[transfer] = self._world.now + self.of_frozen.random() * left_s
                self.doomed[transfer] = self._left_until[transfer] = self._world.now + left_s

    def _delay_write(self) -> None:
        if self._world.wire.moving:
            self.hold_up(self._world.fate.choice(self._world.wire.moving))

    def hold_up(self, transfer: SimulatedHandle) -> None:
        self.held[transfer] = self._world.now + self._world.fate.choice([0.5, 3.0, 8.0])
        self.upset_until(self.held[transfer] + RECOVERY_S)  # others wait behind it
        self.excuse_all("a write came late")

    def _jump(self) -> None:
        process = self._someone()
        if process is not None:
            self.jump(process, self._world.fate.choice([0.1, 1.0, 10.0]))

    def jump(self, process: Process, seconds: float) -> None:
        """A process's clock jumps, unless it has just done so, or the process was frozen."""
        # Of each, a part counts as waited: no more than one in that time (docs/reliability.md).
        if self._world.now - self._jumped_at.get(process, float("-inf")) < WAITS.quarantine_s:
            return
        self._jumped_at[process] = self._world.now
        process.changes += 1
        process.platform.skew_s += seconds
        self.upset_until(self._world.now + RECOVERY_S)
        self.excuse_all("a clock jumped")


_HAPPENINGS: dict[str, Callable[[Adversary], None]] = {
    "crash": Adversary._crash,
    "freeze": Adversary._freeze,
    "close": Adversary._close,
    "cut": Adversary._cut,
    "registry": Adversary._registry,
    "abort": Adversary._abort,
    "write fails": Adversary._fail_write,
    "late": Adversary._delay_write,
    "clock": Adversary._jump,
}
