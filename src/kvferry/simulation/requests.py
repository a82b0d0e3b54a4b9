"""The callers: requests that schedulers of both engines open, feed, abort and forget."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from kvferry.endpoint import DecodeEndpoint, PrefillEndpoint, Receiver, Sender
from kvferry.errors import UnknownRoomError
from kvferry.protocol.states import TransferState
from kvferry.simulation.memory import HEAD_DIM, HEADS, KINDS, Contents
from kvferry.simulation.processes import Process


@dataclass(slots=True, eq=False)
class SendSide:
    """A request on one prefill rank.

    Attributes:
        chunks: pages of every chunk that was not handed in yet.
        sender: once its caller has opened the room.
        position: pages that were handed in.
        state, held_since: where it was seen to stand, and since when.
    """

    request: Request
    process: Process
    chunks: list[int]
    pages: list[int] = field(default_factory=list)
    sender: Sender | None = None
    position: int = 0
    is_released: bool = False
    held_since: float = 0.0
    state: TransferState | None = None

    @property
    def is_known(self) -> bool:
        """Whether the endpoint would still tell decode ranks that come late how the room ended."""
        endpoint = self.process.endpoint
        if self.sender is None or not self.process.is_alive or not isinstance(endpoint, PrefillEndpoint):
            return False
        return self.request.room in endpoint._table.failed_alone

    @property
    def transfer(self) -> Sender | None:
        """What its caller holds."""
        return self.sender


@dataclass(slots=True, eq=False)
class ReceiveSide:
    """A request on one decode rank.

    Attributes:
        held: tokens that it has already.
        first_token: with which its pages begin.
        generation: of its room.
        state, held_since: where it was seen to stand, and since when.
    """

    request: Request
    process: Process
    held: int
    first_token: int
    count: int
    pages: list[int] = field(default_factory=list)
    receiver: Receiver | None = None
    generation: int = -1
    is_released: bool = False
    is_checked: bool = False
    held_since: float = 0.0
    state: TransferState | None = None

    @property
    def is_known(self) -> bool:
        """Whether the endpoint still has a use for the room: nobody may use its number for another request."""
        endpoint = self.process.endpoint
        if self.receiver is None or not self.process.is_alive or not isinstance(endpoint, DecodeEndpoint):
            return False
        try:
            return endpoint.receiver(self.request.room) is self.receiver
        except UnknownRoomError:
            return False

    @property
    def transfer(self) -> Receiver | None:
        """What its caller holds."""
        return self.receiver


AnySide: TypeAlias = SendSide | ReceiveSide


@dataclass(slots=True, eq=False)
class Request:
    """One request.

    Attributes:
        number: of all requests of the world.
        room: its number on both sides.
        tokens: how many it has.
        contents: what its cache holds.
        excuse: why it need not succeed; empty as long as it must.
        is_abandoned: whether somebody never comes. Then nobody may use its number for another.
    """

    number: int
    room: int
    prefill: str
    decode: str
    tokens: int
    contents: Contents
    senders: list[SendSide] = field(default_factory=list)
    receivers: list[ReceiveSide] = field(default_factory=list)
    excuse: str = ""
    is_abandoned: bool = False

    @property
    def sides(self) -> list[AnySide]:
        """On every rank of both engines."""
        return [*self.senders, *self.receivers]

    def __str__(self) -> str:
        return f"request {self.number} (room {self.room})"

    @property
    def aux(self) -> bytes:
        """Its aux data."""
        return b"aux %d" % self.number

    @property
    def is_over(self) -> bool:
        """Whether no side has to do with it any more."""
        return (
            not self.is_abandoned
            and all(side.is_released for side in self.sides)
            and not any(side.is_known for side in self.sides)
        )

    def excused(self, why: str) -> None:
        """Says that it may fail."""
        self.excuse = self.excuse or why


def new_request(
    number: int, room: int, prefill: list[Process], decode: list[Process], layers: int, draw: random.Random
) -> Request:
    """A request between two engines, with everything about it drawn."""
    tokens = draw.choice([1, 3, 4, 7, draw.randint(1, 12)])
    contents = np.frombuffer(draw.randbytes(KINDS * layers * tokens * HEADS * HEAD_DIM), np.uint8)
    request = Request(
        number,
        room,
        prefill[0].engine,
        decode[0].engine,
        tokens,
        contents.reshape(KINDS, layers, tokens, HEADS, HEAD_DIM),
    )
    page_tokens = prefill[0].pool.shape.page_tokens
    count = -(-tokens // page_tokens)
    parts = draw.randint(1, min(3, count))
    ends = [*sorted(draw.sample(range(1, count), parts - 1)), count]
    chunks = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    request.senders = [SendSide(request, process, list(chunks)) for process in prefill]
    held = draw.choice([0, 0, draw.randint(0, tokens)])
    page_tokens = decode[0].pool.shape.page_tokens
    first = held // page_tokens
    count = -(-tokens // page_tokens) - first if held < tokens else 0
    request.receivers = [ReceiveSide(request, process, held, first * page_tokens, count) for process in decode]
    return request
