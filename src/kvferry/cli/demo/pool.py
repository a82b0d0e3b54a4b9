"""One rank's paged pool: a shard of every component, pages handed out in random order, poisoned before use."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.cli.demo.options import EngineShape
from kvferry.layout import Component, Interval, RankCoordinates, RankLayout, Shard, empty_shard, shard_from_tensors

PREFILL_POISON = 0x5A
DECODE_POISON = 0xA5


class RankPool:
    """The cache memory of one rank.

    Attributes:
        layout: what it holds and where.
    """

    def __init__(
        self,
        components: tuple[Component, ...],
        shape: EngineShape,
        coordinates: RankCoordinates,
        *,
        pages: int,
        page_tokens: int,
        poison: int,
        seed: str,
    ) -> None:
        """Args:
        poison: the byte that fills the pool.
        seed: of the page order.
        """
        self._page_tokens = page_tokens
        self._poison = poison
        self._tensors: dict[str, list[torch.Tensor]] = {}
        self._held: dict[str, dict[str, Interval]] = {}
        self._free = list(range(pages))
        random.Random(seed).shuffle(self._free)  # noqa: S311 - an order, not a secret
        shards = []
        for component in components:
            held = shape.held(component, coordinates)
            self._held[component.name] = held
            sizes = [len(held.get(axis.name, Interval(0, axis.size))) for axis in component.axes[1:]]
            tensors = [
                torch.empty((pages, page_tokens, *sizes), dtype=getattr(torch, component.dtype))
                for _ in range(len(held["layer"]))
            ]
            for tensor in tensors:
                tensor.view(torch.uint8).fill_(poison)
            self._tensors[component.name] = tensors
            shards.append(self._shard(component, tensors, held, pages))
        self.layout = RankLayout(shards=tuple(shards))

    def _shard(self, component: Component, tensors: list[torch.Tensor], held: dict[str, Interval], pages: int) -> Shard:
        if not tensors:
            return empty_shard(component, page_tokens=self._page_tokens, num_pages=pages)
        dims = ["page", "token", *(axis.name for axis in component.axes[1:])]
        return shard_from_tensors(component, tensors, dims=dims, held=held)

    def allocate(self, count: int) -> NDArray[np.int64]:
        """Takes pages out of the pool, in random order."""
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count, "the pool was sized for every request"
        return np.array(taken, np.int64)

    def write(self, pages: NDArray[np.int64], caches: Mapping[str, torch.Tensor]) -> None:
        """Writes this rank's part of freshly computed caches into pages.

        Args:
            caches: for every component, the whole model's [layer, token, ...] over the tokens of these pages.
        """
        where = torch.from_numpy(pages)
        for name, tensors in self._tensors.items():
            held = self._held[name]
            part = caches[name][held["layer"].start : held["layer"].stop]
            if "head" in held:
                part = part[:, :, held["head"].start : held["head"].stop]
            full_pages, rest = divmod(part.shape[1], self._page_tokens)
            for tensor, layer in zip(tensors, part, strict=True):
                in_pages = layer[: full_pages * self._page_tokens].unflatten(0, (full_pages, self._page_tokens))
                tensor[where[:full_pages]] = in_pages
                if rest:
                    tensor[where[full_pages], :rest] = layer[full_pages * self._page_tokens :]

    def read(self, pages: NDArray[np.int64]) -> dict[str, NDArray[np.uint8]]:
        """The raw bytes of whole pages in the order given: for every component [layer, token, ..., bytes]."""
        where = torch.from_numpy(pages)
        read = {}
        for name, tensors in self._tensors.items():
            layers = [tensor[where].flatten(0, 1).view(torch.uint8).numpy() for tensor in tensors]
            read[name] = np.stack(layers) if layers else np.empty((0,), np.uint8)
        return read

    def damaged_bytes(self) -> int:
        """Bytes outside of allocated pages that are not poison any more: nobody may have written there."""
        where = torch.tensor(self._free, dtype=torch.int64)
        return sum(
            int((tensor[where].view(torch.uint8) != self._poison).sum())
            for tensors in self._tensors.values()
            for tensor in tensors
        )
