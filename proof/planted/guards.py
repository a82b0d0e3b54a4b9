"""Faults planted in what guards a transfer: each takes one guard away, and the simulation must notice.

Every entry changes the code that ships, as somebody might by mistake, and nothing of the simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec
import pytest
from msgspec import structs

from kvferry.control.process_identity import Sight
from kvferry.endpoint.decode import quarantine
from kvferry.endpoint.decode.arrivals import Arrivals, Scatterers, ScatterTask
from kvferry.endpoint.decode.connections import Connections, Refusals, Repetition
from kvferry.endpoint.decode.driver import DecodeDriver
from kvferry.endpoint.decode.links import Links
from kvferry.endpoint.decode.room import ReceivingRoom
from kvferry.endpoint.decode.rooms import ReceivingRooms
from kvferry.endpoint.prefill import room_actor
from kvferry.endpoint.prefill.admission import Admission
from kvferry.endpoint.prefill.attachment import Attachment
from kvferry.endpoint.prefill.context import BrokenOff
from kvferry.endpoint.prefill.control_channel import ControlChannel, Dismissals
from kvferry.endpoint.prefill.decode_ranks import DecodePeer, DecodeRanks
from kvferry.endpoint.prefill.driver import PrefillDriver
from kvferry.endpoint.prefill.room import SendingRoom
from kvferry.endpoint.prefill.room_actor import UnreadChunks
from kvferry.endpoint.prefill.room_write import DirectWrite, DirectWrites
from kvferry.endpoint.prefill.rooms import SendingRooms
from kvferry.endpoint.prefill.staged_writes import StagedPart, StagedWrite, StagedWrites
from kvferry.endpoint.runtime.callers_code import Awaited, Callbacks, CallersCode
from kvferry.endpoint.runtime.workers import Worker
from kvferry.errors import KVFerryError, PageError, TransferTimeoutError
from kvferry.plan import Unit
from kvferry.plan.requests.chunks import Chunk
from kvferry.plan.requests.moves import Move, moves_of
from kvferry.protocol.links import link, proofs
from kvferry.protocol.links.proofs import LostRanks
from kvferry.protocol.links.rank_link import RankLink
from kvferry.protocol.links.reliable_channel import DecodeChannels, ReliableChannel
from kvferry.protocol.time_awake import TimeAwake
from kvferry.protocol.transfer import events, receiver, sender
from kvferry.protocol.transfer.events import (
    AwaitTurn,
    ConnectFailed,
    PartPlaced,
    ReceiverCommand,
    ReceiverEvent,
    ReceiverOpened,
    RoomExpected,
    SenderCommand,
    SenderDrained,
    SenderEvent,
    SendFinish,
    Tick,
    Write,
    WriteDone,
    WriteFailed,
)
from kvferry.protocol.transfer.receiver import ReceiverMachine
from kvferry.protocol.transfer.room_table import RoomTable
from kvferry.protocol.transfer.sender import SenderMachine
from kvferry.protocol.transfer.states import TransferState
from kvferry.protocol.wire.codec import decode_notification, encode
from kvferry.protocol.wire.field_types import Message, PodIdentity
from kvferry.protocol.wire.messages import AbortRoom, Attach, Drained, Numbered, Ping, Pong, SpanReleased
from kvferry.protocol.wire.versions import SpokenVersions
from kvferry.staging.rings import ReadingRing, SharedRing, Span, Waiter, WritingRing
from kvferry.staging.slots import SourceMemory
from proof.simulation.control_network import NEXT_RELEASE
from proof.simulation.machines import SimulatedPlatform

Plant: TypeAlias = Callable[[pytest.MonkeyPatch], None]


def _no_generations(patch: pytest.MonkeyPatch) -> None:
    """Every use of a room's number looks like every other."""
    patch.setattr(SimulatedPlatform, "random_bits", lambda platform, count: 7)


def _release_on_abort_without_drain(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        ReceiverMachine,
        "are_pages_reusable",
        property(lambda machine: machine.state.is_final and not machine._at_pages),
    )


def _release_on_timeout_without_quarantine(patch: pytest.MonkeyPatch) -> None:
    right = ReceiverMachine.are_pages_reusable

    def reusable(machine: ReceiverMachine) -> bool:
        return isinstance(machine.error, TransferTimeoutError) or right.fget(machine)  # type: ignore[attr-defined]

    patch.setattr(ReceiverMachine, "are_pages_reusable", property(reusable))


class _Bag(set[int]):
    """Counts what it has already."""

    def __init__(self) -> None:
        super().__init__()
        self.everything: list[int] = []

    def add(self, element: int) -> None:
        super().add(element)
        self.everything.append(element)

    def __contains__(self, element: object) -> bool:
        return False

    def __len__(self) -> int:
        return len(self.everything)

    def __iter__(self) -> Iterator[int]:
        return iter(self.everything)


def _arrivals_counted_twice(patch: pytest.MonkeyPatch) -> None:
    right = receiver._Writer

    def writer() -> Any:
        made = right()
        made.arrived = _Bag()
        return made

    patch.setattr(receiver, "_Writer", writer)


def _finish_before_the_last_handle(patch: pytest.MonkeyPatch) -> None:
    """The receiver is told, and the source given back, while writes are on their way."""
    patch.setattr(SenderMachine, "is_drained", property(lambda machine: True))


def _drained_while_writes_fly(patch: pytest.MonkeyPatch) -> None:
    def tell(machine: Any) -> list[Any]:
        commands: list[Any] = []
        for name, each in machine._receivers.items():
            if machine.state is TransferState.FAILED and not each.drained_sent:
                each.drained_sent = True
                commands.append(events.SendDrained(name, each.opened.generation))
        return commands

    patch.setattr(SenderMachine, "_tell_drained", tell)


def _credit_before_the_scatter(patch: pytest.MonkeyPatch) -> None:
    right = Scatterers.submit

    def submit(scatterers: Any, task: Any) -> None:
        task.give_back()
        right(scatterers, task)

    patch.setattr(Scatterers, "submit", submit)


def _arrived_before_the_scatter(patch: pytest.MonkeyPatch) -> None:
    right = ReceiverMachine._part_arrived

    def part_arrived(machine: ReceiverMachine, event: Any, now: float) -> list[Any]:
        commands = right(machine, event, now)
        if commands:
            right_part_placed(machine, PartPlaced(event.writer, event.sequence), now)
        return commands

    right_part_placed = ReceiverMachine._part_placed
    patch.setattr(ReceiverMachine, "_part_arrived", part_arrived)
    patch.setattr(ReceiverMachine, "_part_placed", lambda machine, event, now: [])


def _peer_added_without_removal(patch: pytest.MonkeyPatch) -> None:
    def connect(ranks: Any, message: Attach, now: float) -> None:
        name = message.endpoint
        queue = ranks._queue_of(name.encode())
        made = DecodePeer(
            name,
            queue,
            ranks._context,
            attempt=message.attempt,
            must_wait=False,
            on_undone=ranks._undone,
            now=now,
        )
        ranks._peers[name] = made
        made.post(message)

    patch.setattr(DecodeRanks, "_connect", connect)


def _removed_while_writes_fly(patch: pytest.MonkeyPatch) -> None:
    def retire(attachment: Attachment, when_unused: Callable[[], None]) -> None:
        when_unused()

    patch.setattr(Attachment, "retire", retire)


def _aborts_that_come_first_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Neither as the last use of the number nor as one that takes its open request back."""
    right = RoomTable.abort

    def abort(table: Any, *arguments: Any) -> Any:
        found = right(table, *arguments)
        table.over._entries.clear()
        return found

    patch.setattr(RoomTable, "abort", abort)
    patch.setattr(DecodeChannels, "take_back", lambda channels, *arguments: False)


def _successors_speak_for_the_dead(patch: pytest.MonkeyPatch) -> None:
    """`Drained` counts whoever sends it."""
    right = ReceivingRooms.received

    def received(rooms: ReceivingRooms, address: str, message: Any, now: float) -> None:
        room = rooms.open.get(message.room)
        link = room.link if room is not None else None
        peer = (
            next((each for each in link.peers if link.rank_of(each.endpoint) == message.writer), None) if link else None
        )
        if isinstance(message, Drained) and peer is not None:
            message = Drained(
                endpoint=peer.endpoint, room=message.room, generation=message.generation, writer=message.writer
            )
        right(rooms, address, message, now)

    patch.setattr(ReceivingRooms, "received", received)


def _no_time_to_settle(patch: pytest.MonkeyPatch) -> None:
    right = LostRanks.__init__
    patch.setattr(LostRanks, "__init__", lambda lost, *, settle_s: right(lost, settle_s=0.0))


def _freezes_waited_out(patch: pytest.MonkeyPatch) -> None:
    """Half of what is waited for counts as over once this process was frozen, though it has read nothing meanwhile."""
    right = TimeAwake.__init__

    def begin(awake: TimeAwake, awaited_s: float) -> None:
        right(awake, awaited_s)
        awake._most_at_once_s = awaited_s / 2

    patch.setattr(TimeAwake, "__init__", begin)


def _lost_is_dead(patch: pytest.MonkeyPatch) -> None:
    """A rank that was lost is taken for dead."""
    patch.setattr(SimulatedPlatform, "is_gone", lambda platform, process: True)


def _hidden_is_dead(patch: pytest.MonkeyPatch) -> None:
    """A process whose start cannot be seen is taken for another one, or for none."""
    patch.setattr(Sight, "proves_end_of", lambda sight, process: sight.started != process.started)


def _missing_pod_is_dead(patch: pytest.MonkeyPatch) -> None:
    """A pod whose object was deleted is taken for one that has ended."""
    right = proofs.why_ended

    def why_ended(pod: PodIdentity, found: proofs.PodObject | None, *node: Any) -> str:
        return right(pod, found, *node) if found is not None else "there is no such pod"

    patch.setattr(quarantine, "why_ended", why_ended)


def _phase_is_proof(patch: pytest.MonkeyPatch) -> None:
    """A pod that a controller says has failed is taken for one that has ended."""
    patch.setattr(proofs, "_all_terminated", lambda found: True)


def _slots_reused_at_once(patch: pytest.MonkeyPatch) -> None:
    """A slot is free as soon as its write is posted."""
    right = SourceMemory.take

    def take(memory: SourceMemory, *arguments: Any) -> Any:
        slot = right(memory, *arguments)
        if slot is not None:
            memory._free.append(slot.address)
        return slot

    patch.setattr(SourceMemory, "take", take)
    patch.setattr(SourceMemory, "give_back", lambda memory, slot: None)


def _rings_without_end(patch: pytest.MonkeyPatch) -> None:
    """The ring is written to whether it was read or not."""
    patch.setattr(WritingRing, "_is_free", lambda ring, span: True)
    patch.setattr(ReadingRing, "can_hold", lambda ring, span: span.start not in ring._ahead)


def _no_deadlines(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReceiverMachine, "deadline", property(lambda machine: None))
    patch.setattr(SenderMachine, "deadline", property(lambda machine: None))


def _nothing_sent_again(patch: pytest.MonkeyPatch) -> None:
    """What a broken connection has lost is lost."""
    patch.setattr(ReliableChannel, "resend", lambda channel: [])


def _breaks_kept_from_the_prefill_rank(patch: pytest.MonkeyPatch) -> None:
    """Only the decode rank sends again what a broken connection has lost."""
    right = DecodeChannels.answer

    def answer(channels: Any, receiver: str, ping: Ping) -> Any:
        return right(channels, receiver, structs.replace(ping, resends=False))

    patch.setattr(DecodeChannels, "answer", answer)


def _losses_not_noticed(patch: pytest.MonkeyPatch) -> None:
    """A decode rank sends nothing again where heartbeats show that it was lost."""
    right = RankLink.answered

    def answered(rank: Any, pong: Pong) -> Any:
        return right(rank, structs.replace(pong, heard_of=0))

    patch.setattr(RankLink, "answered", answered)


def _repetitions_taken(patch: pytest.MonkeyPatch) -> None:
    """A message counts as often as it comes."""
    right = ReliableChannel.receive

    def receive(channel: Any, message: Numbered) -> Any:
        if message.epoch == channel.epoch and message.number <= channel.received and not channel.is_closed:
            return [message.body]
        return right(channel, message)

    patch.setattr(ReliableChannel, "receive", receive)


def _earlier_attempts_taken(patch: pytest.MonkeyPatch) -> None:
    """What was sent with an earlier attempt to attach counts as if it had been sent with the last."""
    right = ReliableChannel.receive
    patch.setattr(
        ReliableChannel,
        "receive",
        lambda channel, message: right(channel, structs.replace(message, epoch=channel.epoch)),
    )


def _gaps_taken(patch: pytest.MonkeyPatch) -> None:
    """What comes behind a lost message counts, and the lost one does not any more."""
    right = ReliableChannel.receive

    def receive(channel: Any, message: Numbered) -> Any:
        if message.epoch == channel.epoch and message.number > channel.received:
            channel.received = message.number - 1
        return right(channel, message)

    patch.setattr(ReliableChannel, "receive", receive)


def _aborts_said_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReceivingRooms, "_ask_to_stop", lambda rooms, room, now: None)


def _closed_connections_read(patch: pytest.MonkeyPatch) -> None:
    """A connection is read after everything was said again through it, which may have closed it."""
    right = DecodeDriver.receive

    def receive(driver: Any, connection: Any, now: float) -> None:
        if connection.take_break():
            driver.broke(connection.address, now)
        right(driver, connection, now)

    patch.setattr(DecodeDriver, "receive", receive)


def _never_leaves(patch: pytest.MonkeyPatch) -> None:
    """An endpoint that was closed while its writes hung stays for ever."""
    right = PrefillDriver._has_closed
    patch.setattr(PrefillDriver, "_has_closed", lambda driver: not driver.answers.is_lingering and right(driver))


# ---- what a sender says, and when ------------------------------------------------------------------------------------


def _finish_said_while_writes_fly(patch: pytest.MonkeyPatch) -> None:
    """Receivers are told that all is written, but the source is given back only when it is."""
    right = SenderMachine._maybe_finish

    def maybe_finish(machine: SenderMachine) -> list[SenderCommand]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(SenderMachine, "is_drained", property(lambda machine: True))
            return right(machine)

    patch.setattr(SenderMachine, "_maybe_finish", maybe_finish)


def _never_sent(patch: pytest.MonkeyPatch, kind: type[Message]) -> None:
    """Lets prefill ranks keep messages of a kind to themselves."""
    right = ControlChannel.send

    def send(channel: ControlChannel, receiver: str, message: Message) -> None:
        if not isinstance(message, kind):
            right(channel, receiver, message)

    patch.setattr(ControlChannel, "send", send)


def _drained_never_said(patch: pytest.MonkeyPatch) -> None:
    _never_sent(patch, Drained)


def _aborts_of_unknown_rooms_unanswered(patch: pytest.MonkeyPatch) -> None:
    right = SendingRooms.take_abort

    def take_abort(rooms: SendingRooms, receiver: str, message: AbortRoom, **how: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(SendingRooms, "_drained", lambda *arguments: None)
            right(rooms, receiver, message, **how)

    patch.setattr(SendingRooms, "take_abort", take_abort)


def _one_write_ends_for_all(patch: pytest.MonkeyPatch) -> None:
    """A room is taken for drained once any of its writes has ended."""
    right = SenderMachine.handle

    def handle(machine: SenderMachine, event: SenderEvent, now: float) -> list[SenderCommand]:
        if isinstance(event, WriteDone):
            machine._receivers[event.receiver].writes_in_flight.clear()
        return right(machine, event, now)

    patch.setattr(SenderMachine, "handle", handle)


def _chunks_counted_for_writes(patch: pytest.MonkeyPatch) -> None:
    """A receiver is told how many chunks it was sent where one took two writes."""
    right = SenderMachine._maybe_finish

    def maybe_finish(machine: SenderMachine) -> list[SenderCommand]:
        last = machine._last_chunk
        return [
            replace(command, chunks=min(command.chunks, last.number + 1))
            if isinstance(command, SendFinish) and last is not None
            else command
            for command in right(machine)
        ]

    patch.setattr(SenderMachine, "_maybe_finish", maybe_finish)


def _written_twice(patch: pytest.MonkeyPatch) -> None:
    right = SenderMachine._send_chunk

    def send_chunk(machine: SenderMachine, chunk: Chunk, now: float) -> list[SenderCommand]:
        commands = right(machine, chunk, now)
        return [command for command in commands if isinstance(command, Write)][:1] + commands

    patch.setattr(SenderMachine, "_send_chunk", send_chunk)


def _writes_counted_that_were_never_posted(patch: pytest.MonkeyPatch) -> None:
    """Writes to some receivers are counted, and then dropped for the miscount of another: this code had that fault."""
    right = SenderMachine._send_chunk

    def send_chunk(machine: SenderMachine, chunk: Chunk, now: float) -> list[SenderCommand]:
        commands = right(machine, chunk, now)
        if isinstance(machine.error, PageError):
            for earlier in list(machine._receivers.values())[:-1]:
                earlier.writes_in_flight.add(-1)
        return commands

    patch.setattr(SenderMachine, "_send_chunk", send_chunk)


def _stranger_raises(patch: pytest.MonkeyPatch) -> None:
    """An abort of a receiver, or a generation, that a room does not know is an error of ours."""
    right = SenderMachine._receiver_aborted

    def receiver_aborted(machine: SenderMachine, name: str, message: AbortRoom) -> list[SenderCommand]:
        assert machine._receivers[name].opened.generation == message.generation
        return right(machine, name, message)

    patch.setattr(SenderMachine, "_receiver_aborted", receiver_aborted)


def _no_sender_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SenderMachine, "deadline", property(lambda machine: None))


def _turns_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Of the chunks that were kept until all had opened the room, only the first is written."""
    right = SenderMachine._send_next
    patch.setattr(
        SenderMachine,
        "_send_next",
        lambda machine, now: [each for each in right(machine, now) if not isinstance(each, AwaitTurn)],
    )


# ---- what may be on its way ------------------------------------------------------------------------------------------


def _all_admitted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Admission, "_fits_lane", lambda admission, lane, num_bytes: True)
    patch.setattr(Admission, "_fits_all", lambda admission, num_bytes: True)


def _failed_writes_keep_their_leave(patch: pytest.MonkeyPatch) -> None:
    """What was admitted and has failed counts as on its way for ever."""
    right = DirectWrite.failed

    def failed(write: DirectWrite, error: Exception, *, is_read: bool) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Admission, "give_back", lambda *arguments: None)
            right(write, error, is_read=is_read)

    patch.setattr(DirectWrite, "failed", failed)


def _nobody_served(patch: pytest.MonkeyPatch) -> None:
    """Whoever waits to be admitted waits for ever."""
    patch.setattr(Admission, "_serve", lambda admission: [])


def _dropped_writes_posted(patch: pytest.MonkeyPatch) -> None:
    """What a room had to write when it failed is posted when its turn comes."""
    patch.setattr(DirectWrites, "drop", lambda writes: None)


def _second_write_not_lined_up(patch: pytest.MonkeyPatch) -> None:
    """Of a room whose writes wait, only the first stands in line."""

    def post_admitted(writes: DirectWrites, admitted: Any, worker: Worker) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(DirectWrites, "_apply", lambda *arguments: None)
            right(writes, admitted, worker)

    right = DirectWrites.post_admitted
    patch.setattr(DirectWrites, "post_admitted", post_admitted)


def _failed_measurements_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Of a write that measures and fails nobody hears, though what it had sent may arrive in a ring."""
    patch.setattr(DecodePeer, "broken_off", lambda peer: None)


# ---- what a sender writes --------------------------------------------------------------------------------------------


def _moves_by(change: Callable[[dict[Unit, tuple[Move, ...]]], dict[Unit, tuple[Move, ...]]]) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(sender, "moves_of", lambda chunk, request: change(moves_of(chunk, request)))

    return plant


def _pages_in_reverse(moves: dict[Unit, tuple[Move, ...]]) -> dict[Unit, tuple[Move, ...]]:
    return {
        unit: tuple(replace(move, destination_pages=move.destination_pages[::-1]) for move in of_unit)
        for unit, of_unit in moves.items()
    }


def _single_tokens_forgotten(moves: dict[Unit, tuple[Move, ...]]) -> dict[Unit, tuple[Move, ...]]:
    """Whole units are written, and what does not fill one is left out."""
    return {unit: () if unit is Unit.TOKEN else of_unit for unit, of_unit in moves.items()}


def _prefix_overwritten(patch: pytest.MonkeyPatch) -> None:
    """A write begins with a whole page although the receiver holds the front of it."""
    right = SenderMachine._receiver_opened

    def receiver_opened(machine: SenderMachine, event: ReceiverOpened, now: float) -> list[SenderCommand]:
        wanted = {name: msgspec.structs.replace(group, held=0) for name, group in event.request.wanted.items()}
        return right(machine, replace(event, request=replace(event.request, wanted=wanted)), now)

    patch.setattr(SenderMachine, "_receiver_opened", receiver_opened)


# ---- what a receiver believes ----------------------------------------------------------------------------------------


def _one_speaks_for_all(patch: pytest.MonkeyPatch) -> None:
    """Pages are given back once one of several writers has said that it writes no more."""

    def reusable(machine: ReceiverMachine) -> bool:
        quiet = [not machine._expected[rank].may_write for rank in machine._into_pages]
        return machine.state.is_final and not machine._at_pages and (any(quiet) or not quiet)

    patch.setattr(ReceiverMachine, "are_pages_reusable", property(reusable))


def _first_writer_suffices(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(receiver, "all", any, raising=False)


def _failure_kept_to_itself(patch: pytest.MonkeyPatch) -> None:
    """A receiver that fails asks nobody to stop, neither at once nor later."""
    right = ReceiverMachine._fail

    def fail(machine: ReceiverMachine, error: KVFerryError) -> list[ReceiverCommand]:
        right(machine, error)
        return []

    patch.setattr(ReceiverMachine, "_fail", fail)
    patch.setattr(ReceiverMachine, "unanswered", property(lambda machine: []))


def _lost_is_drained(patch: pytest.MonkeyPatch) -> None:
    """The pages of a room are given back when the rank that writes to them is lost."""
    right = ReceiverMachine.handle

    def handle(machine: ReceiverMachine, event: ReceiverEvent, now: float) -> list[ReceiverCommand]:
        commands = right(machine, event, now)
        if isinstance(event, ConnectFailed):
            for writer in machine._expected.values():
                writer.is_drained = True
        return commands

    patch.setattr(ReceiverMachine, "handle", handle)


def _parts_by(change: Callable[[Any], None]) -> Plant:
    """What is known of a chunk's parts changes before one more counts. Those behind a complete chunk do not count."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = ReceiverMachine._part_placed

        def part_placed(machine: ReceiverMachine, event: PartPlaced, now: float) -> list[ReceiverCommand]:
            parts = machine._expected[event.writer].partial.get(event.sequence)
            if parts is None:
                machine._at_pages -= 1
                return []
            change(parts)
            return right(machine, event, now)

        patch.setattr(ReceiverMachine, "_part_placed", part_placed)

    return plant


def _any_part_suffices(parts: Any) -> None:
    """A chunk counts once any part of it is in its pages."""
    parts.count = 1


def _counted_twice(parts: Any) -> None:
    parts.scattered += 1


def _scattered_or_not(patch: pytest.MonkeyPatch) -> None:
    """A part counts although it could not be put into its pages."""
    right = ReceiverMachine._part_placed
    patch.setattr(
        ReceiverMachine,
        "_part_placed",
        lambda machine, event, now: right(machine, replace(event, error=None), now),
    )


def _no_receiver_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReceiverMachine, "deadline", property(lambda machine: None))


def _stale_arrivals_counted(patch: pytest.MonkeyPatch) -> None:
    """A notification counts for whichever use of a room's number is open."""
    right = Arrivals._notified

    def notified(arrivals: Arrivals, peer: str, data: bytes, now: float) -> None:
        message = decode_notification(data, NEXT_RELEASE)
        room = arrivals._rooms.get(message.room)
        its_data = data if room is None else encode(structs.replace(message, generation=room.generation))
        right(arrivals, peer, its_data, now)

    patch.setattr(Arrivals, "_notified", notified)


# ---- ranks that drain ----------------------------------------------------------------------------------------------


def _drained_with_rooms_open(patch: pytest.MonkeyPatch) -> None:
    """A rank counts as drained as soon as it takes no new rooms."""
    patch.setattr(SendingRooms, "is_drained", property(lambda rooms: rooms.draining.awaits_none))


# ---- staging memory --------------------------------------------------------------------------------------------------


def _all_read_up_to_the_last(patch: pytest.MonkeyPatch) -> None:
    """A watermark says that all was read up to the last span that was, though others before it were not."""

    def release(ring: ReadingRing, span: Span) -> None:
        ring.position = max(ring.position, span.stop)

    patch.setattr(ReadingRing, "release", release)


def _read_only_in_order(patch: pytest.MonkeyPatch) -> None:
    """A span that is read before its turn is forgotten."""

    def release(ring: ReadingRing, span: Span) -> None:
        if span.start == ring.position:
            ring.position = span.stop

    patch.setattr(ReadingRing, "release", release)


def _unwanted_parts_kept(patch: pytest.MonkeyPatch) -> None:
    """Of a part that no room wants, its span is not given back."""
    right, give_back = Arrivals._done, ScatterTask.give_back

    def done(arrivals: Arrivals, task: Any, record: Any, error: Exception | None, now: float) -> None:
        if isinstance(task, ScatterTask):
            give_back(task)
        right(arrivals, task, record, error, now)

    patch.setattr(ScatterTask, "give_back", lambda task: None)
    patch.setattr(Arrivals, "_done", done)


def _void_spans_never_said(patch: pytest.MonkeyPatch) -> None:
    _never_sent(patch, SpanReleased)


def _cancelled_spans_kept(patch: pytest.MonkeyPatch) -> None:
    """A room that gives up says nothing of the span that it had reserved and not used."""
    right = StagedWrites.cancel

    def cancel(writes: StagedWrites, error: KVFerryError, worker: Worker) -> None:
        writes._span = None
        right(writes, error, worker)

    patch.setattr(StagedWrites, "cancel", cancel)


def _places_kept_in_the_queue(patch: pytest.MonkeyPatch) -> None:
    """A room that gives up stays in the queue for memory, and whoever is behind it waits for ever."""

    def withdraw(writes: StagedWrites) -> None:
        writes._waits_at = None

    patch.setattr(StagedWrites, "_withdraw", withdraw)


def _settled_at_once(kind: type[DirectWrite | StagedPart], trust: Plant) -> Plant:
    """What was sent of a write that failed is taken for arrived, by both sides: either's wait alone would do here."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        trust(patch)
        failed, settled = kind.failed, kind.settled

        def both(write: Any, error: Exception, *, is_read: bool) -> None:
            failed(write, error, is_read=is_read)
            settled(write, error)

        patch.setattr(kind, "failed", both)
        patch.setattr(kind, "settled", lambda write, error: None)

    return plant


def _drained_trusted_at_once(patch: pytest.MonkeyPatch) -> None:
    """A decode rank that was frozen believes `Drained` before it has read its sockets."""
    right = ReceiverMachine._drained
    patch.setattr(
        ReceiverMachine, "_drained", lambda machine, event: right(machine, replace(event, after_failure=False))
    )


def _released_span_trusted_at_once(patch: pytest.MonkeyPatch) -> None:
    """The same of a span of its staging memory."""
    right = Arrivals.span_released
    patch.setattr(
        Arrivals,
        "span_released",
        lambda arrivals, message: right(arrivals, structs.replace(message, after_failure=False)),
    )


def _second_drained_believed(patch: pytest.MonkeyPatch) -> None:
    """Whoever says twice that a write failed and nothing follows is believed at once."""
    right = ReceiverMachine._drained

    def drained(machine: ReceiverMachine, event: SenderDrained) -> list[ReceiverCommand]:
        writer = machine._expected.get(event.writer)
        if writer is not None and writer.is_settling:
            writer.is_drained = True
        return right(machine, event)

    patch.setattr(ReceiverMachine, "_drained", drained)


def _failures_forgotten_with_their_rooms(patch: pytest.MonkeyPatch) -> None:
    """Once a room is forgotten, an abort is answered as if none of its writes had failed."""
    patch.setattr(BrokenOff, "__contains__", lambda broken_off, receiver: False)


def _failed_rooms_wait_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StagedWrites, "cancel", lambda writes, error, worker: None)


def _waiters_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a ring behind the first is never woken."""
    right = SharedRing.reserve

    def reserve(ring: SharedRing, num_bytes: int, waiter: Waiter, due_at: float = 0.0) -> Span | None:
        span = right(ring, num_bytes, waiter, due_at)
        first = ring._queue._line.first
        if span is None and first is not None and waiter is not first.who:
            ring._queue._line.leave(waiter)
        return span

    patch.setattr(SharedRing, "reserve", reserve)


def _ended_with_the_last_post(patch: pytest.MonkeyPatch) -> None:
    """A staged write is taken for through when its last part is posted."""
    patch.setattr(StagedWrite, "is_through", property(lambda write: write.next_bytes is None))


def _kept_until_asked_for(patch: pytest.MonkeyPatch) -> None:
    """Every other message is sent when a heartbeat has found that it has not come."""
    right = ReliableChannel.send

    def send(channel: ReliableChannel, body: Any) -> list[Numbered]:
        return right(channel, body)[: channel.last_number % 2]

    patch.setattr(ReliableChannel, "send", send)


def _waiting_callers_not_told(patch: pytest.MonkeyPatch) -> None:
    """Who waits for a link waits on when the endpoint is closed."""
    right = Links.close

    def close(links: Links) -> None:
        links.callers.clear()
        right(links)

    patch.setattr(Links, "close", close)


# ---- connections, and numbers that are used again --------------------------------------------------------------------


def _late_receivers_not_told(patch: pytest.MonkeyPatch) -> None:
    """A room that failed before every decode rank had opened it is forgotten."""
    right = RoomTable.remove

    def remove(table: RoomTable[Any], room: Any, now: float) -> None:
        right(table, room, now)
        table.failed_alone._entries.clear()

    patch.setattr(RoomTable, "remove", remove)


def _any_prompt_will_do(patch: pytest.MonkeyPatch) -> None:
    """What a request's cache depends on is not compared."""
    patch.setattr(sender, "why_different", lambda prefill, decode: "")


# ---- rooms that are refused ------------------------------------------------------------------------------------------


def _refusals_kept_to_itself(patch: pytest.MonkeyPatch) -> None:
    """A decode rank that will not open a room tells no prefill rank."""
    patch.setattr(Refusals, "_tell", lambda refusals, refusal: None)


def _refused_by_silence(patch: pytest.MonkeyPatch) -> None:
    """A prefill rank whose caller refuses a room lets decode ranks wait."""
    patch.setattr(RoomTable, "refuse", lambda table, room, error, now: [])


def _readiness_assumed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(room_actor, "Awaited", lambda _, then, room: Awaited(lambda: True, then, room))


def _joined_unready(patch: pytest.MonkeyPatch) -> None:
    """Whatever waits behind a chunk whose signal has come is taken with it."""
    original = UnreadChunks.signalled

    def signalled(
        unread: UnreadChunks, error: BaseException | None, now: float, code: CallersCode
    ) -> BaseException | None:
        raised = original(unread, error, now, code)
        while unread._unready:
            unread._add_ready(unread._unready.popleft(), now)
        return raised

    patch.setattr(UnreadChunks, "signalled", signalled)


# ---- what is mended where it was broken ----------------------------------------------------------------------------


def _nothing_posted(patch: pytest.MonkeyPatch) -> None:
    """A post that raises is taken for one of which nothing is on its way."""
    patch.setattr(Worker, "post_raised", lambda worker, write, error: write.settled(error))


def _silence_kept(patch: pytest.MonkeyPatch) -> None:
    """A connection that nothing comes through is kept as long as no break is reported."""
    patch.setattr(Connections, "renew_silent", lambda connections, now, limit_s: [])


def _asked_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Whoever does not answer is asked for ever, and kept for that."""
    patch.setattr(
        Repetition,
        "begun",
        lambda now, settings, *, keep_s: Repetition(float("inf"), now, settings.heartbeat_interval_s, 1.0),
    )


def _replaced_goes_on(patch: pytest.MonkeyPatch) -> None:
    """A prefill rank whose place another one has taken keeps its decode ranks."""
    patch.setattr(Dismissals, "look_whether_replaced", lambda dismissals, replaced: None)


def _given_up_without_a_word(patch: pytest.MonkeyPatch) -> None:
    """A decode rank that was given up hears of it with its next heartbeat, and loses every room until then."""
    patch.setattr(Dismissals, "give_up", Dismissals._lose)


def _newer_start_not_looked_up(patch: pytest.MonkeyPatch) -> None:
    """What a link knows of its engine's starts counts, however old it is."""
    patch.setattr(Links, "look_up_again", lambda links, key, then: then(None, links.context.platform.now()))


def _callbacks_raise(patch: pytest.MonkeyPatch) -> None:
    """What a change callback raises is not caught."""
    patch.setattr(Callbacks, "call", lambda callbacks, callback, room: callback())


# ---- releases beside each other --------------------------------------------------------------------------------------


def _spoken_to_in_the_newest_version(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(link, "agreed", lambda mine, theirs, *, peer: mine.newest)


def _answered_in_the_newest_version(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SpokenVersions, "of", lambda spoken, decode_rank: spoken.mine.newest)


def _queues_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SendingRooms, "expected", lambda rooms, numbers, now: None)


def _queues_waited_for_without_a_word(patch: pytest.MonkeyPatch) -> None:
    """A room that was expected once waits for its decode rank for ever, dead or not."""
    right = SenderMachine.handle

    def handle(machine: SenderMachine, event: SenderEvent, now: float) -> list[SenderCommand]:
        return right(machine, RoomExpected(now) if isinstance(event, RoomExpected) else event, now)

    patch.setattr(SenderMachine, "handle", handle)


PLANTED: dict[str, Plant] = {
    "no generation check": _no_generations,
    "pages released on abort without drain": _release_on_abort_without_drain,
    "pages released on timeout without quarantine": _release_on_timeout_without_quarantine,
    "arrival counted twice": _arrivals_counted_twice,
    "acknowledgement before the last handle": _finish_before_the_last_handle,
    "drained while writes fly": _drained_while_writes_fly,
    "credit returned before the scatter": _credit_before_the_scatter,
    "arrival counted before the scatter": _arrived_before_the_scatter,
    "peer re-added without removal": _peer_added_without_removal,
    "peer removed while writes fly": _removed_while_writes_fly,
    "abort that overtakes its open forgotten": _aborts_that_come_first_forgotten,
    "a successor speaks for the dead": _successors_speak_for_the_dead,
    "no time to settle after a death": _no_time_to_settle,
    "half the time to settle passes in a freeze": _freezes_waited_out,
    "no time to settle after a failed write": _settled_at_once(DirectWrite, _drained_trusted_at_once),
    "a failed write's span given back at once": _settled_at_once(StagedPart, _released_span_trusted_at_once),
    "a thawed decode rank trusts Drained at once": _drained_trusted_at_once,
    "a second Drained ends the wait for what had been sent": _second_drained_believed,
    "a failed write forgotten with its room": _failures_forgotten_with_their_rooms,
    "a silent rank is taken for dead": _lost_is_dead,
    "a process that is hidden is taken for dead": _hidden_is_dead,
    "a pod without an object is taken for dead": _missing_pod_is_dead,
    "a phase is taken for a pod's end": _phase_is_proof,
    "slots reused while they are read": _slots_reused_at_once,
    "rings overwritten before they are read": _rings_without_end,
    "no deadlines": _no_deadlines,
    "nothing sent again": _nothing_sent_again,
    "broken connections not told to the prefill rank": _breaks_kept_from_the_prefill_rank,
    "losses not noticed by heartbeats": _losses_not_noticed,
    "messages behind a lost one count": _gaps_taken,
    "aborts said once": _aborts_said_once,
    "connection read after it was closed": _closed_connections_read,
    "endpoint closed while writes hang stays for ever": _never_leaves,
    "finish said while writes fly": _finish_said_while_writes_fly,
    "drained never said": _drained_never_said,
    "aborts of unknown rooms unanswered": _aborts_of_unknown_rooms_unanswered,
    "one write ends for all": _one_write_ends_for_all,
    "chunks counted where writes should be": _chunks_counted_for_writes,
    "a chunk written twice": _written_twice,
    "writes counted that were never posted": _writes_counted_that_were_never_posted,
    "a stranger's abort raises": _stranger_raises,
    "no deadline on the prefill side": _no_sender_deadline,
    "pages written in the wrong order": _moves_by(_pages_in_reverse),
    "tokens that fill no unit forgotten": _moves_by(_single_tokens_forgotten),
    "the end of a held prefix overwritten": _prefix_overwritten,
    "pages released when one of several writers is drained": _one_speaks_for_all,
    "success when the first writer is complete": _first_writer_suffices,
    "a failed receiver tells nobody": _failure_kept_to_itself,
    "pages released when their writer is lost": _lost_is_drained,
    "a chunk complete when any part is scattered": _parts_by(_any_part_suffices),
    "a part counted twice": _parts_by(_counted_twice),
    "a part counted that could not be scattered": _scattered_or_not,
    "no deadline on the decode side": _no_receiver_deadline,
    "stale arrivals counted": _stale_arrivals_counted,
    "a watermark that counts spans out of order": _all_read_up_to_the_last,
    "a watermark that forgets spans out of order": _read_only_in_order,
    "parts that nobody wants kept": _unwanted_parts_kept,
    "released spans never said": _void_spans_never_said,
    "a cancelled write keeps its span": _cancelled_spans_kept,
    "a cancelled write keeps its place": _places_kept_in_the_queue,
    "failed rooms go on waiting for memory": _failed_rooms_wait_on,
    "who waits for a ring is forgotten": _waiters_forgotten,
    "a write through with parts on their way": _ended_with_the_last_post,
    "chunks that wait for a turn forgotten": _turns_forgotten,
    "more admitted than may be on its way": _all_admitted,
    "admission kept after a failed write": _failed_writes_keep_their_leave,
    "nobody admitted who waits": _nobody_served,
    "a room's next write not lined up": _second_write_not_lined_up,
    "deferred writes posted after the end": _dropped_writes_posted,
    "failed measurements forgotten": _failed_measurements_forgotten,
    "messages kept until a heartbeat asks for them": _kept_until_asked_for,
    "who waits for a link is not told of the close": _waiting_callers_not_told,
    "receivers that come late not told": _late_receivers_not_told,
    "another prompt's cache sent": _any_prompt_will_do,
    "a refusal of the decode side is told nobody": _refusals_kept_to_itself,
    "a refusal of the prefill side is told nobody": _refused_by_silence,
    "layers read before they are ready": _readiness_assumed,
    "layers join others before they are ready": _joined_unready,
    "a post that raises is taken for nothing posted": _nothing_posted,
    "a silent connection is kept": _silence_kept,
    "who does not answer is asked for ever": _asked_for_ever,
    "a decode rank that was given up is not told": _given_up_without_a_word,
    "a replaced prefill rank keeps its decode ranks": _replaced_goes_on,
    "a newer start is taken for one that has gone": _newer_start_not_looked_up,
    "what a change callback raises is not caught": _callbacks_raise,
    "older prefill ranks spoken to in the newest version": _spoken_to_in_the_newest_version,
    "older decode ranks answered in the newest version": _answered_in_the_newest_version,
    "drained with rooms open": _drained_with_rooms_open,
    "a queue of the decode side is not waited for": _queues_not_waited_for,
    "a queue is waited for though nobody speaks of it": _queues_waited_for_without_a_word,
}


def _read_no_more_after_an_error(patch: pytest.MonkeyPatch) -> None:
    """A source is its caller's again with the error of its write, though a post that raised is read on."""
    right = SenderMachine.handle

    def handle(machine: SenderMachine, event: SenderEvent, now: float) -> list[SenderCommand]:
        commands = right(machine, event, now)
        if isinstance(event, WriteFailed) and event.may_arrive:
            machine._receivers[event.receiver].writes_in_flight.discard(event.sequence)
            return commands + right(machine, Tick(), now)
        return commands

    patch.setattr(SenderMachine, "handle", handle)


def _aborts_kept_from_rooms(patch: pytest.MonkeyPatch) -> None:
    """A room on a prefill rank does not hear that a decode rank has given it up."""
    patch.setattr(SendingRoom, "aborted", lambda room, *arguments: None)


def _aborts_of_no_request(patch: pytest.MonkeyPatch) -> None:
    """A room on a decode rank does not say which of its open requests an abort takes back."""
    right = ReceivingRoom._execute

    def execute(room: ReceivingRoom, command: ReceiverCommand, now: float) -> None:
        right(room, command, now)
        room.open_numbers.clear()

    patch.setattr(ReceivingRoom, "_execute", execute)


ONLY_ENUMERATED: dict[str, Plant] = {
    "an abort is kept from its room": _aborts_kept_from_rooms,
    "aborts do not say which open request they take back": _aborts_of_no_request,
    "a source given back with the error of its write": _read_no_more_after_an_error,
    "repeated messages count again": _repetitions_taken,
    "messages of an earlier attempt to attach count": _earlier_attempts_taken,
}
"""Faults that take a message which comes twice, or late, at just that moment, or what a room does with it then: every
state is searched for them, and no schedules are."""

SEEN_WITH: dict[str, frozenset[str]] = {
    "a pod without an object is taken for dead": frozenset({"cut"}),
    "a phase is taken for a pod's end": frozenset({"freeze of a writer"}),
    "a thawed decode rank trusts Drained at once": frozenset({"frozen receiver"}),
    "half the time to settle passes in a freeze": frozenset({"freeze while it settles"}),
    "a second Drained ends the wait for what had been sent": frozenset({"frozen receiver"}),
    "a failed write forgotten with its room": frozenset({"frozen receiver"}),
    "drained with rooms open": frozenset({"leave"}),
    "a queue of the decode side is not waited for": frozenset({"queue"}),
    "a queue is waited for though nobody speaks of it": frozenset({"queue"}),
    "a post that raises is taken for nothing posted": frozenset({"raising post"}),
    "a silent connection is kept": frozenset({"silent line"}),
    "who does not answer is asked for ever": frozenset({"unproved end"}),
    "a replaced prefill rank keeps its decode ranks": frozenset({"second start"}),
    "what a change callback raises is not caught": frozenset({"change callback"}),
    "failed measurements forgotten": frozenset({"measuring write"}),
    "who waits for a link is not told of the close": frozenset({"close waits"}),
}
"""Kinds of trouble that it takes to bring a fault to light: a search for it leaves out schedules without them."""
