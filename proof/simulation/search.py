"""Many schedules, and what is left of one that breaks a law once everything that it does not take is left out."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from kvferry.cpus import usable_cpus
from proof.simulation.circumstances import Limits
from proof.simulation.laws import Law, ViolationError
from proof.simulation.memory import Arena
from proof.simulation.world import World

_BATCH = 50


@dataclass(frozen=True, slots=True)
class Violation:
    """A schedule that breaks a law.

    Attributes:
        law: which.
        what: how, in words.
    """

    seed: int
    law: Law
    what: str


@dataclass(slots=True)
class Findings:
    """What came of many schedules.

    Attributes:
        schedules: how many were run.
        violations: those that broke a law.
        outcomes: how many sides of transfers ended how, and how often what went wrong.
        seconds: that it took.
    """

    schedules: int = 0
    violations: list[Violation] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


def run_one(seed: int, arena: Arena, limits: Limits | None = None) -> tuple[Counter[str], Violation | None]:
    """Runs one schedule."""
    world = World(seed, limits=limits, arena=arena)
    try:
        return world.run(), None
    except ViolationError as error:
        return world.outcomes, Violation(seed, error.law, str(error))


def _run_batch(seeds: Sequence[int]) -> Findings:
    """Runs some schedules, one after the other, in the memory of one process."""
    found, arena = Findings(), Arena()
    for seed in seeds:
        outcomes, violation = run_one(seed, arena)
        found.outcomes += outcomes
        found.schedules += 1
        if violation is not None:
            found.violations.append(violation)
    return found


def _run_batch_alone(seeds: Sequence[int]) -> Findings:
    """The same in a process that does nothing else: what worlds leave behind is collected at the end, at once."""
    gc.freeze()  # what is there now stays: it need not be looked through
    gc.disable()
    found = _run_batch(seeds)
    gc.collect()
    return found


def search(seeds: Iterable[int], *, processes: int | None = None, most_violations: int = 10) -> Iterator[Findings]:
    """Runs schedules on all cores; yields what was found so far, every now and then and in the end.

    Args:
        processes: how many at a time; as many as there are CPUs if None. One is this process.
        most_violations: after so many the search ends early.
    """
    found, began_at = Findings(), time.monotonic()
    count = processes or usable_cpus()
    with ExitStack() as stack:
        batches: Iterable[Findings]
        if count == 1:
            batches = map(_run_batch, _batches(seeds))
        else:
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(count))
            batches = pool.imap_unordered(_run_batch_alone, _batches(seeds))
        for batch in batches:
            found.schedules += batch.schedules
            found.violations += batch.violations
            found.outcomes += batch.outcomes
            found.seconds = time.monotonic() - began_at
            yield found
            if len(found.violations) >= most_violations:
                return


def _batches(seeds: Iterable[int]) -> Iterator[list[int]]:
    batch: list[int] = []
    for seed in seeds:
        batch.append(seed)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def shrink(violation: Violation) -> tuple[Limits, World]:
    """Leaves out of a schedule what it breaks its law without: kinds of trouble, requests, single faults, late steps.

    Returns:
        What is left out, and the world that is left, with its trace.
    """
    arena, limits = Arena(), Limits()

    def still_breaks(candidate: Limits) -> bool:
        _, found = run_one(violation.seed, arena, candidate)
        return found is not None and found.law is violation.law

    before = None
    while limits != before:  # what one thing was needed for may have been left out after it
        before, world = limits, World(violation.seed, limits=limits, arena=arena)
        for kind in sorted(world.troubles):
            limits = _better(limits, replace(limits, without_troubles=limits.without_troubles | {kind}), still_breaks)
        for number in range(1, world.circumstances.requests + 1):
            limits = _better(limits, replace(limits, without_requests=limits.without_requests | {number}), still_breaks)
        faults = _run_with_trace(violation.seed, arena, limits).adversary.faults
        for fault in range(faults, 0, -1):
            limits = _better(limits, replace(limits, without_faults=limits.without_faults | {fault}), still_breaks)
        while limits.steps > 1 and still_breaks(replace(limits, steps=limits.steps // 2)):
            limits = replace(limits, steps=limits.steps // 2)
    return limits, _run_with_trace(violation.seed, arena, limits)


def _better(limits: Limits, candidate: Limits, still_breaks: Callable[[Limits], bool]) -> Limits:
    return candidate if still_breaks(candidate) else limits


def _run_with_trace(seed: int, arena: Arena, limits: Limits) -> World:
    world = World(seed, limits=limits, arena=arena, traces=True)
    try:
        world.run()
    except ViolationError as error:
        world.trace.append(f"{world.now:8.3f}  BROKEN: {error}")
    return world
