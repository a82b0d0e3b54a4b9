"""How long `Sender.submit` takes the caller, by the number of pages in the chunk.

Two processes over NIXL, every byte really sent. Before each submit the caller does what a scheduler's process does: it
computes for a few milliseconds, then takes page numbers from its free list and submits them. Prints the median and the
99th percentile of the caller's time in microseconds, and beside it how long the transfers themselves took.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import statistics
import time

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy: the caller computes on one core, the others move bytes

import numpy as np

import kvferry as kf

POOL_PAGES = 16_384
ROUNDS = 200
CHUNK_PAGES = (1, 64, 1024, 8192)
IN_FLIGHT = 4
STEP_S = 0.004


def pool() -> tuple[np.ndarray, kf.RankLayout]:
    """One layer with pages of 2 KiB: the memory, which must outlive the endpoint, and its layout."""
    (component, _) = kf.attention_components(num_layers=1, num_kv_heads=1, head_dim=64, dtype="float16")
    tensor = np.zeros((POOL_PAGES, 16, 1, 64), np.float16)
    shard = kf.shard_from_tensors(component, [tensor], dims=("page", "token", "head", "dim"))
    return tensor, kf.RankLayout(shards=(shard,))


def chosen_pages(count: int) -> np.ndarray:
    """Scattered page numbers."""
    return np.random.default_rng(0).permutation(POOL_PAGES)[:count].astype(np.int64)


def compute() -> None:
    """What the caller does between two submits."""
    matrix = np.ones((128, 128), np.float32)
    end = time.perf_counter() + STEP_S
    while time.perf_counter() < end:
        matrix @ matrix


def receive(connection: multiprocessing.connection.Connection) -> None:
    """The decode process: receives every room, a few at a time."""
    memory, layout = pool()
    with kf.DecodeEndpoint(layout, settings=kf.Settings(registry_url=connection.recv())) as decode:
        decode.connect()
        rooms = [(size * ROUNDS + number, pages) for size, pages in enumerate(CHUNK_PAGES) for number in range(ROUNDS)]
        opened = []
        for index in range(len(rooms) + IN_FLIGHT):
            if index < len(rooms):
                room, pages = rooms[index]
                opened.append(decode.open(room, chosen_pages(pages)))
            if index >= IN_FLIGHT:
                opened[index - IN_FLIGHT].wait(60)
    del memory


def main() -> None:
    """Prints one line a size."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=receive, args=(theirs,))
    receiver.start()
    memory, layout = pool()
    with kf.PrefillEndpoint(layout, settings=kf.Settings(registry_port=0)) as prefill:
        ours.send(prefill.registry_url)
        print("pages a chunk   submit p50 us   p99 us   whole transfer p50 us")
        for size, pages in enumerate(CHUNK_PAGES):
            free_pages = chosen_pages(POOL_PAGES)
            submit_us: list[float] = []
            whole_us: list[float] = []
            for number in range(ROUNDS):
                sender = prefill.open(size * ROUNDS + number)
                compute()
                free_pages = np.roll(free_pages, pages)
                chosen = free_pages[:pages]
                start = time.perf_counter()
                sender.submit(chosen, last=True)
                submit_us.append(1e6 * (time.perf_counter() - start))
                sender.wait(60)
                whole_us.append(1e6 * sender.stats.writes[0].latency_s)
            p99 = statistics.quantiles(submit_us, n=100)[98]
            print(
                f"{pages:13d} {statistics.median(submit_us):15.1f} {p99:8.1f} {statistics.median(whole_us):23.1f}",
                flush=True,
            )
        receiver.join(30)
    del memory


if __name__ == "__main__":
    main()
