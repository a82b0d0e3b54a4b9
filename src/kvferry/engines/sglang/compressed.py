"""DeepSeek V4 in SGLang: latents at several compressions, their index, windows, and what is not compressed yet.

Every tensor-parallel rank has the same. A page of latents or of the index has the slots of all tokens of a page of the
request, in an order of its own. Windows, and what of them layers have not compressed yet, lie in pages or in rings.

A ring has a token at its position modulo the ring's length, which is longer with speculative decoding. What travels
is therefore told by positions, place by place, and never as a ring; only the last tokens, which every ring still has,
do. Rings are a request's, or a page's of the window: then each of the request's pages there has its own last tokens.

A pipeline stage has neighbouring layers of the model. Layers of one compression are numbered among themselves, and all
of them among those with windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry import GroupPages
from kvferry.engines.sglang.caches import DRAFT, NOTHING, Caches, Listed, Stage, Uncut, listed_state
from kvferry.engines.sglang.layouts import (
    COMPRESSION_GROUP,
    KV_GROUP,
    OVERLAP_GROUP,
    PAIR_GROUP,
    RING_GROUP,
    ROW_GROUP,
    WINDOW_GROUP,
)
from kvferry.errors import EngineContractError, LayoutError

POOL = "DeepSeekV4TokenToKVPool"

OVERLAP_TOKENS = 8
"""How many tokens are kept of what layers compress by 4: each time 4 of them, with the 4 before."""

PAIR_TOKENS = 2
"""How many are kept of what layers compress by 2."""


def compressed_caches(
    args: Any, target: Any, draft: Any, window_tokens: int | None, *, layers: int | None = None
) -> Caches:
    """Reads what a rank caches of DeepSeek V4.

    Args:
        draft: its draft model's pool; None if it has none.
        window_tokens: how long the window is; None if its scheduler does not say it.
        layers: how many the whole model has; None if all are on this rank.

    Raises:
        LayoutError: if SGLang's lists are not what its pool has, or there is something that kvferry does not transfer.
    """
    _check(args, target, draft)
    kv = Listed("keys and values", args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)
    of_target, of_draft = _layers(target, layers), _Layers()
    uncut = [*_latents(target, kv, of_target)]
    kv.check_empty()
    seen: set[str] = set()
    for number, kind in enumerate(args.state_types):
        name = kind.value
        is_drafts = name == "request_row" or name in seen
        seen.add(name)
        pool, mine = (draft, of_draft) if is_drafts else (target, of_target)
        listed = listed_state(args, number)
        uncut += _READERS[name](pool, listed, DRAFT if is_drafts else "", mine)
        listed.check_empty()
    return Caches(
        kv=NOTHING,
        page_tokens=args.page_size,
        window_tokens=target.sliding_window if window_tokens is None else window_tokens,
        uncut=tuple(each for each in uncut if len(each.buffers)),
    )


def rings_of(target: Any) -> Rings | None:
    """Returns how long the rings of a rank's pool are; None if it is another model's."""
    if type(target).__name__ != POOL:
        return None
    lengths = {each.ratio: int(each.ring_size) for each in target.compress_state_pools if each is not None}
    return Rings(
        page_tokens=int(target.swa_page_size),
        window=int(target.unified_swa_ring_size) if target._unified_kv else None,
        overlap=lengths.get(4),
        pair=lengths.get(2),
    )


@dataclass(frozen=True, slots=True)
class _Layers:
    """The layers of a rank among those of the model.

    Attributes:
        ratios: the compression of every layer of the model; none if all of its layers are on this rank.
        first: the number of this rank's first layer.
    """

    ratios: tuple[int, ...] = ()
    first: int = 0

    def compressed_by(self, ratio: int) -> Stage:
        """Returns those of one compression."""
        return Stage(self.ratios[: self.first].count(ratio), self.ratios.count(ratio)) if self.ratios else Stage()

    def with_windows(self) -> Stage:
        """Returns all: every layer has a window."""
        return Stage(self.first, len(self.ratios)) if self.ratios else Stage()


def _layers(pool: Any, total: int | None) -> _Layers:
    """Returns which layers of the model a pool has.

    Args:
        total: how many layers the model has; None if the pool has all.

    Raises:
        LayoutError: if nothing says how long something is that layers of other stages have.
    """
    if total is None:
        return _Layers()
    ratios = tuple(pool.compression_ratios[:total])
    if {1, 2}.intersection(ratios):
        raise LayoutError(
            "layers are compressed by 1 or 2, of which some read what others have, perhaps on another pipeline stage: "
            "SGLang does not serve DeepSeek V4.1 so. Leave --pp-size away"
        )
    held = set(ratios[pool._stage_start : pool._stage_end])
    if missing := sorted(set(ratios) - held - {0}):
        raise LayoutError(
            f"no layer of this pipeline stage is compressed by {' or '.join(map(str, missing))}, and nothing says how "
            "long its cache is elsewhere: divide layers so that every stage has one (SGLANG_PP_LAYER_PARTITION)"
        )
    return _Layers(ratios, pool._stage_start)


def _check(args: Any, target: Any, draft: Any) -> None:
    if target.request_window is not None:
        raise LayoutError(
            "windows are in rings of pages, of which a request has one page twice, and kvferry sends each page once: "
            "leave --enable-encoder-swa-bounded-replay away"
        )
    if args.page_size != target.swa_page_size:
        raise LayoutError(
            f"pages have {args.page_size} tokens, and those of windows {target.swa_page_size}: SGLang counts them alike"
        )
    if draft is not None and type(draft).__name__ != POOL:
        raise LayoutError(
            f"the draft model keeps its cache in a {type(draft).__name__} beside a {POOL}: SGLang lists nothing of it "
            "for a transfer"
        )
    if getattr(args, "num_draft_entries", 0):
        raise LayoutError("SGLang lists pages of a draft model beside DeepSeek V4's, which has windows alone")
    listed = {each.value for each in args.state_types}
    wanted = {"swa_ring"} if target._unified_kv else {"swa"}
    if any(pool is not None and pool.request_scoped for pool in target.compress_state_pools):
        wanted.add("c128_state")
    if missing := sorted(wanted - listed):
        raise LayoutError(
            f"SGLang keeps a {POOL} for layers of this model, and does not list its {missing} for a transfer: the "
            "other side would compute without it"
        )


def _latents(pool: Any, listed: Listed, layers: _Layers) -> Iterator[Uncut]:
    """Yields latents and their index, compression by compression, as `get_contiguous_buf_infos` lists them."""
    here = pool.compression_ratios[pool._stage_start : pool._stage_end]
    for ratio, latents in pool.kv_pools.items():
        count, stage = here.count(ratio), layers.compressed_by(ratio)
        if pool._unified_kv:
            order = f"SGLang's rows of {pool.page_size // ratio} tokens"
            yield Uncut.of(f"latent of {ratio}", listed.take(count), order, KV_GROUP, stage)
            if pool._unified_kv_fp8:
                yield Uncut.of(f"rope of {ratio}", listed.take(count), order, KV_GROUP, stage)
        elif latents is not None:
            order = f"SGLang's {_name(latents)} of {latents.page_size} tokens"
            yield Uncut.of(f"latent of {ratio}", listed.take(len(latents.kv_buffer)), order, KV_GROUP, stage)
        index = pool.index_pools.get(ratio)
        if index is None:
            continue
        order = (
            f"SGLang's index of {index.page_size} keys of {index.index_head_dim}, "
            f"{'4' if index.use_fp4_indexer else '8'} bits{', rows of 8' if index.index_k_page8 else ''}"
        )
        if index.uses_aiter_fp4_layout:
            yield Uncut.of(f"index of {ratio}", listed.take(index.layer_num), order, KV_GROUP, stage)
            yield Uncut.of(f"scale of index of {ratio}", listed.take(index.layer_num), order, KV_GROUP, stage)
        else:
            yield Uncut.of(
                f"index of {ratio}", listed.take(len(index.index_k_with_scale_buffer)), order, KV_GROUP, stage
            )


def _name(pool: Any) -> str:
    """Names the order within a page of latents."""
    return "uniform_fp8" if type(pool).__name__ == "DeepSeekV4UniformFP8KVPool" else str(pool.kv_layout.value)


def _windows(pool: Any, listed: Listed, prefix: str, layers: _Layers) -> Iterator[Uncut]:
    """Yields windows, and what layers have not compressed of them: in pages, as the windows, or in rings of requests.

    SGLang lists rings of requests beside the windows' pages, too, although they have no such pages.
    """
    if pool.swa_kv_pool is not None:
        order = f"SGLang's {_name(pool.swa_kv_pool)} of {pool.swa_kv_pool.page_size} tokens"
        buffers = listed.take(len(pool.swa_kv_pool.kv_buffer))
        yield Uncut.of(f"{prefix}window latent", buffers, order, WINDOW_GROUP, layers.with_windows())
    for what, states in (("latent", pool.compress_state_pools), ("index", pool.indexer_compress_state_pools)):
        here = [each for each in states if each is not None and not each.request_scoped]
        if not here:
            continue
        # Rings of pages have OVERLAP_TOKENS of each page of the window, of which the first need not be whole.
        pages = 1 if pool._unified_kv else -(-pool.sliding_window // pool.swa_page_size) + 1
        dtype = str(here[0].kv_score_buffer.kv_score.dtype).removeprefix("torch.")
        yield Uncut.of(
            f"{prefix}pending {what} of {here[0].ratio}, {dtype}",
            listed.take(len(here), places=here[0].ring_size),
            None,
            OVERLAP_GROUP,
            layers.compressed_by(here[0].ratio),
            window_tokens=OVERLAP_TOKENS * pages,
        )


def _rings(pool: Any, listed: Listed, prefix: str, layers: _Layers) -> Iterator[Uncut]:
    """Yields windows in rings of requests: SGLang's items are places in them."""
    kinds = ("latent", "rope") if pool._unified_kv_fp8 else ("latent",)
    for kind in kinds:
        buffers, window_tokens = listed.take(len(pool.unified_kv_pool.kv_buffer)), pool.unified_swa_window
        name, stage = f"{prefix}window {kind}", layers.with_windows()
        yield Uncut.of(name, buffers, None, RING_GROUP, stage, window_tokens=window_tokens)


def _pending(pool: Any, listed: Listed, prefix: str, layers: _Layers) -> Iterator[Uncut]:
    """Yields what layers have not compressed of a request's last tokens, in a place of the request's own."""
    here = [each for each in pool.compress_state_pools if each is not None and each.request_scoped]
    first = here[0]
    name = f"{prefix}{'sum' if first.online else 'pending latent'} of {first.ratio}"
    stage = layers.compressed_by(first.ratio)
    if first.ratio == 2:
        buffers = listed.take(len(here), places=first.ring_size)
        yield Uncut.of(name, buffers, None, PAIR_GROUP, stage, window_tokens=PAIR_TOKENS)
        return
    # A ring of 128 tokens is one item, of which a request may have several: sides may have another number of them.
    yield Uncut.of(name, listed.take(len(here)), None, COMPRESSION_GROUP, stage)


def _rows(_: Any, listed: Listed, prefix: str, layers: _Layers) -> Iterator[Uncut]:
    """Yields where the draft model's windows begin."""
    yield Uncut.of(f"{prefix}window begin", listed.take(1), None, ROW_GROUP, layers.with_windows())


_READERS = {"swa": _windows, "swa_ring": _rings, "c128_state": _pending, "request_row": _rows}


# ---- rings -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rings:
    """The lengths of a rank's rings, in tokens.

    Attributes:
        page_tokens: tokens a page of the window.
        window: of a request's window; None if windows are in pages.
        overlap: of what layers have not compressed by 4 yet; None if no layer does. They are the request's where its
            window is in a ring, else a page's.
        pair: of what layers have not compressed by 2 yet; None if no layer does.
    """

    page_tokens: int
    window: int | None = None
    overlap: int | None = None
    pair: int | None = None

    def window_places(self, given: NDArray[Any], tokens: int) -> GroupPages:
        """Returns where the window's tokens are.

        Args:
            given: the places that SGLang names, in the order of positions.
            tokens: how many the request has.

        Raises:
            EngineContractError: if they are not the places of the request's last tokens.
        """
        if self.window is None or len(given) > tokens:
            raise EngineContractError(f"SGLang hands in {len(given)} places of a window's ring of {self.window}")
        found = _in_ring(self.window, self._slot(given), tokens, len(given))
        if not np.array_equal(given, found.pages):
            raise EngineContractError(
                f"SGLang hands in places {given[:4].tolist()}... of a window's ring of {self.window}: they are not "
                f"those of the last {len(given)} of {tokens} tokens in one ring"
            )
        return found

    def overlap_places(self, window_places: NDArray[Any], tokens: int) -> GroupPages:
        """Returns where a request's ring has what is not compressed by 4 yet.

        Args:
            window_places: where its window is: in the ring of the same number.
        """
        assert self.overlap is not None
        return _in_ring(self.overlap, self._slot(window_places), tokens, OVERLAP_TOKENS)

    def overlap_in_pages(self, pages: NDArray[Any], first: int, tokens: int) -> GroupPages:
        """Returns where the rings of the window's pages have what is not compressed by 4 yet.

        They are numbered by themselves: as many for each page of the request.

        Args:
            pages: of the window, up to the request's last one.
            first: how many of the request's pages come before them.

        Raises:
            EngineContractError: if the request's last page is another one.
        """
        assert self.overlap is not None
        if len(pages) and first + len(pages) != -(-tokens // self.page_tokens):
            raise EngineContractError(
                f"SGLang hands in pages {first} to {first + len(pages)} of a window's, and the request has {tokens} "
                f"tokens in pages of {self.page_tokens}"
            )
        filled = np.minimum(tokens - (first + np.arange(len(pages))) * self.page_tokens, self.page_tokens)
        offsets = filled[:, None] - OVERLAP_TOKENS + np.arange(OVERLAP_TOKENS)
        if len(pages) and filled[-1] < OVERLAP_TOKENS:
            offsets[-1] += OVERLAP_TOKENS - filled[-1]  # its first ones; what is behind them is left out
        places = (pages[:, None].astype(np.int64) * self.overlap + offsets % self.overlap).reshape(-1)
        stop = len(places) - max(0, OVERLAP_TOKENS - int(filled[-1])) if len(pages) else 0
        return GroupPages(places[:stop], first * OVERLAP_TOKENS, held_tokens=0)

    def pair_places(self, slots: NDArray[Any], tokens: int) -> GroupPages:
        """Returns where a request's ring has what is not compressed by 2 yet.

        Args:
            slots: the request's; none where nothing is left to be compressed.
        """
        assert self.pair is not None
        if not len(slots):
            return GroupPages(slots, held_tokens=0)
        return _in_ring(self.pair, int(slots[0]), tokens, PAIR_TOKENS)

    def _slot(self, window_places: NDArray[Any]) -> int:
        return int(window_places[0]) // (self.window or 1) if len(window_places) else 0


def _in_ring(length: int, slot: int, tokens: int, most: int) -> GroupPages:
    """Returns the places that one request's last tokens, so many at most, have in its ring."""
    first = max(0, tokens - most)
    return GroupPages(slot * length + np.arange(first, tokens, dtype=np.int64) % length, first, held_tokens=0)
