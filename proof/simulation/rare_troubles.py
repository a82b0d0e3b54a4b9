"""What goes wrong in few worlds: each kind has chances of its own, so that other worlds are as they were without it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from kvferry.endpoint import DecodeEndpoint, PrefillEndpoint
from kvferry.endpoint.runtime.calibration import WriteHangsError
from kvferry.testing.probe import probe
from kvferry.transport import TransferHandle
from proof.simulated_transport import Loss, SimulatedConnection, SimulatedHandle, SimulatedTransport
from proof.simulation.adversary import RECOVERY_S, Adversary
from proof.simulation.circumstances import LEASE_S, WAITS, Engine
from proof.simulation.laws import Law, demand
from proof.simulation.processes import Process
from proof.simulation.universe import Universe

_MOST = {
    "freeze of a writer": 1,
    "freeze while it settles": 2,
    "unproved end": 2,
    "silent line": 2,
    "lost flow": 2,
    "second start": 1,
}
"""How often each strikes a world: what comes after is to find that all is well again."""
_HANGING_FAILS = 0.02  # of a write that measures and hangs, in a step
_MEASURED_WITHIN_S = 2.0  # lands what a write that measures had sent; less than is waited for
_HEALS_S = 2 * WAITS.peer_s + RECOVERY_S  # a line that was silent


class RareTroubles:
    """Those of one world."""

    def __init__(self, world: Universe, adversary: Adversary, start: Callable[[Engine, int], None]) -> None:
        self._world = world
        self._start = start
        self._adversary = adversary
        self._of_posts = random.Random(f"{world.seed} which posts raise")
        self._of_measuring = random.Random(f"{world.seed} which measurements fail")
        self._of_lost = random.Random(f"{world.seed} what was sent through lost connections")
        self._raises_next = False
        self._hanging: list[SimulatedHandle] = []  # writes that measure
        self._excused: set[tuple[Loss, bool]] = set()  # before it was known that a connection is broken, and since
        self._breaks_at: dict[SimulatedConnection, float] = {}
        self._struck: Counter[str] = Counter()
        known: dict[str, tuple[random.Random, Callable[[random.Random], None]]] = {
            "frozen receiver": (adversary.of_frozen, self._break_off_while_frozen),
            "freeze of a writer": (random.Random(f"{world.seed} which writers freeze"), self._freeze_writer),
            "freeze while it settles": (random.Random(f"{world.seed} who freezes as it waits"), self._freeze_settling),
            "leave": (random.Random(f"{world.seed} who leaves"), self._leave),
            "unproved end": (random.Random(f"{world.seed} which ends nobody proves"), self._end_unproved),
            "silent line": (random.Random(f"{world.seed} which lines are silent"), self._silence),
            "lost flow": (random.Random(f"{world.seed} which bytes are lost"), self._lose_bytes),
            "second start": (random.Random(f"{world.seed} which engines start twice"), self._start_twice),
            "close waits": (random.Random(f"{world.seed} which closes wait"), self._close_while_frozen),
        }
        odds = world.circumstances.odds
        self._strikes = [(odds[kind], *known[kind]) for kind in known if kind in odds]

    def go_wrong(self) -> None:
        """Whatever befalls this step."""
        for odds, draw, happens in self._strikes:
            if draw.random() < odds:
                happens(draw)
        if self._hanging and self._of_measuring.random() < _HANGING_FAILS:
            transfer = self._hanging.pop()
            if not transfer.has_ended and self._adversary.counts("measuring write"):
                target = self._world.process_of(transfer.target)
                if target.takes_work and self._of_measuring.random() < 0.5:
                    self._adversary.freeze_until(target, self._world.now + self._of_measuring.choice([2.0, 4.0, 6.0]))
                self._adversary.break_off(transfer, self._of_measuring)

    def _counts(self, kind: str) -> bool:
        if self._struck[kind] == _MOST[kind] or not self._adversary.counts(kind):
            return False
        self._struck[kind] += 1
        return True

    @property
    def _whole_engines(self) -> list[Engine]:
        """Engines of which every rank runs, and none leaves."""
        engines = self._world.circumstances.engines.values()
        whole = [each for each in engines if len(each.ranks) == len(each.shapes)]
        return [each for each in whole if all(rank.takes_work and not rank.endpoint.is_draining for rank in each.ranks)]

    def _leave(self, draw: random.Random) -> None:
        """An engine drains, to leave once nothing is open there. What it has, or was asked for, does not suffer."""
        staying = self._whole_engines
        if not staying or not self._adversary.counts("leave"):
            return
        engine = draw.choice(staying)
        self._world.note("%s drains", engine.name)
        for process in engine.ranks:
            for side in self._world.sides_of(process):
                if not side.request.is_over and not side.is_taken:
                    side.request.excused(f"{process.name} drains, and has not heard of it")
            process.acts()
            process.endpoint.drain()

    def leave_if_drained(self) -> None:
        """Engines that drain close once all of their ranks have."""
        for engine in self._world.circumstances.engines.values():
            if engine.ranks and all(rank.takes_work and rank.endpoint.is_drained for rank in engine.ranks):
                self._world.note("%s has drained", engine.name)
                for process in engine.ranks:
                    for side in self._world.sides_of(process):
                        is_open = side.transfer is not None and not side.transfer.state.is_final
                        demand(not is_open, Law.ENDS, f"{process.name} has drained, and {side.request} is open there")
                    process.begin_closing()
                    self._adversary.restart_later(process)
                self._adversary.upset_until(self._world.now + RECOVERY_S)

    def _break_off_while_frozen(self, draw: random.Random) -> None:
        """A decode rank freezes for long; a write to it has been sent, in part, and fails."""
        writes = [each for each in self._adversary.of_the_living() if self._world.process_of(each.target).takes_work]
        if writes and self._adversary.counts("frozen receiver"):
            transfer = draw.choice(writes)
            process = self._world.process_of(transfer.target)
            self._adversary.freeze_until(process, self._world.now + draw.choice([2.0, 4.0, 6.0]))
            self._adversary.break_off(transfer, draw)

    def _freeze_writer(self, draw: random.Random) -> None:
        """A prefill rank freezes while it writes, until long after whoever took it for ended has reused the pages."""
        writes = [each for each in self._adversary.of_the_living() if self._world.process_of(each.source).takes_work]
        if writes and self._counts("freeze of a writer"):
            process = self._world.process_of(draw.choice(writes).source)
            self._adversary.freeze_until(process, self._world.now + draw.choice([6.0, 9.0]))

    def _freeze_settling(self, draw: random.Random) -> None:
        """A prefill rank dies while it writes; a decode rank that waits for what that had sent freezes, or its clock
        jumps.
        """
        sent = {each.target: None for each in self._world.wire.transfers if each in self._adversary.in_sockets}
        waiting = [each for each in map(self._world.process_of, sent) if each.takes_work and _settles(each)]
        writes = [each for each in self._adversary.of_the_living() if self._world.process_of(each.source).takes_work]
        if not (waiting or writes) or not self._counts("freeze while it settles"):
            return
        if not waiting:
            process = self._world.process_of(draw.choice(writes).source)
            self._adversary.kill(process)
            self._adversary.restart_later(process)
        elif draw.random() < 0.5:
            self._adversary.freeze_until(draw.choice(waiting), self._world.now + draw.choice([2.0, 4.0]))
        else:
            self._adversary.jump(draw.choice(waiting), 10.0)

    # ---- posts that raise ---------------------------------------------------------------------------------------

    def post_raises(self, transfer: SimulatedHandle) -> Exception | None:
        """Why a post raises after some of its descriptors, or none, were posted; None if it does not."""
        odds = self._world.circumstances.odds.get("raising post")
        strikes = odds is not None and not self._world.is_ending and self._of_posts.random() < odds
        if not self._raises_next and not (strikes and self._adversary.counts("raising post")):
            return None
        self._of_posts.shuffle(transfer.left)
        del transfer.left[self._of_posts.randint(0, len(transfer.left)) :]
        problem = self._adversary.excused_break(transfer, self._of_posts, is_given_up=True)
        self._adversary.ends_soon(transfer, self._of_posts)
        return problem

    def is_cut(self, transfer: SimulatedHandle) -> None:
        """Its writer forgets the peer: of what it has posted in vain, only what was sent lands."""
        self._world.wire.fail(transfer, None, sent=self._of_posts.randint(0, len(transfer.left)))

    # ---- writes that measure ----------------------------------------------------------------------------------------

    def measure(self, post: Callable[[], TransferHandle]) -> None:
        """Lets a write that measures a wire fail, hang, or raise when it is posted; lets it be where all is well.

        Raises:
            TransportError: if it fails.
            WriteHangsError: if it hangs.
        """
        odds, draw = self._world.circumstances.odds.get("measuring write"), self._of_measuring
        if odds is None or self._world.is_ending or draw.random() >= odds:
            return
        if not self._adversary.counts("measuring write"):
            return
        self._raises_next = draw.random() < 1 / 3
        try:
            transfer = post()
        finally:
            self._raises_next = False
        assert isinstance(transfer, SimulatedHandle)
        self._adversary.excused_break(transfer, draw)  # whether it hangs or fails, the two have to connect anew
        if draw.random() < 0.5:
            self._adversary.hold_up(transfer)
            self._hanging.append(transfer)
            raise WriteHangsError(transfer, "did not end in time")
        self._adversary.break_off(transfer, draw, within_s=_MEASURED_WITHIN_S)
        transfer.source.poll(transfer)

    # ---- ends, silence, starts, closes ----------------------------------------------------------------------------

    def _end_unproved(self, draw: random.Random) -> None:
        """A prefill rank ends, and another one takes its place. Nobody ever says that the first has ended."""
        engines = [each for each in self._whole_engines if each.is_prefill]
        if not engines or not self._counts("unproved end"):
            return
        process = draw.choice(draw.choice(engines).ranks)
        self._adversary.kill(process)
        self._adversary.restart_later(process)

    def _silence(self, draw: random.Random) -> None:
        """A connection carries nothing more, one way or both, until it is made anew. Nobody is told."""
        lines = [each for each in self._world.network.lines if not each.is_closed and not each.is_silent]
        if not lines or not self._counts("silent line"):
            return
        line = draw.choice(lines)
        line.loses_up, line.loses_down = draw.choice([(True, False), (False, True), (True, True)])
        line.drop_lost()
        ways = {(True, False): "up", (False, True): "down", (True, True): "both ways"}
        self._world.note(
            "the connection of %s to %s is silent from now on, %s",
            line.identity, line.address, ways[line.loses_up, line.loses_down],
        )  # fmt: skip
        self._adversary.excuse_all("a connection was silent")
        self._adversary.upset_until(self._world.now + _HEALS_S)

    def _lose_bytes(self, draw: random.Random) -> None:
        """What a prefill rank sends to a decode rank's memory is lost from now on, and nobody is told. Words arrive."""
        known = self._world.wire.lost
        connections = [
            (source, connection)
            for process in self._world.processes
            if process.takes_work and process.is_prefill
            for source in [process.transport]
            for connection in source.connected.values()
            if connection not in known and self._world.process_of(connection.target).takes_work
        ]
        if not connections or not self._counts("lost flow"):
            return
        source, connection = draw.choice(connections)
        known[connection] = Loss(source)
        for notification in list(self._world.wire.notifications):  # on their way
            if notification.sender == source.endpoint_name and notification.target is connection.target:
                self._world.wire.notifications.remove(notification)
                known[connection].is_met = True
        self._world.note("what %s writes to %s is lost", source.endpoint_name, connection.target.endpoint_name)
        self._adversary.excuse_all("a connection for bytes was lost")  # and with it words about bytes that arrived

    def break_lost(self) -> None:
        """Connections that were lost are found broken once nothing of what was sent has arrived for long."""
        lost, now = self._world.wire.lost, self._world.now
        for connection, loss in list(lost.items()):
            name = connection.target.endpoint_name
            if loss.source.connected.get(name) is not connection:
                del lost[connection]  # the two have connected anew
                continue
            writes = [each for each in self._adversary.of_the_living() if each.source is loss.source]
            writes = [each for each in writes if each.target is connection.target]
            loss.is_met = loss.is_met or bool(writes)
            if self._waits_for_ring(loss.source, name):  # which posts nothing, and meets no break
                self._adversary.excuse_those_with(
                    self._world.process_of(connection.target), "its ring's words are lost"
                )
            elif not loss.is_met:
                continue
            self.excuse_once(loss, is_known=False)
            if loss.is_met and now >= self._breaks_at.setdefault(connection, now + WAITS.peer_s):
                loss.is_broken = True
                for transfer in writes:
                    self._adversary.break_off(transfer, self._of_lost, is_disconnected=True)

    def excuse_once(self, loss: Loss, *, is_known: bool = True) -> None:
        """What sends something is excused, and what comes until the two have connected anew."""
        if (loss, is_known) not in self._excused:
            self._excused.add((loss, is_known))
            self._adversary.excuse_all("what it sends is lost")
            self._adversary.upset_until(self._world.now + WAITS.write_s + _HEALS_S)

    def _waits_for_ring(self, source: SimulatedTransport, receiver: str) -> bool:
        """Whether a room waits for a receiver's ring, perhaps full of parts of which it was not told."""
        endpoint = self._world.process_of(source).endpoint
        assert isinstance(endpoint, PrefillEndpoint)
        attachment = probe(endpoint).ranks.attachment(receiver)
        staged = attachment.paths.staged if attachment is not None else None
        return staged is not None and staged.peer.ring.num_waiting > 0

    def _start_twice(self, draw: random.Random) -> None:
        """Somebody starts a prefill engine a second time, under its name, and the first goes on."""
        engines = [each for each in self._whole_engines if each.is_prefill]
        if not engines or not self._counts("second start"):
            return
        engine = draw.choice(engines)
        for process in list(engine.ranks):
            self._adversary.excuse_those_with(process, f"{process.name} was replaced while it ran")
            self._start(engine, process.rank)
        self._adversary.upset_until(self._world.now + LEASE_S + RECOVERY_S)

    def _close_while_frozen(self, draw: random.Random) -> None:
        """A decode rank is closed while a prefill rank that writes to it is frozen, and somebody waits for a link."""
        writes = [
            each
            for each in self._adversary.of_the_living()
            if self._world.process_of(each.target).takes_work and self._world.process_of(each.source).takes_work
        ]
        if not writes or not self._adversary.counts("close waits"):
            return
        transfer = draw.choice(writes)
        source, target = (self._world.process_of(each) for each in (transfer.source, transfer.target))
        self._adversary.freeze_until(source, self._world.now + draw.choice([0.5, 2.0, 4.0]))
        target.awaits_link_to(draw.choice([source.engine, "nobody"]))
        self._adversary.close(target)


def _settles(process: Process) -> bool:
    """Whether a decode rank counts the time in which what was sent to it may arrive."""
    assert isinstance(process.endpoint, DecodeEndpoint)
    inspected = probe(process.endpoint)
    return bool(inspected.context.settling) or any(rank.proof for _, rank in inspected.links.quarantine.lost.all)
