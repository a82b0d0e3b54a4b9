"""What the two sides of a request have in common."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sglang.srt.disaggregation.base.conn import KVPoll, StateType

from kvferry import GroupPages, Receiver, Sender, TransferState
from kvferry.engines.sglang.compressed import Rings
from kvferry.engines.sglang.hisparse import JointReceiver
from kvferry.engines.sglang.layouts import (
    COMPRESSION_GROUP,
    DRAFT_GROUP,
    INDEX_GROUP,
    OVERLAP_GROUP,
    PAIR_GROUP,
    PENDING_GROUP,
    RING_GROUP,
    ROW_GROUP,
    STATE_GROUP,
    TAIL_GROUP,
    WINDOW_GROUP,
)
from kvferry.engines.sglang.placement import Placement
from kvferry.errors import EngineContractError

POLLS: Mapping[TransferState, int] = {
    TransferState.BOOTSTRAPPING: KVPoll.Bootstrapping,
    TransferState.WAITING_FOR_INPUT: KVPoll.WaitingForInput,
    TransferState.TRANSFERRING: KVPoll.Transferring,
    TransferState.SUCCESS: KVPoll.Success,
    TransferState.FAILED: KVPoll.Failed,
}
"""What SGLang calls the states of a transfer."""

ROOMS = range(1, 2**63)
"""The numbers that a room can have: SGLang waits for a first token that has come until its row has another than 0."""

_OTHERS_HEAR_S = 0.2
"""By when the other ranks of a group have heard of a failure, too; machines with fewer cores than ranks included."""

_WITH_KEYS = ("dsa", "block_scale", "qsa_compressed", "minimax_index_k", "minimax_dense_kv")
"""What lies in pages with the numbers of keys and values, by the values of SGLang's StateType; 0.5.22 has not all."""

_SLOTS = {
    "dsa_tail": TAIL_GROUP,
    "qsa_pending": PENDING_GROUP,
    "c128_state": COMPRESSION_GROUP,
    "request_row": ROW_GROUP,
}
"""What a request has one place of, and the group that it is numbered in."""

_RING = "swa_ring"


CLOSED = "this server could not take another role (/pd_role_switch), and left its earlier one: start it anew"
"""Why a request fails that comes to a manager that has ended."""


def page_numbers(given: Any) -> NDArray[Any]:
    """Returns page numbers as SGLang gives them, in its own array where it has one: whoever keeps them copies them."""
    return np.asarray(given) if hasattr(given, "dtype") else np.asarray(given, np.int64)


def state_pages(
    types: tuple[StateType, ...],
    indices: list[Any] | None,
    total_pages: int,
    *,
    last: NDArray[Any],
    index: GroupPages | None = None,
    rings: Rings | None = None,
    tokens: int = 0,
) -> dict[str, GroupPages]:
    """Returns the pages and slots of what a request caches beside keys and values.

    What lies in pages with the numbers of keys and values has none of its own: it goes with them, chunk by chunk.

    Args:
        indices: those of each type, as SGLang gives them; None where there are none.
        total_pages: those of the whole request; a window's are the last of them.
        last: the last pages of the request's keys and values.
        index: the last pages of its index, where that has pages of its own.
        rings: how long DeepSeek V4's rings are; None without any.

    Raises:
        EngineContractError: if what lies in pages of keys and values is said to lie in others, or other places of a
            ring are given than those of the request's last tokens.
    """
    windows = [page_numbers(given) for kind, given in zip(types, indices or [], strict=False) if kind is StateType.SWA]
    groups = {}
    for kind, given in zip(types, indices or [None] * len(types), strict=True):
        pages = page_numbers([] if given is None else given).reshape(-1)
        if kind.value in _WITH_KEYS:
            # A prefill server whose ranks divide tokens names an index's pages by the numbers of keys and values.
            own = last if index is None else page_numbers(index.pages)
            expected = last if np.array_equal(pages[max(0, len(pages) - len(last)) :], last) else own
            _check_equal(kind, pages[max(0, len(pages) - len(expected)) :], expected)
        elif kind is StateType.BLOCK_SCALE_SWA:
            _check_equal(kind, pages, windows[0] if windows else pages)
        elif kind.value == "c128_state" and rings is not None and rings.pair is not None:
            groups[PAIR_GROUP] = rings.pair_places(pages, tokens)
        elif kind.value in _SLOTS:
            # A tail's slot comes before which part of its ring is in use: that is the same on both sides.
            groups[_SLOTS[kind.value]] = GroupPages(pages[:1])
        elif kind.value == _RING:
            groups |= _in_rings(rings, pages, tokens)
        elif kind is StateType.SWA:
            if any(each.value == _RING for each in types):
                continue  # what SGLang lists there is in the request's rings, whatever pages it gives
            _check_equal(kind, pages, windows[0] if windows else pages)
            first = total_pages - len(pages)
            groups[WINDOW_GROUP] = GroupPages(pages, first)
            if rings is not None and rings.overlap is not None:
                groups[OVERLAP_GROUP] = rings.overlap_in_pages(pages, first, tokens)
        else:
            groups[STATE_GROUP] = GroupPages(pages)
    return groups


def whole_pages(
    place: Placement, groups: Collection[str], pages: NDArray[Any], *, first: int, tokens: int
) -> dict[str, GroupPages]:
    """Returns the pages of what every rank has of all tokens, where ranks divide the others by decode context.

    A draft model's have the tokens of all ranks together, and the numbers of keys and values. The index has as many in
    their place as there are ranks, and each of them as many tokens as a rank has of one page.

    Args:
        pages: the next ones of keys and values, as SGLang gives them.
        first: how many come before them.
    """
    found = {}
    if DRAFT_GROUP in groups:
        found[DRAFT_GROUP] = GroupPages(pages, first)
    if INDEX_GROUP in groups:
        parts = place.token_parts
        numbers = (pages[:, None].astype(np.int64) * parts + np.arange(parts)).reshape(-1)
        needed = -(-tokens // (place.page_tokens // parts))
        found[INDEX_GROUP] = GroupPages(numbers[: max(0, needed - first * parts)], first * parts)
    return found


def _in_rings(rings: Rings | None, places: NDArray[Any], tokens: int) -> dict[str, GroupPages]:
    """Returns where a request's rings have its window, and what is not compressed of it."""
    if rings is None:
        raise EngineContractError("SGLang hands in places of a window's ring, and its pool has no rings")
    groups = {RING_GROUP: rings.window_places(places, tokens)}
    return groups if rings.overlap is None else groups | {OVERLAP_GROUP: rings.overlap_places(places, tokens)}


def _check_equal(kind: StateType, pages: NDArray[Any], expected: NDArray[Any]) -> None:
    if not np.array_equal(pages, expected):
        raise EngineContractError(
            f"SGLang hands in pages {pages[:4].tolist()}... for StateType.{kind.name}, which belongs to keys and "
            f"values in pages {expected[:4].tolist()}...: the request is not exchanged, since one of them is another's"
        )


def is_paged(kind: StateType) -> bool:
    """Returns whether a kind of cache lies in pages with the numbers of keys and values."""
    return kind.value in _WITH_KEYS


def why_not_its_own(room: int | None) -> str:
    """Says why a request fails that cannot have its number: no room has that, or another request does."""
    if room not in ROOMS:
        return f"bootstrap_room {room} is no room's number: a gateway must give each request one from 1 to 2**63 - 1"
    return f"room {room} is in use here by another request: a gateway must give each request a number of its own"


def give_up(transfer: Sender | Receiver | JointReceiver | None, reason: str) -> None:
    """Aborts a transfer that was begun and has not ended."""
    if transfer is not None and not transfer.state.is_final:
        transfer.abort(reason)


def may_report_failure(ranks: int, heard_at: float) -> bool:
    """Whether a rank that has heard of a failure may say so, since the others of its group know why by now.

    They hear of it at different times, and the client is told what the first rank knows when any of them reports it.
    """
    return ranks == 1 or time.monotonic() >= heard_at + _OTHERS_HEAR_S
