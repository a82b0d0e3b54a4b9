"""In which states a room sends each message, and takes it: by all that its machine can be made to do.

One room with one peer on either side, two chunks, checksums: every event in every state that can be reached so. What
each command of a machine sends is what `endpoint/prefill/rooms.py` and `endpoint/decode/room.py` make of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias, TypeVar

import numpy as np
from proof.enumeration.automata import Automaton, Comparison, Event, Output
from proof.enumeration.ranks import DEADLINES, PAGE_TOKENS, ROOM, decode_name, decode_rank, layout

from kvferry.errors import PeerDisconnectedError, TransportError
from kvferry.plan import route_between
from kvferry.plan.requests.chunks import Chunk, ChunkPart
from kvferry.plan.requests.demands import GroupRequest
from kvferry.plan.requests.moves import ReceiverRequest
from kvferry.plan.requests.page_numbers import PageNumbers
from kvferry.protocol.transfer import events
from kvferry.protocol.transfer.receiver import ReceiverMachine
from kvferry.protocol.transfer.sender import SenderMachine
from kvferry.protocol.transfer.states import ReceiverState, SenderState
from kvferry.protocol.wire import messages
from kvferry.protocol.wire.field_types import Message

State: TypeAlias = SenderState | ReceiverState
Moves: TypeAlias = dict[type[Message], dict[tuple[State, State], None]]
"""By message, from which state to which a room moves as it sends it or takes it; in the order in which they are met."""

SENDS: Mapping[type, tuple[type[Message], ...]] = {
    events.Write: (messages.ChunkArrived, messages.StagedArrived),
    events.SendFinish: (messages.WriterFinished,),
    events.SendFailed: (messages.RoomFailed,),
    events.SendDrained: (messages.Drained,),
    events.SendOpen: (messages.OpenRoom,),
    events.SendAbort: (messages.AbortRoom,),
    events.SendVerified: (messages.RoomVerified,),
}
"""What the commands of either machine send. A write's notification follows the bytes."""

_CHUNKS = 2
_LATE = float("inf")
_NAME = decode_name(0)
_GENERATION = 1

NodeT = TypeVar("NodeT", "_Sending", "_Receiving")


def moves() -> tuple[Moves, Moves]:
    """Returns how rooms move as they send each message, and as they take it."""
    sent, taken = Moves(), Moves()
    _explore(_Sending(), _Sending.EVENTS, sent, taken)
    _explore(_Receiving(), _Receiving.EVENTS, sent, taken)
    return sent, taken


def _explore(first: NodeT, every: Mapping[str, type[Message] | None], sent: Moves, taken: Moves) -> None:
    automaton, comparison = Automaton[NodeT](), Comparison()
    key = automaton.property(lambda node: comparison.key(node.machine))
    state = automaton.property(lambda node: node.machine.detailed_state)
    automaton.number(first)
    number = 0
    while number < len(automaton.states):
        for name, message in every.items():
            after, outputs = automaton.step(number, (name,))
            for before_it, after_it, command in outputs:
                for each in SENDS.get(command, ()):
                    sent.setdefault(each, {})[before_it, after_it] = None
            if message is not None and (outputs or key(number) != key(after)):
                taken.setdefault(message, {})[state(number), state(after)] = None
        number += 1


class _Sending:
    """A prefill rank's room, what it writes, and what has failed of that."""

    EVENTS: Mapping[str, type[Message] | None] = {
        "opened": messages.OpenRoom,
        "aborted": messages.AbortRoom,
        "refused": messages.RefuseRoom,
        "verified": messages.RoomVerified,
        **dict.fromkeys(("submit", "written", "fails", "settles", "lost", "abort", "late")),
    }

    def __init__(self) -> None:
        self.machine = SenderMachine(ROOM, rank=0, deadlines=DEADLINES, now=0.0)
        self.has_opened = self.has_finished = False
        self.submitted = 0
        self.writes: list[int] = []
        self.failing: list[int] = []

    def handle(self, event: Event) -> list[Output]:
        """Takes an event; nothing happens where it cannot be."""
        return list(self._handle(event[0]))

    def _handle(self, name: str) -> Iterator[Output]:
        match name:
            case "opened":
                self.has_opened = True
                yield from self._apply(_opened())
            case "aborted" | "refused":
                yield from self._apply(events.ReceiverMessage(_NAME, _SAID[name]))
            case "verified" if self.has_finished:
                yield from self._apply(events.ReceiverMessage(_NAME, _SAID[name]))
            case "submit" if self.submitted < _CHUNKS:
                self.submitted += 1
                yield from self._apply(events.ChunkSubmitted(_chunk(self.submitted - 1)))
            case "written" if self.writes:
                yield from self._apply(events.WriteDone(_NAME, self.writes.pop(0)))
            case "fails" if self.writes:
                self.failing.append(self.writes.pop(0))
                yield from self._apply(events.WriteFailed(_NAME, self.failing[-1], TransportError("it broke"), True))
            case "settles" if self.failing:
                yield from self._apply(events.WriteFailed(_NAME, self.failing.pop(0), TransportError("it broke")))
            case "lost" if self.has_opened:
                yield from self._apply(events.ReceiverLost(_NAME, PeerDisconnectedError("silent for too long")))
            case "abort":
                yield from self._apply(events.AbortRequested("the client left"))
            case "late":
                yield from self._apply(events.Tick(), now=_LATE)

    def _apply(self, event: events.SenderEvent, now: float = 0.0) -> Iterator[Output]:
        before = self.machine.detailed_state
        commands = self.machine.handle(event, now)
        for command in commands:
            yield before, self.machine.detailed_state, type(command)
        for command in commands:
            match command:
                case events.Write():
                    self.writes.append(command.sequence)
                case events.SendFinish():
                    self.has_finished = True
                    yield from self._apply(events.FinishSent(_NAME))
                case events.AwaitTurn():
                    yield from self._apply(events.TurnCame())
                case _:
                    pass


class _Receiving:
    """A decode rank's room, and what is being put into its pages."""

    EVENTS: Mapping[str, type[Message] | None] = {
        "chunk": messages.ChunkArrived,
        "part": messages.StagedArrived,
        "finished": messages.WriterFinished,
        "failed": messages.RoomFailed,
        "drained": messages.Drained,
        "drained after failure": messages.Drained,
        **dict.fromkeys(("connected", "connect failed", "placed", "settled", "heartbeat", "abort", "late")),
    }

    def __init__(self) -> None:
        self.machine = ReceiverMachine(ROOM, rank=0, deadlines=DEADLINES, now=0.0)
        self.arrived = 0
        self.at_pages: list[int] = []
        self.settles = False

    def handle(self, event: Event) -> list[Output]:
        """Takes an event; nothing happens where it cannot be."""
        return list(self._handle(event[0]))

    def _handle(self, name: str) -> Iterator[Output]:
        if self.machine.detailed_state is ReceiverState.BOOTSTRAPPING and self.EVENTS[name] is not None:
            return  # nobody has been asked to send
        match name:
            case "connected":
                yield from self._apply(_CONNECTED)
            case "connect failed":
                yield from self._apply(events.ConnectFailed(PeerDisconnectedError("silent for too long")))
            case "chunk" if self.arrived < _CHUNKS:
                self.arrived += 1
                yield from self._apply(
                    messages.ChunkArrived(room=ROOM, generation=_GENERATION, writer=0, sequence=self.arrived - 1)
                )
            case "part" if self.arrived < _CHUNKS:
                self.arrived += 1
                yield from self._apply(events.PartArrived(0, self.arrived - 1))
            case "placed" if self.at_pages:
                yield from self._apply(events.PartPlaced(0, self.at_pages.pop(0)))
            case "finished":
                yield from self._apply(
                    messages.WriterFinished(room=ROOM, generation=_GENERATION, writer=0, chunks=_CHUNKS)
                )
            case "failed":
                yield from self._apply(
                    messages.RoomFailed(
                        room=ROOM, generation=_GENERATION, writer=0, error="PageError", reason="no such page"
                    )
                )
            case "drained" | "drained after failure":
                yield from self._apply(events.SenderDrained(0, after_failure=name != "drained"))
            case "settled" if self.settles:
                self.settles = False
                yield from self._apply(events.SenderSettled(0))
            case "heartbeat" if self.machine.unanswered:
                yield self.machine.detailed_state, self.machine.detailed_state, events.SendAbort
            case "abort":
                yield from self._apply(events.AbortRequested("the client left"))
            case "late":
                yield from self._apply(events.Tick(), now=_LATE)

    def _apply(self, event: events.ReceiverEvent, now: float = 0.0) -> Iterator[Output]:
        before = self.machine.detailed_state
        for command in self.machine.handle(event, now):
            yield before, self.machine.detailed_state, type(command)
            if isinstance(command, events.Place) and isinstance(event, events.PartArrived):
                self.at_pages.append(event.sequence)
            self.settles |= isinstance(command, events.AwaitArrival)


_SAID: Mapping[str, messages.AbortRoom | messages.RefuseRoom | messages.RoomVerified] = {
    "aborted": messages.AbortRoom(room=ROOM, generation=_GENERATION, reason="the client left"),
    "refused": messages.RefuseRoom(
        room=ROOM,
        generation=_GENERATION,
        reason="no memory",
        endpoint="p0",
        engine=decode_rank(0, 1).engine,
        coordinates=decode_rank(0, 1).coordinates,
    ),
    "verified": messages.RoomVerified(room=ROOM, generation=_GENERATION),
}
"""What the decode rank may say of the room."""

_CHUNK = messages.ChunkArrived(room=ROOM, generation=_GENERATION, writer=0, sequence=0)
_FINISHED = messages.WriterFinished(room=ROOM, generation=_GENERATION, writer=0, chunks=_CHUNKS)
_FAILED = messages.RoomFailed(
    room=ROOM, generation=_GENERATION, writer=0, error="PageError", reason="the pool has no such page"
)
_CONNECTED = events.Connected(
    ranks=frozenset({0}),
    writers={0: frozenset({"kv"})},
    into_pages=frozenset({0}),
    aux_writer=0,
    verifies=True,
)


def _opened() -> events.ReceiverOpened:
    rank = decode_rank(0, 1)
    held = layout(rank.coordinates)
    pages = PageNumbers.of(np.arange(_CHUNKS))
    return events.ReceiverOpened(
        receiver=_NAME,
        generation=_GENERATION,
        expected_receivers=1,
        request=ReceiverRequest(
            tokens=None,
            wanted={"kv": GroupRequest("kv", 0, 0, _CHUNKS * PAGE_TOKENS, 0, pages)},
            routes=(route_between(held, "kv", held, "kv"),),
        ),
        sends_aux=True,
        rank=rank,
        verifies=True,
    )


def _chunk(number: int) -> Chunk:
    part = ChunkPart("kv", number, np.array([number], np.int64))
    return Chunk(number=number, parts=(part,), is_last=number == _CHUNKS - 1, aux=b"")
