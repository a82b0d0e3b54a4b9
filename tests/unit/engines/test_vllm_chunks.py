"""Chunked local attention through the whole plug-in, from one scheduler's block tables to another's, without vLLM.

The caches are CPU tensors as GPU backends have them, where tokens can be told apart.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from kvferry import DecodeEndpoint, PrefillEndpoint, RankCoordinates, split
from kvferry.engines.fingerprint import request_conditions
from kvferry.engines.vllm import worker as worker_module
from kvferry.engines.vllm.layouts import CacheGroup, HeldHeads, ModelShape, describe
from kvferry.engines.vllm.parameters import ROOM
from kvferry.engines.vllm.scheduling import SchedulerSide
from kvferry.engines.vllm.worker import WorkerSide
from kvferry.testing.network import LocalNetwork

CHUNK, LAYERS, HEADS, CONTENT, BLOCKS = 16, 4, 4, 6, 40
FULL_LAYER = 3
UNTOUCHED = -1.0


@dataclass(eq=False)
class Block:
    block_id: int
    is_null: bool = False


@dataclass
class Request:
    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None
    prompt_token_ids: list[int] | None
    num_computed_tokens: int = 0
    prompt_embeds: Any = None
    max_tokens: int = 1
    _all_token_ids: list[int] = field(default_factory=list)

    def get_skip_reading_prefix_cache(self) -> bool:
        return False


class Engine:
    """A scheduler and its workers; layer 3 attends to every token, the others within chunks."""

    def __init__(
        self, network: LocalNetwork, name: str, tp: int, block_tokens: int, *, sends: bool, held_back_tokens: int = 1
    ) -> None:
        names = [f"model.layers.{number}.attn" for number in range(LAYERS)]
        self.block_tokens = block_tokens
        self.groups = (
            CacheGroup("full", (names[FULL_LAYER],), block_tokens),
            CacheGroup("chunk", tuple(names[:FULL_LAYER]), block_tokens, chunk_tokens=CHUNK),
        )
        self.scheduler = SchedulerSide(
            self.groups,
            engine=name,
            may_send=sends,
            may_receive=not sends,
            held_back_tokens=held_back_tokens,
            conditions=lambda request, tokens: request_conditions(request.prompt_token_ids, count=tokens),
        )
        self.tables: dict[str, list[list[Block]]] = {}
        self.scheduler.bind(lambda request: self.tables[request], cast(Any, Pool()))
        self.caches: list[list[torch.Tensor]] = []
        self.workers = []
        for rank in range(tp):
            held = split(HEADS, tp, rank)
            caches = [torch.full((BLOCKS, len(held), block_tokens, CONTENT), UNTOUCHED) for _ in names]
            coordinates = RankCoordinates(tp_rank=rank, tp_size=tp)
            described = describe(
                dict(zip(names, caches, strict=True)),
                self.groups,
                ModelShape(LAYERS),
                coordinates,
                heads=dict.fromkeys(names, HeldHeads(HEADS, held)),
                num_blocks=BLOCKS,
            )
            self.caches.append(caches)
            self.workers.append(
                WorkerSide(
                    described,
                    cast(Any, None),
                    coordinates,
                    network.settings(),
                    engine=name,
                    sends=sends,
                    receives=not sends,
                    fingerprint={},
                )
            )

    def allocate(self, request: Request, first: int, *, computed: int, external: int) -> None:
        """Gives a request blocks from the first on, backwards, and null ones before the chunk of the next token."""
        count = -(-request.num_prompt_tokens // self.block_tokens)
        null = computed // CHUNK * CHUNK // self.block_tokens
        self.tables[request.request_id] = [
            [Block(first + count - 1 - index) for index in range(count)],
            [Block(first + 2 * count - 1 - index, is_null=index < null) for index in range(count)],
        ]
        self.scheduler.allocated(request, self.tables[request.request_id], external)

    def cached(self, request: str, layer: int, token: int) -> torch.Tensor:
        """What all ranks have of a token: (head, content)."""
        block = self.tables[request][0 if layer == FULL_LAYER else 1][token // self.block_tokens].block_id
        return torch.cat([rank[layer][block, :, token % self.block_tokens] for rank in self.caches])

    def compute(self, request: str, layer: int, token: int) -> None:
        """Fills a token's place with its own value."""
        block = self.tables[request][0 if layer == FULL_LAYER else 1][token // self.block_tokens].block_id
        for rank, own in enumerate(value(layer, token).chunk(len(self.caches))):
            self.caches[rank][layer][block, :, token % self.block_tokens] = own

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


class Pool:
    """Keeps nothing: no block is given away here."""

    def touch(self, blocks: Any) -> None:
        pass

    def free_blocks(self, blocks: Any) -> None:
        pass


def value(layer: int, token: int) -> torch.Tensor:
    first = (layer * 1000 + token) * HEADS * CONTENT
    return torch.arange(first, first + HEADS * CONTENT, dtype=torch.float32).view(HEADS, CONTENT)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalNetwork]:
    with LocalNetwork() as found:
        for kind in (PrefillEndpoint, DecodeEndpoint):

            def begin(layout: Any, kind: Any = kind, **more: Any) -> Any:
                return kind(layout, transport=found.transport(), **more)

            monkeypatch.setattr(worker_module, kind.__name__, begin)
        yield found


def wait_for(worker: WorkerSide, kind: str, name: str, *, ended: set[str] | None = None) -> None:
    """Waits until a worker has reported a request: as sent, or as received."""
    deadline, reported = time.monotonic() + 20, getattr(worker.results(ended or ()), kind)
    while name not in reported:
        assert time.monotonic() < deadline
        time.sleep(0.001)
        reported = getattr(worker.results(()), kind)


def transfer(prefill: Engine, decode: Engine, tokens: int, prefix: int) -> Request:
    """Sends a prompt's cache, computed in steps of 10 tokens; the decode side has a prefix of it."""
    name, room, prompt = f"{tokens}-{prefix}", tokens * 100 + prefix, list(range(tokens))
    sent = Request(name, tokens, {"do_remote_decode": True, ROOM: room}, prompt)
    there_parameters = {"do_remote_prefill": True, "remote_engine_id": "prefill", ROOM: room}
    received = Request(name, tokens, there_parameters, prompt)
    missing = decode.scheduler.tokens_elsewhere(received, prefix)
    assert missing is not None
    decode.allocate(received, 1, computed=prefix + missing, external=missing)
    step = decode.scheduler.take_step({}, ())
    for worker in decode.workers:
        worker.receive(step)
    prefill.allocate(sent, 3, computed=0, external=0)
    for done in range(0, tokens, 10):
        count = min(10, tokens - done)
        for layer in range(LAYERS):
            for token in range(done, done + count):
                prefill.compute(name, layer, token)
        step = prefill.scheduler.take_step({name: count}, ())
        for worker in prefill.workers:
            worker.after(step, None)
        sent.num_computed_tokens += count
    if missing:
        for worker in decode.workers:
            wait_for(worker, "received", name)
    for worker in prefill.workers:
        wait_for(worker, "sent", name, ended={name})
    return received


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2), (4, 2)])
@pytest.mark.parametrize(("here", "there"), [(4, 4), (4, 8), (8, 4)])
def test_the_next_token_finds_its_chunk_whatever_prefix_is_here(
    network: LocalNetwork, prefill_tp: int, decode_tp: int, here: int, there: int
):
    """Every token that the next one attends to is there, byte by byte, and none of the prefix has been touched."""
    prefill = Engine(network, "prefill", prefill_tp, here, sends=True)
    decode = Engine(network, "decode", decode_tp, there, sends=False)
    try:
        for tokens, prefix in [(5, 0), (17, 0), (18, 0), (30, 8), (33, 8), (34, 16), (47, 40), (48, 24), (49, 48)]:
            for caches in decode.caches:
                for cache in caches:
                    cache.fill_(UNTOUCHED)
            request = transfer(prefill, decode, tokens, prefix)
            for layer in range(LAYERS):
                first = 0 if layer == FULL_LAYER else (tokens - 1) // CHUNK * CHUNK
                for token in range(first, tokens - 1):
                    expected = value(layer, token) if token >= prefix else torch.full((HEADS, CONTENT), UNTOUCHED)
                    found = decode.cached(request.request_id, layer, token)
                    assert torch.equal(found, expected), f"layer {layer}, token {token} of {tokens}, prefix {prefix}"
    finally:
        decode.close()
        prefill.close()


def test_another_number_of_tokens_is_refused_by_what_they_depend_on(
    network: LocalNetwork, caplog: pytest.LogCaptureFixture
):
    """Nothing else would tell: where there are chunks, the decode side asks for pages and says no number of tokens."""
    prefill = Engine(network, "prefill", 1, 4, sends=True)
    decode = Engine(network, "decode", 1, 4, sends=False, held_back_tokens=2)
    try:
        transfer(prefill, decode, 30, 0)
    finally:
        decode.close()
        prefill.close()
    assert "another prompt than the prefill side's" in caplog.text
    assert float(decode.caches[0][0].max()) == UNTOUCHED, "nothing was written"
