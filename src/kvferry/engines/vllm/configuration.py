"""What the connector reads of vLLM's configuration: what layers keep, in which groups, and which part a rank has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

from kvferry import RankCoordinates, Settings
from kvferry.engines.vllm.cache_kinds import check_on_device, check_transferred
from kvferry.engines.vllm.caches import CacheGroup, HeldPart, ModelShape
from kvferry.engines.vllm.forms import CacheForm, forms_of, is_the_same_everywhere, role_of
from kvferry.engines.vllm.identity import BY_PLACE, MULTIMODAL_FIELD, Platform, multimodal_inputs
from kvferry.engines.vllm.modules import CachedHeads, draft_layers, held_heads
from kvferry.engines.vllm.shares import sharing_ranks
from kvferry.engines.vllm.states import WHOLE_REQUEST, KeptStates, is_ring, ring_of, states_of
from kvferry.loggers import logger_of

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

log = logger_of(__name__)

_NOT_KNOWN = (
    "it is not known %s %d of %d layers, such as %r: %s can be exchanged with engines of tensor-parallel size %d "
    "alone, and with others the first request is refused"
)


def platform() -> Platform:
    """Returns where kernels run."""
    capability = current_platform.get_device_capability()
    return Platform(current_platform.device_name, None if capability is None else capability.major)


def model_shape(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> ModelShape:
    """Returns what the whole model has."""
    model = vllm_config.model_config
    packing = None
    if current_platform.is_cpu():
        packing = cpu_packing(vllm_config, kv_cache_config)
    drafts: tuple[str, ...] = ()
    if vllm_config.speculative_config is not None:
        cached = {name for group in kv_cache_config.transfer_groups for name in group.layer_names}
        drafts = draft_layers(cached, vllm_config.compilation_config.static_forward_context)
    return ModelShape(model.get_total_num_hidden_layers(), packing, drafts)


def cpu_packing(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Names the order in which the CPU kernels keep a block. They choose it, by type, size and processor."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    specs = [first_spec(group.kv_cache_spec) for group in kv_cache_config.transfer_groups]
    orders = {
        _get_attn_isa(spec.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype)
        for spec in specs
        if not is_of_request(spec)
    }
    return f"vLLM's CPU kernels ({', '.join(sorted(orders))})"


def kept_by_layers(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, tuple[KVCacheSpec, str]]:
    """Returns what every layer that is transferred keeps, and the name of the backend that reads and writes it."""
    layers = vllm_config.compilation_config.static_forward_context
    return {
        name: (spec, layers[name].get_attn_backend().get_name())
        for group in kv_cache_config.transfer_groups
        for name, spec in layer_specs(group).items()
    }


def compares_content(vllm_config: VllmConfig, settings: Settings) -> bool:
    """Returns whether vLLM's digests of multimodal inputs are the same on both sides, for all that is known here."""
    is_waived = MULTIMODAL_FIELD in settings.fields_that_may_differ
    return not is_waived and multimodal_inputs(vllm_config) != BY_PLACE


def groups_of(kv_cache_config: KVCacheConfig, parallel_config: ParallelConfig) -> tuple[CacheGroup, ...]:
    """Returns the groups that are transferred.

    Raises:
        LayoutError: if one has something that cannot be described.
        SettingsError: if ranks share tokens in a version of vLLM that does not say of which groups.
    """
    groups = enumerate(kv_cache_config.transfer_groups)
    return tuple(_group(f"group {number}", group, parallel_config) for number, group in groups)


def first_spec(spec: KVCacheSpec) -> KVCacheSpec:
    """Returns what the layers of a group keep; with layers of several sizes, what the first keeps."""
    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def layer_specs(group: KVCacheGroupSpec) -> dict[str, KVCacheSpec]:
    """Returns what each layer of a group keeps, by its name."""
    spec = group.kv_cache_spec
    own = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
    return {name: own.get(name, first_spec(spec)) for name in group.layer_names}


def heads_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, coordinates: RankCoordinates
) -> dict[str, HeldPart | None]:
    """Returns which KV heads this rank holds of every layer; None where that is not known, which is logged.

    Raises:
        LayoutError: if what vLLM's objects say contradicts each other.
    """
    forms = cache_forms(vllm_config, kv_cache_config)
    cached = {
        name: CachedHeads(
            spec.num_kv_heads,
            not all(form.has_heads for form in forms[name]),
            1 if is_the_same_everywhere(spec) else spec.max_tp_shards,
        )
        for group in kv_cache_config.transfer_groups
        for name, spec in layer_specs(group).items()
        if not is_of_request(spec)
    }
    heads = held_heads(cached, vllm_config.compilation_config.static_forward_context, coordinates)
    if unknown := [name for name, each in heads.items() if each is None]:
        what = "which KV heads this rank holds in"
        log.warning(_NOT_KNOWN, what, len(unknown), len(heads), unknown[0], "their caches", coordinates.tp_size)
    return heads


def cache_forms(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, tuple[CacheForm, ...]]:
    """Returns how the cache of every layer is to be read that has an entry for each token, or for several."""
    layers = vllm_config.compilation_config.static_forward_context
    return {
        name: forms_of(name, spec, layers[name], backend, is_nvidia=current_platform.is_cuda())
        for name, (spec, backend) in kept_by_layers(vllm_config, kv_cache_config).items()
        if not is_of_request(spec)
    }


def is_of_request(spec: KVCacheSpec) -> bool:
    """Whether what a layer keeps is a request's, in one block, and no token's."""
    return isinstance(spec, MambaSpec) or is_ring(spec)


def kept_states(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    coordinates: RankCoordinates,
    kv_caches: dict[str, torch.Tensor],
) -> dict[str, KeptStates]:
    """Returns what every layer keeps that keeps something of a request.

    vLLM gives layers with recurrent state the views that kernels use.
    """
    layers = vllm_config.compilation_config.static_forward_context
    kept = {
        name: KeptStates(
            states_of(spec, layers[name], coordinates, channels_first=is_conv_state_dim_first()),
            tuple(layers[name].kv_cache),
        )
        if isinstance(spec, MambaSpec)
        else ring_of(spec, kv_caches[name], role_of(name, spec))
        for group in kv_cache_config.transfer_groups
        for name, spec in layer_specs(group).items()
        if is_of_request(spec)
    }
    unknown = [name for name, each in kept.items() if any(state.parts is None for state in each.states)]
    if unknown and coordinates.tp_size > 1:
        what = "how ranks divide the recurrent state of"
        log.warning(_NOT_KNOWN, what, len(unknown), len(kept), unknown[0], "it", coordinates.tp_size)
    return kept


def _group(name: str, group: KVCacheGroupSpec, parallel_config: ParallelConfig) -> CacheGroup:
    check_on_device(group)
    for layer, each in layer_specs(group).items():
        check_transferred(each, layer)
    spec = first_spec(group.kv_cache_spec)
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
    return CacheGroup(
        name=name,
        layer_names=tuple(group.layer_names),
        block_tokens=WHOLE_REQUEST if is_ring(spec) else spec.block_size,
        window_tokens=None if window is None else max(1, window - 1),
        chunk_tokens=spec.attention_chunk_size if isinstance(spec, ChunkedLocalAttentionSpec) else None,
        has_state=is_of_request(spec),
        is_prefix_cached=getattr(spec, "prefix_cacheable", True),  # vLLM 0.31 knows no others
        token_ranks=sharing_ranks(group.kv_cache_spec, parallel_config),
    )
