"""Moves bytes between two processes over NIXL, and prints how fast that was: `python -m kvferry.cli.doctor.probe`."""

from __future__ import annotations

import multiprocessing
import sys
import time
from multiprocessing.connection import Connection

import msgspec
import numpy as np

from kvferry.endpoint.construction import create_transport
from kvferry.layout import Device, Region
from kvferry.settings import Settings
from kvferry.transport import Transport

_BULK_BYTES = 64 << 20
_SMALL_BYTES = 4 << 10
_ROUNDS = 5
_SMALL_ROUNDS = 50
_ANSWER_S = 20.0


class Measured(msgspec.Struct, frozen=True):
    """What came of it: the best of several rounds, since others may use the machine as well.

    Attributes:
        bytes_per_s: of one large write.
        latency_s: of a small one, from posting to its end here.
    """

    bytes_per_s: float
    latency_s: float


def _receive(pipe: Connection) -> None:
    memory = np.zeros(_BULK_BYTES, np.uint8)
    transport = create_transport(Settings(), "kvferry-doctor-receiver", writes=False)
    transport.register([Region(memory.ctypes.data, memory.nbytes)], Device())
    pipe.send((transport.metadata(), memory.ctypes.data))
    pipe.recv()
    pipe.send(int(memory.min()))
    transport.close()


def _write(transport: Transport, source: Region, peer: str, address: int) -> float:
    begun_at = time.perf_counter()
    flight = transport.write(source, peer, address, b"")
    while transport.poll(flight) is None:
        if time.perf_counter() - begun_at > _ANSWER_S:
            raise TimeoutError(f"a write of {source.length} bytes did not end within {_ANSWER_S:g} s")
    took_s = time.perf_counter() - begun_at
    transport.release(flight)
    return took_s


def main() -> None:
    """Runs both processes."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    receiver = context.Process(target=_receive, args=(theirs,), daemon=True)
    receiver.start()
    memory = np.ones(_BULK_BYTES, np.uint8)
    source = Region(memory.ctypes.data, memory.nbytes)
    transport = create_transport(Settings(), "kvferry-doctor-sender")
    transport.register([source], Device())
    if not pipe.poll(_ANSWER_S):
        raise TimeoutError("the second process did not start")
    metadata, address = pipe.recv()
    peer = transport.connect(metadata)
    bulk_s = min(_write(transport, source, peer, address) for _ in range(_ROUNDS))
    small = Region(source.address, _SMALL_BYTES)
    small_s = min(_write(transport, small, peer, address) for _ in range(_SMALL_ROUNDS))
    pipe.send("done")
    if pipe.recv() != 1:
        raise ValueError("what arrived is not what was sent")
    receiver.join(_ANSWER_S)
    transport.close()
    sys.stdout.write("\n" + msgspec.json.encode(Measured(_BULK_BYTES / bulk_s, small_s)).decode() + "\n")


if __name__ == "__main__":
    main()
