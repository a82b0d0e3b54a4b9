"""What the plug-in for vLLM says of caches and requests, from objects like vLLM's."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.engines.vllm.identity import (
    BY_PLACE,
    Conditions,
    Platform,
    cache_dtype,
    cache_identity,
    content_order,
    multimodal_inputs,
    scales,
)
from kvferry.errors import IncompatiblePeerError
from kvferry.plan.fingerprint import check_same_fingerprint, why_different


def spec(**changes: Any) -> Any:
    """An `AttentionSpec` of two KV heads of 64 elements."""
    usual = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16, "num_head_slots": None}
    return SimpleNamespace(**usual | {"state_content_bytes": None} | changes)


HOPPER = Platform("cuda", 9)

FLASH = spec(), "FLASH_ATTN"
B12X = spec(num_head_slots=2, state_content_bytes=2 * 64 * 2), "B12X"
"""As vLLM's backends change it: with two heads both give (blocks, 2, tokens, 128)."""


class Config(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return vars(self)


def vllm_config(**changes: Any) -> Any:
    text = {"rope_parameters": {"rope_theta": 1e4}, "sliding_window": None, "_name_or_path": "/a/rope", "vocab_size": 9}
    model = {
        "model": "/not/here",
        "model_weights": "",
        "revision": None,
        "architecture": "Qwen3ForCausalLM",
        "dtype": torch.bfloat16,
        "quantization": None,
        "disable_sliding_window": False,
        "multimodal_config": None,
        "hf_text_config": Config(**text | changes.pop("text", {})),
    }
    cache = {"cache_dtype": "auto", "kv_cache_dtype_skip_layers": [], "enable_prefix_caching": True}
    parallel = {"tensor_parallel_size": 1, "data_parallel_size": 1, "enable_expert_parallel": False}
    return SimpleNamespace(
        model_config=SimpleNamespace(**model | changes.pop("model", {})),
        cache_config=SimpleNamespace(**cache | changes.pop("cache", {})),
        load_config=SimpleNamespace(load_format=changes.pop("load_format", "auto"), download_dir=None),
        parallel_config=SimpleNamespace(**parallel | changes.pop("parallel", {})),
        speculative_config=changes.pop("speculative", None),
    )


def fields(
    layers: Any = (FLASH,), *, packing: str | None = None, platform: Platform = HOPPER, **changes: Any
) -> dict[str, str]:
    config = vllm_config(**changes)
    identity = cache_identity(
        config, layers, version="0.32.0", fp8_dtype="torch.float8_e4m3fn", packing=packing, platform=platform
    )
    return identity.fingerprint()


def refusal(prefill: dict[str, str], decode: dict[str, str]) -> str:
    with pytest.raises(IncompatiblePeerError) as caught:
        check_same_fingerprint(prefill, decode, may_differ=(), prefill_name="prefill", decode_name="decode")
    return str(caught.value)


def test_two_backends_whose_caches_have_one_shape_and_another_order_are_refused():
    said = refusal(fields([FLASH]), fields([B12X]))
    assert (
        "content_order is 'a slot a head: K, V' on prefill, 'a slot for K of all heads, a slot for V: as B12X" in said
    )


def test_backends_that_keep_the_same_in_the_same_place_may_differ():
    ours, theirs = fields([FLASH]), fields([(spec(), "FLASHINFER")])
    assert ours["attention_backend"] != theirs["attention_backend"]
    check_same_fingerprint(ours, theirs, may_differ=(), prefill_name="prefill", decode_name="decode")


@pytest.mark.parametrize(
    ("kept", "backend", "packing", "expected"),
    [
        (spec(), "TRITON_ATTN", None, "a slot a head: K, V"),
        (spec(), "SOMEBODYS_OWN", None, "a slot a head: as SOMEBODYS_OWN orders it on cuda"),
        (spec(), "CPU_ATTN", "vLLM's CPU kernels (amx)", "as the layout names it"),
        (B12X[0], "ROCM_ATTN", None, "a slot for K of all heads, a slot for V: as ROCM_ATTN orders them on cuda"),
        (
            spec(num_head_slots=4, state_content_bytes=36),
            "FLASHINFER",
            None,
            "for V of each: as FLASHINFER packs it on cuda",
        ),
        (spec(state_content_bytes=100), "TURBOQUANT", None, "as TURBOQUANT packs it on cuda"),
    ],
    ids=["plain", "unknown", "cpu", "by kind", "nvfp4", "packed"],
)
def test_the_order_of_a_block_follows_from_what_the_backend_makes_of_it(
    kept: Any, backend: str, packing: str | None, expected: str
):
    assert content_order(kept, backend, packing, HOPPER).endswith(expected)


NVFP4 = spec(num_head_slots=4, state_content_bytes=36, kv_quant_mode=SimpleNamespace(name="NVFP4")), "FLASHINFER"


@pytest.mark.parametrize(
    ("prefill", "decode", "is_alike"),
    [(10, 9, False), (9, 10, False), (10, 12, False), (9, 12, True), (8, 9, True), (10, 10, True), (10, 11, False)],
)
def test_scales_that_vllms_kernels_order_by_the_gpus_generation(prefill: int, decode: int, is_alike: bool):
    """One backend, type, shape and strides: on some the scales of four tokens' values are swizzled, and read so."""
    ours, theirs = (fields([NVFP4], platform=Platform("cuda", generation)) for generation in (prefill, decode))
    if is_alike:
        check_same_fingerprint(ours, theirs, may_differ=(), prefill_name="prefill", decode_name="decode")
    else:
        assert "scales " in refusal(ours, theirs)


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN"])
def test_an_order_that_is_no_backends_own_is_the_same_on_every_platform(backend: str):
    platforms = (Platform("cuda", 9), Platform("cuda", 10), Platform("rocm", 9))
    assert len({content_order(spec(), backend, None, platform) for platform in platforms}) == 1


def test_an_order_that_is_a_backends_own_is_another_one_on_other_hardware():
    kept = [(spec(state_content_bytes=100), "TURBOQUANT")]
    assert "packs it on rocm' on decode" in refusal(fields(kept), fields(kept, platform=Platform("rocm", 9)))


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("auto", "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("fp8", "float8_e4m3fn"),
        ("fp8_e4m3", "float8_e4m3fn"),
        ("fp8_e5m2", "float8_e5m2"),
        ("nvfp4", "nvfp4"),
    ],
)
def test_a_cache_dtype_is_what_is_stored_whatever_it_was_called(named: str, expected: str):
    config = SimpleNamespace(cache_dtype=named, kv_cache_dtype_skip_layers=[])
    assert cache_dtype(config, "torch.bfloat16", "torch.float8_e4m3fn") == expected


def test_layers_that_are_left_out_of_a_cache_dtype_count():
    config = SimpleNamespace(cache_dtype="fp8", kv_cache_dtype_skip_layers=["3", "0"])
    assert cache_dtype(config, "torch.bfloat16", "torch.float8_e4m3fn") == (
        "float8_e4m3fn, but bfloat16 in layers 0, 3"
    )


def test_scales_are_somewhere():
    assert {scales(each) for each in ("auto", "bfloat16")} == {"none"}
    assert {scales(each) for each in ("fp8", "fp8_e5m2")} == {"of the checkpoint, or 1"}
    assert {scales(each) for each in ("int8_per_token_head", "fp8_ds_mla", "nvfp4")} == {"in the cache"}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"text": {"rope_parameters": {"rope_theta": 1e6}}}, "rope"),
        ({"text": {"partial_rotary_factor": 0.5}}, "rope"),
        ({"text": {"sliding_window": 128}}, "attention_window"),
        ({"text": {"layer_types": ["sliding_attention"]}}, "attention_window"),
        ({"model": {"disable_sliding_window": True}}, "attention_window"),
        ({"model": {"quantization": "fp8"}}, "quantization"),
        ({"model": {"architecture": "LlamaForCausalLM"}}, "architecture"),
        ({"model": {"model": "/neither/here"}}, "weights"),
    ],
)
def test_what_changes_cached_values_is_refused_by_name(changes: Any, field: str):
    said = refusal(fields(), fields(**changes))
    assert f"KVFERRY_MAY_DIFFER={field}" in said
    assert said.count(" on prefill, ") == 1


def test_two_types_of_fp8_are_refused_by_name():
    said = refusal(*(fields(cache={"cache_dtype": named}) for named in ("fp8", "fp8_e5m2")))
    assert "cache_dtype is 'float8_e4m3fn' on prefill, 'float8_e5m2' on decode. Start" in said
    assert said.endswith("KVFERRY_MAY_DIFFER=cache_dtype")


def test_what_changes_no_cached_value_is_not_said():
    assert fields() == fields(text={"_name_or_path": "/b", "vocab_size": 10, "max_rope_dummy": None})


def test_weights_that_are_not_here_are_called_by_their_name(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        assert fields()["weights"] == "/not/here"
        assert fields(model={"revision": "main"})["weights"] == "/not/here, revision main"
    assert not caplog.records


def test_weights_that_are_here_are_called_by_what_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.bin").write_bytes(bytes(1000))
    (tmp_path / "c").mkdir()
    ours, theirs = (fields(model={"model": str(tmp_path / name)}) for name in "ab")
    assert ours == theirs
    assert fields(model={"model": str(tmp_path / "c")})["weights"] == str(tmp_path / "c")
    assert "is identified by its name alone" in caplog.text


@pytest.mark.parametrize(
    ("changes", "is_alike"),
    [
        ({}, True),
        ({"parallel": {"data_parallel_size": 2}}, True),
        ({"text": {"_name_or_path": "/b"}}, True),
        ({"parallel": {"tensor_parallel_size": 2}}, False),
        ({"parallel": {"enable_expert_parallel": True}}, False),
        ({"model": {"model": "/neither/here"}}, False),
        ({"model": {"revision": "main"}}, False),
        ({"model": {"dtype": torch.float16}}, False),
        ({"text": {"intermediate_size": 7}}, False),
        ({"platform": Platform("cpu")}, False),
    ],
    ids=lambda value: None if isinstance(value, bool) else "-".join(value) or "same",
)
def test_dummy_weights_are_those_of_their_ranks_tensors(changes: Any, is_alike: bool):
    """vLLM draws each tensor of a rank anew, from one seed."""
    ours, theirs = fields(load_format="dummy"), fields(load_format="dummy", **changes)
    assert (ours["weights"] == theirs["weights"]) is is_alike


def test_a_draft_model_counts_where_both_have_one():
    def speculative(model: str) -> Any:
        return SimpleNamespace(method="eagle3", draft_model_config=vllm_config(model={"model": model}).model_config)

    drafts = [fields(speculative=speculative(name)) for name in ("/one", "/other")]
    assert "speculative_model is 'eagle3: /one' on prefill, 'eagle3: /other' on decode" in refusal(*drafts)
    check_same_fingerprint(drafts[0], fields(), may_differ=(), prefill_name="prefill", decode_name="decode")


def test_a_draft_models_order_counts_where_both_have_one_alone():
    draft = SimpleNamespace(method="mtp", draft_model_config=vllm_config().model_config)

    def said(*drafts: Any) -> dict[str, str]:
        config = vllm_config(speculative=draft)
        identity = cache_identity(
            config, [FLASH], draft_layers=drafts, version="0", fp8_dtype="", packing=None, platform=HOPPER
        )
        return identity.fingerprint()

    ours = said(FLASH)
    assert ours["speculative_model"] == "mtp: /not/here; a slot a head: K, V"
    assert "speculative_model is 'mtp: /not/here; a slot a head" in refusal(ours, said(B12X))
    check_same_fingerprint(said(B12X), fields(), may_differ=(), prefill_name="prefill", decode_name="decode")


def test_drafting_without_a_model_is_no_draft_model():
    config = vllm_config()
    config.speculative_config = SimpleNamespace(method="ngram", draft_model_config=config.model_config)
    identity = cache_identity(config, [FLASH], version="0", fp8_dtype="", packing=None, platform=HOPPER)
    assert "speculative_model" not in identity.fingerprint()


# ---- requests ------------------------------------------------------------------------------------------------------


def image(identifier: str, offset: int = 1) -> Any:
    place = SimpleNamespace(offset=offset, length=4)
    return SimpleNamespace(modality="image", identifier=identifier, mm_position=place)


def request(*tokens: int, **more: Any) -> Any:
    usual = {"prompt_token_ids": list(tokens), "prompt_embeds": None, "lora_request": None, "mm_features": []}
    return SimpleNamespace(**usual | {"request_id": "a", "cache_salt": None} | more)


def lora(name: str, number: int = 1, path: str = "/not/here") -> Any:
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=path, load_inplace=False)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (request(1, 2, 3, 9), request(1, 2, 3, 8), ""),
        (request(1, 2, 3, 9), request(1, 2, 4, 9), "another prompt"),
        (request(1, 2, 3), request(1, 2, 3, lora_request=lora("a")), "names a LoRA adapter"),
        (request(1, 2, 3, lora_request=lora("a")), request(1, 2, 3, lora_request=lora("b")), "another LoRA adapter"),
        (request(1, 2, 3, lora_request=lora("a")), request(1, 2, 3, lora_request=lora("a", 7)), ""),
        (request(1, 2, 3, mm_features=[image("x")]), request(1, 2, 3, mm_features=[image("y")]), "another multimodal"),
        (request(1, 2, 3, cache_salt="a"), request(1, 2, 3, cache_salt="b"), "another cache salt"),
        (request(1, 2, 3, cache_salt=""), request(1, 2, 3), ""),
    ],
    ids=["last token", "token", "no adapter", "adapter", "number", "image", "salt", "no salt"],
)
def test_requests_are_the_same_where_their_caches_are(one: Any, other: Any, said: str):
    found = why_different(Conditions().of(one, 3), Conditions().of(other, 3))
    assert said in found
    assert bool(found) == bool(said)


def test_images_are_told_apart_by_place_where_digests_are_not_the_same_on_both_sides():
    by_place = Conditions(compares_content=False)
    one, other, moved = (
        by_place.of(request(1, mm_features=[image(*given)]), 1) for given in (("x",), ("y",), ("x", 2))
    )
    assert one == other
    assert "multimodal" in why_different(one, moved)


def test_weights_that_were_replaced_count_and_those_of_the_start_are_not_said():
    """A server that has never heard of it is one that was not changed."""
    ours, theirs = Conditions(), Conditions()
    for content in ("first", "second"):
        ours.weights.found(content)
    difference = why_different(ours.of(request(1), 1), theirs.of(request(1), 1))
    assert difference == "the prefill side's request names a weights version, the decode side's names none"


def test_embeddings_instead_of_tokens_count_as_far_as_they_are_exchanged():
    def given(*values: float) -> dict[str, bytes]:
        embeddings = torch.tensor([[value] for value in values], dtype=torch.bfloat16)
        return Conditions().of(SimpleNamespace(request_id="r", prompt_token_ids=None, prompt_embeds=embeddings), 2)

    assert given(1, 2, 3) == given(1, 2, 4)
    assert "another prompt embedding" in why_different(given(1, 2, 3), given(1, 5, 3))


def test_how_images_are_told_apart_is_a_field_of_models_that_take_them():
    assert multimodal_inputs(vllm_config()) == ""
    multimodal = {"multimodal_config": SimpleNamespace(mm_processor_cache_gb=4, mm_hasher_algorithm="blake3")}
    assert multimodal_inputs(vllm_config(model=multimodal)) == "by blake3 of content and of '/not/here'"
    multimodal["multimodal_config"].mm_processor_cache_gb = 0
    assert multimodal_inputs(vllm_config(model=multimodal)) != BY_PLACE
    assert multimodal_inputs(vllm_config(model=multimodal, cache={"enable_prefix_caching": False})) == BY_PLACE
