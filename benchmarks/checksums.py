"""What checksums cost: rooms with and without them take turns between the same two processes, on either path.

Over NIXL, with pages of 16 tokens, 1 KiB a token of every layer, keys and values, scattered all over the pools. A
room's time runs from asking for it until it counts as arrived, which with checksums is when every digest was compared;
the processors' time is that of both processes. The four variants take turns in another order every round, and what is
printed are medians over rounds of the ratio to the same path without checksums in the same round.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import random
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvferry as kf

POOL_PAGES, PAGE_TOKENS, HEADS, HEAD_DIM = 256, 16, 8, 64
REQUEST_PAGES = 2048 // PAGE_TOKENS
VARIANTS = tuple((path, checksums) for path in ("direct", "staged") for checksums in (False, True))
WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Run:
    """One room.

    Attributes:
        path, checksums: the variant.
        seconds: until it counted as arrived.
        cpu_s: of both processes.
    """

    path: str
    checksums: bool
    seconds: float
    cpu_s: float


def pool(layers: int, seed: int) -> tuple[list[np.ndarray], kf.RankLayout]:
    """Keys and values of every layer: the memory, which must outlive the endpoint, and its layout."""
    contents = np.random.default_rng(seed).integers(0, 1 << 16, (POOL_PAGES, PAGE_TOKENS, HEADS, HEAD_DIM), np.uint16)
    memory: list[np.ndarray] = []
    shards = []
    for component in kf.attention_components(num_layers=layers, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype="float16"):
        tensors = [(contents + np.uint16(len(memory) + layer)).view(np.float16) for layer in range(layers)]
        memory += tensors
        shards.append(kf.shard_from_tensors(component, tensors, dims=("page", "token", "head", "dim")))
    return memory, kf.RankLayout(shards=tuple(shards))


def pages_of(side: int) -> np.ndarray:
    """Scattered page numbers of every room on one side."""
    return np.random.default_rng(side).permutation(POOL_PAGES)[:REQUEST_PAGES].astype(np.int64)


def prefill(connection: multiprocessing.connection.Connection, layers: int) -> None:
    """Sends every room that it is told of, and says how much processor time that took."""
    memory, layout = pool(layers, 0)
    with kf.PrefillEndpoint(layout, settings=kf.Settings(registry_port=0, registry_url=None)) as endpoint:
        assert endpoint.wait_registered(WAIT_S)
        connection.send(endpoint.registry_url)
        while (room := connection.recv()) is not None:
            before_s = time.process_time()
            sender = endpoint.open(room)
            sender.submit(pages_of(0), last=True)
            sender.wait(WAIT_S)
            connection.send(time.process_time() - before_s)
    del memory


def rounds_of(connection: multiprocessing.connection.Connection, layers: int, rounds: int) -> list[Run]:
    """Receives so many rooms of every variant, and checks that all arrive exactly."""
    memory, layout = pool(layers, 1)
    expected, _ = pool(layers, 0)
    found: list[Run] = []
    chance, room = random.Random(0), 0
    url = connection.recv()
    with ExitStack() as stack:
        endpoints = {
            (path, checksums): stack.enter_context(
                kf.DecodeEndpoint(layout, settings=kf.Settings(registry_url=url, path=path, checksums=checksums))
            )
            for path, checksums in VARIANTS
        }
        for number in range(-1, rounds):  # the first round connects, and does not count
            for path, checksums in chance.sample(VARIANTS, len(VARIANTS)):
                room += 1
                for tensor in memory:
                    tensor[pages_of(1)] = 0
                before_s = time.process_time()
                receiver = endpoints[path, checksums].open(room, pages_of(1))
                started = time.perf_counter()
                connection.send(room)
                receiver.wait(WAIT_S)
                seconds = time.perf_counter() - started
                cpu_s = time.process_time() - before_s + connection.recv()
                for tensor, right in zip(memory, expected, strict=True):
                    same = np.array_equal(tensor[pages_of(1)].view(np.uint16), right[pages_of(0)].view(np.uint16))
                    assert same, f"{path}, checksums {checksums}: wrong bytes"
                if number >= 0:
                    found.append(Run(path, checksums, seconds, cpu_s))
    return found


def measure(layers: int, rounds: int) -> dict[str, Any]:
    """What is printed."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=prefill, args=(theirs, layers), daemon=True)
    process.start()
    theirs.close()
    try:
        runs = rounds_of(ours, layers, rounds)
        ours.send(None)
        process.join(WAIT_S)
    finally:
        process.kill()
    result: dict[str, Any] = {
        "mib": 2 * layers * REQUEST_PAGES * PAGE_TOKENS * HEADS * HEAD_DIM * 2 / 2**20,
        "rounds": rounds,
    }
    for path in ("direct", "staged"):
        off, on = ([run for run in runs if (run.path, run.checksums) == (path, each)] for each in (False, True))
        pairs = list(zip(off, on, strict=True))
        result[path] = {
            "off_ms": round(1e3 * statistics.median(run.seconds for run in off), 1),
            "on_ms": round(1e3 * statistics.median(run.seconds for run in on), 1),
            "time_ratio": round(statistics.median(b.seconds / a.seconds for a, b in pairs), 2),
            "cpu_ratio": round(statistics.median(b.cpu_s / a.cpu_s for a, b in pairs), 2),
        }
    return result


def main() -> None:
    """Prints medians over all rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="rooms of every variant")
    parser.add_argument("--layers", type=int, default=32, help="layers of the model; every one takes 4 MiB of a room")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    typed = parser.parse_args()
    if min(typed.rounds, typed.layers) < 1:
        parser.error("--rounds and --layers must be at least 1")
    found = measure(typed.layers, typed.rounds)
    if typed.json:
        print(json.dumps(found))
    else:
        print(f"rooms of {found['mib']:.0f} MiB, {found['rounds']} of every variant:")
        for path in ("direct", "staged"):
            each = found[path]
            print(
                f"{path}: {each['off_ms']} ms without checksums, {each['on_ms']} ms with: {each['time_ratio']} times "
                f"as long, {each['cpu_ratio']} times the processors' time"
            )
    sys.exit(0)


if __name__ == "__main__":
    main()
