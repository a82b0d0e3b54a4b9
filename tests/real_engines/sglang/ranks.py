"""Ranks of SGLang's: its manager, sender and receiver over pools of ours, called as its scheduler calls them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.base.conn import KVArgs, StateType
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.plugins.hook_registry import HookRegistry

from kvferry.engines.sglang import manager as manager_module
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
        head_bytes: of one head and token, or of a latent.
        state_layers: with recurrent state, which has `heads` times 4 channels of 6 bytes, and a convolution whose
            channels are three blocks.
    """

    layers: int = 3
    heads: int | None = 4
    head_bytes: int = 8
    page_tokens: int = 4
    window_layers: int = 0
    window_tokens: int = 8
    state_layers: int = 0

    @property
    def channels(self) -> int:
        return 4 * (self.heads or 1)

    @property
    def blocks(self) -> tuple[int, int, int]:
        return (4, 4, 8)


class Rank:
    """One rank's pools, described the way SGLang describes its own."""

    def __init__(self, model: Model, *, tp: int, tp_rank: int, layers: range | None = None) -> None:
        """Makes the pools.

        Args:
            layers: those of a pipeline stage.
        """
        self.model, self.tp, self.tp_rank = model, tp, tp_rank
        self.layers = range(model.layers) if layers is None else layers
        rows = self._row_bytes
        kinds = 1 if model.heads is None else 2
        self.kv = [[self._pool(rows) for _ in self.layers] for _ in range(kinds)]
        self.window = [[self._pool(rows) for _ in range(model.window_layers)] for _ in range(2)]
        channels = model.channels // tp
        self.state = [np.zeros((SLOTS, channels, 6), np.uint8) for _ in range(model.state_layers)]
        convolved = sum(model.blocks) // tp
        self.convolution = [np.zeros((SLOTS, convolved, 3), np.uint8) for _ in range(model.state_layers)]
        self.rooms = np.zeros((METADATA_ROWS, 8), np.uint64)
        self.tokens = np.zeros((METADATA_ROWS, 16), np.int32)

    @property
    def _row_bytes(self) -> int:
        if self.model.heads is None:
            return self.model.head_bytes
        return len(self._heads) * self.model.head_bytes

    @property
    def _heads(self) -> range:
        heads = self.model.heads or 1
        mine = max(1, heads // self.tp)
        start = self.tp_rank * heads // self.tp
        return range(start, start + mine)

    def _pool(self, row_bytes: int) -> np.ndarray:
        return np.zeros((PAGES, self.model.page_tokens, row_bytes), np.uint8)

    @property
    def arguments(self) -> KVArgs:
        """As SGLang's scheduler fills them in."""
        args = KVArgs()
        args.engine_rank, args.pp_rank, args.system_dp_rank, args.gpu_id = self.tp_rank, 0, 0, 0
        args.kv_cache_dtype_str, args.kv_layout, args.page_size = "uint8", None, self.model.page_tokens
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = _infos([pool for kind in self.kv for pool in kind])
        args.kv_layer_ids, args.num_draft_entries = [], 0
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = _infos([self.tokens, self.rooms])
        args.prefill_start_layer = self.layers.start
        args.state_types, args.is_hybrid_mla_backend = [], False
        for name in ("data_ptrs", "data_lens", "item_lens", "dim_per_tensor", "slice_outer_counts", "layer_ids"):
            setattr(args, f"state_{name}", [])
        args.state_conv_shard_groups = []
        if self.model.window_layers:
            self._add_state(args, StateType.SWA, [pool for kind in self.window for pool in kind])
        if self.model.state_layers:
            layers = self.model.state_layers
            self._add_state(args, StateType.MAMBA, [*self.convolution, *self.state])
            args.state_dim_per_tensor[-1] = [each.shape[1] for each in (*self.convolution, *self.state)]
            args.state_slice_outer_counts[-1] = [1] * (2 * layers)
            args.state_layer_ids[-1] = [*range(layers), *range(layers)]
            args.state_conv_shard_groups[-1] = [list(self.model.blocks)] * layers + [None] * layers
        return args

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
                pool[list(pages)] = self._part(whole.kv[kind, layer])
        for kind, pools in enumerate(self.window):
            for layer, pool in enumerate(pools):
                if window:
                    pool[list(window)] = self._part(whole.window[kind, layer])[-len(window) :]
        for layer, pool in enumerate(self.state):
            pool[slot] = whole.state[layer, self._share(self.model.channels)]
        for layer, pool in enumerate(self.convolution):
            pool[slot] = whole.convolution[layer, self._convolved]

    def check(
        self, whole: Whole, pages: Sequence[int], window: Sequence[int], slot: int, *, held_pages: int = 0
    ) -> None:
        """Asserts that a request's caches are here, from page `held_pages` on."""
        for kind, pools in enumerate(self.kv):
            for layer, pool in zip(self.layers, pools, strict=True):
                np.testing.assert_array_equal(pool[list(pages)], self._part(whole.kv[kind, layer])[held_pages:])
        for kind, pools in enumerate(self.window):
            for layer, pool in enumerate(pools):
                expected = self._part(whole.window[kind, layer])[-len(window) :]
                np.testing.assert_array_equal(pool[list(window)], expected)
        for layer, pool in enumerate(self.state):
            np.testing.assert_array_equal(pool[slot], whole.state[layer, self._share(self.model.channels)])
        for layer, pool in enumerate(self.convolution):
            np.testing.assert_array_equal(pool[slot], whole.convolution[layer, self._convolved])

    def _part(self, layer: np.ndarray) -> np.ndarray:
        """This rank's part of (page, token, head, byte)."""
        mine = layer if self.model.heads is None else layer[:, :, list(self._heads)]
        return mine.reshape(*layer.shape[:2], -1)

    def _share(self, size: int, start: int = 0) -> list[int]:
        mine = size // self.tp
        return list(range(start + self.tp_rank * mine, start + (self.tp_rank + 1) * mine))

    @property
    def _convolved(self) -> list[int]:
        a, b, c = self.model.blocks
        return self._share(a) + self._share(b, a) + self._share(c, a + b)


class Whole:
    """The caches of one request, undivided."""

    def __init__(self, model: Model, pages: int, seed: int) -> None:
        random = np.random.default_rng(seed)

        def draw(*shape: int) -> np.ndarray:
            return random.integers(0, 256, shape, np.uint8)

        heads = model.heads or 1
        self.kv = draw(2, model.layers, pages, model.page_tokens, heads, model.head_bytes)
        self.window = draw(2, model.window_layers, pages, model.page_tokens, heads, model.head_bytes)
        self.state = draw(model.state_layers, model.channels, 6)
        self.convolution = draw(model.state_layers, sum(model.blocks), 3)


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


@contextmanager
def place(
    patch: pytest.MonkeyPatch, port: int, model: Model, *, tp: int, tp_rank: int, pp: int, pp_rank: int
) -> Iterator[None]:
    """What SGLang's code is told about the rank that it runs on."""
    parallel = SimpleNamespace(
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
    )
    config = SimpleNamespace(
        get_total_num_kv_heads=lambda: model.heads,
        sliding_window_size=model.window_tokens,
        num_hidden_layers=model.layers,
    )
    with patch.context() as within:
        for module in (conn, manager_module):
            within.setattr(module, "get_parallel", lambda: parallel)
            within.setattr(module, "get_disagg", lambda: disagg)
        within.setattr(conn, "get_serving", lambda: SimpleNamespace(host="127.0.0.1", port=1))
        within.setattr(conn, "get_observability", lambda: SimpleNamespace(enable_trace=False))
        within.setattr(conn, "get_dsv41_spec_layout", lambda _: None)
        within.setattr(conn, "linear_attn_tp_size", lambda: tp)
        within.setattr(conn, "PPConsensusStore", lambda *_: {})
        within.setattr(ModelConfig, "from_server_args", lambda _: config)
        yield


PREFILL, DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE
SERVER_ARGS = SimpleNamespace(device="cpu", enable_pd_role_switch=False)
