"""The transformers model behind a `ModelSpec`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from kvferry.applications.demo.reference.configuration import check_packages, seeded_configuration
from kvferry.applications.demo.reference.specification import ModelSpec
from kvferry.errors import ModelError

# Some architectures normalise queries and keys, which leaves random attention so even that no single token would
# matter. Their norms begin at a weight of 1, which some of them write as 0.
_QUERY_KEY_NORM_GAIN = 1.0

# Most heads of a gated delta net with random weights forget everything within a token: what arrived of their states
# would not matter. This is how fast, by the natural logarithm, they forget at most when their gates stand at 1.
_FASTEST_DECAY = 0.1

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


def _seeded_network(spec: ModelSpec) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    configuration = AutoConfig.for_model(**seeded_configuration(spec))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        network = AutoModelForCausalLM.from_config(
            configuration, dtype=torch.float32, attn_implementation=_ATTENTION_IMPLEMENTATION
        )
    for name, weight in network.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            weight.data.add_(_QUERY_KEY_NORM_GAIN)
        elif name.endswith("linear_attn.A_log"):
            weight.data.clamp_(max=math.log(_FASTEST_DECAY))
    return network


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
