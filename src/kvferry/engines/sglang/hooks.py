"""Whether the plug-in's hooks are in effect.

SGLang logs a hook that it cannot apply, and goes on without it. What is lost then is not always seen: without the hook
on `get_kv_class`, a server that was told to use kvferry in the place of NIXL uses NIXL; without the one on
`DecodeTransferQueue`, pages of failed requests are given away after a time, whether something writes to them or not.
So whoever depends on a hook looks here first.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any
from weakref import WeakSet

from kvferry.errors import EngineContractError

# ---- names of what hooks are put on, as SGLang's hook registry has them ---------------------------------------------

_DISAGGREGATION = "sglang.srt.disaggregation"

BACKENDS = f"{_DISAGGREGATION}.utils.TransferBackend"
KV_CLASS = f"{_DISAGGREGATION}.utils.get_kv_class"
STATE_ARGS = f"{_DISAGGREGATION}.utils.setup_state_kv_args"
TRANSFER_QUEUE = f"{_DISAGGREGATION}.decode.DecodeTransferQueue.__init__"
PREFILL_MANAGER = f"{_DISAGGREGATION}.prefill.PrefillBootstrapQueue._init_kv_manager"
DECODE_MANAGER = f"{_DISAGGREGATION}.decode.DecodePreallocQueue._init_kv_manager"
CREATE_RECEIVER = f"{_DISAGGREGATION}.decode.DecodePreallocQueue._create_receiver_and_enqueue"
SERVERS_KNOWN = f"{_DISAGGREGATION}.decode.DecodePreallocQueue._ensure_prefill_info"
CREATE_SENDER = f"{_DISAGGREGATION}.prefill.PrefillBootstrapQueue.create_sender"
BEFORE_STEP = f"{_DISAGGREGATION}.prefill.SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk"

TERMINATED = "sglang.srt.managers.tokenizer_manager.SignalHandler.sigterm_handler"
SCHEDULER_STARTS = "sglang.srt.managers.scheduler.Scheduler.init_disaggregation"
SCHEDULER_ENDS = "sglang.srt.managers.scheduler.Scheduler.release_host_resources"

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATES = tuple(f"{_UPDATER}.update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc"))
UPDATE_BEGINS = f"{_UPDATER}.begin_weight_update"
UPDATE_ENDS = f"{_UPDATER}.end_weight_update"
MEMORY_RELEASED = f"{_UPDATER}.release_memory_occupation"
WEIGHTS_CHECKED = f"{_UPDATER}.check_weights"
WEIGHTS_NAMED = "sglang.srt.managers.scheduler.Scheduler.handle_update_weight_version"
ADAPTER_LOADED = "sglang.srt.lora.lora_manager.LoRAManager._load_lora_adapter"
ADAPTER_OF_TENSORS = f"{ADAPTER_LOADED}_from_tensors"
STORE_ATTACHED = "sglang.srt.managers.scheduler.Scheduler.attach_hicache_storage_wrapped"
CACHE_FLUSHED = "sglang.srt.managers.scheduler.Scheduler.flush_cache"

_STAGES = "sglang.srt.managers.scheduler_pp_mixin.SchedulerPPMixin"
STAGES_ENDED = f"{_STAGES}._pp_pd_get_decode_transferred_ids"
STAGE_TAKES = f"{_STAGES}.process_decode_transfer_queue"
STAGE_ADMITS = f"{_STAGES}.process_prealloc_queue"

MOVE_GATE = f"{_DISAGGREGATION}.utils.unified_memory_disagg_move_gate"
UNIFIED_BACKENDS = "sglang.srt.server_args.ServerArgs._unified_memory_pd_transfer_backends"


def where(target: str) -> str:
    """Returns the name of a hook's target as the contract has it: with a colon behind its module."""
    parts = target.split(".")
    inside = next((number for number, part in enumerate(parts) if part[0].isupper()), len(parts) - 1)
    return f"{'.'.join(parts[:inside])}:{'.'.join(parts[inside:])}"


# ---- hooks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hook:
    """One thing of SGLang's that the plug-in changes.

    Attributes:
        change: a function that is called before, after or around it, or what stands in its place.
        kind: the name of a HookType.
    """

    target: str
    change: Any
    kind: str

    @property
    def has_target(self) -> bool:
        """Whether this SGLang has what it changes."""
        return self._found is not None

    @property
    def _found(self) -> Any:
        try:
            return pkgutil.resolve_name(self.target)
        except (ImportError, AttributeError):
            return None

    @property
    def is_in_effect(self) -> bool:
        """Whether SGLang has applied it, and nobody has taken it away since."""
        found = self._found
        if isinstance(self.change, type) and issubclass(self.change, Enum):
            # Somebody else may have added to it after us.
            names = getattr(found, "__members__", {})
            return all(name in names for name in self.change.__members__)
        return any(self.change in _enclosed(function) for function in _wrapped(found))


_registered: list[Hook] = []
"""What the plug-in has added to SGLang in this process."""


def remember(hooks: tuple[Hook, ...]) -> None:
    """Remembers that the plug-in was registered in this process, to the end."""
    _registered[:] = hooks


def check_hooks() -> None:
    """Refuses to go on where the plug-in was not registered, or a hook of ours is not in effect.

    Raises:
        EngineContractError: names what is missing.
    """
    if not _registered:
        raise EngineContractError(
            "kvferry refuses to serve: its plug-in was not registered in this process. SGLang logs above why, and "
            "would go on without it; where SGLANG_PLUGINS is set, it must name kvferry"
        )
    if lost := loss(_registered):
        raise EngineContractError(lost)


def loss(hooks: Iterable[Hook]) -> str:
    """Says which hooks are not in effect; empty if all are."""
    lost = ", ".join(hook.target for hook in hooks if not hook.is_in_effect)
    return lost and (
        f"kvferry refuses to serve: its hook on {lost} is not in effect. SGLang logs above why it could "
        "not apply it, and would go on without it; another plug-in may have replaced the same"
    )


# ---- pages that are kept until it is proven that nothing writes to them ---------------------------------------------

queues: WeakSet[Any] = WeakSet()
"""This process's transfer queues that keep pages for as long as it takes."""


def keep_until_proven(queue: Any, *, limit_is_users: bool) -> None:
    """Takes away the time after which SGLang gives pages of a failed request away, proof or not.

    Args:
        queue: a DecodeTransferQueue.
        limit_is_users: whether the user has set that time: then it stays.
    """
    if not limit_is_users:
        queue.deferred_kv_release_timeout = math.inf
    queues.add(queue)


def check_pages_are_kept(*, limit_is_users: bool) -> None:
    """Refuses to receive where pages of failed requests would not be kept until it is safe to give them away.

    Raises:
        EngineContractError: if this process has no transfer queue that our hook has seen, or one with a limit.
    """
    if not queues:
        raise EngineContractError(
            f"kvferry refuses to serve: its hook on {TRANSFER_QUEUE} was not called before SGLang made its manager, so "
            "that pages of failed requests would be given to others while they may still be written to"
        )
    limits = [queue.deferred_kv_release_timeout for queue in queues]
    if not limit_is_users and any(limit != math.inf for limit in limits):
        raise EngineContractError(
            f"kvferry refuses to serve: SGLang's DecodeTransferQueue gives pages of failed requests away after "
            f"{limits} s, although our hook on {TRANSFER_QUEUE} took that limit away: set "
            "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT if that is what you want"
        )


def around_gate(original: Callable[[Any], Callable[[], bool]], scheduler: Any) -> Callable[[], bool]:
    """The hook around SGLang's own gate for moving pages: closes it as well while pages of failed requests are kept.

    A write to these may still be on its way, by the place that they had when the request was opened.

    Args:
        original: returns SGLang's own, which is True where pages may be moved.
    """
    gate = original(scheduler)

    def is_open() -> bool:
        queue = getattr(scheduler, "disagg_decode_transfer_queue", None)
        return gate() and not (queue is not None and queue.has_pending_deferred_releases())

    return is_open


# ---- parts ----------------------------------------------------------------------------------------------------------


def _wrapped(function: Any) -> Iterator[Callable[..., Any]]:
    """Yields a function and those that it wraps, from the outside in."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _enclosed(function: Callable[..., Any]) -> list[Any]:
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
