"""The transformers model behind a `ModelSpec`, and its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvferry.engines.reference.specification import ModelSpec
from kvferry.engines.reference.tokenizer import END_TOKEN, START_TOKEN
from kvferry.errors import ModelError

# transformers' usual 0.02 is for wide models: at a width of some hundreds attention adds so little to a token
# that the next one depends on the last one alone, and greedy decoding soon repeats one token for ever.
_WEIGHT_DEVIATION_AT_UNIT_WIDTH = 2.4

# Qwen3 normalises queries and keys, which leaves random attention so even that no single token would matter.
_QUERY_KEY_NORM_WEIGHT = 2.0

# Plain matrix products and a softmax: no kernel that would choose another algorithm by shape or processor.
_ATTENTION_IMPLEMENTATION = "eager"


def load_network(spec: ModelSpec) -> Any:
    """The model in float32 on the CPU, in evaluation mode and without gradients.

    A checkpoint of another dtype is converted to float32, in which every bfloat16 and float16 is exact: CPUs
    differ in how they round the narrower types, and many are slow at them.

    Raises:
        ModelError: if torch or transformers is missing, or the checkpoint's files cannot be used.
    """
    check_packages()
    directory = spec.model_directory
    network = _seeded_network(spec) if directory is None else _checkpoint_network(directory)
    network.eval()
    network.requires_grad_(False)
    return network


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


def check_packages() -> None:
    """Raise ModelError unless torch and transformers can be imported."""
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise ModelError(f"the reference engine needs {error.name}: pip install 'kvferry[demo]'") from error


def _seeded_network(spec: ModelSpec) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    configuration = AutoConfig.for_model(spec.architecture, **_configuration_values(spec))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        network = AutoModelForCausalLM.from_config(
            configuration, dtype=torch.float32, attn_implementation=_ATTENTION_IMPLEMENTATION
        )
    for name, weight in network.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.constant_(weight, _QUERY_KEY_NORM_WEIGHT)
    return network


def _configuration_values(spec: ModelSpec) -> dict[str, Any]:
    values: dict[str, Any] = {
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_attention_heads,
        "hidden_size": spec.hidden_size,
        "intermediate_size": 2 * spec.hidden_size,
        "vocab_size": spec.vocabulary_size,
        "max_position_embeddings": 32768,
        "initializer_range": _WEIGHT_DEVIATION_AT_UNIT_WIDTH / spec.hidden_size**0.5,
        "tie_word_embeddings": False,
        "bos_token_id": START_TOKEN,
        "eos_token_id": END_TOKEN,
    }
    if not spec.uses_latent_attention:
        return values | {"num_key_value_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
    return values | {
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


def _checkpoint_network(directory: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # ten processes would draw their bars over each other
    try:
        network, loading = AutoModelForCausalLM.from_pretrained(
            directory,
            local_files_only=True,
            dtype=torch.float32,
            attn_implementation=_ATTENTION_IMPLEMENTATION,
            output_loading_info=True,
        )
    except Exception as error:  # any type, by the file that is broken
        raise ModelError(
            f"cannot load the model in {directory} ({type(error).__name__}: {error}); "
            "check that all its weight files are there and whole"
        ) from error
    # transformers fills missing weights with random ones, which would differ from process to process.
    missing = sorted(loading["missing_keys"])
    if missing:
        raise ModelError(
            f"the checkpoint in {directory} lacks {len(missing)} weights, {missing[0]} among them; "
            "check that all its weight files are there and whole"
        )
    return network
