"""What a request's cache depends on: which digests are impossible, and what is said of those that differ."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.errors import UsageError
from kvferry.plan.fingerprint import checked_conditions, why_different


def test_all_that_differs_is_said_and_no_digest_is_shown():
    said = why_different({"prompt": b"secret", "LoRA adapter": b"2"}, {"prompt": b"hidden", "cache salt": b"3"})
    assert said == (
        "the prefill side's request names a LoRA adapter, the decode side's names none; "
        "the decode side's request names a cache salt, the prefill side's names none; "
        "the decode side's request has another prompt than the prefill side's"
    )


def test_the_same_is_no_difference():
    assert why_different({}, {}) == ""
    assert why_different({"a": b"1", "b": b"2"}, {"b": b"2", "a": b"1"}) == ""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({f"digest {number}": b"d" for number in range(9)}, "depends_on has 9 digests: 8 at most"),
        ({"": b"d"}, "depends_on has a digest of ''"),
        ({"a" * 65: b"d"}, "a name has 1 to 64 letters"),
        ({"prompt\n": b"d"}, "a name has 1 to 64 letters"),
        ({7: b"d"}, "a digest of 7"),
        ({"prompt": b""}, "says b'' of 'prompt': a digest is 1 to 32 bytes"),
        ({"prompt": bytes(33)}, "of 'prompt': a digest is 1 to 32 bytes"),
        ({"prompt": "text"}, "says 'text' of 'prompt'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_impossible_digest_is_named(given: Any, said: str):
    with pytest.raises(UsageError, match=f"^room 7: .*{said}"):
        checked_conditions(given, where="room 7")


def test_nothing_given_depends_on_nothing():
    assert checked_conditions(None, where="room 7") == {}
