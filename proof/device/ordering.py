"""Which operations come after which others, and which of them touch the same bytes although nothing orders them.

Every operation belongs to an agent that does one after the other: a stream, a write of a transport, the host. An
operation is queued by the host, and so comes after all that the host has waited for by then; after what its agent had
queued before; and after the events that it waits for. All of that together is a vector clock: of every agent, the last
operation that has come to pass by then.

The host is one agent, however many threads it has: what they tell each other they tell through locks and queues, which
other tests are about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ranges = NDArray[np.int64]
"""Byte ranges, ascending and apart from each other: shape [ranges, 2], the first address and the one after the last."""

HOST = "the host"


class UnorderedAccessError(AssertionError):
    """Two operations touch the same bytes, at least one of them writes, and nothing orders them."""


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """What an agent does in one step.

    Attributes:
        name: what it does, in words.
        agent: who does it.
        number: the how manieth of its agent it is, from 1.
        clock: of every agent, the number of the last operation that comes before this one, or is it.
    """

    name: str
    agent: str
    number: int
    clock: Mapping[str, int]

    def is_after(self, other: Operation) -> bool:
        """Whether the other one has come to pass when this one begins."""
        return self.clock.get(other.agent, 0) >= other.number

    def __str__(self) -> str:
        return f"{self.name} ({self.agent}, operation {self.number})"


@dataclass(slots=True)
class _Access:
    operation: Operation
    ranges: Ranges
    is_write: bool


@dataclass(slots=True)
class Ordering:
    """Takes operations as the host queues them, and checks what each touches. For one thread at a time."""

    _last: dict[str, Operation] = field(default_factory=dict)
    _host: dict[str, int] = field(default_factory=dict)
    _accesses: list[_Access] = field(default_factory=list)

    def add(
        self,
        name: str,
        agent: str,
        *,
        after: Sequence[Operation] = (),
        reads: Ranges | None = None,
        writes: Ranges | None = None,
    ) -> Operation:
        """Queues an operation.

        Args:
            name: what it does, in words.
            agent: who does it, after all that it was given before.
            after: what else it waits for.
            reads: the bytes that it reads.
            writes: the bytes that it writes.

        Raises:
            UnorderedAccessError: naming both operations, and what is missing between them.
        """
        clock = dict(self._host)
        before = self._last.get(agent)
        for each in (before, *after):
            if each is not None:
                _join(clock, each.clock)
        number = 1 if before is None else before.number + 1
        clock[agent] = number
        operation = self._last[agent] = Operation(name, agent, number, clock)
        for ranges, is_write in ((reads, False), (writes, True)):
            if ranges is not None and len(ranges):
                self._check(_Access(operation, ranges, is_write))
        return operation

    def host_has_seen(self, operation: Operation) -> None:
        """Takes note that the host has waited for an operation, or has seen that it is done."""
        _join(self._host, operation.clock)
        # What the host queues from now on comes after all of these: they cannot be in anybody's way any more.
        self._accesses = [
            each for each in self._accesses if self._host.get(each.operation.agent, 0) < each.operation.number
        ]

    def is_seen(self, operation: Operation) -> bool:
        """Whether the host knows that an operation has come to pass."""
        return self._host.get(operation.agent, 0) >= operation.number

    def _check(self, access: _Access) -> None:
        for earlier in self._accesses:
            if not (access.is_write or earlier.is_write) or earlier.operation is access.operation:
                continue
            if access.operation.is_after(earlier.operation):
                continue
            shared = _first_shared(access.ranges, earlier.ranges)
            if shared is not None:
                raise UnorderedAccessError(_why(access, earlier, shared))
        self._accesses.append(access)


def _join(clock: dict[str, int], other: Mapping[str, int]) -> None:
    for agent, number in other.items():
        clock[agent] = max(clock.get(agent, 0), number)


def ranges_of(starts: NDArray[np.int64], length: int) -> Ranges:
    """Returns the ranges of runs of one length, those that touch or overlap as one."""
    starts = np.sort(starts)
    if not len(starts) or not length:
        return np.empty((0, 2), np.int64)
    is_first = np.concatenate([[True], starts[1:] > starts[:-1] + length])
    is_last = np.concatenate([is_first[1:], [True]])
    return np.stack([starts[is_first], starts[is_last] + length], axis=1)


def _first_shared(some: Ranges, others: Ranges) -> tuple[int, int] | None:
    """Returns the first bytes that lie in both; None if none do."""
    where = np.searchsorted(others[:, 1], some[:, 0], side="right")
    has_next = where < len(others)
    found = np.flatnonzero(has_next & (others[np.minimum(where, len(others) - 1), 0] < some[:, 1]))
    if not len(found):
        return None
    one, other = some[found[0]], others[where[found[0]]]
    return int(max(one[0], other[0])), int(min(one[1], other[1]))


def _why(access: _Access, earlier: _Access, shared: tuple[int, int]) -> str:
    mine, its = access.operation, earlier.operation
    does, did = ("writes" if each.is_write else "reads" for each in (access, earlier))
    by = "" if mine.agent == HOST else f", and {mine.agent} does not wait for an event behind it"
    return (
        f"{mine} {does} {shared[1] - shared[0]} bytes at {shared[0]:#x} which {its} {did}, and nothing orders the two: "
        f"the host had not seen the end of {its.name} when it queued {mine.name}{by}"
    )
