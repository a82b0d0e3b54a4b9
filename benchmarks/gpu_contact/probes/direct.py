"""What a direct write costs by the size of its descriptors, with threads that share it and with lists for UCX.

NIXL asks UCX for a copy and an event for each descriptor unless it hands over lists (KVFERRY_NIXL_SGL), and on a GPU
each is a call to the driver: this is what decides from which size on the direct path is worth it.

    python -m benchmarks.gpu_contact.probes.direct [--device cpu --tiny]
"""

from __future__ import annotations

import statistics
from itertools import product

import numpy as np
from benchmarks.gpu_contact.probes.common import (
    MIB,
    Clock,
    DeviceName,
    Memory,
    memory,
    parser,
    pattern,
    seconds_of,
    tell_and_exit,
)
from benchmarks.gpu_contact.probes.receiver import Receiver, finish, sender

from kvferry.transport import NixlTransport

SIZES = (32 << 10, 1 << 10, 256, 256 << 10, 4 << 10)
"""Bytes of a descriptor: what is most worth knowing first."""

WAYS = ((0, False), (0, True), (4, False), (4, True), (1, False))
"""Threads that share a write, and whether UCX gets lists."""

_MOST_DESCRIPTORS = 16384


def written(
    transport: NixlTransport, source: Memory, peer: str, address: int, size: int, count: int, rounds: int
) -> float:
    """Writes blocks to places in another order; returns the median of the seconds that took."""
    apart = source.num_bytes // count  # so that no two are neighbours on both sides
    rows = [np.array([(start, size, 0, apart, count)], np.uint64) for start in (source.address, address)]
    local, remote = transport.prepare(rows[0], None), transport.prepare(rows[1], peer)
    order = np.arange(count, dtype=np.int32)
    taken = seconds_of(lambda: finish(transport, transport.post(local, order, remote, order[::-1].copy(), b"")), rounds)
    for prepared in (local, remote):
        transport.release_list(prepared)
    return statistics.median(taken)


def arrived(content: np.ndarray, size: int, count: int) -> np.ndarray:
    """What the receiver's memory must be: blocks in the other order, and zero elsewhere."""
    expected = np.zeros_like(content)
    apart = len(content) // count
    blocks, places = content[: apart * count].reshape(count, apart), expected[: apart * count].reshape(count, apart)
    places[:, :size] = blocks[::-1, :size]
    return expected


def measure(device: DeviceName, *, is_tiny: bool, seconds: float) -> dict[str, object]:
    """Times every size in every way, and looks at what arrived once a way and size."""
    clock, rounds = Clock(seconds), 1 if is_tiny else 3
    num_bytes = MIB if is_tiny else 128 * MIB
    source, content = memory(num_bytes, device), pattern(num_bytes)
    source.put(content)
    rows, is_exact = [], True
    with Receiver(device, num_bytes) as receiver:
        senders: dict[tuple[int, bool], tuple[NixlTransport, str]] = {}
        for size, way in product((1 << 10, 256) if is_tiny else SIZES, WAYS[1:3] if is_tiny else WAYS):
            threads, lists = way
            name = f"{size} B, {threads} threads, {'lists' if lists else 'one by one'}"
            if not clock.has_time_for(name):
                continue
            if way not in senders:
                transport = sender(threads=threads, lists=lists)
                transport.register([source.region], source.device)
                senders[way] = transport, transport.connect(receiver.metadata)
            transport, peer = senders[way]
            count = min(_MOST_DESCRIPTORS, num_bytes // size // 2)
            receiver.clear()
            taken_s = written(transport, source, peer, receiver.addresses[0], size, count, rounds)
            is_right = receiver.has(arrived(content, size, count))
            is_exact &= is_right
            rows.append(
                {
                    "bytes": size,
                    "threads": threads,
                    "lists": lists,
                    "descriptors": count,
                    "us_each": taken_s / count * 1e6,
                    "gb_per_s": size * count / taken_s / 1e9,
                    "exact": is_right,
                }
            )
        for transport, _ in senders.values():
            transport.close()
    return {"device": device, "exact": is_exact, "rows": rows, "left_out": clock.left_out}


def main() -> None:
    """Measures and prints."""
    typed = parser(__doc__).parse_args()
    tell_and_exit(measure(typed.device, is_tiny=typed.tiny, seconds=typed.seconds))


if __name__ == "__main__":
    main()
