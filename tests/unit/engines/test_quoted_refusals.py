"""What docs/vllm.md and docs/sglang.md quote of refusals is what two servers say that differ so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.caches import Model
from tests.support.clones import ROOT, blocks
from tests.support.engines import WAIT_S, Engines, Requests

from kvferry.engines.checkpoints import weights_identity
from kvferry.engines.sglang.directory import difference
from kvferry.engines.vllm.identity import Platform, cache_dtype, content_order
from kvferry.errors import TransferFailedError


def checkpoint(directory: Path, number: int) -> str:
    """Identifies a checkpoint with a tensor full of a number."""
    directory.mkdir(exist_ok=True)
    save_file({"model.layers.0.weight": torch.full((64, 64), float(number))}, directory / "model.safetensors")
    return weights_identity(directory)


def said(registry_url: str, prefill_name: str, prefill: dict[str, str], decode: dict[str, str]) -> str:
    """What a request's error is on the decode side, where two engines have these fields of their fingerprints."""
    with Engines(registry_url) as both:
        requests = Requests(
            both.prefill(Model(), name=prefill_name, fingerprint=prefill), both.decode(Model(), fingerprint=decode)
        )
        request = requests.new(1)
        requests.open_decode(request)
        with pytest.raises(TransferFailedError) as failed:
            request.receivers[0].wait(WAIT_S)
        return str(failed.value)


def quoted(document: str) -> list[str]:
    """The blocks of a document, each on one line."""
    return [" ".join(block.split()) for block in blocks((ROOT / document).read_text(), "")]


def vllm_fields(directory: Path, number: int, dtype: str, backend: str, **changed: Any) -> dict[str, str]:
    """What vLLM's plug-in says of a server."""
    usual = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16, "num_head_slots": None}
    spec = SimpleNamespace(**usual | {"state_content_bytes": None} | changed)
    config = SimpleNamespace(cache_dtype=dtype, kv_cache_dtype_skip_layers=[])
    return {
        "weights": checkpoint(directory, number),
        "cache_dtype": cache_dtype(config, "torch.bfloat16", "torch.float8_e4m3fn"),
        "content_order": content_order(spec, backend, None, Platform("cuda", 9)),
    }


def test_vllms_are_quoted_as_they_read(tmp_path: Path, kvferry_registry_url: str):
    prefill = vllm_fields(tmp_path, 1, "fp8", "FLASH_ATTN")
    decode = vllm_fields(tmp_path, 2, "fp8_e5m2", "B12X", num_head_slots=2, state_content_bytes=2 * 64 * 2)
    found = said(kvferry_registry_url, "prefill-0", prefill, decode)
    for field in ("weights", "cache_dtype", "content_order"):
        assert f"{field} is " in found
    assert found in quoted("docs/vllm.md")


def test_sglangs_are_quoted_as_they_read(tmp_path: Path, kvferry_registry_url: str):
    sides = [{"weights": checkpoint(tmp_path, number)} for number in (1, 2)]
    assert said(kvferry_registry_url, "sglang-node-0:8998@5f2c9a1e", *sides) in quoted("docs/sglang.md")
    pairs = (
        ("--kv-cache-dtype", "fp8_e4m3", "fp8_e5m2"),
        ("KV layout", "nhd", "vectorized_5d"),
        ("attention context parallelism", None, 1),
    )
    assert difference("10.0.0.5:8998", pairs) in quoted("docs/sglang.md")
    assert difference("10.0.0.5:8998", pairs[2:]) is None
