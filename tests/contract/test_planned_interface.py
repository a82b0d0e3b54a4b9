"""What SGLang's protocol must be able to rely on, to decide when a room is done, given up, or another one.

The three are the decisions that its plan leaves open. Any transport behind the planned interface can be tried: it gets
a line in `IMPLEMENTATIONS`. What the interface takes over from kvferry's contract is tested with that: in
`test_transport_contract.py` as the kind "sglang", and in `tests/simulation/test_planned_interface.py`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from prototypes.sglang_transport import KVFerryTransport, make_transport
from prototypes.transport_interface import (
    BaseTransport,
    CancelResult,
    MemoryRegion,
    OpenedPeer,
    PeerStatus,
    Progress,
)
from tests.support import wrong_transports as wrong
from tests.support.transports import until

from kvferry import Settings
from kvferry.errors import (
    PeerDisconnectedError,
    RegistrationError,
    SettingsError,
    TransportError,
    TransportUnavailableError,
    UsageError,
)
from kvferry.testing import InProcessNetwork, InProcessTransport
from kvferry.transport import Copies, TransferHandle, TransferReport

SIZE, POISON = 256, 0xEE
DONE, FAILED, IN_FLIGHT = Progress.DONE, Progress.FAILED, Progress.IN_FLIGHT


@dataclass
class Rank:
    """A rank with memory, and what moves its bytes."""

    moving: BaseTransport
    memory: Any = field(default_factory=lambda: np.full(SIZE, POISON, np.uint8))

    def __post_init__(self) -> None:
        self.moving.init()
        self.moving.register_memory([self.region])

    @property
    def region(self) -> MemoryRegion:
        return MemoryRegion(self.memory.ctypes.data, SIZE)


@dataclass
class Ends:
    """A prefill rank, and a decode rank that it may write to."""

    prefill: Rank
    decode: Rank
    peer: OpenedPeer

    @classmethod
    def of(cls, make: Callable[[str], BaseTransport]) -> Ends:
        prefill, decode = Rank(make("prefill")), Rank(make("decode"))
        prefill.memory[:] = np.arange(SIZE)
        return cls(prefill, decode, prefill.moving.open_peer("decode", decode.moving.local_desc()))

    def blocks(self, *places: tuple[int, int, int]) -> Copies:
        """Blocks of (source, destination, length), where offsets are in the ranks' memories."""
        sources, destinations, lengths = np.array(places, np.uint64).T
        bases = (np.uint64(each.region.address) for each in (self.prefill, self.decode))
        return Copies(sources + next(bases), destinations + next(bases), lengths)

    def submit(self, event: bytes = b"room 7, use 1, chunk 0") -> Any:
        return self.prefill.moving.submit(self.peer, self.blocks((0, 128, 8), (64, 0, 8)), event)

    def poll(self, handle: Any) -> Progress:
        return self.prefill.moving.poll(handle).progress

    @property
    def is_untouched(self) -> bool:
        return bool((self.decode.memory == POISON).all())

    def close(self) -> None:
        for rank in (self.prefill, self.decode):
            rank.moving.close()


class Slow(InProcessTransport):
    """Ends a write when it is polled for the third time, and none that was released."""

    def __init__(self, network: InProcessNetwork, name: str) -> None:
        super().__init__(network, name)
        self.polls: dict[TransferHandle, int] = {}

    def start(self, *arguments: Any) -> TransferHandle:
        begun = super().start(*arguments)
        self.polls[begun] = 0
        return begun

    def poll(self, transfer: TransferHandle) -> TransferReport | None:
        self.polls[transfer] += 1  # KeyError: it was released
        return super().poll(transfer) if self.polls[transfer] > 2 else None

    def release(self, transfer: TransferHandle) -> None:
        del self.polls[transfer]


def in_process(kind: type[KVFerryTransport] = KVFerryTransport) -> Callable[[str], BaseTransport]:
    """kvferry over its in-process transport, made slow."""
    network = InProcessNetwork()
    return lambda name: kind(lambda life: Slow(network, f"{name}-{uuid.uuid4().hex[:8]}-life{life}"))


IMPLEMENTATIONS: dict[str, Callable[[], Callable[[str], BaseTransport]]] = {"kvferry": in_process}


@pytest.fixture(params=IMPLEMENTATIONS)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = Ends.of(IMPLEMENTATIONS[request.param]())
    yield made
    made.close()


# --- completion


def test_done_means_that_the_bytes_are_there_and_the_event_comes_no_earlier(ends: Ends):
    handle = ends.submit()
    assert ends.is_untouched
    assert ends.decode.moving.drain_events() == []
    until("end of a write", lambda: ends.poll(handle) is not IN_FLIGHT)
    expected = np.full(SIZE, POISON, np.uint8)
    expected[128:136], expected[0:8] = ends.prefill.memory[0:8], ends.prefill.memory[64:72]
    np.testing.assert_array_equal(ends.decode.memory, expected)
    assert ends.decode.moving.drain_events() == [(ends.prefill.moving.life, b"room 7, use 1, chunk 0")]


def test_who_says_done_leaves_the_memory_of_both_alone(ends: Ends):
    handle = ends.submit()
    until("end of a write", lambda: ends.poll(handle) is DONE)
    ends.prefill.memory[:] = 1
    ends.decode.memory[:] = POISON
    assert ends.poll(handle) is DONE
    assert ends.is_untouched
    assert len(ends.decode.moving.drain_events()) == 1


def test_a_write_to_who_has_gone_fails_with_a_reason_and_no_event(ends: Ends):
    handle = ends.submit()
    ends.decode.moving.close()
    until("failure of a write", lambda: ends.poll(handle) is not IN_FLIGHT)
    status = ends.prefill.moving.poll(handle)
    assert status.progress is FAILED
    assert isinstance(status.error, TransportError)
    assert ends.is_untouched


def test_a_failure_can_be_told_without_a_write(ends: Ends):
    ends.prefill.moving.send_event(ends.peer, b"room 7, use 1: failed")
    assert ends.decode.moving.drain_events() == [(ends.prefill.moving.life, b"room 7, use 1: failed")]


# --- abort


def test_pages_of_a_write_that_was_given_up_are_its_own_until_it_is_over(ends: Ends):
    """SGLang acknowledges an abort once nothing is in flight: whatever `cancel` says must be so."""
    handle = ends.submit()
    said = ends.prefill.moving.cancel(handle)
    assert said is not CancelResult.CANCELLED or ends.prefill.moving.capabilities.cancel
    if said is CancelResult.IN_FLIGHT:
        until("end of a write", lambda: ends.poll(handle) is not IN_FLIGHT)
    ends.decode.memory[:] = POISON  # the decode side has its pages back
    ends.prefill.moving.poll(handle)
    ends.prefill.moving.drain_events()
    assert ends.is_untouched
    assert ends.prefill.moving.cancel(handle) is CancelResult.ENDED


def test_a_write_that_has_ended_is_said_to_be_over(ends: Ends):
    handle = ends.submit()
    until("end of a write", lambda: ends.prefill.moving.cancel(handle) is CancelResult.ENDED)
    assert ends.poll(handle) is DONE
    assert not ends.is_untouched


# --- generations


def test_each_life_of_a_peer_is_another_one(ends: Ends):
    moving, decode = ends.prefill.moving, ends.decode.moving
    before = ends.peer
    decode.deregister_memory([ends.decode.region])
    decode.register_memory([ends.decode.region])
    after = moving.open_peer("decode", decode.local_desc())
    assert after.life == decode.life != before.life
    with pytest.raises(PeerDisconnectedError, match="open the peer anew"):
        ends.submit()
    assert moving.probe_peer(before) is PeerStatus.GONE
    ends.peer = after
    handle = ends.submit()
    until("end of a write", lambda: ends.poll(handle) is DONE)
    assert not ends.is_untouched


def test_an_event_says_which_life_it_comes_from(ends: Ends):
    """A number of a room that is used again by a prefill rank that was restarted: its first use has another life."""
    prefill, decode = ends.prefill.moving, ends.decode.moving
    first = prefill.life
    prefill.send_event(ends.peer, b"room 7")
    prefill.deregister_memory([ends.prefill.region])
    prefill.send_event(prefill.open_peer("decode", decode.local_desc()), b"room 7")
    assert decode.drain_events() == [(first, b"room 7"), (prefill.life, b"room 7")]
    assert first != prefill.life


def test_memory_that_was_given_back_is_written_to_by_nobody(ends: Ends):
    """As with sleep: SGLang releases memory, or vLLM unregisters it; what was on its way to it must not arrive."""
    handle = ends.submit()
    assert ends.decode.moving.capabilities.fenced_by_deregistration
    ends.decode.moving.deregister_memory([ends.decode.region])
    until("end of a write", lambda: ends.poll(handle) is FAILED)
    assert ends.is_untouched
    assert ends.decode.moving.drain_events() == []


def test_a_part_of_the_memory_is_not_given_back(ends: Ends):
    more = Rank(ends.decode.moving)
    with pytest.raises(UsageError, match="1 of 2 regions"):
        ends.decode.moving.deregister_memory([more.region])


# --- what is refused, and what is left


def test_what_lies_outside_is_refused(ends: Ends):
    for place in ((SIZE, 0, 8), (0, SIZE - 4, 8)):
        for more in ((), ((0, 0, 8),)):
            with pytest.raises(RegistrationError):
                ends.prefill.moving.submit(ends.peer, ends.blocks(place, *more), b"")
    with pytest.raises(TransportError, match="at least one"):
        ends.prefill.moving.submit(ends.peer, Copies(*[np.array([], np.uint64)] * 3))
    assert ends.is_untouched


class Counting(InProcessTransport):
    """Counts the lists that are prepared, and fails a post where it is told to."""

    prepared = 0
    fails = False

    def prepare(self, *arguments: Any) -> Any:
        made = super().prepare(*arguments)
        self.prepared += 1
        return made

    def release_list(self, prepared: Any) -> None:
        self.prepared -= 1
        super().release_list(prepared)

    def start(self, *arguments: Any) -> Any:
        if self.fails:
            raise TransportError("planted")
        return super().start(*arguments)


@pytest.mark.parametrize("kind", [KVFerryTransport, wrong.LosesLists])
def test_what_a_write_used_is_given_back_once_it_is_over_or_its_peer_is_closed(kind: type[KVFerryTransport]):
    network = InProcessNetwork()
    counting = Counting(network)
    made = iter([counting, InProcessTransport(network)])
    ends = Ends.of(lambda name: kind(lambda life: next(made)))
    handle = ends.submit()
    assert counting.prepared == 2
    until("end of a write", lambda: ends.poll(handle) is DONE)
    assert counting.prepared == (2 if kind is wrong.LosesLists else 0)
    counting.prepared, counting.fails = 0, True
    with pytest.raises(TransportError, match="planted"):
        ends.submit()
    assert counting.prepared == 2, "what a submit has begun that raised may still use its lists"
    ends.prefill.moving.close_peer(ends.peer)
    assert counting.prepared == (2 if kind is wrong.LosesLists else 0)
    ends.close()


@pytest.mark.parametrize("transport", ["tests.support.toy_transport:ToyTransport", "nixl", "mooncake"])
def test_the_setting_says_which_transport_moves_the_bytes(transport: str):
    settings = Settings(transport=transport, host="127.0.0.1")
    try:
        ends = Ends.of(lambda name: make_transport(settings, name, writes=name == "prefill"))
    except TransportUnavailableError as missing:
        pytest.skip(str(missing))
    handle = ends.submit()
    until("end of a write", lambda: ends.poll(handle) is DONE)
    assert not ends.is_untouched
    said: list[tuple[str, bytes]] = until("event", lambda: ends.poll(handle) and ends.decode.moving.drain_events())
    assert said == [(ends.prefill.moving.life, b"room 7, use 1, chunk 0")]
    ends.close()
    with pytest.raises(UsageError, match="init"):
        _ = ends.prefill.moving.life


def test_a_setting_that_names_no_transport_is_refused_with_its_value():
    with pytest.raises(SettingsError, match="nowhere"):
        make_transport(Settings(transport="nowhere"), "prefill", writes=True)


# --- each of these is found where it is wrong


@pytest.mark.parametrize(
    ("kind", "decision"),
    [
        (wrong.DoneOnceBegun, test_done_means_that_the_bytes_are_there_and_the_event_comes_no_earlier),
        (wrong.EventBeforeBytes, test_done_means_that_the_bytes_are_there_and_the_event_comes_no_earlier),
        (wrong.SaysItAgain, test_who_says_done_leaves_the_memory_of_both_alone),
        (wrong.FailsSilently, test_a_write_to_who_has_gone_fails_with_a_reason_and_no_event),
        (wrong.FailedWhileItGoesOn, test_done_means_that_the_bytes_are_there_and_the_event_comes_no_earlier),
        (wrong.CancelsWhatGoesOn, test_pages_of_a_write_that_was_given_up_are_its_own_until_it_is_over),
        (wrong.ForgetsNoPeer, test_each_life_of_a_peer_is_another_one),
        (wrong.EventsOfNoLife, test_an_event_says_which_life_it_comes_from),
        (wrong.KeepsItsLife, test_memory_that_was_given_back_is_written_to_by_nobody),
    ],
)
def test_what_is_wrong_is_found(
    kind: type[KVFerryTransport], decision: Callable[[Ends], None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tests.support.transports.DEADLINE_S", 0.05)
    ends = Ends.of(in_process(kind))
    with pytest.raises((AssertionError, KeyError, pytest.fail.Exception)):
        decision(ends)
