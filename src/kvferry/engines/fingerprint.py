"""What both plug-ins say of an engine's caches and of a request, so that no side reads another's bytes as its own.

An engine's fingerprint is compared when two servers connect, a request's conditions before its cache is sent. Pure:
what stands in an engine's configuration is taken from its objects by the plug-ins, files are read by `checkpoints`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

LONGEST_VALUE = 256
"""Characters of a field, as kvferry takes them."""

DIGEST_BYTES = 16

_AT_A_TIME = 1 << 12

PROMPT = "prompt"
PROMPT_EMBEDDING = "prompt embedding"
LORA_ADAPTER = "LoRA adapter"
MULTIMODAL_INPUT = "multimodal input"
CACHE_SALT = "cache salt"
WEIGHTS_VERSION = "weights version"

NONE = "none"
"""The value of a field where an engine has nothing of the kind, and its cache would differ if it had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheIdentity:
    """What an engine's caches are beyond their layout: the same on every rank, and for every way to divide the model.

    A field is a text that both sides make in the same way; what a plug-in cannot find out says so, such as "of unknown
    order (MY_BACKEND)", and so is equal only to itself.

    Attributes:
        engine: the engine and its version. May differ.
        weights: identifies the model's weights, whatever directory they are in: `checkpoints.weights_identity`, or the
            model's name and revision where there are no files to read.
        architecture: the model's class, as its configuration names it.
        cache_dtype: what the cached numbers are: two types of fp8 have one size, and one type in torch.
        scales: where the scales of quantised numbers come from: NONE, the checkpoint, the cache itself.
        attention_backend: the names of the backends that read and write the caches. May differ: what they keep where is
            `content_order`.
        content_order: how the content of a block lies, by every backend that the layers use.
        rope: the parameters of rotary embeddings, which cached keys have been turned by.
        attention_window: which tokens each layer attends to: cached values of higher layers depend on it.
        quantization: how the weights are quantised, by the engine's name for it.
        speculative_model: the draft model's weights; empty without one. One side alone may have one.
        metadata_rows: the sizes of what the engine sends beside a cache; empty where it sends nothing of its own.
        multimodal_inputs: by what images and the like in `request_conditions` are told apart; empty for models that
            take none. An engine's digests of one image may differ between two servers.
    """

    engine: str
    weights: str
    architecture: str
    cache_dtype: str
    scales: str
    attention_backend: str
    content_order: str
    rope: str
    attention_window: str
    quantization: str
    speculative_model: str = ""
    metadata_rows: str = ""
    multimodal_inputs: str = ""

    def fingerprint(self) -> dict[str, str]:
        """Returns the fields as endpoints take them; those that are empty are not said."""
        values = {each.name: short_text(getattr(self, each.name)) for each in fields(self)}
        return {name: value for name, value in values.items() if value}


def short_text(value: object) -> str:
    """Returns a text for a value that is the same wherever the value is: as it is, or begun and ended with a digest.

    Args:
        value: a text, or anything that JSON can take.
    """
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    shown = "".join(each if each.isprintable() else "?" for each in text)
    if shown == text and len(text) <= LONGEST_VALUE:
        return text
    digest = _digest(text.encode(errors="surrogatepass")).hex()
    return f"{shown[: LONGEST_VALUE // 2]}... ({len(text)} characters, {digest})"


@dataclass(frozen=True, slots=True)
class MultimodalInput:
    """An image, a sound or the like in a prompt.

    Attributes:
        content: identifies what it is: the engine's digest of it.
        offset: the position of its first token in the prompt.
        length: how many tokens it takes.
    """

    content: str
    offset: int
    length: int


def request_conditions(
    prompt: bytes,
    *,
    embedding: bytes = b"",
    lora: str = "",
    multimodal: Sequence[MultimodalInput] = (),
    salt: str = "",
    weights: str = "",
) -> dict[str, bytes]:
    """Returns what a request's cache depends on, as digests by name for `open(..., depends_on=...)`.

    What a request does not have is left out, so that a message can say which side has it.

    Args:
        prompt: the `prompt_digest` of its tokens, as far as they are exchanged.
        embedding: what is given instead of tokens, its bytes or a digest of them.
        lora: identifies the adapter: `checkpoints.adapter_identity`, or its name.
        multimodal: what else the prompt has, in order.
        salt: keeps the caches of different users apart.
        weights: identifies the model's weights of now, where they were replaced since the server started.
    """
    parts = [[each.content, each.offset, each.length] for each in multimodal]
    given = {
        PROMPT_EMBEDDING: embedding,
        LORA_ADAPTER: lora.encode(),
        MULTIMODAL_INPUT: json.dumps(parts).encode() if parts else b"",
        CACHE_SALT: salt.encode(),
        WEIGHTS_VERSION: weights.encode(),
    }
    return {PROMPT: prompt} | {name: _digest(value) for name, value in given.items() if value}


def prompt_digest(tokens: Sequence[int] | NDArray[np.int64], count: int | None = None) -> bytes:
    """Digests a prompt. A list is taken part by part: between them other threads have the interpreter.

    Args:
        count: how many of its tokens count, from the first on; all if None, or if there are not so many.
    """
    most = len(tokens) if count is None else min(count, len(tokens))
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    if isinstance(tokens, np.ndarray):
        digest.update(np.ascontiguousarray(tokens[:most], "<i8").data)
        return digest.digest()
    for start in range(0, most, _AT_A_TIME):
        part = tokens[start : min(start + _AT_A_TIME, most)]
        digest.update(np.fromiter(part, "<i8", len(part)).data)
    return digest.digest()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
