"""Ranks of SGLang's that are built and never run: pools that its own configurator makes of a model's configuration.

SGLang decides by the configuration which pools a rank has, of how many heads and channels, and lists their buffers for
a transfer. All of that is its own code here, on a place among ranks that nobody else takes; the plug-in describes what
it lists. Which heads and channels these are truly is said here, so that a pool can be filled with what a rank computes.
"""

from __future__ import annotations

import ctypes
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator, _PoolSizes
from sglang.srt.model_executor.model_runner_components.layer_setup import ModelLayerInfo
from sglang.srt.runtime_context import SpawnRanks, create_context, use_context
from sglang.srt.server_args import ServerArgs
from tests.support.described import DescribedRank
from tests.support.model_family import Family

from kvferry import Device, RankCoordinates, RankLayout
from kvferry.engines.sglang.layouts import describe
from kvferry.engines.sglang.pools import around_managers, caches_of, remember_pools

PAGES = 12
REQUESTS = 4
PAGE = 1
"""The page of every pool, and the slot of its states, that is filled."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How an engine is divided.

    Attributes:
        tp, pp: tensor-parallel ranks, and pipeline stages.
        page_tokens: of every pool.
    """

    tp: int = 1
    pp: int = 1
    page_tokens: int = 16


@dataclass(frozen=True, slots=True, eq=False)
class BuiltRank:
    """One rank.

    Attributes:
        coordinates: its place.
        layout: what the plug-in makes of what SGLang lists.
        page_bytes: by group, how many bytes its pools keep in the page, or the slot, that was filled.
        owner: what must live as long as the memory.
    """

    coordinates: RankCoordinates
    layout: RankLayout
    page_bytes: Mapping[str, int]
    owner: Any

    @property
    def labelled(self) -> DescribedRank:
        """The rank, with what lies in the pages that were filled, wherever in this process its pools are."""
        regions = self.layout.regions()
        first, last = min(each.address for each in regions), max(each.stop for each in regions)
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * (last - first)).from_address(first))
        return DescribedRank(self.layout, memory, dict.fromkeys(self.page_bytes, PAGE))


@dataclass(slots=True)
class Built:
    """Builds engines of one family, as often as somebody asks for another shape."""

    family: Family
    directory: Path
    _engines: dict[Shape, dict[int, BuiltRank]] = field(default_factory=dict)

    def labelled(self, shape: Shape) -> dict[int, DescribedRank]:
        return {number: rank.labelled for number, rank in self.engine(shape).items()}

    def engine(self, shape: Shape) -> dict[int, BuiltRank]:
        """All ranks of an engine, by their number within it."""
        if shape not in self._engines:
            (self.directory / "config.json").write_text(json.dumps(self.family.sglang_configuration))
            places = [(pp, tp) for pp in range(shape.pp) for tp in range(shape.tp)]
            self._engines[shape] = {number: _build(self, shape, pp, tp) for number, (pp, tp) in enumerate(places)}
        return self._engines[shape]


def _build(built: Built, shape: Shape, stage: int, tp_rank: int) -> BuiltRank:
    args = ServerArgs(
        model_path=str(built.directory),
        device="cpu",
        dtype="float32",
        tp_size=shape.tp,
        pp_size=shape.pp,
        page_size=shape.page_tokens,
        attention_backend=built.family.sglang_backend,
        disable_overlap_schedule=True,
        skip_tokenizer_init=True,
        max_mamba_cache_size=REQUESTS + 2,
        disable_radix_cache=True,
        load_format="dummy",
    )
    ranks = SpawnRanks(world_rank=stage * shape.tp + tp_rank, gpu_id=0, dp_rank=None)
    with use_context(create_context(args, role="scheduler", ranks=ranks)):
        model = ModelConfig.from_server_args(args)
        per_stage = model.num_hidden_layers // shape.pp
        layers = range(stage * per_stage, (stage + 1) * per_stage)
        pools = _Pools(args, model, layers, shape)
        place = RankCoordinates(tp_rank=tp_rank, tp_size=shape.tp, pp_rank=stage, pp_size=shape.pp)
        listed = pools.listed(layers)
        caches = caches_of(listed, model, mambaish_config(model), {}, place=place)
        layout = describe(caches, place, Device())
    truth = _Truth(pools, built.family.configuration, place)
    return BuiltRank(place, layout, truth.fill(), pools)


class _Pools:
    """The pools of a rank, as SGLang makes them."""

    def __init__(self, args: ServerArgs, model: ModelConfig, layers: range, shape: Shape) -> None:
        windows = getattr(model, "swa_attention_layer_ids", None) if model.is_hybrid_swa else None
        full = getattr(model, "full_attention_layer_ids", None) if model.is_hybrid_swa else None
        configurator = KVCacheConfigurator(
            device="cpu",
            gpu_id=0,
            attn_dp_size=1,
            pp_size=shape.pp,
            pp_group=None,
            model=None,
            model_config=model,
            server_args=args,
            kv_cache_dtype=torch.float32,
            model_dtype=torch.float32,
            page_size=shape.page_tokens,
            sliding_window_size=model.sliding_window_size,
            spec_algorithm=_NoSpeculation(),
            is_draft_worker=False,
            post_capture_kv_active=False,
            spec_aux_config=SimpleNamespace(draft_model_config=None, dflash_draft_num_layers=None),
            is_hybrid_swa=model.is_hybrid_swa,
            is_hybrid_swa_compress=getattr(model, "is_hybrid_swa_compress", False),
            use_mla_backend=model.attention_arch is AttentionArch.MLA,
            layer_info=ModelLayerInfo(
                start_layer=layers.start,
                end_layer=layers.stop,
                num_effective_layers=len(layers),
                swa_attention_layer_ids=windows,
                full_attention_layer_ids=full,
            ),
            forward_stream=None,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=None,
            memory_pool_config=None,
        )
        tokens = (PAGES - 1) * shape.page_tokens
        self.requests = configurator._build_req_to_token_pool(max_num_reqs=REQUESTS)
        sizes = _PoolSizes(
            max_total_num_tokens=tokens,
            max_running_requests=REQUESTS,
            full_max_total_num_tokens=tokens,
            swa_max_total_num_tokens=tokens,
            unified_memory_pool_bytes=None,
            c4_max_total_num_tokens=0,
            c128_max_total_num_tokens=0,
            c4_state_pool_size=0,
            c128_state_pool_size=0,
            c4_state_dtype=None,
            c128_state_dtype=None,
        )
        from sglang.srt.configs.model_config import is_deepseek_dsa

        self.tokens = configurator._build_token_to_kv_pool(
            sizes=sizes,
            is_dsa_model=is_deepseek_dsa(model.hf_config),
            is_dsv4_model=False,
            req_to_token_pool=self.requests,
        )
        self.window = model.sliding_window_size if model.is_hybrid_swa else None

    def listed(self, layers: range) -> KVArgs:
        """What SGLang lists of them for a transfer."""
        args = KVArgs()
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = self.tokens.get_contiguous_buf_infos()
        args.page_size, args.num_draft_entries, args.prefill_start_layer = self.tokens.page_size, 0, layers.start
        queue = SimpleNamespace(scheduler=SimpleNamespace(sliding_window_size=self.window))

        def make(_: Any) -> None:
            utils.setup_state_kv_args(args, self.tokens, None, len(layers), self.requests)
            remember_pools(None, args, self.tokens, None, None, self.requests)

        around_managers(make, queue)
        return args


class _Truth:
    """What a rank truly keeps: by its configuration, and by how SGLang's layers divide heads and channels."""

    def __init__(self, pools: _Pools, configuration: Mapping[str, Any], place: RankCoordinates) -> None:
        self._pools, self._configuration, self._place = pools, configuration, place
        self._bytes: dict[str, int] = {}

    def fill(self) -> dict[str, int]:
        """Fills a page of every pool, and a slot; every element says which it is. Returns bytes by group."""
        tokens, kv_heads = self._pools.tokens, self._configuration["num_key_value_heads"]
        full = getattr(tokens, "full_kv_pool", tokens)
        self._paged("kv", full, self._configuration.get("num_global_key_value_heads", kv_heads))
        if (window := getattr(tokens, "swa_kv_pool", None)) is not None:
            self._paged("window", window, self._configuration.get("swa_num_key_value_heads", kv_heads))
        if (states := getattr(self._pools.requests, "mamba_pool", None)) is not None:
            kept = states.mamba_cache
            for number, convolution in enumerate(kept.conv):
                if convolution.numel():  # linear attention has none
                    self._state(f"convolution {number}", convolution, self._channels())
            if kept.temporal.numel():  # short convolutions have none
                heads = kept.temporal.shape[2] * self._place.tp_size
                self._state("state", kept.temporal, self._share(heads))
        return self._bytes

    def _paged(self, group: str, pool: Any, heads: int) -> None:
        page, first = pool.page_size, getattr(pool, "start_layer", 0) or 0
        rows = slice(PAGE * page, (PAGE + 1) * page)
        kinds = {"latent": pool.kv_buffer} if hasattr(pool, "kv_buffer") else {"k": pool.k_buffer, "v": pool.v_buffer}
        for kind, layers in kinds.items():
            for number, layer in enumerate(layers):
                target = layer[rows]
                held = [0] if kind == "latent" else self._share(heads)
                _write(target, f"{group} {kind} {first + number}", [range(page), held, range(target.shape[-1])])
                self._bytes[group] = self._bytes.get(group, 0) + target.nbytes

    def _state(self, name: str, layers: torch.Tensor, held: Sequence[int]) -> None:
        for number, layer in enumerate(layers):
            target = layer[PAGE]
            axes: list[Any] = [range(size) for size in target.shape]
            axes[target.shape.index(len(held))] = held
            _write(target, f"{name} of {number}", axes)
            self._bytes["state"] = self._bytes.get("state", 0) + target.nbytes

    def _share(self, count: int) -> list[int]:
        """Those of so many heads, or groups, that this rank has: neighbours have the same where there are too few."""
        size = self._place.tp_size
        first = self._place.tp_rank * count // size
        return list(range(first, first + max(1, count // size)))

    def _channels(self) -> list[int]:
        """The channels of a convolution that this rank has, in its order."""
        found: list[int] = []
        first = 0
        for units, width in state_blocks(self._configuration):
            found += [first + unit * width + each for unit in self._share(units) for each in range(width)]
            first += units * width
        return found


def state_blocks(known: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The blocks of a convolution: of how many units each, and how many channels one has."""
    if "linear_num_key_heads" in known:
        keys = (known["linear_num_key_heads"], known["linear_key_head_dim"])
        return [keys, keys, (known["linear_num_value_heads"], known["linear_value_head_dim"])]
    if "linear_attn_config" in known:
        each = known["linear_attn_config"]
        return [(each["num_heads"], each["head_dim"])] * 3
    if "conv_L_cache" in known:
        return [(known["hidden_size"], 1)]
    if known["model_type"] in ("mamba", "falcon_mamba"):  # Mamba 1
        return [(known["intermediate_size"], 1)]

    def first(*names: str) -> int:
        return next(int(known[name]) for name in names if name in known)

    heads, width = (
        first("mamba_n_heads", "mamba_num_heads", "num_heads"),
        first("mamba_d_head", "mamba_head_dim", "head_dim"),
    )
    groups, state = first("mamba_n_groups", "n_groups"), first("mamba_d_state", "ssm_state_size", "state_size")
    return [(heads, width), (groups, state), (groups, state)]


def _write(target: torch.Tensor, name: str, axes: list[Any]) -> None:
    label = np.full((), zlib.crc32(name.encode()), np.uint64)
    for axis in axes:
        label = label[..., None] * np.uint64(65_537) + np.array(list(axis), np.uint64) + np.uint64(1)
    mixed = label * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(33)
    kind = {4: np.int32, 2: np.int16, 1: np.uint8}[target.element_size()]
    values = torch.from_numpy(mixed.astype(np.int64).astype(kind))
    target.view(values.dtype).copy_(values.view(target.shape))


class _NoSpeculation:
    def is_dflash_family(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return lambda *_: name == "is_none"
