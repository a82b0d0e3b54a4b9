"""A prefill rank for a process, and a namespace of process numbers, of its own.

    python -m tests.support.lonely_prefill ENGINE

Its settings come from the environment. It opens each room that standard input names, a number a line, submits half of
its pages, and prints the room's number when the decode rank has opened it. It ends when it is killed.
"""

from __future__ import annotations

import sys

import numpy as np
from tests.support.caches import Model, Shape, pool
from tests.support.waiting import eventually

from kvferry import PrefillEndpoint, RankCoordinates, TransferState


def main() -> None:
    """Runs until it is killed."""
    its_pool = pool(Model(), Shape(), RankCoordinates())
    endpoint = PrefillEndpoint(its_pool.layout, engine=sys.argv[1], host_registry=False)
    eventually("it is registered", lambda: endpoint.wait_registered(1.0))
    sys.stdout.write("registered\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sender = endpoint.open(int(line))
        eventually("both have it open", lambda: sender.state is not TransferState.BOOTSTRAPPING)  # noqa: B023
        sender.submit(np.arange(2))
        sys.stdout.write(line)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
