"""The connector's side in vLLM's scheduler: which blocks leave and come, and when vLLM may have them back.

The last token of a prompt is never sent. vLLM computes it on the decode side in any case, to sample from it, and drops
blocks that lie before the window of the token after those it counts as there: with the whole prompt counted, it would
drop one that the last token attends to. A model that drafts with several modules reads further ahead, and as many
tokens are held back: what those modules cache of the last tokens depends on drafts that nobody has verified.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import numpy as np

from kvferry.engines.vllm.caches import CacheGroup
from kvferry.engines.vllm.choices import Fetch, FetchState, FirstChoices, fetch_key, send_key
from kvferry.engines.vllm.holding import HeldRequests
from kvferry.engines.vllm.objects import Block, BlockPool, BlockTables, Request
from kvferry.engines.vllm.parameters import (
    ReceiveParameters,
    SendParameters,
    answer,
    receive_parameters,
    send_parameters,
)
from kvferry.engines.vllm.stats import TransferLog
from kvferry.engines.vllm.steps import BlocksToReceive, BlocksToSend, GroupBlocks, Step
from kvferry.errors import UsageError
from kvferry.loggers import logger_of

log = logger_of(__name__)

_SHORTENED = "_p_side_truncated"
"""In a request's parameters: its prompt has been cut. vLLM's NIXL connector marks so what it has cut, and looks for it,
so that beside each other (MultiConnector) the two cut once."""

_ENDED = "ended on the prefill side before"


Conditions = Callable[[Any, int], dict[str, bytes]]
"""What the cache of a request depends on; see `identity.Conditions`."""


@dataclass(slots=True)
class _Sending:
    """A request that is being sent.

    Attributes:
        next_blocks: by group, the position of the first block that the workers have not got yet.
        is_begun: whether the workers have got any.
        is_complete: whether they have got all, of steps that may be queued and not computed: a preemption undoes it.
        is_outdated: whether no more of it is to leave, though it be computed again: its room stands for what was there.
        kept: blocks that vLLM would give away though they are still being read.
        depends_on: digests of what its cache depends on.
    """

    request: Request
    params: SendParameters
    tokens: int
    next_blocks: dict[str, int] = field(default_factory=dict)
    is_begun: bool = False
    is_complete: bool = False
    is_outdated: bool = False
    kept: list[Block] = field(default_factory=list)
    depends_on: dict[str, bytes] = field(default_factory=dict)


class SchedulerSide:
    """The connector in the scheduler, owned by its thread. No method waits for anything.

    Attributes:
        log: counts the requests that no worker hears of.
        unfinished: requests of which the workers do not have all.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        engine: str,
        instance: str = "",
        may_send: bool,
        may_receive: bool,
        held_back_tokens: int = 1,
        hold_s: float = inf,
        conditions: Conditions | None = None,
        are_conditions_known: Callable[[Any, int], bool] = lambda *_: True,
        computed_here: Callable[[Any], None] = lambda _: None,
    ) -> None:
        """Begins with no requests.

        Args:
            groups: in the order of the block tables. Those that are not transferred are not among them.
            engine: this engine's name.
            instance: the name of this start of it, as its workers have it; empty if it has none.
            may_send: whether it sends caches.
            may_receive: whether it receives caches.
            held_back_tokens: how many of a prompt's last tokens are not sent. The same on both sides.
            hold_s: how long what was computed is held for decode engines in any case.
            conditions: returns what the cache of a request depends on, given how many of its tokens are exchanged;
                nothing if None.
            are_conditions_known: whether that is returned at once. If not, it is found out aside, and the request is
                scheduled later.
            computed_here: takes a request that is scheduled and not exchanged: vLLM may load its adapter with it.
        """
        self._computed_here = computed_here
        self._are_conditions_known = are_conditions_known
        self._conditions = conditions or (lambda *_: {})
        self._groups = tuple(groups)
        self._held_back_tokens = held_back_tokens
        self._has_state = any(group.has_state for group in groups)
        self._engine, self._instance = engine, instance
        self._may_send, self._may_receive = may_send, may_receive
        self._tables: BlockTables | None = None
        self._pool: BlockPool | None = None
        self._sending: dict[str, _Sending] = {}
        self.unfinished: dict[str, _Sending] = {}  # those of which the workers have not got all
        self._held = HeldRequests(hold_s)
        self._receiving: set[str] = set()
        self._outdated: set[str] = set()  # those whose caches are not to be used, even if they come
        self._mixed: set[str] = set()  # those that go on with what they had, and are not to be sent
        self._sent_choices: FirstChoices[SendParameters | None] = FirstChoices()  # None where it is not sent after all
        self._answered_choices: dict[str, Hashable] = {}  # of choices that the first one is sent for: what they share
        self._fetched_choices: FirstChoices[Fetch[Request]] = FirstChoices()
        self._fetches: dict[str, Fetch[Request]] = {}  # by the names of first choices that have not ended
        self._copied: dict[str, list[Block]] = {}  # blocks that are kept while they are copied, by whom they are for
        self._step = Step()
        self._drains = False
        self.log = TransferLog()

    def drain(self) -> None:
        """Has the workers told that the engine ends with the requests that it has. Only sets a flag."""
        self._drains = True

    def bind(self, tables: BlockTables, pool: BlockPool) -> None:
        """Takes where blocks are looked up and kept. Called once, before anything is scheduled."""
        self._tables, self._pool = tables, pool

    # ---- beginnings ---------------------------------------------------------------------------------------------

    def came_in(self, request: Request) -> None:
        """Takes a request that has just come in, before it is scheduled: its cache is kept for it from now on."""
        self._choose_one_way(request)
        self._expect(request)
        self._shorten(request)
        if _has_conditions(request):
            self._are_conditions_known(request, self._sent_tokens(request))  # they are found out from now on

    def _choose_one_way(self, request: Request) -> None:
        """Leaves to a request what it may be: its parameters come from a client, who may say anything.

        One that is fetched was not shortened here, whatever it says. Where there is recurrent state, what was fetched
        is that of the whole prompt but its end, and cannot be sent on as that of a prompt without this end.
        """
        params = request.kv_transfer_params
        if not (self._may_receive and params and params.get("do_remote_prefill")):
            return
        if _SHORTENED in params:
            params = request.kv_transfer_params = {key: params[key] for key in params if key != _SHORTENED}
        if self._has_state and self._may_send and params.get("do_remote_decode"):
            log.error(
                "request %s is computed here: it is to be fetched and to be sent on (do_remote_prefill and "
                "do_remote_decode), and recurrent state that was fetched cannot be",
                request.request_id,
            )
            self.log.not_received()
            _settled(request)

    def _shorten(self, request: Request) -> None:
        """Ends a prompt that is to be sent where what is sent ends, where there is recurrent state.

        That cannot be taken back to an earlier token, and the decode side computes the rest in any case.
        """
        params, count = request.kv_transfer_params, self._held_back_tokens
        if not (self._has_state and self._may_send and params and params.get("do_remote_decode")):
            return
        if _is_shortened(request) or request.num_prompt_tokens <= count or request.get_skip_reading_prefix_cache():
            return  # the decode side computes the prompt of the last kind itself
        for name in ("prompt_token_ids", "prompt_embeds", "prompt_is_token_ids"):  # a mixed prompt has all
            part = getattr(request, name, None)
            if part is not None:
                setattr(request, name, part[:-count])  # other choices may have the same list
        del request._all_token_ids[-count:]
        request.num_prompt_tokens -= count
        request.max_tokens = 1
        request.kv_transfer_params = {**params, _SHORTENED: True}

    def _expect(self, request: Request) -> None:
        """Has the prefill engine told that a request waits for its cache here."""
        try:
            params = self._receive_parameters(request)
        except UsageError:
            return  # it is said when the request is scheduled
        if params is not None and self._fetched_choices.get(fetch_key(request, params)) is None:
            self._step.expect[params.room] = params.engine

    def tokens_elsewhere(self, request: Request, computed_tokens: int) -> int | None:
        """Returns how many tokens can be fetched beyond those that are here; None as long as nobody knows.

        Nor is a request to be scheduled as long as it is not known what its cache depends on: this thread would wait.
        """
        if _has_conditions(request) and not self._are_conditions_known(request, self._sent_tokens(request)):
            return None
        self._held.asked(sum(-(-request.num_prompt_tokens // group.table_tokens) for group in self._groups))
        try:
            params = self._receive_parameters(request)
        except UsageError as error:
            log.error("request %s is computed here: %s", request.request_id, error)
            self.log.not_received()
            _settled(request)
            return 0
        if params is None:
            return 0
        tokens = max(0, self._sent_tokens(request) - computed_tokens)
        fetch = self._fetched_choices.get(fetch_key(request, params))
        if fetch is None or fetch.state is FetchState.FAILED:
            return tokens
        if fetch.state is FetchState.FETCHING:
            return None
        return tokens if self._can_copy(fetch, request, tokens) else 0

    def allocated(self, request: Request, blocks: Sequence[Sequence[Block]], tokens: int) -> None:
        """Takes the blocks that were allocated for a request, which is exchanged from now on, or computed here.

        Args:
            request: the request.
            blocks: those of the request, group by group.
            tokens: how many are to be fetched; 0 where all are here.
        """
        self._held.served()
        if not self._exchanges(request, blocks, tokens) and not request.num_computed_tokens:
            self._computed_here(request)

    def _exchanges(self, request: Request, blocks: Sequence[Sequence[Block]], tokens: int) -> bool:
        """Begins to fetch a request, or to send it. Returns whether it is exchanged."""
        name = request.request_id
        try:
            params = self._receive_parameters(request)
            if params is not None:
                _settled(request)
                self._fetch(params, request, blocks, tokens)
                return True
            sending = (
                send_parameters(request.kv_transfer_params)
                if self._may_send and name not in self._sending and name not in self._mixed
                else None
            )
        except UsageError as error:
            log.error("request %s is not transferred: %s", name, error)
            self.log.not_sent()
            return False
        if sending is None or not self._sent_tokens(request):
            return False
        if self._has_state and not _is_shortened(request):
            log.error("request %s is not sent: its recurrent state is that of tokens that are not sent", name)
            self.log.not_sent()
            return False
        self._begin_to_send(sending, request)
        return True

    def _receive_parameters(self, request: Request) -> ReceiveParameters | None:
        return receive_parameters(request.kv_transfer_params) if self._may_receive else None

    def _begin_to_send(self, params: SendParameters, request: Request) -> None:
        name = request.request_id
        key = send_key(request, params)
        if key is not None:
            if key in self._sent_choices:
                self._answered_choices[name] = key
                return
            self._sent_choices.add(key, params)
        tokens = self._sent_tokens(request)
        self._sending[name] = self.unfinished[name] = _Sending(
            request, params, tokens, depends_on=self._conditions(request, tokens)
        )

    def _fetch(
        self, params: ReceiveParameters, request: Request, blocks: Sequence[Sequence[Block]], tokens: int
    ) -> None:
        """Fetches a request, unless it is a choice of one that was fetched."""
        key = fetch_key(request, params)
        fetch = self._fetched_choices.get(key)
        if fetch is not None:
            if tokens:
                self._copy(fetch, params, request, blocks, tokens)
            return
        if key is not None and tokens:
            fetch = Fetch(request, FetchState.FETCHING)
            self._fetches[request.request_id] = fetch
            self._fetched_choices.add(key, fetch)
        elif key is not None:
            # What it has came from elsewhere, and may be on its way: the others have their own prefix, or compute.
            self._fetched_choices.add(key, Fetch(None, FetchState.FETCHED))
        self._ask(params, request, blocks, tokens)

    def _ask(self, params: ReceiveParameters, request: Request, blocks: Sequence[Sequence[Block]], tokens: int) -> None:
        wanted = self._wanted(params, request, blocks, tokens)
        self._step.expect.pop(params.room, None)
        if tokens or self._are_conditions_known(request, wanted.tokens):
            wanted = replace(wanted, depends_on=self._conditions(request, wanted.tokens))
        else:  # it ended before, and need not be waited for: the prefill engine hears that instead
            wanted = replace(wanted, problem="the request ended before it was scheduled")
        self._step.receive.append(wanted)
        if tokens:
            self._receiving.add(request.request_id)

    def _wanted(
        self, params: ReceiveParameters, request: Request, blocks: Sequence[Sequence[Block]], tokens: int
    ) -> BlocksToReceive:
        there = self._sent_tokens(request)
        groups, problem = {}, ""
        for group, table in zip(self._groups, blocks, strict=True):
            first, stop = self._needed(group, there - tokens, there)
            if not tokens:
                first = stop
            groups[group.name] = replace(
                _numbers(_position(group, first), table[first:stop]),
                held_tokens=None if group.is_prefix_cached or not tokens else 0,
            )
            if len(groups[group.name].blocks) < stop - first:
                problem = f"vLLM keeps no block for some of the tokens before token {there} in group {group.name!r}"
        return BlocksToReceive(
            request.request_id,
            params.room,
            params.engine,
            there - tokens,
            there,
            groups,
            problem,
            instance=params.instance,
        )

    # ---- choices of one request ----------------------------------------------------------------------------------

    def _can_copy(self, fetch: Fetch[Request], request: Request, tokens: int) -> bool:
        """Whether the first choice still has what another one lacks."""
        first, there = fetch.request, self._sent_tokens(request)
        if self._has_state:
            return False  # the first choice has computed on, and its state with it
        if first is None or first.prompt_token_ids != request.prompt_token_ids or first.num_computed_tokens < there:
            return False
        return all(
            len(blocks) == stop - start and not any(block.is_null for block in blocks)
            for _, start, stop, blocks in self._blocks_of(first, there, tokens)
        )

    def _blocks_of(
        self, request: Request, there: int, tokens: int
    ) -> Iterator[tuple[CacheGroup, int, int, Sequence[Block]]]:
        """Yields, for each group, the range of blocks with the last of the first so many tokens, and those blocks."""
        assert self._tables is not None
        for group, table in zip(self._groups, self._tables(request.request_id), strict=True):
            start, stop = self._needed(group, there - tokens, there)
            yield group, start, stop, table[start:stop]

    def _copy(
        self,
        fetch: Fetch[Request],
        params: ReceiveParameters,
        request: Request,
        blocks: Sequence[Sequence[Block]],
        tokens: int,
    ) -> None:
        """Lets the workers copy the first choice's blocks, which are kept until they have."""
        wanted = self._wanted(params, request, blocks, tokens)
        if wanted.problem or fetch.request is None or fetch.state is not FetchState.FETCHED:
            problem = wanted.problem or "the cache of another choice of the same request did not come"
            self._step.receive.append(replace(wanted, problem=problem, copied_from=wanted.groups))
            return
        assert self._pool is not None
        kept: list[Block] = []
        copied_from = {}
        for group, start, _, theirs in self._blocks_of(fetch.request, wanted.tokens, tokens):
            copied_from[group.name] = _numbers(_position(group, start), theirs)
            kept += theirs
        self._pool.touch(kept)
        self._copied[request.request_id] = kept
        self._step.receive.append(replace(wanted, copied_from=copied_from))

    @staticmethod
    def _needed(group: CacheGroup, prefix_tokens: int, tokens: int) -> tuple[int, int]:
        """Returns the first block of a request that is needed, and the one after the last."""
        if group.has_state:
            stop = -(-tokens // group.table_tokens)
            return max(0, stop - 1), stop
        first = max(prefix_tokens if group.is_prefix_cached else 0, group.first_attended(tokens))
        return first // group.table_tokens, -(-tokens // group.table_tokens)

    # ---- every step ---------------------------------------------------------------------------------------------

    def take_step(
        self, scheduled_tokens: Mapping[str, int], preempted: Iterable[str], *, is_paused: bool = False
    ) -> Step:
        """Returns what the workers get with a step that is about to run.

        Args:
            scheduled_tokens: by request, how many tokens the step computes.
            preempted: requests whose blocks were taken since the step before.
            is_paused: whether vLLM is, and waits until nothing is held.
        """
        step, self._step = self._step, Step()
        step.drains = self._drains
        for name in preempted:
            fetch = self._fetches.pop(name, None)
            if fetch is not None:
                fetch.request = None
            sending = self._sending.get(name)
            if sending is not None:
                step.preempted.add(name)
                sending.next_blocks.clear()
                # All is computed again, and given to the workers again: they know what they still lack.
                sending.is_complete = False
                if not sending.is_outdated:
                    self.unfinished[name] = sending
                self._release(sending)
        for name, sending in list(self.unfinished.items()):
            if name in scheduled_tokens:
                self._send(sending, sending.request.num_computed_tokens + scheduled_tokens[name], step)
        if self._pool is not None:
            step.needed = self._held.to_give_up(self._pool.get_num_free_blocks(), is_paused=is_paused)
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
                stop = 0 if group.has_state else computed_tokens // group.table_tokens
            if first < stop:
                groups[group.name] = _numbers(_position(group, first), table[first:stop])
                sending.next_blocks[group.name] = stop
                if len(groups[group.name].blocks) < stop - first:
                    step.give_up[name] = f"vLLM has dropped blocks of group {group.name!r} that were to be sent"
                elif group.gives_blocks_away:
                    self._keep(sending, table[first:stop])
        if groups or is_last:
            step.send.append(
                BlocksToSend(name, sending.params.room, sending.tokens, groups, is_last, sending.depends_on)
            )
            sending.is_begun = True
        if is_last:
            sending.is_complete = True
            del self.unfinished[name]

    def _keep(self, sending: _Sending, blocks: Sequence[Block]) -> None:
        """Keeps blocks that vLLM gives away as soon as no later token needs them."""
        assert self._pool is not None
        self._pool.touch(blocks)
        sending.kept += blocks

    def _release(self, sending: _Sending) -> None:
        """Gives back what was kept of a request: nobody reads it any more, or the workers see to that."""
        kept, sending.kept = sending.kept, []
        if kept:
            assert self._pool is not None
            self._pool.free_blocks(kept)

    # ---- ends ---------------------------------------------------------------------------------------------------

    @property
    def being_sent(self) -> list[Request]:
        """The requests that are sent, some of which have ended."""
        return [each.request for each in self._sending.values()]

    def outdate(self, requests: Iterable[Request], reason: str, arrived: Collection[str] = ()) -> None:
        """Ends what is on its way of requests: what computed their caches is there no more.

        Args:
            requests: those.
            reason: says so.
            arrived: those of them whose caches have come, and with which vLLM has not gone on yet.
        """
        self._step.fail.update(arrived)
        for request in requests:
            name = request.request_id
            self._answered_choices.pop(name, None)
            sending, fetch = self._sending.get(name), self._fetches.get(name)
            if fetch is not None:
                fetch.request = None  # no other choice is to have it
            if sending is not None:
                self.unfinished.pop(name, None)
                sending.is_outdated = True
                self._withdraw(sending)
            elif not (name in self._receiving or name in arrived) and self._tables and any(self._tables(name)):
                self._mixed.add(name)
            if name in self._receiving or name in self._copied:
                self._outdated.add(name)
            if name in self._receiving or (sending is not None and sending.is_begun):
                self._step.give_up[name] = reason

    def finished(self, request: Request, *, is_aborted: bool) -> tuple[bool, dict[str, Any] | None]:
        """Ends a request.

        Returns:
            Whether its blocks are to be kept until the workers have reported it, and what the answer is to contain.
        """
        name = request.request_id
        self._mixed.discard(name)
        self._decline(request)
        fetch = self._fetches.pop(name, None)
        if fetch is not None:
            fetch.request = None
        if name in self._receiving:
            self._receiving.discard(name)
            self._step.give_up[name] = "the request was aborted on the decode side"
            if fetch is not None:
                fetch.state = FetchState.FAILED
        answered = self._answered_choices.pop(name, None)
        if answered is not None:
            first, tokens = self._sent_choices.get(answered), self._sent_tokens(request)
            return False, None if is_aborted or first is None else self._answer(first, name, tokens)
        sending = self._sending.get(name)
        if sending is not None:
            self.unfinished.pop(name, None)
            if is_aborted or not sending.is_complete:
                self._withdraw(sending)
        if sending is None or not sending.is_begun:
            self._refuse(request, is_first=self._sending.pop(name, None) is not None)
            return False, None
        if sending.is_outdated:  # the workers hear of it, and nobody is to ask for it
            return True, None
        if is_aborted or not sending.is_complete:
            how = "was aborted on the prefill side" if is_aborted else f"{_ENDED} all of it was computed"
            self._step.give_up[name] = f"the request {how}"
            return True, None
        assert self._tables is not None
        self._held.add(name, sum(not block.is_null for table in self._tables(name) for block in table))
        return True, self._answer(sending.params, name, sending.tokens)

    def _withdraw(self, sending: _Sending) -> None:
        """Has no other choice promise what is not sent."""
        key = send_key(sending.request, sending.params)
        if key is not None:
            self._sent_choices.add(key, None)

    def _answer(self, params: SendParameters, request: str, tokens: int) -> dict[str, Any]:
        return answer(params, engine=self._engine, instance=self._instance, request=request, tokens=tokens)

    def _decline(self, request: Request) -> None:
        """Asks for no pages of a request that ended before it was scheduled, so that the prefill engine releases it."""
        try:
            params = self._receive_parameters(request)
        except UsageError:
            return  # no engine has it
        if params is None:
            return
        _settled(request)
        key = fetch_key(request, params)
        if self._fetched_choices.get(key) is None:
            if key is not None:
                self._fetched_choices.add(key, Fetch(None, FetchState.FAILED))
            self._ask(params, request, [()] * len(self._groups), 0)

    def _refuse(self, request: Request, *, is_first: bool) -> None:
        """Has the decode engine told that a request will not be sent, if it may ask for it.

        Args:
            request: the request.
            is_first: whether it was to be sent itself, and not another choice for it.
        """
        try:
            params = send_parameters(request.kv_transfer_params) if self._may_send else None
        except UsageError:
            return  # nobody can ask for it
        if params is None or not params.is_known:
            return
        if is_first or send_key(request, params) not in self._sent_choices:
            self._step.refuse[params.room] = f"the request {_ENDED} any of it was computed"

    def reported(self, sent: Iterable[str], received: Collection[str], failed: Collection[str] = ()) -> set[str]:
        """Takes the requests that the workers are done with.

        Args:
            sent: whose blocks are not read any more.
            received: whose blocks are not written to any more.
            failed: those of them that did not come.

        Returns:
            Those that came before the workers heard that they are not to be used: they will report them once more.
        """
        again = self._outdated.intersection(received).difference(failed)
        self._outdated.difference_update(received)
        self._step.fail |= again
        for name in sent:
            self._held.forget(name)
            self.unfinished.pop(name, None)  # one that ended between its preemption and the step that told of that
            sending = self._sending.pop(name, None)
            if sending is not None:
                self._release(sending)
        self._receiving.difference_update(received)
        for name in received:
            fetch = self._fetches.get(name)
            if fetch is not None and fetch.state is FetchState.FETCHING:
                fetch.state = FetchState.FAILED if name in failed else FetchState.FETCHED
            copied = self._copied.pop(name, None)
            if copied is not None:
                assert self._pool is not None
                self._pool.free_blocks(copied)
        return again

    def _sent_tokens(self, request: Request) -> int:
        held_back = 0 if _is_shortened(request) else self._held_back_tokens
        return max(0, request.num_prompt_tokens - held_back)


def _settled(request: Request) -> None:
    """Marks a request as fetched: vLLM computes it when it schedules it again, after a failure or a preemption.

    Others have the same parameters where vLLM runs in one process: the choices of one request.
    """
    assert request.kv_transfer_params is not None
    request.kv_transfer_params = {**request.kv_transfer_params, "do_remote_prefill": False}


def _has_conditions(request: Request) -> bool:
    """Whether anybody asks what a request's cache depends on: itself, or others with its adapter."""
    return bool(request.kv_transfer_params or getattr(request, "lora_request", None))


def _is_shortened(request: Request) -> bool:
    """Whether the tokens that are held back were cut off the prompt already."""
    return bool(request.kv_transfer_params and request.kv_transfer_params.get(_SHORTENED))


def _position(group: CacheGroup, first: int) -> int:
    """Returns the position of blocks among those that are exchanged: the one with a request's state is the only one."""
    return 0 if group.has_state else first


def _numbers(first: int, blocks: Sequence[Block]) -> GroupBlocks:
    """Returns blocks by number, without those that vLLM does not keep."""
    return GroupBlocks(first, np.array([block.block_id for block in blocks if not block.is_null], np.int64))
