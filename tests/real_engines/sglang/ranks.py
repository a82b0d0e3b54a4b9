"""Ranks of SGLang's: its manager, sender and receiver over pools of ours, called as its scheduler calls them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll, StateType
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.plugins.hook_registry import HookRegistry
from tests.support.sglang_pools import heads_pool, mamba_pool, model_config, named, remembered

from kvferry.engines.sglang import manager as manager_module
from kvferry.engines.sglang import options as options_module
from kvferry.engines.sglang import rank_caches as caches_module
from kvferry.engines.sglang.hooks import keep_until_proven
from kvferry.engines.sglang.plugin import register

PAGES = 40
SLOTS = 6
METADATA_ROWS = 8


@dataclass(frozen=True)
class Model:
    """What a model caches.

    Attributes:
        layers, window_layers: with full attention, and with a sliding window.
        heads: keys and values; None for latents.
        window_heads: of layers with a sliding window; None for as many as the others.
        head_bytes: of one head and token, or of a latent.
        state_layers: with recurrent state, which has `heads` times 4 channels of 6 bytes, and a convolution whose
            channels are three blocks.
        weights: identifies them.
        order: of what a page has.
        groups: of a mixer of Mamba 2, whose convolution has blocks for them that SGLang does not name; None for blocks
            that it names.
        sparse: the numbers of layers with sparse attention, of a model that has others which SGLang lists apart.
    """

    layers: int = 3
    heads: int | None = 4
    head_bytes: int = 8
    page_tokens: int = 4
    window_layers: int = 0
    window_tokens: int = 8
    window_heads: int | None = None
    state_layers: int = 0
    weights: str = "the same"
    order: str = "nhd"
    groups: int | None = None
    sparse: tuple[int, ...] = ()

    @property
    def channels(self) -> int:
        return 4 * (self.heads or 1)

    @property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """The blocks of a convolution: their channels over all ranks, and how often each can be cut."""
        if self.groups is None:
            return ((4, 4), (4, 4), (8, 8))
        return ((16, 4), (3 * self.groups, self.groups), (3 * self.groups, self.groups))

    @property
    def heads_in_windows(self) -> int:
        return self.window_heads or self.heads or 1

    def recurrent(self, tp: int) -> Any:
        """The configuration of the layers with recurrent state, on so many ranks."""
        layers = {"full_attention_layer_ids": [number_of(0, each) for each in range(self.layers)]}
        states = [number_of(2, each) for each in range(self.state_layers)]
        if self.groups is None:
            return named("Qwen3NextConfig", mamba2_cache_params=SimpleNamespace(layers=states), **layers)
        extended = tp if self.groups % tp else self.groups
        shape = SimpleNamespace(conv_dim=16 + 2 * 3 * extended, intermediate_size=16, num_heads=4, state_size=3)
        config = SimpleNamespace(shape=shape, layers=states)
        return named("GraniteMoeHybridConfig", mamba2_cache_params=config, mamba_n_groups=self.groups, **layers)


def number_of(kind: int, layer: int) -> int:
    """The number in the model of a layer that has this number among those of its kind: kinds take turns."""
    return 3 * layer + kind


class Rank:
    """One rank's pools, described the way SGLang describes its own."""

    def __init__(
        self,
        model: Model,
        *,
        tp: int,
        tp_rank: int,
        stage: tuple[int, int] = (0, 1),
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Makes the pools.

        Args:
            stage: which pipeline stage it is, of how many.
            options: what SGLang's code is told about the rank beside that; see `place`.
        """
        self.model, self.tp, self.tp_rank, self.options = model, tp, tp_rank, options
        self.layers, self.windows, self.states = (
            range(stage[0] * count // stage[1], (stage[0] + 1) * count // stage[1])
            for count in (model.layers, model.window_layers, model.state_layers)
        )
        rows = model.head_bytes * (1 if model.heads is None else len(self._heads(model.heads)))
        kinds = 1 if model.heads is None else 2
        self.kv = [[self._pool(rows) for _ in self.layers] for _ in range(kinds)]
        rows = model.head_bytes * len(self._heads(model.heads_in_windows))
        self.window = [[self._pool(rows) for _ in self.windows] for _ in range(2)]
        channels = model.channels // tp
        self.state = [np.zeros((SLOTS, channels, 6), np.uint8) for _ in self.states]
        convolved = len(self._convolved)
        self.convolution = [np.zeros((SLOTS, convolved, 3), np.uint8) for _ in self.states]
        self.scheduler = SimpleNamespace(sliding_window_size=None)
        self.rooms = np.zeros((METADATA_ROWS, 8), np.uint64)
        self.tokens = np.zeros((METADATA_ROWS, 16), np.int32)

    def _heads(self, heads: int) -> range:
        """Those of so many that are on this rank."""
        mine = max(1, heads // self.tp)
        start = self.tp_rank * heads // self.tp
        return range(start, start + mine)

    def _pool(self, row_bytes: int) -> np.ndarray:
        return np.zeros((PAGES, self.model.page_tokens, row_bytes), np.uint8)

    @property
    def arguments(self) -> KVArgs:
        """As SGLang's scheduler fills them in."""
        args = KVArgs()
        args.engine_rank, args.pp_rank, args.gpu_id = self.tp_rank, 0, 0
        args.system_dp_rank = self.options.get("system_dp_rank", 0)
        args.kv_cache_dtype_str, args.kv_layout, args.page_size = "uint8", None, self.model.page_tokens
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = _infos([pool for kind in self.kv for pool in kind])
        args.kv_layer_ids, args.num_draft_entries, args.ib_device = [], 0, None
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = _infos([self.tokens, self.rooms])
        args.state_types, args.is_hybrid_mla_backend = [], False
        for name in ("data_ptrs", "data_lens", "item_lens", "dim_per_tensor", "slice_outer_counts", "layer_ids"):
            setattr(args, f"state_{name}", [])
        args.state_conv_shard_groups = []
        if self.model.window_layers:
            self._add_state(args, StateType.SWA, [pool for kind in self.window for pool in kind])
        if self.model.state_layers:
            layers = len(self.states)
            numbers = [number_of(2, each) for each in self.states]
            self._add_state(args, StateType.MAMBA, [*self.convolution, *self.state])
            args.state_dim_per_tensor[-1] = [each.shape[1] for each in (*self.convolution, *self.state)]
            args.state_slice_outer_counts[-1] = [1] * (2 * layers)
            args.state_layer_ids[-1] = [*numbers, *numbers]
            groups = None if self.model.groups else [channels for channels, _ in self.model.blocks]
            args.state_conv_shard_groups[-1] = [groups] * layers + [None] * layers
        requests = SimpleNamespace(mamba_pool=self._mamba_pool)
        window = self.model.window_tokens
        remembered(args, self._pools, None, None, requests, window_tokens=window, scheduler=self.scheduler)
        return args

    @property
    def _pools(self) -> Any:
        """What stands for the pools that SGLang's scheduler has."""
        model = self.model
        start, size = self.layers.start, (PAGES - 1) * model.page_tokens
        full = named("MLATokenToKVPool", start_layer=start, size=size, page_size=model.page_tokens)
        ids = [number_of(0, each) for each in self.layers]
        if model.heads is not None:
            held = len(self._heads(model.heads))
            full = heads_pool(
                held, model.head_bytes, layout=model.order, start_layer=start, model_layer_ids=ids, size=size
            )
        if model.window_layers:
            windowed = [number_of(1, each) for each in self.windows]
            held = len(self._heads(model.heads_in_windows))
            windows = heads_pool(held, model.head_bytes, model_layer_ids=windowed, size=size)
            return named("SWAKVPool", full_kv_pool=full, swa_kv_pool=windows)
        if model.state_layers:
            return named(
                "HybridLinearKVPool",
                full_kv_pool=full,
                mamba_pool=self._mamba_pool,
                full_attention_layer_id_mapping={number: index for index, number in enumerate(ids)},
            )
        return full

    @property
    def _mamba_pool(self) -> Any:
        convolution, state = ([each.ctypes.data for each in kind] for kind in (self.convolution, self.state))
        return mamba_pool([convolution], state) if self.state else None

    def _add_state(self, args: KVArgs, kind: StateType, pools: Sequence[np.ndarray]) -> None:
        args.state_types.append(kind)
        pointers, lengths, items = _infos(pools)
        args.state_data_ptrs.append(pointers)
        args.state_data_lens.append(lengths)
        args.state_item_lens.append(items)
        for name in ("dim_per_tensor", "slice_outer_counts", "layer_ids", "conv_shard_groups"):
            getattr(args, f"state_{name}").append([])

    # ---- what a request has ---------------------------------------------------------------------------------------

    def fill(self, whole: Whole, pages: Sequence[int], window: Sequence[int], slot: int) -> None:
        """Writes a request's caches, as this rank computes them."""
        for kind, pools in enumerate(self.kv):
            for layer, pool in zip(self.layers, pools, strict=True):
                pool[self._places(pages, 0, whole.tokens)] = self._part(whole.kv[kind, layer], self.model.heads)
        first_page = -(-whole.tokens // self.model.page_tokens) - len(window)
        start = min(whole.tokens, first_page * self.model.page_tokens)
        for kind, pools in enumerate(self.window):
            for layer, pool in zip(self.windows, pools, strict=True):
                pool[self._places(window, start, whole.tokens)] = self._windowed(whole.window[kind, layer])[start:]
        for layer, pool in zip(self.states, self.state, strict=True):
            pool[slot] = whole.state[layer, self._share(self.model.channels)]
        for layer, pool in zip(self.states, self.convolution, strict=True):
            pool[slot] = whole.convolution[layer, self._convolved]

    def check(
        self, whole: Whole, pages: Sequence[int], window: Sequence[int], slot: int, *, held_tokens: int = 0
    ) -> None:
        """Asserts that a request's caches are here, from token `held_tokens` on."""
        tokens = whole.tokens
        for kind, pools in enumerate(self.kv):
            for layer, pool in zip(self.layers, pools, strict=True):
                expected = self._part(whole.kv[kind, layer], self.model.heads)[held_tokens:]
                np.testing.assert_array_equal(pool[self._places(pages, held_tokens, tokens)], expected)
        start = max(held_tokens, tokens - self.model.window_tokens)
        for kind, pools in enumerate(self.window):
            for layer, pool in zip(self.windows, pools, strict=True):
                expected = self._windowed(whole.window[kind, layer])[start:]
                np.testing.assert_array_equal(pool[self._places(window, start, tokens)], expected)
        for layer, pool in zip(self.states, self.state, strict=True):
            np.testing.assert_array_equal(pool[slot], whole.state[layer, self._share(self.model.channels)])
        for layer, pool in zip(self.states, self.convolution, strict=True):
            np.testing.assert_array_equal(pool[slot], whole.convolution[layer, self._convolved])

    def _places(self, pages: Sequence[int], start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The page and the offset in it of every token from `start` on; the first page is that token's."""
        tokens, first = np.arange(start, stop), start // self.model.page_tokens
        given = np.array(pages, np.int64)
        return given[tokens // self.model.page_tokens - first], tokens % self.model.page_tokens

    def _part(self, layer: np.ndarray, heads: int | None) -> np.ndarray:
        """This rank's part of (token, head, byte)."""
        mine = layer if heads is None else layer[:, list(self._heads(heads))]
        return mine.reshape(len(layer), -1)

    def _windowed(self, layer: np.ndarray) -> np.ndarray:
        return self._part(layer, self.model.heads_in_windows)

    def _share(self, size: int) -> list[int]:
        mine = size // self.tp
        return list(range(self.tp_rank * mine, (self.tp_rank + 1) * mine))

    @property
    def _convolved(self) -> list[int]:
        """The channels of the convolution that this rank has, of x, B and C, or of other blocks."""
        mine: list[int] = []
        first = 0
        for channels, parts in self.model.blocks:
            width = channels // parts
            mine += [first + part * width + each for part in self._heads(parts) for each in range(width)]
            first += channels
        return mine


class Whole:
    """The caches of one request, undivided."""

    def __init__(self, model: Model, tokens: int, seed: int) -> None:
        self.tokens = tokens
        random = np.random.default_rng(seed)

        def draw(*shape: int) -> np.ndarray:
            return random.integers(0, 256, shape, np.uint8)

        heads = model.heads or 1
        self.kv = draw(2, model.layers, tokens, heads, model.head_bytes)
        windows = model.heads_in_windows
        self.window = draw(2, model.window_layers, tokens, windows, model.head_bytes)
        self.state = draw(model.state_layers, model.channels, 6)
        self.convolution = draw(model.state_layers, sum(channels for channels, _ in model.blocks), 3)


def _infos(pools: Sequence[np.ndarray]) -> tuple[list[int], list[int], list[int]]:
    return [each.ctypes.data for each in pools], [each.nbytes for each in pools], [each[0].nbytes for each in pools]


class TransferQueue:
    """Stands in for SGLang's, of which one is made before a decode rank's manager is."""


QUEUE = TransferQueue()


@cache
def plug_in() -> None:
    """Registers the plug-in in this process, as SGLang does before everything else."""
    register()
    HookRegistry.apply_hooks()
    keep_until_proven(QUEUE, limit_is_users=False)


class Consensus(dict[int, int]):
    """What a pipeline stage knows of all stages, when no other stage has said anything yet."""

    def __init__(self, stages: int, *_: object) -> None:
        super().__init__()
        self._stages = stages

    def collect(self, room: int) -> list[int | None]:
        return [self.get(room), *[KVPoll.Bootstrapping] * (self._stages - 1)]


@contextmanager
def place(
    patch: pytest.MonkeyPatch,
    port: int,
    model: Model,
    *,
    tp: int,
    tp_rank: int,
    pp: int,
    pp_rank: int,
    **changed: Any,
) -> Iterator[None]:
    """What SGLang's code is told about the rank that it runs on.

    Args:
        changed: options that are different.
    """
    parallel = SimpleNamespace(
        tp_size=tp,
        tp_rank=changed.get("tp_rank_of_all", tp_rank),
        attn_tp_size=tp,
        attn_tp_rank=tp_rank,
        attn_cp_size=1,
        attn_cp_rank=0,
        attn_dcp_size=1,
        attn_dcp_rank=0,
        attn_dp_size=1,
        attn_dp_rank=0,
        dp_size=1,
        pp_size=pp,
        pp_group=None,
        num_dp_ranks=1,
        nnodes=1,
        dist_init_addr=None,
        enable_kv_cache_sharding=False,
        enable_dsa_cache_layer_split=False,
        enable_cp_tp_group_sharing=False,
        load_balance_method="round_robin",
    )
    disagg = SimpleNamespace(
        disaggregation_bootstrap_port=port,
        disaggregation_decode_allocation_policy="early",
        disaggregation_enable_kv_checksum=False,
        disaggregation_decode_host_receive_threshold=1.0,
        enable_pd_role_switch=False,
    )
    identity = SimpleNamespace(fingerprint=lambda: {"weights": model.weights})
    memory = SimpleNamespace(enable_hisparse=False, enable_unified_memory=False)
    for options in (parallel, disagg, memory):
        vars(options).update({name: value for name, value in changed.items() if name in vars(options)})
    shard = SimpleNamespace(rank_in_group=changed.get("shard_rank", 0), world_size=changed.get("shard_size", 1))
    config = model_config(model.heads, model.window_heads, window_tokens=model.window_tokens, layers=model.layers)
    config.full_attention_layer_ids = [number_of(0, each) for each in range(model.layers)]
    config.swa_attention_layer_ids = [number_of(1, each) for each in range(model.window_layers)]
    freq = [int(layer in model.sparse) for layer in range(model.layers)]
    config.hf_config = SimpleNamespace(sparse_attention_config={"sparse_attention_freq": freq})
    with patch.context() as within:  # without `raising` where 0.5.22 asks for nothing
        for module in (conn, options_module):
            within.setattr(module, "get_parallel", lambda: parallel)
            within.setattr(module, "get_disagg", lambda: disagg)
        within.setattr(manager_module, "get_disagg", lambda: disagg)
        within.setattr(manager_module, "get_parallel", lambda: parallel)
        within.setattr(options_module, "get_memory", lambda: memory)
        within.setattr(caches_module, "mambaish_config", lambda _: model.recurrent(tp) if model.state_layers else None)
        within.setattr(conn, "get_serving", lambda: SimpleNamespace(host=changed.get("host", "127.0.0.1"), port=1))
        within.setattr(conn, "get_observability", lambda: SimpleNamespace(enable_trace=False), raising=False)
        within.setattr(conn, "get_dsv41_spec_layout", lambda _: None)
        within.setattr(conn, "linear_attn_tp_size", lambda: tp, raising=False)
        within.setattr(conn, "get_kv_shard_group", lambda _: shard, raising=False)
        within.setattr(conn, "PPConsensusStore", Consensus)
        within.setattr(ModelConfig, "from_server_args", lambda _: config)
        within.setattr(caches_module, "identity_of", lambda *_: identity)
        yield


PREFILL, DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE
SERVER_ARGS = SimpleNamespace(device="cpu", enable_pd_role_switch=False)
