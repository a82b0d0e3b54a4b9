"""Copies of blocks within a worker's own caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.engines.vllm.caches import CacheGroup
from kvferry.engines.vllm.steps import GroupBlocks


@dataclass(frozen=True, slots=True)
class _Cache:
    """One layer's cache.

    Attributes:
        pages: its tensor, pages first. Of types that devices cannot copy by index, the bytes.
        pages_per_block: into how many of them a kernel divides a block of the block table.
    """

    pages: Any
    pages_per_block: int

    def copy(self, blocks: GroupBlocks, copies: GroupBlocks) -> None:
        source, target = (on_device(each.pages(self.pages_per_block), self.pages.device) for each in (blocks, copies))
        self.pages.index_copy_(0, target, self.pages.index_select(0, source))


class BlockCopier:
    """Copies blocks of all layers of a group, in the order in which the device does everything else."""

    def __init__(self, caches: Mapping[str, Any], groups: Sequence[CacheGroup], num_blocks: int) -> None:
        """Takes the caches.

        Args:
            caches: by layer name, views whose first dimension is the page.
            groups: the layers that share a block table.
            num_blocks: in every block table.
        """
        self._groups = {
            group.name: [_cache(caches[name], num_blocks) for name in group.layer_names] for group in groups
        }

    def copy(self, group: str, blocks: GroupBlocks, copies: GroupBlocks) -> None:
        """Copies blocks. Does not wait for the device.

        Args:
            group: whose.
            blocks: that are copied.
            copies: where they go, in the same order.
        """
        if len(blocks.blocks):
            for cache in self._groups[group]:
                cache.copy(blocks, copies)


def on_device(numbers: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Returns numbers as a tensor of a device, without waiting for what is queued there."""
    found = torch.from_numpy(numbers)
    return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)


def _cache(cache: Any, num_blocks: int) -> _Cache:
    pages = cache.view(torch.uint8) if cache.element_size() == 1 else cache
    return _Cache(pages, cache.shape[0] // num_blocks)
