"""Draws the cases: how latencies are distributed, and throughput by size of descriptor beside the limit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from kvferry.cli.bench.summary import GB, Case


def draw(cases: Sequence[Case], file: Path) -> None:
    """Draws to a file, in the format that its name ends in."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    latencies, speeds = figure.subplots(1, 2)
    for case in cases:
        sorted_ms = 1e3 * np.sort(case.all_latencies_s)
        share = np.arange(1, len(sorted_ms) + 1) / len(sorted_ms)
        latencies.step(sorted_ms, share, where="post", label=f"{case.variant}: {case.name}")
    latencies.set(xscale="log", xlabel="latency of a request, ms", ylabel="share of requests", ylim=(0, 1.02))
    latencies.legend(fontsize="x-small")
    by_variant = sorted(cases, key=lambda case: case.variant)
    for variant, members in groupby(by_variant, key=lambda case: case.variant):
        points = sorted((_descriptor_bytes(case), case.bytes_per_s / GB) for case in members)
        speeds.plot(*zip(*points, strict=True), marker="o", label=variant)
    limit = sorted({(_descriptor_bytes(case), case.bulk_bytes_per_s / GB) for case in cases})
    speeds.plot(*zip(*limit, strict=True), linestyle="--", marker="_", color="black", label="bulk write (limit)")
    speeds.set(xscale="log", xlabel="bytes a descriptor", ylabel="GB/s")
    speeds.set_ylim(bottom=0)
    speeds.legend(fontsize="x-small")
    figure.savefig(file, dpi=140)


def _descriptor_bytes(case: Case) -> float:
    return case.request_bytes / case.descriptors
