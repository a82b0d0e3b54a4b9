"""What SGLang's plug-in says of a server and of a request, from objects as SGLang has them."""

from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import torch
from tests.unit.engines.test_checkpoints import in_the_hubs_cache

from kvferry.engines.checkpoints import weights_identity
from kvferry.engines.fingerprint import prompt_digest, request_conditions
from kvferry.engines.sglang import conditions
from kvferry.engines.sglang.conditions import Prompt, around_requests, conditions_of, current
from kvferry.engines.sglang.identity import cache_identity
from kvferry.errors import EngineContractError

# ---- servers --------------------------------------------------------------------------------------------------------


def identity(**changes: Any) -> Any:
    """A server's, with changes by the names of what is given to `cache_identity`, as "given.model_path"."""
    text = SimpleNamespace(rope_theta=1e6, layer_types=["sliding_attention", "full_attention"])
    objects: dict[str, Any] = {
        "args": SimpleNamespace(kv_cache_dtype_str="auto", kv_layout=None, aux_item_lens=[64, 512, 64]),
        "model": SimpleNamespace(
            hf_text_config=text,
            hf_config=SimpleNamespace(architectures=["Qwen3ForCausalLM"]),
            dtype="torch.bfloat16",
            sliding_window_size=512,
            quantization=None,
        ),
        "given": SimpleNamespace(
            model_path="Qwen/Qwen3-8B",
            revision=None,
            download_dir=None,
            load_format="auto",
            weight_cache_mode="off",
            quantization=None,
            quantization_param_path=None,
        ),
        "speculative": SimpleNamespace(
            speculative_algorithm=None, speculative_draft_model_path=None, speculative_draft_model_revision=None
        ),
        "execution": SimpleNamespace(
            kernel=SimpleNamespace(
                attention_backend="fa3", prefill_attention_backend="fa3", decode_attention_backend="flashinfer"
            )
        ),
    }
    for name, value in changes.items():
        which, _, field = name.partition("__")
        setattr(objects[which] if which in objects else getattr(objects["model"], which), field, value)
    args, model = objects.pop("args"), objects.pop("model")
    return cache_identity(args, model, version="0.5.23", **objects)


def test_weights_that_were_taken_from_a_running_server_are_not_those_of_the_files():
    """That server may have been updated in place, and these are what it has: nobody says what that is."""
    files, one, other = (identity(given__load_format=each).weights for each in ("auto", *["remote_instance"] * 2))
    assert len({files, one, other}) == 3
    assert "a running server's" in one


def test_weights_that_were_taken_from_a_daemon_are_not_those_of_the_files():
    """It compares paths alone: the files there may be others since it has read them."""
    modes = ("off", "daemon", "client", "client")  # with "daemon" the server starts one, which ends with it
    files, own, one, other = (identity(given__weight_cache_mode=each).weights for each in modes)
    assert files == own
    assert len({files, one, other}) == 3
    assert "--weight-cache-mode off" in one


def test_a_server_says_what_its_caches_are():
    assert identity().fingerprint() == {
        "engine": "SGLang 0.5.23",
        "weights": "Qwen/Qwen3-8B at its default revision",
        "architecture": "Qwen3ForCausalLM",
        "cache_dtype": "bfloat16",
        "scales": "none",
        "attention_backend": "fa3, flashinfer",
        "content_order": "tokens, heads, numbers",
        "rope": '{"rope_theta": 1000000.0}',
        "attention_window": '512 tokens, {"layer_types": ["sliding_attention", "full_attention"]}',
        "quantization": "none",
        "metadata_rows": "64, 512, 64 bytes",
    }


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("weights", {"given__revision": "v2"}),
        ("weights", {"given__model_path": "Qwen/Qwen3-8B-Base"}),
        ("weights", {"given__load_format": "dummy"}),
        ("weights", {"hf_config___commit_hash": "abc"}),
        ("architecture", {"hf_config__architectures": ["Qwen2ForCausalLM"]}),
        ("cache_dtype", {"args__kv_cache_dtype_str": "fp8_e5m2"}),
        ("cache_dtype", {"model__dtype": "torch.float16"}),
        ("content_order", {"args__kv_layout": "packed"}),
        ("rope", {"hf_text_config__rope_theta": 1e4}),
        ("rope", {"hf_text_config__rope_scaling": {"factor": 4}}),
        ("attention_window", {"model__sliding_window_size": 1024}),
        ("attention_window", {"model__sliding_window_size": None}),
        ("quantization", {"model__quantization": "awq"}),
        ("speculative_model", {"speculative__speculative_algorithm": "EAGLE"}),
        ("metadata_rows", {"args__aux_item_lens": [64, 512, 8192, 64]}),
    ],
)
def test_servers_that_differ_say_so(field: str, changes: dict[str, Any]):
    one, other = identity(), identity(**changes)
    assert getattr(one, field) != getattr(other, field)
    same = replace(other, **{field: getattr(one, field)})
    assert same == one or (field == "cache_dtype" and replace(same, scales=one.scales) == one)


def test_scales_are_told_apart_by_what_is_in_their_file(tmp_path: Path):
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    one.write_text("{}")
    other.write_text("{}")
    fp8 = {"args__kv_cache_dtype_str": "fp8_e4m3"}
    given = [identity(**fp8, given__quantization_param_path=str(path)).scales for path in (one, other)]
    assert given[0] == given[1] != identity(**fp8).scales != identity().scales
    other.write_text('{"scale": 2}')
    assert identity(**fp8, given__quantization_param_path=str(other)).scales != given[0]


def test_a_model_of_the_hubs_and_its_directory_are_the_same(tmp_path: Path):
    kept = in_the_hubs_cache(tmp_path, "org/model")
    of_hub = identity(given__model_path="org/model", given__download_dir=str(tmp_path))
    assert of_hub.weights == identity(given__model_path=str(kept)).weights == weights_identity(kept)


def test_a_draft_model_of_the_hubs_and_its_directory_are_the_same(tmp_path: Path):
    kept = in_the_hubs_cache(tmp_path, "org/draft")
    where = {"given__download_dir": str(tmp_path), "speculative__speculative_algorithm": "EAGLE"}
    drafts = [
        identity(**where, speculative__speculative_draft_model_path=path).speculative_model
        for path in ("org/draft", str(kept))
    ]
    assert drafts == [weights_identity(kept)] * 2


# ---- requests -------------------------------------------------------------------------------------------------------


def image(content: int, start: int, stop: int) -> Any:
    return SimpleNamespace(modality=SimpleNamespace(name="IMAGE"), hash=content, offsets=[(start, stop)])


def request(**changes: Any) -> Any:
    given = {
        "origin_input_ids": array("q", range(40)),
        "output_ids": array("q"),
        "input_embeds": None,
        "multimodal_inputs": None,
        "lora_id": None,
        "extra_key": None,
        "cache_salt": None,
    }
    return SimpleNamespace(**{**given, **changes})


def adapter(directory: Path, weights: str) -> Any:
    directory.mkdir()
    ref = SimpleNamespace(lora_id=str(directory), lora_name="any", lora_path=str(directory))
    (directory / "adapter_config.json").write_text("{}")
    overwrite(ref, weights)
    return ref


def weights_of(ref: Any) -> Path:
    return Path(ref.lora_path) / "adapter_model.bin"


def overwrite(ref: Any, weights: str) -> None:
    weights_of(ref).write_text(weights)


PLAIN = request_conditions(prompt_digest(list(range(40))))


def test_a_prompt_alone():
    assert conditions_of(request()) == PLAIN


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("prompt", {"origin_input_ids": array("q", range(41))}),
        ("prompt embedding", {"input_embeds": [[0.5, 1.0]]}),
        ("multimodal input", {"multimodal_inputs": SimpleNamespace(mm_items=[image(7, 3, 9)])}),
        ("LoRA adapter", {"lora_id": "f00"}),
        ("cache salt", {"cache_salt": "tenant"}),
        ("cache salt", {"extra_key": "tenant"}),
    ],
)
def test_what_differs_is_named(name: str, changes: dict[str, Any]):
    found = conditions_of(request(**changes))
    assert found.get(name) != PLAIN.get(name)


@pytest.fixture
def lora(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, bytes]]:
    """Loads an adapter as SGLang does, in a server that has loaded none, and returns the conditions of its requests."""
    monkeypatch.setattr(conditions, "_loaded", {})

    def load(
        ref: Any, *sent: Any, meanwhile: Callable[[], object] = lambda: None, success: bool = True
    ) -> dict[str, bytes]:
        def original(*_: Any) -> Any:
            meanwhile()
            return SimpleNamespace(success=success)

        around = conditions.around_load_of_tensors if sent else conditions.around_load
        around(original, None, ref, *sent)
        return asked_with(ref)

    return load


def asked_with(ref: Any) -> dict[str, bytes]:
    # SGLang puts the adapter's id into the key of its own cache.
    return conditions_of(request(lora_id=ref.lora_id, extra_key=f"salt{ref.lora_id}"))


def test_the_same_adapter_has_another_id_on_every_server(tmp_path: Path, lora: Callable[..., Any]):
    refs = adapter(tmp_path / "here", "a"), adapter(tmp_path / "there", "a"), adapter(tmp_path / "other", "b")
    one, two, three = (lora(each) for each in refs)
    assert one == two
    assert {name for name in one if one[name] != three[name]} == {"LoRA adapter"}


def test_an_adapter_is_what_was_loaded_and_not_what_lies_there_at_its_first_request(
    tmp_path: Path, lora: Callable[..., Any]
):
    ref, same = adapter(tmp_path / "here", "a"), adapter(tmp_path / "there", "a")
    lora(ref)
    overwrite(ref, "b")
    assert asked_with(ref) == lora(same)
    again = SimpleNamespace(lora_id="again", lora_name="any", lora_path=ref.lora_path)
    assert lora(again) != asked_with(ref)


@pytest.mark.parametrize("late", [lambda ref: overwrite(ref, "b"), lambda ref: weights_of(ref).unlink()])
def test_an_adapter_whose_files_were_written_while_it_was_loaded_is_nobodys(
    tmp_path: Path, lora: Callable[..., Any], late: Callable[[Any], None]
):
    changed = [adapter(tmp_path / f"changed {number}", "a") for number in range(2)]
    kept = [adapter(tmp_path / weights, weights) for weights in "ab"]
    loaded = [lora(ref, meanwhile=partial(late, ref)) for ref in changed] + [lora(ref) for ref in kept]
    found = [each["LoRA adapter"] for each in loaded]
    assert len(set(found)) == len(found)


def test_an_adapter_that_the_load_fetches_is_what_it_fetched(tmp_path: Path, lora: Callable[..., Any]):
    ref = SimpleNamespace(lora_id="new", lora_name="any", lora_path=str(tmp_path / "fetched"))
    same = adapter(tmp_path / "same", "a")
    assert lora(ref, meanwhile=lambda: adapter(tmp_path / "fetched", "a")) == lora(same)


def test_an_adapter_that_is_in_no_files_is_the_tensors_and_the_configuration_that_were_sent(lora: Callable[..., Any]):
    def sent(scale: float = 1.0, dtype: torch.dtype = torch.bfloat16, **configuration: Any) -> bytes:
        ref = SimpleNamespace(lora_id=uuid4().hex, lora_name="any", lora_path="__tensor__")
        tensors = {name: torch.full((2, 3), scale, dtype=dtype) for name in "ab"}
        digest: bytes = lora(ref, tensors, {"r": 2, **configuration}, None)["LoRA adapter"]
        return digest

    assert sent() == sent(base_model_name_or_path="/elsewhere")
    found = {sent(), sent(scale=2.0), sent(dtype=torch.float16), sent(lora_alpha=4)}
    assert len(found) == 4


def test_an_adapter_that_nobody_saw_loaded_is_nobodys(lora: Callable[..., Any]):
    refs = [SimpleNamespace(lora_id=lora_id, lora_name="any", lora_path="__tensor__") for lora_id in ("f00", "ba5")]
    one, other = (lora(ref, {}, {}, success=False) for ref in refs)
    assert one["LoRA adapter"] != other["LoRA adapter"]


def test_another_image_is_another_image_and_no_other_prompt():
    """SGLang writes its digest of an image where the image's tokens are."""
    prompts = [[1, 2, *[1000 + content] * 4, 3] for content in (7, 8)]
    found = [
        conditions_of(
            request(
                origin_input_ids=array("q", prompt),
                multimodal_inputs=SimpleNamespace(mm_items=[image(content, 2, 5)]),
            ),
        )
        for prompt, content in zip(prompts, (7, 8), strict=True)
    ]
    assert {name for name in found[0] if found[0][name] != found[1][name]} == {"multimodal input"}


def test_a_long_prompt_is_not_copied_and_never_changed():
    asked = request(origin_input_ids=array("q", range(1_000_000)))
    tracemalloc.start()
    conditions_of(asked)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 1_000_000
    asked.multimodal_inputs = SimpleNamespace(mm_items=[image(7, 2, 5)])
    conditions_of(asked)
    assert asked.origin_input_ids == array("q", range(1_000_000))


def test_images_that_sglang_does_not_digest_are_told_apart_by_their_places_alone():
    def found(content: int, start: int) -> dict[str, bytes]:
        inputs = SimpleNamespace(mm_items=[image(content, start, start + 3)])
        return conditions_of(request(multimodal_inputs=inputs), has_digests=False)

    assert found(7, 2) == found(8, 2) != found(7, 3)


def test_what_was_generated_is_prompt_to_whoever_computes_it_again():
    again = request(origin_input_ids=array("q", range(38)), output_ids=array("q", [38, 39]))
    assert conditions_of(again) != PLAIN
    again.pd_rebootstrap_in_progress = True
    assert conditions_of(again) == PLAIN


def test_tokens_that_are_computed_again_count():
    again = request(origin_input_ids=array("q", range(38)), output_ids=array("q", [38, 39]))
    around_a_request, queue = around_requests(lambda: True), object()
    for is_again, tokens in ((False, 38), (True, 40)):
        again.pd_rebootstrap_in_progress = is_again
        assert around_a_request(lambda *_: current("the hook"), queue, again).tokens == tokens


def test_conditions_are_those_of_the_request_that_is_being_made():
    queue = object()

    def original(*arguments: Any, **named: Any) -> Any:
        assert (arguments[0], named) == (queue, {"is_rebootstrap": False})
        return current("the hook")

    around_a_request = around_requests(lambda: True)
    assert around_a_request(original, queue, request(), is_rebootstrap=False) == Prompt(40, PLAIN)
    with pytest.raises(EngineContractError, match="kvferry's hook on the hook was not called"):
        current("the hook")
