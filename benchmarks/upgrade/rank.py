"""What a process of either release runs: the soak's ranks, each told what to do through a pipe of its own.

    python -m benchmarks.upgrade.rank 5 7    # numbers of descriptors, one a rank

Of kvferry it uses what is exported alone, which older releases have as well.
"""

from __future__ import annotations

import sys
import threading
from multiprocessing.connection import Connection

from benchmarks.soak.ranks import run_rank
from benchmarks.upgrade.processes import Running

import kvferry


def main() -> None:
    """Runs until the other end of every pipe is closed."""
    threads = []
    for descriptor in sys.argv[1:]:
        connection = Connection(int(descriptor))
        connection.send([Running(kvferry.__file__)])
        threads.append(threading.Thread(target=run_rank, args=(connection, *connection.recv())))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
