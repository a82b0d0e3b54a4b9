"""Decode ranks by name: the connections of a prefill rank to them, and what it remembers of others.

Of each there is a connection, which workers make and undo, and a reliable channel; and it is remembered who was given
up.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from kvferry.endpoint.prefill.attachment import Attachment, attach
from kvferry.endpoint.prefill.context import PrefillContext
from kvferry.endpoint.runtime.calibration import WriteHangsError
from kvferry.endpoint.runtime.run_queue import Actor, RunQueue
from kvferry.endpoint.runtime.workers import Worker
from kvferry.errors import KVFerryError, TransportError
from kvferry.loggers import logger_of
from kvferry.observe.logs import report_silence
from kvferry.observe.status import PeerStatus
from kvferry.plan import TransferPath
from kvferry.protocol.bounded import remember
from kvferry.protocol.links.reliable_channel import DecodeChannels
from kvferry.protocol.wire.field_types import DecodeRank
from kvferry.protocol.wire.messages import Attach, Attached, Refused
from kvferry.transport import TransferHandle, TransferReport

log = logger_of(__name__)

_MOST_ASKED = 4
"""A decode rank asks again with every heartbeat. As often a write that measures may still be on its way: on a machine
on which many processes start, or a network that is down for a moment, such a write is slow and arrives."""


@dataclass(frozen=True, slots=True)
class DetachRequested:
    """The decode rank has closed, or is lost."""


@dataclass(frozen=True, slots=True)
class EarlierUndone:
    """The connection before this one is undone."""


@dataclass(frozen=True, slots=True, eq=False)
class HangingWrite:
    """A write that measures, and may not have ended. Once it is over the connection gets it as an event.

    Attributes:
        peer: the connection that is measured.
        transfer: the transport's handle; of no use where posting it raised.
        request: the attempt to attach, which can go on when the write is over.
    """

    peer: DecodePeer
    transfer: TransferHandle
    request: Attach

    @property
    def receiver(self) -> str:
        """Whose memory is written."""
        return self.peer.name

    def done(self, _: TransferReport) -> None:
        self.peer.post(self)

    def failed(self, _: Exception, *, is_read: bool) -> None:
        self.peer.broken_off()  # what was sent of it may arrive yet, so that it counts as hanging

    def settled(self, _: Exception) -> None:
        self.peer.post(self)

    def broke(self, _: BaseException) -> None:
        """Does nothing: the write may not have ended, so that it counts as hanging."""


PeerEvent: TypeAlias = Attach | DetachRequested | EarlierUndone | HangingWrite


def refused(attempt: int, error: Exception) -> Refused:
    """Makes the answer to an attempt to attach that fails."""
    return Refused(attempt=attempt, error=type(error).__name__, reason=str(error))


class DecodePeer(Actor):
    """One connection to a decode rank: made and undone on a worker, since either may take a while.

    It is undone when no write uses it any more, and until then no later one to the same decode rank is made.

    Attributes:
        name: the decode rank's endpoint.
        attempt: the number that the decode rank gave this connection.
        last_message_at: when the control thread last received a message from it; only that thread writes it.
        attachment: what was prepared, once it is.
        later: the next connection to the same decode rank, which waits until this one is undone.
    """

    def __init__(
        self,
        name: str,
        run_queue: RunQueue,
        context: PrefillContext,
        *,
        attempt: int,
        must_wait: bool,
        on_undone: Callable[[DecodePeer], None],
        now: float,
    ) -> None:
        """Begins with nothing prepared.

        Args:
            must_wait: whether an earlier connection to the same decode rank is still to be undone.
            on_undone: called once this connection is undone, from the thread that undoes it.
        """
        super().__init__(run_queue)
        self.name = name
        self.attempt = attempt
        self.last_message_at = now
        self.attachment: Attachment | None = None
        self.later: DecodePeer | None = None
        self._must_wait = must_wait
        self._on_undone = on_undone
        self._hanging: TransportError | None = None  # set while a write hangs: as long the rank must stay connected
        self._asked = 0  # how often it asked meanwhile
        self._is_detaching = False
        self._waiting: list[PeerEvent] = []
        self._context = context
        self._is_silence_reported = False

    def status(self, now: float) -> PeerStatus:
        """Returns the status of this peer. May be called from any thread."""
        is_ready = self.attachment is not None
        state = "detaching" if self._is_detaching else "ready" if is_ready else "connecting"
        silent_s = max(0.0, now - self.last_message_at)
        return PeerStatus(name=self.name, state=state, is_ready=is_ready, silent_s=silent_s)

    def report_silence(self, silence_s: float, noticed_s: float) -> None:
        """Logs, once, that the decode rank has fallen silent. For the control thread only."""
        is_silent = silence_s > noticed_s
        if is_silent and not self._is_silence_reported:
            report_silence(f"decode rank {self.name}", self.name, silence_s)
        self._is_silence_reported = is_silent

    def broken_off(self) -> None:
        """A write to the decode rank failed of which something had been sent."""
        self._context.broken_off.add(self.name)

    def handle(self, event: PeerEvent, worker: Worker) -> None:
        """Connects or disconnects, once the earlier connection is undone."""
        if event not in self._waiting:  # a decode rank asks again with every heartbeat
            self._waiting.append(event)
        if isinstance(event, EarlierUndone):
            self._must_wait = False
        if self._must_wait:
            return
        events, self._waiting = self._waiting, []
        for each in events:
            match each:
                case Attach():
                    self._attach(each, worker)
                case DetachRequested():
                    self._is_detaching = True
                    dropped, self.attachment = self.attachment, None
                    if dropped is not None:
                        dropped.retire(partial(self._detach, dropped))
                    elif self._hanging is None:
                        self._on_undone(self)
                case HangingWrite(request=request):
                    self._hanging = None
                    self._disconnect(partial(self._context.transport.disconnect, self.name))
                    if self._is_detaching:
                        self._on_undone(self)
                    elif self._asked <= _MOST_ASKED:
                        self._attach(request, worker)

    def broke(self, error: BaseException, worker: Worker) -> None:
        """Logs the error. Errors of connecting and disconnecting are handled where they occur."""
        log.error("the connection to decode rank %s met an unexpected error", self.name, exc_info=error)

    def _attach(self, message: Attach, worker: Worker) -> None:
        if self.attachment is not None:  # the same message twice: the answer may have been lost
            self._confirm(self.attachment)
            return
        if self._hanging is not None:
            self._asked += 1
            if self._asked > _MOST_ASKED:
                self._refuse(self._hanging)
            return
        context = self._context
        try:
            self.attachment = attach(
                message,
                mine=context.identity,
                transport=context.transport,
                staging=context.staging,
                broken_off=self.broken_off,
            )
        except WriteHangsError as error:
            self._hanging = TransportError(str(error))
            log.warning("decode rank %s has to wait: %s", self.name, error)
            write = HangingWrite(self, error.transfer or TransferHandle(), message)
            if isinstance(error.__cause__, Exception) and error.transfer is None:
                worker.post_raised(write, error.__cause__)
            else:
                worker.watch(write)
        except Exception as error:
            self._refuse(error)
        else:
            self._confirm(self.attachment)

    def _confirm(self, attachment: Attachment) -> None:
        attached = Attached(
            endpoint=self._context.identity.endpoint,
            attempt=self.attempt,
            only_staged=attachment.paths.forced is TransferPath.STAGED,
            last_failure=self._context.broken_off.last_failure_to(self.name),
        )
        self._context.send(self.name, attached)

    def _refuse(self, error: Exception) -> None:
        log.warning("refused decode rank %s: %s", self.name, error)
        self._context.observer.refused(error)
        self._context.send(self.name, refused(self.attempt, error))

    def _detach(self, dropped: Attachment) -> None:
        self._disconnect(dropped.release)
        self._on_undone(self)

    def _disconnect(self, how: Callable[[], None]) -> None:
        try:
            how()
        except Exception as error:
            log.warning("the connection to decode rank %s could not be undone: %s", self.name, error)


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A decode rank that was given up, and may come back.

    Attributes:
        rank: which it is; None if it had not attached.
        error: why.
    """

    rank: DecodeRank | None
    error: KVFerryError


class DecodeRanks:
    """All decode ranks. May be read from any thread; the control thread attaches, loses and forgives them.

    Attributes:
        channels: the reliable channels to them, for the control thread.
    """

    def __init__(self, context: PrefillContext, *, queue_of: Callable[[bytes], RunQueue]) -> None:
        """Begins with nobody connected, and nothing to remember.

        Args:
            queue_of: returns where a connection waits for a worker.
        """
        self.channels = DecodeChannels(context.identity.endpoint)
        self._queue_of = queue_of
        self._context = context
        # Guards both tables of connections, which workers read while the control thread adds and removes.
        self._lock = threading.Lock()
        self._peers: dict[str, DecodePeer] = {}
        self._detaching: dict[str, DecodePeer] = {}
        self._given_up: OrderedDict[str, GivenUp] = OrderedDict()  # the latest stand last

    # ---- connections --------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Returns the number of connections, those that are being undone included."""
        with self._lock:
            return len(self._peers) + len(self._detaching)

    def peers(self) -> list[DecodePeer]:
        """Returns the connections."""
        with self._lock:
            return list(self._peers.values())

    def peer(self, name: str) -> DecodePeer | None:
        """Returns the connection to a decode rank; None if it is not connected."""
        with self._lock:
            return self._peers.get(name)

    def attachment(self, name: str) -> Attachment | None:
        """Returns what is prepared for a decode rank; None if it is not connected."""
        peer = self.peer(name)
        return peer.attachment if peer is not None else None

    def is_attached(self, name: str) -> bool:
        """Whether a decode rank is connected, and messages to it come."""
        return self.attachment(name) is not None and self.channels.is_open(name)

    def attach(self, message: Attach, now: float) -> bool:
        """Connects a decode rank, perhaps anew. Returns whether it does so for the first time with this attempt."""
        self.forgive(message.endpoint)
        is_first = self.channels.attached(message.endpoint, message.attempt)
        self._connect(message, now)
        return is_first

    def _connect(self, message: Attach, now: float) -> None:
        """Makes a new connection to a decode rank. An earlier one is undone first; a later one stays."""
        name, attempt = message.endpoint, message.attempt
        known = self.peer(name)
        if known is not None and known.attempt > attempt:
            return
        if known is None or known.attempt < attempt:
            self._disconnect(name)
            with self._lock:
                earlier = self._detaching.get(name)
                known = DecodePeer(
                    name,
                    self._queue_of(name.encode()),
                    self._context,
                    attempt=attempt,
                    must_wait=earlier is not None,
                    on_undone=self._undone,
                    now=now,
                )
                if earlier is not None:
                    earlier.later = known
                self._peers[name] = known
        known.post(message)

    def _disconnect(self, name: str) -> None:
        """Takes a connection out of the table and undoes it."""
        with self._lock:
            peer = self._peers.pop(name, None)
            if peer is None:
                return
            self._detaching[name] = peer
        peer.post(DetachRequested())

    def _undone(self, peer: DecodePeer) -> None:
        """Forgets a connection that is undone; the one that waits for that goes on."""
        with self._lock:
            if self._detaching.get(peer.name) is peer:
                del self._detaching[peer.name]
            later = peer.later
        if later is not None:
            later.post(EarlierUndone())

    # ---- who they are, and were ---------------------------------------------------------------------------------

    @property
    def all(self) -> list[str]:
        """All that are connected or were given up."""
        return [*(peer.name for peer in self.peers()), *self._given_up]

    def rank(self, name: str) -> DecodeRank | None:
        """Returns which decode rank has that name; None if it has not attached."""
        attachment, given_up = self.attachment(name), self._given_up.get(name)
        return attachment.rank if attachment is not None else given_up.rank if given_up is not None else None

    def connected(self) -> list[DecodeRank | None]:
        """Returns which decode ranks are connected; None for one that has not attached yet."""
        return [each.rank if (each := peer.attachment) is not None else None for peer in self.peers()]

    def lose(self, name: str) -> DecodeRank | None:
        """Ends all that there is to a decode rank. Returns which it was; None if it had not attached."""
        rank = self.rank(name)
        self.channels.close(name)
        self._disconnect(name)
        return rank

    def give_up(self, name: str, error: KVFerryError) -> DecodeRank | None:
        """Loses a decode rank that may come back, and remembers why; returns as `lose`."""
        remember(self._given_up, name, GivenUp(self.rank(name), error), self._context.settings.max_decode_ranks)
        return self.lose(name)

    def forgive(self, name: str) -> None:
        """Forgets that a decode rank was given up."""
        self._given_up.pop(name, None)

    def given_up(self, name: str) -> GivenUp | None:
        """Returns what is known of a decode rank that was given up; None if it was not, or has come back."""
        return self._given_up.get(name)
