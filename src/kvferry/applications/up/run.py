"""Starts a deployment, says where it answers, and stops it in order."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from kvferry.applications.interrupts import interruptible
from kvferry.applications.up.arguments import DeploymentRequest
from kvferry.applications.up.installed import check_installed, router_is_front
from kvferry.applications.up.plan import Program, ports_needed, programs
from kvferry.applications.up.supervision import Supervisor, free_ports, refuse_taken
from kvferry.settings import Settings


def run(request: DeploymentRequest, *, logs: Path | None, timeout_s: float) -> None:
    """Runs it until Ctrl-C or SIGTERM.

    Args:
        logs: where logs go; None makes a directory for them.
        timeout_s: the longest wait until everything serves.

    Raises:
        ConfigurationError: if the engine, our plug-in or supervisor is not installed, or the port is taken.
        KVFerryError: if a process does not come up, with the end of its log.
    """
    check_installed(request)
    has_router = router_is_front(request)
    refuse_taken(request.host, request.port)
    directory = logs or Path(tempfile.mkdtemp(prefix="kvferry-up-"))
    with interruptible():
        ports = free_ports(ports_needed(request))
        planned = programs(request, ports, has_router=has_router, registry_url=Settings().registry_url)
        _supervise(request, Supervisor(planned, directory), timeout_s)


def _supervise(request: DeploymentRequest, supervisor: Supervisor, timeout_s: float) -> None:
    console = Console()
    try:
        console.print(f"Logs are in {supervisor.directory}.", highlight=False)

        def serving(program: Program) -> None:
            console.print(f"  {program.name} serves", highlight=False)

        supervisor.wait_serving(timeout_s, serving)
        console.print(f"Ready: http://{request.host}:{request.port}/v1/completions  (Ctrl-C stops it)", highlight=False)
        supervisor.wait()
    except KeyboardInterrupt:
        console.print("Stopping ...")
    finally:
        supervisor.stop()
