"""A decode rank's link to one data-parallel group of a prefill engine.

A link is made when the first room needs the engine: its ranks are looked up, greeted, checked and attached, all
without holding up anything else. Rooms wait for it; if it fails, they fail with its reason, and the next room starts
a new one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, SupportsIndex

import msgspec

from kvferry import errors
from kvferry.errors import IncompatiblePeerError, KVFerryError, LayoutError, PeerError
from kvferry.layout import RankLayout
from kvferry.layout.interval import volume
from kvferry.plan import Piece, described_alike, elect_writer, pieces_for_receiver
from kvferry.protocol.links.rank_link import RankLink, Send
from kvferry.protocol.links.reliable_channel import ReliableChannel
from kvferry.protocol.transfer.events import Connected
from kvferry.protocol.wire import codec, field_types, messages
from kvferry.protocol.wire.field_types import Identity
from kvferry.protocol.wire.registrations import RankRegistration, check_engine_name
from kvferry.protocol.wire.versions import agreed

_SHORTEST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


class RingOffers(Protocol):
    """Staging memory to offer to prefill ranks."""

    def offer(self, endpoint: str, source: RankLayout, pieces: tuple[Piece, ...]) -> messages.Staging:
        """Returns what to offer a prefill rank when it is asked to attach.

        Args:
            endpoint: the prefill rank's name.
            source: its layout.
            pieces: what it may send.
        """

    def metadata(self) -> bytes:
        """Returns the transport's metadata, with all memory that was offered."""

    def attached(self, endpoint: str) -> None:
        """Records that a prefill rank has attached, for the first time or anew."""


class LinkState(Enum):
    """How far a link has come."""

    RESOLVING = "looking up the engine at the registry"
    GREETING = "asking the ranks what they hold"
    ATTACHING = "waiting for the ranks to prepare"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class LinkKey:
    """Which group of ranks a link goes to.

    Attributes:
        engine: the prefill engine's name.
        dp_rank: the data-parallel group there.

    Raises:
        SettingsError: if no engine can have that name.
        LayoutError: if the group's number is negative, or none.
    """

    engine: str
    dp_rank: int

    def __post_init__(self) -> None:
        check_engine_name(self.engine)
        if not isinstance(self.dp_rank, SupportsIndex):
            raise LayoutError(f"prefill_dp_rank is {self.dp_rank!r}: it must be an integer")
        if self.dp_rank < 0:
            raise LayoutError(f"prefill_dp_rank is {self.dp_rank}: it must not be negative")


class Link:
    """A link to one group of ranks: takes what has happened, and returns what to send. It waits for nothing.

    Attributes:
        attempt: the latest attempt to attach; distinguishes its answers from those to earlier ones, of any link.
        is_given_up: whether no room can be opened through it any more; aborts still go to ranks that may write.
        tolerated: what differs from the prefill engine because an operator lets it, a sentence each.
        deadline: when it must be ready.
        registrations: ranks of the group that the registry has named, all or some; by an earlier look-up, if another is
            on its way.
        problem: why the last look-up at the registry did not succeed; None if it did, or there was none.
        look_up_at: when to ask the registry again; None while it is being asked.
        ranks: the connections to the ranks that are known, by engine rank.
    """

    def __init__(
        self,
        key: LinkKey,
        identity: Identity,
        staging: RingOffers,
        *,
        next_attempt: Callable[[], int],
        can_prove_end: Callable[[field_types.ProcessIdentity], bool],
        deadline: float,
    ) -> None:
        """Begins with the look-up at the registry.

        Args:
            next_attempt: returns a number that is higher than all before.
            can_prove_end: whether a source is in reach that could prove a process's end.
        """
        self.key = key
        self.attempt = next_attempt()
        self.is_given_up = False
        self.tolerated: tuple[str, ...] = ()
        self._next_attempt = next_attempt
        self._can_prove_end = can_prove_end
        self.state = LinkState.RESOLVING
        self.deadline = deadline
        self.registrations: tuple[RankRegistration, ...] = ()
        self.problem: KVFerryError | None = None
        self.look_up_at: float | None = None
        self._pause_s = _SHORTEST_PAUSE_S
        self._identity = identity
        self._staging = staging
        self.ranks: dict[int, RankLink] = {}  # by engine rank
        self._at: dict[str, RankLink] = {}  # by address
        self._pieces: tuple[tuple[Piece, str], ...] = ()  # each with its group of pages on this rank
        self.absent: frozenset[str] = frozenset()  # components of this rank's of which the group has nothing

    def next_pause_s(self, jitter: float) -> float:
        """Returns how long to wait before the registry is asked again: twice as long every time, up to a limit.

        Args:
            jitter: between 0 and 1, so that ranks that lost the same engine do not all ask at once.
        """
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return pause_s * (1 - jitter / 2)

    @property
    def addresses(self) -> list[str]:
        """Where the group's ranks listen."""
        return list(self._at)

    def rank_at(self, address: str) -> int | None:
        """Returns the engine rank that listens at an address; None if it is not one of the group's."""
        rank = self._at.get(address)
        return rank.number if rank is not None else None

    def address_of(self, endpoint: str) -> str | None:
        """Returns the address at which an endpoint has answered; None if it has not."""
        number = self.rank_of(endpoint)
        return None if number is None else self.ranks[number].address

    def resolved(self, registrations: tuple[RankRegistration, ...], now: float) -> list[Send]:
        """Greets the ranks that the registry named.

        Raises:
            VersionError: if a rank speaks no protocol version that this side speaks.
            IncompatiblePeerError: if the engine has no such data-parallel rank.
        """
        self.state = LinkState.GREETING
        group = [each for each in registrations if each.coordinates.dp_rank == self.key.dp_rank]
        if not group:
            size = registrations[0].coordinates.dp_size
            raise IncompatiblePeerError(
                f"engine {self.key.engine!r} has no dp_rank {self.key.dp_rank}: its dp_size is {size}"
            )
        for registration in group:
            name = f"prefill rank {registration.engine_rank} of {self.key.engine!r}"
            version = agreed(self._identity.versions, registration.spoken, peer=name)
            rank = self.ranks[registration.engine_rank] = RankLink(registration, version)
            self._at.setdefault(rank.address, rank)
        return self.ask(now)

    def in_place_of(self, instance: str) -> RankRegistration | None:
        """Returns a rank of another start of the engine, where none of the one with that name is registered.

        None where the instance is registered, or nobody can say: before the look-up, or where either names none.
        """
        others = [each for each in self.registrations if each.instance and each.instance != instance]
        return others[0] if instance and others and len(others) == len(self.registrations) else None

    def is_restarted(self, address: str, message: messages.Welcome) -> bool:
        """Whether the rank at an address has restarted meanwhile, and will not answer its predecessor's messages."""
        return self.state is LinkState.ATTACHING and self._at[address].endpoint != message.endpoint

    def is_given_up_there(self, message: messages.Pong) -> bool:
        """Whether a rank has given this attempt to attach up, which it may have prepared for all the same."""
        return self.state is LinkState.ATTACHING and not message.attached and message.epoch == self.attempt

    def received(self, address: str, message: messages.ToDecode) -> list[Send]:
        """Handles a message about the link itself, from the rank at an address. It may become ready by it.

        Raises:
            IncompatiblePeerError: if the caches cannot be exchanged, from our side or the prefill rank's.
            PeerError: if a rank is not who the registry said it was.
            PeerDisconnectedError: if a rank does not have this endpoint attached any more.
        """
        rank = self._at[address]
        match message:
            case messages.Welcome() if self.state is LinkState.GREETING:
                self.tolerated = rank.check(message, self._identity)
                rank.welcome = message
                if all(each.welcome is not None for each in self.ranks.values()):
                    return self._attach()
            case messages.Attached() | messages.Refused() if message.attempt != self.attempt:
                pass  # an answer to another attempt
            case messages.Attached() if rank.endpoint != message.endpoint:
                pass  # of an earlier start
            case messages.Attached() if self.state is LinkState.ATTACHING:
                rank.is_attached = True
                rank.only_staged = message.only_staged
                self._staging.attached(message.endpoint)
                if all(each.is_attached for each in self.ranks.values()):
                    self.state = LinkState.READY
            case messages.Refused():
                kind = getattr(errors, message.error, IncompatiblePeerError)
                is_ours = isinstance(kind, type) and issubclass(kind, KVFerryError)
                raise (kind if is_ours else PeerError)(
                    f"prefill rank {rank.number} of {self.key.engine!r} refused: {message.reason}"
                )
            case messages.Pong() if self.state is LinkState.READY:
                return rank.answered(message)
        return []

    def take(self, address: str, message: messages.Numbered) -> tuple[list[messages.NumberedToDecode], list[Send]]:
        """Takes a numbered message from the rank at an address. Returns what counts of it, and what to send.

        Raises:
            MessageError: if it is malformed.
        """
        rank = self._at[address]
        if rank.channel is None:
            return [], []
        taken = [codec.decode_numbered_to_decode(body) for body in rank.channel.receive(message)]
        is_due = rank.channel.owes_acknowledgement and not self.is_given_up
        return taken, [rank.ping()] if is_due else []

    def _attach(self) -> list[Send]:
        layouts = {
            rank.registration.coordinates.group_rank: rank.welcome.layout
            for rank in self.ranks.values()
            if rank.welcome is not None
        }
        theirs = {shard.component.name for each in layouts.values() for shard in each.shards if volume(shard.box)}
        ours = {shard.component.name for shard in self._identity.layout.shards if volume(shard.box)}
        self.absent = frozenset(ours - theirs)
        held, mine = described_alike(layouts, self._identity.layout)
        pieces = pieces_for_receiver(held, mine)
        shards = [mine.shard_with(piece.component, piece.box) for piece in pieces]
        groups = [shard.group for shard in shards if shard is not None]
        self._pieces = tuple(zip(pieces, groups, strict=True))
        self.state = LinkState.ATTACHING
        offers = {number: self._offer(rank, pieces) for number, rank in self.ranks.items()}
        metadata = self._staging.metadata()  # with the memory of all offers
        sends = []
        for number, rank in self.ranks.items():
            rank.channel = ReliableChannel(self.attempt)
            rank.request = messages.Attach(
                endpoint=self._identity.endpoint,
                attempt=self.attempt,
                engine=self._identity.engine,
                coordinates=self._identity.coordinates,
                layout=self._identity.layout,
                pieces=pieces,
                transport=self._identity.transport,
                transport_metadata=metadata,
                host=self._identity.host,
                staging=offers[number],
                checksums=self._identity.checksums,
                fingerprint=dict(self._identity.fingerprint),
                requires=self._identity.requires,
            )
            sends.append(rank.send(rank.request))
        return sends

    def _offer(self, rank: RankLink, pieces: tuple[Piece, ...]) -> messages.Staging:
        welcome = rank.welcome
        assert welcome is not None
        group_rank = rank.registration.coordinates.group_rank
        mine = tuple(piece for piece in pieces if group_rank in piece.holders)
        offer = self._staging.offer(welcome.endpoint, welcome.layout, mine)
        return msgspec.structs.replace(offer, unproven=not self._can_prove_end(welcome.process))

    def connected(self, room: int) -> Connected:
        """Returns who sends what in a room, once the link is ready."""
        by_group_rank = {rank.registration.coordinates.group_rank: number for number, rank in self.ranks.items()}
        receiver = self._identity.coordinates.group_rank
        writers: dict[int, set[str]] = {}
        for piece, group in self._pieces:
            writer = by_group_rank[elect_writer(piece, room=room, receiver=receiver)]
            writers.setdefault(writer, set()).add(group)
        aux_writer = next(n for n, rank in self.ranks.items() if rank.registration.coordinates.is_aux_writer)
        return Connected(
            ranks=frozenset(self.ranks),
            writers={writer: frozenset(groups) for writer, groups in writers.items()},
            into_pages=frozenset(writer for writer in writers if not self.ranks[writer].only_staged),
            aux_writer=aux_writer,
            verifies=self._identity.checksums,
        )

    def send(self, engine_rank: int, message: messages.NumberedToPrefill) -> list[Send]:
        """Sends to one rank, once and in order: as soon as it can be sent, and again if it may have been lost.

        Raises:
            MessageError: if it cannot be encoded, or is too large.
        """
        rank = self.ranks[engine_rank]
        if self.is_given_up or rank.channel is None:
            return []
        return [rank.send(each) for each in rank.channel.send(codec.encode_body(message))]

    def send_unnumbered(self, engine_rank: int, message: messages.AbortRoom) -> list[Send]:
        """Sends to one rank, perhaps in vain; also where the link was given up."""
        return [self.ranks[engine_rank].send(message)]

    def tell(self, message: messages.ExpectRooms) -> list[Send]:
        """Tells every rank what need not come."""
        return [rank.send(message) for rank in self.ranks.values()]

    def last_number(self, engine_rank: int) -> int:
        """Returns the number of the last message that was sent to a rank with `send`."""
        channel = self.ranks[engine_rank].channel
        return channel.last_number if channel is not None else 0

    def broke(self, address: str, now: float) -> list[Send]:
        """A connection broke: what was on its way may be lost, either way."""
        sends = self.ask(now)
        return [*sends, *self._at[address].broke()] if self.state is LinkState.READY else sends

    def resend(self) -> list[Send]:
        """Sends again what was not acknowledged, before a close that no rank hears anything after."""
        channels = [(rank, rank.channel) for rank in self.ranks.values() if rank.channel is not None]
        return [rank.send(each) for rank, channel in channels for each in channel.resend()]

    def rank_of(self, endpoint: str) -> int | None:
        """Returns the engine rank of an endpoint; None if it is not one of the group's."""
        return next((number for number, rank in list(self.ranks.items()) if rank.endpoint == endpoint), None)

    def endpoint_of(self, engine_rank: int) -> str | None:
        """Returns the endpoint of an engine rank; None if it is not one of the group's, or has not answered."""
        rank = self.ranks.get(engine_rank)
        return rank.endpoint if rank is not None else None

    @property
    def peers(self) -> list[messages.Welcome]:
        """The ranks that have answered `Hello`. May be read from another thread."""
        return [rank.welcome for rank in list(self.ranks.values()) if rank.welcome is not None]

    def knows_machine(self, address: str, machine: str) -> bool:
        """Returns whether the rank at an address is on that machine, and can check processes there."""
        return address in self._at and self._at[address].is_on(machine)

    def ask_whether_gone(self, process: field_types.ProcessIdentity) -> list[Send]:
        """Asks the ranks on a process's machine whether the process has ended."""
        return [
            rank.send(messages.IsGone(process=process))
            for rank in self.ranks.values()
            if rank.is_on(process.machine) and rank.process != process
        ]

    def record_answer(self, address: str) -> None:
        """Records that a message came from the rank at an address, which is therefore alive."""
        self._at[address].asked_at = None

    def ask(self, now: float) -> list[Send]:
        """Sends every rank a heartbeat that it must answer.

        Until the link is ready this is `Hello`, which a rank answers whether this endpoint is attached or not.
        """
        is_ready = self.state is LinkState.READY
        sends = []
        for rank in self.ranks.values():
            if rank.asked_at is None:
                rank.asked_at = now
            sends.append(rank.ping() if is_ready else rank.send(messages.Hello()))
            if rank.request is not None and not rank.is_attached:  # a connection that broke may have lost it
                sends.append(rank.send(rank.request))
        return sends

    def forgive(self, seconds: float, now: float) -> None:
        """Takes so many seconds off the ranks' silence, for example because this side was not listening."""
        for rank in self.ranks.values():
            if rank.asked_at is not None:
                rank.asked_at = min(now, rank.asked_at + seconds)

    def silent_rank(self, now: float, limit_s: float) -> tuple[int, float] | None:
        """Returns a rank that has not answered for longer than the limit, and for how long; None if there is none."""
        for number, rank in self.ranks.items():
            if (silent_s := rank.silent_s(now)) > limit_s:
                return number, silent_s
        return None

    def start_over(self, now: float) -> list[messages.Welcome]:
        """Forgets the ranks, to look them up again: those that were registered may be of an earlier start.

        Returns:
            Those that had answered.
        """
        left_behind = self.peers
        self.state = LinkState.RESOLVING
        self.attempt = self._next_attempt()  # a live rank might still answer the earlier one
        self.look_up_at = now
        self.ranks.clear()
        self._at.clear()
        return left_behind
