"""Which versions of the protocol a side speaks, which one two sides use, and what one requires of the other.

A side speaks a range of versions, and registers both its ends. Whoever opens a connection takes the newest version that
both sides speak, and uses it from the first message on; the other side answers in it. So releases that are one version
apart always understand each other, whichever of the two sides is the newer one: each speaks the version before, too.

Not everything that is new takes a version. An optional field, or a message of a type that the peer
does not know, is ignored; what must not be ignored is a feature with a name, which one side requires of the other when
they connect.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from kvferry._version import __version__
from kvferry.errors import IncompatiblePeerError, VersionError
from kvferry.protocol.bounded import remember

PROTOCOL_VERSION = 1
"""The newest version that this release speaks."""

FEATURES: frozenset[str] = frozenset()
"""What a peer may require of this release, by name."""


@dataclass(frozen=True, slots=True)
class Versions:
    """A range of versions, both ends included.

    Raises:
        ValueError: if it is empty.
    """

    oldest: int
    newest: int

    def __post_init__(self) -> None:
        if not 0 <= self.oldest <= self.newest:
            raise ValueError(f"versions {self.oldest} to {self.newest}: there is none")

    def __contains__(self, version: int) -> bool:
        return self.oldest <= version <= self.newest

    def __str__(self) -> str:
        if self.oldest == self.newest:
            return f"protocol version {self.newest}"
        return f"protocol versions {self.oldest} to {self.newest}"

    def shared_with(self, other: Versions) -> int | None:
        """Returns the newest version that both sides speak; None if there is none."""
        version = min(self.newest, other.newest)
        return version if version in self and version in other else None


SPOKEN = Versions(oldest=1, newest=PROTOCOL_VERSION)
"""What this release speaks; later ones speak the version of the release before as well."""


def agreed(mine: Versions, theirs: Versions, *, peer: str) -> int:
    """Returns the version in which to speak with a peer: the newest that both sides speak.

    Args:
        peer: names it, at the beginning of a sentence.

    Raises:
        VersionError: if there is none, naming both ranges and the side to upgrade.
    """
    version = mine.shared_with(theirs)
    if version is None:
        raise VersionError(f"{peer} speaks {theirs}, this side {mine}: {_remedy(mine, theirs)}")
    return version


def check_spoken(version: int, spoken: Versions) -> None:
    """Checks that a message is of a version that this side speaks.

    Raises:
        VersionError: if it is not, naming both.
    """
    if version not in spoken:
        theirs = Versions(version, version)
        raise VersionError(f"a message of {theirs}, and this side speaks {spoken}: {_remedy(spoken, theirs)}")


def _remedy(mine: Versions, theirs: Versions) -> str:
    side, version = ("this", theirs.oldest) if mine.newest < theirs.oldest else ("the peer's", mine.oldest)
    return f"upgrade kvferry on {side} side first, to a release that speaks version {version}"


def check_required(required: Collection[str], known: Collection[str], *, peer: str) -> None:
    """Checks that this side knows every feature that a peer requires.

    Args:
        peer: names it, at the beginning of a sentence.

    Raises:
        IncompatiblePeerError: if not, naming those that it does not know.
    """
    unknown = [name for name in required if name not in known]
    if unknown:
        raise IncompatiblePeerError(
            f"{peer} requires {', '.join(map(repr, unknown))}, which kvferry {__version__} of this side does not know: "
            "upgrade kvferry on this side first"
        )


_MOST_REMEMBERED = 1 << 16


class SpokenVersions:
    """Versions by decode rank. One thread records them, any thread may read them."""

    def __init__(self, mine: Versions) -> None:
        """Begins with nobody.

        Args:
            mine: the versions that this side speaks.
        """
        self.mine = mine
        self._last: OrderedDict[str, int] = OrderedDict()  # by decode rank, the latest stand last

    def record(self, decode_rank: str, version: int) -> None:
        """Records that a message of this version came from a decode rank."""
        remember(self._last, decode_rank, version, _MOST_REMEMBERED)

    def of(self, decode_rank: str) -> int:
        """Returns in which version to speak to a decode rank; the oldest for one of which nothing is known."""
        return self._last.get(decode_rank, self.mine.oldest)
