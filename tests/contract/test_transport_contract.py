"""What `transport/base.py` promises, checked for every transport.

A new transport is added to `KINDS` in `tests/support/transports.py`. Libraries run for real, two ends in this process;
what takes a second process (one that dies, above all) is in `tests/processes`.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tiers import examples
from tests.support.transports import (
    DEADLINE_S,
    KINDS,
    MEMORY,
    POISON,
    End,
    Kit,
    Pair,
    arrivals,
    connected,
    cuda,
    finish,
    in_tiers,
    numbers,
    until,
    write,
    write_range,
)

from kvferry.errors import MessageError, PeerDisconnectedError, RegistrationError, TransportError
from kvferry.layout import Device, MemoryKind, Region, attention_components, empty_shard
from kvferry.plan import Runs, Selector, descriptor_rows, selectors
from kvferry.plan.descriptors import Numbers
from kvferry.plan.lowering import PageSteps
from kvferry.transport import PeerMetadata

ANY, _ = attention_components(num_layers=1, num_kv_heads=1, head_dim=1, dtype="uint8")


@pytest.fixture(params=in_tiers(KINDS))
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    """A kit of one's own, for tests that close or restart."""
    made = Kit(request.param)
    yield made
    made.close()


@pytest.fixture(params=in_tiers(KINDS), scope="module")
def shared_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    kit = Kit(request.param)
    yield connected(kit)
    kit.close()


@pytest.fixture
def pair(shared_pair: Pair) -> Pair:
    """A pair that the module shares, cleaned."""
    shared_pair.clean()
    return shared_pair


# --- bytes


def test_when_poll_says_done_the_bytes_are_there_and_ours_may_be_overwritten(pair: Pair):
    lists = pair.lists([(0, MEMORY, 0, 1)], [(0, MEMORY, 0, 1)])
    expected = pair.here.memory.copy()
    transfer = pair.here.transport.post(lists[0], numbers(0), lists[1], numbers(0), b"done")
    until("end of a write", lambda: pair.here.transport.poll(transfer))
    pair.here.memory[:] = 0
    np.testing.assert_array_equal(pair.there.memory, expected)
    pair.here.transport.release(transfer)
    arrivals(pair.there.transport, 1)
    np.testing.assert_array_equal(pair.there.memory, expected)


def test_only_the_selected_bytes_change(pair: Pair):
    lists = pair.lists([(10, 7, 100, 50)], [(3, 7, 64, 80)])
    write(pair, lists, numbers(4, 0, 49), numbers(79, 1, 0))
    expected = np.full(MEMORY, POISON, np.uint8)
    for source, destination in ((4, 79), (0, 1), (49, 0)):
        expected[3 + 64 * destination :][:7] = pair.here.memory[10 + 100 * source :][:7]
    np.testing.assert_array_equal(pair.there.memory, expected)
    arrivals(pair.there.transport, 1)


@settings(max_examples=examples(60))
@given(
    lengths=st.lists(st.sampled_from([1, 3, 64, 4096]), min_size=1, max_size=3),
    counts=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    gaps=st.tuples(st.sampled_from([0, 1, 64]), st.sampled_from([0, 1, 64])),
    data=st.data(),
)
def test_indices_number_the_elements_row_by_row(
    shared_pair: Pair, lengths: list[int], counts: tuple[int, int], gaps: tuple[int, int], data: st.DataObject
):
    """Rows of any lengths, strides and counts on either side, elements in any order: NumPy says what must arrive."""
    pair = shared_pair
    pair.clean()
    placed: list[list[tuple[int, int]]] = []  # for either side, offset and length of every element, as numbered
    rows: list[list[tuple[int, int, int, int]]] = []
    for count, gap in zip(counts, gaps, strict=True):
        at, side, elements = 5, [], []
        for length in lengths:
            side.append((at, length, length + gap, count))
            elements += [(at + element * (length + gap), length) for element in range(count)]
            at += count * (length + gap) + 9
        rows.append(side)
        placed.append(elements)
    here, there = [], []
    for row in range(len(lengths)):
        both = min(counts)
        here += [row * counts[0] + element for element in data.draw(st.permutations(range(counts[0])))[:both]]
        there += [row * counts[1] + element for element in data.draw(st.permutations(range(counts[1])))[:both]]
    lists = pair.lists(*rows)
    assert [each.count for each in lists] == [len(lengths) * count for count in counts]
    report = write(pair, lists, numbers(*here), numbers(*there))
    expected = np.full(MEMORY, POISON, np.uint8)
    for source, destination in zip(here, there, strict=True):
        (from_, length), (to, _) = placed[0][source], placed[1][destination]
        expected[to : to + length] = pair.here.memory[from_ : from_ + length]
    np.testing.assert_array_equal(pair.there.memory, expected)
    assert report.total_bytes == sum(placed[0][source][1] for source in here)
    arrivals(pair.there.transport, 1)
    for prepared in lists:
        pair.here.transport.release_list(prepared)


def test_one_element_may_be_written_to_many_places(pair: Pair):
    lists = pair.lists([(0, 16, 16, 4)], [(0, 16, 16, 64)])
    write(pair, lists, numbers(*[2] * 64), numbers(*range(64)))
    np.testing.assert_array_equal(pair.there.memory[: 16 * 64], np.tile(pair.here.memory[32:48], 64))
    arrivals(pair.there.transport, 1)


def test_the_report_counts_bytes_and_at_most_the_posted_descriptors(pair: Pair):
    lists = pair.lists([(0, 128, 128, 32)], [(0, 128, 128, 32)])
    transport = pair.here.transport
    transfer = transport.post(lists[0], numbers(*range(32)), lists[1], numbers(*range(32)), b"n")
    report = until("end of a write", lambda: transport.poll(transfer))
    assert report.total_bytes == 128 * 32
    assert 1 <= report.descriptors <= 32
    assert report.post_s >= 0
    assert report.transfer_s >= 0
    assert transport.poll(transfer) == report
    transport.release(transfer)
    arrivals(pair.there.transport, 1)


@settings(max_examples=examples(40))
@given(
    here=st.permutations(range(24)), there=st.permutations(range(24)), count=st.integers(1, 24), most=st.integers(1, 9)
)
def test_selected_neighbours_arrive_whether_they_are_merged_or_not(
    shared_pair: Pair, here: list[int], there: list[int], count: int, most: int
):
    """Two regions with pages of three units on our side and of two on the peer's; NumPy says what must arrive."""
    pair, unit = shared_pair, 32
    pair.clean()
    runs = Runs(
        source_bases=np.array([64, 4096], np.uint64),
        destination_bases=np.array([32, 8192], np.uint64),
        loops=(),
        length=unit,
        source_steps=PageSteps(3, unit, 3 * unit),
        destination_steps=PageSteps(2, unit, 2 * unit),
    )
    pools = empty_shard(ANY, page_tokens=3, num_pages=8), empty_shard(ANY, page_tokens=2, num_pages=12)
    made = descriptor_rows([(runs, *pools)])
    for rows, end in ((made.source, pair.here), (made.destination, pair.there)):
        rows[:, 0] += np.uint64(end.region.address)
    lists = pair.here.transport.prepare(made.source, None), pair.here.transport.prepare(made.destination, pair.peer)
    (selector,) = selectors(made.pieces, [0], merged_bytes=most * unit)
    pages, units = np.divmod(np.array(here[:count]), 3)
    to_pages, to_units = np.divmod(np.array(there[:count]), 2)
    report = write(pair, lists, *selector.select(units, pages, to_units, to_pages))
    expected = np.full(MEMORY, POISON, np.uint8)
    for source, destination in zip(here[:count], there[:count], strict=True):
        for from_, to in ((64, 32), (4096, 8192)):
            expected[to + unit * destination :][:unit] = pair.here.memory[from_ + unit * source :][:unit]
    np.testing.assert_array_equal(pair.there.memory, expected)
    assert report.total_bytes == 2 * count * unit
    if pair.kit.kind.joins:
        goes_on = set(zip(here[:count], there[:count], strict=True))
        fewest = count - sum((source + 1, to + 1) in goes_on for source, to in goes_on)
        most_blocks = 2 * (fewest + -(-count // most) - 1) + pair.kit.kind.cuts
        assert 2 * max(fewest, -(-count // most)) <= report.descriptors <= most_blocks
    arrivals(pair.there.transport, 1)
    for prepared in lists:
        pair.here.transport.release_list(prepared)


def test_a_long_run_is_cut_so_that_there_is_something_for_every_thread(pair: Pair):
    """Selected as a whole, 1 MiB of neighbours would be one descriptor; cut, it is as many as there are blocks."""
    lists = pair.lists([(0, 4096, 4096, 256)], [(0, 4096, 4096, 256)])
    none, pages = np.zeros(256, np.int64), np.arange(256)
    numbering = Numbers(np.zeros(1, np.int32), 256, 1)
    for most, blocks in ((256, 1), (64, 4), (50, 6)):
        report = write(pair, lists, *Selector(numbering, numbering, most).select(none, pages, none, pages))
        if not pair.kit.kind.joins:
            blocks = 256
        assert blocks <= report.descriptors <= blocks + pair.kit.kind.cuts
        np.testing.assert_array_equal(pair.there.memory, pair.here.memory)
        pair.there.memory[:] = POISON
        arrivals(pair.there.transport, 1)


def test_prepared_lists_say_how_large_they_are(pair: Pair):
    for prepared in pair.lists([(0, 64, 64, 16), (4096, 64, 64, 3)], [(0, 64, 64, 16), (4096, 64, 64, 3)]):
        assert (prepared.rows, prepared.count) == (2, 19)
        pair.here.transport.release_list(prepared)


def test_several_transfers_at_once_arrive_whatever_order_they_are_polled_in(pair: Pair):
    lists = pair.lists([(0, 4096, 4096, 64)], [(0, 4096, 4096, 64)])
    transport = pair.here.transport
    transfers = [
        transport.post(lists[0], numbers(index), lists[1], numbers(63 - index), f"transfer {index}".encode())
        for index in range(64)
    ]
    for transfer in reversed(transfers):
        finish(transport, transfer)
    expected = pair.here.memory[: 64 * 4096].reshape(64, 4096)[::-1]
    np.testing.assert_array_equal(pair.there.memory[: 64 * 4096].reshape(64, 4096), expected)
    received = arrivals(pair.there.transport, 64)
    assert Counter(received) == Counter((pair.name, f"transfer {index}".encode()) for index in range(64))


def test_lists_are_prepared_once_and_used_often(pair: Pair):
    lists = pair.lists([(0, 64, 64, 16)], [(0, 64, 64, 16)])
    for index in range(16):
        write(pair, lists, numbers(index), numbers(index))
    np.testing.assert_array_equal(pair.there.memory[:1024], pair.here.memory[:1024])
    arrivals(pair.there.transport, 16)
    for prepared in (*lists, *lists):  # releasing twice is no harm
        pair.here.transport.release_list(prepared)


def test_rows_may_be_changed_by_their_owner_once_they_are_prepared(pair: Pair):
    here, there = pair.here.rows((0, 64, 64, 16)), pair.there.rows((0, 64, 64, 16))
    transport = pair.here.transport
    lists = transport.prepare(here, None), transport.prepare(there, pair.peer)
    here[:], there[:] = 0, 0
    write(pair, lists, numbers(3), numbers(3))
    np.testing.assert_array_equal(pair.there.memory[192:256], pair.here.memory[192:256])
    arrivals(pair.there.transport, 1)


def test_both_directions_at_once(kit: Kit):
    pair = connected(kit)
    here, there = pair.here.transport, pair.there.transport
    back = there.connect(here.metadata())
    forth = pair.lists([(0, 256, 0, 1)], [(0, 256, 0, 1)])
    pair.there.memory[512:768] = 77
    home = (
        there.prepare(pair.there.rows((512, 256, 0, 1)), None),
        there.prepare(pair.here.rows((512, 256, 0, 1)), back),
    )
    transfers = (
        here.post(forth[0], numbers(0), forth[1], numbers(0), b"forth"),
        there.post(home[0], numbers(0), home[1], numbers(0), b"back"),
    )
    came: list[tuple[str, bytes]] = []

    def both() -> bool:
        came.extend(here.take_notifications())  # what connections have to do may wait for it, on either side
        reports = [transport.poll(transfer) for transport, transfer in zip((here, there), transfers, strict=True)]
        return None not in reports

    until("end of both writes", both)
    for transport, transfer in zip((here, there), transfers, strict=True):
        transport.release(transfer)
    np.testing.assert_array_equal(pair.there.memory[:256], pair.here.memory[:256])
    assert set(pair.here.memory[512:768].tolist()) == {77}
    assert arrivals(there, 1) == [(pair.name, b"forth")]
    assert came or arrivals(here, 1) == [(pair.peer, b"back")]
    assert came in ([], [(pair.peer, b"back")])
    there.disconnect(back)  # leaves the other direction as it is
    here.notify(pair.peer, b"once more")
    assert finish(here, here.post(forth[0], numbers(0), forth[1], numbers(0), b"forth")).total_bytes == 256
    assert sorted(arrivals(there, 2)) == [(pair.name, b"forth"), (pair.name, b"once more")]


@pytest.mark.parametrize(
    ("source", "destination", "length"), [(0, 0, MEMORY), (7, 100, 1), (1000, 3, 4099), (MEMORY - 5, MEMORY - 5, 5)]
)
def test_a_range_is_written_in_one_piece_without_any_list(pair: Pair, source: int, destination: int, length: int):
    report = write_range(pair, source, destination, length, b"a range")
    expected = np.full(MEMORY, POISON, np.uint8)
    expected[destination : destination + length] = pair.here.memory[source : source + length]
    np.testing.assert_array_equal(pair.there.memory, expected)
    assert report.total_bytes == length
    assert arrivals(pair.there.transport, 1) == [(pair.name, b"a range")]


@pytest.mark.parametrize(
    ("source", "destination", "length"),
    [(-1, 0, 8), (0, -1, 8), (MEMORY - 7, 0, 8), (0, MEMORY - 7, 8), (0, 0, 0), (0, 0, MEMORY + 1)],
    ids=["before ours", "before theirs", "over our end", "over their end", "no length", "more than there is"],
)
def test_a_range_outside_of_registered_memory_is_refused(pair: Pair, source: int, destination: int, length: int):
    with pytest.raises(RegistrationError, match="outside the memory"):
        write_range(pair, source, destination, length, b"wrong")
    assert set(pair.there.memory.tolist()) == {POISON}
    assert pair.there.transport.take_notifications() == []


def test_a_range_to_an_unknown_peer_is_refused(pair: Pair):
    with pytest.raises(PeerDisconnectedError, match="'stranger'"):
        pair.here.transport.write(pair.here.region, "stranger", pair.there.region.address, b"")


@pytest.mark.parametrize("way", ["post", "write"])
def test_a_write_without_a_notification_sends_none(pair: Pair, way: str):
    if way == "post":
        lists = pair.lists([(0, 64, 64, 4)], [(0, 64, 64, 4)])
        write(pair, lists, numbers(1), numbers(2), b"")
    else:
        write_range(pair, 64, 128, 64)
    np.testing.assert_array_equal(pair.there.memory[128:192], pair.here.memory[64:128])
    pair.here.transport.notify(pair.peer, b"the only one")
    assert arrivals(pair.there.transport, 1) == [(pair.name, b"the only one")]


# --- notifications


def test_the_notification_comes_after_the_write_and_names_its_sender(pair: Pair):
    lists = pair.lists([(0, MEMORY, 0, 1)], [(0, MEMORY, 0, 1)])
    there, transport = pair.there.transport, pair.here.transport
    notification = bytes(range(256))
    transfer = transport.post(lists[0], numbers(0), lists[1], numbers(0), notification)
    received: list[tuple[str, bytes]] = []

    def done() -> bool:
        before = there.take_notifications()
        finished = transport.poll(transfer) is not None
        if before:  # it may leave as soon as the write has completed, which the next poll must then say
            assert finished
        received.extend(before)
        return finished

    until("end of a write", done)
    transport.release(transfer)
    received += arrivals(there, 1 - len(received))
    assert received == [(pair.name, notification)]
    assert there.take_notifications() == []


def test_a_receiver_that_is_notified_finds_every_byte(kit: Kit):
    """The receiver looks from a thread of its own, at the moment when the notification comes."""
    size, rounds = 8 << 20, 5
    pair = connected(kit, size)
    lists = pair.lists([(0, 4096, 4096, size // 4096)], [(0, 4096, 4096, size // 4096)])
    wrong: list[int] = []
    seen = threading.Semaphore(0)

    def watch() -> None:
        for number in range(rounds):
            until("notification", pair.there.transport.take_notifications)
            wrong.append(int((pair.there.memory != number).sum()))
            seen.release()

    watcher = threading.Thread(target=watch)
    watcher.start()
    every = np.arange(size // 4096, dtype=np.int32)
    order = np.random.default_rng(0).permutation(every).astype(np.int32)
    for number in range(rounds):
        pair.here.memory[:] = number
        write(pair, lists, order, order)
        assert seen.acquire(timeout=DEADLINE_S)
    watcher.join(DEADLINE_S)
    assert wrong == [0] * rounds


@pytest.mark.parametrize(
    "notification", [b"x", b"\x00\xff\x00", bytes(range(256)) * 400], ids=["short", "zeros", "long"]
)
def test_a_notification_needs_no_write(pair: Pair, notification: bytes):
    pair.here.transport.notify(pair.peer, notification)
    assert arrivals(pair.there.transport, 1) == [(pair.name, notification)]


def test_many_notifications_arrive_once_each_in_whatever_order(pair: Pair):
    lists = pair.lists([(0, 8, 8, 8)], [(0, 8, 8, 8)])
    for number in range(300):
        pair.here.transport.notify(pair.peer, b"alone %d" % number)
        if number % 3 == 0:
            write(pair, lists, numbers(number % 8), numbers(number % 8), b"written %d" % number)
    received = arrivals(pair.there.transport, 400)
    expected = [b"alone %d" % number for number in range(300)] + [b"written %d" % number for number in range(0, 300, 3)]
    assert Counter(received) == Counter((pair.name, notification) for notification in expected)


def test_notifications_of_several_peers_name_each(kit: Kit):
    receiver = kit.end("receiver")
    senders = [kit.end("sender") for _ in range(3)]
    expected = []
    for number, sender in enumerate(senders):
        peer = sender.transport.connect(receiver.transport.metadata())
        sender.transport.notify(peer, b"%d" % number)
        expected.append((PeerMetadata.decode(sender.transport.metadata()).name, b"%d" % number))
    assert sorted(arrivals(receiver.transport, 3)) == sorted(expected)


# --- what fails in the middle


def test_a_post_that_fails_in_the_middle_has_sent_nothing_or_ends_like_any_write(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
):
    """Unless the transport promises no such thing: then whoever posts takes it for a write that may arrive."""
    pair = connected(kit)
    transport, some = pair.here.transport, [(0, 64, 128, 100), (32768, 32, 96, 100)]
    lists, order = pair.lists(some, some), np.arange(200, dtype=np.int32)
    elsewhere = pair.lists([(65536, 64, 64, 1)], [(65536, 64, 64, 1)])
    pair.here.memory[:] = 1
    with monkeypatch.context() as patch:
        kit.kind.breaks(transport, patch)
        try:
            transfer = transport.post(lists[0], order, lists[1], order, b"half")
        except TransportError:
            transfer = None
            if not transport.promises.posts_all_or_nothing:
                return
        if transfer is not None:  # some of it may be posted as it is polled
            with pytest.raises(TransportError, match=r"planted|Mooncake|not all of a write"):
                until("end of a write", lambda: transport.poll(transfer))
    if transfer is not None:
        transport.release(transfer)
    before = pair.there.memory.copy()
    assert transfer is not None or set(before.tolist()) == {POISON}
    pair.here.memory[:] = 2
    write(pair, elsewhere, numbers(0), numbers(0), b"whole")
    assert arrivals(pair.there.transport, 1) == [(pair.name, b"whole")]
    before[65536 : 65536 + 64] = 2
    np.testing.assert_array_equal(pair.there.memory, before)


# --- refusals


@pytest.mark.parametrize(
    "row",
    [
        (-1, 8, 0, 1),
        (MEMORY - 7, 8, 0, 1),
        (MEMORY, 1, 0, 1),
        (0, MEMORY // 4, MEMORY // 4, 5),
        (0, 8, 2**63, 3),
        (8, 2**64 - 8, 0, 1),
        (0, 0, 0, 1),
    ],
    ids=["before", "over the end", "at the end", "last of many", "absurd stride", "absurd length", "no length"],
)
@pytest.mark.parametrize("remote", [False, True])
def test_rows_outside_of_registered_memory_are_refused_by_number(
    pair: Pair, row: tuple[int, int, int, int], remote: bool
):
    end, peer = (pair.there, pair.peer) if remote else (pair.here, None)
    with pytest.raises(RegistrationError) as caught:
        pair.here.transport.prepare(end.rows((0, 8, 8, 4), row), peer)
    assert "descriptor row 1 [" in str(caught.value)
    assert (pair.peer if remote else "this endpoint") in str(caught.value)


@pytest.mark.parametrize("remote", [False, True])
def test_rows_on_a_wrong_device_are_refused(pair: Pair, remote: bool):
    end, peer = (pair.there, pair.peer) if remote else (pair.here, None)
    rows = end.rows((0, 8, 8, 4))
    rows[0, 2] = 3
    with pytest.raises(RegistrationError, match=r"descriptor row 0 .* on device 3 lies outside .* DRAM:0"):
        pair.here.transport.prepare(rows, peer)


def test_no_rows_are_refused(pair: Pair):
    with pytest.raises(RegistrationError, match="at least one"):
        pair.here.transport.prepare(np.empty((0, 5), np.uint64), None)


def test_our_own_rows_are_not_looked_for_in_the_peers_memory(pair: Pair):
    with pytest.raises(RegistrationError, match="this endpoint"):
        pair.here.transport.prepare(pair.there.rows((0, 8, 8, 1)), None)
    with pytest.raises(RegistrationError, match=pair.peer):
        pair.here.transport.prepare(pair.here.rows((0, 8, 8, 1)), pair.peer)


def test_an_unknown_peer_is_refused(pair: Pair):
    with pytest.raises(PeerDisconnectedError, match="'stranger'"):
        pair.here.transport.prepare(pair.there.rows((0, 8, 8, 1)), "stranger")
    with pytest.raises(PeerDisconnectedError, match="'stranger'"):
        pair.here.transport.notify("stranger", b"hello")


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ([0, 1], [0]),
        ([0], [0, 1]),
        ([], []),
        ([0], []),
        ([0], [4]),
        ([4], [0]),
        ([-1], [0]),
        ([0], [-1]),
        ([0, 1, 2, 4], [0, 1, 2, 3]),
    ],
)
def test_wrong_indices_are_refused_and_nothing_moves(pair: Pair, here: list[int], there: list[int]):
    lists = pair.lists([(0, 64, 64, 4)], [(0, 64, 64, 4)])
    with pytest.raises(TransportError):
        pair.here.transport.post(lists[0], numbers(*here), lists[1], numbers(*there), b"wrong")
    assert set(pair.there.memory.tolist()) == {POISON}
    write(pair, lists, numbers(1), numbers(1), b"right")
    assert arrivals(pair.there.transport, 1) == [(pair.name, b"right")]


def test_elements_of_different_lengths_are_refused(pair: Pair):
    lists = pair.lists([(0, 64, 64, 4), (512, 32, 32, 4)], [(0, 64, 64, 4), (512, 32, 32, 4)])
    for here, there in (([0], [4]), ([4], [0]), ([0, 1, 5], [0, 1, 1])):
        with pytest.raises(TransportError):
            pair.here.transport.post(lists[0], numbers(*here), lists[1], numbers(*there), b"wrong")
    assert set(pair.there.memory.tolist()) == {POISON}
    assert pair.there.transport.take_notifications() == []


def test_lists_the_wrong_way_round_are_refused(pair: Pair):
    local, remote = pair.lists([(0, 64, 64, 4)], [(0, 64, 64, 4)])
    for one, other in ((remote, local), (local, local), (remote, remote)):
        with pytest.raises(TransportError, match="from a list of our own memory to one of a peer's"):
            pair.here.transport.post(one, numbers(0), other, numbers(0), b"wrong")


def test_device_memory_is_refused_where_there_is_none(kit: Kit):
    if cuda() is None and not kit.kind.has_device:
        memory = np.zeros(64, np.uint8)
        with pytest.raises(RegistrationError, match="VRAM:0"):
            kit.make("no-device").register([Region(memory.ctypes.data, 64)], Device(MemoryKind.VRAM, 0))


def test_memory_that_comes_later_is_on_the_same_device(kit: Kit):
    end = kit.end("one-device")
    more = np.zeros(64, np.uint8)
    with pytest.raises(RegistrationError, match=r"DRAM:1 cannot join memory on DRAM:0"):
        end.transport.register([Region(more.ctypes.data, 64)], Device(MemoryKind.DRAM, 1))
    assert PeerMetadata.decode(end.transport.metadata()).regions == (end.region,)


def test_an_endpoint_without_memory_can_be_connected_and_notified(kit: Kit):
    sender, receiver = kit.end("sender"), kit.make(f"bare-{uuid.uuid4().hex[:8]}")
    receiver.register([], Device())
    peer = sender.transport.connect(receiver.metadata())
    sender.transport.notify(peer, b"hello")
    assert [text for _, text in arrivals(receiver, 1)] == [b"hello"]
    with pytest.raises(RegistrationError):
        sender.transport.prepare(sender.rows((0, 8, 8, 1)), peer)


# --- connections


@pytest.mark.parametrize("garbage", [b"", b"garbage", b"\xc1", bytes(100), b"\x84\xa4name\xa2\xff\xff"])
def test_garbage_is_no_metadata(pair: Pair, garbage: bytes):
    with pytest.raises(MessageError):
        pair.here.transport.connect(garbage)


@pytest.mark.parametrize("cut", [1, 20])
def test_truncated_metadata_is_refused(pair: Pair, cut: int):
    with pytest.raises(MessageError):
        pair.here.transport.connect(pair.there.transport.metadata()[:-cut])


@pytest.mark.parametrize("private", [b"", b"garbage", b"nixlSerDes|"])
def test_metadata_of_nobody_is_refused_without_harm(pair: Pair, private: bytes):
    nobody = PeerMetadata(name="nobody", device=Device(), regions=(), private=private)
    with pytest.raises(TransportError):
        pair.here.transport.connect(nobody.encode())
    with pytest.raises(PeerDisconnectedError):
        pair.here.transport.notify("nobody", b"hello")
    pair.here.transport.notify(pair.peer, b"still here")
    assert arrivals(pair.there.transport, 1) == [(pair.name, b"still here")]


def test_a_peer_under_a_false_name_is_refused_and_connects_under_its_own(kit: Kit):
    here, there = kit.end("here"), kit.end("there")
    true = PeerMetadata.decode(there.transport.metadata())
    false = PeerMetadata(name="impostor", device=true.device, regions=true.regions, private=true.private)
    with pytest.raises(TransportError, match="impostor"):
        here.transport.connect(false.encode())
    assert here.transport.connect(true.encode()) == true.name
    here.transport.notify(true.name, b"hello")
    arrivals(there.transport, 1, sender=here.transport)


def test_metadata_says_who_and_where(pair: Pair):
    metadata = PeerMetadata.decode(pair.there.transport.metadata())
    assert (metadata.name, metadata.device, metadata.regions) == (pair.peer, Device(), (pair.there.region,))
    assert pair.here.transport.name == pair.kit.name.split()[0]


def test_connecting_again_forgets_the_lists_of_before(kit: Kit):
    pair = connected(kit)
    old = pair.lists([(0, 64, 64, 4)], [(0, 64, 64, 4)])
    assert pair.here.transport.connect(pair.there.transport.metadata()) == pair.peer
    with pytest.raises(PeerDisconnectedError, match="earlier connection"):
        pair.here.transport.post(old[0], numbers(0), old[1], numbers(0), b"old")
    new = pair.lists([(0, 64, 64, 4)], [(0, 64, 64, 4)])
    write(pair, (old[0], new[1]), numbers(0), numbers(0), b"new")  # lists of our own memory stay
    assert arrivals(pair.there.transport, 1) == [(pair.name, b"new")]
    pair.here.transport.release_list(old[1])


def test_a_released_list_is_refused(pair: Pair):
    lists = pair.lists([(0, 64, 64, 4)], [(0, 64, 64, 4)])
    for prepared in lists:
        pair.here.transport.release_list(prepared)
    with pytest.raises(TransportError):
        pair.here.transport.post(lists[0], numbers(0), lists[1], numbers(0), b"released")


def test_disconnecting_forgets_a_peer_and_may_be_repeated(kit: Kit):
    pair = connected(kit)
    lists = pair.lists([(0, 64, 64, 4)], [(0, 64, 64, 4)])
    for _ in range(3):
        pair.here.transport.disconnect(pair.peer)
    pair.here.transport.disconnect("stranger")
    with pytest.raises(PeerDisconnectedError):
        pair.here.transport.notify(pair.peer, b"gone")
    with pytest.raises(PeerDisconnectedError):
        pair.here.transport.prepare(pair.there.rows((0, 64, 64, 4)), pair.peer)
    with pytest.raises(PeerDisconnectedError):
        pair.here.transport.post(lists[0], numbers(0), lists[1], numbers(0), b"gone")
    assert set(pair.there.memory.tolist()) == {POISON}
    assert pair.here.transport.connect(pair.there.transport.metadata()) == pair.peer


def test_a_peer_that_starts_anew_under_its_old_name_is_reached_in_its_new_memory(kit: Kit):
    pair = connected(kit)
    lists = pair.lists([(0, 64, 64, 4)], [(0, 64, 64, 4)])
    write(pair, lists, numbers(0), numbers(0), b"first life")
    arrivals(pair.there.transport, 1)
    pair.there.transport.close()
    old = pair.there.memory.copy()
    reborn = End(kit.make(pair.peer), np.full(MEMORY, POISON, np.uint8))
    with pytest.raises(PeerDisconnectedError):
        until("refusal of the old connection", lambda: pair.here.transport.notify(pair.peer, b"too early"))
    assert pair.here.transport.connect(reborn.transport.metadata()) == pair.peer
    with pytest.raises(PeerDisconnectedError):
        pair.here.transport.post(lists[0], numbers(1), lists[1], numbers(1), b"old list")
    again = Pair(kit, pair.here, reborn, pair.peer)
    lists = again.lists([(0, 64, 64, 4)], [(64, 64, 64, 4)])
    write(again, lists, numbers(2), numbers(2), b"second life")
    assert arrivals(reborn.transport, 1) == [(pair.name, b"second life")]
    np.testing.assert_array_equal(reborn.memory[192:256], pair.here.memory[128:192])
    np.testing.assert_array_equal(pair.there.memory, old)


def test_closing_may_be_repeated_and_leaves_others_alone(kit: Kit):
    pair, bystander = connected(kit), kit.end("bystander")
    pair.lists([(0, 64, 64, 4)], [(0, 64, 64, 4)])
    peer = bystander.transport.connect(pair.there.transport.metadata())
    pair.here.transport.close()
    pair.here.transport.close()
    bystander.transport.notify(peer, b"still here")
    assert [text for _, text in arrivals(pair.there.transport, 1)] == [b"still here"]


# --- threads


def test_two_threads_write_through_one_transport(pair: Pair):
    rounds, half = 100, MEMORY // 2
    lists = pair.lists([(0, 1024, 1024, MEMORY // 1024)], [(0, 1024, 1024, MEMORY // 1024)])
    problems: list[BaseException] = []
    start = threading.Barrier(2)

    def work(thread: int) -> None:
        try:
            start.wait(DEADLINE_S)
            first = thread * half // 1024
            for number in range(rounds):
                index = numbers(first + number % (half // 1024), first + (number + 1) % (half // 1024))
                write(pair, lists, index, index[::-1].copy(), b"%d/%d" % (thread, number))
                pair.here.transport.notify(pair.peer, b"%d/%d alone" % (thread, number))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    received = arrivals(pair.there.transport, 4 * rounds)  # a third thread takes meanwhile
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not problems
    assert len(set(received)) == 4 * rounds
    expected = np.full(MEMORY, POISON, np.uint8).reshape(-1, 1024)
    source = pair.here.memory.reshape(-1, 1024)
    for half_number in range(2):
        first = half_number * half // 1024
        for number in range(rounds):
            one, other = first + number % (half // 1024), first + (number + 1) % (half // 1024)
            expected[other], expected[one] = source[one], source[other]
    np.testing.assert_array_equal(pair.there.memory.reshape(-1, 1024), expected)


def test_one_thread_connects_and_disconnects_while_another_writes(kit: Kit):
    pair, others = connected(kit), [kit.end("other") for _ in range(2)]
    lists = pair.lists([(0, 64, 64, 4)], [(0, 64, 64, 4)])
    problems: list[BaseException] = []
    stop = threading.Event()

    def churn() -> None:
        try:
            while not stop.is_set():
                for other in others:
                    peer = pair.here.transport.connect(other.transport.metadata())
                    prepared = pair.here.transport.prepare(other.rows((0, 64, 64, 4)), peer)
                    pair.here.transport.release_list(prepared)
                    pair.here.transport.disconnect(peer)
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=churn)
    thread.start()
    for number in range(100):
        write(pair, lists, numbers(number % 4), numbers(number % 4), b"%d" % number)
    stop.set()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert not problems
    assert len(set(arrivals(pair.there.transport, 100))) == 100


# ---- what is promised beyond the contract ----------------------------------------------------------------------------


def test_nothing_is_promised_that_was_not_measured(kit: Kit):
    assert kit.make("promises").promises == kit.kind.promises


def test_memory_that_was_given_back_is_written_to_only_by_whoever_does_not_promise_otherwise(pair: Pair):
    """Some write there all the same where processes share memory: that must not be taken for a fence."""
    lists = pair.lists([(0, 64, 64, 4)], [(0, 64, 64, 4)])
    is_promised = pair.there.transport.promises.fenced_by_deregistration
    pair.there.transport.close()
    pair.here.memory[:64] = 1
    with contextlib.suppress(TransportError):
        pair.here.transport.post(lists[0], numbers(0), lists[1], numbers(0), b"")
    if is_promised:
        assert set(pair.there.memory.tolist()) == {POISON}
