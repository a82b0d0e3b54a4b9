"""What vLLM's scheduler needs to know of requests, and does not wait for: it is found out on a thread of its own.

So are digests of large prompts: a million tokens would hold up everybody. vLLM's own hashes of a prompt's blocks would
cost nothing, and tell nothing: they are chained from a seed of the process with some algorithms and not with others,
and go by each server's size of blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from kvferry.engines.fingerprint import DIGEST_BYTES, prompt_digest

LONGEST_AT_ONCE = 1 << 13
"""Tokens that are digested where they are asked for: 0.4 ms."""

Found = TypeVar("Found")


class FoundAside(Generic[Found]):
    """What was found out, or is being found out, of requests, for the scheduler's thread.

    All that have not ended: were some forgotten for others' sake, more of them than are kept would have each other
    forgotten, as vLLM asks about all that wait, one after the other, and none of them would ever be scheduled.
    """

    def __init__(self, thread: str) -> None:
        self._found: dict[str, tuple[object, Future[Found]]] = {}  # by request
        self._thread = ThreadPoolExecutor(1, thread)

    def __len__(self) -> int:
        return len(self._found)

    def look(self, request: str, find: Callable[[], Found], *, about: object = None) -> Future[Found]:
        """Returns what is found; if nobody has asked for it, that begins.

        Args:
            about: what is asked about it: only the last thing is remembered.
        """
        known = self._found.get(request)
        if known is None or known[0] != about:
            self.forget(request)
            known = self._found[request] = about, self._thread.submit(find)
        return known[1]

    def forget(self, request: str) -> None:
        """Drops what was found of a request, which has ended; or it is found out anew when somebody asks."""
        _, future = self._found.pop(request, (None, None))
        if future is not None:
            future.cancel()

    def forget_all(self) -> None:
        for request in list(self._found):
            self.forget(request)


class PromptDigest(NamedTuple):
    """Digests of a prompt.

    Attributes:
        tokens: of its tokens.
        embedding: of what is given instead of tokens; empty where nothing is.
    """

    tokens: bytes
    embedding: bytes


class PromptDigests:
    """Digests of the prompts of requests, as far as they are exchanged. For the scheduler's thread.

    Attributes:
        found: those of large prompts, by request.
    """

    def __init__(self) -> None:
        self.found: FoundAside[PromptDigest] = FoundAside("kvferry-vllm-prompts")

    def is_known(self, request: Any, tokens: int) -> bool:
        """Whether `of` returns at once. A large prompt is digested from now on, aside.

        Args:
            request: vLLM's.
            tokens: how many of its prompt are exchanged, from the first on.
        """
        return not _is_large(request, tokens) or self._begun(request, tokens).done()

    def of(self, request: Any, tokens: int) -> PromptDigest:
        """Returns the digests of a prompt, and forgets them. Waits for a large one that is not known yet."""
        if not _is_large(request, tokens):
            return _digested(request, tokens)
        digest = self._begun(request, tokens).result()
        self.found.forget(request.request_id)
        return digest

    def _begun(self, request: Any, tokens: int) -> Future[PromptDigest]:
        return self.found.look(request.request_id, partial(_digested, request, tokens), about=tokens)


def _is_large(request: Any, tokens: int) -> bool:
    """Whether a prompt has many tokens, or embeddings, of which each takes as long as a thousand tokens."""
    return _embeddings(request) is not None or min(tokens, len(request.prompt_token_ids or ())) > LONGEST_AT_ONCE


def _embeddings(request: Any) -> Any | None:
    return getattr(request, "prompt_embeds", None)


def _digested(request: Any, tokens: int) -> PromptDigest:
    rows = _embeddings(request)
    return PromptDigest(
        prompt_digest(request.prompt_token_ids or (), tokens), b"" if rows is None else _rows_digest(rows[:tokens])
    )


def _rows_digest(rows: Any) -> bytes:
    import torch

    data = rows.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
