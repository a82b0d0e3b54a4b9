"""Who an endpoint is, to its peers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvferry.layout import RankCoordinates, RankLayout
from kvferry.protocol.wire.versions import FEATURES, SPOKEN, Versions


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
