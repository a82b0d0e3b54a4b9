"""How much longer the first transfer to a new peer takes than a later one: connecting, preparing, calibrating.

Two new processes over NIXL for every pair, with 64 layers of keys and values: 128 regions of 6,144 pages. Pages have
512 bytes, so that the pools fit everywhere; what is measured does not depend on it. The prefill side is registered and
waits; the decode side opens rooms of 2,048 tokens, one after the other. The first one makes the connection. A room's
time runs from opening it until it has arrived. Every byte is checked.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import statistics
import sys
import time
from typing import Any

import numpy as np

import kvferry as kf

LAYERS, POOL_PAGES, PAGE_TOKENS, HEAD_DIM = 64, 6144, 16, 16
REQUEST_PAGES = 2048 // PAGE_TOKENS
LATER_ROOMS = 8
PAIRS = 5
WAIT_S = 60.0


def pool() -> tuple[list[np.ndarray], kf.RankLayout]:
    """Keys and values of every layer: the memory, which must outlive the endpoint, and its layout."""
    components = kf.attention_components(num_layers=LAYERS, num_kv_heads=1, head_dim=HEAD_DIM, dtype="float16")
    shards, memory = [], []
    for component in components:
        # Ones, not zeros: memory that nobody has written to is not there yet, and the first room would wait for it.
        tensors = [np.ones((POOL_PAGES, PAGE_TOKENS, 1, HEAD_DIM), np.float16) for _ in range(LAYERS)]
        memory += tensors
        shards.append(kf.shard_from_tensors(component, tensors, dims=("page", "token", "head", "dim")))
    return memory, kf.RankLayout(shards=tuple(shards))


def pages_of(side: int, room: int) -> np.ndarray:
    """Scattered page numbers of a room on one side."""
    return np.random.default_rng((side, room)).permutation(POOL_PAGES)[:REQUEST_PAGES].astype(np.int64)


def contents(region: int, room: int) -> np.ndarray:
    """What a room's pages of one region hold, as 16-bit numbers of shape [page, token, head, dim]."""
    shape = (REQUEST_PAGES, PAGE_TOKENS, 1, HEAD_DIM)
    numbers = np.arange(np.prod(shape), dtype=np.uint32) + np.uint32(1_000_003 * region + 7_777_777 * room)
    mixed: np.ndarray = (numbers * np.uint32(2_654_435_761) >> np.uint32(16)).astype(np.uint16)
    return mixed.reshape(shape)


def prefill(connection: multiprocessing.connection.Connection) -> None:
    """Sends every room as soon as it is asked for."""
    memory, layout = pool()
    with kf.PrefillEndpoint(layout, settings=kf.Settings(registry_port=0, registry_url=None)) as endpoint:
        assert endpoint.wait_registered(WAIT_S)
        for room in range(1 + LATER_ROOMS):
            pages = pages_of(0, room)
            for region, tensor in enumerate(memory):
                tensor.view(np.uint16)[pages] = contents(region, room)
            sender = endpoint.open(room)
            sender.submit(pages, last=True)
            connection.send(endpoint.registry_url)  # it may be opened on the other side
            sender.wait(WAIT_S)
        connection.recv()
    del memory


def decode(connection: multiprocessing.connection.Connection) -> None:
    """Receives one room after the other; sends how long each took, and whether every byte of it was right."""
    memory, layout = pool()
    with kf.DecodeEndpoint(layout, settings=kf.Settings(registry_url=connection.recv())) as endpoint:
        for room in range(1 + LATER_ROOMS):
            pages = pages_of(1, room)
            started = time.perf_counter()
            endpoint.open(room, pages).wait(WAIT_S)
            took_s = time.perf_counter() - started
            arrived = (tensor.view(np.uint16)[pages] for tensor in memory)
            exact = all(np.array_equal(each, contents(region, room)) for region, each in enumerate(arrived))
            connection.send((took_s, exact))
            if room < LATER_ROOMS:
                connection.recv()
        connection.recv()
    del memory


def measure_pair() -> tuple[float, list[float], bool]:
    """Seconds of the first room and of later ones between two new processes, and whether every byte was right."""
    context = multiprocessing.get_context("spawn")
    (ours_p, theirs_p), (ours_d, theirs_d) = context.Pipe(), context.Pipe()
    processes = [context.Process(target=prefill, args=(theirs_p,)), context.Process(target=decode, args=(theirs_d,))]
    for process in processes:
        process.daemon = True
        process.start()
    theirs_p.close()
    theirs_d.close()
    times, exact = [], True
    try:
        for _ in range(1 + LATER_ROOMS):
            ours_d.send(ours_p.recv())
            took_s, is_right = ours_d.recv()
            times.append(took_s)
            exact &= is_right
        for connection, process in ((ours_d, processes[1]), (ours_p, processes[0])):  # decode first: it misses nobody
            connection.send(None)
            process.join(WAIT_S)
    finally:
        for process in processes:
            process.kill()
    return times[0], times[1:], exact


def result(count: int) -> dict[str, Any]:
    """What is printed of so many pairs; times in milliseconds."""
    pairs = [measure_pair() for _ in range(count)]
    more_ms = [1e3 * (first - statistics.median(later)) for first, later, _ in pairs]
    return {
        "regions": 2 * LAYERS,
        "pages": POOL_PAGES,
        "pairs": count,
        "first_ms": round(1e3 * statistics.median(first for first, _, _ in pairs), 2),
        "later_ms": round(1e3 * statistics.median(each for _, later, _ in pairs for each in later), 2),
        "more_ms": round(statistics.median(more_ms), 2),
        "all_more_ms": [round(each, 2) for each in more_ms],
        "exact": all(exact for _, _, exact in pairs),
    }


def main() -> None:
    """Prints the medians over all pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS, help="how many pairs of processes, one after the other")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    typed = parser.parse_args()
    if typed.pairs < 1:
        parser.error(f"--pairs {typed.pairs}: at least 1")
    found = result(typed.pairs)
    if typed.json:
        print(json.dumps(found))
    else:
        print(f"{found['regions']} regions of {found['pages']:,} pages, {found['pairs']} pairs of new processes:")
        print(f"first transfer {found['first_ms']:.1f} ms, later ones {found['later_ms']:.1f} ms,")
        print(f"{found['more_ms']:.1f} ms more (median of differences); every byte right: {found['exact']}")
    sys.exit(not found["exact"])


if __name__ == "__main__":
    main()
