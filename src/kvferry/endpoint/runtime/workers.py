"""The threads that move chunks, and the writes that they have on their way.

A worker never waits for a write: it starts the next one and looks at those on their way in between. No transport here
says by itself which write has ended: it has to be polled, and its notification leaves with that poll. Polling all of
them after every event would make an event the dearer, the more writes are on their way. So one look is a bounded number
of polls, and those that find an end:

* the oldest write to each peer, one peer after the other. Writes to one peer end about in the order in which they were
  posted, so this finds most; behind one that has ended the next is polled, and so on;
* some of all writes, round and round, so that each is found soon in whatever order they end.

As long as there are few, every look polls all of them.

Those that have failed are counted until all that was sent of them has had time to arrive (`Settling`).
"""

from __future__ import annotations

import queue
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from kvferry.endpoint.runtime.callers_code import AwaitedSignals, CallersCode
from kvferry.endpoint.runtime.platform import Platform
from kvferry.endpoint.runtime.run_queue import RunQueue
from kvferry.endpoint.runtime.threads import Loop, RunningLoop, SleepBounds
from kvferry.errors import TransportError
from kvferry.layout import Device
from kvferry.loggers import logger_of
from kvferry.protocol.time_awake import TimeAwake
from kvferry.staging.runs import Comings
from kvferry.staging.slots import SourceMemory
from kvferry.transport import TransferHandle, TransferReport, Transport

log = logger_of(__name__)

MOST_POLLS = 32
"""Most polls of one look that find nothing, while the worker has events to handle. So many writes are all polled."""

LOOKS_AROUND = 64
"""Looks after which every write was polled, while the worker has nothing else to do."""


class WatchedWrite(Protocol):
    """A write on its way. Told apart by identity; called on the thread of the worker that polls it."""

    @property
    def transfer(self) -> TransferHandle:
        """The transport's handle."""

    @property
    def receiver(self) -> str:
        """Whose memory is written."""

    def done(self, report: TransferReport) -> None:
        """It is complete."""

    def failed(self, error: Exception, *, is_read: bool) -> None:
        """It has failed, and what was sent of it may arrive yet.

        Args:
            is_read: whether our memory may be read for it yet, too: it was never known to have ended.
        """

    def settled(self, error: Exception) -> None:
        """It has failed, nothing can arrive in the receiver's memory any more, and nothing reads ours."""

    def broke(self, error: BaseException) -> None:
        """Polling raised what no transport should, for the first time: whether it has ended is not known."""


class WritesInFlight:
    """Polls the writes that one worker has posted. For that worker's thread only.

    Attributes:
        of_peers: the writes, by peer.
    """

    def __init__(self, transport: Transport, on_failed: Callable[[WatchedWrite, Exception], None]) -> None:
        """Begins with none; `on_failed` is called with each that fails."""
        self._transport = transport
        self._on_failed = on_failed
        self._all: OrderedDict[WatchedWrite, None] = OrderedDict()  # the one that is polled next comes first
        self._broken: set[WatchedWrite] = set()
        # By peer, the oldest write first; the peer whose turn it is comes first. Those that broke are not here.
        self.of_peers: OrderedDict[str, OrderedDict[WatchedWrite, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, write: WatchedWrite) -> None:
        """Polls a write at once, and from then on until it ends."""
        if self._ends(write):
            return
        self._all[write] = None
        if write not in self._broken:
            self.of_peers.setdefault(write.receiver, OrderedDict())[write] = None

    def look(self, *, has_time: bool) -> bool:
        """Polls some of the writes, and handles those that have ended; returns whether there were any.

        Args:
            has_time: whether the worker has nothing else to do.
        """
        before = len(self._all)
        if before <= MOST_POLLS:
            for write in list(self._all):
                self._poll(write)
        else:
            self._look_at_oldest(MOST_POLLS // 2)
            self._look_around(max(MOST_POLLS // 2, -(-before // LOOKS_AROUND) if has_time else 0))
        return len(self._all) < before

    def _look_at_oldest(self, peers: int) -> None:
        for _ in range(min(peers, len(self.of_peers))):
            writes = next(iter(self.of_peers.values()))
            self.of_peers.move_to_end(next(iter(self.of_peers)))
            while writes and self._poll(next(iter(writes))):
                pass

    def _look_around(self, count: int) -> None:
        for _ in range(min(count, len(self._all))):
            write = next(iter(self._all))
            self._all.move_to_end(write)
            self._poll(write)

    def _poll(self, write: WatchedWrite) -> bool:
        """Polls a write; returns whether it need not be looked at any more as the oldest of its peer."""
        has_ended = self._ends(write)
        if has_ended:
            del self._all[write]
        if has_ended or write in self._broken:
            self._take_from_peer(write)
        return has_ended or write in self._broken

    def _take_from_peer(self, write: WatchedWrite) -> None:
        writes = self.of_peers.get(write.receiver, OrderedDict())
        writes.pop(write, None)
        if not writes:
            self.of_peers.pop(write.receiver, None)

    def _ends(self, write: WatchedWrite) -> bool:
        """Polls a write, and says so if it has ended."""
        try:
            report = self._transport.poll(write.transfer)
        except TransportError as error:
            self._release(write)
            self._on_failed(write, error)
            return True
        except BaseException as error:
            if write not in self._broken:
                self._broken.add(write)
                log.exception("the transport broke while a write was polled")
                write.broke(error)
            return False
        if report is None:
            return False
        self._release(write)
        write.done(report)
        return True

    def _release(self, write: WatchedWrite) -> None:
        self._broken.discard(write)
        try:
            self._transport.release(write.transfer)
        except Exception as error:
            log.warning("a finished write could not be released: %s", error)


class Settling:
    """Writes that have failed, until all that was sent of them has had time to arrive. For one thread.

    A transport that reports an error sends nothing more. What it had sent lies in buffers of both machines, and lands
    when the receiver's processor comes to it: after the error. Until then the receiver's memory is not its own again.
    Both sides count: the writer before it says that nothing is on its way, and the receiver, which may have been frozen
    all that time and reads its sockets only now, from then on.

    The writer's kernel sends whether or not the writer runs, so that there a late look loses nothing but a jump of the
    clock; the receiver must not count the time of its own freeze. Hence on both sides a part of the time at most
    counts at a look (`TimeAwake`).
    """

    def __init__(self, settle_s: float, now: Callable[[], float]) -> None:
        """Starts with no writes.

        Args:
            settle_s: how long what was sent may take to arrive.
        """
        self._settle_s = settle_s
        self._now = now
        self._awake = TimeAwake(settle_s)
        self._awake_s = 0.0  # that has passed
        self._failed: deque[tuple[float, Callable[[], None]]] = deque()  # with when they settle, in that time

    def __bool__(self) -> bool:
        return bool(self._failed)

    def add(self, on_settled: Callable[[], None]) -> None:
        """Begins to count for a write that has just failed, or of which that was just heard."""
        self.look()
        self._failed.append((self._awake_s + self._settle_s, on_settled))

    def look(self) -> bool:
        """Calls `on_settled` of those that have settled; returns whether there were any. Must be called often.

        Of a long time between two calls only a part counts: this process was frozen, or its clock jumped.
        """
        self._awake_s += self._awake.passed_s(self._now())
        has_settled = False
        while self._failed and self._failed[0][0] <= self._awake_s:
            _, on_settled = self._failed.popleft()
            on_settled()
            has_settled = True
        return has_settled


# Also looked at is whether the engine has computed what is to be sent, which a request's first token waits for.
_SLEEPS = SleepBounds(shortest_s=50e-6, of_quiet=1.0, longest_s=1e-3)


class Worker(Loop):
    """Runs the actors of one queue and polls the writes that they started, on a thread of its own.

    Attributes:
        code: runs what looks at signals, which are the caller's.
        signals: those that it looks at until they come, or are dropped, for actors that run on it.
    """

    def __init__(
        self,
        run_queue: RunQueue,
        transport: Transport,
        settling: Settling,
        memory: SourceMemory | None = None,
        bind_thread: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes a queue; the worker runs nothing before its thread does.

        Args:
            settling: the writes that failed, until they settle.
            memory: staging memory of its own, if it gathers.
            bind_thread: called on the worker's thread before it looks at events of the pool's device.
            now: the time, in seconds of a steady clock.
        """
        self._run_queue = run_queue
        self._memory = memory
        self._transport = transport
        self._writes = WritesInFlight(transport, self._failed)
        self._settling = settling
        self.code = CallersCode(now)
        self.signals = AwaitedSignals(self.code, bind_thread)
        self._is_stopping = False
        self._last_news_at = time.monotonic()

    @property
    def held_up_by(self) -> str:  # type: ignore[override]
        return self.code.held_up_by

    @property
    def memory(self) -> SourceMemory:
        """Staging memory of this worker, for actors that run on it. Only workers that gather have any."""
        assert self._memory is not None
        return self._memory

    def comings(self, due_at: float) -> Comings:
        """Returns what ends a run of who was due then: as `RunQueue.comings`."""
        return self._run_queue.comings(due_at)

    def watch(self, write: WatchedWrite) -> None:
        """Polls a write until it ends, and tells it. For actors that run on this worker.

        If polling raises what no transport should, the write is told once, and polled on.
        """
        self._writes.add(write)

    def post_raised(self, write: WatchedWrite, error: Exception) -> None:
        """Takes a write whose post raised: it counts as one that failed on its way, unless nothing of it was posted."""
        if self._transport.promises.posts_all_or_nothing:
            write.settled(error)
        else:
            self._settle(write, error, is_read=True)

    def _failed(self, write: WatchedWrite, error: Exception) -> None:
        if self._transport.may_deliver_late:
            self._settle(write, error, is_read=False)
        else:
            write.settled(error)

    def _settle(self, write: WatchedWrite, error: Exception, *, is_read: bool) -> None:
        write.failed(error, is_read=is_read)
        self._settling.add(partial(write.settled, error))

    def has_work(self) -> bool:
        return self._run_queue.has_any or self._is_stopping

    def polls(self) -> bool:
        return self._has_writes or bool(self.signals)

    @property
    def _has_writes(self) -> bool:
        return bool(self._writes or self._settling)

    def turn(self, *, may_wait: bool) -> bool:
        if self._is_stopping and not self._has_writes:
            return False
        has_taken = self._take_one(may_wait=may_wait)
        has_settled = bool(self._settling) and self._settling.look()
        has_come = bool(self.signals) and self.signals.look()
        if self._writes.look(has_time=not has_taken) or has_settled or has_taken or has_come:
            self._last_news_at = time.monotonic()
        return True

    def _take_one(self, *, may_wait: bool) -> bool:
        """Runs the next actor. Waits until there is one, or only until the next poll while writes are in flight."""
        sleep_s = _SLEEPS.next_s(time.monotonic() - self._last_news_at)
        if self._is_stopping:
            if may_wait:
                time.sleep(sleep_s)
            return False
        if not may_wait and not self._run_queue.has_any:
            return False
        try:
            actor = self._run_queue.take((sleep_s if self.polls() else None) if may_wait else 0.0)
        except queue.Empty:
            return False
        if actor is None:
            self._is_stopping = True
        else:
            actor.take_turn(self)
        return True


class WorkerPool:
    """All workers of a prefill endpoint: some for rooms and peers, and some that gather.

    Attributes:
        queues: the actors that the first kind runs.
        gathering: the actors whose next event is to gather.
        threads: those of all workers.
    """

    def __init__(
        self,
        count: int,
        num_queues: int,
        transport: Transport,
        memories: Sequence[SourceMemory],
        *,
        settle_s: float,
        platform: Platform,
        name: str,
        device: Device,
    ) -> None:
        """Starts the workers.

        Args:
            count: workers for rooms and peers, spread over num_queues queues in turn.
            memories: staging memory of every worker that gathers.
            settle_s: how long after a write has failed something of it may still arrive.
            device: the pool's, whose events workers look at.
        """
        self.queues = tuple(RunQueue() for _ in range(num_queues))
        self.gathering = RunQueue()
        workers: list[tuple[str, RunQueue, SourceMemory | None]] = [
            (f"{name}-worker-{index}", self.queues[index % num_queues], None) for index in range(count)
        ]
        workers += [(f"{name}-gather-{index}", self.gathering, memory) for index, memory in enumerate(memories)]
        self._stops: list[RunQueue] = []
        self._workers: list[Worker] = []
        threads: list[RunningLoop] = []
        try:
            for thread_name, run_queue, memory in workers:
                settling = Settling(settle_s, platform.now)
                bind_thread = partial(platform.staging.bind_thread, device)
                worker = Worker(run_queue, transport, settling, memory, bind_thread, platform.now)
                self._workers.append(worker)
                threads.append(platform.start(thread_name, worker))
                self._stops.append(run_queue)
        except BaseException:
            self.stop()
            raise
        self.threads = tuple(threads)

    def queue_of(self, key: bytes) -> RunQueue:
        """Returns the queue for a key, the same one every time."""
        return self.queues[zlib.crc32(key) % len(self.queues)]

    @property
    def held_up_by(self) -> list[str]:
        """What of the caller's code workers have been in for long, in words."""
        return [worker.held_up_by for worker in self._workers if worker.held_up_by]

    def report_held_up(self) -> None:
        """Logs, once each, which signals do not return that workers look at."""
        for worker in self._workers:
            worker.code.report()

    def stop(self) -> None:
        """Ends all workers once their writes have ended. May be called again."""
        while self._stops:
            self._stops.pop().put(None)

    @property
    def running(self) -> int:
        """Number of workers that still run."""
        return sum(thread.is_alive for thread in self.threads)
