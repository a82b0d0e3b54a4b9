"""vLLM's own kernels that say where a token goes, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import triton.language as tl
import vllm.models.deepseek_v32.common.kernels as index_kernels
import vllm.v1.worker.block_table as first_runner
import vllm.v1.worker.gpu.block_table as second_runner
import vllm.v1.worker.gpu.buffer_utils as second_buffers
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
from vllm.v1.attention.backends.utils import PAD_SLOT_ID, get_dcp_local_seq_lens

KEY_BYTES = 128


def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives vLLM's modules Triton's language, which they leave away where no device is."""
    for module in (first_runner, second_runner, second_buffers, index_kernels):
        monkeypatch.setattr(module, "tl", tl)
    load = InterpreterBuilder.create_masked_load

    def load_by_truth(self: Any, pointers: Any, mask: Any, *more: Any) -> Any:
        """The interpreter makes bytes of truth values that it broadcasts, and takes no mask of bytes."""
        return load(self, pointers, TensorHandle(mask.data.astype(bool), mask.dtype), *more)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", load_by_truth)
    monkeypatch.setattr(index_kernels, "_fp8_ue8m0_quantize", lambda made_up, *_: made_up)


def first_runners(blocks: Sequence[int], tokens: int, block_tokens: int, ranks: int, rank: int, turn: int) -> list[int]:
    """The slot of every token by the kernel of vLLM's first model runner."""
    found = torch.full((tokens,), -7)
    InterpretedFunction(first_runner.ComputeSlotMappingKernel.kernel)[(2,)](
        tokens,
        tokens,
        torch.tensor([0, tokens], dtype=torch.int32),
        torch.arange(tokens),
        torch.tensor([blocks], dtype=torch.int32),
        len(blocks),
        found,
        KV_CACHE_BLOCK_SIZE=block_tokens,
        TOTAL_CP_WORLD_SIZE=ranks,
        TOTAL_CP_RANK=rank,
        CP_KV_CACHE_INTERLEAVE_SIZE=turn,
        PAD_ID=PAD_SLOT_ID,
        BLOCK_SIZE=16,
    )
    slots: list[int] = found.tolist()
    held = get_dcp_local_seq_lens(torch.tensor([tokens]), ranks, rank, turn)
    assert [sum(slot != PAD_SLOT_ID for slot in slots)] == held.tolist()
    return slots


def write_index(cache: torch.Tensor, slots: Sequence[int], keys: torch.Tensor, scales: torch.Tensor) -> None:
    """Writes made-up keys and scales where the kernel of DeepSeek-V3.2 and GLM-5 writes its own.

    Args:
        cache: of an index, (block, token, byte).
        slots: of the tokens that are written.
        keys: their bytes, (token, 128).
        scales: their bits, (token,).
    """
    count = 1 << (len(slots) - 1).bit_length()  # which the interpreter wants; the last token is written again
    last = torch.arange(count).clamp(max=len(slots) - 1)
    InterpretedFunction(_write_index)[(1,)](
        keys[last],
        scales[last],
        torch.tensor(slots)[last],
        cache,
        cache.view(torch.int32),
        cache.shape[1],
        cache.stride(0),
        COUNT=count,
        KEY_BYTES=KEY_BYTES,
    )


def _write_index(
    keys: Any,
    scales: Any,
    slots: Any,
    cache: Any,
    cache_scales: Any,
    block_tokens: Any,
    block_stride: Any,
    COUNT: tl.constexpr,  # noqa: N803 - Triton's way
    KEY_BYTES: tl.constexpr,  # noqa: N803
) -> None:
    tokens, offsets = tl.arange(0, COUNT)[:, None], tl.arange(0, KEY_BYTES)[None, :]
    quantised = tl.load(keys + tokens * KEY_BYTES + offsets), tl.load(scales + tokens)
    index_kernels._fp8_quant_and_cache_write(
        quantised,
        offsets < KEY_BYTES,
        tl.load(slots + tokens),
        cache,
        cache_scales,
        block_tokens,
        block_stride,
        offsets,
        KEY_BYTES,
        False,  # the order of GPUs of NVIDIA's
        1,
        1,
        448.0,
        False,
    )
