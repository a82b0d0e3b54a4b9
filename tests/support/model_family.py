"""What a family of models is in tests: a tiny configuration, and what engines need to read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 512,
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
    "tie_word_embeddings": False,
}
EXPERTS: Final[Mapping[str, Any]] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT: Final[Mapping[str, Any]] = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models.

    Attributes:
        name: how it is called in tests and in docs/design/families.md.
        members: published models that are of it, in words.
        special: what its cache has that other families' do not have.
        model_type: of its configuration, as transformers calls it.
        architecture: the class that engines look it up by.
        changes: what is different from `SIZES` in its configuration.
        drafts: how an engine drafts with it, as vLLM's configuration has it; None where it does not.
        draft: what is different from the model's in the configuration of a draft model of its own; None for none.
        sglang_around: the type and the class of the multimodal model that SGLang wants around it; None for none.
        sglang_backend: of attention, where SGLang does not take the one for CPUs.
        sglang_pools: who makes its pools in tests: SGLang's configurator, or the test itself of SGLang's classes, if
            the configurator wants a GPU.
        vllm, sglang: why the engine itself does not serve it; None where it does.
    """

    name: str
    members: str
    special: str
    model_type: str
    architecture: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    drafts: Mapping[str, Any] | None = None
    draft: Mapping[str, Any] | None = None
    sglang_around: tuple[str, str] | None = None
    sglang_backend: str = "torch_native"
    sglang_pools: str = "configurator"
    vllm: str | None = None
    sglang: str | None = None

    @property
    def configuration(self) -> dict[str, Any]:
        """What stands in its config.json."""
        return {**SIZES, **self.changes, "model_type": self.model_type, "architectures": [self.architecture]}

    @property
    def sglang_configuration(self) -> dict[str, Any]:
        """What stands there for SGLang."""
        if self.sglang_around is None:
            return self.configuration
        kind, architecture = self.sglang_around
        return {"model_type": kind, "architectures": [architecture], "text_config": self.configuration}
