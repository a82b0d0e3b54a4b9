"""Rooms that a decode rank will not open, until every prefill rank that waits for them knows.

A room that fails before it was opened, since its link did or its caller gave it up, ends here at once; on the prefill
side it would wait for its deadline. All of it runs on the decode endpoint's one thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass, field

from kvferry.control.ends import Connection
from kvferry.endpoint.links import Links
from kvferry.errors import KVFerryError
from kvferry.protocol import messages
from kvferry.protocol.bounded import forget_oldest
from kvferry.protocol.link import Identity, Link
from kvferry.protocol.registrations import RankRegistration


@dataclass(eq=False, slots=True)
class Refusal:
    """A room that this rank will not open.

    Attributes:
        link: through which it would have been opened.
        generation: distinguishes it from other refusals of the number.
        holder: as in `RefuseRoom`.
        until: when to give up on ranks that do not answer.
        answered: engine ranks that know.
    """

    room: int
    link: Link
    generation: int
    reason: str
    holder: int | None
    until: float
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
    """The refusals of a decode endpoint that some prefill rank may not know of."""

    def __init__(self, identity: Identity, links: Links, *, keep_s: float, most: int) -> None:
        """Begins with none.

        Args:
            keep_s: how long a rank is told that does not answer, in seconds.
            most: how many are kept; the oldest are dropped.
        """
        self._identity = identity
        self._links = links
        self._keep_s = keep_s
        self._most = most
        self._refusals: dict[tuple[int, int], Refusal] = {}  # by room and generation, the oldest first

    @property
    def all(self) -> Collection[Refusal]:
        """Those that some rank may not know of."""
        return self._refusals.values()

    @property
    def links(self) -> set[Link]:
        """Links to ranks that are still to hear of any."""
        return {refusal.link for refusal in self._refusals.values()}

    def holds(self, room: int) -> bool:
        """Whether a prefill rank may still be told that a room was refused."""
        return any(number == room for number, _ in self._refusals)

    def add(
        self, room: int, link: Link, *, generation: int, reason: str, now: float, holder: int | None = None
    ) -> None:
        """Refuses a room, and tells the prefill ranks that were found so far.

        Args:
            link: through which it would have been opened.
            generation: as in `RefuseRoom`; likewise the holder.
            reason: why, in words.
        """
        refusal = Refusal(room, link, generation, reason, holder, until=now + self._keep_s)
        self._refusals[room, generation] = refusal
        forget_oldest(self._refusals, self._most)
        self._tell(refusal)

    def link_looked_up(self, link: Link) -> None:
        """Tells ranks that have just been found what was refused before."""
        for refusal in self._refusals.values():
            if refusal.link is link:
                self._tell(refusal)

    def repeat(self, now: float) -> None:
        """Tells again whoever has not answered, and gives up on those that have not for long."""
        for key, refusal in list(self._refusals.items()):
            if now >= refusal.until:
                del self._refusals[key]
            else:
                self._tell(refusal)

    def forget(self, room: int) -> None:
        """Stops refusing a number that is used again."""
        for key in [key for key in self._refusals if key[0] == room]:
            del self._refusals[key]

    def take_answer(self, channel: Connection, message: messages.Drained) -> bool:
        """Handles a prefill rank's answer. Returns whether it was the last one to a refusal."""
        refusal = self._refusals.get((message.room, message.generation))
        if refusal is None:
            return False
        ranks = {each.engine_rank: each.control_address for each in refusal.link.registrations}
        if ranks.get(message.writer) == channel.address:
            refusal.answered.add(message.writer)
        if not refusal.is_known_to_all:
            return False
        del self._refusals[message.room, message.generation]
        return True

    def _tell(self, refusal: Refusal) -> None:
        for registration in refusal.unanswered:
            if registration.protocol_version != messages.PROTOCOL_VERSION:
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
            with contextlib.suppress(KVFerryError):  # with the next heartbeat, again
                self._links.tell(registration, message)
