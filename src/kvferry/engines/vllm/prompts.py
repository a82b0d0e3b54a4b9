"""Digests of long prompts, which are made aside: in vLLM's scheduler a million tokens would hold up everybody.

vLLM's own hashes of a prompt's blocks would cost nothing, and tell nothing: they are chained from a seed of the process
with some algorithms and not with others, and go by each server's size of blocks.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Any

from kvferry.engines.fingerprint import prompt_digest
from kvferry.engines.vllm.aside import FoundAside

LONGEST_AT_ONCE = 1 << 13
"""Tokens that are digested where they are asked for: 0.4 ms."""


class PromptDigests:
    """Digests of the prompts of requests, as far as they are exchanged. For the scheduler's thread.

    Attributes:
        found: those of long prompts, by request.
    """

    def __init__(self) -> None:
        """Begins with none."""
        self.found: FoundAside[bytes] = FoundAside("kvferry-vllm-prompts")

    def is_known(self, request: Any, tokens: int) -> bool:
        """Whether `of` returns at once. A long prompt is digested from now on, aside.

        Args:
            request: vLLM's.
            tokens: how many of its prompt are exchanged, from the first on.
        """
        return not _is_long(request, tokens) or self._begun(request, tokens).done()

    def of(self, request: Any, tokens: int) -> bytes:
        """Returns the digest of a prompt, and forgets it. Waits for a long one that is not known yet."""
        if not _is_long(request, tokens):
            return prompt_digest(request.prompt_token_ids or (), tokens)
        digest = self._begun(request, tokens).result()
        self.found.forget(request.request_id)
        return digest

    def _begun(self, request: Any, tokens: int) -> Future[bytes]:
        find = partial(prompt_digest, request.prompt_token_ids, tokens)
        return self.found.look(request.request_id, find, about=tokens)


def _is_long(request: Any, tokens: int) -> bool:
    return min(tokens, len(request.prompt_token_ids or ())) > LONGEST_AT_ONCE
