"""`kvferry demo`, as Typer calls it."""

from __future__ import annotations

import time

import typer
from rich.console import Console

from kvferry.applications.command_line import FAILED, Json, with_fields_as_options
from kvferry.applications.demo.options import DemoArguments


@with_fields_as_options
def demo(arguments: DemoArguments, json: Json = False) -> None:
    """Prefill on some ranks, move the cache over a real transport, decode on others, and check every byte and token.

    Every rank is a process of its own with its own paged pool in random page order. A real transformers model prefills;
    each prefill rank keeps only its shard of the cache. What the decode side generates comes from nothing but the bytes
    that arrived, and must equal what the undivided model generates. The exit code is 0 only if it does and every byte
    is exact.
    """
    from kvferry.applications.demo.options import prepare

    started_at = time.monotonic()
    options = prepare(arguments)
    from kvferry.applications.demo import report, run, verdict

    with report.progress_view(options, Console(stderr=True)) as view:
        outcome = run.run(options, view.on_report)
    judged = verdict.judge(options, outcome)
    if json:
        typer.echo(report.as_json(options, judged))
    else:
        elapsed_s = time.monotonic() - started_at
        report.show(options, judged, Console(), elapsed_s=elapsed_s)
    if not judged.holds:
        raise typer.Exit(FAILED)
