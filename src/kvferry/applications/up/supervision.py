"""Starts a deployment, once what it needs is installed here, says where it answers, and stops it in order.

Its processes run under supervisord, which starts, restarts and stops them, and keeps a log of each.
"""

from __future__ import annotations

import configparser
import json
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import httpx
from rich.console import Console

from kvferry.applications.command_line import interruptible, why_not_listening
from kvferry.applications.up.engine_options import DeploymentRequest, Engine, FrontKind
from kvferry.applications.up.plan import Program, ports_needed, programs
from kvferry.engines.sglang.settings import PluginChoice
from kvferry.errors import ConfigurationError, KVFerryError
from kvferry.settings import Settings

_STOP_S = 20
_POLL_S = 0.25
_LOG_BYTES = "32MB"
_TAIL_LINES = 15
_TOGETHER = "kvferry.applications.up.together"
_BELOW_CHANCE = range(20_000, 32_000)


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody has at present, below those that systems give to connections by chance.

    Raises:
        ConfigurationError: if there are not so many.
    """
    found: list[int] = []
    with ExitStack() as probes:
        for port in random.sample(_BELOW_CHANCE, len(_BELOW_CHANCE)):
            with suppress(OSError):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                return found
    raise ConfigurationError(f"there are no {count} free ports from {_BELOW_CHANCE.start} to {_BELOW_CHANCE.stop - 1}")


def refuse_taken(host: str, port: int) -> None:
    """Refuses a port that something listens on.

    Raises:
        ConfigurationError: if it is taken.
    """
    if error := why_not_listening(host, port):
        raise ConfigurationError(f"{host}:{port} cannot be listened on: {error}; choose another --port") from error


class Supervisor:
    """The processes of one deployment.

    Attributes:
        directory: of the configuration and the logs.
        process: supervises the programs.
    """

    def __init__(self, programs: Sequence[Program], directory: Path) -> None:
        """Starts all of them.

        Raises:
            ConfigurationError: if supervisor is not installed.
        """
        try:
            import psutil  # noqa: F401
            import supervisor  # noqa: F401
        except ImportError as error:
            raise ConfigurationError(f"kvferry up needs {error.name}: pip install psutil supervisor") from error
        self.directory = directory
        self._programs = tuple(programs)
        directory.mkdir(parents=True, exist_ok=True)
        config = directory / "supervisord.conf"
        with config.open("w") as file:
            configuration(programs, directory).write(file)
        command = (sys.executable, "-m", "supervisor.supervisord", "--nodaemon", "--configuration", str(config))
        # In a group of its own: Ctrl-C reaches us alone, and we stop everything in order.
        self.process = subprocess.Popen(  # noqa: S603 - our own interpreter, and a file of ours
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def log_of(self, program: Program) -> Path:
        """Where a process's output goes."""
        return self.directory / f"{program.name}.log"

    @property
    def is_running(self) -> bool:
        """Whether the supervisor itself runs."""
        return self.process.poll() is None

    def wait_serving(self, timeout_s: float, on_serving: Callable[[Program], None]) -> None:
        """Waits until every process serves.

        Args:
            on_serving: called with each as soon as it does.

        Raises:
            KVFerryError: if one does not in time, with the end of its log, or the supervisor ends.
        """
        deadline = time.monotonic() + timeout_s
        waiting = list(self._programs)
        with httpx.Client(timeout=2.0, trust_env=False) as client:
            while waiting:
                for program in [each for each in waiting if _serves(client, each)]:
                    waiting.remove(program)
                    on_serving(program)
                if not waiting:
                    return
                if not self.is_running:
                    self.wait()
                if time.monotonic() > deadline:
                    log = self.log_of(waiting[0])
                    raise KVFerryError(
                        f"{waiting[0].name} does not serve after {timeout_s:g} s. The end of {log}:\n{_tail(log)}"
                    )
                time.sleep(_POLL_S)

    def wait(self) -> NoReturn:
        """Waits until it is interrupted.

        Raises:
            KVFerryError: if the supervisor ends by itself.
        """
        status = self.process.wait()
        raise KVFerryError(
            f"the supervisor has ended by itself (status {status}), and with it all that it had started; see "
            f"{self.directory / 'supervisord.log'}"
        )

    def stop(self) -> None:
        """Stops every process in order and waits for that; whoever interrupts the wait ends all of them at once."""
        if not self.is_running:
            return
        try:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(_STOP_S * (len(self._programs) + 1))  # they stop one after the other
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self.kill()

    def kill(self) -> None:
        """Kills what is left, at once."""
        import psutil

        programs: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):  # here and below: it may have ended meanwhile
            programs = psutil.Process(self.process.pid).children()
        self.process.kill()  # first: it would start them again
        for program in programs:
            with suppress(psutil.NoSuchProcess):
                program.kill()  # and with it goes whatever it has started, see `together`
        self.process.wait()
        psutil.wait_procs(programs, timeout=_STOP_S)


def configuration(programs: Sequence[Program], directory: Path) -> configparser.RawConfigParser:
    """What supervisord reads."""
    config = configparser.RawConfigParser()
    config["supervisord"] = {
        "logfile": _literal(directory / "supervisord.log"),
        "pidfile": _literal(directory / "supervisord.pid"),
        "childlogdir": _literal(directory),
    }
    for priority, program in enumerate(programs):
        config[f"program:{program.name}"] = {
            "command": _literal(shlex.join((sys.executable, "-m", _TOGETHER, _in_json(program.command)))),
            "environment": _literal(_assignments(program.environment)),
            "priority": str(priority),  # the front stops first, the registry last
            "autorestart": "true",
            "startsecs": "3",
            "startretries": "1000000",
            "stopsignal": "TERM",
            "stopwaitsecs": str(_STOP_S),
            # An engine's workers go with it.
            "stopasgroup": "true",
            "killasgroup": "true",
            "redirect_stderr": "true",
            "stdout_logfile": _literal(directory / f"{program.name}.log"),
            "stdout_logfile_maxbytes": _LOG_BYTES,
            "stdout_logfile_backups": "1",
        }
    return config


def _in_json(command: Sequence[str]) -> str:
    """A command with nothing that supervisord takes for a comment or the end of a line, as chat templates have it."""
    return json.dumps(command).replace("#", "\\u0023").replace(";", "\\u003b")


def _assignments(environment: Mapping[str, str]) -> str:
    """As supervisord reads variables, which may hold no quotation marks."""
    return ",".join(f'{name}="{value}"' for name, value in environment.items())


def _literal(text: object) -> str:
    """supervisord expands what stands behind a per cent sign."""
    return str(text).replace("%", "%%")


def _serves(client: httpx.Client, program: Program) -> bool:
    try:
        return client.get(program.health_url).is_success
    except httpx.HTTPError:
        return False


def _tail(log: Path) -> str:
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
    except OSError as error:
        return str(error)


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
