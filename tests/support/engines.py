"""Whole engines in this process: every rank of a prefill and of a decode engine, over the in-process transport."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.support.caches import Model, Pool, Shape, pool
from tests.support.transports import FaultyTransport

from kvferry import DecodeEndpoint, InProcessNetwork, PrefillEndpoint, Receiver, Sender, Settings

WAIT_S = 10.0
"""How long a test waits for what should take milliseconds."""

_names = itertools.count()


def new_engine_name(kind: str) -> str:
    """A name that no test used before: all tests share one registry."""
    return f"{kind}-{next(_names)}"


@dataclass(slots=True, eq=False)
class PrefillEngine:
    """A prefill engine's ranks."""

    name: str
    shape: Shape
    pools: list[Pool] = field(default_factory=list)
    endpoints: list[PrefillEndpoint] = field(default_factory=list)
    transports: list[FaultyTransport] = field(default_factory=list)


@dataclass(slots=True)
class DecodeEngine:
    """A decode engine's ranks."""

    name: str
    shape: Shape
    pools: list[Pool] = field(default_factory=list)
    endpoints: list[DecodeEndpoint] = field(default_factory=list)
    transports: list[FaultyTransport] = field(default_factory=list)


@dataclass(slots=True)
class Request:
    """One request between two engines."""

    room: int
    source_pages: list[NDArray[np.int64]]
    destination_pages: list[NDArray[np.int64]]
    prefix_pages: int
    senders: list[Sender] = field(default_factory=list)
    receivers: list[Receiver] = field(default_factory=list)

    def wait(self, timeout_s: float = WAIT_S) -> None:
        """Waits for both sides; raises what the first that failed failed with."""
        for transfer in (*self.receivers, *self.senders):
            transfer.wait(timeout_s)

    def wait_ended(self, timeout_s: float = WAIT_S) -> None:
        """Waits for the end of both sides, whatever it is."""
        for transfer in (*self.receivers, *self.senders):
            with contextlib.suppress(Exception):
                transfer.wait(timeout_s)
            assert transfer.state.is_final, transfer.state


class Engines:
    """Starts engines that know one another by one registry, and ends them all."""

    def __init__(self, registry_url: str, /, **settings: Any) -> None:
        self.network = InProcessNetwork()
        self._settings = {"workers": 2, "queues": 2, "registry_url": registry_url, **settings}
        self._endpoints = contextlib.ExitStack()

    def __enter__(self) -> Engines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._endpoints.close()

    def settings(self, **changed: Any) -> Settings:
        return Settings(**{**self._settings, **changed})

    def prefill(
        self,
        model: Model,
        shape: Shape | None = None,
        *,
        name: str | None = None,
        ranks: Sequence[int] | None = None,
        **settings: Any,
    ) -> PrefillEngine:
        """Starts a prefill engine, or only some of its ranks, and waits until it is registered."""
        engine = PrefillEngine(name or new_engine_name("prefill"), shape or Shape())
        for coordinates in engine.shape.coordinates():
            if ranks is not None and coordinates.engine_rank not in ranks:
                continue
            engine.pools.append(pool(model, engine.shape, coordinates))
            engine.transports.append(FaultyTransport(self.network))
            endpoint = PrefillEndpoint(
                engine.pools[-1].layout,
                engine=engine.name,
                coordinates=coordinates,
                settings=self.settings(**settings),
                transport=engine.transports[-1],
            )
            self._endpoints.callback(endpoint.close)
            engine.endpoints.append(endpoint)
        for endpoint in engine.endpoints:
            assert endpoint.wait_registered(WAIT_S), endpoint.registry_error
        return engine

    def decode(
        self, model: Model, shape: Shape | None = None, *, ranks: Sequence[int] | None = None, **settings: Any
    ) -> DecodeEngine:
        """Starts a decode engine, or only some of its ranks."""
        engine = DecodeEngine(new_engine_name("decode"), shape or Shape())
        for coordinates in engine.shape.coordinates():
            if ranks is not None and coordinates.engine_rank not in ranks:
                continue
            engine.pools.append(pool(model, engine.shape, coordinates))
            engine.transports.append(FaultyTransport(self.network))
            endpoint = DecodeEndpoint(
                engine.pools[-1].layout,
                engine=engine.name,
                coordinates=coordinates,
                settings=self.settings(**settings),
                transport=engine.transports[-1],
            )
            self._endpoints.callback(endpoint.close)
            engine.endpoints.append(endpoint)
        return engine


class Requests:
    """Requests of one data-parallel group of a prefill engine, to one of a decode engine."""

    def __init__(
        self, prefill: PrefillEngine, decode: DecodeEngine, *, prefill_dp_rank: int = 0, decode_dp_rank: int = 0
    ) -> None:
        self.prefill, self.decode, self._prefill_dp_rank = prefill, decode, prefill_dp_rank
        self._used_pages = 0
        self._sources = [
            (pool, endpoint)
            for pool, endpoint in zip(prefill.pools, prefill.endpoints, strict=True)
            if pool.coordinates.dp_rank == prefill_dp_rank
        ]
        self._destinations = [
            (pool, endpoint)
            for pool, endpoint in zip(decode.pools, decode.endpoints, strict=True)
            if pool.coordinates.dp_rank == decode_dp_rank
        ]

    def connect(self) -> None:
        """Connects every decode rank now, so that the first room need not."""
        for _, endpoint in self._destinations:
            endpoint.connect(self.prefill.name, prefill_dp_rank=self._prefill_dp_rank, timeout_s=WAIT_S)

    def new(self, room: int, pages: int = 6, *, prefix_pages: int = 0) -> Request:
        """A request whose pages lie elsewhere on every rank, filled in at the source.

        Pages are reused as late as can be, so that requests side by side do not share any.
        """
        request = Request(
            room,
            [self._next_pages(pool, pages) for pool, _ in self._sources],
            [self._next_pages(pool, pages) for pool, _ in self._destinations],
            prefix_pages,
        )
        self._used_pages += pages
        for (memory, _), own in zip(self._sources, request.source_pages, strict=True):
            memory.fill(room, own)
        return request

    def _next_pages(self, pool: Pool, count: int) -> NDArray[np.int64]:
        seed = pool.coordinates.engine_rank + 100 * (pool in self.decode.pools)
        order = np.random.default_rng(seed).permutation(pool.layout.group("kv").num_pages)
        return np.roll(order, -self._used_pages)[:count]

    def open_decode(self, request: Request) -> None:
        """Opens the room on every decode rank."""
        for (memory, endpoint), pages in zip(self._destinations, request.destination_pages, strict=True):
            receiver = endpoint.open(
                request.room,
                pages[request.prefix_pages :],
                engine=self.prefill.name,
                prefill_dp_rank=self._prefill_dp_rank,
                prefix_tokens=request.prefix_pages * memory.model.page_tokens,
            )
            request.receivers.append(receiver)

    def open_prefill(self, request: Request) -> None:
        """Opens the room on every prefill rank."""
        request.senders += [endpoint.open(request.room) for _, endpoint in self._sources]

    def submit(
        self, request: Request, start: int = 0, stop: int | None = None, *, last: bool = True, aux: bytes = b"token"
    ) -> None:
        """Hands in pages [start, stop) of the request on every prefill rank, each with an aux of its own."""
        for rank, (sender, pages) in enumerate(zip(request.senders, request.source_pages, strict=True)):
            is_aux_writer = self._sources[rank][0].coordinates.is_aux_writer
            given = (aux if is_aux_writer else b"from another rank") if last else None
            sender.submit(pages[start:stop], last=last, aux=given)

    def check(self, request: Request) -> None:
        """Every byte of the part that was to be sent is right, on every decode rank."""
        for (memory, _), pages in zip(self._destinations, request.destination_pages, strict=True):
            wrong = memory.wrong(request.room, pages[request.prefix_pages :], first_page=request.prefix_pages)
            assert wrong == 0, f"{wrong} wrong elements on {memory.coordinates}"

    def run(
        self, room: int, pages: int = 6, *, prefix_pages: int = 0, cuts: Sequence[int] = (), aux: bytes = b"token"
    ) -> Request:
        """A whole request, submitted in chunks that end at the cuts, checked at its end."""
        request = self.new(room, pages, prefix_pages=prefix_pages)
        self.open_decode(request)
        self.open_prefill(request)
        for start, stop in itertools.pairwise([0, *cuts, pages]):
            self.submit(request, start, stop, last=stop == pages, aux=aux)
        request.wait()
        self.check(request)
        return request
