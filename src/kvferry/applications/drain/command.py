"""`kvferry drain`, as Typer calls it."""

from __future__ import annotations

from typing import Annotated

import typer

from kvferry.applications.command_line import FAILED


def drain(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            help="Prefill engines by name, at the registry (KVFERRY_REGISTRY_URL), or endpoints of either side by the "
            "address of what they show: http://host:9470, or http://host:9470-9477. By default all endpoints of this "
            "machine, from KVFERRY_OBSERVE_PORT on."
        ),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0, help="How long to wait until nothing is open, in seconds.")
    ] = 60.0,
) -> None:
    """Let engines or endpoints leave: no new rooms, those that are open end.

    Everyone sees it at once, at the registry and by /readyz; new rooms are still taken for KVFERRY_DRAIN_GRACE_S, of
    requests that gateways had sent before, and what is still open after KVFERRY_DRAIN_TIMEOUT_S is aborted. The command
    waits, and says what is still open. The exit code is 0 if nothing is, 1 if something was at the end. Endpoints with
    a secret ask for it (KVFERRY_SECRET_FILE, KVFERRY_SECRET); others let only processes of their machine drain them.
    """
    from kvferry.applications.drain.run import run

    if not run(targets or (), timeout_s=timeout_s, say=typer.echo):
        raise typer.Exit(FAILED)
