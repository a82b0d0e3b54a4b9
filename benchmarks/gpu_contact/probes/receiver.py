"""A second process with memory that this one writes into, as a decode rank is to a prefill rank."""

from __future__ import annotations

import multiprocessing
import time
import uuid
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType

import numpy as np
import xxhash
from benchmarks.gpu_contact.probes.common import DeviceName, memory
from numpy.typing import NDArray

from kvferry.layout import Region
from kvferry.transport import NixlTransport, TransferHandle, Transport

_START_S = 60.0
_WRITE_S = 30.0


def digest(content: NDArray[np.uint8]) -> str:
    """A digest of bytes, to compare without sending them."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(content).data)


def _receive(pipe: Connection, device: DeviceName, num_bytes: int, regions: int) -> None:
    pieces = [memory(num_bytes // regions, device) for _ in range(regions)]
    transport = NixlTransport(f"receiver-{uuid.uuid4().hex[:8]}")
    transport.register([piece.region for piece in pieces], pieces[0].device)
    pipe.send((transport.metadata(), [piece.address for piece in pieces]))
    while (asked := pipe.recv()) is not None:
        if asked == "clear":
            for piece in pieces:
                piece.put(np.zeros(piece.num_bytes, np.uint8))
            pipe.send(None)
        else:
            pipe.send(digest(np.concatenate([piece.get() for piece in pieces])))
    transport.close()


class Receiver:
    """The second process.

    Attributes:
        metadata: its transport's, to connect to.
        addresses: of its pieces of memory.
    """

    def __init__(self, device: DeviceName, num_bytes: int, regions: int = 1) -> None:
        """Starts it, with so many pieces of memory that are so large together."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_receive, args=(theirs, device, num_bytes, regions), daemon=True)
        self._process.start()
        theirs.close()
        if not self._pipe.poll(_START_S):
            raise TimeoutError(f"the second process was not there after {_START_S:g} s")
        self.metadata: bytes
        self.addresses: list[int]
        self.metadata, self.addresses = self._pipe.recv()

    def clear(self) -> None:
        """Makes all of its memory zero."""
        self._pipe.send("clear")
        self._pipe.recv()

    def has(self, expected: NDArray[np.uint8]) -> bool:
        """Returns whether its memory is this, all pieces one after the other."""
        self._pipe.send("digest")
        return bool(self._pipe.recv() == digest(expected))

    def __enter__(self) -> Receiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # it has ended, which whoever asked it has met before
            self._pipe.send(None)
        self._process.join(10)


def sender(*, threads: int = 0, lists: bool = False) -> NixlTransport:
    """A transport that only writes, as a prefill rank's is."""
    return NixlTransport(f"sender-{uuid.uuid4().hex[:8]}", only_writes=True, threads=threads, hands_lists=lists)


def finish(transport: Transport, transfer: TransferHandle) -> None:
    """Waits for the end of a write.

    Raises:
        TimeoutError: if there is none for long.
    """
    deadline = time.monotonic() + _WRITE_S
    while transport.poll(transfer) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"a write did not end within {_WRITE_S:g} s")
    transport.release(transfer)


def write(transport: Transport, source: Region, peer: str, address: int) -> None:
    """Writes one range and waits for its end."""
    finish(transport, transport.write(source, peer, address, b""))
