"""Reads from SGLang's pools and its model's configuration what a rank caches.

Its list of buffers says where bytes lie, not what they are. How many heads a layer has on this rank is what its pool
was made for; how many the model has there is what the projections of these layers say, or else the configuration, and
counts only if the pool confirms it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from kvferry import RankCoordinates
from kvferry.engines.sglang import compressed
from kvferry.engines.sglang.cache_kinds import check_order, check_pool, check_states
from kvferry.engines.sglang.caches import (
    Attention,
    Buffers,
    Caches,
    Heads,
    Listed,
    Stages,
    StateBuffer,
    Uncut,
    listed_state,
)
from kvferry.engines.sglang.companions import check_listed, own_scales_of, pooled_of, scales_of, sparse_of
from kvferry.engines.sglang.layers import DENSE, INDEX, minimax_of_stage, stages_of, total_of
from kvferry.engines.sglang.look_ups import take_over
from kvferry.engines.sglang.placement import Part, Placement, placed
from kvferry.engines.sglang.recurrent import mamba_pool, state_buffers
from kvferry.engines.sglang.shared_buffers import (
    heads_of_rows,
    index_of_rows,
    is_of_rows,
    is_unified,
    layers_of,
    parts_of_rows,
    state_of,
)
from kvferry.engines.sglang.weights import Weights
from kvferry.errors import LayoutError, UsageError
from kvferry.loggers import logger_of

log = logger_of(__name__)

_FULL = "layers with full attention"
_WINDOWS = "layers with sliding windows"
_DRAFTS = "layers of the draft model"

_HEADS = (
    "MHATokenToKVPool",
    "MHATokenToKVPoolMXFP8",
    "PageInterleaveMHATokenToKVPool",
    "UnifiedMHATokenToKVPool",
    "HiSparseMHAMainPool",
)
_LATENTS = (
    "HiSparseDSATokenToKVPool",
    "MLATokenToKVPool",
    "MLATokenToKVPoolFP4",
    "DSATokenToKVPool",
    "PageInterleaveMLATokenToKVPool",
    "UnifiedMLATokenToKVPool",
)

_INNER = ("full_kv_pool", "main_pool")
"""Where pools that are made of others have the pool of layers with full attention."""

_WITH_WINDOWS = ("SWAKVPool", "UnifiedSWAKVPool")

_TWICE = {compressed.POOL: ("SWA", "SWA_RING")}
"""States that SGLang lists twice beside pools of a class: the model's, and then its draft model's."""


@dataclass(frozen=True, slots=True)
class EnginePools:
    """The pools of a rank, which its scheduler has and does not hand to managers.

    Attributes:
        target: keys and values of the model.
        draft: those of its draft model; None if it has none.
        requests: which slots requests have; recurrent state is in it, too.
        window_tokens: how many tokens at a request's end the scheduler takes for its window; None if there is none.
        draft_runner: what runs the draft model; None if nothing does.
        weights: what is known of the rank's weights since it had another role; None in its first one.
    """

    target: Any
    draft: Any
    requests: Any
    window_tokens: int | None
    draft_runner: Any = None
    weights: Weights | None = None


_scheduler: ContextVar[Any] = ContextVar("kvferry scheduler", default=None)


def around_managers(original: Callable[..., Any], queue: Any, *arguments: Any, **named: Any) -> Any:
    """The hook around what makes a rank's manager: `remember_pools` takes from its scheduler what is known there alone.

    That is the window, since a model's configuration and its code count windows differently, with or without the token
    that attends; what runs the draft model; and, where the server takes another role, what its weights have become.
    """
    scheduler = queue.scheduler
    token = _scheduler.set(scheduler)
    try:
        manager = original(queue, *arguments, **named)
        if hasattr(manager, "renew_weights"):  # one of ours
            scheduler.kvferry_weights = manager.weights
        if getattr(manager, "servers", None) is not None:  # one of ours, that receives
            take_over(queue)
        return manager
    finally:
        _scheduler.reset(token)


def _runner_of(scheduler: Any) -> Any:
    """Returns what runs the draft model whose pool SGLang hands out; None if there is none."""
    runners: tuple[Any, ...] = getattr(getattr(scheduler, "draft_worker", None), "_draft_model_runners", tuple)()
    return runners[0] if runners else None


def remember_pools(
    _: None,
    kv_args: Any,
    token_to_kv_pool: Any,
    draft_token_to_kv_pool: Any = None,
    total_kv_layers: object = None,  # noqa: ARG001 - SGLang gives it
    req_to_token_pool: Any = None,
) -> None:
    """Keeps a rank's pools with its KVArgs, for `caches_of`. The hook after `setup_state_kv_args`."""
    scheduler = _scheduler.get()
    kv_args.kvferry_pools = EnginePools(
        token_to_kv_pool,
        draft_token_to_kv_pool,
        req_to_token_pool,
        None if scheduler is None else scheduler.sliding_window_size,
        _runner_of(scheduler),
        getattr(scheduler, "kvferry_weights", None),
    )


def draft_modules(args: Any) -> Iterable[Any]:
    """Returns the modules of a rank's draft model; none if it has none.

    Args:
        args: its KVArgs, to which `remember_pools` has added its pools.
    """
    model = getattr(getattr(getattr(args, "kvferry_pools", None), "draft_runner", None), "model", None)
    return model.modules() if model is not None else ()


def caches_of(
    args: Any,
    model: Any,
    recurrent: Any,
    totals: Mapping[int, frozenset[int]],
    *,
    place: Placement | RankCoordinates,
) -> Caches:
    """Reads what a rank caches.

    Args:
        args: its KVArgs, to which `remember_pools` has added its pools.
        model: its ModelConfig.
        recurrent: the configuration of its layers with recurrent state, as `mambaish_config` finds it; None if it has
            none.
        totals: what projections say of each layer's KV heads, as `totals_by_layer` finds it.

    Raises:
        LayoutError: if there is a cache of a kind that kvferry does not transfer.
        UsageError: if nobody has remembered the pools.
    """
    pools = getattr(args, "kvferry_pools", None)
    if pools is None:
        raise UsageError(
            "SGLang did not say which pools this rank has: its setup_state_kv_args was not wrapped by kvferry's "
            "plug-in. Is it loaded (SGLANG_PLUGINS), and of a version for this SGLang?"
        )
    place = placed(place)
    name = check_pool(pools.target, "layers of this model")
    check_states(args.state_types, twice=_TWICE.get(name, ()))
    if name == compressed.POOL:
        layers = model.num_hidden_layers if place.pp_size > 1 else None
        return compressed.compressed_caches(args, pools.target, pools.draft, pools.window_tokens, layers=layers)
    reading = _Reading(args, model, recurrent, totals, place)
    for number, kind in enumerate(args.state_types):
        _READERS.get(kind.value, _Reading.read_recurrent)(reading, number, kind.value)
    if place.pp_size > 1 and name == "MiniMaxSparseKVPool":
        reading.apart = minimax_of_stage(reading.apart, reading.full, model)
    return Caches(
        kv=reading.full,
        draft=reading.drafts,
        draft_heads=_draft_heads(pools, place) if len(reading.drafts) or pools.draft is not None else None,
        page_tokens=args.page_size,
        window=reading.window,
        window_tokens=pools.window_tokens if reading.window is not None else None,
        state=reading.state,
        scales=reading.scales.get("block_scale"),
        window_scales=reading.scales.get("block_scale_swa"),
        dense=reading.apart.get(DENSE),
        index=reading.apart.get(INDEX),
        uncut=tuple(reading.uncut),
        stages=stages_of(args, model, recurrent, pools.target) if place.pp_size > 1 else Stages(),
    )


class _Reading:
    """What has been read of a rank's caches: its keys and values, and then one after the other of its states.

    Attributes:
        main: the pool of layers with full attention.
        windowed: that of layers with sliding windows; None if there is none.
        claims: how many heads the whole model has in either, by all that is said.
        full: keys and values of layers with full attention.
        drafts: buffers of a draft model.
        window: keys and values of layers with sliding windows.
        scales: of blocks of numbers, by SGLang's name of the state.
        apart: caches beside a layer's own, by SGLang's name.
        uncut: what every rank has whole.
        state: of layers with recurrent state.
    """

    def __init__(
        self, args: Any, model: Any, recurrent: Any, totals: Mapping[int, frozenset[int]], place: Placement
    ) -> None:
        """Reads the keys and values of layers with full attention."""
        self.args, self.recurrent, self.place = args, recurrent, place
        self.pools: EnginePools = args.kvferry_pools
        target, draft = self.pools.target, self.pools.draft
        self.main = next((inner for each in _INNER if (inner := getattr(target, each, None)) is not None), target)
        self.windowed = target.swa_kv_pool if type(target).__name__ in _WITH_WINDOWS else None
        check_listed(args.state_types, target, self.main, self.windowed, draft)
        if is_unified(self.main) and draft is not None:
            raise LayoutError(
                "SGLang numbers a draft model's pages otherwise than the model's in unified memory, and hands in no "
                "such numbers: leave --enable-unified-memory or the draft model away"
            )
        self.claims = _claimed_heads(model, totals, self.main, self.windowed)
        listed = Listed("keys and values", args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)
        buffers = listed.take(len(listed.items) - getattr(args, "num_draft_entries", 0))
        self.drafts = listed.rest()
        self.full = _attention(self.main, buffers, _heads_of(self.main, self.claims[0], place, _FULL))
        self.window: Attention | None = None
        self.scales: dict[str, Attention] = {}
        self.apart: dict[str, Attention] = {}
        self.uncut: list[Uncut] = []
        self.state: tuple[StateBuffer, ...] = ()
        if is_of_rows(self.main) and self.full.heads is not None:
            self.full, self.scales["block_scale"] = parts_of_rows(self.main, self.full.buffers, self.full.heads)
        elif (own := own_scales_of(self.main, self.full.heads)) is not None:
            self.scales["block_scale"] = own

    def _listed(self, number: int) -> Buffers:
        """Returns all buffers of a state, where they are one pool's."""
        return listed_state(self.args, number).rest()

    def read_sparse(self, number: int, _: str) -> None:
        self.uncut += sparse_of(self.main, self.pools.draft, listed_state(self.args, number))

    def read_window(self, number: int, _: str) -> None:
        heads = _heads_of(self.windowed, self.claims[1], self.place, _WINDOWS)
        self.window = _attention(self.windowed, self._listed(number), heads)
        if (own := own_scales_of(self.windowed, self.window.heads)) is not None:
            self.scales["block_scale_swa"] = own
        if self.pools.window_tokens is None:
            raise LayoutError("SGLang lists layers with sliding windows, and its scheduler no window")

    def read_scales(self, number: int, kind: str) -> None:
        of_main, of_windows = (self.main, self.claims[0], _FULL), (self.windowed, self.claims[1], _WINDOWS)
        pool, claimed, which = of_windows if kind == "block_scale_swa" else of_main
        heads = scales_of(pool, _heads_of(pool, claimed, self.place, which))
        self.scales[kind] = Attention(self._listed(number), heads)

    def read_pooled(self, number: int, _: str) -> None:
        self.uncut += pooled_of(self.pools.target, self.pools.draft, listed_state(self.args, number))

    def read_apart(self, number: int, kind: str) -> None:
        given = self._listed(number)
        if kind == INDEX and is_of_rows(self.main):
            self.uncut.append(index_of_rows(self.pools.target.index_k_pool, given))
        else:
            self.apart[kind] = Attention(given, self.full.heads if kind == DENSE else None)

    def read_recurrent(self, number: int, _: str) -> None:
        given, holder = self._listed(number), mamba_pool(self.pools.target, self.pools.requests)
        buffers = state_buffers(self.args, number, given, holder, self.recurrent, self.place)
        self.state = state_of(holder, given) or tuple(buffers)


_READERS: Mapping[str, Callable[[_Reading, int, str], None]] = {
    "dsa": _Reading.read_sparse,
    "dsa_tail": _Reading.read_sparse,
    "swa": _Reading.read_window,
    "block_scale": _Reading.read_scales,
    "block_scale_swa": _Reading.read_scales,
    "qsa_pending": _Reading.read_pooled,
    "qsa_compressed": _Reading.read_pooled,
    INDEX: _Reading.read_apart,
    DENSE: _Reading.read_apart,
}
"""By SGLang's names of states; `check_states` refuses what is neither here nor recurrent."""


def _attention(pool: Any, listed: Buffers, heads: Heads | None) -> Attention:
    attention = layers_of(pool, listed, heads) if is_unified(pool) else Attention(listed, heads)
    return replace(attention, pages=_pages_of(pool))


# ---- attention ------------------------------------------------------------------------------------------------------


def _claimed_heads(
    model: Any, totals: Mapping[int, frozenset[int]], main: Any, windowed: Any
) -> tuple[int | None, int | None]:
    """Returns how many heads the whole model has by all that is said, in the main pool and in that of windows.

    Where layers of one pool differ, or nobody knows, it is None.
    """
    full, windows = model.get_total_num_kv_heads(), model.get_swa_num_kv_heads(1)
    if windowed is None:
        return total_of(totals, None, full if not full or full == windows else None), None
    of_each = ((main, full), (windowed, windows))
    first, second = (total_of(totals, getattr(pool, "model_layer_ids", ()), claimed) for pool, claimed in of_each)
    return first, second


def _heads_of(pool: Any, claimed: int | None, place: Placement, which: str) -> Heads | None:
    """Returns the heads of a pool's layers; None for latents.

    Args:
        claimed: how many the whole model has by all that is said.
        which: the layers, in words.

    Raises:
        LayoutError: if kvferry does not transfer such pools.
    """
    name = check_pool(pool, which)
    if name in _LATENTS and which == _FULL:
        return None
    if is_of_rows(pool):
        return heads_of_rows(pool, _total_of(claimed, pool.head_num, place.heads, which))
    if name not in _HEADS:
        raise LayoutError(f"{which} keep their cache in a {name}, which kvferry knows elsewhere, but not for them")
    packing = None if is_unified(pool) else _packing(pool, which)
    total, dims = _total_of(claimed, pool.head_num, place.heads, which), None
    if name == "MHATokenToKVPool" and getattr(pool, "k_scale_buffer", None) is not None:
        dims = pool.k_buffer[0].shape[-1], pool.v_buffer[0].shape[-1]  # two elements of 4 bits are one that is stored
    return _heads(pool, total, packing, dims)


def _heads(pool: Any, total: int | None, packing: str | None, dims: tuple[int, int] | None = None) -> Heads:
    key, value = dims or (pool.head_dim, pool.v_head_dim)
    item = pool.store_dtype.itemsize
    return Heads(pool.head_num, total, key * item, value * item, packing)


def _packing(pool: Any, which: str) -> str | None:
    """Returns the name of the order within a pool's pages; None for NHD."""
    check_order(pool, which)
    if pool.kv_cache_layout == "nhd":
        return None
    return f"SGLang's {pool.kv_cache_layout}, elements of {pool.store_dtype.itemsize} bytes"


def _draft_heads(pools: EnginePools, place: Placement) -> Heads | None:
    """Returns the heads of a draft model's layers, of which SGLang lists those with full attention.

    Latents have none: every rank has the same of them.
    """
    pool = pools.draft
    if check_pool(pool, _DRAFTS) in ("SWAKVPool", "HybridLinearKVPool", "QSATokenToKVPool"):
        pool = pool.full_kv_pool
    if check_pool(pool, _DRAFTS) != "MHATokenToKVPool":
        return None
    config = getattr(pools.draft_runner, "model_config", None)
    claimed = config.get_total_num_kv_heads() if config is not None else None
    return _heads(pool, _total(claimed, pool.head_num, place.drafts), _packing(pool, _DRAFTS))


def _pages_of(pool: Any) -> int:
    """Returns how many pages a pool has, with the one that SGLang keeps for padding."""
    size, page_tokens = getattr(pool, "size", 0), getattr(pool, "page_size", 1)
    return max(1, (size + page_tokens) // page_tokens)


def _total_of(claimed: int | None, held: int, part: Part, which: str) -> int | None:
    """Returns how many heads the whole model has in some layers; None, and says so, if nobody knows."""
    total = _total(claimed, held, part)
    if total is None:
        log.warning(
            "SGLang's pool of %s has %d KV heads on rank %d of %d, and the model does not say how many there are in "
            "each of these layers (%s): caches can be exchanged with as many tensor-parallel ranks only",
            which,
            held,
            part.index,
            part.count,
            "layers differ" if claimed is None else f"it says {claimed}",
        )
    return total


def _total(claimed: int | None, held: int, part: Part) -> int | None:
    """Returns how many heads the whole model has; None if the configuration and the pool do not agree.

    Ranks either divide heads evenly, or evenly share each of them.
    """
    if part.count == 1:
        return held
    if not claimed:
        return None
    if claimed % part.count == 0:
        return claimed if held == claimed // part.count else None
    return claimed if part.count % claimed == 0 and held == 1 else None
