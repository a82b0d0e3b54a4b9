"""The reference engine: a model cut into prefill and decode answers exactly what the undivided model answers."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
from tests.support.checkpoints import save_checkpoint
from tests.support.reference import Caches, cache_in, changes_with, decode, prefill_whole, seeded_model

from kvferry.applications.demo.reference.caches import array_shape, cache_form
from kvferry.applications.demo.reference.engine import load_model
from kvferry.applications.demo.reference.specification import (
    KNOWN_ARCHITECTURES,
    LATENT_ARCHITECTURES,
    SEEDED_ARCHITECTURES,
    ModelSpec,
)
from kvferry.applications.demo.reference.tokenizer import START_TOKEN, ByteTokenizer, load_tokenizer, read_prompts
from kvferry.errors import ConfigurationError, LayoutError, ModelError, SettingsError
from kvferry.layout import attention_components, latent_component

NEW_TOKENS = 24
PROMPTS = read_prompts()


@pytest.mark.sampled(one_in=24, full=3)
@pytest.mark.parametrize("chunk_tokens", [64, 1000, 7, 1])
@pytest.mark.parametrize("architecture", SEEDED_ARCHITECTURES)
def test_decoding_from_captured_caches_gives_the_undivided_models_tokens(architecture, chunk_tokens, tier):
    model = seeded_model(architecture)
    for prompt in PROMPTS[4:5] if chunk_tokens == 1 else PROMPTS[: tier.amount(quick=1, full=2, long=8)]:
        token_ids = ByteTokenizer().tokenize(prompt)
        prefilled = prefill_whole(model, token_ids, chunk_tokens)
        undivided = model.generate_undivided(token_ids, chunk_tokens, NEW_TOKENS)
        assert len(undivided) == NEW_TOKENS
        assert decode(model, token_ids, prefilled, NEW_TOKENS) == undivided
        assert decode(model, token_ids, prefilled, 1) == undivided[:1]


@pytest.mark.sampled(one_in=4, full=2)
@pytest.mark.parametrize("num_kv_heads", [1, 4, 6, 8, 12])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_every_number_of_kv_heads(architecture, num_kv_heads):
    model = seeded_model(architecture, num_kv_heads)
    token_ids = ByteTokenizer().tokenize(PROMPTS[3])
    prefilled = prefill_whole(model, token_ids, 32)
    assert prefilled[0]["k"].shape[2] == num_kv_heads
    assert decode(model, token_ids, prefilled, 8) == model.generate_undivided(token_ids, 32, 8)


@pytest.mark.parametrize("architecture", SEEDED_ARCHITECTURES)
def test_the_undivided_model_agrees_with_transformers_generate(architecture):
    model = seeded_model(architecture)
    token_ids = ByteTokenizer().tokenize(PROMPTS[1])
    generated = model.network.generate(
        torch.tensor([token_ids]), do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS
    )
    # generate forbids the end token until enough tokens are there; a prompt that never reaches it is compared.
    tokens = model.generate_undivided(token_ids, len(token_ids), NEW_TOKENS)
    assert model.network.config.eos_token_id not in tokens
    assert generated[0, len(token_ids) :].tolist() == tokens


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_captured_keys_and_values_are_what_transformers_caches(architecture):
    model = seeded_model(architecture)
    token_ids = ByteTokenizer().tokenize(PROMPTS[5])
    caches, _ = prefill_whole(model, token_ids, len(token_ids))
    with torch.no_grad():
        own = cache_in(model.network(torch.tensor([token_ids]), use_cache=True))
    for index, layer in enumerate(own.layers):
        assert torch.equal(caches["k"][index].transpose(0, 1), layer.keys[0])
        assert torch.equal(caches["v"][index].transpose(0, 1), layer.values[0])


def test_captured_latents_are_the_normed_and_the_rotated_parts():
    """Recomputed from the attention's own inputs, without any cache."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

    model = seeded_model("deepseek_v3")
    token_ids = ByteTokenizer().tokenize(PROMPTS[2])
    caches, _ = prefill_whole(model, token_ids, len(token_ids))
    projected: dict[int, torch.Tensor] = {}
    layers = model.network.model.layers
    handles = [
        layer.self_attn.kv_a_proj_with_mqa.register_forward_hook(
            lambda _module, _inputs, output, index=index: projected.__setitem__(index, output)
        )
        for index, layer in enumerate(layers)
    ]
    with torch.no_grad():
        model.network(torch.tensor([token_ids]), use_cache=False)
        for handle in handles:
            handle.remove()
        cosine, sine = model.network.model.rotary_emb(projected[0], torch.arange(len(token_ids))[None])
        for index, layer in enumerate(layers):
            compressed, key = projected[index].split((128, 32), dim=-1)
            _, rotated = apply_rotary_pos_emb_interleave(key[:, None], key[:, None], cosine, sine)
            expected = torch.cat((layer.self_attn.kv_a_layernorm(compressed)[0], rotated[0, 0]), dim=-1)
            assert torch.equal(caches["latent"][index], expected)


def _zero_one_token(caches: Caches) -> None:
    for array in caches.values():
        array[:, 5] = 0


def _replace_one_token(caches: Caches) -> None:
    for array in caches.values():
        array[:, 5] = array[:, 9]


def _swap_tokens_of_the_last_component(caches: Caches) -> None:
    array = list(caches.values())[-1]
    array[:, [5, 9]] = array[:, [9, 5]]


def _drop_a_head(caches: Caches) -> None:
    caches["v"][:, :, 1] = 0


def _swap_heads(caches: Caches) -> None:
    caches["k"] = caches["k"].flip(2)


def _swap_layers(caches: Caches) -> None:
    for name in caches:
        caches[name] = caches[name].flip(0)


def _zero_all(caches: Caches) -> None:
    for array in caches.values():
        array.zero_()


def _zero_rotary_part(caches: Caches) -> None:
    caches["latent"][..., 128:] = 0


_ANYWHERE = [_zero_one_token, _replace_one_token, _swap_layers, _zero_all]
_DAMAGE = [
    *((name, damage) for name in ("qwen3", "llama", "deepseek_v3") for damage in _ANYWHERE),
    *(
        (name, damage)
        for name in ("qwen3", "llama")
        for damage in (_drop_a_head, _swap_heads, _swap_tokens_of_the_last_component)
    ),
    ("deepseek_v3", _zero_rotary_part),
]


@pytest.mark.sampled(one_in=32, full=2)
@pytest.mark.parametrize(("architecture", "damage"), _DAMAGE)
def test_damaged_caches_change_the_tokens(architecture, damage):
    """If they did not, that tokens are equal would prove nothing about a transfer."""
    assert changes_with(seeded_model(architecture), PROMPTS[:4], damage) >= 3


@pytest.mark.full
@pytest.mark.parametrize("architecture", SEEDED_ARCHITECTURES)
def test_tokens_are_varied(architecture):
    model = seeded_model(architecture)
    answers = [model.generate_undivided(ByteTokenizer().tokenize(prompt), 64, 32) for prompt in PROMPTS[:6]]
    assert min(len(set(answer)) for answer in answers) >= 16
    assert len({tuple(answer) for answer in answers}) == len(answers)


def _fingerprint(spec: ModelSpec) -> str:
    torch.set_num_threads(1)
    model = load_model(spec)
    digest = hashlib.sha256()
    for _, weight in sorted(model.network.state_dict().items()):
        digest.update(weight.numpy().tobytes())
    for chunk in model.prefill(ByteTokenizer().tokenize(PROMPTS[7]), 64):
        for _, array in sorted(chunk.caches.items()):
            digest.update(array.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.full
def test_another_process_has_the_same_weights_and_caches():
    specs = [ModelSpec.small(architecture) for architecture in SEEDED_ARCHITECTURES]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(_fingerprint, specs) == [_fingerprint(spec) for spec in specs]
    assert _fingerprint(specs[0]) != _fingerprint(ModelSpec.small("qwen3", seed=1))


_FORK_SERVER_SCRIPT = """
import multiprocessing
import sys

from kvferry.applications.demo.reference.engine import load_model
from kvferry.applications.demo.reference.specification import ModelSpec


def answer(_):
    assert "kvferry.applications.demo.reference.preload" in sys.modules
    return load_model(ModelSpec.small()).generate_undivided(list(range(40)), 16, 16)


if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvferry.applications.demo.reference.preload"])
    with context.Pool(2) as pool:
        print(pool.map(answer, range(2)))
"""


def _run_python(*arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, *arguments], stdout=subprocess.PIPE, text=True, env=environment, check=True, timeout=60
    ).stdout.strip()


@pytest.mark.full
def test_processes_of_a_preloaded_fork_server_agree_too(tmp_path):
    # In a process of its own, as a process has but one fork server, which other tests may have started.
    script = tmp_path / "answers.py"
    script.write_text(_FORK_SERVER_SCRIPT)
    expected = seeded_model("qwen3").generate_undivided(list(range(40)), 16, 16)
    assert _run_python(str(script)) == str([expected, expected])


def test_only_loading_imports_torch():
    """The command line describes models and reads prompts without waiting for torch."""
    code = (
        "import sys; from kvferry.applications.demo.reference import engine, tokenizer, specification as s, caches;"
        "tokenizer.read_prompts(); caches.cache_form(s.ModelSpec.small('deepseek_v3')).components;"
        "from kvferry.applications.demo import report, run, verdict;"
        "print(sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    assert _run_python("-c", code) == "[]"


def test_loading_leaves_the_random_generator_of_torch_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load_model(ModelSpec.small())
    assert torch.equal(torch.rand(3), expected)


def test_abandoned_prefill_leaves_gradients_on():
    model = seeded_model("qwen3")
    chunks = model.prefill(ByteTokenizer().tokenize(PROMPTS[7]), 16)
    next(chunks)
    assert torch.is_grad_enabled()


def test_components():
    spec = ModelSpec.small("llama", num_kv_heads=6)
    assert (spec.num_attention_heads, spec.hidden_size) == (12, 264)
    expected = attention_components(num_layers=4, num_kv_heads=6, head_dim=64, dtype="float32")
    assert [sharded.component for sharded in cache_form(spec).components] == list(expected)
    assert {(sharded.layers, sharded.tp_axis) for sharded in cache_form(spec).components} == {((0, 1, 2, 3), "head")}
    (latent,) = cache_form(ModelSpec.small("deepseek_v3")).components
    assert latent.component == latent_component(num_layers=4, latent_dim=160, dtype="float32")
    assert latent.tp_axis is None
    assert array_shape(latent.component, 9) == (4, 9, 160)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert pickle.loads(pickle.dumps(latent)) == latent


def test_byte_tokenizer():
    tokenizer = ByteTokenizer()
    assert tokenizer.tokenize("Fähre") == [START_TOKEN, *"Fähre".encode()]
    assert tokenizer.detokenize(tokenizer.tokenize("Fähre 渡")) == "Fähre 渡"
    assert tokenizer.detokenize([0xFF, 65, 257, 400]) == "\ufffdA"
    assert tokenizer.tokenize("") == [START_TOKEN]


@pytest.mark.parametrize("architecture", KNOWN_ARCHITECTURES)
def test_a_local_checkpoint(architecture, tmp_path):
    spec = ModelSpec.from_directory(save_checkpoint(tmp_path / "checkpoint", architecture, PROMPTS))
    assert spec.architecture == architecture
    model = load_model(pickle.loads(pickle.dumps(spec)))
    assert model.form.components == cache_form(spec).components
    if architecture in LATENT_ARCHITECTURES:
        (latent,) = model.form.components
        assert latent.component == latent_component(num_layers=2, latent_dim=64, dtype="float32")
    tokenizer = load_tokenizer(spec.model_directory)
    token_ids = tokenizer.tokenize(PROMPTS[6])
    assert tokenizer.detokenize(token_ids) == PROMPTS[6]
    prefilled = prefill_whole(model, token_ids, 8)
    undivided = model.generate_undivided(token_ids, 8, NEW_TOKENS)
    assert decode(model, token_ids, prefilled, NEW_TOKENS) == undivided
    for array in prefilled[0].values():
        array.zero_()
    assert decode(model, token_ids, prefilled, NEW_TOKENS) != undivided


def test_directories_that_are_no_checkpoint(tmp_path):
    with pytest.raises(ModelError, match=r"nowhere does not exist.*local checkpoint"):
        ModelSpec.from_directory(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        ModelSpec.from_directory(tmp_path)
    config_file = tmp_path / "config.json"
    for text, complaint in (
        ("{", "as JSON"),
        ("[]", "names no model_type"),
        ('{"model_type": "rwkv"}', "'rwkv'.*does not know what.*caches.*llama"),
    ):
        config_file.write_text(text)
        with pytest.raises(ModelError, match=complaint):
            ModelSpec.from_directory(tmp_path)


def test_checkpoints_with_parts_missing(tmp_path):
    whole = save_checkpoint(tmp_path / "whole", "llama", PROMPTS)

    def copy(name: str, *without: str) -> ModelSpec:
        directory = tmp_path / name
        shutil.copytree(whole, directory)
        for file in without:
            (directory / file).unlink()
        return ModelSpec.from_directory(directory)

    with pytest.raises(ModelError, match=r"no tokenizer.*copy"):
        load_tokenizer(copy("untokenized", "tokenizer.json").model_directory)
    broken_tokenizer = copy("mistokenized")
    (tmp_path / "mistokenized" / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"cannot load the tokenizer in .*mistokenized"):
        load_tokenizer(broken_tokenizer.model_directory)
    with pytest.raises(ModelError, match=r"cannot load the model in .*unweighted"):
        load_model(copy("unweighted", "model.safetensors"))
    deeper = copy("deeper")
    config_file = tmp_path / "deeper" / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"deeper lacks \d+ weights, model\.layers\.2\."):
        load_model(deeper)
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"hidden_size": "wide"}))
    with pytest.raises(ModelError, match=r"deeper.*hidden_size"):
        load_model(deeper)
    with pytest.raises(ModelError, match=r"refuses .*config\.json .*hidden_size"):
        cache_form(deeper)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"architecture": "gpt2"}, "'gpt2'.*qwen3, llama, deepseek_v3, qwen3_next, gemma3, mamba2"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_kv_heads": 3}, r"\(8\) must be a multiple of num_kv_heads \(3\)"),
        ({"head_dim": 63}, "head_dim is 63.*even"),
        ({"vocabulary_size": 100}, "vocabulary_size is 100.*260"),
        ({"architecture": "llama", "hidden_size": 250}, r"hidden_size \(250\)"),
        ({"architecture": "mamba2", "head_dim": 32}, r"hidden_size \(256\) must be half .*8 x 32"),
        ({"architecture": "gemma3", "num_layers": 1}, "num_layers is 1; gemma3 .* at least 2"),
        ({"architecture": "gemma3", "sliding_window": 1}, "sliding_window is 1.*at least 2"),
    ],
)
def test_impossible_sizes(values, complaint):
    with pytest.raises(ModelError, match=complaint):
        ModelSpec(**values)


def test_small_specs_name_an_impossible_number_of_kv_heads():
    with pytest.raises(ModelError, match="num_kv_heads is 0"):
        ModelSpec.small(num_kv_heads=0)


def test_misuse_of_a_model():
    model = seeded_model("qwen3")
    token_ids = ByteTokenizer().tokenize(PROMPTS[0])
    with pytest.raises(ModelError, match="no tokens"):
        model.prefill([], 16)
    with pytest.raises(ModelError, match="token id 260 is outside"):
        model.prefill([1, 260], 16)
    with pytest.raises(SettingsError, match="chunk_tokens is 0"):
        model.prefill(token_ids, 0)
    with pytest.raises(SettingsError, match="max_new_tokens is 0"):
        model.generate_undivided(token_ids, 16, 0)
    caches, first_token = prefill_whole(model, token_ids, 16)
    with pytest.raises(SettingsError, match="max_new_tokens is -1"):
        decode(model, token_ids, (caches, first_token), -1)
    with pytest.raises(SettingsError, match="num_tokens is 0"):
        decode(model, [], (caches, first_token), 4)
    with pytest.raises(ModelError, match="token id -1 is outside"):
        decode(model, token_ids, (caches, -1), 4)
    for wrong, complaint in (
        ({"k": caches["k"]}, r"\['k'\], the model has \['k', 'v'\]"),
        (caches | {"v": caches["v"][:, :-1]}, r"'v' has shape \(4, 29, 2, 64\), the model needs \(4, 30, 2, 64\)"),
        (caches | {"k": caches["k"].transpose(1, 2)}, "'k' has shape"),
        ({name: array[:, :0] for name, array in caches.items()}, "has shape"),
        (caches | {"v": caches["v"].half()}, "'v' is torch.float16, the model needs float32"),
    ):
        with pytest.raises(LayoutError, match=complaint):
            decode(model, token_ids, (wrong, first_token), 4)


def test_decode_copies_the_caches():
    for architecture in SEEDED_ARCHITECTURES:
        model = seeded_model(architecture)
        token_ids = ByteTokenizer().tokenize(PROMPTS[0])
        caches, first_token = prefill_whole(model, token_ids, 16)
        before = {name: array.clone() for name, array in caches.items()}
        decode(model, token_ids, (caches, first_token), 8)
        assert all(torch.equal(before[name], caches[name]) for name in caches)


def test_shipped_prompts():
    assert len(PROMPTS) == 16
    assert all(20 <= len(prompt.encode()) <= 600 for prompt in PROMPTS)


def test_prompts_of_the_user(tmp_path):
    file = tmp_path / "mine.txt"
    with pytest.raises(ConfigurationError, match=r"mine\.txt.*one prompt a line"):
        read_prompts(file)
    file.write_text("\n  \n")
    with pytest.raises(ConfigurationError, match=r"mine\.txt holds no prompt"):
        read_prompts(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match=r"mine\.txt"):
        read_prompts(file)
    file.write_text("one\n\n two \n")
    assert read_prompts(file) == ["one", "two"]
