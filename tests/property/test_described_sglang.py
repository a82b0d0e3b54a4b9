"""As `test_described_engines`, for SGLang: over all that it may say of its caches, nobody gets another rank's bytes."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tests.support.described import DescribedRank, wrong_bytes
from tests.support.sglang_pools import Lists, StateType, heads_pool, mamba_pool, model_config, named

from kvferry import Device, RankCoordinates
from kvferry.engines.sglang import pools, recurrent
from kvferry.engines.sglang.caches import Block
from kvferry.engines.sglang.layouts import describe
from kvferry.errors import IncompatiblePeerError

ROOMS = range(64)
SIZES = (1, 2, 4, 8)
PAGES, PAGE_TOKENS, CONTENT = 2, 2, 3
X_HEADS, X_WIDTH, STATE_SIZE, TAPS = 8, 2, 3, 2


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution's channels.

    Attributes:
        kind: "mixer" of Mamba 2, with x, B and C; "named", blocks that SGLang names; "unknown", those that nobody does.
        groups: of B and C.
    """

    kind: str
    groups: int = 1

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """The units of each block, and the channels of a unit."""
        if self.kind == "mixer":
            return [(X_HEADS, X_WIDTH), (self.groups, STATE_SIZE), (self.groups, STATE_SIZE)]
        return [(8, 1), (8, 1), (8, 2)]


@dataclass(frozen=True, slots=True)
class Model:
    """A made-up model.

    Attributes:
        full, windows: KV heads of layers with full attention, and of those with windows; None if it has no such layers.
        told_by: who says them: "projections", "configuration", or nobody.
        one_pool: whether layers with windows are in the pool of the others.
        convolution: of its recurrent state; None if it has none.
    """

    full: int
    windows: int | None = None
    told_by: str = "configuration"
    one_pool: bool = False
    convolution: Convolution | None = None


def held(units: int, rank: int, size: int) -> list[int]:
    """Those of so many heads, or groups, that a rank truly has."""
    each = max(1, units // size)
    start = rank * each if units >= size else rank // (size // units)
    return list(range(start, start + each))


@st.composite
def models(draw: st.DrawFn) -> Model:
    full, windows = draw(st.sampled_from(SIZES)), draw(st.sampled_from([None, *SIZES]))
    told_by = draw(st.sampled_from(["projections", "configuration", "nobody"]))
    if windows is None and draw(st.booleans()):
        kind = draw(st.sampled_from(["mixer", "named", "unknown"]))
        return Model(full, None, told_by, convolution=Convolution(kind, draw(st.sampled_from([1, 8]))))
    return Model(full, windows, told_by, one_pool=windows is not None and draw(st.booleans()))


class Memory:
    """A rank's memory, in which every element says what the engine keeps there."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._all = np.zeros(1 << 16, np.int32)
        self._used = 0

    def add(self, labels: np.ndarray) -> tuple[int, int]:
        """Puts an array there; returns its address and its length in bytes."""
        part = self._all[self._used : self._used + labels.size]
        part[:] = labels.reshape(-1)
        self._used += labels.size
        return part.ctypes.data, part.nbytes

    @property
    def whole(self) -> np.ndarray:
        return self._all.view(np.uint8)


_MOST = 64
"""Places on an axis."""


def labels(kind: int, *axes: list[int]) -> np.ndarray:
    """Elements that say their kind and their place on every axis, each as no other does."""
    found = np.full((), kind, np.int64)
    for axis in axes:
        assert max(axis) < _MOST
        found = found[..., None] * _MOST + np.array(axis)
    assert found.max() < 2**31
    return found.astype(np.int32)


def described_rank(model: Model, rank: int, size: int) -> DescribedRank:
    """Describes one rank as the plug-in does."""
    memory, lists = Memory(), Lists(page_tokens=PAGE_TOKENS, pages=PAGES)
    args = lists.args
    pages, tokens, content = list(range(PAGES)), list(range(PAGE_TOKENS)), list(range(CONTENT))
    attention = {0: model.full} if model.windows is None else {0: model.full, 1: model.windows}

    def keys_and_values(layers: list[int]) -> list[list[int]]:
        found: list[list[int]] = [[], [], []]
        for kind in (1, 2):
            for layer in layers:
                mine = held(attention[layer], rank, size)
                address, length = memory.add(labels(kind * 10 + layer, pages, tokens, mine, content))
                for column, value in zip(found, (address, length, length // PAGES), strict=True):
                    column.append(value)
        return found

    def pool(layer: int) -> Any:
        mine = len(held(attention[layer], rank, size))
        return heads_pool(mine, 4 * CONTENT, item=4, model_layer_ids=(layer,))

    has_window_pool = model.windows is not None and not model.one_pool
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = keys_and_values(
        [0] if has_window_pool else list(attention)
    )
    target: Any = pool(0)
    recurrent = None
    if has_window_pool:
        lists.state(StateType.SWA, keys_and_values([1]))
        target = named("SWAKVPool", full_kv_pool=target, swa_kv_pool=pool(1))
    if model.convolution is not None:
        recurrent = recurrent_config(model.convolution, size)
        target = named(
            "HybridLinearKVPool", full_kv_pool=target, mamba_pool=state_pool(model, memory, lists, rank, size)
        )
    told = model.told_by == "configuration"
    config = model_config(model.full if told else None, model.windows if told else None, window_tokens=3)
    totals = {}
    if model.told_by == "projections":
        totals = {layer: frozenset({total}) for layer, total in attention.items()}
    place = RankCoordinates(tp_rank=rank, tp_size=size)
    caches = pools.caches_of(lists.in_pools(target), config, recurrent, totals, place=place)
    return DescribedRank(describe(caches, place, Device()), memory.whole)


CONFIGURATIONS = {"mixer": "GraniteMoeHybridConfig", "named": "Qwen3NextConfig", "unknown": "JetNemotronConfig"}


def recurrent_config(convolution: Convolution, size: int) -> Any:
    """What SGLang's configuration says of recurrent state on so many ranks."""
    extended = convolution.groups if convolution.groups % size == 0 else size
    conv_dim = X_HEADS * X_WIDTH + 2 * extended * STATE_SIZE if convolution.kind == "mixer" else 32
    shape = SimpleNamespace(
        conv_dim=conv_dim, intermediate_size=X_HEADS * X_WIDTH, num_heads=X_HEADS, state_size=STATE_SIZE
    )
    return named(
        CONFIGURATIONS[convolution.kind],
        mamba2_cache_params=SimpleNamespace(shape=shape),
        mamba_n_groups=convolution.groups,
    )


def state_pool(model: Model, memory: Memory, lists: Lists, rank: int, size: int) -> Any:
    """Adds recurrent state, and returns its pool."""
    assert model.convolution is not None
    mine, first = [], 0
    for units, width in model.convolution.blocks:
        mine += [first + unit * width + each for unit in held(units, rank, size) for each in range(width)]
        first += units * width
    slots, taps = list(range(PAGES)), list(range(TAPS))
    parts = [
        memory.add(labels(30, slots, mine, taps)),
        memory.add(labels(40, slots, held(X_HEADS, rank, size), taps)),
    ]
    channels = [len(mine), X_HEADS // size]
    groups = [8, 8, 16] if model.convolution.kind == "named" else None
    given = [
        [address for address, _ in parts],
        [length for _, length in parts],
        [length // PAGES for _, length in parts],
    ]
    lists.state(StateType.MAMBA, given, channels=channels, rows=[1, 1], layers=[0, 0], groups=[groups, None])
    return mamba_pool([[parts[0][0]]], [parts[1][0]])


def engine(model: Model, size: int) -> dict[int, DescribedRank]:
    return {rank: described_rank(model, rank, size) for rank in range(size)}


def fits(model: Model, size: int) -> bool:
    """Whether SGLang could have such a pool: layers in one have as many heads on a rank."""
    return not model.one_pool or len(held(model.full, 0, size)) == len(held(model.windows or model.full, 0, size))


MIMO = Model(4, 8)
"""As MiMo-V2: four heads in layers with full attention, eight in those with windows."""


@given(models(), st.sampled_from(SIZES))
@example(MIMO, 8)
@example(Model(4, 8, one_pool=True), 8)
@example(Model(1, convolution=Convolution("unknown")), 4)
def test_between_equal_sizes_every_rank_gets_its_own_ranks_bytes(model: Model, size: int):
    assume(fits(model, size))
    ranks = engine(model, size)
    assert list(wrong_bytes(ranks, ranks, ROOMS, range(PAGES))) == []


@given(models(), st.sampled_from(SIZES), st.sampled_from(SIZES))
@example(MIMO, 2, 8)
@example(MIMO, 8, 1)
@example(Model(1, 2), 2, 1)
@example(Model(2, convolution=Convolution("mixer", 8)), 4, 2)
@example(Model(2, convolution=Convolution("mixer", 1)), 1, 4)
@example(Model(2, convolution=Convolution("unknown")), 2, 1)
def test_whatever_is_not_refused_is_right(model: Model, prefill: int, decode: int):
    assume(fits(model, prefill) and fits(model, decode))
    try:
        wrong = list(wrong_bytes(engine(model, prefill), engine(model, decode), ROOMS, range(PAGES)))
    except IncompatiblePeerError as refusal:
        differs = model.one_pool and model.full != model.windows
        is_unknown = model.convolution is not None and model.convolution.kind == "unknown"
        assert model.told_by == "nobody" or differs or is_unknown, "everything was known"
        assert prefill != decode
        words = str(refusal)
        assert "give both sides the same tensor-parallel size" in words
    else:
        assert wrong == []


def as_before(channels: int, _: Any, __: Any, tp_size: int) -> tuple[Block, ...]:
    """What the plug-in used to take every convolution for that SGLang does not describe."""
    return (Block(channels * tp_size, channels * tp_size),)


@pytest.mark.parametrize("fault", ["one number for all layers", "a convolution is one block"])
def test_what_is_guessed_is_found_out(fault: str, monkeypatch: pytest.MonkeyPatch):
    """What the plug-in used to do."""
    if fault == "one number for all layers":
        monkeypatch.setattr(pools, "_claimed_heads", lambda *_: (4, 4))
        prefill, decode = engine(MIMO, 8), engine(MIMO, 8)
    else:
        monkeypatch.setattr(recurrent, "_convolution", as_before)
        model = Model(2, convolution=Convolution("mixer", 8))
        prefill, decode = engine(model, 2), engine(model, 1)
    assert list(wrong_bytes(prefill, decode, ROOMS))
