"""The staged path on the decode side: rings that prefill ranks write to, and the threads that empty them into pages."""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.endpoint.calibration import copy_bytes_per_s
from kvferry.endpoint.receiving import ReceivingRoom
from kvferry.errors import KVFerryError, MessageError, SettingsError, TransportError, TransportUnavailableError
from kvferry.layout import RankLayout
from kvferry.plan import PairPlan, Path, Piece, Unit
from kvferry.plan.packing import PackedPiece, Starts, aligned
from kvferry.protocol.credits import ReadingRing, Span
from kvferry.protocol.messages import Credit, StagedArrived, StagedSegment, Staging, StagingRing, encode
from kvferry.settings import Settings
from kvferry.staging import Kernels, StagingMemory, allocate, kernels_for
from kvferry.transport import Transport

log = logging.getLogger(__name__)

_CREDITS_A_ROUND = 4


class WriterRing:
    """The ring that one prefill rank writes to, and how what it writes is packed.

    Attributes:
        memory: where it is.
        epoch: tells it apart from an earlier one.
        plan: what the prefill rank may send.
    """

    def __init__(self, memory: StagingMemory, plan: PairPlan, *, endpoint: str, send: Callable[[bytes], None]) -> None:
        """Args:
        endpoint: this rank's, for credits.
        send: takes a message to the prefill rank.
        """
        self.memory = memory
        self._endpoint = endpoint
        self._send = send
        self.epoch = secrets.randbits(63)
        self.plan = plan
        self._reading = ReadingRing(memory.num_bytes)
        self._packed: dict[Unit, tuple[PackedPiece, ...]] = {}
        self._being_read: set[int] = set()  # where the spans start
        self._reported = 0

    def packed(self, unit: Unit) -> tuple[PackedPiece, ...]:
        """How every piece is packed, worked out when first asked for."""
        if unit not in self._packed:  # two threads at a time work out the same
            self._packed[unit] = self.plan.packed_pieces(unit)
        return self._packed[unit]

    def take(self, span: Span) -> bool:
        """Begins to read a span; False if it is read already, or the writer cannot have been given it.

        For the driver's thread only.
        """
        if span.start in self._being_read or not self._reading.can_hold(span):
            return False
        self._being_read.add(span.start)
        return True

    @property
    def is_idle(self) -> bool:
        """Whether nothing of it is being read."""
        return not self._being_read

    def give_back(self, span: Span) -> None:
        """Says that a span was read.

        The writer learns of it several times a round, and whenever nothing is left to be read: it may wait for that.
        """
        self._being_read.discard(span.start)
        self._reading.release(span)
        position = self._reading.position
        is_due = position - self._reported >= self.memory.num_bytes // _CREDITS_A_ROUND or self.is_idle
        if not is_due or position == self._reported:
            return
        self._reported = position
        try:
            self._send(encode(Credit(endpoint=self._endpoint, epoch=self.epoch, position=position)))
        except KVFerryError as error:
            log.debug("a credit was lost together with its connection: %s", error)

    def address(self, span: Span) -> int:
        """Where a span lies."""
        return self.memory.address + span.begin % self.memory.num_bytes


class ReceivingStaging:
    """What a decode endpoint has for staged writes. Only the driver's thread uses it after the start."""

    def __init__(self, settings: Settings, layout: RankLayout, transport: Transport) -> None:
        """Takes a first ring's memory, unless staged writes are impossible: whoever connects first shall not wait.

        Raises:
            TransportUnavailableError: if staged writes are forced, and what copies is not installed.
            SettingsError: if they are forced, and there is no such memory.
            TransportError: if they are forced, and the memory cannot be registered.
        """
        self.path = settings.forced_path
        self.kernels: Kernels | None = None
        self._first: StagingMemory | None = None
        self._settings = settings
        self._layout = layout
        self._transport = transport
        self._problem = ""
        self._ring_bytes = int(settings.staging_ring_mib * 2**20)
        self._rings: dict[str, WriterRing] = {}  # by the prefill rank's endpoint
        self._earlier: dict[str, list[WriterRing]] = {}  # that may be written to until it has attached anew
        self._free: list[WriterRing] = []
        self._taken_bytes = 0
        if self.path is Path.DIRECT:
            self._problem = "the decode side forces the direct path (KVFERRY_PATH)"
            return
        try:
            kernels = kernels_for(layout.regions(), layout.device)
            self._first = self._more_memory()
            self.kernels = kernels
        except (TransportUnavailableError, SettingsError, TransportError) as error:
            if self.path is Path.STAGED:
                raise
            self._problem = str(error)

    def offer(
        self, endpoint: str, source: RankLayout, pieces: tuple[Piece, ...], send: Callable[[bytes], None]
    ) -> Staging:
        """What to tell a prefill rank when it is asked to attach.

        Args:
            endpoint: the prefill rank's.
            source: its layout.
            pieces: what it may send.
            send: takes a message to it.
        """
        if endpoint in self._rings:
            self._earlier.setdefault(endpoint, []).append(self._rings.pop(endpoint))
        if not pieces or self.kernels is None:
            return Staging(path=self.path, problem=self._problem)
        plan = PairPlan(source, self._layout, pieces)
        if problem := self._why_too_small(plan):
            return Staging(path=self.path, problem=problem)
        try:
            memory = self._memory()
        except KVFerryError as error:
            log.warning("no staging memory for %s: %s", endpoint, error)
            return Staging(path=self.path, problem=str(error))
        if memory is None:
            return Staging(path=self.path, problem=self._why_no_memory())
        ring = WriterRing(memory, plan, endpoint=self._transport.endpoint_name, send=send)
        self._rings[endpoint] = ring
        speed = copy_bytes_per_s(self.kernels, [piece.destination for piece in ring.packed(Unit.GRANULE)], memory)
        return Staging(
            path=self.path,
            ring=StagingRing(memory.address, memory.num_bytes, ring.epoch),
            scatter_bytes_per_s=speed,
        )

    def _memory(self) -> StagingMemory | None:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        for ring in self._free:
            if ring.is_idle:
                self._free.remove(ring)
                return ring.memory
        return self._more_memory()

    def _more_memory(self) -> StagingMemory | None:
        if self._taken_bytes + self._ring_bytes > self._settings.staging_memory_mib * 2**20:
            return None
        memory = allocate(self._ring_bytes, self._layout.device)
        self._transport.register([memory.region], self._layout.device)
        self._taken_bytes += self._ring_bytes
        return memory

    def _why_too_small(self, plan: PairPlan) -> str:
        largest = max(piece.block_bytes for piece in plan.packed_pieces(Unit.GRANULE))
        if largest <= self._ring_bytes:
            return ""
        return (
            f"one page of one layer takes {largest} bytes, more than the {self._ring_bytes} bytes of the decode side's "
            "ring: raise KVFERRY_STAGING_RING_MIB there"
        )

    def _why_no_memory(self) -> str:
        return (
            f"all of the decode side's {self._settings.staging_memory_mib:g} MiB of staging memory "
            "(KVFERRY_STAGING_MEMORY_MIB) is in use by other prefill ranks"
        )

    def metadata(self) -> bytes:
        """The transport's, with all rings."""
        return self._transport.metadata()

    def attached(self, endpoint: str) -> None:
        """A prefill rank has attached, anew perhaps: what it wrote before has ended."""
        self._free += self._earlier.pop(endpoint, [])

    def closed(self, endpoint: str) -> None:
        """A prefill rank was closed: it will not write again."""
        self.attached(endpoint)
        ring = self._rings.pop(endpoint, None)
        if ring is not None:
            self._free.append(ring)

    def ring(self, endpoint: str, epoch: int) -> WriterRing | None:
        """The ring that a prefill rank writes to, if it is still that one."""
        ring = self._rings.get(endpoint)
        return ring if ring is not None and ring.epoch == epoch else None


@dataclass(frozen=True, slots=True, eq=False)
class ScatterTask:
    """A part of a chunk that is in staging memory and belongs into pages.

    Attributes:
        room: whose it is.
        ring, span: where it is.
        message: what it is.
    """

    room: ReceivingRoom
    ring: WriterRing
    span: Span
    message: StagedArrived


class Scatterers:
    """Threads that put what is in staging memory into its pages. There may be none: then whoever submits does it."""

    def __init__(
        self,
        count: int,
        kernels: Kernels,
        layout: RankLayout,
        on_done: Callable[[ScatterTask, Exception | None], None],
        *,
        name: str,
    ) -> None:
        """Starts them.

        Args:
            count: how many.
            layout: this rank's.
            on_done: called with every task, once it is through, and the error that it met; from the threads, if any.
        """
        self._kernels = kernels
        self._layout = layout
        self._on_done = on_done
        self._tasks: queue.SimpleQueue[ScatterTask | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-scatter-{index}", daemon=True) for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def are_alive(self) -> bool:
        """Whether all of them run."""
        return all(thread.is_alive() for thread in self._threads)

    def submit(self, task: ScatterTask) -> None:
        """Hands a task to whichever is free."""
        if self._threads:
            self._tasks.put(task)
        else:
            self._work(task)

    def close(self) -> None:
        """Ends them, once all tasks are through."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._work(task)

    def _work(self, task: ScatterTask) -> None:
        error: Exception | None = None
        try:
            if not task.room.machine.state.is_final:  # else nobody wants it any more
                self._scatter(task)
        except Exception as problem:
            error = problem
        self._on_done(task, error)

    def _scatter(self, task: ScatterTask) -> None:
        message = task.message
        packed = task.ring.packed(message.unit)
        resolved = [self._starts(task, packed, segment) for segment in message.segments]
        ends = 0
        for _, piece, num_blocks in resolved:
            ends = aligned(ends) + num_blocks * piece.block_bytes
        if ends != task.span.num_bytes:
            raise MessageError(f"{task.span.num_bytes} bytes of staging memory for segments of {ends}")
        offset = 0
        address = task.ring.address(task.span)
        for starts, piece, num_blocks in resolved:
            offset = aligned(offset)
            self._kernels.scatter(address + offset, starts, piece.destination.shape)
            offset += num_blocks * piece.block_bytes

    def _starts(
        self, task: ScatterTask, packed: tuple[PackedPiece, ...], segment: StagedSegment
    ) -> tuple[Starts, PackedPiece, int]:
        """Where a segment's blocks begin, its piece, and how many they are."""
        if segment.piece >= len(packed):
            raise MessageError(f"piece {segment.piece} of {len(packed)}")
        piece = packed[segment.piece]
        if not segment.first_base < segment.stop_base <= piece.num_bases:
            raise MessageError(f"indices {segment.first_base} to {segment.stop_base} of {piece.num_bases}")
        route = task.ring.plan.route(segment.piece)
        units, pages = task.room.places(segment.units, route, self._layout, unit=task.message.unit)
        starts = piece.destination.starts(segment.first_base, segment.stop_base, units, pages)
        return starts, piece, len(starts)
