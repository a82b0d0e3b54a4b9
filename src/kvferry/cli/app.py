"""The command line of kvferry."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from kvferry._version import __version__
from kvferry.applications.bench.command import bench
from kvferry.applications.demo.command import demo
from kvferry.applications.doctor.command import doctor
from kvferry.applications.drain.command import drain
from kvferry.applications.plan.command import plan
from kvferry.applications.top.command import top, trace
from kvferry.applications.up.command import up
from kvferry.errors import KVFerryError
from kvferry.settings import Settings, is_wildcard

app = typer.Typer(
    name="kvferry",
    help="Moves LLM KV caches from prefill workers to decode workers, from any parallel layout to any other.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

WRONG_INPUT = 2


def main() -> None:
    """Runs the command line. Errors that a person can act on are one line on stderr and exit code 2."""
    try:
        app()
    except KVFerryError as error:
        Console(stderr=True).print(f"[bold red]kvferry:[/] {type(error).__name__}:", end=" ")
        Console(stderr=True).print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(WRONG_INPUT)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvferry {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def registry(
    host: Annotated[str | None, typer.Option(help="Address to listen on [KVFERRY_REGISTRY_HOST].")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes any free one [KVFERRY_REGISTRY_PORT].")] = None,
    lease_s: Annotated[
        float | None, typer.Option(help="Seconds that a registration lasts [KVFERRY_REGISTRY_LEASE_S].")
    ] = None,
) -> None:
    """Run the registry on its own, where prefill ranks register and decode ranks find them.

    By default the first rank of a prefill engine runs one itself; with several prefill engines, or to let engines come
    and go, run this once and point all ranks to it with KVFERRY_REGISTRY_URL.
    """
    from kvferry.control.construction import create_registry

    given = {"registry_host": host, "registry_port": port, "registry_lease_s": lease_s}
    settings = Settings(**{name: value for name, value in given.items() if value is not None})
    server = create_registry(settings)

    def started(url: str) -> None:
        scheme, port = url.partition("://")[0], url.rpartition(":")[2]
        everywhere = f"{scheme}://ADDRESS:{port} (an address of this machine that they reach)"
        known = everywhere if is_wildcard(settings.registry_host) else url
        typer.echo(f"The registry answers at {url}. Set KVFERRY_REGISTRY_URL={known} for every rank. Ctrl-C stops it.")

    server.serve_forever(started)


@app.command()
def release(
    endpoints: Annotated[
        list[str], typer.Argument(help="Names of lost prefill endpoints, as `kvferry top` shows them.")
    ],
    is_sure: Annotated[bool, typer.Option("--yes", help="Do not ask whether you are sure.")] = False,
) -> None:
    """Say that prefill endpoints have ended, so that decode ranks get back what these might still write to.

    It is your word that their processes cannot run again, not even after a thaw: pages and staging memory go to others.
    The registry (KVFERRY_REGISTRY_URL) passes it on to every decode rank whose KVFERRY_END_PROOFS has operator.
    """
    from kvferry.control.construction import create_registry_client

    question = f"Is it certain that {', '.join(endpoints)} cannot write any more: ended, or without power or network?"
    if not is_sure:
        typer.confirm(question, abort=True)
    with create_registry_client(Settings()) as client:
        for endpoint in endpoints:
            client.release(endpoint)
            typer.echo(
                f"{endpoint} is released: decode ranks give its memory back within a heartbeat and quarantine_s."
            )


for _command in (demo, plan, bench, up, doctor, top, drain, trace):
    app.command()(_command)
