"""The connections of a prefill rank to decode ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from kvferry.endpoint.prefill.attachment import Attachment, attach
from kvferry.endpoint.prefill.context import PrefillContext
from kvferry.endpoint.runtime.calibration import WriteHangsError
from kvferry.endpoint.runtime.run_queue import Actor, RunQueue
from kvferry.endpoint.runtime.workers import Worker
from kvferry.errors import TransportError
from kvferry.loggers import logger_of
from kvferry.observe.logs import report_silence
from kvferry.observe.status import PeerStatus
from kvferry.plan import TransferPath
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
