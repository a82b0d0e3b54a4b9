"""What bounds on direct writes on their way cost in throughput, and what they spare a small request beside large ones.

Large requests of scattered pages go from one process to another as fast as they can, several at a time, over NIXL;
beside them small requests of one page, one after the other. In turns, with each value of `KVFERRY_DIRECT_MIB` and
`KVFERRY_DIRECT_RECEIVER_MIB` (the same for both: there is one receiver), each in an endpoint of its own with the same
memory. Prints the throughput of the large requests and how long the small ones took from submitted to successful, 50th
and 99th percentile, each as the median over rounds, and as a ratio to the loosest bound in the same round.

    python benchmarks/admission.py --mib 1 16 256 1024
    UCX_TLS=tcp python benchmarks/admission.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import multiprocessing
import multiprocessing.connection
import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvferry as kf
from kvferry.layout import ShardedComponent, VirtualPools
from kvferry.testing import Pool

logging.getLogger("kvferry").setLevel(logging.CRITICAL)  # every turn ends with requests that are aborted

LAYERS, PAGE_TOKENS, HEADS, HEAD_DIM = 8, 16, 8, 128
PAGE_BYTES = 2 * LAYERS * PAGE_TOKENS * HEADS * HEAD_DIM * 2
IN_FLIGHT = 8
BETWEEN_SMALL_S = 0.01
LOOK_S = 200e-6
SMALL_ROOMS = 1 << 40
"""Rooms from here on are small."""

Connection = multiprocessing.connection.Connection


def pool(large_pages: int) -> Pool:
    """Memory for all requests that are in flight."""
    components = kf.attention_components(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype="float16")
    sharded = [ShardedComponent(component=each, layers=tuple(range(LAYERS))) for each in components]
    num_pages = IN_FLIGHT * large_pages + 1
    return Pool.allocate(
        sharded, VirtualPools(page_tokens=PAGE_TOKENS, num_pages=num_pages, layers_per_stage=(LAYERS,))
    )


class Requests:
    """Keeps requests open at one endpoint, each with pages of its own; the other side does the same."""

    def __init__(
        self,
        endpoint: kf.PrefillEndpoint | kf.DecodeEndpoint,
        engine: str,
        page_sets: list[np.ndarray],
        rooms: itertools.count[int],
        pause_s: float = 0.0,
    ) -> None:
        """Opens none before `look`; a prefill rank's wait for `pause_s` after the one before."""
        self._endpoint, self._engine, self._rooms, self._pause_s = endpoint, engine, rooms, pause_s
        self._free = deque(page_sets)
        self._open: list[tuple[kf.Sender | kf.Receiver, np.ndarray, float]] = []
        self._next_at = 0.0
        self.taken_s: list[float] = []

    def look(self, now: float) -> None:
        """Notes what has ended, and opens another in place of each."""
        for entry in [each for each in self._open if each[0].pages_reusable]:
            transfer, pages, begun_at = entry
            if transfer.state is not kf.TransferState.SUCCESS:
                raise SystemExit(f"a request failed: {transfer.error}")
            self._open.remove(entry)
            self._free.append(pages)
            self.taken_s.append(now - begun_at)
            self._next_at = now + self._pause_s
        while self._free and now >= self._next_at:
            pages = self._free.popleft()
            self._open.append((self._opened(next(self._rooms), pages), pages, now))

    def _opened(self, room: int, pages: np.ndarray) -> kf.Sender | kf.Receiver:
        if isinstance(self._endpoint, kf.DecodeEndpoint):
            return self._endpoint.open(room, pages, engine=self._engine)
        sender = self._endpoint.open(room)
        sender.submit(pages, last=True)
        return sender

    def end(self) -> None:
        """Aborts what is open, and waits until its pages are free."""
        for transfer, _, _ in self._open:
            transfer.abort("the turn is over")
        for transfer, _, _ in self._open:
            assert transfer.wait_pages_reusable(60)


def both_kinds(
    endpoint: kf.PrefillEndpoint | kf.DecodeEndpoint, engine: str, first_room: int, large_pages: int
) -> tuple[Requests, Requests]:
    """Large requests, and small ones."""
    pages = np.random.default_rng(0).permutation(IN_FLIGHT * large_pages).astype(np.int64)
    large = Requests(endpoint, engine, np.split(pages, IN_FLIGHT), itertools.count(first_room))
    small_page = np.array([IN_FLIGHT * large_pages], np.int64)
    # The decode side opens its next at once, so that a small request never waits for it.
    pause_s = BETWEEN_SMALL_S if isinstance(endpoint, kf.PrefillEndpoint) else 0.0
    return large, Requests(endpoint, engine, [small_page], itertools.count(SMALL_ROOMS + first_room), pause_s)


def decode(connection: Connection, large_pages: int) -> None:
    """The process that is written to; it has the registry as well."""
    memory = pool(large_pages)
    with kf.create_registry(kf.Settings(registry_port=0)) as registry:
        settings = kf.Settings(registry_url=registry.url, path="direct")
        with kf.DecodeEndpoint(memory.layout, engine="decode", settings=settings) as endpoint:
            connection.send(registry.url)
            while (message := connection.recv()) is not None:
                engine, first_room = message
                kinds = both_kinds(endpoint, engine, first_room, large_pages)
                while not connection.poll():
                    for requests in kinds:
                        requests.look(time.perf_counter())
                    time.sleep(LOOK_S)
                connection.recv()
                for requests in kinds:
                    requests.end()
                connection.send(None)


@dataclass(frozen=True)
class Turn:
    """What came of one turn with one bound."""

    gb_per_s: float
    small_s: list[float]


def turn(
    endpoint: kf.PrefillEndpoint, engine: str, peer: Connection, first_room: int, seconds: float, large_pages: int
) -> Turn:
    """Sends for some seconds. What begins it, before all is in flight, is not counted."""
    peer.send((engine, first_room))
    kinds = large, small = both_kinds(endpoint, "", first_room, large_pages)
    begun_at = time.perf_counter()
    counted_from: tuple[float, int, int] | None = None
    while (now := time.perf_counter()) - begun_at < 1.25 * seconds:
        for requests in kinds:
            requests.look(now)
        if counted_from is None and now - begun_at >= 0.25 * seconds:
            counted_from = now, len(large.taken_s), len(small.taken_s)
        time.sleep(LOOK_S)
    assert counted_from is not None
    since, large_before, small_before = counted_from
    moved = (len(large.taken_s) - large_before) * large_pages * PAGE_BYTES
    found = Turn(moved / (now - since) / 1e9, small.taken_s[small_before:])
    peer.send(None)
    peer.recv()  # it aborts its own first: what this side aborts is a failure there
    for requests in kinds:
        requests.end()
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Figures of every bound."""
    large_pages = -(-options.request_mib * 2**20 // PAGE_BYTES)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=decode, args=(theirs, large_pages))
    process.start()
    registry_url = ours.recv()
    memory = pool(large_pages)
    endpoints = {}
    for mib in sorted(options.mib):
        settings = kf.Settings(registry_url=registry_url, path="direct", direct_mib=mib, direct_receiver_mib=mib)
        endpoints[mib] = kf.PrefillEndpoint(memory.layout, engine=f"bound-{mib:g}", settings=settings)
    turns: dict[float, list[Turn]] = {mib: [] for mib in endpoints}
    first_rooms = itertools.count(1 << 20, 1 << 20)
    for number in range(options.rounds + 1):
        for mib, endpoint in endpoints.items():
            seconds = options.seconds if number else 1.0
            found = turn(endpoint, f"bound-{mib:g}", ours, next(first_rooms), seconds, large_pages)
            if number:  # connections are made in the first round
                turns[mib].append(found)
    for endpoint in endpoints.values():
        endpoint.close()
    ours.send(None)
    process.join()
    return {"request_mib": options.request_mib, "in_flight": IN_FLIGHT, "bounds": summary(turns)}


def summary(turns: dict[float, list[Turn]]) -> dict[str, dict[str, float]]:
    """The medians over rounds, by bound."""
    loosest = turns[max(turns)]
    found = {}
    for mib, of_bound in turns.items():
        percentiles = {
            percent: [float(np.percentile(each.small_s, percent)) * 1e3 for each in of_bound] for percent in (50, 99)
        }
        found[f"{mib:g}"] = {
            "gb_per_s": statistics.median(each.gb_per_s for each in of_bound),
            "of_loosest": statistics.median(
                each.gb_per_s / other.gb_per_s for each, other in zip(of_bound, loosest, strict=True)
            ),
            "small_p50_ms": statistics.median(percentiles[50]),
            "small_p99_ms": statistics.median(percentiles[99]),
            "small_requests": sum(len(each.small_s) for each in of_bound),
        }
    return found


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, nargs="+", default=[1, 4, 16, 64, 256, 1024], help="the bounds")
    parser.add_argument("--request-mib", type=int, default=64, help="size of a large request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a turn")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    found = measure(options)
    if options.json:
        print(json.dumps(found))
        return
    print(
        f"{IN_FLIGHT} requests of {found['request_mib']} MiB at a time, and one of {PAGE_BYTES >> 10} KiB beside them"
    )
    print(f"{'bound MiB':>10}{'GB/s':>8}{'of loosest':>12}{'small p50 ms':>14}{'p99 ms':>10}{'requests':>10}")
    for mib, each in found["bounds"].items():
        print(
            f"{mib:>10}{each['gb_per_s']:8.2f}{each['of_loosest']:12.3f}{each['small_p50_ms']:14.2f}"
            f"{each['small_p99_ms']:10.2f}{each['small_requests']:10}"
        )


if __name__ == "__main__":
    main()
