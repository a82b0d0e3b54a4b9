"""Which components a model caches, and how transformers' cache turns into arrays and back.

transformers keeps, for each layer, a pair of tensors [1, heads, tokens, width]. What travels is token-major,
one array a component: [layer, token, ...]. Keys are cached after rotary embedding, so positions need not
travel; and as attention is a sum over tokens, decoding does not notice if whole tokens change places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvferry.engines.reference.network import checkpoint_configuration
from kvferry.engines.reference.specification import ModelSpec
from kvferry.errors import LayoutError, ModelError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class CachedComponent:
    """One kind of cached state.

    `axes` are the name and global size of every axis but the token axis, which stands second in the arrays:
    (("layer", 4), ("head", 2), ("dim", 64)) describes arrays of shape [4, tokens, 2, 64].
    """

    name: str
    axes: tuple[tuple[str, int], ...]
    dtype: str = "float32"

    def shape(self, num_tokens: int) -> tuple[int, ...]:
        """Shape of the component's array over `num_tokens` tokens."""
        (_, num_layers), *rest = self.axes
        return (num_layers, num_tokens, *(size for _, size in rest))


class CacheForm(Protocol):
    """How one family of architectures fills transformers' cache."""

    @property
    def components(self) -> tuple[CachedComponent, ...]:
        """The components, in the order in which they should be listed."""
        ...

    @property
    def layer_widths(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads and width of the first and of the second tensor that transformers keeps for each layer."""
        ...

    def capture(
        self, layers: list[tuple[torch.Tensor, torch.Tensor]], start: int, stop: int
    ) -> dict[str, torch.Tensor]:
        """Copies of the tokens [start, stop) of every component, contiguous."""
        ...

    def restore(self, caches: Mapping[str, torch.Tensor], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The pair [1, heads, tokens, width] that transformers would keep for `layer`."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionCacheForm:
    """Keys and values for each head: components "k" and "v", arrays [layer, token, head, dim]."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def components(self) -> tuple[CachedComponent, ...]:
        axes = (("layer", self.num_layers), ("head", self.num_kv_heads), ("dim", self.head_dim))
        return CachedComponent("k", axes), CachedComponent("v", axes)

    @property
    def layer_widths(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return (self.num_kv_heads, self.head_dim), (self.num_kv_heads, self.head_dim)

    def capture(
        self, layers: list[tuple[torch.Tensor, torch.Tensor]], start: int, stop: int
    ) -> dict[str, torch.Tensor]:
        import torch

        return {
            name: torch.stack([pair[which][0, :, start:stop].transpose(0, 1) for pair in layers])
            for which, name in enumerate(("k", "v"))
        }

    def restore(self, caches: Mapping[str, torch.Tensor], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (caches[name][layer].transpose(0, 1)[None].contiguous() for name in ("k", "v"))
        return keys, values


@dataclass(frozen=True, slots=True)
class LatentCacheForm:
    """MLA: one component "latent", array [layer, token, latent], without heads.

    Along the last axis stand first the `kv_lora_rank` numbers of the compressed keys and values, after their
    norm, then the `rope_dim` numbers of the key that all heads share, after rotary embedding.
    """

    num_layers: int
    kv_lora_rank: int
    rope_dim: int

    @property
    def components(self) -> tuple[CachedComponent, ...]:
        return (CachedComponent("latent", (("layer", self.num_layers), ("latent", self.kv_lora_rank + self.rope_dim))),)

    @property
    def layer_widths(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return (1, self.kv_lora_rank), (1, self.rope_dim)

    def capture(
        self, layers: list[tuple[torch.Tensor, torch.Tensor]], start: int, stop: int
    ) -> dict[str, torch.Tensor]:
        import torch

        return {
            "latent": torch.stack(
                [
                    torch.cat((compressed[0, 0, start:stop], rotary[0, 0, start:stop]), dim=-1)
                    for compressed, rotary in layers
                ]
            )
        }

    def restore(self, caches: Mapping[str, torch.Tensor], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        latent = caches["latent"][layer][None, None]
        return latent[..., : self.kv_lora_rank].contiguous(), latent[..., self.kv_lora_rank :].contiguous()


def cache_form(spec: ModelSpec) -> CacheForm:
    """What the model of `spec` caches. For seeded models pure arithmetic; a checkpoint needs transformers.

    Raises:
        ModelError: if the checkpoint's configuration cannot be read.
    """
    if spec.model_directory is None:
        if spec.uses_latent_attention:
            return LatentCacheForm(spec.num_layers, spec.kv_lora_rank, spec.qk_rope_head_dim)
        return AttentionCacheForm(spec.num_layers, spec.num_kv_heads, spec.head_dim)
    configuration = checkpoint_configuration(spec.model_directory)
    if spec.uses_latent_attention:
        return LatentCacheForm(
            configuration.num_hidden_layers, configuration.kv_lora_rank, configuration.qk_rope_head_dim
        )
    head_dim = getattr(configuration, "head_dim", None)
    return AttentionCacheForm(
        configuration.num_hidden_layers,
        configuration.num_key_value_heads,
        head_dim or configuration.hidden_size // configuration.num_attention_heads,
    )


def check_cache_form(form: CacheForm, cache: Any) -> None:
    """Compare a cache that transformers filled with what `form` says of it.

    Raises:
        ModelError: if transformers caches something else, as with sliding windows, or in versions that keep
            MLA's keys and values expanded.
    """
    import transformers
    from transformers.cache_utils import DynamicLayer

    (num_layers, *_), *_ = (component.shape(0) for component in form.components)
    if len(cache.layers) != num_layers:
        raise ModelError(f"the model caches {len(cache.layers)} layers, but its configuration says {num_layers}")
    for index, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:
            raise ModelError(
                f"layer {index} keeps its cache as {type(layer).__name__}; the reference engine knows full "
                "attention only: use a checkpoint without sliding windows"
            )
        found = tuple((tensor.shape[1], tensor.shape[3]) for tensor in (layer.keys, layer.values))
        if found != form.layer_widths:
            raise ModelError(
                f"transformers {transformers.__version__} caches (heads, width) {found} in layer {index}, "
                f"the reference engine expects {form.layer_widths}: install transformers 5.15 or newer"
            )


def check_caches(form: CacheForm, caches: Mapping[str, torch.Tensor]) -> int:
    """Number of tokens in `caches`.

    Raises:
        LayoutError: if a component is missing or unknown, or an array has another shape or dtype than it
            should; names both.
    """
    names = [component.name for component in form.components]
    if sorted(caches) != sorted(names):
        raise LayoutError(f"caches hold the components {sorted(caches)}, the model has {sorted(names)}")
    first = caches[names[0]]
    num_tokens = first.shape[1] if first.ndim > 1 else 0
    if num_tokens < 1:
        raise LayoutError(f"component {names[0]!r} of shape {tuple(first.shape)} holds no token")
    for component in form.components:
        array = caches[component.name]
        if tuple(array.shape) != component.shape(num_tokens):
            raise LayoutError(
                f"component {component.name!r} has shape {tuple(array.shape)}, "
                f"the model needs {component.shape(num_tokens)}"
            )
        if str(array.dtype) != f"torch.{component.dtype}":
            raise LayoutError(f"component {component.name!r} is {array.dtype}, the model needs {component.dtype}")
    return num_tokens
