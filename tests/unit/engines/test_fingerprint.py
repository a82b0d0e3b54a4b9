"""What plug-ins say of caches and requests: the same where these are the same, and another wherever they differ."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.engines.fingerprint import (
    LONGEST_VALUE,
    CacheIdentity,
    MultimodalInput,
    prompt_digest,
    request_conditions,
    short_text,
)
from kvferry.plan.fingerprint import MAY_BE_UNSAID, MAY_DIFFER, checked_conditions, checked_fingerprint, why_different

IDENTITY = CacheIdentity(
    engine="vllm 0.32.0",
    weights="3f9a",
    architecture="Qwen3ForCausalLM",
    cache_dtype="float8_e4m3fn",
    scales="of the checkpoint",
    attention_backend="FLASH_ATTN",
    content_order="a slot a head: K, V",
    rope="{'rope_theta': 10000.0}",
    attention_window="every token",
    quantization="none",
    speculative_model="77aa",
    metadata_rows="64, 64 bytes",
    multimodal_inputs="by digest",
)
CAT, DOG = MultimodalInput("cat", 3, 5), MultimodalInput("dog", 3, 5)


def test_every_attribute_is_a_field_that_travels():
    fingerprint = IDENTITY.fingerprint()
    assert fingerprint.keys() == {each.name for each in fields(CacheIdentity)}
    assert checked_fingerprint(fingerprint) == fingerprint
    assert "speculative_model" not in replace(IDENTITY, speculative_model="").fingerprint()


def test_the_fields_that_need_not_agree_are_among_them():
    assert {each.name for each in fields(CacheIdentity)} > MAY_DIFFER | MAY_BE_UNSAID


@pytest.mark.parametrize("value", ["", "plain", {"b": 1, "a": None}, "x" * LONGEST_VALUE, "x" * 10_000, "a\nb", [1.5]])
def test_a_text_is_short_and_the_same_for_the_same(value: Any):
    text = short_text(value)
    assert len(text) <= LONGEST_VALUE
    assert text.isprintable()
    assert text == short_text(dict(reversed(value.items())) if isinstance(value, dict) else value)


@pytest.mark.parametrize("make", [list, np.array, lambda tokens: array("q", tokens), tuple])
def test_a_prompt_has_the_same_digest_in_whatever_it_is_kept(make: Callable[[list[int]], Any]):
    """Two servers may have two versions of an engine, or of kvferry."""
    tokens = [7, -1, 2**40, *range(100)]
    expected = hashlib.blake2b(b"".join(each.to_bytes(8, "little", signed=True) for each in tokens), digest_size=16)
    assert request_conditions(prompt_digest(make(tokens))) == {"prompt": expected.digest()}
    assert request_conditions(prompt_digest(make([*tokens, 5, 6]), len(tokens))) == {"prompt": expected.digest()}
    assert request_conditions(prompt_digest(make(tokens), 1000)) == {"prompt": expected.digest()}


def test_texts_that_differ_behind_their_beginning_differ():
    assert short_text("x" * 10_000) != short_text("x" * 9_999 + "y")
    assert short_text("a\nb") != short_text("a\tb") != short_text("a?b")


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (request_conditions(prompt_digest([1, 2, 4])), "another prompt"),
        (request_conditions(prompt_digest([1, 2])), "another prompt"),
        (request_conditions(prompt_digest([1, 2, 3, 0])), "another prompt"),
        (request_conditions(prompt_digest([1, 2, 3]), embedding=b"e"), "names a prompt embedding"),
        (request_conditions(prompt_digest([1, 2, 3]), lora="a"), "names a LoRA adapter"),
        (request_conditions(prompt_digest([1, 2, 3]), multimodal=[CAT]), "names a multimodal input"),
        (request_conditions(prompt_digest([1, 2, 3]), salt="s"), "names a cache salt"),
        (request_conditions(prompt_digest([1, 2, 3]), weights="w"), "names a weights version"),
    ],
    ids=["token", "shorter", "longer", "embedding", "adapter", "image", "salt", "weights"],
)
def test_requests_that_differ_in_anything_that_their_caches_depend_on_are_told_apart(
    other: dict[str, bytes], what: str
):
    mine = request_conditions(prompt_digest([1, 2, 3]))
    assert what in why_different(mine, checked_conditions(other, where="here"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"lora": "a"}, {"lora": "b"}),
        ({"salt": "a"}, {"salt": "b"}),
        ({"weights": "a"}, {"weights": "b"}),
        ({"embedding": b"a"}, {"embedding": b"b"}),
        ({"multimodal": [CAT]}, {"multimodal": [DOG]}),
        ({"multimodal": [CAT]}, {"multimodal": [replace(CAT, offset=4)]}),
        ({"multimodal": [CAT, DOG]}, {"multimodal": [DOG, CAT]}),
    ],
)
def test_what_both_have_must_be_the_same(one: dict[str, Any], other: dict[str, Any]):
    mine, again, theirs = (request_conditions(prompt_digest([1]), **each) for each in (one, one, other))
    assert why_different(mine, again) == ""
    assert "has another" in why_different(mine, theirs)


def test_tokens_count_by_value_and_not_by_type():
    numpy = pytest.importorskip("numpy")
    assert prompt_digest(numpy.array([1, 2, 3], numpy.int32)) == prompt_digest((1, 2, 3))


def test_the_page_about_vllm_says_what_every_field_is():
    page = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text()
    for each in fields(CacheIdentity):
        assert re.search(rf"^\|.*`{each.name}`.*\|.*\|", page, flags=re.MULTILINE), each.name
