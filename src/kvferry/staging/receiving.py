"""The staged path on the decode side: rings that prefill ranks write to, and what is scattered from them into pages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kvferry.errors import KVFerryError, MessageError, SettingsError, TransportError, TransportUnavailableError
from kvferry.layout import RankLayout
from kvferry.loggers import logger_of
from kvferry.plan import PairPlan, Piece, TransferPath, Unit
from kvferry.plan.packing import aligned
from kvferry.plan.requests.moved_blocks import UnitPlaces
from kvferry.protocol.wire.messages import Credit, StagedArrived, Staging, StagingRing
from kvferry.settings import Settings
from kvferry.staging.digests import Blocks, DigestMemory, resolved, verify_segment
from kvferry.staging.kernels import Kernels, PackedBlocks
from kvferry.staging.memory import StagingMemory
from kvferry.staging.resources import StagingResources
from kvferry.staging.rings import ReadingRing, Span
from kvferry.staging.sizes import StagingSettings, staging_sizes
from kvferry.transport import Transport

log = logger_of(__name__)

_CREDITS_A_ROUND = 4


class ArrivalChecks:
    """What a decode endpoint needs to compare digests. Only the driver's thread uses the table.

    Attributes:
        memory: kernels and memory to digest pages with.
    """

    def __init__(self, memory: DigestMemory) -> None:
        self.memory = memory
        self._plans: dict[str, PairPlan] = {}

    def add(self, endpoint: str, plan: PairPlan) -> None:
        """Stores what a prefill rank may send. Rooms that relied on an earlier plan are over."""
        self._plans[endpoint] = plan

    def remove(self, endpoint: str) -> None:
        """Forgets a prefill rank."""
        self._plans.pop(endpoint, None)

    def plan(self, endpoint: str) -> PairPlan | None:
        """Returns what a prefill rank may send; None if nothing."""
        return self._plans.get(endpoint)


class WriterRing:
    """The ring that one prefill rank writes to.

    Attributes:
        memory: where it is.
        epoch: distinguishes it from an earlier ring.
        plan: what the prefill rank may send.
        reading: what is read, and up to where.
    """

    def __init__(self, memory: StagingMemory, plan: PairPlan, *, epoch: int, send: Callable[[Credit], None]) -> None:
        """Begins with a ring of which nothing was read.

        Args:
            send: sends the prefill rank a message.
        """
        self.memory = memory
        self._send = send
        self.epoch = epoch
        self.plan = plan
        self.reading = ReadingRing(memory.num_bytes)
        self._being_read: dict[int, int] = {}  # where the spans start, and stop
        self._reported = 0

    def take(self, span: Span) -> bool:
        """Begins to read a span. Returns False if it is read already, or cannot be one that the writer reserved.

        For the driver's thread only.
        """
        if span.start in self._being_read or not self.reading.can_hold(span):
            return False
        self._being_read[span.start] = span.stop
        return True

    @property
    def is_idle(self) -> bool:
        """Whether nothing of it is being read."""
        return not self._being_read

    @property
    def held_bytes(self) -> int:
        """Bytes that are being read, or wait to be. For any thread."""
        return sum(stop - start for start, stop in list(self._being_read.items()))

    def give_back(self, span: Span) -> None:
        """Marks a span as read."""
        self._being_read.pop(span.start, None)
        self.reading.release(span)

    def send_credit(self) -> None:
        """Tells the writer up to where the ring was read, if it is time to.

        That is several times a round, and whenever nothing is left to be read: it may wait for that.
        """
        position = self.reading.position
        is_due = position - self._reported >= self.memory.num_bytes // _CREDITS_A_ROUND or self.is_idle
        if not is_due or position == self._reported:
            return
        self._reported = position
        self._send(Credit(epoch=self.epoch, position=position))

    def address(self, span: Span) -> int:
        """Returns where a span lies."""
        return self.memory.address + span.begin % self.memory.num_bytes


class ReceivingStaging:
    """What a decode endpoint has for staged writes, and to verify. Only the driver's thread uses it after the start.

    Attributes:
        path: the path that the settings force, if any.
        kernels: copy staged bytes into pages; None if there are no staged writes.
        checks: compare digests; None without checksums.
        taken_bytes: how much memory was taken for rings.
    """

    def __init__(
        self, settings: Settings, layout: RankLayout, transport: Transport, resources: StagingResources
    ) -> None:
        """Takes a first ring's memory, so that the first peer need not wait, unless staged writes are impossible.

        Raises:
            TransportUnavailableError: if staged writes are forced, and the kernels' library is not installed.
            SettingsError: if they are forced, and there is no such memory; or if checksums are impossible.
            TransportError: if they are forced, and the memory cannot be registered.
        """
        self.path = settings.forced_path
        self.kernels: Kernels | None = None
        self.checks: ArrivalChecks | None = None
        if settings.checksums:
            self.checks = ArrivalChecks(DigestMemory(resources, layout.regions(), layout.device))
        self._first: StagingMemory | None = None
        self._most_bytes = settings.of(StagingSettings).most_bytes
        self._layout = layout
        self._transport = transport
        self._resources = resources
        self._problem = ""
        self._ring_bytes = staging_sizes(settings, layout.device.kind).ring_bytes
        self._rings: dict[str, WriterRing] = {}  # by the prefill rank's endpoint
        self._earlier: dict[str, list[WriterRing]] = {}  # those that may be written to until it has attached anew
        self._free: list[WriterRing] = []
        self.taken_bytes = 0
        if self.path not in (None, TransferPath.STAGED):
            self._problem = f"the decode side forces the {self.path.value} path (KVFERRY_PATH)"
            return
        try:
            checks = self.checks
            kernels = checks.memory.kernels if checks else resources.kernels(layout.regions(), layout.device)
            self._first = self._more_memory()
            self.kernels = kernels
        except (TransportUnavailableError, SettingsError, TransportError) as error:
            if self.path is TransferPath.STAGED:
                raise
            self._problem = str(error)

    def offer(
        self, endpoint: str, source: RankLayout, pieces: tuple[Piece, ...], send: Callable[[Credit], None]
    ) -> Staging:
        """Returns what to offer a prefill rank when it is asked to attach.

        Args:
            endpoint: the prefill rank's name.
            source: its layout.
            pieces: what it may send.
            send: sends it a message.
        """
        earlier = self._rings.pop(endpoint, None)
        if earlier is not None:
            self._earlier.setdefault(endpoint, []).append(earlier)
        if not pieces or (self.kernels is None and self.checks is None):
            return Staging(path=self.path, problem=self._problem)
        plan = PairPlan(source, self._layout, pieces)
        if self.checks is not None:
            self.checks.add(endpoint, plan)
        if self.kernels is None:
            return Staging(path=self.path, problem=self._problem)
        if problem := self._why_too_small(plan):
            return Staging(path=self.path, problem=problem)
        try:
            memory = self._memory_again(endpoint) or self._memory()
        except KVFerryError as error:
            log.warning("no staging memory for %s: %s", endpoint, error)
            return Staging(path=self.path, problem=str(error))
        if memory is None:
            return Staging(path=self.path, problem=self._why_no_memory())
        ring = WriterRing(memory, plan, epoch=self._resources.epoch(), send=send)
        self._rings[endpoint] = ring  # before anything that may raise: the rank's next attempt finds the memory here
        self.kernels.prepare((each.destination for unit in Unit for each in plan.packed_pieces(unit)), is_gather=False)
        speed = self._resources.copy_bytes_per_s(
            self.kernels, [piece.destination for piece in plan.packed_pieces(Unit.WHOLE)], memory
        )
        return Staging(
            path=self.path,
            ring=StagingRing(memory.address, memory.num_bytes, ring.epoch),
            scatter_bytes_per_s=speed,
        )

    def _memory_again(self, endpoint: str) -> StagingMemory | None:
        """Returns memory that the prefill rank was offered before, if nothing of it is being read; else None.

        The rank writes nowhere else before all that it wrote there has ended. Without this, a rank that connects in
        vain, again and again, would take all memory.
        """
        rings = self._earlier.pop(endpoint, [])
        idle = next((ring for ring in rings if ring.is_idle), None)
        others = [ring for ring in rings if ring is not idle]
        if others:
            self._earlier[endpoint] = others
        return idle.memory if idle is not None else None

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
        if self.taken_bytes + self._ring_bytes > self._most_bytes:
            return None
        memory = self._resources.allocate(self._ring_bytes, self._layout.device)
        self._transport.register([memory.region], self._layout.device)
        self.taken_bytes += self._ring_bytes
        return memory

    def _why_too_small(self, plan: PairPlan) -> str:
        largest = max(piece.block_bytes for piece in plan.packed_pieces(Unit.WHOLE))
        if largest <= self._ring_bytes:
            return ""
        return (
            f"one page of one layer takes {largest} bytes, more than the {self._ring_bytes} bytes of the decode side's "
            "ring: raise KVFERRY_STAGING_RING_MIB there"
        )

    def _why_no_memory(self) -> str:
        return (
            f"all of the decode side's {self._most_bytes / 2**20:g} MiB of staging memory "
            "(KVFERRY_STAGING_MEMORY_MIB) is in use by other prefill ranks"
        )

    def metadata(self) -> bytes:
        """Returns the transport's metadata, with all rings."""
        return self._transport.metadata()

    def send_credits(self) -> None:
        """Tells writers what was read since the last call: one message for all that a look has found."""
        for ring in self._rings.values():
            ring.send_credit()

    def attached(self, endpoint: str) -> None:
        """Records that a prefill rank has attached, for the first time or anew: its earlier writes have ended."""
        self._free += self._earlier.pop(endpoint, [])

    def closed(self, endpoint: str) -> None:
        """Records that a prefill rank was closed: it will not write again."""
        self.attached(endpoint)
        if self.checks is not None:
            self.checks.remove(endpoint)
        ring = self._rings.pop(endpoint, None)
        if ring is not None:
            self._free.append(ring)

    def keep_for_good(self, settled: Collection[str]) -> int:
        """Keeps memory that may still be written to until the process ends. Returns how many bytes it is.

        Args:
            settled: prefill ranks that have no write to this rank in flight.
        """
        # Of a ring that is not idle, what a failed write had sent may be about to arrive.
        doubtful = [ring for endpoint, ring in self._rings.items() if endpoint not in settled or not ring.is_idle]
        doubtful += [ring for rings in self._earlier.values() for ring in rings]
        doubtful += [ring for ring in self._free if not ring.is_idle]
        for ring in doubtful:
            ring.memory.keep_for_good()
        return sum(ring.memory.num_bytes for ring in doubtful)

    def bytes_of(self, endpoint: str) -> int:
        """Returns how much memory a prefill rank may write to. May be called from any thread."""
        ring = self._rings.get(endpoint)
        rings = [*list(self._earlier.get(endpoint, ())), *([ring] if ring is not None else [])]
        return sum(ring.memory.num_bytes for ring in rings)

    @property
    def writers(self) -> set[str]:
        """The prefill ranks that may write into any memory, also from an earlier attempt to connect."""
        return {*self._rings, *self._earlier}

    @property
    def rings(self) -> dict[str, WriterRing]:
        """The rings that may be written to at present, by the prefill rank's endpoint."""
        return self._rings

    def ring(self, endpoint: str, epoch: int) -> WriterRing | None:
        """Returns the ring that a prefill rank writes to; None if it has another one by now, or none."""
        ring = self._rings.get(endpoint)
        return ring if ring is not None and ring.epoch == epoch else None


def scatter_part(
    message: StagedArrived,
    ring: WriterRing,
    span: Span,
    places: UnitPlaces,
    kernels: Kernels,
    *,
    is_verified: bool = False,
) -> None:
    """Scatters a part of a chunk into its pages. Nothing is copied if any of it is invalid.

    Args:
        message: describes the part.
        ring: the ring that it is in.
        span: where in the ring.
        places: the places of its room's units.
        is_verified: whether to compare digests afterwards. The pages are gathered into the span again, which is no
            longer needed.

    Raises:
        MessageError: if it is not what the writer may send, or not what the room requested.
        RegistrationError: if a page lies outside the pool.
        ChecksumError: if a digest differs.
    """
    parts = [resolved(segment, message.unit, ring.plan, places) for segment in message.segments]
    ends = 0
    for blocks in parts:
        ends = aligned(ends) + blocks.num_bytes
    if ends != span.num_bytes:
        raise MessageError(f"{span.num_bytes} bytes of staging memory for segments of {ends}")
    address, packed = ring.address(span), _packed(parts)
    kernels.scatter_all(address, packed)
    if not is_verified:
        return
    for segment, blocks, placed in zip(message.segments, parts, packed, strict=True):
        where = address + placed.offset
        verify_segment(segment, blocks, ring.plan, places, kernels, where, unit=message.unit, writer=message.writer)


def _packed(parts: Sequence[Blocks]) -> list[PackedBlocks]:
    """Returns every segment's blocks, and where they are packed."""
    found: list[PackedBlocks] = []
    for blocks in parts:
        offset = aligned(found[-1].stop) if found else 0
        found.append(PackedBlocks(blocks.starts, blocks.piece.destination.shape, offset))
    return found
