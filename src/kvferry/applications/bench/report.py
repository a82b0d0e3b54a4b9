"""Shows the benchmark's cases as a table for a person, as one JSON object, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvferry.applications.bench.options import VARIANTS, BenchOptions
from kvferry.applications.bench.summary import GB, Case, Exposed, Figures, all_exact
from kvferry.layout import MemoryKind

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FIGURES: Mapping[str, Callable[[Figures], object]] = {
    "path": lambda each: each.path,
    "why": lambda each: each.why,
    "gb_per_s": lambda each: round(each.bytes_per_s / GB, 4),
    "bulk_gb_per_s": lambda each: round(each.bulk_bytes_per_s / GB, 4),
    "memory_copy_gb_per_s": lambda each: round(each.memory_copy_bytes_per_s / GB, 4),
    "efficiency": lambda each: round(each.efficiency, 4),
    "ratio_to_direct": lambda each: each.to_direct and round(each.to_direct, 4),
    "submit_us": lambda each: _percentiles(each.submit_s, 1e6, 2),
    "latency_ms": lambda each: _percentiles(each.latency_s, 1e3, 3),
    "cpu_s_per_gb": lambda each: round(each.cpu_s_per_gb, 4),
    "interpreter_s_per_gb": lambda each: each.interpreter_s_per_gb and round(each.interpreter_s_per_gb, 4),
    "descriptors": lambda each: each.descriptors,
    "writes": lambda each: each.writes,
    "bytes_per_request": lambda each: each.request_bytes,
    "exposed": lambda each: each.exposed and _exposed_data(each.exposed),
}
"""What is said of a variant that went, in the units that the names say."""


def as_json(options: BenchOptions, cases: Sequence[Case], *, shares_clock: bool) -> str:
    """Everything as one JSON object; of the options, what all cases have in common."""
    return json.dumps(
        {
            "exact": all_exact(cases),
            "model": options.model.name,
            "device": "cuda" if options.device.kind is MemoryKind.VRAM else "cpu",
            "prefill_tp": options.prefill.tp_size,
            "decode_tp": options.decode.tp_size,
            "prefill_layout": options.prefill.order.value,
            "decode_layout": options.decode.order.value,
            "tokens": options.tokens,
            "chunks": options.chunks,
            "requests": options.requests,
            "passes": options.passes,
            "in_flight": options.at_a_time,
            "nixl_threads": options.nixl_threads,
            "latency_from": "submit" if shares_clock else "asking",
            "layer_time_ms": options.layer_time_ms,
            "layer_ranges": options.layer_ranges if options.layer_time_ms else None,
            "cases": [case_data(case) for case in cases],
        }
    )


def case_data(case: Case) -> dict[str, Any]:
    """One case in the units that the fields' names say. Figures of a variant that cannot do it are None."""
    options = case.options
    data: dict[str, Any] = {
        "case": case.name,
        "variant": case.variant,
        "prefill_page_tokens": options.prefill.page_tokens,
        "decode_page_tokens": options.decode.page_tokens,
        "pages": "scattered" if options.is_scattered else "contiguous",
        "transport": options.transport,
        "block_bytes": round(case.block_bytes, 1),
        "refused": case.refusal,
        "bytes_checked": case.checked.checked_bytes,
        "bytes_wrong": case.checked.wrong_bytes,
        "exact": case.is_exact,
    }
    return data | {name: case.figures and figure(case.figures) for name, figure in _FIGURES.items()}


def _percentiles(seconds: Mapping[int, float], per_s: float, digits: int) -> dict[str, float]:
    return {f"p{number}": round(per_s * each, digits) for number, each in seconds.items()}


def _exposed_data(exposed: Exposed) -> dict[str, Any]:
    return {
        "ms": _percentiles(exposed.seconds, 1e3, 3),
        "share_of_whole": round(exposed.share, 4),
        "limit_ms": round(1e3 * exposed.limit_s, 3),
    }


def show(options: BenchOptions, cases: Sequence[Case], console: Console, *, shares_clock: bool) -> None:
    """The cases for a person."""
    title = (
        f"{options.model.name}: {options.requests} requests of {options.tokens} tokens, {options.at_a_time} in flight, "
        f"{options.chunks} chunks each; GB/s are medians, efficiency the median of ratios to the bulk write"
    )
    table = Table(title=title)
    table.add_column("case")
    table.add_column("variant")
    table.add_column("path")
    for name in ("GB/s", "bulk", "memcpy", "efficiency", "x direct", "submit us", "latency ms", "CPU s/GB", "descr."):
        table.add_column(name, justify="right")
    table.add_column("exact")
    for case in cases:
        table.add_row(case.name, case.variant, *_cells(case))
    console.print(table)
    if options.layer_time_ms:
        console.print(_exposed_table(options, cases))
    since = "its first submit" if shares_clock else "when the decode side asked for it"
    console.print(
        f"submit: p50 / p99 of the caller's time; latency: p50 / p95 / p99 of a request, from {since} to its arrival",
        style="dim",
    )
    for case in cases:
        place = f"{case.name}, {case.variant}"
        if case.figures is None:
            console.print(f"[bold yellow]refused[/]  {place}: {escape(case.refusal or '')}")
        elif not case.is_exact:
            console.print(
                f"[bold red]NO[/]  {place}: {case.checked.wrong_bytes:,} of {case.checked.checked_bytes:,} bytes are "
                f"wrong, the first in {case.checked.first_wrong}"
            )
        else:
            console.print(f"{place}: {escape(case.figures.path)}, {escape(case.figures.why)}", style="dim")


def _exposed_table(options: BenchOptions, cases: Sequence[Case]) -> Table:
    """What is left of transfers when their prompts are computed."""
    computing_ms = options.layer_time_ms * options.model.num_layers
    table = Table(
        title=f"what is left of a transfer when its prompt is computed: {options.model.num_layers} layers of "
        f"{options.layer_time_ms:g} ms each ({computing_ms:g} ms), sent whole at the end, or in "
        f"{min(options.layer_ranges, options.model.num_layers)} ranges as they are computed"
    )
    table.add_column("case")
    table.add_column("variant")
    for name in ("left, ms (p50 / p95)", "of whole", "least possible, ms", "writes"):
        table.add_column(name, justify="right")
    for case in cases:
        if case.figures is not None and case.figures.exposed is not None:
            exposed = case.figures.exposed
            left = " / ".join(f"{1e3 * seconds:.1f}" for seconds in exposed.seconds.values())
            share, limit = f"{exposed.share:.2f}", f"{1e3 * exposed.limit_s:.1f}"
            table.add_row(case.name, case.variant, left, share, limit, str(case.figures.writes))
    return table


def _cells(case: Case) -> list[str]:
    figures = case.figures
    if figures is None:
        return ["[bold yellow]refused[/]"]
    return [
        figures.path,
        f"{figures.bytes_per_s / GB:.2f}",
        f"{figures.bulk_bytes_per_s / GB:.2f}",
        f"{figures.memory_copy_bytes_per_s / GB:.2f}",
        f"{figures.efficiency:.2f}",
        "" if figures.to_direct is None else f"{figures.to_direct:.2f}",
        " / ".join(f"{1e6 * seconds:.0f}" for seconds in figures.submit_s.values()),
        " / ".join(f"{1e3 * seconds:.1f}" for seconds in figures.latency_s.values()),
        f"{figures.cpu_s_per_gb:.2f}",
        f"{figures.descriptors:,}",
        "[bold green]yes[/]" if case.is_exact else "[bold red]NO[/]",
    ]


_DASHES = ("-", "--", ":", "-.")
_MARKERS = "osD^"


def draw(cases: Sequence[Case], file: Path) -> None:
    """Draws how latencies are distributed, and throughput by size of block beside the limit.

    To a file, in the format that its name ends in. Variants that were refused are left out.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6), layout="constrained")
    latencies, speeds = figure.subplots(1, 2)
    went = [(case, case.figures) for case in cases if case.figures is not None]
    _draw_latencies(latencies, went)
    _draw_speeds(speeds, went)
    figure.savefig(file, dpi=140)


def _draw_latencies(axes: Axes, went: Sequence[tuple[Case, Figures]]) -> None:
    names = list(dict.fromkeys(case.name for case, _ in went))
    for case, figures in went:
        sorted_ms = 1e3 * np.sort(figures.all_latencies_s)
        axes.step(
            sorted_ms,
            np.arange(1, len(sorted_ms) + 1) / len(sorted_ms),
            where="post",
            color=_colour(case.variant),
            linestyle=_DASHES[names.index(case.name) % len(_DASHES)],
            label=f"{case.variant}: {case.name}",
        )
    axes.set(xscale="log", xlabel="latency of a request, ms", ylabel="share of requests", ylim=(0, 1.02))
    if went:
        axes.legend(fontsize="xx-small")


def _draw_speeds(axes: Axes, went: Sequence[tuple[Case, Figures]]) -> None:
    for number, variant in enumerate(VARIANTS):
        points = sorted((case.block_bytes, each.bytes_per_s / GB) for case, each in went if case.variant == variant)
        if points:
            marker = _MARKERS[number % len(_MARKERS)]
            axes.plot(*zip(*points, strict=True), marker=marker, color=_colour(variant), label=variant)
    limit = sorted({(case.block_bytes, figures.bulk_bytes_per_s / GB) for case, figures in went})
    if limit:
        axes.plot(*zip(*limit, strict=True), linestyle="--", marker="_", color="black", label="bulk write (limit)")
        axes.legend(fontsize="x-small")
    axes.set(xscale="log", xlabel="bytes of a block, which lie together on both sides", ylabel="GB/s")
    axes.set_ylim(bottom=0)


def _colour(variant: str) -> str:
    return f"C{list(VARIANTS).index(variant)}"
