"""Blocks of a worker's own caches: copied, and cleared where a load has not written.

Where a cache may find bytes of another kind in a block (recurrent state beside attention, several precisions), vLLM
clears blocks as it gives them out: kernels read pages to their end and multiply what lies behind the last token by 0,
of which NaN stays NaN. It leaves out what a connector loads, since that may be written at the same time.

So the rest of such blocks is cleared here: once all has arrived, when nobody writes to them any more, and before the
load is reported, in the order in which the device does everything else. No byte of a token that was loaded or was here
before is touched. Pages whose inner order only the kernel knows come whole: behind the last token they have what the
prefill side has there, which vLLM has cleared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry import Interval
from kvferry.engines.vllm.caches import CacheGroup
from kvferry.engines.vllm.layouts import DescribedCaches, LayerPages
from kvferry.engines.vllm.steps import BlocksToReceive, GroupBlocks


class LoadedBlocks:
    """Clears what a load has left in the blocks of all layers of a group. Does not wait for the device."""

    def __init__(self, described: DescribedCaches, groups: Sequence[CacheGroup]) -> None:
        """Takes the caches.

        Args:
            described: with the layers' pages, as tensors.
            groups: the layers that share a block table.
        """
        self._described = described
        self._groups = {group.name: group for group in groups}

    def clear(self, loaded: BlocksToReceive, absent: Collection[str]) -> None:
        """Clears what has not been written.

        Args:
            loaded: what was asked for, all of which has arrived.
            absent: components of which nothing came, since the prefill engine has none.
        """
        for name, blocks in loaded.groups.items():
            layers = self._described.pages.get(name, ())
            if layers and len(blocks.blocks):
                self._clear(layers, name, blocks, loaded, absent)

    def _clear(
        self,
        layers: Sequence[LayerPages],
        name: str,
        blocks: GroupBlocks,
        loaded: BlocksToReceive,
        absent: Collection[str],
    ) -> None:
        ratio, page_tokens = self._described.pages_per_block[name], layers[0].page_tokens
        pages, before = blocks.pages(ratio), blocks.start * ratio * page_tokens
        prefix = loaded.prefix_tokens if blocks.held_tokens is None else blocks.held_tokens
        needed = max(prefix, self._groups[name].first_attended(loaded.tokens))
        held, start, stop = (self._described.kept(name, tokens) for tokens in (prefix, needed, loaded.tokens))
        begin, end = max(before, held), before + len(pages) * page_tokens
        written = Interval(start, max(start, stop))  # of the positions of tokens among those of this rank
        for layer in layers:
            for first, last in _unwritten(begin, end, None if layer.component in absent else written):
                _clear(layer, pages, first - before, last - before)


def _unwritten(begin: int, end: int, written: Interval | None) -> Iterator[tuple[int, int]]:
    """Yields what nobody has written from one position to another."""
    rest = [(begin, written.start), (max(begin, written.stop), end)] if written else [(begin, end)]
    yield from (each for each in rest if each[0] < each[1])


def copy_blocks(described: DescribedCaches, group: str, blocks: GroupBlocks, copies: GroupBlocks) -> None:
    """Copies blocks of all layers of a group. Does not wait for the device.

    Args:
        copies: where they go, in the same order.
    """
    if not len(blocks.blocks):
        return
    ratio = described.pages_per_block[group]
    for layer in described.pages.get(group, ()):
        cache = _indexed(layer)
        source, target = (_on_device(each.pages(ratio), cache.device) for each in (blocks, copies))
        cache.index_copy_(0, target, cache.index_select(0, source))


def _indexed(layer: LayerPages) -> torch.Tensor:
    """Returns a layer's pages; of types that devices cannot address by index, the bytes."""
    pages: torch.Tensor = layer.pages
    return pages.view(torch.uint8) if pages.element_size() == 1 else pages


def _on_device(numbers: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Returns numbers as a tensor of a device, without waiting for what is queued there."""
    found = torch.from_numpy(numbers)
    return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)


def _clear(layer: LayerPages, pages: NDArray[np.int64], start: int, stop: int) -> None:
    """Clears a layer's tokens in pages that follow each other, from one position to another."""
    cache, size = _indexed(layer), layer.page_tokens
    first, last = -(-start // size), stop // size  # the pages that are cleared whole
    if first < last:
        cache.index_fill_(0, _on_device(pages[first:last], cache.device), 0)
    ends = {start // size: (start % size, size)} if start % size else {}
    if stop % size:
        ends[last] = (ends.get(last, (0, 0))[0], stop % size)
    for page, (low, high) in ends.items():
        for part in _of_tokens(layer, low, high):
            cache[int(pages[page]), :, part].zero_()


def _of_tokens(layer: LayerPages, low: int, high: int) -> Iterator[slice]:
    """Yields where in a page of a layer some of its tokens are: nowhere where only the kernel knows."""
    if not layer.is_packed:
        entries = layer.pages.shape[2] // layer.page_tokens
        yield slice(low * entries, high * entries)
    for before, width in zip(accumulate(layer.token_parts, initial=0), layer.token_parts, strict=False):
        begin = before * layer.page_tokens
        yield slice(begin + low * width, begin + high * width)
