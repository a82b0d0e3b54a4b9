"""The device: streams, events, and a scheduler that does what is queued, some time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvferry.layout import Region
from proof.device.ordering import HOST, Operation, Ordering, Ranges, UnorderedAccessError

Addresses = NDArray[np.int64]

_PAUSE_S = 1e-4
_PAGE_BYTES = 4096


@dataclass(slots=True, eq=False)
class Work:
    """What was queued and may not be done yet.

    Attributes:
        operation: what it is.
        after: what is done before it.
        does: does it.
        is_done: whether it is done.
    """

    operation: Operation
    after: tuple[Work, ...]
    does: Callable[[], None]
    is_done: bool = False

    @property
    def may_run(self) -> bool:
        """Whether all that it waits for is done."""
        return not self.is_done and all(each.is_done for each in self.after)


@dataclass(slots=True)
class Counts:
    """What was asked of a device.

    Attributes:
        uploads: copies of arrays to it.
        launches: of kernels that copied something.
        synchronizations: waits of the host.
        threads: those that were bound to it.
        unbound: those that looked at its events without: each makes a context on the first GPU, whichever this one is.
        compiled: variants of the kernel that were compiled: alignment, loops, whether it gathers.
        compiled_late: those that were compiled by a launch that copied something, which had to wait for it.
        compiled_runs: variants of the kernel from addresses to addresses that were compiled: alignments.
        compiled_runs_late: as `compiled_late`.
    """

    uploads: int = 0
    launches: int = 0
    synchronizations: int = 0
    threads: set[str] = field(default_factory=set)
    unbound: set[str] = field(default_factory=set)
    compiled: set[tuple[int, int, bool]] = field(default_factory=set)
    compiled_late: list[tuple[int, int, bool]] = field(default_factory=list)
    compiled_runs: set[int] = field(default_factory=set)
    compiled_runs_late: list[int] = field(default_factory=list)


class FakeDevice:
    """Does what is queued in an order that a seed gives. May be used from several threads.

    Attributes:
        counts: what was asked of it. To be read while nobody asks.
        violations: every access that nothing ordered; whoever queued it got it as an exception as well.
        problems: what work has raised when it was done.
        log: what was queued, done, and seen by the host to be done, in order: (which of the three, operation).
        mappings: memory that processes share.
    """

    def __init__(self, seed: int = 0, *, waits: int = 0) -> None:
        """Makes an idle device.

        Args:
            seed: decides what is done when.
            waits: how often whoever waits lets others run first, for a tenth of a millisecond each time.
        """
        self.counts = Counts()
        self.violations: list[UnorderedAccessError] = []
        self.problems: list[BaseException] = []
        self.log: list[tuple[str, str]] = []
        self._chance = random.Random(seed)
        self._waits = waits
        # Guards all of it: work is queued, and done, by whichever thread comes along.
        self._lock = threading.RLock()
        self._ordering = Ordering()
        self.mappings = Mappings(self, self._lock)
        self._queued: list[Work] = []
        self._streams = 0
        self._writes = 0

    def stream(self, name: str = "") -> FakeStream:
        """Makes a stream."""
        with self._lock:
            self._streams += 1
            return FakeStream(self, name or f"stream {self._streams}")

    def queue(
        self,
        name: str,
        agent: str,
        does: Callable[[], None],
        *,
        after: Sequence[Work] = (),
        reads: Ranges | None = None,
        writes: Ranges | None = None,
    ) -> Work:
        """Queues work. `FakeStream` and `write` are what callers use.

        Raises:
            UnorderedAccessError: if it touches bytes that other work touches, and nothing orders the two.
        """
        with self._lock:
            try:
                operation = self._ordering.add(
                    name, agent, after=[each.operation for each in after], reads=reads, writes=writes
                )
            except UnorderedAccessError as error:
                self.violations.append(error)
                raise
            work = Work(operation, tuple(after), does)
            self._queued.append(work)
            self.log.append(("queued", name))
            return work

    def write(self, name: str, does: Callable[[], None], *, reads: Ranges, writes: Ranges) -> Work:
        """Queues a write of a transport, which is ordered with nothing but what the host has seen by now."""
        with self._lock:
            self._writes += 1
            return self.queue(name, f"write {self._writes}", does, reads=reads, writes=writes)

    def touch(self, name: str, *, reads: Ranges | None = None, writes: Ranges | None = None) -> None:
        """Checks an access of the host's own, which has it done at once.

        Raises:
            UnorderedAccessError: if others touch the same bytes, and the host has not waited for them.
        """
        with self._lock:
            work = self.queue(name, HOST, lambda: None, reads=reads, writes=writes)
            self._run(work)
            self._see(work)

    def given_back(self, name: str, agent: str, writes: Ranges) -> None:
        """Takes note that memory goes back to where it came from: to whatever the same agent does next."""
        with self._lock:
            try:
                self._ordering.add(name, agent, writes=writes)
            except UnorderedAccessError as error:
                self.violations.append(error)

    def check_seen(self, name: str, works: Sequence[Work]) -> None:
        """Checks that the host has seen the end of some work, before it does what would not go well beside it.

        Raises:
            UnorderedAccessError: naming what the host has not waited for.
        """
        with self._lock:
            for work in works:
                if not self._ordering.is_seen(work.operation):
                    error = UnorderedAccessError(f"{name}, and the host has not seen the end of {work.operation}")
                    self.violations.append(error)
                    raise error

    def look(self, work: Work) -> bool:
        """Returns whether work is done, after something may have been done; if so, the host has seen it."""
        with self._lock:
            for _ in range(self._chance.randrange(3)):
                self._run_any()
            if work.is_done:
                self._see(work)
            return work.is_done

    def wait(self, work: Work | None) -> None:
        """Waits until work is done."""
        with self._lock:
            self.counts.synchronizations += 1
        for _ in range(self._waits):
            time.sleep(_PAUSE_S)
        while work is not None:
            with self._lock:
                if work.is_done:
                    self._see(work)
                    return
                self._run_any()

    def finish(self) -> None:
        """Does all that is queued."""
        with self._lock:
            while self._queued:
                self._run_any()

    def verify(self) -> None:
        """Raises the first of the violations and problems, if there were any."""
        for error in (*self.violations, *self.problems):
            raise error

    def _see(self, work: Work) -> None:
        self._ordering.host_has_seen(work.operation)
        self.log.append(("seen", work.operation.name))

    def _run_any(self) -> None:
        able = [work for work in self._queued if work.may_run]
        if able:
            self._run(self._chance.choice(able))

    def _run(self, work: Work) -> None:
        self._queued.remove(work)
        try:
            work.does()
        except BaseException as error:  # for `verify`: whoever happens to be on this thread has nothing to do with it
            self.problems.append(error)
        work.is_done = True
        self.log.append(("done", work.operation.name))


@dataclass(frozen=True, slots=True, eq=False)
class Mapping:
    """Memory that is mapped.

    Attributes:
        memory: where it is in the process that shares it.
        address: where it is mapped.
        used_by: what was queued that uses the mapping.
    """

    memory: Region
    address: int
    used_by: list[Work] = field(default_factory=list)


class IllegalAddressError(RuntimeError):
    """A kernel used an address that is nothing in its process. On a GPU, its process can use it no more."""


class Mappings:
    """Memory that processes share, mapped at addresses that only the device knows: the host would fault there."""

    def __init__(self, device: FakeDevice, lock: threading.RLock) -> None:
        """Begins with nothing shared.

        Args:
            device: whose kernels use the mappings.
            lock: the device's, since its work looks here.
        """
        self._device = device
        self._lock = lock
        self._shared: dict[bytes, Region] = {}
        self._mapped: dict[int, list[Mapping]] = {}  # by address, as often as it is mapped
        self._next = 1 << 60

    @property
    def count(self) -> int:
        """How many mappings there are."""
        with self._lock:
            return sum(len(each) for each in self._mapped.values())

    def share(self, memory: Region) -> bytes:
        """Returns a handle of some memory, the same for the same."""
        with self._lock:
            handle = f"{memory.address:x} {memory.length:x}".encode()
            self._shared[handle] = memory
            return handle

    def map(self, handle: bytes) -> int:
        """Maps memory, and returns where: at the same address if it is mapped already.

        Raises:
            IllegalAddressError: if nobody shares it.
        """
        with self._lock:
            if handle not in self._shared:
                raise IllegalAddressError(f"nobody shares memory by the handle {handle!r}")
            memory = self._shared[handle]
            known = next((each for each in self._mapped.values() if each[0].memory == memory), [])
            if not known:
                # Within a page, addresses are what they are where the memory is.
                at = self._next + memory.address % _PAGE_BYTES
                self._next += -(-(memory.length + 2 * _PAGE_BYTES) // _PAGE_BYTES) * _PAGE_BYTES
                self._mapped[at] = known
                known.append(Mapping(memory, at))
            else:
                known.append(known[0])
            return known[0].address

    def unmap(self, address: int) -> None:
        """Ends a mapping.

        Raises:
            UnorderedAccessError: if the host has not seen the end of all that uses it.
        """
        with self._lock:
            its = self._mapped[address]
            if len(its) == 1:
                self._device.check_seen(f"the mapping at {address:#x} is closed", its[0].used_by)
                del self._mapped[address]
            else:
                its.pop()

    def translated(self, addresses: Addresses, length: int) -> tuple[Addresses, set[Mapping]]:
        """Returns where memory is that lies at mapped addresses, and by which mappings.

        Raises:
            IllegalAddressError: if an address is not mapped.
        """
        found = np.full_like(addresses, -1)
        used: set[Mapping] = set()
        with self._lock:
            for address, (mapping, *_) in self._mapped.items():
                inside = (addresses >= address) & (addresses + length <= address + mapping.memory.length)
                found[inside] = addresses[inside] - address + mapping.memory.address
                used |= {mapping} if inside.any() else set()
        if (found == -1).any():
            outside = int(addresses[found == -1][0])
            raise IllegalAddressError(f"{length} bytes at {outside:#x} are not mapped")
        return found, used


class FakeStream:
    """A stream: does what it is given in order."""

    def __init__(self, device: FakeDevice, name: str) -> None:
        self.name = name
        self._device = device
        self._last: Work | None = None
        self._awaited: list[Work] = []

    def launch(
        self,
        name: str,
        does: Callable[[], None] = lambda: None,
        *,
        reads: Ranges | None = None,
        writes: Ranges | None = None,
    ) -> Work:
        """Queues a kernel, or a copy, and returns it; raises as `FakeDevice.queue`.

        Args:
            name: what it does, in words.
            does: does it.
            reads: the bytes that it reads.
            writes: the bytes that it writes.
        """
        after = [*([self._last] if self._last is not None else []), *self._awaited]
        self._last = self._device.queue(name, self.name, does, after=after, reads=reads, writes=writes)
        self._awaited = []
        return self._last

    def record_event(self) -> DeviceEvent:
        """Records an event behind all that was queued."""
        return DeviceEvent(self._device, self._last)

    def wait_event(self, event: DeviceEvent) -> None:
        """Lets what is queued from now on wait for an event."""
        if event.work is not None:
            self._awaited.append(event.work)

    def synchronize(self) -> None:
        """Waits until all that was queued is done."""
        self._device.wait(self._last)

    def given_back(self, name: str, writes: Ranges) -> None:
        """As an allocator with a pool for every stream: this stream may get the memory again, and no other."""
        self._device.given_back(name, self.name, writes)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceEvent:
    """An event, as torch has them.

    Attributes:
        work: what it is behind; None if that is nothing.
    """

    device: FakeDevice
    work: Work | None

    def query(self) -> bool:
        """Returns whether all before it is done."""
        self._ask()
        return self.work is None or self.device.look(self.work)

    def synchronize(self) -> None:
        """Waits until all before it is done."""
        self._ask()
        self.device.wait(self.work)

    def _ask(self) -> None:
        name, counts = threading.current_thread().name, self.device.counts
        if name not in counts.threads:
            counts.unbound.add(name)
