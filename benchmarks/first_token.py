"""Time to the first token where the cache crosses a slow wire: an engine's own connector, kvferry, and layer by layer.

A prefill and a decode engine, real ones, in a network namespace whose loopback device is slowed until one prompt's
cache takes as long on it as the prompt takes to compute. The same prompts' lengths go through each connector in turns,
one at a time; the time is from handing a request in until its first token is there. Requests are handed to both sides
at once, but with vLLM's own connector, which tells the decode side only after the prefill side has ended.

    python -m benchmarks.first_token --engine vllm      # in .venv-vllm
    python -m benchmarks.first_token --engine sglang    # in .venv-sglang

Takes what `slow_wire` does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.slow_wire import enter_namespace, slow_down
from examples.tiny_model import VOCABULARY, write

LAYERS, KV_HEADS, HEAD_DIM = 16, 8, 64
MODEL = {"num_hidden_layers": LAYERS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
TOKEN_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4  # of float32
PROMPT_TOKENS = 960
WARM_UP = 2  # the first ones connect
POOL_MIB = 256
UNDIVIDED, STOCK, WHOLE, BY_LAYER = "undivided", "stock", "kvferry, whole", "kvferry, by layer"
TURNS = (STOCK, WHOLE, BY_LAYER, BY_LAYER, WHOLE, STOCK)


class Served(Protocol):
    """One engine that does everything itself, or a prefill and a decode engine."""

    def first_token_s(self, prompt: Sequence[int]) -> float:
        """Runs a request, alone; returns how long its first token took."""


class Vllm:
    """vLLM's engines."""

    def __init__(self, model: Path, variant: str, ranges: int, closing: ExitStack) -> None:
        """Starts them."""
        from tests.real_engines.vllm.pairs import Engines

        engines = Engines(model)
        closing.callback(engines.close)
        self._variant, self._numbers = variant, itertools.count(1)
        if variant == UNDIVIDED:
            self._decode = engines.begin("alone", connector="", pool_mib=POOL_MIB).started()
            return
        connector: dict[str, Any] = {"settings": {"layer_ranges": ranges} if variant == BY_LAYER else {}}
        if variant == STOCK:
            connector = {"connector": "nixl", "settings": None}
        for begin, name, port in ((engines.prefill, "prefill", 18600), (engines.decode, "decode", 18620)):
            environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port), "UCX_TLS": "tcp,self"}
            begin(name, environment=environment, pool_mib=POOL_MIB, **connector)
        self._prefill, self._decode = engines.prefill("prefill").started(), engines.decode("decode").started()

    def first_token_s(self, prompt: Sequence[int]) -> float:
        """Asks the engines, and waits for the decode engine."""
        from kvferry.engines.vllm.parameters import ROOM

        number = next(self._numbers)
        name, begun_at = f"request-{number}", time.perf_counter()
        if self._variant == UNDIVIDED:
            self._decode.submit(name, prompt, 1)
        elif self._variant == STOCK:
            self._prefill.submit(name, prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False})
            self._decode.submit(name, prompt, 1, self._prefill.output(name).parameters)
        else:
            there = {"do_remote_prefill": True, "remote_engine_id": "prefill", ROOM: number}
            self._decode.submit(name, prompt, 1, there)
            self._prefill.submit(name, prompt, 1, {"do_remote_decode": True, ROOM: number})
        assert self._decode.output(name).reason == "length"
        elapsed_s = time.perf_counter() - begun_at
        if self._variant in (WHOLE, BY_LAYER):
            self._prefill.output(name)
        return elapsed_s


class Sglang:
    """SGLang's engines."""

    def __init__(self, model: Path, variant: str, ranges: int, closing: ExitStack) -> None:
        """Starts them."""
        from tests.real_engines.sglang import main_memory
        from tests.real_engines.sglang.engine import EngineProcess, Shape, disaggregated

        from kvferry.applications.up.supervision import free_ports

        (self._port,) = free_ports(1)
        environment = {"UCX_TLS": "tcp,self", "SGLANG_HOST_IP": "127.0.0.1"}  # there is no other
        environment["KVFERRY_LAYER_RANGES"] = str(ranges if variant == BY_LAYER else 1)
        path: tuple[Path, ...] = ()
        if variant == STOCK:
            path = (main_memory.install(Path(closing.enter_context(tempfile.TemporaryDirectory()))),)
        options = {"chunked_prefill_size": 2048, "max_total_tokens": 8192}
        each = [options]
        if variant != UNDIVIDED:
            backend = "nixl" if variant == STOCK else "kvferry"
            each = [disaggregated(mode, self._port, backend, **options) for mode in ("prefill", "decode")]
        self._engines = [
            EngineProcess(Shape(model, given, environment, path, spawns=variant == STOCK)) for given in each
        ]
        for engine in self._engines:
            closing.callback(engine.close)
        for engine in self._engines:
            engine.started()
        self._rooms = itertools.count(1)

    def first_token_s(self, prompt: Sequence[int]) -> float:
        """Asks the engines, and waits for the decode engine."""
        room, begun_at = next(self._rooms), time.perf_counter()
        for engine in self._engines:
            engine.submit([prompt], 1, rooms=[room] if len(self._engines) > 1 else [], port=self._port)
        (answer,) = self._engines[-1].outputs()
        elapsed_s = time.perf_counter() - begun_at
        assert answer.error is None, answer.error
        for engine in self._engines[:-1]:
            engine.outputs()
        return elapsed_s


@dataclass(frozen=True)
class Engine:
    """How an engine is measured.

    Attributes:
        model: the name of the tiny model that it serves.
        start: starts it, or a pair.
    """

    model: str
    start: Callable[[Path, str, int, ExitStack], Served]


ENGINES = {"vllm": Engine("qwen3", Vllm), "sglang": Engine("llama", Sglang)}


def measure(engine: Engine, model: Path, variant: str, options: argparse.Namespace, turn: int) -> list[float]:
    """Starts engines, and measures some requests after those that connect."""
    draw = random.Random(f"{variant} {turn}")
    with ExitStack() as closing:
        served = engine.start(model, variant, options.ranges, closing)
        seconds = [
            served.first_token_s([draw.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)])
            for _ in range(WARM_UP + options.requests)
        ]
    return seconds[WARM_UP:]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--requests", type=int, default=8, help="in each turn")
    parser.add_argument("--ranges", type=int, default=LAYERS, help="KVFERRY_LAYER_RANGES")
    parser.add_argument("--json", type=Path, help="writes all figures to a file")
    options = parser.parse_args()
    enter_namespace("benchmarks.first_token")
    engine = ENGINES[options.engine]
    with tempfile.TemporaryDirectory() as directory:
        model = write(engine.model, Path(directory), changes=MODEL)
        computing_s = statistics.median(measure(engine, model, UNDIVIDED, options, 0))
        rate = round(8 * PROMPT_TOKENS * TOKEN_BYTES / computing_s)
        slow_down("lo", rate)
        print(
            f"a prompt of {PROMPT_TOKENS} tokens takes {1e3 * computing_s:.0f} ms to compute, and its "
            f"{PROMPT_TOKENS * TOKEN_BYTES / 1e6:.0f} MB as long on a wire of {rate / 1e6:.0f} Mbit/s",
            flush=True,
        )
        figures: dict[str, list[float]] = {variant: [] for variant in TURNS}
        for turn, variant in enumerate(TURNS):
            figures[variant] += measure(engine, model, variant, options, turn)
            print(f"{variant}: {', '.join(f'{1e3 * each:.0f}' for each in figures[variant])} ms", flush=True)
    print(f"{'connector':>18} {'median ms':>10} {'p10':>6} {'p90':>6} {'of stock':>9} {'of computing':>13}")
    stock = statistics.median(figures[STOCK])
    for variant, each in figures.items():
        median, tenths = statistics.median(each), statistics.quantiles(each, n=10)
        print(
            f"{variant:>18} {1e3 * median:>10.0f} {1e3 * tenths[0]:>6.0f} {1e3 * tenths[-1]:>6.0f} "
            f"{median / stock:>9.2f} {median / computing_s:>13.2f}"
        )
    if options.json is not None:
        found = {"computing_s": computing_s, "rate_bits_per_s": rate, "seconds": figures}
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
