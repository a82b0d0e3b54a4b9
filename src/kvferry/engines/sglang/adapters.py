"""What LoRA adapters were when SGLang loaded them, which may be another thing than what lies at their paths by now."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from kvferry.engines.checkpoints import adapter_identity, adapter_use, model_directory
from kvferry.errors import ModelError
from kvferry.loggers import logger_of

log = logger_of(__name__)

_loaded: dict[str, str] = {}
"""What was loaded, by the id that this server gave it, which no other adapter gets."""


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


def around_load_of_tensors(
    original: Callable[..., Any], manager: Any, ref: Any, tensors: Any, configuration: Any, *more: Any
) -> Any:
    """Around what loads an adapter from tensors that a client has sent: they are in no file."""
    result = original(manager, ref, tensors, configuration, *more)
    if result.success:
        _loaded[ref.lora_id] = _content(tensors, configuration, more)
    return result


def identity(lora_id: str | None) -> str:
    """Identifies a request's adapter; empty without one.

    Args:
        lora_id: this server's own for it, which stands for what was never seen to be loaded.
    """
    return _loaded.get(lora_id, lora_id) if lora_id is not None else ""


def _content(tensors: Mapping[str, Any], configuration: Mapping[str, Any], more: object) -> str:
    import torch

    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return f"{digest.hexdigest()} ({len(tensors)} tensors), {adapter_use({**configuration, 'more': more})}"


def _read(ref: Any) -> str | None:
    """Identifies what lies at an adapter's path; None if nothing can be read there."""
    directory = model_directory(ref.lora_path, None) if ref.lora_path else None
    try:
        return None if directory is None else adapter_identity(directory)
    except ModelError:
        return None
