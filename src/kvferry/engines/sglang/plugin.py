"""What SGLang loads in each of its processes: makes kvferry one of its transfer backends.

SGLang finds `register` as an entry point of the group sglang.srt.plugins. It logs whatever exception a plug-in raises,
and goes on without the plug-in; a SystemExit it lets through. A server that was told to use kvferry must use nothing
else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

from kvferry.engines.contract import enforce, holds
from kvferry.engines.sglang import conditions, consensus, hooks, layer_steps, pools, termination, weights
from kvferry.engines.sglang.contract import ENDING, LOADING, SERVING, engine_version
from kvferry.engines.sglang.hooks import Hook
from kvferry.engines.sglang.look_ups import hold_unanswered
from kvferry.engines.sglang.settings import PluginSettings
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
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    enforce(LOADING, engine_version(), warns=False)
    replaces_nixl = PluginSettings().replaces_nixl
    added = tuple(_hooks(_Changes(frozenset((NAME, "nixl") if replaces_nixl else (NAME,)))))
    for hook in added:
        HookRegistry.register(hook.target, hook.change, HookType[hook.kind])
    _check_when_applied(HookRegistry, added, must_stop=replaces_nixl)
    hooks.remember(added)
    add_disagg_transfer_backend_choices([NAME])


@dataclass(frozen=True, slots=True)
class _Changes:
    """What hooks do that depends on the backend that the server was told to use.

    Attributes:
        ours: names of the backends that are kvferry.
    """

    ours: frozenset[str]

    @property
    def is_on(self) -> bool:
        """Whether this server uses one of ours. SGLang knows once it has read its arguments."""
        from sglang.srt.runtime_context import get_disagg

        return get_disagg().disaggregation_transfer_backend in self.ours

    def where_on(self, change: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a change around a method of SGLang's that leaves servers with other backends as they are."""

        def changed(original: Callable[..., Any], *given: Any) -> Any:
            return change(original, *given) if self.is_on else original(*given)

        return changed

    def choose(self, original: Callable[..., Any], backend: Any, kind: Any) -> Any:
        is_ours = backend.value in self.ours and kind.value != "kvargs"
        return our_class(kind) if is_ours else original(backend, kind)

    def allow_unified_memory(self, original: Callable[..., set[str]], server_args: Any) -> set[str]:
        return original(server_args) | self.ours

    def keep_until_proven(self, _: None, queue: Any, *__: Any, **___: Any) -> None:
        from sglang.srt.environ import envs

        if self.is_on:
            limit = envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT
            hooks.keep_until_proven(queue, limit_is_users=limit.is_set())

    def start(self, *_: Any, **__: Any) -> None:
        if self.is_on:
            from kvferry.engines.sglang.options import unset_variables

            unset_variables()

    def close_endpoints(self, _: None, scheduler: Any) -> None:
        if self.is_on:
            termination.close_endpoints(scheduler)


def _hooks(changes: _Changes) -> Iterator[Hook]:
    """Yields what is changed in this SGLang."""
    from sglang.srt.disaggregation import utils

    members = {member.name: member.value for member in utils.TransferBackend}
    backends = Enum("TransferBackend", {**members, "KVFERRY": NAME}, module=utils.__name__)  # type: ignore[misc]
    around_a_request = conditions.around_requests(_digests_inputs)
    yield Hook(hooks.BACKENDS, backends, "REPLACE")
    yield Hook(hooks.KV_CLASS, changes.choose, "AROUND")
    yield Hook(hooks.PREFILL_MANAGER, pools.around_managers, "AROUND")
    yield Hook(hooks.DECODE_MANAGER, pools.around_managers, "AROUND")
    yield Hook(hooks.STATE_ARGS, pools.remember_pools, "AFTER")
    yield Hook(hooks.TRANSFER_QUEUE, changes.keep_until_proven, "AFTER")
    yield Hook(hooks.CREATE_SENDER, around_a_request, "AROUND")
    yield Hook(hooks.CREATE_RECEIVER, around_a_request, "AROUND")
    yield Hook(hooks.SERVERS_KNOWN, hold_unanswered, "AROUND")
    # Without these, caches of weights that were replaced would be taken for those of the ones before.
    yield from (Hook(update, weights.around_update, "AROUND") for update in hooks.UPDATES)
    yield Hook(hooks.UPDATE_BEGINS, weights.around_begin, "AROUND")
    yield Hook(hooks.UPDATE_ENDS, weights.around_end, "AROUND")
    yield Hook(hooks.MEMORY_RELEASED, weights.after_release, "AFTER")
    yield Hook(hooks.WEIGHTS_CHECKED, weights.after_checking, "AFTER")
    yield Hook(hooks.WEIGHTS_NAMED, weights.after_naming, "AFTER")
    yield Hook(hooks.STORE_ATTACHED, weights.after_attaching, "AFTER")
    yield Hook(hooks.CACHE_FLUSHED, weights.after_flush, "AFTER")
    # Without these, what an adapter was when it was loaded would not be known.
    yield Hook(hooks.ADAPTER_LOADED, changes.where_on(conditions.around_load), "AROUND")
    yield Hook(hooks.ADAPTER_OF_TENSORS, changes.where_on(conditions.around_load_of_tensors), "AROUND")
    # Without these, pipeline stages of a decode server that came to differ answer nothing any more.
    yield Hook(hooks.STAGES_ENDED, changes.where_on(consensus.agree_on_ended), "AROUND")
    yield Hook(hooks.STAGE_TAKES, changes.where_on(consensus.take_ended), "AROUND")
    yield Hook(hooks.STAGE_ADMITS, changes.where_on(consensus.admit), "AROUND")
    # 0.5.22 may not have them: then it has no unified memory with disaggregation.
    unified = (
        Hook(hooks.UNIFIED_BACKENDS, changes.allow_unified_memory, "AROUND"),
        Hook(hooks.MOVE_GATE, changes.where_on(hooks.around_gate), "AROUND"),
    )
    if all(hook.has_target for hook in unified):
        yield from unified
    optional = (
        # Without it, variables that it unsets are refused.
        Hook(hooks.SCHEDULER_STARTS, changes.start, "BEFORE"),
        # Else layers leave with their step, and ranges are refused.
        Hook(hooks.BEFORE_STEP, layer_steps.announce, "AFTER"),
        # Without these two, that a server ends is merely noticed later.
        Hook(hooks.TERMINATED, termination.announce, "AFTER"),
        Hook(hooks.SCHEDULER_ENDS, changes.close_endpoints, "AFTER"),
    )
    yield from (hook for hook in optional if hook.has_target)


def _digests_inputs() -> bool:
    from sglang.srt.environ import envs

    return not envs.SGLANG_MM_SKIP_COMPUTE_HASH.get()


def _check_when_applied(registry: Any, added: tuple[Hook, ...], *, must_stop: bool) -> None:
    """Makes SGLang's registry look, once it has applied all hooks, whether ours are in effect."""
    apply = registry.apply_hooks

    def apply_and_check(_: Any) -> None:
        apply()
        lost = hooks.loss(added)
        if lost and must_stop:
            raise SystemExit(_refusal(lost))
        if lost:
            log.error("--disaggregation-transfer-backend %s will not work: %s", NAME, lost)

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
