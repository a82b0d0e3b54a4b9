"""What a whole model caches: its components, and those of its draft layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from kvferry.errors import LayoutError, ModelError
from kvferry.layout import Axis, Component, Entry, ShardedComponent, even_stages

Components = tuple[ShardedComponent, ...]

_QUANTISED_BYTES = 1
_SCALE = "_scale"


class ModelCache(msgspec.Struct, frozen=True, kw_only=True):
    """What a model caches, whole, and how tensor parallelism divides it.

    The layers of the draft model (multi-token prediction) are numbered after the model's own. They are apart because
    engines hold them only where they speculate: add them to the components where they do. The other side may lack
    them; then they do not travel.

    Attributes:
        name: the architecture, or what a hand-written description calls itself.
        num_layers: layers of the model itself, with those that cache nothing.
        components: components of the model itself.
        draft: components of the draft layers, all of them optional.

    Raises:
        ModelError: if nothing is cached, a name appears twice, or a layer number does not fit its side.
    """

    name: str
    num_layers: int
    components: Components
    draft: Components = ()

    def __post_init__(self) -> None:
        names = [sharded.component.name for sharded in (*self.components, *self.draft)]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ModelError(f"model {self.name!r} has several components called {repeated}: give each its own name")
        for sharded in self.components:
            if not 0 <= sharded.layers[0] <= sharded.layers[-1] < self.num_layers:
                raise ModelError(
                    f"model {self.name!r} has layers 0 to {self.num_layers - 1}, its component "
                    f"{sharded.component.name!r} layers {sharded.layers[0]} to {sharded.layers[-1]}; draft layers come "
                    "after the model's own and are optional"
                )
        for sharded in self.draft:
            if sharded.layers[0] < self.num_layers or not sharded.component.is_optional:
                raise ModelError(
                    f"draft component {sharded.component.name!r} of model {self.name!r} must be optional, with layers "
                    f"from {self.num_layers} on; it has layers from {sharded.layers[0]} on"
                )
        if not self.components:
            raise ModelError(
                f"model {self.name!r} caches nothing in {self.num_layers} layers: there is nothing to move"
            )

    @property
    def num_draft_layers(self) -> int:
        """How many layer numbers the draft takes after the model's own."""
        return max((sharded.layers[-1] + 1 for sharded in self.draft), default=self.num_layers) - self.num_layers

    def layers_per_stage(self, stages: int | Sequence[int] = 1) -> tuple[int, ...]:
        """Divides the layers among pipeline stages. The last stage has the draft layers besides its own.

        They do no harm where the draft's components are left out.

        Args:
            stages: the number of stages, to be made as even as possible, or how many of the model's layers each has.

        Raises:
            LayoutError: if the stages do not have the model's layers.
        """
        counts = even_stages(self.num_layers, stages) if isinstance(stages, int) else tuple(stages)
        if sum(counts) != self.num_layers or min(counts, default=-1) < 0:
            raise LayoutError(
                f"pipeline stages of {list(counts)} layers have {sum(counts)} together: {self.name!r} has "
                f"{self.num_layers}, its draft layers not counted"
            )
        return (*counts[:-1], counts[-1] + self.num_draft_layers)


def as_draft(components: Iterable[ShardedComponent]) -> Components:
    """Returns the components as those of a draft model: optional, and with names of their own."""
    return tuple(
        msgspec.structs.replace(
            sharded,
            component=msgspec.structs.replace(
                sharded.component, name=f"draft_{sharded.component.name}", is_optional=True
            ),
        )
        for sharded in components
    )


def with_block_scales(cache: ModelCache, *, block: int | None = None, dtype: str = "float32") -> ModelCache:
    """Adds the scales of quantised keys, values and latents as components of their own.

    Every component of one-byte elements that has one entry per token gets another, such as "k_scale" beside "k": one
    scale for each token, head and block of elements on the last axis. Components that have scales already keep them.

    Args:
        block: elements that share a scale; None has one for the whole last axis.
        dtype: element type of the scales.

    Raises:
        ModelError: if nothing is quantised, or tensor parallelism divides the blocks.
        LayoutError: if the scales' dtype is unknown.
    """
    scaled = msgspec.structs.replace(
        cache,
        components=block_scaled(cache.components, block=block, dtype=dtype),
        draft=block_scaled(cache.draft, block=block, dtype=dtype),
    )
    if not any(sharded.component.name.endswith(_SCALE) for sharded in (*scaled.components, *scaled.draft)):
        dtypes = sorted({sharded.component.dtype for sharded in cache.components})
        raise ModelError(
            f"model {cache.name!r} caches {', '.join(dtypes)}: there is nothing to scale. Give the dtype of the "
            "quantised cache, such as cache_dtype='float8_e4m3fn'"
        )
    return scaled


def block_scaled(components: Components, *, block: int | None, dtype: str) -> Components:
    """Adds scales to the components, behind each quantised one that has none yet."""
    if block is not None and block < 1:
        raise ModelError(f"block is {block}: a scale is shared by at least 1 element, or by all with None")
    names = {sharded.component.name for sharded in components}
    result = []
    for sharded in components:
        component = sharded.component
        result.append(sharded)
        if component.entry is not Entry.TOKEN or component.element_bytes != _QUANTISED_BYTES:
            continue
        if _scale_name(component) in names or component.name.endswith(_SCALE):
            continue
        result.append(_scales(sharded, block, dtype))
    return tuple(result)


def _scale_name(component: Component) -> str:
    return component.name + _SCALE


def _scales(sharded: ShardedComponent, block: int | None, dtype: str) -> ShardedComponent:
    component = sharded.component
    *kept, scaled = component.axes
    if len(component.axes) < 2 or sharded.tp_axis == scaled.name:
        raise ModelError(
            f"component {component.name!r} has axes {[axis.name for axis in component.axes]}, divided along "
            f"{sharded.tp_axis!r}: scales are for blocks of the last axis, which must not be the layer or be divided"
        )
    axis = Axis("block", 1 if block is None else -(-scaled.size // block))
    return msgspec.structs.replace(
        sharded,
        component=msgspec.structs.replace(component, name=_scale_name(component), axes=(*kept, axis), dtype=dtype),
    )
