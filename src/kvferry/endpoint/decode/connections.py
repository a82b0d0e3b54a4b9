"""How a decode endpoint reaches prefill ranks: looks them up, connects, and tells them of rooms it will not open.

Connections are kept by address: links to the same rank share one. One can be lost without a word: whatever stands
between two hosts (NAT, a load balancer, connection tracking) forgets it, or drops one way, and TCP reports a break
after a quarter of an hour or never. But a rank owes answers, with every heartbeat at the latest. So a connection
through which none has come for a while is closed and made anew, which is like any other break; a rank that is frozen or
dead gets a few connections more, of which one is open at a time.

A room that fails before it was opened, since its link did or its caller gave it up, ends here at once; on the prefill
side it would wait for its deadline. So it is refused there, until every prefill rank that waits for it knows.

All of it runs on the endpoint's one thread, but for `look_up`, which blocks.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from kvferry.control.credentials import secret_hint
from kvferry.control.ends import ConnectingEnd, Connection
from kvferry.control.registry import Registry
from kvferry.endpoint.decode.context import DecodeContext
from kvferry.errors import KVFerryError, MessageError, PeerDisconnectedError, RegistryError
from kvferry.loggers import logger_of
from kvferry.protocol.links.link import Link, LinkKey, LinkState
from kvferry.protocol.wire import codec, messages
from kvferry.protocol.wire.field_types import Message
from kvferry.protocol.wire.registrations import EngineView, RankRegistration
from kvferry.protocol.wire.versions import SPOKEN
from kvferry.settings import Settings

log = logger_of(__name__)


def look_up(registry: Registry, key: LinkKey) -> tuple[EngineView | None, KVFerryError | None]:
    """Looks a group of ranks up, once. Blocks, and never raises.

    Returns:
        What the registry says of the engine, None if it does not answer; and why ranks of the group are missing, None
        if all are there or the engine has no such group.
    """
    try:
        view = registry.engine(key.engine)
        missing = _missing(view, key.dp_rank)
        if missing is None:
            return view, None
        return view, PeerDisconnectedError(f"the registry at {registry.url_for(key.engine)} knows {missing}")
    except RegistryError as error:
        return None, error
    except BaseException as error:  # a registry may be the caller's own
        unexpected = RegistryError(f"looking up {key.engine!r} failed: {type(error).__name__}: {error}")
        unexpected.__cause__ = error
        return None, unexpected


def why_not_ready(link: Link, settings: Settings) -> KVFerryError:
    """Returns the error that says what a link still waits for."""
    if link.state is LinkState.RESOLVING and link.problem is not None:
        return link.problem
    hint = ""
    if link.state is LinkState.GREETING:
        mine = secret_hint(has_secret=settings.has_secret)
        hint = f". Nobody answered, or whoever did has another secret: {mine}"
    return PeerDisconnectedError(
        f"prefill engine {link.key.engine!r}: still {link.state.value} after "
        f"{settings.bootstrap_timeout_s:g} s (KVFERRY_BOOTSTRAP_TIMEOUT_S){hint}"
    )


def why_gone(link: Link, instance: str) -> KVFerryError | None:
    """Returns the error of a room whose prefill engine was started anew since; None if it was not, or nobody knows.

    Args:
        instance: the start of the engine that has the request.
    """
    other = link.in_place_of(instance)
    if other is None:
        return None
    return PeerDisconnectedError(
        f"the start of prefill engine {link.key.engine!r} that has the request ({instance}) has gone: registered is "
        f"{other.instance}, with rank {other.engine_rank} at {other.control_address}; send the request there again"
    )


def _missing(view: EngineView, dp_rank: int) -> str | None:
    """Says how much of a data-parallel group is live; None if all of it is, or if the engine has no such group.

    What the other groups are doing does not matter: no request needs them.
    """
    if not view.registrations:
        return (
            f"0 of an unknown number of ranks of engine {view.engine!r}: nobody of that name is there, {_others(view)}"
        )
    sizes, live = view.registrations[0].coordinates, len(view.group(dp_rank))
    if dp_rank >= sizes.dp_size or live == sizes.group_size:
        return None
    group = f"data-parallel group {dp_rank} of " if sizes.dp_size > 1 else ""
    return f"{live} of {sizes.group_size} ranks of {group}engine {view.engine!r}"


def _others(view: EngineView) -> str:
    """Says which engines are registered where one is not."""
    if not view.others:
        return "and no other engine"
    more = view.num_others - len(view.others)
    return f"but {', '.join(map(repr, view.others))}" + (f" and {more} more" if more > 0 else "")


_ANSWERED = messages.Hello | messages.Ping | messages.AbortRoom | messages.RefuseRoom
"""What a rank owes an answer to. What else is sent is followed by one of these."""


@dataclass(slots=True)
class Line:
    """What there is to one address.

    Attributes:
        links: those that go there; none if only refusals do.
        attempt: the last to attach that was begun there.
        version: of the protocol, in which a message was last sent there.
        owes_answer: whether something was asked through the connection, and nothing has come since.
        silent_since: the first heartbeat with which that was so; None before.
    """

    connection: Connection
    links: list[Link] = field(default_factory=list)
    attempt: int = 0
    version: int = SPOKEN.oldest
    owes_answer: bool = False
    silent_since: float | None = None


class Connections:
    """Connections that are open, and which links go through each. For the endpoint's thread.

    Attributes:
        lines: by address.
    """

    def __init__(self, end: ConnectingEnd, endpoint: str) -> None:
        """Begins with none. What they are made with stays the caller's; `endpoint` is our own name."""
        self._end = end
        self._endpoint = endpoint
        self.lines: dict[str, Line] = {}

    def owns(self, connection: Connection) -> bool:
        """Whether a connection is still open."""
        line = self.lines.get(connection.address)
        return line is not None and line.connection is connection

    def through(self, address: str) -> list[Link]:
        """Returns the links to a rank at an address: the current ones first, then those that were given up."""
        line = self.lines.get(address)
        return sorted(line.links, key=lambda link: link.is_given_up) if line is not None else []

    def behind(self, address: str) -> Link | None:
        """Returns the current link to a rank at an address; None if there is none."""
        return next((link for link in self.through(address) if not link.is_given_up), None)

    def carries_messages_of(self, address: str, endpoint: str) -> bool:
        """Whether an endpoint has answered at an address: from no other may its messages come."""
        return any(link.address_of(endpoint) == address for link in self.through(address))

    def open(self, link: Link) -> None:
        """Makes sure that there is one to every rank of a link, for its attempt to attach.

        Raises:
            PeerDisconnectedError: if an address makes no sense.
        """
        for address in link.addresses:
            line = self._line(address)
            line.attempt = link.attempt
            if link not in line.links:
                line.links.append(link)

    def send(self, address: str, message: Message, version: int) -> None:
        """Sends a message, over a new connection if there is none.

        What cannot be sent is lost, as what a connection loses that breaks: most of it is sent again with a heartbeat.

        Args:
            version: of the protocol, in which to speak to the rank there.

        Raises:
            MessageError: if it cannot be encoded.
        """
        data = codec.encode(message, version)
        try:
            line = self._line(address)
            line.version = version
            line.owes_answer |= isinstance(message, _ANSWERED)
            line.connection.send(data)
        except PeerDisconnectedError as error:
            log.debug("%s to %s was lost: %s", type(message).__name__, address, error)

    def _line(self, address: str) -> Line:
        if address not in self.lines:
            self.lines[address] = Line(self._end.connect(address))
        return self.lines[address]

    # ---- connections that are lost without a word ----------------------------------------------------------------

    def record_answer(self, address: str) -> None:
        """Records that something has come from an address, by which its connection lives."""
        line = self.lines[address]
        line.owes_answer, line.silent_since = False, None

    def forgive(self, seconds: float, now: float) -> None:
        """Takes so many seconds off the silence of all connections; see `Link.forgive`."""
        for line in self.lines.values():
            if line.silent_since is not None:
                line.silent_since = min(now, line.silent_since + seconds)

    def renew_silent(self, now: float, limit_s: float) -> list[str]:
        """Makes the connections anew that have been silent for longer than the limit. To be called with heartbeats.

        Returns:
            Their addresses. What was on its way there or from there is lost, as when a connection breaks.
        """
        renewed = []
        for address, line in self.lines.items():
            if line.owes_answer and line.silent_since is None:
                line.silent_since = now
            elif line.silent_since is not None and now - line.silent_since > limit_s:
                try:
                    connection = self._end.connect(address)
                except PeerDisconnectedError as error:
                    log.warning("the connection to %s is silent and cannot be made anew yet: %s", address, error)
                    continue
                log.info("made the connection to %s anew: it was silent for %.1f s", address, now - line.silent_since)
                self._end.disconnect(line.connection)
                line.connection, line.owes_answer, line.silent_since = connection, False, None
                renewed.append(address)
        return renewed

    # ---- the end of a connection ---------------------------------------------------------------------------------

    def leave(self, link: Link) -> None:
        """Takes a link out that goes nowhere any more, and closes the connections that no other one uses."""
        named = {each.control_address for each in link.registrations}  # of refusals, whether or not it was greeted
        for address, line in list(self.lines.items()):
            if link in line.links or address in named:
                line.links = [each for each in line.links if each is not link]
                if not line.links:
                    self.hang_up(address)

    def close(self) -> None:
        """Closes all. May be called again."""
        for address in list(self.lines):
            self.hang_up(address)

    def hang_up_unused(self, named: Collection[str]) -> None:
        """Closes connections that no link uses, but for those that are named."""
        for address in [address for address, line in self.lines.items() if not line.links and address not in named]:
            self.hang_up(address)

    @property
    def are_some_unused(self) -> bool:
        """Whether there are connections that no link uses."""
        return not all(line.links for line in self.lines.values())

    def hang_up(self, address: str) -> None:
        """Sends a close message and closes the connection."""
        line = self.lines.pop(address)
        detach = messages.Detach(endpoint=self._endpoint, attempt=line.attempt)
        try:
            line.connection.send(codec.encode(detach, line.version))
        except PeerDisconnectedError as error:
            log.debug("no close message to %s: %s", address, error)
        self._end.disconnect(line.connection)


@dataclass(slots=True)
class Repetition:
    """When to send again what was not answered.

    Ever less often, since few messages are lost where no connection breaks; but often enough that a rank which was cut
    off, and is back, need not be waited for much longer than its silence would be.

    Attributes:
        until: when to give up on an answer. What is kept for another reason goes on.
        at: when to send it again.
        pause_s: how long to wait after that, in seconds.
        longest_s: beyond which that does not grow.
    """

    until: float
    at: float
    pause_s: float
    longest_s: float

    @classmethod
    def begun(cls, now: float, settings: Settings, *, keep_s: float) -> Repetition:
        """Begins when it was sent for the first time.

        Args:
            keep_s: how long to wait for an answer, in seconds.
        """
        first_s = settings.heartbeat_interval_s
        return cls(now + keep_s, now + first_s, 2 * first_s, settings.peer_timeout_s)

    def is_due(self, now: float, *, at_once: bool = False) -> bool:
        """Whether to send it again; then the next time is reckoned from now on.

        Args:
            at_once: whether it is due in any case: a connection broke, and may have lost it or the answer.
        """
        if not at_once and now < self.at:
            return False
        self.at, self.pause_s = now + self.pause_s, min(2 * self.pause_s, self.longest_s)
        return True


@dataclass(eq=False, slots=True)
class Refusal:
    """A room that this rank will not open.

    Attributes:
        link: through which it would have been opened.
        generation: distinguishes it from other refusals of the number.
        holder: as in `RefuseRoom`.
        again: when to tell ranks again that do not answer, and when to give up on them.
        answered: engine ranks that know.
    """

    room: int
    link: Link
    generation: int
    reason: str
    holder: int | None
    again: Repetition
    answered: set[int] = field(default_factory=set)

    @property
    def unanswered(self) -> list[RankRegistration]:
        """The ranks that were found so far and are still to answer."""
        return [each for each in self.link.registrations if each.engine_rank not in self.answered]

    @property
    def is_known_to_all(self) -> bool:
        """Whether every rank of the group has answered."""
        found = self.link.registrations
        return bool(found) and not self.unanswered and len(found) == found[0].coordinates.group_size


class Refusals:
    """The refusals of a decode endpoint that some prefill rank may not know of.

    Attributes:
        unheard: those refusals, by room.
    """

    def __init__(self, context: DecodeContext, connections: Connections) -> None:
        """Begins with none."""
        self._identity = context.identity
        self._connections = connections
        self._settings = context.settings
        self.unheard: dict[int, Refusal] = {}  # by room, the oldest first
        self._count_of: Counter[Link] = Counter()  # the same, counted by link

    def are_told_through(self, link: Link) -> bool:
        """Whether ranks of a link are still to hear of any."""
        return link in self._count_of

    def add(
        self, room: int, link: Link, *, generation: int, reason: str, now: float, holder: int | None = None
    ) -> None:
        """Refuses a room, and tells the prefill ranks that were found so far.

        Args:
            link: through which it would have been opened.
            generation: as in `RefuseRoom`; likewise the holder.
            reason: why, in words.
        """
        if not link.registrations and link.is_given_up:
            return  # nobody was found, or will be
        refusal = Refusal(
            room,
            link,
            generation,
            reason,
            holder,
            again=Repetition.begun(now, self._settings, keep_s=self._settings.bootstrap_timeout_s),
        )
        self.forget(room)  # the latest is what counts
        self.unheard[room] = refusal
        self._count_of[link] += 1
        while len(self.unheard) > self._settings.max_rooms:  # the oldest are dropped
            self.forget(next(iter(self.unheard)))
        self._tell(refusal)

    def link_looked_up(self, link: Link) -> None:
        """Tells ranks that have just been found what was refused before."""
        for refusal in self.unheard.values():
            if refusal.link is link:
                self._tell(refusal)

    def repeat(self, now: float, *, at_once: bool = False) -> None:
        """Tells again whoever has not answered for a while, and gives up on those that have not for long.

        Args:
            at_once: whether to tell them now: a connection broke, and may have lost it.
        """
        for room, refusal in list(self.unheard.items()):
            if now >= refusal.again.until:
                self.forget(room)
            elif refusal.again.is_due(now, at_once=at_once):
                self._tell(refusal)
        if self._connections.are_some_unused:  # of ranks that have answered, or are not found there any more
            told = {each.control_address for refusal in self.unheard.values() for each in refusal.unanswered}
            self._connections.hang_up_unused(told)

    def forget(self, room: int) -> None:
        """Stops telling that a room was refused: all know, or its number is used again."""
        refusal = self.unheard.pop(room, None)
        if refusal is not None:
            self._count_of[refusal.link] -= 1
            if not self._count_of[refusal.link]:
                del self._count_of[refusal.link]

    def take_answer(self, address: str, message: messages.Drained) -> bool:
        """Handles a prefill rank's answer. Returns whether it was the last one that a link waited for."""
        refusal = self.unheard.get(message.room)
        if refusal is None or refusal.generation != message.generation:
            return False
        ranks = {each.engine_rank: each.control_address for each in refusal.link.registrations}
        if ranks.get(message.writer) == address:
            refusal.answered.add(message.writer)
        if not refusal.is_known_to_all:
            return False
        self.forget(message.room)
        return not self.are_told_through(refusal.link)

    def _tell(self, refusal: Refusal) -> None:
        for registration in refusal.unanswered:
            version = self._identity.versions.shared_with(registration.spoken)
            if version is None:
                continue  # it would not understand
            message = messages.RefuseRoom(
                endpoint=registration.incarnation,
                engine=self._identity.engine,
                coordinates=self._identity.coordinates,
                room=refusal.room,
                generation=refusal.generation,
                reason=refusal.reason,
                holder=refusal.holder,
            )
            with contextlib.suppress(MessageError):  # one that no rank could read
                self._connections.send(registration.control_address, message, version)
