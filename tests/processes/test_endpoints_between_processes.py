"""Whole engines, each rank in a process of its own: exact, side by side, and when a process dies."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from tests.support.caches import Model, Shape
from tests.support.processes import Rank, RankProcess, until
from tests.support.real_transport import skip_unless_installed

from kvferry.control.registry_server import RegistryServer

skip_unless_installed()

PAGE_TOKENS = 8
ATTENTION = Model(layers=4, heads=4, head_dim=16, page_tokens=PAGE_TOKENS, dtype="float32")
LATENT = Model(layers=5, latent_dim=40, page_tokens=PAGE_TOKENS, dtype="float16")
PAGES = 12
ROOMS_AT_ONCE = 20
PEER_TIMEOUT_S = 3.0

_rooms = itertools.count(1)


class Processes:
    """As many processes as the tests need at once; one that was killed is replaced."""

    def __init__(self) -> None:
        self._free: list[RankProcess] = []

    def take(self, count: int) -> list[RankProcess]:
        while len(self._free) < count:
            self._free.append(RankProcess())
        return [self._free.pop(0) for _ in range(count)]

    def give_back(self, processes: list[RankProcess]) -> None:
        for process in processes:
            if process.unanswered:  # a test failed half-way
                process.kill()
        usable = [process for process in processes if not process.unanswered]
        for process in usable:
            process.ask(Rank.stop)
        for process in usable:
            assert process.answer().error is None
        self._free += usable

    def close(self) -> None:
        for process in self._free:
            process.close()


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.close()


@pytest.fixture(scope="module")
def registry() -> Iterator[RegistryServer]:
    with RegistryServer(port=0, lease_s=2) as running:
        yield running


def pages_of(room: int, number: int) -> list[int]:
    """Pages that differ from rank to rank, and that no other of 20 successive rooms has."""
    mixed = np.random.default_rng(number).permutation(ROOMS_AT_ONCE * PAGES)
    pages: list[int] = mixed.reshape(ROOMS_AT_ONCE, PAGES)[room % ROOMS_AT_ONCE].tolist()
    return pages


class Engine:
    """An engine of either kind, one process a rank."""

    def __init__(self, name: str, shape: Shape, ranks: list[RankProcess]) -> None:
        self.name, self.shape, self.ranks = name, shape, ranks


class Cluster:
    """Starts engines and runs requests between them."""

    def __init__(self, processes: Processes, registry: RegistryServer) -> None:
        self._processes = processes
        self._settings = {
            "registry_url": registry.url,
            "heartbeat_interval_s": 0.3,
            "peer_timeout_s": PEER_TIMEOUT_S,
            "close_timeout_s": 1.0,
        }
        self._taken: list[RankProcess] = []
        self._names = itertools.count()

    def start(self, kind: str, model: Model, shape: Shape, *, name: str | None = None) -> Engine:
        shape = replace(shape, pages=ROOMS_AT_ONCE * PAGES)
        coordinates = shape.coordinates()
        ranks = self._processes.take(len(coordinates))
        self._taken += ranks
        engine = Engine(name or f"{kind}-{id(self)}-{next(self._names)}", shape, ranks)
        start = Rank.start_prefill if kind == "prefill" else Rank.start_decode
        for rank, place in zip(ranks, coordinates, strict=True):
            rank.ask(start, model, shape, place, engine.name, self._settings)
        for rank in ranks:
            answer = rank.answer()
            assert answer.error is None, answer.error
        return engine

    def begin(
        self,
        prefill: Engine,
        decode: Engine,
        *,
        chunks: list[int] | None = None,
        prefix_tokens: int = 0,
        **options: bool,
    ) -> int:
        """Opens a room on every rank of both, with other pages on each, and submits chunks that end as given."""
        room = next(_rooms)
        size = decode.shape.page_tokens or PAGE_TOKENS
        count = PAGES * PAGE_TOKENS // size - prefix_tokens // size
        for number, rank in enumerate(decode.ranks):
            pages = pages_of(room, number)[:count]
            rank.do(Rank.receive, room, pages, prefill.name, prefix_tokens=prefix_tokens)
        for number, rank in enumerate(prefill.ranks):
            rank.do(Rank.send, room, pages_of(room, 100 + number), [5, PAGES] if chunks is None else chunks, **options)
        return room

    def finish(self, room: int, *engines: Engine) -> None:
        """Waits for a room on every rank: all succeed, and every element is right."""
        ranks = [rank for engine in engines for rank in engine.ranks]
        for rank in ranks:
            rank.ask(Rank.wait, room)
        for rank in ranks:
            answer = rank.answer()
            assert (answer.error, answer.value) == (None, 0)

    def lost(self, *dead: RankProcess) -> None:
        """Kills processes."""
        for process in dead:
            process.kill()
            self._taken.remove(process)

    def close(self) -> None:
        self._processes.give_back(self._taken)


@pytest.fixture
def cluster(processes: Processes, registry: RegistryServer) -> Iterator[Cluster]:
    made = Cluster(processes, registry)
    yield made
    made.close()


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(
    ("model", "prefill", "decode"),
    [
        pytest.param(ATTENTION, Shape(tp=2), Shape(), id="tp2-to-1"),
        pytest.param(ATTENTION, Shape(), Shape(tp=2, heads_first=True), id="1-to-tp2-hnd"),
        pytest.param(LATENT, Shape(tp=2), Shape(tp=2), id="latent"),
        pytest.param(LATENT, Shape(pp=2, stages=(2, 3)), Shape(pp=2, stages=(4, 1)), id="uneven-stages"),
    ],
)
def test_every_byte_arrives(cluster: Cluster, model: Model, prefill: Shape, decode: Shape):
    source, destination = cluster.start("prefill", model, prefill), cluster.start("decode", model, decode)
    for _ in range(4):
        cluster.finish(cluster.begin(source, destination), source, destination)


@pytest.mark.parametrize("decode", [Shape(tp=2, page_tokens=16), Shape(page_tokens=24, heads_first=True)])
def test_pages_of_unlike_sizes_and_prefixes_that_end_anywhere(cluster: Cluster, decode: Shape):
    source, destination = cluster.start("prefill", ATTENTION, Shape(tp=2)), cluster.start("decode", ATTENTION, decode)
    for prefix_tokens in (0, 5, 8, 41, 95):
        cluster.finish(cluster.begin(source, destination, prefix_tokens=prefix_tokens), source, destination)


@pytest.mark.full
def test_two_engines_of_either_kind_exchange_at_once(cluster: Cluster):
    prefills = [cluster.start("prefill", ATTENTION, shape) for shape in (Shape(tp=2), Shape(pp=2, stages=(1, 3)))]
    decodes = [cluster.start("decode", ATTENTION, shape) for shape in (Shape(tp=2), Shape(dp=2))]
    replicas = [Engine(decodes[1].name, Shape(), [rank]) for rank in decodes[1].ranks]
    pairs = list(itertools.product(prefills, [decodes[0], *replicas]))
    begun = [(cluster.begin(prefill, decode), prefill, decode) for _ in range(3) for prefill, decode in pairs]
    for room, prefill, decode in begun:
        cluster.finish(room, prefill, decode)


def test_a_decode_rank_that_is_killed_fails_only_its_own_rooms(cluster: Cluster):
    prefill = cluster.start("prefill", ATTENTION, Shape(tp=2))
    dying, living = (cluster.start("decode", ATTENTION, Shape()) for _ in range(2))
    for decode in (dying, living):
        cluster.finish(cluster.begin(prefill, decode), prefill, decode)
    room = cluster.begin(prefill, dying, chunks=[5], is_complete=False)
    until(dying.ranks[0], room, lambda state: state[2] == 2)
    cluster.lost(dying.ranks[0])
    started = time.monotonic()
    while time.monotonic() < started + 2 * PEER_TIMEOUT_S:
        cluster.finish(cluster.begin(prefill, living), prefill, living)
    for rank in prefill.ranks:
        rank.ask(Rank.wait, room)
        answer = rank.answer()
        assert answer.error_type == "TransferFailedError"
        assert "PeerDisconnectedError: silent for" in str(answer.error)
        assert rank.do(Rank.state, room) == ("FAILED", True, 0)
    cluster.finish(cluster.begin(prefill, living), prefill, living)


@pytest.mark.full
def test_a_prefill_rank_that_is_killed_is_named_and_its_engine_may_come_back(cluster: Cluster):
    prefill, other = (cluster.start("prefill", ATTENTION, Shape(tp=2)) for _ in range(2))
    decode = cluster.start("decode", ATTENTION, Shape())
    for engine in (prefill, other):
        cluster.finish(cluster.begin(engine, decode), engine, decode)
    room = cluster.begin(prefill, decode, chunks=[5], is_complete=False)
    until(decode.ranks[0], room, lambda state: state[2] == 2)
    cluster.lost(prefill.ranks[1])
    decode.ranks[0].ask(Rank.wait, room)
    answer = decode.ranks[0].answer()
    assert answer.error_type == "TransferFailedError"
    assert f"prefill rank 1 of '{prefill.name}' has ended: its process" in str(answer.error)
    until(decode.ranks[0], room, lambda state: state[1])  # what the network still had of its writes had time to arrive
    cluster.finish(cluster.begin(other, decode), other, decode)

    prefill.ranks[0].ask(Rank.wait, room)
    answer = prefill.ranks[0].answer()
    assert "rank 1 of" in str(answer.error), "the surviving rank learns the cause from the decode side"
    cluster.lost(prefill.ranks[0])
    again = cluster.start("prefill", ATTENTION, Shape(tp=2), name=prefill.name)
    for engine in (again, other, again):
        cluster.finish(cluster.begin(engine, decode), engine, decode)
