"""What ranks of prefill engines register, and what the registry says of an engine."""

from __future__ import annotations

import re
from typing import Annotated, TypeAlias

import msgspec

from kvferry.errors import SettingsError
from kvferry.layout.parallel import RankCoordinates
from kvferry.protocol.wire.versions import Versions

_ENGINE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")
_VISIBLE_ASCII = re.compile(r"[!-~]+")
_LONGEST_ENGINE_NAME = 128
LONGEST_INCARNATION = 256
_LONGEST_ADDRESS = 256
_LONGEST_DIGEST = 128
_LONGEST_INSTANCE = 128
_LARGEST_PROTOCOL_VERSION = 2**31 - 1
_LARGEST_PARALLEL_SIZE = 2**20

MOST_ENGINES = 1024
MOST_RANKS = 16384
"""Most engines and ranks that a registry holds, and that a registry's answer may have."""

MOST_NAMED = 8
"""Engines that the answer about an unknown one names."""

KnownEngine: TypeAlias = Annotated[
    str, msgspec.Meta(max_length=_LONGEST_ENGINE_NAME, pattern=rf"^{_ENGINE_NAME.pattern}\Z")
]
"""The name of an engine that is registered."""

MOST_RELEASED = 4096
"""Endpoints of which an operator's word is kept: the latest."""


def check_engine_name(engine: str) -> None:
    """Checks that a name can stand in a URL, a log line and a metric's label as it is.

    Raises:
        SettingsError: if the name is empty, longer than 128 characters, or has characters other than letters,
            digits and `. _ : @ -`, of which the first must be a letter or a digit.
    """
    if not (isinstance(engine, str) and _ENGINE_NAME.fullmatch(engine)):
        raise SettingsError(
            f"{_quoted(engine)} cannot be an engine's name: use 1 to 128 letters, digits and . _ : @ -, "
            "beginning with a letter or a digit"
        )


class RankRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank of a prefill engine registers.

    Attributes:
        engine: name of the prefill engine, the same on all its ranks.
        incarnation: random id of this start of the endpoint; every start draws a new one.
        coordinates: where the rank stands in its engine; the engine rank and world size follow from it.
        control_address: where decode endpoints reach the rank, such as "tcp://127.0.0.1:41234".
        layout_digest: digest of what all ranks of the engine must have in common to serve one request.
        protocol_version: the oldest version of the messages between peers that the rank speaks.
        newest_protocol_version: the newest; 0 where it names none, and speaks the one version alone.
        draining: whether the rank is about to leave, so that new requests are for other engines.
        drained: whether, besides, nothing is open on it any more.
        open_rooms: how many rooms are, while it drains.
        instance: names this start of the whole engine, the same on all its ranks; empty where the engine names none.
        started_at: when this start began, by its host's clock, in seconds of Unix time. Of two starts of one rank that
            live at once the later one has the place, whichever of them asks first.

    Raises:
        SettingsError: if a text is empty, too long or has unprintable characters, or a number is out of
            range.
    """

    engine: str
    incarnation: str
    coordinates: RankCoordinates
    control_address: str
    layout_digest: str
    started_at: Annotated[float, msgspec.Meta(ge=0)]
    protocol_version: int
    newest_protocol_version: int = 0
    draining: bool = False
    drained: bool = False
    open_rooms: Annotated[int, msgspec.Meta(ge=0)] = 0
    instance: str = ""

    def __post_init__(self) -> None:
        check_engine_name(self.engine)
        check_text("incarnation", self.incarnation, LONGEST_INCARNATION)
        check_text("control_address", self.control_address, _LONGEST_ADDRESS)
        check_text("layout_digest", self.layout_digest, _LONGEST_DIGEST)
        if self.instance:
            check_instance(self.instance)
        # Numbers of thousands of digits arrive from JSON unharmed, and then cannot be printed.
        coordinates, newest = self.coordinates, self.newest_protocol_version
        sizes = (coordinates.tp_size, coordinates.cp_size, coordinates.pp_size, coordinates.dp_size)
        if max(sizes) > _LARGEST_PARALLEL_SIZE:
            raise SettingsError(f"one of tp_size, cp_size, pp_size and dp_size is above {_LARGEST_PARALLEL_SIZE}")
        if not 0 <= self.protocol_version <= _LARGEST_PROTOCOL_VERSION:
            raise SettingsError(f"protocol_version is {self.protocol_version}: it must lie in [0, 2**31)")
        if not (newest == 0 or self.protocol_version <= newest <= _LARGEST_PROTOCOL_VERSION):
            raise SettingsError(
                f"newest_protocol_version is {newest}: it must be 0, or lie in [{self.protocol_version}, 2**31)"
            )

    @property
    def spoken(self) -> Versions:
        """The versions of the messages between peers that the rank speaks."""
        return Versions(self.protocol_version, self.newest_protocol_version or self.protocol_version)

    @property
    def engine_rank(self) -> int:
        """The rank's number in its engine, in [0, world_size)."""
        return self.coordinates.engine_rank

    @property
    def world_size(self) -> int:
        """How many ranks the engine has."""
        return self.coordinates.world_size


class EngineView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An engine as the registry has it at one moment.

    Attributes:
        registrations: the live ranks, by engine rank. Empty if no rank of this name is live.
        world_size: how many ranks the engine has, live or not; 0 if none is live.
        complete: whether every rank of the engine is live.
        draining: whether any rank of it drains, so that new requests are for other engines.
        others: names of other engines, where none of this one's ranks is live: the nearest first, at most `MOST_NAMED`.
        num_others: how many others there are.
        retry_s: in how many seconds to ask again at the soonest, where ranks are missing: so many wait for theirs.
    """

    engine: Annotated[str, msgspec.Meta(max_length=_LONGEST_ENGINE_NAME)]
    registrations: Annotated[tuple[RankRegistration, ...], msgspec.Meta(max_length=MOST_RANKS)]
    world_size: int
    complete: bool
    draining: bool = False
    others: Annotated[tuple[KnownEngine, ...], msgspec.Meta(max_length=MOST_NAMED)] = ()
    num_others: Annotated[int, msgspec.Meta(ge=0, le=MOST_ENGINES)] = 0
    retry_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    def group(self, dp_rank: int) -> tuple[RankRegistration, ...]:
        """Returns the live ranks of one data-parallel group, by engine rank."""
        return tuple(each for each in self.registrations if each.coordinates.dp_rank == dp_rank)


def check_instance(instance: str) -> None:
    """Checks the name of one start of an engine.

    Raises:
        SettingsError: if it is empty, longer than 128 characters, or has other characters than visible ASCII.
    """
    check_text("instance", instance, _LONGEST_INSTANCE)


def check_text(name: str, text: str, longest: int) -> None:
    """Checks that a text can stand in a URL and a log line.

    Raises:
        SettingsError: if it is empty, too long or has other characters than visible ASCII, naming it.
    """
    if len(text) > longest or not _VISIBLE_ASCII.fullmatch(text):
        raise SettingsError(
            f"{name} is {_quoted(text)}: it must be 1 to {longest} printable ASCII characters without spaces"
        )


def _quoted(text: str) -> str:
    """Quotes a text as in a program, cut short: a message stays readable whatever the text."""
    return repr(text) if not isinstance(text, str) or len(text) <= 80 else f"{text[:80]!r}... ({len(text)} characters)"
