"""Draws the cases: how latencies are distributed, and throughput by size of block beside the limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvferry.applications.bench.options import VARIANTS
from kvferry.applications.bench.summary import GB, Case, Figures

_DASHES = ("-", "--", ":", "-.")
_MARKERS = "osD^"


def draw(cases: Sequence[Case], file: Path) -> None:
    """Draws to a file, in the format that its name ends in. Variants that were refused are left out."""
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
