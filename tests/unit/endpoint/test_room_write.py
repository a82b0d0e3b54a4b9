"""One write of a room: it ends once, and says once that it failed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.endpoint.prefill.room_write import RoomWrite, Target
from kvferry.errors import PeerDisconnectedError
from kvferry.observe.records import PartRecord, WriteRecord
from kvferry.plan import Choice, TransferPath, Unit
from kvferry.protocol.transfer.events import Write, WriteDone, WriteFailed
from kvferry.transport import TransferReport


class Surface:
    """What a write touches outside of itself, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, object]] = []
        self.records: list[WriteRecord] = []
        attachment: Any = SimpleNamespace(
            receiver="d0",
            moved_at=float("-inf"),
            bytes_of=lambda unit, elected, moves: 100,
            end_write=lambda: self.log.append(("lists", "given back")),
        )
        context: Any = SimpleNamespace(
            now=lambda: 9.0,
            broken_off=SimpleNamespace(add=lambda receiver: self.log.append(("broken off", receiver))),
            write_failed=lambda attachment, error: self.log.append(("connection", str(error))),
            observer=SimpleNamespace(
                write_failed=lambda room, receiver, error: self.log.append(("observed", str(error)))
            ),
        )
        room: Any = SimpleNamespace(room=7, keep=self.records.append)
        command = Write("d0", 1, 0, 3, Unit.WHOLE, ())
        self.write = RoomWrite(
            command,
            Target(room, attachment, (), context),
            Choice(TransferPath.STAGED, 2.0, 1.0, "it is faster"),
            submitted_at=1.0,
            begun_at=2.0,
        )


@pytest.fixture
def surface() -> Surface:
    return Surface()


def part(num_bytes: int, landed_at: float) -> PartRecord:
    return PartRecord(2.0, 2.0, 3.0, 4.0, landed_at, num_bytes, 5, "a thread")


def test_a_write_ends_once(surface: Surface):
    assert surface.write.end(None) == WriteDone("d0", 3)
    assert surface.write.end(None) is None
    assert surface.write.end(OSError("late")) is None
    assert surface.log == [("lists", "given back")]
    assert len(surface.records) == 1


def test_the_record_adds_up_the_parts(surface: Surface):
    report = TransferReport(total_bytes=100, descriptors=1, post_s=0.5, transfer_s=0.25)
    surface.write.arrived(report, part(60, 5.0), descriptors=1)
    surface.write.arrived(report, part(40, 6.0), descriptors=1)
    assert surface.write.target.attachment.moved_at == 6.0
    surface.write.end(None)
    (record,) = surface.records
    assert (record.receiver, record.path, record.why) == ("d0", TransferPath.STAGED, "it is faster")
    assert (record.total_bytes, record.descriptors) == (100, 2)
    assert (record.transport_post_s, record.transport_transfer_s) == (1.0, 0.5)
    assert (record.submitted_at, record.posted_at, record.done_at) == (1.0, 2.0, 9.0)
    assert len(record.parts) == 2


def test_a_write_that_fails_says_so_once_outside_of_the_room_and_twice_to_it(surface: Surface):
    error = OSError("broken")
    assert surface.write.failure(error, may_arrive=True) == WriteFailed("d0", 3, error, may_arrive=True)
    assert surface.log == [("broken off", "d0"), ("observed", "broken")]
    assert surface.write.end(error) == WriteFailed("d0", 3, error)
    assert surface.log[2:] == [("lists", "given back")]
    assert not surface.records


@pytest.mark.parametrize(
    ("error", "is_read"),
    [(PeerDisconnectedError("broken"), False), (OSError("broken"), True)],
    ids=["its connection broke", "what was posted may go on"],
)
def test_after_a_failure_that_only_connecting_anew_mends_the_decode_rank_is_given_up(
    surface: Surface, error: Exception, is_read: bool
):
    surface.write.failure(error, may_arrive=True, is_read=is_read)
    assert surface.log == [("broken off", "d0"), ("observed", "broken"), ("connection", "broken")]
