"""The connector's side in vLLM's scheduler: which blocks leave and come, and when vLLM may have them back.

The last token of a prompt is never sent. vLLM computes it on the decode side in any case, to sample from it, and drops
blocks that lie before the window of the token after those it counts as there: with the whole prompt counted, it would
drop one that the last token attends to. A model that drafts with several modules reads further ahead, and as many
tokens are held back: what those modules cache of the last tokens depends on drafts that nobody has verified.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

from kvferry.engines.vllm.caches import Block, BlockPool, BlockTables, CacheGroup, Request
from kvferry.engines.vllm.fetching import Fetches, FirstChoices, choices_of
from kvferry.engines.vllm.holding import HeldRequests
from kvferry.engines.vllm.parameters import (
    ReceiveParameters,
    SendParameters,
    answer,
    receive_parameters,
    send_parameters,
)
from kvferry.engines.vllm.stats import TransferLog
from kvferry.engines.vllm.steps import BlocksToSend, GroupBlocks, Step
from kvferry.errors import UsageError
from kvferry.loggers import logger_of

if TYPE_CHECKING:
    from kvferry.engines.vllm.identity import Conditions

log = logger_of(__name__)

_SHORTENED = "_p_side_truncated"
"""In a request's parameters: its prompt has been cut. vLLM's NIXL connector marks so what it has cut, and looks for it,
so that beside each other (MultiConnector) the two cut once."""

_ENDED = "ended on the prefill side before"


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
        conditions: Conditions,
    ) -> None:
        """Begins with no requests.

        Args:
            groups: in the order of the block tables. Those that are not transferred are not among them.
            instance: the name of this start of it, as its workers have it; empty if it has none.
            held_back_tokens: how many of a prompt's last tokens are not sent. The same on both sides.
            hold_s: how long what was computed is held for decode engines in any case.
            conditions: what the caches of requests depend on. A request of which it is not known is scheduled later.
        """
        self._conditions = conditions
        self._groups = tuple(groups)
        self._held_back_tokens = held_back_tokens
        self._engine, self._instance = engine, instance
        self._may_send, self._may_receive = may_send, may_receive
        self._tables: BlockTables | None = None
        self._pool: BlockPool | None = None
        self._sending: dict[str, _Sending] = {}
        self.unfinished: dict[str, _Sending] = {}  # those of which the workers have not got all
        self._held = HeldRequests(hold_s)
        self._fetches = Fetches(self._groups, conditions)
        self._mixed: set[str] = set()  # those that go on with what they had, and are not to be sent
        self._sent_choices: FirstChoices[SendParameters | None] = FirstChoices()  # None where it is not sent after all
        self._answered_choices: dict[str, Hashable] = {}  # of choices that the first one is sent for: what they share
        self._step = Step()
        self._drains = False
        self.log = TransferLog()

    def drain(self) -> None:
        """Has the workers told that the engine ends with the requests that it has. Only sets a flag."""
        self._drains = True

    def bind(self, tables: BlockTables, pool: BlockPool) -> None:
        """Takes where blocks are looked up and kept. Called once, before anything is scheduled."""
        self._tables, self._pool = tables, pool
        self._fetches.bind(tables, pool)

    # ---- beginnings ---------------------------------------------------------------------------------------------

    def came_in(self, request: Request) -> None:
        """Takes a request that has just come in, before it is scheduled: its cache is kept for it from now on."""
        self._choose_one_way(request)
        self._expect(request)
        self._shorten(request)
        if _has_conditions(request):
            self._conditions.are_known(request, self._sent_tokens(request))  # they are found out from now on

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
        if params is not None and not self._fetches.is_begun(params, request):
            self._step.expect[params.room] = params.engine

    def tokens_elsewhere(self, request: Request, computed_tokens: int) -> int | None:
        """Returns how many tokens can be fetched beyond those that are here; None as long as nobody knows.

        Nor is a request to be scheduled as long as it is not known what its cache depends on: this thread would wait.
        """
        if _has_conditions(request) and not self._conditions.are_known(request, self._sent_tokens(request)):
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
        there = self._sent_tokens(request)
        return self._fetches.missing(params, request, there, max(0, there - computed_tokens))

    def allocated(self, request: Request, blocks: Sequence[Sequence[Block]], tokens: int) -> None:
        """Takes the blocks that were allocated for a request, which is exchanged from now on, or computed here.

        Args:
            blocks: those of the request, group by group.
            tokens: how many are to be fetched; 0 where all are here.
        """
        self._held.served()
        if not self._exchanges(request, blocks, tokens) and not request.num_computed_tokens:
            self._conditions.computed_here(request)

    def _exchanges(self, request: Request, blocks: Sequence[Sequence[Block]], tokens: int) -> bool:
        """Begins to fetch a request, or to send it. Returns whether it is exchanged."""
        name = request.request_id
        try:
            params = self._receive_parameters(request)
            if params is not None:
                _settled(request)
                wanted = self._fetches.wanted(params, request, self._sent_tokens(request), blocks, tokens)
                self._fetches.begin(params, request, wanted, self._step)
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
        key = choices_of(request, params)
        if key is not None:
            if key in self._sent_choices:
                self._answered_choices[name] = key
                return
            self._sent_choices[key] = params
        tokens = self._sent_tokens(request)
        self._sending[name] = self.unfinished[name] = _Sending(
            request, params, tokens, depends_on=self._conditions.of(request, tokens)
        )

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
            self._fetches.lost_blocks(name)
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
            first, stop = group.needed(0, sending.tokens)
            first = max(first, sending.next_blocks.get(group.name, 0))
            if not is_last:
                stop = 0 if group.has_state else computed_tokens // group.table_tokens
            if first < stop:
                groups[group.name] = GroupBlocks.of(group, first, table[first:stop])
                sending.next_blocks[group.name] = stop
                if len(groups[group.name].blocks) < stop - first:
                    step.give_up[name] = f"vLLM has dropped blocks of group {group.name!r} that were to be sent"
                elif group.gives_blocks_away:  # as soon as no later token needs them
                    assert self._pool is not None
                    self._pool.touch(table[first:stop])
                    sending.kept += table[first:stop]
        if groups or is_last:
            step.send.append(
                BlocksToSend(name, sending.params.room, sending.tokens, groups, is_last, sending.depends_on)
            )
            sending.is_begun = True
        if is_last:
            sending.is_complete = True
            del self.unfinished[name]

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
            arrived: those of them whose caches have come, and with which vLLM has not gone on yet.
        """
        self._step.fail.update(arrived)
        for request in requests:
            name = request.request_id
            self._answered_choices.pop(name, None)
            sending, is_fetched = self._sending.get(name), self._fetches.outdate(name, reason, self._step)
            if sending is not None:
                self.unfinished.pop(name, None)
                sending.is_outdated = True
                self._withdraw(sending)
            elif not (is_fetched or name in arrived) and self._tables and any(self._tables(name)):
                self._mixed.add(name)
            if sending is not None and sending.is_begun:
                self._step.give_up[name] = reason

    def finished(self, request: Request, *, is_aborted: bool) -> tuple[bool, dict[str, Any] | None]:
        """Ends a request.

        Returns:
            Whether its blocks are to be kept until the workers have reported it, and what the answer is to contain.
        """
        name = request.request_id
        self._mixed.discard(name)
        self._decline(request)
        self._fetches.ended(name, self._step)
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
        key = choices_of(sending.request, sending.params)
        if key is not None:
            self._sent_choices[key] = None

    def _answer(self, params: SendParameters, request: str, tokens: int) -> dict[str, Any]:
        return answer(params, engine=self._engine, instance=self._instance, request=request, tokens=tokens)

    def _decline(self, request: Request) -> None:
        """Has the prefill engine release a request that ended before it was scheduled here."""
        try:
            params = self._receive_parameters(request)
        except UsageError:
            return  # no engine has it
        if params is None:
            return
        _settled(request)
        wanted = self._fetches.wanted(params, request, self._sent_tokens(request))
        self._fetches.decline(params, request, wanted, self._step)

    def _refuse(self, request: Request, *, is_first: bool) -> None:
        """Has the decode engine told that a request will not be sent, if it may ask for it.

        Args:
            is_first: whether it was to be sent itself, and not another choice for it.
        """
        try:
            params = send_parameters(request.kv_transfer_params) if self._may_send else None
        except UsageError:
            return  # nobody can ask for it
        if params is None or not params.is_known:
            return
        if is_first or choices_of(request, params) not in self._sent_choices:
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
        for name in sent:
            self._held.forget(name)
            self.unfinished.pop(name, None)  # one that ended between its preemption and the step that told of that
            sending = self._sending.pop(name, None)
            if sending is not None:
                self._release(sending)
        return self._fetches.reported(received, failed, self._step)

    @property
    def _has_state(self) -> bool:
        return any(group.has_state for group in self._groups)

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
