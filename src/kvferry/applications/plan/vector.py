"""A plan as a vector: two sides' layouts, the pages of one request, and every byte that moves.

An implementation in another language reads the first two and must come to the third. What moves is worked out here as
a prefill rank does it, from what is on the wire: layouts, pieces, an open request, a chunk, and the descriptors that it
selects. It is written down in a form that does not depend on how they were cut: moves that go on where others end, on
both sides, are one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.applications.plan.study import Side, Study
from kvferry.errors import SettingsError
from kvferry.layout import PageGroup, RankCoordinates, RankLayout, Region
from kvferry.layout.component import Name
from kvferry.layout.interval import WireIndex
from kvferry.plan import (
    Demand,
    PairPlan,
    described_alike,
    needed_locally,
    pieces_for_receiver,
    selectors,
)
from kvferry.plan.descriptors import DescriptorIndices, RowArray
from kvferry.plan.requests.chunks import Chunk, ChunkPart
from kvferry.plan.requests.demands import GroupRequest, Position, demands_of
from kvferry.plan.requests.moves import check_chunk, moves_of
from kvferry.plan.requests.page_numbers import PageNumbers
from kvferry.protocol.wire.field_types import Random
from kvferry.protocol.wire.messages import OpenRoom
from kvferry.protocol.wire.versions import PROTOCOL_VERSION

MOST_MOVES = 1 << 20
"""Most byte ranges that are exported, before those that adjoin are one."""

_LINE = 120

Numbers: TypeAlias = NDArray[np.int64]


class _Rank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of either side.

    Attributes:
        coordinates: where it stands in its engine.
        layout: what it holds, as in `Welcome` and `Attach`.
        regions: the memory of its shards, in ascending order: each base address with all that its steps reach, those
            that overlap as one.
    """

    coordinates: RankCoordinates
    layout: RankLayout
    regions: tuple[Region, ...]


class PrefillRank(_Rank, frozen=True, kw_only=True):
    """A rank that sends.

    Attributes:
        pages: page numbers of the request by group, from the request's first token on that the rank holds.
    """

    pages: dict[Name, tuple[WireIndex, ...]]


class Requested(msgspec.Struct, frozen=True):
    """What a rank requests for one of its groups: a `GroupRequest` of `OpenRoom`, with its page numbers written out.

    Attributes:
        name: the group's name.
        held: the rank has the tokens before this position; they must not be touched.
        start: the first token that it needs.
        stop: the first after those that it needs.
        first_page: how many pages of the request come before the given ones on this rank.
        pages: page numbers.
    """

    name: Name
    held: Position
    start: Position
    stop: Position
    first_page: Position
    pages: tuple[WireIndex, ...]


class DecodeRank(_Rank, frozen=True, kw_only=True):
    """A rank that receives.

    Attributes:
        groups: what it requests.
    """

    groups: tuple[Requested, ...]


class ByteMove(msgspec.Struct, frozen=True, array_like=True):
    """Bytes that are copied.

    Attributes:
        prefill_rank: the rank that they come from, by its place in `prefill`.
        source_region: which of its regions they are in.
        source_offset: where they begin there, in bytes.
        decode_rank: the rank that they go to, by its place in `decode`.
        destination_region: which of its regions.
        destination_offset: where they begin there, in bytes.
        length: how many they are.
    """

    prefill_rank: int
    source_region: int
    source_offset: int
    decode_rank: int
    destination_region: int
    destination_offset: int
    length: int


class Vector(msgspec.Struct, frozen=True, kw_only=True):
    """Two sides, a request, and what moves.

    Attributes:
        protocol: the version of the protocol.
        title: what it is about.
        room: the transfer's number, on which it depends which of several holders sends.
        tokens: how many the request has.
        prefill: the ranks that share the request on the prefill side, by group rank.
        decode: the ranks that share it on the decode side, by group rank.
        moves: all that moves, by decode rank and address there. Of two that adjoin on both sides, in the same regions,
            the second is part of the first.
    """

    protocol: int
    title: str
    room: Random
    tokens: Position
    prefill: tuple[PrefillRank, ...]
    decode: tuple[DecodeRank, ...]
    moves: tuple[ByteMove, ...]


def vector_of(study: Study, *, title: str, prefix_tokens: int = 0) -> Vector:
    """Works out the vector of a request that was planned.

    The prefill ranks' pages ascend and the decode ranks' descend, next to each other or apart as the request says.

    Args:
        prefix_tokens: tokens at the request's start that the decode side holds already.

    Raises:
        SettingsError: if more is moved than a vector should list, or no message can name the room.
    """
    if study.request.room >= 1 << 63:
        raise SettingsError(f"--room {study.request.room}: rooms that are opened have numbers below 2^63")
    if study.totals.runs > MOST_MOVES:
        raise SettingsError(
            f"--tokens {study.request.tokens}: the request moves {study.totals.runs:,} ranges of bytes, and a vector "
            f"lists {MOST_MOVES:,} at most: export a shorter request"
        )
    tokens, step = study.request.tokens, study.request.pages.step
    prefill = tuple(
        PrefillRank(
            coordinates=coordinates,
            layout=layout,
            regions=layout.regions(),
            pages={
                group.name: tuple(step * order for order in _pages_of(layout, group, Demand(0, 0, tokens), tokens))
                for group in layout.groups
            },
        )
        for coordinates, layout in _ranks(study.prefill)
    )
    decode = tuple(
        DecodeRank(
            coordinates=coordinates,
            layout=layout,
            regions=layout.regions(),
            groups=tuple(map(_written_out, _requests(layout, tokens, prefix_tokens, step))),
        )
        for coordinates, layout in _ranks(study.decode)
    )
    vector = Vector(
        protocol=PROTOCOL_VERSION,
        title=title,
        room=study.request.room,
        tokens=tokens,
        prefill=prefill,
        decode=decode,
        moves=(),
    )
    return msgspec.structs.replace(vector, moves=tuple(moves_between(vector)))


def as_text(vector: Vector) -> str:
    """Writes a vector as JSON, in lines that can be read."""
    return in_lines(msgspec.to_builtins(vector)) + "\n"


def in_lines(value: Any, indent: str = "") -> str:
    """Writes a value as JSON: in one line if it fits, else each of its parts in lines of its own."""
    line = json.dumps(value)
    if len(indent) + len(line) <= _LINE or not isinstance(value, dict | list | tuple) or not value:
        return line
    inner = indent + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(name)}: {in_lines(each, inner)}" for name, each in value.items()]
        return "{\n" + ",\n".join(inner + part for part in parts) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + in_lines(each, inner) for each in value) + f"\n{indent}]"


# ---- pages ----------------------------------------------------------------------------------------------------------


def _ranks(side: Side) -> Iterator[tuple[RankCoordinates, RankLayout]]:
    return ((side.coordinates[rank], side.layouts[rank]) for rank in sorted(side.layouts))


def _pages_of(layout: RankLayout, group: PageGroup, demand: Demand, tokens: int) -> range:
    """The pages of a request that hold what is needed, by their order in the request on a rank."""
    if group.has_slots:
        return range(1)
    low, high = needed_locally(layout.share_of(group), demand, request_tokens=tokens)
    return range(low // group.page_tokens, -(-high // group.page_tokens)) if low < high else range(0)


def _requests(layout: RankLayout, tokens: int, prefix_tokens: int, step: int) -> tuple[GroupRequest, ...]:
    pages = {}
    for group in layout.groups:
        kept = tokens if group.window_tokens is None else group.window_tokens
        demand = Demand(prefix_tokens, max(prefix_tokens, tokens - kept), tokens)
        last = group.num_pages - 1
        pages[group.name] = [last - step * order for order in _pages_of(layout, group, demand, tokens)]
    return demands_of(layout, pages, prefix_tokens=prefix_tokens, tokens=tokens, where="the vector")


def _written_out(request: GroupRequest) -> Requested:
    pages = tuple(request.pages.numbers().tolist())
    return Requested(request.name, request.held, request.start, request.stop, request.first_page, pages)


def _as_sent(group: Requested) -> GroupRequest:
    pages = PageNumbers.of(np.array(group.pages, np.int64))
    return GroupRequest(group.name, group.held, group.start, group.stop, group.first_page, pages)


# ---- moves ----------------------------------------------------------------------------------------------------------


def moves_between(vector: Vector) -> Iterator[ByteMove]:
    """Yields what moves between the ranks of a vector, whatever it lists."""
    sources = {rank: each.layout for rank, each in enumerate(vector.prefill)}
    for receiver, there in enumerate(vector.decode):
        alike, destination = described_alike(sources, there.layout)
        pieces = pieces_for_receiver(alike, destination)
        found = [np.empty((0, 7), np.int64)]
        for writer, here in enumerate(vector.prefill):
            plan = PairPlan(here.layout, there.layout, [piece for piece in pieces if writer in piece.holders])
            for source, target, length in _written(plan, vector, writer, receiver):
                columns = writer, *_within(here.regions, source), receiver, *_within(there.regions, target), length
                found.append(np.stack(np.broadcast_arrays(*columns), axis=1))
        moves = np.concatenate(found)
        yield from (ByteMove(*row) for row in _joined(moves[np.lexsort((moves[:, 5], moves[:, 4]))]).tolist())


def _written(plan: PairPlan, vector: Vector, writer: int, receiver: int) -> Iterator[tuple[Numbers, Numbers, Numbers]]:
    """Yields what one rank writes to another: addresses on either side, and lengths."""
    here, there = vector.prefill[writer], vector.decode[receiver]
    where = f"prefill rank {writer} to decode rank {receiver}"
    elected = plan.elected(vector.room, writer=writer, receiver=receiver)
    filled = {each.route.destination_group for each in elected}
    opened = OpenRoom(
        room=vector.room,
        generation=0,
        receivers=len(vector.decode),
        tokens=vector.tokens,
        groups=tuple(_as_sent(group) for group in there.groups if group.name in filled),
    )
    request = opened.checked(there.layout, elected, where=where)
    parts = tuple(ChunkPart(name, 0, np.array(pages, np.int64)) for name, pages in here.pages.items())
    chunk = Chunk(0, parts, is_last=True)
    check_chunk(chunk, request, {}, where=where)
    for unit, moves in moves_of(chunk, request).items():
        rows = plan.descriptor_rows(unit)
        for move in moves:
            for selector in selectors(rows.pieces, elected[move.route].pieces):
                source, target = selector.select(
                    move.source_units, move.source_pages, move.destination_units, move.destination_pages
                )
                addresses, lengths = _selected(rows.source, source)
                yield addresses, _selected(rows.destination, target)[0], lengths


def _selected(rows: RowArray, indices: DescriptorIndices) -> tuple[Numbers, Numbers]:
    """Returns the addresses and lengths of descriptors that are selected from rows."""
    address, length, _, stride, count = rows.astype(np.int64).T
    stops = np.cumsum(count)
    row = np.searchsorted(stops, indices, side="right")
    return address[row] + stride[row] * (indices - (stops - count)[row]), length[row]


def _within(regions: Sequence[Region], addresses: Numbers) -> tuple[Numbers, Numbers]:
    """Returns in which region each address is, and where in it."""
    begins = np.array([region.address for region in regions], np.int64)
    region = np.searchsorted(begins, addresses, side="right") - 1
    return region, addresses - begins[region]


def _joined(moves: Numbers) -> Numbers:
    """Joins moves, in the order of where they go, that adjoin on both sides."""
    before, after = moves[:-1], moves[1:]
    same = (before[:, [0, 1, 3, 4]] == after[:, [0, 1, 3, 4]]).all(axis=1)
    for offset in (2, 5):
        same &= before[:, offset] + before[:, 6] == after[:, offset]
    firsts = np.flatnonzero(np.concatenate([np.ones(min(len(moves), 1), np.bool_), ~same]))
    joined = moves[firsts]
    joined[:, 6] = np.add.reduceat(moves[:, 6], firsts) if len(firsts) else joined[:, 6]
    return joined
