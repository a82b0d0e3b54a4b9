"""Who checks after every step that the laws hold, in what callers see and in every byte of memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from kvferry.endpoint import DecodeEndpoint, PrefillEndpoint
from kvferry.endpoint.transfer import Transfer
from kvferry.errors import KVFerryError
from kvferry.plan import TransferPath
from kvferry.protocol.transfer.states import (
    RECEIVER_TRANSITIONS,
    SENDER_TRANSITIONS,
    ReceiverState,
    SenderState,
    SideState,
    TransferState,
    longest_s,
)
from kvferry.protocol.wire.codec import decode_notification, decode_to_decode, decode_to_prefill
from kvferry.protocol.wire.messages import ChunkArrived, Notification, Numbered, Ping, Pong, StagedArrived
from kvferry.staging.rings import Span
from kvferry.testing.probe import probe
from proof.simulated_transport import Piece, SimulatedHandle, SimulatedTransport
from proof.simulation.adversary import Adversary
from proof.simulation.circumstances import WAITS
from proof.simulation.control_network import NEXT_RELEASE, Line
from proof.simulation.laws import Law, ViolationError, demand
from proof.simulation.leftovers import leftovers
from proof.simulation.memory import DESTINATION_GONE, HELD, SOURCE_GONE
from proof.simulation.processes import Process
from proof.simulation.raised import is_of_a_caller
from proof.simulation.requests import RankSide, ReceiveSide, SendSide
from proof.simulation.universe import Universe


def _followers(table: Mapping[Any, Mapping[Any, Any]]) -> dict[TransferState, set[TransferState]]:
    """By state as callers see it, all that may follow, sooner or later: several moves may lie between two looks."""
    followers: dict[TransferState, set[TransferState]] = {state.shown: set() for state in table}
    for state, moves in table.items():
        followers[state.shown] |= {target.shown for target in moves.values() if target.shown is not state.shown}
    for _ in table:
        for reached in followers.values():
            reached.update(*(followers[state] for state in tuple(reached)))
    return followers


_SENDER_FOLLOWERS = _followers(SENDER_TRANSITIONS)
_RECEIVER_FOLLOWERS = _followers(RECEIVER_TRANSITIONS)
_LOOKS_A_CHECK = 8  # nothing is missed in between: pages are compared again before somebody gets them
_MOST_PROGRESS = 8  # how often a transfer may get on while its state stays the same: a few chunks and parts
_SLACK_S = 1.5  # until somebody has a turn, and looks
_TELLS_S = 2.5  # until the other side has been found and told; less than any deadline
_TELLS_UNLESS = frozenset(
    {
        "crash",
        "freeze",
        "close",
        "cut",
        "registry",
        "send fails",
        "connect fails",
        "clock",
        "reorder",
        "frozen receiver",
        "freeze of a writer",
        "freeze while it settles",
        "leave",
        "unproved end",
        "silent line",
        "lost flow",
        "second start",
        "close waits",
    }
)  # then who is to be told may be out of reach, or take its peer for lost


LOSES_NOTHING = frozenset(
    {
        "abort",
        "write fails",
        "copy fails",
        "late",
        "absent",
        "miscount",
        "refuse",
        "another prompt",
        "change callback",
        "ready",
        "queue",
        "raising post",
        "measuring write",
    }
)
"""Troubles that lose no message."""


def _longest_s(side: type[SideState], state: TransferState) -> float:
    is_bounded_at_once = state in (TransferState.BOOTSTRAPPING, TransferState.SUCCESS, TransferState.FAILED)
    return longest_s(side, state, WAITS) * (1 if is_bounded_at_once else _MOST_PROGRESS) + _SLACK_S


_LONGEST_S = {
    (side, state): _longest_s(side, state) for side in (SenderState, ReceiverState) for state in TransferState
}
"""How long each side may hold pages in each state."""


class Inspector:
    """Checks one world. Whatever it finds against a law is a ViolationError."""

    def __init__(self, world: Universe, adversary: Adversary) -> None:
        self._world = world
        self._adversary = adversary
        self._looks = 0
        self._all_in_reach_since = 0.0
        self._is_told_soon = not _TELLS_UNLESS & world.troubles
        self._exceeded: list[str] = []
        # Where staged writes go, by the number of their post.
        self._staged: list[tuple[int, SimulatedTransport, int, int]] = []
        self._sent: dict[tuple[Line, bool, int], int] = {}  # by line, way and epoch the last number
        self._held_up: list[str] = []  # what was sent again, or waited for a heartbeat, and need not have
        self._posted_at: dict[SimulatedHandle, float] = {}
        # By the two processes, when a write between them was last on its way that should have ended.
        self._overdue_at: dict[tuple[Process, Process], float] = {}
        self._about: dict[SimulatedHandle, Notification] = {}  # what each write notifies its receiver of

    def look(self, process: Process) -> None:
        """What a process's callers see after it did something, and what its memory holds."""
        if self._world.raised.found:
            raise ViolationError(Law.NEVER_RAISES, f"{process.name}: {self._world.raised.found[0]}")
        if self._world.wire.breaches:
            raise ViolationError(Law.CONTRACT, self._world.wire.breaches[0])
        if self._exceeded:  # not raised where it was seen: there it would be an error of the transport
            raise ViolationError(Law.BOUNDED, self._exceeded[0])
        if self._held_up:
            raise ViolationError(Law.GOES_ON, self._held_up[0])
        if process.is_prefill:
            self._check_admission(process)
        self._looks += 1
        if self._looks % _LOOKS_A_CHECK == 0 and not process.is_prefill:
            process.pool.check_free(process.name)
        if not process.has_acted:
            return
        process.has_acted = False
        sides = self._world.sides_of(process)
        for side in sides:
            if side.transfer is not None:
                self._check_state(side, side.transfer)
        for side in sides:
            if not side.is_released and side.transfer is not None and process.is_alive:
                self._look_at(side, side.transfer)

    def _check_state(self, side: RankSide, transfer: Transfer) -> None:
        """Of those whose pages were given back, too: nothing may happen to them any more."""
        state, was = transfer.state, side.last_state
        if state is not was:
            followers = _SENDER_FOLLOWERS if isinstance(side, SendSide) else _RECEIVER_FOLLOWERS
            side.last_state = state
            demand(
                state in followers[was],
                Law.STATES,
                f"{side.process.name}: {side.request} was {was.value}, and is {state.value}",
            )
        if (transfer.error is not None) != (state is TransferState.FAILED):
            raise ViolationError(
                Law.STATES,
                f"{side.process.name}: {side.request} is {state.value}, and its error {transfer.error}",
            )

    def _look_at(self, side: RankSide, transfer: Transfer) -> None:
        if transfer.error is not None:
            self._check_error(transfer.error)
        if transfer.state is TransferState.FAILED and side.failed_at is None:
            side.failed_at = self._world.now
        if isinstance(side, ReceiveSide) and transfer.state is TransferState.SUCCESS and not side.is_checked:
            self._check_received(side)
        if transfer.pages_reusable:
            self._world.note(
                "%s: %s gives back pages %s (%s)", side.process.name, side.request, side.pages, transfer.state.value
            )
            side.is_released = True
            is_source = isinstance(side, SendSide)
            side.process.pool.give_back(side.pages, SOURCE_GONE if is_source else DESTINATION_GONE)
            self._world.outcomes[f"{'sent' if is_source else 'received'}: {transfer.state.value}"] += 1
            if transfer.state is TransferState.FAILED:
                self._failed(side, str(transfer.error))

    def _check_received(self, side: ReceiveSide) -> None:
        assert side.receiver is not None
        side.is_checked = True
        who = f"{side.process.name}: {side.request}"
        side.process.pool.check(side.pages, side.request.contents, side.first_token, side.held, HELD, who)
        demand(side.receiver.aux == side.request.aux, Law.EXACT, f"{who}: aux data is {side.receiver.aux!r}")

    def _check_error(self, error: KVFerryError) -> None:
        demand("unexpected error" not in str(error) or is_of_a_caller(str(error)), Law.NEVER_RAISES, str(error))

    def _failed(self, side: RankSide, why: str) -> None:
        request, name, registry = side.request, side.process.name, self._world.registry
        self._world.note("%s: %s failed: %s", name, request, why)
        demand(bool(request.excuse), Law.ISOLATED, f"{name}: {request} failed although nothing went wrong: {why}")
        # In the words of who looked it up: what others are told of it they may hear when the start is back.
        if "connecting failed" in why and "has gone: registered is" in why and registry.answers:
            for each in registry.ask().engine(request.prefill, self._world.now).registrations:
                was_known = registry.named_since[each.engine, each.instance] < side.opened_at
                demand(
                    not (was_known and f"({each.instance})" in why),
                    Law.ISOLATED,
                    f"{name}: {request} failed since a start has gone that was there all the time: {why}",
                )

    def check_sent(self, line: Line, data: bytes, is_up: bool) -> None:
        """Checks a message where none is lost: it is no repetition, and asks for none."""
        message = (decode_to_prefill if is_up else decode_to_decode)(data, NEXT_RELEASE)
        if isinstance(message, Numbered):
            sent = self._sent.get((line, is_up, message.epoch), 0)
            if message.number <= sent:
                self._held_up.append(f"{line.identity} and {line.address}: message {message.number} is sent again")
            self._sent[line, is_up, message.epoch] = message.number
        elif isinstance(message, Ping) and message.resends:
            self._held_up.append(f"{line.identity} has {line.address} send again what it has not received")
        elif isinstance(message, Ping) and message.epoch and self._is_given_up_unheard(line):
            self._held_up.append(f"{line.address} gave {line.identity} up, and did not say so")

    def _is_given_up_unheard(self, line: Line) -> bool:
        """Whether a prefill rank has given a decode rank up, and nothing is on its way that says so."""
        prefill = next((each for each in self._world.processes if each.address == line.address and each.is_alive), None)
        if prefill is None or not isinstance(prefill.endpoint, PrefillEndpoint):
            return False
        messages = (decode_to_decode(data, NEXT_RELEASE) for data in (*line.down, *line.arrived))
        is_told = any(isinstance(message, Pong) and not message.attached for message in messages)
        return not is_told and probe(prefill.endpoint).ranks.given_up(line.identity) is not None

    def _check_admission(self, process: Process) -> None:
        """Nobody waits to be admitted while there is room for who is due before all others for whom it is not full."""
        assert isinstance(process.endpoint, PrefillEndpoint)
        admission = probe(process.endpoint).admission
        waits = [(lane, first) for lane in admission.lanes.values() if (first := lane.waiting.first) is not None]
        firsts = [first for lane, first in waits if admission._fits_lane(lane, first.need)]
        first = min(firsts, key=lambda each: each.turn, default=None)
        if first is not None and admission._fits_all(first.need):
            raise ViolationError(Law.GOES_ON, f"{process.name}: {first.need} bytes wait to be admitted, and need not")

    def check_post(self, transfer: SimulatedHandle) -> None:
        """A write was posted: is that more than may be on its way?"""
        source = self._world.process_of(transfer.source)
        now = source.platform.now()
        self._posted_at[transfer] = now
        if not transfer.notification:
            return  # it measures
        if not isinstance(self._what(transfer), ChunkArrived):
            if "measuring write" in self._world.circumstances.odds:
                addresses = [piece.destination for piece in transfer.left]
                self._staged.append((transfer.number, transfer.target, min(addresses), max(addresses)))
            return
        by_target: dict[SimulatedTransport, list[SimulatedHandle]] = {}
        for each in self._world.wire.moving:
            if each.is_orphan or not each.notification:
                continue  # it has failed, for all that its writer knows, or measures
            if each.source is transfer.source and isinstance(self._what(each), ChunkArrived):
                by_target.setdefault(each.target, []).append(each)
        settings = source.endpoint.settings
        self._check_bound(source, by_target[transfer.target], settings.direct_receiver_mib)
        if source.platform.skew_s:
            return  # receivers may seem to have stood still, which others have used by now
        # A receiver at which nothing has ended for long does not count in all.
        moving = [
            each
            for transfers in by_target.values()
            if now - min(self._posted_at[each] for each in transfers) < WAITS.write_s / 2
            for each in transfers
        ]
        self._check_bound(source, moving, settings.direct_mib)

    def _check_bound(self, source: Process, transfers: list[SimulatedHandle], most_mib: float) -> None:
        total = sum(each.report.total_bytes for each in transfers)
        if total > most_mib * 2**20 and len(transfers) > 1:
            self._exceeded.append(f"{source.name}: {len(transfers)} direct writes of {total} bytes are on their way")

    def _what(self, transfer: SimulatedHandle) -> Notification:
        """What a write notifies its receiver of."""
        about = self._about.get(transfer)
        if about is None:
            about = self._about[transfer] = decode_notification(transfer.notification, NEXT_RELEASE)
        return about

    def check_piece(self, transfer: SimulatedHandle, piece: Piece) -> None:
        """Checks that the pages which a piece reads, and those where it is about to land, belong to its room."""
        if not transfer.notification:
            self._check_measuring(transfer, piece)
            return
        about = self._what(transfer)
        source, target = self._world.process_of(transfer.source), self._world.process_of(transfer.target)
        if piece.sent is None and source.died_at is None and source.pool.holds(piece.source):
            page, owner = source.pool.owner_at(piece.source)
            if not (isinstance(owner, SendSide) and owner.request.room == about.room):
                raise ViolationError(
                    Law.NO_REUSE_UNDER_A_READ,
                    f"{source.name}: page {page} is read for room {about.room}, but belongs to {_owner_name(owner)}",
                )
            demand(
                source.pool.is_computed(piece.source),
                Law.READY,
                f"{source.name}: page {page} is read for room {about.room} before what is read is computed",
            )
        if target.pool.holds(piece.destination):
            page, owner = target.pool.owner_at(piece.destination)
            if not (isinstance(owner, ReceiveSide) and owner.generation == about.generation):
                raise ViolationError(
                    Law.NO_WRITE_AFTER_RELEASE if owner is None else Law.OWN_PAGES_ONLY,
                    f"{target.name}: page {page} is written to by {source.name} for room {about.room}, but belongs to "
                    f"{_owner_name(owner)}",
                )
        elif isinstance(about, StagedArrived) and isinstance(target.endpoint, DecodeEndpoint):
            ring = probe(target.endpoint).context.staging.ring(transfer.source.endpoint_name, about.epoch)
            demand(
                ring is None or ring.reading.can_hold(Span(about.start, about.begin, about.stop)),
                Law.NO_WRITE_AFTER_RELEASE,
                f"{target.name}: {source.name} writes for room {about.room} to a span of the ring that was given back",
            )

    def _check_measuring(self, transfer: SimulatedHandle, piece: Piece) -> None:
        """A piece of a write that measures is about to land: nobody may use its ring yet."""
        for number, target, first, last in self._staged:
            demand(
                not (number > transfer.number and target is transfer.target and first <= piece.destination <= last),
                Law.OWN_PAGES_ONLY,
                f"{transfer.source.endpoint_name} measures the wire to a ring of {target.endpoint_name} that is in use",
            )

    def check_holdings(self) -> None:
        """No state holds pages for longer than the table says."""
        if self._is_anyone_out_of_reach():
            self._all_in_reach_since = self._world.now
        if self._is_told_soon:
            self._note_overdue()
            self._check_told()
        for side in self._open_sides():
            transfer = side.transfer
            assert transfer is not None
            if side.process.thaws_at is not None or transfer.state is not side.state:
                side.state, side.held_since = transfer.state, self._world.now
                side.longest_s = _LONGEST_S[SenderState if isinstance(side, SendSide) else ReceiverState, side.state]
                if isinstance(side, SendSide) and side.state is TransferState.BOOTSTRAPPING:
                    side.longest_s += max(0.0, side.request.queued_until - self._world.now)
                continue
            since, longest_s = side.held_since, side.longest_s
            if transfer.state is TransferState.FAILED:
                since = max(since, self._all_in_reach_since, self._adversary.lost_at)
            if self._world.now - since > longest_s and not self._is_kept_by_right(side):
                raise ViolationError(
                    Law.GIVES_BACK,
                    f"{side.process.name}: {side.request} holds pages for more than {longest_s:g} s while it is "
                    f"{transfer.state.value}, against the table",
                )

    def _note_overdue(self) -> None:
        """A decode rank is given up with the first write that is overdue, and connects anew once all have ended."""
        for transfer in self._world.wire.transfers:
            if transfer.is_orphan:
                continue  # its post raised: `kept_until` goes on for long enough
            source, target = self._world.process_of(transfer.source), self._world.process_of(transfer.target)
            if source.platform.now() - self._posted_at[transfer] > WAITS.write_s:
                self._overdue_at[source, target] = self._world.now

    def _check_told(self) -> None:
        """When a side has failed, no rank of the other side goes on for long, once the two can speak."""
        kept_until, overdue_at = self._adversary.kept_until, self._overdue_at
        for request in self._world.requests:
            pairs = product((side.process for side in request.senders), (side.process for side in request.receivers))
            apart_until = (max(kept_until.get(both, 0.0), overdue_at.get(both, 0.0)) for both in pairs)
            awake_since = (side.process.awake_since for side in request.sides)
            connected_by = max(*apart_until, *awake_since)
            failed = {
                True: [side.failed_at for side in request.senders if side.failed_at is not None],
                False: [side.failed_at for side in request.receivers if side.failed_at is not None],
            }
            for side in request.sides:
                since = failed[isinstance(side, ReceiveSide)]
                transfer = side.transfer
                if not since or side.is_released or transfer is None or transfer.state.is_final:
                    continue
                if isinstance(side, SendSide) and side.may_be_late:
                    continue  # docs/reliability.md, "What is not promised"
                if isinstance(side, ReceiveSide) and connected_by > min(since) + WAITS.bootstrap_s:
                    continue  # what it asks for is forgotten by the time that the ranks are connected: likewise
                waits_s = self._world.now - max(side.opened_at, min(since), connected_by)
                demand(
                    waits_s <= _TELLS_S,
                    Law.TELLS,
                    f"{side.process.name}: {request} is {transfer.state.value} {waits_s:.1f} s after the other side "
                    "failed",
                )

    def _is_anyone_out_of_reach(self) -> bool:
        """Whether somebody is frozen, cut off or not replaced, or a write is slow: then pages may be held."""
        world = self._world
        return (
            not world.registry.answers
            or (world.circumstances.wire_bytes_per_s is not None and bool(world.wire.transfers))
            or max(self._adversary.held.values(), default=0.0) > world.now
            or max(self._adversary.doomed.values(), default=0.0) > world.now
            or any(process.thaws_at is not None for process in world.processes)
            or any(line.is_cut for line in world.network.lines)
            or any(world.wire.is_lost(transfer) for transfer in world.wire.transfers)
            or not all(process.is_alive for engine in world.circumstances.engines.values() for process in engine.ranks)
        )

    def _is_kept_by_right(self, side: RankSide) -> bool:
        """Whether a rank may still write to a failed room's pages, and nobody can prove, or hear, that it will not."""
        if not isinstance(side, ReceiveSide) or side.transfer is None:
            return False
        if side.transfer.state is not TransferState.FAILED:
            return False
        if side.process.hears_nobody:  # `close` waits no longer, and has said which pages it never gives back
            return self._was_writable(side)
        if not self._world.proves_no_end:
            return False
        engines = [self._world.circumstances.engines[name] for name in (side.request.prefill, side.request.decode)]
        forced = {each.settings.forced_path for each in engines}
        does_without = engines[1].settings.unproven_path == "auto" and TransferPath.STAGED not in forced
        is_direct = TransferPath.DIRECT in forced or does_without
        return is_direct and any(
            each.engine == side.request.prefill and not each.is_alive for each in self._world.processes
        )

    def _was_writable(self, side: ReceiveSide) -> bool:
        """Whether the endpoint had not heard of the end of all who write to a room's pages."""
        assert isinstance(side.process.endpoint, DecodeEndpoint)
        room = probe(side.process.endpoint).rooms.open.get(side.request.room)
        return room is not None and room.receiver is side.receiver and bool(room.machine.undrained)

    def _open_sides(self) -> Iterator[RankSide]:
        """Those whose callers have opened the room, and do not have their pages back."""
        for side in self._world.sides:
            if not side.is_released and side.transfer is not None and side.process.is_alive:
                yield side

    def what_is_open(self, *, but_for_frozen: bool) -> tuple[Law, str] | None:
        """What is not over, or left over, and the law against it.

        Args:
            but_for_frozen: whether pages may be held as long as somebody is frozen.
        """
        is_someone_frozen = any(process.thaws_at is not None for process in self._world.processes)
        for side in self._open_sides():
            transfer = side.transfer
            assert transfer is not None
            if side.process.thaws_at is not None:
                continue
            if not transfer.state.is_final:
                return Law.ENDS, f"{side.process.name}: {side.request} is still {transfer.state.value}"
            if self._is_kept_by_right(side):
                continue
            # Whoever is frozen may write or be written to when it thaws, and nothing says when.
            if not (but_for_frozen and is_someone_frozen):
                return Law.GIVES_BACK, f"{side.process.name}: {side.request} ended, but keeps its pages"
        living = {process.transport.endpoint_name for process in self._world.processes if process.is_alive}
        for process in self._world.processes if not is_someone_frozen else ():
            kept = {side.request.room for side in self._world.sides_of(process) if self._is_kept_by_right(side)}
            left = leftovers(process, living, kept) if process.is_alive else ""
            if left:
                return Law.LEAVES_NOTHING, f"{process.name}: left are {left}"
        return None

    def check_over(self, *, but_for_frozen: bool) -> None:
        """Everything has ended, and nothing is left of it. See `what_is_open`."""
        found = self.what_is_open(but_for_frozen=but_for_frozen)
        if found is not None:
            raise ViolationError(*found)

    def check_memory(self) -> None:
        """No byte changed that belongs to nobody."""
        for process in self._world.processes:
            if process.is_alive:
                process.pool.check_free(process.name)


def _owner_name(owner: object | None) -> str:
    if owner is None:
        return "nobody"
    assert isinstance(owner, (SendSide, ReceiveSide))
    return f"{owner.request} on {owner.process.name}"
