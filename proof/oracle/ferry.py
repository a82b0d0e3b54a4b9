"""kvferry as its endpoints use it, without their threads, on ranks of which the oracle knows every byte.

Each write is done twice: by a transport with the bytes, and here with the bytes' labels, which counts the writes of
every byte as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvferry.endpoint.prefill.attachment import Attachment, Selected, attach
from kvferry.endpoint.prefill.paths import SendingStaging
from kvferry.endpoint.runtime.platform import SystemPlatform
from kvferry.layout import (
    Device,
    Entry,
    Interval,
    RankCoordinates,
    RankLayout,
    Shard,
    TokenShare,
    all_coordinates,
    empty_shard,
    shard_from_tensors,
    stage_of,
)
from kvferry.plan import ElectedRoute, Piece, SourceGroup, Unit, check_exchangeable, prove
from kvferry.plan.descriptors import DescriptorIndices, RowArray
from kvferry.plan.requests import demands, moves
from kvferry.plan.requests.chunks import Chunk, ChunkSequence
from kvferry.plan.requests.demands import GroupRequest
from kvferry.plan.requests.moves import Move
from kvferry.plan.requests.page_numbers import GroupPages
from kvferry.protocol.wire import codec, messages
from kvferry.protocol.wire.field_types import Identity
from kvferry.settings import Settings
from kvferry.transport import InProcessNetwork, InProcessTransport
from proof.oracle.cases import Case, Room, Side
from proof.oracle.memory import DUE, UNTOUCHED, Elements, Memory, hashed, with_prefix_in_whole_pages

DIRECTLY = Settings(path="direct")


class WrongBytesError(AssertionError):
    """Memory is not as the oracle says."""


# --- ranks


class Rank:
    """One rank's memory, described to kvferry."""

    def __init__(self, case: Case, side: Side, coordinates: RankCoordinates, *, is_source: bool) -> None:
        self.coordinates = coordinates
        place = coordinates.tp_rank, coordinates.cp_rank, coordinates.pp_rank
        self.memory = Memory(case, side, place, is_source=is_source)
        shards = tuple(self._shards(side))
        self.layout = RankLayout(shards=shards, tokens=TokenShare(side.context.partition, coordinates.cp_rank))
        self.base = self.memory.buffer.__array_interface__["data"][0]
        self.writes = np.zeros(len(self.memory.buffer), np.int64)

    def _shards(self, side: Side) -> Iterator[Shard]:
        memory, stage = self.memory, stage_of(self.coordinates, side.stages)
        for family, cache in memory.empty:
            group = side.group_of(family, 0)
            yield empty_shard(
                cache.component,
                page_tokens=side.page_tokens_of(family),
                num_pages=memory.num_pages[group],
                group=group,
            )
        for each in memory.fields:
            component, entry = each.cache.component, each.family.entry
            layers, *others = each.cache.held(self.coordinates, stage)
            dims = tuple("slot" if name == "page" and entry is Entry.REQUEST else name for name in each.dims)
            tensors = [
                np.ndarray(
                    tuple(each.shape[name] for name in each.dims),
                    component.dtype,
                    buffer=memory.buffer,
                    offset=offset,
                    strides=tuple(each.strides[name] for name in each.dims),
                )
                for offset in each.offsets
            ]
            # Layers of one group that follow each other in the model are one shard.
            first_held = min(other.layers[0] for other in memory.fields if other.cache is each.cache)
            ends = [i + 1 for i, (low, high) in enumerate(pairwise(each.layers)) if high > low + 1]
            for start, stop in pairwise([0, *ends, len(each.layers)]):
                first = layers.start + each.layers[start] - first_held
                held = {component.axes[0].name: Interval(first, first + stop - start)}
                held |= {axis.name: part for axis, part in zip(component.axes[1:], others, strict=True)}
                yield shard_from_tensors(
                    component,
                    tensors[start:stop],
                    dims=dims,
                    held=held,
                    group=each.group,
                    page_tokens=side.page_tokens_of(each.family) if entry is Entry.PAGE else None,
                )

    def join(self, network: InProcessNetwork) -> None:
        self.transport = InProcessTransport(network)
        self.transport.register(self.layout.regions(), Device())


def ranks(case: Case, side: Side, *, is_source: bool) -> dict[int, Rank]:
    places = all_coordinates(tp_size=side.tp, cp_size=side.context.size, pp_size=len(side.stages))
    return {each.group_rank: Rank(case, side, each, is_source=is_source) for each in places}


def chunks_of(case: Case, source: Rank, room: int) -> list[Chunk]:
    """A room's pages on a source rank, in chunks that every group cuts elsewhere; what is left goes with the last.

    Each is handed in once for every range of layers.
    """
    drawn, handed = case.rooms[room], source.memory.given
    sequence = ChunkSequence(drawn.number, source.layout.groups, source.layout.shards)
    ranges = layer_ranges(source.layout, drawn)
    made: list[Chunk] = []
    bounds = {
        group: [0, *sorted(cut * (number + 1) % (len(each[room].pages) + 1) for cut in drawn.cuts)]
        for number, (group, each) in enumerate(handed.items())
    }
    for number in range(len(drawn.cuts) + 1):
        is_last = number == len(drawn.cuts)
        pages: dict[str, GroupPages] = {}
        for group in source.layout.groups:
            mine = handed[group.name][room]
            start, stop = bounds[group.name][number], len(mine.pages) if is_last else bounds[group.name][number + 1]
            if group.has_slots and not is_last:
                continue
            if group.has_slots:
                start = 0
            is_first = not any(group.name in {part.group for part in chunk.parts} for chunk in made)
            if start < stop or (is_last and is_first):
                says_start = mine.start + start if is_first and mine.start else None
                pages[group.name] = GroupPages(mine.pages[start:stop], says_start)
        for layers in ranges:
            ends = is_last and layers is ranges[-1]
            if len(source.layout.groups) == 1 and pages:
                (only,) = pages.values()
                handed_in = sequence.hand_in(
                    only.pages, start=only.start, is_last=ends, aux=None, now=0.0, layers=layers
                )
            else:
                handed_in = sequence.hand_in(pages, start=None, is_last=ends, aux=None, now=0.0, layers=layers)
            made.append(handed_in.chunk())
    return made


def layer_ranges(layout: RankLayout, drawn: Room) -> list[dict[str, Interval] | None]:
    """The ranges of layers in which a room's chunks are handed in, by component; only None where they are not cut."""
    if drawn.layer_cuts is None:
        return [None]
    ranges: list[dict[str, Interval] | None] = []
    for number in range(len(drawn.layer_cuts) + 1):
        each: dict[str, Interval] = {}
        for component in layout.components:
            total = component.axes[0].size
            cuts = [0, *sorted(cut % (total + 1) for cut in drawn.layer_cuts), total]
            if cuts[number] < cuts[number + 1]:
                each[component.name] = Interval(cuts[number], cuts[number + 1])
        ranges.append(each)
    return ranges[::-1] if drawn.last_layers_first else ranges


def open_message(case: Case, destination: Rank, room: int) -> messages.OpenRoom:
    drawn = case.rooms[room]
    pages: dict[str, GroupPages] = {}
    in_use = {each.group for each in destination.memory.fields}
    for group in destination.layout.groups:
        if drawn.leaves_out_unused and group.name not in in_use:
            continue
        mine = destination.memory.given[group.name][room]
        says_start = drawn.begins_early or (not drawn.says_length and group.window_tokens is not None)
        pages[group.name] = GroupPages(mine.pages, mine.start if says_start and not group.has_slots else None)
    tokens = drawn.tokens if drawn.says_length else None
    message = messages.OpenRoom(
        room=drawn.number,
        generation=1,
        receivers=1,
        tokens=tokens,
        groups=demands.demands_of(
            destination.layout, pages, prefix_tokens=drawn.prefix, tokens=tokens, where="the receiver"
        ),
    )
    arrived = codec.decode_numbered_to_prefill(codec.encode_body(message))
    assert arrived == message
    return message


def expand(rows: RowArray, indices: DescriptorIndices) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Address and length of descriptors, as the rows' definition has it: every row stands for one in each page."""
    table = rows.astype(np.int64)
    numbers = np.repeat(np.arange(len(table)), table[:, 4])
    elements = np.concatenate([np.arange(count) for count in table[:, 4]])
    chosen = numbers[indices]
    return table[chosen, 0] + elements[indices] * table[chosen, 3], table[chosen, 1]


def copy_labels(selected: Selected, source: Rank, destination: Rank) -> None:
    """Does what a write does, with labels, and counts."""
    here, lengths = expand(selected.local.handle.rows, selected.local_indices)
    there, as_long = expand(selected.remote.handle.rows, selected.remote_indices)
    assert np.array_equal(lengths, as_long)
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    places = np.repeat(there - destination.base, lengths) + within
    destination.memory.labels[places] = source.memory.labels[np.repeat(here - source.base, lengths) + within]
    np.add.at(destination.writes, places, 1)


@dataclass(frozen=True)
class Pair:
    """A source rank and a receiver that are connected."""

    source: Rank
    destination: Rank
    attachment: Attachment

    def send(self, message: messages.OpenRoom, wanted: Mapping[str, GroupRequest], handed: list[Chunk]) -> None:
        """Sends a room as endpoints do."""
        elected = self.attachment.elected(message.room, self.source.coordinates.group_rank)
        routes, layers = (tuple(each.route for each in elected), tuple(each.layers for each in elected))
        request = moves.ReceiverRequest(message.tokens, wanted, routes, layers=layers)
        next_pages: dict[str, int] = {}
        for chunk in handed:
            moves.check_chunk(chunk, request, next_pages, where="the sender")
            next_pages.update({part.group: part.stop for part in chunk.parts})
            for unit, of_unit in moves.moves_of(chunk, request).items():
                if of_unit:
                    self.write(message, elected, unit, of_unit)

    def write(
        self, message: messages.OpenRoom, elected: tuple[ElectedRoute, ...], unit: Unit, of_unit: tuple[Move, ...]
    ) -> None:
        """Writes straight from pages to pages."""
        selected = self.attachment.select(unit, elected, of_unit)
        copy_labels(selected, self.source, self.destination)
        transport = self.source.transport
        transfer = transport.post(
            selected.local, selected.local_indices, selected.remote, selected.remote_indices, b"chunk"
        )
        assert transport.poll(transfer) is not None
        transport.release(transfer)


def connect(source: Rank, destination: Rank, pieces: tuple[Piece, ...]) -> Attachment:
    message = messages.Attach(
        endpoint=destination.transport.endpoint_name,
        engine="decode",
        coordinates=destination.coordinates,
        attempt=1,
        layout=destination.layout,
        pieces=pieces,
        transport=destination.transport.name,
        transport_metadata=destination.transport.metadata(),
    )
    return attach(
        message,
        mine=Identity(
            endpoint=source.transport.endpoint_name,
            engine="prefill",
            coordinates=source.coordinates,
            layout=source.layout,
            transport=source.transport.name,
            host="",
        ),
        transport=source.transport,
        staging=SendingStaging(DIRECTLY, source.layout, source.transport, SystemPlatform()),
        merged_bytes=64,  # so little that blocks of neighbours are cut in most cases
    )


# --- the comparison


def compare(case: Case, elements: Elements, number: int, destination: Rank) -> None:
    """Everything that is due is there and was written once; all else is as it was."""
    sent = {family.name for family in case.families_of(case.source)}
    right, rules = destination.memory.expected(elements, lambda family: family.name in sent)
    found, writes = destination.memory.labels, destination.writes
    is_right = np.where(
        rules == DUE,
        (found == right) & (writes == 1),
        np.where(
            rules == UNTOUCHED,
            writes == 0,
            ((writes == 1) & (found == right)) | (writes == 0),
        ),
    )
    if not is_right.all():
        place = int(np.flatnonzero(~is_right)[0])
        ought = "be left alone" if rules[place] == UNTOUCHED else elements.describe(case, int(right[place]))
        raise WrongBytesError(
            f"receiver {number}, byte {place}: written {writes[place]} times, holds "
            f"{elements.describe(case, int(found[place]))}, ought to {ought}; {np.count_nonzero(~is_right)} such bytes"
        )
    if not np.array_equal(destination.memory.buffer, hashed(found)):
        raise WrongBytesError(f"receiver {number}: the transport moved other bytes than the descriptors say")


def check(case: Case, *, with_proof: bool = True, make_pair: Callable[[Rank, Rank, Attachment], Pair] = Pair) -> None:
    """Moves the case's rooms from every source to every receiver and compares all memory with the oracle.

    Args:
        make_pair: makes what moves them between two ranks.
    """
    case = replace(case, rooms=tuple(with_prefix_in_whole_pages(case, room) for room in case.rooms))
    elements = Elements(case)
    sources = ranks(case, case.source, is_source=True)
    destinations = ranks(case, case.destination, is_source=False)
    network = InProcessNetwork()
    for rank in (*sources.values(), *destinations.values()):
        rank.join(network)
    for source in sources.values():
        source.memory.fill(elements)
    for destination in destinations.values():
        destination.memory.buffer[:] = hashed(destination.memory.labels)
    handed = {
        number: [chunks_of(case, source, room) for room in range(len(case.rooms))] for number, source in sources.items()
    }
    group = SourceGroup({number: source.layout for number, source in sources.items()})
    for number, destination in destinations.items():
        cut = group.pieces_for(destination.layout)
        pairs = {}
        for writer, source in sources.items():
            if any(writer in piece.holders for piece in cut):
                pairs[writer] = make_pair(source, destination, connect(source, destination, cut))
            else:
                check_exchangeable(source.layout, destination.layout, source_name="prefill", destination_name="decode")
        for room in range(len(case.rooms)):
            message = open_message(case, destination, room)
            every = {group.name for group in destination.layout.groups}
            wanted = demands.wanted_groups(
                message.groups,
                destination.layout,
                receivers=message.receivers,
                tokens=message.tokens,
                filled=every,
                where="the sender",
            )
            for writer, connected in pairs.items():
                connected.send(message, wanted, handed[writer][room])
        compare(case, elements, number, destination)
    for source in sources.values():
        if not np.array_equal(source.memory.buffer, hashed(source.memory.labels)):
            raise WrongBytesError("a source's memory has changed")
    if with_proof:
        layouts = [{number: rank.layout for number, rank in side.items()} for side in (sources, destinations)]
        assert prove(*layouts, room=case.rooms[0].number).receivers == len(destinations)
