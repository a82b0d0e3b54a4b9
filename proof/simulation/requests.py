"""The callers: requests that schedulers of both engines open, feed, abort and forget."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np

from kvferry.endpoint import DecodeEndpoint, PrefillEndpoint, Receiver, Sender
from kvferry.errors import UnknownRoomError
from kvferry.layout import Interval
from kvferry.protocol.transfer.states import TransferState
from kvferry.testing.probe import probe
from proof.simulation.memory import HEAD_DIM, HEADS, KINDS, MOST_TOKENS, Contents
from proof.simulation.processes import Process


@dataclass(slots=True, eq=False)
class RankSide(ABC):
    """A request on one rank.

    Attributes:
        pages: that its caller gave it.
        is_released: whether these are its caller's again, or nobody's.
        state: where it was seen to stand.
        held_since: since when it has stood there.
        longest_s: how long it may.
        last_state: where the law of states last saw it.
        is_refusing: whether its caller refuses the room instead of opening it.
        opened_at: when its caller opened the room.
        failed_at: when it was seen to have failed, or its caller refused it.
    """

    request: Request
    process: Process
    pages: list[int] = field(default_factory=list, kw_only=True)
    is_released: bool = field(default=False, kw_only=True)
    state: TransferState | None = field(default=None, kw_only=True)
    held_since: float = field(default=0.0, kw_only=True)
    longest_s: float = field(default=0.0, kw_only=True)
    last_state: TransferState = field(default=TransferState.BOOTSTRAPPING, kw_only=True)
    is_refusing: bool = field(default=False, kw_only=True)
    opened_at: float = field(default=0.0, kw_only=True)
    failed_at: float | None = field(default=None, kw_only=True)

    @property
    @abstractmethod
    def is_known(self) -> bool:
        """Whether the endpoint has a use for the room's number still: nobody may use it for another request."""

    @property
    def is_taken(self) -> bool:
        """Whether its endpoint takes the room also where it drains from now on."""
        return self.transfer is not None

    @property
    @abstractmethod
    def is_handed_in(self) -> bool:
        """Whether its caller has nothing more to give to the endpoint."""

    @property
    @abstractmethod
    def transfer(self) -> Sender | Receiver | None:
        """What its caller holds, once it has opened the room."""


@dataclass(slots=True, eq=False)
class SendSide(RankSide):
    """A request on one prefill rank.

    Attributes:
        chunks: pages of every chunk that was not handed in yet.
        sender: once its caller has opened the room.
        ranges: ranges of layers of the first of them that are still to be handed in.
        position: pages that were handed in.
        waits_since: since when its caller has waited for pages; None if it never did.
        may_be_late: whether that was so long that decode ranks may have given the request up.
    """

    chunks: list[int]
    ranges: list[Interval | None] = field(default_factory=list)
    sender: Sender | None = None
    position: int = 0
    waits_since: float | None = None
    may_be_late: bool = False

    @property
    def is_known(self) -> bool:
        """Whether decode ranks that come late would still be told how the room ended, or have refused it."""
        endpoint = self.process.endpoint
        has_come = self.sender is not None or self.is_refusing
        if not has_come or not self.process.is_alive or not isinstance(endpoint, PrefillEndpoint):
            return False
        table, room = probe(endpoint).table, self.request.room
        # Where its clock has jumped it has forgotten too soon how the room ended: whoever comes late waits for another.
        return table.holds(room) or (self.process.platform.skew_s > 0 and room in table.pending)

    @property
    def is_taken(self) -> bool:
        endpoint = self.process.endpoint
        assert isinstance(endpoint, PrefillEndpoint)
        return self.sender is not None or probe(endpoint).table.is_asked_for(self.request.room)

    @property
    def is_handed_in(self) -> bool:
        return self.sender is not None and not self.chunks

    @property
    def transfer(self) -> Sender | None:
        return self.sender


@dataclass(slots=True, eq=False)
class ReceiveSide(RankSide):
    """A request on one decode rank.

    Attributes:
        held: tokens that it has already.
        first_token: with which its pages begin.
        count: how many pages it needs.
        receiver: once its caller has opened the room.
        queued_until: when its caller has pages for it, at the earliest; until then the prefill side is to keep it.
        generation: of its room.
        is_checked: whether its success was seen.
    """

    held: int
    first_token: int
    count: int
    receiver: Receiver | None = None
    queued_until: float = 0.0
    generation: int = -1
    is_checked: bool = False

    @property
    def is_known(self) -> bool:
        """Whether the room is open still, or prefill ranks would still be told that it was refused."""
        endpoint = self.process.endpoint
        if not self.process.is_alive or not isinstance(endpoint, DecodeEndpoint):
            return False
        if self.request.room in probe(endpoint).rooms.refusals.unheard:
            return True
        if self.receiver is None:
            return False
        try:
            return endpoint.receiver(self.request.room) is self.receiver
        except UnknownRoomError:
            return False

    @property
    def is_handed_in(self) -> bool:
        return self.receiver is not None

    @property
    def transfer(self) -> Receiver | None:
        return self.receiver


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
        is_another_prompt: whether the prefill side has computed another prompt than the decode side's, of as many
            tokens.
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
    is_another_prompt: bool = False

    @property
    def computed(self) -> Contents:
        """What the prefill side has computed."""
        return np.invert(self.contents) if self.is_another_prompt else self.contents

    def depends_on(self, *, on_prefill: bool) -> dict[str, bytes]:
        """What a side says that its request's cache depends on."""
        is_other = on_prefill and self.is_another_prompt
        return {"prompt": b"another" if is_other else b"prompt %d" % self.number}

    @property
    def queued_until(self) -> float:
        """When the decode side has pages for it on all ranks, at the earliest."""
        return max(side.queued_until for side in self.receivers)

    @property
    def sides(self) -> list[RankSide]:
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
    tokens = draw.choice([1, 3, 4, 7, draw.randint(1, MOST_TOKENS)])
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


@dataclass(frozen=True, slots=True, eq=False)
class Computing:
    """A model computes layers of pages.

    Attributes:
        position: how many pages of the request come before them.
        until: when it has computed them.
    """

    side: SendSide
    pages: list[int]
    layers: Interval
    position: int
    until: float

    def begin(self) -> None:
        """Nothing is there yet."""
        self.side.process.pool.is_to_compute(self.pages, self.layers)

    def end(self) -> None:
        """All is there; nothing if somebody else has the pages by now."""
        pool = self.side.process.pool
        if all(pool.owners[page] is self.side for page in self.pages):
            pool.fill(self.pages, self.side.request.computed, self.position * pool.shape.page_tokens, self.layers)

    def is_over(self) -> bool:
        """Whether it is there."""
        return self.side.process.pool.has_computed(self.pages, self.layers)
