"""What a request's cache depends on, as digests that both sides compare before anything is sent.

A room's number says which transfer is meant, and not which request: a gateway that mixes two up, or sends the prefill
side another adapter than the decode side, would have caches arrive that belong to nobody's prompt. Each side says of
its request, by name, a digest of everything that the cache depends on; both must say the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, TypeAlias

import msgspec

from kvferry.errors import UsageError

MAX_CONDITIONS = 8
LONGEST_NAME = 64
LONGEST_DIGEST = 32
"""In bytes."""

_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9 ._-]*\Z"
_NAME = re.compile(_NAME_PATTERN)

RequestConditions: TypeAlias = Annotated[
    dict[
        Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_NAME, pattern=_NAME_PATTERN)],
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
        if not isinstance(name, str) or len(name) > LONGEST_NAME or _NAME.match(name) is None:
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
