"""A decode endpoint's connections to prefill ranks, by address: links to the same rank share one.

A connection can be lost without a word: whatever stands between two hosts (NAT, a load balancer, connection tracking)
forgets it, or drops one way, and TCP reports a break after a quarter of an hour or never. But a rank owes answers, with
every heartbeat at the latest. So a connection through which none has come for a while is closed and made anew, which
is like any other break; a rank that is frozen or dead gets a few connections more, of which one is open at a time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from kvferry.control.ends import ConnectingEnd, Connection
from kvferry.errors import PeerDisconnectedError
from kvferry.loggers import logger_of
from kvferry.protocol.links.link import Link
from kvferry.protocol.wire import codec, messages
from kvferry.protocol.wire.field_types import Message
from kvferry.protocol.wire.versions import SPOKEN

log = logger_of(__name__)

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
