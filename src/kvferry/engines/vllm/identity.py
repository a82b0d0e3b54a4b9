"""What vLLM's caches are beyond their shape, and what a request's cache depends on; from vLLM's own objects.

Nothing of vLLM is imported: the connector hands its objects in. What of vLLM's each field stands on is said beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.engines.checkpoints import identified, model_directory
from kvferry.engines.fingerprint import NONE, CacheIdentity, MultimodalInput, request_conditions, short_text
from kvferry.engines.vllm.adapters import Adapters
from kvferry.engines.vllm.aside import PromptDigests
from kvferry.engines.vllm.forms import quant_mode
from kvferry.engines.vllm.weights import WeightsVersion
from kvferry.loggers import logger_of

log = logger_of(__name__)

MULTIMODAL_FIELD = "multimodal_inputs"
"""The field that lets multimodal inputs be compared by place alone where an operator lets it differ."""

BY_PLACE = "by place alone"

_K_THEN_V = frozenset(
    {
        "FLASH_ATTN",
        "FLASH_ATTN_DIFFKV",
        "FLASHINFER",
        "FLEX_ATTENTION",
        "HPC_ATTN",
        "ROCM_AITER_UNIFIED_ATTN",
        "TRITON_ATTN",
    }
)
"""Backends whose kernels split the content of a head into K and, behind it, V; read in their sources of vLLM 0.32."""

_SCALES_BY_TOKEN = frozenset({8, 9, 12})
"""Compute capabilities of which FLASHINFER keeps NVFP4's scales token by token: those whose caches its FA2 kernels read
(`flashinfer._nvfp4_kv_on_fa2`). vLLM's own kernel, for all others, puts the values' scales of four tokens in the order
in which TensorRT-LLM's kernels read them, at the same place and in as many bytes."""

_NOT_QUANTIZED = frozenset({"auto", "float16", "bfloat16"})
_SCALED_BY_TENSOR = frozenset({"fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc"})


@dataclass(frozen=True, slots=True)
class Platform:
    """Where kernels run.

    Attributes:
        device: what vLLM calls it: "cuda", "rocm", "cpu".
        generation: the major number of its compute capability; None where it has none.
    """

    device: str
    generation: int | None = None


def cache_identity(
    vllm_config: Any,
    layers: Iterable[tuple[Any, str]],
    *,
    draft_layers: Iterable[tuple[Any, str]] = (),
    version: str,
    fp8_dtype: str,
    packing: str | None,
    platform: Platform,
) -> CacheIdentity:
    """Returns what a worker's caches are. Reads samples of the model's files.

    Args:
        layers: of every layer that is transferred, what it keeps (an `AttentionSpec` or a `MambaSpec`) and the name of
            its backend. Those of a draft model are left out: the other side may have none.
        draft_layers: the same of those.
        fp8_dtype: what `fp8` stands for on this platform.
        packing: the name of an order that only the kernel knows, which the layout has; None where there is none.
        platform: where its kernels run.
    """
    layers = list(layers)
    model = vllm_config.model_config
    config = _as_dict(model.hf_text_config)
    return CacheIdentity(
        engine=f"vllm {version}",
        weights=_weights(vllm_config, model, platform),
        architecture=str(model.architecture),
        cache_dtype=cache_dtype(vllm_config.cache_config, str(model.dtype), fp8_dtype),
        scales=scales(vllm_config.cache_config.cache_dtype),
        attention_backend=", ".join(sorted({backend for _, backend in layers})),
        content_order=_orders(layers, packing, platform),
        rope=short_text(_chosen(config, "rope", "rotary")),
        attention_window=short_text(
            _chosen(config, "window", "layer_types", "attention_chunk_size")
            | {"is_off": bool(model.disable_sliding_window)}
        ),
        quantization=str(model.quantization or NONE),
        speculative_model=_speculative_model(vllm_config, _orders(draft_layers, packing, platform), platform),
        multimodal_inputs=multimodal_inputs(vllm_config),
    )


def cache_dtype(cache_config: Any, model_dtype: str, fp8_dtype: str) -> str:
    """Returns the type of cached numbers by its exact name: vLLM stores two types of fp8 as bytes, and calls one fp8.

    Args:
        model_dtype: what `auto` stands for.
        fp8_dtype: what `fp8` stands for.
    """
    named = str(cache_config.cache_dtype)
    exact = {"auto": model_dtype, "fp8": fp8_dtype, "fp8_e4m3": fp8_dtype, "fp8_e5m2": "float8_e5m2"}.get(named, named)
    skipped = sorted(map(str, cache_config.kv_cache_dtype_skip_layers or ()))
    exceptions = f", but {model_dtype} in layers {', '.join(skipped)}" if skipped else ""
    return (exact + exceptions).replace("torch.", "")


def scales(cache_dtype: str) -> str:
    """Returns where the scales of quantised numbers are.

    Scales of whole tensors are 1 or the checkpoint's, whose identity covers them: vLLM 0.32 computes none itself.

    Args:
        cache_dtype: as vLLM calls it.
    """
    if cache_dtype in _NOT_QUANTIZED:
        return NONE
    return "of the checkpoint, or 1" if cache_dtype in _SCALED_BY_TENSOR else "in the cache"


def _orders(layers: Iterable[tuple[Any, str]], packing: str | None, platform: Platform) -> str:
    return "; ".join(sorted({content_order(spec, backend, packing, platform) for spec, backend in layers}))


def content_order(spec: Any, backend: str, packing: str | None, platform: Platform) -> str:
    """Returns how a block's content lies behind the dimensions that vLLM gives it: block, head, token, content.

    Backends say so by how they change a layer's spec (`customize_spec`): FLASH_ATTN has a slot for every head, with K
    and V behind each other; B12X one slot for the K of all heads and one for their V. Both may have one shape. An order
    that is a backend's own may be another one on another platform.

    Args:
        spec: what the layer keeps, as its backend has changed it.
        packing: as for `cache_identity`, and so is platform.
    """
    if hasattr(spec, "mamba_type"):
        return f"recurrent state of {spec.mamba_type.name}"
    slots, content = spec.num_head_slots, spec.state_content_bytes
    if packing is not None:
        return "as the layout names it"
    its_own = f"as {backend} %s on {platform.device}"
    if slots is None and content is None:
        if "MLA" in type(spec).__name__:
            return "one latent"
        return "a slot a head: K, V" if backend in _K_THEN_V else f"a slot a head: {its_own % 'orders it'}"
    if content is not None and slots == 2 and content == spec.num_kv_heads * spec.head_size * spec.dtype.itemsize:
        # Not the same for all that do so: ROCM_ATTN keeps K by groups of elements.
        return f"a slot for K of all heads, a slot for V: {its_own % 'orders them'}"
    if slots is not None and slots == 2 * spec.num_kv_heads:
        scales = ""
        if quant_mode(spec) == "NVFP4" and backend == "FLASHINFER":
            by_token = platform.generation in _SCALES_BY_TOKEN
            scales = ", scales by token" if by_token else f", scales as on compute capability {platform.generation}"
        return f"a slot for K of each head, then a slot for V of each: {its_own % 'packs it'}{scales}"
    return its_own % "packs it"


def multimodal_inputs(vllm_config: Any) -> str:
    """Returns by what images and the like are told apart; empty for models that take none.

    vLLM tells them apart by a digest of their content and of the model's name, which may be a path; and by a count
    where neither its prefix cache nor its processor cache needs a digest.
    """
    multimodal = vllm_config.model_config.multimodal_config
    if multimodal is None:
        return ""
    if multimodal.mm_processor_cache_gb == 0 and not vllm_config.cache_config.enable_prefix_caching:
        return BY_PLACE
    return f"by {multimodal.mm_hasher_algorithm} of content and of {vllm_config.model_config.model!r}"


class Conditions:
    """Digests of what the caches of requests depend on: what vLLM's own block hashes are made of."""

    def __init__(self, *, compares_content: bool = True) -> None:
        """Begins with no adapters, and the weights of the engine's start.

        Args:
            compares_content: whether vLLM's digests of multimodal inputs are the same on both sides.
        """
        self._compares_content = compares_content
        self.adapters, self.weights = Adapters(), WeightsVersion()
        self._prompts = PromptDigests()

    def are_known(self, request: Any, tokens: int) -> bool:
        """Whether `of` returns at once. What is not known is found out from now on, aside: adapters, large prompts."""
        is_read, is_exchanged = self.adapters.is_known(request), getattr(request, "kv_transfer_params", True)
        return (not is_exchanged or self._prompts.is_known(request, tokens)) and is_read

    def of(self, request: Any, tokens: int) -> dict[str, bytes]:
        """Returns what the cache of a request depends on, once: a large prompt is found out anew after that.

        Waits for what is not known.

        Args:
            tokens: how many of its prompt are exchanged, from the first on.
        """
        features = getattr(request, "mm_features", None) or ()
        prompt = self._prompts.of(request, tokens)
        return request_conditions(
            prompt.tokens,
            embedding=prompt.embedding,
            lora=self.adapters.identity(request),
            multimodal=[
                MultimodalInput(
                    f"{each.modality} {each.identifier}" if self._compares_content else each.modality,
                    each.mm_position.offset,
                    each.mm_position.length,
                )
                for each in features
            ],
            salt=getattr(request, "cache_salt", None) or "",
            weights=self.weights.text,
        )

    def computed_here(self, request: Any) -> None:
        """Takes that a request is scheduled that is not exchanged. Waits for its adapter, unless that is known."""
        self.adapters.scheduled(request)

    def ended(self, request: str) -> None:
        """Takes that nobody asks about a request any more."""
        self.adapters.ended(request)
        self._prompts.found.forget(request)


def _weights(vllm_config: Any, model: Any, platform: Platform) -> str:
    load = vllm_config.load_config
    name = model.model_weights or model.model
    revision = f", revision {model.revision}" if model.revision else ""
    if load.load_format == "dummy":  # what a rank draws follows from the shapes of its own tensors, and from its device
        parallel = vllm_config.parallel_config
        ranks = f"{parallel.tensor_parallel_size} tensor-parallel ranks"
        if parallel.enable_expert_parallel:
            ranks += f", experts divided over {parallel.data_parallel_size} times as many"
        shapes = short_text(_chosen(_as_dict(model.hf_text_config), "") | {"dtype": model.dtype})
        return short_text(f"dummy on {platform.device}, of {name}{revision} on {ranks}: {shapes}")
    return identified(model_directory(name, model.revision, load.download_dir), f"{name}{revision}")


def _speculative_model(vllm_config: Any, content_order: str, platform: Platform) -> str:
    """Identifies the draft model and what its cache is; empty without one, and for what drafts without a cache."""
    speculative = vllm_config.speculative_config
    draft = speculative.draft_model_config if speculative is not None else None
    if draft is None or draft is vllm_config.model_config:
        return ""
    order = f"; {content_order}" if content_order else ""
    return f"{speculative.method}: {_weights(vllm_config, draft, platform)}{order}"


def _as_dict(config: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    return found


def _chosen(config: Mapping[str, Any], *parts: str) -> dict[str, Any]:
    """Returns the entries whose names have one of these parts and that say anything."""
    return {
        name: value
        for name, value in config.items()
        if value is not None and any(part in name for part in parts) and not name.startswith("_")
    }
