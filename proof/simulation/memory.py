"""Pools whose every byte has an owner, and whose contents are known."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvferry.layout import (
    Interval,
    RankCoordinates,
    RankLayout,
    attention_components,
    shard_from_tensors,
    split,
    stage_layers,
)
from proof.simulation.laws import Law, ViolationError, demand

HEADS = 2
HEAD_DIM = 4
KINDS = 2  # keys and values
MOST_TOKENS = 12  # of a request

FRESH, SOURCE_GONE, DESTINATION_GONE, HELD, NOT_COMPUTED = 0x11, 0xEE, 0xDD, 0x77, 0x99
"""What fills pages: at the start, after a prefill and a decode rank gave them back, before something is received, and
before it is computed."""

Contents = NDArray[np.uint8]
"""What a request holds: shape [keys or values, layer, token, head, element of the head]."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One rank's part of a model.

    Attributes:
        layers: of the whole model.
        tp: how many ranks share the heads.
        rank: which one this is.
        stages: layers of every pipeline stage.
        pages: of the pool.
    """

    layers: int
    tp: int
    rank: int
    stages: tuple[int, ...]
    page_tokens: int
    pages: int


class Pool:
    """One rank's memory.

    Attributes:
        layout: as its endpoint knows it.
        owners: by page, whoever it was given to; None for free ones.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.coordinates = RankCoordinates(
            tp_rank=shape.rank % shape.tp,
            tp_size=shape.tp,
            pp_rank=shape.rank // shape.tp,
            pp_size=len(shape.stages),
        )
        self._stage = stage_layers(shape.stages, self.coordinates.pp_rank)
        self._heads = split(HEADS, shape.tp, self.coordinates.tp_rank)
        layers, heads = len(self._stage), len(self._heads)
        self._memory = np.zeros([KINDS, layers, shape.pages, shape.page_tokens, heads, HEAD_DIM], np.uint8)
        self._shadow = self._memory.copy()
        self._address = self._memory.ctypes.data
        self._page_bytes = shape.page_tokens * heads * HEAD_DIM
        self.owners: list[object | None] = [None] * shape.pages
        self._is_free = np.ones(shape.pages, np.bool_)
        self._is_computed = np.ones((layers, shape.pages), np.bool_)
        self.layout = self._make_layout()

    def _make_layout(self) -> RankLayout:
        components = attention_components(
            num_layers=self.shape.layers, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype="uint8"
        )
        shards = []
        for kind, component in enumerate(components):
            held = {"layer": self._stage, "head": self._heads}
            dims = ["page", "token", "head", "dim"]
            shards.append(shard_from_tensors(component, list(self._memory[kind]), dims=dims, held=held))
        return RankLayout(shards=tuple(shards))

    def wipe(self, filler: int) -> None:
        """Frees every page, and fills all of them with one byte."""
        self._memory[...] = filler
        self._shadow[...] = filler
        self.owners = [None] * self.shape.pages
        self._is_free[:] = True
        self._is_computed[:] = True

    def take(self, count: int, owner: object) -> list[int] | None:
        """Pages for somebody; None if there are not so many."""
        free: list[int] = np.flatnonzero(self._is_free)[:count].tolist()
        if len(free) < count:
            return None
        self.check_free("before pages are given to somebody")
        for page in free:
            self.owners[page] = owner
            self._is_free[page] = False
        return free

    def give_back(self, pages: list[int], filler: int) -> None:
        """Takes pages back, and puts something else there at once, as their next owner would."""
        for page in pages:
            self.owners[page] = None
            self._is_free[page] = True
        self._is_computed[:, pages] = True
        self._memory[:, :, pages] = filler
        self._shadow[:, :, pages] = filler

    def spread(self, pages: list[int], filler: int) -> None:
        """Fills pages that somebody has with one byte."""
        self._memory[:, :, pages] = filler

    def owner_at(self, address: int) -> tuple[int, object | None]:
        """The page that an address is in, and whose it is."""
        _, page = self._place_of(address)
        return page, self.owners[page]

    def holds(self, address: int) -> bool:
        """Whether an address is in this pool."""
        return 0 <= address - self._address < self._memory.nbytes

    def is_computed(self, address: int) -> bool:
        """Whether what an address holds is what its request is to hold there."""
        return bool(self._is_computed[self._place_of(address)])

    def _place_of(self, address: int) -> tuple[int, int]:
        """The layer, of this rank's, and the page that an address is in: its keys or its values."""
        position = (address - self._address) // self._page_bytes
        return divmod(position % self._is_computed.size, self.shape.pages)

    def has_computed(self, pages: list[int], layers: Interval) -> bool:
        """Whether layers of pages hold what they are to hold."""
        return bool(self._is_computed[self._mine(layers), pages].all())

    def is_to_compute(self, pages: list[int], layers: Interval) -> None:
        """Says that layers of pages are computed later. Until then they hold something else."""
        mine = self._mine(layers)
        self._is_computed[mine, pages] = False
        self._memory[:, mine, pages] = NOT_COMPUTED

    def fill(self, pages: list[int], contents: Contents, first_token: int, layers: Interval | None = None) -> None:
        """Writes what a request holds into pages, which begin with that token.

        Args:
            layers: of the model; None for all.
        """
        mine = self._mine(layers)
        flat = self._of(pages)
        part = self._part(contents, first_token)[:, :, : flat.shape[2]]
        flat[:, mine, : part.shape[2]] = part[:, mine]
        self._memory[:, :, pages] = flat.reshape(self._memory[:, :, pages].shape)
        self._is_computed[mine, pages] = True

    def check(self, pages: list[int], contents: Contents, first_token: int, held: int, filler: int, who: str) -> None:
        """Compares pages with what they must hold after a success.

        Args:
            first_token: with which they begin.
            held: tokens before this one were not to be touched; they hold the filler.

        Raises:
            ViolationError: if a byte differs.
        """
        part = self._part(contents, first_token)
        found = self._of(pages)[:, :, : part.shape[2]]
        before = held - first_token
        wrong = np.argwhere(found[:, :, before:] != part[:, :, before:])
        if len(wrong):
            kind, layer, token, head, _ = wrong[0].tolist()
            is_early = bool((found[:, :, before:][tuple(wrong.T)] == NOT_COMPUTED).all())
            raise ViolationError(
                Law.READY if is_early else Law.EXACT,
                f"{who}: {len(wrong)} wrong bytes, the first in {'kv'[kind]} of layer {layer + self._stage.start}, "
                f"token {token + held}, head {head + self._heads.start}",
            )
        demand(bool((found[:, :, :before] == filler).all()), Law.EXACT, f"{who}: what it held before was written to")

    def check_free(self, who: str) -> None:
        """Checks that nobody has written to a free page.

        Raises:
            ViolationError: if a byte changed in a page that nobody has.
        """
        if self._memory.tobytes() == self._shadow.tobytes():  # where nobody has a page, this is all
            return
        is_changed = self._memory != self._shadow
        is_changed &= self._is_free[:, None, None, None]
        if not is_changed.any():
            return
        pages = np.flatnonzero(is_changed.any(axis=(0, 1, 3, 4, 5))).tolist()
        raise ViolationError(Law.NO_WRITE_AFTER_RELEASE, f"{who}: pages {pages} changed")

    def _mine(self, layers: Interval | None) -> slice:
        """Where this rank has layers of the model, of its own."""
        if layers is None:
            return slice(None)
        start, count = self._stage.start, len(self._stage)
        return slice(*(min(max(0, edge - start), count) for edge in (layers.start, layers.stop)))

    def _part(self, contents: Contents, first_token: int) -> Contents:
        stage, heads = self._stage, self._heads
        return contents[:, stage.start : stage.stop, first_token:, heads.start : heads.stop]

    def _of(self, pages: list[int]) -> Contents:
        """The tokens of pages, one after the other."""
        kinds, layers, _, page_tokens, heads, dim = self._memory.shape
        found: Contents = self._memory[:, :, pages].reshape(kinds, layers, len(pages) * page_tokens, heads, dim)
        return found


@dataclass(slots=True, eq=False)
class Arena:
    """Pools to be used by one schedule after the other: to lay them out takes longer than to run a schedule."""

    _idle: dict[Shape, list[Pool]] = field(default_factory=dict)

    def take(self, shape: Shape) -> Pool:
        """A pool of that shape that nobody uses. Its contents are undefined."""
        idle = self._idle.get(shape)
        return idle.pop() if idle else Pool(shape)

    def give_back(self, pool: Pool) -> None:
        """Takes back a pool that a schedule needs no longer."""
        pool.owners.clear()  # they would keep the schedule's whole world
        self._idle.setdefault(pool.shape, []).append(pool)
