"""Digests that are compared before anything counts, on both sides of one transfer: each rule one test."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvferry.errors import ChecksumError, KVFerryError, TransferAbortedError, TransferFailedError, TransferTimeoutError
from kvferry.layout import RankCoordinates
from kvferry.plan.requests.chunks import Chunk, ChunkPart
from kvferry.plan.requests.moves import ReceiverRequest
from kvferry.protocol.transfer.events import (
    AbortRequested,
    ChunkSubmitted,
    Connected,
    Drop,
    FinishSent,
    PartArrived,
    PartPlaced,
    Place,
    ReceiverCommand,
    ReceiverLost,
    ReceiverMessage,
    ReceiverOpened,
    SendAbort,
    SendDrained,
    SenderDrained,
    SendFinish,
    SendVerified,
    Tick,
    WriteAdmitted,
)
from kvferry.protocol.transfer.receiver import ReceiverMachine
from kvferry.protocol.transfer.sender import SenderMachine
from kvferry.protocol.transfer.states import Deadlines, TransferState
from kvferry.protocol.wire.codec import decode_notification, encode
from kvferry.protocol.wire.field_types import DecodeRank
from kvferry.protocol.wire.messages import AbortRoom, ChunkArrived, RoomVerified, WriterFinished

S = TransferState
DEADLINES = Deadlines(bootstrap_s=10.0, waiting_s=20.0, write_s=5.0)
WRONG = ChecksumError("'k' in page 5")

# ---- the decode side ------------------------------------------------------------------------------------------------


def receiver(*writers: int, ranks: int = 3) -> ReceiverMachine:
    machine = ReceiverMachine(7, rank=3, deadlines=DEADLINES, now=0.0)
    writing = {writer: frozenset({"kv"}) for writer in writers}
    connected = Connected(
        ranks=frozenset(range(ranks)),
        writers=writing,
        into_pages=frozenset(writing),
        aux_writer=writers[0],
        verifies=True,
    )
    machine.handle(connected, 0.0)
    return machine


def finished(writer: int, chunks: int, aux: bytes | None) -> WriterFinished:
    return WriterFinished(room=7, generation=1, writer=writer, chunks=chunks, aux=aux)


def run(machine: ReceiverMachine, *events: Any, now: float = 0.0) -> list[ReceiverCommand]:
    """The commands for the last of some events."""
    commands: list[ReceiverCommand] = []
    for event in events:
        commands = machine.handle(event, now)
    return commands


def test_a_room_succeeds_only_once_everything_is_verified_and_tells_the_writer():
    machine = receiver(1)
    assert run(machine, PartArrived(1, 0, work="its digests")) == [Place("its digests")]
    assert run(machine, PartArrived(1, 1, work="others")) == [Place("others")]
    assert run(machine, finished(1, 2, b"")) == []
    assert run(machine, PartPlaced(1, 1)) == []
    assert (machine.state, machine.chunks) == (S.TRANSFERRING, 1)
    assert run(machine, PartPlaced(1, 0)) == [SendVerified(1)]
    assert machine.state is S.SUCCESS
    assert machine.are_pages_reusable


def test_every_writer_is_told_once_its_own_bytes_are_verified():
    machine = receiver(1, 2)
    run(machine, PartArrived(1, 0), PartArrived(2, 0), finished(1, 1, b""))
    assert run(machine, PartPlaced(1, 0)) == [SendVerified(1)]
    assert run(machine, finished(1, 1, b"")) == []
    assert run(machine, PartPlaced(2, 0)) == []
    assert run(machine, finished(2, 1, None)) == [SendVerified(2)]
    assert machine.state is S.SUCCESS


def test_without_checksums_nobody_is_told():
    machine = ReceiverMachine(7, rank=3, deadlines=DEADLINES, now=0.0)
    one = frozenset([1])
    connected = Connected(ranks=one, writers={1: frozenset({"kv"})}, into_pages=one, aux_writer=1)
    assert run(machine, connected, finished(1, 0, b"")) == []
    assert machine.state is S.SUCCESS


def test_a_repeated_notification_is_verified_once():
    machine = receiver(1)
    run(machine, PartArrived(1, 0))
    assert run(machine, PartArrived(1, 0)) == [Drop(None)]
    run(machine, PartPlaced(1, 0))
    assert run(machine, PartArrived(1, 0)) == [Drop(None)]
    assert machine.chunks == 1


def test_what_arrives_after_the_end_is_not_verified():
    machine = receiver(1)
    run(machine, PartArrived(1, 0), PartPlaced(1, 0), finished(1, 1, b""))
    assert run(machine, PartArrived(1, 0), PartArrived(1, 9)) == [Drop(None)]
    failed = receiver(1)
    run(failed, AbortRequested("enough"))
    assert run(failed, PartArrived(1, 0)) == [Drop(None)]


def test_nobody_but_a_writer_is_verified():
    assert run(receiver(1), PartArrived(2, 0)) == [Drop(None)]


def test_a_wrong_digest_fails_the_room_with_its_own_error_and_every_rank_hears_which():
    machine = receiver(1, ranks=2)
    run(machine, PartArrived(1, 0))
    reason = "room 7: 'k' in page 5"
    assert run(machine, PartPlaced(1, 0, error=WRONG)) == [
        SendAbort(0, reason, "ChecksumError"),
        SendAbort(1, reason, "ChecksumError"),
    ]
    assert isinstance(machine.error, ChecksumError)
    assert machine.abort_of(1) == SendAbort(1, reason, "ChecksumError")
    assert not machine.are_pages_reusable
    run(machine, SenderDrained(1))
    assert machine.are_pages_reusable


def test_a_part_with_a_wrong_digest_does_the_same():
    machine = receiver(1)
    assert run(machine, PartArrived(1, 0, 0, is_last=True, work="it")) == [Place("it")]
    run(machine, PartPlaced(1, 0, WRONG))
    assert type(machine.error) is ChecksumError


def test_what_cannot_be_verified_fails_the_room_with_its_cause():
    machine = receiver(1)
    run(machine, PartArrived(1, 0), PartPlaced(1, 0, error=ZeroDivisionError("none"), purpose="verified"))
    assert type(machine.error) is TransferFailedError
    assert "prefill rank 1 sent could not be verified: ZeroDivisionError" in str(machine.error)


def test_pages_are_not_reusable_while_they_are_read():
    machine = receiver(1)
    run(machine, PartArrived(1, 0), AbortRequested("enough"), SenderDrained(1))
    assert not machine.are_pages_reusable
    assert run(machine, PartPlaced(1, 0, error=WRONG)) == []
    assert isinstance(machine.error, TransferAbortedError), "what was first"
    assert machine.are_pages_reusable


# ---- the prefill side -----------------------------------------------------------------------------------------------


def sender(*receivers: str, verifies: bool = True) -> SenderMachine:
    """All of them want nothing but the aux data."""
    machine = SenderMachine(7, rank=3, deadlines=DEADLINES, now=0.0)
    for name in receivers:
        machine.handle(opened(name, len(receivers), verifies=verifies), 0.0)
    return machine


def opened(name: str, count: int, *, verifies: bool = True) -> ReceiverOpened:
    request = ReceiverRequest(tokens=None, wanted={}, routes=())
    rank = DecodeRank("decode", RankCoordinates())
    return ReceiverOpened(name, 1, count, request, sends_aux=True, rank=rank, verifies=verifies)


def verified(name: str, generation: int) -> ReceiverMessage:
    return ReceiverMessage(name, RoomVerified(room=7, generation=generation))


def aborted(name: str, generation: int, reason: str, error: str) -> ReceiverMessage:
    return ReceiverMessage(name, AbortRoom(room=7, generation=generation, reason=reason, error=error))


def has_succeeded(machine: SenderMachine) -> bool:
    return machine.state is S.SUCCESS


def last_chunk() -> ChunkSubmitted:
    return ChunkSubmitted(Chunk(0, (ChunkPart("kv", 0, np.zeros(0, np.int64)),), is_last=True))


def test_a_sender_succeeds_once_every_receiver_has_verified():
    machine = sender("d0", "d1")
    assert machine.handle(last_chunk(), 0.0) == [SendFinish("d0", 1, 0, b""), SendFinish("d1", 1, 0, b"")]
    for name in ("d0", "d1"):
        machine.handle(FinishSent(name), 0.0)
    machine.handle(verified("d0", 1), 0.0)
    machine.handle(verified("d1", 99), 0.0)
    machine.handle(verified("d2", 1), 0.0)
    assert not has_succeeded(machine)
    machine.handle(verified("d1", 1), 0.0)
    assert has_succeeded(machine)


def test_the_answer_may_come_before_the_question_is_known_to_be_sent():
    machine = sender("d0")
    machine.handle(last_chunk(), 0.0)
    machine.handle(verified("d0", 1), 0.0)
    assert not has_succeeded(machine)
    machine.handle(FinishSent("d0"), 0.0)
    assert has_succeeded(machine)


def test_one_that_needs_nothing_more_does_not_end_the_room_for_another():
    machine = sender("d0", "d1")
    machine.handle(verified("d0", 1), 0.0)
    assert machine.state is S.WAITING_FOR_INPUT
    machine.handle(WriteAdmitted("d1", 0), 0.0)
    assert machine.handle(last_chunk(), 0.0) == [], "a write to the other one is on its way"
    assert machine.handle(verified("d0", 1), 0.0) == []
    assert machine.state is S.WAITING_FOR_INPUT


def test_without_checksums_nothing_is_waited_for():
    machine = sender("d0", verifies=False)
    machine.handle(last_chunk(), 0.0)
    machine.handle(FinishSent("d0"), 0.0)
    assert has_succeeded(machine)


def failed(machine: SenderMachine) -> KVFerryError:
    assert machine.error is not None
    return machine.error


def test_wrong_bytes_fail_the_sender_with_the_same_error():
    machine = sender("d0")
    machine.handle(last_chunk(), 0.0)
    machine.handle(FinishSent("d0"), 0.0)
    commands = machine.handle(aborted("d0", 1, "room 7: 'k' in page 5", "ChecksumError"), 0.0)
    assert commands == [SendDrained("d0", 1)]
    assert type(failed(machine)) is ChecksumError
    assert str(machine.error) == "d0 found wrong bytes: room 7: 'k' in page 5"


@pytest.mark.parametrize("name", ["", "SystemExit", "SettingsError"])
def test_any_other_abort_stays_one(name: str):
    machine = sender("d0")
    machine.handle(aborted("d0", 1, "enough", name), 0.0)
    assert type(failed(machine)) is TransferAbortedError


def test_a_receiver_that_is_lost_before_it_has_verified_fails_the_room():
    machine = sender("d0")
    machine.handle(last_chunk(), 0.0)
    machine.handle(FinishSent("d0"), 0.0)
    machine.handle(ReceiverLost("d0", KeyError("gone")), 0.0)
    assert "d0 is gone" in str(failed(machine))


def test_a_receiver_that_never_says_is_waited_for_until_the_deadline():
    machine = sender("d0")
    machine.handle(last_chunk(), 1.0)
    machine.handle(FinishSent("d0"), 1.0)
    machine.handle(Tick(), 20.9)
    assert not machine.state.is_final
    machine.handle(Tick(), 21.0)
    assert isinstance(machine.error, TransferTimeoutError)
    assert "['d0'] did not confirm within 20 s that the digests are right" in str(machine.error)


# ---- what travels ---------------------------------------------------------------------------------------------------


def test_a_chunk_without_digests_says_nothing_of_them():
    plain = ChunkArrived(room=1, generation=2, writer=3, sequence=4)
    assert b"segments" not in encode(plain)
    assert b"unit" not in encode(plain)
    assert decode_notification(encode(plain)) == plain
