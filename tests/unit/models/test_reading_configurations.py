"""Reading configurations: what stands in where a field is missing, and errors that name the file and the field."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvferry.errors import ModelError
from kvferry.models import FAMILIES, ModelCache, model_cache_from_config, read_model_cache

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "torch_dtype": "float16",
}
QWEN_NEXT = LLAMA | {"model_type": "qwen3_next"}
NEMOTRON = LLAMA | {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M*-M",
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
}
JAMBA = LLAMA | {"model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 1}
MAMBA2 = {"model_type": "mamba2", "num_hidden_layers": 4, "num_heads": 8, "head_dim": 16, "state_size": 24}
MINIMAX = LLAMA | {"model_type": "minimax", "attn_type_list": [0, 1, 0, 1]}
GPT_OSS = LLAMA | {"model_type": "gpt_oss"}


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def layers(cache: ModelCache) -> dict[str, tuple[int, ...]]:
    return {each.component.name: each.layers for each in (*cache.components, *cache.draft)}


def sizes(config: dict[str, Any], name: str = "k") -> tuple[int, ...]:
    cache = model_cache_from_config(config)
    (component,) = [each.component for each in cache.components if each.component.name == name]
    return tuple(axis.size for axis in component.axes)


def dtype(config: dict[str, Any], name: str = "k") -> str:
    return next(
        each.component.dtype for each in model_cache_from_config(config).components if each.component.name == name
    )


def test_heads_and_dims_that_are_not_given_follow_from_the_others():
    assert sizes(LLAMA) == (4, 2, 32)
    assert sizes(without(LLAMA, "num_key_value_heads")) == (4, 8, 32)
    assert sizes(LLAMA | {"num_key_value_heads": None}) == (4, 8, 32)
    assert sizes(LLAMA | {"head_dim": 40}) == (4, 2, 40)
    assert sizes(LLAMA | {"head_dim": None}) == (4, 2, 32)


def test_what_transformers_takes_for_a_missing_field_is_taken_here():
    assert sizes(without(LLAMA, "num_key_value_heads") | {"model_type": "mistral", "sliding_window": None})[1] == 8
    assert sizes(LLAMA | {"model_type": "qwen3"})[2] == 128
    assert sizes({"model_type": "gemma3_text", "dtype": "bfloat16"}) == (4, 4, 256)
    assert sizes(QWEN_NEXT, "state") == (3, 32, 128, 128)


def test_keys_and_values_of_a_gated_delta_net_may_differ_in_all_their_sizes():
    config = QWEN_NEXT | {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_conv_kernel_dim": 5}
    config |= {"linear_num_value_heads": 6, "linear_value_head_dim": 12}
    assert sizes(config, "state") == (3, 6, 8, 12)
    assert sizes(config, "conv_q") == sizes(config, "conv_k") == (3, 2, 8, 4)
    assert sizes(config, "conv_v") == (3, 6, 12, 4)


def test_the_dtype_has_two_names_and_both_count():
    assert dtype(LLAMA) == "float16"
    assert dtype(without(LLAMA, "torch_dtype") | {"dtype": "float32"}) == "float32"
    assert dtype(LLAMA | {"dtype": "torch.bfloat16"}) == "bfloat16"
    assert dtype(LLAMA | {"dtype": None}) == "float16"
    assert dtype(GPT_OSS) == "float16", "what the file says wins over what the family knows"
    assert dtype(without(GPT_OSS, "torch_dtype")) == "bfloat16"


def test_a_language_model_inside_another_takes_the_dtype_from_outside_unless_it_has_one():
    inside = without(LLAMA, "torch_dtype")
    outside = {"model_type": "llava", "torch_dtype": "bfloat16", "text_config": inside}
    assert dtype(outside) == "bfloat16"
    assert dtype(outside | {"text_config": inside | {"torch_dtype": None}}) == "bfloat16"
    assert dtype(outside | {"dtype": "float32", "text_config": LLAMA}) == "float16"
    assert model_cache_from_config(outside).name == "llama"


def test_a_language_model_inside_that_does_not_say_its_type_has_the_outer_one():
    config = {"model_type": "qwen3_5", "dtype": "bfloat16", "text_config": {"num_hidden_layers": 4}}
    assert set(layers(model_cache_from_config(config))) == {"k", "v", "state", "conv_q", "conv_k", "conv_v"}


@pytest.mark.parametrize("field", ["mamba_ssm_dtype", "mamba_ssm_cache_dtype"])
def test_the_state_has_the_dtype_that_the_configuration_says(field: str):
    for config in (QWEN_NEXT, NEMOTRON, JAMBA):
        assert dtype(config, "state") == "float32"
        assert dtype(config | {field: "bfloat16"}, "state") == "bfloat16"
        chosen = model_cache_from_config(config | {field: "bfloat16"}, state_dtype="float16")
        assert {each.component.dtype for each in chosen.components if each.component.name == "state"} == {"float16"}
    assert dtype(MINIMAX, "state") == "float16"


def test_windows_of_mistral():
    mistral = LLAMA | {"model_type": "mistral"}
    assert layers(model_cache_from_config(mistral)).keys() == {"window_k", "window_v"}
    assert layers(model_cache_from_config(mistral | {"sliding_window": None})).keys() == {"k", "v"}
    assert layers(model_cache_from_config(LLAMA | {"model_type": "mixtral"})).keys() == {"k", "v"}
    assert layers(model_cache_from_config(LLAMA | {"sliding_window": 16})).keys() == {"k", "v"}, "llama has none"


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_windows_of_qwen(model_type: str):
    qwen = LLAMA | {"model_type": model_type, "sliding_window": 64, "max_window_layers": 3}
    assert layers(model_cache_from_config(qwen))["k"] == (0, 1, 2, 3), "not used unless the flag says so"
    used = qwen | {"use_sliding_window": True}
    assert layers(model_cache_from_config(used)) == {
        "k": (0, 1, 2),
        "v": (0, 1, 2),
        "window_k": (3,),
        "window_v": (3,),
    }
    assert layers(model_cache_from_config(used | {"max_window_layers": 9}))["k"] == (0, 1, 2, 3)
    assert layers(model_cache_from_config(used | {"max_window_layers": 0}))["window_k"] == (0, 1, 2, 3)
    assert layers(model_cache_from_config(used | {"sliding_window": None}))["k"] == (0, 1, 2, 3)
    types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert layers(model_cache_from_config(used | {"layer_types": types}))["window_k"] == (0, 3)


def test_windows_of_qwen3_moe_are_in_every_layer_or_in_none():
    qwen = LLAMA | {"model_type": "qwen3_moe", "sliding_window": 64, "max_window_layers": 3}
    assert layers(model_cache_from_config(qwen)).keys() == {"k", "v"}
    assert layers(model_cache_from_config(qwen | {"use_sliding_window": True}))["window_k"] == (0, 1, 2, 3)


def test_turns_of_layers_where_no_list_says_them():
    assert layers(model_cache_from_config(GPT_OSS))["window_k"] == (0, 2)
    gemma = LLAMA | {"model_type": "gemma3_text", "sliding_window_pattern": 2}
    assert layers(model_cache_from_config(gemma))["k"] == (1, 3)
    types = ["full_attention", *["sliding_attention"] * 3]
    assert layers(model_cache_from_config(gemma | {"layer_types": types}))["k"] == (0,)
    assert layers(model_cache_from_config(QWEN_NEXT | {"full_attention_interval": 2}))["state"] == (0, 2)
    types = ["full_attention", *["linear_attention"] * 3]
    assert layers(model_cache_from_config(QWEN_NEXT | {"layer_types": types}))["k"] == (0,)


def test_kinds_of_layers_by_any_of_their_names():
    by_type = without(NEMOTRON, "hybrid_override_pattern") | {
        "layers_block_type": ["mamba", "attention", "moe", "mamba"]
    }
    assert layers(model_cache_from_config(by_type)) == layers(model_cache_from_config(NEMOTRON))
    assert layers(model_cache_from_config(NEMOTRON))["state"] == (0, 3)
    by_list = without(MINIMAX, "attn_type_list") | {"layer_types": ["linear_attention", "full_attention"] * 2}
    assert layers(model_cache_from_config(by_list)) == layers(model_cache_from_config(MINIMAX))
    assert layers(model_cache_from_config(JAMBA))["k"] == (1, 3)


def test_draft_layers_come_after_the_models_own():
    llama = LLAMA | {"model_type": "glm4_moe", "num_nextn_predict_layers": 2}
    assert layers(model_cache_from_config(llama))["draft_k"] == (4, 5)
    nemotron = NEMOTRON | {"num_nextn_predict_layers": 2, "mtp_hybrid_override_pattern": "*E"}
    assert layers(model_cache_from_config(nemotron))["draft_k"] == (4, 6)
    assert model_cache_from_config(nemotron).layers_per_stage(2) == (2, 5)
    minimax = LLAMA | {"model_type": "minimax_m2", "num_mtp_modules": 3, "use_mtp": True}
    assert layers(model_cache_from_config(minimax))["draft_v"] == (4, 5, 6)
    assert model_cache_from_config(minimax | {"use_mtp": False}).draft == ()


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
@pytest.mark.parametrize("value", [0, -3, "4", 4.0, True, [4]])
def test_a_number_of_layers_that_is_none(model_type: str, value: object):
    config = MAMBA2 | NEMOTRON | MINIMAX | {"model_type": model_type, "num_hidden_layers": value}
    with pytest.raises(ModelError) as caught:
        model_cache_from_config(config, source="there.json")
    assert "there.json: num_hidden_layers is" in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (without(LLAMA, "num_hidden_layers"), "num_hidden_layers is missing, and what 'llama' caches depends on it"),
        (
            without(LLAMA, "num_key_value_heads", "num_attention_heads"),
            "num_key_value_heads or num_attention_heads is missing",
        ),
        (without(LLAMA, "hidden_size"), "hidden_size is missing"),
        (LLAMA | {"hidden_size": 100}, "hidden_size 100 is not a multiple of num_attention_heads 8: add head_dim"),
        (LLAMA | {"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        (LLAMA | {"head_dim": "64"}, "head_dim is '64': it must be a whole number from 1 on"),
        (without(LLAMA, "torch_dtype"), "neither dtype nor torch_dtype is given"),
        (LLAMA | {"torch_dtype": "bf16"}, "torch_dtype is 'bf16': known are float64"),
        (LLAMA | {"torch_dtype": ["bfloat16"]}, r"torch_dtype is \['bfloat16'\]: known are"),
        (LLAMA | {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1"),
        (GPT_OSS | {"sliding_window": -1}, "sliding_window is -1"),
        (GPT_OSS | {"sliding_window": None}, "sliding_window is missing"),
        (
            GPT_OSS | {"layer_types": ["full_attention"]},
            "layer_types has 1 entries: it must be a list of 4 layer types",
        ),
        (GPT_OSS | {"layer_types": "full"}, "layer_types is 'full': it must be a list of 4"),
        (
            GPT_OSS | {"layer_types": [*["full_attention"] * 3, "chunked_attention"]},
            r"layer_types\[3\] is 'chunked_attention': layers of 'gpt_oss' are full_attention or attention or sliding_",
        ),
        (QWEN_NEXT | {"layer_types": ["sliding_attention"] * 4}, r"layer_types\[0\] is 'sliding_attention'"),
        (
            LLAMA | {"model_type": "qwen3", "use_sliding_window": "yes"},
            "use_sliding_window is 'yes': it must be true or",
        ),
        (QWEN_NEXT | {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1: it must be a whole number from 2 on"),
        (QWEN_NEXT | {"mamba_ssm_dtype": "single"}, "mamba_ssm_dtype is 'single'"),
        (LLAMA | {"model_type": "deepseek_v3", "qk_rope_head_dim": 64}, "kv_lora_rank is missing"),
        (LLAMA | {"model_type": "deepseek_v3", "kv_lora_rank": 512}, "qk_rope_head_dim is missing"),
        (without(NEMOTRON, "mamba_num_heads"), "mamba_num_heads is missing"),
        (without(NEMOTRON, "hybrid_override_pattern"), "neither hybrid_override_pattern nor layers_block_type"),
        (
            NEMOTRON | {"hybrid_override_pattern": "M*XM"},
            r"hybrid_override_pattern is 'M\*XM': it must have a letter of",
        ),
        (NEMOTRON | {"hybrid_override_pattern": "M*M"}, "has 3 letters, but num_hidden_layers is 4"),
        (JAMBA | {"attn_layer_offset": 2}, "attn_layer_offset is 2: it must be below attn_layer_period, 2"),
        (MINIMAX | {"attn_type_list": [0, 1]}, r"attn_type_list must be a list of 4 numbers, .* it is \[0, 1\]"),
        (MINIMAX | {"attn_type_list": [0, 1, 2, 1]}, "attn_type_list must be a list of 4 numbers"),
        (without(MINIMAX, "attn_type_list"), "neither attn_type_list nor layer_types"),
    ],
)
def test_a_field_that_is_missing_or_impossible(config: dict[str, Any], message: str):
    with pytest.raises(ModelError, match=r"^there\.json: .*" + message):
        model_cache_from_config(config, source="there.json")


def test_a_field_of_a_language_model_inside_is_named_with_its_place():
    config = {"model_type": "mistral3", "torch_dtype": "bfloat16", "text_config": LLAMA | {"num_hidden_layers": 0}}
    with pytest.raises(ModelError, match=r"text_config\.num_hidden_layers is 0"):
        model_cache_from_config(config)


def test_a_model_that_caches_nothing():
    with pytest.raises(ModelError, match="caches nothing in 4 layers"):
        model_cache_from_config(NEMOTRON | {"hybrid_override_pattern": "----"})


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"cache_dtype": "fp8"}, "cache_dtype is 'fp8': known are .*float8_e4m3fn"),
        ({"cache_dtype": "float4_e2m1fn_x2"}, "packs two numbers into each element: describe the cache by hand"),
        ({"state_dtype": "half"}, "state_dtype is 'half'"),
        ({"extra_conv_columns": -1}, "extra_conv_columns is -1: it must not be negative"),
    ],
)
def test_choices_that_no_engine_makes(choices: dict[str, Any], message: str):
    with pytest.raises(ModelError, match=message):
        model_cache_from_config(LLAMA, **choices)


@pytest.mark.parametrize("config", [{"model_type": "novel", "architectures": ["NovelForCausalLM"]}, {}])
def test_an_unknown_architecture_shows_a_form_that_can_be_filled_in(config: dict[str, Any], tmp_path: Path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        read_model_cache(tmp_path)
    text = str(caught.value)
    assert text.startswith(f"{file} has model_type {config.get('model_type')!r}")
    assert ("NovelForCausalLM" in text) == bool(config)
    assert all(re.search(rf"\b{name}\b", text) for name in FAMILIES)
    file.write_text(text[text.index("\n{") :])
    cache = read_model_cache(tmp_path)
    assert layers(cache) == {"k": tuple(range(32)), "v": tuple(range(32))}
    assert [each.tp_axis for each in cache.components] == ["head", "head"]


def test_an_unknown_language_model_inside_is_named():
    with pytest.raises(ModelError, match=r"has text_config\.model_type 'novel'.*known are deepseek_v2, "):
        model_cache_from_config({"model_type": "gemma3", "text_config": {"model_type": "novel"}})


def test_a_directory_or_a_file(tmp_path: Path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | {"time_step_limit": [0.0, float("inf")]}))
    assert read_model_cache(tmp_path) == read_model_cache(str(file)) == model_cache_from_config(LLAMA)


@pytest.mark.parametrize("name", ["", "absent.json", "absent/config.json"])
def test_a_file_that_is_not_there(tmp_path: Path, name: str):
    with pytest.raises(ModelError) as caught:
        read_model_cache(tmp_path / name)
    expected = tmp_path / (name or "config.json")
    assert str(caught.value).startswith(f"{expected} does not exist: give a model's config.json")


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b"[" * 200_000])
def test_a_file_that_is_no_json(tmp_path: Path, content: bytes):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ModelError, match="as JSON"):
        read_model_cache(file)


@pytest.mark.parametrize("content", ["[]", "null", '"llama"', "4"])
def test_a_file_that_holds_no_object(tmp_path: Path, content: str):
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(ModelError, match=r"config\.json holds a JSON \w+, not an object"):
        read_model_cache(file)
