"""Two machines: the decode side leads, and the prefill side's ranks answer it through one connection.

The prefill side listens and enters itself at the registry, with a key; the decode side looks it up there, says the key
and its options, and from then on talks to the ranks as if they were its own. Everything that travels is typed
MessagePack. Both sides end when the other does.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TypeAlias

import msgspec
import zmq

from kvferry.cli.bench.options import BenchOptions
from kvferry.cli.bench.teams import BenchError, LocalTeam, Pollable, listen
from kvferry.cli.strays import messages_among
from kvferry.control.channel import ConnectedChannel, ListeningChannel
from kvferry.control.construction import create_registry_client, credentials_of
from kvferry.control.registry_client import LeaseKeeper
from kvferry.errors import (
    IncompatiblePeerError,
    PeerDisconnectedError,
    RegistrationRefusedError,
    RegistryAccessError,
    RegistryError,
)
from kvferry.layout import RankCoordinates
from kvferry.protocol.messages import PROTOCOL_VERSION
from kvferry.protocol.registrations import RankRegistration
from kvferry.settings import Settings, bracketed

ENGINE = "kvferry-bench"
"""Under this name the prefill side is entered at the registry."""

_PING_S = 1.0
_LOOK_S = 0.2
_LOOK_MS = 200


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


class Lead(_Message, frozen=True):
    """Decode to prefill: I lead. The key is the one that the registry has."""

    key: str
    options: dict[str, str]


class Tell(_Message, frozen=True):
    """Decode to prefill: a command for a rank."""

    rank: int
    command: bytes


class Ping(_Message, frozen=True):
    """Decode to prefill: I am here."""


class Finish(_Message, frozen=True):
    """Decode to prefill: that was all.

    Attributes:
        is_exact: whether every byte was right.
        failure: why it ended early, if it did.
    """

    is_exact: bool
    failure: str | None


class Welcome(_Message, frozen=True):
    """Prefill to decode: lead."""


class Refused(_Message, frozen=True):
    """Prefill to decode: do not lead."""

    reason: str


class Said(_Message, frozen=True):
    """Prefill to decode: a rank's answer."""

    rank: int
    answer: bytes


class Pong(_Message, frozen=True):
    """Prefill to decode: I am here too."""


class Broken(_Message, frozen=True):
    """Prefill to decode: a rank of mine is gone, and so am I."""

    reason: str


ToPrefill: TypeAlias = Lead | Tell | Ping | Finish
ToDecode: TypeAlias = Welcome | Refused | Said | Pong | Broken

_TO_PREFILL: msgspec.msgpack.Decoder[ToPrefill] = msgspec.msgpack.Decoder(ToPrefill)
_TO_DECODE: msgspec.msgpack.Decoder[ToDecode] = msgspec.msgpack.Decoder(ToDecode)
_encode = msgspec.msgpack.encode


def difference(prefill: Mapping[str, str], decode: Mapping[str, str]) -> str | None:
    """In which options two sides differ, in words; None if they agree."""
    parts = [
        f"{name} is {prefill.get(name, 'unknown')} on the prefill side and {decode.get(name, 'unknown')} on the "
        "decode side"
        for name in {**prefill, **decode}
        if prefill.get(name) != decode.get(name)
    ]
    if not parts:
        return None
    return f"the two sides were not told the same: {'; '.join(parts)}. Give both the same options"


class RemoteTeam:
    """The prefill side's ranks, as the leading side sees them."""

    def __init__(self, channel: ConnectedChannel, size: int, silence_s: float) -> None:
        """Args:
        channel: to a prefill side that said welcome.
        size: how many ranks it has.
        silence_s: how long it may be silent.
        """
        self.name = "prefill"
        self.size = size
        self.is_exact = False
        self._channel = channel
        self._silence_s = silence_s
        self._heard_at = time.monotonic()
        self._asked_at = 0.0

    def tell(self, rank: int, command: bytes) -> None:
        self._channel.send(_encode(Tell(rank, command)))

    def pollables(self) -> Collection[Pollable]:
        return [self._channel.socket]

    def hear(self, readable: Collection[Pollable]) -> list[tuple[int, bytes]]:
        now, heard = time.monotonic(), []
        for message in messages_among(self._channel.receive(), _TO_DECODE):
            self._heard_at = now
            match message:
                case Said(rank, answer):
                    heard.append((rank, answer))
                case Broken(reason) | Refused(reason):
                    raise BenchError(f"the prefill side gave up: {reason}")
        if now - self._heard_at > self._silence_s:
            raise BenchError(
                f"nothing was heard from the prefill side for {now - self._heard_at:.0f} s (KVFERRY_PEER_TIMEOUT_S)"
            )
        if now - self._asked_at > _PING_S:
            self._asked_at = now
            self._channel.send(_encode(Ping()))
        return heard

    def __enter__(self) -> RemoteTeam:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        failure = None if kind is None else f"{kind.__name__}: {error}"
        with suppress(PeerDisconnectedError):
            self._channel.send(_encode(Finish(self.is_exact, failure)))
        self._channel.close()


def find_prefill_side(
    context: zmq.Context[zmq.Socket[bytes]],
    registry_url: str,
    options: Mapping[str, str],
    settings: Settings,
    *,
    size: int,
) -> RemoteTeam:
    """Waits for the prefill side and leads it from then on.

    Args:
        options: what both sides must agree on.
        size: how many ranks the prefill side has.

    Raises:
        IncompatiblePeerError: if the prefill side was told something else.
        BenchError: if it is not there in time.
        SettingsError: if the registry's address makes no sense.
    """
    deadline = time.monotonic() + settings.bootstrap_timeout_s
    known: RankRegistration | None = None
    channel: ConnectedChannel | None = None
    problem = "it is not entered there"
    with create_registry_client(settings, registry_url) as registry:
        try:
            while time.monotonic() < deadline:
                found = known
                try:
                    found = next(iter(registry.engine(ENGINE).registrations), known)
                except RegistryAccessError:
                    raise
                except RegistryError as error:
                    problem = str(error)
                if found is not None and found != known:
                    known, problem = found, f"it is entered there, but does not answer at {found.control_address}"
                    if channel is not None:
                        channel.close()
                    channel = ConnectedChannel(
                        context,
                        identity=f"bench-decode-{secrets.token_hex(8)}",
                        address=found.control_address,
                        credentials=credentials_of(settings),
                    )
                    channel.send(_encode(Lead(found.incarnation, dict(options))))
                if channel is None:
                    time.sleep(_LOOK_S)
                    continue
                channel.socket.poll(_LOOK_MS)
                for message in messages_among(channel.receive(), _TO_DECODE):
                    if isinstance(message, Refused):
                        raise IncompatiblePeerError(message.reason)
                    if isinstance(message, Welcome):
                        team, channel = RemoteTeam(channel, size, settings.peer_timeout_s), None
                        return team
        finally:
            if channel is not None:
                channel.close()
    raise BenchError(
        f"no prefill side within {settings.bootstrap_timeout_s:g} s (KVFERRY_BOOTSTRAP_TIMEOUT_S) through the registry "
        f"at {registry_url}: {problem}. Start `kvferry bench --role prefill --registry {registry_url}` with the same "
        "options"
    )


def follow(
    planned: Sequence[BenchOptions],
    registry_url: str,
    options: Mapping[str, str],
    settings: Settings,
    on_progress: Callable[[str], None],
) -> bool:
    """Is the prefill side for one run: enters it at the registry, waits for the decode side, does what that says.

    Args:
        options: what both sides must agree on.

    Returns:
        Whether every byte was right, as the decode side says.

    Raises:
        IncompatiblePeerError: if the decode side was told something else.
        BenchError: if it does not come in time, falls silent or gives up, or a rank fails.
        RegistrationRefusedError: if another prefill side is entered at this registry.
        SettingsError: if an address makes no sense.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        channel = ListeningChannel(
            context,
            host=bracketed(settings.host),
            port=settings.control_port,
            credentials=credentials_of(settings),
        )
        try:
            key = secrets.token_hex(16)
            registration = RankRegistration(
                engine=ENGINE,
                incarnation=key,
                coordinates=RankCoordinates(),
                control_address=(
                    f"tcp://{bracketed(settings.advertise_host or settings.host)}:"
                    f"{settings.advertise_port or channel.port}"
                ),
                layout_digest=ENGINE,
                protocol_version=PROTOCOL_VERSION,
            )
            with (
                create_registry_client(settings, registry_url) as registry,
                LeaseKeeper(registry, registration, lambda _: None) as lease,
            ):
                on_progress("waiting for the decode side")
                leader = _leader(channel, key, options, settings, lease, registry_url)
            on_progress("the decode side leads")
            with LocalTeam.started("prefill", planned) as team:
                return _serve(channel, leader, team, settings.peer_timeout_s)
        finally:
            channel.close()
    finally:
        context.term()


def _leader(
    channel: ListeningChannel,
    key: str,
    options: Mapping[str, str],
    settings: Settings,
    lease: LeaseKeeper,
    registry_url: str,
) -> str:
    """Waits for a leader with the key; returns how the channel knows it."""
    deadline = time.monotonic() + settings.bootstrap_timeout_s
    while time.monotonic() < deadline:
        if isinstance(lease.last_error, (RegistrationRefusedError, RegistryAccessError)):
            raise lease.last_error
        channel.wait(_LOOK_MS)
        for identity, data in channel.receive():
            for message in messages_among([data], _TO_PREFILL):
                if not isinstance(message, Lead) or not secrets.compare_digest(message.key, key):
                    continue
                reason = difference(options, message.options)
                channel.send(identity, _encode(Welcome() if reason is None else Refused(reason)))
                if reason is not None:
                    raise IncompatiblePeerError(reason)
                return identity
    cause = "" if lease.last_error is None else f" ({lease.last_error})"
    raise BenchError(
        f"no decode side within {settings.bootstrap_timeout_s:g} s (KVFERRY_BOOTSTRAP_TIMEOUT_S) through the registry "
        f"at {registry_url}{cause}. Start `kvferry bench --role decode --registry {registry_url}` with the same options"
    )


def _serve(channel: ListeningChannel, leader: str, team: LocalTeam, silence_s: float) -> bool:
    """Passes commands and answers on until the leader is through."""
    relay = _Relay(channel, leader, silence_s)
    try:
        while relay.finished is None:
            for speaker, rank, said in listen((team, relay), silence_s):
                if speaker is team:
                    channel.send(leader, _encode(Said(rank, said)))
                elif 0 <= rank < team.size:
                    team.tell(rank, said)
    except PeerDisconnectedError as error:
        raise BenchError(f"the decode side is gone: {error}") from error
    except BenchError as error:
        with suppress(PeerDisconnectedError):
            channel.send(leader, _encode(Broken(str(error))))
        raise
    if relay.finished.failure is not None:
        raise BenchError(f"the decode side gave up: {relay.finished.failure}")
    return relay.finished.is_exact


class _Relay:
    """Hears the leader's commands to the ranks here."""

    def __init__(self, channel: ListeningChannel, leader: str, silence_s: float) -> None:
        self.finished: Finish | None = None
        self._channel = channel
        self._leader = leader
        self._silence_s = silence_s
        self._heard_at = time.monotonic()

    def pollables(self) -> Collection[Pollable]:
        return list(self._channel.sockets)

    def hear(self, readable: Collection[Pollable]) -> list[tuple[int, bytes]]:
        now, commands = time.monotonic(), []
        for identity, data in self._channel.receive():
            for message in messages_among([data], _TO_PREFILL):
                if identity != self._leader:
                    with suppress(PeerDisconnectedError):
                        self._channel.send(identity, _encode(Refused("another decode side leads already")))
                    continue
                self._heard_at = now
                match message:
                    case Tell(rank, command):
                        commands.append((rank, command))
                    case Ping():
                        self._channel.send(self._leader, _encode(Pong()))
                    case Finish():
                        self.finished = message
        if now - self._heard_at > self._silence_s:
            raise BenchError(
                f"nothing was heard from the decode side for {now - self._heard_at:.0f} s (KVFERRY_PEER_TIMEOUT_S)"
            )
        return commands
