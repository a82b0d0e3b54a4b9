"""A decode rank's link to one prefill rank of a group: who it is, whether it answers, and the channel to it."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.errors import IncompatiblePeerError, PeerDisconnectedError, PeerError
from kvferry.plan import check_exchangeable, check_token_share
from kvferry.plan.fingerprint import check_same_fingerprint
from kvferry.protocol.links.reliable_channel import ReliableChannel
from kvferry.protocol.wire import field_types, messages
from kvferry.protocol.wire.field_types import Identity
from kvferry.protocol.wire.registrations import RankRegistration
from kvferry.protocol.wire.versions import check_required


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the rank at an address.

    Attributes:
        version: of the protocol, in which the rank is spoken to.
    """

    address: str
    message: field_types.Message
    version: int


@dataclass(slots=True)
class RankLink:
    """One prefill rank of the group.

    Attributes:
        registration: what the registry says of it.
        version: of the protocol, in which it is spoken to.
        asked_at: when the oldest unanswered question was sent.
        welcome: its answer to `Hello`.
        request: the `Attach` that it was sent.
        channel: numbered messages either way, since it was asked to attach.
        only_staged: whether it writes to staging memory alone.
    """

    registration: RankRegistration
    version: int
    asked_at: float | None = None
    welcome: messages.Welcome | None = None
    request: messages.Attach | None = None
    channel: ReliableChannel | None = None
    is_attached: bool = False
    only_staged: bool = False

    @property
    def number(self) -> int:
        """Its engine rank."""
        return self.registration.engine_rank

    @property
    def address(self) -> str:
        """Where it listens."""
        return self.registration.control_address

    @property
    def endpoint(self) -> str | None:
        """Its name; None until it has answered."""
        return self.welcome.endpoint if self.welcome is not None else None

    @property
    def process(self) -> field_types.ProcessIdentity | None:
        """Which process it is; None until it has answered."""
        return self.welcome.process if self.welcome is not None else None

    def is_on(self, machine: str) -> bool:
        """Whether it is known to be on a machine, and can check processes there."""
        return self.process is not None and self.process.machine == machine

    def silent_s(self, now: float) -> float:
        """Returns for how long an answer has been due, in seconds. For any thread."""
        asked_at = self.asked_at
        return max(0.0, now - asked_at) if asked_at is not None else 0.0

    def check(self, welcome: messages.Welcome, mine: Identity) -> tuple[str, ...]:
        """Checks who has answered, and what it holds. Returns what differs because an operator lets it, in words.

        Raises:
            PeerError: if it is not who the registry said it was.
            IncompatiblePeerError: if the caches cannot be exchanged.
        """
        registration = self.registration
        if (welcome.engine, welcome.coordinates) != (registration.engine, registration.coordinates):
            raise PeerError(
                f"at {self.address} the registry named rank {self.number} of {registration.engine!r}, but rank "
                f"{welcome.coordinates.engine_rank} of {welcome.engine!r} answered"
            )
        name = f"prefill rank {self.number} of {registration.engine!r}"
        if welcome.transport != mine.transport:
            raise IncompatiblePeerError(
                f"transport: {name} uses {welcome.transport}, this decode rank {mine.transport}; KVFERRY_TRANSPORT, "
                "and whether KVFERRY_PATH is mapped, must be the same"
            )
        check_required(welcome.requires, mine.features, peer=name)
        check_token_share(welcome.layout, welcome.coordinates)
        tolerated = check_same_fingerprint(
            welcome.fingerprint,
            mine.fingerprint,
            may_differ=mine.may_differ,
            prefill_name=f"prefill engine {registration.engine!r}",
            decode_name="this decode rank",
        )
        check_exchangeable(welcome.layout, mine.layout, source_name=name, destination_name="this decode rank")
        return tolerated

    def send(self, message: field_types.Message) -> Send:
        """Addresses a message to it."""
        return Send(self.address, message, self.version)

    def ping(self) -> Send:
        """Makes a heartbeat."""
        return self.send(self.channel.ping() if self.channel is not None else messages.Ping())

    def answered(self, pong: messages.Pong) -> list[Send]:
        """Takes the answer to a heartbeat: what it says of the messages either way.

        Raises:
            PeerDisconnectedError: if the rank does not have this endpoint attached any more.
        """
        if not pong.attached or pong.endpoint != self.endpoint:
            raise PeerDisconnectedError(
                f"prefill rank {self.number} of {self.registration.engine!r} does not know this endpoint any more: "
                f"{pong.reason or 'it was restarted, or had lost it'}"
            )
        if self.channel is None or pong.epoch != self.channel.epoch:
            return []
        return [self.send(each) for each in self.channel.answered(pong)]

    def broke(self) -> list[Send]:
        """A connection broke: what was on its way may be lost, either way."""
        return [self.send(each) for each in self.channel.broke()] if self.channel is not None else []
