"""Faults planted in what guards a transfer: each takes one guard away, and the simulation must notice.

Every entry changes the code that ships, as somebody might by mistake, and nothing of the simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest

from kvferry.endpoint import PrefillEndpoint, scattering
from kvferry.endpoint.attachment import Attachment
from kvferry.endpoint.decode_driver import DecodeDriver
from kvferry.endpoint.decode_peers import DecodePeers
from kvferry.errors import TransferTimeoutError
from kvferry.protocol import receiver, sender
from kvferry.protocol.credits import ReadingRing, WritingRing
from kvferry.protocol.lost_ranks import LostRanks
from kvferry.protocol.messages import AbortRoom, Attach, Drained, OpenRoom
from kvferry.protocol.receiver import PartScattered, ReceiverMachine
from kvferry.protocol.room_table import RoomTable
from kvferry.protocol.sender import SenderMachine
from kvferry.protocol.states import TransferState
from kvferry.simulation.machines import SimulatedPlatform
from kvferry.staging.receiving import WriterRing
from kvferry.staging.rings import SharedRing
from kvferry.staging.slots import SourceMemory

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
            if machine.state is TransferState.FAILED and not each.told_drained:
                each.told_drained = True
                commands.append(sender.SendDrained(name, each.opened.generation))
        return commands

    patch.setattr(SenderMachine, "_tell_drained", tell)


def _credit_before_the_scatter(patch: pytest.MonkeyPatch) -> None:
    right = scattering.Scatterers.submit

    def submit(scatterers: Any, task: Any) -> None:
        task.give_back()
        right(scatterers, task)

    patch.setattr(scattering.Scatterers, "submit", submit)


def _arrived_before_the_scatter(patch: pytest.MonkeyPatch) -> None:
    right = ReceiverMachine._part_arrived

    def part_arrived(machine: ReceiverMachine, event: Any, now: float) -> list[Any]:
        commands = right(machine, event, now)
        if commands:
            right_part_scattered(machine, PartScattered(event.writer, event.sequence, event.part), now)
        return commands

    right_part_scattered = ReceiverMachine._part_scattered
    patch.setattr(ReceiverMachine, "_part_arrived", part_arrived)
    patch.setattr(ReceiverMachine, "_part_scattered", lambda machine, event, now: [])


def _peer_added_without_removal(patch: pytest.MonkeyPatch) -> None:
    def attach(peers: Any, message: Attach) -> None:
        peers._peers[message.endpoint] = peers._make(message.endpoint, message.attempt, None)
        peers._peers[message.endpoint].post(message)

    patch.setattr(DecodePeers, "attach", attach)


def _removed_while_writes_fly(patch: pytest.MonkeyPatch) -> None:
    def retire(attachment: Attachment, when_unused: Callable[[], None]) -> None:
        when_unused()

    patch.setattr(Attachment, "retire", retire)


def _aborts_that_come_first_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Neither as the last use of the number nor as the number of a wish."""
    right, right_hears = RoomTable.abort, RoomTable.hears

    def abort(table: Any, *arguments: Any) -> Any:
        found = right(table, *arguments)
        table._over.clear()
        return found

    def hears(table: Any, receiver: str, message: OpenRoom | AbortRoom) -> bool:
        return isinstance(message, AbortRoom) or right_hears(table, receiver, message)

    patch.setattr(RoomTable, "abort", abort)
    patch.setattr(RoomTable, "hears", hears)


def _successors_speak_for_the_dead(patch: pytest.MonkeyPatch) -> None:
    """`Drained` counts whoever sends it."""
    right = DecodeDriver._room_message

    def room_message(driver: Any, channel: Any, message: Any, now: float) -> None:
        link = driver._room_links.get(message.room)
        peer = (
            next((each for each in link.peers if link.rank_of(each.endpoint) == message.writer), None) if link else None
        )
        if isinstance(message, Drained) and peer is not None:
            message = Drained(
                endpoint=peer.endpoint, room=message.room, generation=message.generation, writer=message.writer
            )
        right(driver, channel, message, now)

    patch.setattr(DecodeDriver, "_room_message", room_message)


def _no_time_to_settle(patch: pytest.MonkeyPatch) -> None:
    right = LostRanks.__init__
    patch.setattr(LostRanks, "__init__", lambda lost, *, settle_s: right(lost, settle_s=0.0))


def _lost_is_dead(patch: pytest.MonkeyPatch) -> None:
    """A rank that was lost is taken for dead."""
    patch.setattr(SimulatedPlatform, "is_gone", lambda platform, process: True)


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


def _credits_said_once(patch: pytest.MonkeyPatch) -> None:
    right = DecodeDriver._repeat

    def repeat(driver: Any, now: float) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(WriterRing, "report", lambda ring: None)
            right(driver, now)

    patch.setattr(DecodeDriver, "_repeat", repeat)


def _voids_said_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SharedRing, "give_up", lambda ring, span: None)


def _aborts_said_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeDriver, "_repeat", lambda driver, now: None)


def _closed_connections_read(patch: pytest.MonkeyPatch) -> None:
    """A connection is read after everything was said again through it, which may have closed it."""
    right = DecodeDriver._receive

    def receive(driver: Any, channel: Any, now: float) -> None:
        if channel.take_break():
            driver._say_again(channel, now)
        right(driver, channel, now)

    patch.setattr(DecodeDriver, "_receive", receive)


def _never_leaves(patch: pytest.MonkeyPatch) -> None:
    """An endpoint that was closed while its writes hung stays for ever."""
    right = PrefillEndpoint._has_left
    patch.setattr(PrefillEndpoint, "_has_left", lambda endpoint: not endpoint._is_lingering and right(endpoint))


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
    "a silent rank is taken for dead": _lost_is_dead,
    "slots reused while they are read": _slots_reused_at_once,
    "rings overwritten before they are read": _rings_without_end,
    "no deadlines": _no_deadlines,
    "credits said once": _credits_said_once,
    "void spans said once": _voids_said_once,
    "nothing said twice": _aborts_said_once,
    "connection read after it was closed": _closed_connections_read,
    "endpoint closed while writes hang stays for ever": _never_leaves,
}
