"""In which order messages come: what a link sends in each of its states, and transfers from their first message on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from proof.enumeration.automata import Event, Output
from proof.enumeration.decode_node import DecodeNode
from proof.enumeration.prefill_node import PrefillNode
from proof.enumeration.ranks import (
    ROOM,
    chunk_arrived,
    decode_identity,
    prefill_name,
    registration,
    staged_arrived,
    welcome,
)

from kvferry.layout import RankLayout
from kvferry.plan import Piece
from kvferry.protocol.links.link import Link, LinkKey, LinkState
from kvferry.protocol.links.rank_link import Send
from kvferry.protocol.transfer.states import ReceiverState, SenderState
from kvferry.protocol.wire import codec, messages
from kvferry.protocol.wire.field_types import Message, ProcessIdentity


class _NoRings:
    """Offers no staging memory."""

    def offer(self, endpoint: str, source: RankLayout, pieces: tuple[Piece, ...]) -> messages.Staging:
        return messages.Staging()

    def metadata(self) -> bytes:
        return b""

    def attached(self, endpoint: str) -> None:
        pass


def of_link() -> dict[LinkState, tuple[str, ...]]:
    """Returns the messages that a decode rank's link sends in each state: as it gets there, and with heartbeats."""
    link = Link(
        LinkKey("prefill", 0),
        decode_identity(0, 1),
        _NoRings(),
        next_attempt=lambda: 1,
        can_prove_end=lambda _: True,
        deadline=0.0,
    )
    attached = messages.Attached(endpoint=prefill_name(0), attempt=1, only_staged=True)
    opened = messages.OpenRoom(room=ROOM, generation=1, receivers=1, tokens=None, groups=())
    aborted = messages.AbortRoom(room=ROOM, generation=1, reason="the client left")
    expected = messages.ExpectRooms(rooms=(ROOM,))
    beside = ProcessIdentity(welcome(0, 1).process.machine, 1, 0)
    steps: tuple[Callable[[], list[Send]], ...] = (
        list,
        lambda: link.resolved((registration(0, 1),), 0.0),
        lambda: link.received(prefill_name(0), welcome(0, 1)),
        lambda: [
            *link.received(prefill_name(0), attached),
            *link.send(0, opened),
            *link.send_unnumbered(0, aborted),
            *link.tell(expected),
        ],
    )
    found: dict[LinkState, tuple[str, ...]] = {}
    for step in steps:
        found[link.state] = _names([*step(), *link.ask(0.0), *link.ask_whether_gone(beside)])
    return found


def _names(sends: Iterable[Send]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name_of(each.message) for each in sends))


def name_of(message: Message, *, is_up: bool = True) -> str:
    """Returns a message's name; of a numbered one that of its body."""
    if not isinstance(message, messages.Numbered):
        return type(message).__name__
    decode = codec.decode_numbered_to_prefill if is_up else codec.decode_numbered_to_decode
    return f"{type(decode(message.body)).__name__} (number {message.number})"


@dataclass(frozen=True, slots=True)
class Said:
    """A message of a transfer, when it is taken.

    Attributes:
        is_up: whether it goes to the prefill rank.
        message: its name.
        prefill: where the room then stands there; None before it is opened.
        decode: likewise.
    """

    is_up: bool
    message: str
    prefill: SenderState | None
    decode: ReceiverState | None


def of_transfer(*, aborts: bool = False) -> tuple[Said, ...]:
    """Returns the messages of a transfer of two chunks, the first written into pages, the second staged.

    Args:
        aborts: whether the decode side's caller aborts it while the first chunk is on its way.
    """
    return tuple(_Transfer(aborts=aborts).run())


class _Transfer:
    """A prefill and a decode rank, and what is on its way between them, which arrives in the order of sending."""

    def __init__(self, *, aborts: bool) -> None:
        self._aborts = aborts
        self._prefill = PrefillNode(0, 1, 1, 2)
        self._decode = DecodeNode(0, 1, 1)
        self._on_way: deque[tuple[bool, Event]] = deque()  # whether it is the prefill rank's event
        self._notified: deque[bytes] = deque()

    def run(self) -> Iterator[Said]:
        self._do(is_up=False, event=("attach",))
        yield from self._deliver()
        self._do(is_up=True, event=("open",))
        self._do(is_up=True, event=("submit",))
        self._do(is_up=False, event=("open",))
        yield from self._deliver()

    def _deliver(self) -> Iterator[Said]:
        while self._on_way:
            is_up, event = self._on_way.popleft()
            if event[0] == "landed" and self._aborts:
                self._aborts = False
                self._on_way.appendleft((is_up, event))
                self._do(is_up=False, event=("abort",))
                self._on_way.rotate(-1)  # the write goes on meanwhile
                continue
            self._do(is_up=is_up, event=event)
            name = self._name(is_up, event)
            if name:
                yield Said(is_up, name, self._prefill.room_state, self._decode.room_state)

    def _name(self, is_up: bool, event: Event) -> str:
        match event:
            case ("message", _, data):
                message = codec.decode_to_prefill(data) if is_up else codec.decode_to_decode(data)
                return name_of(message, is_up=is_up)
            case ("note", _, data):
                return type(codec.decode_notification(data)).__name__
        return ""

    def _do(self, *, is_up: bool, event: Event) -> None:
        node = self._prefill if is_up else self._decode
        for output in node.handle(event):
            self._carry(output)

    def _carry(self, output: Output) -> None:
        match output:
            case ("up", _, data):
                self._on_way.append((True, ("message", 0, data)))
            case ("down", _, data):
                self._on_way.append((False, ("message", 0, data)))
            case ("write", _, generation, sequence, None):
                note = chunk_arrived(0, generation, sequence)
                self._on_way += [(True, ("landed", 0, sequence)), (False, ("note", 0, note))]
                self._on_way.appendleft((False, ("bytes", 0, generation, sequence)))
            case ("write", _, generation, sequence, span):
                note = staged_arrived(0, generation, sequence, span)
                self._on_way += [(True, ("landed", 0, sequence)), (False, ("note", 0, note))]
            case ("notify", _, data):
                self._on_way.append((False, ("note", 0, data)))
