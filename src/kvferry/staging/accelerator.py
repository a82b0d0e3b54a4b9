"""What the kernels ask of an accelerator: streams, and copies that wait in them for their turn.

`cuda.CudaAccelerator` is the one that there is. `proof.device` has another one, without any hardware, whose
streams run late and in any order that they allow: what runs there is the code that runs on a GPU, and every read of
bytes that nothing ordered behind their write is an error.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.staging.kernels import StartArray

MOST_LOOPS = 4
"""Nested loops of a block that a launch follows by itself."""


class DeviceArray:
    """Numbers in the accelerator's memory, for as long as the object lives."""


@dataclass(frozen=True, slots=True, eq=False)
class CopyLaunch:
    """One launch: equally shaped blocks that are packed one after the other, copied from the pool or to it.

    Attributes:
        starts: where blocks begin; it may have more than these.
        first: the first of these blocks.
        stop: the one after the last; with none the launch copies nothing, but is compiled.
        loops: nested loops of a block, (count, stride in bytes), the slowest first; at most `MOST_LOOPS`.
        length: bytes of a run.
        address: staging memory, where the first block is packed.
        alignment: bytes that divide all addresses and the length, a power of two up to 16.
        is_gather: whether it copies from the pool to staging memory; otherwise back.
    """

    starts: DeviceArray
    first: int
    stop: int
    loops: tuple[tuple[int, int], ...]
    length: int
    address: int
    alignment: int
    is_gather: bool


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRows:
    """Rows of evenly spaced runs, which are numbered row by row.

    Attributes:
        table: the number of each row's first run, then where each row begins, then the bytes from a run to the next.
        count: how many rows there are.
    """

    table: DeviceArray
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class RunsLaunch:
    """One launch: runs of one length, each copied from its place to another, wherever the two are mapped.

    Attributes:
        source: the rows that are read.
        destination: the rows that are written.
        numbers: which runs, on both sides; it may have more than these.
        sources: the place of the first source's number among them; the others follow it.
        destinations: likewise of the first destination's.
        count: how many runs there are; with none the launch copies nothing, but is compiled.
        length: bytes of a run.
        alignment: bytes that divide all addresses and the length, a power of two up to 16.
    """

    source: DeviceRows
    destination: DeviceRows
    numbers: DeviceArray
    sources: int
    destinations: int
    count: int
    length: int
    alignment: int


class StreamEvent(ABC):
    """A place in a stream."""

    @abstractmethod
    def query(self) -> bool:
        """Returns whether all that was queued before it is done. From any thread that is bound."""


class Stream(ABC):
    """Does what it is given in order, beside all other streams. For one thread."""

    @abstractmethod
    def upload(self, numbers: StartArray | NDArray[np.int32]) -> DeviceArray:
        """Queues a copy of an array to the accelerator. The array may be changed once this returns."""

    @abstractmethod
    def launch(self, copy: CopyLaunch) -> None:
        """Queues a copy between pool and staging memory."""

    @abstractmethod
    def launch_runs(self, copy: RunsLaunch) -> None:
        """Queues a copy from rows to rows."""

    @abstractmethod
    def record(self) -> StreamEvent:
        """Records an event behind all that was queued."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until all that was queued is done. Other threads run meanwhile."""


class Accelerator(ABC):
    """One accelerator. May be used from several threads."""

    @abstractmethod
    def bind_thread(self) -> None:
        """Makes the calling thread's work go to this accelerator: once in every thread, before anything else."""

    @abstractmethod
    def stream(self) -> Stream:
        """Makes a stream for the calling thread, which has to be bound."""


class ThreadStreams:
    """One stream of an accelerator for each thread that works on it. May be used from several threads."""

    def __init__(self, accelerator: Accelerator) -> None:
        """Binds no thread yet, and makes no stream."""
        self._accelerator = accelerator
        self._of_thread = threading.local()

    def bind(self) -> None:
        """Binds the calling thread to the accelerator, unless it is."""
        if not getattr(self._of_thread, "is_bound", False):
            self._accelerator.bind_thread()
            self._of_thread.is_bound = True

    def own(self) -> Stream:
        """Returns the calling thread's stream."""
        stream: Stream | None = getattr(self._of_thread, "stream", None)
        if stream is None:
            self.bind()
            stream = self._of_thread.stream = self._accelerator.stream()
        return stream
