"""Engines of vLLM's that are built and never run: its own model classes, cache specs, groups and pools, rank by rank.

Every rank's model is made in this process by vLLM's class for it, with a place among tensor-parallel and pipeline ranks
that nobody else takes. Its layers say what they cache, vLLM groups them and allocates a small pool, and the plug-in
describes that as it does in a worker. Which heads and channels a rank truly has its weights say: vLLM's own loaders are
given weights in which every row says its number, so that a pool can be filled with what the rank would compute.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from inspect import Parameter, signature
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from tests.support.described import DescribedRank
from tests.support.model_family import Family
from transformers import PreTrainedConfig
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import ModelRegistry, registry
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import Platform
from vllm.transformers_utils.config import _CONFIG_REGISTRY
from vllm.v1.attention.backends.mla import flashmla_sparse
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
from vllm.v1.worker.utils import allocate_kv_cache, bind_kv_cache_to_layers

from kvferry import RankCoordinates
from kvferry.engines.vllm import modules as modules_module
from kvferry.engines.vllm.caches import CacheGroup, ModelShape
from kvferry.engines.vllm.configuration import cache_forms, groups_of, heads_of, kept_states
from kvferry.engines.vllm.layouts import DescribedCaches, describe
from kvferry.engines.vllm.modules import draft_layers

BLOCKS = 64
"""Of every pool."""

_MLA = {
    False: "vllm.v1.attention.backends.mla.triton_mla.TritonMLABackend",
    True: "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend",
}
"""GPU backends of latents, by whether attention is sparse: those of CPUs have blocks of one size, or none."""

_PROJECTED_BY = ("D", "dt_bias", "A_log")
"""Parameters of a layer with recurrent state that have a row for each of its heads; of Mamba 1, for each channel."""


class _ProcessGroup:
    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class _Group:
    """What layers ask of vLLM's groups of ranks while they are made."""

    device_communicator = None
    use_custom_op_call = False
    unique_name = "nobody"

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = self.rank_in_group = self.local_rank = rank
        self.world_size, self.ranks = size, list(range(size))
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1
        self.device_group = self.cpu_group = _ProcessGroup(rank, size)


@dataclass(frozen=True, slots=True)
class Shape:
    """How an engine is divided.

    Attributes:
        tp, pp: how many tensor-parallel ranks, and how many pipeline stages.
        block_tokens: that vLLM is asked for.
        layout: in which order the pool's dimensions lie.
    """

    tp: int = 1
    pp: int = 1
    block_tokens: int = 32
    layout: str = "LBHNC"


@dataclass(frozen=True, slots=True, eq=False)
class BuiltRank:
    """One rank.

    Attributes:
        coordinates: its place.
        described: what the plug-in makes of its caches.
        groups: the groups of layers that share block tables.
        owner: what must live as long as the memory.
        memory: the pool, in bytes.
        page_bytes: by group, how many bytes its layers keep in the page that was filled.
    """

    coordinates: RankCoordinates
    described: DescribedCaches
    groups: tuple[CacheGroup, ...]
    owner: Any
    memory: np.ndarray[Any, Any]
    page_bytes: Mapping[str, int]

    @property
    def labelled(self) -> DescribedRank:
        """The rank, with what lies in the pages that `fill` has written."""
        pages = {group.name: page_of(number) for number, group in enumerate(self.groups)}
        return DescribedRank(self.described.layout, self.memory, pages)


def page_of(group: int) -> int:
    """The page that is filled for a group: groups lie over each other, and no block is two groups'."""
    return 1 + group


@dataclass(slots=True)
class Built:
    """Builds engines of one family, as often as somebody asks for another shape.

    Attributes:
        family: which.
        directory: where its configuration is written.
        totals: by layer and number of a state, how many channels or heads that has over all ranks.
    """

    family: Family
    directory: Path
    totals: dict[tuple[str, int], int] = field(default_factory=dict)
    _engines: dict[Shape, dict[int, BuiltRank]] = field(default_factory=dict)

    @property
    def draft_directory(self) -> Path:
        """Where the configuration of a draft model of its own is written."""
        return self.directory / "draft"

    @property
    def drafts(self) -> dict[str, Any] | None:
        """How engines draft, as vLLM's configuration has it."""
        if self.family.drafts is None:
            return None
        model = {"model": str(self.draft_directory)} if self.family.draft is not None else {}
        return {**self.family.drafts, **model}

    def engine(self, shape: Shape) -> dict[int, BuiltRank]:
        """All ranks of an engine, by their number within it, each with its pool filled."""
        if Shape() not in self._engines:  # on a single rank it shows how many channels and heads there are
            self._engines[Shape()] = self._build(Shape())
        if shape not in self._engines:
            self._engines[shape] = self._build(shape)
        return self._engines[shape]

    def labelled(self, shape: Shape) -> dict[int, DescribedRank]:
        return {number: rank.labelled for number, rank in self.engine(shape).items()}

    def _build(self, shape: Shape) -> dict[int, BuiltRank]:
        configuration = self.family.configuration
        (self.directory / "config.json").write_text(json.dumps(configuration))
        if self.family.draft is not None:
            self.draft_directory.mkdir(exist_ok=True)
            (self.draft_directory / "config.json").write_text(json.dumps({**configuration, **self.family.draft}))
        ranks = [
            _Rank(self, shape, RankCoordinates(tp_rank=tp, tp_size=shape.tp, pp_rank=pp, pp_size=shape.pp))
            for pp in range(shape.pp)
            for tp in range(shape.tp)
        ]
        with standing_at(ranks[0].place):
            configs = get_kv_cache_configs(ranks[0].config, [each.specs for each in ranks], [1 << 30] * len(ranks))
        return {number: rank.finish(kept) for number, (rank, kept) in enumerate(zip(ranks, configs, strict=True))}


class _Rank:
    """A rank that is being built."""

    def __init__(self, built: Built, shape: Shape, place: RankCoordinates) -> None:
        self.place, self.shape, self.totals = place, shape, built.totals
        with standing_at(place):
            self.config = EngineArgs(
                model=str(built.directory),
                dtype="float32",
                tensor_parallel_size=shape.tp,
                pipeline_parallel_size=shape.pp,
                block_size=shape.block_tokens,
                max_model_len=256,
                enforce_eager=True,
                skip_tokenizer_init=True,
                distributed_executor_backend="mp",
                kv_cache_memory_bytes=1 << 26,
                enable_prefix_caching=False,
                load_format="dummy",
                num_gpu_blocks_override=BLOCKS,
                speculative_config=built.drafts,
            ).create_engine_config()
            self.config.parallel_config.rank = place.pp_rank * shape.tp + place.tp_rank
            with set_current_vllm_config(self.config):
                self.models = [initialize_model(self.config)]
                speculative = self.config.speculative_config
                if speculative is not None and place.pp_rank == place.pp_size - 1:  # the last stage drafts
                    self.models.append(initialize_model(self.config, model_config=speculative.draft_model_config))
            # As on GPUs: blocks of attention grow until a state fits into as many bytes.
            Platform.update_block_size_for_backend.__func__(CpuPlatform, self.config)
            self.config.cache_config.kv_cache_layout = shape.layout
            self.specs = get_kv_cache_spec(self.config)

    def _modules(self) -> list[Any]:
        return [module for model in self.models for module in model.modules()]

    @property
    def layers(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.config.compilation_config.static_forward_context
        return found

    def finish(self, kept: Any) -> BuiltRank:
        """Allocates the rank's pool, describes it, and fills it."""
        caches = allocate_kv_cache(kept, torch.device("cpu"), KVCacheLayout[self.shape.layout])
        groups = groups_of(kept, self.config.parallel_config)
        total = self.config.model_config.get_total_num_hidden_layers()
        with standing_at(self.place), pytest.MonkeyPatch.context() as patch:
            # Else the plug-in would look through all that lives in this process, for every rank.
            patch.setattr(modules_module, "gc", SimpleNamespace(get_objects=self._modules))
            drafts = draft_layers(caches, self.layers) if self.config.speculative_config is not None else ()
            bind_kv_cache_to_layers(caches, self.layers, 1, kept.kv_cache_groups)
            described = describe(
                caches,
                groups,
                ModelShape(total, None, drafts),
                self.place,
                heads=heads_of(self.config, kept, self.place),
                states=kept_states(self.config, kept, self.place, caches),
                forms=cache_forms(self.config, kept),
                num_blocks=kept.num_blocks,
            )
            page_bytes = {
                group.name: sum(self._fill(name, caches[name], group, page_of(number)) for name in group.layer_names)
                for number, group in enumerate(groups)
            }
        storage = next(iter(caches.values())).untyped_storage()
        memory = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        return BuiltRank(self.place, described, groups, (self.models, caches), memory, page_bytes)

    # ---- what it would compute ---------------------------------------------------------------------------------------

    def _fill(self, name: str, cache: torch.Tensor, group: CacheGroup, page: int) -> int:
        """Writes into a page of a layer what it would keep there: every element says which it is. Returns its bytes."""
        if not group.has_state:
            pages = group.block_tokens // cache.shape[2]
            for part in range(pages):
                tokens = range(part * cache.shape[2], (part + 1) * cache.shape[2])
                _write(cache[page * pages + part], name, [self._heads(name), tokens, range(cache.shape[3])])
            return cache[0].nbytes * pages
        layer = self.layers[name]
        for number, tensor in enumerate(layer.kv_cache):
            divided = int(_is_convolution(layer, number) and not is_conv_state_dim_first())
            axes: list[Any] = [range(size) for size in tensor.shape[1:]]
            axes[divided] = self._rows(layer, name, number, tensor.shape[1 + divided])
            _write(tensor[page], f"{name} {number}", axes)
        return sum(tensor[page].nbytes for tensor in layer.kv_cache)

    def _heads(self, name: str) -> list[int]:
        """The KV heads that a rank has of a layer, by what its projection loads of weights that say their head."""
        attention = self.layers[name]
        if hasattr(attention, "kv_lora_rank") or not hasattr(attention, "num_kv_heads"):
            return [0]  # of latents and of an index there is one, which every rank has
        (named,) = ([*model.named_modules()] for model in self.models if attention in model.modules())
        (path,) = (path for path, module in named if module is attention)
        around, _, _ = path.rpartition(".")
        (projection,) = [
            module for path, module in named if path.startswith(f"{around}.") and isinstance(module, QKVParallelLinear)
        ]
        size, param = projection.head_size, projection.weight
        numbers = torch.arange(projection.total_num_kv_heads, dtype=param.dtype).repeat_interleave(size)
        param.weight_loader(param, numbers[:, None].expand(-1, param.shape[1]).contiguous(), "k")
        first = projection.num_heads * size
        return [int(each) for each in param[first : first + projection.num_kv_heads * size : size, 0]]

    def _rows(self, layer: Any, name: str, number: int, count: int) -> list[int]:
        """The channels of a convolution, or the heads of a state, that a rank has: by what its layer loads."""
        if _is_convolution(layer, number):
            params = [_convolution(layer).weight]
        else:
            params = [getattr(layer, each, None) for each in _PROJECTED_BY]
        param = next((each for each in params if each is not None and len(each) == count), None)
        total = self.totals.setdefault((name, number), count)
        if param is None:  # linear attention without a parameter of its own: the slopes of its heads go by this too
            first = self.place.tp_rank * count
            return list(range(first, first + count))
        numbers = torch.arange(total, dtype=param.dtype).view(-1, *[1] * (param.dim() - 1))
        numbers = numbers.expand(total, *param.shape[1:]).contiguous()
        shard = signature(param.weight_loader).parameters.get("loaded_shard_id")
        if shard is not None and shard.default is Parameter.empty:  # queries, keys and values, one by one
            for index, part in enumerate(numbers.chunk(3)):
                param.weight_loader(param, part, index)
        else:
            param.weight_loader(param, numbers)
        return [int(each) for each in param.reshape(count, -1)[:, 0]]


def _convolution(layer: Any) -> Any:
    return getattr(layer, "conv1d", None) or getattr(layer, "conv", None)


def _is_convolution(layer: Any, number: int) -> bool:
    """Whether a state of a layer is what a convolution has seen last: all but the last one, or the only one."""
    return _convolution(layer) is not None and number < max(1, len(layer.kv_cache) - 1)


def _write(target: torch.Tensor, name: str, axes: list[Any]) -> None:
    label = np.full((), zlib.crc32(name.encode()), np.uint64)
    for axis in axes:
        label = label[..., None] * np.uint64(65_537) + np.array(list(axis), np.uint64) + np.uint64(1)
    mixed = label * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(33)
    kind = {4: np.int32, 2: np.int16, 1: np.uint8}[target.element_size()]
    values = torch.from_numpy(mixed.astype(np.int64).astype(kind))
    target.view(values.dtype).copy_(values)


@contextmanager
def standing_at(place: RankCoordinates) -> Iterator[None]:
    """Lets vLLM's layers find themselves on a rank."""
    tensor, stage = _Group(place.tp_rank, place.tp_size), _Group(place.pp_rank, place.pp_size)
    whole = _Group(place.pp_rank * place.tp_size + place.tp_rank, place.tp_size * place.pp_size)
    groups = {"_TP": tensor, "_EP": tensor, "_PP": stage, "_WORLD": whole}
    groups |= {name: _Group() for name in ("_DP", "_DCP", "_PCP", "_ETP", "_EPLB")}
    with pytest.MonkeyPatch.context() as patch:
        for name, group in groups.items():
            patch.setattr(parallel_state, name, group)
        yield


def install_stand_ins(patch: pytest.MonkeyPatch) -> None:
    """Puts in what model classes import and no cache depends on; and lets vLLM look at them in this process."""
    patch.setattr(registry, "_run_in_subprocess", lambda look: look())
    names = (
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.v2",
        "torchvision.transforms.v2.functional",
    )
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
        patch.setitem(sys.modules, name, module)
    patch.setitem(
        _CONFIG_REGISTRY, "bailing_hybrid", type("Ling", (PreTrainedConfig,), {"model_type": "bailing_hybrid"})
    )
    ModelRegistry.register_model("KimiLinearForCausalLM", "vllm.models.kimi_k3.amd.linear:KimiLinearForCausalLM")
    patch.setattr(flashmla_sparse, "current_workspace_manager", MagicMock)
    choose = CpuPlatform.get_attn_backend_cls

    def chosen(selected: Any, attn_selector_config: Any, **more: Any) -> str:
        if attn_selector_config.use_mla:
            return _MLA[attn_selector_config.use_sparse]
        chosen_by_vllm: str = choose(selected, attn_selector_config, **more)
        return chosen_by_vllm

    patch.setattr(CpuPlatform, "get_attn_backend_cls", staticmethod(chosen))
    modules["torchvision.transforms"].InterpolationMode = type("InterpolationMode", (), {})  # type: ignore[attr-defined]
