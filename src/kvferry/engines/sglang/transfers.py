"""What the two sides of a request have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sglang.srt.disaggregation.base.conn import KVPoll, StateType

from kvferry import GroupPages, Receiver, Sender, TransferState
from kvferry.engines.sglang.layouts import STATE_GROUP, WINDOW_GROUP

POLLS: Mapping[TransferState, int] = {
    TransferState.BOOTSTRAPPING: KVPoll.Bootstrapping,
    TransferState.WAITING_FOR_INPUT: KVPoll.WaitingForInput,
    TransferState.TRANSFERRING: KVPoll.Transferring,
    TransferState.SUCCESS: KVPoll.Success,
    TransferState.FAILED: KVPoll.Failed,
}
"""What SGLang calls the states of a transfer."""


def page_numbers(given: Any) -> NDArray[Any]:
    """Returns page numbers as SGLang gives them, in its own array where it has one: whoever keeps them copies them."""
    return np.asarray(given) if hasattr(given, "dtype") else np.asarray(given, np.int64)


def state_pages(types: tuple[StateType, ...], indices: list[Any] | None, total_pages: int) -> dict[str, GroupPages]:
    """Returns the pages and slots of what a request caches beside keys and values.

    Args:
        types: what the rank caches.
        indices: those of each type, as SGLang gives them; None where there are none.
        total_pages: those of the whole request; a window's are the last of them.
    """
    groups = {}
    for kind, given in zip(types, indices or [None] * len(types), strict=True):
        pages = page_numbers([] if given is None else given).reshape(-1)
        if kind is StateType.SWA:
            groups[WINDOW_GROUP] = GroupPages(pages, total_pages - len(pages))
        else:
            groups[STATE_GROUP] = GroupPages(pages)
    return groups


def give_up(transfer: Sender | Receiver | None, reason: str) -> None:
    """Aborts a transfer that was begun and has not ended."""
    if transfer is not None and not transfer.state.is_final:
        transfer.abort(reason)
