"""Writes a tiny model with random weights, to try an engine without a download: `python examples/tiny_model.py DIR`.

Its vocabulary is w0 to w511, and no word of it means anything.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 512

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}

MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {}),
    "hybrid": (
        "gemma3_text",
        {
            "num_hidden_layers": 6,
            "sliding_window": 64,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "query_pre_attn_scalar": 64,
        },
    ),
}
"""Architecture, and what is different in its configuration. The hybrid attends to a window in five layers of six."""


def write(name: str, directory: Path, *, seed: int = 11) -> Path:
    """Writes one of `MODELS` where an engine can load it; its weights are as the seed says."""
    architecture, changes = MODELS[name]
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(directory)
    torch.manual_seed(seed)
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **_SIZES | changes))
    network.to(torch.float32).save_pretrained(directory)
    return directory


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3")
    chosen = parser.parse_args()
    print(f"wrote {write(chosen.model, chosen.directory)}")
