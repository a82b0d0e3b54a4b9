"""The ranks' pools: small pages, so that much happens to few bytes, and contents that tell engines and places apart."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import kvferry as kf

ROOM_PAGES = 8
SOURCE_PAGES = 512
_SHAPE = (4, 2, 32)
_LAYERS = 2
POISON = np.float32(-1234.5)
"""In every element of a room's pages on the decode side, before the room is opened and after it was given up."""


def pool(pages: int) -> tuple[list[NDArray[np.float32]], kf.RankLayout]:
    """One rank's memory, which must outlive the endpoint, and its layout. A page has 4 KiB over all tensors."""
    tokens, heads, dim = _SHAPE
    components = kf.attention_components(num_layers=_LAYERS, num_kv_heads=heads, head_dim=dim, dtype="float32")
    memory: list[NDArray[np.float32]] = []
    shards = []
    for component in components:
        tensors = [np.full((pages, tokens, heads, dim), POISON, np.float32) for _ in range(_LAYERS)]
        memory += tensors
        shards.append(kf.shard_from_tensors(component, tensors, dims=("page", "token", "head", "dim")))
    return memory, kf.RankLayout(shards=tuple(shards))


def contents(engine: int, region: int) -> NDArray[np.float32]:
    """What a prefill engine has in one region."""
    return np.random.default_rng((engine, region)).standard_normal((SOURCE_PAGES, *_SHAPE)).astype(np.float32)


def source_pages(room: int) -> NDArray[np.int64]:
    """Which pages a room is read from. Rooms share them."""
    return np.random.default_rng(room).permutation(SOURCE_PAGES)[:ROOM_PAGES]


def target_pages(slot: int) -> NDArray[np.int64]:
    """Which pages a room in that slot is written to: nobody else has them."""
    return np.arange(slot * ROOM_PAGES, (slot + 1) * ROOM_PAGES, dtype=np.int64)[::-1]
