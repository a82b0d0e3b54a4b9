"""Runs of sub-chunks: each is gathered into staging memory, and written from there into a receiver's in bulk.

The interpreter does a step after the other here; `compiled_runs` does all of a run in one call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.layout import Region
from kvferry.staging.kernels import Kernels, PackedBlocks
from kvferry.transport import TransferHandle, Transport


@dataclass(slots=True, eq=False)
class Step:
    """A sub-chunk.

    Attributes:
        blocks: what is to be gathered; empty where it is in staging memory already.
        source: where in staging memory.
        address: where it goes in the receiver's memory.
        notification: what the receiver gets once it is there.
        begun_at: when that began; None if it has not.
        gathered_at: when it was gathered; None if it was not.
        posted_at: when its post has returned.
        transfer: the write, once it is on its way or has ended; None if it was not posted.
        error: why it was not gathered, or why its post has raised.
    """

    blocks: Sequence[PackedBlocks]
    source: Region
    address: int
    notification: bytes
    begun_at: float | None = None
    gathered_at: float | None = None
    posted_at: float = 0.0
    transfer: TransferHandle | None = None
    error: Exception | None = None


class Comings:
    """How many have come during a turn who are due before it. Any thread may count them.

    Attributes:
        count: where compiled code looks at it.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        """Nobody has come."""
        self.count = ctypes.c_int64()

    def come(self) -> None:
        """Counts one. Where two threads do at once it is no longer 0 all the same."""
        self.count.value += 1

    @property
    def any(self) -> bool:
        """Whether anybody has come, which ends a run."""
        return self.count.value != 0


class Runs:
    """Runs steps. Any thread may, each with staging memory of its own.

    Attributes:
        most_steps: how many a run has at most, to whomever.
    """

    def __init__(
        self, kernels: Kernels, transport: Transport, now: Callable[[], float], *, most_steps: int = 1
    ) -> None:
        """Takes what gathers, and what writes.

        Args:
            now: the time, in seconds of a steady clock.
        """
        self.most_steps = most_steps
        self._kernels = kernels
        self._transport = transport
        self._now = now

    def steps_to(self, receiver: str) -> int:
        """Returns how many a run to a receiver has at most: what more is prepared only keeps memory."""
        return self.most_steps

    def run(self, steps: Sequence[Step], receiver: str, comings: Comings) -> int:
        """Does step after step, until one fails or somebody else has come. Returns how many were begun, at least one.

        Raises nothing: a step has its error.
        """
        begun = 0
        for step in steps:
            self._do(step, receiver)
            begun += 1
            if step.error is not None or comings.any:
                break
        return begun

    def _do(self, step: Step, receiver: str) -> None:
        step.begun_at = self._now() if step.begun_at is None else step.begun_at
        try:
            for each in step.blocks:
                self._kernels.gather(each.starts, each.shape, step.source.address + each.offset)
            step.gathered_at = self._now() if step.gathered_at is None else step.gathered_at
            step.transfer = self._transport.write(step.source, receiver, step.address, step.notification)
        except Exception as error:
            step.error = error
        step.posted_at = self._now()
