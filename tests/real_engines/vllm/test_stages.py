"""Pipeline stages: vLLM's own functions divide groups of layers among them, and its own group of ranks carries what
they tell each other. No engine starts: vLLM cannot run stages on a CPU.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from tests.support.vllm_ranks import ALONE
from vllm.v1.core.kv_cache_utils import _project_kv_cache_groups_to_worker, generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvferry.engines.vllm.configuration import groups_of, layer_specs

SIZES: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**SIZES)


def test_every_stage_and_the_scheduler_know_the_same_groups():
    larger = FullAttentionSpec(**SIZES | {"num_kv_heads": 4})
    several = UniformTypeKVCacheSpecs(16, {"model.layers.0.attn": FULL, "model.layers.3.attn": larger})
    whole = [
        KVCacheGroupSpec(["model.layers.0.attn", "model.layers.3.attn"], several),
        KVCacheGroupSpec(["model.layers.1.attn"], SlidingWindowSpec(**SIZES, sliding_window=8)),
        KVCacheGroupSpec(["model.layers.2.attn"], ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=32)),
        KVCacheGroupSpec(["model.layers.4.mixer"], MambaSpec(16, ((4, 4),), (torch.float32,))),
    ]
    specs = {name: spec for group in whole for name, spec in layer_specs(group).items()}
    stages = [
        KVCacheConfig(
            num_blocks=4,
            kv_cache_tensors=[],
            kv_cache_groups=_project_kv_cache_groups_to_worker(
                whole, {name: spec for name, spec in specs.items() if int(name.split(".")[2]) in numbers}
            ),
        )
        for numbers in (range(2), range(2, 5), range(5, 6))
    ]
    found = [groups_of(stage, ALONE) for stage in (*stages, generate_scheduler_kv_cache_config(stages))]
    bare = [[(each.name, each.block_tokens, each.window_tokens, each.chunk_tokens, each.has_state) for each in groups]
            for groups in found]  # fmt: skip
    assert bare[0] == [
        ("group 0", 16, None, None, False),
        ("group 1", 16, 7, None, False),
        ("group 2", 16, None, 32, False),
        ("group 3", 16, None, None, True),
    ]
    assert all(each == bare[0] for each in bare)
    assert [[len(group.layer_names) for group in groups] for groups in found[:3]] == [
        [1, 1, 0, 0],
        [1, 0, 1, 1],
        [0, 0, 0, 0],
    ]


STAGE = """
import sys
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.v1.kv_cache_interface import FullAttentionSpec
from kvferry.engines.vllm.components import of_all_stages

rank, address = int(sys.argv[1]), sys.argv[2]
specs = [FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=64, dtype=torch.bfloat16) for heads in (2, 4)]
with set_current_vllm_config(VllmConfig()):
    init_distributed_environment(2, rank, address, rank, backend="gloo")
    initialize_model_parallel(1, 2, backend="gloo")
    assert of_all_stages((rank, specs[rank])) == [(0, specs[0]), (1, specs[1])]
"""


def test_stages_tell_each_other_what_their_layers_keep(tmp_path: Path):
    command = [sys.executable, "-c", STAGE]
    stages = [
        subprocess.Popen([*command, str(rank), f"file://{tmp_path}/meeting"], stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    try:
        for stage in stages:
            _, said = stage.communicate(timeout=240)
            assert stage.returncode == 0, said
    finally:
        for stage in stages:
            stage.kill()
            stage.wait()
