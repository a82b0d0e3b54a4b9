"""The decode side of one transfer: each rule one test."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from tests.support.steps import steps_of

from kvferry.errors import TransferAbortedError, TransferFailedError, TransferTimeoutError
from kvferry.protocol.transfer.events import (
    AbortRequested,
    AnswersOverdue,
    AwaitArrival,
    Broke,
    Connected,
    ConnectFailed,
    Drop,
    PartArrived,
    PartPlaced,
    Place,
    ReceiverCommand,
    SendAbort,
    SenderDrained,
    SenderSettled,
    SendOpen,
    Tick,
)
from kvferry.protocol.transfer.receiver import ReceiverMachine
from kvferry.protocol.transfer.states import Deadlines, TransferState
from kvferry.protocol.wire.messages import ChunkArrived, RoomFailed, WriterFinished

BOOTSTRAP, WAITING, TRANSFERRING, SUCCESS, FAILED = TransferState
DEADLINES = Deadlines(bootstrap_s=10.0, waiting_s=20.0, write_s=5.0)


def machine() -> ReceiverMachine:
    return ReceiverMachine(7, rank=3, deadlines=DEADLINES, now=0.0)


def connected(*writers: int, ranks: int = 4, aux_writer: int = 0) -> Connected:
    return Connected(
        ranks=frozenset(range(ranks)),
        writers={writer: frozenset({"kv"}) for writer in writers},
        into_pages=frozenset(writers),
        aux_writer=aux_writer,
    )


def asked(rank: int, *groups: str) -> SendOpen:
    return SendOpen(rank, frozenset(groups))


def arrived(writer: int, sequence: int) -> ChunkArrived:
    return ChunkArrived(room=7, generation=1, writer=writer, sequence=sequence)


def finished(writer: int, chunks: int, aux: bytes | None) -> WriterFinished:
    return WriterFinished(room=7, generation=1, writer=writer, chunks=chunks, aux=aux)


def sender_failed(writer: int, error: str, reason: str) -> RoomFailed:
    return RoomFailed(room=7, generation=1, writer=writer, error=error, reason=reason)


def run(receiver: ReceiverMachine, *events: Any, now: float = 0.0) -> list[ReceiverCommand]:
    """The commands for the last of some events."""
    commands: list[ReceiverCommand] = []
    for event in events:
        commands = receiver.handle(event, now)
    return commands


# ---- the way to success --------------------------------------------------------------------------------------------


def test_a_room_goes_from_connecting_to_success():
    receiver = machine()
    assert receiver.state is BOOTSTRAP
    assert run(receiver, connected(1, ranks=3)) == [asked(0), asked(1, "kv"), asked(2)]
    assert receiver.state is WAITING
    run(receiver, arrived(1, 0))
    assert receiver.state is TRANSFERRING
    run(receiver, arrived(1, 1), finished(1, 2, None))
    assert (receiver.state, receiver.are_pages_reusable) == (TRANSFERRING, False)
    assert run(receiver, finished(0, 0, b"token")) == []
    assert (receiver.state, receiver.aux, receiver.error) == (SUCCESS, b"token", None)
    assert receiver.are_pages_reusable
    assert receiver.deadline is None


@pytest.mark.parametrize(
    "order",
    [
        [finished(0, 2, b"t"), finished(1, 1, None), arrived(1, 0), arrived(0, 1), arrived(0, 0)],
        [arrived(0, 1), finished(1, 1, None), arrived(0, 0), arrived(1, 0), finished(0, 2, b"t")],
        [arrived(1, 0), arrived(0, 0), finished(0, 2, b"t"), arrived(0, 1), finished(1, 1, None)],
    ],
)
def test_arrivals_count_in_any_order(order: list[Any]):
    receiver = machine()
    run(receiver, connected(0, 1))
    for event in order:
        assert not receiver.state.is_final
        run(receiver, event)
    assert receiver.state is SUCCESS


class Compared(int):
    """A number that counts how often it is compared."""

    count = 0

    def __gt__(self, other: int) -> bool:
        Compared.count += 1
        return int(self) > int(other)

    def __lt__(self, other: int) -> bool:
        Compared.count += 1
        return int(self) < int(other)


def test_an_arrival_is_not_compared_with_all_that_have_arrived():
    receiver = machine()
    run(receiver, connected(0), *(arrived(0, Compared(number)) for number in range(2_000)))
    assert receiver.chunks == 2_000
    Compared.count = 0
    run(receiver, arrived(0, Compared(2_000)))
    assert Compared.count <= 2


def test_the_aux_writer_is_waited_for_even_if_it_writes_nothing():
    receiver = machine()
    run(receiver, connected(1), arrived(1, 0), finished(1, 1, None))
    assert receiver.state is TRANSFERRING
    run(receiver, finished(0, 0, b""))
    assert (receiver.state, receiver.aux) == (SUCCESS, b"")


def test_a_request_without_pages_needs_only_the_aux():
    receiver = machine()
    run(receiver, connected(), finished(0, 0, b"t"))
    assert receiver.state is SUCCESS


def test_ranks_that_owe_nothing_are_asked_but_not_awaited():
    receiver = machine()
    assert run(receiver, connected(0, ranks=2)) == [asked(0, "kv"), asked(1)]
    assert run(receiver, arrived(1, 0), finished(1, 1, b"stray"), SenderDrained(1)) == []
    assert (receiver.state, receiver.aux) == (WAITING, None)
    run(receiver, finished(0, 0, b"t"))
    assert (receiver.state, receiver.aux) == (SUCCESS, b"t")


def test_a_repeated_arrival_counts_once():
    receiver = machine()
    run(receiver, connected(0), arrived(0, 0), arrived(0, 0), finished(0, 2, b"t"), arrived(0, 0))
    assert receiver.state is TRANSFERRING
    run(receiver, arrived(0, 1))
    assert receiver.state is SUCCESS


def test_a_repeated_finish_changes_nothing():
    receiver = machine()
    run(receiver, connected(0), finished(0, 1, b"t"))
    assert run(receiver, finished(0, 1, b"other"), now=15.0) == []
    assert (receiver.state, receiver.aux, receiver.deadline) == (WAITING, b"t", 20.0)


def test_connecting_twice_asks_once():
    receiver = machine()
    run(receiver, connected(0))
    assert run(receiver, connected(0)) == []
    assert receiver.state is WAITING


def test_what_comes_after_success_changes_nothing():
    receiver = machine()
    run(receiver, connected(0), finished(0, 0, b"t"))
    late = [
        arrived(0, 0),
        finished(0, 0, b"other"),
        finished(0, 3, None),
        sender_failed(0, "PageError", "late"),
        SenderDrained(0),
        AbortRequested("late"),
        ConnectFailed(OSError()),
        Broke(OSError()),
        connected(1),
        Tick(),
    ]
    for event in late:
        assert run(receiver, event, now=1000.0) == []
    assert (receiver.state, receiver.aux, receiver.error) == (SUCCESS, b"t", None)
    assert receiver.are_pages_reusable


# ---- writers that contradict themselves ----------------------------------------------------------------------------


def test_a_writer_that_finishes_twice_with_other_numbers_fails_the_room():
    receiver = machine()
    run(receiver, connected(0), finished(0, 1, b"t"))
    assert run(receiver, finished(0, 2, b"t"))
    assert isinstance(receiver.error, TransferFailedError)
    assert "prefill rank 0 said that it sent 1 chunks, then 2" in str(receiver.error)


@pytest.mark.parametrize(
    "events",
    [
        [arrived(0, 1), finished(0, 1, b"t")],
        [finished(0, 1, b"t"), arrived(0, 1)],
        [arrived(0, 0), arrived(0, 1), finished(0, 1, b"t")],
    ],
)
def test_a_chunk_beyond_those_announced_fails_the_room_and_never_stands_in_for_another(events: list[Any]):
    receiver = machine()
    run(receiver, connected(0), *events)
    assert receiver.state is FAILED
    assert "prefill rank 0 said that it sent 1 chunks, but number 1 arrived" in str(receiver.error)


# ---- failures, and when pages may be used again --------------------------------------------------------------------


def test_pages_are_never_reusable_while_the_room_is_open():
    receiver = machine()
    assert not receiver.are_pages_reusable
    run(receiver, connected(0, 1), finished(0, 0, b"t"))
    assert not receiver.are_pages_reusable


def test_a_rank_that_is_drained_without_a_word_ends_the_room():
    receiver = machine()
    run(receiver, connected(0, 1), SenderDrained(9))
    assert not receiver.state.is_final
    run(receiver, finished(0, 0, b"t"), SenderDrained(1))
    assert receiver.state is FAILED
    assert "prefill rank 1 stopped without saying why" in str(receiver.error)
    assert receiver.are_pages_reusable


def test_why_a_rank_failed_is_known_from_whichever_message_comes():
    failed = sender_failed(1, "TransportError", "the cable was cut")
    drained = SenderDrained(1, error="TransportError", reason="the cable was cut")
    for messages in ([failed], [drained], [failed, drained], [drained, failed]):
        receiver = machine()
        run(receiver, connected(0, 1), *messages)
        assert "prefill rank 1 failed with TransportError: the cable was cut" in str(receiver.error)


@pytest.mark.parametrize("event", [AbortRequested("gone"), ConnectFailed(OSError("refused"))])
def test_a_room_that_failed_before_anyone_was_asked_gives_its_pages_back_at_once(event: Any):
    receiver = machine()
    assert run(receiver, event) == []
    assert receiver.state is FAILED
    assert receiver.are_pages_reusable
    assert run(receiver, connected(0)) == [], "nobody is asked any more"
    assert receiver.are_pages_reusable


def test_a_failed_connection_keeps_its_cause():
    receiver = machine()
    cause = OSError("refused")
    run(receiver, ConnectFailed(cause))
    assert isinstance(receiver.error, TransferFailedError)
    assert receiver.error.__cause__ is cause
    assert "connecting failed: OSError: refused" in str(receiver.error)


def test_an_abort_is_sent_to_every_rank_and_pages_wait_for_all_that_may_write():
    receiver = machine()
    commands = run(receiver, connected(0, 2, ranks=3), AbortRequested("the client went away"))
    assert isinstance(receiver.error, TransferAbortedError)
    assert commands == [SendAbort(rank, str(receiver.error)) for rank in (0, 1, 2)]
    assert receiver.undrained == [0, 2]
    run(receiver, SenderDrained(1))
    assert receiver.undrained == [0, 2]
    run(receiver, SenderDrained(2))
    assert receiver.undrained == [0]
    assert not receiver.are_pages_reusable
    run(receiver, SenderDrained(0))
    assert receiver.undrained == []
    assert receiver.are_pages_reusable


def test_what_a_failed_write_had_sent_is_waited_for():
    """This rank may have been frozen while the writer waited, and have to read it from its sockets yet."""
    receiver = machine()
    run(receiver, connected(0, 1, ranks=2), sender_failed(0, "TransportError", "link down"))
    assert run(receiver, SenderDrained(0, after_failure=True)) == [AwaitArrival(0)]
    assert (receiver.undrained, receiver.unanswered) == ([0, 1], [1])
    assert "ranks [1] to confirm" in receiver.waits_for
    run(receiver, SenderDrained(1))
    assert (receiver.undrained, receiver.unanswered) == ([0], [])
    assert "ranks [0] had sent of writes that failed" in receiver.waits_for
    assert not receiver.are_pages_reusable
    assert run(receiver, SenderSettled(0)) == []
    assert receiver.is_done
    assert receiver.waits_for == ""
    assert receiver.are_pages_reusable


@pytest.mark.parametrize("after_failure", [True, False])
def test_the_same_again_neither_ends_that_wait_nor_starts_it_anew(after_failure: bool):
    receiver = machine()
    run(receiver, connected(0, ranks=1), AbortRequested("gone"), SenderDrained(0, after_failure=True))
    assert run(receiver, SenderDrained(0, after_failure=after_failure)) == []
    assert not receiver.are_pages_reusable
    run(receiver, SenderSettled(0))
    assert run(receiver, SenderDrained(0, after_failure=True)) == []
    assert receiver.are_pages_reusable


def test_a_rank_that_is_drained_after_a_failure_without_a_word_ends_the_room_and_is_not_asked_again():
    receiver = machine()
    commands = run(receiver, connected(0, 1, ranks=2), SenderDrained(1, after_failure=True))
    assert receiver.state is FAILED
    assert AwaitArrival(1) in commands
    assert receiver.unanswered == [0]
    assert receiver.undrained == [0, 1]


def test_what_a_rank_had_sent_that_writes_to_no_pages_is_not_waited_for():
    receiver = machine()
    run(
        receiver,
        replace(connected(0, 1, ranks=2), into_pages=frozenset({1})),
        AbortRequested("gone"),
        SenderDrained(1),
    )
    assert receiver.are_pages_reusable
    assert run(receiver, SenderDrained(0, after_failure=True)) == []
    assert receiver.is_done


def test_an_arrival_after_the_abort_does_not_free_the_pages():
    receiver = machine()
    run(receiver, connected(0), AbortRequested("gone"), arrived(0, 0))
    assert (receiver.state, receiver.are_pages_reusable) == (FAILED, False)


def test_a_writer_that_finished_will_not_write_again_even_if_the_room_failed():
    receiver = machine()
    run(receiver, connected(0, 1), finished(1, 5, None), AbortRequested("gone"))
    assert receiver.undrained == [0]
    run(receiver, finished(0, 5, b"t"))
    assert receiver.are_pages_reusable
    assert (receiver.state, receiver.aux) == (FAILED, None)


def test_the_failure_of_one_rank_stops_all_others():
    receiver = machine()
    commands = run(receiver, connected(0, ranks=2), sender_failed(1, "PageError", "page 9 is out of range"))
    assert isinstance(receiver.error, TransferFailedError)
    assert "prefill rank 1 failed with PageError: page 9 is out of range" in str(receiver.error)
    assert [command.rank for command in commands if isinstance(command, SendAbort)] == [0, 1]


def test_a_lost_rank_keeps_the_pages_until_it_is_known_to_be_quiet():
    receiver = machine()
    cause = OSError("no heartbeat")
    commands = run(receiver, connected(0, 1, ranks=2), ConnectFailed(cause))
    assert receiver.error is not None
    assert receiver.error.__cause__ is cause
    assert [command.rank for command in commands if isinstance(command, SendAbort)] == [0, 1]
    run(receiver, SenderDrained(0))
    assert receiver.undrained == [1]
    run(receiver, SenderDrained(1))
    assert receiver.are_pages_reusable


def test_a_room_whose_ranks_never_answer_is_done_once_that_is_overdue_unless_one_may_write_to_its_pages():
    receiver = machine()
    run(receiver, connected(0, 1, ranks=3), ConnectFailed(OSError("no heartbeat")), SenderDrained(1))
    assert receiver.unanswered == [0, 2]
    assert run(receiver, AnswersOverdue()) == []
    assert (receiver.unanswered, receiver.undrained) == ([0], [0]), "it is asked for the sake of the pages"
    assert not receiver.are_pages_reusable
    staged = machine()
    run(staged, replace(connected(0, ranks=2), into_pages=frozenset()), ConnectFailed(OSError("no heartbeat")))
    assert (staged.are_pages_reusable, staged.unanswered, staged.is_done) == (True, [0, 1], False)
    run(staged, AnswersOverdue())
    assert (staged.unanswered, staged.is_done) == ([], True)


def test_an_unexpected_error_of_ours_fails_the_room_like_any_other():
    receiver = machine()
    commands = run(receiver, connected(0, ranks=2), Broke(ZeroDivisionError("division by zero")))
    assert "ZeroDivisionError: division by zero" in str(receiver.error)
    assert [command.rank for command in commands if isinstance(command, SendAbort)] == [0, 1]
    assert receiver.undrained == [0]


def test_the_first_failure_is_the_one_that_is_told():
    receiver = machine()
    run(receiver, connected(0), AbortRequested("first"))
    assert run(receiver, sender_failed(0, "OSError", "second"), AbortRequested("third")) == []
    assert "first" in str(receiver.error)


# ---- parts that come through staging memory ------------------------------------------------------------------------


def test_a_part_that_arrives_is_to_be_scattered():
    receiver = machine()
    assert run(receiver, connected(1), PartArrived(1, 4, 2, is_last=False, work="it")) == [Place("it")]
    assert (receiver.state, receiver.chunks) == (WAITING, 0)


def test_a_chunk_has_arrived_once_all_its_parts_are_in_their_pages():
    receiver = machine()
    run(receiver, connected(0), finished(0, 1, b"t"))
    for part in (2, 0, 1):  # the last may come first
        run(receiver, PartArrived(0, 0, part, is_last=part == 2))
    for _ in range(2):
        assert run(receiver, PartPlaced(0, 0)) == []
        assert (receiver.state, receiver.chunks) == (WAITING, 0)
    run(receiver, PartPlaced(0, 0))
    assert (receiver.state, receiver.chunks) == (SUCCESS, 1)
    assert receiver.are_pages_reusable


def test_a_part_behind_what_its_writer_called_the_last_is_no_error():
    receiver = machine()
    run(receiver, connected(0), PartArrived(0, 0, 5, is_last=True), PartArrived(0, 0, 0, is_last=True))
    run(receiver, PartPlaced(0, 0))
    assert run(receiver, PartPlaced(0, 0)) == []
    assert (receiver.state, receiver.chunks) == (TRANSFERRING, 1)


def test_a_chunk_is_not_complete_before_its_last_part_has_come():
    receiver = machine()
    run(receiver, connected(0), finished(0, 1, b"t"), PartArrived(0, 0, 0, is_last=False), PartPlaced(0, 0))
    assert receiver.state is WAITING
    run(receiver, PartArrived(0, 0, 1, is_last=True), PartPlaced(0, 0))
    assert receiver.state is SUCCESS


def test_chunks_in_parts_and_chunks_in_one_piece_count_alike():
    receiver = machine()
    run(receiver, connected(0, 1), finished(0, 2, b"t"), finished(1, 1, None))
    run(receiver, arrived(0, 1), PartArrived(0, 0, 0, is_last=True), PartArrived(1, 0, 0, is_last=True))
    run(receiver, PartPlaced(1, 0))
    assert (receiver.state, receiver.chunks) == (TRANSFERRING, 2)
    run(receiver, PartPlaced(0, 0))
    assert (receiver.state, receiver.chunks) == (SUCCESS, 3)


@pytest.mark.parametrize(
    "event",
    [
        PartArrived(0, 0, 0, is_last=True),  # of a chunk that is complete
        PartArrived(0, 1, 0, is_last=False),  # that is being scattered
        PartArrived(0, 1, 1, is_last=True),  # that was scattered
        PartArrived(2, 0, 0, is_last=True),  # from a rank that owes us nothing
    ],
)
def test_a_part_that_comes_again_or_from_a_stranger_is_not_wanted(event: PartArrived):
    receiver = machine()
    run(receiver, connected(0), PartArrived(0, 0, 0, is_last=True), PartPlaced(0, 0))
    run(receiver, PartArrived(0, 1, 0, is_last=False), PartArrived(0, 1, 1, is_last=True), PartPlaced(0, 1))
    assert run(receiver, event) == [Drop(None)]
    assert receiver.chunks == 1
    run(receiver, finished(0, 2, b"t"), PartPlaced(0, 1))
    assert receiver.state is SUCCESS


def test_a_part_that_comes_when_the_room_is_over_is_not_wanted():
    receiver = machine()
    run(receiver, connected(0), AbortRequested("gone"))
    assert run(receiver, PartArrived(0, 0, 0, is_last=True, work="it")) == [Drop("it")]
    run(receiver, SenderDrained(0))
    assert receiver.are_pages_reusable


def test_pages_are_not_reusable_while_a_part_is_on_its_way_into_them():
    receiver = machine()
    parts = [PartArrived(0, 0, part, is_last=False) for part in range(2)]
    run(receiver, connected(0), *parts, AbortRequested("gone"), SenderDrained(0))
    assert (receiver.state, receiver.are_pages_reusable) == (FAILED, False)
    reusable = []
    for _ in range(2):
        assert run(receiver, PartPlaced(0, 0)) == []
        reusable.append(receiver.are_pages_reusable)
    assert reusable == [False, True]


def test_a_part_that_cannot_be_put_into_its_pages_fails_the_room():
    receiver = machine()
    cause = OSError("an illegal memory access")
    run(receiver, connected(0, ranks=2), PartArrived(0, 0, 0, is_last=False), PartArrived(0, 0, 1, is_last=True))
    commands = run(receiver, PartPlaced(0, 0, cause, "put into its pages"))
    assert [command.rank for command in commands if isinstance(command, SendAbort)] == [0, 1]
    assert receiver.error is not None
    assert receiver.error.__cause__ is cause
    assert "what prefill rank 0 sent could not be put into its pages" in str(receiver.error)
    run(receiver, SenderDrained(0))
    reusable = [receiver.are_pages_reusable]
    run(receiver, PartPlaced(0, 0))
    assert [*reusable, receiver.are_pages_reusable] == [False, True]


# ---- deadlines -----------------------------------------------------------------------------------------------------


def expires(receiver: ReceiverMachine, at: float, message: str) -> list[ReceiverCommand]:
    assert (receiver.state.is_final, receiver.deadline) == (False, at)
    assert receiver.handle(Tick(), at - 0.001) == []
    assert not receiver.state.is_final
    commands = receiver.handle(Tick(), at)
    assert isinstance(receiver.error, TransferTimeoutError)
    assert message in str(receiver.error)
    assert (receiver.state, receiver.deadline) == (FAILED, None)
    return commands


def test_a_room_that_is_never_connected_ends():
    receiver = machine()
    assert expires(receiver, 10.0, "was not connected within 10 s") == []
    assert receiver.are_pages_reusable


def test_a_room_of_which_nothing_comes_ends():
    receiver = machine()
    run(receiver, connected(0, 1, ranks=2), now=4.0)
    assert len(expires(receiver, 24.0, "nothing came for 20 s")) == 2
    assert not receiver.are_pages_reusable


def test_what_comes_starts_the_wait_anew_and_those_still_missing_are_named():
    receiver = machine()
    run(receiver, connected(0, 1))
    run(receiver, arrived(0, 0), now=4.0)
    run(receiver, finished(0, 1, b"t"), now=6.0)
    expires(receiver, 26.0, "prefill ranks [1] have not finished")


def test_a_repeated_arrival_does_not_put_off_the_deadline():
    receiver = machine()
    run(receiver, connected(0))
    run(receiver, arrived(0, 0), now=4.0)
    run(receiver, arrived(0, 0), now=15.0)
    expires(receiver, 24.0, "nothing came for 20 s")


def test_every_part_that_comes_starts_the_wait_anew():
    receiver = machine()
    run(receiver, connected(0))
    run(receiver, PartArrived(0, 0, 0, is_last=False), now=4.0)
    run(receiver, PartArrived(0, 0, 0, is_last=False), now=15.0)  # again
    expires(receiver, 24.0, "prefill ranks [0] have not finished")


def test_that_one_more_rank_has_stopped_costs_the_same_however_many_there_are():
    def mean(ranks: int) -> int:
        receiver = machine()
        run(receiver, connected(*range(ranks), ranks=ranks), AbortRequested("no"))
        each = [steps_of(partial(receiver.handle, SenderDrained(rank, False), 0.0)) for rank in range(ranks)]
        assert receiver.is_done
        return sum(each) // ranks

    assert mean(64) <= mean(8) + 5
