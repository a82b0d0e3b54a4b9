"""States of a world of prefill and decode ranks, and moves between them: plain data, and the same in a few bytes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from struct import Struct
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from proof.enumeration.ranks import RingSpan


class Flying(NamedTuple):
    """A write on its way.

    Attributes:
        is_failed: whether it failed: its sender has been told, and will not be told anything more before `is_settled`.
        is_settled: whether its sender counts it as over. What had been sent of it may still arrive.
        has_landed: whether what had been sent of a failed one has arrived.
        reads_on: whether its sender was told so by its post, which raised: what was posted goes on, and is read when it
            lands.
        span: where in the receiver's ring; None where it goes to pages.
    """

    prefill: int
    decode: int
    generation: int
    sequence: int
    span: RingSpan | None
    is_failed: bool = False
    is_settled: bool = False
    has_landed: bool = False
    reads_on: bool = False


class Note(NamedTuple):
    """A notification on its way."""

    prefill: int
    decode: int
    data: bytes


class State(NamedTuple):
    """A state of the world.

    Attributes:
        prefills: numbers of the prefill nodes' states.
        decodes: likewise.
        up: messages on their way to a prefill rank, by decode and prefill rank.
        down: messages on their way back.
        late_up: messages on their way to a prefill rank with a connection that was given up.
        late_down: likewise.
        writes: on their way.
        notes: likewise.
        faults: how much may still go wrong.
    """

    prefills: tuple[int, ...]
    decodes: tuple[int, ...]
    up: tuple[tuple[bytes, ...], ...]
    down: tuple[tuple[bytes, ...], ...]
    late_up: tuple[tuple[bytes, ...], ...]
    late_down: tuple[tuple[bytes, ...], ...]
    writes: tuple[Flying, ...]
    notes: tuple[Note, ...]
    faults: int


class Move(NamedTuple):
    """What can happen in a state.

    Attributes:
        label: in words.
        source: who acts, or whose message arrives: its name.
        target: whom it is about.
        is_fault: whether it is something that goes wrong.
        state: the state that follows.
    """

    label: str
    source: str
    target: str
    is_fault: bool
    state: State


@dataclass(frozen=True, slots=True)
class Shape:
    """What is enumerated.

    Attributes:
        prefills: how many prefill ranks there are.
        decodes: how many decode ranks.
        chunks: of each request: the first is written to pages, the second through a ring, and so on.
        faults: how much may go wrong: cuts, noticed or not, messages that come twice, writes that fail, posts that
            raise, aborts, deadlines, links and decode ranks that are given up.
    """

    prefills: int
    decodes: int
    chunks: int
    faults: int

    def __str__(self) -> str:
        return f"{self.prefills} x {self.decodes} ranks, {self.chunks} chunks, {self.faults} faults"


KeyT = TypeVar("KeyT", bound=Hashable)


class _Numbered(Generic[KeyT]):
    """Values by number, each once."""

    def __init__(self) -> None:
        self.values: list[KeyT] = []
        self._numbers: dict[KeyT, int] = {}

    def number(self, value: KeyT) -> int:
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self.values)
            self.values.append(value)
        return number


_Line: TypeAlias = tuple[tuple[bytes, ...], tuple[bytes, ...], tuple[bytes, ...], tuple[bytes, ...]]


class Packing:
    """Packs states: what is on each line, and all that is on its way beside lines, becomes a number of four bytes.

    There are some thousands of each, and many millions of their combinations.
    """

    def __init__(self, shape: Shape) -> None:
        self._prefills = shape.prefills
        self._nodes = shape.prefills + shape.decodes
        self._lines: _Numbered[_Line] = _Numbered()
        self._others: _Numbered[tuple[tuple[Flying, ...], tuple[Note, ...], int]] = _Numbered()
        self._struct = Struct(f"<{self._nodes + shape.prefills * shape.decodes + 1}I")

    def pack(self, state: State) -> bytes:
        """Returns a state in a few bytes."""
        lines = map(self._lines.number, zip(state.up, state.down, state.late_up, state.late_down, strict=True))
        others = self._others.number((state.writes, state.notes, state.faults))
        return self._struct.pack(*state.prefills, *state.decodes, *lines, others)

    def unpack(self, data: bytes) -> State:
        """Returns the state that was packed."""
        *numbers, others = self._struct.unpack(data)
        up, down, late_up, late_down = zip(*[self._lines.values[each] for each in numbers[self._nodes :]], strict=True)
        prefills, decodes = tuple(numbers[: self._prefills]), tuple(numbers[self._prefills : self._nodes])
        return State(prefills, decodes, up, down, late_up, late_down, *self._others.values[others])
