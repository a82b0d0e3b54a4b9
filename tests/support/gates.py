"""Places in a rank where a test can hold it up: the thread that comes there waits until the gate is opened.

So a fault strikes at a known step of the protocol. A gate holds up only what its key names, such as one room.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.support.real_transport import REAL

from kvferry.endpoint.decode.arrivals import ScatterTask
from kvferry.endpoint.prefill import decode_ranks
from kvferry.endpoint.prefill.room import SendingRoom
from kvferry.protocol.wire.codec import decode_notification


@dataclass(frozen=True, slots=True)
class _Place:
    owner: Any
    name: str
    key: Callable[..., Any]


PLACES = {
    # On a prefill rank: a decode rank wants to attach. By that rank's engine.
    "attach": _Place(decode_ranks, "attach", lambda message, **_: message.engine),
    # On a prefill rank: everything is written, and the receiver is to be told. By room.
    "finish": _Place(REAL, "notify", lambda _, peer, data: decode_notification(data).room),
    # On a prefill rank: a decode rank has given a room up. By room.
    "abort": _Place(SendingRoom, "aborted", lambda room, *_: room.room),
    # On a decode rank: a part is in staging memory and belongs into its pages. By room.
    "scatter": _Place(ScatterTask, "run", lambda task, _: task.room.room),
}


@dataclass(slots=True)
class _Gate:
    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)


class Gates:
    """The gates of one process."""

    def __init__(self) -> None:
        self._closed: dict[tuple[str, Any], _Gate] = {}
        self._guarded: set[str] = set()

    def shut(self, place: str, key: Any) -> None:
        """From now on, whoever comes there with that key waits."""
        self._closed[place, key] = _Gate()
        if place not in self._guarded:
            self._guarded.add(place)
            self._guard(place)

    def reached(self, place: str, key: Any, timeout_s: float) -> bool:
        """Waits until somebody waits there."""
        return self._closed[place, key].reached.wait(timeout_s)

    def open_all(self) -> None:
        """Lets everybody go on."""
        for gate in self._closed.values():
            gate.opened.set()
        self._closed.clear()

    def _guard(self, place: str) -> None:
        found = PLACES[place]
        original = getattr(found.owner, found.name)

        def guarded(*arguments: Any, **named: Any) -> Any:
            gate = self._closed.get((place, found.key(*arguments, **named)))
            if gate is not None:
                gate.reached.set()
                gate.opened.wait()
            return original(*arguments, **named)

        setattr(found.owner, found.name, guarded)
