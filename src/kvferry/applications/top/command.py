"""`kvferry top` and `kvferry trace`, as Typer calls them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvferry.applications.command_line import FAILED


def top(
    where: Annotated[
        list[str] | None,
        typer.Argument(help="Endpoints: port, host:port or host:9470-9477; else KVFERRY_OBSERVE_PORT of this machine."),
    ] = None,
    interval_s: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the tables once, and end.")] = False,
) -> None:
    """Show endpoints and their open rooms: where they stand, how fast they move, and what they wait for.

    Endpoints answer when they are started with KVFERRY_OBSERVE_PORT, on that port plus their rank. Works in any
    terminal, over ssh too. The exit code is 0 only if somebody answered.
    """
    from kvferry.applications.top.run import run

    if not run(where or (), interval_s=interval_s, once=once, console=Console()):
        raise typer.Exit(FAILED)


def trace(
    where: Annotated[
        list[str], typer.Argument(help="Endpoints: port, host:port or host:9470-9477, of both sides if you can.")
    ],
    seconds: Annotated[float, typer.Option(min=0.1, max=60, help="How long to record.")] = 5.0,
    output: Annotated[Path, typer.Option(help="The file to write.")] = Path("kvferry-trace.json"),
) -> None:
    """Record what endpoints do for a while, and write a trace to look at in ui.perfetto.dev or chrome://tracing.

    A row is a worker or a wire, a colour a phase: queue, credit, gather, post, wire, arrival, scatter, and every room
    as a whole. Endpoints of several machines are put on one time line by their clocks. The exit code is 0 only if all
    endpoints answered.
    """
    from kvferry.applications.top.recording import record

    if not record(where, seconds=seconds, output=output, console=Console()):
        raise typer.Exit(FAILED)
