"""The requests that a decode engine fetches, in vLLM's scheduler: where their caches go, and who copies what came.

The choices of a request with `n` > 1 have one prompt, one cache and one room. vLLM calls them "0_<name>", "1_<name>"
and so on, gives each the parameters of the one that was asked for, and schedules them like any others. A room is opened
once: the first choice sends, or fetches, for all of them. On the decode side the others wait for it and copy its
blocks; on the prefill side they answer with its room.

A caller's own requests may have such names as well, or one name twice. They have come in at other times: all choices of
one request have its time.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from kvferry.engines.vllm.caches import Block, BlockPool, BlockTables, CacheGroup, Request
from kvferry.engines.vllm.parameters import ReceiveParameters, SendParameters
from kvferry.engines.vllm.steps import BlocksToReceive, GroupBlocks, Step

if TYPE_CHECKING:
    from kvferry.engines.vllm.identity import Conditions

MOST_REMEMBERED = 4096
"""A choice may be scheduled long after the first one has ended. Those of older requests are taken for first ones."""

_CHOICE = re.compile(r"\d+_(?P<whole>.+)", re.DOTALL)

First = TypeVar("First")


class FirstChoices(OrderedDict[Hashable, First]):
    """What is known of the first choices of the latest requests, by whatever tells requests apart."""

    def __setitem__(self, key: Hashable, first: First) -> None:
        super().__setitem__(key, first)
        if len(self) > MOST_REMEMBERED:
            self.popitem(last=False)


def choices_of(request: Request, params: SendParameters | ReceiveParameters) -> Hashable | None:
    """Returns what all choices of a request have in common, and no two requests; None if it is no choice.

    Args:
        params: the request's; of one to be sent whose room the other side does not know yet each choice has others.
    """
    match = _CHOICE.fullmatch(request.request_id)
    if match is None:
        return None
    is_shared = isinstance(params, ReceiveParameters) or params.is_known
    return match["whole"], request.arrival_time, params if is_shared else None


class FetchState(Enum):
    """How far the first choice of a request is with what it fetches."""

    FETCHING = "fetching"
    FETCHED = "fetched"
    FAILED = "failed"


@dataclass(slots=True)
class Fetch:
    """The fetch that serves all choices of a request.

    Attributes:
        request: the first choice, which fetches; None once it has lost what it had, or where it had it from elsewhere.
    """

    request: Request | None
    state: FetchState


class Fetches:
    """What is fetched, owned by the scheduler's thread. What workers hear of it comes into the step that is given."""

    def __init__(self, groups: Sequence[CacheGroup], conditions: Conditions) -> None:
        """Begins with none.

        Args:
            groups: in the order of the block tables.
        """
        self._groups, self._conditions = groups, conditions
        self._tables: BlockTables | None = None
        self._pool: BlockPool | None = None
        self._receiving: set[str] = set()
        self._outdated: set[str] = set()  # those whose caches are not to be used, even if they come
        self._choices: FirstChoices[Fetch] = FirstChoices()
        self._first: dict[str, Fetch] = {}  # by the names of first choices that have not ended
        self._copied: dict[str, list[Block]] = {}  # blocks that are kept while they are copied, by whom they are for

    def bind(self, tables: BlockTables, pool: BlockPool) -> None:
        """Takes where blocks are looked up and kept."""
        self._tables, self._pool = tables, pool

    def is_begun(self, params: ReceiveParameters, request: Request) -> bool:
        """Whether a request is fetched, or was: it, or another choice for it."""
        return self._choices.get(choices_of(request, params)) is not None

    def missing(self, params: ReceiveParameters, request: Request, there: int, tokens: int) -> int | None:
        """Returns how many tokens can be fetched of so many that are not here; None as long as nobody knows.

        Args:
            there: how many of its tokens the prefill engine sends.
            tokens: how many of these are not here.
        """
        fetch = self._choices.get(choices_of(request, params))
        if fetch is None or fetch.state is FetchState.FAILED:
            return tokens
        if fetch.state is FetchState.FETCHING:
            return None
        return tokens if self._can_copy(fetch, request, there, tokens) else 0

    def begin(self, params: ReceiveParameters, request: Request, wanted: BlocksToReceive, step: Step) -> None:
        """Fetches a request, unless it is a choice of one that was fetched."""
        key = choices_of(request, params)
        fetch = self._choices.get(key)
        if fetch is not None:
            if wanted.is_wanted:
                self._copy(fetch, request, wanted, step)
            return
        if key is not None and wanted.is_wanted:
            fetch = Fetch(request, FetchState.FETCHING)
            self._first[request.request_id] = fetch
            self._choices[key] = fetch
        elif key is not None:
            # What it has came from elsewhere, and may be on its way: the others have their own prefix, or compute.
            self._choices[key] = Fetch(None, FetchState.FETCHED)
        self._ask(request, wanted, step)

    def decline(self, params: ReceiveParameters, request: Request, wanted: BlocksToReceive, step: Step) -> None:
        """Asks for no pages of a request that ended before it was scheduled, so that the prefill engine releases it."""
        key = choices_of(request, params)
        if self._choices.get(key) is None:
            if key is not None:
                self._choices[key] = Fetch(None, FetchState.FAILED)
            self._ask(request, wanted, step)

    def wanted(
        self,
        params: ReceiveParameters,
        request: Request,
        there: int,
        blocks: Sequence[Sequence[Block]] | None = None,
        tokens: int = 0,
    ) -> BlocksToReceive:
        """Returns what is to be fetched of a request.

        Args:
            there: how many of its tokens the prefill engine sends.
            blocks: those of the request, group by group; None if it has none.
            tokens: how many are to be fetched; 0 where all are here.
        """
        groups, problem = {}, ""
        for group, table in zip(self._groups, blocks or [()] * len(self._groups), strict=True):
            first, stop = group.needed(there - tokens, there)
            if not tokens:
                first = stop
            groups[group.name] = replace(
                GroupBlocks.of(group, first, table[first:stop]),
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

    def _ask(self, request: Request, wanted: BlocksToReceive, step: Step) -> None:
        step.expect.pop(wanted.room, None)
        if wanted.is_wanted or self._conditions.are_known(request, wanted.tokens):
            wanted = replace(wanted, depends_on=self._conditions.of(request, wanted.tokens))
        else:  # it ended before, and need not be waited for: the prefill engine hears that instead
            wanted = replace(wanted, problem="the request ended before it was scheduled")
        step.receive.append(wanted)
        if wanted.is_wanted:
            self._receiving.add(request.request_id)

    def _can_copy(self, fetch: Fetch, request: Request, there: int, tokens: int) -> bool:
        """Whether the first choice still has what another one lacks."""
        first = fetch.request
        if any(group.has_state for group in self._groups):
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
            start, stop = group.needed(there - tokens, there)
            yield group, start, stop, table[start:stop]

    def _copy(self, fetch: Fetch, request: Request, wanted: BlocksToReceive, step: Step) -> None:
        """Lets the workers copy the first choice's blocks, which are kept until they have."""
        if wanted.problem or fetch.request is None or fetch.state is not FetchState.FETCHED:
            problem = wanted.problem or "the cache of another choice of the same request did not come"
            step.receive.append(replace(wanted, problem=problem, copied_from=wanted.groups))
            return
        assert self._pool is not None
        kept: list[Block] = []
        copied_from = {}
        missing = wanted.tokens - wanted.prefix_tokens
        for group, start, _, theirs in self._blocks_of(fetch.request, wanted.tokens, missing):
            copied_from[group.name] = GroupBlocks.of(group, start, theirs)
            kept += theirs
        self._pool.touch(kept)
        self._copied[request.request_id] = kept
        step.receive.append(replace(wanted, copied_from=copied_from))

    # ---- ends ---------------------------------------------------------------------------------------------------

    def lost_blocks(self, name: str) -> Fetch | None:
        """Takes that a request has lost its blocks: no other choice is to have them. Returns its fetch, if it has."""
        fetch = self._first.pop(name, None)
        if fetch is not None:
            fetch.request = None
        return fetch

    def outdate(self, name: str, reason: str, step: Step) -> bool:
        """Has what comes of a request not used, or given up. Returns whether it is on its way."""
        fetch = self._first.get(name)
        if fetch is not None:
            fetch.request = None  # no other choice is to have it
        if name in self._receiving or name in self._copied:
            self._outdated.add(name)
        if name in self._receiving:
            step.give_up[name] = reason
        return name in self._receiving

    def ended(self, name: str, step: Step) -> None:
        fetch = self.lost_blocks(name)
        if name in self._receiving:
            self._receiving.discard(name)
            step.give_up[name] = "the request was aborted on the decode side"
            if fetch is not None:
                fetch.state = FetchState.FAILED

    def reported(self, received: Collection[str], failed: Collection[str], step: Step) -> set[str]:
        """Takes the requests whose blocks are not written to any more; arguments as of `SchedulerSide.reported`."""
        again = self._outdated.intersection(received).difference(failed)
        self._outdated.difference_update(received)
        step.fail |= again
        self._receiving.difference_update(received)
        for name in received:
            fetch = self._first.get(name)
            if fetch is not None and fetch.state is FetchState.FETCHING:
                fetch.state = FetchState.FAILED if name in failed else FetchState.FETCHED
            copied = self._copied.pop(name, None)
            if copied is not None:
                assert self._pool is not None
                self._pool.free_blocks(copied)
        return again
