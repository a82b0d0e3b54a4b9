"""All writes of a room to one receiver: the path of each is chosen, and it joins those that go the same way."""

from __future__ import annotations

from kvferry.endpoint.prefill.admission import Admitted
from kvferry.endpoint.prefill.direct_writes import DirectWrite, DirectWrites
from kvferry.endpoint.prefill.room_write import Target
from kvferry.endpoint.prefill.staged_writes import PostNextPart, StagedPart, StagedWrite, StagedWrites
from kvferry.endpoint.runtime.workers import Worker
from kvferry.errors import KVFerryError, PeerDisconnectedError
from kvferry.plan import TransferPath
from kvferry.protocol.transfer.sender_events import Write, WriteFailed


class ReceiverWrites:
    """Those of a room to one receiver. Only the room's own turns use it, where nothing else is said."""

    def __init__(self, target: Target) -> None:
        """Begins with none."""
        self._target = target
        self._direct = DirectWrites(target)
        path = target.attachment.paths.staged
        self._staged = StagedWrites(target, path) if path is not None else None

    def write(self, command: Write, worker: Worker, *, submitted_at: float) -> None:
        """Begins a write: it is posted when there is memory for it, or when it is admitted.

        Args:
            submitted_at: when its chunk was handed in, and all receivers had opened the room.
        """
        target, attachment = self._target, self._target.attachment
        if not attachment.begin_write():
            self._fail(command, PeerDisconnectedError(f"{command.receiver} is not connected any more"))
            return
        begun_at = target.context.now()
        try:
            choice = attachment.paths.choose(command.unit, target.elected, command.moves)
            if choice.path is TransferPath.STAGED:
                staged = self._staged
                assert staged is not None
                staged.write(
                    StagedWrite(command, target, choice, staged.path, submitted_at=submitted_at, begun_at=begun_at)
                )
                return
        except Exception as error:
            attachment.end_write()
            self._fail(command, error)
            return
        self._direct.write(DirectWrite(command, target, choice, submitted_at=submitted_at, begun_at=begun_at), worker)

    @property
    def staged_writes(self) -> list[StagedWrite]:
        """Those through its ring that have not ended. May be read from any thread."""
        return [] if self._staged is None else self._staged.unended

    @property
    def waits_for_memory(self) -> bool:
        """Whether the next sub-chunk waits for memory, on this side or the receiver's. May be read from any thread."""
        return self._staged is not None and self._staged.is_waiting

    @property
    def deferred_chunk(self) -> int | None:
        """The first chunk of which a write waits to be admitted; None if none does."""
        return self._direct.deferred_chunk

    def post_next(self, event: PostNextPart | Admitted, worker: Worker) -> None:
        """Posts what it is the room's turn to post."""
        if isinstance(event, Admitted):
            self._direct.post_admitted(event, worker)
        elif self._staged is not None:
            self._staged.post_next(worker)

    def landed(self, part: StagedPart, worker: Worker) -> None:
        """Takes a sub-chunk that is no longer on its way."""
        assert self._staged is not None
        self._staged.landed(part, worker)

    def _fail(self, command: Write, error: Exception) -> None:
        self._target.report_failure(error)
        self._target.room.post(WriteFailed(command.receiver, command.sequence, error))

    def cancel(self, error: KVFerryError, worker: Worker) -> None:
        """Posts nothing more."""
        self._direct.drop()
        if self._staged is not None:
            self._staged.cancel(error, worker)

    def moved_at(self, now: float) -> float:
        """Returns when something last got on that the writes wait for, also others' to the same receiver."""
        staged = float("-inf") if self._staged is None else self._staged.moved_at
        return max(self._direct.moved_at, min(staged, now), self._target.attachment.moved_at)
