"""How long a request waits for its cache in vLLM: kvferry's connector beside vLLM's own NIXL connector.

Pairs of real engines, alike but for the connector, on this machine and in one run. A prompt is computed on a prefill
engine; then its decode engine is asked for one token, and the time until it has it is taken, in the decode engine's own
process. It holds the handing over of the request, the transfer, and a step of one token, which costs both the same. One
pair lives at a time, and they take turns (stock, kvferry, kvferry, stock): threads of the stock connector spin, also
while nothing is moved, and would take the processors of a pair beside it. Run it where vLLM and kvferry are installed:
`make environments` sets up such an environment.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any, TypeAlias

from examples.tiny_model import write
from tests.real_engines.prompts import prompts
from tests.real_engines.vllm.engine import EngineProcess
from tests.real_engines.vllm.pairs import Engines

LENGTHS = (32, 256, 900)
CONNECTORS = ("nixl", "kvferry")
WARM_UP = 3  # the first ones connect

Figures: TypeAlias = dict[int, dict[str, list[float]]]
"""Seconds of every request, by length of the prompt and connector."""

_COUNTS = {"nixl": "vllm:nixl_xfer_time_seconds_count", "kvferry": "vllm:kvferry_receive_seconds_count"}
"""Where the decode side counts what has come."""


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=60, help="for every length and connector")
    parser.add_argument("--prefill-tp", type=int, default=1)
    parser.add_argument("--decode-tp", type=int, default=1)
    parser.add_argument("--json", type=Path, help="writes all figures to a file")
    options = parser.parse_args()
    figures: Figures = {length: {name: [] for name in CONNECTORS} for length in LENGTHS}
    with tempfile.TemporaryDirectory() as directory:
        model = write("qwen3", Path(directory))
        for turn, connector in enumerate((*CONNECTORS, *reversed(CONNECTORS))):
            engines = Engines(model)
            try:
                pair = start(engines, connector, options.prefill_tp, options.decode_tp)
                measure(connector, pair, turn, options.requests // 2, figures)
            finally:
                engines.close()
    print(f"{'tokens':>8} {'connector':>10} {'median ms':>10} {'p90 ms':>8} {'of stock':>9}")
    for tokens, times in figures.items():
        stock = statistics.median(times["nixl"])
        for connector, each in times.items():
            median, high = statistics.median(each), statistics.quantiles(each, n=10)[-1]
            print(f"{tokens:>8} {connector:>10} {median * 1e3:>10.2f} {high * 1e3:>8.2f} {median / stock:>9.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1))


def start(engines: Engines, connector: str, prefill_tp: int, decode_tp: int) -> tuple[EngineProcess, EngineProcess]:
    """A prefill and a decode engine."""
    more: dict[str, Any] = {"connector": connector}
    if connector == "nixl":
        more["settings"] = None
    prefill_port, decode_port = ({"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)} for port in (18600, 18620))
    prefill = engines.prefill("prefill", tp=prefill_tp, environment=prefill_port, **more)
    decode = engines.decode("decode", tp=decode_tp, environment=decode_port, **more)
    return prefill.started(), decode.started()


def measure(
    connector: str, pair: tuple[EngineProcess, EngineProcess], turn: int, requests: int, figures: Figures
) -> None:
    """Adds the seconds of every request."""
    prefill, decode = pair
    for length in LENGTHS:
        for number in range(requests + WARM_UP):
            (prompt,) = prompts(100_000 * turn + 1000 * length + number, 1, shortest=length)
            name = f"{length}-{number}"
            prefill.submit(name, prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False})
            parameters = prefill.output(name).parameters
            elapsed_s, output = decode.ask("timed", name, prompt, 1, parameters)
            assert output.reason == "length", output
            if number >= WARM_UP:
                figures[length][connector].append(elapsed_s)
    moved = decode.ask("metric", _COUNTS[connector]) / decode.shape.tp
    assert moved == len(LENGTHS) * (requests + WARM_UP), f"{connector} has moved {moved} caches"


if __name__ == "__main__":
    main()
