"""The whole set of a deployment: `kvferry doctor --for vllm`, or sglang, and the lines that are missing.

Whether the engine that is installed is what a plug-in builds on asks a process of its own, since engines import for
long, print, and take devices: `python -m kvferry.applications.doctor.deployment MODULE:FUNCTION`.
"""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from kvferry.addresses import default_address
from kvferry.applications.up.engine_options import Engine
from kvferry.engines.deployment import Deployment, Remark
from kvferry.engines.sglang.deployment import SglangDeployment
from kvferry.engines.vllm.deployment import VllmDeployment
from kvferry.errors import EngineContractError
from kvferry.findings import Finding, error, good, warning
from kvferry.hosts import lacks
from kvferry.loggers import logger_of
from kvferry.settings import Settings, known_variables
from kvferry.spelling import PREFIX
from kvferry.transport.diagnosis import installed_version

DEPLOYMENTS: Mapping[Engine, Deployment] = {Engine.VLLM: VllmDeployment(), Engine.SGLANG: SglangDeployment()}
_ENVIRONMENT = "environment"
_PROC = Path("/proc")


def whole(of: Deployment, variables: Mapping[str, str], proc: Path = _PROC) -> Iterator[Finding]:
    """Looks at the engine, at the plug-in in it, and at the options of its servers on this machine.

    Args:
        variables: this process's environment, which the servers' is to be like.
        proc: where the system shows processes.
    """
    versions = {name: installed_version(name) for name in of.packages}
    there = [f"{name} {version}" for name, version in versions.items() if version]
    if there:
        yield from contract(of.contract, there[0], variables)
        yield from (_finding("plug-in", remark) for remark in of.installed(variables))
    else:
        names = " or ".join(of.packages)
        yield error("engine", f"{names} is not installed in this environment", "run the doctor in that of the servers")
    numbers = (int(folder.name) for folder in sorted(proc.iterdir()) if folder.name.isdecimal())
    lines = {number: _texts(proc, number, "cmdline") or () for number in numbers}
    servers = {number: line for number, line in lines.items() if of.is_server(line)}
    for number, line in servers.items():
        about, theirs = f"{of.command}, {number}", _variables(proc, number)
        remarks = of.options(line, variables if theirs is None else theirs)
        yield from (_finding(about, remark) for remark in remarks)
        yield from _differing(about, variables, theirs)
    if not servers:
        what = f"no process here is `{of.command}`: its options were not looked at"
        yield warning(of.command, what, "run the doctor beside a server; it needs these options", (of.example,))


def environment_of_ranks(of: Deployment, settings: Settings | None, missing: Sequence[str]) -> Iterator[Finding]:
    """Says which variables ranks on several machines lack.

    Args:
        settings: those of this process; None if they are refused.
        missing: the names that they are refused for want of.
    """
    names = list(missing)
    if settings is not None:
        names = [lack.name for lack in lacks(settings)]
        if settings.is_on_loopback:
            names = ["host", "secret_file", "registry_url"]
    if not of.needs_registry:
        names = [name for name in names if name != "registry_url"]
    if not names:
        yield good(_ENVIRONMENT, "ranks on other machines find this one, as far as variables say")
        return
    wanted = ", ".join(f"{PREFIX}{name.upper()}" for name in names)
    lines = tuple(_lines(names))
    if settings is None:
        yield error(_ENVIRONMENT, f"missing: {wanted}", "the lines below; the secret is the same everywhere", lines)
    else:
        what = f"ranks on other machines do not find this one: {wanted}"
        yield warning(_ENVIRONMENT, what, "right if all servers are on this machine; else the lines below", lines)


def _lines(names: Sequence[str]) -> Iterator[str]:
    """Yields what a shell is told, in the order in which each line finds what it needs."""
    here = default_address() or "127.0.0.1"
    values = {"secret_file": "/etc/kvferry/secret", "registry_url": f"http://{here}:8998"}
    if "secret_file" in names:
        yield "mkdir -p /etc/kvferry"
        yield "(umask 077; openssl rand -hex 32 > /etc/kvferry/secret)    # once; then copy it to every machine"
    yield from (f"export {PREFIX}{name.upper()}={values.get(name, here)}" for name in names)
    if "registry_url" in names:
        yield "kvferry registry --host 0.0.0.0 &    # once, on the machine that the URL names"


def _finding(about: str, remark: Remark) -> Finding:
    if not remark.remedy:
        return good(about, remark.what)
    kind = error if remark.is_wrong else warning
    return kind(about, remark.what, remark.remedy, (remark.line,) if remark.line else ())


def _differing(about: str, ours: Mapping[str, str], theirs: Mapping[str, str] | None) -> Iterator[Finding]:
    """Says which settings a server has otherwise than the doctor, whose other findings are not about it then."""
    if theirs is None:
        yield warning(about, "its environment is not shown to this user", "run the doctor as the server's user")
        return
    known = known_variables()
    names = sorted(name for name in {*ours, *theirs} if name.upper() in known and ours.get(name) != theirs.get(name))
    if names:
        what = f"it has other values than this doctor: {', '.join(names)}"
        yield warning(about, what, "run the doctor with the server's variables: the rest is said of the doctor's")


def _variables(proc: Path, number: int) -> dict[str, str] | None:
    """Returns the environment that a process was started with; None where it is not shown."""
    given = _texts(proc, number, "environ")
    if given is None:
        return None
    return {name: value for name, _, value in (text.partition("=") for text in given)}


def _texts(proc: Path, number: int, name: str) -> tuple[str, ...] | None:
    """Returns what the system shows of a process, in pieces; None if it has ended, or is another user's."""
    try:
        shown = (proc / str(number) / name).read_bytes()
    except OSError:
        return None
    return tuple(each.decode(errors="replace") for each in shown.rstrip(b"\0").split(b"\0"))


_LONGEST_S = 300.0
_ABOUT = "contract"
_FINDINGS = msgspec.json.Decoder(list[Finding])


def contract(check: str, engine: str, variables: Mapping[str, str]) -> Iterator[Finding]:
    """Has a process compare the engine with the contract.

    Args:
        check: the function that compares, as module:name. It raises, or logs, what differs.
        engine: its name and version, in words.
        variables: the process's environment.
    """
    command = [sys.executable, "-m", "kvferry.applications.doctor.deployment", check]
    try:
        run = subprocess.run(  # noqa: S603 - this interpreter, and a module of ours
            command, env=dict(variables), capture_output=True, text=True, timeout=_LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        yield error(_ABOUT, f"{engine} was not imported within {_LONGEST_S:g} s", "is the machine busy?")
        return
    for line in reversed(run.stdout.splitlines()):
        with suppress(msgspec.MsgspecError):
            found = _FINDINGS.decode(line)
            yield from found or [good(_ABOUT, f"{engine} has all that the plug-in builds on")]
            return
    last = (run.stderr or run.stdout).strip().rpartition("\n")[2]
    yield error(_ABOUT, f"{engine} cannot be imported: {last}", "install it anew")


class _Heard(logging.Handler):
    """Keeps what is logged as findings."""

    def __init__(self, found: list[Finding]) -> None:
        super().__init__(logging.WARNING)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        self._found.append(warning(_ABOUT, record.getMessage(), "docs/vllm.md and docs/sglang.md say what was tried"))


def main() -> None:
    """Compares, and prints a list of findings as a line of JSON."""
    module, _, name = sys.argv[1].partition(":")
    found: list[Finding] = []
    logger_of("kvferry").addHandler(_Heard(found))
    try:
        getattr(importlib.import_module(module), name)()
    except EngineContractError as problem:
        found.append(error(_ABOUT, str(problem), "install a version that was tried"))
    sys.stdout.write("\n" + msgspec.json.encode(found).decode() + "\n")


if __name__ == "__main__":
    main()
