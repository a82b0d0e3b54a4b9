"""Keeps a decode endpoint's links alive, and gives up those to prefill ranks that are silent or dead.

With every heartbeat it is said which rooms requests of this rank's caller wait for, until it can open them: prefill
ranks keep their caches. All of them are said again each time: what a prefill rank has heard of late counts, and nothing
else. So those of a rank that dies end by themselves. All of it runs on the decode endpoint's one thread.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.endpoint.decode.context import DecodeContext
from kvferry.endpoint.decode.links import Links
from kvferry.endpoint.runtime.threads import LONGEST_S
from kvferry.errors import KVFerryError, PeerDisconnectedError
from kvferry.observe.logs import report_silence
from kvferry.observe.observer import Retry
from kvferry.protocol.bounded import forget_oldest
from kvferry.protocol.links.link import Link, LinkKey, LinkState
from kvferry.protocol.time_awake import Lateness
from kvferry.protocol.wire.field_types import MAX_EXPECTED
from kvferry.protocol.wire.messages import ExpectRooms


class Heartbeats:
    """Asks prefill ranks whether they are there, and knows which of them have not answered."""

    def __init__(self, context: DecodeContext, links: Links) -> None:
        """Begins with nobody silent."""
        self._settings = context.settings
        self._observer = context.observer
        self._links = links
        self._silent: frozenset[tuple[LinkKey, int]] = frozenset()  # prefill ranks whose silence was logged
        self._lateness = Lateness()

    def send(self, now: float, *, longest_sleep_s: float) -> None:
        """Sends a heartbeat to every rank, and gives up or starts over links to those that are silent or dead.

        Args:
            longest_sleep_s: by how much a heartbeat may come later than it should while all is well.
        """
        most_apart_s = 2 * self._settings.heartbeat_interval_s + longest_sleep_s + LONGEST_S
        late_s = self._lateness.seconds(now, most_apart_s=most_apart_s)
        self._links.connections.forgive(late_s, now)
        for link in self._links.current:
            link.forgive(late_s, now)
        self._report_silence(now)
        for link in self._links.current:
            try:
                self._check_processes(link, now)
                if (silent := link.silent_rank(now, self._settings.peer_timeout_s)) is not None:
                    why = f"has been silent for {silent[1]:.1f} s (KVFERRY_PEER_TIMEOUT_S)"
                    self._lost(link, silent[0], why, now)
                self._links.send_all(link.ask(now))
            except KVFerryError as error:
                self._links.fail(link, error, now)

    def renew_silent(self, now: float) -> bool:
        """Makes connections anew whose silence has lasted half as long as it may; returns whether there were any.

        The other half is for the new one to carry an answer, before the rank is given up.
        """
        renewed = self._links.connections.renew_silent(now, self._settings.peer_timeout_s / 2)
        for address in renewed:
            self._observer.retried(Retry.CONNECT)
            self.broke(address, now)
        return bool(renewed)

    def broke(self, address: str, now: float) -> None:
        """A connection broke: what was on its way through its links may be lost."""
        link = self._links.connections.behind(address)
        if link is None:
            return
        try:
            self._check_processes(link, now)
            if link.rank_at(address) is not None:
                self._links.send_all(link.broke(address, now))
        except KVFerryError as error:
            self._links.fail(link, error, now)

    def _report_silence(self, now: float) -> None:
        """Logs, once for each, which prefill ranks have fallen silent."""
        silent = {}
        for link in self._links.current:
            for rank in link.rank_statuses(now):
                if rank.silent_s > 2 * self._settings.heartbeat_interval_s:
                    silent[link.key, rank.rank] = rank
        for (key, number), rank in silent.items():
            if (key, number) not in self._silent:
                who = f"prefill rank {number} of {key.engine!r} ({rank.endpoint or 'not connected yet'})"
                report_silence(who, rank.endpoint, rank.silent_s)
        self._silent = frozenset(silent)

    def _check_processes(self, link: Link, now: float) -> None:
        """Looks whether the process of one of a link's ranks is known to have ended; raises as `_lost`."""
        for peer in link.peers:
            if self._links.quarantine.is_gone(peer.process):
                why = f"has ended: its process {peer.process.pid} is gone"
                self._lost(link, link.rank_of(peer.endpoint), why, now)
                return

    def _lost(self, link: Link, rank: int | None, why: str, now: float) -> None:
        """Starts a link over that has lost a rank before it was ready: its rooms wait for whoever is found then.

        Raises:
            PeerDisconnectedError: if it was ready, so that rooms rely on that rank.
        """
        if link.state is LinkState.READY:
            raise PeerDisconnectedError(f"prefill rank {rank} of {link.key.engine!r} {why}")
        self._links.start_over(link, now)


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
