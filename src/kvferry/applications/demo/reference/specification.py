"""Which model the reference engine runs: sizes and a seed, or a checkpoint's directory; and what transformers calls it.

Nothing here imports transformers before a checkpoint's configuration is asked for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.applications.demo.reference.tokenizer import END_TOKEN, NUM_BYTE_TOKENS, START_TOKEN
from kvferry.errors import ModelError

SEEDED_ARCHITECTURES = ("qwen3", "llama", "deepseek_v3", "qwen3_next", "gemma3", "mamba2")
"""What can be built from sizes and a seed."""

ATTENTION_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Model types that cache keys and values for each head."""

LATENT_ARCHITECTURES = ("deepseek_v2", "deepseek_v3")
"""Model types with multi-head latent attention (MLA), which cache one latent vector a token and layer."""

HYBRID_ARCHITECTURES = ("gemma3_text", "qwen3_next")
"""Model types whose layers are of two kinds: full attention, and sliding windows or gated delta nets."""

STATE_ARCHITECTURES = ("mamba2",)
"""Model types without attention, which cache recurrent and convolution states alone."""

KNOWN_ARCHITECTURES = (*ATTENTION_ARCHITECTURES, *LATENT_ARCHITECTURES, *HYBRID_ARCHITECTURES, *STATE_ARCHITECTURES)
"""Model types of checkpoints that the reference engine runs."""

_MODEL_TYPES = {"gemma3": "gemma3_text"}

MINIMUM_ATTENTION_HEADS = 8

_POSITIVE_SIZES = (
    "num_layers",
    "num_kv_heads",
    "num_attention_heads",
    "head_dim",
    "hidden_size",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "state_size",
)
MINIMUM_HIDDEN_SIZE = 256
MINIMUM_HYBRID_LAYERS = 2

# transformers' usual 0.02 is for wide models: at a width of some hundreds attention adds so little to a token
# that the next one depends on the last one alone, and greedy decoding soon repeats one token for ever.
_WEIGHT_DEVIATION_AT_UNIT_WIDTH = 2.4

_LAYERS_TO_FULL_ATTENTION = 4


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A small model with seeded random weights, or a local checkpoint. Can be pickled.

    The same spec gives bit-identical weights in every process. With `model_directory` set, `architecture`
    is the checkpoint's model type, and all else comes from its files: the sizes and the seed mean nothing.

    The four sizes from `kv_lora_rank` on matter to deepseek_v3 only, which in turn ignores `num_kv_heads` and
    `head_dim`: each of its query heads has `qk_nope_head_dim` + `qk_rope_head_dim` dimensions, each value head
    `v_head_dim`, and what it caches is `kv_lora_rank` + `qk_rope_head_dim` numbers a token and layer.

    `sliding_window` is of gemma3. `num_kv_heads` is also how many key heads the gated delta nets of qwen3_next have,
    with twice as many value heads of `state_size` dimensions each, and how many groups B and C of mamba2 have, whose
    `num_attention_heads` heads keep `head_dim` times `state_size` numbers each.

    Raises:
        ModelError: if no model can be built from these values; names the value.
    """

    architecture: str = "qwen3"
    num_layers: int = 4
    num_attention_heads: int = MINIMUM_ATTENTION_HEADS
    num_kv_heads: int = 2
    head_dim: int = 64
    hidden_size: int = MINIMUM_HIDDEN_SIZE
    vocabulary_size: int = NUM_BYTE_TOKENS
    seed: int = 0
    model_directory: Path | None = None
    kv_lora_rank: int = 128
    qk_rope_head_dim: int = 32
    qk_nope_head_dim: int = 64
    v_head_dim: int = 64
    sliding_window: int = 32
    state_size: int = 48

    def __post_init__(self) -> None:
        if self.model_directory is None:
            self._check_sizes()

    @classmethod
    def small(
        cls, architecture: str = "qwen3", *, num_kv_heads: int = 2, num_layers: int = 4, seed: int = 0
    ) -> ModelSpec:
        """A model that loads in a blink. Its attention heads are the least multiple of the KV heads from 8.

        Raises:
            ModelError: if the architecture is unknown, or a size is not positive.
        """
        num_attention_heads = _round_up(MINIMUM_ATTENTION_HEADS, num_kv_heads)
        hidden_size = _round_up(MINIMUM_HIDDEN_SIZE, num_attention_heads)
        return cls(
            architecture=architecture,
            num_layers=num_layers,
            num_attention_heads=num_attention_heads,
            num_kv_heads=num_kv_heads,
            hidden_size=hidden_size,
            head_dim=2 * hidden_size // num_attention_heads if architecture == "mamba2" else 64,
            seed=seed,
        )

    @classmethod
    def from_directory(cls, directory: Path) -> ModelSpec:
        """A local checkpoint as transformers saves it. Reads config.json only, so that mistakes show early.

        Raises:
            ModelError: if the directory or its config.json is missing or unreadable, or if it is not known
                what its architecture caches; names the path or the value, and what to do.
        """
        return cls(architecture=_read_model_type(directory), model_directory=directory)

    @property
    def model_type(self) -> str:
        """The architecture's name in transformers."""
        return _MODEL_TYPES.get(self.architecture, self.architecture)

    @property
    def uses_latent_attention(self) -> bool:
        """Whether the cache is MLA's one latent component instead of keys and values."""
        return self.architecture in LATENT_ARCHITECTURES

    def _check_sizes(self) -> None:
        if self.architecture not in SEEDED_ARCHITECTURES:
            raise ModelError(
                f"no seeded model of architecture {self.architecture!r}: "
                f"choose one of {', '.join(SEEDED_ARCHITECTURES)}, or give a model directory"
            )
        for name in _POSITIVE_SIZES:
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.sliding_window < 2:
            raise ModelError(f"sliding_window is {self.sliding_window}; transformers needs at least 2")
        if self.model_type in HYBRID_ARCHITECTURES and self.num_layers < MINIMUM_HYBRID_LAYERS:
            raise ModelError(
                f"num_layers is {self.num_layers}; {self.architecture} has layers of two kinds and needs at least "
                f"{MINIMUM_HYBRID_LAYERS}"
            )
        for name in ("head_dim", "qk_rope_head_dim"):
            if getattr(self, name) % 2:
                raise ModelError(f"{name} is {getattr(self, name)}; rotary embedding needs an even number")
        if self.num_attention_heads % self.num_kv_heads:
            raise ModelError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )
        if self.architecture == "llama" and self.hidden_size % self.num_attention_heads:
            raise ModelError(
                f"hidden_size ({self.hidden_size}) must be a multiple of "
                f"num_attention_heads ({self.num_attention_heads}): transformers insists on it for llama"
            )
        if self.architecture == "mamba2" and 2 * self.hidden_size != self.num_attention_heads * self.head_dim:
            raise ModelError(
                f"hidden_size ({self.hidden_size}) must be half of num_attention_heads times head_dim "
                f"({self.num_attention_heads} x {self.head_dim}) for mamba2"
            )
        if self.vocabulary_size < NUM_BYTE_TOKENS:
            raise ModelError(
                f"vocabulary_size is {self.vocabulary_size}; the byte-level tokenizer needs at least {NUM_BYTE_TOKENS}"
            )


def _round_up(value: int, factor: int) -> int:
    # A factor that is no factor is left to the checks of ModelSpec, which name it.
    return -(-value // factor) * factor if factor > 0 else value


def _read_model_type(directory: Path) -> str:
    known = ", ".join(KNOWN_ARCHITECTURES)
    config_file = directory / "config.json"
    if not directory.is_dir():
        raise ModelError(f"model directory {directory} does not exist; give the folder of a local checkpoint")
    if not config_file.is_file():
        raise ModelError(
            f"model directory {directory} has no config.json; give a folder written by save_pretrained, "
            "or a downloaded snapshot with config.json at its top"
        )
    try:
        config: Any = json.loads(config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {config_file} as JSON ({error}); restore it from the checkpoint") from error
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(model_type, str):
        raise ModelError(f"{config_file} names no model_type; use a checkpoint with one of {known}")
    if model_type not in KNOWN_ARCHITECTURES:
        raise ModelError(
            f"{config_file} has model_type {model_type!r}, and the reference engine does not know what that "
            f"architecture caches; use a checkpoint with one of {known}"
        )
    return model_type


def check_packages() -> None:
    """Raise ModelError unless torch and transformers can be imported."""
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise ModelError(
            f"the reference engine needs {error.name}: pip install torch transformers tokenizers"
        ) from error


def checkpoint_configuration(directory: Path) -> Any:
    """transformers' configuration of a local checkpoint, its defaults filled in.

    Raises:
        ModelError: if transformers is missing or refuses the configuration.
    """
    check_packages()
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # any type, by the value that is wrong
        raise ModelError(
            f"transformers refuses {directory / 'config.json'} ({type(error).__name__}: {error}); "
            "correct that value, or install the version of transformers that wrote it"
        ) from error


def seeded_configuration(spec: ModelSpec) -> dict[str, Any]:
    """The configuration of a seeded model, as its config.json would have it."""
    values: dict[str, Any] = {
        "model_type": spec.model_type,
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocabulary_size,
        "initializer_range": _WEIGHT_DEVIATION_AT_UNIT_WIDTH / spec.hidden_size**0.5,
        "tie_word_embeddings": False,
        "bos_token_id": START_TOKEN,
        "eos_token_id": END_TOKEN,
    }
    if spec.model_type == "mamba2":
        return values | _mamba2(spec)
    values |= {
        "num_attention_heads": spec.num_attention_heads,
        "intermediate_size": 2 * spec.hidden_size,
        "max_position_embeddings": 32768,
    }
    if spec.uses_latent_attention:
        return values | _latent_attention(spec)
    values |= {"num_key_value_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
    if spec.model_type == "qwen3_next":
        return values | _gated_delta_net(spec)
    if spec.model_type == "gemma3_text":
        return values | _sliding_window(spec)
    return values


def _latent_attention(spec: ModelSpec) -> dict[str, Any]:
    return {
        "num_key_value_heads": spec.num_attention_heads,
        "kv_lora_rank": spec.kv_lora_rank,
        "q_lora_rank": None,
        "qk_rope_head_dim": spec.qk_rope_head_dim,
        "qk_nope_head_dim": spec.qk_nope_head_dim,
        "v_head_dim": spec.v_head_dim,
        # The upper half of the layers are mixtures of experts, the lower half dense.
        "first_k_dense_replace": spec.num_layers // 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": spec.hidden_size // 2,
        "num_mtp_layers": 0,
    }


def _gated_delta_net(spec: ModelSpec) -> dict[str, Any]:
    return {
        "layer_types": _layer_types(spec, "linear_attention"),
        "linear_num_key_heads": spec.num_kv_heads,
        "linear_num_value_heads": 2 * spec.num_kv_heads,
        "linear_key_head_dim": spec.head_dim // 2,
        "linear_value_head_dim": spec.state_size,
        "linear_conv_kernel_dim": 4,
        # Every layer is dense: experts cache nothing.
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_only_layers": list(range(spec.num_layers)),
    }


def _sliding_window(spec: ModelSpec) -> dict[str, Any]:
    return {
        "layer_types": _layer_types(spec, "sliding_attention"),
        "sliding_window": spec.sliding_window,
        "query_pre_attn_scalar": spec.head_dim,
        "pad_token_id": None,
    }


def _mamba2(spec: ModelSpec) -> dict[str, Any]:
    return {
        "num_heads": spec.num_attention_heads,
        "head_dim": spec.head_dim,
        "n_groups": spec.num_kv_heads,
        "state_size": spec.state_size,
        "expand": 2,
        "conv_kernel": 4,
        "chunk_size": 64,
        "pad_token_id": None,
    }


def _layer_types(spec: ModelSpec, others: str) -> list[str]:
    """One layer in four attends to every token, or the last one of a model with fewer."""
    period = min(_LAYERS_TO_FULL_ATTENTION, spec.num_layers)
    return ["full_attention" if (index + 1) % period == 0 else others for index in range(spec.num_layers)]
