"""What a request's cache depends on beside the server: its tokens, its adapter, its images, its salt.

SGLang gives senders and receivers the number of a room, and nothing of the request. So hooks stand around the places
where it makes them, and whoever is made there takes the request's conditions from here.

An adapter is what it was when SGLang loaded it, which may be another thing than what lies at its path by now.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import struct
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.engines.checkpoints import adapter_identity, adapter_use, model_directory
from kvferry.engines.fingerprint import MultimodalInput, prompt_digest, request_conditions
from kvferry.errors import EngineContractError, KVFerryError, ModelError, UsageError, quoted
from kvferry.loggers import logger_of

log = logger_of(__name__)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is known of a request whose sender or receiver is being made.

    Attributes:
        tokens: how many tokens the prefill side computes.
        depends_on: digests of what their cache depends on, by name.
    """

    tokens: int
    depends_on: dict[str, bytes]


_current: ContextVar[Callable[[], Prompt] | None] = ContextVar("kvferry request", default=None)

_OF_AN_INPUT = -1
"""Stands for the tokens of an image or the like, which are SGLang's digest of it: that is a condition of its own."""

_ELASTIC = re.compile(r"(^|\|)elastic_ep_size=\d+\Z")
"""SGLang adds it to a request's key with --elastic-ep-backend, on a server whose cache shares prefixes. No cache
depends on how many ranks have experts for now."""


def around_requests(has_digests: Callable[[], bool]) -> Callable[..., Any]:
    """Returns the hook around what makes a request's sender or receiver, which may take its conditions meanwhile.

    Args:
        has_digests: whether SGLang digests images and the like; else it gives each a number by chance.
    """

    def around_a_request(original: Callable[..., Any], queue: Any, req: Any, *arguments: Any, **named: Any) -> Any:
        digests = has_digests()
        token = _current.set(lambda: Prompt(len(_tokens(req)), conditions_of(req, has_digests=digests)))
        try:
            return original(queue, req, *arguments, **named)
        finally:
            _current.reset(token)

    return around_a_request


def current(target: str) -> Prompt:
    """Returns the prompt of the request whose sender or receiver is being made.

    Args:
        target: where the hook is, for the error.

    Raises:
        EngineContractError: if our hook was not called.
        UsageError: if what the client asks for cannot be digested.
    """
    take = _current.get()
    if take is None:
        raise EngineContractError(
            f"kvferry's hook on {target} was not called: what this request's cache depends on is not known, and so "
            "it is not exchanged"
        )
    try:
        return take()
    except KVFerryError:
        raise
    except Exception as error:  # whatever a client asks for, the scheduler goes on
        raise UsageError(f"what this request's cache depends on cannot be digested: {quoted(error)}") from error


def conditions_of(req: Any, *, has_digests: bool = True) -> dict[str, bytes]:
    """Returns what a request's cache depends on.

    Args:
        has_digests: as for `around_requests`. Without them another image in the same place is not noticed.
    """
    tokens = _tokens(req)
    inputs = _inputs(req, has_digests=has_digests)
    if inputs:
        tokens = tokens.copy()  # they are the request's own
    for each in inputs:
        tokens[each.offset : each.offset + each.length] = _OF_AN_INPUT
    return request_conditions(
        prompt_digest(tokens),
        embedding=_embedding(req.input_embeds or []),
        lora=adapter_loaded(req.lora_id),
        multimodal=inputs,
        salt=_salt(req),
    )


def _tokens(req: Any) -> Any:
    """Returns the tokens that the prefill side computes: the request's own where it can, which may be a million."""
    tokens = np.asarray(req.origin_input_ids, np.int64)
    if getattr(req, "pd_rebootstrap_in_progress", False):
        # What was generated so far is prompt to the prefill side, which computes it again.
        tokens = np.concatenate([tokens, np.asarray(req.output_ids, np.int64)])
    return tokens


def _embedding(rows: Sequence[Sequence[float]]) -> bytes:
    """Returns what a client gives instead of tokens, as float32: several times as fast as NumPy reads lists.

    Raises:
        struct.error: if its rows are not of one length, or not of numbers.
    """
    row = struct.Struct(f"{len(rows[0]) if rows else 0}f")
    return b"".join(row.pack(*each) for each in rows)


def _inputs(req: Any, *, has_digests: bool) -> list[MultimodalInput]:
    given = req.multimodal_inputs
    return [
        MultimodalInput(f"{item.modality.name} {item.hash if has_digests else ''}", start, stop + 1 - start)
        for item in (given.mm_items if given is not None else ())
        for start, stop in item.offsets or ()
    ]


def _salt(req: Any) -> str:
    key = _ELASTIC.sub("", req.extra_key or "")
    if req.lora_id is not None:
        key = key.removesuffix(req.lora_id)  # SGLang puts it there
    parts = [part for part in (key, req.cache_salt) if part]
    return "\0".join(parts)


# ---- adapters --------------------------------------------------------------------------------------------------------

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


def adapter_loaded(lora_id: str | None) -> str:
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
