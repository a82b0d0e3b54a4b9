"""What the first write to a peer costs over the second: 128 tensors a side, each mapped by the sender when first used.

python -m benchmarks.gpu_contact.probes.first_write [--device cpu --tiny]
"""

from __future__ import annotations

import time

import numpy as np
from benchmarks.gpu_contact.probes.common import MIB, DeviceName, memory, parser, pattern, tell_and_exit
from benchmarks.gpu_contact.probes.receiver import Receiver, finish, sender

_BLOCK_BYTES = 32 << 10
_WRITES = 4


def measure(device: DeviceName, *, is_tiny: bool) -> dict[str, object]:
    """Registers, connects, and writes a block of every tensor, several times."""
    # So large that torch's allocator takes a segment of its own for each, as it does for an engine's layers.
    regions, each = (4, MIB // 4) if is_tiny else (128, 16 * MIB)
    sources = [memory(each, device) for _ in range(regions)]
    contents = [pattern(_BLOCK_BYTES, seed) for seed in range(regions)]
    for source, content in zip(sources, contents, strict=True):
        source.put(content)
    with Receiver(device, each * regions, regions) as receiver:
        transport = sender()
        marks = [time.perf_counter()]
        transport.register([source.region for source in sources], sources[0].device)
        marks.append(time.perf_counter())
        peer = transport.connect(receiver.metadata)
        marks.append(time.perf_counter())
        rows = [
            np.array([(start, _BLOCK_BYTES, 0, _BLOCK_BYTES, 1) for start in starts], np.uint64)
            for starts in ([source.address for source in sources], receiver.addresses)
        ]
        local, remote = transport.prepare(rows[0], None), transport.prepare(rows[1], peer)
        order = np.arange(regions, dtype=np.int32)
        marks.append(time.perf_counter())
        for _ in range(_WRITES):
            finish(transport, transport.post(local, order, remote, order, b""))
            marks.append(time.perf_counter())
        expected = np.zeros((regions, each), np.uint8)
        for row, content in zip(expected, contents, strict=True):
            row[:_BLOCK_BYTES] = content
        is_exact = receiver.has(expected.ravel())
        transport.close()
    took = np.diff(marks) * 1e3
    names = ("register", "connect", "prepare", "first write", "second write")
    return {
        "device": device,
        "exact": is_exact,
        "regions": regions,
        "milliseconds": {name: float(value) for name, value in zip(names, took, strict=False)},
        "later_ms": float(np.median(took[4:])),
    }


def main() -> None:
    """Measures and prints."""
    typed = parser(__doc__).parse_args()
    tell_and_exit(measure(typed.device, is_tiny=typed.tiny))


if __name__ == "__main__":
    main()
