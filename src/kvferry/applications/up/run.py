"""Starts a deployment, once what it needs is installed here, says where it answers, and stops it in order."""

from __future__ import annotations

import tempfile
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from kvferry.applications.command_line import interruptible
from kvferry.applications.up.engine_options import DeploymentRequest, Engine, FrontKind
from kvferry.applications.up.plan import Program, ports_needed, programs
from kvferry.applications.up.supervision import Supervisor, free_ports, refuse_taken
from kvferry.engines.sglang.settings import PluginChoice
from kvferry.errors import ConfigurationError
from kvferry.settings import Settings

_NAMES = {Engine.VLLM: "vLLM", Engine.SGLANG: "SGLang"}
_PLUGINS = "sglang.srt.plugins"
_OURS = "kvferry"


def check_installed(request: DeploymentRequest) -> None:
    """Refuses an engine that is not there, or that would not find kvferry.

    Raises:
        ConfigurationError: naming what is missing, and the remedy.
    """
    engine = request.which_engine
    if find_spec(engine.value) is None:
        raise ConfigurationError(
            f"--engine {engine.value}: {_NAMES[engine]} is not installed in this environment, whose interpreter starts "
            f"the servers; install kvferry where the engine is, as docs/{engine.value}.md says"
        )
    if engine is Engine.VLLM:  # which is told our module's name
        return
    if _OURS not in {each.name for each in entry_points(group=_PLUGINS)}:
        raise ConfigurationError(
            f"--engine {engine.value}: SGLang finds kvferry by an entry point of the group {_PLUGINS}, and there is "
            "none: kvferry is on the module path, but not installed here; install it as docs/sglang.md says"
        )
    only = PluginChoice().plugins
    if only and _OURS not in (each.strip() for each in only.split(",")):
        raise ConfigurationError(
            f"--engine {engine.value}: SGLANG_PLUGINS is {only!r}, and SGLang loads no other plug-in: add {_OURS} to "
            "it, or unset it"
        )


def router_is_front(request: DeploymentRequest) -> bool:
    """Returns whether SGLang's router answers, and not a front of ours.

    Raises:
        ConfigurationError: if it should, and is not installed.
    """
    wanted = FrontKind(request.front.lower())
    if request.which_engine is not Engine.SGLANG or wanted is FrontKind.KVFERRY:
        return False
    is_installed = find_spec("sglang_router") is not None
    if wanted is FrontKind.ROUTER and not is_installed:
        raise ConfigurationError(
            "--front sglang-router: it is not installed in this environment: install it there, or leave "
            "--front away for kvferry's own"
        )
    return is_installed


def run(request: DeploymentRequest, *, logs: Path | None, timeout_s: float) -> None:
    """Runs it until Ctrl-C or SIGTERM.

    Args:
        logs: where logs go; None makes a directory for them.
        timeout_s: the longest wait until everything serves.

    Raises:
        ConfigurationError: if the engine, our plug-in or supervisor is not installed, or the port is taken.
        KVFerryError: if a process does not come up, with the end of its log, or the supervisor ends by itself.
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
