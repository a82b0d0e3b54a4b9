"""What both sides must say alike, though their layouts agree: of their caches, and of every request.

A fingerprint is what an engine says of its caches beyond their shape, as named fields: which weights computed them, in
which order a head's content lies, how its numbers are scaled. Two sides compare field by field when they connect. The
library knows no field's meaning; it has names for those that need not agree.

A request's conditions are digests, by name, of everything that its cache depends on. A room's number says which
transfer is meant, and not which request: a gateway that mixes two up, or sends the prefill side another adapter than
the decode side, would have caches arrive that belong to nobody's prompt.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, TypeAlias

import msgspec

from kvferry.errors import IncompatiblePeerError, LayoutError, UsageError

MAX_FIELDS = 64
LONGEST_NAME = 64
LONGEST_VALUE = 256

MAY_DIFFER = frozenset({"engine", "attention_backend"})
"""Fields that may differ: they say who computed the bytes, and not what these are."""

MAY_BE_UNSAID = frozenset({"speculative_model"})
"""Fields that may be said by one side alone: a cache that the other does not have is not exchanged."""

_NAME_PATTERN = r"^[a-z0-9_]+\Z"
_NAME = re.compile(_NAME_PATTERN)
_UNSAID = "not said"

FingerprintFields: TypeAlias = Annotated[
    dict[
        Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_NAME, pattern=_NAME_PATTERN)],
        Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_VALUE)],
    ],
    msgspec.Meta(max_length=MAX_FIELDS),
]
"""A fingerprint as it travels: values by field."""


def checked_fingerprint(fields: Mapping[str, str] | None) -> dict[str, str]:
    """Returns a fingerprint that can travel; without any fields if none is given.

    Raises:
        LayoutError: if there are too many fields, or one has an impossible name or value, naming it.
    """
    fields = dict(fields or {})
    if len(fields) > MAX_FIELDS:
        raise LayoutError(f"the fingerprint has {len(fields)} fields: {MAX_FIELDS} at most can be compared")
    for name, value in fields.items():
        if not is_field_name(name):
            raise LayoutError(
                f"the fingerprint has a field {name!r}: a name has 1 to {LONGEST_NAME} lower-case letters, digits and _"
            )
        if not isinstance(value, str) or not 0 < len(value) <= LONGEST_VALUE or not value.isprintable():
            raise LayoutError(
                f"field {name!r} of the fingerprint is {_shown(value)}: a value is a text of 1 to {LONGEST_VALUE} "
                "printable characters; say a digest of what is longer"
            )
    return fields


def is_field_name(name: object) -> bool:
    """Returns whether a field can have this name."""
    return isinstance(name, str) and len(name) <= LONGEST_NAME and _NAME.match(name) is not None


def parse_field_names(text: str) -> frozenset[str]:
    """Reads names of fields with commas between.

    Raises:
        ValueError: if one is no such name.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if not is_field_name(name):
            raise ValueError(f"{name!r} is no name of a field: these have lower-case letters, digits and _")
    return frozenset(names)


def check_same_fingerprint(
    prefill: Mapping[str, str],
    decode: Mapping[str, str],
    *,
    may_differ: Collection[str],
    prefill_name: str,
    decode_name: str,
) -> tuple[str, ...]:
    """Refuses two sides of which a field differs, or is said by one side alone.

    Args:
        prefill: the prefill side's fields.
        decode: the decode side's.
        may_differ: fields that an operator lets differ.
        prefill_name: how messages call the prefill side.
        decode_name: how messages call the other.

    Returns:
        A sentence for every field that differs because the operator lets it.

    Raises:
        IncompatiblePeerError: naming every field that differs, with both values.
    """
    differing = sorted(name for name in prefill.keys() | decode.keys() if _differs(name, prefill, decode))
    sentences = {
        name: f"{name} is {_quoted(prefill.get(name))} on {prefill_name}, {_quoted(decode.get(name))} on {decode_name}"
        for name in differing
    }
    refused = [name for name in differing if name not in may_differ]
    if refused:
        raise IncompatiblePeerError(
            f"the two sides' caches do not mean the same: {'; '.join(sentences[name] for name in refused)}. Start both "
            "sides with the same; where you know that a difference changes no cached value, let it pass on both: "
            f"KVFERRY_MAY_DIFFER={_listed(may_differ, refused)}"
        )
    return tuple(sentences[name] for name in differing)


def _differs(name: str, prefill: Mapping[str, str], decode: Mapping[str, str]) -> bool:
    is_said_by_both = name in prefill and name in decode
    if name in MAY_DIFFER or (name in MAY_BE_UNSAID and not is_said_by_both):
        return False
    return prefill.get(name) != decode.get(name)


def _listed(*names: Iterable[str]) -> str:
    return ",".join(dict.fromkeys(name for each in names for name in sorted(each)))


def _quoted(value: str | None) -> str:
    return _UNSAID if value is None else repr(value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}... ({len(text)} characters)"


MAX_CONDITIONS = 8
LONGEST_DIGEST = 32
"""In bytes."""

_CONDITION_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9 ._-]*\Z"
_CONDITION = re.compile(_CONDITION_PATTERN)

RequestConditions: TypeAlias = Annotated[
    dict[
        Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_NAME, pattern=_CONDITION_PATTERN)],
        Annotated[bytes, msgspec.Meta(min_length=1, max_length=LONGEST_DIGEST)],
    ],
    msgspec.Meta(max_length=MAX_CONDITIONS),
]
"""Digests by name, as they travel with an open request."""


def checked_conditions(conditions: Mapping[str, bytes] | None, *, where: str) -> dict[str, bytes]:
    """Returns what a request's cache depends on in a form that can travel; nothing if nothing is given.

    Args:
        conditions: digests by name.
        where: begins error messages.

    Raises:
        UsageError: if there are too many, or one has an impossible name or digest, naming it.
    """
    conditions = dict(conditions or {})
    if len(conditions) > MAX_CONDITIONS:
        raise UsageError(f"{where}: depends_on has {len(conditions)} digests: {MAX_CONDITIONS} at most can be compared")
    for name, digest in conditions.items():
        if not isinstance(name, str) or len(name) > LONGEST_NAME or _CONDITION.match(name) is None:
            raise UsageError(
                f"{where}: depends_on has a digest of {name!r:.80}: a name has 1 to {LONGEST_NAME} letters, digits and "
                "spaces"
            )
        if not isinstance(digest, bytes) or not 0 < len(digest) <= LONGEST_DIGEST:
            raise UsageError(
                f"{where}: depends_on says {digest!r:.80} of {name!r}: a digest is 1 to {LONGEST_DIGEST} bytes"
            )
    return conditions


def why_different(prefill: Mapping[str, bytes], decode: Mapping[str, bytes]) -> str:
    """Says what the caches of two requests depend on differently; empty if they depend on the same.

    Digests are not shown: some could be guessed back.

    Args:
        prefill: what the prefill side's request depends on.
        decode: what the decode side's does.
    """
    return "; ".join(
        _sentence(name, prefill.get(name), decode.get(name))
        for name in sorted(prefill.keys() | decode.keys())
        if prefill.get(name) != decode.get(name)
    )


def _sentence(name: str, prefill: bytes | None, decode: bytes | None) -> str:
    if decode is None:
        return f"the prefill side's request names a {name}, the decode side's names none"
    if prefill is None:
        return f"the decode side's request names a {name}, the prefill side's names none"
    return f"the decode side's request has another {name} than the prefill side's"
