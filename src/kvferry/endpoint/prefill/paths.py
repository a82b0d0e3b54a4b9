"""Which path the bytes of a write take to a receiver, and what the staged path needs on the prefill side."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.endpoint.runtime.calibration import Calibration, WireKey
from kvferry.endpoint.runtime.platform import Platform
from kvferry.errors import IncompatiblePeerError, SettingsError, TransportError, TransportUnavailableError
from kvferry.layout import Entry, RankLayout, Region
from kvferry.loggers import logger_of
from kvferry.plan import Choice, ElectedRoute, PairPlan, PathCosts, TransferPath, Unit, choose
from kvferry.plan.packing import SEGMENT_ALIGNMENT, aligned
from kvferry.plan.requests.moved_blocks import moved_blocks, write_size_of
from kvferry.plan.requests.moves import Move
from kvferry.protocol.wire.messages import Attach
from kvferry.settings import Settings
from kvferry.staging import Kernels, StagingMemory
from kvferry.staging.digests import DigestMemory
from kvferry.staging.rings import PeerMemory, SharedRing
from kvferry.staging.runs import Runs
from kvferry.staging.sizes import StagingSettings, staging_sizes
from kvferry.staging.slots import SourceMemory
from kvferry.transport import PeerMetadata, Transport

log = logger_of(__name__)

UNPROVEN = "the decode side could not prove that this prefill rank has ended (KVFERRY_UNPROVEN_PATH)"


@dataclass(frozen=True, slots=True, eq=False)
class StagedPath:
    """What staged writes to one receiver need.

    Attributes:
        peer: its staging memory.
        kernels: what copies.
        runs: what gathers and writes.
        costs: the measured ones.
        chunk_bytes: the size of a sub-chunk.
    """

    peer: PeerMemory
    kernels: Kernels
    runs: Runs
    costs: PathCosts
    chunk_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class PathChooser:
    """Chooses the path of every write to one receiver.

    Attributes:
        plan: what is sent.
        forced: the only path that may be taken, if there is one.
        staged: what staged writes need; None where there are none.
        problem: why there are none, if so.
        why: why a path is forced; empty where KVFERRY_PATH says so.
        why_not_tokens: why single tokens cannot be written directly; empty if they can, or there is no other path.
    """

    plan: PairPlan
    forced: TransferPath | None
    staged: StagedPath | None
    problem: str
    why: str = ""
    why_not_tokens: str = ""

    def credited(self, epoch: int, position: int) -> None:
        """Takes a credit: how far the receiver has read its ring. Returns at once."""
        if self.staged is not None and self.staged.peer.epoch == epoch:
            self.staged.peer.ring.read_until(position)

    def choose(self, unit: Unit, elected: Sequence[ElectedRoute], moves: Sequence[Move]) -> Choice:
        """Chooses the path of a write, and says why.

        Args:
            elected: what this rank sends in the room; moves refer to it.
        """
        if self.forced is not None:
            return Choice(self.forced, 0.0, 0.0, self.why or f"KVFERRY_PATH is {self.forced.value}")
        if self.staged is None:
            return Choice(TransferPath.DIRECT, 0.0, 0.0, f"there is no staged path: {self.problem}")
        if unit is Unit.TOKEN and self.why_not_tokens:
            return Choice(TransferPath.STAGED, 0.0, 0.0, self.why_not_tokens)
        packed = self.plan.packed_pieces(unit)
        loads = moved_blocks(elected, moves, packed)
        return choose(write_size_of(loads, moves, packed, chunk_bytes=self.staged.chunk_bytes), self.staged.costs)


class SendingStaging:
    """The staging memory of a prefill endpoint, and the paths to its decode ranks.

    Attributes:
        source_memories: staging memory of every worker that gathers; none if there are no staged writes.
        taken_bytes: how much memory was taken.
        joined_pages: how many pages chunks that wait may have together, to leave in one write.
    """

    def __init__(self, settings: Settings, layout: RankLayout, transport: Transport, platform: Platform) -> None:
        """Takes memory, unless staged writes are impossible.

        Raises:
            TransportUnavailableError: if staged writes are forced, and what copies is not installed.
            SettingsError: if they are forced, and their memory is more than may be taken, or than there is.
            TransportError: if they are forced, and their memory cannot be registered.
        """
        self._settings = settings
        self._layout = layout
        self._transport = transport
        self._platform = platform
        self._sizes = staging_sizes(settings, layout.device.kind)
        self._ring_bytes = self._sizes.ring_bytes
        self._most_bytes = settings.of(StagingSettings).most_bytes
        # A multiple of what segments are aligned to, since slots follow each other.
        self._chunk_bytes = aligned(self._sizes.chunk_bytes - SEGMENT_ALIGNMENT + 1)
        # Of those that may be on their way directly a quarter, so that several writes are.
        directly = min(settings.direct_mib, settings.direct_receiver_mib) * 2**20 / 4
        self.joined_pages = _pages_in(min(self._chunk_bytes, int(directly)), layout)
        # Guards the count below, since workers that gather take more memory when they need it, and the digest memory.
        self._lock = threading.Lock()
        self.taken_bytes = 0
        self._kernels: Kernels | None = None
        self._runs: Runs
        self._digest_memory: DigestMemory | None = None
        self._calibration: Calibration | None = None
        self._problem = ""
        self.source_memories: tuple[SourceMemory, ...] = ()
        if settings.forced_path not in (None, TransferPath.STAGED):
            self._problem = f"the prefill side forces the {settings.path} path (KVFERRY_PATH)"
            return
        try:
            self._take_memory()
        except (SettingsError, TransportUnavailableError, TransportError) as error:
            if settings.forced_path is TransferPath.STAGED:
                raise
            self._problem = str(error)

    def _take_memory(self) -> None:
        """Allocates what every worker that gathers begins with, and what calibrations need. Raises as `__init__`."""
        settings, layout = self._settings, self._layout
        sizes = self._sizes.of_sender(settings.gather_workers)
        if sum(sizes) > self._most_bytes:
            raise SettingsError(
                f"{settings.gather_workers} workers that gather (KVFERRY_GATHER_WORKERS) with "
                f"{self._ring_bytes / 2**20:g} MiB each (KVFERRY_STAGING_RING_MIB), and calibration, "
                f"need more than {self._most_bytes / 2**20:g} MiB (KVFERRY_STAGING_MEMORY_MIB)"
            )
        kernels = self._platform.staging.kernels(layout.regions(), layout.device)
        # In one call: where it raises, no memory is registered that nobody has any more.
        measuring, *gathering = self._registered(*sizes)
        self.taken_bytes = sum(sizes)
        self.source_memories = tuple(SourceMemory(self._chunk_bytes, memory, self.more_memory) for memory in gathering)
        self._kernels = kernels
        self._runs = self._platform.staging.runs(kernels, self._transport, self._platform.now)
        self._calibration = self._platform.calibration(self._transport, kernels, layout, measuring)

    def more_memory(self) -> StagingMemory | None:
        """Allocates as much again for a worker that gathers; None if there is no more, or may not be."""
        with self._lock:
            if self.taken_bytes + self._ring_bytes > self._most_bytes:
                return None
            self.taken_bytes += self._ring_bytes  # before it is allocated: another worker may ask meanwhile
        try:
            (memory,) = self._registered(self._ring_bytes)
            return memory
        except (SettingsError, TransportError) as error:
            log.warning("staged writes go on with the memory that they have: %s", error)
            with self._lock:
                self.taken_bytes -= self._ring_bytes
            return None

    def _registered(self, *sizes: int) -> list[StagingMemory]:
        """Allocates staging memory of each size in bytes, and registers it. Raises as `__init__`."""
        memories = [self._platform.staging.allocate(size, self._layout.device) for size in sizes]
        self._transport.register([memory.region for memory in memories], self._layout.device)
        return memories

    def paths_to(self, message: Attach, plan: PairPlan) -> PathChooser:
        """Makes the chooser of paths to a decode rank, measuring how fast they are. The transport must be connected.

        Raises:
            IncompatiblePeerError: if the settings of both sides force different paths, or one that there is not.
            TransportError: if measuring fails.
        """
        mine, theirs = self._settings.forced_path, message.staging.path
        if mine is not None and theirs is not None and mine is not theirs:
            raise IncompatiblePeerError(
                f"path: the prefill side forces {mine.value} (KVFERRY_PATH), the decode side {theirs.value}"
            )
        forced = mine or theirs
        if not plan.pieces:
            return PathChooser(plan, forced=None, staged=None, problem="nothing is sent there")
        if forced is None or forced is TransferPath.STAGED:
            problem = self._why_not_staged(message, plan)
        else:
            problem = f"the {forced.value} path is forced"
        if problem and forced is TransferPath.STAGED:
            raise IncompatiblePeerError(f"path: staged is forced (KVFERRY_PATH), but cannot be taken: {problem}")
        why = ""
        if forced is None and message.staging.unproven:
            if problem:
                log.warning(
                    "%s could not prove that this rank has ended, and bytes go directly all the same: %s",
                    message.endpoint,
                    problem,
                )
            else:
                forced, why = TransferPath.STAGED, UNPROVEN
        why_not_tokens = ""
        if forced is None and not problem:
            why, why_not_tokens = plan.why_not_direct(Unit.WHOLE), plan.why_not_direct(Unit.TOKEN)
            if why:
                forced = TransferPath.STAGED
            if why or why_not_tokens:
                log.warning(
                    "%s to %s can only go through staging memory: %s",
                    "bytes" if why else "parts of pages",
                    message.endpoint,
                    why or why_not_tokens,
                )
        staged = None if problem else self._staged(message, plan, is_forced=forced is TransferPath.STAGED)
        return PathChooser(plan, forced, staged, problem=problem, why=why, why_not_tokens=why_not_tokens)

    def digest_memory(self) -> DigestMemory:
        """Returns what digests are computed with, made when a decode rank first asks for them.

        Raises:
            SettingsError: if the pool is in a GPU's memory.
        """
        with self._lock:  # decode ranks attach on any worker
            if self._digest_memory is None:
                self._digest_memory = DigestMemory(self._platform.staging, self._layout.regions(), self._layout.device)
            return self._digest_memory

    def _why_not_staged(self, message: Attach, plan: PairPlan) -> str:
        ring = message.staging.ring
        if self._kernels is None:
            return self._problem
        if ring is None:
            return message.staging.problem or "the decode side offers no staging memory"
        largest = max(piece.block_bytes for piece in plan.packed_pieces(Unit.WHOLE))
        if largest > self._chunk_bytes:
            return (
                f"one page of one layer takes {largest} bytes, more than the {self._chunk_bytes} bytes of a sub-chunk: "
                "raise KVFERRY_STAGING_CHUNK_MIB on the prefill side, and KVFERRY_STAGING_RING_MIB on both if need be"
            )
        return ""

    def _staged(self, message: Attach, plan: PairPlan, *, is_forced: bool) -> StagedPath:
        ring = message.staging.ring
        assert ring is not None
        assert self._kernels is not None
        assert self._calibration is not None
        peer = PeerMemory(ring.address, ring.epoch, SharedRing(ring.num_bytes))
        self._kernels.prepare((each.source for unit in Unit for each in plan.packed_pieces(unit)), is_gather=True)
        costs = PathCosts()
        if not is_forced:
            wire = WireKey(
                message.host,
                self._transport.name,
                self._layout.device,
                PeerMetadata.decode(message.transport_metadata).device,
            )
            costs = self._calibration.costs(
                wire,
                message.endpoint,
                Region(ring.address, ring.num_bytes),
                plan.packed_pieces(Unit.WHOLE),
                scatter_bytes_per_s=message.staging.scatter_bytes_per_s,
            )
        chunk_bytes = min(self._chunk_bytes, ring.num_bytes)
        return StagedPath(peer, self._kernels, self._runs, costs, chunk_bytes)


def _pages_in(num_bytes: int, layout: RankLayout) -> int:
    """Returns how many pages fit into memory, of the group that has the largest."""
    of_groups: dict[str, int] = {}
    for shard in layout.shards:
        if shard.component.entry is not Entry.REQUEST:
            of_groups[shard.group] = of_groups.get(shard.group, 0) + shard.bytes_per_page
    return num_bytes // max([1, *of_groups.values()])
