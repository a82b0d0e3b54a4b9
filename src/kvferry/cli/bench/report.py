"""Shows the benchmark's cases as a table for a person, and as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from kvferry.cli.bench.options import BenchOptions
from kvferry.cli.bench.summary import GB, Case


def as_json(options: BenchOptions, cases: Sequence[Case]) -> str:
    """Everything as one JSON object; of the options, what all cases have in common."""
    return json.dumps(
        {
            "exact": all(case.is_exact for case in cases),
            "model": options.model.name,
            "prefill_tp": options.prefill.tp_size,
            "decode_tp": options.decode.tp_size,
            "prefill_layout": options.prefill.order.value,
            "decode_layout": options.decode.order.value,
            "tokens": options.tokens,
            "chunks": options.chunks,
            "requests": options.requests,
            "in_flight": options.in_flight,
            "nixl_threads": options.nixl_threads,
            "cases": [case_data(case) for case in cases],
        }
    )


def case_data(case: Case) -> dict[str, Any]:
    """One case in the units that the fields' names say."""
    return {
        "case": case.name,
        "variant": case.variant,
        "path": case.path,
        "gb_per_s": round(case.bytes_per_s / GB, 4),
        "bulk_gb_per_s": round(case.bulk_bytes_per_s / GB, 4),
        "memory_copy_gb_per_s": round(case.memory_copy_bytes_per_s / GB, 4),
        "efficiency": round(case.efficiency, 4),
        "ratio_to_direct": round(case.to_direct, 4),
        "submit_us": {f"p{number}": round(1e6 * seconds, 2) for number, seconds in case.submit_s.items()},
        "latency_ms": {f"p{number}": round(1e3 * seconds, 3) for number, seconds in case.latency_s.items()},
        "cpu_s_per_gb": round(case.cpu_s_per_gb, 4),
        "descriptors": case.descriptors,
        "bytes_per_request": case.request_bytes,
        "bytes_checked": case.checked_bytes,
        "bytes_wrong": case.wrong_bytes,
        "exact": case.is_exact,
    }


def show(options: BenchOptions, cases: Sequence[Case], console: Console) -> None:
    """The cases for a person."""
    title = (
        f"{options.model.name}: {options.requests} requests of {options.tokens} tokens, {options.in_flight} in flight, "
        f"{options.chunks} chunks each; GB/s are medians, efficiency the median of ratios to the bulk write"
    )
    table = Table(title=title)
    table.add_column("case")
    table.add_column("variant")
    for name in ("GB/s", "bulk", "memcpy", "efficiency", "x direct", "submit us", "latency ms", "CPU s/GB", "descr."):
        table.add_column(name, justify="right")
    table.add_column("exact")
    for case in cases:
        table.add_row(
            case.name,
            case.variant,
            f"{case.bytes_per_s / GB:.2f}",
            f"{case.bulk_bytes_per_s / GB:.2f}",
            f"{case.memory_copy_bytes_per_s / GB:.2f}",
            f"{case.efficiency:.2f}",
            f"{case.to_direct:.2f}",
            " / ".join(f"{1e6 * seconds:.0f}" for seconds in case.submit_s.values()),
            " / ".join(f"{1e3 * seconds:.1f}" for seconds in case.latency_s.values()),
            f"{case.cpu_s_per_gb:.2f}",
            f"{case.descriptors:,}",
            "[bold green]yes[/]" if case.is_exact else "[bold red]NO[/]",
        )
    console.print(table)
    console.print("submit: p50 / p99 of the caller's time; latency: p50 / p95 / p99 of a request", style="dim")
    for case in cases:
        if not case.is_exact:
            console.print(
                f"[bold red]NO[/]  {case.name}, {case.variant}: {case.wrong_bytes:,} of {case.checked_bytes:,} bytes "
                f"are wrong, the first in {case.first_wrong}"
            )
