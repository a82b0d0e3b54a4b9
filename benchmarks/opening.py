"""What a request for a cache takes of an engine's scheduler in its plug-in, by the number of pages, and of what parts.

A decode endpoint opens requests whose prefill engine nobody knows, one after the other, so that nothing else goes on.
Page numbers are given as the engines have them: SGLang a row of 32-bit integers, vLLM a list of its blocks, which its
scheduler passes on to the workers as an array. Prints, in microseconds of the thread that calls (median), for scattered
pages and for runs of 64:

* open: `DecodeEndpoint.open`, which copies and checks page numbers before it returns, so that the caller has its error
  at once and may use its array again;
* of it copying, checking and packing the numbers for their way;
* vLLM's scheduler: taking the numbers out of its blocks; a worker: turning them into pages.

With --json, the same as JSON.

    python benchmarks/opening.py [--pages 1,1024,8192] [--repeats 200]
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvferry as kf
from kvferry.engines.vllm.caches import CacheGroup
from kvferry.engines.vllm.layouts import DescribedCaches
from kvferry.engines.vllm.steps import GroupBlocks
from kvferry.engines.vllm.worker import WorkerSide
from kvferry.plan.requests.page_numbers import PageNumbers, checked_pages

PAGE_TOKENS = 16
RUN = 64

Pages = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(slots=True)
class Block:
    """A block of vLLM's."""

    block_id: int
    is_null: bool = False


def pool(num_pages: int) -> tuple[np.ndarray, kf.RankLayout]:
    """One layer: the memory, which must outlive the endpoint, and its layout."""
    (component, _) = kf.attention_components(num_layers=1, num_kv_heads=1, head_dim=64, dtype="float16")
    tensor = np.zeros((num_pages, PAGE_TOKENS, 1, 64), np.float16)
    shard = kf.shard_from_tensors(component, [tensor], dims=("page", "token", "head", "dim"))
    return tensor, kf.RankLayout(shards=(shard,))


def orders(count: int) -> dict[str, Pages]:
    """Page numbers of a pool of twice as many pages and a run more."""
    random = np.random.default_rng(0)
    runs = random.permutation(2 * count // RUN + 1)[: -(-count // RUN)] * RUN
    return {
        "scattered": random.permutation(2 * count)[:count].astype(np.int64),
        f"in runs of {RUN}": np.concatenate([np.arange(first, first + RUN) for first in runs])[:count].astype(np.int64),
    }


def median_us(call: Callable[[], Any], repeats: int, after: Callable[[Any], object] = lambda _: None) -> float:
    """What a call takes of this thread; what is done with its result does not count."""
    taken = []
    for _ in range(repeats):
        begun_ns = time.thread_time_ns()
        result = call()
        taken.append(time.thread_time_ns() - begun_ns)
        after(result)
    return statistics.median(taken) / 1e3


def end(receiver: kf.Receiver) -> None:
    """Ends a request, so that its number of pages is not in the way of the next."""
    receiver.abort("it was opened to be measured")
    assert receiver.wait_pages_reusable(30)


def figures(pages: Pages, repeats: int, endpoint: kf.DecodeEndpoint, rooms: itertools.count[int]) -> dict[str, float]:
    """All parts, for one number of pages in one order."""
    tokens, group = PAGE_TOKENS * len(pages), endpoint.layout.groups[0]
    blocks, table = [Block(int(each)) for each in pages], CacheGroup(group.name, ("layer",), PAGE_TOKENS)
    worker: Any = WorkerSide.__new__(WorkerSide)
    worker._described, worker._layout_groups = DescribedCaches(endpoint.layout, {group.name: 1}), {group.name: group}
    rows, given = pages.astype(np.int32), GroupBlocks(0, pages)
    return {
        "open": median_us(lambda: endpoint.open(next(rooms), rows), repeats, end),
        "copying": median_us(lambda: rows.astype(np.int64), repeats),
        "copying and checking": median_us(
            lambda: checked_pages(rows, pool_pages=group.num_pages, where="here"), repeats
        ),
        "packing": median_us(lambda: PageNumbers.of(pages), repeats),
        "vLLM's scheduler": median_us(lambda: GroupBlocks.of(table, 0, blocks), repeats),
        "vLLM's worker": median_us(lambda: worker.pages(group.name, given, tokens), repeats),
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", default="1,1024,8192", help="of a request")
    parser.add_argument("--repeats", type=int, default=200, help="how many a figure is of")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    logging.getLogger("kvferry").setLevel(logging.CRITICAL)  # requests are given up, one by one
    counts = [int(each) for each in arguments.pages.split(",")]
    registry = kf.create_registry(kf.Settings(registry_port=0))
    registry.start()
    memory, layout = pool(2 * max(counts) + RUN)
    found: dict[str, dict[int, dict[str, float]]] = {}
    rooms = itertools.count(1)
    with kf.DecodeEndpoint(layout, settings=kf.Settings(registry_url=registry.url)) as endpoint:
        for count in counts:
            for order, pages in orders(count).items():
                found.setdefault(order, {})[count] = figures(pages, arguments.repeats, endpoint, rooms)
    registry.close()
    del memory
    if arguments.json:
        print(json.dumps(found))
        return
    names = list(found["scattered"][counts[0]])
    print(f"{'':18}{'pages':>8}" + "".join(f"{name:>22}" for name in names))
    for order, by_count in found.items():
        for count, each in by_count.items():
            print(f"{order:18}{count:8}" + "".join(f"{each[name]:22.1f}" for name in names))


if __name__ == "__main__":
    main()
