"""The command line of kvferry: the options of every command, and what it calls, which is imported when it runs."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvferry._version import __version__
from kvferry.applications.bench.options import BenchArguments
from kvferry.applications.command_line import (
    FAILED,
    Json,
    interruptible,
    one_of,
    with_fields_as_options,
)
from kvferry.applications.demo.options import DemoArguments, prepare
from kvferry.applications.up.engine_options import DeploymentRequest, Engine
from kvferry.errors import KVFerryError
from kvferry.hosts import is_wildcard
from kvferry.layout import Device, PageOrder
from kvferry.settings import Settings, environment, known_variables
from kvferry.spelling import meaningless

app = typer.Typer(
    name="kvferry",
    help="Moves LLM KV caches from prefill workers to decode workers, from any parallel layout to any other.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

WRONG_INPUT = 2


def main() -> None:
    """Runs the command line. Errors that a person can act on are one line on stderr and exit code 2."""
    for name, hint in meaningless(environment(), known_variables()).items():
        typer.echo(f"kvferry: {name} is set, and means nothing: {hint}", err=True)
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


@app.command()
@with_fields_as_options
def demo(arguments: DemoArguments, json: Json = False) -> None:
    """Prefill on some ranks, move the cache over a real transport, decode on others, and check every byte and token.

    Every rank is a process of its own with its own paged pool in random page order. A real transformers model prefills;
    each prefill rank keeps only its shard of the cache. What the decode side generates comes from nothing but the bytes
    that arrived, and must equal what the undivided model generates. The exit code is 0 only if it does and every byte
    is exact.
    """
    started_at = time.monotonic()
    options = prepare(arguments)
    from kvferry.applications.demo import report, run, verdict  # neither torch nor transformers, if that refuses

    with report.progress_view(options, Console(stderr=True)) as on_report:
        outcome = run.run(options, on_report)
    judged = verdict.judge(options, outcome)
    if json:
        typer.echo(report.as_json(options, judged))
    else:
        elapsed_s = time.monotonic() - started_at
        report.show(options, judged, Console(), elapsed_s=elapsed_s)
    if not judged.holds:
        raise typer.Exit(FAILED)


@app.command()
def plan(
    config: Annotated[
        Path, typer.Option(help="A model's config.json, a directory with one, or a description by hand.")
    ],
    prefill: Annotated[str, typer.Option(help="The prefill side, such as tp=4,pp=2; see below.")] = "tp=1",
    decode: Annotated[str, typer.Option(help="The decode side, such as tp=2,dp=2.")] = "tp=1",
    decode_config: Annotated[
        Path | None, typer.Option(help="The decode side's configuration, where it differs.")
    ] = None,
    prefill_page_size: Annotated[int, typer.Option(help="Tokens in a page of the prefill side.")] = 16,
    decode_page_size: Annotated[int, typer.Option(help="Tokens in a page of the decode side.")] = 16,
    prefill_layout: Annotated[str, typer.Option(help="Order in its pages: nhd, hnd or packed.")] = "nhd",
    decode_layout: Annotated[str, typer.Option(help="Order in its pages: nhd, hnd or packed.")] = "nhd",
    prefill_dtype: Annotated[
        str | None, typer.Option(help="Of its keys, values and latents, such as float8_e4m3fn; else the model's.")
    ] = None,
    decode_dtype: Annotated[str | None, typer.Option(help="The same for the decode side.")] = None,
    tokens: Annotated[int, typer.Option(help="Length of the request that is counted.")] = 1000,
    pages: Annotated[
        str, typer.Option(help="How a request's pages lie, to choose a path: scattered or, in a fresh pool, adjacent.")
    ] = "scattered",
    room: Annotated[int, typer.Option(help="The request's room number: decides which of several replicas sends.")] = 1,
    draw: Annotated[
        Path | None, typer.Option(help="Draw who sends which heads and layers where: a .svg, .png or .pdf.")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Write both layouts, a request's pages and every move of bytes, as JSON.")
    ] = None,
    json: Json = False,
) -> None:
    """Show what two deployments would exchange: who sends what to whom, how much, which way, and whether it is right.

    Starts nothing and moves nothing. A side is written as tp=4,pp=2,dp=2,cp=2,ep=8, every part of which may be left
    out; stages=7+8 instead of pp gives every stage its layers; cp=2:contiguous, cp=2:zigzag or cp=2:interleaved:16 say
    how tokens are partitioned; draft adds the layers of the draft model. The exit code is 0 only if the plan is proved.
    """
    from kvferry.applications.plan.counting import PagePlacement
    from kvferry.applications.plan.run import run
    from kvferry.applications.plan.study import RequestOptions, SideOptions

    orders = [
        one_of(PageOrder, layout, option=f"--{side}-layout")
        for side, layout in (("prefill", prefill_layout), ("decode", decode_layout))
    ]
    is_proved = run(
        SideOptions("prefill", config, prefill_dtype, prefill, prefill_page_size, orders[0]),
        SideOptions("decode", decode_config or config, decode_dtype, decode, decode_page_size, orders[1]),
        RequestOptions(tokens, room, one_of(PagePlacement, pages, option="--pages")),
        picture=draw,
        export=export,
        wants_json=json,
    )
    if not is_proved:
        raise typer.Exit(FAILED)


@app.command()
@with_fields_as_options
def bench(
    arguments: BenchArguments,
    role: Annotated[
        str, typer.Option(help="Which side runs here: both, or prefill or decode, with the other one elsewhere.")
    ] = "both",
    registry: Annotated[
        str | None,
        typer.Option(help="Where a registry answers, by which the sides find each other [KVFERRY_REGISTRY_URL]."),
    ] = None,
    one_clock: Annotated[
        bool,
        typer.Option(
            "--one-clock",
            help="With --role prefill or decode: the other side runs on this machine, in a container or network "
            "namespace of its own, so that times of both can be compared.",
        ),
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw latencies and throughput: a .svg, .png or .pdf.")] = None,
    json: Json = False,
) -> None:
    """Measure how fast caches move between processes, beside what the machine can do at best.

    Every rank is a process with its own pool. In the same run, in turn: submits that wait, the direct path, the staged
    one, the one that kvferry chooses, a bulk write of the same bytes, and a copy in memory. Every byte of every run is
    checked. The exit code is 0 only if all were right.

    On two machines, run it on both with the same options, one with --role prefill and one with --role decode, which
    shows the figures; --registry says where both find a running `kvferry registry`.
    """
    from kvferry.applications.bench.run import checked_place, run

    if not run(arguments, checked_place(role, registry, one_clock=one_clock), picture=plot, wants_json=json):
        raise typer.Exit(FAILED)


@app.command()
@with_fields_as_options
def up(
    request: DeploymentRequest,
    logs: Annotated[Path | None, typer.Option(help="Directory for logs; a new one if not given.")] = None,
    timeout_s: Annotated[float, typer.Option(help="Longest wait until all processes serve.")] = 600.0,
) -> None:
    """Start a disaggregated deployment of a real engine on this machine.

    Prefill and decode servers of vLLM or SGLang, and one address that speaks OpenAI's interface, streaming included: it
    asks a prefill and a decode server at once, and tries another pair when one fails. Processes that die are started
    again. For one machine; for a cluster, the same plug-ins work under a gateway (docs/vllm.md, docs/sglang.md).
    """
    from kvferry.applications.up.supervision import run

    run(request, logs=logs, timeout_s=timeout_s)


@app.command()
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
    engine: Annotated[
        str | None,
        typer.Option(
            "--for", help="Look at the whole set of a deployment, and print the lines that it lacks: vllm or sglang."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Look at what is installed, set, reachable and running, and say what is wrong and what to do.

    Run it in the environment and with the variables of a rank. The exit code is 0 if all is good, 1 if something
    deserves a look, and 2 if something is wrong.
    """
    from kvferry.applications.doctor.run import run

    if listen is not None:
        from kvferry.applications.doctor import probe

        with suppress(KeyboardInterrupt), interruptible():
            probe.listen(Settings(), listen, typer.echo, Device())
        return
    chosen = None if engine is None else one_of(Engine, engine, option="--for")
    worst = run(
        where or (),
        peer=peer,
        moves_bytes=wire,
        wire_to=wire_to,
        engine=chosen,
        wants_json=json,
        console=Console(),
    )
    if worst:
        raise typer.Exit(int(worst))


@app.command()
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
    from kvferry.applications.top.view import run

    if not run(where or (), interval_s=interval_s, once=once, console=Console()):
        raise typer.Exit(FAILED)


@app.command()
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
    from kvferry.applications.drain import run

    if not run(targets or (), timeout_s=timeout_s, say=typer.echo):
        raise typer.Exit(FAILED)


@app.command()
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
    from kvferry.applications.top.asking import record

    if not record(where, seconds=seconds, output=output, console=Console()):
        raise typer.Exit(FAILED)
