"""What befalls the processes, drawn at random from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """Faults of whole processes."""

    FREEZES = "a burst of short freezes"
    LONG_FREEZE = "a freeze that peers notice"
    KILL = "killed and started again"
    REGISTRY = "the registry killed and started again"


_WEIGHTS = {Kind.FREEZES: 9, Kind.LONG_FREEZE: 2, Kind.KILL: 5, Kind.REGISTRY: 4}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        at: when it begins, in seconds since the soak began.
        rank: number of the rank that it befalls.
        steps: for how long it is frozen and then left alone, over and over, in seconds; for the others, how long until
            it is started again.
    """

    at: float
    kind: Kind
    rank: int
    steps: tuple[float, ...]


class Faults:
    """One after the other, with quiet times between."""

    def __init__(self, seed: int, ranks: int, *, mean_quiet_s: float, long_freeze_s: float) -> None:
        self._chance = random.Random(seed)
        self._ranks = ranks
        self._mean_quiet_s = mean_quiet_s
        self._long_freeze_s = long_freeze_s

    def after(self, at: float) -> Fault:
        """The next, when the one before is over at that time."""
        chance = self._chance
        kind = chance.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        rank = chance.randrange(self._ranks)
        begins = at + chance.expovariate(1 / self._mean_quiet_s)
        if kind is Kind.FREEZES:
            steps = tuple(chance.uniform(0.01, 0.2) for _ in range(2 * chance.randint(1, 6)))
        elif kind is Kind.LONG_FREEZE:
            steps = (self._long_freeze_s * chance.uniform(1.0, 1.5), 0.0)
        else:
            steps = (chance.uniform(0.0, 1.0),)
        return Fault(begins, kind, rank, steps)
