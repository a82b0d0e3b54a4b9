"""Which part of a component one rank holds, and where its elements lie.

A shard is a box of the component plus an affine map from (page, token in page, index on every axis) to an address.
NHD, HND and packed layouts are nothing but strides, separate tensors per layer nothing but base addresses. Shards whose
entries share page numbers form a group; a request has one list of pages for each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from itertools import combinations, pairwise
from typing import Annotated, TypeAlias

import msgspec

from kvferry.errors import LayoutError
from kvferry.layout.component import MOST_AXES, Component, Entry, Name, check_name
from kvferry.layout.interval import Box, WireIndex, covers, overlap, volume
from kvferry.layout.tokens import TokenShare

_MOST_LAYERS = 2048
_MOST_SHARDS = 512
_MOST_DISTANCES = 4096
_MOST_COMPARED = 1 << 17
_LARGEST_PAGE = 1 << 20  # tokens
_MOST_PAGES = (1 << 31) - 1  # descriptors are numbered in 32 bits
"""Limits on layouts. Peers send layouts too, and checking one must take neither long nor much memory."""


class MemoryKind(str, Enum):
    """Where memory lives, in NIXL's words."""

    DRAM = "DRAM"
    VRAM = "VRAM"


class Device(msgspec.Struct, frozen=True, array_like=True):
    """A kind of memory and, on machines with several of that kind, which one."""

    kind: MemoryKind = MemoryKind.DRAM
    index: Annotated[int, msgspec.Meta(ge=0, le=65535, description="which one, from 0")] = 0

    def __str__(self) -> str:
        return f"{self.kind.value}:{self.index}"


class Region(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A range of memory, in bytes. A peer's with negative numbers is refused on arrival."""

    address: Annotated[int, msgspec.Meta(ge=0, description="of its first byte")]
    length: Annotated[int, msgspec.Meta(ge=0, description="how many bytes it has")]

    @property
    def stop(self) -> int:
        """The address after the last byte."""
        return self.address + self.length

    def contains(self, other: Region) -> bool:
        """Whether all of another range lies in this one."""
        return self.address <= other.address and other.stop <= self.stop


class Paging(msgspec.Struct, frozen=True, array_like=True):
    """How entries are laid out in a paged or slotted pool.

    Attributes:
        page_tokens: tokens that a page holds; 1 where a page is the slot of a request.
        num_pages: pages in the pool.
        page_stride: bytes from a page to the next.
        token_stride: bytes from a token to the next in the same page; 0 where tokens have no entries of their own.
    """

    page_tokens: int
    num_pages: int
    page_stride: WireIndex
    token_stride: WireIndex


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One dimension of the address map: `count` steps of `stride` bytes. Its name is an axis, 'page' or 'token'."""

    name: str
    count: int
    stride: int


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds of one component, and where.

    The element with index i on the first axis, page p, token t and indices j, k, ... on the further axes lies at
    `addresses[i] + p * page_stride + t * token_stride + j * strides[0] + k * strides[1] + ...`, where i, j, k count
    from the start of the box, and t is 0 where tokens have no entries of their own.

    Attributes:
        component: the component that it is a part of.
        box: the part, one interval per axis of the component. May be empty.
        addresses: one base address per index of the box's first axis.
        strides: bytes per step, for every further axis.
        paging: how pages and tokens are laid out.
        device: where the memory is.
        group: the name that shards with the same page numbers share.
        has_every_token: whether it holds every token of a request, also where context parallelism has the rank's other
            shards hold a share: a draft model's layers may be kept so.

    Raises:
        LayoutError: if the box leaves the component, counts do not fit, or two elements would share a byte.
    """

    component: Component
    box: Annotated[Box, msgspec.Meta(max_length=MOST_AXES)]
    addresses: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=_MOST_LAYERS)]
    strides: Annotated[tuple[WireIndex, ...], msgspec.Meta(max_length=MOST_AXES)]
    paging: Paging
    device: Device = Device()
    group: Name = "kv"
    has_every_token: bool = False

    def __post_init__(self) -> None:
        check_name("a group", self.group)
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
        if not 1 <= self.paging.page_tokens <= _LARGEST_PAGE or not 1 <= self.paging.num_pages <= _MOST_PAGES:
            raise LayoutError(
                f"shard of {name!r} has {self.paging.num_pages} pages of {self.paging.page_tokens} tokens: both must "
                f"be at least 1, pages at most {_MOST_PAGES} and tokens at most {_LARGEST_PAGE}"
            )
        if len(self.addresses) > _MOST_LAYERS:
            raise LayoutError(
                f"shard of {name!r} has {len(self.addresses)} of axis {axes[0].name!r} at addresses of their own: "
                f"{_MOST_LAYERS} at most"
            )
        if self.component.entry is Entry.REQUEST and self.paging.page_tokens != 1:
            raise LayoutError(
                f"shard of {name!r} has pages of {self.paging.page_tokens} tokens, but one entry per request: its "
                "pages are slots of 1"
            )
        self._refuse_unequal_parts()
        self._refuse_shared_bytes()

    def _refuse_unequal_parts(self) -> None:
        parts, last = self.component.token_parts, self.component.axes[-1]
        if not parts or volume(self.box) == 0:
            return
        is_dense = len(self.component.axes) > 1 and self.strides[-1] == self.component.element_bytes
        if not is_dense or len(self.box[-1]) != last.size or self.paging.page_tokens * sum(parts) != last.size:
            raise LayoutError(
                f"shard of {self.component.name!r} holds {last.name} {self.box[-1]} of {last.size}, in pages of "
                f"{self.paging.page_tokens} tokens: with token_parts {parts} a page has {sum(parts)} for each token"
            )

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
        steps = [step for step in self.steps() if step.count > 1]
        extent = sum((step.count - 1) * step.stride for step in steps) + self.component.element_bytes
        placed = sorted(zip(self.addresses, range(self.box[0].start, self.box[0].stop), strict=True))
        if all(high - low >= extent for (low, _), (high, _) in pairwise(placed)):
            return
        nested = sorted(steps, key=lambda step: -step.stride)
        apart: set[int] = set()  # layers of one tensor have few distinct distances
        work = 0
        for (low, one), (high, other) in _distances(placed):
            is_known = high - low in apart
            work += 1 if is_known else 1 << len(nested)
            if not is_known and _meets_itself(high - low, nested, self.component.element_bytes):
                first = self.component.axes[0].name
                raise LayoutError(
                    f"shard of {self.component.name!r}: {first} {one} at {low:#x} and {first} {other} at {high:#x} "
                    f"share bytes: every {first} needs memory of its own"
                )
            apart.add(high - low)
            if len(apart) > _MOST_DISTANCES or work > _MOST_COMPARED:
                raise LayoutError(
                    f"shard of {self.component.name!r}: its addresses lie inside each other in more than "
                    f"{len(apart) - 1} different ways; give every {self.component.axes[0].name} memory of its own"
                )

    def steps(self) -> Iterator[Step]:
        """Yields the dimensions of the address map below the first axis, in no particular order."""
        yield Step("page", self.paging.num_pages, self.paging.page_stride)
        if self.component.entry is Entry.TOKEN:
            yield Step("token", self.paging.page_tokens, self.paging.token_stride)
        for axis, interval, stride in zip(self.component.axes[1:], self.box[1:], self.strides, strict=True):
            yield Step(axis.name, len(interval), stride)

    @property
    def entries_per_page(self) -> int:
        """How many entries a page has."""
        return self.paging.page_tokens if self.component.entry is Entry.TOKEN else 1

    @property
    def bytes_per_page(self) -> int:
        """Bytes that one page, or slot, takes in this shard."""
        return volume(self.box) * self.component.element_bytes * self.entries_per_page

    def regions(self) -> list[Region]:
        """Returns the memory that the shard occupies, from the first to the last byte of every base address."""
        if volume(self.box) == 0:
            return []
        last = sum((step.count - 1) * step.stride for step in self.steps())
        return [Region(address, last + self.component.element_bytes) for address in self.addresses]


_Placed: TypeAlias = tuple[int, int]
"""An address, and the index whose memory begins there."""


def _distances(placed: Sequence[_Placed]) -> Iterable[tuple[_Placed, _Placed]]:
    """Returns pairs of addresses, in ascending order, among which is every distance between any two."""
    gaps = {high - low for (low, _), (high, _) in pairwise(placed)}
    return ((placed[0], each) for each in placed[1:]) if len(gaps) == 1 else combinations(placed, 2)


def _meets_itself(distance: int, nested: Sequence[Step], element_bytes: int) -> bool:
    """Returns whether the elements that nested steps reach share a byte with the same ones `distance` bytes further on.

    Args:
        nested: the steps, largest stride first.
    """
    rests = {distance}  # what is left to be bridged by smaller steps
    for step in nested:
        left = set()
        for each in rests:
            whole, rest = divmod(each, step.stride)
            if whole < step.count:
                left.add(rest)
            if whole + 1 < step.count:
                left.add(step.stride - rest)
        rests = left
    return any(rest < element_bytes for rest in rests)


class PageGroup(msgspec.Struct, frozen=True):
    """What shards that share page numbers have in common.

    Attributes:
        name: the group's name, unique on the rank.
        page_tokens: tokens in a page; 1 in a group of slots.
        num_pages: pages, or slots, in each of its pools.
        has_slots: whether a page holds the one entry of a request instead of tokens.
        window_tokens: how many tokens at the end of a request it keeps; None keeps all.
        has_every_token: whether it holds every token, whatever share the rank has of the others' tokens.
    """

    name: str
    page_tokens: int
    num_pages: int
    has_slots: bool
    window_tokens: int | None
    has_every_token: bool = False


def _group_of(shard: Shard) -> PageGroup:
    component, paging = shard.component, shard.paging
    return PageGroup(
        name=shard.group,
        page_tokens=paging.page_tokens,
        num_pages=paging.num_pages,
        has_slots=component.entry is Entry.REQUEST,
        window_tokens=component.window_tokens,
        has_every_token=shard.has_every_token,
    )


class RankLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one rank caches, in groups of pools that share page numbers.

    Every rank of an engine lists every component, also those of which it holds nothing (an empty box). A component may
    have several shards, in different groups: engines give layers of the same kind different pages.

    Attributes:
        shards: the parts that it holds.
        tokens: which token positions of every request it holds, but for shards that hold every one.

    Raises:
        LayoutError: if there is no shard, shards of a group differ in their pages, shards of a component overlap,
            devices differ, or two shards of a group start in the same place.
    """

    shards: Annotated[tuple[Shard, ...], msgspec.Meta(max_length=_MOST_SHARDS)]
    tokens: TokenShare = TokenShare()

    def __post_init__(self) -> None:
        if not 1 <= len(self.shards) <= _MOST_SHARDS:
            raise LayoutError(
                f"a rank's layout has at least one shard, which may be empty, and at most {_MOST_SHARDS}: it has "
                f"{len(self.shards)}"
            )
        self._check_groups()
        self._check_components()
        self._check_addresses()

    def _check_groups(self) -> None:
        groups: dict[str, tuple[PageGroup, str]] = {}
        for shard in self.shards:
            name, group = shard.component.name, _group_of(shard)
            first, first_name = groups.setdefault(shard.group, (group, name))
            if group != first:
                raise LayoutError(
                    f"{name!r} has {_describe(group)}, {first_name!r} has {_describe(first)}: shards of group "
                    f"{shard.group!r} share page numbers and need the same pages; give one of them another group"
                )
            if shard.device != self.device:
                raise LayoutError(
                    f"{name!r} is on {shard.device}, {self.shards[0].component.name!r} on {self.device}: the pools of "
                    "a rank share a device, which empty shards name too"
                )

    def _check_components(self) -> None:
        seen: dict[str, list[Shard]] = {}
        for shard in self.shards:
            name = shard.component.name
            for other in seen.setdefault(name, []):
                if other.component != shard.component:
                    raise LayoutError(
                        f"two different components are called {name!r}: {other.component}, {shard.component}"
                    )
                if overlap(other.box, shard.box) is not None or not (volume(other.box) and volume(shard.box)):
                    raise LayoutError(
                        f"{name!r} appears twice, with {shard.component.describe(other.box)} and "
                        f"{shard.component.describe(shard.box)}: a rank's shards of a component must be apart, and one "
                        "that holds nothing stands alone"
                    )
            seen[name].append(shard)

    def _check_addresses(self) -> None:
        owners: dict[tuple[str, int], Shard] = {}
        for shard in self.shards:
            for address in shard.addresses if volume(shard.box) else ():
                owner = owners.setdefault((shard.group, address), shard)
                if owner is not shard:
                    raise LayoutError(
                        f"{shard.component.name!r} and {owner.component.name!r} both start at {address:#x}: shards of "
                        f"group {shard.group!r} share page numbers, so that each needs memory of its own"
                    )

    @property
    def device(self) -> Device:
        """Where the pools live."""
        return self.shards[0].device

    @property
    def groups(self) -> tuple[PageGroup, ...]:
        """The groups, in the order of their first shards."""
        return tuple({shard.group: _group_of(shard) for shard in self.shards}.values())

    @property
    def components(self) -> tuple[Component, ...]:
        """The components, in the order of their first shards."""
        return tuple({shard.component.name: shard.component for shard in self.shards}.values())

    @property
    def digest(self) -> str:
        """A fingerprint of what all ranks of the engine must agree on: components, and how tokens are partitioned.

        Groups and their pages are left out: a pipeline stage may hold only those layers of a component that are in one
        of them. So are components that may be missing: a draft model is on the last stage alone.
        """
        needed = [component for component in self.components if not component.is_optional]
        components = sorted(needed, key=lambda component: component.name)
        description = msgspec.json.encode([components, self.tokens.partition])
        return hashlib.sha256(description).hexdigest()[:16]

    def group(self, name: str) -> PageGroup:
        """Returns the group of that name.

        Raises:
            LayoutError: if there is none.
        """
        for group in self.groups:
            if group.name == name:
                return group
        raise LayoutError(f"no group {name!r}: there are {[group.name for group in self.groups]}")

    def share_of(self, part: PageGroup | Shard) -> TokenShare:
        """Returns which positions a group or a shard holds. State of a whole request has one, which is all of it."""
        group = _group_of(part) if isinstance(part, Shard) else part
        return TokenShare() if group.has_slots or group.has_every_token else self.tokens

    def shards_of(self, component: str) -> tuple[Shard, ...]:
        """Returns the shards of one component."""
        return tuple(shard for shard in self.shards if shard.component.name == component)

    def shard_with(self, component: str, box: Box) -> Shard | None:
        """Returns the shard that holds all of a part of a component; None if none does."""
        return next((shard for shard in self.shards_of(component) if covers(shard.box, box)), None)

    def regions(self) -> tuple[Region, ...]:
        """Returns the memory to register: the shards' regions, merged where they overlap."""
        merged: list[Region] = []
        for region in sorted(region for shard in self.shards for region in shard.regions()):
            if merged and region.address < merged[-1].stop:
                first = merged[-1].address
                merged[-1] = Region(first, max(merged[-1].stop, region.stop) - first)
            else:
                merged.append(region)
        return tuple(merged)


def _describe(group: PageGroup) -> str:
    pages = f"{group.num_pages} slots" if group.has_slots else f"{group.num_pages} pages of {group.page_tokens} tokens"
    pages += " for every token" if group.has_every_token else ""
    return pages if group.window_tokens is None else f"{pages} with a window of {group.window_tokens} tokens"
