"""What a layer keeps of a whole request, and not of each token: recurrent state, and rings of tokens to be compressed.

vLLM keeps the states of a layer behind each other in one block of a request's block table, that of its last token:
what a convolution has seen last, and what was summed up. Ranks divide a state along one of its dimensions, in parts
that lie behind each other (x, B and C of a convolution of Mamba 2). Which parts these are the layer's module knows.
Where it does not say, the state is its rank's share, which only the rank of the same number among as many can have.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from kvferry import Axis, Component, Entry, Interval, RankCoordinates, geometry
from kvferry.engines.vllm.caches import HeldPart
from kvferry.engines.vllm.components import ComponentForm, Piece
from kvferry.errors import LayoutError

WHOLE_REQUEST = sys.maxsize
"""Tokens in the block of what has one block a request, whatever its length."""

SHARE = "tensor-parallel share"
"""The axis of what ranks hold apart from each other where it is not known what that is."""

DRAFTED = "tokens back (more with num_speculative_tokens)"
"""The axis of what a state keeps of so many tokens: as many more as are drafted, which may all turn out wrong."""


@dataclass(frozen=True, slots=True)
class State:
    """One of the states that a layer keeps of a request.

    Attributes:
        shape: on this rank.
        divided: the dimension along which ranks divide it.
        parts: what lies behind each other there; None where that is not known.
        drafted: the dimension that is longer the more tokens are drafted; None where there is none.
    """

    shape: tuple[int, ...]
    divided: int = 0
    parts: tuple[HeldPart, ...] | None = None
    drafted: int | None = None

    @property
    def axes(self) -> list[Axis]:
        """Its dimensions, as they are on this rank."""
        return [
            Axis(f"dimension {index}" if index != self.drafted else DRAFTED, size)
            for index, size in enumerate(self.shape)
        ]


_LOOKING_BACK = frozenset({"MAMBA2", "GDN_ATTN", "SHORT_CONV"})
"""Kinds whose first state is what a convolution has seen last; of Mamba 1's vLLM keeps no more for drafts."""

RECURRENT = "state"
"""What the recurrent state of a layer is called beside other things that it keeps of a request."""


@dataclass(frozen=True, slots=True)
class KeptStates:
    """What a layer keeps of a request.

    Attributes:
        states: in the order in which they lie in a block.
        tensors: of each state a view of (block, *shape).
        role: what it is beside other things that the same decoder layer keeps.
    """

    states: tuple[State, ...]
    tensors: tuple[Any, ...]
    role: str = RECURRENT


@dataclass(frozen=True, slots=True)
class StateLayer:
    """A layer that keeps state.

    Attributes:
        number: of the layer, in the whole model; of a draft model's, among those of the draft.
        group: the name of its group.
        drafts: how many layers the draft model has whose layer it is; 0 for one of the model's.
    """

    number: int
    name: str
    group: str
    kept: KeptStates
    drafts: int = 0


# ---- what vLLM's layers say -----------------------------------------------------------------------------------------


def states_of(spec: Any, layer: Any, coordinates: RankCoordinates, *, channels_first: bool) -> tuple[State, ...]:
    """Returns what a layer keeps of a request.

    Args:
        spec: what vLLM says of its cache (a `MambaSpec`).
        channels_first: whether a convolution's channels come before what it has seen of each.
    """
    channel = 0 if channels_first else 1
    first, *others = _states_of(spec, layer, coordinates, channel)
    is_convolution = spec.mamba_type.name in _LOOKING_BACK and len(first.shape) == 2
    return replace(first, drafted=1 - channel if is_convolution else None), *others


def _states_of(spec: Any, layer: Any, coordinates: RankCoordinates, channel: int) -> tuple[State, ...]:
    shapes = [tuple(map(int, shape)) for shape in spec.shapes]
    if spec.tp_replicated:
        return tuple(State(shape, 0, (HeldPart.whole(shape[0]),)) for shape in shapes)
    kind = spec.mamba_type.name
    if kind == "LINEAR" and len(shapes) == 1:
        return (_evenly(shapes[0], 0, coordinates),)
    if kind == "SHORT_CONV" and len(shapes) == 1:
        return (_evenly(shapes[0], channel, coordinates),)
    parts = _parts_of_convolution(kind, layer, shapes, channel, coordinates) if len(shapes) == 2 else None
    if parts is None:
        return tuple(State(shape) for shape in shapes)
    return State(shapes[0], channel, parts), _evenly(shapes[1], 0, coordinates)


def is_ring(spec: Any) -> bool:
    """Whether a layer keeps a ring. By the name of its spec's class, which vLLM 0.31 has not."""
    return type(spec).__name__ == "CircularBufferSpec"


def ring_of(spec: Any, cache: Any, role: str) -> KeptStates:
    """Returns what a layer keeps in a ring: entries of a request's last tokens, each at its position modulo the size.

    A ring has one block, whatever the request's length, and every rank has the same. It is taken as a whole: where the
    last token is in it follows from the number of tokens.

    Args:
        spec: what vLLM says of it (a `CircularBufferSpec`).
        cache: its tensor, of (block, head slot, entry, content).
        role: what it is beside the layer's other caches.
    """
    shape = spec.num_heads, spec.num_states, spec.state_content_size_bytes // spec.dtype.itemsize
    return KeptStates((State(shape, 0, (HeldPart.whole(shape[0]),), drafted=1),), (cache,), role)


def _parts_of_convolution(
    kind: str, layer: Any, shapes: Sequence[tuple[int, ...]], channel: int, coordinates: RankCoordinates
) -> tuple[HeldPart, ...] | None:
    """Returns the parts of a convolution's channels; None where the layer does not say them, or says something else."""
    held, size = shapes[0][channel], coordinates.tp_size
    if kind == "MAMBA1":
        return _divided([held], coordinates)
    if kind == "GDN_ATTN":  # queries, keys, values
        alike = getattr(layer, "projection_size", None)  # Kimi's delta attention has as much of each
        keys, values = getattr(layer, "key_dim", alike), getattr(layer, "value_dim", alike)
        if not isinstance(keys, int) or not isinstance(values, int) or keys % size or values % size:
            return None
        sizes = [keys // size, keys // size, values // size]
        return _divided(sizes, coordinates) if sum(sizes) == held else None
    if kind == "MAMBA2":  # x, B, C
        said = [getattr(layer, name, None) for name in ("intermediate_size", "n_groups", "ssm_state_size")]
        inner, groups, width = (each if isinstance(each, int) else 0 for each in said)
        if not inner or not groups or inner % size or groups % size:
            return None
        sizes = [inner // size, groups * width // size, groups * width // size]
        if sum(sizes) != held:
            return None
        x, b, c = _divided(sizes, coordinates)
        # With one group for all heads every rank has it: the layer then counts as many groups as there are ranks, and
        # its projection is one piece.
        if size > 1 and not hasattr(getattr(layer, "conv1d", None), "output_sizes"):
            if groups != size:
                return None
            b = c = HeldPart.whole(width)
        return x, b, c
    return None


def _evenly(shape: tuple[int, ...], divided: int, coordinates: RankCoordinates) -> State:
    return State(shape, divided, _divided([shape[divided]], coordinates))


def _divided(sizes: Sequence[int], coordinates: RankCoordinates) -> tuple[HeldPart, ...]:
    """Returns parts of which each rank has as much, in the order of the ranks."""
    rank = coordinates.tp_rank
    return tuple(HeldPart(size * coordinates.tp_size, Interval(rank * size, (rank + 1) * size)) for size in sizes)


# ---- as shards ------------------------------------------------------------------------------------------------------


def state_pieces(layers: Iterable[StateLayer], num_layers: int, coordinates: RankCoordinates) -> Iterator[Piece]:
    """Yields what layers keep of a request, state by state and part by part.

    Args:
        layers: in the order of their numbers.
        num_layers: of the whole model.

    Raises:
        LayoutError: if a tensor is not what its layer says, naming the layer and both.
    """
    for layer in layers:
        # Falcon-H1 numbers layers with state on behind those with attention.
        numbered = Axis("layer", layer.drafts or num_layers * (1 + layer.number // num_layers))
        for kind, view, axes, held in _parts(layer, coordinates):
            dtype, sizes = geometry(view).dtype, " x ".join(str(axis.size) for axis in axes)
            component = Component(
                name=kind,
                axes=(numbered, *axes),
                dtype=dtype,
                entry=Entry.REQUEST,
                is_optional=bool(layer.drafts),
            )
            form = ComponentForm(kind, (f"{sizes} of {dtype}",), component, layer.name)
            yield Piece(form, layer.number, layer.group, view, ("slot", *(axis.name for axis in axes)), held)


def _parts(
    layer: StateLayer, coordinates: RankCoordinates
) -> Iterator[tuple[str, Any, tuple[Axis, ...], dict[str, Interval]]]:
    """Yields the name of each part, a view of (block, *dimensions), the axes of these, and what the rank has of them.

    A rank's share has an axis of its own, of length 1 in the view.
    """
    kept, draft = layer.kept, "draft, " if layer.drafts else ""
    for number, (state, tensor) in enumerate(zip(kept.states, kept.tensors, strict=True)):
        base = f"{draft}{kept.role} {number}" if kept.role == RECURRENT else f"{draft}{kept.role}"
        if tuple(tensor.shape[1:]) != state.shape:
            raise LayoutError(
                f"state {number} of layer {layer.name!r} has shape {tuple(tensor.shape[1:])} where vLLM says "
                f"{state.shape}"
            )
        if state.parts is None:
            share = {SHARE: Interval(coordinates.tp_rank, coordinates.tp_rank + 1)}
            yield base, tensor[:, None], (Axis(SHARE, coordinates.tp_size), *state.axes), share
            continue
        starts = accumulate((len(part.held) for part in state.parts), initial=0)
        for index, (start, part) in enumerate(zip(starts, state.parts, strict=False)):
            axes = tuple(
                Axis("channel", part.total) if dimension == state.divided else axis
                for dimension, axis in enumerate(state.axes)
            )
            name = base if len(state.parts) == 1 else f"{base}, part {index}"
            yield name, tensor.narrow(1 + state.divided, start, len(part.held)), axes, {"channel": part.held}
