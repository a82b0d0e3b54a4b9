"""The prefill side of one transfer: each rule one test."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.support.steps import at_every_step

from kvferry.errors import (
    IncompatiblePeerError,
    PageError,
    TransferAbortedError,
    TransferFailedError,
    TransferTimeoutError,
)
from kvferry.layout import RankCoordinates, TokenShare
from kvferry.plan import Demand, Route, Unit
from kvferry.plan.requests.chunks import Chunk, ChunkPart
from kvferry.plan.requests.demands import GroupRequest
from kvferry.plan.requests.moves import Move, ReceiverRequest, moves_of
from kvferry.plan.requests.page_numbers import PageNumbers
from kvferry.protocol.transfer import sender as sender_module
from kvferry.protocol.transfer.events import (
    AbortRequested,
    AwaitTurn,
    Broke,
    ChunkSubmitted,
    FinishSent,
    ReceiverLost,
    ReceiverMessage,
    ReceiverOpened,
    RoomExpected,
    SendDrained,
    SenderCommand,
    SendFailed,
    SendFinish,
    Tick,
    TurnCame,
    Write,
    WriteAdmitted,
    WriteDeferred,
    WriteDone,
    WriteFailed,
    WriteProgressed,
)
from kvferry.protocol.transfer.sender import SenderMachine
from kvferry.protocol.transfer.states import Deadlines, TransferState
from kvferry.protocol.wire.field_types import DecodeRank
from kvferry.protocol.wire.messages import AbortRoom

BOOTSTRAP, WAITING, TRANSFERRING, SUCCESS, FAILED = TransferState
PAGE_TOKENS = 16
DEADLINES = Deadlines(bootstrap_s=10.0, waiting_s=20.0, write_s=5.0)


def machine() -> SenderMachine:
    return SenderMachine(7, rank=3, deadlines=DEADLINES, now=0.0)


def route(name: str = "kv", *, has_slots: bool = False, there: int = PAGE_TOKENS) -> Route:
    here = 1 if has_slots else PAGE_TOKENS
    there = 1 if has_slots else there
    return Route(
        source_group=name,
        destination_group=name,
        source_page_tokens=here,
        destination_page_tokens=there,
        source_share=TokenShare(),
        destination_share=TokenShare(),
        unit_tokens=min(here, there),
        has_slots=has_slots,
    )


def opened_for(
    receiver: str,
    wanted: Mapping[str, GroupRequest],
    routes: Sequence[Route],
    *,
    tokens: int | None = None,
    generation: int = 1,
    expected_receivers: int = 1,
    sends_aux: bool = True,
    depends_on: Mapping[str, bytes] | None = None,
) -> ReceiverOpened:
    return ReceiverOpened(
        receiver=receiver,
        generation=generation,
        expected_receivers=expected_receivers,
        request=ReceiverRequest(tokens=tokens, wanted=wanted, routes=tuple(routes), depends_on=depends_on or {}),
        sends_aux=sends_aux,
        rank=DecodeRank("decode", RankCoordinates()),
    )


def opened(
    receiver: str = "d0",
    *,
    pages: Sequence[int] = (10, 11, 12),
    prefix_pages: int = 0,
    is_writer: bool = True,
    **changes: Any,
) -> ReceiverOpened:
    """A receiver that wants whole pages of one group, in a request of whose length it says nothing."""
    start, stop = prefix_pages * PAGE_TOKENS, (prefix_pages + len(pages)) * PAGE_TOKENS
    kv = GroupRequest("kv", start, start, stop, prefix_pages, PageNumbers.of(np.array(pages, np.int64)))
    return opened_for(receiver, {"kv": kv}, [route()] if is_writer else [], **changes)


def chunk(*pages: int, start: int = 0, is_last: bool = False, aux: bytes | None = None) -> ChunkSubmitted:
    part = ChunkPart("kv", start, np.array(pages, np.int64))
    return ChunkSubmitted(Chunk(number=0, parts=(part,), is_last=is_last, aux=aux))


def followed(event: ChunkSubmitted) -> ChunkSubmitted:
    """The same of a chunk behind which another one waits."""
    return replace(event, is_followed=True)


def aborted(receiver: str, generation: int, reason: str) -> ReceiverMessage:
    return ReceiverMessage(receiver, AbortRoom(room=7, generation=generation, reason=reason))


def run(sender: SenderMachine, *events: Any, now: float = 0.0) -> list[SenderCommand]:
    """The commands for the last of some events."""
    commands: list[SenderCommand] = []
    for event in events:
        commands = sender.handle(event, now)
    return commands


def writes(commands: Sequence[SenderCommand]) -> list[tuple[str, int, list[int], list[int]]]:
    """Writes of whole pages of one group: receiver, sequence, source and destination pages."""
    made = []
    for command in commands:
        assert isinstance(command, Write), commands
        (move,) = command.moves
        assert (command.unit, move.route) == (Unit.WHOLE, 0)
        assert not move.source_units.any()
        assert not move.destination_units.any()
        pages = move.source_pages.tolist(), move.destination_pages.tolist()
        made.append((command.receiver, command.sequence, *pages))
    return made


def failed_of(commands: Sequence[SenderCommand]) -> list[tuple[str, int]]:
    return [(command.receiver, command.generation) for command in commands if isinstance(command, SendFailed)]


def drained_of(commands: Sequence[SenderCommand]) -> list[tuple[str, int]]:
    return [(command.receiver, command.generation) for command in commands if isinstance(command, SendDrained)]


# ---- the way to success --------------------------------------------------------------------------------------------


def test_a_room_goes_from_opening_to_success():
    sender = machine()
    assert sender.state is BOOTSTRAP
    assert run(sender, opened()) == []
    assert sender.state is WAITING
    assert writes(run(sender, chunk(1, 2))) == [("d0", 0, [1, 2], [10, 11])]
    assert sender.state is TRANSFERRING
    assert writes(run(sender, chunk(3, start=2, is_last=True, aux=b"token"))) == [("d0", 1, [3], [12])]
    assert run(sender, WriteDone("d0", 1)) == []
    assert run(sender, WriteDone("d0", 0)) == [SendFinish("d0", 1, 2, b"token")]
    assert (sender.state, sender.is_drained, sender.is_done) == (TRANSFERRING, True, False)
    assert run(sender, FinishSent("d0")) == []
    assert sender.state is SUCCESS
    assert sender.is_done
    assert sender.deadline is None
    assert sender.error is None


def test_chunks_handed_in_before_a_receiver_opens_are_written_once_it_does():
    sender = machine()
    assert run(sender, chunk(1), chunk(2, 3, start=1, is_last=True)) == []
    assert sender.state is BOOTSTRAP
    *made, turn = run(sender, opened())
    assert turn == AwaitTurn()
    assert writes(made) == [("d0", 0, [1], [10])]
    assert writes(run(sender, TurnCame())) == [("d0", 1, [2, 3], [11, 12])]
    assert run(sender, TurnCame()) == []


def test_a_chunk_handed_in_while_earlier_ones_wait_for_a_turn_waits_behind_them():
    sender = machine()
    run(sender, chunk(1), chunk(2, start=1), opened())
    assert writes(run(sender, chunk(3, start=2, is_last=True))) == [("d0", 1, [2], [11])], "its turn is the next one's"
    assert sender.waiting_chunks == 1
    assert run(sender, WriteDone("d0", 0)) == [], "it is not complete"
    assert writes(run(sender, TurnCame())) == [("d0", 2, [3], [12])]
    assert sender.waiting_chunks == 0


def test_chunks_that_wait_leave_in_one_write_up_to_so_many_pages():
    sender = SenderMachine(7, rank=3, deadlines=DEADLINES, now=0.0, joined_pages=3)
    run(sender, chunk(1), chunk(2, start=1), chunk(3, start=2), chunk(4, start=3), chunk(5, 6, start=4, is_last=True))
    *made, turn = run(sender, opened(pages=(11, 12, 13, 14, 15, 16)))
    assert (writes(made), turn) == ([("d0", 0, [1, 2, 3], [11, 12, 13])], AwaitTurn())
    assert writes(run(sender, TurnCame())) == [("d0", 1, [4, 5, 6], [14, 15, 16])]
    run(sender, WriteDone("d0", 1))
    assert run(sender, WriteDone("d0", 0)) == [SendFinish("d0", 1, 2, b"")]


def test_a_chunk_that_is_followed_waits_for_those_behind_it_and_for_no_more():
    sender = SenderMachine(7, rank=3, deadlines=DEADLINES, now=0.0, joined_pages=3)
    run(sender, opened(pages=(11, 12, 13, 14, 15, 16)))
    assert run(sender, followed(chunk(1))) == [AwaitTurn()]
    assert writes(run(sender, chunk(2, start=1))) == [("d0", 0, [1, 2], [11, 12])], "nothing follows"
    assert run(sender, TurnCame()) == []
    assert run(sender, followed(chunk(3, start=2))) == [AwaitTurn()]
    assert writes(run(sender, TurnCame())) == [("d0", 1, [3], [13])], "what follows had not come by then"
    assert writes(run(sender, followed(chunk(4, 5, 6, start=3, is_last=True)))) == [("d0", 2, [4, 5, 6], [14, 15, 16])]


def test_chunks_that_are_enough_for_a_write_wait_for_no_turn():
    sender = SenderMachine(7, rank=3, deadlines=DEADLINES, now=0.0, joined_pages=2)
    run(sender, opened(pages=(11, 12, 13, 14)), followed(chunk(1)))
    assert writes(run(sender, followed(chunk(2, start=1)))) == [("d0", 0, [1, 2], [11, 12])]
    assert run(sender, followed(chunk(3, start=2))) == [], "the turn that is awaited is still to come"
    assert writes(run(sender, TurnCame())) == [("d0", 1, [3], [13])]


def test_a_chunk_waits_for_none_behind_it_that_cannot_leave_with_it():
    sender = SenderMachine(7, rank=3, deadlines=DEADLINES, now=0.0, joined_pages=8)
    run(sender, opened(pages=(11, 12, 13, 14, 15)))
    for each in (followed(chunk(1)), followed(chunk(2, start=1))):
        run(sender, each)
    other = chunk_of(ChunkPart("kv", 2, np.array([3])), ChunkPart("state", 0, np.array([1])))
    assert writes(run(sender, followed(other))) == [("d0", 0, [1, 2], [11, 12])]
    assert writes(run(sender, TurnCame())) == [("d0", 1, [3], [13])]


def test_a_chunk_that_waits_for_those_behind_it_begins_the_time_for_the_next_one_anew():
    sender = SenderMachine(7, rank=3, deadlines=DEADLINES, now=0.0, joined_pages=2)
    run(sender, opened())
    just_before = sender.deadline
    assert just_before is not None
    run(sender, followed(chunk(1)), now=just_before)
    assert run(sender, Tick(), now=just_before + 0.1) == []
    assert sender.state is WAITING


def test_the_aux_data_of_the_last_of_the_chunks_that_leave_together_is_sent():
    sender = SenderMachine(7, rank=3, deadlines=DEADLINES, now=0.0, joined_pages=3)
    run(sender, chunk(1), chunk(2, 3, start=1, is_last=True, aux=b"token"), opened())
    assert run(sender, WriteDone("d0", 0)) == [SendFinish("d0", 1, 1, b"token")]


def test_a_wrong_page_among_chunks_that_wait_fails_the_room():
    sender = SenderMachine(7, rank=3, deadlines=DEADLINES, now=0.0, joined_pages=8)
    run(sender, opened(), followed(chunk(1)))
    run(sender, followed(chunk(-2, start=1)))
    assert isinstance(sender.error, PageError)
    assert run(sender, TurnCame()) == []


def test_chunks_that_wait_for_a_turn_are_dropped_with_the_room():
    sender = machine()
    run(sender, chunk(1), chunk(2, start=1), opened())
    run(sender, AbortRequested("the client went away"))
    assert run(sender, TurnCame()) == []
    assert run(sender, WriteDone("d0", 0)) == [SendDrained("d0", 1)]


def test_nothing_is_written_before_every_receiver_has_opened():
    sender = machine()
    assert run(sender, opened("d0", expected_receivers=2), chunk(1, 2, 3, is_last=True)) == []
    assert writes(run(sender, opened("d1", expected_receivers=2, pages=[20, 21, 22]))) == [
        ("d0", 0, [1, 2, 3], [10, 11, 12]),
        ("d1", 0, [1, 2, 3], [20, 21, 22]),
    ]


def test_each_receiver_gets_what_lies_behind_its_own_prefix():
    sender = machine()
    run(sender, opened("d0", expected_receivers=3, prefix_pages=1, pages=[10, 11]))
    run(sender, opened("d1", expected_receivers=3, prefix_pages=2, pages=[20]))
    run(sender, opened("d2", expected_receivers=3, prefix_pages=3, pages=[]))
    assert writes(run(sender, chunk(1))) == []
    assert writes(run(sender, chunk(2, start=1))) == [("d0", 0, [2], [10])]
    assert writes(run(sender, chunk(3, start=2, is_last=True))) == [("d0", 1, [3], [11]), ("d1", 0, [3], [20])]
    run(sender, WriteDone("d0", 0), WriteDone("d0", 1))
    assert run(sender, WriteDone("d1", 0)) == [
        SendFinish("d0", 1, 2, b""),
        SendFinish("d1", 1, 1, b""),
        SendFinish("d2", 1, 0, b""),
    ]


def test_a_prefix_that_covers_everything_needs_no_write():
    sender = machine()
    run(sender, opened(prefix_pages=3, pages=[]))
    assert run(sender, chunk(1, 2, 3, is_last=True, aux=b"t")) == [SendFinish("d0", 1, 0, b"t")]
    assert sender.state is WAITING
    run(sender, FinishSent("d0"))
    assert sender.state is SUCCESS


@pytest.mark.parametrize("pending", [True, False])
def test_a_request_without_pages_needs_no_write(pending: bool):
    sender = machine()
    events = [chunk(is_last=True, aux=b"t"), opened(pages=[])]
    assert run(sender, *(events if pending else reversed(events))) == [SendFinish("d0", 1, 0, b"t")]


def test_the_first_chunk_may_start_where_the_shortest_prefix_ends():
    sender = machine()
    run(sender, opened("d0", expected_receivers=2, prefix_pages=5, pages=[10]))
    run(sender, opened("d1", expected_receivers=2, prefix_pages=4, pages=[20, 21]))
    assert writes(run(sender, chunk(8, 9, start=4, is_last=True))) == [
        ("d0", 0, [9], [10]),
        ("d1", 0, [8, 9], [20, 21]),
    ]


def test_a_rank_that_owes_nothing_sends_nothing_and_succeeds():
    sender = machine()
    run(sender, opened(is_writer=False, sends_aux=False))
    assert run(sender, chunk(1, 2, 3, is_last=True)) == []
    assert sender.state is SUCCESS


def test_a_rank_that_only_sends_aux_writes_nothing_and_tells_so():
    sender = machine()
    run(sender, opened(is_writer=False))
    assert run(sender, chunk(1, 2)) == []
    assert run(sender, chunk(3, start=2, is_last=True, aux=b"t")) == [SendFinish("d0", 1, 0, b"t")]


def test_a_rank_that_does_not_send_aux_sends_none_even_if_it_has_some():
    sender = machine()
    run(sender, opened(sends_aux=False), chunk(1, 2, 3, is_last=True, aux=b"t"))
    assert run(sender, WriteDone("d0", 0)) == [SendFinish("d0", 1, 1, None)]


def test_receivers_are_told_only_when_no_write_to_any_of_them_is_in_flight():
    sender = machine()
    run(sender, opened("d0", expected_receivers=2), opened("d1", expected_receivers=2))
    run(sender, chunk(1, 2, 3, is_last=True))
    assert run(sender, WriteDone("d1", 0)) == []
    assert not sender.is_drained
    assert [type(command) for command in run(sender, WriteDone("d0", 0))] == [SendFinish, SendFinish]
    assert sender.is_drained


def test_success_waits_until_every_receiver_was_told():
    sender = machine()
    run(sender, opened("d0", expected_receivers=2, pages=[]), opened("d1", expected_receivers=2, pages=[]))
    run(sender, chunk(is_last=True), FinishSent("d1"))
    assert not sender.state.is_final
    run(sender, FinishSent("d0"))
    assert sender.state is SUCCESS


# ---- who may open --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expected", [1, 2])
def test_the_same_open_twice_changes_nothing(expected: int):
    sender = machine()
    run(sender, opened(expected_receivers=expected))
    state = sender.state
    assert run(sender, opened(expected_receivers=expected), now=3.0) == []
    assert (sender.state, sender.deadline) == (state, 10.0 if expected == 2 else 20.0)


def test_a_second_generation_of_a_known_receiver_is_refused_and_the_first_goes_on():
    sender = machine()
    run(sender, opened(generation=1), chunk(1, 2))
    refused, drained = run(sender, opened(generation=2))
    assert isinstance(refused, SendFailed)
    assert "already being sent to d0" in str(refused.error)
    assert (refused.receiver, refused.generation, drained) == ("d0", 2, SendDrained("d0", 2))
    assert writes(run(sender, chunk(3, start=2, is_last=True))) == [("d0", 1, [3], [12])]
    assert sender.state is TRANSFERRING


def test_who_opens_a_room_that_is_complete_is_refused():
    sender = machine()
    run(sender, opened(is_writer=False, sends_aux=False), chunk(1, 2, 3, is_last=True))
    refused, drained = run(sender, opened("d1"))
    assert isinstance(refused, SendFailed)
    assert "already complete on prefill rank 3" in str(refused.error)
    assert drained == SendDrained("d1", 1)
    assert sender.state is SUCCESS


@pytest.mark.parametrize("receiver", ["d0", "d1"])
def test_who_opens_a_room_that_failed_learns_why(receiver: str):
    sender = machine()
    run(sender, opened(), AbortRequested("the client went away"))
    refused, drained = run(sender, opened(receiver, generation=9))
    assert isinstance(refused, SendFailed)
    assert refused.error is sender.error
    assert drained == SendDrained(receiver, 9)


def test_more_receivers_than_announced_fail_the_room_for_all():
    sender = machine()
    run(sender, opened("d0"), chunk(1))
    commands = run(sender, opened("d1", generation=5))
    assert isinstance(sender.error, IncompatiblePeerError)
    assert failed_of(commands) == [("d0", 1), ("d1", 5)]
    assert drained_of(commands) == [("d1", 5)], "d0 still has a write in flight"
    assert drained_of(run(sender, WriteDone("d0", 0))) == [("d0", 1)]


def test_receivers_that_disagree_on_their_number_fail_the_room():
    sender = machine()
    run(sender, opened("d0", expected_receivers=3))
    commands = run(sender, opened("d1", expected_receivers=2))
    assert isinstance(sender.error, IncompatiblePeerError)
    assert failed_of(commands) == drained_of(commands) == [("d0", 1), ("d1", 1)]


# ---- both sides must count the same pages --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([chunk(1, 2, 3, 4)], "4 pages of 16 tokens of the request and more to come where the receiver has room for 3"),
        ([chunk(1, 2), chunk(3, 4, start=2, is_last=True)], "4 pages of 16 tokens of the request where the receiver"),
        (
            [chunk(1, 2, is_last=True)],
            "2 pages of 16 tokens of the request where the receiver has room for 3, 0 tokens",
        ),
        ([chunk(2, 3, start=1, is_last=True)], "starts at page 1 of the request, but the receiver needs what comes"),
    ],
)
def test_pages_that_do_not_match_fail_the_room(chunks: list[ChunkSubmitted], message: str):
    sender = machine()
    run(sender, opened())
    commands = run(sender, *chunks)
    assert isinstance(sender.error, PageError)
    assert message in str(sender.error)
    assert "room 7: " in str(sender.error)
    assert "(prefill rank 3, receiver d0)" in str(sender.error)
    assert failed_of(commands) == [("d0", 1)]


def test_one_receiver_with_other_pages_leaves_no_write_to_the_others_behind():
    sender = machine()
    run(sender, opened("d0", expected_receivers=2), opened("d1", expected_receivers=2, pages=[20, 21]))
    commands = run(sender, chunk(1, 2, 3, is_last=True))
    assert failed_of(commands) == drained_of(commands) == [("d0", 1), ("d1", 1)]
    assert not [command for command in commands if isinstance(command, Write)]
    assert sender.is_done


def test_a_chunk_that_does_not_fit_lets_the_one_before_it_land_first():
    sender = machine()
    run(sender, chunk(1, 2), chunk(3, 4, start=2, is_last=True))
    assert [type(command) for command in run(sender, opened())] == [Write, AwaitTurn]
    assert [type(command) for command in run(sender, TurnCame())] == [SendFailed]
    assert not sender.is_done
    assert run(sender, WriteDone("d0", 0)) == [SendDrained("d0", 1)]
    assert sender.is_done


# ---- failures ------------------------------------------------------------------------------------------------------


def test_a_failed_write_fails_the_room_and_keeps_the_cause():
    sender = machine()
    run(sender, opened(), chunk(1), chunk(2, start=1))
    cause = OSError("link down")
    commands = run(sender, WriteFailed("d0", 0, cause))
    assert isinstance(sender.error, TransferFailedError)
    assert sender.error.__cause__ is cause
    assert "OSError: link down" in str(sender.error)
    assert failed_of(commands) == [("d0", 1)]
    assert not drained_of(commands)
    assert drained_of(run(sender, WriteDone("d0", 1))) == [("d0", 1)]


def test_a_receiver_is_not_drained_while_what_was_sent_of_a_failed_write_may_arrive():
    sender = machine()
    run(sender, opened("d0", expected_receivers=2), opened("d1", expected_receivers=2), chunk(1))
    run(sender, WriteDone("d1", 0))
    commands = run(sender, WriteFailed("d0", 0, OSError("link down"), may_arrive=True))
    assert sender.state is FAILED
    assert failed_of(commands) == [("d0", 1), ("d1", 1)]
    assert drained_of(commands) == [("d1", 1)]
    assert not sender.is_done
    assert run(sender, aborted("d0", 1, "it failed")) == []
    assert run(sender, WriteFailed("d0", 0, OSError("link down"))) == [SendDrained("d0", 1, after_failure=True)]
    assert sender.is_done


def test_a_receiver_hears_with_every_drained_that_a_write_to_it_failed_and_others_do_not():
    """It may have been frozen all the time, and have to read from its sockets yet what had been sent."""
    sender = machine()
    run(sender, opened("d0", expected_receivers=2), opened("d1", expected_receivers=2), chunk(1), chunk(2, start=1))
    failed = OSError("link down")
    run(sender, WriteDone("d1", 0), WriteFailed("d0", 0, failed, may_arrive=True), WriteFailed("d0", 0, failed))
    assert run(sender, WriteDone("d0", 1)) == [SendDrained("d0", 1, after_failure=True)]
    assert run(sender, WriteDone("d1", 1)) == [SendDrained("d1", 1)]
    assert run(sender, aborted("d0", 1, "again")) == [SendDrained("d0", 1, after_failure=True)]
    assert run(sender, aborted("d1", 1, "again")) == [SendDrained("d1", 1)]


def test_a_write_of_which_nothing_was_sent_leaves_nothing_to_wait_for():
    sender = machine()
    run(sender, opened(), chunk(1))
    assert run(sender, WriteFailed("d0", 0, OSError("not posted")))[-1] == SendDrained("d0", 1)


def test_drained_says_why_the_room_failed_in_case_nothing_else_arrives():
    sender = machine()
    run(sender, opened(), chunk(1))
    *_, drained = run(sender, WriteFailed("d0", 0, OSError("link down")))
    assert isinstance(drained, SendDrained)
    assert drained.error is sender.error is not None
    *_, drained = run(sender, opened("d1", generation=2))
    assert isinstance(drained, SendDrained)
    assert drained.error is sender.error


def test_a_finish_that_cannot_be_told_fails_the_room():
    sender = machine()
    run(sender, opened("d0", expected_receivers=2, pages=[]), opened("d1", expected_receivers=2, pages=[]))
    run(sender, chunk(is_last=True), FinishSent("d0"))
    commands = run(sender, FinishSent("d1", OSError("gone")))
    assert sender.state is FAILED
    assert failed_of(commands) == drained_of(commands) == [("d0", 1), ("d1", 1)]
    assert run(sender, FinishSent("d1")) == []


def test_an_abort_of_our_caller_fails_the_room_for_every_receiver():
    sender = machine()
    run(sender, opened("d0", expected_receivers=2), opened("d1", expected_receivers=2, is_writer=False), chunk(1))
    commands = run(sender, AbortRequested("the client went away"))
    assert isinstance(sender.error, TransferAbortedError)
    assert failed_of(commands) == [("d0", 1), ("d1", 1)]
    assert drained_of(commands) == [("d1", 1)]
    assert run(sender, chunk(2, start=1)) == []
    assert run(sender, WriteDone("d0", 0)) == [SendDrained("d0", 1)]


def test_a_receiver_that_aborts_is_not_told_of_the_failure_but_when_it_is_drained():
    sender = machine()
    run(sender, opened("d0", expected_receivers=2), opened("d1", expected_receivers=2), chunk(1))
    commands = run(sender, aborted("d0", 1, "timeout"))
    assert isinstance(sender.error, TransferAbortedError)
    assert failed_of(commands) == [("d1", 1)]
    assert drained_of(commands) == []
    assert run(sender, WriteDone("d0", 0)) == [SendDrained("d0", 1)]
    assert run(sender, WriteFailed("d1", 0, OSError())) == [SendDrained("d1", 1)]


def test_an_abort_before_every_receiver_opened_ends_the_room():
    sender = machine()
    run(sender, chunk(1), opened("d0", expected_receivers=2))
    assert run(sender, aborted("d0", 1, "timeout")) == [SendDrained("d0", 1)]
    assert sender.is_done


def test_an_abort_that_crosses_success_is_answered_and_changes_nothing():
    sender = machine()
    run(sender, opened(pages=[]), chunk(is_last=True), FinishSent("d0"))
    assert run(sender, aborted("d0", 1, "timeout")) == [SendDrained("d0", 1)]
    assert sender.state is SUCCESS


@pytest.mark.parametrize(
    "event",
    [
        AbortRequested("too late"),
        Broke(ZeroDivisionError()),
        FinishSent("d0", OSError("said after all")),
        ReceiverLost("d0", OSError("no heartbeat")),
        Tick(),
    ],
)
def test_what_comes_after_success_changes_nothing(event: Any):
    sender = machine()
    run(sender, opened(pages=[]), chunk(is_last=True), FinishSent("d0"))
    assert run(sender, event, now=1000.0) == []
    assert (sender.state, sender.error) == (SUCCESS, None)


def test_an_abort_between_the_last_write_and_success_fails_the_room():
    sender = machine()
    run(sender, opened(), chunk(1, 2, 3, is_last=True), WriteDone("d0", 0))
    assert run(sender, aborted("d0", 1, "timeout")) == [SendDrained("d0", 1)]
    assert run(sender, FinishSent("d0")) == []
    assert sender.state is FAILED


@pytest.mark.parametrize(("receiver", "generation"), [("d0", 2), ("d1", 1)])
def test_an_abort_of_another_generation_or_receiver_is_answered_and_changes_nothing(receiver: str, generation: int):
    sender = machine()
    run(sender, opened(), chunk(1))
    assert run(sender, aborted(receiver, generation, "late")) == [SendDrained(receiver, generation)]
    assert sender.state is TRANSFERRING


def test_drained_is_said_once_and_again_to_whom_asks_again():
    sender = machine()
    run(sender, opened(), chunk(1), aborted("d0", 1, "timeout"))
    assert run(sender, WriteDone("d0", 0)) == [SendDrained("d0", 1)]
    for event in (Tick(), AbortRequested("late"), Broke(OSError())):
        assert run(sender, event, now=1000.0) == []
    assert run(sender, aborted("d0", 1, "again")) == [SendDrained("d0", 1)]


def test_who_aborts_again_before_the_last_write_ended_is_answered_once_it_has():
    sender = machine()
    run(sender, opened(), chunk(1), aborted("d0", 1, "timeout"))
    assert run(sender, aborted("d0", 1, "again")) == []
    assert run(sender, WriteDone("d0", 0)) == [SendDrained("d0", 1)]


def test_an_unexpected_error_of_ours_fails_the_room_like_any_other():
    sender = machine()
    run(sender, opened(), chunk(1))
    commands = run(sender, Broke(ZeroDivisionError("division by zero")))
    assert "ZeroDivisionError: division by zero" in str(sender.error)
    assert failed_of(commands) == [("d0", 1)]
    assert run(sender, WriteDone("d0", 0)) == [SendDrained("d0", 1)]


def test_a_lost_receiver_fails_the_room_for_the_others_and_is_told_nothing():
    sender = machine()
    run(sender, opened("d0", expected_receivers=2), opened("d1", expected_receivers=2), chunk(1))
    commands = run(sender, ReceiverLost("d0", OSError("no heartbeat")))
    assert "d0 is gone: OSError: no heartbeat" in str(sender.error)
    assert failed_of(commands) == [("d1", 1)]
    assert drained_of(commands) == []
    assert run(sender, WriteFailed("d0", 0, OSError())) == []
    assert not sender.is_done
    assert run(sender, WriteDone("d1", 0)) == [SendDrained("d1", 1)]
    assert sender.is_done


def test_a_lost_receiver_that_got_all_that_it_was_to_get_leaves_the_others_alone():
    sender = machine()
    run(sender, opened("d0", expected_receivers=2, pages=[]), opened("d1", expected_receivers=2, pages=[]))
    run(sender, chunk(is_last=True), FinishSent("d0"))
    assert run(sender, ReceiverLost("d0", OSError())) == []
    run(sender, FinishSent("d1"))
    assert sender.state is SUCCESS


def test_a_lost_receiver_that_was_owed_nothing_leaves_the_others_alone():
    sender = machine()
    run(sender, opened("d0", expected_receivers=2, is_writer=False, sends_aux=False))
    assert run(sender, ReceiverLost("d0", OSError())) == []
    run(sender, opened("d1", expected_receivers=2), chunk(1, 2, 3, is_last=True))
    assert run(sender, WriteDone("d1", 0)) == [SendFinish("d1", 1, 1, b"")]
    assert failed_of(run(sender, AbortRequested("late"))) == [("d1", 1)], "nobody is there to tell"


def test_a_receiver_lost_after_the_failure_is_told_nothing_either():
    sender = machine()
    run(sender, opened(), chunk(1), AbortRequested("the client went away"))
    assert run(sender, ReceiverLost("d0", OSError())) == []
    assert isinstance(sender.error, TransferAbortedError)
    assert run(sender, WriteFailed("d0", 0, OSError())) == []
    assert sender.is_done


def test_the_loss_of_a_stranger_or_of_a_served_receiver_changes_nothing():
    sender = machine()
    run(sender, opened(pages=[]))
    assert run(sender, ReceiverLost("d9", OSError())) == []
    run(sender, chunk(is_last=True), FinishSent("d0"))
    assert run(sender, ReceiverLost("d0", OSError())) == []
    assert sender.state is SUCCESS


def test_the_first_failure_is_the_one_that_is_told():
    sender = machine()
    run(sender, opened(), chunk(1), AbortRequested("first"))
    run(sender, WriteFailed("d0", 0, OSError("second")), AbortRequested("third"))
    assert "first" in str(sender.error)


def test_a_page_that_appears_twice_in_a_chunk_fails_the_room():
    sender = machine()
    commands = run(sender, opened(pages=[0, 1, 2]), chunk(3, 4, 3, is_last=True))
    assert [type(command) for command in commands] == [SendFailed, SendDrained]
    assert isinstance(sender.error, PageError)
    assert "page 3 appears 2 times" in str(sender.error)


# ---- deadlines -----------------------------------------------------------------------------------------------------


def test_a_room_that_a_request_waits_for_is_kept_from_the_last_time_on_that_somebody_said_so():
    sender = machine()
    for said_at, deadline in ((8.0, 18.0), (3.0, 18.0), (17.0, 27.0)):
        assert sender.handle(RoomExpected(said_at), said_at) == []
        assert (sender.state, sender.deadline) == (BOOTSTRAP, deadline)
    assert sender.handle(Tick(), 26.9) == []
    sender.handle(Tick(), 27.0)
    assert isinstance(sender.error, TransferTimeoutError)
    sender.handle(RoomExpected(27.5), 27.5)
    assert sender.state is FAILED


def test_no_other_wait_gets_longer_by_it():
    sender = machine()
    sender.handle(opened(), 1.0)
    sender.handle(RoomExpected(20.0), 20.0)
    assert sender.deadline == 21.0
    sender.handle(Tick(), 21.0)
    assert sender.state is FAILED


def expires(sender: SenderMachine, at: float, message: str) -> list[SenderCommand]:
    assert sender.deadline == at
    assert sender.handle(Tick(), at - 0.001) == []
    assert not sender.state.is_final
    commands = sender.handle(Tick(), at)
    assert isinstance(sender.error, TransferTimeoutError)
    assert message in str(sender.error)
    assert "rank 3" in str(sender.error)
    return commands


def test_a_room_that_nobody_opens_ends():
    sender = machine()
    run(sender, chunk(1), now=4.0)
    expires(sender, 10.0, "0 of an unknown number of decode ranks opened it within 10 s")
    assert sender.is_done


def test_a_room_that_not_all_open_ends_and_those_who_did_are_told():
    sender = machine()
    run(sender, opened(expected_receivers=2), now=4.0)
    commands = expires(sender, 10.0, "1 of 2 decode ranks")
    assert failed_of(commands) == drained_of(commands) == [("d0", 1)]


def test_a_room_without_chunks_ends():
    sender = machine()
    run(sender, opened(), now=4.0)
    expires(sender, 24.0, "no chunk was submitted for 20 s")


def test_every_chunk_starts_the_wait_anew():
    sender = machine()
    run(sender, opened())
    run(sender, chunk(1), now=4.0)
    run(sender, WriteDone("d0", 0), now=6.0)
    expires(sender, 26.0, "no chunk was submitted for 20 s")


def test_a_write_that_gets_on_is_given_its_time_anew():
    sender = machine()
    run(sender, opened())
    run(sender, chunk(1), now=1.0)
    for now in (4.0, 8.0, 12.0):
        assert run(sender, WriteProgressed("d0"), now=now) == []
    commands = expires(sender, 17.0, "writes to ['d0'] did not end within 5 s")
    assert drained_of(commands) == [], "the rest of it may still land"
    assert run(sender, WriteProgressed("d0"), now=18.0) == []
    assert not sender.is_drained


def test_a_write_that_ends_gives_those_behind_it_their_time_anew():
    """Thirty that are posted together and end one after the other, each in time."""
    sender = machine()
    run(sender, opened(pages=range(30)))
    for page in range(30):
        run(sender, chunk(page, start=page), now=1.0)
    for sequence in range(29):
        now = 1.0 + 4.0 * (sequence + 1)
        assert run(sender, Tick(), WriteDone("d0", sequence), now=now) == []
    expires(sender, 1.0 + 4.0 * 29 + 5.0, "writes to ['d0'] did not end within 5 s")


def test_each_receiver_has_a_time_of_its_own():
    sender = machine()
    run(sender, opened("d0", expected_receivers=2), opened("d1", expected_receivers=2), chunk(1), now=1.0)
    run(sender, WriteProgressed("d1"), now=4.0)
    expires(sender, 6.0, "writes to ['d0'] did not end within 5 s")


def test_a_write_that_is_through_does_not_get_on_again():
    sender = machine()
    run(sender, opened())
    run(sender, chunk(1), WriteDone("d0", 0), now=1.0)
    run(sender, WriteProgressed("d0"), now=4.0)
    assert sender.is_drained
    expires(sender, 21.0, "no chunk was submitted for 20 s")


def test_a_write_that_is_posted_starts_no_time_anew():
    """Else a receiver that stands still would be written to for ever."""
    sender = machine()
    run(sender, opened())
    run(sender, chunk(1), now=1.0)
    run(sender, chunk(2, start=1), now=4.0)
    commands = expires(sender, 6.0, "writes to ['d0'] did not end within 5 s")
    assert drained_of(commands) == [], "the writes may still land"
    assert sender.deadline is None
    assert not sender.is_done
    run(sender, WriteDone("d0", 1), now=7.0)
    assert run(sender, WriteDone("d0", 0), now=99.0) == [SendDrained("d0", 1)]


def test_the_first_write_after_a_pause_has_all_of_its_time():
    sender = machine()
    run(sender, opened())
    run(sender, chunk(1), now=1.0)
    run(sender, WriteDone("d0", 0), now=2.0)
    run(sender, chunk(2, start=1), now=19.0)
    expires(sender, 24.0, "writes to ['d0'] did not end within 5 s")


@pytest.mark.parametrize("event", [WriteProgressed("d0"), WriteFailed("d1", 99, OSError()), Tick()])
def test_what_an_event_costs_does_not_grow_with_the_writes_in_flight(event: Any):
    """Counted in lines that run: no loop over writes."""

    def lines(count: int) -> int:
        sender = machine()
        run(sender, opened("d0", pages=range(count), expected_receivers=2))
        run(sender, opened("d1", pages=range(count), expected_receivers=2))
        for page in range(count):
            run(sender, chunk(page, start=page))
        made = 0

        def trace(frame: Any, what: str, _: Any) -> Any:
            nonlocal made
            made += what in ("line", "call")
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            sender.handle(event, 1.0)
            _ = sender.deadline
        finally:
            sys.settrace(before)
        return made

    assert lines(400) == lines(4)


def test_a_write_that_is_deferred_has_its_time_from_when_it_is_admitted():
    sender = machine()
    run(sender, opened())
    run(sender, chunk(1), WriteDeferred("d0", 0), now=1.0)
    assert not sender.is_drained
    assert sender.waits_for == "other writes to end before those to d0"
    run(sender, WriteProgressed("d0"), now=9.0)
    assert sender.deadline == 29.0
    run(sender, WriteAdmitted("d0", 0), now=12.0)
    expires(sender, 17.0, "writes to ['d0'] did not end within 5 s")
    assert run(sender, WriteDone("d0", 0), now=18.0) == [SendDrained("d0", 1)]


def test_a_deferred_write_whose_turn_never_comes_ends_the_room_and_names_the_bounds():
    sender = machine()
    run(sender, opened())
    run(sender, chunk(1), WriteDeferred("d0", 0), now=1.0)
    commands = expires(sender, 21.0, "(KVFERRY_DIRECT_MIB, KVFERRY_DIRECT_RECEIVER_MIB)")
    assert drained_of(commands) == [("d0", 1)], "it will never be posted"
    assert sender.is_done


def test_what_is_known_late_of_others_progress_takes_nothing_back():
    sender = machine()
    run(sender, opened(), chunk(1), now=3.0)
    run(sender, WriteProgressed("d0"), now=1.0)
    expires(sender, 8.0, "writes to ['d0'] did not end within 5 s")


def test_a_room_with_a_deferred_write_is_not_complete():
    sender = machine()
    run(sender, opened(pages=[10, 11]), chunk(1), WriteDeferred("d0", 0))
    run(sender, chunk(2, start=1, is_last=True))
    assert run(sender, WriteDone("d0", 1)) == []
    run(sender, WriteAdmitted("d0", 0))
    assert run(sender, WriteDone("d0", 0)) == [SendFinish("d0", 1, 2, b"")]


def test_a_failed_room_forgets_deferred_writes_and_waits_for_those_in_flight():
    sender = machine()
    run(sender, opened(), chunk(1), chunk(2, start=1), WriteDeferred("d0", 1))
    commands = run(sender, AbortRequested("the client went away"))
    assert drained_of(commands) == []
    assert run(sender, WriteDone("d0", 0)) == [SendDrained("d0", 1)]
    assert sender.is_done


def test_a_finish_that_is_never_sent_ends_the_room_and_says_so():
    sender = machine()
    run(sender, opened(pages=[]), now=1.0)
    run(sender, chunk(is_last=True), now=2.0)
    expires(sender, 22.0, "['d0'] could not be notified within 20 s that it is complete")


# ---- several groups, and both units --------------------------------------------------------------------------------


def part(name: str, start: int, *pages: int) -> ChunkPart:
    return ChunkPart(name, start, np.array(pages, np.int64))


def chunk_of(*parts: ChunkPart, is_last: bool = False, number: int = 0) -> ChunkSubmitted:
    return ChunkSubmitted(Chunk(number=number, parts=parts, is_last=is_last))


def wanted(demand: Demand, first_page: int, *pages: int) -> GroupRequest:
    numbers = PageNumbers.of(np.array(pages, np.int64))
    return GroupRequest("kv", demand.held, demand.start, demand.stop, first_page, numbers)


def units(commands: Sequence[SenderCommand]) -> list[tuple[int, int, Unit, list[int]]]:
    """Writes: the chunk's number, the sequence, the unit and how many of it each move has."""
    assert all(isinstance(command, Write) for command in commands), commands
    return [
        (command.chunk, command.sequence, command.unit, [len(move.source_pages) for move in command.moves])
        for command in commands
        if isinstance(command, Write)
    ]


def hybrid(receiver: str = "d0", **changes: Any) -> ReceiverOpened:
    """Wants 70 tokens behind 20 that it holds, of a window of 24 tokens the last, and the state."""
    return opened_for(
        receiver,
        {
            "kv": wanted(Demand(20, 20, 70), 1, 11, 12, 13, 14),
            "window": wanted(Demand(20, 46, 70), 2, 22, 23, 24),
            "state": wanted(Demand(0, 0, 1), 0, 31),
        },
        [route("kv"), route("window"), route("state", has_slots=True)],
        tokens=70,
        **changes,
    )


def test_a_chunk_that_ends_between_units_takes_two_writes_and_both_are_counted():
    sender = machine()
    run(sender, hybrid())
    # 12 tokens behind the prefix fill no page on their own; the window is not needed yet.
    assert units(run(sender, chunk_of(part("kv", 0, 1, 2), part("window", 0, 5)))) == [(0, 0, Unit.TOKEN, [12])]
    made = run(sender, chunk_of(part("kv", 2, 3, 4, 5), part("window", 2, 6, 7, 8), number=1))
    assert units(made) == [(1, 1, Unit.WHOLE, [3, 3])], "a window may begin before its first token in its page"
    assert units(run(sender, chunk_of(part("state", 0, 9), is_last=True, number=2))) == [(2, 2, Unit.WHOLE, [1])]
    run(sender, WriteDone("d0", 0), WriteDone("d0", 2))
    assert not sender.is_drained
    assert run(sender, WriteDone("d0", 1)) == [SendFinish("d0", 1, 3, b"")]


def test_two_writes_of_one_chunk_are_both_in_flight():
    sender = machine()
    run(sender, hybrid())
    made = run(
        sender, chunk_of(part("kv", 0, 1, 2, 3, 4, 5), part("window", 2, 6, 7, 8), part("state", 0, 9), is_last=True)
    )
    assert units(made) == [(0, 0, Unit.WHOLE, [3, 3, 1]), (0, 1, Unit.TOKEN, [12])]
    whole, tokens = made
    assert isinstance(whole, Write)
    assert isinstance(tokens, Write)
    assert [move.route for move in whole.moves] == [0, 1, 2]
    assert [(move.route, move.source_units.tolist()) for move in tokens.moves] == [(0, list(range(4, 16)))]
    assert run(sender, WriteDone("d0", 1)) == []
    assert not sender.is_drained, "the units are still on their way"
    assert run(sender, WriteDone("d0", 0)) == [SendFinish("d0", 1, 2, b"")]


def test_a_failed_write_of_one_unit_waits_for_the_other_before_pages_are_free():
    sender = machine()
    run(sender, hybrid(), chunk_of(part("kv", 0, 1, 2, 3)))
    commands = run(sender, WriteFailed("d0", 1, OSError("link down")))
    assert (failed_of(commands), drained_of(commands)) == ([("d0", 1)], [])
    assert run(sender, WriteDone("d0", 0)) == [SendDrained("d0", 1)]


def test_a_slot_that_was_never_handed_in_fails_the_room():
    sender = machine()
    run(sender, hybrid())
    run(sender, chunk_of(part("kv", 0, 1, 2, 3, 4, 5), part("window", 2, 6, 7, 8), is_last=True))
    assert isinstance(sender.error, PageError)
    assert "room 7, group 'state': 0 slots of the request where the receiver has room for 1" in str(sender.error)


def test_a_slot_that_the_receiver_does_not_want_is_not_sent():
    sender = machine()
    everything = wanted(Demand(0, 0, 16), 0, 10)
    run(
        sender,
        opened_for(
            "d0",
            {"kv": everything, "state": wanted(Demand(0, 0, 0), 0)},
            [route(), route("state", has_slots=True)],
            tokens=16,
        ),
    )
    assert units(run(sender, chunk_of(part("kv", 0, 1), part("state", 0, 3), is_last=True))) == [
        (0, 0, Unit.WHOLE, [1])
    ]


def test_a_gap_in_a_window_before_its_first_token_does_not_matter():
    sender = machine()
    run(sender, hybrid())
    run(sender, chunk_of(part("kv", 0, 1, 2, 3, 4), part("window", 0, 5)))
    made = run(sender, chunk_of(part("window", 2, 6, 7, 8), part("kv", 4, 5), part("state", 0, 9), is_last=True))
    assert units(made) == [(0, 2, Unit.WHOLE, [1, 3, 1])]


@pytest.mark.parametrize("before", [[part("window", 0, 5)], [part("window", 0, 5, 6)], []])
def test_a_gap_in_a_window_that_matters_fails_the_room(before: list[ChunkPart]):
    sender = machine()
    run(sender, hybrid(), chunk_of(*before), chunk_of(part("window", 3, 7, 8)))
    assert isinstance(sender.error, PageError)
    assert "group 'window': a chunk starts at page 3 of the request" in str(sender.error)
    assert "what comes before, from page 2 on" in str(sender.error)


def test_a_group_that_ends_too_early_fails_the_room_with_its_name():
    sender = machine()
    run(sender, hybrid(), chunk_of(part("kv", 0, 1, 2, 3, 4, 5), part("state", 0, 9)))
    run(sender, chunk_of(part("window", 2, 6, 7), is_last=True))
    assert "group 'window': 4 pages of 16 tokens of the request where the receiver has room for 5" in str(sender.error)


def test_a_group_keeps_its_place_while_chunks_have_nothing_of_it():
    sender = machine()
    run(sender, hybrid(), chunk_of(part("kv", 0, 1, 2, 3, 4, 5)), chunk_of(part("window", 2, 6, 7, 8)))
    made = run(sender, chunk_of(part("state", 0, 9), is_last=True))
    assert units(made) == [(0, 3, Unit.WHOLE, [1])]
    assert sender.error is None


def test_each_receiver_may_want_other_groups():
    sender = machine()
    run(sender, hybrid("d0", expected_receivers=2))
    run(
        sender,
        opened_for(
            "d1",
            {
                "kv": wanted(Demand(70, 70, 70), 5),
                "window": wanted(Demand(70, 70, 70), 5),
                "state": wanted(Demand(0, 0, 1), 0, 8),
            },
            [route("state", has_slots=True)],
            tokens=70,
            expected_receivers=2,
            sends_aux=False,
        ),
    )
    made = run(
        sender, chunk_of(part("kv", 0, 1, 2, 3, 4, 5), part("window", 2, 6, 7, 8), part("state", 0, 9), is_last=True)
    )
    assert [(command.receiver, command.sequence) for command in made if isinstance(command, Write)] == [
        ("d0", 0),
        ("d0", 1),
        ("d1", 0),
    ]
    run(sender, WriteDone("d0", 0), WriteDone("d0", 1))
    assert run(sender, WriteDone("d1", 0)) == [SendFinish("d0", 1, 2, b""), SendFinish("d1", 1, 1, None)]


@pytest.mark.parametrize(("there", "sent"), [(4, [4]), (64, [1])])
def test_pages_of_another_size_are_moved_in_the_smaller_units(there: int, sent: list[int]):
    sender = machine()
    pages = range(16 // there or 1)
    run(sender, opened_for("d0", {"kv": wanted(Demand(0, 0, 16), 0, *pages)}, [route(there=there)], tokens=16))
    assert units(run(sender, chunk_of(part("kv", 0, 3), is_last=True))) == [(0, 0, Unit.WHOLE, sent)]


def test_a_page_may_appear_in_two_groups_but_not_twice_in_one():
    sender = machine()
    run(sender, hybrid(), chunk_of(part("kv", 0, 1, 2), part("window", 0, 1, 2)))
    assert sender.error is None
    run(sender, chunk_of(part("kv", 2, 3), part("window", 2, 5, 5)))
    assert "page 5 appears 2 times" in str(sender.error)


# ---- lengths, and errors of our own --------------------------------------------------------------------------------


def test_a_length_that_differs_from_the_receivers_fails_the_room():
    sender = SenderMachine(7, rank=3, deadlines=DEADLINES, now=0.0, tokens=48)
    kv = GroupRequest("kv", 0, 0, 47, 0, PageNumbers.of(np.array([10, 11, 12], np.int64)))
    commands = run(sender, opened_for("d0", {"kv": kv}, [route()], tokens=47))
    assert isinstance(sender.error, PageError)
    assert "48 tokens on prefill rank 3, 47 on d0" in str(sender.error)
    assert failed_of(commands) == drained_of(commands) == [("d0", 1)]


MINE = {"prompt": b"1", "LoRA adapter": b"2"}


def that_depends_on(depends_on: Mapping[str, bytes]) -> SenderMachine:
    return SenderMachine(7, rank=3, deadlines=DEADLINES, now=0.0, depends_on=depends_on)


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({"prompt": b"1", "LoRA adapter": b"3"}, "the decode side's request has another LoRA adapter than the prefill"),
        ({"prompt": b"1"}, "the prefill side's request names a LoRA adapter, the decode side's names none"),
        ({**MINE, "cache salt": b"4"}, "the decode side's request names a cache salt, the prefill side's names none"),
        (
            {},
            "names a LoRA adapter, the decode side's names none; the prefill side's request names a prompt, the decode",
        ),
    ],
    ids=["another", "none there", "none here", "nothing"],
)
def test_a_request_whose_cache_depends_on_something_else_fails_before_anything_is_sent(
    theirs: Mapping[str, bytes], said: str
):
    sender = that_depends_on(MINE)
    run(sender, chunk(1, 2, 3, is_last=True))
    commands = run(sender, opened(depends_on=theirs))
    assert isinstance(sender.error, IncompatiblePeerError)
    assert said in str(sender.error)
    assert "(prefill rank 3, d0): send both sides the same request" in str(sender.error)
    assert failed_of(commands) == drained_of(commands) == [("d0", 1)]
    assert sender.is_done


def test_a_request_that_depends_on_the_same_is_sent():
    sender = that_depends_on(MINE)
    run(sender, opened(depends_on=dict(reversed(MINE.items()))))
    assert writes(run(sender, chunk(1, 2, 3, is_last=True))) == [("d0", 0, [1, 2, 3], [10, 11, 12])]


def test_one_of_several_receivers_whose_request_is_another_fails_all_of_them():
    sender = that_depends_on(MINE)
    run(sender, opened("d0", depends_on=MINE, expected_receivers=3))
    commands = run(sender, opened("d1", depends_on={"prompt": b"9"}, expected_receivers=3))
    assert failed_of(commands) == drained_of(commands) == [("d0", 1), ("d1", 1)]
    late = run(sender, opened("d2", depends_on=MINE, expected_receivers=3))
    assert failed_of(late) == drained_of(late) == [("d2", 1)]
    assert all(command.error is sender.error for command in late if isinstance(command, SendFailed))


@pytest.mark.parametrize("tokens", [48, None])
def test_a_length_that_the_receiver_shares_or_does_not_say_is_no_obstacle(tokens: int | None):
    sender = SenderMachine(7, rank=3, deadlines=DEADLINES, now=0.0, tokens=48)
    kv = GroupRequest("kv", 0, 0, 48, 0, PageNumbers.of(np.array([10, 11, 12], np.int64)))
    run(sender, opened_for("d0", {"kv": kv}, [route()], tokens=tokens))
    assert writes(run(sender, chunk(1, 2, 3, is_last=True))) == [("d0", 0, [1, 2, 3], [10, 11, 12])]


def test_an_error_in_planning_for_one_receiver_leaves_no_write_of_another_behind(monkeypatch: pytest.MonkeyPatch):
    """What was never posted never ends: the other receiver's pages would stay in quarantine for ever."""
    right = moves_of

    def planned(chunk: Chunk, request: ReceiverRequest) -> dict[Unit, tuple[Move, ...]]:
        if request.tokens == 32:
            raise MemoryError("planted")
        return right(chunk, request)

    monkeypatch.setattr(sender_module, "moves_of", planned)
    sender = machine()
    kv = GroupRequest("kv", 0, 0, 32, 0, PageNumbers.of(np.array([10, 11], np.int64)))
    run(
        sender,
        opened("d0", pages=(20, 21), expected_receivers=2),
        opened_for("d1", {"kv": kv}, [route()], tokens=32, expected_receivers=2),
    )
    with pytest.raises(MemoryError):
        run(sender, chunk(1, 2, is_last=True))
    commands = run(sender, Broke(MemoryError("planted")))
    assert sender.is_drained
    assert sorted(drained_of(commands)) == [("d0", 1), ("d1", 1)]


def test_what_a_room_waits_for_can_be_read_while_decode_ranks_open_it() -> None:
    room = machine()
    room.handle(opened("d0", expected_receivers=10_000), 0.0)
    more = (opened(f"d{number}", expected_receivers=10_000) for number in itertools.count(1))
    at_every_step(lambda: (room.is_drained, room.waits_for), lambda: room.handle(next(more), 0.0))
    assert next(more).receiver != "d1"
