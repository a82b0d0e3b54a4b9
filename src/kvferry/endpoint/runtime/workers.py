"""The threads that move chunks, and the writes that they have on their way.

A worker never waits for a write: it starts the next one and looks at those on their way in between.
"""

from __future__ import annotations

import queue
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial

from kvferry.endpoint.runtime.callers_code import Awaited, AwaitedSignals, CallersCode
from kvferry.endpoint.runtime.platform import Platform
from kvferry.endpoint.runtime.run_queue import RunQueue
from kvferry.endpoint.runtime.threads import Loop, RunningLoop, SleepBounds
from kvferry.endpoint.runtime.writes import Settling, WatchedWrite, WritesInFlight
from kvferry.layout import Device
from kvferry.staging.slots import SourceMemory
from kvferry.transport import Transport

# Also looked at is whether the engine has computed what is to be sent, which a request's first token waits for.
_SLEEPS = SleepBounds(shortest_s=50e-6, of_quiet=1.0, longest_s=1e-3)


class Worker(Loop):
    """Runs the actors of one queue and polls the writes that they started, on a thread of its own.

    Attributes:
        code: runs what looks at signals, which are the caller's.
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
        self._signals = AwaitedSignals(self.code, bind_thread)
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

    def await_signal(self, signal: Awaited) -> None:
        """Looks at a signal until it comes, or is dropped. For actors that run on this worker."""
        self._signals.add(signal)

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
        return self._has_writes or bool(self._signals)

    @property
    def _has_writes(self) -> bool:
        return bool(self._writes or self._settling)

    def turn(self, *, may_wait: bool) -> bool:
        if self._is_stopping and not self._has_writes:
            return False
        has_taken = self._take_one(may_wait=may_wait)
        has_settled = bool(self._settling) and self._settling.look()
        has_come = bool(self._signals) and self._signals.look()
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
