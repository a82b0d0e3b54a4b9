"""One rank's cache memory: an engine's own, or made here, with every byte of it in reach.

A pool is a layout and the memory behind it. In whatever order the dimensions of an engine's tensors lie, here they are
arrays [page, entry in page, index on every further axis], and a request's cache is written, copied and checked by what
its elements are.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.layout import (
    Entry,
    MemoryKind,
    RankCoordinates,
    RankLayout,
    Shard,
    ShardedComponent,
    VirtualPools,
    virtual_layout,
)
from kvferry.plan.requests.page_numbers import AnyPages
from kvferry.pools.contents import Contents, CopiedContents, Elements, element_type
from kvferry.pools.places import Pages, TakenPages, by_group, left_open, needed_pages, page_numbers, places

POISON = 0xA5
"""Fills every byte of a pool before anything is written to it."""

ALIGNMENT = 4096
"""Of the memory that is allocated here, in bytes."""

_MOST_SAID = 8


def aligned_bytes(num_bytes: int) -> NDArray[np.uint8]:
    """Main memory that begins at an aligned address, with nothing particular in it."""
    whole = np.empty(num_bytes + ALIGNMENT, np.uint8)
    skipped = -whole.ctypes.data % ALIGNMENT
    return whole[skipped : skipped + num_bytes]


def bytes_of(layout: RankLayout) -> int:
    """Bytes from the first to the last that a layout has memory for, up to a whole number of alignments."""
    regions = layout.regions()
    num_bytes = regions[-1].stop - regions[0].address if regions else 0
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def placed(layout: RankLayout, address: int) -> RankLayout:
    """The same layout in other memory, whose first byte is at an address."""
    offset = address - min((region.address for region in layout.regions()), default=address)
    shards = tuple(
        msgspec.structs.replace(shard, addresses=tuple(each + offset for each in shard.addresses))
        for shard in layout.shards
    )
    return msgspec.structs.replace(layout, shards=shards)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Memory from an address on.

    Attributes:
        host: its bytes as this process sees them: themselves, or a copy where they are on a device.
    """

    address: int
    host: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class WrongBytes:
    """Bytes of one page that are not as they should be.

    Attributes:
        what: the component, and which of its layers; for bytes between two tensors, that.
        page: the page's number in the pool, or the slot's.
        num_bytes: how many are wrong.
        first: where in the page the first of them lies, in words.
        was_awaited: whether something else was to arrive there; if not, nobody was to write there.
    """

    what: str
    page: int
    num_bytes: int
    first: str
    was_awaited: bool

    def __str__(self) -> str:
        problem = "not what was to arrive" if self.was_awaited else "changed, though nobody was to write there"
        number = f"{self.num_bytes} byte{'s' if self.num_bytes != 1 else ''}"
        return f"{self.what}, page {self.page}: {number} {problem}, the first at {self.first}"


class Pool:
    """One rank's cache memory.

    Attributes:
        layout: what it holds and where.
        coordinates: the rank's place in its engine.
        blocks: the memory.
    """

    def __init__(
        self,
        layout: RankLayout,
        coordinates: RankCoordinates | None = None,
        *,
        memory: object = None,
        blocks: Sequence[Block] | None = None,
        seed: int | str | None = 0,
    ) -> None:
        """Looks at memory that somebody else has allocated, and leaves it as it is; `allocate` makes memory.

        Args:
            layout: of memory on the CPU, unless `blocks` say what a device holds.
            coordinates: the only rank by default.
            memory: whatever owns the memory, such as an engine's tensors: it lives as long as the pool.
            blocks: where the memory is seen; None looks where the layout says that it is.
            seed: of the order in which `take` gives pages; None gives them in their own.
        """
        self.layout = layout
        self.coordinates = coordinates or RankCoordinates()
        self.blocks = tuple(_blocks(layout) if blocks is None else blocks)
        self._memory = memory
        self._before: int | tuple[NDArray[np.uint8], ...] | None = None  # the byte that filled it, or all of them
        self._seed = seed
        self._taken: dict[str, int] = {}

    @classmethod
    def allocate(
        cls,
        components: Sequence[ShardedComponent],
        pools: VirtualPools,
        coordinates: RankCoordinates | None = None,
        *,
        seed: int | str | None = 0,
    ) -> Pool:
        """Makes the pool of one rank of an engine, in main memory, every byte of it poisoned.

        Args:
            components: what the engine caches, and how ranks divide it.
            pools: pages, and how they lie.
            coordinates: the only rank by default.
            seed: of the order in which `take` gives pages; None gives them in their own.
        """
        coordinates = coordinates or RankCoordinates()
        return cls.backed(virtual_layout(components, coordinates, pools), coordinates, seed=seed)

    @classmethod
    def backed(
        cls, layout: RankLayout, coordinates: RankCoordinates | None = None, *, seed: int | str | None = 0
    ) -> Pool:
        """Makes a pool of any layout, such as one that nobody has allocated: the same, but in memory of its own."""
        host = aligned_bytes(bytes_of(layout))
        address = host.ctypes.data
        made = cls(placed(layout, address), coordinates, blocks=[Block(address, host)], seed=seed)
        made.wipe()
        return made

    # ---- memory --------------------------------------------------------------------------------------------------

    def elements(self, shard: Shard, index: int) -> Elements:
        """One layer of a shard, to read and to write: an array [page, entry in page, index on every further axis].

        A page has an entry for every token; a packed page, and the slot of a request, has one.

        Args:
            index: which of the shard's layers, counted from its first.
        """
        return _elements(self.blocks, shard, index)

    def wipe(self, value: int = POISON) -> None:
        """Overwrites every byte. `check` finds what is written from now on."""
        for block in self.blocks:
            block.host.fill(value)
        self._before = value

    def mark(self) -> None:
        """Remembers every byte as it is. `check` finds what is written from now on."""
        self._before = tuple(block.host.copy() for block in self.blocks)

    def wipe_pages(self, pages: AnyPages, value: int = POISON) -> None:
        """Overwrites some pages, as somebody else does who gets them next.

        Args:
            pages: by group, or of every group.
        """
        for shard, array, numbers in self._pages(pages):
            array[numbers] = np.full(shard.component.element_bytes, value, np.uint8).view(array.dtype)[0]

    def touched_bytes(self, pages: AnyPages, value: int = POISON) -> int:
        """How many bytes of some pages are not as a wipe left them.

        Args:
            pages: by group, or of every group.
        """
        return sum(
            int(np.count_nonzero(np.ascontiguousarray(array[numbers]).view(np.uint8) != value))
            for _, array, numbers in self._pages(pages)
        )

    def _pages(self, pages: AnyPages) -> Iterator[tuple[Shard, Elements, Pages]]:
        numbers = by_group(self.layout, pages)
        for shard in self.layout.shards:
            for index in range(len(shard.addresses)):
                yield shard, self.elements(shard, index), page_numbers(numbers[shard.group])

    @property
    def bytes_per_page(self) -> int:
        """Bytes that one page number stands for, over all shards."""
        return sum(shard.bytes_per_page for shard in self.layout.shards)

    # ---- pages ---------------------------------------------------------------------------------------------------

    @cached_property
    def _orders(self) -> dict[str, tuple[Pages, str]]:
        """For every group, its pages in random order, and the first group that has its memory, often itself."""
        owner_at: dict[int, str] = {}
        owner_of: dict[str, str] = {}
        for shard in self.layout.shards:
            for address in shard.addresses:
                owner_of.setdefault(shard.group, owner_at.setdefault(address, shard.group))
        orders = {}
        for group in self.layout.groups:
            owner = owner_of.get(group.name, group.name)
            numbers = list(range(group.num_pages))
            if self._seed is not None:
                random.Random(f"{self._seed} {owner}").shuffle(numbers)  # noqa: S311 - an order, not a secret
            orders[group.name] = np.array(numbers, np.int64), owner
        return orders

    def take(self, group: str, count: int) -> Pages:
        """Page numbers that nobody else was given, in random order; the oldest again once none is left."""
        order, owner = self._orders[group]
        first = self._taken.get(owner, 0)
        self._taken[owner] = first + count
        return order[np.arange(first, first + count) % len(order)]

    def untaken(self) -> dict[str, Pages]:
        """By group, the pages that nobody was given: nobody may write there."""
        return {group: order[self._taken.get(owner, 0) :] for group, (order, owner) in self._orders.items()}

    def pages_for(self, tokens: int, *, prefix_tokens: int = 0, whole_windows: bool = False) -> dict[str, TakenPages]:
        """Takes the pages that a request needs, of every group, as `open` and `submit` want them.

        Args:
            tokens: how many the request has.
            prefix_tokens: of those, how many this rank has already, in pages that are not counted here.
            whole_windows: whether groups with a window get pages for all tokens, not only for those in the window.
        """
        made = {}
        for group in self.layout.groups:
            if group.has_slots:
                made[group.name] = TakenPages(self.take(group.name, 1))
                continue
            needed = needed_pages(self.layout, group, tokens, prefix_tokens=prefix_tokens, whole_window=whole_windows)
            made[group.name] = TakenPages(self.take(group.name, len(needed)), needed.start)
        return made

    # ---- contents ------------------------------------------------------------------------------------------------

    def fill(self, contents: Contents, pages: AnyPages, *, tokens: int | None = None) -> None:
        """Writes a request's cache into its pages, as a prefill rank's model does.

        Args:
            pages: as for `DecodeEndpoint.open`; they begin with the request's first unless they say otherwise.
            tokens: how many the request has; None fills the pages.
        """
        for shard, index, where, positions in places(self.layout, pages, tokens, None):
            self.elements(shard, index)[where] = contents.of(shard, shard.box[0].start + index, positions)

    def check(
        self,
        contents: Contents,
        pages: AnyPages,
        *,
        tokens: int | None = None,
        prefix_tokens: int = 0,
        absent: Sequence[str] = (),
        elsewhere: bool = True,
    ) -> None:
        """Checks that a request has arrived, and that nothing else was written.

        Every byte that was to arrive must be what the contents say, every other byte as it was at the last `wipe` or
        `mark`. In the request's own pages, and there only, it is left open what lies behind its last token, and what
        lies before a window's first one, as far as the rank did not hold it.

        Args:
            contents: what the request holds.
            pages: what was given to `DecodeEndpoint.open`, and so are tokens and prefix_tokens.
            absent: components that the other side lacks.
            elsewhere: whether to look at bytes, too, that were not to arrive; not if other transfers write there.

        Raises:
            AssertionError: if a byte is wrong, with where and how.
        """
        wrong = self.wrong_bytes(
            contents, pages, tokens=tokens, prefix_tokens=prefix_tokens, absent=absent, elsewhere=elsewhere
        )
        if wrong:
            said = [f"  {each}" for each in wrong[:_MOST_SAID]]
            said += [f"  and in {len(wrong) - _MOST_SAID} more places"] if len(wrong) > _MOST_SAID else []
            total = sum(each.num_bytes for each in wrong)
            raise AssertionError("\n".join([f"wrong bytes on rank {self.coordinates.engine_rank}: {total}", *said]))

    def wrong_bytes(
        self,
        contents: Contents,
        pages: AnyPages,
        *,
        tokens: int | None = None,
        prefix_tokens: int = 0,
        absent: Sequence[str] = (),
        elsewhere: bool = True,
    ) -> tuple[WrongBytes, ...]:
        """What `check` finds, page by page."""
        awaited_places = list(places(self.layout, pages, tokens, prefix_tokens, absent))
        if not elsewhere and all(  # usually: what follows takes memory for the whole pool to say what is wrong
            np.array_equal(
                self.elements(shard, index)[where], contents.of(shard, shard.box[0].start + index, positions)
            )
            for shard, index, where, positions in awaited_places
        ):
            return ()
        right = self._at_first() if elsewhere else self._filled(0)
        is_awaited, is_open = self._filled(0), self._filled(0)
        for shard, index, where, positions in awaited_places:
            _elements(right, shard, index)[where] = contents.of(shard, shard.box[0].start + index, positions)
            _elements(is_awaited, shard, index)[where] = np.iinfo(element_type(shard.component)).max
        for shard, index, where in left_open(self.layout, pages, tokens, prefix_tokens, absent):
            _elements(is_open, shard, index)[where] = np.iinfo(element_type(shard.component)).max
        is_wrong = []
        for found, expected, awaited, left in zip(self.blocks, right, is_awaited, is_open, strict=True):
            differs = found.host != expected.host
            differs &= (left.host == 0) if elsewhere else (awaited.host != 0)
            is_wrong.append(Block(found.address, differs.view(np.uint8)))
        return tuple(self._described(is_wrong, is_awaited))

    def _described(self, is_wrong: Sequence[Block], is_awaited: Sequence[Block]) -> Iterator[WrongBytes]:
        """The bytes that are wrong, page by page; none twice, though groups may share memory."""
        if not any(block.host.any() for block in is_wrong):
            return
        for shard in self.layout.shards:
            first, *axes = shard.component.axes
            for index in range(len(shard.addresses)):
                wrong, awaited = (_elements(blocks, shard, index) for blocks in (is_wrong, is_awaited))
                for was_awaited in (True, False):
                    chosen = np.where((awaited != 0) == was_awaited, wrong, 0)
                    for page in np.unique(np.nonzero(chosen)[0]).tolist():
                        entry, *place = np.argwhere(chosen[page])[0].tolist()
                        words = [f"token {entry}"] if shard.component.entry is Entry.TOKEN else []
                        words += [
                            f"{axis.name} {part.start + inner}"
                            for axis, part, inner in zip(axes, shard.box[1:], place, strict=True)
                        ]
                        yield WrongBytes(
                            what=f"{shard.component.name} of {first.name} {shard.box[0].start + index}",
                            page=page,
                            num_bytes=int(np.count_nonzero(np.ascontiguousarray(chosen[page]).view(np.uint8))),
                            first=" ".join(words),
                            was_awaited=was_awaited,
                        )
                wrong[...] = 0
        for block in is_wrong:
            if between := int(np.count_nonzero(block.host)):
                first_byte = f"address {block.address + int(np.flatnonzero(block.host)[0]):#x}"
                yield WrongBytes("memory between two tensors", 0, between, first_byte, was_awaited=False)

    def _filled(self, value: int) -> list[Block]:
        made = np.zeros if value == 0 else partial(np.full, fill_value=value)  # zeros take memory only once written
        return [Block(block.address, made(block.host.shape, dtype=np.uint8)) for block in self.blocks]

    def _at_first(self) -> list[Block]:
        """The memory as it was."""
        if self._before is None:
            raise ValueError("nobody knows what was in the pool before: call wipe() or mark() before the transfer")
        if isinstance(self._before, int):
            return self._filled(self._before)
        return [Block(block.address, host.copy()) for block, host in zip(self.blocks, self._before, strict=True)]


def copied_contents(
    sources: Iterable[tuple[Pool, AnyPages]], *, tokens: int, absent: Sequence[str] = ()
) -> CopiedContents:
    """What prefill ranks hold of a request, to check decode ranks against.

    Args:
        sources: the ranks of one data-parallel group, and the pages that they have submitted.
        tokens: how many the request has.
        absent: components that are not looked at.

    Raises:
        ValueError: if ranks that hold the same part of a cache differ in it.
    """
    contents = CopiedContents(tokens)
    for pool, pages in sources:
        for shard, index, where, positions in places(pool.layout, pages, tokens, None, absent):
            contents.add(shard, shard.box[0].start + index, positions, pool.elements(shard, index)[where])
    return contents


def _blocks(layout: RankLayout) -> Iterator[Block]:
    """The memory that a layout is of, as this process has it."""
    if layout.device.kind is not MemoryKind.DRAM:
        raise ValueError(f"a pool on {layout.device} is not seen by this process: give a copy of it as blocks")
    for region in layout.regions():
        seen = (ctypes.c_uint8 * region.length).from_address(region.address)
        yield Block(region.address, np.ctypeslib.as_array(seen))


def _elements(blocks: Sequence[Block], shard: Shard, index: int) -> Elements:
    """One layer of a shard in some memory: an array [page, entry, ...]."""
    paging, element = shard.paging, element_type(shard.component)
    for block in blocks:
        start = shard.addresses[index] - block.address
        if 0 <= start < len(block.host):
            return np.lib.stride_tricks.as_strided(
                block.host[start : start + element.itemsize].view(element),
                (paging.num_pages, shard.entries_per_page, *(len(part) for part in shard.box[1:])),
                (paging.page_stride, paging.token_stride, *shard.strides),
            )
    raise ValueError(f"layer {index} of the shard of {shard.component.name!r} lies in none of the pool's blocks")
