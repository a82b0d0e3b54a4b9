"""The staged path's loop without the interpreter: gathers, posts and polls, in Python and in C, in turns.

Two processes over NIXL. One gathers runs into staging memory and writes them into the other's in bulk, several on their
way at a time, with NumPy and NIXL's bindings or with `native_loop.c`, which calls NIXL's C interface: alone, and beside
a thread that keeps the interpreter's lock. docs/design/engine.md says what follows from it. It needs a C compiler:

    python -m benchmarks.native_loop [--chunk-mib 16] [--run-bytes 1024] [--rounds 3]

Prints GB/s, all rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import mmap
import multiprocessing
import multiprocessing.connection
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.transport.nixl.bindings import load_bindings

MIB = 1 << 20
POOL_BYTES = 256 * MIB
IN_FLIGHT, SUB_CHUNKS, NOTIFICATION_BYTES = 4, 32, 200
POLL_S = 20e-6
SPAWN = multiprocessing.get_context("spawn")


def memory(num_bytes: int) -> NDArray[np.uint8]:
    """Memory of its own, in whole pages."""
    found = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    found[:] = 0
    return found


def agent(name: str, *, receives: bool) -> tuple[Any, Any]:
    """An agent of NIXL's, and its backend."""
    nixl = load_bindings()
    config = nixl.nixlAgentConfig()
    config.useProgThread, config.useListenThread, config.pthrDelay = receives, False, 50_000
    config.syncMode = nixl.NIXL_THREAD_SYNC_RW
    made = nixl.nixlAgent(name, config)
    return made, made.createBackend("UCX", {"engine_config": "TCP_CONN_NB=y"})


def register(made: Any, backend: Any, *areas: NDArray[np.uint8]) -> None:
    """Registers memory with an agent."""
    nixl = load_bindings()
    described = [(area.ctypes.data, area.size, 0, "") for area in areas]
    made.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, described), [backend])


def receive(num_bytes: int, pipe: multiprocessing.connection.Connection) -> None:
    """The other process: has a ring, and takes notifications until it is told to end."""
    made, backend = agent("receiver", receives=True)
    ring = memory(num_bytes)
    register(made, backend, ring)
    pipe.send((made.getLocalMD(), ring.ctypes.data))
    while not pipe.poll(0.001):
        made.getNotifs({}, [backend])


class _Calls(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("post", "status", "set_notification", "agent", "options"))


class Sender:
    """The process that sends: its pool, its slots, and a request for each of them.

    Attributes:
        chunk_bytes: of a sub-chunk.
    """

    def __init__(self, metadata: bytes, ring: int, chunk_bytes: int, run_bytes: int) -> None:
        """Connects to the other one, whose ring is at an address."""
        nixl = load_bindings()
        self.chunk_bytes, self._run_bytes = chunk_bytes, run_bytes
        self._agent, backend = agent("sender", receives=False)
        self._pool, self._slots = memory(POOL_BYTES), memory(IN_FLIGHT * chunk_bytes)
        register(self._agent, backend, self._pool, self._slots)
        peer = self._agent.loadRemoteMD(metadata)
        peer = peer.decode() if isinstance(peer, bytes) else peer
        self._agent.makeConnection(peer, [backend])
        self._slot_addresses = self._slots.ctypes.data + chunk_bytes * np.arange(IN_FLIGHT, dtype=np.uint64)
        self._requests = [
            self._agent.createXferReq(
                nixl.NIXL_WRITE,
                nixl.nixlXferDList(nixl.DRAM_SEG, [(int(slot), chunk_bytes, 0)]),
                nixl.nixlXferDList(nixl.DRAM_SEG, [(ring + number * chunk_bytes, chunk_bytes, 0)]),
                peer,
                b"",
                [backend],
            )
            for number, slot in enumerate(self._slot_addresses)
        ]
        random = np.random.default_rng(1)
        count, runs = POOL_BYTES // run_bytes, chunk_bytes // run_bytes
        self._numbers = np.stack([random.permutation(count)[:runs] for _ in range(SUB_CHUNKS)])
        self._starts = (self._numbers * run_bytes + self._pool.ctypes.data).astype(np.uint64)
        self._notifications = np.zeros((SUB_CHUNKS, NOTIFICATION_BYTES), np.uint8)
        self._in_progress = nixl.NIXL_IN_PROG
        self._loop, self._calls = self._native(Path(str(nixl.__file__)).parent.parent)

    def _native(self, packages: Path) -> tuple[Any, _Calls]:
        """Compiles the loop, and collects what it calls; NIXL's objects of both interfaces are the same."""
        with tempfile.TemporaryDirectory() as directory:
            built = Path(directory, "native_loop.so")
            source = Path(__file__).with_suffix(".c")
            subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", built, source], check=True)
            loop = ctypes.CDLL(str(built)).move
        loop.restype = ctypes.c_int64
        library = ctypes.CDLL(str(next(packages.glob(".nixl_cu*.mesonpy.libs/libnixl_capi.so"))))
        options = ctypes.c_void_p()
        assert library.nixl_capi_create_opt_args(ctypes.byref(options)) == 0
        library.nixl_capi_opt_args_set_has_notif(options, ctypes.c_bool(True))
        functions = ("post_xfer_req", "get_xfer_status", "opt_args_set_notif_msg")
        addresses = [ctypes.cast(getattr(library, f"nixl_capi_{name}"), ctypes.c_void_p).value for name in functions]
        # The bindings' object has its agent's address behind its head (pybind11); the C interface has it in a struct.
        self._inner = np.array([ctypes.c_uint64.from_address(id(self._agent) + 16).value], np.uint64)
        self._handles = np.array(self._requests, np.uint64)
        self._request_addresses = self._handles.ctypes.data + 8 * np.arange(IN_FLIGHT, dtype=np.uint64)
        return loop, _Calls(*addresses, self._inner.ctypes.data, options)

    def in_python(self) -> None:
        """Moves all with NumPy and NIXL's bindings."""
        rows = self._pool.view(f"|V{self._run_bytes}")
        for number in range(SUB_CHUNKS + IN_FLIGHT):
            slot = number % IN_FLIGHT
            if number >= IN_FLIGHT:
                while self._agent.getXferStatus(self._requests[slot]) == self._in_progress:
                    time.sleep(POLL_S)
            if number < SUB_CHUNKS:
                packed = self._slots[slot * self.chunk_bytes : (slot + 1) * self.chunk_bytes]
                rows.take(self._numbers[number], out=packed.view(rows.dtype), mode="clip")
                self._agent.postXferReq(self._requests[slot], bytes(self._notifications[number]))

    def in_c(self) -> None:
        """Moves all with the loop in C: one call."""
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        ended = self._loop(
            ctypes.byref(self._calls),
            pointer(self._request_addresses.ctypes.data),
            pointer(self._slot_addresses.ctypes.data),
            number(IN_FLIGHT),
            pointer(self._starts.ctypes.data),
            number(SUB_CHUNKS),
            number(self._starts.shape[1]),
            ctypes.c_uint64(self._run_bytes),
            pointer(self._notifications.ctypes.data),
            number(NOTIFICATION_BYTES),
            ctypes.byref(number(0)),
        )
        assert ended >= 0, ended


def speed(move: Callable[[], None], num_bytes: int) -> float:
    """GB/s of one round."""
    begun_at = time.perf_counter()
    move()
    return num_bytes / (time.perf_counter() - begun_at) / 1e9


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunk-mib", type=int, default=16, help="size of a sub-chunk")
    parser.add_argument("--run-bytes", type=int, default=1024, help="bytes that lie together in the pool")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    chunk_bytes = options.chunk_mib * MIB
    ours, theirs = SPAWN.Pipe()
    other = SPAWN.Process(target=receive, args=(IN_FLIGHT * chunk_bytes, theirs), daemon=True)
    other.start()
    metadata, ring = ours.recv()
    sender = Sender(metadata, ring, chunk_bytes, options.run_bytes)
    print(f"{'':24}{'Python':>24}{'C':>24}")
    for name, spins in (("alone", False), ("beside a busy thread", True)):
        is_over = threading.Event()
        if spins:
            threading.Thread(target=lambda: all(not is_over.is_set() for _ in itertools.count()), daemon=True).start()  # noqa: B023
        found = [
            (speed(sender.in_python, SUB_CHUNKS * chunk_bytes), speed(sender.in_c, SUB_CHUNKS * chunk_bytes))
            for _ in range(options.rounds)
        ]
        is_over.set()
        columns = (" ".join(f"{each[which]:.2f}" for each in found) for which in (0, 1))
        print(f"{name:24}{''.join(f'{column:>24}' for column in columns)}")
    ours.send(None)
    other.join()


if __name__ == "__main__":
    main()
