"""What both endpoints are made with, names, a transport, deadlines; and what both check of a room that is opened.

A drain has two parts. First everyone is told, and rooms are still taken for a while: gateways had sent requests here
before they saw it. Then no new room is taken, and the endpoint is drained once nothing is open. Which rooms are new is
said where they are opened (docs/drain.md).
"""

from __future__ import annotations

import operator
import os
import secrets
import threading
from collections.abc import Callable, Collection
from math import inf
from typing import SupportsIndex

import numpy as np

from kvferry.addresses import with_found_address
from kvferry.errors import (
    EndpointClosedError,
    EndpointDrainingError,
    QueueFullError,
    RoomExistsError,
    TransportUnavailableError,
    UsageError,
)
from kvferry.protocol.transfer.states import Deadlines
from kvferry.settings import Settings
from kvferry.transport import Transport
from kvferry.transport.chosen import available_transport_class, transport_class

_ROOM_LIMIT = 2**63
_LONGEST_IN_NAME = 24  # of the engine's name: registries and sockets limit how long an endpoint's may be


def endpoint_name(engine: str, engine_rank: int) -> str:
    """Makes a name for one start of one rank: readable, and never used before."""
    return f"{engine[:_LONGEST_IN_NAME]}-{engine_rank}-{os.getpid()}-{secrets.token_hex(8)}"


def create_transport(settings: Settings, name: str, *, writes: bool = True) -> Transport:
    """Makes the transport that the settings choose.

    Args:
        writes: whether its endpoint writes into peers' memory, and is never written to; else it is the other way round.

    Raises:
        SettingsError: if there is no such transport, or no address is found that peers could be told.
        TransportUnavailableError: if it is not installed.
    """
    try:
        return transport_class(settings.transport).from_settings(with_found_address(settings), name, writes=writes)
    except TransportUnavailableError:
        available_transport_class(settings.transport)  # says which other one is there, if this one's library is not
        raise


def deadlines(settings: Settings) -> Deadlines:
    """Reads the protocol's longest waits from the settings."""
    return Deadlines(
        bootstrap_s=settings.bootstrap_timeout_s,
        waiting_s=settings.waiting_timeout_s,
        write_s=settings.write_timeout_s,
    )


def check_may_open(
    room: int,
    open_rooms: Collection[int],
    *,
    most: int,
    who: str,
    is_closed: bool,
    refusal: EndpointDrainingError | None = None,
) -> None:
    """Raises unless a room may be opened.

    Args:
        open_rooms: those that are open.
        most: how many may be.
        who: the rank, as it stands in a message.
        is_closed: whether the endpoint was closed.
        refusal: why it is not taken, where the endpoint drains.

    Raises:
        EndpointClosedError: if it was.
        EndpointDrainingError: if there is a refusal.
        RoomExistsError: if the room is open.
        QueueFullError: if no other one may be.
    """
    if is_closed:
        raise EndpointClosedError(f"room {room}: the endpoint is closed")
    if refusal is not None:
        raise refusal
    if room in open_rooms:
        raise RoomExistsError(f"room {room} is already open on {who}")
    if len(open_rooms) >= most:
        raise QueueFullError(
            f"room {room}: {len(open_rooms)} rooms are open on {who} already (KVFERRY_MAX_ROOMS): open it when others "
            "have ended"
        )


def checked_room(room: SupportsIndex) -> int:
    """Returns the room number as a plain integer, which is what travels, if it is valid.

    Raises:
        UsageError: if it is no integer in [0, 2**63); NumPy's are integers too.
    """
    try:
        # NumPy's truth is an integer to releases of it before 2.3.
        number = -1 if isinstance(room, (bool, np.bool_)) else operator.index(room)
    except TypeError:
        number = -1
    if not 0 <= number < _ROOM_LIMIT:
        raise UsageError(f"room {room!r} is not an integer in [0, 2**63)")
    return number


class Draining:
    """The drain of one endpoint, which may not have begun. For any thread.

    Attributes:
        has_begun: whether the endpoint is to leave.
    """

    def __init__(self, who: str, now: Callable[[], float]) -> None:
        """Begins with no drain.

        Args:
            who: the endpoint's engine, for messages.
            now: the time, in seconds of a steady clock.
        """
        self._who = who
        self._now = now
        # Guards that of two calls the stricter counts, whichever came first.
        self._lock = threading.Lock()
        self._takes_rooms_until = inf
        self._ends_at = inf
        self._timeout_s = inf
        self.has_begun = False

    def begin(self, *, grace_s: float, timeout_s: float | None) -> bool:
        """Begins the drain. Called again, it can only hurry.

        Args:
            grace_s: for how long new rooms are still taken and waited for, in seconds; infinite for a caller that has
                rooms for all that its engine has accepted, and accepts no more: they are taken, and none waited for.
            timeout_s: after how long what is open is aborted, in seconds; None leaves that to the rooms' own deadlines.

        Returns:
            Whether this call has begun it.
        """
        now = self._now()
        with self._lock:
            is_first = not self.has_begun
            self._takes_rooms_until = min(self._takes_rooms_until, now + grace_s)
            if timeout_s is not None and now + timeout_s < self._ends_at:
                self._ends_at, self._timeout_s = now + timeout_s, timeout_s
            self.has_begun = True
            return is_first

    @property
    def takes_rooms(self) -> bool:
        """Whether new rooms are taken."""
        return not self.has_begun or self._now() < min(self._takes_rooms_until, self._ends_at)

    @property
    def awaits_none(self) -> bool:
        """Whether the endpoint has drained as soon as nothing is open: no new room is taken, or none is waited for."""
        return self.has_begun and (self._takes_rooms_until == inf or not self.takes_rooms)

    @property
    def is_overdue(self) -> bool:
        """Whether what is open has had its time."""
        return self.has_begun and self._now() >= self._ends_at

    def refusal(self, room: int) -> EndpointDrainingError:
        """Returns the error for a room that is not taken."""
        return EndpointDrainingError(f"room {room}: {self._who} is draining and takes no new requests: ask another one")

    @property
    def overdue(self) -> str:
        """Says why what is open is aborted."""
        return f"{self._who} drains, and this was still open after {self._timeout_s:g} s (KVFERRY_DRAIN_TIMEOUT_S)"
