"""Which part of a component one rank holds, and where its elements lie.

A shard is a box of the component plus an affine map from (page, token in page, index on every axis) to an address.
NHD, HND and packed layouts are nothing but strides, separate tensors per layer nothing but base addresses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import combinations
from typing import Annotated

import msgspec

from kvferry.errors import LayoutError
from kvferry.layout.component import Component, digest
from kvferry.layout.interval import Box, covers, volume


class MemoryKind(str, Enum):
    """Where memory lives, in NIXL's words."""

    DRAM = "DRAM"
    VRAM = "VRAM"


class Device(msgspec.Struct, frozen=True, array_like=True):
    """A kind of memory and, on machines with several of that kind, which one."""

    kind: MemoryKind = MemoryKind.DRAM
    index: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}:{self.index}"


class Region(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A range of memory, in bytes. One that travelled is not negative."""

    address: Annotated[int, msgspec.Meta(ge=0)]
    length: Annotated[int, msgspec.Meta(ge=0)]

    @property
    def stop(self) -> int:
        """The address after the last byte."""
        return self.address + self.length


class Paging(msgspec.Struct, frozen=True, array_like=True):
    """How tokens are laid out in a paged pool.

    Attributes:
        page_tokens: tokens that a page holds.
        num_pages: pages in the pool.
        page_stride: bytes from a page to the next.
        token_stride: bytes from a token to the next in the same page.
    """

    page_tokens: int
    num_pages: int
    page_stride: int
    token_stride: int


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One dimension of the address map: `count` steps of `stride` bytes. Its name is an axis, 'page' or 'token'."""

    name: str
    count: int
    stride: int


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds of one component, and where.

    The element with index i on the first axis, page p, token t and indices j, k, ... on the further axes lies at
    `addresses[i] + p * page_stride + t * token_stride + j * strides[0] + k * strides[1] + ...`, where i, j, k count
    from the start of the box.

    Attributes:
        component: what it is a part of.
        box: the part, one interval per axis of the component. May be empty.
        addresses: one base address per index of the box's first axis.
        strides: bytes per step, for every further axis.
        paging: of the token axis.
        device: where the memory is.

    Raises:
        LayoutError: if the box leaves the component, counts do not fit, or two elements would share a byte.
    """

    component: Component
    box: Box
    addresses: tuple[int, ...]
    strides: tuple[int, ...]
    paging: Paging
    device: Device = Device()

    def __post_init__(self) -> None:
        name, axes = self.component.name, self.component.axes
        if len(self.box) != len(axes) or not covers(self.component.whole, self.box):
            raise LayoutError(
                f"component {name!r} has {', '.join(map(str, axes))}: a shard of {self.box} is not a part of it"
            )
        if len(self.addresses) != len(self.box[0]) or len(self.strides) != len(axes) - 1:
            raise LayoutError(
                f"shard of {name!r} ({self.component.describe(self.box)}) needs {len(self.box[0])} addresses and "
                f"{len(axes) - 1} strides, not {len(self.addresses)} and {len(self.strides)}"
            )
        if self.paging.page_tokens < 1 or self.paging.num_pages < 1:
            raise LayoutError(
                f"shard of {name!r} has {self.paging.num_pages} pages of {self.paging.page_tokens} tokens: "
                "both must be at least 1"
            )
        self._refuse_shared_bytes()

    def _refuse_shared_bytes(self) -> None:
        # Strides that nest (each at least as long as everything inside it) are what makes the address map injective,
        # and what lets an address be decoded again.
        inner_bytes = self.component.element_bytes
        if volume(self.box) == 0:
            return
        for step in sorted(self.steps(), key=lambda step: step.stride):
            if step.count > 1 and step.stride < inner_bytes:
                raise LayoutError(
                    f"shard of {self.component.name!r}: a step on {step.name} is {step.stride} bytes, but one "
                    f"{step.name} takes {inner_bytes}: elements would overlap. "
                    "Check the tensor's shape and dimension names"
                )
            inner_bytes = max(inner_bytes, step.stride * step.count)
        self._refuse_shared_layers()

    def _refuse_shared_layers(self) -> None:
        nested = sorted((step for step in self.steps() if step.count > 1), key=lambda step: -step.stride)
        placed = sorted(zip(self.addresses, range(self.box[0].start, self.box[0].stop), strict=True))
        apart: set[int] = set()  # layers of one tensor have few distinct distances
        for (low, one), (high, other) in combinations(placed, 2):
            if high - low in apart:
                continue
            if _meets_itself(high - low, nested, self.component.element_bytes):
                first = self.component.axes[0].name
                raise LayoutError(
                    f"shard of {self.component.name!r}: {first} {one} at {low:#x} and {first} {other} at {high:#x} "
                    f"share bytes: every {first} needs memory of its own"
                )
            apart.add(high - low)

    def steps(self) -> Iterator[Step]:
        """The dimensions of the address map below the first axis, in no particular order."""
        yield Step("page", self.paging.num_pages, self.paging.page_stride)
        yield Step("token", self.paging.page_tokens, self.paging.token_stride)
        for axis, interval, stride in zip(self.component.axes[1:], self.box[1:], self.strides, strict=True):
            yield Step(axis.name, len(interval), stride)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in this shard."""
        return volume(self.box) * self.component.element_bytes

    def regions(self) -> list[Region]:
        """The memory that the shard occupies, from the first to the last byte of every base address."""
        if volume(self.box) == 0:
            return []
        last = sum((step.count - 1) * step.stride for step in self.steps())
        return [Region(address, last + self.component.element_bytes) for address in self.addresses]


def _meets_itself(distance: int, nested: Sequence[Step], element_bytes: int) -> bool:
    """Whether the elements that `nested` steps reach, largest stride first, share a byte with those `distance` on."""
    if not nested:
        return distance < element_bytes
    step, inner = nested[0], nested[1:]
    whole, rest = divmod(distance, step.stride)
    return (whole < step.count and _meets_itself(rest, inner, element_bytes)) or (
        whole + 1 < step.count and _meets_itself(step.stride - rest, inner, element_bytes)
    )


class RankLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one rank caches: a shard of every component, in pools that share page indices.

    Every rank of an engine lists every component, also those of which it holds nothing (an empty box).

    Raises:
        LayoutError: if there is no shard, a component appears twice, the shards' pages or devices differ, or two
            components start in the same place.
    """

    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        names = [shard.component.name for shard in self.shards]
        if not names or len(set(names)) != len(names):
            raise LayoutError(f"a rank's layout lists each component once, and at least one; got {names}")
        for shard in self.shards[1:]:
            mine, first = shard.paging, self.shards[0].paging
            if (mine.page_tokens, mine.num_pages) != (first.page_tokens, first.num_pages):
                raise LayoutError(
                    f"{shard.component.name!r} has {mine.num_pages} pages of {mine.page_tokens} tokens, {names[0]!r} "
                    f"has {first.num_pages} of {first.page_tokens}: pools that share page indices need the same pages"
                )
            if shard.device != self.device:
                raise LayoutError(
                    f"{shard.component.name!r} is on {shard.device}, {names[0]!r} on {self.device}: the pools of a "
                    "rank share a device, which empty shards name too"
                )
        owners: dict[int, str] = {}
        for shard in self.shards:
            name = shard.component.name
            for address in shard.addresses if volume(shard.box) else ():
                if owners.setdefault(address, name) != name:
                    raise LayoutError(
                        f"{name!r} and {owners[address]!r} both start at {address:#x}: every component needs memory "
                        "of its own"
                    )

    @property
    def device(self) -> Device:
        """Where the pools live."""
        return self.shards[0].device

    @property
    def page_tokens(self) -> int:
        """Tokens in a page."""
        return self.shards[0].paging.page_tokens

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return self.shards[0].paging.num_pages

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes on this rank, over all components."""
        return sum(shard.bytes_per_token for shard in self.shards)

    @property
    def digest(self) -> str:
        """A fingerprint of what all ranks of the engine share; see `component.digest`."""
        return digest((shard.component for shard in self.shards), self.page_tokens)

    def shard(self, name: str) -> Shard:
        """The shard of one component.

        Raises:
            LayoutError: if there is none of that name.
        """
        for shard in self.shards:
            if shard.component.name == name:
                return shard
        raise LayoutError(f"no component {name!r}: there are {[shard.component.name for shard in self.shards]}")

    def regions(self) -> tuple[Region, ...]:
        """The memory to register: the shards' regions, those that overlap made one."""
        merged: list[Region] = []
        for region in sorted(region for shard in self.shards for region in shard.regions()):
            if merged and region.address < merged[-1].stop:
                first = merged[-1].address
                merged[-1] = Region(first, max(merged[-1].stop, region.stop) - first)
            else:
                merged.append(region)
        return tuple(merged)
