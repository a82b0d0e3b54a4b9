"""Does it work? Writes 64 MiB from this process's memory into another's, and reads from UCX which way they took.

Between two processes on one GPU, or on two with NVLink or PCIe between them, UCX should take cuda_ipc. "software
emulation" and tcp mean that the bytes go by way of main memory and a processor: everything else would be measured in
vain. Memory of `expandable_segments` cannot be shared by the older CUDA IPC; what becomes of it is the second question.

    python -m benchmarks.gpu_contact.probes.bulk [--device cpu --tiny] [--lists]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import asdict

from benchmarks.gpu_contact.probes.common import MIB, DeviceName, is_legacy_ipc_capable, memory, parser, pattern, tell
from benchmarks.gpu_contact.probes.receiver import Receiver, sender, write
from benchmarks.gpu_contact.running import last_json

from kvferry.layout import MemoryKind
from kvferry.transport.nixl.nixl_diagnosis import ways_of_writes

_ROUNDS = 5


def measure(device: DeviceName, num_bytes: int, *, lists: bool) -> dict[str, object]:
    """Writes several times; the first, in which memory is mapped, is shown apart."""
    source = memory(num_bytes, device)
    content = pattern(num_bytes)
    source.put(content)
    with Receiver(device, num_bytes) as receiver:
        transport = sender(lists=lists)
        transport.register([source.region], source.device)
        peer = transport.connect(receiver.metadata)
        taken = []
        for _ in range(_ROUNDS + 1):
            before = time.perf_counter()
            write(transport, source.region, peer, receiver.addresses[0])
            taken.append(time.perf_counter() - before)
        is_exact = receiver.has(content)
        transport.close()
    return {
        "exact": is_exact,
        "mib": num_bytes / MIB,
        "first_ms": taken[0] * 1e3,
        "gb_per_s": num_bytes / min(taken[1:]) / 1e9,
        "legacy_ipc_capable": is_legacy_ipc_capable(source),
    }


def main() -> None:
    """Measures in a process of its own, whose output is read, and prints."""
    options = parser(__doc__)
    options.add_argument("--lists", action="store_true", help="with KVFERRY_NIXL_SGL")
    options.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    typed = options.parse_args()
    num_bytes = MIB if typed.tiny else 64 * MIB
    if typed.inner:
        tell(measure(typed.device, num_bytes, lists=typed.lists))
        return
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_contact.probes.bulk", *sys.argv[1:], "--inner"],
        env={**os.environ, "UCX_PROTO_INFO": "y"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(run.stdout)
    found = last_json(run.stdout.splitlines())
    if run.returncode or found is None:
        sys.exit(run.returncode or 1)
    kind = MemoryKind.VRAM if typed.device == "cuda" else MemoryKind.DRAM
    ways = [{**asdict(way), "emulated": way.is_emulated} for way in ways_of_writes(run.stdout, kind)]
    tell({"device": typed.device, **found, "ways": ways})
    sys.exit(not found["exact"])


if __name__ == "__main__":
    main()
