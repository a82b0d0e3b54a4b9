"""The requests that a worker receives: what vLLM hears of them, once nothing is written to their blocks any more.

Nothing here looks at a request of which nothing has happened, however many are on their way: rooms call back when they
change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from kvferry import Receiver, TransferState
from kvferry.engines.vllm.blocks import LoadedBlocks
from kvferry.engines.vllm.stats import TransferLog
from kvferry.engines.vllm.steps import BlocksToReceive


@dataclass(slots=True)
class _Load:
    """A request on its way.

    Attributes:
        is_given_up: whether what comes of it is not to be used, even if all does.
    """

    blocks: BlocksToReceive
    receiver: Receiver
    is_given_up: bool = False


class IncomingRequests:
    """The requests that a worker receives. Only its main thread calls this."""

    def __init__(self, log: TransferLog, loaded_blocks: LoadedBlocks | None) -> None:
        """Begins with none.

        Args:
            log: is told of those that have ended.
            loaded_blocks: clears what loads leave in their blocks; None where vLLM clears no blocks either.
        """
        self._log = log
        self._loaded_blocks = loaded_blocks
        self._loads: dict[str, _Load] = {}
        self._changed: deque[str] = deque()  # names of those of which something has happened, as often as it has
        self._failed: set[str] = set()  # to be reported as such: those without a room, or whatever has come of them
        self._came: set[str] = set()  # to be reported as received: those that needed no room

    @property
    def receivers(self) -> list[Receiver]:
        """The rooms of those on their way."""
        return [load.receiver for load in self._loads.values()]

    def add(self, blocks: BlocksToReceive, receiver: Receiver) -> None:
        """Takes a request whose room is open."""
        request = blocks.request
        self._loads[request] = _Load(blocks, receiver)
        receiver.add_change_callback(partial(self._changed.append, request))
        self._changed.append(request)  # it may have changed before

    def have_come(self, request: str) -> None:
        """Takes a request whose cache was here."""
        self._came.add(request)

    def fail(self, requests: Iterable[str]) -> None:
        """Takes requests that are to fail, though they were not asked for, or have come."""
        self._failed.update(requests)

    def give_up(self, request: str, reason: str) -> bool:
        """Aborts a request. Returns whether it is on its way here."""
        load = self._loads.get(request)
        if load is None:
            return False
        load.receiver.abort(reason)
        load.is_given_up = True
        return True

    def take_ended(self) -> tuple[set[str], set[str]]:
        """Returns the requests that have ended since the last call, and those of them that failed."""
        failed, self._failed = self._failed, set()
        came, self._came = self._came, set()
        ended = failed | came
        while self._changed:
            request = self._changed.popleft()
            load = self._loads.get(request)
            if load is None or not load.receiver.pages_reusable:
                continue
            del self._loads[request]
            self._log.received(request, load.receiver)
            ended.add(request)
            if load.receiver.state is not TransferState.SUCCESS or load.is_given_up:
                failed.add(request)  # vLLM clears its blocks itself, as it gives them out again
            elif self._loaded_blocks is not None:
                self._loaded_blocks.clear(load.blocks, load.receiver.stats.absent)
        return ended, failed
