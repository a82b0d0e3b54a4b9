"""What SGLang loads in each of its processes: makes kvferry one of its transfer backends.

SGLang finds `register` as an entry point of the group sglang.srt.plugins. It logs whatever exception a plug-in raises,
and goes on without the plug-in; a SystemExit it lets through. A server that was told to use kvferry must use nothing
else.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any

from kvferry.engines.contract import enforce, holds
from kvferry.engines.sglang import consensus, hooks, layer_steps, pools, termination, weights
from kvferry.engines.sglang.conditions import around_requests
from kvferry.engines.sglang.contract import ENDING, LOADING, SERVING, engine_version
from kvferry.engines.sglang.hooks import Hook
from kvferry.engines.sglang.names import (
    BACKENDS,
    BEFORE_STEP,
    CREATE_RECEIVER,
    CREATE_SENDER,
    DECODE_MANAGER,
    KV_CLASS,
    MOVE_GATE,
    PREFILL_MANAGER,
    SCHEDULER_ENDS,
    SCHEDULER_STARTS,
    STAGE_ADMITS,
    STAGE_TAKES,
    STAGES_ENDED,
    STATE_ARGS,
    TERMINATED,
    TRANSFER_QUEUE,
    UNIFIED_BACKENDS,
    UPDATE_BEGINS,
    UPDATE_ENDS,
    UPDATES,
    WEIGHTS_NAMED,
)
from kvferry.engines.sglang.settings import PluginSettings
from kvferry.engines.sglang.unified import may_move
from kvferry.loggers import logger_of

log = logger_of(__name__)

NAME = "kvferry"
"""For --disaggregation-transfer-backend."""


def register() -> None:
    """Adds the backend, and replaces `nixl` by it if the settings say so.

    Raises:
        SystemExit: if `nixl` is to be replaced, and that cannot be done: SGLang would use its own.
        EngineContractError: if it is not, and the backend cannot be added: SGLang refuses a name that it does not know.
    """
    try:
        _register()
    except Exception as error:
        if not _replaces_nixl():
            raise
        raise SystemExit(_refusal(error)) from error


def _replaces_nixl() -> bool:
    try:
        return PluginSettings().replaces_nixl
    except ValueError:  # a value that is neither true nor false: whoever set it means that nixl be replaced
        return True


def _refusal(error: object) -> str:
    return (
        f"KVFERRY_SGLANG_REPLACES_NIXL is set, and kvferry cannot take the place of nixl: {error}. SGLang would use "
        "its own NIXL backend, unnoticed: this server stops. Unset KVFERRY_SGLANG_REPLACES_NIXL if you want that one"
    )


def _register() -> None:
    from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation import utils
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    enforce(LOADING, engine_version(), warns=False)
    replaces_nixl = PluginSettings().replaces_nixl
    members = {member.name: member.value for member in utils.TransferBackend}
    backends = Enum("TransferBackend", {**members, "KVFERRY": NAME}, module=utils.__name__)  # type: ignore[misc]
    ours = {NAME, "nixl"} if replaces_nixl else {NAME}

    def choose(original: Callable[..., Any], backend: Any, kind: Any) -> Any:
        return our_class(kind) if backend.value in ours and kind.value != "kvargs" else original(backend, kind)

    def keep_until_proven(_: None, queue: Any, *__: Any, **___: Any) -> None:
        from sglang.srt.environ import envs
        from sglang.srt.runtime_context import get_disagg

        if get_disagg().disaggregation_transfer_backend in ours:
            limit = envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT
            hooks.keep_until_proven(queue, limit_is_users=limit.is_set())

    def remember_pools(_: None, *given: Any, **named: Any) -> None:
        pools.remember_pools(*given, **named)

    def digests_inputs() -> bool:
        from sglang.srt.environ import envs

        return not envs.SGLANG_MM_SKIP_COMPUTE_HASH.get()

    def allow_unified_memory(original: Callable[..., set[str]], server_args: Any) -> set[str]:
        return original(server_args) | ours

    def keep_in_place(original: Callable[..., Any], scheduler: Any) -> Any:
        from sglang.srt.runtime_context import get_disagg

        gate = original(scheduler)
        return may_move(gate, scheduler) if get_disagg().disaggregation_transfer_backend in ours else gate

    def announce_step(_: None, scheduler: Any, request: Any, allow_send: bool = True) -> None:
        layer_steps.announce(scheduler, request, may_leave=allow_send)

    def start(*_: Any, **__: Any) -> None:
        from sglang.srt.runtime_context import get_disagg

        if get_disagg().disaggregation_transfer_backend in ours:
            from kvferry.engines.sglang.options import unset_variables

            unset_variables()

    def announce_end(_: None, handler: Any, *__: Any, **___: Any) -> None:
        termination.announce(handler.tokenizer_manager)

    def close_endpoints(_: None, scheduler: Any) -> None:
        from sglang.srt.runtime_context import get_disagg

        if get_disagg().disaggregation_transfer_backend in ours:
            termination.close_endpoints(scheduler)

    def where_ours(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(original: Callable[..., Any], scheduler: Any, *given: Any) -> Any:
            from sglang.srt.runtime_context import get_disagg

            is_ours = get_disagg().disaggregation_transfer_backend in ours
            return change(original, scheduler, *given) if is_ours else original(scheduler, *given)

        return changed

    # Without these, pipeline stages of a decode server that came to differ answer nothing any more.
    stages = (
        Hook(STAGES_ENDED, where_ours(consensus.agree_on_ended), "AROUND"),
        Hook(STAGE_TAKES, where_ours(consensus.take_ended), "AROUND"),
        Hook(STAGE_ADMITS, where_ours(consensus.admit), "AROUND"),
    )
    # Without these, caches of weights that were replaced would be taken for those of the ones before.
    updates = (
        *(Hook(update, weights.around_update, "AROUND") for update in UPDATES),
        Hook(UPDATE_BEGINS, weights.around_begin, "AROUND"),
        Hook(UPDATE_ENDS, weights.around_end, "AROUND"),
        Hook(WEIGHTS_NAMED, weights.after_naming, "AFTER"),
    )
    # Without it variables that it unsets are refused.
    starts = Hook(SCHEDULER_STARTS, start, "BEFORE")
    # Without these a server that ends is merely noticed later.
    ends = (Hook(TERMINATED, announce_end, "AFTER"), Hook(SCHEDULER_ENDS, close_endpoints, "AFTER"))
    # Where SGLang has not what it is on, layers leave with their step, and KVFERRY_LAYER_RANGES is refused.
    steps = Hook(BEFORE_STEP, announce_step, "AFTER")
    # 0.5.22 may not have them: then it has no unified memory with disaggregation.
    unified = (Hook(UNIFIED_BACKENDS, allow_unified_memory, "AROUND"), Hook(MOVE_GATE, keep_in_place, "AROUND"))
    around_a_request = around_requests(digests_inputs)
    added = (
        Hook(BACKENDS, backends, "REPLACE"),
        Hook(KV_CLASS, choose, "AROUND"),
        Hook(PREFILL_MANAGER, pools.around_managers, "AROUND"),
        Hook(DECODE_MANAGER, pools.around_managers, "AROUND"),
        Hook(STATE_ARGS, remember_pools, "AFTER"),
        Hook(TRANSFER_QUEUE, keep_until_proven, "AFTER"),
        Hook(CREATE_SENDER, around_a_request, "AROUND"),
        Hook(CREATE_RECEIVER, around_a_request, "AROUND"),
        *updates,
        *stages,
        *(hook for hook in (starts, steps) if hook.has_target),
        *(unified if all(hook.has_target for hook in unified) else ()),
        *(hook for hook in ends if hook.has_target),
    )
    for hook in added:
        HookRegistry.register(hook.target, hook.change, HookType[hook.kind])
    _check_when_applied(HookRegistry, added, must_stop=replaces_nixl)
    hooks.remember(added)
    add_disagg_transfer_backend_choices([NAME])


def _check_when_applied(registry: Any, added: tuple[Hook, ...], *, must_stop: bool) -> None:
    """Makes SGLang's registry look, once it has applied all hooks, whether ours are in effect."""
    apply = registry.apply_hooks

    def apply_and_check(_: Any) -> None:
        apply()
        gone = hooks.lost(added)
        if gone and must_stop:
            raise SystemExit(_refusal(hooks.loss(gone)))
        if gone:
            log.error("--disaggregation-transfer-backend %s will not work: %s", NAME, hooks.loss(gone))

    registry.apply_hooks = classmethod(apply_and_check)


@cache
def check_contract() -> None:
    """Refuses to go on with an SGLang that is not what the plug-in builds on. Checks once a process.

    Raises:
        EngineContractError: names all that has changed.
    """
    enforce(SERVING, engine_version())
    holds(
        ENDING,
        engine_version(),
        "Peers notice late that a server has ended: run kvferry drain before the SIGTERM (docs/drain.md)",
    )


def our_class(kind: Any) -> type:
    """Returns kvferry's class for a KVClassType. Imported here: processes that transfer nothing need none of them.

    Raises:
        EngineContractError: if SGLang is not what the plug-in builds on.
    """
    check_contract()
    from kvferry.engines.sglang.bootstrap import KVFerryBootstrapServer
    from kvferry.engines.sglang.manager import KVFerryManager
    from kvferry.engines.sglang.receiver import KVFerryReceiver
    from kvferry.engines.sglang.sender import KVFerrySender

    return {
        "manager": KVFerryManager,
        "sender": KVFerrySender,
        "receiver": KVFerryReceiver,
        "bootstrap_server": KVFerryBootstrapServer,
    }[kind.value]
