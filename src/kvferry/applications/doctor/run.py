"""Runs `kvferry doctor`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import typer
from msgspec import structs
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvferry.applications.doctor import configuration, deployment, machine, others
from kvferry.applications.doctor.probe import wire
from kvferry.applications.top.asking import addresses, present
from kvferry.applications.up.engine_options import Engine
from kvferry.errors import SettingsError
from kvferry.findings import Finding, Severity, error
from kvferry.layout import MemoryKind
from kvferry.observe.settings import ObserveSettings
from kvferry.settings import Settings, environment
from kvferry.transport import Diagnosis
from kvferry.transport.chosen import transport_class

_USUAL_PORT = 9470
"""Of an endpoint, where only its host is given."""

_SHOWN = {
    Severity.GOOD: Text("good", style="green"),
    Severity.WARNING: Text("look", style="yellow"),
    Severity.ERROR: Text("WRONG", style="bold red"),
}


def run(
    given: Sequence[str],
    *,
    peer: str | None,
    moves_bytes: bool,
    wire_to: str | None = None,
    engine: Engine | None = None,
    wants_json: bool,
    console: Console,
) -> Severity:
    """Looks at everything, and says what it has found.

    Args:
        given: addresses of endpoints on this machine; else those of the settings.
        peer: an endpoint on another machine to compare with.
        moves_bytes: whether to measure the transport between two processes.
        wire_to: a doctor that listens on another machine, to measure the transport with.
        engine: of a deployment whose whole set is to be looked at.

    Returns:
        The worst that was found.

    Raises:
        ConfigurationError: if an address makes no sense.
    """
    targets = addresses(given)
    peers = addresses([with_port(peer)]) if peer else []
    doctors = addresses([wire_to]) if wire_to else []
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    findings = []
    looks = _everything(targets, peers, doctors, engine, moves_bytes=moves_bytes)
    for finding in looks:
        findings.append(finding)
        remedy = (f"\n-> {finding.remedy}", "bold") if finding.remedy else ""
        table.add_row(_SHOWN[finding.severity], finding.about, Text.assemble(finding.what, remedy))
    worst = max((finding.severity for finding in findings), default=Severity.GOOD)
    if wants_json:
        plain = [{**structs.asdict(each), "severity": each.severity.name.lower()} for each in findings]
        said = {"worst": worst.name.lower(), "findings": plain}
        typer.echo(msgspec.json.encode(said).decode())
        return worst
    console.print(table)
    for line in _missing(findings):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    counts = [sum(finding.severity is each for finding in findings) for each in (Severity.ERROR, Severity.WARNING)]
    console.print(f"{counts[0]} wrong, {counts[1]} to look at, of {len(findings)}", highlight=False)
    return worst


def with_port(peer: str) -> str:
    """Adds the usual port where only a host is given: an IPv6 address with or without its brackets, too."""
    bare = peer.strip("[]")
    if bare.count(":") > 1 and "]:" not in peer:
        return f"[{bare}]:{_USUAL_PORT}"
    return peer if ":" in peer or peer.isdecimal() else f"{peer}:{_USUAL_PORT}"


def _missing(findings: Sequence[Finding]) -> Iterator[str]:
    """Yields the lines that are missing, once each, below where they belong: to be copied as they are."""
    for about in dict.fromkeys(finding.about for finding in findings if finding.lines):
        yield f"\n# missing: {about}"
        yield from dict.fromkeys(line for finding in findings if finding.about == about for line in finding.lines)


def _everything(
    targets: Sequence[str], peers: Sequence[str], doctors: Sequence[str], engine: Engine | None, *, moves_bytes: bool
) -> Iterator[Finding]:
    variables = environment()
    of = None if engine is None else deployment.DEPLOYMENTS[engine]
    yield from _safely("installed", machine.installed)
    if of is not None:
        yield from _safely(of.command, lambda: deployment.whole(of, variables))
    try:
        settings = Settings()
        transport = transport_class(settings.transport)
    except SettingsError as problem:
        yield from _safely("settings", lambda: configuration.variables(variables, Diagnosis()))
        yield error("settings", str(problem), "mend the variable; docs/settings.md says what it may be")
        if of is not None:
            yield from deployment.environment_of_ranks(of, None, problem.missing)
        return
    if of is not None:
        yield from _safely("environment", lambda: deployment.environment_of_ranks(of, settings, ()))
    yield from _safely(transport.name, lambda: transport.diagnosis.findings(settings))
    yield from _safely("settings", lambda: configuration.variables(variables, transport.diagnosis))
    yield from _safely("addresses", lambda: configuration.addresses(settings))
    yield from _safely("limits", lambda: machine.limits(settings))
    yield from _safely("devices", machine.devices)
    yield from _safely("registry", lambda: others.registry(settings))
    yield from _safely("kubernetes", lambda: others.orchestrator(settings))
    port = settings.of(ObserveSettings).observe_port
    running = targets or (present(port) if port else [])
    yield from _safely("endpoints", lambda: others.endpoints(running, are_expected=bool(targets)))
    for each in peers:
        yield from _safely("peer", lambda at=each: others.peer(at))  # type: ignore[misc]
    if moves_bytes:
        yield from _safely("wire", lambda: wire(variables, transport.diagnosis))
        if machine.has_gpu():
            yield from _safely("wire", lambda: wire(variables, transport.diagnosis, kind=MemoryKind.VRAM))
    for each in doctors:
        yield from _safely("wire", lambda at=each: wire(variables, transport.diagnosis, at))  # type: ignore[misc]


def _safely(about: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """What a look finds; if it fails, that is a finding, and the others follow."""
    try:
        yield from look()
    except Exception as problem:
        yield error(about, f"could not be looked at: {type(problem).__name__}: {problem}", "please report this")
