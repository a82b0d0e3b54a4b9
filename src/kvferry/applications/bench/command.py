"""`kvferry bench`, as Typer calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvferry.applications.bench.options import BenchArguments
from kvferry.applications.command_line import FAILED, Json, with_fields_as_options


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
