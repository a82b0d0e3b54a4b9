"""Engines without a model: caches, groups and block tables by vLLM's own code, the plug-in's two sides, and no kernel.

What kernels would write is made up: every block of a request has bytes that follow from its layer and its position.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from tests.support.vllm_conditions import made_up
from tests.support.vllm_ranks import Deployment
from vllm import SamplingParams
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.models.deepseek_v4.attention import DeepseekV4Attention, DeepseekV4IndexerCache
from vllm.models.deepseek_v4.compressor import CompressorStateCache
from vllm.models.deepseek_v41.attention import DeepseekV4Attention as DeepseekV41Attention
from vllm.models.deepseek_v41.attention import DeepseekV4IndexerCache as DeepseekV41IndexerCache
from vllm.models.deepseek_v41.compressor import CompressorStateCache as RingCache
from vllm.models.qwen4_exp.common.qsa_cache import QSACompressedKeyCache, QSAKeyStateCache
from vllm.utils.hashing import sha256
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import Request
from vllm.v1.worker.utils import allocate_kv_cache

from kvferry.engines.vllm.caches import ModelShape
from kvferry.engines.vllm.configuration import cache_forms, groups_of, heads_of, kept_states
from kvferry.engines.vllm.layouts import describe
from kvferry.engines.vllm.parameters import ROOM
from kvferry.engines.vllm.scheduling import SchedulerSide
from kvferry.engines.vllm.shares import GroupRank, Place, check_turns, place_of
from kvferry.engines.vllm.worker import WorkerSide
from kvferry.testing.network import LocalNetwork

WAIT_S = 30.0
STEP_TOKENS = 300
"""How many tokens of a prompt are computed in a step."""


@dataclass(frozen=True)
class Model:
    """What a model keeps, by vLLM's own modules.

    Attributes:
        name: what its test is called.
        layers: how many decoder layers it has.
        block_tokens: tokens in a block of its attention.
        cache_dtype: vLLM's `--kv-cache-dtype`.
        layout: one of the orders of layers, blocks, heads and tokens that its backends take.
    """

    name: str
    layers: int
    block_tokens: int
    cache_dtype: str
    layout: str

    def modules(self, config: VllmConfig, tp: int, rank: int) -> dict[str, Any]:
        """The modules that keep something, by name."""
        raise NotImplementedError


class Backed:
    """A layer of which only what it says of its cache matters; the rest of it needs a GPU."""

    def __init__(self, spec: Any, backend: str) -> None:
        self._spec, self._backend = spec, backend
        self.kv_cache = torch.tensor([])

    def get_kv_cache_spec(self, config: VllmConfig) -> Any:
        return self._spec(config) if callable(self._spec) else self._spec

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: self._backend)


def asked(module: type, backend: str, **attributes: Any) -> Backed:
    """An attention layer that cannot be made here; its class says what it keeps, given some of its attributes."""
    layer = SimpleNamespace(**attributes)
    return Backed(lambda config: cast(Any, module).get_kv_cache_spec(layer, config), backend)


class AttentionLayer(Backed, torch.nn.Module):
    """One that is a module among others."""

    def __init__(self, spec: Any, backend: str) -> None:
        torch.nn.Module.__init__(self)
        Backed.__init__(self, spec, backend)


class DeepseekV32(Model):
    """Latents of 656 bytes, and an index beside them."""

    def modules(self, config: VllmConfig, tp: int, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number in range(self.layers):
            name = f"model.layers.{number}.self_attn"
            found[f"{name}.attn"] = asked(
                MLAAttention,
                "FLASHMLA_SPARSE",
                kv_cache_dtype=self.cache_dtype,
                head_size=576,
                sliding_window=None,
                indexer=object(),
                non_causal_multi_token_decode=False,
            )
            found[f"{name}.indexer.k_cache"] = DeepseekV32IndexerCache(
                132, torch.uint8, f"{name}.indexer.k_cache", config.cache_config
            )
        return found


class DeepseekV4(Model):
    """Windows, latents for 4 and for 128 tokens, an index for 4, and what their compressors have not compressed yet."""

    def modules(self, config: VllmConfig, tp: int, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number in range(self.layers):
            name, ratio = f"model.layers.{number}.attn", (0, 4, 128, 4)[number % 4]
            window = DeepseekV4SWACache(512, 128, torch.uint8, f"{name}.swa_cache", config.cache_config)
            found[f"{name}.swa_cache"] = window
            if not ratio:
                continue
            found[name] = asked(
                DeepseekV4Attention,
                "FLASHMLA_SPARSE",
                compress_ratio=ratio,
                kv_cache_dtype=self.cache_dtype,
                head_dim=512,
                kv_cache_torch_dtype=torch.uint8,
            )
            state = f"{name}.compressor.state_cache"
            found[state] = CompressorStateCache(1024 * (1 + (ratio == 4)), torch.float32, ratio, state)
            if ratio == 4:
                index, state = f"{name}.indexer.k_cache", f"{name}.indexer.compressor.state_cache"
                found[index] = DeepseekV4IndexerCache(132, torch.uint8, index, config.cache_config, 4)
                found[state] = CompressorStateCache(512, torch.float32, 4, state)
        return found


class DeepseekV41(Model):
    """Windows that the prefix cache has not, latents for 4 tokens and rings of what is not compressed yet."""

    def modules(self, config: VllmConfig, tp: int, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number in range(self.layers):
            name = f"model.layers.{number}.attn"
            found[f"{name}.swa_cache"] = DeepseekV4SWACache(
                512,
                128,
                torch.uint8,
                f"{name}.swa_cache",
                config.cache_config,
                packed_bytes_per_token=528,
                packed_page_alignment=512,
                bounded_replay=True,
            )
            found[name] = asked(
                DeepseekV41Attention,
                "FLASHMLA_SPARSE",
                is_kv_source=True,
                compress_ratio=4,
                kv_cache_dtype=self.cache_dtype,
                head_dim=512,
                kv_cache_torch_dtype=torch.uint8,
                kv_page_alignment=512,
                compressed_bytes_per_token=528,
            )
            index, ring = f"{name}.indexer.k_cache", f"{name}.compressor.state_cache"
            found[index] = DeepseekV41IndexerCache(132, torch.uint8, index, config.cache_config, 4)
            found[ring] = RingCache(1024, torch.float32, ring)
        return found


class Projection(torch.nn.Module):
    """What makes keys and values, as vLLM's QKVParallelLinear: by it the KV heads of a rank are known."""

    def __init__(self, total: int, rank: int, size: int) -> None:
        super().__init__()
        self.total_num_kv_heads, self.tp_rank, self.tp_size = total, rank, size
        self.num_kv_heads, self.num_kv_head_replicas = max(1, total // size), max(1, size // total)


class Attention(torch.nn.Module):
    """Attention with KV heads that ranks divide: what is around a layer."""

    def __init__(self, heads: int, config: VllmConfig, tp: int, rank: int) -> None:
        super().__init__()
        self.qkv_proj = Projection(heads, rank, tp)
        spec = FullAttentionSpec(
            block_size=config.cache_config.block_size,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            head_size=64,
            dtype=torch.bfloat16,
        )
        self.layer = AttentionLayer(spec, "FLASH_ATTN")


class Qwen4(Model):
    """Attention of 4 KV heads, keys for 8 tokens that choose among them, and rings of those that are not compressed."""

    def modules(self, config: VllmConfig, tp: int, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number in range(self.layers):
            name = f"model.layers.{number}.self_attn"
            around = Attention(4, config, tp, rank)
            found[f"{name}.attn"] = around.layer
            more = {"cache_config": config.cache_config, "vllm_config": config, "dtype": torch.bfloat16}
            ring, index = f"{name}.indexer.raw_key_cache", f"{name}.indexer.compressed_key_cache"
            found[ring] = QSAKeyStateCache(head_size=64, compress_ratio=8, prefix=ring, **more)
            found[index] = QSACompressedKeyCache(head_size=64, compress_ratio=8, prefix=index, **more)
            config.kept_alive = [*getattr(config, "kept_alive", ()), around]  # vLLM's model holds its modules
        return found


MODELS = (
    DeepseekV32("deepseek v3.2", 3, 64, "fp8_ds_mla", "LBNHC"),
    DeepseekV4("deepseek v4", 4, 256, "fp8_ds_mla", "BLNHC"),
    DeepseekV41("deepseek v4.1", 2, 128, "fp8_ds_mla", "BLNHC"),
    Qwen4("qwen4", 2, 32, "auto", "BLHNC"),
)


@dataclass
class Rank:
    """A worker.

    Attributes:
        caches: by layer.
        heads: by layer, which of its KV heads are here; None where every rank has the same.
        worker: the plug-in's side.
        place: where it stands.
    """

    caches: dict[str, torch.Tensor]
    heads: dict[str, Any]
    worker: WorkerSide
    place: Place


class Engine:
    """A scheduler's block tables and the caches of its workers."""

    pool_bytes = 24 << 20

    def __init__(self, network: LocalNetwork, model: Model, name: str, made: Deployment, *, sends: bool) -> None:
        """Starts it.

        Args:
            made: how many ranks it has, and in which turns they take tokens; the model says how long blocks are.
        """
        self.model, self.name, self.made, self.sends = model, name, made, sends
        self.ranks: list[Rank] = []
        try:
            for prefill_rank in range(made.pcp):
                for rank in range(made.tp):
                    self.config = _config(model, made)
                    with set_current_vllm_config(self.config):
                        self._add_rank(network, rank, prefill_rank)
        except BaseException:
            self.close()
            raise
        init_none_hash(sha256)
        kept = generate_scheduler_kv_cache_config([self.kept])
        block_size, hash_block = resolve_kv_cache_block_sizes(kept, self.config)
        self.hasher = get_request_block_hasher(hash_block, sha256)
        self.manager = KVCacheManager(
            kept,
            4096,
            scheduler_block_size=block_size,
            hash_block_size=hash_block,
            enable_caching=not sends,
            dcp_world_size=made.dcp,
        )
        groups = groups_of(kept, self.config.parallel_config)
        self.scheduler = SchedulerSide(groups, engine=name, may_send=sends, may_receive=not sends, conditions=made_up())
        self.scheduler.bind(self.tables, self.manager.block_pool)

    def _add_rank(self, network: LocalNetwork, rank: int, prefill_rank: int) -> None:
        config, made = self.config, self.made
        place = place_of(
            GroupRank(rank, made.tp),
            GroupRank(0, 1),
            GroupRank(prefill_rank, made.pcp),
            GroupRank((rank * made.pcp + prefill_rank) % made.dcp, made.dcp),
            made.turn,
        )
        coordinates = place.in_model
        modules = self.model.modules(config, made.tp, rank)
        context = config.compilation_config.static_forward_context
        context.update(modules)
        specs = {name: module.get_kv_cache_spec(config) for name, module in modules.items()}
        self.kept = kept = get_kv_cache_config_from_groups(config, get_kv_cache_groups(config, specs), self.pool_bytes)
        layout = KVCacheLayout[self.model.layout]
        caches = allocate_kv_cache(kept, torch.device("cpu"), layout)
        self.groups = groups_of(kept, config.parallel_config)
        check_turns(self.groups, place.tokens)
        heads = heads_of(config, kept, coordinates)
        described = describe(
            caches,
            self.groups,
            ModelShape(self.model.layers),
            coordinates,
            heads=heads,
            states=kept_states(config, kept, coordinates, caches),
            forms=cache_forms(config, kept),
            num_blocks=kept.num_blocks,
            tokens=place.tokens,
        )
        self.described = described
        worker = WorkerSide(
            described,
            place.in_engine,
            network.settings(),
            engine=self.name,
            sends=self.sends,
            receives=not self.sends,
            fingerprint={},
        )
        self.ranks.append(Rank(caches, heads, worker, place))

    def tables(self, request: str) -> Any:
        return self.kept.select_transfer_block_ids(self.manager.get_blocks(request).blocks)

    def request(self, name: str, prompt: Sequence[int], parameters: Mapping[str, Any]) -> Request:
        request = Request(name, list(prompt), SamplingParams(max_tokens=1), None, block_hasher=self.hasher)
        request.kv_transfer_params = dict(parameters)
        self.scheduler.came_in(request)
        return request

    def fill(self, request: Request, tokens: int) -> None:
        """Writes what kernels would into all blocks of a request, of which so many tokens are computed."""
        for layer, position, block in self.blocks(request.request_id):
            for rank in self.ranks:
                self.page(rank, layer, block).copy_(torch.from_numpy(self.content(rank, layer, position)))

    def blocks(self, request: str) -> Iterator[tuple[str, int, int]]:
        """Yields each layer, and the position and the number of each of its blocks."""
        for group, table in zip(self.groups, self.tables(request), strict=True):
            for position, block in enumerate(table):
                if not block.is_null:
                    yield from ((layer, position, block.block_id) for layer in group.layer_names)

    @staticmethod
    def page(rank: Rank, layer: str, block: int) -> torch.Tensor:
        """A layer's bytes of a block, by (head, entry, byte)."""
        return rank.caches[layer][block].view(torch.uint8)

    def content(self, rank: Rank, layer: str, position: int) -> np.ndarray[Any, Any]:
        """What a block of a request holds on a rank."""
        heads, entries, width = self.page(rank, layer, 0).shape
        held = rank.heads.get(layer)
        total = heads if held is None else held.total
        seed = [*layer.encode(), position]
        whole = np.random.default_rng(seed).integers(0, 256, (total, entries, width), np.uint8)
        return whole if held is None else whole[held.held.start : held.held.stop]

    def close(self) -> None:
        for rank in self.ranks:
            rank.worker.close()


def _config(model: Model, made: Deployment) -> VllmConfig:
    config = VllmConfig()
    config.parallel_config.prefill_context_parallel_size = made.pcp
    config.parallel_config.decode_context_parallel_size = made.dcp
    config.parallel_config.cp_kv_cache_interleave_size = made.turn
    config.model_config = SimpleNamespace(max_model_len=4096, dtype=torch.bfloat16, use_mla=True)
    config.cache_config.block_size = model.block_tokens
    config.cache_config.cache_dtype = model.cache_dtype
    config.cache_config.kv_cache_layout = model.layout
    return config


@dataclass
class Transfer:
    """A request of two engines.

    Attributes:
        received: on the decode side.
        prefix: how many tokens were there already.
        tokens: how many are there once it has arrived.
    """

    received: Request
    prefix: int
    tokens: int


@dataclass
class Pair:
    """A prefill and a decode engine."""

    prefill: Engine
    decode: Engine
    rooms: int = field(default=0)

    def transfer(self, tokens: int, prompt_seed: int = 0) -> Transfer:
        """Computes a prompt in steps, sends its cache, and waits until it has arrived."""
        self.rooms += 1
        name, prompt = f"request-{self.rooms}", range(prompt_seed, prompt_seed + tokens)
        there = {"do_remote_prefill": True, "remote_engine_id": self.prefill.name, ROOM: self.rooms}
        received = self.decode.request(name, prompt, there)
        blocks, prefix = self.decode.manager.get_computed_blocks(received)[:2]
        missing = self.decode.scheduler.tokens_elsewhere(received, prefix)
        assert missing
        allocated = self.decode.manager.allocate_slots(
            received,
            0,
            prefix,
            blocks,
            num_external_computed_tokens=missing,
            delay_cache_blocks=True,
        )
        assert allocated is not None
        self.decode.scheduler.allocated(received, self.decode.tables(name), missing)
        step = self.decode.scheduler.take_step({}, ())
        for rank in self.decode.ranks:
            rank.worker.receive(step)
        self._compute(self.prefill.request(name, prompt, {"do_remote_decode": True, ROOM: self.rooms}))
        for rank in self.decode.ranks:
            wait(rank.worker, "received", name)
        for rank in self.prefill.ranks:
            wait(rank.worker, "sent", name, ended={name})
        received.num_computed_tokens = prefix + missing
        self.decode.manager.cache_blocks(received, received.num_computed_tokens)
        return Transfer(received, prefix, prefix + missing)

    def _compute(self, sent: Request) -> None:
        is_first = True
        while sent.num_computed_tokens < sent.num_prompt_tokens:
            count = min(STEP_TOKENS, sent.num_prompt_tokens - sent.num_computed_tokens)
            assert self.prefill.manager.allocate_slots(sent, count) is not None
            if is_first:
                self.prefill.scheduler.allocated(sent, self.prefill.tables(sent.request_id), 0)
            is_first = False
            self.prefill.fill(sent, sent.num_computed_tokens + count)
            step = self.prefill.scheduler.take_step({sent.request_id: count}, ())
            for rank in self.prefill.ranks:
                rank.worker.after(step, None)
            sent.num_computed_tokens += count


def wait(worker: WorkerSide, kind: str, name: str, *, ended: set[str] | None = None) -> None:
    """Waits until a worker has reported a request: as sent, or as received."""
    deadline, results = time.monotonic() + WAIT_S, worker.results(ended or ())
    while name not in getattr(results, kind):
        assert time.monotonic() < deadline
        time.sleep(0.001)
        results = worker.results(())
    assert not results.failed


@contextmanager
def engines(
    network: LocalNetwork, model: Model, here: Deployment, there: Deployment, kind: type[Engine] = Engine
) -> Iterator[Pair]:
    """Starts a prefill and a decode engine."""
    prefill = kind(network, model, "prefill", here, sends=True)
    try:
        decode = kind(network, model, "decode", there, sends=False)
        try:
            yield Pair(prefill, decode)
        finally:
            decode.close()
    finally:
        prefill.close()
