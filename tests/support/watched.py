"""A write on its way whose owner is a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvferry.transport import TransferHandle


def _nothing(_: object, **how: object) -> None:
    pass


@dataclass(frozen=True, eq=False)
class Watched:
    """What `Worker.watch` takes; see `WatchedWrite`."""

    transfer: TransferHandle
    receiver: str
    done: Callable[[Any], None] = _nothing
    failed: Callable[..., None] = _nothing
    settled: Callable[[Exception], None] = _nothing
    broke: Callable[[BaseException], None] = _nothing
