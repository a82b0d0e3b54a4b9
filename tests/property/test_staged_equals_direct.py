"""The staged way ends in the same bytes as the direct one: through sub-chunks, rings, messages, and back into pages.

kvferry's own code cuts, packs, names and places; only copying is done here, by plain definition. A worker's slots and
the receiver's ring are memory of their own, of labels like the oracle's, so that a byte that is packed at one place and
unpacked at another is found whatever its value. The receiver knows what it would: its own view of the plan, and what
the notifications say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import product
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from proof.oracle.cases import Case, cases
from proof.oracle.ferry import Pair, WrongBytesError, check
from proof.oracle.memory import Labels, hashed
from tests.property.test_plan_against_oracle import NAMED
from tests.support.tiers import examples

from kvferry.endpoint.decode.arrivals import ArrivalTask, Scatterers, ScatterTask
from kvferry.endpoint.decode.room import ReceivingRoom, RoomPort
from kvferry.endpoint.runtime.callers_code import Callbacks
from kvferry.endpoint.runtime.platform import SystemPlatform
from kvferry.endpoint.transfer import Receiver
from kvferry.errors import MessageError
from kvferry.layout import Device, Region
from kvferry.observe.records import PlacedRecord
from kvferry.plan import ElectedRoute, PairPlan, Unit, packing, pair
from kvferry.plan.packing import SEGMENT_ALIGNMENT, BlockShape, PackedPiece, PackedSide, Segment, Starts, SubChunk
from kvferry.plan.requests import moved_blocks
from kvferry.plan.requests.moved_blocks import UnitPlaces
from kvferry.plan.requests.moves import Move
from kvferry.protocol.transfer.events import Write
from kvferry.protocol.transfer.receiver import ReceiverMachine
from kvferry.protocol.transfer.states import Deadlines
from kvferry.protocol.wire import codec, messages
from kvferry.protocol.wire.messages import Credit, StagedArrived
from kvferry.staging import Kernels, StagingMemory, digests, gathering, receiving
from kvferry.staging.gathering import Gathering
from kvferry.staging.receiving import WriterRing
from kvferry.staging.rings import ReadingRing, SharedRing, Span, WritingRing
from kvferry.staging.slots import SourceMemory
from kvferry.transport import TransferHandle

SLOT_BASE, RING_BASE = 1 << 40, 1 << 41
STAGING_POISON = -3
DEADLINES = Deadlines(bootstrap_s=1.0, waiting_s=1.0, write_s=1.0)

# ---- copying, by definition -----------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def places_in(shape: BlockShape) -> Labels:
    """Where every byte of a block lies, from its first, in the order in which it is packed."""
    loops, length = shape.loops, shape.length
    starts = [
        sum(index * stride for index, (_, stride) in zip(indices, loops, strict=True))
        for indices in product(*(range(count) for count, _ in loops))
    ]
    return np.array([start + byte for start in starts for byte in range(length)], np.int64)


@dataclass
class Staging:
    """Some staging memory, as labels."""

    base: int
    labels: Labels

    @classmethod
    def of(cls, base: int, num_bytes: int) -> Staging:
        return cls(base, np.full(num_bytes, STAGING_POISON, np.int64))

    def at(self, address: int, num_bytes: int) -> Labels:
        """A view of one segment, or of a sub-chunk."""
        start = address - self.base
        if start % SEGMENT_ALIGNMENT:
            raise WrongBytesError(f"a segment begins at byte {start} of staging memory, where large words do not")
        if start < 0 or start + num_bytes > len(self.labels):
            raise WrongBytesError(f"{num_bytes} bytes at {start} of {len(self.labels)} bytes of staging memory")
        return self.labels[start : start + num_bytes]


class Gatherer(Kernels):
    """Packs blocks of a source's memory."""

    def __init__(self, pair: Pair, slots: Staging) -> None:
        self._memory, self._base, self._slots = pair.source.memory, pair.source.base, slots

    def gather(self, starts: Starts, shape: BlockShape, address: int) -> None:
        places = np.add.outer(starts - self._base, places_in(shape)).ravel()
        self._slots.at(address, len(places))[:] = self._memory.labels[places]

    def scatter(self, address: int, starts: Starts, shape: BlockShape) -> None:
        raise AssertionError("a source's pages are only read")


class Scatterer(Kernels):
    """Unpacks blocks into a receiver's memory, and counts the writes of every byte."""

    def __init__(self, pair: Pair, ring: Staging) -> None:
        self._rank, self._ring = pair.destination, ring

    def scatter(self, address: int, starts: Starts, shape: BlockShape) -> None:
        places = np.add.outer(starts - self._rank.base, places_in(shape)).ravel()
        memory, packed = self._rank.memory, self._ring.at(address, len(places))
        memory.labels[places], memory.buffer[places] = packed, hashed(packed)
        np.add.at(self._rank.writes, places, 1)

    def gather(self, starts: Starts, shape: BlockShape, address: int) -> None:
        raise AssertionError("a receiver's pages are only written to")


class Wire:
    """Writes staging memory in bulk."""

    def __init__(self, slots: Staging, ring: Staging) -> None:
        self._slots, self._ring = slots, ring
        self.arrived: list[bytes] = []

    def write(self, source: Region, receiver: str, address: int, notification: bytes) -> TransferHandle:
        self._ring.at(address, source.length)[:] = self._slots.at(source.address, source.length)
        self.arrived.append(notification)
        return TransferHandle()


# ---- a pair of ranks ------------------------------------------------------------------------------------------------


Rooms: TypeAlias = dict[tuple[str, int], ReceivingRoom]
"""By receiver and number: writers share what the receiver knows of a room."""


@dataclass(frozen=True)
class StagedPair(Pair):
    """Moves a room's bytes through staging memory.

    Attributes:
        chunk_bytes: of a sub-chunk, unless a block is larger.
        ring_chunks: how many of them a receiver's ring has room for.
        reads_late: whether the receiver only reads when its ring is full, and then from the last to the first.
        rooms: of all receivers.
        sizes: collects the bytes of all bulk writes.
    """

    chunk_bytes: int = 256
    ring_chunks: int = 2
    reads_late: bool = False
    rooms: Rooms = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)

    def write(
        self, message: messages.OpenRoom, elected: tuple[ElectedRoute, ...], unit: Unit, of_unit: tuple[Move, ...]
    ) -> None:
        """Gathers, writes and scatters, sub-chunk by sub-chunk, as the endpoints do."""
        plan, receiver = self.attachment.plan, self.attachment.receiver
        chunk_bytes = max(self.chunk_bytes, *(piece.block_bytes for piece in plan.packed_pieces(unit)))
        slots, ring = Staging.of(SLOT_BASE, chunk_bytes), Staging.of(RING_BASE, self.ring_chunks * chunk_bytes)
        gatherer = Gatherer(self, slots)
        wire: Any = Wire(slots, ring)
        there = Receiving(self, message, ring)
        here = SharedRing(len(ring.labels))
        memory = SourceMemory(chunk_bytes, staging_memory(slots), lambda: None)
        write = Gathering(
            message.room,
            Write(receiver, message.generation, 0, 0, unit, of_unit),
            elected,
            plan.packed_pieces(unit),
            gatherer,
            chunk_bytes=chunk_bytes,
            writer=self.source.coordinates.engine_rank,
        )
        waiter = Nobody()
        while (num_bytes := write.next_bytes) is not None:
            self.sizes.append(num_bytes)
            while (span := here.reserve(num_bytes, waiter)) is None:
                assert wire.arrived, "the ring is full although all of it was read"
                self._read(there, here, wire)
            slot = memory.take(receiver, waiter)
            assert slot is not None
            gathered = write.gather(slot.address, span, epoch=there.ring.epoch)
            wire.write(
                Region(slot.address, num_bytes),
                receiver,
                RING_BASE + here.place(span),
                codec.encode(gathered.notification),
            )
            memory.give_back(slot)
            if not self.reads_late:
                self._read(there, here, wire)
        self._read(there, here, wire)
        assert here.in_use == 0, "not all of the ring came back"

    def _read(self, there: Receiving, here: SharedRing, wire: Wire) -> None:
        arrived, wire.arrived = wire.arrived, []
        for data in reversed(arrived):
            there.arrived(data)
        for position in there.credits:
            here.read_until(position)


class Receiving:
    """The decode side of one write."""

    def __init__(self, pair: StagedPair, message: messages.OpenRoom, ring: Staging) -> None:
        source, destination = pair.source.layout, pair.destination.layout
        # Its own plan, of the pieces in the order in which it named them.
        plan = PairPlan(source, destination, pair.attachment.plan.pieces)
        self.ring = WriterRing(staging_memory(ring), plan, epoch=7, send=self._credit)
        self.credits: list[int] = []
        key = pair.attachment.receiver, message.room
        if key not in pair.rooms:
            pair.rooms[key] = ReceivingRoom(
                ReceiverMachine(message.room, rank=0, deadlines=DEADLINES, now=0.0),
                generation=message.generation,
                groups=message.groups,
                tokens=message.tokens,
                depends_on=message.depends_on,
                receiver=Receiver(message.room, lambda reason: None, Callbacks(SystemPlatform(), "nobody"), 0.0),
                places=UnitPlaces(destination, message.groups, message.tokens),
                port=cast(RoomPort, None),  # nothing happens in it
            )
        self._room = pair.rooms[key]
        scatterer = Scatterer(pair, ring)
        self._scatterers = Scatterers(0, scatterer, self._done, platform=SystemPlatform(), name="nobody")

    def arrived(self, data: bytes) -> None:
        """Scatters a part."""
        message = codec.decode_notification(data)
        assert isinstance(message, StagedArrived)
        span = Span(message.start, message.begin, message.stop)
        assert self.ring.take(span)
        self._scatterers.submit(ScatterTask(self._room, 0.0, self.ring, span, message))

    def _done(self, task: ArrivalTask, _: PlacedRecord, error: BaseException | None) -> None:
        if error is not None:
            raise error
        task.give_back()
        self.ring.send_credit()

    def _credit(self, message: messages.Credit) -> None:
        assert isinstance(message, Credit)
        self.credits.append(message.position)


class Nobody:
    """Tries again by itself."""

    def wake(self) -> None:
        pass


def staging_memory(memory: Staging) -> StagingMemory:
    return StagingMemory(Region(memory.base, len(memory.labels)), Device(), owner=None)


# ---- the law --------------------------------------------------------------------------------------------------------

EXAMPLES = 120
chunk_sizes = st.sampled_from([1, 64, 100, 256, 1000, 1 << 20])


def check_staged(case: Case, **fields: Any) -> None:
    check(case, with_proof=False, make_pair=partial(StagedPair, rooms={}, **fields))


@pytest.mark.timeout(600)
@settings(max_examples=examples(EXAMPLES))
@given(cases(), chunk_sizes, st.integers(1, 3), st.booleans())
def test_every_byte_arrives_once_at_its_place_through_staging_memory(
    case: Case, chunk_bytes: int, ring_chunks: int, reads_late: bool
):
    check_staged(case, chunk_bytes=chunk_bytes, ring_chunks=ring_chunks, reads_late=reads_late)


@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("name", NAMED)
def test_layouts_that_engines_have(name: str, chunk_bytes: int):
    sizes: list[int] = []
    check_staged(NAMED[name], chunk_bytes=chunk_bytes, sizes=sizes)
    assert sizes, "nothing was staged"


@pytest.mark.parametrize(
    "change", [lambda segments: segments[:-1], lambda segments: (*segments, segments[-1])], ids=["fewer", "more"]
)
def test_a_part_whose_bytes_are_not_those_of_its_segments_is_refused(
    change: Callable[[tuple[Any, ...]], tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
):
    right = codec.decode_notification

    def changed(data: bytes) -> Any:
        message = right(data)
        assert isinstance(message, StagedArrived)
        return msgspec.structs.replace(message, segments=change(message.segments))

    monkeypatch.setattr(codec, "decode_notification", changed)
    monkeypatch.setattr(Scatterer, "scatter", lambda *arguments: pytest.fail("bytes were copied"))
    for case in NAMED.values():
        with pytest.raises(MessageError, match="bytes of staging memory for segments of"):
            check_staged(case, chunk_bytes=100)


# ---- can the check fail? --------------------------------------------------------------------------------------------

Plant: TypeAlias = Callable[[pytest.MonkeyPatch], None]


def _pieces_by(change: Callable[[PackedPiece], PackedPiece]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        right = packing.packed_piece
        monkeypatch.setattr(pair, "packed_piece", lambda *args, **named: change(right(*args, **named)))

    return plant


def _source_shape_on_both_sides(piece: PackedPiece) -> PackedPiece:
    return replace(piece, destination=replace(piece.destination, shape=piece.source.shape))


def _each_side_in_its_own_order(piece: PackedPiece) -> PackedPiece:
    shape = piece.destination.shape
    loops = tuple(sorted(shape.loops, key=lambda loop: -loop[1]))
    return replace(piece, destination=replace(piece.destination, shape=replace(shape, loops=loops)))


def _starts_by(change: Callable[..., Any]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        right = PackedSide.starts
        monkeypatch.setattr(PackedSide, "starts", lambda *args: change(right, *args))

    return plant


def _first_index_of_the_axis_forgotten(right: Any, side: PackedSide, first: int, stop: int, *where: Any) -> Any:
    return right(side, 0, stop - first, *where)


def _units_forgotten(right: Any, side: PackedSide, first: int, stop: int, units: Any, pages: Any) -> Any:
    return right(side, first, stop, np.zeros_like(units), pages)


def _unit_by_unit_instead_of_index_by_index(
    right: Any, side: PackedSide, first: int, stop: int, units: Any, pages: Any
) -> Any:
    starts = right(side, first, stop, units, pages)
    return starts.reshape(stop - first, -1).T.ravel() if side.num_pages % 2 else starts


def _sub_chunks_by(change: Callable[[list[SubChunk]], list[SubChunk]]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        right = packing.sub_chunks
        monkeypatch.setattr(gathering, "sub_chunks", lambda *args: iter(change(list(right(*args)))))

    return plant


def _units_travel_by(change: Callable[[Any], Any]) -> Plant:
    return lambda monkeypatch: monkeypatch.setattr(
        gathering, "pack_units", lambda numbers: moved_blocks.pack_units(change(numbers))
    )


def _units_of_the_first_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remembers what a move's units are by the move alone."""

    def units_of(write: Gathering, segment: Segment) -> bytes:
        key = segment.move, 0, 0
        if key not in write.units:
            numbers = write.command.moves[segment.move].destination_numbers
            count = segment.stop_unit - segment.first_unit
            write.units[key] = moved_blocks.pack_units(numbers[segment.first_unit : segment.first_unit + count])
        return write.units[key]

    monkeypatch.setattr(Gathering, "_units_of", units_of)


def _placed_by(change: Callable[[Any, Any], Any]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        right = moved_blocks.places_of_units
        monkeypatch.setattr(
            moved_blocks, "places_of_units", lambda *args, **named: change(*right(*args, **named)), raising=True
        )

    return plant


def _places_remembered_whatever_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    right = UnitPlaces.find

    def find(room: Any, units: bytes, route: Any, *args: Any, **named: Any) -> Any:
        key: Any = units
        if key not in room.found:
            room.found[key] = right(room, units, route, *args, **named)
        return room.found[key]

    monkeypatch.setattr(UnitPlaces, "find", find)


def _pieces_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the receiver's side."""
    right = digests.resolved

    def resolved(segment: messages.StagedSegment, unit: Unit, plan: PairPlan, places: UnitPlaces) -> Any:
        mirrored = msgspec.structs.replace(segment, piece=len(plan.pieces) - 1 - segment.piece)
        return right(mirrored, unit, plan, places)

    monkeypatch.setattr(receiving, "resolved", resolved)


def _what_is_left_out_is_read_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        WriterRing, "address", lambda ring, span: ring.memory.address + span.start % ring.memory.num_bytes
    )


def _unread_memory_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WritingRing, "_is_free", lambda ring, span: True)
    monkeypatch.setattr(ReadingRing, "can_hold", lambda ring, span: True)


FAULTS: dict[str, Plant] = {
    "the source's strides on both sides": _pieces_by(_source_shape_on_both_sides),
    "each side in the order of its own memory": _pieces_by(_each_side_in_its_own_order),
    "the first index of a segment forgotten": _starts_by(_first_index_of_the_axis_forgotten),
    "which unit of a page forgotten": _starts_by(_units_forgotten),
    "unit by unit on one side, index by index on the other": _starts_by(_unit_by_unit_instead_of_index_by_index),
    "the last sub-chunk forgotten": _sub_chunks_by(lambda chunks: chunks[:-1]),
    "a sub-chunk twice": _sub_chunks_by(lambda chunks: [*chunks, chunks[0]]),
    "units named in reverse": _units_travel_by(lambda numbers: numbers[::-1]),
    "a unit named twice": _units_travel_by(lambda numbers: np.concatenate([numbers[:1], numbers[:-1]])),
    "units of the first segment for all": _units_of_the_first_segment,
    "pages in reverse": _placed_by(lambda units, pages: (units, pages[::-1])),
    "places remembered whatever the group": _places_remembered_whatever_the_group,
    "pieces in another order": _pieces_in_another_order,
    "a span read from where it starts, not from where it begins": _what_is_left_out_is_read_as_well,
    "memory handed out that is unread": _unread_memory_handed_out,
}


def bytes_are_wrong(case: Case, **fields: Any) -> bool:
    """Whether bytes end up where they do not belong. Cases that end otherwise do not count."""
    try:
        check_staged(case, **fields)
    except WrongBytesError:
        return True
    except Exception:
        return False
    return False


@pytest.mark.usefixtures("nothing_remembered")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch):
    FAULTS[fault](monkeypatch)
    # Parts of an odd size, and so many unread at a time that a ring wraps around in front of its reader.
    assert any(bytes_are_wrong(case, chunk_bytes=100, ring_chunks=3, reads_late=True) for case in NAMED.values())


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("nothing_remembered")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught_by_what_is_drawn(fault: str, monkeypatch: pytest.MonkeyPatch):
    """The cases that the law is tested with are those that it takes to find every fault."""

    @settings(
        max_examples=20_000,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(cases(), chunk_sizes, st.integers(1, 3), st.booleans())
    def search(case: Case, chunk_bytes: int, ring_chunks: int, reads_late: bool) -> None:
        if bytes_are_wrong(case, chunk_bytes=chunk_bytes, ring_chunks=ring_chunks, reads_late=reads_late):
            raise WrongBytesError(fault)

    FAULTS[fault](monkeypatch)
    with pytest.raises(WrongBytesError):
        search()
