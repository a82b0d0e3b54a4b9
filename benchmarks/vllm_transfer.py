"""How long a request waits for its cache in vLLM: kvferry's connector beside vLLM's own NIXL connector.

Two pairs of real engines, alike but for the connector, on this machine and in one run. A prompt is computed on a
prefill engine; then its decode engine is asked for one token, and the time until it has it is taken, in the decode
engine's own process. It holds the handing over of the request, the transfer, and a step of one token, which costs both
the same. The pairs take turns, request by request. Run it where vLLM and kvferry are installed: `make test-engines`
sets up such an environment.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from tests.real_engines.models import prompts, write
from tests.real_engines.vllm.engine import EngineProcess
from tests.real_engines.vllm.pairs import Engines

LENGTHS = (32, 256, 900)

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
    with tempfile.TemporaryDirectory() as directory:
        engines = Engines(write("qwen3", Path(directory)))
        try:
            figures = measure(engines, options.requests, options.prefill_tp, options.decode_tp)
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


def measure(engines: Engines, requests: int, prefill_tp: int, decode_tp: int) -> dict[int, dict[str, list[float]]]:
    """Seconds of every request, by length of the prompt and connector."""
    pairs: dict[str, tuple[EngineProcess, EngineProcess]] = {}
    for number, connector in enumerate(("nixl", "kvferry")):
        more: dict[str, Any] = {"connector": connector}
        if connector == "nixl":
            more["settings"] = None
        ports = [{"VLLM_NIXL_SIDE_CHANNEL_PORT": str(18600 + 20 * number + 10 * side)} for side in range(2)]
        pairs[connector] = (
            engines.prefill(f"prefill-{connector}", tp=prefill_tp, environment=ports[0], **more),
            engines.decode(f"decode-{connector}", tp=decode_tp, environment=ports[1], **more),
        )
    for pair in pairs.values():
        for engine in pair:
            engine.started()
    times: dict[int, dict[str, list[float]]] = {length: {name: [] for name in pairs} for length in LENGTHS}
    for length in LENGTHS:
        for number in range(requests + 3):
            (prompt,) = prompts(1000 * length + number, 1, shortest=length)
            for connector, (prefill, decode) in pairs.items():
                name = f"{connector}-{length}-{number}"
                prefill.submit(name, prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False})
                parameters = prefill.output(name).parameters
                elapsed_s, output = decode.ask("timed", name, prompt, 1, parameters)
                assert output.reason == "length", output
                if number >= 3:  # the first ones connect
                    times[length][connector].append(elapsed_s)
    for connector, (_, decode) in pairs.items():
        moved = decode.ask("metric", _COUNTS[connector]) / decode_tp
        assert moved == len(LENGTHS) * (requests + 3), f"{connector} has moved {moved} caches"
    return times


if __name__ == "__main__":
    main()
