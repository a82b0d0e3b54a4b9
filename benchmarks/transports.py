"""Transports side by side, between two processes of one machine, and what each can do at best.

Four shapes of `kvferry bench --transports`, and the first transfer between two new processes (`first_transfer.py`). So
that the same wire is compared, UCX is held to TCP (`--all-wires` lets it choose, shared memory above all). Every byte
is checked.

    python -m benchmarks.transports
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "tests" / "data" / "configs"
SHAPES = {
    "GQA, TP 1 -> 1": "--preset qwen3-8b",
    "GQA, TP 2 -> 1": "--preset qwen3-8b --prefill-tp 2",
    "GQA, contiguous pages of 64": "--preset qwen3-8b --page-size 64 --pages contiguous",
    "MLA, TP 1 -> 1": f"--config {CONFIGS / 'deepseek-v3.json'}",
}
"""What is moved, as options of `kvferry bench`."""


def printed(command: list[str], **environment: str) -> Any:
    """Runs a command and returns the JSON that it prints last.

    Raises:
        RuntimeError: with what it said, if it fails.
    """
    path = os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    run = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)}: {run.stderr}{run.stdout}")
    return json.loads(run.stdout.strip().splitlines()[-1])


def cases(shape: str, options: argparse.Namespace, wires: dict[str, str]) -> list[dict[str, Any]]:
    """Measures a shape: one entry for every transport and variant."""
    load = f"--tokens {options.tokens} --repetitions {options.repetitions} --transports {options.transports}"
    found = printed(
        ["-m", "kvferry", "bench", *f"{SHAPES[shape]} {load} --variants direct,auto --json".split()], **wires
    )
    return [{"shape": shape, **case} for case in found["cases"]]


def markdown(rows: list[dict[str, Any]], first_ms: dict[str, float]) -> str:
    """Returns the tables."""
    head = [
        "| shape | transport | chosen | GB/s | direct | bulk write | of bulk | CPU s/GB | submit, us | latency, ms |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    direct = {(row["shape"], row["transport"]): row for row in rows if row["variant"] == "direct"}
    chosen = [
        f"| {row['shape']} | {row['transport']} | {row['path']} | {row['gb_per_s']:.2f} | "
        f"{direct[row['shape'], row['transport']]['gb_per_s']:.2f} | {row['bulk_gb_per_s']:.2f} | "
        f"{row['efficiency']:.2f} | {row['cpu_s_per_gb']:.2f} | {row['submit_us']['p50']:.0f} | "
        f"{row['latency_ms']['p50']:.0f} |"
        for row in rows
        if row["variant"] == "auto"
    ]
    first = ["", "| transport | first transfer, ms |", "|---|---|"]
    first += [f"| {name} | {milliseconds:.0f} |" for name, milliseconds in first_ms.items()]
    return "\n".join([*head, *chosen, *first])


def main() -> None:
    """Measures every shape with every transport."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", default="nixl,mooncake", help="names, separated by commas")
    parser.add_argument("--shapes", default="", help="only those whose names hold this")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=3, help="of processes, for the first transfer")
    parser.add_argument("--all-wires", action="store_true", help="let UCX choose")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    wires = {} if options.all_wires else {"UCX_TLS": "tcp"}
    rows = [case for shape in SHAPES if options.shapes in shape for case in cases(shape, options, wires)]
    first_ms = {
        name: printed(
            ["-m", "benchmarks.first_transfer", "--json", "--pairs", str(options.pairs)],
            **wires,
            KVFERRY_TRANSPORT=name,
        )["first_ms"]
        for name in options.transports.split(",")
    }
    print(json.dumps({"rows": rows, "first_ms": first_ms}) if options.json else markdown(rows, first_ms))


if __name__ == "__main__":
    main()
