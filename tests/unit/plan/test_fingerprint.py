"""What two sides say of their caches: which fields are impossible, which differ, and which may."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kvferry.errors import IncompatiblePeerError, LayoutError
from kvferry.plan.fingerprint import check_same_fingerprint, checked_fingerprint, parse_field_names

MINE = {"weights": "3f9a", "cache_dtype": "float8_e4m3fn", "rope": "theta 10000"}


def compared(prefill: Mapping[str, str], decode: Mapping[str, str], *may_differ: str) -> tuple[str, ...]:
    return check_same_fingerprint(
        prefill, decode, may_differ=may_differ, prefill_name="prefill engine 'p'", decode_name="this decode rank"
    )


def test_the_same_fields_are_the_same_in_any_order():
    assert compared(MINE, dict(reversed(MINE.items()))) == ()
    assert compared({}, {}) == ()


def test_every_field_that_differs_is_named_with_both_values_and_the_remedy():
    theirs = {"weights": "77aa", "cache_dtype": "float8_e5m2", "rope": "theta 10000"}
    with pytest.raises(IncompatiblePeerError) as caught:
        compared(MINE, theirs)
    assert str(caught.value) == (
        "the two sides' caches do not mean the same: "
        "cache_dtype is 'float8_e4m3fn' on prefill engine 'p', 'float8_e5m2' on this decode rank; "
        "weights is '3f9a' on prefill engine 'p', '77aa' on this decode rank. "
        "Start both sides with the same; where you know that a difference changes no cached value, let it pass on "
        "both: KVFERRY_MAY_DIFFER=cache_dtype,weights"
    )


def test_a_field_that_one_side_alone_says_differs():
    with pytest.raises(IncompatiblePeerError, match="rope is 'theta 10000' on prefill engine 'p', not said on this"):
        compared({"rope": "theta 10000"}, {})
    with pytest.raises(IncompatiblePeerError, match="rope is not said on prefill engine 'p', 'theta 10000' on this"):
        compared({}, {"rope": "theta 10000"})


def test_a_field_may_be_let_differ_by_name_and_the_others_not():
    theirs = {**MINE, "weights": "77aa"}
    assert compared(MINE, theirs, "weights", "unheard_of") == (
        "weights is '3f9a' on prefill engine 'p', '77aa' on this decode rank",
    )
    with pytest.raises(IncompatiblePeerError, match=r"KVFERRY_MAY_DIFFER=weights,rope$") as caught:
        compared(MINE, {**theirs, "rope": "none"}, "weights")
    assert "3f9a" not in str(caught.value)


def test_who_computed_a_cache_may_differ_and_a_draft_be_on_one_side_alone():
    assert compared({"engine": "vllm 1", "attention_backend": "A"}, {"engine": "vllm 2"}) == ()
    assert compared({"speculative_model": "a"}, {}) == ()
    assert compared({}, {"speculative_model": "a"}) == ()
    with pytest.raises(IncompatiblePeerError, match="speculative_model is 'a' on"):
        compared({"speculative_model": "a"}, {"speculative_model": "b"})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({f"field_{number}": "v" for number in range(65)}, "65 fields: 64 at most"),
        ({"Cache Dtype": "fp8"}, "a field 'Cache Dtype': a name has 1 to 64 lower-case letters, digits and _"),
        ({"": "fp8"}, "a field ''"),
        ({"a" * 65: "fp8"}, "1 to 64 lower-case"),
        ({3: "fp8"}, "a field 3"),
        ({"rope\n": "1"}, "lower-case letters"),
        ({"rope": ""}, "field 'rope' of the fingerprint is '': a value is a text of 1 to 256 printable characters"),
        ({"rope": "x" * 257}, r"xxx\.\.\. \(259 characters\): a value is"),
        ({"rope": "a\nb"}, "printable"),
        ({"rope": 10000}, "field 'rope' of the fingerprint is 10000"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_impossible_field_is_named(fields: Any, said: str):
    with pytest.raises(LayoutError, match=said):
        checked_fingerprint(fields)


def test_a_fingerprint_is_a_copy_and_nothing_is_one_without_fields():
    fields = dict(MINE)
    made = checked_fingerprint(fields)
    fields.clear()
    assert made == MINE
    assert checked_fingerprint(None) == {}


def test_names_are_read_with_commas_between():
    assert parse_field_names(" weights, rope,,") == {"weights", "rope"}
    assert parse_field_names("") == frozenset()
    with pytest.raises(ValueError, match="'Rope' is no name of a field"):
        parse_field_names("weights,Rope")
