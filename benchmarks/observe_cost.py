"""What metrics cost: the same benchmark with them and without, in turns, while somebody reads them now and then.

`python -m benchmarks.observe_cost --rounds 6`. Prints throughput of either, and the ratio of their medians with the
range of what pairs of rounds that differ in nothing would show.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import httpx

from kvferry.observe.server import PORTS

BASE_PORT = 19_470


@dataclass(frozen=True, slots=True)
class Round:
    """One run of the benchmark.

    Attributes:
        gb_per_s: by variant.
    """

    gb_per_s: dict[str, float]


def measure(*, is_observed: bool, seconds: float, chunks: int, read_s: float) -> Round:
    """Runs the benchmark once."""
    environment = {**os.environ}
    if is_observed:
        environment["KVFERRY_OBSERVE_PORT"] = str(BASE_PORT)
    command = [sys.executable, "-m", "kvferry", "bench", "--preset", "small", "--json", "--variants", "direct,staged"]
    command += ["--seconds", str(seconds), "--chunks", str(chunks)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as run:
        over = threading.Event()
        reader = threading.Thread(target=_read, args=(over, read_s), daemon=True)
        reader.start()  # in both kinds of rounds: where nobody answers, it costs as little
        said, _ = run.communicate()
        over.set()
        reader.join()
    return Round({case["variant"]: case["gb_per_s"] for case in json.loads(said)["cases"]})


def _read(over: threading.Event, every_s: float) -> None:
    if not every_s:
        return
    with httpx.Client(trust_env=False, timeout=1.0) as client:
        while not over.wait(every_s):
            for port in range(BASE_PORT, BASE_PORT + PORTS // 8):
                try:
                    client.get(f"http://127.0.0.1:{port}/metrics")
                except httpx.HTTPError:
                    time.sleep(0)


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="pairs of runs, one of each kind")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run")
    parser.add_argument(
        "--chunks", type=int, default=4, help="that a request is submitted in: more writes, more to count"
    )
    parser.add_argument("--read-s", type=float, default=10.0, help="seconds between reads of the metrics; 0 for never")
    chosen = parser.parse_args()

    def run(is_observed: bool) -> Round:
        return measure(is_observed=is_observed, seconds=chosen.seconds, chunks=chosen.chunks, read_s=chosen.read_s)

    kinds: dict[bool, list[Round]] = {False: [], True: []}
    for number in range(chosen.rounds):
        for is_observed in (number % 2 == 0, number % 2 == 1):  # neither is always first
            kinds[is_observed].append(run(is_observed))
    print("| path | without, GB/s | with metrics, GB/s | ratio of medians | spread of rounds without |")
    print("|---|---|---|---|---|")
    for variant in kinds[False][0].gb_per_s:
        off, on = ([each.gb_per_s[variant] for each in kinds[kind]] for kind in (False, True))
        middle = statistics.median(off)
        spread = f"{min(off) / middle:.3f} to {max(off) / middle:.3f}"
        ratio = statistics.median(on) / middle
        print(f"| {variant} | {middle:.3f} | {statistics.median(on):.3f} | {ratio:.3f} | {spread} |")


if __name__ == "__main__":
    main()
