"""What vLLM keeps beside its prefix cache from before a change, and has to drop: in connectors, and of images.

What an encoder has made of images and the like is found again by their content alone, and keys and values are computed
from it. So once weights are replaced what the old ones made of an image is dropped, in the scheduler and in the
workers; what a request still needs is dropped as soon as none does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from kvferry.loggers import logger_of

log = logger_of(__name__)


class Beside:
    """A connector beside ours, and whether it keeps anything from before: it finds caches by their tokens alone.

    vLLM's own cannot be reset twice between two steps, and whoever replaces weights may ask for it too.
    """

    def __init__(self, connector: Any) -> None:
        self.name = type(connector).__name__
        self._scheduler, self._original = getattr(connector, "connector_scheduler", None), connector.reset_cache
        self._result: bool | None = None
        connector.reset_cache = self._reset

    def computed(self) -> None:
        """Takes that another step is about to run, of which it may keep something."""
        self._result = None

    def is_reset(self) -> bool:
        """Has it drop what it keeps. Returns whether it has."""
        try:
            return self._reset() is True and not self._keeps_more
        except Exception as error:  # whatever it is; vLLM's own asserts that no step is being scheduled
            log.debug("%s was not reset: %s: %s", self.name, type(error).__name__, error)
            return False

    def loads_into(self, blocks: set[int]) -> None:
        """Has it read first what it still needs of blocks: vLLM's own looks at those of steps and of its own loads."""
        allocated: set[int] = getattr(self._scheduler, "_current_batch_allocated_block_ids", set())
        allocated.update(blocks)

    def forget_names(self) -> None:
        """Has it name anew what requests have: once it is reset, vLLM's own stores all of that again, by old hashes."""
        known: Mapping[str, Any] = getattr(self._scheduler, "_req_status", {})
        for request in known.values():
            for group in request.group_states:
                group.offload_keys.clear()

    @property
    def _keeps_more(self) -> bool:
        """Whether it has files or the like, which vLLM leaves as they are."""
        manager = getattr(self._scheduler, "manager", None)
        return bool(getattr(manager, "secondary_tiers", ()))

    def _reset(self) -> bool | None:
        if self._result is not True:
            self._result = self._original()
        return self._result


class EncoderOutputs:
    """Has vLLM drop what was encoded before a change. For the scheduler's thread, between two steps or within one."""

    name = "vLLM's encoder cache"

    def __init__(self, scheduler: Any, executor: Any) -> None:
        self._manager, self._executor = scheduler.encoder_cache_manager, executor
        self._is_elsewhere = scheduler.ec_connector is not None
        self._keeps_elsewhere = False
        self._old: set[str] = set()  # what is there from before

    def outdate(self, adapter: str) -> None:
        """Takes that what is there now is not to be used for other requests.

        Args:
            adapter: the name of what has changed, where encoders may have adapters; empty for the weights.
        """
        concerned = {key for key in self._manager.cached if key.startswith(adapter and f"{adapter}:")}
        self._old |= concerned
        self._keeps_elsewhere |= self._is_elsewhere and (not adapter or bool(concerned))

    def is_reset(self) -> bool:
        """Has vLLM drop what no request needs. Returns whether nothing is there from before."""
        if self._old:
            room = self._manager.num_freeable_slots
            asking = SimpleNamespace(get_num_encoder_embeds=lambda _: room)
            self._manager.can_allocate(asking, 0, room, 0)  # as for one that needs all the room
            self._drop(sorted(self._old.difference(self._manager.cached)))
        return not (self._old or self._keeps_elsewhere)

    def _drop(self, keys: Sequence[str]) -> None:
        """Has the workers drop what the scheduler has dropped: some keep what comes again before the next step."""
        if not keys:
            return
        try:
            problems = "; ".join(filter(None, self._executor.collective_rpc(drop_encoded, args=(keys,))))
        except Exception as error:  # an executor's, whatever it is
            problems = f"{type(error).__name__}: {error}"
        if problems:
            log.debug("%s was not cleared in workers, and is tried again: %s", self.name, problems)
        else:
            self._old.difference_update(keys)


def drop_encoded(worker: Any, keys: Sequence[str]) -> str:
    """Has a worker drop what was encoded. Returns what went wrong, and does not raise, as `parameter_sums`."""
    try:
        cache = worker.model_runner.encoder_cache
        outputs = getattr(cache, "encoder_outputs", cache)  # of the second model runner, and of the first
        for key in keys if outputs else ():  # stages behind the first may have none
            outputs.pop(key, None)
    except Exception as error:  # a model runner's, whatever it is
        return f"{type(error).__name__}: {error}"
    return ""
