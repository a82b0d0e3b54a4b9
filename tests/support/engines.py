"""Whole engines in this process: every rank of a prefill and of a decode engine, over the in-process transport."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from tests.support.caches import Model, Shape, pool
from tests.support.waiting import PATIENCE_S, eventually

from kvferry import (
    DecodeEndpoint,
    GroupPages,
    InProcessNetwork,
    PrefillEndpoint,
    RankCoordinates,
    Receiver,
    Sender,
    Settings,
    TokenShare,
)
from kvferry.pools.places import Pages, TakenPages, first_needed, positions_of
from kvferry.testing import FaultyTransport, KnownContents, LocalNetwork, Pool
from kvferry.testing.probe import probe

WAIT_S = PATIENCE_S
"""How long a test waits for what should take milliseconds."""

_names = itertools.count()


def new_engine_name(kind: str) -> str:
    """A name that no test used before: all tests share one registry."""
    return f"{kind}-{next(_names)}"


@dataclass(slots=True, eq=False)
class PrefillEngine:
    """A prefill engine's ranks."""

    name: str
    model: Model
    pools: list[Pool] = field(default_factory=list)
    endpoints: list[PrefillEndpoint] = field(default_factory=list)
    transports: list[FaultyTransport] = field(default_factory=list)


@dataclass(slots=True)
class DecodeEngine:
    """A decode engine's ranks."""

    name: str
    pools: list[Pool] = field(default_factory=list)
    endpoints: list[DecodeEndpoint] = field(default_factory=list)
    transports: list[FaultyTransport] = field(default_factory=list)


@dataclass(slots=True)
class Request:
    """One request between two engines.

    Attributes:
        source: by prefill rank and group, the pages in which it keeps the request, from the request's first on.
        destination: by decode rank and group, the pages for what is missing there.
    """

    room: int
    tokens: int
    prefix_tokens: int
    source: list[dict[str, TakenPages]]
    destination: list[dict[str, TakenPages]]
    senders: list[Sender] = field(default_factory=list)
    receivers: list[Receiver] = field(default_factory=list)
    submitted: list[dict[str, int]] = field(default_factory=list)  # by prefill rank and group, how many pages

    @property
    def source_pages(self) -> list[Pages]:
        """By prefill rank, the pages of the only group."""
        return [given.pages for each in self.source for given in each.values()]

    @property
    def destination_pages(self) -> list[Pages]:
        """By decode rank, the pages of the only group."""
        return [given.pages for each in self.destination for given in each.values()]

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
        self.local = LocalNetwork(settings.pop("registry_url", registry_url), **settings)

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *error: object) -> None:
        self.local.close()

    @property
    def network(self) -> InProcessNetwork:
        """What connects the transports."""
        return self.local.transports

    def settings(self, **changed: Any) -> Settings:
        return self.local.settings(**changed)

    def prefill(
        self,
        model: Model,
        shape: Shape | None = None,
        *,
        name: str | None = None,
        ranks: Sequence[int] | None = None,
        fingerprint: Mapping[str, str] | None = None,
        instance: str | None = None,
        **settings: Any,
    ) -> PrefillEngine:
        """Starts a prefill engine, or only some of its ranks, and waits until it is registered."""
        engine = PrefillEngine(name or new_engine_name("prefill"), model)
        for coordinates in _chosen(shape, ranks):
            engine.pools.append(pool(model, shape or Shape(), coordinates, seed=coordinates.engine_rank))
            engine.transports.append(self.local.transport())
            started = self.local.prefill(
                engine.pools[-1],
                engine=engine.name,
                transport=engine.transports[-1],
                fingerprint=fingerprint,
                instance=instance,
                **settings,
            )
            engine.endpoints.append(started)
        return engine

    def decode(
        self,
        model: Model,
        shape: Shape | None = None,
        *,
        ranks: Sequence[int] | None = None,
        fingerprint: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> DecodeEngine:
        """Starts a decode engine, or only some of its ranks."""
        engine = DecodeEngine(new_engine_name("decode"))
        for coordinates in _chosen(shape, ranks):
            engine.pools.append(pool(model, shape or Shape(), coordinates, seed=100 + coordinates.engine_rank))
            engine.transports.append(self.local.transport())
            started = self.local.decode(
                engine.pools[-1],
                engine=engine.name,
                transport=engine.transports[-1],
                fingerprint=fingerprint,
                **settings,
            )
            engine.endpoints.append(started)
        return engine


def _chosen(shape: Shape | None, ranks: Sequence[int] | None) -> list[RankCoordinates]:
    return [each for each in (shape or Shape()).coordinates() if ranks is None or each.engine_rank in ranks]


def share_tokens(memory: Pool, request: Request) -> int | None:
    """How many of a request's tokens a rank holds, where it must say it: counted out one by one."""
    share = memory.layout.tokens
    return len(positions_of(share, request.tokens)) if share.partition.depends_on_length else None


class Requests:
    """Requests of one data-parallel group of a prefill engine, to one of a decode engine."""

    def __init__(
        self, prefill: PrefillEngine, decode: DecodeEngine, *, prefill_dp_rank: int = 0, decode_dp_rank: int = 0
    ) -> None:
        self.prefill, self.decode, self._prefill_dp_rank = prefill, decode, prefill_dp_rank
        self._are_dealt = False
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

    def deal(self, by: int) -> None:
        """Has the next requests' tokens lie so many ranks further on the prefill side than its layouts say."""
        self._are_dealt = True
        for memory, _ in self._sources:
            share = memory.layout.tokens
            moved = TokenShare(share.partition, (share.part + by) % share.partition.num_parts)
            memory.layout = msgspec.structs.replace(memory.layout, tokens=moved)

    def connect(self) -> None:
        """Connects every decode rank now, so that the first room need not."""
        for _, endpoint in self._destinations:
            endpoint.connect(self.prefill.name, prefill_dp_rank=self._prefill_dp_rank, timeout_s=WAIT_S)

    def new(self, room: int, pages: int = 6, *, prefix_pages: int = 0) -> Request:
        """As `request`, of so many of the model's pages."""
        page_tokens = self.prefill.model.page_tokens
        return self.request(room, pages * page_tokens, prefix_tokens=prefix_pages * page_tokens)

    def request(self, room: int, tokens: int, *, prefix_tokens: int = 0) -> Request:
        """A request whose pages lie elsewhere on every rank, filled in at the source.

        Pages are reused as late as can be, so that requests side by side do not share any.
        """
        request = Request(
            room,
            tokens,
            prefix_tokens,
            [pool.pages_for(tokens, whole_windows=True) for pool, _ in self._sources],
            [pool.pages_for(tokens, prefix_tokens=prefix_tokens) for pool, _ in self._destinations],
        )
        for (memory, _), own in zip(self._sources, request.source, strict=True):
            memory.fill(KnownContents(room), own, tokens=tokens)
        return request

    def open_decode(
        self, request: Request, *, says_tokens: bool = False, depends_on: Sequence[Mapping[str, bytes]] = ()
    ) -> None:
        """Opens the room on every decode rank.

        Args:
            says_tokens: whether the decode side says how long the request is.
            depends_on: what each rank says that the request's cache depends on; nothing if empty.
        """
        for rank, ((memory, endpoint), kept) in enumerate(zip(self._destinations, request.destination, strict=True)):
            by_group = {name: each.pages for name, each in kept.items()}
            receiver = endpoint.open(
                request.room,
                by_group if len(by_group) > 1 else next(iter(by_group.values())),
                engine=self.prefill.name,
                prefill_dp_rank=self._prefill_dp_rank,
                prefix_tokens=request.prefix_tokens,
                tokens=request.tokens if says_tokens else None,
                share_tokens=share_tokens(memory, request) if says_tokens else None,
                depends_on=depends_on[rank] if depends_on else None,
            )
            request.receivers.append(receiver)

    def open_prefill(self, request: Request, *, depends_on: Mapping[str, bytes] | None = None) -> None:
        """Opens the room on every prefill rank, which says the length where it must.

        Args:
            depends_on: what every rank says that the request's cache depends on.
        """
        for memory, endpoint in self._sources:
            share = share_tokens(memory, request)
            tokens = None if share is None else request.tokens
            request.senders.append(
                endpoint.open(request.room, tokens=tokens, share_tokens=share, depends_on=depends_on)
            )

    def submit(
        self, request: Request, start: int = 0, stop: int | None = None, *, last: bool = True, aux: bytes = b"token"
    ) -> None:
        """Hands in pages [start, stop) of the request on every prefill rank, each with an aux of its own."""
        for rank, (sender, pages) in enumerate(zip(request.senders, request.source_pages, strict=True)):
            is_aux_writer = self._sources[rank][0].coordinates.is_aux_writer
            given = (aux if is_aux_writer else b"from another rank") if last else None
            sender.submit(pages[start:stop], last=last, aux=given)

    def advance(self, request: Request, tokens: int, *, aux: bytes = b"token", skips_windows: bool = False) -> None:
        """Hands in, on every prefill rank, the pages that are full after so many tokens; all that is left at the end.

        Args:
            skips_windows: leaves out the pages of windows of which the decode side needs nothing.
        """
        is_last = tokens == request.tokens
        request.submitted = request.submitted or [dict.fromkeys(each, 0) for each in request.source]
        for rank, (memory, _) in enumerate(self._sources):
            positions = positions_of(memory.layout.tokens, request.tokens)
            pages: dict[str, GroupPages] = {}
            for group in memory.layout.groups:
                done, own = request.submitted[rank][group.name], request.source[rank][group.name].pages
                full = sum(position < tokens for position in positions) // group.page_tokens
                stop = len(own) if is_last else 0 if group.has_slots else full
                if skips_windows and group.window_tokens is not None:
                    start = first_needed(group.window_tokens, request.tokens, request.prefix_tokens)
                    done = max(done, min(sum(position < start for position in positions) // group.page_tokens, stop))
                if stop > done or not group.has_slots:
                    pages[group.name] = GroupPages(own[done:stop], start=done)
                    request.submitted[rank][group.name] = stop
            given = (aux if memory.coordinates.is_aux_writer else b"from another rank") if is_last else None
            part = memory.layout.tokens.part if self._are_dealt else None
            request.senders[rank].submit(pages, last=is_last, aux=given, token_part=part)

    def check(self, request: Request) -> None:
        """Every byte of the part that was to be sent is right, on every decode rank."""
        for (memory, _), kept in zip(self._destinations, request.destination, strict=True):
            memory.check(KnownContents(request.room), kept, elsewhere=False)

    def check_every_byte(self, request: Request, *, absent: Sequence[str] = ()) -> None:
        """The decode ranks, wiped before, hold this request and nothing else."""
        for (memory, _), kept in zip(self._destinations, request.destination, strict=True):
            memory.check(
                KnownContents(request.room),
                kept,
                tokens=request.tokens,
                prefix_tokens=request.prefix_tokens,
                absent=absent,
            )

    def wipe(self) -> None:
        """Makes the decode ranks' memory untouched again."""
        for memory, _ in self._destinations:
            memory.wipe()

    def begin_held(self) -> Request:
        """A request of which a write is on its way, and stays there until the prefill transport is `held` no more."""
        transport = self.prefill.transports[0]
        transport.held = True
        request = self.new(1)
        self.open_decode(request)
        self.open_prefill(request)
        self.submit(request)
        eventually("a write is on its way", lambda: transport.in_flight == 1)
        return request

    def run(
        self, room: int, pages: int = 6, *, prefix_pages: int = 0, cuts: Sequence[int] = (), aux: bytes = b"token"
    ) -> Request:
        """A whole request, submitted in chunks that end at the cuts, checked at its end."""
        request = self.new(room, pages, prefix_pages=prefix_pages)
        self.open_decode(request)
        self.open_prefill(request)
        for count, (start, stop) in enumerate(itertools.pairwise([0, *cuts, pages])):
            self.let_leave(request, count)
            self.submit(request, start, stop, last=stop == pages, aux=aux)
        request.wait()
        self.check(request)
        return request

    def let_leave(self, request: Request, count: int) -> None:
        """Waits until so many chunks have left: the next one would leave together with those that have not."""

        def have_left(endpoint: PrefillEndpoint) -> bool:
            room = probe(endpoint).table.rooms.get(request.room)
            return room is None or (room.chunks == count and room.machine.waiting_chunks == 0)

        if count:
            eventually("chunks have left", lambda: all(have_left(endpoint) for _, endpoint in self._sources))

    def run_tokens(
        self,
        room: int,
        tokens: int,
        *,
        prefix_tokens: int = 0,
        cuts: Sequence[int] = (),
        says_tokens: bool = True,
        skips_windows: bool = False,
        absent: Sequence[str] = (),
    ) -> Request:
        """A whole request of any length, of which every byte is checked; cuts count tokens."""
        self.wipe()
        request = self.request(room, tokens, prefix_tokens=prefix_tokens)
        self.open_decode(request, says_tokens=says_tokens)
        self.open_prefill(request)
        for count, stop in enumerate([*(cut for cut in cuts if cut < tokens), tokens]):
            self.let_leave(request, count)
            self.advance(request, stop, skips_windows=skips_windows)
        request.wait()
        self.check_every_byte(request, absent=absent)
        assert {receiver.aux for receiver in request.receivers} == {b"token"}
        return request
