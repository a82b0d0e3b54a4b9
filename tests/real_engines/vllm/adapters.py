"""LoRA adapters with random weights for the tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

_RANK = 8


def write_adapter(directory: Path, model: Path, *, seed: int) -> Path:
    """Writes an adapter that changes the keys and values of every layer, strongly."""
    config = json.loads((model / "config.json").read_text())
    hidden, width = config["hidden_size"], config["head_dim"]
    sizes = {"q_proj": config["num_attention_heads"] * width}
    sizes |= dict.fromkeys(("k_proj", "v_proj"), config["num_key_value_heads"] * width)
    random_numbers = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in sizes.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{module}.lora_A.weight"] = torch.randn(_RANK, hidden, generator=random_numbers) / 4
            weights[f"{module}.lora_B.weight"] = torch.randn(size, _RANK, generator=random_numbers) / 4
    directory.mkdir()
    save_file(weights, directory / "adapter_model.safetensors")
    configuration = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": [*sizes], "bias": "none"}
    configuration |= {"base_model_name_or_path": str(model), "task_type": "CAUSAL_LM"}
    (directory / "adapter_config.json").write_text(json.dumps(configuration))
    return directory
