"""Rooms that requests of this rank's caller wait for, until it can open them: prefill ranks keep their caches.

They are said again with every heartbeat, all of them: what a prefill rank has heard of late counts, and nothing else.
So those of a rank that dies end by themselves. All of it runs on the decode endpoint's one thread.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.endpoint.decode.context import DecodeContext
from kvferry.endpoint.decode.links import Links
from kvferry.protocol.bounded import forget_oldest
from kvferry.protocol.links.link import LinkKey, LinkState
from kvferry.protocol.wire.field_types import MAX_EXPECTED
from kvferry.protocol.wire.messages import ExpectRooms


class ExpectedRooms:
    """The rooms that will be opened here later.

    Attributes:
        rooms: their prefill engines, the oldest first.
    """

    def __init__(self, context: DecodeContext, links: Links) -> None:
        """Begins with none."""
        self._settings = context.settings
        self._links = links
        self.rooms: dict[int, LinkKey] = {}

    def add(self, room: int, key: LinkKey, now: float) -> None:
        """Takes a room that will be opened, or refused."""
        self.rooms[room] = key
        forget_oldest(self.rooms, self._settings.max_rooms)
        self._links.to(key, now + self._settings.bootstrap_timeout_s)

    def forget(self, room: int) -> None:
        """Drops a room that is opened or refused."""
        self.rooms.pop(room, None)

    def say(self, now: float) -> None:
        """Tells the prefill ranks that are connected, and has the others connected."""
        for key, messages in self._by_engine().items():
            link = self._links.to(key, now + self._settings.bootstrap_timeout_s)
            if link.state is LinkState.READY:
                for message in messages:
                    self._links.send_all(link.tell(message))

    def _by_engine(self) -> dict[LinkKey, Iterator[ExpectRooms]]:
        rooms: dict[LinkKey, list[int]] = {}
        for room, key in self.rooms.items():
            rooms.setdefault(key, []).append(room)
        return {key: _messages(each) for key, each in rooms.items()}


def _messages(rooms: list[int]) -> Iterator[ExpectRooms]:
    for start in range(0, len(rooms), MAX_EXPECTED):
        yield ExpectRooms(rooms=tuple(rooms[start : start + MAX_EXPECTED]))
