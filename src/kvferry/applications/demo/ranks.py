"""What each process of the demo does. Every rank is one process with its own pool and its own endpoint."""

from __future__ import annotations

import multiprocessing.connection
import multiprocessing.queues
import struct
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kvferry.applications.demo.options import DemoOptions, EngineShape, Request
from kvferry.applications.demo.reference.caches import array_shape
from kvferry.applications.demo.reference.engine import PrefilledChunk, load_model
from kvferry.endpoint import DecodeEndpoint, PrefillEndpoint, Receiver, ReceiverStats, SenderStats
from kvferry.layout import Entry, RankCoordinates, RankLayout, Shard, VirtualPools, default_group
from kvferry.plan.requests.page_numbers import GroupPages
from kvferry.pools.contents import Contents, Elements, Positions, element_type
from kvferry.pools.places import TakenPages, entries_kept, first_needed, places
from kvferry.pools.pool import Pool
from kvferry.settings import Settings

if TYPE_CHECKING:
    import torch

Connection: TypeAlias = multiprocessing.connection.Connection
ShardQueue: TypeAlias = "multiprocessing.queues.Queue[tuple[Pool, dict[int, tuple[dict[str, TakenPages], bytes]]]]"

_AUX = struct.Struct("<q")
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank is connected and waits for the start."""


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """A prefill rank has sent a request, or a decode rank received it, in these pages of its pools."""

    room: int
    pages: dict[str, TakenPages]
    stats: SenderStats | ReceiverStats


@dataclass(frozen=True, slots=True)
class Answered:
    """A decode engine has decoded a request from what arrived, or the undivided model has answered it."""

    room: int
    token_ids: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """A process is through. A rank shows its memory, and how many bytes changed there that nobody may touch."""

    damaged_bytes: int = 0
    pool: Pool | None = None


@dataclass(frozen=True, slots=True)
class Crashed:
    """A process failed."""

    error: str
    details: str


Report: TypeAlias = Ready | Moved | Answered | Ended | Crashed


def guarded(main: Callable[..., None], reports: Connection, *arguments: Any) -> None:
    """Runs a process's main function and reports what it raises."""
    # Imported here and not above: the command, which starts the ranks, waits for neither.
    import torch
    from transformers.utils.logging import set_verbosity_error

    torch.set_num_threads(1)  # as many processes share a few cores; also makes sums the same in all of them
    set_verbosity_error()  # every process would say which faster kernels are not installed
    try:
        main(reports, *arguments)
    except BaseException as error:
        reports.send(Crashed(f"{type(error).__name__}: {error}", traceback.format_exc()))


def undivided_main(reports: Connection, options: DemoOptions) -> None:
    """Answers every request with the model in one piece."""
    model = load_model(options.model)
    for request in options.requests:
        tokens = model.generate_undivided(request.token_ids, options.chunk_tokens, options.max_new_tokens)
        reports.send(Answered(request.room, tokens))
    reports.send(Ended())


def prefill_main(
    reports: Connection, options: DemoOptions, registry_url: str, engine: int, coordinates: RankCoordinates
) -> None:
    """Prefills this engine's requests and sends this rank's shard of their caches, chunk by chunk.

    Every rank runs the whole forward pass, since splitting the computation is not what is shown here; of the cache it
    keeps its own shard alone.
    """
    model = load_model(options.model)
    seed = f"{options.seed} prefill {engine} {coordinates.engine_rank}"
    pool = rank_pool(options, options.prefill, coordinates, poison=PREFILL_POISON, seed=seed)
    settings = Settings(registry_url=registry_url, bootstrap_timeout_s=_TIMEOUT_S, transport=options.transport)
    name = engine_name(engine)
    with PrefillEndpoint(pool.layout, engine=name, coordinates=coordinates, settings=settings) as endpoint:
        reports.send(Ready())
        reports.recv()
        mine = [request for request in options.requests if request.prefill_engine == engine]
        senders = [(request, endpoint.open(request.room)) for request in mine]
        placed_of = {}
        for request, sender in senders:
            placed_of[request.room] = placed = pool.pages_for(len(request.token_ids), whole_windows=True)
            for chunk in model.prefill(request.token_ids, options.chunk_tokens):
                pages = pages_of_chunk(pool.layout, placed, request, chunk)
                pool.fill(Computed(chunk.caches, chunk.start), pages, tokens=chunk.stop)
                is_last = chunk.next_token is not None
                aux = _AUX.pack(chunk.next_token) if chunk.next_token is not None else None
                sender.submit(pages, last=is_last, aux=aux)
        for request, sender in senders:
            sender.wait(_TIMEOUT_S)
            reports.send(Moved(request.room, placed_of[request.room], sender.stats))
        reports.send(Ended(pool.touched_bytes(pool.untaken(), PREFILL_POISON), pool))
        reports.recv()  # the peer channel stays until everybody is through


def pages_of_chunk(
    layout: RankLayout, placed: dict[str, TakenPages], request: Request, chunk: PrefilledChunk
) -> dict[str, GroupPages]:
    """What a rank hands in with a chunk: the pages that it filled, and with the last chunk the request's state.

    Pages that have left the window before the request ends are not handed in: decoding needs none of them.
    """
    pages = {}
    for group in layout.groups:
        mine = placed[group.name]
        if group.has_slots:
            if chunk.next_token is not None:
                pages[group.name] = GroupPages(mine.pages)
            continue
        needed = first_needed(group.window_tokens, len(request.token_ids), 0)
        first = max(chunk.start, needed) // group.page_tokens
        stop = -(-chunk.stop // group.page_tokens)
        if first < stop:
            pages[group.name] = GroupPages(mine.pages[first:stop], start=first)
    return pages


def decode_main(
    reports: Connection,
    options: DemoOptions,
    registry_url: str,
    engine: int,
    coordinates: RankCoordinates,
    shards: ShardQueue,
) -> None:
    """Receives this rank's shard of this engine's requests; the first rank puts the shards together and decodes."""
    is_first = coordinates.engine_rank == 0
    model = load_model(options.model) if is_first else None
    seed = f"{options.seed} decode {engine} {coordinates.engine_rank}"
    pool = rank_pool(options, options.decode, coordinates, poison=DECODE_POISON, seed=seed)
    settings = Settings(registry_url=registry_url, bootstrap_timeout_s=_TIMEOUT_S, transport=options.transport)
    with DecodeEndpoint(pool.layout, engine=f"decode-{engine}", coordinates=coordinates, settings=settings) as endpoint:
        mine = [request for request in options.requests if request.decode_engine == engine]
        for prefill_engine in {request.prefill_engine for request in mine}:
            endpoint.connect(engine_name(prefill_engine), timeout_s=_TIMEOUT_S)
        reports.send(Ready())
        reports.recv()
        rooms: dict[int, tuple[dict[str, TakenPages], Receiver]] = {}

        def open_next() -> None:
            if len(rooms) < len(mine):
                request = mine[len(rooms)]
                num_tokens = len(request.token_ids)
                placed = pool.pages_for(num_tokens)
                pages = {group: each.pages for group, each in placed.items()}
                engine_of = engine_name(request.prefill_engine)
                receiver = endpoint.open(request.room, pages, engine=engine_of, tokens=num_tokens)
                rooms[request.room] = (placed, receiver)

        for _ in range(options.in_flight):
            open_next()
        for request in mine:
            placed, receiver = rooms[request.room]
            receiver.wait(_TIMEOUT_S)
            open_next()
            reports.send(Moved(request.room, placed, receiver.stats))
        shards.put((pool, {room: (placed, receiver.aux) for room, (placed, receiver) in rooms.items()}))
        damaged_bytes = pool.touched_bytes(pool.untaken(), DECODE_POISON)
        if model is not None:
            for request, caches, first_token in _assembled(options, mine, shards):
                tokens = model.decode(
                    caches,
                    num_tokens=len(request.token_ids),
                    first_token=first_token,
                    max_new_tokens=options.max_new_tokens,
                )
                reports.send(Answered(request.room, tokens))
        reports.send(Ended(damaged_bytes, pool))
        reports.recv()  # prefill ranks that had nothing to send to this one may not be through


def _assembled(
    options: DemoOptions, requests: list[Request], shards: ShardQueue
) -> Iterator[tuple[Request, dict[str, torch.Tensor], int]]:
    """Yields every request's whole cache, from nothing but what the ranks of this engine received."""
    import torch

    arrived = [shards.get(timeout=_TIMEOUT_S) for _ in options.decode.coordinates]
    for request in requests:
        num_tokens, caches = len(request.token_ids), {}
        for sharded in options.components:
            shape = array_shape(sharded.component, len(entries_kept(sharded.component, num_tokens)))
            caches[sharded.component.name] = np.full(shape, np.nan, sharded.component.dtype)
        for pool, rooms in arrived:
            placed, aux = rooms[request.room]
            for shard, index, where, positions in places(pool.layout, placed, num_tokens, 0):
                layer = caches[shard.component.name][shard.box[0].start + index]
                first = entries_kept(shard.component, num_tokens).start
                elements = np.ascontiguousarray(pool.elements(shard, index)[where])
                layer[part_of(shard, positions - first)] = elements.view(layer.dtype)
        (first_token,) = _AUX.unpack(aux)
        yield request, {name: torch.from_numpy(each) for name, each in caches.items()}, first_token


def engine_name(engine: int) -> str:
    """How the demo's prefill engines are registered."""
    return f"prefill-{engine}"


PREFILL_POISON = 0x5A
DECODE_POISON = 0xA5


def rank_pool(
    options: DemoOptions, shape: EngineShape, coordinates: RankCoordinates, *, poison: int, seed: str
) -> Pool:
    """Allocates the memory of a rank, each group's pages free and in random order.

    Args:
        poison: the byte that fills the pools.
        seed: of the page orders.
    """
    pools = VirtualPools(
        page_tokens=shape.page_tokens,
        num_pages={group: _num_pages(options, shape, group) for group in options.groups},
        order=shape.order,
        beside=_convolutions(options),
        layers_per_stage=shape.stages,
    )
    pool = Pool.allocate(options.components, pools, coordinates, seed=seed)
    pool.wipe(poison)
    return pool


class Computed(Contents):
    """What a model has just computed of a request, to be written into pages."""

    def __init__(self, caches: Mapping[str, torch.Tensor], start: int) -> None:
        """Takes the whole model's arrays.

        Args:
            caches: [layer, entry, ...], of some components.
            start: the position of the first token; a state has one entry, wherever the tokens begin.
        """
        self._caches = caches
        self._start = start

    def of(self, shard: Shard, layer: int, positions: Positions) -> Elements:
        first = 0 if shard.component.entry is Entry.REQUEST else self._start
        entries = self._caches[shard.component.name][layer].numpy()[part_of(shard, positions - first)]
        elements: Elements = entries.view(element_type(shard.component))
        return elements


def part_of(shard: Shard, entries: Positions) -> tuple[Any, ...]:
    """Where a shard's part of some entries lies in an array [entry, ...] of whole ones."""
    return (entries, *(slice(part.start, part.stop) for part in shard.box[1:]))


def _convolutions(options: DemoOptions) -> tuple[tuple[str, ...], ...]:
    """The channels of a convolution that are divided apart lie side by side in one tensor, as engines have them."""
    channels: dict[tuple[int, ...], tuple[str, ...]] = {}
    for sharded in options.components:
        if sharded.component.axes[-1].name == "width":
            channels[sharded.layers] = (*channels.get(sharded.layers, ()), sharded.component.name)
    return tuple(channels.values())


def _num_pages(options: DemoOptions, shape: EngineShape, group: str) -> int:
    """What the requests take, and half as many pages again that nobody may touch."""
    has_slots = any(
        default_group(sharded.component) == group and sharded.component.entry is Entry.REQUEST
        for sharded in options.components
    )
    needed = sum(1 if has_slots else -(-len(request.token_ids) // shape.page_tokens) for request in options.requests)
    return needed + needed // 2 + 8
