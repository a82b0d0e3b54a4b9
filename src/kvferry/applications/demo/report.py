"""Shows the demo: progress while it works, then a table, a picture of who sent what to whom, and the verdict."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvferry.applications.demo.options import DemoOptions, EngineShape
from kvferry.applications.demo.ranks import Answered, Moved, Ready, Report
from kvferry.applications.demo.run import RankName
from kvferry.applications.demo.verdict import Verdict


@contextmanager
def progress_view(options: DemoOptions, console: Console) -> Iterator[Callable[[RankName, Report], None]]:
    """Shows progress on a console for as long as the context lasts; yields what takes every report as it comes.

    A bar each counts processes that are up, and requests sent, received and decoded, over all ranks.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    requests = len(options.requests)
    prefill_ranks, decode_ranks = len(options.prefill.coordinates), len(options.decode.coordinates)
    processes = prefill_ranks * options.prefill.count + decode_ranks * options.decode.count
    with Progress(*columns, console=console) as progress:
        ready = progress.add_task("ranks ready", total=processes)
        bars = {
            ("prefill", Ready): ready,
            ("decode", Ready): ready,
            ("prefill", Moved): progress.add_task("shards sent", total=requests * prefill_ranks),
            ("decode", Moved): progress.add_task("shards received", total=requests * decode_ranks),
            ("decode", Answered): progress.add_task("requests decoded", total=requests),
            ("undivided", Answered): progress.add_task("answers of the undivided model", total=requests),
        }

        def take(name: RankName, report: Report) -> None:
            if (name.side, type(report)) in bars:
                progress.advance(bars[name.side, type(report)])

        yield take


def as_json(options: DemoOptions, verdict: Verdict) -> str:
    """The result as one JSON object."""
    times = np.array(verdict.transfer_ms)
    return json.dumps(
        {
            "tokens_match": verdict.tokens_match,
            "bytes_checked": verdict.bytes_checked,
            "bytes_mismatched": verdict.bytes_mismatched,
            "requests": len(options.requests),
            "prefill_tp": options.prefill.tp_size,
            "decode_tp": options.decode.tp_size,
            "prefill_stages": list(options.prefill.stages),
            "decode_stages": list(options.decode.stages),
            "prefill_page_size": options.prefill.page_tokens,
            "decode_page_size": options.decode.page_tokens,
            "prefill_layout": options.prefill.order.value,
            "decode_layout": options.decode.order.value,
            "groups": list(options.groups),
            "architecture": options.model.architecture,
            "path": "direct",
            "bytes_sent": verdict.total_bytes,
            "descriptors": verdict.descriptors,
            "transfer_ms": {
                "p50": round(float(np.percentile(times, 50)), 3),
                "p95": round(float(np.percentile(times, 95)), 3),
                "mean": round(float(times.mean()), 3),
            },
            "gb_per_s": round(verdict.gb_per_s, 4),
        }
    )


def show(options: DemoOptions, verdict: Verdict, console: Console, *, elapsed_s: float) -> None:
    """The result for a person."""
    times = np.array(verdict.transfer_ms)
    table = Table(title="Transfers", show_header=False)
    table.add_row("requests", str(len(options.requests)))
    table.add_row("pages", f"{_pages(options.prefill)} -> {_pages(options.decode)}")
    table.add_row("groups", ", ".join(options.groups))
    table.add_row("sent", f"{verdict.total_bytes / 2**20:.1f} MiB in {verdict.descriptors:,} descriptors")
    table.add_row("from the last chunk's submission", f"p50 {np.percentile(times, 50):.1f} ms")
    table.add_row("to arrival on every decode rank", f"p95 {np.percentile(times, 95):.1f} ms")
    table.add_row("while writes were on their way", f"{verdict.gb_per_s:.2f} GB/s")
    table.add_row("path", "direct")
    console.print(table)
    console.print(_picture(options, verdict))
    console.print(_sample(options, verdict))
    _print_verdict(verdict, console, elapsed_s)


def _pages(shape: EngineShape) -> str:
    return f"{shape.page_tokens} tokens {shape.order.value.upper()}"


def _picture(options: DemoOptions, verdict: Verdict) -> Table:
    """Prefill ranks down, decode ranks across; what crossed in the cells."""
    picture = Table(title="Who sent what to whom", show_lines=True)
    picture.add_column("prefill \\ decode")
    for decode in options.decode.coordinates:
        picture.add_column(_rank_title(options, options.decode, decode.engine_rank))
    for prefill in options.prefill.coordinates:
        cells = [
            "\n".join(verdict.links.get((prefill.engine_rank, decode.engine_rank), ["-"]))
            for decode in options.decode.coordinates
        ]
        picture.add_row(_rank_title(options, options.prefill, prefill.engine_rank), *cells)
    return picture


def _rank_title(options: DemoOptions, shape: EngineShape, engine_rank: int) -> str:
    coordinates = shape.coordinates[engine_rank]
    stage = f" stage {coordinates.pp_rank}" if coordinates.pp_size > 1 else ""
    sharded = options.components[0]
    held = dict(zip((axis.name for axis in sharded.component.axes), shape.held(sharded, coordinates), strict=True))
    heads = held.get("head")
    heads_held = f" (heads {heads.start}-{heads.stop - 1})" if heads is not None else ""
    return f"rank {engine_rank}{stage}{heads_held}"


def _sample(options: DemoOptions, verdict: Verdict) -> Text:
    """The first answer, so that there is something to read."""
    request = options.requests[0]
    tokens = verdict.answers.get(request.room, [])
    return Text(f"Request {request.room}: {request.prompt[:60]!r}... -> tokens {tokens[:12]}...", style="dim")


def _print_verdict(verdict: Verdict, console: Console, elapsed_s: float) -> None:
    def line(is_good: bool, text: str) -> None:
        mark = "[bold green]yes[/]" if is_good else "[bold red]NO[/]"
        console.print(f"{mark}  {text}")

    line(verdict.tokens_match, "tokens equal those of the undivided model")
    line(
        verdict.bytes_mismatched == 0,
        f"bytes exact: {verdict.bytes_checked:,} checked, {verdict.bytes_mismatched:,} mismatched",
    )
    outcome = "[bold green]The cache arrived.[/]" if verdict.holds else "[bold red]The demo failed.[/]"
    console.print(f"{outcome} {elapsed_s:.1f} s in all.")
