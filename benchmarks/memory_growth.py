"""Whether memory grows with the number of transfers: two processes over NIXL that exchange small rooms for long.

Resident memory of both is read after a tenth of the transfers, at the end, and a few times between. What grows with the
number of transfers grows between any two looks; what is made once, such as a part of a staging ring that nobody has
come to yet, shows between two of them. So there are two figures: all growth, and what it would be if it had always been
as between most looks. A room has 8 pages of 2 layers. The decode side overwrites its pages before every room and checks
every byte after it.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import multiprocessing.connection
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import kvferry as kf

TRANSFERS = 100_000
IN_FLIGHT = 8
ROOM_PAGES = 8
POOL_PAGES = ROOM_PAGES * IN_FLIGHT
SAMPLES = 10
"""Of resident memory, evenly spread; the first one ends the warm-up."""
WAIT_S = 60.0


def pool() -> tuple[list[np.ndarray], kf.RankLayout]:
    """Two layers, empty: the memory, which must outlive the endpoint, and its layout."""
    components = kf.attention_components(num_layers=2, num_kv_heads=2, head_dim=32, dtype="float32")
    shards, memory = [], []
    for component in components:
        tensors = [np.zeros((POOL_PAGES, 4, 2, 32), np.float32) for _ in range(2)]
        memory += tensors
        shards.append(kf.shard_from_tensors(component, tensors, dims=("page", "token", "head", "dim")))
    return memory, kf.RankLayout(shards=tuple(shards))


def contents(region: int) -> np.ndarray:
    """What the source has in one region, shape [page, token, head, dim]."""
    return np.random.default_rng(region).standard_normal((POOL_PAGES, 4, 2, 32)).astype(np.float32)


def source_pages(room: int) -> np.ndarray:
    """Which pages a room is read from."""
    return (np.arange(ROOM_PAGES, dtype=np.int64) * IN_FLIGHT + room) % POOL_PAGES


def target_pages(room: int) -> np.ndarray:
    """Which pages a room is written to: no other room in flight has them."""
    first = room % IN_FLIGHT * ROOM_PAGES
    return np.arange(first, first + ROOM_PAGES, dtype=np.int64)[::-1]


def resident_bytes() -> int:
    """Resident memory of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def is_sampled(done: int, transfers: int) -> bool:
    """Whether memory is read after so many transfers."""
    return done % (transfers // SAMPLES) == 0


def steady_growth(samples: Sequence[int]) -> int:
    """Growth over all samples if it had always been as it was between most of them: the median step, so many times."""
    steps = [after - before for before, after in pairwise(samples)]
    return round(statistics.median(steps) * len(steps))


def prefill(connection: multiprocessing.connection.Connection, transfers: int) -> None:
    """Sends every room; then says how its memory grew."""
    memory, layout = pool()
    for region, tensor in enumerate(memory):
        tensor[...] = contents(region)
    samples: list[int] = []
    with kf.PrefillEndpoint(layout, settings=kf.Settings(registry_port=0, registry_url=None)) as endpoint:
        connection.send(endpoint.registry_url)
        opened: deque[kf.Sender] = deque()
        for room in range(transfers + IN_FLIGHT):
            if room >= IN_FLIGHT:
                opened.popleft().wait(WAIT_S)
                if is_sampled(room - IN_FLIGHT + 1, transfers):
                    samples.append(resident_bytes())
            if room < transfers:
                sender = endpoint.open(room)
                sender.submit(source_pages(room), last=True)
                opened.append(sender)
        connection.send((samples, endpoint.open_rooms, True))
        connection.recv()
    del memory


def decode(connection: multiprocessing.connection.Connection, transfers: int) -> None:
    """Receives and checks every room; then says how its memory grew, and whether every byte was right."""
    memory, layout = pool()
    expected = [contents(region) for region in range(len(memory))]
    samples: list[int] = []
    exact = True
    with kf.DecodeEndpoint(layout, settings=kf.Settings(registry_url=connection.recv())) as endpoint:
        opened: deque[kf.Receiver] = deque()
        for room in range(transfers + IN_FLIGHT):
            if room >= IN_FLIGHT:
                earlier = room - IN_FLIGHT
                opened.popleft().wait(WAIT_S)
                source, target = source_pages(earlier), target_pages(earlier)
                exact &= all(
                    np.array_equal(tensor[target], right[source])
                    for tensor, right in zip(memory, expected, strict=True)
                )
                if is_sampled(earlier + 1, transfers):
                    samples.append(resident_bytes())
            if room < transfers:
                for tensor in memory:
                    tensor[target_pages(room)] = np.nan
                opened.append(endpoint.open(room, target_pages(room)))
        connection.send((samples, endpoint.open_rooms, exact))
        connection.recv()
    del memory


def result(transfers: int) -> dict[str, Any]:
    """What is printed."""
    context = multiprocessing.get_context("spawn")
    (ours_p, theirs_p), (ours_d, theirs_d) = context.Pipe(), context.Pipe()
    processes = [
        context.Process(target=prefill, args=(theirs_p, transfers), daemon=True),
        context.Process(target=decode, args=(theirs_d, transfers), daemon=True),
    ]
    started = time.monotonic()
    try:
        for process in processes:
            process.start()
        theirs_p.close()
        theirs_d.close()
        ours_d.send(ours_p.recv())
        sides = dict(zip(("prefill", "decode"), (ours_p.recv(), ours_d.recv()), strict=True))
        for connection, process in ((ours_d, processes[1]), (ours_p, processes[0])):  # decode first: it misses nobody
            connection.send(None)
            process.join(WAIT_S)
    finally:
        for process in processes:
            process.kill()
    counted = transfers - transfers // SAMPLES
    found: dict[str, Any] = {
        "transfers": transfers,
        "counted": counted,
        "seconds": round(time.monotonic() - started, 1),
    }
    for name, (samples, open_rooms, _) in sides.items():
        found[f"{name}_growth_bytes"] = samples[-1] - samples[0]
        found[f"{name}_steady_growth_bytes"] = steady_growth(samples)
        found[f"{name}_resident_mib"] = [round(sample / 2**20, 2) for sample in samples]
        found[f"{name}_open_rooms"] = open_rooms
    found["exact"] = all(exact for _, _, exact in sides.values())
    return found


def main() -> None:
    """Prints how both sides' memory grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transfers", type=int, default=TRANSFERS, help=f"how many; {SAMPLES} at least")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    typed = parser.parse_args()
    if typed.transfers < SAMPLES:
        parser.error(f"--transfers {typed.transfers}: at least {SAMPLES}, for as many looks at the memory")
    found = result(typed.transfers)
    if typed.json:
        print(json.dumps(found))
    else:
        print(f"{found['counted']:,} transfers after {typed.transfers // SAMPLES:,} to warm up, {found['seconds']} s:")
        for name in ("prefill", "decode"):
            growth, steady = (found[f"{name}_{kind}_bytes"] for kind in ("growth", "steady_growth"))
            print(
                f"{name} grew by {growth / 2**20:.2f} MiB, steadily {steady / found['counted']:.1f} bytes a transfer "
                f"({', '.join(map(str, found[f'{name}_resident_mib']))} MiB)"
            )
        print(f"every byte right: {found['exact']}")
    sys.exit(not found["exact"])


if __name__ == "__main__":
    main()
