"""The writes of one worker that are on their way, and which of them to poll next.

No transport here says by itself which write has ended: it has to be polled, and its notification leaves with that poll.
Polling all of them after every event would make an event the dearer, the more writes are on their way. So one look is a
bounded number of polls, and those that find an end:

* the oldest write to each peer, one peer after the other. Writes to one peer end about in the order in which they were
  posted, so this finds most; behind one that has ended the next is polled, and so on;
* some of all writes, round and round, so that each is found soon in whatever order they end.

As long as there are few, every look polls all of them.

Those that have failed are counted until all that was sent of them has had time to arrive (`Settling`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Protocol

from kvferry.errors import TransportError
from kvferry.loggers import logger_of
from kvferry.protocol.time_awake import TimeAwake
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
