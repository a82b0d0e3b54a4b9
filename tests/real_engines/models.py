"""Tiny models with random weights, written where an engine can load them; no token of theirs means anything."""

from __future__ import annotations

import random
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

_MODELS: dict[str, tuple[str, dict[str, object]]] = {
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


def write(name: str, directory: Path) -> Path:
    """Writes one: "qwen3", "llama" or "hybrid", which attends to a sliding window in five layers of six."""
    architecture, changes = _MODELS[name]
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(directory)
    torch.manual_seed(11)
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **_SIZES | changes))
    network.to(torch.float32).save_pretrained(directory)
    return directory


def prompts(seed: int, count: int = 16, *, shortest: int = 5, longest: int = 600) -> list[list[int]]:
    """Prompts of lengths from the shortest to the longest. No two seeds have a prefix in common."""
    random_numbers = random.Random(seed)
    lengths = [shortest + (longest - shortest) * number // max(1, count - 1) for number in range(count)]
    return [[random_numbers.randrange(VOCABULARY) for _ in range(length)] for length in lengths]
