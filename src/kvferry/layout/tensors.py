"""Shards from an engine's tensors.

Of torch tensors and NumPy arrays only the description is read (address, shape, strides, dtype, device); neither library
is needed to import this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvferry.errors import LayoutError
from kvferry.layout.component import Component, Entry
from kvferry.layout.interval import Interval
from kvferry.layout.shard import Device, MemoryKind, Paging, Shard

_PAGED_DIMS: Mapping[Entry, tuple[str, ...]] = {
    Entry.TOKEN: ("page", "token"),
    Entry.PAGE: ("page",),
    Entry.REQUEST: ("slot",),
}


class TensorGeometry(msgspec.Struct, frozen=True):
    """Where a tensor's elements lie.

    Attributes:
        address: the first element's address.
        shape: elements per dimension.
        strides: bytes per step, for every dimension.
        dtype: the element type's name.
        device: where the memory is.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: Device


def geometry(tensor: Any) -> TensorGeometry:
    """Reads where the elements of a torch tensor or a NumPy array lie.

    Raises:
        LayoutError: if it is neither, or lives on a device that no transport reads from.
    """
    if hasattr(tensor, "data_ptr"):
        kinds = {"cpu": MemoryKind.DRAM, "cuda": MemoryKind.VRAM}
        if tensor.device.type not in kinds:
            raise LayoutError(f"a tensor on device {tensor.device} cannot be registered: use cpu or cuda")
        size = tensor.element_size()
        return TensorGeometry(
            address=tensor.data_ptr(),
            shape=tuple(tensor.shape),
            strides=tuple(stride * size for stride in tensor.stride()),
            dtype=str(tensor.dtype).removeprefix("torch."),
            device=Device(kinds[tensor.device.type], tensor.device.index or 0),
        )
    if hasattr(tensor, "__array_interface__"):
        return TensorGeometry(
            address=tensor.__array_interface__["data"][0],
            shape=tuple(tensor.shape),
            strides=tuple(tensor.strides),
            dtype=tensor.dtype.name,
            device=Device(),
        )
    raise LayoutError(f"expected a torch tensor or a NumPy array, got {type(tensor).__name__}")


def shard_from_tensors(
    component: Component,
    tensors: Sequence[Any],
    *,
    dims: Sequence[str],
    held: Mapping[str, Interval] | None = None,
    group: str | None = None,
    page_tokens: int | None = None,
    has_every_token: bool = False,
) -> Shard:
    """Describes a rank's tensors of one component.

    Args:
        component: what the tensors cache.
        tensors: one for every index of the first axis that the rank holds (one per layer), all of the same shape and
            strides. Layers stacked in one tensor are passed as its slices.
        dims: what the dimensions of each tensor are, in order: 'page', 'token' and the names of the component's
            further axes. ('page', 'token', 'head', 'dim') is the NHD layout, ('page', 'head', 'token', 'dim') HND.
            Packed pages have no 'token', and 'slot' takes the place of both in a component with one entry per request.
        held: the intervals that the rank holds, by axis; axes that are missing are held whole.
        group: the name that shards with the same page numbers share; None takes `default_group`.
        page_tokens: tokens in a page, for packed pages alone.
        has_every_token: whether the tensors have every token of a request, also where the rank has a share of others'.

    Raises:
        LayoutError: if shapes, dtypes, devices or strides do not fit, naming what was expected and what was found.
    """
    held = dict(held or {})
    names = [axis.name for axis in component.axes]
    if unknown := set(held) - set(names):
        raise LayoutError(f"component {component.name!r} has no axis {sorted(unknown)}: its axes are {names}")
    box = tuple(held.get(axis.name, Interval(0, axis.size)) for axis in component.axes)
    _check_dims(component, dims, page_tokens)
    if not tensors:
        raise LayoutError(f"no tensors for {component.name!r}: a rank that holds nothing of it uses empty_shard")
    if len(tensors) != len(box[0]):
        raise LayoutError(
            f"{component.name!r} holds {names[0]} {box[0]}: that takes {len(box[0])} tensors, not {len(tensors)}"
        )
    geometries = [geometry(tensor) for tensor in tensors]
    first = geometries[0]
    expected = {name: len(interval) for name, interval in zip(names[1:], box[1:], strict=True)}
    for index, each in enumerate(geometries):
        _check_tensor(component, each, first, dims, expected, where=f"{names[0]} {box[0].start + index}")
    strides = dict(zip(dims, first.strides, strict=True))
    return Shard(
        component=component,
        box=box,
        addresses=tuple(each.address for each in geometries),
        strides=tuple(strides[name] for name in names[1:]),
        paging=_paging(component, dict(zip(dims, first.shape, strict=True)), strides, page_tokens),
        device=first.device,
        group=group or default_group(component),
        has_every_token=has_every_token,
    )


def _paging(
    component: Component, sizes: Mapping[str, int], strides: Mapping[str, int], page_tokens: int | None
) -> Paging:
    pages = _PAGED_DIMS[component.entry][0]
    return Paging(
        page_tokens=sizes.get("token", 1) if page_tokens is None else page_tokens,
        num_pages=sizes[pages],
        page_stride=strides[pages],
        token_stride=strides.get("token", 0),
    )


def default_group(component: Component) -> str:
    """Names the group of a component's shards where the caller does not: "kv", "window-<tokens>" or "state"."""
    if component.entry is Entry.REQUEST:
        return "state"
    return "kv" if component.window_tokens is None else f"window-{component.window_tokens}"


def _check_dims(component: Component, dims: Sequence[str], page_tokens: int | None) -> None:
    paged, named = _PAGED_DIMS[component.entry], [axis.name for axis in component.axes[1:]]
    if sorted(dims) != sorted([*paged, *named]):
        raise LayoutError(
            f"dimensions {list(dims)} of {component.name!r}, which has one entry per {component.entry.value}, must be "
            f"{list(paged)} and {named}, in any order"
        )
    if (page_tokens is not None) != (component.entry is Entry.PAGE):
        raise LayoutError(
            f"{component.name!r} has one entry per {component.entry.value}: page_tokens is given for packed pages, "
            f"whose tensors do not say it, and for no others; it is {page_tokens}"
        )


def _check_tensor(
    component: Component,
    tensor: TensorGeometry,
    first: TensorGeometry,
    dims: Sequence[str],
    expected: Mapping[str, int],
    *,
    where: str,
) -> None:
    what = f"tensor of {component.name!r} for {where}"
    if tensor.dtype != component.dtype:
        raise LayoutError(f"{what} has dtype {tensor.dtype}, the component {component.dtype}")
    if len(tensor.shape) != len(dims):
        raise LayoutError(f"{what} has shape {tensor.shape}: that is not one number for each of {list(dims)}")
    for name, size in zip(dims, tensor.shape, strict=True):
        if name in expected and size != expected[name]:
            raise LayoutError(
                f"{what} has {size} in dimension {name!r} where the rank holds {expected[name]}: shape {tensor.shape}"
            )
    if 0 in tensor.shape:
        raise LayoutError(f"{what} has shape {tensor.shape}: a pool needs at least one page and one token a page")
    innermost = dims[-1]
    if tensor.shape[-1] > 1 and tensor.strides[-1] != component.element_bytes:
        raise LayoutError(
            f"{what} is not contiguous in its last dimension {innermost!r}: a step is {tensor.strides[-1]} bytes, an "
            f"element {component.element_bytes}. Make it contiguous, or name the dimensions in the order of memory"
        )
    if (tensor.shape, tensor.strides, tensor.device) != (first.shape, first.strides, first.device):
        raise LayoutError(
            f"{what} differs from the first: shape {tensor.shape} strides {tensor.strides} on {tensor.device} against "
            f"shape {first.shape} strides {first.strides} on {first.device}; pages need the same place in every layer"
        )


def empty_shard(
    component: Component, *, page_tokens: int, num_pages: int, device: Device | None = None, group: str | None = None
) -> Shard:
    """Makes the shard of a rank that holds nothing of a component, beside pools of the given pages."""
    return Shard(
        component=component,
        box=(Interval(0, 0), *component.whole[1:]),
        addresses=(),
        strides=(0,) * (len(component.axes) - 1),
        paging=Paging(page_tokens=page_tokens, num_pages=num_pages, page_stride=0, token_stride=0),
        device=device or Device(),
        group=group or default_group(component),
    )
