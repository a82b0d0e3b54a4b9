"""What each process does: a rank of either side, which answers one command after the other."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import traceback
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvferry.cli.bench import pattern
from kvferry.cli.bench.limits import BulkReceiver, BulkSender, copy_seconds
from kvferry.cli.bench.options import VARIANTS, BenchOptions, Variant
from kvferry.cli.bench.pool import Pool
from kvferry.endpoint import DecodeEndpoint, PrefillEndpoint, Receiver, Sender
from kvferry.layout import RankCoordinates
from kvferry.protocol.chunks import GroupPages
from kvferry.protocol.states import TransferState
from kvferry.settings import Settings

Pages: TypeAlias = "NDArray[np.int64] | dict[str, GroupPages]"

_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class Allocate:
    """Make the pools and fill them. Answer: None."""


@dataclass(frozen=True, slots=True)
class Start:
    """Make the endpoints; None as the registry's address has the rank run it. Answer: that address."""

    registry_url: str | None


@dataclass(frozen=True, slots=True)
class Open:
    """Open the rooms of one repetition and wait until all ranks have. Answer: None."""

    variant: int
    first_room: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """Move, or receive, the rooms that are open. Answer: `Sent` or `Received`."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class Check:
    """Compare every byte with what belongs there. Answer: `pattern.Checked`."""


@dataclass(frozen=True, slots=True)
class Listen:
    """Make ready for bulk writes. Answer: what a bulk sender needs to connect."""


@dataclass(frozen=True, slots=True)
class Aim:
    """Connect to where bulk writes go. Answer: None.

    Attributes:
        targets: for every decode rank that this one sends to, what `Listen` answered, where in its memory to write,
            and the bytes of every request.
    """

    targets: tuple[tuple[bytes, int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Bulk:
    """Write the bytes of a repetition in bulk. Answer: `limits.BulkTimes`."""

    is_in_blocks: bool
    timeout_s: float


@dataclass(frozen=True, slots=True)
class CopyMemory:
    """Copy so many bytes within the pools, or as many as half of them have. Answer: seconds for each byte."""

    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """A prefill rank's account of one repetition; times are of the machine's steady clock.

    Attributes:
        submitted_at: of every request, just before its first chunk.
        submit_s: how long every submit took the caller.
        cpu_s: of the whole process, meanwhile.
        sent_bytes: for every request, how many went to each receiver.
        descriptors: of every request.
    """

    submitted_at: tuple[float, ...]
    submit_s: tuple[float, ...]
    cpu_s: float
    sent_bytes: tuple[dict[str, int], ...]
    descriptors: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """A decode rank's account of one repetition.

    Attributes:
        endpoint: how prefill ranks call it.
        ended_at: of every request.
        cpu_s: of the whole process, meanwhile.
    """

    endpoint: str
    ended_at: tuple[float, ...]
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Crashed:
    """A process failed."""

    error: str
    details: str


class Rank(Protocol):
    """What a process runs."""

    def answer(self, command: Any) -> Any:
        """Does what a command says."""

    def close(self) -> None:
        """Gives everything back."""


def prefill_main(connection: Connection, options: BenchOptions, coordinates: RankCoordinates) -> None:
    """The process of a prefill rank."""
    _serve(connection, PrefillRank(options, coordinates))


def decode_main(connection: Connection, options: BenchOptions, coordinates: RankCoordinates) -> None:
    """The process of a decode rank."""
    _serve(connection, DecodeRank(options, coordinates))


def _serve(connection: Connection, rank: Rank) -> None:
    """Answers commands until None comes. Ends with the parent, whatever it is doing then."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        while (command := connection.recv()) is not None:
            connection.send(rank.answer(command))
    except EOFError:
        pass
    except Exception as error:
        connection.send(Crashed(f"{type(error).__name__}: {error}", traceback.format_exc()))
    finally:
        rank.close()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class PrefillRank:
    """Sends. It has one endpoint for every variant, all of the same memory."""

    def __init__(self, options: BenchOptions, coordinates: RankCoordinates) -> None:
        self._options = options
        self._coordinates = coordinates
        self._resources = ExitStack()
        self._endpoints: list[PrefillEndpoint] = []
        self._senders: list[Sender] = []

    def close(self) -> None:
        """Gives everything back."""
        self._resources.close()

    def answer(self, command: Any) -> Any:
        """Does what a command says."""
        match command:
            case Allocate():
                self._pool = Pool(self._options, self._options.prefill, self._coordinates)
                pattern.write(self._pool, self._options)
                self._chunks = [self._chunks_of(request) for request in range(self._options.requests)]
                return None
            case Start(registry_url):
                return self._start(registry_url)
            case Open(variant, first_room, timeout_s):
                return self._open(variant, first_room, timeout_s)
            case Transfer(timeout_s):
                return self._send(timeout_s)
            case Aim(targets):
                threads = self._options.nixl_threads
                self._bulk = BulkSender(self._pool.memory, targets, self._coordinates.engine_rank, threads)
                self._resources.callback(self._bulk.close)
                return None
            case Bulk(is_in_blocks, timeout_s):
                return self._bulk.write(is_in_blocks, timeout_s)
        raise TypeError(f"a prefill rank does not know {command}")

    def _start(self, registry_url: str | None) -> str:
        for variant in VARIANTS:
            endpoint = PrefillEndpoint(
                self._pool.layout,
                engine=engine_name(variant),
                coordinates=self._coordinates,
                settings=_settings(self._options, registry_url, variant),
                host_registry=registry_url is None,
            )
            self._endpoints.append(self._resources.enter_context(endpoint))
            registry_url = endpoint.registry_url
        assert registry_url is not None
        return registry_url

    def _open(self, variant: int, first_room: int, timeout_s: float) -> None:
        endpoint = self._endpoints[variant]
        self._senders = [endpoint.open(first_room + request) for request in range(self._options.requests)]
        deadline = time.monotonic() + timeout_s
        while any(sender.state is TransferState.BOOTSTRAPPING for sender in self._senders):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the decode ranks did not open all rooms within {timeout_s:g} s")
            time.sleep(_POLL_S)

    def _send(self, timeout_s: float) -> Sent:
        deadline = time.monotonic() + timeout_s
        submitted_at, submit_s = [], []
        cpu_before = time.process_time()
        for number, sender in enumerate(self._senders):
            if number >= self._options.in_flight:
                self._senders[number - self._options.in_flight].wait(max(0.0, deadline - time.monotonic()))
            submitted_at.append(time.monotonic())
            for pages, is_last in self._chunks[number]:
                before = time.perf_counter()
                sender.submit(pages, last=is_last)
                submit_s.append(time.perf_counter() - before)
        for sender in self._senders:
            sender.wait(max(0.0, deadline - time.monotonic()))
        cpu_s = time.process_time() - cpu_before
        sent_bytes: list[dict[str, int]] = []
        for sender in self._senders:
            sent_bytes.append({})
            for write in sender.stats.writes:
                sent_bytes[-1][write.receiver] = sent_bytes[-1].get(write.receiver, 0) + write.total_bytes
        descriptors = tuple(sender.stats.descriptors for sender in self._senders)
        return Sent(tuple(submitted_at), tuple(submit_s), cpu_s, tuple(sent_bytes), descriptors)

    def _chunks_of(self, request: int) -> list[tuple[Pages, bool]]:
        """What each submit of a request hands in, and whether it is the last."""
        pool, count = self._pool, self._options.chunks
        groups = pool.layout.groups
        chunks: list[tuple[Pages, bool]] = []
        for chunk in range(count):
            is_last = chunk == count - 1
            parts: dict[str, GroupPages] = {}
            for group in groups:
                extent, numbers = pool.extents[group.name], pool.pages(group.name, request)
                if group.has_slots:
                    if is_last:
                        parts[group.name] = GroupPages(numbers)
                    continue
                start, stop = extent.pages * chunk // count, extent.pages * (chunk + 1) // count
                if start < stop:
                    parts[group.name] = GroupPages(numbers[start:stop], start=extent.first + start)
                    if len(groups) == 1 and extent.first == 0:  # as an engine with one group would
                        chunks.append((numbers[start:stop], is_last))
            if len(chunks) == chunk:
                chunks.append((parts, is_last))
        return chunks


class DecodeRank:
    """Receives, through one endpoint for all variants."""

    def __init__(self, options: BenchOptions, coordinates: RankCoordinates) -> None:
        self._options = options
        self._coordinates = coordinates
        self._resources = ExitStack()
        self._receivers: list[Receiver] = []

    def close(self) -> None:
        """Gives everything back."""
        self._resources.close()

    def answer(self, command: Any) -> Any:
        """Does what a command says."""
        match command:
            case Allocate():
                self._pool = Pool(self._options, self._options.decode, self._coordinates)
                return None
            case Start(registry_url):
                return self._start(registry_url)
            case Open(variant, first_room):
                return self._open(variant, first_room)
            case Transfer(timeout_s):
                return self._receive(timeout_s)
            case Check():
                if self._options.plants_wrong_byte:
                    pattern.damage(self._pool, self._options)
                return pattern.check(self._pool, self._options)
            case Listen():
                self._bulk = BulkReceiver(self._pool.memory, self._coordinates.engine_rank)
                self._resources.callback(self._bulk.close)
                return self._bulk.metadata
            case CopyMemory(num_bytes):
                return copy_seconds(self._pool.memory, num_bytes)
        raise TypeError(f"a decode rank does not know {command}")

    def _start(self, registry_url: str | None) -> str | None:
        self._endpoint = self._resources.enter_context(
            DecodeEndpoint(
                self._pool.layout,
                engine="bench-decode",
                coordinates=self._coordinates,
                settings=_settings(self._options, registry_url),
            )
        )
        for variant in VARIANTS:
            self._endpoint.connect(engine_name(variant))
        return registry_url

    def _open(self, variant: int, first_room: int) -> None:
        self._pool.poison()
        engine = engine_name(VARIANTS[variant])
        self._receivers = [
            self._endpoint.open(
                first_room + request,
                {group.name: self._pool.pages(group.name, request) for group in self._pool.layout.groups},
                engine=engine,
                tokens=self._options.tokens,
            )
            for request in range(self._options.requests)
        ]

    def _receive(self, timeout_s: float) -> Received:
        deadline = time.monotonic() + timeout_s
        cpu_before = time.process_time()
        ended_at = []
        for receiver in self._receivers:
            receiver.wait(max(0.0, deadline - time.monotonic()))
            assert receiver.stats.ended_at is not None
            ended_at.append(receiver.stats.ended_at)
        return Received(self._endpoint.transport.endpoint_name, tuple(ended_at), time.process_time() - cpu_before)


def engine_name(variant: Variant) -> str:
    """How the prefill engine of a variant is registered."""
    return f"bench-{variant.name}"


def _settings(options: BenchOptions, registry_url: str | None, variant: Variant | None = None) -> Settings:
    own = {} if variant is None else variant.settings
    return Settings(registry_url=registry_url, registry_port=0, nixl_threads=options.nixl_threads, **own)
