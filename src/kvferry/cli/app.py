"""The command line of kvferry."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvferry._version import __version__
from kvferry.errors import KVFerryError
from kvferry.settings import Settings

app = typer.Typer(
    name="kvferry",
    help="Moves LLM KV caches from prefill workers to decode workers, from any parallel layout to any other.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

FAILED, WRONG_INPUT = 1, 2


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
        typer.echo(f"The registry answers at {url}. Set KVFERRY_REGISTRY_URL={url} for every rank. Ctrl-C stops it.")

    server.serve_forever(started)


@app.command()
def demo(
    prefill_tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of a prefill engine.")] = 4,
    decode_tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of a decode engine.")] = 2,
    prefill_pp: Annotated[int, typer.Option(help="Pipeline stages of a prefill engine.")] = 1,
    decode_pp: Annotated[int, typer.Option(help="Pipeline stages of a decode engine.")] = 1,
    prefill_stages: Annotated[
        str | None, typer.Option(help="Layers of every prefill stage, such as 3,1; instead of --prefill-pp.")
    ] = None,
    decode_stages: Annotated[
        str | None, typer.Option(help="Layers of every decode stage, such as 1,3; instead of --decode-pp.")
    ] = None,
    prefill_engines: Annotated[int, typer.Option(help="Prefill engines side by side.")] = 1,
    decode_engines: Annotated[int, typer.Option(help="Decode engines side by side.")] = 1,
    arch: Annotated[
        str,
        typer.Option(
            help="Architecture of a small model with seeded weights: qwen3, llama, deepseek_v3, or one of the hybrids "
            "qwen3_next (recurrent and convolution states), gemma3 (sliding windows) and mamba2."
        ),
    ] = "qwen3",
    kv_heads: Annotated[
        int, typer.Option(help="KV heads of the seeded model; also key heads of qwen3_next's states, groups of mamba2.")
    ] = 4,
    layers: Annotated[int, typer.Option(help="Layers of the seeded model.")] = 4,
    model: Annotated[
        Path | None, typer.Option(help="Directory of a local checkpoint to use instead, with its tokenizer.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Text file with one prompt a line; prompts come with kvferry.")
    ] = None,
    requests: Annotated[int, typer.Option(help="How many requests.")] = 8,
    in_flight: Annotated[int, typer.Option(help="Requests that a decode rank waits for at a time.")] = 4,
    page_size: Annotated[int, typer.Option(help="Tokens in a page.")] = 16,
    prefill_page_size: Annotated[
        int | None, typer.Option(help="Tokens in a page of the prefill side; else --page-size.")
    ] = None,
    decode_page_size: Annotated[
        int | None, typer.Option(help="Tokens in a page of the decode side; else --page-size.")
    ] = None,
    prefill_layout: Annotated[str, typer.Option(help="Order in a page of the prefill side: nhd or hnd.")] = "nhd",
    decode_layout: Annotated[str, typer.Option(help="Order in a page of the decode side: nhd or hnd.")] = "nhd",
    chunk_tokens: Annotated[int, typer.Option(help="Tokens prefilled and sent at a time; whole pages.")] = 64,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to decode for every request.")] = 24,
    seed: Annotated[int, typer.Option(help="Seed of weights and page orders.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Prefill on some ranks, move the cache over NIXL, decode on others, and check every byte and token.

    Every rank is a process of its own with its own paged pool in random page order. A real transformers model prefills;
    each prefill rank keeps only its shard of the cache. What the decode side generates comes from nothing but the bytes
    that arrived, and must equal what the undivided model generates. The exit code is 0 only if it does and every byte
    is exact.
    """
    from kvferry.cli.demo.prepare import ShapeValues, prepare

    started_at = time.monotonic()
    options = prepare(
        prefill=ShapeValues(
            tp_size=prefill_tp,
            pp_size=prefill_pp,
            stages=prefill_stages,
            engines=prefill_engines,
            page_tokens=page_size if prefill_page_size is None else prefill_page_size,
            order=prefill_layout,
        ),
        decode=ShapeValues(
            tp_size=decode_tp,
            pp_size=decode_pp,
            stages=decode_stages,
            engines=decode_engines,
            page_tokens=page_size if decode_page_size is None else decode_page_size,
            order=decode_layout,
        ),
        architecture=arch,
        num_kv_heads=kv_heads,
        num_layers=layers,
        model_directory=model,
        prompt_file=prompt_file,
        requests=requests,
        in_flight=in_flight,
        chunk_tokens=chunk_tokens,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )
    from kvferry.cli.demo import report, run, verdict

    with report.progress_view(options, Console(stderr=True)) as view:
        outcome = run.run(options, view.on_report)
    judged = verdict.judge(options, outcome)
    transport = Settings().transport
    if json:
        typer.echo(report.as_json(options, judged, transport=transport))
    else:
        elapsed_s = time.monotonic() - started_at
        report.show(options, judged, Console(), transport=transport, elapsed_s=elapsed_s)
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
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Show what two deployments would exchange: who sends what to whom, how much, which way, and whether it is right.

    Starts nothing and moves nothing. A side is written as tp=4,pp=2,dp=2,cp=2,ep=8, every part of which may be left
    out; stages=7+8 instead of pp gives every stage its layers; cp=2:contiguous, cp=2:zigzag or cp=2:interleaved:16 say
    how tokens are dealt; draft adds the layers of the draft model. The exit code is 0 only if the plan is proved.
    """
    from kvferry.cli.plan import run

    is_proved = run.run(
        prefill=("prefill", config, prefill, prefill_page_size, prefill_layout, prefill_dtype),
        decode=("decode", decode_config or config, decode, decode_page_size, decode_layout, decode_dtype),
        request=(tokens, room, pages),
        picture=draw,
        wants_json=json,
    )
    if not is_proved:
        raise typer.Exit(FAILED)


@app.command()
def bench(
    preset: Annotated[
        str, typer.Option(help="Whose cache: small, qwen3-8b, qwen3-32b or llama-3.1-70b.")
    ] = "qwen3-32b",
    config: Annotated[
        Path | None, typer.Option(help="A model's config.json, or a description by hand, instead of --preset.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="Where the caches lie: cpu, or cuda for one GPU, which needs torch.")
    ] = "cpu",
    variants: Annotated[
        str, typer.Option(help="What is measured: some of synchronous, direct, staged and auto, separated by commas.")
    ] = "synchronous,direct,staged,auto",
    prefill_tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of the prefill engine.")] = 1,
    decode_tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of the decode engine.")] = 1,
    page_size: Annotated[str, typer.Option(help="Tokens in a page; several, such as 1,16,64, are a case each.")] = "16",
    decode_page_size: Annotated[int | None, typer.Option(help="Of the decode side; else --page-size.")] = None,
    prefill_layout: Annotated[str, typer.Option(help="Order in a page of the prefill side: nhd or hnd.")] = "nhd",
    decode_layout: Annotated[str, typer.Option(help="Order in a page of the decode side: nhd or hnd.")] = "nhd",
    pages: Annotated[
        str, typer.Option(help="How a request's pages lie: scattered, contiguous, or both, a case each.")
    ] = "scattered",
    tokens: Annotated[int, typer.Option(help="Tokens of a request.")] = 2048,
    chunks: Annotated[int, typer.Option(help="Chunks that a request is submitted in.")] = 1,
    requests: Annotated[int, typer.Option(help="Requests with memory of their own.")] = 4,
    passes: Annotated[
        int, typer.Option(help="How often a repetition goes over the memory of its requests: more, for a steady load.")
    ] = 1,
    in_flight: Annotated[int, typer.Option(help="Requests submitted and not yet sent at a time.")] = 4,
    repetitions: Annotated[int, typer.Option(help="Rounds, in each of which every variant has a turn.")] = 3,
    seconds: Annotated[float, typer.Option(help="Begin further rounds for so long.")] = 0.0,
    nixl_threads: Annotated[
        int | None, typer.Option(help="NIXL's worker threads of every endpoint [KVFERRY_NIXL_THREADS].")
    ] = None,
    role: Annotated[
        str, typer.Option(help="Which side runs here: both, or prefill or decode, with the other one elsewhere.")
    ] = "both",
    registry: Annotated[
        str | None,
        typer.Option(help="Where a registry answers, by which the sides find each other [KVFERRY_REGISTRY_URL]."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw latencies and throughput: a .svg, .png or .pdf.")] = None,
    plant_wrong_byte: Annotated[
        bool, typer.Option("--plant-wrong-byte", help="Change a byte that arrived, to see that the check finds it.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Measure how fast caches move between processes, beside what the machine can do at best.

    Every rank is a process with its own pool. In the same run, in turn: submits that wait, the direct path, the staged
    one, the one that kvferry chooses, a bulk write of the same bytes, and a copy in memory. Every byte of every run is
    checked. The exit code is 0 only if all were right.

    On two machines, run it on both with the same options, one with --role prefill and one with --role decode, which
    shows the figures; --registry says where both find a running `kvferry registry`.
    """
    from kvferry.cli.bench.run import Typed, checked_place, run

    typed = Typed(
        preset=preset,
        config=config,
        device=device,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        page_size=page_size,
        decode_page_size=decode_page_size,
        prefill_layout=prefill_layout,
        decode_layout=decode_layout,
        pages=pages,
        variants=variants,
        tokens=tokens,
        chunks=chunks,
        requests=requests,
        passes=passes,
        in_flight=in_flight,
        repetitions=repetitions,
        seconds=seconds,
        nixl_threads=nixl_threads,
        plant_wrong_byte=plant_wrong_byte,
    )
    if not run(typed, checked_place(role, registry), picture=plot, wants_json=json):
        raise typer.Exit(FAILED)


@app.command()
def up(
    model: Annotated[Path, typer.Option(help="A directory with the model, as transformers saves it.")],
    engine: Annotated[str, typer.Option(help="Which engine: vllm.")] = "vllm",
    prefill: Annotated[int, typer.Option(help="Prefill servers.")] = 1,
    prefill_tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of each.")] = 1,
    decode: Annotated[int, typer.Option(help="Decode servers.")] = 1,
    decode_tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of each.")] = 1,
    host: Annotated[str, typer.Option(help="Address to answer on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to answer on.")] = 8000,
    logs: Annotated[Path | None, typer.Option(help="Directory for logs; a new one if not given.")] = None,
    timeout_s: Annotated[float, typer.Option(help="Longest wait until all processes serve.")] = 600.0,
    engine_options: Annotated[
        list[str] | None, typer.Argument(help="Options for every server, after --, such as -- --max-model-len 4096.")
    ] = None,
) -> None:
    """Start a disaggregated deployment of a real engine on this machine.

    Prefill and decode servers, a registry, and one address that speaks OpenAI's interface, streaming included: it asks
    a prefill and a decode server at once, and tries another pair when one fails. Processes that die are started again.
    For one machine; for a cluster, the same connector works under a gateway (docs/vllm.md).
    """
    from kvferry.cli.up.run import run
    from kvferry.engines.deployment.plan import DeploymentRequest
    from kvferry.errors import ConfigurationError

    if engine != "vllm":
        raise ConfigurationError(f"--engine {engine}: known is vllm")
    request = DeploymentRequest(model, prefill, prefill_tp, decode, decode_tp, host, port, tuple(engine_options or ()))
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
        str | None, typer.Option(help="Measure NIXL with a machine where `kvferry doctor --listen` runs: host:port.")
    ] = None,
    listen: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Only let doctors of other machines measure, on this port.")
    ] = None,
    wire: Annotated[bool, typer.Option(help="Measure NIXL between two processes of this machine.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Look at what is installed, set, reachable and running, and say what is wrong and what to do.

    Run it in the environment and with the variables of a rank. The exit code is 0 if all is good, 1 if something
    deserves a look, and 2 if something is wrong.
    """
    from kvferry.cli.doctor.run import run

    if listen is not None:
        from kvferry.cli.doctor.pairing import listen as listen_on

        with suppress(KeyboardInterrupt):
            listen_on(Settings(), listen, typer.echo)
        return
    worst = run(where or (), peer=peer, moves_bytes=wire, wire_to=wire_to, wants_json=json, console=Console())
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
    from kvferry.cli.top.run import run

    if not run(where or (), interval_s=interval_s, once=once, console=Console()):
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
    from kvferry.cli.top.recording import record

    if not record(where, seconds=seconds, output=output, console=Console()):
        raise typer.Exit(FAILED)


@app.command()
def sim(
    seed: Annotated[int | None, typer.Option(help="The schedule to run, or the first of several.")] = None,
    count: Annotated[int, typer.Option(min=1, help="How many schedules, from the first on.")] = 1,
    steps: Annotated[bool, typer.Option("--steps", help="Print what happens, step by step.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write what happens to a file.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="How many run at a time; else one for each CPU.")] = None,
) -> None:
    """Run whole systems on simulated machines, wires and clocks, where everything goes wrong that may.

    The endpoints are those that ship. A seed decides who acts when, what is late, lost or said twice, and who is
    frozen, killed, cut off or closed; after every step all memory is compared, byte by byte, with what must hold.
    Without a seed, a fresh one is drawn. A schedule that breaks a law is printed, shrunken to what it takes. The exit
    code is 0 only if none did.
    """
    from kvferry.cli.sim.run import fresh_seed, replay, search_many

    console = Console()
    first = fresh_seed() if seed is None else seed
    if count == 1:
        is_well = replay(first, shows_steps=steps, trace=trace, console=console)
    else:
        is_well = search_many(first, count, processes=processes, console=console)
    if not is_well:
        raise typer.Exit(FAILED)
