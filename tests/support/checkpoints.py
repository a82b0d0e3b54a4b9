"""Checkpoints with random weights, written where a test can load them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from kvferry.applications.demo.reference.specification import LATENT_ARCHITECTURES


def save_checkpoint(directory: Path, architecture: str, prompts: Sequence[str], **changes: object) -> Path:
    """A tiny bfloat16 checkpoint with a tokenizer of the prompts' words, as save_pretrained writes it."""
    import transformers  # takes a second; every process of a run imports this module, few use it

    words = sorted({word for prompt in prompts for word in prompt.split()})
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0} | {w: i + 1 for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(directory)
    sizes: dict[str, object] = {
        "vocab_size": len(words) + 1,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if architecture in LATENT_ARCHITECTURES:
        sizes |= {"num_key_value_heads": 4, "kv_lora_rank": 48, "q_lora_rank": 24, "qk_rope_head_dim": 16}
        sizes |= {"qk_nope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2}
        sizes |= {"n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    elif architecture == "qwen3_moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    elif architecture == "mistral":
        sizes |= {"sliding_window": None}
    elif architecture == "gemma3_text":
        sizes |= {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16}
        sizes |= {"tie_word_embeddings": False}
    elif architecture == "qwen3_next":
        sizes |= {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
        sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
        sizes |= {"linear_value_head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2}
        sizes |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    elif architecture == "mamba2":
        sizes |= {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 12, "chunk_size": 16}
    torch.manual_seed(3)
    network = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(architecture, **sizes | changes)
    )
    network.to(torch.bfloat16).save_pretrained(directory)
    return directory
