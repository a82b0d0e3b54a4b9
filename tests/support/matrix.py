"""The cells of the fault matrix, and the few of them that stand for all where there is little time.

Every cell strikes somebody, at a step of a room, on a path, with a fault. The full tier has each kind of fault at each
step for everybody, with one fault of the kind and on one path in turn: what is struck knows little of the path. The
long tier has all faults on both paths. The quick tier takes a choice in which everybody is struck with every fault, and
every path meets every step and every fault. Who is struck at which step, and which kind of fault meets it there, is
left to the full tier, which has all of that: the pairs of those would take half as many cells again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import TypeAlias, TypeVar

import pytest
from _pytest.mark import ParameterSet
from tests.support.victims import Cut, Fault, Step

AnyFault: TypeAlias = Fault | Cut
Case = TypeVar("Case")


class Role(Enum):
    """Who is struck."""

    PREFILL_RANK = "a prefill rank"
    DECODE_RANK = "a decode rank"
    CONNECTION = "the control connection of two ranks"
    REGISTRY = "the registry"


KINDS: dict[AnyFault, str] = {
    Fault.KILL: "it ends",
    Fault.RESTART: "it ends",
    Fault.SHORT_FREEZE: "away for a moment",
    Fault.LONG_FREEZE: "away for long",
    Fault.FREEZE: "away for long",
    Cut.SHORT_CUT: "away for a moment",
    Cut.LONG_CUT: "away for long",
    Cut.LONG_HOLD: "away for long",
}


@dataclass(frozen=True, slots=True)
class FaultCase:
    """One cell."""

    role: Role
    step: Step
    path: str
    fault: AnyFault

    def pairs(self) -> set[Hashable]:
        """Returns the pairs of values that the quick tier must have, of those that it has."""
        values = {"role": self.role, "step": self.step, "path": self.path, "fault": self.fault}
        left = {("role", "step"), ("step", "fault")}  # to the full tier
        return {
            ((one, values[one]), (other, values[other]))
            for one, other in itertools.combinations(values, 2)
            if (one, other) not in left
        }


def all_cases() -> Iterator[FaultCase]:
    """Yields every cell that makes sense.

    The registry matters before two ranks have connected, and must not matter in the middle of a room.
    """
    for path in PATHS:
        for role in (Role.PREFILL_RANK, Role.DECODE_RANK):
            for step, fault in itertools.product(Step, Fault):
                yield FaultCase(role, step, path, fault)
        for step, cut in itertools.product(Step, Cut):
            yield FaultCase(Role.CONNECTION, step, path, cut)
        for step, fault in itertools.product((Step.NOT_CONNECTED, Step.BETWEEN_CHUNKS), Fault):
            yield FaultCase(Role.REGISTRY, step, path, fault)


def covering(cases: Sequence[Case], covered_by: Callable[[Case], set[Hashable]]) -> list[Case]:
    """Chooses cases that together cover what all cover: again and again the one that adds most, the first of equals.

    Args:
        covered_by: what a case covers.
    """
    missing = set[Hashable]().union(*map(covered_by, cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(missing & covered_by(case)))
        chosen.append(best)
        missing -= covered_by(best)
    return chosen


PATHS = ("staged", "direct")


@cache
def full_cases() -> frozenset[FaultCase]:
    """Returns those of the full tier: of cells that differ in the path, or in the fault of a kind, one in turn."""
    steps = list(Step)

    def is_its_turn(case: FaultCase) -> bool:
        step, kind = steps.index(case.step), KINDS[case.fault]
        alike = [each for each in KINDS if type(each) is type(case.fault) and KINDS[each] == kind]
        # From step to step the fault changes, and the path after two; who is away for long is so on the other path.
        path = PATHS[(step // 2 + (kind == "away for long")) % len(PATHS)]
        return case.fault is alike[step % len(alike)] and case.path == path

    return quick_cases() | {case for case in all_cases() if is_its_turn(case)}


@cache
def quick_cases() -> frozenset[FaultCase]:
    """Returns those of the quick tier."""
    return frozenset(covering(list(all_cases()), FaultCase.pairs))


def cells(role: Role, *steps: Step) -> list[ParameterSet]:
    """Returns the parameters path, step and fault of a role's cells, marked with their tiers.

    Args:
        steps: which; all if none is given.
    """
    return [
        pytest.param(
            case.path,
            case.step,
            case.fault,
            id=f"{case.path}-{case.step.name}-{case.fault.name}".lower(),
            marks=_marks(case),
        )
        for case in all_cases()
        if case.role is role and (not steps or case.step in steps)
    ]


def _marks(case: FaultCase) -> tuple[pytest.MarkDecorator, ...]:
    if case in quick_cases():
        return ()
    return (pytest.mark.full if case in full_cases() else pytest.mark.long,)
