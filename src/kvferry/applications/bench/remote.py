"""Two machines: the decode side leads, and the prefill side's ranks answer it through one connection.

The prefill side listens and enters itself at the registry, with a key; the decode side looks it up there, says the key
and its options, and from then on talks to the ranks as if they were its own. Everything that travels is typed
MessagePack. Both sides end when the other does.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeAlias

import msgspec

from kvferry.addresses import with_found_address
from kvferry.applications.bench.options import BenchOptions
from kvferry.applications.bench.teams import BenchError, LocalTeam, Pollable, begin_to_import, listen
from kvferry.applications.partner import Caller, Listener, Message, calling, listening
from kvferry.control.construction import create_registry_client
from kvferry.control.renewals import LeaseKeeper
from kvferry.errors import (
    IncompatiblePeerError,
    PeerDisconnectedError,
    RegistrationRefusedError,
    RegistryAccessError,
    RegistryError,
)
from kvferry.hosts import bracketed
from kvferry.layout import RankCoordinates
from kvferry.protocol.wire.registrations import RankRegistration
from kvferry.protocol.wire.versions import PROTOCOL_VERSION
from kvferry.settings import Settings

ENGINE = "kvferry-bench"
"""Under this name the prefill side is entered at the registry."""

_PING_S = 1.0
_LOOK_S = 0.2


class Lead(Message, frozen=True):
    """Decode to prefill: I lead. The key is the one that the registry has."""

    key: str
    options: dict[str, str]


class Tell(Message, frozen=True):
    """Decode to prefill: a command for a rank."""

    rank: int
    command: bytes


class Ping(Message, frozen=True):
    """Decode to prefill: I am here."""


class Finish(Message, frozen=True):
    """Decode to prefill: that was all.

    Attributes:
        is_exact: whether every byte was right.
        failure: why it ended early, if it did.
    """

    is_exact: bool
    failure: str | None


class Welcome(Message, frozen=True):
    """Prefill to decode: lead."""


class Refused(Message, frozen=True):
    """Prefill to decode: do not lead."""

    reason: str


class Said(Message, frozen=True):
    """Prefill to decode: a rank's answer."""

    rank: int
    answer: bytes


class Pong(Message, frozen=True):
    """Prefill to decode: I am here too."""


class Broken(Message, frozen=True):
    """Prefill to decode: a rank of mine is gone, and so am I."""

    reason: str


ToPrefill: TypeAlias = Lead | Tell | Ping | Finish
ToDecode: TypeAlias = Welcome | Refused | Said | Pong | Broken

_TO_PREFILL: msgspec.msgpack.Decoder[ToPrefill] = msgspec.msgpack.Decoder(ToPrefill)
_TO_DECODE: msgspec.msgpack.Decoder[ToDecode] = msgspec.msgpack.Decoder(ToDecode)


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
    """The prefill side's ranks, as the leading side sees them.

    Attributes:
        is_exact: whether every byte was right; told to the prefill side in the end.
    """

    def __init__(self, caller: Caller[ToDecode], size: int, silence_s: float) -> None:
        """Takes the caller of the prefill side; nothing is sent yet.

        Args:
            caller: of a prefill side that sent its welcome.
            size: how many ranks it has.
            silence_s: how long it may be silent.
        """
        self.name = "prefill"
        self.size = size
        self.is_exact = False
        self._caller = caller
        self._silence_s = silence_s
        self._asked_at = 0.0

    def tell(self, rank: int, command: bytes) -> None:
        self._caller.send(Tell(rank, command))

    def pollables(self) -> Collection[Pollable]:
        return self._caller.sockets

    def hear(self, readable: Collection[Pollable]) -> list[tuple[int, bytes]]:
        answers = []
        for message in self._caller.receive():
            match message:
                case Said(rank, answer):
                    answers.append((rank, answer))
                case Broken(reason) | Refused(reason):
                    raise BenchError(f"the prefill side gave up: {reason}")
        _check_silence("prefill", self._caller.silent_s, self._silence_s)
        now = time.monotonic()
        if now - self._asked_at > _PING_S:
            self._asked_at = now
            self._caller.send(Ping())
        return answers


@contextmanager
def find_prefill_side(
    registry_url: str, options: Mapping[str, str], settings: Settings, *, size: int
) -> Iterator[RemoteTeam]:
    """Waits for the prefill side, leads it, and tells it how that ended.

    Args:
        options: what both sides must agree on.
        size: how many ranks the prefill side has.

    Raises:
        IncompatiblePeerError: if the prefill side was told something else.
        BenchError: if it is not there in time.
        SettingsError: if the registry's address makes no sense.
    """
    with ExitStack() as connection:
        caller = _welcomed(connection, registry_url, options, settings)
        team = RemoteTeam(caller, size, settings.peer_timeout_s)
        failure: str | None = None
        try:
            yield team
        except BaseException as error:
            failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            with suppress(PeerDisconnectedError):
                caller.send(Finish(team.is_exact, failure))


def _welcomed(
    connection: ExitStack, registry_url: str, options: Mapping[str, str], settings: Settings
) -> Caller[ToDecode]:
    """Calls whichever prefill side is entered at the registry, until one says welcome."""
    imports = begin_to_import()
    deadline = time.monotonic() + settings.bootstrap_timeout_s
    known: RankRegistration | None = None
    caller: Caller[ToDecode] | None = None
    problem = "it is not entered there"
    with create_registry_client(settings, registry_url) as registry:
        while time.monotonic() < deadline:
            found = known
            try:
                found = next(iter(registry.engine(ENGINE).registrations), known)
            except RegistryAccessError:
                raise
            except RegistryError as error:
                problem = str(error)
            if found is not None and found != known:
                imports.join()  # from the first word on, neither side may be silent for long
                known, problem = found, f"it is entered there, but does not answer at {found.control_address}"
                connection.close()
                caller = connection.enter_context(
                    calling(settings, found.control_address, _TO_DECODE, name="bench-decode")
                )
                caller.send(Lead(found.incarnation, dict(options)))
            if caller is None:
                time.sleep(_LOOK_S)
                continue
            caller.wait()
            for message in caller.receive():
                if isinstance(message, Refused):
                    raise IncompatiblePeerError(message.reason)
                if isinstance(message, Welcome):
                    return caller
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
        SettingsError: if an address makes no sense, or none is found that the decode side could be told.
    """
    key, settings = secrets.token_hex(16), with_found_address(settings)

    def leads(message: ToPrefill) -> bool:
        return isinstance(message, Lead) and secrets.compare_digest(message.key, key)

    with listening(
        settings, settings.control_port, _TO_PREFILL, opens=leads, busy=Refused("another decode side leads already")
    ) as listener:
        registration = RankRegistration(
            engine=ENGINE,
            incarnation=key,
            coordinates=RankCoordinates(),
            control_address=(
                f"tcp://{bracketed(settings.advertise_host or settings.host)}:"
                f"{settings.advertise_port or listener.port}"
            ),
            layout_digest=ENGINE,
            started_at=time.time(),
            protocol_version=PROTOCOL_VERSION,
        )
        with (
            create_registry_client(settings, registry_url) as registry,
            LeaseKeeper(registry, registration, lambda _: None) as lease,
        ):
            on_progress("waiting for the decode side")
            _wait_for_leader(listener, options, settings, lease, registry_url)
        on_progress("the decode side leads")
        with LocalTeam("prefill", planned) as team:
            return _serve(listener, team, settings.peer_timeout_s)


def _wait_for_leader(
    listener: Listener[ToPrefill],
    options: Mapping[str, str],
    settings: Settings,
    lease: LeaseKeeper,
    registry_url: str,
) -> None:
    imports = begin_to_import()
    deadline = time.monotonic() + settings.bootstrap_timeout_s
    while time.monotonic() < deadline:
        if isinstance(lease.last_error, (RegistrationRefusedError, RegistryAccessError)):
            raise lease.last_error
        listener.wait()
        for message in listener.receive():
            assert isinstance(message, Lead), "the first message of a conversation opens it"
            reason = difference(options, message.options)
            if reason is None:
                imports.join()  # from the welcome on, neither side may be silent for long
            listener.send(Welcome() if reason is None else Refused(reason))
            if reason is not None:
                raise IncompatiblePeerError(reason)
            return
    cause = "" if lease.last_error is None else f" ({lease.last_error})"
    raise BenchError(
        f"no decode side within {settings.bootstrap_timeout_s:g} s (KVFERRY_BOOTSTRAP_TIMEOUT_S) through the registry "
        f"at {registry_url}{cause}. Start `kvferry bench --role decode --registry {registry_url}` with the same options"
    )


def _serve(listener: Listener[ToPrefill], team: LocalTeam, silence_s: float) -> bool:
    """Passes commands and answers on until the leader is through."""
    relay = _Relay(listener, silence_s)
    try:
        while relay.finished is None:
            for speaker, rank, said in listen((team, relay), silence_s):
                if speaker is team:
                    listener.send(Said(rank, said))
                elif 0 <= rank < team.size:
                    team.tell(rank, said)
    except PeerDisconnectedError as error:
        raise BenchError(f"the decode side is gone: {error}") from error
    except BenchError as error:
        with suppress(PeerDisconnectedError):
            listener.send(Broken(str(error)))
        raise
    if relay.finished.failure is not None:
        raise BenchError(f"the decode side gave up: {relay.finished.failure}")
    return relay.finished.is_exact


class _Relay:
    """Hears the leader's commands to the ranks here."""

    def __init__(self, listener: Listener[ToPrefill], silence_s: float) -> None:
        self.finished: Finish | None = None
        self._listener = listener
        self._silence_s = silence_s

    def pollables(self) -> Collection[Pollable]:
        return self._listener.sockets

    def hear(self, readable: Collection[Pollable]) -> list[tuple[int, bytes]]:
        commands = []
        for message in self._listener.receive():
            match message:
                case Tell(rank, command):
                    commands.append((rank, command))
                case Ping():
                    self._listener.send(Pong())
                case Finish():
                    self.finished = message
        _check_silence("decode", self._listener.silent_s, self._silence_s)
        return commands


def _check_silence(side: str, silent_s: float, silence_s: float) -> None:
    if silent_s > silence_s:
        raise BenchError(f"nothing was heard from the {side} side for {silent_s:.0f} s (KVFERRY_PEER_TIMEOUT_S)")
