"""What SGLang loads in each of its processes: makes kvferry one of its transfer backends.

SGLang finds `register` as an entry point of the group sglang.srt.plugins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import Any

from kvferry.engines.sglang.settings import PluginSettings

NAME = "kvferry"
"""For --disaggregation-transfer-backend."""


def register() -> None:
    """Adds the backend, and replaces `nixl` by it if the settings say so."""
    from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation import utils
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_disagg_transfer_backend_choices([NAME])
    members = {member.name: member.value for member in utils.TransferBackend}
    backends = Enum("TransferBackend", {**members, "KVFERRY": NAME}, module=utils.__name__)  # type: ignore[misc]
    ours = {backends["KVFERRY"]}
    if PluginSettings().replaces_nixl:
        ours.add(backends["NIXL"])

    def choose(original: Callable[..., Any], backend: Any, kind: Any) -> Any:
        return our_class(kind) if backend in ours and kind.value != "kvargs" else original(backend, kind)

    def keep_until_proven(_: None, queue: Any, *__: Any, **___: Any) -> None:
        from sglang.srt.environ import envs
        from sglang.srt.runtime_context import get_disagg

        is_ours = backends(get_disagg().disaggregation_transfer_backend) in ours
        if is_ours and not envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT.is_set():
            # SGLang would give pages to other requests after a time, whether a write may still reach them or not.
            queue.deferred_kv_release_timeout = math.inf

    where = "sglang.srt.disaggregation"
    HookRegistry.register(f"{where}.utils.TransferBackend", backends, HookType.REPLACE)
    HookRegistry.register(f"{where}.utils.get_kv_class", choose, HookType.AROUND)
    HookRegistry.register(f"{where}.decode.DecodeTransferQueue.__init__", keep_until_proven, HookType.AFTER)


def our_class(kind: Any) -> type:
    """Returns kvferry's class for a KVClassType. Imported here: processes that transfer nothing need none of them."""
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
