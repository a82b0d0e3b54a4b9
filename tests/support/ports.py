"""Ports for tests."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress


@contextmanager
def held_port() -> Iterator[int]:
    """A port of loopback where nobody listens, and that the system gives to nobody else.

    It is bound, so that no other test can find it free; a server that sets SO_REUSEADDR can listen there all the same.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def free_ports_in_a_row(count: int) -> int:
    """Returns the first of some free ports of loopback, below those that Linux gives to connections by chance."""
    for base in random.sample(range(20_000, 32_000, count), 100):
        with ExitStack() as probes, suppress(OSError):
            for port in range(base, base + count):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return base
    raise AssertionError(f"there are no {count} free ports in a row")
