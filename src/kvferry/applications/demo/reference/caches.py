"""Which components a model caches, and how transformers' cache turns into arrays and back.

What travels is one array a component: [layer, entry, ...]. Entries are tokens, or the single one of a request's state.
Keys are cached after rotary embedding, so positions need not travel; and as attention is a sum over tokens, decoding
does not notice if whole tokens change places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from kvferry.applications.demo.reference.specification import ModelSpec, checkpoint_configuration, seeded_configuration
from kvferry.errors import LayoutError, ModelError
from kvferry.layout import Component, ShardedComponent
from kvferry.models import model_cache_from_config
from kvferry.pools.places import entries_kept

if TYPE_CHECKING:
    import torch

DTYPE = "float32"
"""Of everything that the reference engine computes and caches."""

_EXTRA_CONV_COLUMNS = 1
"""transformers keeps as many columns of a convolution as its kernel has; the oldest is never looked at."""


def array_shape(component: Component, num_entries: int) -> tuple[int, ...]:
    """Shape of a component's array over so many entries."""
    first, *rest = component.axes
    return (first.size, num_entries, *(axis.size for axis in rest))


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """Keys and values for each head: tensors [1, heads, tokens, dim], of arrays [token, head, dim]."""

    keys: Component
    values: Component

    def check(self, layer: Any) -> str | None:
        """What is wrong with a layer of transformers' cache that holds one token; None if it is as expected."""
        from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

        window = self.keys.window_tokens
        expected_type = DynamicLayer if window is None else DynamicSlidingWindowLayer
        if type(layer) is not expected_type:
            return f"is a {type(layer).__name__}, not a {expected_type.__name__}"
        if window is not None and layer.sliding_window != window:
            return f"has a window of {layer.sliding_window} tokens, not of {window}"
        expected = [(1, component.axes[1].size, 1, component.axes[2].size) for component in (self.keys, self.values)]
        return _difference("keys and values", [layer.keys, layer.values], expected)

    def capture(self, layer: Any, count: int, *, is_final: bool) -> dict[str, torch.Tensor]:
        """The last `count` tokens, and state if it is final."""
        keys, values = (tensor[0, :, -count:].transpose(0, 1) for tensor in (layer.keys, layer.values))
        return {self.keys.name: keys, self.values.name: values}

    def restore(self, layer: Any, arrays: Mapping[str, torch.Tensor], num_tokens: int) -> None:
        """Fills an empty layer as if transformers had run `num_tokens` tokens. Copies the arrays."""
        names = self.keys.name, self.values.name
        layer.update(*(arrays[name].transpose(0, 1)[None].contiguous() for name in names))
        if self.keys.window_tokens is not None:
            layer.cumulative_length = num_tokens


@dataclass(frozen=True, slots=True)
class LatentForm:
    """MLA: tensors [1, 1, tokens, width], of one array [token, latent], without heads.

    Along the last axis stand first the `compressed_dim` numbers of the compressed keys and values, after their norm,
    then those of the key that all heads share, after rotary embedding.
    """

    latent: Component
    compressed_dim: int

    def check(self, layer: Any) -> str | None:
        rotary_dim = self.latent.axes[1].size - self.compressed_dim
        expected = [(1, 1, 1, self.compressed_dim), (1, 1, 1, rotary_dim)]
        return _difference("compressed and rotary parts", [layer.keys, layer.values], expected)

    def capture(self, layer: Any, count: int, *, is_final: bool) -> dict[str, torch.Tensor]:
        import torch

        return {self.latent.name: torch.cat([part[0, 0, -count:] for part in (layer.keys, layer.values)], dim=-1)}

    def restore(self, layer: Any, arrays: Mapping[str, torch.Tensor], num_tokens: int) -> None:
        latent = arrays[self.latent.name][None, None]
        layer.update(latent[..., : self.compressed_dim].contiguous(), latent[..., self.compressed_dim :].contiguous())


@dataclass(frozen=True, slots=True)
class RecurrentForm:
    """A recurrent state [1, heads, ...], and that of a convolution [1, channels, width].

    Several kinds of channels stand one behind the other; each is an array [1, ..., width] of its own.
    """

    state: Component
    channels: tuple[Component, ...]

    def check(self, layer: Any) -> str | None:
        from transformers.cache_utils import LinearAttentionLayer

        if type(layer) is not LinearAttentionLayer:
            return f"is a {type(layer).__name__}, not a {LinearAttentionLayer.__name__}"
        expected = [
            (1, *(axis.size for axis in self.state.axes[1:])),
            (1, sum(self._counts()), self.channels[0].axes[-1].size),
        ]
        return _difference("states", [layer.recurrent_states[0], layer.conv_states[0]], expected)

    def capture(self, layer: Any, count: int, *, is_final: bool) -> dict[str, torch.Tensor]:
        if not is_final:
            return {}
        parts = layer.conv_states[0].split(self._counts(), dim=1)
        return {self.state.name: layer.recurrent_states[0]} | {
            component.name: part.unflatten(1, [axis.size for axis in component.axes[1:-1]])
            for component, part in zip(self.channels, parts, strict=True)
        }

    def restore(self, layer: Any, arrays: Mapping[str, torch.Tensor], num_tokens: int) -> None:
        import torch

        layer.update_conv_state(torch.cat([arrays[component.name].flatten(1, -2) for component in self.channels], 1))
        layer.update_recurrent_state(arrays[self.state.name])

    def _counts(self) -> list[int]:
        return [prod(axis.size for axis in component.axes[1:-1]) for component in self.channels]


LayerForm: TypeAlias = AttentionForm | LatentForm | RecurrentForm
"""How transformers keeps the cache of a layer of one kind. Arrays of a layer are [entry, ...], by component."""


def _difference(what: str, tensors: Sequence[torch.Tensor], expected: Sequence[tuple[int, ...]]) -> str | None:
    found = [tuple(tensor.shape) for tensor in tensors]
    return None if found == list(expected) else f"has {what} of shapes {found}, not {list(expected)}"


@dataclass(frozen=True, slots=True)
class CacheForm:
    """What a model caches.

    Attributes:
        num_layers: of the model.
        components: what travels, and how tensor parallelism divides it.
        layers: how transformers keeps it, for every layer of the model.
    """

    num_layers: int
    components: tuple[ShardedComponent, ...]
    layers: tuple[LayerForm, ...]

    def record(self, cache: Any) -> None:
        """Has an empty cache keep all of a chunk's tokens for `capture`, also those that leave the window with it."""
        for layer in _sliding(cache):
            layer.activate_past_recording()

    def capture(self, cache: Any, count: int, *, is_final: bool) -> dict[str, torch.Tensor]:
        """Copies of the last `count` tokens, contiguous, by component; with the last tokens also of the states.

        Sliding windows forget what they do not need any more.
        """
        import torch

        layers = [
            form.capture(layer, count, is_final=is_final) for form, layer in zip(self.layers, cache.layers, strict=True)
        ]
        arrays = {}
        for sharded in self.components:
            name = sharded.component.name
            if name in layers[sharded.layers[0]]:
                arrays[name] = torch.stack([layers[layer][name] for layer in sharded.layers])
        for layer in _sliding(cache):
            layer.crop(0)
        return arrays

    def restore(self, cache: Any, arrays: Mapping[str, torch.Tensor], num_tokens: int) -> None:
        """Fills an empty cache from the entries that a request of `num_tokens` tokens needs."""
        for layer, (form, kept) in enumerate(zip(self.layers, cache.layers, strict=True)):
            mine = {
                sharded.component.name: arrays[sharded.component.name][sharded.layers.index(layer)]
                for sharded in self.components
                if layer in sharded.layers
            }
            form.restore(kept, mine, num_tokens)


def _sliding(cache: Any) -> list[Any]:
    return [layer for layer, is_sliding in zip(cache.layers, cache.is_sliding, strict=True) if is_sliding]


def cache_form(spec: ModelSpec) -> CacheForm:
    """What the model of `spec` caches. For seeded models pure arithmetic; a checkpoint needs transformers.

    Raises:
        ModelError: if the checkpoint's configuration cannot be read, or a layer caches what the engine does not know.
    """
    directory = spec.model_directory
    if directory is None:
        values, source = seeded_configuration(spec), f"the seeded {spec.architecture}"
    else:
        values, source = checkpoint_configuration(directory).to_dict(), str(directory / "config.json")
    model = model_cache_from_config(
        values | {"dtype": DTYPE},
        cache_dtype=DTYPE,
        state_dtype=DTYPE,
        extra_conv_columns=_EXTRA_CONV_COLUMNS,
        source=source,
    )
    layers = []
    for layer in range(model.num_layers):
        cached = {each.component.name: each.component for each in model.components if layer in each.layers}
        layers.append(_layer_form(cached, values, where=f"{source}, layer {layer}"))
    return CacheForm(model.num_layers, model.components, tuple(layers))


def _layer_form(cached: Mapping[str, Component], values: Mapping[str, Any], *, where: str) -> LayerForm:
    channels = tuple(component for name, component in cached.items() if name.startswith("conv_"))
    if channels and set(cached) == {"state", *(component.name for component in channels)}:
        return RecurrentForm(cached["state"], channels)
    if set(cached) == {"latent"}:
        return LatentForm(cached["latent"], values["kv_lora_rank"])
    for prefix in ("", "window_"):
        if set(cached) == {f"{prefix}k", f"{prefix}v"}:
            return AttentionForm(cached[f"{prefix}k"], cached[f"{prefix}v"])
    raise ModelError(f"{where} caches {sorted(cached)}, which the reference engine does not know; use another model")


def check_cache_form(form: CacheForm, cache: Any) -> None:
    """Compare a cache that transformers filled with one token with what `form` says of it.

    Raises:
        ModelError: if transformers caches something else, as in versions that keep MLA's keys and values expanded.
    """
    import transformers

    if len(cache.layers) != form.num_layers:
        raise ModelError(f"the model caches {len(cache.layers)} layers, but its configuration says {form.num_layers}")
    for index, (layer_form, layer) in enumerate(zip(form.layers, cache.layers, strict=True)):
        difference = layer_form.check(layer)
        if difference is not None:
            raise ModelError(
                f"transformers {transformers.__version__} caches otherwise than the reference engine expects: layer "
                f"{index} {difference}; install transformers 5.23 or newer"
            )


def check_caches(form: CacheForm, caches: Mapping[str, torch.Tensor], num_tokens: int) -> None:
    """Raise LayoutError if a component is missing or unknown, or an array has not the shape and dtype that it should.

    The error names both.
    """
    components = [sharded.component for sharded in form.components]
    names = [component.name for component in components]
    if sorted(caches) != sorted(names):
        raise LayoutError(f"caches hold the components {sorted(caches)}, the model has {sorted(names)}")
    for component in components:
        array, expected = caches[component.name], array_shape(component, len(entries_kept(component, num_tokens)))
        if tuple(array.shape) != expected:
            raise LayoutError(
                f"component {component.name!r} has shape {tuple(array.shape)}, the model needs {expected} for "
                f"{num_tokens} tokens"
            )
        if str(array.dtype) != f"torch.{component.dtype}":
            raise LayoutError(f"component {component.name!r} is {array.dtype}, the model needs {component.dtype}")
