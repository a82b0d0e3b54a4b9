"""What LoRA adapters were when SGLang loaded them, which may be another thing than what lies at their paths by now."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from kvferry.engines.checkpoints import adapter_identity, model_directory
from kvferry.errors import ModelError
from kvferry.loggers import logger_of

log = logger_of(__name__)

_loaded: dict[str, str] = {}
"""What was loaded from files, by the id that this server gave it, which no other adapter gets."""


def around_load(original: Callable[..., Any], manager: Any, ref: Any) -> Any:
    """Around what loads an adapter from its files, at the start or later, into the server's memory."""
    before = _read(ref)
    result = original(manager, ref)
    if not result.success:
        return result
    after = _read(ref)
    if before not in (None, after):  # None before the hub's client has fetched it
        log.error(
            "requests with LoRA adapter %r are not exchanged: its files in %s were written while SGLang loaded them. "
            "Unload it, and load it again",
            ref.lora_name,
            ref.lora_path,
        )
        after = f"unknown {secrets.token_hex(8)}"
    _loaded[ref.lora_id] = after or ref.lora_name
    return result


def identity(lora_id: str | None, scheduler: Any) -> str:
    """Identifies a request's adapter; empty without one.

    Args:
        lora_id: this server's own for it.
        scheduler: SGLang's Scheduler. What was loaded from no files it knows by name.
    """
    if lora_id is None or lora_id in _loaded:
        return _loaded.get(lora_id or "", "")
    manager = scheduler.tp_worker.model_runner.lora_manager
    ref = None if manager is None else manager.lora_refs.get(lora_id)
    return lora_id if ref is None else str(ref.lora_name or ref.lora_path or lora_id)


def _read(ref: Any) -> str | None:
    """Identifies what lies at an adapter's path; None if nothing can be read there."""
    directory = model_directory(ref.lora_path, None) if ref.lora_path else None
    try:
        return None if directory is None else adapter_identity(directory)
    except ModelError:
        return None
