"""What all transports share: what lies in registered memory, and metadata that travels."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.steps import steps_of

from kvferry.errors import MessageError, RegistrationError
from kvferry.layout import Device, MemoryKind, Region
from kvferry.transport import InProcessNetwork, InProcessTransport, PeerMetadata
from kvferry.transport.registered import RegisteredMemory

HOST = Device()
REGIONS = [Region(0x3000, 0x100), Region(0x1000, 0x100), Region(0x1100, 0x80)]


def refused(row: tuple[int, ...], regions: list[Region] = REGIONS, device: Device = HOST) -> str | None:
    try:
        RegisteredMemory("someone", device, regions).check_rows(np.array([row], np.uint64))
    except RegistrationError as error:
        return str(error)
    return None


NUMBERS = st.integers(0, 0x400) | st.integers(0x0F00, 0x3200) | st.sampled_from([2**63, 2**64 - 1, 2**64 - 0x1000])


@given(NUMBERS, NUMBERS, st.integers(0, 1), NUMBERS, st.integers(0, 5) | NUMBERS)
def test_a_row_is_accepted_if_and_only_if_it_lies_in_one_region_and_apart_from_itself(
    address: int, length: int, device: int, stride: int, count: int
):
    stop = address + length + stride * (max(count, 1) - 1)  # of unbounded integers
    inside = any(region.address <= address and stop <= region.stop for region in REGIONS) and device == 0
    inside = inside and (count == 1 or (count > 1 and stride >= length))
    found = refused((address, length, device, stride, count))
    assert (found is None) == (inside and length > 0)


@given(st.lists(st.integers(0, 20), unique=True, min_size=1, max_size=5), st.integers(0, 250), st.integers(1, 30))
def test_regions_may_come_in_any_order(places: list[int], start: int, length: int):
    regions = [Region(1000 + 12 * place, 10) for place in places]
    inside = any(region.address <= 1000 + start and 1000 + start + length <= region.stop for region in regions)
    assert (refused((1000 + start, length, 0, 0, 1), regions) is None) == inside


@pytest.mark.parametrize("region", REGIONS)
def test_all_of_every_region_is_accepted(region: Region):
    assert refused((region.address, region.length, 0, region.length, 1)) is None
    assert refused((region.address, 1, 0, 1, region.length)) is None


def test_the_message_names_the_first_bad_row_its_range_and_the_owner():
    rows = np.array([[0x1000, 16, 0, 32, 8], [0x1000, 16, 0, 32, 9], [0, 1, 0, 0, 1]], np.uint64)
    with pytest.raises(RegistrationError) as caught:
        RegisteredMemory("decode-3", Device(), REGIONS).check_rows(rows)
    assert "descriptor row 1 [0x1000, 0x1110) on device 0 lies outside" in str(caught.value)
    assert "decode-3 registered on DRAM:0: 3 regions" in str(caught.value)


@pytest.mark.parametrize(("stride", "count"), [(15, 2), (0, 2), (16, 0)])
def test_a_row_that_overlaps_itself_or_has_no_elements_is_refused(stride: int, count: int):
    message = refused((0x1000, 16, 0, stride, count)) or ""
    assert f"row 0 of someone has {count} elements of 16 bytes every {stride} bytes" in message
    assert refused((0x1000, 16, 0, stride, 1)) is None


def test_a_row_of_another_device_is_refused():
    assert "on device 0 lies outside" in (refused((0x1000, 1, 0, 0, 1), device=Device(MemoryKind.VRAM, 1)) or "")
    assert refused((0x1000, 1, 1, 0, 1), device=Device(MemoryKind.VRAM, 1)) is None


def test_without_regions_every_row_is_refused():
    assert "0 regions" in (refused((0x1000, 1, 0, 0, 1), []) or "")


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((2, 3), np.uint64),
        np.zeros(5, np.uint64),
        np.zeros((2, 5), np.int64),
        np.zeros((0, 5), np.uint64),
    ],
    ids=["three columns", "flat", "signed", "none"],
)
def test_rows_of_another_form_are_refused(rows: Any):
    with pytest.raises(RegistrationError, match=r"uint64 of shape \[rows, 5\]"):
        RegisteredMemory("someone", Device(), REGIONS).check_rows(rows)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=12), st.integers(0, 50), st.integers(0, 12))
def test_a_range_is_accepted_if_and_only_if_it_lies_in_one_region_however_they_overlap(
    places: list[tuple[int, int]], start: int, length: int
):
    regions = [Region(1000 + address, size) for address, size in places]
    memory = RegisteredMemory("someone")
    for region in regions:
        memory.add([region], HOST)
    wanted = Region(1000 + start, length)
    inside = any(region.address <= wanted.address and wanted.stop <= region.stop for region in regions)
    row = np.array([[wanted.address, length, 0, 0, 1]], np.uint64)
    for check in (lambda: memory.check_range(wanted), lambda: memory.check_rows(row)):
        if inside and length:
            check()
        else:
            with pytest.raises(RegistrationError, match=r"outside the memory that someone registered"):
                check()
    assert memory.regions == tuple(regions)


def test_one_more_region_and_one_more_range_take_as_many_steps_beside_ten_thousand_as_beside_ten():
    taken = {}
    for count in (10, 10_000):
        network = InProcessNetwork()
        ours, theirs = (InProcessTransport(network, name) for name in ("ours", "theirs"))
        theirs.register([Region(4096 * (1 + number), 4096) for number in range(count)], HOST)
        ours.register([Region(4096 * (1 + number), 4096) for number in range(count)], HOST)
        ours.connect(theirs.metadata())
        between = Region(4096 * 2, 100)
        more = Region(4096 * (count + 10), 4096)
        taken[count] = (
            steps_of(partial(ours.register, [more], HOST)),
            steps_of(partial(ours.write, between, "theirs", 4096 * 3, b"")),
        )
        assert len(PeerMetadata.decode(ours.metadata()).regions) == count + 1
    assert taken[10] == taken[10_000]


def test_a_region_that_goes_beyond_all_addresses_is_no_error_of_ours():
    memory = RegisteredMemory("someone", HOST, [Region(2**64 - 16, 2**64 - 1)])
    memory.check_rows(np.array([[2**64 - 16, 8, 0, 0, 1]], np.uint64))
    with pytest.raises(RegistrationError, match="outside"):
        memory.check_rows(np.array([[2**64 - 16, 16, 0, 0, 1]], np.uint64))


METADATA = PeerMetadata(name="decode-0", device=Device(MemoryKind.VRAM, 3), regions=tuple(REGIONS), private=b"\0\xff")


def test_metadata_travels():
    assert PeerMetadata.decode(METADATA.encode()) == METADATA


@given(st.binary(max_size=40))
def test_bytes_that_are_no_metadata_are_refused(data: bytes):
    with pytest.raises(MessageError, match="malformed transport metadata"):
        PeerMetadata.decode(data)


@given(st.lists(st.tuples(st.integers(0, len(METADATA.encode()) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_metadata_is_read_or_refused_and_nothing_else(changes: list[tuple[int, int]]):
    data = bytearray(METADATA.encode())
    for place, value in changes:
        data[place] = value
    try:
        read = PeerMetadata.decode(bytes(data))
    except MessageError:
        return
    # What was read can be used: rows are refused for what they are, not for what the regions are.
    with contextlib.suppress(RegistrationError):
        RegisteredMemory(read.name, read.device, read.regions).check_rows(np.array([[0x1000, 1, 0, 0, 1]], np.uint64))


@pytest.mark.parametrize("cut", [1, 10, 30])
def test_truncated_metadata_is_refused(cut: int):
    with pytest.raises(MessageError):
        PeerMetadata.decode(METADATA.encode()[:-cut])


def test_metadata_with_a_name_that_is_no_text_is_refused():
    data = METADATA.encode().replace(b"decode-0", b"decode-\xff")
    with pytest.raises(MessageError, match=r"(?i)utf-8"):
        PeerMetadata.decode(data)


@pytest.mark.parametrize("region", [[-1, 10], [0, -10], [0, "10"], [0]])
def test_metadata_with_impossible_regions_is_refused(region: list[Any]):
    fields = {**msgspec.to_builtins(METADATA), "regions": [region]}
    with pytest.raises(MessageError):
        PeerMetadata.decode(msgspec.msgpack.encode({**fields, "private": b""}))
