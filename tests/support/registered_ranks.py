"""Ranks as they register."""

from __future__ import annotations

from typing import Any

from kvferry.layout.parallel import RankCoordinates
from kvferry.protocol.wire.registrations import RankRegistration

_IN_ORDER = ("first", "old", "older", "second", "new", "newer")
"""Starts, the earliest first."""


def rank(tp_rank: int = 0, tp_size: int = 2, incarnation: str = "first", **changes: Any) -> RankRegistration:
    """A rank of the engine "prefill", with whatever is changed of it."""
    fields = {
        "engine": "prefill",
        "incarnation": incarnation,
        "coordinates": RankCoordinates(tp_rank=tp_rank, tp_size=tp_size),
        "control_address": f"tcp://127.0.0.1:{40000 + tp_rank}",
        "layout_digest": "digest",
        "started_at": float(_IN_ORDER.index(incarnation)) if incarnation in _IN_ORDER else 0.0,
        "protocol_version": 1,
    }
    return RankRegistration(**{**fields, **changes})
