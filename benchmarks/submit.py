"""How long `Sender.submit` takes the caller, by the number of pages in the chunk: alone, and while transfers run.

Two processes over NIXL, every byte really sent. Before each submit the caller does what a scheduler's process does: it
computes for a few milliseconds, then takes page numbers from its free list and submits them. In turn, all in one run:

* idle: nothing else is on its way;
* busy: earlier requests are, several at a time, of all sizes; where none was left at that moment, it does not count;
* synchronous: the baseline, a caller that waits after each submit until the bytes have moved.

Prints the median and the 99th percentile of the caller's time in microseconds, and how many times longer the
synchronous path blocks the caller than the asynchronous one does, idle, by the medians. With --json, the same as JSON;
`submit_us` is of all asynchronous submits of a size, idle and busy together.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import statistics
import time

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy: the caller computes on one core, the others move bytes

import numpy as np

import kvferry as kf

POOL_PAGES = 16_384
ROUNDS = 250
CHUNK_PAGES = (1, 64, 1024, 8192)
MODES = ("idle", "busy", "synchronous")
BUSY_ROUNDS = 2  # as many more, since some do not count
IN_FLIGHT = 4
STEP_S = 0.004

Room = tuple[int, str, int]
"""Its number, what is measured with it, and its pages."""


def all_rooms() -> list[Room]:
    """In the order in which they are sent."""
    kinds = [
        (mode, pages) for mode in MODES for _ in range(BUSY_ROUNDS if mode == "busy" else 1) for pages in CHUNK_PAGES
    ]
    rooms = [
        (mode, pages)
        for wanted in MODES
        for _ in range(ROUNDS if wanted != "synchronous" else ROUNDS // 5)
        for mode, pages in kinds
        if mode == wanted
    ]
    return [(number, mode, pages) for number, (mode, pages) in enumerate(rooms)]


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
    """The decode process: opens every room some time before it is sent."""
    memory, layout = pool()
    with kf.DecodeEndpoint(layout, settings=kf.Settings(registry_url=connection.recv())) as decode:
        decode.connect("prefill")
        rooms, opened = all_rooms(), []
        for index in range(len(rooms) + 2 * IN_FLIGHT):
            if index < len(rooms):
                number, _, pages = rooms[index]
                opened.append(decode.open(number, chosen_pages(pages), engine="prefill"))
            if index >= 2 * IN_FLIGHT:
                opened[index - 2 * IN_FLIGHT].wait(60)
    del memory


def submit_times(prefill: kf.PrefillEndpoint) -> dict[tuple[str, int], list[float]]:
    """Sends every room; the caller's seconds, by what was measured and the number of pages."""
    taken: dict[tuple[str, int], list[float]] = {(mode, pages): [] for mode in MODES for pages in CHUNK_PAGES}
    free_pages = chosen_pages(POOL_PAGES)
    senders: list[kf.Sender] = []
    for number, mode, pages in all_rooms():
        sender = prefill.open(number)
        for earlier in senders if mode != "busy" else senders[: -IN_FLIGHT + 1]:
            earlier.wait(60)
        senders = [earlier for earlier in senders if not earlier.state.is_final]
        compute()
        while mode == "synchronous" and sender.state is kf.TransferState.BOOTSTRAPPING:
            time.sleep(1e-4)
        free_pages = np.roll(free_pages, pages)
        chosen = free_pages[:pages]
        is_alone = all(earlier.state.is_final for earlier in senders)
        start = time.perf_counter()
        sender.submit(chosen, last=True)
        while mode == "synchronous" and not (sender.is_at_rest or sender.state.is_final):
            time.sleep(1e-4)
        seconds = time.perf_counter() - start
        senders.append(sender)
        if mode != "busy" or not is_alone:
            taken[mode, pages].append(seconds)
    for sender in senders:
        sender.wait(60)
    return taken


def show(taken: dict[tuple[str, int], list[float]]) -> None:
    """Prints one line a size."""
    print("                   idle, us         busy, us      synchronous, us   synchronous /")
    print("    pages      p50      p99      p50      p99      p50        p99   asynchronous   busy")
    for pages in CHUNK_PAGES:
        line = f"{pages:9d}"
        for mode in MODES:
            p50, p99 = (float(np.percentile(taken[mode, pages] or [np.nan], each)) * 1e6 for each in (50, 99))
            line += f"{p50:9.1f}{p99:9.1f}" if mode != "synchronous" else f"{p50:9.0f}{p99:11.0f}"
        ratio = statistics.median(taken["synchronous", pages]) / statistics.median(taken["idle", pages])
        print(f"{line}{ratio:15.0f}{len(taken['busy', pages]):7d}", flush=True)


def percentiles_us(seconds: list[float]) -> dict[str, float]:
    """Median and 99th percentile, in microseconds."""
    p50, p99 = np.percentile(seconds or [np.nan], [50, 99]) * 1e6
    return {"p50": float(p50), "p99": float(p99)}


def as_json(taken: dict[tuple[str, int], list[float]]) -> str:
    """The same for programs."""
    sizes = [
        {
            "pages": pages,
            "submit_us": percentiles_us(taken["idle", pages] + taken["busy", pages]),
            **{f"{mode}_us": percentiles_us(taken[mode, pages]) for mode in MODES},
        }
        for pages in CHUNK_PAGES
    ]
    return json.dumps({"sizes": sizes})


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    is_json = parser.parse_args().json
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=receive, args=(theirs,))
    receiver.start()
    memory, layout = pool()
    with kf.PrefillEndpoint(layout, engine="prefill", settings=kf.Settings(registry_port=0)) as prefill:
        ours.send(prefill.registry_url)
        taken = submit_times(prefill)
        if is_json:
            print(as_json(taken))
        else:
            show(taken)
        receiver.join(30)
    del memory


if __name__ == "__main__":
    main()
