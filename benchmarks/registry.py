"""How long a registry takes to answer, and what it takes of a core while nobody asks.

    python benchmarks/registry.py [--requests 200] [--idle-s 5]

A registration takes 1 to 2 ms; with Nagle's algorithm at work it took 44.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time

import numpy as np
import psutil

from kvferry.control.registry_client import RegistryClient
from kvferry.layout import RankCoordinates
from kvferry.protocol.wire.registrations import RankRegistration

RANK = RankRegistration(
    engine="prefill",
    incarnation="first",
    coordinates=RankCoordinates(),
    control_address="tcp://127.0.0.1:40000",
    layout_digest="digest",
    started_at=0.0,
    protocol_version=1,
)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="how many registrations are timed")
    parser.add_argument("--idle-s", type=float, default=5.0, help="for how long nobody asks")
    options = parser.parse_args()
    command = [sys.executable, "-m", "kvferry", "registry", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            said = re.search(r"http://[\d.:]+\d", process.stdout.readline())
            assert said is not None, "the registry did not start"
            with RegistryClient(said[0]) as client:
                took = []
                for _ in range(options.requests):
                    begun_at = time.perf_counter()
                    client.register(RANK)
                    took.append(time.perf_counter() - begun_at)
            watched = psutil.Process(process.pid)
            before = watched.cpu_times()
            time.sleep(options.idle_s)
            after = watched.cpu_times()
        finally:
            process.terminate()
    median, slow = np.percentile(took, [50, 99]) * 1e3
    busy = (after.user + after.system - before.user - before.system) / options.idle_s
    print(f"a registration takes {median:.2f} ms, one in a hundred {slow:.2f}; idle, {busy:.1%} of a core")


if __name__ == "__main__":
    main()
