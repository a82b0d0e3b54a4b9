"""Through which connection a decode rank is reached that may have made several, and which others may claim to be.

A connection is identified by the rank's name and a number, which is higher for every one that the rank makes. The
youngest is the right one: what an older one had left may come later. But where there is no secret anybody can connect
under a name, and with any number. So whoever has sent something last is sent to as well: nobody keeps the answers from
who asks, and a message that is for the other one changes nothing there.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from kvferry.protocol.bounded import remember

_MARK = "~"  # between the name and the number
_MOST = 1 << 16


def identity_of(name: str, number: int) -> str:
    """Returns what the connection of that number calls itself."""
    return f"{name}{_MARK}{number}"


class _Route(NamedTuple):
    """Two connections, or one.

    Attributes:
        number: of the youngest that has sent anything.
        youngest: its identity.
        last: of the one that has sent something last.
    """

    number: int
    youngest: str
    last: str


class ReplyRoutes:
    """The connections of decode ranks that have sent anything. For the thread that has them."""

    def __init__(self) -> None:
        """Begins with none."""
        self._of: OrderedDict[str, _Route] = OrderedDict()  # by name

    def sender_of(self, identity: str) -> str:
        """Takes the identity of a connection that has sent something. Returns whose it is."""
        name, mark, digits = identity.rpartition(_MARK)
        if not mark or not digits.isdigit():
            name, digits = identity, "0"
        number, known = int(digits), self._of.get(name)
        if known is None or known.number <= number:
            known = _Route(number, identity, identity)
        remember(self._of, name, known._replace(last=identity), _MOST)
        return name

    def to(self, name: str) -> list[str]:
        """Returns the identities of the connections through which to send to whoever has a name."""
        route = self._of.get(name)
        return [] if route is None else list(dict.fromkeys((route.youngest, route.last)))

    def lost(self, name: str, identity: str) -> None:
        """Takes out a connection that is not there any more."""
        others = [each for each in self.to(name) if each != identity]
        route = self._of.pop(name)
        if others:
            number = 0 if identity == route.youngest else route.number
            self._of[name] = _Route(number, *others, *others)
