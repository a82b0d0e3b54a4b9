"""Who an endpoint is, to its peers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvferry.layout import RankCoordinates, RankLayout


@dataclass(frozen=True, slots=True)
class Identity:
    """How an endpoint identifies itself to its peers.

    Attributes:
        endpoint: its name, new at every start.
        engine: its engine's name.
        coordinates: its place in its engine.
        layout: what it caches and where.
        transport: the transport's name.
        host: its machine's name.
        checksums: whether what arrives is verified.
        fingerprint: what its caches are beyond their layout.
        may_differ: fields of it that an operator lets differ from a peer's.
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


@dataclass(frozen=True, slots=True)
class DecodeRank:
    """A decode rank's place, by its own word.

    Attributes:
        engine: its engine's name.
        coordinates: its place there.
    """

    engine: str
    coordinates: RankCoordinates

    def can_be_beside(self, others: Iterable[DecodeRank]) -> bool:
        """Returns whether it can be one of the group that others belong to, and is none of them."""
        return all(self.engine == other.engine and self._is_beside(other.coordinates) for other in others)

    def _is_beside(self, other: RankCoordinates) -> bool:
        mine = self.coordinates
        sizes = [(each.tp_size, each.cp_size, each.pp_size, each.dp_size, each.dp_rank) for each in (mine, other)]
        return sizes[0] == sizes[1] and mine != other
