"""Schedules of a simulated system, one to look at or many to search: `python -m proof.simulation --help`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from proof.simulation.reports import fresh_seed, replay, search_many

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def sim(
    seed: Annotated[int | None, typer.Option(help="The schedule to run, or the first of several.")] = None,
    count: Annotated[int, typer.Option(min=1, help="How many schedules, from the first on.")] = 1,
    steps: Annotated[bool, typer.Option("--steps", help="Print what happens, step by step.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write what happens to a file.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="How many run at a time; else one for each CPU.")] = None,
) -> None:
    """Run whole systems on simulated machines, wires and clocks, where everything goes wrong that may.

    The endpoints are those that ship. A seed decides who acts when, what is late, lost or said twice, and who is
    frozen, killed, cut off or closed; after every step all memory is compared, byte by byte, with what must hold.
    Without a seed, a fresh one is drawn. A schedule that breaks a law is printed, shrunken to what it takes. The exit
    code is 0 only if none did.
    """
    console = Console()
    first = fresh_seed() if seed is None else seed
    if count == 1:
        is_healthy = replay(first, shows_steps=steps, trace=trace, console=console)
    else:
        is_healthy = search_many(first, count, processes=processes, console=console)
    if not is_healthy:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
