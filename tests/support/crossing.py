"""A request that crosses from the ranks of one engine to those of another, of which layouts are all that is known."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvferry import DecodeEndpoint, GroupPages, PrefillEndpoint, RankCoordinates, TransferState
from kvferry.layout import RankLayout
from kvferry.testing.network import LocalNetwork

WAIT_S = 30.0


def cross(
    network: LocalNetwork,
    prefill: Sequence[RankLayout],
    decode: Sequence[RankLayout],
    *,
    sent: Mapping[str, GroupPages],
    received: Mapping[str, GroupPages],
    tokens: int,
    prefix_tokens: int = 0,
) -> None:
    """Sends a request of so many tokens and waits until it has arrived on every rank.

    Args:
        prefill: of the engine that sends, a layout for each rank: those that share tokens follow each other.
        decode: of the one that receives.
        sent: the pages of the request on each prefill rank.
        received: those on each decode rank, without those of the prefix.
        prefix_tokens: how many tokens the decode ranks have already.
    """

    def begin(kind: Any, engine: str, layouts: Sequence[RankLayout]) -> list[Any]:
        return [
            kind(
                layout,
                engine=engine,
                coordinates=_place(layout, rank, len(layouts)),
                settings=network.settings(),
                transport=network.transport(),
            )
            for rank, layout in enumerate(layouts)
        ]

    endpoints: list[Any] = []
    try:
        senders = begin(PrefillEndpoint, "prefill", prefill)
        endpoints += senders
        receivers = begin(DecodeEndpoint, "decode", decode)
        endpoints += receivers
        opened = [
            each.open(1, dict(received), engine="prefill", tokens=tokens, prefix_tokens=prefix_tokens)
            for each in receivers
        ]
        for each in senders:
            each.open(1, tokens=tokens).submit(dict(sent), last=True)
        deadline = time.monotonic() + WAIT_S
        while not all(each.pages_reusable for each in opened):
            assert time.monotonic() < deadline, [each.state for each in opened]
            time.sleep(0.002)
        assert {each.state for each in opened} == {TransferState.SUCCESS}
    finally:
        for each in reversed(endpoints):
            each.close()


def _place(layout: RankLayout, rank: int, ranks: int) -> RankCoordinates:
    parts = layout.tokens.partition.num_parts
    return RankCoordinates(tp_rank=rank // parts, tp_size=ranks // parts, cp_rank=layout.tokens.part, cp_size=parts)
