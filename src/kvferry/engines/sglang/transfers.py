"""What the two sides of a request have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sglang.srt.disaggregation.base.conn import KVPoll, StateType

from kvferry import GroupPages, Receiver, Sender, TransferState
from kvferry.engines.sglang.layouts import (
    COMPRESSION_GROUP,
    PENDING_GROUP,
    RING_GROUP,
    ROW_GROUP,
    STATE_GROUP,
    TAIL_GROUP,
    WINDOW_GROUP,
)
from kvferry.errors import EngineContractError

POLLS: Mapping[TransferState, int] = {
    TransferState.BOOTSTRAPPING: KVPoll.Bootstrapping,
    TransferState.WAITING_FOR_INPUT: KVPoll.WaitingForInput,
    TransferState.TRANSFERRING: KVPoll.Transferring,
    TransferState.SUCCESS: KVPoll.Success,
    TransferState.FAILED: KVPoll.Failed,
}
"""What SGLang calls the states of a transfer."""


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


def page_numbers(given: Any) -> NDArray[Any]:
    """Returns page numbers as SGLang gives them, in its own array where it has one: whoever keeps them copies them."""
    return np.asarray(given) if hasattr(given, "dtype") else np.asarray(given, np.int64)


def state_pages(
    types: tuple[StateType, ...],
    indices: list[Any] | None,
    total_pages: int,
    *,
    last: NDArray[Any],
    ring_places: int | None = None,
) -> dict[str, GroupPages]:
    """Returns the pages and slots of what a request caches beside keys and values.

    What lies in pages with the numbers of keys and values has none of its own: it goes with them, chunk by chunk.

    Args:
        types: what the rank caches.
        indices: those of each type, as SGLang gives them; None where there are none.
        total_pages: those of the whole request; a window's are the last of them.
        last: the last pages of the request's keys and values.
        ring_places: how many places a request's ring has, of which SGLang names those in use; None without rings.

    Raises:
        EngineContractError: if what lies in pages of keys and values is said to lie in others, or places of several
            rings are given.
    """
    windows = [page_numbers(given) for kind, given in zip(types, indices or [], strict=False) if kind is StateType.SWA]
    groups = {}
    for kind, given in zip(types, indices or [None] * len(types), strict=True):
        pages = page_numbers([] if given is None else given).reshape(-1)
        if kind.value in _WITH_KEYS:
            _check_equal(kind, pages[max(0, len(pages) - len(last)) :], last)
        elif kind is StateType.BLOCK_SCALE_SWA:
            _check_equal(kind, pages, windows[0] if windows else pages)
        elif kind.value in _SLOTS:
            # A tail's slot comes before which part of its ring is in use: that is the same on both sides.
            groups[_SLOTS[kind.value]] = GroupPages(pages[:1])
        elif kind.value == _RING:
            groups[RING_GROUP] = GroupPages(_ring_of(pages, ring_places))
        elif kind is StateType.SWA:
            if any(each.value == _RING for each in types):
                continue  # what SGLang lists there is in the request's rings, whatever pages it gives
            _check_equal(kind, pages, windows[0] if windows else pages)
            groups[WINDOW_GROUP] = GroupPages(pages, total_pages - len(pages))
        else:
            groups[STATE_GROUP] = GroupPages(pages)
    return groups


def _ring_of(places: NDArray[Any], ring_places: int | None) -> NDArray[Any]:
    """Returns the ring that places are in; none if there is no place."""
    rings = np.unique(places // (ring_places or 1))
    if ring_places is None or len(rings) > 1:
        raise EngineContractError(
            f"SGLang hands in places {places[:4].tolist()}... of a window's ring of {ring_places}: they are in rings "
            f"{rings[:4].tolist()}, and a request has one"
        )
    return rings


def _check_equal(kind: StateType, pages: NDArray[Any], expected: NDArray[Any]) -> None:
    if not np.array_equal(pages, expected):
        raise EngineContractError(
            f"SGLang hands in pages {pages[:4].tolist()}... for StateType.{kind.name}, which belongs to keys and "
            f"values in pages {expected[:4].tolist()}...: the request is not exchanged, since one of them is another's"
        )


def give_up(transfer: Sender | Receiver | None, reason: str) -> None:
    """Aborts a transfer that was begun and has not ended."""
    if transfer is not None and not transfer.state.is_final:
        transfer.abort(reason)
