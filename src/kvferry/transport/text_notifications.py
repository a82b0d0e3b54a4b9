"""Notifications of any bytes and any length, over a transport that carries short pieces of plain text.

A notification becomes as many pieces as it takes, each a text of ASCII letters, digits and `.+/=`. They may arrive in
any order, those of several notifications among one another.
"""

from __future__ import annotations

import base64
import itertools
import re
import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from kvferry.errors import MessageError, TransportError, quoted
from kvferry.loggers import logger_of

log = logger_of(__name__)

_SERIAL_DIGITS = 16
_MOST_PIECES = 999_999
_HEADER = _SERIAL_DIGITS + 2 * (1 + len(str(_MOST_PIECES))) + 1
_PIECE = re.compile(r"([0-9a-f]{16})\.([0-9]{1,6})\.([0-9]{1,6})\.([A-Za-z0-9+/]*={0,2})")
_COST = 128  # bytes that a piece takes beside its own, about

SHORTEST_PIECE = _HEADER + 4


@dataclass(slots=True)
class _Incomplete:
    """What has arrived of a notification.

    Attributes:
        num_pieces: how many there are in all.
        pieces: those that arrived, by their place.
        cost: bytes that they take here.
    """

    num_pieces: int
    pieces: dict[int, bytes] = field(default_factory=dict)
    cost: int = 0


@dataclass(slots=True)
class _Sender:
    """What one sender has begun, the oldest first, by serial number.

    Attributes:
        cost: bytes that all of it takes here.
    """

    begun: OrderedDict[str, _Incomplete] = field(default_factory=OrderedDict)
    cost: int = 0

    def drop(self, serial: str) -> _Incomplete:
        """Forgets one."""
        found = self.begun.pop(serial)
        self.cost -= found.cost
        return found


class TextNotifications:
    """Makes pieces of the notifications that one endpoint sends, and notifications of the pieces that it gets.

    Every method may be called from any thread.

    Attributes:
        senders: what has come of notifications that are not whole, by sender.
    """

    def __init__(self, *, longest: int, most_incomplete_bytes: int = 16 << 20) -> None:
        """Begins with nothing incomplete.

        Args:
            longest: most characters of a piece, at least `SHORTEST_PIECE`; the same on both sides.
            most_incomplete_bytes: most that is kept of what one sender has begun and not completed. Beyond it the
                oldest of them is lost.
        """
        if longest < SHORTEST_PIECE:
            raise ValueError(f"a piece of {longest} characters has no room for anything: {SHORTEST_PIECE} at least")
        self._longest = longest
        self._bytes_of_piece = (longest - _HEADER) // 4 * 3
        self._most = most_incomplete_bytes
        # Never used before, by no earlier endpoint of the same name either: their pieces must not be mixed.
        self._serials = itertools.count(secrets.randbits(4 * _SERIAL_DIGITS))
        # Guards the table and the count.
        self._lock = threading.Lock()
        self.senders: dict[str, _Sender] = {}

    def pieces(self, notification: bytes) -> list[str]:
        """Returns the texts to send, each of at most `longest` characters.

        Raises:
            TransportError: if the notification would need more pieces than can be numbered.
        """
        size = self._bytes_of_piece
        num_pieces = max(1, -(-len(notification) // size))
        if num_pieces > _MOST_PIECES:
            raise TransportError(f"a notification of {len(notification)} bytes is too long for pieces of {size}")
        with self._lock:
            serial = next(self._serials) % (1 << 4 * _SERIAL_DIGITS)
        return [
            f"{serial:0{_SERIAL_DIGITS}x}.{place}.{num_pieces}."
            + base64.b64encode(notification[place * size : (place + 1) * size]).decode()
            for place in range(num_pieces)
        ]

    def add(self, sender: str, text: str) -> bytes | None:
        """Takes a piece that arrived. Returns the notification that it completes, or None.

        Args:
            sender: where it came from: what one sender does harms no other's notifications.

        Raises:
            MessageError: if it is no piece.
        """
        match = _PIECE.fullmatch(text) if len(text) <= self._longest else None
        if match is None:
            raise MessageError(f"no piece of a notification: {quoted(ValueError(text))}")
        serial, place, num_pieces = f"{match[1]}.{match[3]}", int(match[2]), int(match[3])
        if not place < num_pieces:
            raise MessageError(f"piece {place} of {num_pieces} of a notification")
        try:
            data = base64.b64decode(match[4], validate=True)
        except ValueError as error:
            raise MessageError(f"a piece of a notification is no base64: {error}") from error
        with self._lock:
            whole = self._put(self.senders.setdefault(sender, _Sender()), sender, serial, place, num_pieces, data)
            if not self.senders[sender].begun:
                del self.senders[sender]
        return whole

    def _put(
        self, from_sender: _Sender, name: str, serial: str, place: int, num_pieces: int, data: bytes
    ) -> bytes | None:
        found = from_sender.begun.setdefault(serial, _Incomplete(num_pieces))
        if place not in found.pieces:
            found.pieces[place] = data
            found.cost += len(data) + _COST
            from_sender.cost += len(data) + _COST
        if len(found.pieces) == num_pieces:
            from_sender.drop(serial)
            return b"".join(found.pieces[each] for each in range(num_pieces))
        while from_sender.cost > self._most:
            lost = from_sender.drop(next(iter(from_sender.begun)))
            log.warning("%s left a notification of %d pieces incomplete, which is lost", name, lost.num_pieces)
        return None

    def forget(self, sender: str) -> None:
        """Forgets what a sender has left incomplete, since it will not go on."""
        with self._lock:
            self.senders.pop(sender, None)

    @property
    def num_incomplete(self) -> int:
        """How many notifications have begun to arrive."""
        with self._lock:
            return sum(len(sender.begun) for sender in self.senders.values())
