"""How long `Sender.submit` takes the caller, by the number of pages in the chunk.

The receiving side is real and receives every chunk; the transport is in-process, so that the machine's other core is
not what is measured. Prints the median and the 99th percentile in microseconds.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

import kvferry as kf

POOL_PAGES = 16_384
ROUNDS = 300


def pool() -> tuple[np.ndarray, kf.RankLayout]:
    """One layer with tiny pages, since the caller's time does not depend on how large a page is."""
    (component, _) = kf.attention_components(num_layers=1, num_kv_heads=1, head_dim=4, dtype="float32")
    tensor = np.zeros((POOL_PAGES, 1, 1, 4), np.float32)
    shard = kf.shard_from_tensors(component, [tensor], dims=("page", "token", "head", "dim"))
    return tensor, kf.RankLayout(shards=(shard,))


def measure(prefill: kf.PrefillEndpoint, decode: kf.DecodeEndpoint, pages: int) -> list[float]:
    """Microseconds of every submit."""
    chosen = np.random.default_rng(0).permutation(POOL_PAGES)[:pages].astype(np.int64)
    times_us = []
    for room in range(ROUNDS):
        receiver = decode.open(room, chosen)
        sender = prefill.open(room)
        start = time.perf_counter()
        sender.submit(chosen, last=True)
        times_us.append(1e6 * (time.perf_counter() - start))
        receiver.wait(30)
        sender.wait(30)
    return times_us


def main() -> None:
    """Prints one line a size."""
    network = kf.InProcessNetwork()
    (source, prefill_layout), (destination, decode_layout) = pool(), pool()
    with (
        kf.PrefillEndpoint(
            prefill_layout, settings=kf.Settings(registry_port=0), transport=kf.InProcessTransport(network)
        ) as prefill,
        kf.DecodeEndpoint(
            decode_layout,
            settings=kf.Settings(registry_url=prefill.registry_url),
            transport=kf.InProcessTransport(network),
        ) as decode,
    ):
        decode.connect()
        print("pages a chunk   p50 us   p99 us")
        for pages in (1, 64, 1024, 8192):
            times_us = measure(prefill, decode, pages)
            p99 = statistics.quantiles(times_us, n=100)[98]
            print(f"{pages:13d} {statistics.median(times_us):8.1f} {p99:8.1f}")
    del source, destination  # the pools outlive the endpoints


if __name__ == "__main__":
    main()
