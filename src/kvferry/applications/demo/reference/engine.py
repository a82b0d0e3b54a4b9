"""A causal language model in two halves: one that prefills and hands out caches, one that decodes from them.

The undivided model stands beside them as the reference. Bits agree between processes that run the same spec
with the same chunking and number of torch threads; processes of the demo call `torch.set_num_threads(1)`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.applications.demo.reference.caches import CacheForm, cache_form, check_cache_form, check_caches
from kvferry.applications.demo.reference.specification import ModelSpec, check_packages, seeded_configuration
from kvferry.errors import ModelError, SettingsError

if TYPE_CHECKING:
    import torch

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


CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""What a model's `forward` and its output call the cache: since transformers 5.24; before; without attention."""


@dataclass(frozen=True, slots=True)
class PrefilledChunk:
    """What prefill made of the prompt's tokens [start, stop).

    `caches` holds one contiguous float32 array a component, by name, [layer, entry, ...]: over the chunk's tokens
    alone, those outside of a window included, or on the last chunk only with the request's one state. `next_token`
    is the first token of the answer, on the last chunk only.
    """

    start: int
    stop: int
    caches: dict[str, torch.Tensor]
    next_token: int | None


def load_model(spec: ModelSpec) -> ReferenceModel:
    """Build or load the model of `spec`.

    Raises:
        ModelError: if torch or transformers is missing, if the checkpoint cannot be used, or if transformers
            caches something else than the engine expects of the architecture.
    """
    model = ReferenceModel(load_network(spec), cache_form(spec))
    model.check()
    return model


class ReferenceModel:
    """A transformers model with greedy decoding, one request at a time; not for several threads at once.

    Decoding does not stop at an end-of-sequence token: it always yields as many tokens as were asked for.

    Attributes:
        network: the weights, and what computes with them.
        form: of its caches.
    """

    def __init__(self, network: Any, form: CacheForm) -> None:
        self.network = network
        self.form = form
        parameters = inspect.signature(network.forward).parameters
        argument = next((name for name in CACHE_NAMES if name in parameters), None)
        if argument is None:
            raise ModelError(
                f"{type(network).__name__} takes its cache by none of the names {', '.join(CACHE_NAMES)}: this "
                "version of transformers is not known here"
            )
        self._cache_argument = argument

    def prefill(self, token_ids: Sequence[int], chunk_tokens: int) -> Iterator[PrefilledChunk]:
        """Run a prompt through the model, `chunk_tokens` tokens at a time; the last chunk may be shorter.

        A chunk is computed when the iterator is asked for it.

        Raises:
            SettingsError: if chunk_tokens is not positive.
            ModelError: if the prompt is empty, or holds an id outside the vocabulary.
        """
        self._check_prompt(token_ids, chunk_tokens)
        return self._prefilled_chunks(token_ids, chunk_tokens)

    def decode(
        self, caches: Mapping[str, torch.Tensor], *, num_tokens: int, first_token: int, max_new_tokens: int
    ) -> list[int]:
        """Continue a prompt from its caches alone.

        Args:
            caches: arrays as in `PrefilledChunk.caches`, over the entries that `entries_kept` names. They are copied.
            num_tokens: length of the prompt.
            first_token: `next_token` of the last chunk.
            max_new_tokens: length of the result, `first_token` included.

        Raises:
            LayoutError: if components are missing, or an array's shape or dtype is wrong.
            SettingsError: if num_tokens or max_new_tokens is not positive.
            ModelError: if first_token is outside the vocabulary.
        """
        _check_positive("num_tokens", num_tokens)
        _check_positive("max_new_tokens", max_new_tokens)
        self._check_token_ids([first_token])
        check_caches(self.form, caches, num_tokens)
        cache = self.empty_cache()
        self.form.restore(cache, caches, num_tokens)
        return self._continue(cache, first_token, max_new_tokens)

    def generate_undivided(self, token_ids: Sequence[int], chunk_tokens: int, max_new_tokens: int) -> list[int]:
        """What the model answers when it is not divided: prefill and decode on one and the same cache.

        The result holds `max_new_tokens` tokens. Nothing is captured or restored, so that it can be compared
        with what `prefill` and `decode` make together.

        Raises:
            SettingsError: if chunk_tokens or max_new_tokens is not positive.
            ModelError: if the prompt is empty, or holds an id outside the vocabulary.
        """
        self._check_prompt(token_ids, chunk_tokens)
        _check_positive("max_new_tokens", max_new_tokens)
        cache = self.empty_cache()
        token = 0
        for start in range(0, len(token_ids), chunk_tokens):
            token = self.forward(token_ids[start : start + chunk_tokens], cache)
        return self._continue(cache, token, max_new_tokens)

    def check(self) -> None:
        """Run one token, and raise ModelError unless transformers caches what the engine expects."""
        cache = self.empty_cache()
        self.forward([0], cache)
        check_cache_form(self.form, cache)

    def _prefilled_chunks(self, token_ids: Sequence[int], chunk_tokens: int) -> Iterator[PrefilledChunk]:
        cache = self.empty_cache()
        self.form.record(cache)
        for start in range(0, len(token_ids), chunk_tokens):
            stop = min(start + chunk_tokens, len(token_ids))
            token = self.forward(token_ids[start:stop], cache)
            is_last = stop == len(token_ids)
            caches = self.form.capture(cache, stop - start, is_final=is_last)
            yield PrefilledChunk(start, stop, caches, token if is_last else None)

    def empty_cache(self) -> Any:
        """Makes a cache that holds nothing yet."""
        from transformers import DynamicCache

        return DynamicCache(config=self.network.config)

    def forward(self, token_ids: Sequence[int], cache: Any) -> int:
        """Append the tokens to `cache`; returns the likeliest next token."""
        import torch

        with torch.no_grad():
            output = self.network(
                input_ids=torch.tensor([list(token_ids)]),
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_argument: cache},
            )
            return int(output.logits[0, -1].argmax())

    def _continue(self, cache: Any, token: int, max_new_tokens: int) -> list[int]:
        tokens = [token]
        while len(tokens) < max_new_tokens:
            tokens.append(self.forward(tokens[-1:], cache))
        return tokens

    def _check_prompt(self, token_ids: Sequence[int], chunk_tokens: int) -> None:
        _check_positive("chunk_tokens", chunk_tokens)
        if not token_ids:
            raise ModelError("the prompt has no tokens; a model needs at least one")
        self._check_token_ids(token_ids)

    def _check_token_ids(self, token_ids: Sequence[int]) -> None:
        size = int(self.network.config.vocab_size)
        for token in (min(token_ids), max(token_ids)):
            if not 0 <= token < size:
                raise ModelError(
                    f"token id {token} is outside the model's vocabulary of {size}; use the model's own tokenizer"
                )


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise SettingsError(f"{name} is {value}; it must be at least 1")
