"""Metrics of one endpoint, for Prometheus: docs/observability.md lists them."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvferry import errors
from kvferry.errors import KVFerryError
from kvferry.observe.records import (
    BusyTime,
    Observer,
    Outcome,
    PlacedRecord,
    ReceiverStats,
    Retry,
    SenderStats,
    WriteRecord,
    outcome_of,
)
from kvferry.observe.status import EndpointStatus
from kvferry.plan import TransferPath
from kvferry.protocol.links.proofs import Proof
from kvferry.protocol.transfer.states import TransferState


class Distribution:
    """Counts of values between bounds, as `HistogramMetricFamily` takes them. One thread at a time may use it."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """Begins with no values.

        Args:
            bounds: rising; a value that equals one is below it.
        """
        self._bounds = tuple(bounds)
        self._names = (*(str(float(bound)) for bound in bounds), "+Inf")
        self._counts = [0] * len(self._names)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Counts a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Returns every bound, as Prometheus writes it, and how many values were not above it."""
        return list(zip(self._names, accumulate(self._counts), strict=True))


MOST_NAMED_PEERS = 32
"""Largest number of silent peers with a label each: labels are bounded."""

SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
SUBMIT_SECONDS = (1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 1e-3, 1e-2, 1e-1)

PHASES = ("queue", "credit", "gather", "post", "wire", "arrival", "scatter")
"""What the time of a transfer goes into; see docs/observability.md."""

MIXED = "mixed"
NO_WAY = "none"
WAYS = (*(path.value for path in TransferPath), MIXED, NO_WAY)
"""Which path a transfer took. On a decode rank it is staged if any of it came through staging memory."""

_BATCH = 64
"""Events are counted in batches. Between two rooms the code that counts leaves the processor's cache: alone, each event
would take several times as long."""


class Metrics(Observer):
    """Counts an endpoint's events, and reads the gauges from its status when it is read itself.

    A thread that reports an event only queues it. Once a batch is full, the next write or room that ends counts all
    that is queued; the rest is counted when the metrics are read. Nothing is counted in the caller's time, `submitted`.

    Attributes:
        uncounted: events that are not counted yet.
    """

    def __init__(self, status: Callable[[], EndpointStatus], *, into_pages: TransferPath = TransferPath.DIRECT) -> None:
        """Begins with nothing counted.

        Args:
            status: where the endpoint stands now.
            into_pages: the path of what arrives in pages without a word of it before.
        """
        self._into_pages = into_pages
        # Events that are not counted yet. Any thread adds to them; the one with the lock takes.
        self.uncounted: deque[tuple[Callable[..., object], object]] = deque()
        # Lets one thread count at a time, in the order of the events.
        self._counting = threading.Lock()
        self._registry = registry = CollectorRegistry()
        self._busy = BusyTime()

        def counter(name: str, meaning: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"kvferry_{name}", meaning, labels, registry=registry)

        transfers = counter("transfers", "Transfers that have ended.", ("outcome", "path"))
        self._transfers = {(outcome, way): transfers.labels(outcome.value, way) for outcome in Outcome for way in WAYS}
        self._times = _Times()
        registry.register(self._times)

        def by_path(name: str, meaning: str) -> dict[TransferPath, Counter]:
            found = counter(name, meaning, ("path",))
            return {path: found.labels(path.value) for path in TransferPath}

        self._sent_bytes = by_path("sent_bytes", "Bytes of caches that were written to peers.")
        self._writes = by_path("writes", "Writes of chunks that have completed.")
        self._runs = by_path("runs", "Pieces that the bytes lay in, before neighbours were merged or gathered.")
        self._descriptors = by_path("descriptors", "Descriptors that were posted; through staging, bulk writes.")
        self._failed_writes = counter("failed_writes", "Writes of chunks that failed.")
        self._deferrals = counter("deferrals", "Times that a sub-chunk had to wait for staging memory of either side.")
        self._wire_busy = counter(
            "wire_busy_seconds", "Time with at least one write on its way. Overlapping writes count once."
        )
        self._placed_bytes = counter("placed_bytes", "Bytes that were put from staging memory into pages.")
        self._refusals = counter("refusals", "What was refused, by the error that said so.", ("error",))
        retries = counter("retries", "What was done again.", ("what",))
        self._retries = {what: retries.labels(what.value) for what in Retry}
        self._lost_peers = counter("lost_peers", "Times that a peer was given up.")
        registry.register(_Standing(status))

    def exposition(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        with self._counting:
            self._count()
            return generate_latest(self._registry)

    def _count(self) -> None:
        while self.uncounted:
            count, what = self.uncounted.popleft()
            count(what)

    def _count_batch(self) -> None:
        """Counts the queued events if they are a batch and no other thread does."""
        if len(self.uncounted) >= _BATCH and self._counting.acquire(blocking=False):
            try:
                self._count()
            finally:
                self._counting.release()

    # ---- events -----------------------------------------------------------------------------------------------------

    def submitted(self, seconds: Sequence[float]) -> None:
        self.uncounted.append((self._count_submits, seconds))

    def _count_submits(self, seconds: Sequence[float]) -> None:
        for each in seconds:
            self._times.submits.add(each)

    def wrote(self, room: int, writes: Sequence[WriteRecord]) -> None:
        self.uncounted.append((self._count_writes, writes))
        self._count_batch()

    def _count_writes(self, writes: Sequence[WriteRecord]) -> None:
        for path in {write.path for write in writes}:  # one, nearly always
            its = [write for write in writes if write.path is path]
            self._writes[path].inc(len(its))
            self._sent_bytes[path].inc(sum(write.total_bytes for write in its))
            self._runs[path].inc(sum(write.runs for write in its))
            self._descriptors[path].inc(sum(write.descriptors for write in its))
        phases, busy_s = self._times.phases, 0.0
        for write in writes:
            phases["queue"].add(max(0.0, write.posted_at - write.submitted_at))
            for part in write.parts:
                if part.ready_at < part.begun_at:
                    phases["credit"].add(part.begun_at - part.ready_at)
                phases["gather"].add(part.gathered_at - part.begun_at)
                phases["post"].add(part.posted_at - part.gathered_at)
                phases["wire"].add(part.landed_at - part.gathered_at)
                busy_s += self._busy.add(part.gathered_at, part.landed_at)
        self._wire_busy.inc(busy_s)

    def write_failed(self, room: int, receiver: str, error: Exception) -> None:
        self._failed_writes.inc()

    def deferred(self, receiver: str) -> None:
        self._deferrals.inc()

    def sent(self, room: int, stats: SenderStats, error: Exception | None) -> None:
        paths = {write.path for write in stats.writes}
        way = NO_WAY if not paths else MIXED if len(paths) > 1 else next(iter(paths)).value
        self._ended(way, stats.opened_at, stats.ended_at, error)

    def received(self, room: int, stats: ReceiverStats, error: Exception | None) -> None:
        self.uncounted.append((self._count_placed, stats.placed))
        is_staged = any(placed.num_bytes for placed in stats.placed)
        way = TransferPath.STAGED.value if is_staged else self._into_pages.value if stats.chunks else NO_WAY
        self._ended(way, stats.opened_at, stats.ended_at, error)

    def _count_placed(self, parts: Sequence[PlacedRecord]) -> None:
        for placed in parts:
            self._times.phases["arrival"].add(placed.begun_at - placed.arrived_at)
            self._times.phases["scatter"].add(placed.done_at - placed.begun_at)
            self._placed_bytes.inc(placed.num_bytes)

    def _ended(self, way: str, opened_at: float, ended_at: float | None, error: Exception | None) -> None:
        self.uncounted.append((Counter.inc, self._transfers[outcome_of(error), way]))
        if error is None and ended_at is not None:
            self.uncounted.append((self._times.transfers.add, ended_at - opened_at))
        self._count_batch()

    def refused(self, error: Exception) -> None:
        name = type(error).__name__
        is_ours = isinstance(error, KVFerryError) and hasattr(errors, name)
        self._refusals.labels(name if is_ours else "another").inc()

    def retried(self, what: Retry) -> None:
        self._retries[what].inc()

    def peer_lost(self, peer: str, error: Exception) -> None:
        self._lost_peers.inc()


class _Times(Collector):
    """The histograms."""

    def __init__(self) -> None:
        self.transfers = Distribution(SECONDS)
        self.phases = {phase: Distribution(SECONDS) for phase in PHASES}
        self.submits = Distribution(SUBMIT_SECONDS)

    def collect(self) -> Iterable[Metric]:
        meaning = "From the opening of a room to its end, of transfers that succeeded."
        yield HistogramMetricFamily("kvferry_transfer_seconds", meaning, self.transfers.buckets(), self.transfers.sum)
        phases = HistogramMetricFamily(
            "kvferry_phase_seconds", "What the time of transfers went into.", labels=["phase"]
        )
        for phase, found in self.phases.items():
            phases.add_metric([phase], found.buckets(), found.sum)
        yield phases
        meaning = "How long a caller was busy with handing a chunk in."
        yield HistogramMetricFamily("kvferry_submit_seconds", meaning, self.submits.buckets(), self.submits.sum)


class _Standing(Collector):
    """The gauges: the endpoint's status when they are read."""

    def __init__(self, status: Callable[[], EndpointStatus]) -> None:
        self._status = status

    def describe(self) -> Iterable[Metric]:
        return []  # so that registering does not read the status of an endpoint in the making

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        for families in (_of_the_endpoint, _of_rooms, _of_peers, _of_memory):
            yield from families(status)


def _of_the_endpoint(status: EndpointStatus) -> Iterable[Metric]:
    info = InfoMetricFamily("kvferry_endpoint", "Which endpoint this is.")
    known = {"side": status.side.value, "engine": status.engine, "rank": str(status.rank)}
    info.add_metric([], {**known, "version": status.version})
    yield info
    yield _gauge("healthy", "Whether all threads run, and nothing else is wrong.", float(status.is_healthy))
    yield _gauge("ready", "Whether it takes new rooms, as /readyz says.", float(not status.not_ready))
    yield _gauge("draining", "Whether it is about to leave.", float(status.is_draining))
    failures = CounterMetricFamily("kvferry_thread_failures", "Turns of threads that met an unexpected error.")
    failures.add_metric([], sum(thread.failures for thread in status.threads))
    yield failures


def _of_rooms(status: EndpointStatus) -> Iterable[Metric]:
    states = [(state.value, status.states.get(state.value, 0)) for state in TransferState]
    yield _gauges("rooms", "Rooms that are open.", "state", states)
    yield _gauge("oldest_room_seconds", "How long the oldest room has been open.", status.oldest_room_s)
    load = status.load
    yield _gauge("open_rooms", "Rooms whose transfers have not ended.", load.open_rooms)
    yield _gauge("waiting_rooms", "Of them, those that wait for the other side, or for pages.", load.waiting_rooms)
    yield _gauge(
        "pending_rooms",
        "Rooms that decode ranks have opened and the engine has not: a prefill engine's queue.",
        load.pending_rooms,
    )
    yield _gauge(
        "bytes_in_flight",
        "Bytes of direct writes on their way, and of staged ones that nobody has taken from rings.",
        load.bytes_in_flight,
    )
    yield _gauge(
        "outstanding_exports",
        "Rooms with pages that no decode rank has come for: what a prefill engine keeps for others.",
        load.outstanding_exports,
    )


def _of_peers(status: EndpointStatus) -> Iterable[Metric]:
    ready, silent = sum(peer.is_ready for peer in status.peers), status.silent_peers
    states = [("ready", ready), ("connecting", len(status.peers) - ready), ("silent", len(silent))]
    yield _gauges("peers", "Peers on the other side.", "state", states)
    named = [(peer.name, peer.silent_s) for peer in silent[:MOST_NAMED_PEERS]]
    yield _gauges("peer_silent_seconds", "Peers that have missed two heartbeats, the longest silent.", "peer", named)


def _of_memory(status: EndpointStatus) -> Iterable[Metric]:
    staging = status.staging
    yield _gauge("staging_bytes", "Staging memory for chunks.", staging.total_bytes)
    yield _gauge("staging_used_bytes", "Of it, what holds something or is reserved.", staging.used_bytes)
    yield _gauge("staging_waiting_rooms", "Rooms that wait for staging memory.", staging.waiting_rooms)
    yield _gauge(
        "quarantined_pages", "Pages of failed transfers that a write may still touch.", status.quarantined_pages
    )
    ended = [each.proof or "none" for each in status.quarantine]
    yield _gauges(
        "lost_peers_in_doubt",
        "Prefill ranks that were lost and may still write, by what has proved their end; none: nothing has.",
        "proof",
        [(proof, ended.count(proof)) for proof in ("none", *(each.value for each in Proof))],
    )
    kept_bytes = sum(each.ring_bytes for each in status.quarantine)
    yield _gauge("quarantined_staging_bytes", "Staging memory that lost prefill ranks may still write to.", kept_bytes)
    yield _gauge("quarantine_seconds", "How long the oldest of these transfers has failed.", status.quarantine_s)


def _gauge(name: str, meaning: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvferry_{name}", meaning, value=value)


def _gauges(name: str, meaning: str, label: str, values: Iterable[tuple[str, float]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"kvferry_{name}", meaning, labels=[label])
    for each, value in values:
        family.add_metric([each], value)
    return family
