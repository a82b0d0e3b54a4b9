"""`kvferry doctor`, as Typer calls it."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console

from kvferry.applications.command_line import Json
from kvferry.settings import Settings


def doctor(
    where: Annotated[
        list[str] | None,
        typer.Argument(help="Endpoints that run: port, host:port or host:9470-9477; else KVFERRY_OBSERVE_PORT here."),
    ] = None,
    peer: Annotated[
        str | None, typer.Option(help="An endpoint on another machine, host or host:port, to check this one against.")
    ] = None,
    wire_to: Annotated[
        str | None,
        typer.Option(help="Measure the wire to a machine where `kvferry doctor --listen` runs: host:port."),
    ] = None,
    listen: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Only let doctors of other machines measure, on this port.")
    ] = None,
    wire: Annotated[bool, typer.Option(help="Measure between two processes of this machine.")] = True,
    json: Json = False,
) -> None:
    """Look at what is installed, set, reachable and running, and say what is wrong and what to do.

    Run it in the environment and with the variables of a rank. The exit code is 0 if all is good, 1 if something
    deserves a look, and 2 if something is wrong.
    """
    from kvferry.applications.doctor.run import run

    if listen is not None:
        from kvferry.applications.command_line import interruptible
        from kvferry.applications.doctor.pairing import listen as listen_on

        with suppress(KeyboardInterrupt), interruptible():
            listen_on(Settings(), listen, typer.echo)
        return
    worst = run(where or (), peer=peer, moves_bytes=wire, wire_to=wire_to, wants_json=json, console=Console())
    if worst:
        raise typer.Exit(int(worst))
