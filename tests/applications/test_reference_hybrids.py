"""Hybrids in the reference engine: sliding windows, recurrent states and convolutions survive being cut out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.checkpoints import save_checkpoint
from tests.support.reference import Caches, cache_in, changes_with, decode, prefill_whole, seeded_model

from kvferry.applications.demo.reference.caches import CacheForm, cache_form, check_cache_form
from kvferry.applications.demo.reference.engine import ReferenceModel, load_model
from kvferry.applications.demo.reference.specification import ModelSpec
from kvferry.applications.demo.reference.tokenizer import ByteTokenizer, load_tokenizer, read_prompts
from kvferry.errors import ModelError
from kvferry.layout import Component, Entry, Interval
from kvferry.pools.places import entries_kept

PROMPTS = read_prompts()
HYBRIDS = ("qwen3_next", "gemma3", "mamba2")


def described(model: ReferenceModel) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], str | None]]:
    return {
        each.component.name: (each.layers, tuple(axis.size for axis in each.component.axes[1:]), each.tp_axis)
        for each in model.form.components
    }


def test_what_a_gated_delta_net_caches():
    assert described(seeded_model("qwen3_next")) == {
        "k": ((3,), (2, 64), "head"),
        "v": ((3,), (2, 64), "head"),
        "state": ((0, 1, 2), (4, 32, 48), "head"),
        "conv_q": ((0, 1, 2), (2, 32, 4), "head"),
        "conv_k": ((0, 1, 2), (2, 32, 4), "head"),
        "conv_v": ((0, 1, 2), (4, 48, 4), "head"),
    }


def test_what_mamba2_caches():
    assert described(seeded_model("mamba2")) == {
        "state": ((0, 1, 2, 3), (8, 64, 48), "head"),
        "conv_x": ((0, 1, 2, 3), (8, 64, 4), "head"),
        "conv_b": ((0, 1, 2, 3), (2, 48, 4), "group"),
        "conv_c": ((0, 1, 2, 3), (2, 48, 4), "group"),
    }


def test_what_sliding_windows_cache():
    model = seeded_model("gemma3")
    assert described(model) == {
        "k": ((3,), (2, 64), "head"),
        "v": ((3,), (2, 64), "head"),
        "window_k": ((0, 1, 2), (2, 64), "head"),
        "window_v": ((0, 1, 2), (2, 64), "head"),
    }
    assert [each.component.window_tokens for each in model.form.components] == [None, None, 32, 32]


@pytest.mark.parametrize(
    ("window_tokens", "num_tokens", "expected"),
    [(None, 9, (0, 9)), (4, 9, (5, 9)), (4, 4, (0, 4)), (4, 5, (1, 5)), (4, 1, (0, 1))],
)
def test_entries_that_a_request_needs(window_tokens, num_tokens, expected):
    of_tokens: dict[str, Any] = {"axes": seeded_model("gemma3").form.components[0].component.axes, "dtype": "float32"}
    component = Component(name="k", window_tokens=window_tokens, **of_tokens)
    assert entries_kept(component, num_tokens) == Interval(*expected)
    assert entries_kept(Component(name="k", entry=Entry.REQUEST, **of_tokens), num_tokens) == Interval(0, 1)


def own_cache(model: ReferenceModel, token_ids: list[int]) -> Any:
    """What transformers caches of a prompt that it runs in one piece, without the engine."""
    with torch.no_grad():
        output = model.network(torch.tensor([token_ids]), use_cache=True)
    return cache_in(output)


@pytest.mark.parametrize("prompt", [0, 5])  # shorter than the window, and longer
def test_captured_windows_are_the_tokens_that_transformers_keeps_and_one_more(prompt):
    model = seeded_model("gemma3")
    token_ids = ByteTokenizer().tokenize(PROMPTS[prompt])
    caches, _ = prefill_whole(model, token_ids, len(token_ids))
    own = own_cache(model, token_ids)
    for layer in range(3):
        for name, tensor in (("window_k", own.layers[layer].keys), ("window_v", own.layers[layer].values)):
            kept = min(len(token_ids), 31)
            assert tensor.shape[2] == kept
            assert torch.equal(caches[name][layer, -kept:].transpose(0, 1), tensor[0])
    assert caches["window_k"].shape[1] == min(len(token_ids), 32)
    assert torch.equal(caches["k"][0].transpose(0, 1), own.layers[3].keys[0])


def test_every_token_of_a_chunk_is_captured_although_the_window_forgets_it():
    model = seeded_model("gemma3")
    token_ids = ByteTokenizer().tokenize(PROMPTS[5])
    in_pieces = list(model.prefill(token_ids, 48))
    (whole,) = model.prefill(token_ids, len(token_ids))
    for name in ("window_k", "window_v"):
        joined = torch.cat([chunk.caches[name] for chunk in in_pieces], dim=1)
        assert joined.shape == whole.caches[name].shape
        torch.testing.assert_close(joined, whole.caches[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("architecture", "channels"),
    [("qwen3_next", ("conv_q", "conv_k", "conv_v")), ("mamba2", ("conv_x", "conv_b", "conv_c"))],
)
def test_captured_states_are_what_transformers_keeps(architecture, channels):
    model = seeded_model(architecture)
    token_ids = ByteTokenizer().tokenize(PROMPTS[5])
    caches, _ = prefill_whole(model, token_ids, len(token_ids))
    own = own_cache(model, token_ids)
    for layer in range(3):
        assert torch.equal(caches["state"][layer], own.layers[layer].recurrent_states[0])
        side_by_side = torch.cat([caches[name][layer].flatten(1, -2) for name in channels], dim=1)
        assert torch.equal(side_by_side, own.layers[layer].conv_states[0])


def test_channels_are_the_query_the_key_and_the_value():
    """Which rows are which is taken from the weights that make them, not from the order in the cache."""
    model = seeded_model("qwen3_next")
    token_ids = ByteTokenizer().tokenize(PROMPTS[5])
    caches, _ = prefill_whole(model, token_ids, len(token_ids))
    net = model.network.model.layers[0].linear_attn
    with torch.no_grad():
        hidden = model.network.model.layers[0].input_layernorm(
            model.network.model.embed_tokens(torch.tensor([token_ids]))
        )
        query, key, value, *_ = net.fix_query_key_value_ordering(net.in_proj_qkvz(hidden), net.in_proj_ba(hidden))
    for name, expected in (("conv_q", query), ("conv_k", key), ("conv_v", value)):
        torch.testing.assert_close(caches[name][0, 0].movedim(-1, 0), expected[0, -4:])


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_a_restored_cache_is_the_one_that_was_captured(architecture):
    """Continued by several tokens at once, which looks at more of it than decoding one by one does."""
    model = seeded_model(architecture)
    token_ids = ByteTokenizer().tokenize(PROMPTS[5])
    caches, _ = prefill_whole(model, token_ids, 64)
    restored, undivided = model.empty_cache(), model.empty_cache()
    model.form.restore(restored, caches, len(token_ids))
    for start in range(0, len(token_ids), 64):
        model.forward(token_ids[start : start + 64], undivided)
    for more in (token_ids[:7], token_ids[7:8], token_ids[8:60]):
        assert model.forward(more, restored) == model.forward(more, undivided)
    for mine, own in zip(restored.layers, undivided.layers, strict=True):
        for name in ("keys", "values", "cumulative_length"):
            if hasattr(own, name):
                assert torch.equal(torch.as_tensor(getattr(mine, name)), torch.as_tensor(getattr(own, name)))
        for name in ("recurrent_states", "conv_states"):
            if hasattr(own, name):
                assert torch.equal(getattr(mine, name)[0], getattr(own, name)[0])


@pytest.mark.sampled(one_in=18, full=3)
@pytest.mark.parametrize("chunk_tokens", [31, 32, 33, 3, 2, 1])
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_chunks_around_the_window_and_the_kernel(architecture, chunk_tokens, tier):
    model = seeded_model(architecture)
    for prompt in PROMPTS[: tier.amount(quick=1, full=1, long=2)]:
        for length in (1, 2, 31, 32, 33, 64):
            token_ids = ByteTokenizer().tokenize(prompt * 3)[:length]
            prefilled = prefill_whole(model, token_ids, chunk_tokens)
            assert decode(model, token_ids, prefilled, 6) == model.generate_undivided(token_ids, chunk_tokens, 6)


def zero(name: str) -> Callable[[Caches], object]:
    return lambda caches: caches[name].zero_()


def zero_half_of_the_heads(name: str) -> Callable[[Caches], object]:
    return lambda caches: caches[name][:, :, : caches[name].shape[2] // 2].zero_()


def swap(one: str, other: str) -> Callable[[Caches], object]:
    def swapped(caches: Caches) -> None:
        caches[one], caches[other] = caches[other], caches[one]

    return swapped


def swap_heads(name: str) -> Callable[[Caches], object]:
    return lambda caches: caches.update({name: caches[name].flip(2)})


def one_token_late(caches: Caches) -> None:
    """As a window would arrive that starts one token too early, and so misses the last."""
    for name in ("window_k", "window_v"):
        caches[name] = caches[name].roll(1, dims=1)
        caches[name][:, 0] = 0


_DAMAGE = [
    *(("qwen3_next", zero(name)) for name in ("k", "v", "state", "conv_q", "conv_k", "conv_v")),
    *(("qwen3_next", zero_half_of_the_heads(name)) for name in ("state", "conv_q", "conv_k", "conv_v")),
    ("qwen3_next", swap_heads("state")),
    ("qwen3_next", swap("conv_q", "conv_k")),
    *(("gemma3", zero(name)) for name in ("k", "v", "window_k", "window_v")),
    ("gemma3", zero_half_of_the_heads("window_v")),
    ("gemma3", one_token_late),
    *(("mamba2", zero(name)) for name in ("state", "conv_x", "conv_b", "conv_c")),
    *(("mamba2", zero_half_of_the_heads(name)) for name in ("state", "conv_x", "conv_b", "conv_c")),
    ("mamba2", swap_heads("state")),
    ("mamba2", swap("conv_b", "conv_c")),
]


@pytest.mark.sampled(one_in=52, full=3)
@pytest.mark.parametrize(("architecture", "damage"), _DAMAGE)
def test_damaged_states_and_windows_change_the_tokens(architecture, damage):
    """If they did not, that tokens are equal would prove nothing about a transfer."""
    assert changes_with(seeded_model(architecture), PROMPTS[4:8], damage) >= 3


def test_a_state_that_is_cut_out_too_early_changes_the_tokens():
    for architecture in ("qwen3_next", "mamba2"):
        model = seeded_model(architecture)
        token_ids = ByteTokenizer().tokenize(PROMPTS[5])
        caches, first_token = prefill_whole(model, token_ids, 64)
        intact = decode(model, token_ids, (caches, first_token), 24)
        pending, _ = prefill_whole(model, token_ids[: len(token_ids) // 64 * 64], 64)
        states = {name: array for name, array in pending.items() if name not in ("k", "v")}
        assert decode(model, token_ids, (caches | states, first_token), 24) != intact


def test_a_checkpoint_with_sliding_windows_in_every_layer(tmp_path):
    spec = ModelSpec.from_directory(save_checkpoint(tmp_path, "mistral", PROMPTS, sliding_window=5))
    model = load_model(spec)
    assert [each.component.name for each in model.form.components] == ["window_k", "window_v"]
    token_ids = load_tokenizer(spec.model_directory).tokenize(PROMPTS[6])
    assert len(token_ids) > 2 * 5
    prefilled = prefill_whole(model, token_ids, 4)
    assert decode(model, token_ids, prefilled, 24) == model.generate_undivided(token_ids, 4, 24)


@pytest.mark.parametrize(
    ("architecture", "other", "complaint"),
    [
        ("gemma3", "qwen3", "layer 0 is a DynamicLayer, not a DynamicSlidingWindowLayer"),
        ("qwen3", "gemma3", "layer 0 is a DynamicSlidingWindowLayer, not a DynamicLayer"),
        ("mamba2", "gemma3", "layer 0 is a DynamicSlidingWindowLayer, not a LinearAttentionLayer"),
        ("mamba2", "qwen3_next", r"layer 0 has states of shapes .*, not .*8, 64, 48"),
    ],
)
def test_a_cache_of_another_kind_is_refused(architecture, other, complaint):
    model = seeded_model(other)
    cache = model.empty_cache()
    model.forward([0], cache)
    with pytest.raises(ModelError, match=complaint):
        check_cache_form(cache_form(ModelSpec.small(architecture)), cache)


def test_a_window_of_another_length_is_refused():
    model = seeded_model("gemma3")
    cache = model.empty_cache()
    model.forward([0], cache)
    with pytest.raises(ModelError, match="window of 32 tokens, not of 16"):
        check_cache_form(cache_form(ModelSpec("gemma3", sliding_window=16)), cache)


def test_a_model_of_other_length_is_refused():
    form = cache_form(ModelSpec.small("qwen3"))
    cache = seeded_model("qwen3").empty_cache()
    shorter = CacheForm(3, form.components, form.layers[:3])
    with pytest.raises(ModelError, match="caches 4 layers, but its configuration says 3"):
        check_cache_form(shorter, cache)
