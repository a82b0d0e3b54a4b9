"""What the plug-in does when SGLang's server is told to end.

SGLang finishes the requests that it has, and a prefill server's are finished when their caches have arrived: so
nothing that it keeps is lost. It tells its ranks only at the very end, though. So its main process, which gets the
SIGTERM, says at the registry that the engine drains: from there gateways, decode ranks and the engine's own ranks hear
of it. And when a rank's scheduler ends, its endpoints are closed, so that their peers need not miss them first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from kvferry.loggers import logger_of

log = logger_of(__name__)

_QUEUES = ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue")


def announce(_: None, handler: Any, *__: Any, **___: Any) -> None:
    """Says at the registry that this server's engine drains. Returns at once.

    Args:
        handler: SGLang's SignalHandler. That of a decode server has no engine at a registry.
    """
    server = getattr(handler.tokenizer_manager, "bootstrap_server", None)
    drain = getattr(server, "drain", None)
    if drain is not None:
        threading.Thread(target=_tell, args=(drain,), name="kvferry-sglang-drain", daemon=True).start()


def _tell(drain: Any) -> None:
    try:
        drain()
    except Exception as error:
        log.warning("nobody was told that this server is about to end: %s", error)


def managers_of(scheduler: Any) -> Iterator[Any]:
    """Yields the managers that a scheduler has, of whatever backend."""
    for name in _QUEUES:
        manager = getattr(getattr(scheduler, name, None), "kv_manager", None)
        if manager is not None:
            yield manager


def close_endpoints(scheduler: Any) -> None:
    """Closes what a scheduler that ends has of ours, and lets SGLang go on whatever comes of it."""
    for manager in managers_of(scheduler):
        try:
            manager.close()
        except Exception:
            log.exception("an endpoint was not closed in order")
