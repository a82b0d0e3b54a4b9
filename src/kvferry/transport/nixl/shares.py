"""A write, and its shares: each is a request of its own, with a status of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

from kvferry.errors import PeerDisconnectedError
from kvferry.transport.base import TransferHandle, TransferReport
from kvferry.transport.ranges import Connection

_Argument = TypeVar("_Argument")
_Answer = TypeVar("_Answer")

Lane: TypeAlias = ThreadPoolExecutor
"""A thread of ours that posts shares of writes."""


@dataclass(slots=True, eq=False)
class NixlConnection(Connection):
    """A connection to a peer.

    Attributes:
        copies_as_it_posts: as `CompiledWay` says.
    """

    copies_as_it_posts: bool = True


@dataclass(slots=True, eq=False)
class Share:
    """A part of a write, with a request and a status of its own.

    Attributes:
        handle: NIXL's request; 0 if it was released.
        lane: the thread that posts it; None for the caller's own.
        report: what NIXL measured, once it has ended well.
        has_ended: whether nothing of it can move any more.
        is_half_posted: whether posting it raised, so that its own status says nothing of what was posted before.
        flush: a request of no bytes that was posted behind, and ends when that has; None if there is none yet.
        flushed_at: when that was last tried.
    """

    handle: int
    lane: Lane | None = None
    report: TransferReport | None = None
    has_ended: bool = False
    is_half_posted: bool = False
    flush: int | None = None
    flushed_at: float = 0.0


@dataclass(slots=True, eq=False)
class NixlHandle(TransferHandle):
    """A write.

    Attributes:
        connection: by which it goes.
        shares: its parts; one, where it is not shared by several threads.
        notification: what is sent once all shares have ended; b"" where that is none, or a request carries it.
        problem: the first error of a share.
        report: that of the whole write, once it has ended well.
    """

    connection: NixlConnection
    shares: list[Share] = field(default_factory=list)
    notification: bytes = b""
    problem: Exception | None = None
    report: TransferReport | None = None

    @property
    def peer(self) -> str:
        """The peer's name."""
        return self.connection.peer.name

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it can move any more."""
        return all(share.has_ended for share in self.shares)

    def half_posted(self, share: Share | None, problem: Exception) -> None:
        """Takes why the post of a share has failed, of which something may be on its way; or (None) why it has none."""
        if share is not None:
            share.is_half_posted, share.has_ended = True, isinstance(problem, PeerDisconnectedError)
        self.problem = self.problem or problem


def on_lanes(
    lanes: Sequence[Lane], call: Callable[[_Argument], _Answer], arguments: Sequence[_Argument]
) -> list[_Answer | BaseException]:
    """Calls a function once for each argument, every time on another lane. Returns what it returned, or raised."""
    futures = [lane.submit(call, argument) for lane, argument in zip(lanes, arguments, strict=False)]
    return [future.exception() or future.result() for future in futures]


def seconds(duration: Any) -> float:
    """Converts NIXL's telemetry, which is microseconds or a timedelta depending on its version."""
    return duration.total_seconds() if hasattr(duration, "total_seconds") else float(duration) * 1e-6


def report_of(telemetry: Any) -> TransferReport:
    """Returns what NIXL measured of a request that has ended."""
    return TransferReport(
        total_bytes=telemetry.totalBytes,
        descriptors=telemetry.descCount,
        post_s=seconds(telemetry.postDuration),
        transfer_s=seconds(telemetry.xferDuration),
    )


def parts(count: int, num_parts: int) -> list[slice]:
    """Divides a number of descriptors into parts of nearly the same size."""
    edges = [count * part // num_parts for part in range(num_parts + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def sum_of(reports: Sequence[TransferReport]) -> TransferReport:
    """Returns the report of a write from those of its shares, which moved at the same time."""
    return TransferReport(
        total_bytes=sum(report.total_bytes for report in reports),
        descriptors=sum(report.descriptors for report in reports),
        post_s=max(report.post_s for report in reports),
        transfer_s=max(report.transfer_s for report in reports),
    )
