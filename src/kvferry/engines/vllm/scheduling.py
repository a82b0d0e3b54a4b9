"""The connector's side in vLLM's scheduler: which blocks leave and come, and when vLLM may have them back.

The last token of a prompt is never sent. vLLM computes it on the decode side in any case, to sample from it, and drops
blocks that lie before the window of the token after those it counts as there: with the whole prompt counted, it would
drop one that the last token attends to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvferry.engines.vllm.layouts import CacheGroup
from kvferry.engines.vllm.parameters import (
    ReceiveParameters,
    SendParameters,
    answer,
    receive_parameters,
    send_parameters,
)
from kvferry.engines.vllm.steps import BlocksToReceive, BlocksToSend, GroupBlocks, Step
from kvferry.errors import UsageError

log = logging.getLogger(__name__)


class Block(Protocol):
    """A block of vLLM's; a null one stands for a block that is not kept."""

    block_id: int
    is_null: bool


class Request(Protocol):
    """What is needed of a request of vLLM's."""

    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int
    kv_transfer_params: dict[str, Any] | None


BlockTables = Callable[[str], "Sequence[Sequence[Block]]"]
"""The blocks of a request, group by group."""


class BlockPool(Protocol):
    """What keeps blocks from being given to others."""

    def touch(self, blocks: Sequence[Any]) -> None:
        """Adds a reference to each."""

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Drops a reference to each."""


@dataclass(slots=True)
class _Sending:
    """A request that is being sent.

    Attributes:
        next_blocks: by group, the position of the first block that the workers have not got yet.
        is_begun: whether the workers have got any.
        is_complete: whether they have got all.
        kept: blocks that vLLM would give away though they are still being read.
    """

    request: Request
    params: SendParameters
    tokens: int
    next_blocks: dict[str, int] = field(default_factory=dict)
    is_begun: bool = False
    is_complete: bool = False
    kept: list[Block] = field(default_factory=list)


class SchedulerSide:
    """The connector in the scheduler, owned by its thread. No method waits for anything."""

    def __init__(self, groups: Sequence[CacheGroup], *, engine: str, may_send: bool, may_receive: bool) -> None:
        """Begins with no requests.

        Args:
            groups: in the order of the block tables. Those that are not transferred are not among them.
            engine: this engine's name.
        """
        self._groups = tuple(groups)
        self._engine = engine
        self._may_send, self._may_receive = may_send, may_receive
        self._tables: BlockTables | None = None
        self._pool: BlockPool | None = None
        self._sending: dict[str, _Sending] = {}
        self._receiving: set[str] = set()
        self._step = Step()

    def bind(self, tables: BlockTables, pool: BlockPool) -> None:
        """Takes where blocks are looked up and kept. Called once, before anything is scheduled."""
        self._tables, self._pool = tables, pool

    # ---- beginnings ---------------------------------------------------------------------------------------------

    def tokens_elsewhere(self, request: Request, computed_tokens: int) -> int:
        """Returns how many tokens can be fetched beyond those that are here."""
        try:
            params = self._receive_parameters(request)
        except UsageError as error:
            log.error("request %s is computed here: %s", request.request_id, error)
            _settled(request)
            return 0
        return 0 if params is None else max(0, _sent_tokens(request) - computed_tokens)

    def allocated(self, request: Request, blocks: Sequence[Sequence[Block]], tokens: int) -> None:
        """Takes the blocks that were allocated for a request; begins to fetch it, or to send it.

        Args:
            blocks: those of the request, group by group.
            tokens: how many are to be fetched; 0 where all are here.
        """
        name = request.request_id
        try:
            params = self._receive_parameters(request)
            if params is not None:
                _settled(request)
                self._ask(params, request, blocks, tokens)
                return
            sending = (
                send_parameters(request.kv_transfer_params) if self._may_send and name not in self._sending else None
            )
        except UsageError as error:
            log.error("request %s is not transferred: %s", name, error)
            return
        if sending is not None and _sent_tokens(request):
            self._sending[name] = _Sending(request, sending, _sent_tokens(request))

    def _receive_parameters(self, request: Request) -> ReceiveParameters | None:
        return receive_parameters(request.kv_transfer_params) if self._may_receive else None

    def _ask(self, params: ReceiveParameters, request: Request, blocks: Sequence[Sequence[Block]], tokens: int) -> None:
        name, there = request.request_id, _sent_tokens(request)
        groups, problem = {}, ""
        for group, table in zip(self._groups, blocks, strict=True):
            first, stop = self._needed(group, there - tokens, there)
            if not tokens:
                first = stop
            groups[group.name] = _numbers(first, table[first:stop])
            if len(groups[group.name].blocks) < stop - first:
                problem = f"vLLM keeps no block for some of the tokens before token {there} in group {group.name!r}"
        self._step.receive.append(
            BlocksToReceive(name, params.room, params.engine, there - tokens, there, groups, problem)
        )
        if tokens:
            self._receiving.add(name)

    @staticmethod
    def _needed(group: CacheGroup, prefix_tokens: int, tokens: int) -> tuple[int, int]:
        """Returns the first block of a request that is needed, and the one after the last."""
        first = prefix_tokens
        if group.window_tokens is not None:
            first = max(first, tokens - group.window_tokens)
        return first // group.block_tokens, -(-tokens // group.block_tokens)

    # ---- every step ---------------------------------------------------------------------------------------------

    def take_step(self, scheduled_tokens: Mapping[str, int], preempted: Iterable[str]) -> Step:
        """Returns what the workers get with a step that is about to run.

        Args:
            scheduled_tokens: by request, how many tokens the step computes.
            preempted: requests whose blocks were taken since the step before.
        """
        step, self._step = self._step, Step()
        for name in preempted:
            sending = self._sending.get(name)
            if sending is not None:
                step.preempted.add(name)
                sending.next_blocks.clear()
        for name, tokens in scheduled_tokens.items():
            sending = self._sending.get(name)
            if sending is not None and not sending.is_complete:
                self._send(sending, sending.request.num_computed_tokens + tokens, step)
        return step

    def _send(self, sending: _Sending, computed_tokens: int, step: Step) -> None:
        computed_tokens = min(computed_tokens, sending.tokens)
        is_last = computed_tokens == sending.tokens
        if not (is_last or sending.params.is_known):
            return  # the decode side cannot ask for it yet, and until it does the request may be preempted
        assert self._tables is not None
        name, groups = sending.request.request_id, {}
        for group, table in zip(self._groups, self._tables(name), strict=True):
            first, stop = self._needed(group, 0, sending.tokens)
            first = max(first, sending.next_blocks.get(group.name, 0))
            if not is_last:
                stop = computed_tokens // group.block_tokens
            if first < stop:
                groups[group.name] = _numbers(first, table[first:stop])
                sending.next_blocks[group.name] = stop
                if len(groups[group.name].blocks) < stop - first:
                    step.give_up[name] = f"vLLM has dropped blocks of group {group.name!r} that were to be sent"
                elif group.window_tokens is not None:
                    self._keep(sending, table[first:stop])
        if groups or is_last:
            step.send.append(BlocksToSend(name, sending.params.room, sending.tokens, groups, is_last))
            sending.is_begun = True
        sending.is_complete = is_last

    def _keep(self, sending: _Sending, blocks: Sequence[Block]) -> None:
        """Keeps blocks of a window: vLLM gives them away as soon as no later token attends to them."""
        assert self._pool is not None
        self._pool.touch(blocks)
        sending.kept += blocks

    # ---- ends ---------------------------------------------------------------------------------------------------

    def finished(self, request: Request, *, is_aborted: bool) -> tuple[bool, dict[str, Any] | None]:
        """Ends a request.

        Returns:
            Whether its blocks are to be kept until the workers have reported it, and what the answer is to contain.
        """
        name = request.request_id
        self._decline(request)
        if name in self._receiving:
            self._receiving.discard(name)
            self._step.give_up[name] = "the request was aborted on the decode side"
        sending = self._sending.get(name)
        if sending is None or not sending.is_begun:
            self._sending.pop(name, None)
            self._refuse(request)
            return False, None
        if is_aborted or not sending.is_complete:
            self._step.give_up[name] = "the request was aborted on the prefill side"
            return True, None
        return True, answer(sending.params, engine=self._engine, request=name, tokens=sending.tokens)

    def _decline(self, request: Request) -> None:
        """Asks for no pages of a request that ended before it was scheduled, so that the prefill engine releases it."""
        try:
            params = self._receive_parameters(request)
        except UsageError:
            return  # no engine has it
        if params is not None:
            _settled(request)
            self._ask(params, request, [()] * len(self._groups), 0)

    def _refuse(self, request: Request) -> None:
        """Has the decode engine told that a request will not be sent, if it may ask for it."""
        try:
            params = send_parameters(request.kv_transfer_params) if self._may_send else None
        except UsageError:
            return  # nobody can ask for it
        if params is not None and params.is_known:
            self._step.refuse[params.room] = "the request ended on the prefill side before any of it was computed"

    def reported(self, sent: Iterable[str], received: Iterable[str]) -> None:
        """Takes the requests that the workers are done with."""
        for name in sent:
            sending = self._sending.pop(name, None)
            if sending is not None and sending.kept:
                assert self._pool is not None
                self._pool.free_blocks(sending.kept)
        self._receiving.difference_update(received)


def _sent_tokens(request: Request) -> int:
    return request.num_prompt_tokens - 1


def _settled(request: Request) -> None:
    """Marks a request as fetched: vLLM computes it when it schedules it again, after a failure or a preemption."""
    assert request.kv_transfer_params is not None
    request.kv_transfer_params["do_remote_prefill"] = False


def _numbers(first: int, blocks: Sequence[Block]) -> GroupBlocks:
    """Returns blocks by number, without those that vLLM does not keep."""
    return GroupBlocks(first, tuple(block.block_id for block in blocks if not block.is_null))
