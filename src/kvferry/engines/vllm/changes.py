"""What changes in an engine that runs: weights and adapters that are replaced in place, and caches that are reset.

vLLM tells connectors of the last alone. The others are asked of its core, in the process and on the thread of its
scheduler, between two steps; so what it is asked is watched there. A change ends what is on its way from before, and
what was cached before is found by nobody any more: it would be sent, or answered from, as if the new weights had
computed it. Requests that go on with what they have, as vLLM lets them, share nothing of it with others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from uuid import uuid4

from kvferry.engines.vllm.adapters import Adapters, files_in
from kvferry.engines.vllm.caches import BlockPool, BlockTables
from kvferry.engines.vllm.identity import Conditions
from kvferry.engines.vllm.kept import Beside, EncoderOutputs
from kvferry.engines.vllm.scheduling import SchedulerSide
from kvferry.engines.vllm.weights import content_of, parameter_sums
from kvferry.errors import SettingsError, UsageError
from kvferry.loggers import logger_of

log = logger_of(__name__)

_UNTIL_FINISHED = frozenset({"start_weight_update", "update_weights"})
"""What workers are asked in the middle of an update: until it is finished, nobody knows what the weights are."""


class _AsleepError(Exception):
    """Weights that have no memory."""


class Changes:
    """Takes what changes in the engine of a connector's side in the scheduler. Owned by its thread.

    Attributes:
        follows_sleep: whether sleeping discards what was cached.
    """

    def __init__(self, side: SchedulerSide, conditions: Conditions, *, follows_sleep: bool = False) -> None:
        """Begins with an engine that has just started.

        Args:
            follows_sleep: whether this vLLM tells connectors when it gives the caches' memory back.
        """
        self.follows_sleep = follows_sleep
        self._side, self._conditions = side, conditions
        self._requests: dict[str, Any] = {}  # those that have come in and not ended
        self._tables: BlockTables | None = None
        self._pool: BlockPool | None = None
        self._beside: list[Beside] = []
        self._encoded: EncoderOutputs | None = None
        self._core: Any = None  # vLLM's
        self._executor: Any = None  # vLLM's: asks the workers
        self._is_updating = False  # whether an update of the weights has begun and not ended
        self._arrived: set[str] = set()  # vLLM's own: those whose caches have come, and that have not gone on yet
        self.adapters.replaced = self._adapter_replaced

    @property
    def adapters(self) -> Adapters:
        return self._conditions.adapters

    def bind(self, tables: BlockTables, pool: BlockPool) -> None:
        """Takes where blocks are looked up and found again. Called once, before anything is scheduled."""
        self._tables, self._pool = tables, pool

    def stands_beside(self, connectors: Sequence[Any]) -> None:
        """Takes which connectors there are, ours among them. Once is enough."""
        if not self._beside:
            self._beside = [Beside(each) for each in connectors if getattr(each, "changes", None) is not self]

    def serves(self, core: Any) -> None:
        """Takes vLLM's core, whose scheduler this is. Once is enough."""
        if self._encoded is None:
            self._core, self._executor = core, core.model_executor
            self._arrived = core.scheduler.finished_recving_kv_req_ids
            self._encoded = EncoderOutputs(core.scheduler, core.model_executor)

    @property
    def is_paused(self) -> bool:
        """Whether vLLM was asked for a pause, which is over for whoever asked once nothing is held."""
        return self._core is not None and bool(self._core.scheduler.pause_state)

    def between_steps(self) -> None:
        """Drops what connectors beside ours keep from before, where they could not do so in the middle of a step."""
        if self._conditions.weights.are_mixed:
            self._reset_others()

    def came_in(self, request: Any) -> None:
        """Takes a request that has just come in."""
        self.between_steps()
        self._requests[request.request_id] = request

    def scheduled(self) -> None:
        """Takes that another step is about to run."""
        if not self.adapters.are_proved:
            for request in self._requests.values():
                if request.num_output_tokens:
                    self._computed(request)
        for each in self._beside:
            each.computed()

    def loads_into(self, tables: Iterable[Sequence[Any]]) -> None:
        """Takes blocks, group by group, that are about to be fetched into: others may still be reading them."""
        for each in self._beside:
            each.loads_into({block.block_id for table in tables for block in table if not block.is_null})

    def ended(self, request: Any) -> None:
        self._computed(request)
        self._requests.pop(request.request_id, None)

    def asked_about_no_more(self, request: Any) -> None:
        """Takes that all is done about a request that has ended."""
        self._conditions.ended(request.request_id)

    def _computed(self, request: Any) -> None:
        """Has the adapter of a request looked at once more: a step has loaded it, or none will."""
        if request.lora_request is not None:
            self.adapters.computed(request)

    def reset(self) -> None:
        """Ends what is on its way, as vLLM asks where it resets caches."""
        self._side.outdate(self._all(), "the engine's caches were reset")

    def started(self, executor: Any) -> None:
        """Looks at the weights of the start: whatever is found later is compared with them.

        Args:
            executor: vLLM's, which asks the workers for them.
        """
        self._executor = executor
        try:
            self._conditions.weights.found(_content(executor))
        except Exception as error:  # an executor's or a model's: nothing has changed yet, and exchange goes on
            log.warning("what the weights are cannot be read: %s: %s", type(error).__name__, error)

    def asked(self, method: object, ask: Callable[[], Any]) -> Any:
        """Has the workers asked for something, and looks whether it has changed the weights.

        Args:
            method: the name of a worker's method, or a function.
        """
        weights = self._conditions.weights
        if not weights.is_known:
            self._look()
        try:
            result = ask()
            self._is_updating |= method == "start_weight_update"
            return result
        except Exception:
            self._is_updating &= method != "update_weights"  # as vLLM's workers take it
            raise
        finally:
            self._is_updating &= method != "finish_weight_update"
            if isinstance(method, str) and method in _UNTIL_FINISHED:
                weights.lost()
                self._weights_replaced()
            elif self._look():
                self._weights_replaced()

    def falls_asleep(self, *, with_weights: bool) -> None:
        """Takes that the caches' memory is about to be given back.

        Args:
            with_weights: whether that of the weights is too, and not kept elsewhere.

        Raises:
            UsageError: if nobody will tell when it has been replaced.
        """
        if not self.follows_sleep:
            raise UsageError(
                "kvferry has registered the KV cache's memory, and this vLLM does not say when sleep and waking "
                "replace it: other servers would write to what is somebody else's by then. End this server instead, or "
                "use vLLM 0.33, with which it is registered anew"
            )
        if with_weights:
            self.awake()
            self._conditions.weights.lost()

    def awake(self) -> None:
        """Looks at the weights, which may be others now, though nobody says so."""
        if self._look(is_told=False):
            self._weights_replaced()

    def named(self, version: str) -> None:
        """Takes the name that vLLM was given for the weights, which nobody may have told of before."""
        if self._is_updating:
            log.error("the weights are not called %r: an update has begun. Name them once it is finished", version)
            return
        if self._look():
            self._weights_replaced()
        self._conditions.weights.named(version)

    def look_for_adapters(self) -> None:
        """Looks which adapters vLLM still has."""
        used = {each.lora_request.lora_int_id for each in self._requests.values() if each.lora_request}
        self.adapters.kept(self._core.list_loras, used)

    def _look(self, *, is_told: bool = True) -> bool:
        """Looks at the weights, unless an update has begun.

        Args:
            is_told: whether somebody was asked for what may have changed them: what cannot be read then is nobody's.

        Returns:
            Whether they have changed.
        """
        if self._is_updating:
            return False
        try:
            return self._conditions.weights.found(_content(self._executor))
        except _AsleepError:
            return False  # they come back as they were, or are nobody's already; waking looks at them
        except Exception as error:  # an executor's or a model's: whatever it is, nobody knows the weights
            if not is_told:
                return False
            log.warning(
                "what the weights are now cannot be read, and no cache is exchanged until they are named "
                "(set_weight_version, the same on every server) or can be: %s: %s",
                type(error).__name__,
                error,
            )
            self._conditions.weights.lost()
            return True

    def _weights_replaced(self) -> None:
        log.warning("the weights were replaced: what was computed before is neither sent nor found again")
        self._outdate(self._all(), "the engine's weights were replaced meanwhile")

    def _adapter_replaced(self, name: str) -> None:
        concerned = [each for each in self._all() if (lora := each.lora_request) and lora.lora_name == name]
        self._outdate(concerned, f"its LoRA adapter {name!r} was replaced meanwhile", name)

    def _all(self) -> list[Any]:
        sent = {each.request_id: each for each in self._side.being_sent}  # some have ended
        return list((sent | self._requests).values())

    def _outdate(self, requests: Sequence[Any], reason: str, adapter: str = "") -> None:
        """Has nothing that was computed until now found by others, and ends what is on its way of these requests."""
        if self._encoded is not None:
            self._encoded.outdate(adapter)
        self._reset_others()
        arrived = self._arrived.intersection(each.request_id for each in requests)
        self._arrived -= arrived
        self._side.outdate(requests, reason, arrived)
        self._have_nothing_found(requests)

    def _have_nothing_found(self, requests: Iterable[Any]) -> None:
        """Empties vLLM's prefix cache, and has nothing in it of what these requests have, if they go on."""
        assert self._tables is not None
        assert self._pool is not None
        self._pool.evict_blocks(set(range(self._pool.num_gpu_blocks)))
        for request in requests:
            if request.request_id in self._requests and any(map(len, self._tables(request.request_id))):
                _share_nothing(request)
        for each in self._beside:
            each.forget_names()

    def _reset_others(self) -> None:
        """Has others drop what they keep. As long as one may not have, nothing is exchanged."""
        weights = self._conditions.weights
        others = (*self._beside, self._encoded)
        kept = [each.name for each in others if each is not None and not each.is_reset()]
        if kept and not weights.are_mixed:
            log.error(
                "%s may still have what was computed before, and vLLM would take it for new: no cache is exchanged "
                "until it has dropped that; if this stays so, start this server anew",
                " and ".join(kept),
            )
        if bool(kept) != weights.are_mixed:
            weights.are_mixed = bool(kept)
            if not kept:  # what was computed meanwhile may have been from that
                self._have_nothing_found(self._requests.values())


def _share_nothing(request: Any) -> None:
    """Has no other request find the blocks that one fills from now on."""
    request.cache_salt = f"{request.cache_salt or ''} {uuid4().hex}"
    request.block_hashes.clear()
    request.update_block_hashes()


def watch(core: Any, executor: Any) -> None:
    """Has connectors of ours told what vLLM's core is asked.

    Args:
        core: its class.
        executor: the class of what asks the workers.
    """
    starts = _then(lambda changes, executor, *_, **__: changes.started(executor))
    _around(executor, "init_kv_output_aggregator", lambda _, connector: _changes_of(connector), starts)
    for name, ours in _AROUND_CORE.items():
        _around(core, name, _of_core, ours)


def _around(owner: Any, name: str, changes_of: Callable[..., Changes | None], ours: Callable[..., Any]) -> None:
    """Calls ours around a method of vLLM's, once the connector is there.

    Args:
        changes_of: returns ours, given what the method is called with.
        ours: takes it, and what calls the original one, and the other arguments.
    """
    original = getattr(owner, name, None)
    if original is None or getattr(original, "is_watched", False):
        return  # this vLLM has no such thing, or it is watched already

    @functools.wraps(original)
    def watched(owner: Any, *arguments: Any, **named: Any) -> Any:
        changes = changes_of(owner, *arguments, **named)
        if changes is None:
            return original(owner, *arguments, **named)
        return ours(changes, owner, functools.partial(original, owner), *arguments, **named)

    watched.is_watched = True  # type: ignore[attr-defined]
    setattr(owner, name, watched)


def _of_core(core: Any, *_: Any, **__: Any) -> Changes | None:
    scheduler = getattr(core, "scheduler", None)  # a core that starts has none yet
    changes = None if scheduler is None else _changes_of(scheduler.get_kv_connector())
    if changes is not None:
        changes.serves(core)
    return changes


def _changes_of(connector: Any) -> Changes | None:
    """Returns ours, of a connector or of one of several that stand beside each other.

    Raises:
        SettingsError: if two are ours.
    """
    several: Sequence[Any] = getattr(connector, "_connectors", ())
    kept = (getattr(each, "changes", None) for each in (connector, *several))
    found = [each for each in kept if isinstance(each, Changes)]
    if len(found) > 1:
        raise SettingsError(
            "MultiConnector has kvferry's connector more than once, and one alone would be told when weights or "
            "adapters change: let one of them be kv_both"
        )
    if not found:
        return None
    found[0].stands_beside(several)
    return found[0]


def _content(executor: Any) -> str:
    """Returns what the weights are.

    Raises:
        _AsleepError: if they have no memory.
    """
    if "weights" in executor.sleeping_tags:
        raise _AsleepError
    return content_of(executor.collective_rpc(parameter_sums))


def _then(tell: Callable[..., None]) -> Callable[..., Any]:
    """Returns what calls the original, and then tells ours of it: what it was called on, and with."""

    def called(changes: Changes, owner: Any, original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        tell(changes, owner, *arguments, **named)
        return result

    return called


def _collective_rpc(
    changes: Changes, _: Any, original: Callable[..., Any], method: Any, *more: Any, **named: Any
) -> Any:
    result = changes.asked(method, lambda: original(method, *more, **named))
    changes.look_for_adapters()
    return result


def _reset_prefix_cache(changes: Changes, _: Any, original: Callable[..., bool], *arguments: Any, **named: Any) -> bool:
    try:
        return original(*arguments, **named)
    finally:
        changes.awake()  # trainers in the engine's own process ask for nothing else


def _add_lora(changes: Changes, _: Any, original: Callable[..., Any], lora_request: Any) -> Any:
    before = files_in(lora_request.lora_path)
    result = original(lora_request)
    changes.adapters.loaded(lora_request, before)
    return result


def _sleep(changes: Changes, _: Any, original: Callable[..., Any], level: int = 1, *more: Any, **named: Any) -> Any:
    if level > 0:  # else vLLM schedules nothing, and keeps its memory
        changes.falls_asleep(with_weights=level > 1)
    return original(level, *more, **named)


def _awake(changes: Changes, core: Any, *_: Any, **__: Any) -> None:
    if not core.model_executor.sleeping_tags:
        changes.awake()


def _release(changes: Changes, _: Any, original: Callable[..., Any]) -> Any:
    changes.falls_asleep(with_weights=False)
    return original()


_AROUND_CORE: dict[str, Callable[..., Any]] = {
    "add_request": _then(lambda *_, **__: None),  # the core is known from the first request on
    "collective_rpc": _collective_rpc,
    "set_weight_version": _then(lambda changes, _, weight_version: changes.named(weight_version)),
    "reset_prefix_cache": _reset_prefix_cache,
    "add_lora": _add_lora,
    "remove_lora": _then(lambda changes, _, lora_id: changes.adapters.unloaded(lora_id)),
    "sleep": _sleep,
    "wake_up": _then(_awake),
    "release_kv_cache_memory": _release,
}
"""By what vLLM's core is asked for, what ours does around it."""
