"""Which blocks leave and come, as vLLM's scheduler schedules, preempts, aborts and finishes requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from kvferry.engines.vllm.layouts import CacheGroup
from kvferry.engines.vllm.parameters import LARGEST_ROOM, ROOM, receive_parameters, send_parameters
from kvferry.engines.vllm.scheduling import SchedulerSide
from kvferry.engines.vllm.steps import BlocksToReceive, BlocksToSend, GroupBlocks
from kvferry.errors import UsageError

FULL = CacheGroup("full", ("layers.0",), 4)
WINDOW = CacheGroup("window", ("layers.1",), 4, window_tokens=5)


@dataclass(eq=False)
class Block:
    block_id: int
    is_null: bool = False


@dataclass
class Request:
    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None = None
    num_computed_tokens: int = 0


@dataclass
class Pool:
    kept: list[int] = field(default_factory=list)

    def touch(self, blocks):
        self.kept += [block.block_id for block in blocks]

    def free_blocks(self, blocks):
        for block in blocks:
            self.kept.remove(block.block_id)


class Scheduler:
    """As much of vLLM's as it takes: block tables, and progress after every step."""

    def __init__(self, *groups: CacheGroup) -> None:
        self.groups = groups or (FULL,)
        self.side = SchedulerSide(self.groups, engine="here", may_send=True, may_receive=True)
        self.tables: dict[str, list[list[Block]]] = {}
        self.pool = Pool()
        self.side.bind(lambda name: self.tables[name], self.pool)

    def allocate(self, request: Request, *, external: int = 0, first: int = 100) -> None:
        count = -(-request.num_prompt_tokens // 4)
        self.tables[request.request_id] = [
            [Block(first + 50 * number + index) for index in range(count)] for number in range(len(self.groups))
        ]
        self.side.allocated(request, self.tables[request.request_id], external)

    def step(self, request: Request | None = None, tokens: int = 0, preempted: tuple[str, ...] = ()):
        step = self.side.take_step({} if request is None else {request.request_id: tokens}, preempted)
        if request is not None:
            request.num_computed_tokens += tokens
        return step


def prefill_request(tokens: int, *, room: int | None = 9) -> Request:
    parameters = {"do_remote_decode": True} | ({} if room is None else {ROOM: room})
    return Request("r", tokens, parameters)


def decode_request(tokens: int) -> Request:
    return Request("r", tokens, {"do_remote_prefill": True, "remote_engine_id": "there", ROOM: 9})


class TestSending:
    def test_blocks_leave_as_chunks_fill_them_and_all_but_the_last_token_is_sent(self):
        scheduler, request = Scheduler(), prefill_request(14)
        scheduler.allocate(request)
        assert scheduler.step(request, 6).send == [
            BlocksToSend("r", 9, 13, {"full": GroupBlocks(0, (100,))}, is_last=False)
        ]
        assert scheduler.step(request, 1).send == []
        assert scheduler.step(request, 7).send == [
            BlocksToSend("r", 9, 13, {"full": GroupBlocks(1, (101, 102, 103))}, is_last=True)
        ]
        assert scheduler.step(request, 1).send == []

    def test_a_last_token_in_a_block_of_its_own_leaves_that_at_home(self):
        scheduler, request = Scheduler(), prefill_request(13)
        scheduler.allocate(request)
        assert scheduler.step(request, 13).send == [
            BlocksToSend("r", 9, 12, {"full": GroupBlocks(0, (100, 101, 102))}, is_last=True)
        ]

    def test_a_room_that_nobody_can_know_yet_is_sent_at_once_when_the_prompt_is_done(self):
        scheduler, request = Scheduler(), prefill_request(14, room=None)
        scheduler.allocate(request)
        assert scheduler.step(request, 8).send == []
        (sent,) = scheduler.step(request, 6).send
        assert sent.groups == {"full": GroupBlocks(0, (100, 101, 102, 103))}
        keeps, parameters = scheduler.side.finished(request, is_aborted=False)
        assert keeps
        assert parameters is not None
        assert parameters[ROOM] == sent.room
        assert parameters["remote_engine_id"] == "here"
        params = receive_parameters(parameters)
        assert params is not None
        assert (params.room, params.engine) == (sent.room, "here")

    def test_blocks_that_were_here_already_are_sent_as_well(self):
        scheduler, request = Scheduler(), prefill_request(14)
        request.num_computed_tokens = 8
        scheduler.allocate(request)
        assert scheduler.step(request, 2).send[0].groups == {"full": GroupBlocks(0, (100, 101))}

    def test_of_a_window_only_its_blocks_leave_and_they_are_kept_until_they_are_sent(self):
        """vLLM gives blocks away as soon as no later token attends to them, also those that are being read."""
        scheduler, request = Scheduler(FULL, WINDOW), prefill_request(14)
        scheduler.allocate(request)
        assert scheduler.step(request, 8).send[0].groups == {"full": GroupBlocks(0, (100, 101))}
        assert scheduler.pool.kept == []
        (sent,) = scheduler.step(request, 6).send
        assert sent.groups == {"full": GroupBlocks(2, (102, 103)), "window": GroupBlocks(2, (152, 153))}
        assert scheduler.pool.kept == [152, 153]
        scheduler.side.finished(request, is_aborted=False)
        assert scheduler.pool.kept == [152, 153]
        scheduler.side.reported(["r"], [])
        assert scheduler.pool.kept == []

    def test_a_preempted_request_is_sent_again_from_the_start_with_its_new_blocks(self):
        scheduler, request = Scheduler(), prefill_request(14)
        scheduler.allocate(request)
        scheduler.step(request, 8)
        request.num_computed_tokens = 0
        step = scheduler.step(preempted=("r",))
        assert step.preempted == {"r"}
        assert step.send == []
        scheduler.allocate(request, first=200)
        assert scheduler.step(request, 4).send[0].groups == {"full": GroupBlocks(0, (200,))}
        assert scheduler.step(request, 10).send[0].groups == {"full": GroupBlocks(1, (201, 202, 203))}

    def test_preemption_of_others_is_nothing_to_tell(self):
        assert Scheduler().step(preempted=("other",)).preempted == set()

    def test_an_aborted_request_keeps_its_blocks_until_nobody_reads_them(self):
        scheduler, request = Scheduler(), prefill_request(14)
        scheduler.allocate(request)
        scheduler.step(request, 8)
        assert scheduler.side.finished(request, is_aborted=True) == (True, None)
        assert scheduler.step().give_up == {"r": "the request was aborted on the prefill side"}

    def test_an_aborted_request_that_the_workers_do_not_know_keeps_nothing(self):
        """They would never report it."""
        scheduler, request = Scheduler(), prefill_request(14)
        scheduler.allocate(request)
        scheduler.step(request, 2)
        assert scheduler.side.finished(request, is_aborted=True) == (False, None)
        assert scheduler.step().give_up == {}

    @pytest.mark.parametrize("is_allocated", [False, True])
    def test_a_request_that_ends_before_any_of_it_leaves_is_refused_to_those_who_may_ask(self, is_allocated: bool):
        scheduler, request = Scheduler(), prefill_request(14)
        if is_allocated:
            scheduler.allocate(request)
        scheduler.side.finished(request, is_aborted=True)
        assert scheduler.step().refuse == {9: "the request ended on the prefill side before any of it was computed"}

    def test_a_request_whose_room_nobody_can_know_is_refused_to_nobody(self):
        scheduler, request = Scheduler(), prefill_request(14, room=None)
        scheduler.allocate(request)
        scheduler.side.finished(request, is_aborted=True)
        assert scheduler.step().refuse == {}

    def test_a_prompt_of_one_token_has_nothing_to_send(self):
        scheduler, request = Scheduler(), prefill_request(1)
        scheduler.allocate(request)
        assert scheduler.step(request, 1).send == []
        assert scheduler.side.finished(request, is_aborted=False) == (False, None)

    def test_a_block_that_vllm_has_dropped_fails_the_request_instead_of_sending_another(self):
        scheduler, request = Scheduler(FULL, WINDOW), prefill_request(14)
        scheduler.allocate(request)
        scheduler.tables["r"][1][2].is_null = True
        step = scheduler.step(request, 14)
        assert "has dropped blocks of group 'window'" in step.give_up["r"]

    def test_who_may_not_send_does_not(self):
        scheduler, request = Scheduler(), prefill_request(14)
        scheduler.side = SchedulerSide((FULL,), engine="here", may_send=False, may_receive=True)
        scheduler.allocate(request)
        assert scheduler.step(request, 14).send == []


class TestReceiving:
    def test_all_but_the_last_token_is_fetched_into_the_blocks_behind_the_prefix(self):
        scheduler, request = Scheduler(), decode_request(14)
        assert scheduler.side.tokens_elsewhere(request, 4) == 9
        scheduler.allocate(request, external=9)
        assert scheduler.step().receive == [
            BlocksToReceive("r", 9, "there", 4, 13, {"full": GroupBlocks(1, (101, 102, 103))})
        ]
        assert scheduler.step().receive == []

    def test_of_a_window_only_its_blocks_are_wanted(self):
        scheduler, request = Scheduler(FULL, WINDOW), decode_request(14)
        scheduler.allocate(request, external=13)
        (wanted,) = scheduler.step().receive
        assert wanted.groups == {"full": GroupBlocks(0, (100, 101, 102, 103)), "window": GroupBlocks(2, (152, 153))}

    def test_where_all_is_here_the_prefill_engine_is_told_so(self):
        scheduler, request = Scheduler(), decode_request(14)
        assert scheduler.side.tokens_elsewhere(request, 13) == 0
        scheduler.allocate(request)
        (told,) = scheduler.step().receive
        assert (told.is_wanted, told.groups) == (False, {"full": GroupBlocks(4, ())})

    def test_a_request_is_fetched_once(self):
        """When vLLM schedules it again, after a failure or a preemption, it computes it."""
        scheduler, request = Scheduler(), decode_request(14)
        scheduler.allocate(request, external=13)
        assert scheduler.side.tokens_elsewhere(request, 0) == 0
        scheduler.allocate(request)
        assert len(scheduler.step().receive) == 1

    def test_an_aborted_request_is_given_up(self):
        scheduler, request = Scheduler(), decode_request(14)
        scheduler.allocate(request, external=13)
        scheduler.step()
        assert scheduler.side.finished(request, is_aborted=True) == (False, None)
        assert scheduler.step().give_up == {"r": "the request was aborted on the decode side"}

    def test_a_request_that_has_come_is_not_given_up_when_it_ends(self):
        scheduler, request = Scheduler(), decode_request(14)
        scheduler.allocate(request, external=13)
        scheduler.step()
        scheduler.side.reported([], ["r"])
        assert scheduler.side.finished(request, is_aborted=False) == (False, None)
        assert scheduler.step().give_up == {}

    def test_a_request_that_ends_before_it_is_scheduled_lets_the_prefill_engine_know(self):
        scheduler, request = Scheduler(), decode_request(14)
        assert scheduler.side.finished(request, is_aborted=True) == (False, None)
        (told,) = scheduler.step().receive
        assert (told.room, told.engine, told.is_wanted) == (9, "there", False)
        assert told.groups == {"full": GroupBlocks(4, ())}

    def test_a_block_that_vllm_does_not_keep_is_not_written_to(self):
        scheduler, request = Scheduler(FULL, WINDOW), decode_request(14)
        scheduler.tables["r"] = [[Block(n) for n in range(4)], [Block(0, is_null=True) for _ in range(4)]]
        scheduler.side.allocated(request, scheduler.tables["r"], 13)
        (wanted,) = scheduler.step().receive
        assert "keeps no block" in wanted.problem

    @pytest.mark.parametrize("room", [None, "9", -1, 1 << 53, True, 1.5])
    def test_a_request_with_impossible_parameters_is_computed_here(self, room: object, caplog):
        scheduler, request = Scheduler(), decode_request(14)
        assert request.kv_transfer_params is not None
        request.kv_transfer_params[ROOM] = room
        assert scheduler.side.tokens_elsewhere(request, 0) == 0
        assert "kvferry_room is" in caplog.text
        caplog.clear()
        assert scheduler.side.tokens_elsewhere(request, 0) == 0
        assert not caplog.text, "said once"


class TestParameters:
    @pytest.mark.parametrize("parameters", [None, {}, {"do_remote_decode": False}, {"do_remote_prefill": False}])
    def test_a_request_without_wishes(self, parameters: dict[str, Any] | None):
        assert send_parameters(parameters) is None
        assert receive_parameters(parameters) is None

    def test_rooms_are_not_guessable_and_survive_json_in_every_language(self):
        rooms = {params.room for _ in range(100) if (params := send_parameters({"do_remote_decode": True})) is not None}
        assert len(rooms) == 100
        assert max(rooms) <= LARGEST_ROOM < 1 << 53
        assert max(rooms) > 1 << 40

    @pytest.mark.parametrize("engine", [None, 7, "", "a/b"])
    def test_an_engine_that_cannot_be_is_refused(self, engine: object):
        with pytest.raises(UsageError, match="remote_engine_id"):
            receive_parameters({"do_remote_prefill": True, "remote_engine_id": engine, ROOM: 1})
