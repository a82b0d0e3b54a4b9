"""Rooms that a decode rank will not open, until every prefill rank that waits for them knows.

A room that fails before it was opened, since its link did or its caller gave it up, ends here at once; on the prefill
side it would wait for its deadline. All of it runs on the decode endpoint's one thread.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field

from kvferry.endpoint.decode.connections import Connections
from kvferry.endpoint.decode.context import DecodeContext
from kvferry.errors import MessageError
from kvferry.protocol.links.link import Link
from kvferry.protocol.wire import messages
from kvferry.protocol.wire.registrations import RankRegistration
from kvferry.settings import Settings


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
