"""Engines of vLLM's without vLLM: a scheduler's side of the connector, and ranks with caches as GPU backends have them.

A request goes through the whole plug-in, from one engine's block tables to another's. Which slot of a rank a token is
in is counted out here one token after the other, or asked of vLLM itself where it is there. The caches are CPU tensors
in which tokens can be told apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.support.vllm_conditions import made_up

from kvferry import DecodeEndpoint, PrefillEndpoint, split
from kvferry.engines.fingerprint import prompt_digest, request_conditions
from kvferry.engines.vllm import worker as worker_module
from kvferry.engines.vllm.blocks import LoadedBlocks
from kvferry.engines.vllm.caches import CacheGroup, HeldPart, ModelShape
from kvferry.engines.vllm.components import ComponentForm
from kvferry.engines.vllm.layouts import DescribedCaches, describe
from kvferry.engines.vllm.parameters import ROOM
from kvferry.engines.vllm.scheduling import SchedulerSide
from kvferry.engines.vllm.shares import GroupRank, Place, check_turns, place_of
from kvferry.engines.vllm.states import KeptStates, State
from kvferry.engines.vllm.worker import WorkerSide
from kvferry.layout import Interval
from kvferry.testing.network import LocalNetwork

UNTOUCHED = -1.0
CONTENT, STATE_CHANNELS, BLOCKS = 6, 8, 80

ALONE = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)
"""The parallel configuration of a vLLM whose ranks share no tokens, as far as it is looked at."""


@dataclass(eq=False)
class Block:
    block_id: int
    is_null: bool = False


@dataclass
class Request:
    """As much of vLLM's as the connector takes."""

    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None
    prompt_token_ids: list[int] | None
    num_computed_tokens: int = 0
    prompt_embeds: Any = None
    max_tokens: int = 1
    arrival_time: float = 0.0
    _all_token_ids: list[int] = field(default_factory=list)

    def get_skip_reading_prefix_cache(self) -> bool:
        return False


class Pool:
    """Keeps nothing: no block is given away here, and there are more than enough."""

    def get_num_free_blocks(self) -> int:
        return 1 << 20

    def touch(self, blocks: Any) -> None:
        pass

    def free_blocks(self, blocks: Any) -> None:
        pass


@dataclass(frozen=True)
class Kind:
    """Layers that share a block table.

    Attributes:
        layers: their numbers in the model; of a draft model's, in that.
        heads: KV heads over all ranks; 1 is a latent.
        window: as for `CacheGroup`.
        chunk: as for `CacheGroup`.
        has_state: whether they keep recurrent state.
        is_draft: whether they are a draft model's.
        is_shared: whether the ranks of decode context parallelism share its tokens; each has all of them if not.
    """

    layers: tuple[int, ...]
    heads: int = 4
    window: int | None = None
    chunk: int | None = None
    has_state: bool = False
    is_draft: bool = False
    is_shared: bool = True

    def name(self, layer: int) -> str:
        return f"{'mtp' if self.is_draft else 'model'}.layers.{layer}.{'mixer' if self.has_state else 'attn'}"

    def first_attended(self, tokens: int) -> int:
        """The position of the first token that the one behind so many attends to."""
        if self.chunk is not None:
            return tokens // self.chunk * self.chunk
        return 0 if self.window is None else max(0, tokens - self.window)


@dataclass(frozen=True)
class Deployment:
    """How an engine is divided.

    Attributes:
        turn: how many tokens in a row a rank keeps under decode context parallelism.
        block_tokens: in a block on one rank.
        pages_per_block: into how many pages a kernel divides it.
        stages: the numbers of the layers of each pipeline stage; one stage with all of them if none.
    """

    tp: int = 1
    pcp: int = 1
    dcp: int = 1
    turn: int = 1
    block_tokens: int = 4
    pages_per_block: int = 1
    stages: tuple[range, ...] = ()

    def __str__(self) -> str:
        parts = [f"tp{self.tp}", f"pcp{self.pcp}" * (self.pcp > 1)]
        parts.append(f"dcp{self.dcp}by{self.turn}" * (self.dcp > 1))
        parts += [f"blocks{self.block_tokens}", f"stages{len(self.stages)}" * (len(self.stages) > 1)]
        return "-".join(part for part in parts if part)


Slots = Callable[[Sequence[int], int, int, int, int, int], "list[int]"]
"""From a request's blocks, its tokens, tokens in a block, how many ranks share tokens, which one this is and the turn,
the slot of each token on this rank; -1 where another rank has it."""


def dealt(blocks: Sequence[int], tokens: int, block_tokens: int, ranks: int, rank: int, turn: int) -> list[int]:
    """Deals tokens out, one after the other."""
    kept, slots = [0] * ranks, []
    for token in range(tokens):
        owner = token // turn % ranks
        block, within = divmod(kept[owner], block_tokens)
        kept[owner] += 1
        slots.append(blocks[block] * block_tokens + within if owner == rank else -1)
    return slots


@dataclass(frozen=True)
class Rank:
    """One worker's caches, by the name of the layer."""

    place: Place
    caches: dict[str, torch.Tensor]
    heads: dict[str, Interval]


class Engine:
    """A scheduler and its workers."""

    def __init__(
        self,
        network: LocalNetwork,
        name: str,
        kinds: Sequence[Kind],
        deployment: Deployment,
        *,
        sends: bool,
        held_back_tokens: int = 1,
        slots: Slots = dealt,
        layers: int | None = None,
        clears: bool = False,
    ) -> None:
        """Starts it.

        Args:
            layers: of the model; as many as the kinds name if None.
            clears: whether what a load leaves in its blocks is cleared, as where vLLM clears blocks.
        """
        self._clears = clears
        self.name, self.kinds, self.deployment, self._slots = name, kinds, deployment, slots
        self.layers = layers or 1 + max(layer for kind in kinds if not kind.is_draft for layer in kind.layers)
        self.stages = deployment.stages or (range(self.layers),)
        self.scheduler = SchedulerSide(
            self._groups(None),
            engine=name,
            may_send=sends,
            may_receive=not sends,
            held_back_tokens=held_back_tokens,
            conditions=made_up(
                lambda request, tokens: request_conditions(prompt_digest(request.prompt_token_ids, tokens))
            ),
        )
        self.tables: dict[str, list[list[Block]]] = {}
        self.scheduler.bind(lambda request: self.tables[request], cast(Any, Pool()))
        self.ranks = [
            self._rank(stage, pcp, tp)
            for stage in range(len(self.stages))
            for pcp in range(deployment.pcp)
            for tp in range(deployment.tp)
        ]
        self.workers: list[WorkerSide] = []
        self._forms = [form for rank in self.ranks for form in self._told(rank)]
        try:
            for rank in self.ranks:
                self.workers.append(self._worker(rank, network, name, sends=sends))
        except BaseException:
            self.close()
            raise

    def _layers_of(self, kind: Kind, stage: int | None) -> list[int]:
        """A draft model's layers are all in the last stage."""
        if stage is None:
            return list(kind.layers)
        if kind.is_draft:
            return list(kind.layers) if stage == len(self.stages) - 1 else []
        return [layer for layer in kind.layers if layer in self.stages[stage]]

    def _groups(self, stage: int | None) -> tuple[CacheGroup, ...]:
        """Every stage knows every group, without the layers that it lacks."""
        return tuple(
            CacheGroup(
                f"group {number}",
                tuple(kind.name(layer) for layer in self._layers_of(kind, stage)),
                self._block_tokens(kind),
                window_tokens=kind.window,
                chunk_tokens=kind.chunk,
                has_state=kind.has_state,
                token_ranks=self.sharing(kind),
            )
            for number, kind in enumerate(self.kinds)
        )

    def _block_tokens(self, kind: Kind) -> int:
        """Without a prefix cache, a block of state is one for the whole request."""
        return 1024 if kind.has_state else self.deployment.block_tokens

    def sharing(self, kind: Kind) -> int:
        return self.deployment.dcp if kind.is_shared and not kind.has_state else 1

    def _rank(self, stage: int, pcp: int, tp: int) -> Rank:
        made = self.deployment
        place = place_of(
            GroupRank(tp, made.tp),
            GroupRank(stage, len(self.stages)),
            GroupRank(pcp, made.pcp),
            GroupRank((tp * made.pcp + pcp) % made.dcp, made.dcp),
            made.turn,
        )
        caches, heads = {}, {}
        for kind in self.kinds:
            total = STATE_CHANNELS if kind.has_state else kind.heads
            held = split(total, made.tp, tp)
            for layer in self._layers_of(kind, stage):
                heads[kind.name(layer)] = held
                pages, page_tokens = BLOCKS * made.pages_per_block, made.block_tokens // made.pages_per_block
                shape = (BLOCKS, len(held)) if kind.has_state else (pages, len(held), page_tokens, CONTENT)
                caches[kind.name(layer)] = torch.full(shape, UNTOUCHED)
        return Rank(place, caches, heads)

    def _worker(self, rank: Rank, network: LocalNetwork, name: str, *, sends: bool) -> WorkerSide:
        groups = self._groups(rank.place.in_model.pp_rank)
        check_turns(groups, rank.place.tokens)
        described = self._described(rank, everywhere=lambda _: self._forms)
        return WorkerSide(
            described,
            rank.place.in_engine,
            network.settings(),
            engine=name,
            sends=sends,
            receives=not sends,
            fingerprint={},
            loaded_blocks=LoadedBlocks(described, groups) if self._clears else None,
        )

    def _told(self, rank: Rank) -> list[ComponentForm]:
        """What a rank says to the other stages."""
        told: list[ComponentForm] = []

        def listen(own: list[ComponentForm]) -> list[ComponentForm]:
            told.extend(own)
            raise TimeoutError("no other stage is there yet")

        with pytest.raises(TimeoutError):
            self._described(rank, everywhere=listen)
        return told

    def _described(
        self, rank: Rank, *, everywhere: Callable[[list[ComponentForm]], list[ComponentForm]]
    ) -> DescribedCaches:
        groups = self._groups(rank.place.in_model.pp_rank)
        totals = {
            kind.name(layer): STATE_CHANNELS if kind.has_state else kind.heads
            for kind in self.kinds
            for layer in kind.layers
        }
        states = {
            name: KeptStates(
                (State((len(rank.heads[name]),), 0, (HeldPart(STATE_CHANNELS, rank.heads[name]),)),),
                (rank.caches[name],),
            )
            for group in groups
            if group.has_state
            for name in group.layer_names
        }
        return describe(
            {name: cache for name, cache in rank.caches.items() if name not in states},
            groups,
            self._model(rank),
            rank.place.in_model,
            heads={name: HeldPart(totals[name], held) for name, held in rank.heads.items()},
            states=states,
            num_blocks=BLOCKS,
            tokens=rank.place.tokens,
            everywhere=everywhere,
        )

    def _model(self, rank: Rank) -> ModelShape:
        stage = rank.place.in_model.pp_rank
        drafts = [kind.name(layer) for kind in self.kinds if kind.is_draft for layer in self._layers_of(kind, stage)]
        return ModelShape(self.layers, drafts=tuple(drafts))

    # ---- requests ---------------------------------------------------------------------------------------------------

    def allocate(self, request: Request, first: int, *, computed: int, external: int) -> None:
        """Gives a request blocks from the first on, backwards, and null ones before what the next token attends to."""
        tables, start = [], first
        for kind in self.kinds:
            tokens = self._block_tokens(kind) * self.sharing(kind)
            count = -(-request.num_prompt_tokens // tokens)
            null = kind.first_attended(computed) // tokens
            tables.append([Block(start + count - 1 - index, is_null=index < null) for index in range(count)])
            start += count
        assert start <= BLOCKS, "more blocks than there are"
        self.tables[request.request_id] = tables
        self.scheduler.allocated(request, tables, external)

    def places(self, rank: Rank, kind: Kind, blocks: Sequence[Block], tokens: int) -> list[int]:
        """Where each token is in a layer's cache on a rank, by slot; -1 where it is not."""
        sharing = self.sharing(kind)
        part = rank.place.tokens.part if sharing > 1 else 0
        numbers = [block.block_id for block in blocks]
        return self._slots(numbers, tokens, self.deployment.block_tokens, sharing, part, self.deployment.turn)

    def cells(self, request: str, tokens: int) -> Iterator[tuple[Rank, Kind, int, torch.Tensor, list[torch.Tensor]]]:
        """Yields every layer of every rank: the layer's cache, and its cell for every token (empty if not there)."""
        made = self.deployment
        page_tokens = made.block_tokens // made.pages_per_block
        for kind, table in zip(self.kinds, self.tables[request], strict=True):
            if kind.has_state:
                continue
            for rank in self.ranks:
                slots = self.places(rank, kind, table, tokens)
                for layer in kind.layers:
                    cache = rank.caches.get(kind.name(layer))
                    if cache is not None:
                        nowhere = cache[:0]
                        cells = [
                            nowhere if slot < 0 else cache[slot // page_tokens, :, slot % page_tokens] for slot in slots
                        ]
                        yield rank, kind, layer, cache, cells

    def compute(self, request: str, tokens: Iterable[int]) -> None:
        """Fills tokens' places with their own values."""
        tokens = list(tokens)
        for rank, kind, layer, _, cells in self.cells(request, tokens[-1] + 1):
            held = rank.heads[kind.name(layer)]
            for token in tokens:
                if len(cells[token]):
                    cells[token].copy_(value(kind, layer, token)[held.start : held.stop])
        for rank, kind, layer, state in self.states(request):
            held = rank.heads[kind.name(layer)]
            state.copy_(state_value(kind, layer, tokens[-1] + 1)[held.start : held.stop])

    def states(self, request: str) -> Iterator[tuple[Rank, Kind, int, torch.Tensor]]:
        """Yields the state of a request in every layer of every rank: that of its last block."""
        for kind, table in zip(self.kinds, self.tables[request], strict=True):
            for rank in self.ranks if kind.has_state else ():
                for layer in kind.layers:
                    if kind.name(layer) in rank.caches:
                        yield rank, kind, layer, rank.caches[kind.name(layer)][table[-1].block_id]

    def check(self, request: Request, tokens: int, prefix: int, *, absent: Sequence[Kind] = ()) -> None:
        """Checks every byte: what the token behind so many needs is there, and neither the prefix nor others' blocks
        have been touched."""
        name = request.request_id
        seen = 0
        for rank, kind, layer, cache, cells in self.cells(name, tokens):
            held = rank.heads[kind.name(layer)]
            for token in range(tokens):
                if not len(cells[token]) or token < kind.first_attended(tokens):
                    continue
                expected = value(kind, layer, token)[held.start : held.stop]
                if token < prefix or kind in absent:
                    expected = torch.full_like(expected, UNTOUCHED)
                seen += token >= prefix
                where = f"layer {layer} on {rank.place.in_model}, token {token} of {tokens}, prefix {prefix}"
                assert torch.equal(cells[token], expected), where
            own = {block.block_id for block in self.tables[name][self.kinds.index(kind)]}
            ratio = self.deployment.pages_per_block
            others = [page for page in range(BLOCKS * ratio) if page // ratio not in own]
            assert float(cache[others].max()) == UNTOUCHED, f"another request's blocks of layer {layer}"
        for rank, kind, layer, state in self.states(name):
            held = rank.heads[kind.name(layer)]
            seen += 1
            assert torch.equal(state, state_value(kind, layer, tokens)[held.start : held.stop]), f"state of {layer}"
        assert seen or prefix >= tokens, "nothing was looked at"

    def wipe(self, to: float = UNTOUCHED) -> None:
        for rank in self.ranks:
            for cache in rank.caches.values():
                cache.fill_(to)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def value(kind: Kind, layer: int, token: int) -> torch.Tensor:
    """What a token has in a layer, (head, content); no two have the same."""
    first = ((layer + 100 * kind.is_draft) * 500 + token) * kind.heads * CONTENT
    return torch.arange(first, first + kind.heads * CONTENT, dtype=torch.float32).view(kind.heads, CONTENT)


def state_value(kind: Kind, layer: int, tokens: int) -> torch.Tensor:
    """The state of a layer after so many tokens."""
    first = (layer * 500 + tokens) * STATE_CHANNELS + 0.5
    return torch.arange(first, first + STATE_CHANNELS, dtype=torch.float32)


@contextmanager
def plugged_in(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Iterator[LocalNetwork]:
    """A network on which the workers' endpoints find each other."""
    with LocalNetwork(**settings) as found:
        for kind in (PrefillEndpoint, DecodeEndpoint):

            def begin(layout: Any, kind: Any = kind, **more: Any) -> Any:
                return kind(layout, transport=found.transport(), **more)

            monkeypatch.setattr(worker_module, kind.__name__, begin)
        yield found


def wait_for(worker: WorkerSide, kind: str, name: str, *, ended: set[str] | None = None) -> None:
    """Waits until a worker has reported a request: as sent, or as received."""
    deadline, reported = time.monotonic() + 20, getattr(worker.results(ended or ()), kind)
    while name not in reported:
        assert time.monotonic() < deadline, f"{name} was not {kind}"
        time.sleep(0.001)
        reported = getattr(worker.results(()), kind)


def transfer(prefill: Engine, decode: Engine, tokens: int, prefix: int, *, step: int = 10) -> Request:
    """Sends a prompt's cache, computed in steps; the decode side has a prefix of it."""
    name, room, prompt = f"{tokens}-{prefix}", tokens * 100 + prefix, list(range(tokens))
    sent = Request(name, tokens, {"do_remote_decode": True, ROOM: room}, prompt, _all_token_ids=list(prompt))
    there_parameters = {"do_remote_prefill": True, "remote_engine_id": prefill.name, ROOM: room}
    received = Request(name, tokens, there_parameters, list(prompt))
    prefill.scheduler.came_in(cast(Any, sent))
    missing = decode.scheduler.tokens_elsewhere(received, prefix)
    assert missing is not None
    decode.allocate(received, 1, computed=prefix + missing, external=missing)
    asked = decode.scheduler.take_step({}, ())
    for worker in decode.workers:
        worker.receive(asked)
    prefill.allocate(sent, 3, computed=0, external=0)
    for done in range(0, sent.num_prompt_tokens, step):
        count = min(step, sent.num_prompt_tokens - done)
        prefill.compute(name, range(done, done + count))
        leaving = prefill.scheduler.take_step({name: count}, ())
        for worker in prefill.workers:
            worker.after(leaving, None)
        sent.num_computed_tokens += count
    if missing:
        for worker in decode.workers:
            wait_for(worker, "received", name)
    for worker in prefill.workers:
        wait_for(worker, "sent", name, ended={name})
    return received
