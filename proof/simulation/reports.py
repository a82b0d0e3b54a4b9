"""Runs schedules for the command line, and says what came of them."""

from __future__ import annotations

import secrets
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from proof.simulation import Limits, ViolationError, World
from proof.simulation.search import Findings, Violation, search, shrink

_LARGEST_SEED = 2**40


def fresh_seed() -> int:
    """Where to begin with seeds that nobody has run."""
    return secrets.randbelow(_LARGEST_SEED)


def replay(seed: int, *, shows_steps: bool, trace: Path | None, console: Console) -> bool:
    """Runs one schedule; returns whether it kept all laws.

    Args:
        shows_steps: whether to print what happens.
        trace: where to write it, if anywhere.
    """
    world = World(seed, limits=Limits(), traces=shows_steps or trace is not None)
    violation: Violation | None = None
    try:
        world.run()
    except ViolationError as error:
        violation = Violation(seed, error.law, str(error))
    if shows_steps:
        console.print("\n".join(world.trace), markup=False, highlight=False, soft_wrap=True)
    if trace is not None:
        trace.write_text("\n".join(world.trace) + "\n")
    if violation is not None:
        explain(violation, console)
        return False
    console.print(f"Seed {seed} keeps every law: {_in_words(world.outcomes)}.", highlight=False)
    return True


def explain(violation: Violation, console: Console) -> None:
    """Prints a violation, and the shortest trace that still leads to it."""
    console.print(f"[bold red]Seed {violation.seed} breaks a law[/]:", end=" ")
    console.print(violation.what, markup=False, highlight=False, soft_wrap=True)
    limits, world = shrink(violation)
    left_out = [*sorted(limits.without_troubles), *(f"request {each}" for each in sorted(limits.without_requests))]
    console.print(
        f"Shrunken to {limits.steps} steps, without {', '.join(left_out) or 'nothing'} and "
        f"{len(limits.without_faults)} single faults:",
        highlight=False,
    )
    console.print("\n".join(world.trace), markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"Replay the whole of it with: python -m proof.simulation --seed {violation.seed} --steps", highlight=False
    )


def search_many(first: int, count: int, *, processes: int | None, console: Console) -> bool:
    """Runs many schedules on all cores; returns whether all kept all laws.

    Args:
        first: the first seed; the others follow.
    """
    columns = [TextColumn("schedules"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    found = Findings()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=count)
        for found in search(range(first, first + count), processes=processes):
            progress.update(task, completed=found.schedules)
    _print_summary(first, found, console)
    for violation in found.violations[:1]:
        explain(violation, console)
    for violation in found.violations[1:]:
        console.print(f"Seed {violation.seed}: {violation.what}", markup=False, highlight=False, soft_wrap=True)
    return not found.violations


def _print_summary(first: int, found: Findings, console: Console) -> None:
    table = Table(title=f"{found.schedules:,} schedules from seed {first} on, {found.seconds:.0f} s", title_style="")
    table.add_column("what")
    table.add_column("how often", justify="right")
    for what, count in sorted(found.outcomes.items()):
        table.add_row(what, f"{count:,}")
    table.add_row("broken laws", str(len(found.violations)))
    console.print(table)


def _in_words(outcomes: dict[str, int]) -> str:
    return ", ".join(f"{what} {count}" for what, count in sorted(outcomes.items())) or "nothing happened"
