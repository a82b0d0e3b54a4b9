"""The reference engine's two halves, put together in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from kvferry.applications.demo.reference.caches import array_shape
from kvferry.applications.demo.reference.engine import CACHE_NAMES, ReferenceModel, load_model
from kvferry.applications.demo.reference.specification import ModelSpec
from kvferry.applications.demo.reference.tokenizer import ByteTokenizer
from kvferry.layout import Entry
from kvferry.pools.places import entries_kept

Caches = dict[str, torch.Tensor]


@cache
def seeded_model(architecture: str, num_kv_heads: int = 2) -> ReferenceModel:
    return load_model(ModelSpec.small(architecture, num_kv_heads=num_kv_heads))


def prefill_whole(model: ReferenceModel, token_ids: list[int], chunk_tokens: int) -> tuple[Caches, int]:
    """What decoding needs of a prompt, from all its chunks, and the first token."""
    chunks = list(model.prefill(token_ids, chunk_tokens))
    assert [chunk.next_token is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert [chunk.start for chunk in chunks] == list(range(0, len(token_ids), chunk_tokens))
    assert [chunk.stop for chunk in chunks] == [*(chunk.start for chunk in chunks[1:]), len(token_ids)]
    caches = {}
    for sharded in model.form.components:
        component = sharded.component
        of_state = component.entry is Entry.REQUEST
        assert [component.name in chunk.caches for chunk in chunks] == [
            chunk is chunks[-1] or not of_state for chunk in chunks
        ]
        arrays = []
        for chunk in chunks[-1:] if of_state else chunks:
            array = chunk.caches[component.name]
            assert array.shape == array_shape(component, 1 if of_state else chunk.stop - chunk.start)
            assert array.is_contiguous()
            assert array.dtype == torch.float32
            arrays.append(array)
        kept = entries_kept(component, len(token_ids))
        caches[component.name] = torch.cat(arrays, dim=1)[:, kept.start : kept.stop]
    first_token = chunks[-1].next_token
    assert first_token is not None
    return caches, first_token


def decode(model: ReferenceModel, token_ids: list[int], prefilled: tuple[Caches, int], new_tokens: int) -> list[int]:
    caches, first_token = prefilled
    return model.decode(caches, num_tokens=len(token_ids), first_token=first_token, max_new_tokens=new_tokens)


def changes_with(
    model: ReferenceModel, prompts: list[str], damage: Callable[[Caches], object], *, new_tokens: int = 24
) -> int:
    """Of how many prompts the answer changes if the caches are damaged on their way."""
    changed = 0
    for prompt in prompts:
        token_ids = ByteTokenizer().tokenize(prompt)
        caches, first_token = prefill_whole(model, token_ids, 64)
        intact = decode(model, token_ids, (caches, first_token), new_tokens)
        damage(caches)
        changed += decode(model, token_ids, (caches, first_token), new_tokens) != intact
    return changed


def cache_in(output: Any) -> Any:
    """What a model's output says that it caches, by whichever name its version of transformers has for it."""
    return next(held for name in CACHE_NAMES if (held := getattr(output, name, None)) is not None)
