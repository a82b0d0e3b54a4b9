"""A thousand rooms of 1 GiB on a wire a tenth as fast as it should be: none times out on the wire.

Whole endpoints on simulated machines, as in every schedule, with memory that is described and does not exist: what
counts here is time, of which the wire takes its share for every byte.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Any

import numpy as np
import pytest
from proof.planted.guards import PLANTED
from proof.simulated_transport import SimulatedHandle, SimulatedTransport, SimulatedWire
from proof.simulation.control_network import ControlNetwork
from proof.simulation.machines import RegistryProcess, SimulatedPlatform
from proof.simulation.pods import SimulatedPods

from kvferry import DecodeEndpoint, PrefillEndpoint, Receiver, Sender, Settings
from kvferry.control.process_identity import Sight
from kvferry.endpoint.prefill.room_actor import RoomActor
from kvferry.errors import KVFerryError
from kvferry.layout import (
    RankCoordinates,
    RankLayout,
    ShardedComponent,
    VirtualPools,
    attention_components,
    virtual_layout,
)
from kvferry.protocol.transfer.receiver_progress import ReceiverProgress
from kvferry.testing.probe import probe

GIB = 2**30
ROOMS, ROOM_PAGES, DECODE_RANKS = 1000, 16, 4
PAGE_BYTES = GIB // ROOM_PAGES
PAGE_TOKENS = 1 << 14
FULL_SPEED = 50e9
MOST_BYTES = 1024 * 2**20
"""Of direct writes on their way: the default of `direct_mib`."""


class SlowWire(SimulatedWire):
    """Carries so many bytes a second, an equal share of every write at a time, to memory that is not there.

    Attributes:
        most_bytes: the most that were on their way at once.
    """

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__(on_post=self._posted, on_piece=lambda transfer, piece: None, fails_to=lambda what: None)
        self.most_bytes = 0
        self._bytes_per_s = bytes_per_s
        self._now = 0.0
        self._share = 0.0  # bytes that every write on its way since the beginning would have been given
        self._ends: list[tuple[float, int, SimulatedHandle]] = []  # the share at which each is through
        self._count = self._bytes = 0

    def _posted(self, transfer: SimulatedHandle) -> None:
        total = transfer.report.total_bytes
        self._count += 1
        self._bytes += total
        self.most_bytes = max(self.most_bytes, self._bytes)
        heappush(self._ends, (self._share + total, self._count, transfer))

    @property
    def next_at(self) -> float:
        """When the next write ends."""
        if not self._ends:
            return float("inf")
        return self._now + (self._ends[0][0] - self._share) * len(self._ends) / self._bytes_per_s

    def move(self, until: float) -> None:
        """Lets time pass."""
        while self._ends and (at := self.next_at) <= until:
            self._now = at
            self._share, _, transfer = heappop(self._ends)
            self._bytes -= transfer.report.total_bytes
            self.fail(transfer, None)  # it ends as it is: there is nothing to be copied
        if self._ends:
            self._share += (until - self._now) * self._bytes_per_s / len(self._ends)
        self._now = until


class Machines:
    """One prefill rank and several decode engines of one rank, with a slow wire between them.

    Attributes:
        now: the time, in seconds.
    """

    def __init__(self, bytes_per_s: float, seed: int, **settings: Any) -> None:
        self.now = 0.0
        self._settings = Settings(registry_url="http://registry:1", path="direct", workers=2, queues=2, **settings)
        self.wire = SlowWire(bytes_per_s)
        self._chance = random.Random(seed)
        self._network = ControlNetwork(lambda: False)
        self._registry = RegistryProcess(lease_s=10.0)
        self._platforms: list[SimulatedPlatform] = []
        self._transports: list[SimulatedTransport] = []
        rooms_of_one = -(-ROOMS // DECODE_RANKS)
        self.prefill = PrefillEndpoint(layout(ROOMS), host_registry=False, **self._process("prefill"))
        self.decodes = [
            DecodeEndpoint(layout(rooms_of_one), engine=f"decode{number}", **self._process(f"decode{number}"))
            for number in range(DECODE_RANKS)
        ]

    def _process(self, name: str) -> dict[str, Any]:
        platform = SimulatedPlatform(
            name,
            lambda: self.now,
            random.Random(self._chance.getrandbits(32)),
            self._network,
            self._registry,
            address=f"tcp://127.0.0.1:{1000 + len(self._platforms)}",
            pid=len(self._platforms),
            pods=SimulatedPods(0),
            pod=None,
            see=lambda process: Sight(is_in_use=True, started=process.started),
            copying_fails=lambda: None,
        )
        self._platforms.append(platform)
        self._transports.append(SimulatedTransport(self.wire, name))
        return {
            "settings": self._settings,
            "transport": self._transports[-1],
            "platform": platform,
        }

    def _work(self) -> None:
        """Everybody does what there is to do now."""
        is_busy = True
        while is_busy:
            is_busy = False
            for platform, transport in zip(self._platforms, self._transports, strict=True):
                for thread in platform.threads:
                    queue = getattr(thread.loop, "_run_queue", None)
                    thread.turn()
                    while queue is not None and queue.has_any:
                        is_busy = True
                        thread.turn()
                for executor in platform.executors:
                    while executor.work:
                        executor.work.popleft()()
                is_busy |= bool(transport.arrived)
            for line in self._network.lines:
                while self._network.can_go_up(line):
                    self._network.go_up(line)
                    is_busy = True
                while line.down:
                    self._network.go_down(line)
                    is_busy = True
            while self.wire.notifications:
                self.wire.deliver(self.wire.notifications[0])
                is_busy = True

    def run(self, transfers: Sequence[Sender | Receiver], *, until: float) -> None:
        """Lets time pass until all have ended."""
        while self.now < until and not all(transfer.state.is_final for transfer in transfers):
            self._work()
            self.now = min(max(self.wire.next_at, self.now + 1e-4), self.now + 0.1)
            self.wire.move(self.now)
            for platform in self._platforms:
                keeper = platform.keeper
                if keeper is not None and self.now >= keeper.due_at:
                    keeper.due_at = self.now + keeper.renew()
        self._work()


def layout(rooms: int) -> RankLayout:
    """Pools for so many rooms, which nobody allocates."""
    head_dim = PAGE_BYTES // 2 // PAGE_TOKENS
    components = attention_components(num_layers=1, num_kv_heads=1, head_dim=head_dim, dtype="uint8")
    pools = VirtualPools(page_tokens=PAGE_TOKENS, num_pages=rooms * ROOM_PAGES, layers_per_stage=(1,))
    sharded = [ShardedComponent(component=component, layers=(0,)) for component in components]
    return virtual_layout(sharded, RankCoordinates(), pools)


def send_all(machines: Machines, chunks: Sequence[int], rooms: int) -> Iterator[Sender | Receiver]:
    """Opens all rooms on both sides and hands in all chunks, before anything moves."""
    for room in range(rooms):
        sender = machines.prefill.open(room)
        pages = np.arange(room * ROOM_PAGES, (room + 1) * ROOM_PAGES)
        for start, stop in zip(chunks, [*chunks[1:], ROOM_PAGES], strict=True):
            is_last = stop == ROOM_PAGES
            sender.submit(pages[start:stop], last=is_last, aux=b"token" if is_last else None)
        yield sender
        place = room // DECODE_RANKS * ROOM_PAGES
        decode = machines.decodes[room % DECODE_RANKS]
        yield decode.open(room, np.arange(place, place + ROOM_PAGES), engine="prefill")


def outcomes(transfers: Sequence[Sender | Receiver]) -> Counter[str]:
    """How the transfers ended: success, the setting that an error names, or its text."""
    found: Counter[str] = Counter()
    for transfer in transfers:
        error: KVFerryError | None = transfer.error
        text = "success" if transfer.state.name == "SUCCESS" else str(error)
        found[next((name for name in ("WRITE_TIMEOUT", "WAITING_TIMEOUT") if name in text), text)] += 1
    return found


@pytest.mark.parametrize(
    "chunks",
    [[0], pytest.param([0, 4, 8, 12], marks=pytest.mark.full), pytest.param(range(16), marks=pytest.mark.full)],
    ids=["whole", "quarters", "pages"],
)
def test_on_a_wire_slowed_to_a_tenth_all_rooms_succeed(chunks: Sequence[int]):
    machines = Machines(FULL_SPEED / 10, seed=1)
    transfers = list(send_all(machines, chunks, ROOMS))
    machines.run(transfers, until=600.0)
    assert outcomes(transfers) == {"success": 2 * ROOMS}
    assert machines.wire.most_bytes <= MOST_BYTES
    assert machines.now > ROOMS * GIB / (FULL_SPEED / 10), "the wire is the bottleneck"
    assert probe(machines.prefill).admission.num_bytes == 0


@pytest.mark.full
def test_without_bounds_what_shares_the_wire_times_out_on_it(monkeypatch: pytest.MonkeyPatch):
    """As it was: all is posted at once."""
    PLANTED["more admitted than may be on its way"](monkeypatch)
    machines = Machines(FULL_SPEED / 10, seed=1)
    transfers = list(send_all(machines, [0], ROOMS))
    machines.run(transfers, until=600.0)
    assert outcomes(transfers)["WRITE_TIMEOUT"] > ROOMS
    assert machines.wire.most_bytes == ROOMS * GIB


def test_a_room_whose_writes_get_on_does_not_time_out_on_the_wire(monkeypatch: pytest.MonkeyPatch):
    """One room takes far longer than the deadline of a write: 160 s, page by page."""

    def progressed_once(receiver: ReceiverProgress, now: float) -> None:
        receiver.progressed_at = receiver.progressed_at or now

    for is_planted in (False, True):
        if is_planted:
            monkeypatch.setattr(ReceiverProgress, "progressed", progressed_once)
        machines = Machines(GIB / 160, seed=1)
        transfers = list(send_all(machines, range(16), rooms=1))
        machines.run(transfers, until=600.0)
        assert outcomes(transfers) == {"WRITE_TIMEOUT" if is_planted else "success": 2}


@pytest.mark.parametrize("is_known", [True, False])
def test_a_write_has_time_as_long_as_others_to_the_same_rank_end(is_known: bool, monkeypatch: pytest.MonkeyPatch):
    """Sixteen rooms share the wire: every 2 to 28 s one is through, and the last after 240 s."""
    if not is_known:
        monkeypatch.setattr(RoomActor, "_take_over_progress", lambda room: None)
    most_mib = sum(range(1, ROOM_PAGES + 1)) * PAGE_BYTES / 2**20
    machines = Machines(most_mib * 2**20 / 240, seed=1, direct_mib=most_mib, direct_receiver_mib=most_mib)
    transfers: list[Sender | Receiver] = []
    for room in range(ROOM_PAGES):
        sender = machines.prefill.open(room)
        sender.submit(np.arange(room + 1) + room * ROOM_PAGES, last=True, aux=b"token")
        receiver = machines.decodes[0].open(room, np.arange(room + 1) + room * ROOM_PAGES, engine="prefill")
        transfers += [sender, receiver]
    machines.run(transfers, until=600.0)
    found = outcomes(transfers)
    assert found == {"success": 2 * ROOM_PAGES} if is_known else found["WRITE_TIMEOUT"] > ROOM_PAGES
