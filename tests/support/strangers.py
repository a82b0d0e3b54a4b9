"""Strangers: connections to every port of a process, of every kind that costs it a descriptor.

Run as a program it opens them, keeps those that stay, and prints how many there were:
`python -m tests.support.strangers 10000 5 127.0.0.1:8998 127.0.0.1:40000`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections import Counter, deque

KINDS: dict[str, bytes] = {
    "says nothing": b"",
    "half a request": b"GET /v1/eng",
    "was answered and stays": b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n",
    "garbage": bytes(range(256)),
    "a wrong secret": b"GET /v1/engines HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\n\r\n",
}
"""What each says."""


def ports_of(pid: int) -> list[tuple[str, int]]:
    """Every TCP port that a process listens on, with an address of this machine by which it is reached."""
    listed = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
    found = set()
    for line in listed.splitlines():
        if re.search(rf"pid={pid},", line):
            host, _, port = line.split()[3].rpartition(":")
            host = host.strip("[]").removeprefix("::ffff:").partition("%")[0]
            found.add(("127.0.0.1" if host in ("*", "0.0.0.0", "::") else host, int(port)))
    return sorted(found)


def besiege(addresses: list[tuple[str, int]], *, count: int, seconds: float) -> Counter[str]:
    """Opens so many connections, spread over the time, and keeps all until they are more than files may be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = min(count, hard - 100)
    held: deque[socket.socket] = deque()
    done: Counter[str] = Counter()
    begun_at = time.monotonic()
    try:
        for number, (address, (kind, said)) in zip(
            range(count), itertools.cycle(itertools.product(addresses, KINDS.items()))
        ):
            ahead_s = begun_at + seconds * number / count - time.monotonic()
            if ahead_s > 0:
                time.sleep(ahead_s)
            connection = socket.socket()
            connection.settimeout(0.5)
            try:
                connection.connect(address)
                connection.sendall(said)
                done[f"{address[1]} {kind}"] += 1
            except OSError as error:
                done[f"{address[1]} {type(error).__name__}"] += 1
            connection.setblocking(False)
            held.append(connection)
            if len(held) >= most:
                held.popleft().close()
        sys.stdout.write(f"{done.total()}\n")
        sys.stdout.flush()
        sys.stdin.readline()
    finally:
        for connection in held:
            with contextlib.suppress(OSError):
                connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return done


def open_files(pid: int) -> int:
    """How many files a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


if __name__ == "__main__":
    targets = [(host, int(port)) for host, _, port in (each.rpartition(":") for each in sys.argv[3:])]
    sys.stdout.write(f"{dict(besiege(targets, count=int(sys.argv[1]), seconds=float(sys.argv[2])))}\n")
