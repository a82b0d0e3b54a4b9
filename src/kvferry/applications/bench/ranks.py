"""What each process does: a rank of either side, which answers one command after the other."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvferry.applications.bench import commands, pattern
from kvferry.applications.bench.interpreter_time import counted_platform, interpreter_cpu_s, taken_since
from kvferry.applications.bench.limits import BulkSender, bulk_transport
from kvferry.applications.bench.options import BY_LAYER, BenchOptions, Variant, variant_of
from kvferry.applications.bench.pool import Pool, Storage, allocate, storage_bytes
from kvferry.cpus import usable_cpus
from kvferry.endpoint import DecodeEndpoint, PrefillEndpoint, Receiver, Sender
from kvferry.errors import KVFerryError, PeerDisconnectedError, RegistryError, TransferTimeoutError
from kvferry.layout import Interval, RankCoordinates
from kvferry.plan.requests.page_numbers import GroupPages
from kvferry.pools.pool import POISON
from kvferry.protocol.transfer.states import TransferState
from kvferry.settings import Settings
from kvferry.transport import Transport

Pages: TypeAlias = "NDArray[np.int64] | dict[str, GroupPages]"
EndpointT = TypeVar("EndpointT", PrefillEndpoint, DecodeEndpoint)
TransferT = TypeVar("TransferT", Sender, Receiver)

_POLL_S = 0.001
_SYNCHRONOUS_POLL_S = 20e-6  # little beside the milliseconds that a chunk takes
_NOT_REFUSALS = (TransferTimeoutError, RegistryError, PeerDisconnectedError)
"""Errors that say that something is broken, rather than that it cannot be done this way."""


class Rank(Protocol):
    """What a process runs: made there, of all cases and its place on its side."""

    def answer(self, command: commands.Command) -> commands.Answer:
        """Does what a command says."""

    def close(self) -> None:
        """Gives everything back."""


RankMaker: TypeAlias = Callable[[Sequence[BenchOptions], RankCoordinates], Rank]


def serve(connection: Connection, make: RankMaker, planned: Sequence[BenchOptions], place: RankCoordinates) -> None:
    """A rank's process: answers commands until it is told to leave. Ends with the parent, whatever it does then."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    rank = make(planned, place)
    try:
        while not isinstance(command := commands.decode_command(connection.recv_bytes()), commands.Leave):
            connection.send_bytes(commands.encode(rank.answer(command)))
    except EOFError:
        pass
    except Exception as error:
        crashed = commands.Crashed(f"{type(error).__name__}: {error}", traceback.format_exc())
        connection.send_bytes(commands.encode(crashed))
    finally:
        rank.close()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class _SideRank(ABC, Generic[EndpointT, TransferT]):
    """A rank of one side. It has one endpoint for every variant, all of the same memory.

    Attributes:
        endpoints: by the variant's name.
    """

    side_name: ClassVar[str]

    def __init__(self, planned: Sequence[BenchOptions], coordinates: RankCoordinates) -> None:
        self.endpoints: dict[str, EndpointT] = {}
        self._planned = planned
        self._coordinates = coordinates
        self._resources = ExitStack()
        self._storage: Storage | None = None  # for all cases
        self.transfers: list[TransferT] = []

    def close(self) -> None:
        """Gives everything back but the memory, which the next case uses as well."""
        self._resources.close()
        self.endpoints.clear()
        self.transfers.clear()

    def answer(self, command: commands.Command) -> commands.Answer:
        """Does what both sides do alike."""
        match command:
            case commands.Prepare(case):
                self._prepare(case)
            case commands.Open():
                self._open(command)
            case commands.Start():
                return self._start(command)
            case _:
                raise TypeError(f"a {self.side_name} rank does not know {command}")
        return commands.Done()

    def _prepare(self, case: int) -> None:
        """Begins a case, with its pool poisoned."""
        self.close()
        self._options = self._planned[case]
        side = self._options.side(self.side_name)
        # Threads to fill and to check with: ranks of one side do so at the same time.
        self._threads = max(1, usable_cpus() // side.tp_size)
        if self._storage is None:
            size = storage_bytes(self._planned, self.side_name, self._coordinates)
            self._storage = allocate(size, self._options.device)
        self._pool = Pool(self._options, side, self._coordinates, self._storage)

    def _start(self, command: commands.Start) -> commands.Started:
        """Makes an endpoint for every variant that can have one."""
        self._run, registry_url, refused = command.run, command.registry_url, dict[str, str]()
        for name in command.variants:
            try:
                self.endpoints[name], registry_url = self._endpoint(name, registry_url)
            except KVFerryError as error:
                refused[name] = _refusal(error)
        return commands.Started(registry_url or "", refused)

    @abstractmethod
    def _endpoint(self, variant: str, registry_url: str | None) -> tuple[EndpointT, str]:
        """Makes the endpoint of a variant, and says where its registry answers: without one it runs one."""

    def _open(self, command: commands.Open) -> None:
        """Opens as many rooms as there are requests with memory of their own."""
        self._opened, self.transfers = command, []
        for _ in range(self._options.requests):
            self._open_next()

    def _open_next(self) -> None:
        """Opens another room, unless that were one too many."""
        if len(self.transfers) < self._num_transfers:
            number = len(self.transfers)
            endpoint = self.endpoints[self._opened.variant]
            self.transfers.append(self._open_room(endpoint, number, self._opened.first_room + number))

    @abstractmethod
    def _open_room(self, endpoint: EndpointT, number: int, room: int) -> TransferT:
        """Opens a room for the transfer of that number."""

    def _bulk_transport(self) -> Transport:
        settings = bulk_settings(self._options)
        transport = bulk_transport(self._pool.storage, self.side_name, self._coordinates.engine_rank, settings)
        self._resources.callback(transport.close)
        return transport

    @property
    def _num_transfers(self) -> int:
        return self._opened.passes * self._options.requests


class PrefillRank(_SideRank[PrefillEndpoint, Sender]):
    """Sends."""

    side_name = "prefill"

    def answer(self, command: commands.Command) -> commands.Answer:
        match command:
            case commands.Transfer(timeout_s):
                return self._send(timeout_s)
            case commands.Aim(targets):
                self._bulk = BulkSender(self._bulk_transport(), self._pool.storage, targets)
                return commands.Done()
            case commands.Bulk(is_in_blocks, timeout_s):
                return self._bulk.write(is_in_blocks, timeout_s)
        return super().answer(command)

    def _prepare(self, case: int) -> None:
        super()._prepare(case)
        pattern.write(self._pool, self._options, threads=self._threads)
        self._chunks = [self._chunks_of(request) for request in range(self._options.requests)]

    def _endpoint(self, variant: str, registry_url: str | None) -> tuple[PrefillEndpoint, str]:
        endpoint = PrefillEndpoint(
            self._pool.layout,
            engine=engine_name(self._run, variant),
            coordinates=self._coordinates,
            settings=_settings(self._options, registry_url, variant_of(variant)),
            platform=counted_platform(),
            host_registry=registry_url is None,
        )
        return self._resources.enter_context(endpoint), endpoint.registry_url

    def _open(self, command: commands.Open) -> None:
        super()._open(command)
        deadline = time.monotonic() + command.timeout_s
        while any(sender.state is TransferState.BOOTSTRAPPING for sender in self.transfers):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the decode ranks did not open all rooms within {command.timeout_s:g} s")
            time.sleep(_POLL_S)

    def _open_room(self, endpoint: PrefillEndpoint, number: int, room: int) -> Sender:
        return endpoint.open(room)

    def _send(self, timeout_s: float) -> commands.Sent | commands.Failed:
        deadline = time.monotonic() + timeout_s
        submitted_at, computed_at, submit_s = [], [], []
        is_synchronous = variant_of(self._opened.variant).is_synchronous
        cpu_before, interpreter_before = time.process_time(), interpreter_cpu_s()
        try:
            for number in range(self._num_transfers):
                if number >= self._options.at_a_time:
                    self.transfers[number - self._options.at_a_time].wait(max(0.0, deadline - time.monotonic()))
                    self._open_next()
                sender = self.transfers[number]
                submitted_at.append(time.monotonic())
                for pages, is_last in self._chunks[self._options.source_of(number)]:
                    for layers, ends in self._computed(is_last=is_last):
                        before = time.perf_counter()
                        sender.submit(pages, last=ends, layers=layers)
                        while is_synchronous and not (sender.is_at_rest or sender.state.is_final):
                            time.sleep(_SYNCHRONOUS_POLL_S)
                        submit_s.append(time.perf_counter() - before)
                computed_at.append(time.monotonic())
            for sender in self.transfers:
                sender.wait(max(0.0, deadline - time.monotonic()))
        except KVFerryError as error:
            return _failed(error, self.transfers, timeout_s)
        cpu_s, interpreter_s = time.process_time() - cpu_before, taken_since(interpreter_before)
        sent_bytes: list[dict[str, int]] = []
        for sender in self.transfers:
            sent_bytes.append({})
            for write in sender.stats.writes:
                sent_bytes[-1][write.receiver] = sent_bytes[-1].get(write.receiver, 0) + write.total_bytes
        return commands.Sent(
            submitted_at=tuple(submitted_at),
            computed_at=tuple(computed_at),
            submit_s=tuple(submit_s),
            cpu_s=cpu_s,
            interpreter_s=interpreter_s,
            sent_bytes=tuple(sent_bytes),
            descriptors=tuple(sender.stats.descriptors for sender in self.transfers),
            writes=tuple(len(sender.stats.writes) for sender in self.transfers),
            ways=ways_of(self.transfers),
        )

    def _computed(self, *, is_last: bool) -> Iterator[tuple[Mapping[str, Interval] | None, bool]]:
        """Yields what there is of a chunk to be handed in, as it is computed, and whether the request ends with it."""
        layer_s = self._options.layer_time_ms / 1e3
        through_at = time.monotonic()
        if not variant_of(self._opened.variant).is_by_layer:
            _wait_until(through_at + layer_s * self._options.model.num_layers)
            yield None, is_last
            return
        ranges = layer_ranges(self._options)
        for number, (computed, layers) in enumerate(ranges):
            through_at += layer_s * computed
            _wait_until(through_at)
            yield layers, is_last and number == len(ranges) - 1

    def _chunks_of(self, request: int) -> list[tuple[Pages, bool]]:
        """What each submit of a request hands in, and whether it is the last."""
        pool, count = self._pool, self._options.chunks
        groups = pool.layout.groups
        chunks: list[tuple[Pages, bool]] = []
        for chunk in range(count):
            is_last = chunk == count - 1
            parts: dict[str, GroupPages] = {}
            for group in groups:
                taken = pool.requests[request][group.name]
                if group.has_slots:
                    if is_last:
                        parts[group.name] = GroupPages(taken.pages)
                    continue
                start, stop = (len(taken.pages) * each // count for each in (chunk, chunk + 1))
                if start < stop:
                    parts[group.name] = GroupPages(taken.pages[start:stop], start=taken.start + start)
                    if len(groups) == 1 and taken.start == 0:  # as an engine with one group would
                        chunks.append((taken.pages[start:stop], is_last))
            if len(chunks) == chunk:
                chunks.append((parts, is_last))
        return chunks


class DecodeRank(_SideRank[DecodeEndpoint, Receiver]):
    """Receives."""

    side_name = "decode"

    def answer(self, command: commands.Command) -> commands.Answer:
        match command:
            case commands.Transfer(timeout_s):
                return self._receive(timeout_s)
            case commands.Check():
                self._pool.memory.fetch()
                if self._options.plant_wrong_byte:
                    pattern.damage(self._pool, self._options)
                passes = self._opened.passes
                return commands.Found(pattern.check(self._pool, self._options, passes=passes, threads=self._threads))
            case commands.Listen():
                return commands.Listening(self._bulk_transport().metadata())
            case commands.CopyMemory(num_bytes):
                return commands.Copied(self._pool.storage.copy_seconds(num_bytes))
        return super().answer(command)

    def _endpoint(self, variant: str, registry_url: str | None) -> tuple[DecodeEndpoint, str]:
        assert registry_url is not None
        endpoint = DecodeEndpoint(
            self._pool.layout,
            engine="bench-decode",
            coordinates=self._coordinates,
            settings=_settings(self._options, registry_url, variant_of(variant)),
            platform=counted_platform(),
        )
        self._resources.enter_context(endpoint)
        endpoint.connect(engine_name(self._run, variant))
        return endpoint, registry_url

    def _open(self, command: commands.Open) -> None:
        self._pool.memory.fill(POISON)
        super()._open(command)

    def _open_room(self, endpoint: DecodeEndpoint, number: int, room: int) -> Receiver:
        pages = {name: taken.pages for name, taken in self._pool.requests[number % self._options.requests].items()}
        engine = engine_name(self._run, self._opened.variant)
        return endpoint.open(room, pages, engine=engine, tokens=self._options.tokens)

    def _receive(self, timeout_s: float) -> commands.Received | commands.Failed:
        deadline = time.monotonic() + timeout_s
        cpu_before, interpreter_before = time.process_time(), interpreter_cpu_s()
        ended_at = []
        try:
            for number in range(self._num_transfers):
                receiver = self.transfers[number]
                receiver.wait(max(0.0, deadline - time.monotonic()))
                receiver.wait_pages_reusable(max(0.0, deadline - time.monotonic()))
                assert receiver.stats.ended_at is not None
                ended_at.append(receiver.stats.ended_at)
                self._open_next()  # in the same pages
        except KVFerryError as error:
            return _failed(error, self.transfers, timeout_s)
        return commands.Received(
            endpoint=self.endpoints[self._opened.variant].transport.endpoint_name,
            ended_at=tuple(ended_at),
            cpu_s=time.process_time() - cpu_before,
            interpreter_s=taken_since(interpreter_before),
        )


RANKS: Mapping[str, RankMaker] = MappingProxyType({"prefill": PrefillRank, "decode": DecodeRank})
"""By the name of the side."""


def _wait_until(moment: float) -> None:
    """Waits as for a device, which takes no processor. Not at all where it has come: to sleep gives the lock away."""
    left_s = moment - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)


def layer_ranges(options: BenchOptions) -> list[tuple[float, Mapping[str, Interval]]]:
    """In which ranges a request is handed in: how many of the model's layers are computed for each, and its layers.

    Components that have fewer layers than the model have as many of them in a range as fall to it.
    """
    count = min(options.layer_ranges, options.model.num_layers)
    ranges: list[tuple[float, Mapping[str, Interval]]] = []
    for number in range(count):
        parts: dict[str, Interval] = {}
        for sharded in options.model.components:
            total = sharded.component.axes[0].size
            start, stop = total * number // count, total * (number + 1) // count
            if start < stop:
                parts[sharded.component.name] = Interval(start, stop)
        ranges.append((options.model.num_layers / count, parts))
    return ranges


def engine_name(run: str, variant: str) -> str:
    """How the prefill engine of a variant is registered."""
    return f"bench-{run}-{variant.replace(BY_LAYER, '-by-layer')}"


def ways_of(senders: Iterable[Sender]) -> tuple[commands.Way, ...]:
    """How the bytes of some transfers went, and why, those of most bytes first."""
    amounts: dict[tuple[str, str], int] = {}
    for sender in senders:
        for write in sender.stats.writes:
            key = write.path.value, write.why
            amounts[key] = amounts.get(key, 0) + write.total_bytes
    ways = [commands.Way(path, why, num_bytes) for (path, why), num_bytes in amounts.items()]
    return tuple(sorted(ways, key=lambda way: -way.num_bytes))


def _failed(error: KVFerryError, transfers: Sequence[Sender | Receiver], timeout_s: float) -> commands.Failed:
    """Ends what still runs, so that the memory is free for the next variant."""
    for transfer in transfers:
        transfer.abort("another request of the benchmark failed")
    deadline = time.monotonic() + timeout_s
    for transfer in transfers:
        if not transfer.wait_pages_reusable(max(0.0, deadline - time.monotonic())):
            raise error
    return commands.Failed(f"{type(error).__name__}: {error}")


def _refusal(error: KVFerryError) -> str:
    """Why something cannot be done this way.

    Raises:
        KVFerryError: the same again, if the error says something else.
    """
    if isinstance(error, _NOT_REFUSALS):
        raise error
    return f"{type(error).__name__}: {error}"


def _settings(options: BenchOptions, registry_url: str | None, variant: Variant) -> Settings:
    own: dict[str, Any] = dict(variant.settings)
    return Settings(
        registry_url=registry_url,
        registry_port=0,
        control_port=0,
        transport=options.transport,
        nixl_threads=options.nixl_threads,
        **own,
    )


def bulk_settings(options: BenchOptions) -> Settings:
    """What bulk writes are made with: all that endpoints have, and threads in any case, since they are the limit."""
    return Settings(transport=options.transport, nixl_threads=options.nixl_threads or usable_cpus())
