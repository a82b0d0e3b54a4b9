"""What the fields of messages hold: numbers, names and sentences within bounds, and who an endpoint is to its peers.

What is out of bounds is refused on arrival, before anything is made of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

import msgspec

from kvferry.layout import RankCoordinates, RankLayout
from kvferry.protocol.wire.versions import FEATURES, SPOKEN, Versions

MAX_AUX_BYTES = 1024 * 1024
MAX_REASON = 8000
"""Characters of a reason. Longer ones are cut before they are sent."""

MAX_GROUPS = 512
MAX_REQUIRED = 64
MAX_PIECES = 2**17
MAX_SEGMENTS = 2**16
MAX_DIGEST_BYTES = 2**20
MAX_METADATA_BYTES = 16 * 1024 * 1024
MAX_EXPECTED = 4096

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
"""A number that is refused on arrival if it is negative."""


Random: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number drawn at random, or a room's."""

EndpointName: TypeAlias = Annotated[
    str,
    msgspec.Meta(
        min_length=1, max_length=255, pattern=r"^[!-~]+\Z", description="the endpoint that sends it, one start of it"
    ),
]
"""Identifies one start of an endpoint: visible ASCII, which ZMQ requires and a log can show."""

Attempt: TypeAlias = Annotated[
    int, msgspec.Meta(ge=0, description="which of the decode rank's attempts to attach it is about")
]

Writer: TypeAlias = Annotated[int, msgspec.Meta(ge=0, description="the engine rank of the prefill rank")]

ShortText: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]
"""A name for people."""

RequiredFeatures: TypeAlias = Annotated[tuple[ShortText, ...], msgspec.Meta(max_length=MAX_REQUIRED)]
"""Names of what the receiver of a message must know; see `versions`."""

Reason: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_REASON, description="why, in words")]
"""A sentence for people."""


def shortened(text: str) -> str:
    """Cuts a reason that is too long to be sent, and notes its length at the end."""
    text = text.encode(errors="replace").decode()  # half a character, as in some files' names, cannot be sent
    if len(text) <= MAX_REASON:
        return text
    ending = f"... ({len(text)} characters)"
    return text[: MAX_REASON - len(ending)] + ending


def shorten(struct: msgspec.Struct, field: str) -> None:
    """Shortens a sentence of a new struct, so that its length alone does not keep the struct from being sent."""
    msgspec.structs.force_setattr(struct, field, shortened(getattr(struct, field)))


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages."""


class AboutRoom(Message, frozen=True):
    """Base of messages about one transfer.

    Attributes:
        room: the transfer's number.
        generation: random; distinguishes this use of the number from others, also where it is refused.
    """

    room: Random
    generation: Random


class PodIdentity(msgspec.Struct, frozen=True):
    """Identifies a Kubernetes pod, by a UID that is never used again, and one start of a container in it.

    Attributes:
        uid: Kubernetes', of the pod.
        name: the pod's.
        namespace: the pod's.
        container: in the termination message of the container that the process runs in, once that has ended; empty
            where nothing was put there.
    """

    uid: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    namespace: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    container: ShortText = ""


class ProcessIdentity(msgspec.Struct, frozen=True):
    """Identifies a process among all machines, even after its number was reused.

    Attributes:
        machine: identifies its machine, and the namespace of process numbers there.
        pid: its number there.
        started: when it was started, in whatever unit the machine counts.
        pod: the pod that it runs in, if it does and says so.
    """

    machine: ShortText
    pid: Count
    started: Count
    pod: PodIdentity | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """How an endpoint identifies itself to its peers.

    Attributes:
        endpoint: its name, new at every start.
        host: its machine's name.
        checksums: whether what arrives is verified.
        fingerprint: what its caches are beyond their layout.
        may_differ: fields of it that an operator lets differ from a peer's.
        versions: which versions of the protocol it speaks.
        requires: features that it requires of its peers, by name.
        features: those that it knows.
    """

    endpoint: str
    engine: str
    coordinates: RankCoordinates
    layout: RankLayout
    transport: str
    host: str
    checksums: bool = False
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    may_differ: frozenset[str] = frozenset()
    versions: Versions = SPOKEN
    requires: tuple[str, ...] = ()
    features: frozenset[str] = FEATURES


@dataclass(frozen=True, slots=True)
class DecodeRank:
    """A decode rank's engine, and its place there, by its own word."""

    engine: str
    coordinates: RankCoordinates

    def can_be_beside(self, others: Iterable[DecodeRank]) -> bool:
        """Returns whether it can be one of the group that others belong to, and is none of them."""
        return all(self._group == other._group and self.coordinates != other.coordinates for other in others)

    @property
    def _group(self) -> tuple[str, int, int, int, int, int]:
        """What all ranks of its data-parallel group have in common."""
        mine = self.coordinates
        return self.engine, mine.tp_size, mine.cp_size, mine.pp_size, mine.dp_size, mine.dp_rank
