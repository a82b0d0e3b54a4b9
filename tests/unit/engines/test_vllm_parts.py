"""Caches whose keys, values and scales a backend keeps apart in a block, against views as its kernels have them.

`tests/real_engines/vllm/test_cache_parts.py` compares with the backends' own functions, where these can be imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.crossing import cross

from kvferry import GroupPages, RankCoordinates, split
from kvferry.engines.vllm.caches import CacheGroup, HeldPart, ModelShape
from kvferry.engines.vllm.forms import CachePart, forms_of, parts_of
from kvferry.engines.vllm.layouts import describe
from kvferry.errors import IncompatiblePeerError
from kvferry.layout.shard import RankLayout
from kvferry.plan import check_exchangeable
from kvferry.testing.network import LocalNetwork

BLOCKS, TOKENS, HEADS, HEAD_DIM, LAYERS = 5, 16, 4, 64, 2
BACKENDS = {
    "FLASHINFER": "NVFP4",
    "CUTLASS_MSA": "NVFP4",
    "TRITON_MSA": "NVFP4",
    "B12X": "NONE",
    "ROCM_ATTN": "NONE",
}


@pytest.fixture
def network() -> Iterator[LocalNetwork]:
    with LocalNetwork() as found:
        yield found


def spec(backend: str, heads: int) -> Any:
    """What a layer keeps, as its backend changes it."""
    is_nvfp4 = BACKENDS.get(backend) == "NVFP4"
    return SimpleNamespace(
        num_kv_heads=heads,
        head_size=HEAD_DIM,
        dtype=torch.uint8 if is_nvfp4 else torch.bfloat16,
        num_head_slots=2 * heads if is_nvfp4 else 2,
        state_content_bytes=HEAD_DIM // 2 + HEAD_DIM // 16 if is_nvfp4 else heads * HEAD_DIM * 2,
        kv_quant_mode=SimpleNamespace(name=BACKENDS.get(backend, "NONE")),
        tokens_per_state=1,
        num_states=TOKENS,
    )


def cache(backend: str, heads: int, *, tokens: int = TOKENS) -> torch.Tensor:
    """A layer's cache (block, slot, token, content), of zeros; heads outside of tokens."""
    made = spec(backend, heads)
    content = made.state_content_bytes // made.dtype.itemsize
    return torch.zeros(BLOCKS, made.num_head_slots, tokens, content, dtype=made.dtype)


def kernel_views(backend: str, block: torch.Tensor, heads: int) -> list[torch.Tensor]:
    """The keys, values and scales of one block as the backend's kernels see them, each with a dimension of heads."""
    flat, tokens = block.reshape(-1), block.shape[1]
    if backend == "FLASHINFER":  # all keys, their scales, all values, their scales
        side = flat.numel() // 2
        values = side * 8 // 9
        return [part.view(heads, tokens, -1) for which in flat.split(side) for part in (which[:values], which[values:])]
    if backend.endswith("MSA"):  # for each head its keys, their scales, its values, their scales
        slots = block.view(heads, 2, -1)
        values = slots.shape[2] * 8 // 9
        return [slots[:, side, part] for side in (0, 1) for part in (slice(0, values), slice(values, None))]
    if backend == "B12X":  # token by token, the heads of each behind each other
        return [block[side].view(tokens, heads, HEAD_DIM).transpose(0, 1) for side in (0, 1)]
    keys, values_ = block[0].view(heads, HEAD_DIM // 8, tokens, 8), block[1].view(heads, HEAD_DIM, tokens)
    return [keys, values_]


def bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The bytes of a tensor's elements, in the order of its dimensions, with one more for those of an element."""
    return tensor.contiguous().view(torch.uint8).numpy()


@pytest.mark.shows("vllm", "AttentionSpec with kv_quant_mode")
@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_byte_of_a_page_belongs_to_one_part(backend: str, heads: int):
    whole = cache(backend, heads)
    found = [part.view(whole) for part in parts_of(spec(backend, heads), backend)]
    assert [view.shape[:3] for view in found] == [(BLOCKS, heads, TOKENS)] * len(found)
    for view in found:
        view.view(torch.uint8).add_(1)
    assert set(bytes_of(whole).reshape(-1).tolist()) == {1}


def described(backend: str, tp: int, rank: int, *, tokens: int = TOKENS) -> tuple[list[torch.Tensor], RankLayout]:
    held = split(HEADS, tp, rank)
    names = [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)]
    caches = [cache(backend, len(held), tokens=tokens) for _ in names]
    made = spec(backend, len(held))
    layout = describe(
        dict(zip(names, caches, strict=True)),
        [CacheGroup("group 0", tuple(names), tokens)],
        ModelShape(LAYERS),
        RankCoordinates(tp_rank=rank, tp_size=tp),
        heads=dict.fromkeys(names, HeldPart(HEADS, held)),
        forms={name: forms_of(name, made, SimpleNamespace(), backend) for name in names},
        num_blocks=BLOCKS,
    ).layout
    return caches, layout


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (2, 1), (4, 2), (2, 8)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_keep_their_keys_values_and_scales_with_any_number_of_ranks(
    network: LocalNetwork, backend: str, prefill_tp: int, decode_tp: int
):
    """Byte for byte in the places where a kernel reads them."""
    blocks, there = [3, 1], [2, 4]
    prefill = [described(backend, prefill_tp, rank) for rank in range(prefill_tp)]
    decode = [described(backend, decode_tp, rank) for rank in range(decode_tp)]
    whole = {
        (layer, block): [
            torch.from_numpy(np.random.default_rng([layer, block, number]).integers(0, 256, bytes_of(view).shape, "u1"))
            for number, view in enumerate(kernel_views(backend, cache(backend, HEADS)[0], HEADS))
        ]
        for layer in range(LAYERS)
        for block in range(len(blocks))
    }
    for rank, (caches, _) in enumerate(prefill):
        held = split(HEADS, prefill_tp, rank)
        for (layer, block), parts in whole.items():
            for view, part in zip(kernel_views(backend, caches[layer][blocks[block]], len(held)), parts, strict=True):
                view.copy_(part[held.start : held.stop].contiguous().view(view.dtype))
    cross(
        network,
        [layout for _, layout in prefill],
        [layout for _, layout in decode],
        sent={"group 0": GroupPages(blocks)},
        received={"group 0": GroupPages(there)},
        tokens=2 * TOKENS - 3,
    )
    for rank, (caches, _) in enumerate(decode):
        held = split(HEADS, decode_tp, rank)
        for (layer, block), parts in whole.items():
            for view, part in zip(kernel_views(backend, caches[layer][there[block]], len(held)), parts, strict=True):
                assert np.array_equal(bytes_of(view), part[held.start : held.stop].numpy())
        untouched = torch.cat([each[[0, 1, 3]].view(torch.uint8).reshape(-1) for each in caches])
        assert not untouched.any(), "nothing else is written"


@pytest.mark.parametrize("backend", ["FLASHINFER", "CUTLASS_MSA", "ROCM_ATTN"])
def test_pages_of_another_size_are_refused_where_tokens_cannot_be_told_apart(backend: str):
    (_, here), (_, there) = described(backend, 1, 0), described(backend, 1, 0, tokens=2 * TOKENS)
    with pytest.raises(
        IncompatiblePeerError, match=rf"vLLM's {backend}, 16 tokens a page.*vLLM's {backend}, 32 tokens"
    ):
        check_exchangeable(here, there, source_name="theirs", destination_name="ours")


def test_what_a_backend_of_somebody_elses_keeps_apart_is_its_ranks_share():
    assert parts_of(spec("SOMEBODYS", HEADS), "SOMEBODYS") == ()
    _, layout = described("SOMEBODYS", 2, 0)
    (shard,) = layout.shards
    assert [axis.name for axis in shard.component.axes] == ["layer", "tensor-parallel share", "head", "packed"]
    _, other = described("SOMEBODYS", 1, 0)
    with pytest.raises(IncompatiblePeerError, match="the same tensor-parallel size"):
        check_exchangeable(layout, other, source_name="theirs", destination_name="ours")


@pytest.mark.parametrize("is_dense", [True, False], ids=["heads outside", "tokens outside"])
def test_one_piece_has_all_bytes_of_a_page_whatever_the_order(is_dense: bool):
    whole = torch.arange(BLOCKS * TOKENS * HEADS * 6).view(BLOCKS, TOKENS, HEADS, 6).transpose(1, 2)
    whole = whole.contiguous() if is_dense else whole
    piece = CachePart.in_one_piece(whole)
    assert piece.shape == ((BLOCKS, HEADS, TOKENS, 6) if is_dense else (BLOCKS, 1, TOKENS, HEADS * 6))
    assert torch.equal(piece[2].reshape(-1).sort().values, whole[2].reshape(-1).sort().values)
    assert piece.stride()[2:] == (piece.shape[3], 1)
