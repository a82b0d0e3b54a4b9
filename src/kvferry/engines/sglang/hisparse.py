"""HiSparse on a decode rank: what sparse attention reads lies in host memory, all else on the device.

Each has page numbers of its own, and an endpoint is on one device. So such a rank has two, registered as neighbouring
pipeline stages of one engine: a prefill rank sends to either what it has, and a room ends for both or for none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from kvferry import RankCoordinates, RankLayout, Receiver, TransferState, empty_shard
from kvferry.engines.sglang.caches import NOTHING, Caches
from kvferry.errors import KVFerryError, LayoutError

STAGES = 2
"""Endpoints of a rank."""

_ON_HOST = ("HiSparseDSATokenToKVPool", "HiSparseMHAMainPool")
"""What a device keeps of layers with sparse attention: a buffer, which is filled from host memory."""

_PROGRESS = (
    TransferState.BOOTSTRAPPING,
    TransferState.WAITING_FOR_INPUT,
    TransferState.TRANSFERRING,
    TransferState.SUCCESS,
)


def is_hisparse(pools: Any) -> bool:
    """Returns whether a rank's sparse attention reads from host memory.

    Args:
        pools: the rank's pools, as `remember_pools` keeps them.

    Raises:
        LayoutError: if it is of a kind that SGLang transfers with Mooncake alone.
    """
    target = pools.target
    if type(getattr(target, "c4_kv_pool", None)).__name__ == "HiSparseC4DevicePool":
        raise LayoutError(
            "SGLang itself transfers DeepSeek V4 with HiSparse by its Mooncake backend alone: leave --enable-hisparse "
            "away"
        )
    if not {type(each).__name__ for each in (target, getattr(target, "main_pool", None))}.intersection(_ON_HOST):
        return False
    if pools.draft is not None:
        raise LayoutError(
            "SGLang itself transfers a draft model's cache beside HiSparse by its Mooncake backend alone: leave "
            "--enable-hisparse or the draft model away"
        )
    return True


def apart(caches: Caches) -> tuple[Caches, Caches]:
    """Divides what a rank caches into what lies in host memory, and what on the device."""
    on_host = Caches(kv=caches.kv, page_tokens=caches.page_tokens, stages=caches.stages)
    return on_host, replace(caches, kv=NOTHING)


def beside(layout: RankLayout, other: RankLayout) -> RankLayout:
    """Returns one memory's layout as the prefill side compares it: with the components of the other, of none of which
    it holds anything."""
    pagings = {shard.group: shard.paging for shard in layout.shards}
    lacking = {shard.component.name: shard for shard in other.shards}
    none_of = []
    for shard in lacking.values():
        paging = pagings.get(shard.group, shard.paging)
        none_of.append(
            empty_shard(
                shard.component,
                page_tokens=paging.page_tokens,
                num_pages=paging.num_pages,
                device=layout.device,
                group=shard.group,
            )
        )
    return msgspec.structs.replace(layout, shards=(*layout.shards, *none_of))


def stage(coordinates: RankCoordinates, number: int) -> RankCoordinates:
    """Returns where one of a rank's endpoints stands.

    Args:
        number: 0 for host memory, 1 for the device.
    """
    return msgspec.structs.replace(
        coordinates, pp_rank=STAGES * coordinates.pp_rank + number, pp_size=STAGES * coordinates.pp_size
    )


@dataclass(slots=True, eq=False)
class JointReceiver:
    """A room at both of a rank's endpoints, as one.

    Attributes:
        parts: the receivers: of the room at each endpoint that has opened it.
    """

    parts: list[Receiver]

    @property
    def state(self) -> TransferState:
        """That of whichever is behind; failed if one is."""
        states: Sequence[TransferState] = [part.state for part in self.parts]
        return TransferState.FAILED if TransferState.FAILED in states else min(states, key=_PROGRESS.index)

    @property
    def error(self) -> KVFerryError | None:
        """Why it failed; None if it did not."""
        return next((part.error for part in self.parts if part.error is not None), None)

    @property
    def aux(self) -> bytes:
        """What came with the cache: the same at either."""
        return self.parts[0].aux

    @property
    def pages_reusable(self) -> bool:
        """Whether no write can reach the pages of either any more."""
        return all(part.pages_reusable for part in self.parts)

    def abort(self, reason: str) -> None:
        """Aborts both; what has ended stays as it is."""
        for part in self.parts:
            part.abort(reason)
