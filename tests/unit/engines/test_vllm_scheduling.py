"""Which blocks leave and come, as vLLM's scheduler schedules, preempts, aborts and finishes requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.vllm_conditions import made_up
from tests.support.waiting import eventually

from kvferry.engines.vllm import fetching
from kvferry.engines.vllm.caches import CacheGroup
from kvferry.engines.vllm.identity import Conditions as DependsOn
from kvferry.engines.vllm.parameters import (
    LARGEST_ROOM,
    ROOM,
    ReceiveParameters,
    answer,
    receive_parameters,
    send_parameters,
)
from kvferry.engines.vllm.scheduling import SchedulerSide
from kvferry.engines.vllm.steps import BlocksToReceive, BlocksToSend, GroupBlocks
from kvferry.errors import UsageError

FULL = CacheGroup("full", ("layers.0",), 4)
WINDOW = CacheGroup("window", ("layers.1",), 4, window_tokens=5)
CHUNK = CacheGroup("chunk", ("layers.3",), 4, chunk_tokens=8)
STATE = CacheGroup("state", ("layers.2",), 8, has_state=True)


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
    prompt_token_ids: list[int] | None = None
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    max_tokens: int = 100
    skips_prefix_cache: bool = False
    arrival_time: float = 0.0

    def __post_init__(self) -> None:
        self._all_token_ids = list(self.prompt_token_ids or [0] * self.num_prompt_tokens)

    def get_skip_reading_prefix_cache(self) -> bool:
        return self.skips_prefix_cache


@dataclass
class Pool:
    kept: list[int] = field(default_factory=list)
    free: int = 0

    def get_num_free_blocks(self):
        return self.free

    def touch(self, blocks):
        self.kept += [block.block_id for block in blocks]

    def free_blocks(self, blocks):
        for block in blocks:
            self.kept.remove(block.block_id)


class Scheduler:
    """As much of vLLM's as it takes: block tables, and progress after every step."""

    def __init__(
        self,
        *groups: CacheGroup,
        held_back_tokens: int = 1,
        hold_s: float = 0.0,
        conditions: Any = None,
    ) -> None:
        self.groups = groups or (FULL,)
        self.side = SchedulerSide(
            self.groups,
            engine="here",
            may_send=True,
            may_receive=True,
            held_back_tokens=held_back_tokens,
            hold_s=hold_s,
            conditions=conditions or made_up(),
        )
        self.tables: dict[str, list[list[Block]]] = {}
        self.pool = Pool()
        self.side.bind(lambda name: self.tables[name], cast(Any, self.pool))

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

    def test_a_request_preempted_after_its_last_blocks_were_handed_over_is_sent_again(self):
        """With asynchronous scheduling the step that computes them may not be over when vLLM takes the blocks."""
        scheduler, request = Scheduler(), prefill_request(14)
        scheduler.allocate(request)
        assert scheduler.step(request, 14).send[0].is_last
        request.num_computed_tokens = 0
        assert scheduler.step(preempted=("r",)).preempted == {"r"}
        scheduler.allocate(request, first=200)
        (sent,) = scheduler.step(request, 14).send
        assert (sent.groups, sent.is_last) == ({"full": GroupBlocks(0, (200, 201, 202, 203))}, True)
        keeps, parameters = scheduler.side.finished(request, is_aborted=False)
        assert keeps
        assert parameters is not None

    def test_what_is_kept_of_a_request_is_given_back_when_it_is_preempted(self):
        """It is computed again, in other blocks, and may need these."""
        scheduler, request = Scheduler(FULL, WINDOW), prefill_request(14)
        scheduler.allocate(request)
        scheduler.step(request, 14)
        assert scheduler.pool.kept == [152, 153]
        request.num_computed_tokens = 0
        scheduler.step(preempted=("r",))
        assert scheduler.pool.kept == []
        scheduler.allocate(request, first=200)
        scheduler.step(request, 14)
        assert scheduler.pool.kept == [252, 253]
        scheduler.side.finished(request, is_aborted=False)
        scheduler.side.reported(["r"], [])
        assert scheduler.pool.kept == []

    def test_a_preempted_request_that_ends_before_it_is_computed_again_is_given_up_and_not_answered(self):
        """Its blocks are another's by then."""
        scheduler, request = Scheduler(), prefill_request(14)
        scheduler.allocate(request)
        scheduler.step(request, 14)
        scheduler.step(preempted=("r",))
        assert scheduler.side.finished(request, is_aborted=False) == (True, None)
        assert scheduler.step().give_up == {"r": "the request ended on the prefill side before all of it was computed"}

    def test_a_request_that_is_preempted_and_aborted_between_two_steps_leaves_nothing(self):
        scheduler, request = Scheduler(), prefill_request(14)
        scheduler.allocate(request)
        scheduler.step(request, 14)
        assert scheduler.side.finished(request, is_aborted=True) == (True, None)
        assert scheduler.step(preempted=("r",)).preempted == {"r"}
        scheduler.side.reported(["r"], [])
        assert not scheduler.side.unfinished

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
        scheduler.side = SchedulerSide((FULL,), engine="here", may_send=False, may_receive=True, conditions=made_up())
        scheduler.allocate(request)
        assert scheduler.step(request, 14).send == []


class TestHolding:
    """What is held for decode engines, when vLLM has no blocks for the next request."""

    def scheduler(self, *, free: int, hold_s: float = 0.0) -> Scheduler:
        """One that holds two requests of four blocks each."""
        scheduler = Scheduler(hold_s=hold_s)
        scheduler.pool.free = free
        for name in ("first", "second"):
            request = replace(prefill_request(14), request_id=name)
            scheduler.allocate(request)
            scheduler.step(request, 14)
            assert scheduler.side.finished(request, is_aborted=False)[0]
        assert scheduler.step().needed == []
        return scheduler

    @pytest.mark.parametrize(
        ("free", "needed"),
        [(6, []), (5, ["first"]), (2, ["first"]), (1, ["first", "second"]), (0, ["first", "second"])],
    )
    def test_as_many_are_given_up_as_another_one_needs_blocks_the_oldest_first(self, free: int, needed: list[str]):
        scheduler = self.scheduler(free=free)
        scheduler.side.tokens_elsewhere(prefill_request(24), 0)
        assert scheduler.step().needed == needed

    def test_they_are_waited_for_and_others_follow_if_that_was_not_enough(self):
        scheduler = self.scheduler(free=4)
        for needed in (["first"], []):
            scheduler.side.tokens_elsewhere(prefill_request(24), 0)
            assert scheduler.step().needed == needed
        scheduler.side.reported(["first"], [])  # others have got its blocks
        scheduler.side.tokens_elsewhere(prefill_request(24), 0)
        assert scheduler.step().needed == ["second"]

    def test_none_is_given_up_for_a_request_that_has_got_its_blocks(self):
        scheduler, request = self.scheduler(free=0), prefill_request(24)
        scheduler.side.tokens_elsewhere(request, 0)
        scheduler.allocate(request)
        assert scheduler.step(request, 24).needed == []

    def test_none_is_given_up_before_it_was_held_as_long_as_any(self):
        scheduler = self.scheduler(free=0, hold_s=600.0)
        scheduler.side.tokens_elsewhere(prefill_request(24), 0)
        assert scheduler.step().needed == []


class TestExpecting:
    """The prefill engine keeps what a request in the queue waits for."""

    def test_a_request_that_waits_is_expected_once(self):
        scheduler, request = Scheduler(), decode_request(14)
        scheduler.side.came_in(request)
        assert scheduler.step().expect == {9: "there"}
        assert scheduler.step().expect == {}
        scheduler.side.tokens_elsewhere(request, 0)
        scheduler.allocate(request, external=13)
        step = scheduler.step()
        assert (step.expect, len(step.receive)) == ({}, 1)

    def test_one_that_does_not_wait_is_not(self):
        scheduler, request = Scheduler(), decode_request(14)
        scheduler.side.came_in(request)
        scheduler.allocate(request, external=13)
        assert scheduler.step().expect == {}

    def test_nor_is_one_that_ends_first_or_another_choice_of_one_that_was_asked_for(self):
        scheduler = Scheduler()
        for number in range(2):
            choice = replace(decode_request(14), request_id=f"{number}_r")
            scheduler.side.came_in(choice)
            if not number:
                scheduler.side.finished(choice, is_aborted=True)
            assert scheduler.step().expect == {}

    @pytest.mark.parametrize("parameters", [None, {}, {"do_remote_prefill": True}, {"do_remote_decode": True}])
    def test_nor_is_one_that_waits_for_nobody(self, parameters: dict[str, Any] | None):
        scheduler = Scheduler()
        scheduler.side.came_in(Request("r", 14, parameters))
        assert scheduler.step().expect == {}


class TestReceiving:
    def test_all_but_the_last_token_is_fetched_into_the_blocks_behind_the_prefix(self):
        scheduler, request = Scheduler(), decode_request(14)
        assert scheduler.side.tokens_elsewhere(request, 4) == 9
        scheduler.allocate(request, external=9)
        assert scheduler.step().receive == [
            BlocksToReceive("r", 9, "there", 4, 13, {"full": GroupBlocks(1, (101, 102, 103))})
        ]
        assert scheduler.step().receive == []

    def test_a_window_that_no_prefix_cache_keeps_is_fetched_before_the_prefixs_end_too(self):
        groups = (FULL, WINDOW, replace(WINDOW, name="uncached", is_prefix_cached=False))
        scheduler, request = Scheduler(*groups), decode_request(14)
        scheduler.allocate(request, external=1)
        (wanted,) = scheduler.step().receive
        assert wanted.groups == {
            "full": GroupBlocks(3, (103,)),
            "window": GroupBlocks(3, (153,)),
            "uncached": GroupBlocks(2, (202, 203), held_tokens=0),
        }

    def test_a_window_that_begins_within_a_block_needs_all_of_it(self):
        scheduler, request = (
            Scheduler(FULL, CacheGroup("window", ("layers.1",), 4, window_tokens=6)),
            decode_request(14),
        )
        scheduler.allocate(request, external=13)
        (wanted,) = scheduler.step().receive
        assert wanted.groups["window"] == GroupBlocks(1, (151, 152, 153))

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

    def test_a_request_with_impossible_parameters_is_computed_here(self, caplog):
        scheduler, request = Scheduler(), decode_request(14)
        assert request.kv_transfer_params is not None
        request.kv_transfer_params[ROOM] = -1
        assert scheduler.side.tokens_elsewhere(request, 0) == 0
        assert "kvferry_room is -1" in caplog.text
        caplog.clear()
        assert scheduler.side.tokens_elsewhere(request, 0) == 0
        assert not caplog.text, "said once"


class TestWhatIsOutdated:
    """As where weights are replaced."""

    def test_what_is_sent_ends_and_nothing_more_of_it_leaves(self):
        scheduler, request = Scheduler(), prefill_request(14)
        scheduler.allocate(request)
        scheduler.step(request, 6)
        scheduler.side.outdate([request], "replaced")
        step = scheduler.step(request, 8)
        assert (step.send, step.give_up) == ([], {"r": "replaced"})
        assert scheduler.side.finished(request, is_aborted=False) == (True, None), "its blocks may still be read"

    @pytest.mark.parametrize("is_begun", [True, False])
    def test_nor_does_what_is_computed_anew_after_a_preemption(self, is_begun: bool):
        """As where caches are reset with the requests that run: what was sent of it is of the weights before."""
        scheduler, request = Scheduler(), prefill_request(14)
        scheduler.allocate(request)
        if is_begun:
            scheduler.step(request, 6)
        scheduler.side.outdate([request], "replaced")
        request.num_computed_tokens = 0
        scheduler.allocate(request, first=200)
        step = scheduler.side.take_step({"r": 14}, {"r"})
        assert (step.send, step.preempted) == ([], {"r"})
        assert scheduler.side.finished(request, is_aborted=False) == (is_begun, None)

    def test_what_waits_to_be_fetched_ends_too(self):
        scheduler, request = Scheduler(), prefill_request(14)
        scheduler.allocate(request)
        scheduler.step(request, 14)
        assert scheduler.side.finished(request, is_aborted=False)[0]
        assert scheduler.side.being_sent == [request]
        scheduler.side.outdate(scheduler.side.being_sent, "replaced")
        assert scheduler.step().give_up == {"r": "replaced"}

    def test_what_ends_with_its_last_step_is_promised_to_nobody(self):
        """As where the change comes while that step is under way."""
        scheduler, request = Scheduler(), prefill_request(14)
        scheduler.allocate(request)
        scheduler.step(request, 14)
        scheduler.side.outdate([request], "replaced")
        assert scheduler.side.finished(request, is_aborted=False) == (True, None)
        assert scheduler.step().give_up == {"r": "replaced"}

    def test_nor_do_other_choices_promise_it(self):
        scheduler = Scheduler()
        choices = [replace(prefill_request(14, room=None), request_id=f"{number}_r") for number in range(2)]
        for choice in choices:
            scheduler.allocate(choice)
        scheduler.side.outdate(choices, "replaced")
        assert [scheduler.side.finished(each, is_aborted=False) for each in choices] == [(False, None)] * 2

    @pytest.mark.parametrize("room", [None, 9])
    def test_nor_does_a_choice_that_is_scheduled_first_after_that(self, room: int | None):
        scheduler = Scheduler()
        choices = [replace(prefill_request(14, room=room), request_id=f"{number}_r") for number in range(2)]
        scheduler.allocate(choices[0])
        scheduler.step(choices[0], 14)
        scheduler.side.outdate(choices[:1], "replaced")
        scheduler.allocate(choices[1])
        assert scheduler.step(choices[1], 14).send == []
        assert scheduler.side.finished(choices[1], is_aborted=False) == (False, None)
        assert scheduler.step().refuse == {}, "of the room it was said already"

    def test_nor_one_that_is_scheduled_after_the_first_one_was_aborted(self):
        scheduler = Scheduler()
        choices = [replace(prefill_request(14, room=None), request_id=f"{number}_r") for number in range(2)]
        scheduler.allocate(choices[0])
        scheduler.step(choices[0], 6)
        assert scheduler.side.finished(choices[0], is_aborted=True)[1] is None
        scheduler.allocate(choices[1])
        assert scheduler.side.finished(choices[1], is_aborted=False) == (False, None)

    def test_what_nobody_knows_of_yet_is_refused_when_it_ends(self):
        scheduler, request = Scheduler(), prefill_request(14)
        scheduler.allocate(request)
        scheduler.side.outdate([request], "replaced")
        step = scheduler.step(request, 14)
        assert step.send == []
        assert step.give_up == {}
        assert scheduler.side.finished(request, is_aborted=False) == (False, None)
        assert scheduler.step().refuse.keys() == {9}

    def test_what_is_fetched_ends_and_what_has_come_does_not(self):
        scheduler, request = Scheduler(), decode_request(14)
        scheduler.allocate(request, external=13)
        scheduler.step()
        scheduler.side.outdate([request], "replaced")
        assert scheduler.step().give_up == {"r": "replaced"}
        scheduler.side.reported([], ["r"], ["r"])
        scheduler.side.outdate([request], "replaced")
        assert scheduler.step().give_up == {}

    def test_what_has_come_and_waits_to_be_computed_to_its_end_is_not_sent_on(self):
        """vLLM goes on with it, and asks for what it is sent as when it does: it is not the new weights'."""
        scheduler = Scheduler(conditions=made_up(lambda *_: {"weights": b"new"}))
        request = Request("r", 14, {**(decode_request(14).kv_transfer_params or {}), "do_remote_decode": True})
        scheduler.allocate(request, external=13)
        scheduler.step()
        scheduler.side.reported([], ["r"])
        request.num_computed_tokens = 13
        scheduler.side.outdate([request], "replaced")
        scheduler.allocate(request)
        assert scheduler.step(request, 1).send == []
        assert scheduler.side.finished(request, is_aborted=False) == (False, None)
        assert scheduler.step().refuse.keys() == {9}

    def test_what_came_before_the_workers_heard_of_it_is_reported_once_more(self):
        """As where vLLM has the next step queued already; or has been told, and not gone on with it."""
        scheduler, request = Scheduler(), decode_request(14)
        scheduler.allocate(request, external=13)
        scheduler.step()
        scheduler.side.outdate([request], "replaced")
        assert scheduler.side.reported([], {"r"}) == {"r"}
        assert scheduler.step().fail == {"r"}
        assert scheduler.side.reported([], {"r"}, {"r"}) == set()
        scheduler.side.outdate([request], "replaced", arrived={"r"})
        assert scheduler.step().fail == {"r"}


class TestHoldingBack:
    """A model that drafts with three modules: what they cache of the last three tokens depends on drafts."""

    def test_that_many_tokens_are_not_sent(self):
        scheduler, request = Scheduler(held_back_tokens=3), prefill_request(14)
        scheduler.allocate(request)
        (sent,) = scheduler.step(request, 14).send
        assert (sent.tokens, sent.groups, sent.is_last) == (11, {"full": GroupBlocks(0, (100, 101, 102))}, True)
        _, parameters = scheduler.side.finished(request, is_aborted=False)
        assert parameters is not None
        assert parameters["remote_num_tokens"] == 11

    def test_that_many_tokens_are_computed_on_the_decode_side(self):
        scheduler, request = Scheduler(held_back_tokens=3), decode_request(14)
        assert scheduler.side.tokens_elsewhere(request, 4) == 7
        scheduler.allocate(request, external=7)
        assert scheduler.step().receive == [
            BlocksToReceive("r", 9, "there", 4, 11, {"full": GroupBlocks(1, (101, 102))})
        ]

    @pytest.mark.parametrize("tokens", [1, 2, 3])
    def test_of_a_prompt_as_short_as_that_nothing_is_sent_or_fetched(self, tokens: int):
        scheduler, request = Scheduler(held_back_tokens=3), prefill_request(tokens)
        scheduler.allocate(request)
        assert scheduler.step(request, tokens).send == []
        assert scheduler.side.tokens_elsewhere(decode_request(tokens), 0) == 0


class TestChunks:
    """A token attends to those of its own chunk of 8, in blocks of 4. What is sent ends before the last token."""

    @pytest.mark.parametrize(
        ("tokens", "blocks"),
        [
            (8, GroupBlocks(0, (150, 151))),
            (9, None),  # the last token begins a chunk
            (10, GroupBlocks(2, (152,))),
            (14, GroupBlocks(2, (152, 153))),
            (16, GroupBlocks(2, (152, 153))),
            (17, None),
        ],
    )
    def test_the_chunk_of_the_last_token_leaves_without_it(self, tokens: int, blocks: GroupBlocks | None):
        scheduler, request = Scheduler(FULL, CHUNK), prefill_request(tokens)
        scheduler.allocate(request)
        (sent,) = scheduler.step(request, tokens).send
        assert sent.groups.get("chunk") == blocks
        assert scheduler.pool.kept == ([] if blocks is None else list(blocks.blocks)), "vLLM gives them away"

    def test_what_fills_earlier_chunks_stays(self):
        scheduler, request = Scheduler(FULL, CHUNK), prefill_request(22)
        scheduler.allocate(request)
        assert scheduler.step(request, 12).send[0].groups == {"full": GroupBlocks(0, (100, 101, 102))}
        assert scheduler.step(request, 8).send[0].groups["chunk"] == GroupBlocks(4, (154,))
        assert scheduler.step(request, 2).send[0].groups["chunk"] == GroupBlocks(5, (155,))

    @pytest.mark.parametrize(
        ("tokens", "prefix", "blocks"),
        [
            (14, 0, GroupBlocks(2, (152, 153))),
            (14, 8, GroupBlocks(2, (152, 153))),
            (14, 12, GroupBlocks(3, (153,))),
            (17, 4, GroupBlocks(4, ())),
            (17, 12, GroupBlocks(4, ())),
            (24, 12, GroupBlocks(4, (154, 155))),
        ],
    )
    def test_what_the_prefix_lacks_of_the_chunk_is_received(self, tokens: int, prefix: int, blocks: GroupBlocks):
        """vLLM has null blocks before the chunk."""
        scheduler, request = Scheduler(FULL, CHUNK), decode_request(tokens)
        table = [
            [Block(100 + index) for index in range(6)],
            [Block(150 + index, is_null=index < (tokens - 1) // 8 * 2) for index in range(6)],
        ]
        scheduler.side.allocated(request, table, tokens - 1 - prefix)
        (wanted,) = scheduler.step().receive
        assert (wanted.groups["chunk"], wanted.problem) == (blocks, "")


class TestState:
    """Recurrent state is that of one number of tokens, and of no other."""

    @staticmethod
    def came_in(request: Request) -> tuple[Scheduler, Request]:
        scheduler = Scheduler(FULL, STATE)
        scheduler.side.came_in(request)
        return scheduler, request

    def test_a_prompt_that_is_to_be_sent_ends_where_what_is_sent_ends(self):
        given = list(range(14))
        scheduler, request = self.came_in(replace(prefill_request(14), prompt_token_ids=given))
        assert (request.num_prompt_tokens, request.prompt_token_ids, request.max_tokens) == (13, given[:13], 1)
        assert request._all_token_ids == given[:13]
        assert len(given) == 14, "other choices may have the same list"
        scheduler.side.came_in(request)
        assert request.num_prompt_tokens == 13, "once"

    def test_every_part_of_a_mixed_prompt_is_cut(self):
        """Token ids, embeddings, and which of both is meant: vLLM's workers refuse them unless they are as many."""
        mixed = Request("r", 14, {"do_remote_decode": True, ROOM: 9}, prompt_token_ids=list(range(14)))
        mixed.prompt_embeds, mixed.prompt_is_token_ids = list(range(14)), [True, False] * 7
        _, request = self.came_in(mixed)
        parts = (request.prompt_token_ids, request.prompt_embeds, request.prompt_is_token_ids, request._all_token_ids)
        assert [len(part) for part in parts if part is not None] == [13] * 4

    def test_what_is_to_be_fetched_and_sent_on_is_computed_here(self, caplog: pytest.LogCaptureFixture):
        """Else its last token would be computed upon state that has it already."""
        both = Request("r", 14, {**(decode_request(14).kv_transfer_params or {}), "do_remote_decode": True})
        scheduler, request = self.came_in(both)
        assert scheduler.side.tokens_elsewhere(request, 0) == 0
        assert request.num_prompt_tokens == 13, "it is sent"
        assert "request r is computed here: it is to be fetched and to be sent on" in caplog.text

    def test_a_request_that_is_fetched_was_not_cut_here_whatever_it_says(self):
        scheduler, request = self.came_in(decode_request(14))
        forged = decode_request(14)
        assert forged.kv_transfer_params is not None
        forged.kv_transfer_params["_p_side_truncated"] = True
        other, forged = self.came_in(forged)
        assert scheduler.side.tokens_elsewhere(request, 0) == other.side.tokens_elsewhere(forged, 0) == 13

    @pytest.mark.parametrize(
        "request_",
        [
            decode_request(14),
            Request("r", 14),
            prefill_request(1),
            replace(prefill_request(14), skips_prefix_cache=True),
            Request("r", 14, {"do_remote_decode": True, "_p_side_truncated": True}),
        ],
        ids=["to be received", "its own", "too short", "computed by the decode side", "cut by another connector"],
    )
    def test_no_other_prompt_is_cut(self, request_: Request):
        before = request_.num_prompt_tokens
        assert self.came_in(request_)[1].num_prompt_tokens == before

    def test_without_state_no_prompt_is_cut(self):
        scheduler, request = Scheduler(FULL, WINDOW), prefill_request(14)
        scheduler.side.came_in(request)
        assert request.num_prompt_tokens == 14

    def test_state_leaves_with_the_last_pages_from_the_block_of_the_last_token(self):
        scheduler, request = self.came_in(prefill_request(14))
        scheduler.allocate(request)
        assert scheduler.step(request, 8).send == [
            BlocksToSend("r", 9, 13, {"full": GroupBlocks(0, (100, 101))}, is_last=False)
        ]
        assert scheduler.step(request, 5).send == [
            BlocksToSend(
                "r",
                9,
                13,
                {"full": GroupBlocks(2, (102, 103)), "state": GroupBlocks(0, (151,))},
                is_last=True,
            )
        ]
        assert scheduler.pool.kept == [151], "vLLM gives it away with the next token"
        scheduler.side.finished(request, is_aborted=False)
        scheduler.side.reported(["r"], ())
        assert scheduler.pool.kept == []

    def test_the_answer_says_how_many_tokens_there_are(self):
        scheduler, request = self.came_in(prefill_request(14))
        scheduler.allocate(request)
        scheduler.step(request, 13)
        assert scheduler.side.finished(request, is_aborted=False)[1]["remote_num_tokens"] == 13  # type: ignore[index]

    def test_a_prompt_that_was_not_cut_is_not_sent(self, caplog: pytest.LogCaptureFixture):
        scheduler, request = Scheduler(FULL, STATE), prefill_request(14)
        scheduler.allocate(request)
        assert scheduler.step(request, 14).send == []
        assert "its recurrent state is that of tokens that are not sent" in caplog.text
        scheduler.side.finished(request, is_aborted=False)
        assert list(scheduler.step().refuse) == [9], "the decode side is told"

    @pytest.mark.parametrize("prefix", [0, 8])
    def test_it_is_received_whatever_prefix_is_here(self, prefix: int):
        scheduler, request = Scheduler(FULL, STATE), decode_request(14)
        assert scheduler.side.tokens_elsewhere(request, prefix) == 13 - prefix
        scheduler.allocate(request, external=13 - prefix)
        (wanted,) = scheduler.step().receive
        assert (wanted.groups["state"], wanted.problem) == (GroupBlocks(0, (151,)), "")

    def test_where_nothing_is_missing_no_state_is_either(self):
        scheduler, request = Scheduler(FULL, STATE), decode_request(14)
        assert scheduler.side.tokens_elsewhere(request, 13) == 0
        scheduler.allocate(request)
        (wanted,) = scheduler.step().receive
        assert wanted.groups["state"] == GroupBlocks(0, ())

    def test_other_choices_of_a_request_are_computed(self):
        scheduler, (first, second, _) = Scheduler(FULL, STATE), choices(decode_request(14))
        scheduler.allocate(first, external=13)
        scheduler.step()
        first.num_computed_tokens = 13
        scheduler.side.reported((), ["0_r"])
        assert scheduler.side.tokens_elsewhere(second, 0) == 0


def choices(request: Request, count: int = 3) -> list[Request]:
    """The requests that vLLM makes of one: in one process they even have the same parameters."""
    return [
        replace(request, request_id=f"{number}_{request.request_id}", prompt_token_ids=[1] * request.num_prompt_tokens)
        for number in range(count)
    ]


class TestChoicesThatAreFetched:
    def fetched(self, *groups: CacheGroup) -> tuple[Scheduler, list[Request]]:
        """The first of three choices of 14 tokens, once its cache is there."""
        scheduler, (first, *others) = Scheduler(*groups), choices(decode_request(14))
        assert scheduler.side.tokens_elsewhere(first, 0) == 13
        scheduler.allocate(first, external=13)
        first.num_computed_tokens = 13
        scheduler.step()
        scheduler.side.reported([], {"0_r"})
        return scheduler, [first, *others]

    def test_the_first_fetches_and_the_others_wait_for_it(self):
        scheduler, (first, second, third) = Scheduler(), choices(decode_request(14))
        scheduler.allocate(first, external=13)
        assert scheduler.side.tokens_elsewhere(second, 0) is None
        assert [each.request for each in scheduler.step().receive] == ["0_r"]
        first.num_computed_tokens = 13
        scheduler.side.reported([], {"0_r"})
        assert scheduler.side.tokens_elsewhere(second, 0) == 13
        assert scheduler.side.tokens_elsewhere(third, 8) == 5

    def test_the_others_copy_what_they_lack_and_the_blocks_are_kept_meanwhile(self):
        scheduler, (first, second, _) = self.fetched(FULL, WINDOW)
        scheduler.allocate(second, external=5, first=200)
        (wanted,) = scheduler.step().receive
        assert (wanted.request, wanted.prefix_tokens, wanted.tokens) == ("1_r", 8, 13)
        assert wanted.groups == {"full": GroupBlocks(2, (202, 203)), "window": GroupBlocks(2, (252, 253))}
        assert wanted.copied_from == {"full": GroupBlocks(2, (102, 103)), "window": GroupBlocks(2, (152, 153))}
        assert scheduler.pool.kept == [102, 103, 152, 153]
        scheduler.side.finished(first, is_aborted=False)
        assert scheduler.pool.kept == [102, 103, 152, 153]
        scheduler.side.reported([], {"1_r"})
        assert scheduler.pool.kept == []

    def test_what_is_being_copied_is_not_used_once_it_is_outdated(self):
        scheduler, (_, second, _) = self.fetched()
        scheduler.allocate(second, external=5, first=200)
        scheduler.step()
        scheduler.side.outdate([second], "replaced")
        assert scheduler.side.reported([], {"1_r"}) == {"1_r"}
        assert scheduler.pool.kept == []

    def test_one_that_has_all_asks_nobody(self):
        scheduler, (_, second, _) = self.fetched()
        assert scheduler.side.tokens_elsewhere(second, 13) == 0
        scheduler.allocate(second)
        assert scheduler.step().receive == []

    def ended(self, first: Request, scheduler: Scheduler) -> None:
        scheduler.side.finished(first, is_aborted=False)

    def preempted(self, first: Request, scheduler: Scheduler) -> None:
        first.num_computed_tokens = 0

    def was_outdated(self, first: Request, scheduler: Scheduler) -> None:
        scheduler.side.outdate([first], "replaced")
        scheduler.step()

    def left_the_window(self, first: Request, scheduler: Scheduler) -> None:
        scheduler.tables["0_r"][1][2].is_null = True

    def had_another_prompt(self, first: Request, scheduler: Scheduler) -> None:
        first.prompt_token_ids = [2] * 14

    @pytest.mark.parametrize("event", [ended, preempted, was_outdated, left_the_window, had_another_prompt])
    def test_where_the_first_has_lost_it_the_others_are_computed(self, event):
        scheduler, (first, second, _) = self.fetched(FULL, WINDOW)
        event(self, first, scheduler)
        assert scheduler.side.tokens_elsewhere(second, 0) == 0
        scheduler.allocate(second, first=200)
        assert scheduler.step().receive == []
        assert scheduler.pool.kept == []

    def test_where_the_first_does_not_come_the_others_fail_as_the_policy_says(self):
        scheduler, (first, second, _) = Scheduler(), choices(decode_request(14))
        scheduler.allocate(first, external=13)
        scheduler.step()
        scheduler.side.reported([], {"0_r"}, {"0_r"})
        assert scheduler.side.tokens_elsewhere(second, 0) == 13
        scheduler.allocate(second, external=13, first=200)
        (wanted,) = scheduler.step().receive
        assert wanted.problem == "the cache of another choice of the same request did not come"
        assert wanted.copied_from, "the prefill engine is told nothing: it is over for it"
        assert scheduler.side.tokens_elsewhere(second, 0) == 0, "vLLM computes it when it schedules it again"

    def test_a_request_that_is_aborted_while_it_is_fetched_asks_and_declines_once(self):
        scheduler, each = Scheduler(), choices(decode_request(14))
        scheduler.allocate(each[0], external=13)
        assert len(scheduler.step().receive) == 1
        for request in each:
            scheduler.side.finished(request, is_aborted=True)
        step = scheduler.step()
        assert step.receive == []
        assert step.give_up == {"0_r": "the request was aborted on the decode side"}

    def test_a_request_that_is_aborted_before_it_is_scheduled_declines_once(self):
        scheduler, each = Scheduler(), choices(decode_request(14))
        for request in each:
            scheduler.side.finished(request, is_aborted=True)
        assert [(told.request, told.is_wanted) for told in scheduler.step().receive] == [("0_r", False)]

    def test_where_the_first_has_all_from_elsewhere_nothing_is_copied(self):
        """It may be another connector's, which has not loaded it yet though vLLM counts it as there."""
        scheduler, (first, second, _) = Scheduler(), choices(decode_request(14))
        first.num_computed_tokens = 13
        scheduler.allocate(first)
        assert [told.is_wanted for told in scheduler.step().receive] == [False]
        assert scheduler.side.tokens_elsewhere(second, 4) == 0
        scheduler.allocate(second, first=200)
        assert scheduler.step().receive == []

    def test_nothing_is_copied_from_one_that_was_preempted_and_counts_as_there_again(self):
        scheduler, (first, second, _) = self.fetched()
        scheduler.step(preempted=("0_r",))
        assert first.num_computed_tokens == 13
        assert scheduler.side.tokens_elsewhere(second, 0) == 0

    def test_another_request_of_the_same_name_is_another_one(self):
        """Names are the caller's where vLLM is told not to make them unique."""
        scheduler, _ = self.fetched()
        again = choices(decode_request(14))[0]
        assert again.kv_transfer_params is not None
        again.kv_transfer_params[ROOM] = 10
        assert scheduler.side.tokens_elsewhere(again, 0) == 13
        scheduler.allocate(again, external=13, first=200)
        assert [wanted.room for wanted in scheduler.step().receive] == [10]


class TestChoicesThatAreSent:
    @pytest.mark.parametrize("room", [None, 9])
    def test_the_first_is_sent_and_all_answer_with_its_room(self, room: int | None):
        """A gateway hands one of the answers on, whichever vLLM chooses."""
        scheduler, each = Scheduler(), choices(prefill_request(14, room=room))
        sent = []
        for number, request in enumerate(each):
            scheduler.allocate(request, first=100 * number + 100)
            sent += scheduler.step(request, 14).send
        answers = [scheduler.side.finished(request, is_aborted=False) for request in each]
        assert [each.request for each in sent] == ["0_r"]
        assert [keeps for keeps, _ in answers] == [True, False, False]
        assert {parameters[ROOM] for _, parameters in answers if parameters is not None} == {sent[0].room}
        assert len([parameters for _, parameters in answers if parameters is not None]) == 3

    def test_one_that_comes_when_the_first_has_been_sent_is_not_sent_again(self):
        scheduler, (first, second, _) = Scheduler(), choices(prefill_request(14, room=None))
        scheduler.allocate(first)
        (sent,) = scheduler.step(first, 14).send
        scheduler.side.finished(first, is_aborted=False)
        scheduler.side.reported(["0_r"], ())
        scheduler.allocate(second)
        assert scheduler.step(second, 14).send == []
        keeps, parameters = scheduler.side.finished(second, is_aborted=False)
        assert parameters is not None
        assert (keeps, parameters[ROOM]) == (False, sent.room)

    @pytest.mark.parametrize("name", ["1_r", "0_r"], ids=["like another choice", "used again"])
    def test_another_request_is_sent_by_itself_whatever_its_name(self, name: str):
        """Names are the caller's where vLLM is told not to make them unique."""
        scheduler, (first, _, _) = Scheduler(), choices(prefill_request(14, room=None))
        second = replace(first, request_id=name, arrival_time=1.0)
        rooms = set()
        for number, request in enumerate((first, second)):
            scheduler.allocate(request, first=100 * number + 100)
            (sent,) = scheduler.step(request, 14).send
            _, answered = scheduler.side.finished(request, is_aborted=False)
            assert answered is not None
            assert answered[ROOM] == sent.room
            rooms.add(sent.room)
            scheduler.side.reported([request.request_id], ())
        assert len(rooms) == 2

    def test_one_that_is_aborted_answers_nothing(self):
        scheduler, (first, second, _) = Scheduler(), choices(prefill_request(14))
        scheduler.allocate(first)
        scheduler.allocate(second)
        assert scheduler.side.finished(second, is_aborted=True) == (False, None)

    def test_one_that_is_aborted_before_it_is_scheduled_refuses_nothing_that_another_is_sent_for(self):
        scheduler, (first, second, _) = Scheduler(), choices(prefill_request(14))
        scheduler.allocate(first)
        scheduler.side.finished(second, is_aborted=True)
        assert scheduler.step().refuse == {}
        scheduler.side.finished(first, is_aborted=True)
        assert list(scheduler.step().refuse) == [9]

    def test_requests_that_are_no_choices_are_all_sent(self):
        scheduler = Scheduler()
        for name, room in (("r", 9), ("q", 10), ("cmpl-1-0-abc", 11)):
            request = replace(prefill_request(14, room=room), request_id=name)
            scheduler.allocate(request)
            assert [sent.room for sent in scheduler.step(request, 14).send] == [room]

    @pytest.mark.parametrize("is_first", [True, False])
    def test_a_choice_that_ends_before_it_is_scheduled_refuses_no_room_of_another(self, is_first: bool):
        scheduler, each = Scheduler(), choices(prefill_request(14))
        if not is_first:
            scheduler.allocate(each[0])
        scheduler.side.finished(each[1], is_aborted=True)
        assert set(scheduler.step().refuse) == ({9} if is_first else set())


def test_only_the_latest_requests_are_remembered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fetching, "MOST_REMEMBERED", 2)
    scheduler = Scheduler()
    asked = [prefill_request(14, room=room) for room in (1, 2, 3)]
    each = [[replace(one, request_id=f"{choice}_{number}") for choice in "01"] for number, one in enumerate(asked)]
    for first, _ in each:
        scheduler.allocate(first)
    for (_, second), sent in ((each[2], []), (each[0], [1])):
        scheduler.allocate(second)
        assert [blocks.room for blocks in scheduler.step(second, 14).send] == sent


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

    def test_parameters_of_another_release_are_read_as_far_as_they_are_known(self):
        novelty = {"kvferry_novelty": {"one": [2]}, "remote_host": "elsewhere"}
        sent = send_parameters({"do_remote_decode": True, ROOM: 7} | novelty)
        assert sent is not None
        params = answer(sent, engine="p", request="r", tokens=3)
        assert receive_parameters(params | novelty) == ReceiveParameters(7, "p")
        said_before = {
            "do_remote_prefill",
            "do_remote_decode",
            "remote_engine_id",
            "remote_request_id",
            "remote_num_tokens",
        }
        assert said_before | {ROOM} <= params.keys(), "the release before has them from us"
        needed_before = {"do_remote_prefill": True, "remote_engine_id": "p", ROOM: 7}
        assert receive_parameters(needed_before) == ReceiveParameters(7, "p"), "and says no more"


class TestConditions:
    """What a request's cache depends on goes with its blocks, of the tokens that are exchanged."""

    def test_every_chunk_that_is_sent_carries_them_and_a_preemption_changes_nothing(self):
        asked = []

        def conditions(_: Any, tokens: int) -> dict[str, bytes]:
            asked.append(tokens)
            return {"prompt": b"1"}

        scheduler = Scheduler(conditions=made_up(conditions))
        request = prefill_request(13)
        scheduler.allocate(request)
        assert [each.depends_on for each in scheduler.step(request, 8).send] == [{"prompt": b"1"}]
        request.num_computed_tokens = 0
        scheduler.step(preempted=("r",))
        scheduler.allocate(request)
        assert [each.depends_on for each in scheduler.step(request, 13).send] == [{"prompt": b"1"}]
        assert asked == [12], "once, of all tokens but the last"

    @pytest.mark.parametrize("request_of", [decode_request, prefill_request])
    def test_a_request_of_which_they_are_not_known_waits_for_them(self, request_of: Callable[[int], Request]):
        known: list[str] = []
        scheduler = Scheduler(conditions=made_up(are_known=lambda each, _: each.request_id in known))
        request = request_of(13)
        assert scheduler.side.tokens_elsewhere(request, 0) is None
        assert scheduler.side.tokens_elsewhere(replace(request, kv_transfer_params=None), 0) == 0, "nobody asks for it"
        known.append("r")
        assert scheduler.side.tokens_elsewhere(request, 0) == (12 if request_of is decode_request else 0)

    @pytest.mark.parametrize("params", [None, {"do_remote_decode": False}, {"do_remote_decode": True, ROOM: -1}])
    @pytest.mark.parametrize("waits", [True, False])
    def test_an_adapter_that_a_request_has_loaded_which_is_not_exchanged_is_what_it_was_then(
        self, waits: bool, params: dict[str, Any] | None, tmp_path: Path
    ):
        """vLLM loads it with the first request that has it, whatever request that is, and then has it."""
        known = DependsOn()
        scheduler = Scheduler(conditions=known)

        def write(content: bytes) -> None:
            (tmp_path / "adapter_model.bin").write_bytes(content)
            (tmp_path / "adapter_config.json").write_text("{}")

        def is_known(request: Request) -> bool:
            return scheduler.side.tokens_elsewhere(request, 0) is not None

        lora = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=str(tmp_path), load_inplace=False)
        plain, asked = Request("plain", 13, params), prefill_request(13)
        plain.lora_request = asked.lora_request = lora  # type: ignore[attr-defined]
        write(b"1")
        scheduler.side.came_in(plain)
        eventually("it is known", lambda: is_known(plain))
        scheduler.allocate(plain)
        scheduler.step(plain, 13)
        if waits:
            scheduler.side.came_in(asked)
            eventually("it is known", lambda: is_known(asked))
        write(b"22")
        eventually("it is known", lambda: is_known(asked))
        scheduler.allocate(asked)
        (sent,) = scheduler.step(asked, 13).send
        assert sent.depends_on["LoRA adapter"] != DependsOn().of(asked, 12)["LoRA adapter"], "vLLM has the first"

    @pytest.mark.parametrize("request_of", [decode_request, prefill_request])
    def test_they_are_found_out_from_the_moment_on_that_a_request_comes_in(self, request_of: Callable[[int], Request]):
        begun: list[tuple[str, int]] = []

        def are_known(request: Any, tokens: int) -> bool:
            begun.append((request.request_id, tokens))
            return False

        scheduler = Scheduler(conditions=made_up(are_known=are_known))
        scheduler.side.came_in(request_of(13))
        scheduler.side.came_in(Request("alone", 13))
        assert begun == [("r", 12)]

    def test_a_request_that_ends_before_they_are_known_is_refused_without_a_wait(self):
        def never(request: Any, tokens: int) -> dict[str, bytes]:
            raise AssertionError("the scheduler would wait for it")

        scheduler = Scheduler(conditions=made_up(never, are_known=lambda *_: False))
        scheduler.side.finished(decode_request(13), is_aborted=True)
        (declined,) = scheduler.step().receive
        assert not declined.is_wanted
        assert declined.problem == "the request ended before it was scheduled"

    @pytest.mark.parametrize("external", [12, 4, 0])
    def test_a_request_for_a_cache_carries_them_also_where_nothing_is_missing(self, external: int):
        scheduler = Scheduler(conditions=made_up(lambda request, tokens: {"prompt": b"%d" % tokens}))
        scheduler.allocate(decode_request(13), external=external)
        assert [each.depends_on for each in scheduler.step().receive] == [{"prompt": b"12"}]

    def test_a_request_that_ended_early_is_declined_with_them(self):
        scheduler = Scheduler(conditions=made_up(lambda request, tokens: {"prompt": b"%d" % tokens}))
        scheduler.side.finished(decode_request(13), is_aborted=True)
        assert [each.depends_on for each in scheduler.step().receive] == [{"prompt": b"12"}]
