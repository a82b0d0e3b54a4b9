"""The writes of a room to one receiver, each by the path that costs least."""

from __future__ import annotations

from kvferry.endpoint.prefill.room_write import DirectWrite, DirectWrites, Target
from kvferry.endpoint.prefill.staged_writes import StagedWrite, StagedWrites
from kvferry.endpoint.runtime.workers import Worker
from kvferry.errors import KVFerryError, PeerDisconnectedError
from kvferry.plan import TransferPath
from kvferry.protocol.transfer.events import Write, WriteFailed


class ReceiverWrites:
    """Those of a room to one receiver. Only the room's own turns use it, where nothing else is said.

    Attributes:
        direct: those into its pages.
        staged: those through its ring.
    """

    def __init__(self, target: Target) -> None:
        """Begins with none."""
        self._target = target
        self.direct = DirectWrites(target)
        self.staged = StagedWrites(target)

    def write(self, command: Write, worker: Worker, *, submitted_at: float) -> None:
        """Begins a write: it is posted when there is memory for it, or when it is admitted.

        Args:
            submitted_at: when the first of its chunks was handed in, and all receivers had opened the room.
        """
        target, attachment = self._target, self._target.attachment
        if not attachment.begin_write():
            self._fail(command, PeerDisconnectedError(f"{command.receiver} is not connected any more"))
            return
        begun_at = target.context.now()
        try:
            choice = attachment.paths.choose(command.unit, target.elected, command.moves)
            if choice.path is TransferPath.STAGED:
                self.staged.write(StagedWrite(command, target, choice, submitted_at=submitted_at, begun_at=begun_at))
                return
        except Exception as error:
            attachment.end_write()
            self._fail(command, error)
            return
        self.direct.write(DirectWrite(command, target, choice, submitted_at=submitted_at, begun_at=begun_at), worker)

    def _fail(self, command: Write, error: Exception) -> None:
        self._target.report_failure(error)
        self._target.room.post(WriteFailed(command.receiver, command.sequence, error))

    def cancel(self, error: KVFerryError, worker: Worker) -> None:
        """Posts nothing more."""
        self.direct.drop()
        self.staged.cancel(error, worker)

    def moved_at(self, now: float) -> float:
        """Returns when something last got on that the writes wait for, also others' to the same receiver."""
        return max(self.direct.moved_at, min(self.staged.moved_at, now), self._target.attachment.moved_at)
