"""Engines whose caches a plug-in has described, with what truly lies in every rank's memory.

A plug-in's `describe` turns what an engine says into layouts. Whether the layouts are true is another question: here
each rank has memory in which every element is labelled with what the engine keeps there, so that a receiver's bytes can
be compared with what its engine would have computed itself. Any plug-in's caches can be put into `DescribedRank`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvferry.layout import RankLayout, Shard
from kvferry.layout.interval import Box
from kvferry.plan import check_exchangeable
from kvferry.plan.pieces import SourceGroup, elect_writer
from kvferry.plan.proof import prove

Ranks: TypeAlias = "Mapping[int, DescribedRank]"
"""The ranks of one engine, by group rank."""


@dataclass(frozen=True, slots=True, eq=False)
class DescribedRank:
    """A rank, and the memory that its layout describes.

    Attributes:
        layout: as the plug-in has described it.
        memory: all of the rank's memory, in bytes. The layout's addresses lie in it.
        pages: by group, the number of the first page that is looked at; none counts as 0.
    """

    layout: RankLayout
    memory: NDArray[np.uint8]
    pages: Mapping[str, int] = field(default_factory=dict)

    def bytes_of(self, shard: Shard, box: Box, page: int) -> NDArray[np.uint8]:
        """Returns what lies in a part of a shard on one page, token by token, in logical order."""
        axes = [shard.paging.token_stride * np.arange(shard.entries_per_page)]
        for stride, held, part in zip(shard.strides, shard.box[1:], box[1:], strict=True):
            axes.append(stride * np.arange(part.start - held.start, part.stop - held.start))
        offsets = np.zeros((), dtype=np.int64)
        for axis in (*axes, np.arange(shard.component.element_bytes)):
            offsets = offsets[..., None] + axis
        offsets = offsets + (self.pages.get(shard.group, 0) + page) * shard.paging.page_stride
        first = box[0].start - shard.box[0].start
        addresses = np.array(shard.addresses[first : first + len(box[0])], dtype=np.int64)
        places = addresses.reshape(-1, *[1] * offsets.ndim) + offsets - self.memory.ctypes.data
        assert places.size == 0 or (places.min() >= 0 and places.max() < self.memory.size), "outside of the memory"
        found: NDArray[np.uint8] = self.memory[places]
        return found


def wrong_bytes(sources: Ranks, receivers: Ranks, rooms: Iterable[int], pages: Iterable[int] = (0,)) -> Iterator[str]:
    """Yields a sentence for every part that some receiver gets wrong in one of the rooms.

    A receiver's own memory holds what its engine would have computed itself: the part must be the same where its writer
    is. Where both sides have pages of another size, as much of a page is compared as the smaller one has.

    Raises:
        IncompatiblePeerError: if the two sides refuse each other, which is no wrong byte.
    """
    chosen, seen = list(rooms), list(pages)
    layouts = {rank: each.layout for rank, each in sources.items()}
    for there in receivers.values():
        for here in sources.values():
            check_exchangeable(here.layout, there.layout, source_name="prefill", destination_name="decode")
    prove(layouts, {rank: each.layout for rank, each in receivers.items()}, room=chosen[0])
    group = SourceGroup(layouts)
    for rank, receiver in receivers.items():
        for piece in group.pieces_for(receiver.layout):
            mine = receiver.layout.shard_with(piece.component, piece.box)
            assert mine is not None
            rooms_of: dict[int, list[int]] = {}
            for room in chosen:
                rooms_of.setdefault(elect_writer(piece, room=room, receiver=rank), []).append(room)
            for writer, written in rooms_of.items():
                theirs = sources[writer].layout.shard_with(piece.component, piece.box)
                assert theirs is not None
                for page in seen:
                    found = sources[writer].bytes_of(theirs, piece.box, page)
                    expected = receiver.bytes_of(mine, piece.box, page)
                    common = min(found.shape[1], expected.shape[1])
                    if not np.array_equal(found[:, :common], expected[:, :common]):
                        yield (
                            f"rank {rank} gets {piece.component!r} {mine.component.describe(piece.box)} from rank "
                            f"{writer} in {len(written)} of {len(chosen)} rooms, which holds something else there"
                        )
