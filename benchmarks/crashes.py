"""What crashes of prefill ranks leave behind where nothing proves their ends: `python -m benchmarks.crashes`.

In every cycle a prefill rank starts in a namespace of process numbers of its own, so that the decode rank cannot see
whether it lives. Both open the same rooms, with the same numbers in every cycle, all go half-way through staging memory
over NIXL, and the rank is killed. Printed are the seconds until the rooms have failed, until all their pages are
reusable, and until nothing is left of the rooms; then an operator's word gives the rank's ring of staging memory back,
which is kept for a proof. In the end rooms, pages, threads, descriptors and idle CPU must be as after the first cycles;
the exit code is 0 only then.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tests.support.resources import Resources, resources

import kvferry as kf
from kvferry.control.registry_server import RegistryServer
from kvferry.testing.probe import probe

ROOT = Path(__file__).parent.parent
ENGINE = "crashing"
WARM = 2
"""Cycles after which nothing may grow any more: caches and pools of the libraries are filled then."""

PATIENCE_S = 120.0
IDLE_S = 5.0
MOST_GROWN = {"resident_bytes": 160 * 2**20, "sockets": 2, "threads": 4}
"""Two rings of staging memory: the next rank may attach before the last one's is given back; and pools of threads that
grow when they are first needed. A leak of a cycle would soon be more than that."""


def pool(pages: int) -> tuple[np.ndarray, kf.RankLayout]:
    """One small latent a page: the memory, which must outlive the endpoint, and its layout."""
    component = kf.latent_component(num_layers=1, latent_dim=64, dtype="float32")
    memory = np.zeros((pages, 4, 64), np.float32)
    shard = kf.shard_from_tensors(component, [memory], dims=("page", "token", "latent"))
    return memory, kf.RankLayout(shards=(shard,))


def eventually(what: str, holds: Callable[[], object]) -> float:
    """Waits until something holds; returns when it did. Fails if it never does."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            sys.exit(f"not within {PATIENCE_S:g} s: {what}")
        time.sleep(0.01)
    return time.monotonic()


def prefill(rooms: int) -> None:
    """Opens all rooms at the caller's word, hands in half of each, says so, and waits to be killed."""
    logging.disable()
    memory, layout = pool(2 * rooms)
    endpoint = kf.PrefillEndpoint(layout, engine=ENGINE, host_registry=False)
    eventually("it is registered", lambda: endpoint.wait_registered(1.0))
    sys.stdout.write("registered\n")
    sys.stdout.flush()
    sys.stdin.readline()
    senders = [endpoint.open(room) for room in range(rooms)]
    for room, sender in enumerate(senders):
        sender.submit([2 * room])
    eventually("half is sent", lambda: all(sender.is_at_rest for sender in senders))
    sys.stdout.write("half-way\n")
    sys.stdout.flush()
    sys.stdin.readline()
    del memory


class Prefill:
    """A prefill rank in a namespace of its own."""

    def __init__(self, rooms: int) -> None:
        """Begins to start it."""
        unshare = shutil.which("unshare")
        if unshare is None:
            sys.exit("there is no unshare (util-linux)")
        begin = [unshare, "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-m", "benchmarks.crashes"]
        self._process = subprocess.Popen(
            [*begin, "--prefill", "--rooms", str(rooms)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ,
        )

    def expect(self, line: str) -> None:
        """Waits for a line of its output."""
        assert self._process.stdout is not None
        said = self._process.stdout.readline().strip()
        if said != line:
            sys.exit(f"the prefill rank said {said!r} where {line!r} was expected")

    def go_on(self) -> None:
        """Lets it open its rooms."""
        assert self._process.stdin is not None
        self._process.stdin.write("go on\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """Ends it at once, as the kernel does."""
        pid = self._process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def cycle(decode: kf.DecodeEndpoint, rank: Prefill, rooms: int) -> tuple[float, float, float]:
    """Crashes a prefill rank; returns the seconds until rooms have failed, pages are back, and rooms are forgotten."""
    rank.expect("registered")
    decode.connect(ENGINE, timeout_s=PATIENCE_S)
    receivers = [decode.open(room, [2 * room, 2 * room + 1], engine=ENGINE) for room in range(rooms)]
    rank.go_on()
    rank.expect("half-way")
    early = sum(each.state.is_final for each in receivers)
    if early:
        print(f"{early} rooms failed before the crash: the machine has so much to do that a rank seemed silent")
    rank.kill()
    killed_at = time.monotonic()
    failed_at = eventually("all rooms fail", lambda: all(each.state.is_final for each in receivers))
    back_at = eventually("all pages are reusable", lambda: all(each.pages_reusable for each in receivers))
    forgotten_at = eventually("all rooms are forgotten", lambda: decode.open_rooms == 0)
    for lost in decode.status().quarantine:
        decode.release(lost.endpoint)
    links = probe(decode).links
    eventually("nothing is in quarantine", lambda: not decode.status().quarantine and not links.retired)
    return failed_at - killed_at, back_at - killed_at, forgotten_at - killed_at


def idle_percent() -> float:
    """This process's CPU time while nothing happens, in percent of a core."""
    before = time.process_time()
    time.sleep(IDLE_S)
    return 100 * (time.process_time() - before) / IDLE_S


def main() -> None:
    """Prints a line a cycle, and the verdict."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--rooms", type=int, default=2000)
    parser.add_argument("--prefill", action="store_true", help="be the prefill rank")
    arguments = parser.parse_args()
    if arguments.prefill:
        prefill(arguments.rooms)
        return
    logging.disable()  # every room of every crash
    with RegistryServer(port=0, lease_s=1.0) as registry:
        times = {"heartbeat_interval_s": 0.2, "peer_timeout_s": 5.0, "quarantine_s": 0.2}
        settings = kf.Settings(registry_url=registry.url, **times)
        os.environ["KVFERRY_REGISTRY_URL"] = registry.url
        os.environ.update({f"KVFERRY_{name.upper()}": str(value) for name, value in times.items()})
        memory, layout = pool(2 * arguments.rooms)
        before: Resources | None = None
        idle_before = 0.0
        with kf.DecodeEndpoint(layout, settings=settings) as decode:
            rank = Prefill(arguments.rooms)
            for number in range(1, arguments.cycles + 1):
                failed_s, back_s, forgotten_s = cycle(decode, rank, arguments.rooms)
                if number == WARM:
                    before, idle_before = resources(), idle_percent()
                now = resources()
                if number < arguments.cycles:
                    rank = Prefill(arguments.rooms)
                print(
                    f"cycle {number}: failed after {failed_s:.1f} s, pages back {back_s:.1f} s, forgotten "
                    f"{forgotten_s:.1f} s; {now.threads.total()} threads, {now.descriptors.total()} descriptors, "
                    f"{now.resident_bytes / 2**20:.0f} MiB",
                    flush=True,
                )
            if before is None:
                sys.exit(f"--cycles must be more than {WARM}")
            idle_after, problem = idle_percent(), resources().beyond(before, **MOST_GROWN)
        print(f"idle: {idle_before:.2f} % of a core after {WARM} cycles, {idle_after:.2f} % after {arguments.cycles}")
        if idle_after > 2 * idle_before + 0.5:
            problem += "; it does not sleep as long any more"
        print(f"{arguments.cycles} cycles with {arguments.rooms} rooms: {problem or 'all is as it was'}")
        del memory
    sys.exit(bool(problem))


if __name__ == "__main__":
    main()
