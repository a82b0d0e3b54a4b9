"""Starting and ending endpoints: what is open ends, nothing stays behind, and nothing works afterwards."""

from __future__ import annotations

import contextlib
import itertools
import linecache
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import zmq
from tests.support.caches import Model, Shape, pool
from tests.support.engines import WAIT_S, Engines, Request, Requests
from tests.support.tiers import Tier
from tests.support.waiting import eventually

from kvferry import (
    DecodeEndpoint,
    InProcessNetwork,
    PrefillEndpoint,
    RankCoordinates,
    Receiver,
    Settings,
    TransferState,
)
from kvferry.control.registry_client import RegistryClient
from kvferry.endpoint.construction import endpoint_name
from kvferry.endpoint.decode.driver import DecodeDriver
from kvferry.endpoint.decode.links import Links
from kvferry.endpoint.runtime.platform import SystemPlatform
from kvferry.endpoint.runtime.threads import Loop, RunningLoop
from kvferry.errors import (
    EndpointClosedError,
    KVFerryError,
    LayoutError,
    PageError,
    RegistrationError,
    SettingsError,
    TransferAbortedError,
    TransferFailedError,
    TransportError,
    UnknownRoomError,
    UsageError,
)
from kvferry.protocol.links.link import Link
from kvferry.protocol.wire.registrations import EngineView
from kvferry.staging import memory
from kvferry.testing.probe import probe
from kvferry.testing.transports import FaultyTransport


def is_closed(transport: FaultyTransport) -> bool:
    return probe(transport).is_closed


def our_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("kvferry-")}


@pytest.fixture(autouse=True)
def _no_thread_stays(registry_url: str) -> Iterator[None]:
    before = our_threads()
    yield
    eventually(f"only {before} run", lambda: our_threads() <= before)


MEMORY = pool(Model(), Shape(), RankCoordinates())
"""Lives as long as any endpoint that uses it; what is in it does not matter here."""


def made(**settings: object) -> tuple[PrefillEndpoint, DecodeEndpoint]:
    """A pair with a registry of its own, by itself. It stages little: to touch the usual ring takes longest."""
    network, layout = InProcessNetwork(), MEMORY.layout
    settings = {"staging_ring_mib": 2.0} | settings
    prefill = PrefillEndpoint(
        layout, settings=Settings(registry_port=0, workers=2, **settings), transport=FaultyTransport(network)
    )
    decode = DecodeEndpoint(
        layout,
        settings=Settings(registry_url=prefill.registry_url, **settings),
        transport=FaultyTransport(network),
    )
    return prefill, decode


# ---- nothing stays ----------------------------------------------------------------------------------------------


def test_no_thread_and_no_file_stays_after_many_lives():
    process, counts = psutil.Process(), []
    before = our_threads()
    for _ in range(20):
        prefill, decode = made()
        with prefill, decode:
            receiver = decode.open(1, np.arange(2))
            sender = prefill.open(1)
            sender.submit(np.arange(2, 4), last=True)
            receiver.wait(WAIT_S)
            sender.wait(WAIT_S)
        assert our_threads() <= before
        counts.append(process.num_fds())
    assert max(counts[5:]) <= counts[2] + 2, counts


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_closing_in_either_order_waits_for_nothing(first: str):
    prefill, decode = made(close_timeout_s=3600)
    decode.connect(timeout_s=WAIT_S)
    for endpoint in (prefill, decode) if first == "prefill" else (decode, prefill):
        endpoint.close()


def test_a_rank_that_closes_leaves_the_registry(engines: Callable[..., Engines], registry_url: str):
    prefill = engines().prefill(Model(), Shape(tp=2))
    with RegistryClient(registry_url) as registry:
        assert registry.engine(prefill.name).complete
        prefill.endpoints[1].close()
        assert [each.engine_rank for each in registry.engine(prefill.name).registrations] == [0]
        prefill.endpoints[0].close()
        assert registry.engine(prefill.name).registrations == ()


# ---- rooms that are open ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_closing_fails_what_is_open_on_both_sides(pair: Callable[..., Requests], side: str):
    requests = pair(Model(), Shape(tp=2), Shape(tp=2))
    requests.connect()
    started = []
    for room in range(4):
        request = requests.new(room, 4)
        requests.open_decode(request)
        requests.open_prefill(request)
        requests.submit(request, 0, 2, last=False)
        started.append(request)
    eventually(
        "all are under way",
        lambda: all(each.state is TransferState.TRANSFERRING for one in started for each in one.receivers),
    )
    closing = requests.prefill.endpoints if side == "prefill" else requests.decode.endpoints
    for endpoint in closing:
        endpoint.close()
    for request in started:
        request.wait_ended(3)
        closed = request.senders if side == "prefill" else request.receivers
        assert any(isinstance(each.error, TransferAbortedError) for each in closed)
        assert any(f"the {side} endpoint was closed" in str(each.error) for each in closed)
        for transfer in (*request.senders, *request.receivers):
            assert "closed" in str(transfer.error)
            assert transfer.wait_pages_reusable(3)


def test_closing_waits_for_writes_on_their_way(pair: Callable[..., Requests]):
    requests = pair()
    transport = requests.prefill.transports[0]
    request = requests.begin_held()
    closing = threading.Thread(target=requests.prefill.endpoints[0].close)
    closing.start()
    with pytest.raises(TransferAbortedError):
        request.senders[0].wait(WAIT_S)
    assert not is_closed(transport)
    assert not request.receivers[0].pages_reusable
    transport.held = False
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert is_closed(transport)
    assert request.senders[0].pages_reusable
    assert request.receivers[0].wait_pages_reusable(WAIT_S)


@dataclass
class Hanging:
    """A room whose write hangs, and endpoints whose patience is short.

    Attributes:
        engines: where they came from.
        link: of the decode rank to the prefill rank.
    """

    engines: Engines
    requests: Requests
    request: Request
    link: Link

    @property
    def prefill(self) -> PrefillEndpoint:
        return self.requests.prefill.endpoints[0]

    @property
    def transport(self) -> FaultyTransport:
        return self.requests.prefill.transports[0]

    @property
    def driver(self) -> DecodeDriver:
        return probe(self.requests.decode.endpoints[0]).driver

    def wait_until_not_relied_on(self) -> None:
        """The decode rank may make another link to the engine at any time, but this one is over."""
        eventually("the decode rank relies on it no more", lambda: self.link not in self.driver.rooms.links.current)

    def ends(self) -> None:
        """The write does, and with it everything else."""
        self.transport.held = False
        for transfer in (self.request.senders[0], self.request.receivers[0]):
            assert transfer.wait_pages_reusable(WAIT_S), "both sides live, and nothing is on its way any more"
        eventually("everything was given back", lambda: is_closed(self.transport))
        assert not self.transport.misused


@pytest.fixture
def hanging(engines: Callable[..., Engines]) -> Callable[..., Hanging]:
    """Makes one, with settings of its own."""

    def make(**settings: object) -> Hanging:
        both = engines(close_timeout_s=0.2, heartbeat_interval_s=0.1, **settings)
        requests = Requests(both.prefill(Model()), both.decode(Model()))
        requests.connect()
        request = requests.begin_held()
        (link,) = probe(requests.decode.endpoints[0]).links.current
        return Hanging(both, requests, request, link)

    return make


def test_closing_returns_while_a_write_hangs_and_the_rest_is_done_when_it_ends(
    hanging: Callable[..., Hanging], caplog: pytest.LogCaptureFixture
):
    case = hanging()
    pending = case.requests.new(2)
    case.requests.open_decode(pending)
    eventually("another room waits", lambda: len(probe(case.prefill).pending) == 1)
    with caplog.at_level(logging.ERROR):
        case.prefill.close()
    assert "writes are still on their way, 1 rooms' too" in caplog.text
    assert not is_closed(case.transport), "memory is not taken away under a write"
    with pytest.raises(TransferFailedError, match="closed"):
        case.request.receivers[0].wait(WAIT_S)
    with pytest.raises(TransferFailedError, match="EndpointClosedError: the prefill endpoint was closed"):
        pending.receivers[0].wait(WAIT_S)
    assert pending.receivers[0].wait_pages_reusable(WAIT_S), "no write of this room was ever begun"
    case.wait_until_not_relied_on()
    for transfer in (case.request.senders[0], case.request.receivers[0]):
        assert not transfer.pages_reusable
    case.ends()


def test_a_successor_serves_while_writes_of_a_closed_endpoint_hang(hanging: Callable[..., Hanging]):
    case = hanging()
    case.prefill.close()
    after = Requests(case.engines.prefill(Model(), name=case.requests.prefill.name), case.requests.decode)
    case.wait_until_not_relied_on()
    after.run(2)
    assert not case.request.receivers[0].pages_reusable
    case.ends()
    after.run(3)


@pytest.mark.parametrize("hangs", [True, False], ids=["hanging", "idle"])
def test_a_decode_rank_that_was_given_up_for_its_silence_is_told_of_the_end_too(
    hanging: Callable[..., Hanging], hangs: bool
):
    """It may be the reason why the write hung: nothing else would ever tell it that there is none any more."""
    case = hanging(peer_timeout_s=0.5)
    if not hangs:
        case.transport.held = False
        case.request.wait()
        case.request = case.requests.new(2, 4)
        case.requests.open_decode(case.request)
        case.requests.open_prefill(case.request)
        case.requests.submit(case.request, 0, 2, last=False)
        receiver = case.request.receivers[0]
        eventually("half of it has come", lambda: receiver.state is TransferState.TRANSFERRING)
    thawed = threading.Event()

    def freeze(now: float) -> None:
        thawed.wait()

    case.driver.context.submit(freeze)
    eventually("it is given up", lambda: not probe(case.prefill).peers)
    case.prefill.close()
    case.transport.held = False
    eventually("everything was given back", lambda: is_closed(case.transport))
    thawed.set()
    assert case.request.receivers[0].wait_pages_reusable(WAIT_S)


def test_staging_memory_comes_back_when_what_hung_has_ended(hanging: Callable[..., Hanging]):
    """The process goes on, so that nothing but the close message says so."""
    case = hanging(path="staged", staging_ring_mib=1.0, staging_chunk_mib=0.25)
    name = case.transport.endpoint_name
    case.prefill.close()
    case.wait_until_not_relied_on()
    assert case.request.receivers[0].wait_pages_reusable(WAIT_S), "nobody writes to pages but the decode rank"
    time.sleep(0.5)  # several heartbeats, in which the connection might be closed as unused
    assert name in case.driver.context.staging.rings, "it may still be written to"
    case.ends()
    eventually("the ring came back", lambda: name not in case.driver.context.staging.rings)
    eventually("nobody is in doubt", lambda: len(case.driver.rooms.links.quarantine.lost) == 0)


@pytest.mark.parametrize("end", ["works again", "closed"])
def test_a_write_that_hangs_while_a_decode_rank_attaches_keeps_it_connected(pair: Callable[..., Requests], end: str):
    """What is written to measure the ways to it is no room's, and must end all the same."""
    requests = pair(
        path="auto",
        staging_ring_mib=1.0,
        staging_chunk_mib=0.25,
        close_timeout_s=0.2,
        bootstrap_timeout_s=2.0,
        heartbeat_interval_s=0.05,
    )
    transport, prefill = requests.prefill.transports[0], requests.prefill.endpoints[0]
    transport.held = True
    with pytest.raises(TransportError, match="did not end within"):
        requests.connect()
    with contextlib.suppress(KVFerryError):
        requests.connect()  # while it still hangs
    assert transport.in_flight == 1
    if end == "closed":
        prefill.close()
        assert not is_closed(transport)
        transport.held = False
        eventually("everything was given back", lambda: is_closed(transport))
    else:
        transport.held = False
        requests.run(1)
    assert not transport.misused


def test_a_write_that_takes_long_while_a_decode_rank_attaches_refuses_nobody(
    pair: Callable[..., Requests], caplog: pytest.LogCaptureFixture
):
    """As on a machine on which many processes start."""
    requests = pair(path="auto", staging_ring_mib=1.0, staging_chunk_mib=0.25)
    transport = requests.prefill.transports[0]
    transport.held = True
    connecting = threading.Thread(target=requests.connect)
    connecting.start()
    eventually("it has to wait", lambda: "has to wait: a write of a few bytes did not end within 1 s" in caplog.text)
    transport.held = False
    connecting.join(WAIT_S)
    requests.run(1)
    assert "refused" not in caplog.text
    assert not transport.misused


def test_a_transport_that_takes_no_notifications_keeps_nobody_from_leaving(pair: Callable[..., Requests]):
    requests = pair(close_timeout_s=0.2)
    requests.run(1)
    transport = requests.prefill.transports[0]

    def breaks() -> None:
        raise RuntimeError("planted")

    transport.on_take = breaks
    requests.prefill.endpoints[0].close()
    eventually("everything was given back", lambda: is_closed(transport))
    assert not requests.prefill.endpoints[0].is_healthy


@pytest.mark.parametrize("hangs", [True, False], ids=["hanging", "quiet"])
def test_staging_memory_that_may_still_be_written_to_stays_when_a_decode_rank_closes(
    hanging: Callable[..., Hanging], monkeypatch: pytest.MonkeyPatch, hangs: bool
):
    """The engine goes on, and might put something of its own there."""
    kept: list[object] = []
    monkeypatch.setattr(memory, "_KEPT_FOR_GOOD", kept)
    case = hanging(path="staged", staging_ring_mib=1.0, staging_chunk_mib=0.25)
    if not hangs:
        case.transport.held = False
        case.request.wait()
    case.requests.decode.endpoints[0].close()
    assert len(kept) == hangs
    case.transport.held = False


@pytest.mark.parametrize("hangs", [True, False], ids=["hanging", "quiet"])
def test_a_decode_rank_that_closes_says_which_pages_it_never_gives_back(
    hanging: Callable[..., Hanging], caplog: pytest.LogCaptureFixture, hangs: bool
):
    """Whoever frees their memory has it overwritten: nothing tells them later that the write has ended."""
    case = hanging()
    if not hangs:
        case.transport.held = False
        case.request.wait()
    case.requests.decode.endpoints[0].close()
    said = f"6 pages are never given back: {case.transport.endpoint_name} may still write to them"
    assert (said in caplog.text) == hangs
    assert case.request.receivers[0].pages_reusable != hangs
    waiting = threading.Thread(target=case.request.receivers[0].wait_pages_reusable, daemon=True)
    waiting.start()
    waiting.join(WAIT_S)
    assert not waiting.is_alive(), "whoever waits without a limit waits for ever"
    case.transport.held = False


def test_rooms_that_are_opened_and_closed_at_once_end(engines: Callable[..., Engines]):
    both = engines(close_timeout_s=0.0)
    prefill = both.prefill(Model(layers=1))
    for _ in range(20):
        decode = both.decode(Model(layers=1)).endpoints[0]
        receivers = [decode.open(room, [0], engine=prefill.name) for room in range(20)]
        decode.close()
        for receiver in receivers:
            with pytest.raises((TransferAbortedError, TransferFailedError)):
                receiver.wait(WAIT_S)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_whoever_closes_second_waits_too(pair: Callable[..., Requests], side: str):
    requests = pair(close_timeout_s=WAIT_S)
    transport = requests.prefill.transports[0]
    requests.begin_held()
    endpoint = requests.prefill.endpoints[0] if side == "prefill" else requests.decode.endpoints[0]
    closers = [threading.Thread(target=endpoint.close) for _ in range(2)]
    for closer in closers:
        closer.start()
    closers[1].join(0.3)
    assert closers[1].is_alive(), "a write is still on its way"
    transport.held = False
    for closer in closers:
        closer.join(WAIT_S)
        assert not closer.is_alive()


def test_memory_that_cannot_be_given_back_is_told_to_whoever_closes(pair: Callable[..., Requests]):
    requests = pair()
    transport = requests.prefill.transports[0]
    close = transport.close

    def breaks() -> None:
        close()
        raise RuntimeError("planted")

    transport.close = breaks  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="planted"):
        requests.prefill.endpoints[0].close()
    requests.prefill.endpoints[0].close()  # once is enough


def test_memory_is_given_back_where_the_connections_cannot_be_closed(pair: Callable[..., Requests]):
    requests = pair()
    endpoint = requests.prefill.endpoints[0]
    given_back: list[None] = []
    transport, listening = requests.prefill.transports[0], probe(endpoint).driver.channel.connection
    close, close_connections = transport.close, listening.close

    def breaks() -> None:
        close_connections()
        raise OSError("planted")

    listening.close = breaks  # type: ignore[method-assign]
    transport.close = lambda: given_back.append(close())  # type: ignore[method-assign]
    with pytest.raises(OSError, match="planted"):
        endpoint.close()
    assert given_back == [None]


@pytest.mark.parametrize("fails_at", range(1, 8))
def test_an_endpoint_whose_threads_cannot_start_leaves_nothing(registry_url: str, fails_at: int):
    class Platform(SystemPlatform):
        started = 0

        def start(self, name: str, loop: Loop) -> RunningLoop:
            self.started += 1
            if self.started == fails_at:
                raise RuntimeError("can't start new thread")
            return super().start(name, loop)

    transport, engine = FaultyTransport(InProcessNetwork()), f"never-{fails_at}"
    settings = Settings(registry_url=registry_url, workers=2, gather_workers=2, staging_ring_mib=2.0)
    try:
        endpoint = PrefillEndpoint(
            MEMORY.layout, engine=engine, settings=settings, transport=transport, platform=Platform()
        )
    except RuntimeError:
        with RegistryClient(registry_url) as registry:
            assert registry.engine(engine).registrations == ()
    else:
        assert fails_at > 6, "two workers, two that gather, the waker and the control thread"
        endpoint.close()
    assert is_closed(transport)


def test_the_decode_side_waits_until_nothing_can_be_written(pair: Callable[..., Requests]):
    requests = pair()
    transport = requests.prefill.transports[0]
    request = requests.begin_held()
    closing = threading.Thread(target=requests.decode.endpoints[0].close)
    closing.start()
    with pytest.raises(TransferAbortedError, match="the decode endpoint was closed"):
        request.receivers[0].wait(WAIT_S)
    assert not is_closed(requests.decode.transports[0])
    transport.held = False
    closing.join(WAIT_S)
    assert is_closed(requests.decode.transports[0])
    assert request.receivers[0].pages_reusable


def test_a_room_that_is_opened_while_the_endpoint_closes_ends_too(engines: Callable[..., Engines]):
    both = engines()
    prefill = both.prefill(Model(layers=1))
    for _ in range(15):
        decode = both.decode(Model(layers=1)).endpoints[0]
        receivers: list[Receiver] = []

        def open_many(decode: DecodeEndpoint = decode, receivers: list[Receiver] = receivers) -> None:
            with contextlib.suppress(EndpointClosedError):
                for room in range(10_000):
                    receivers.append(decode.open(room, [0], engine=prefill.name))  # noqa: PERF401

        opening = threading.Thread(target=open_many)
        opening.start()
        eventually("some are open", lambda receivers: len(receivers) > 20, receivers)
        decode.close()
        opening.join(WAIT_S)
        for receiver in receivers:
            with pytest.raises((TransferAbortedError, TransferFailedError)):
                receiver.wait(WAIT_S)


# ---- afterwards -------------------------------------------------------------------------------------------------


def test_closing_twice_is_fine():
    prefill, decode = made()
    for endpoint in (decode, prefill):
        endpoint.close()
        endpoint.close()
        assert not endpoint.is_healthy
    closers = [threading.Thread(target=endpoint.close) for endpoint in made() for _ in range(3)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(WAIT_S)


class Interrupted(BaseException):
    """Ctrl-C, at one line of a program."""


def interrupted_at(line: int, call: Callable[[], None], files: Sequence[str]) -> bool:
    """Interrupts a call before the n-th new line of these files that it comes to. Returns whether it got there."""
    seen: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.endswith(tuple(files)):
            return None
        # A signal is handled between two calls: never between the last line under a lock and the lock's release.
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not source.lstrip().startswith("with "):
            seen.add((frame.f_code.co_filename, frame.f_lineno))
            if len(seen) == line:
                raise Interrupted
        return trace

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupted:
        return True
    finally:
        sys.settrace(earlier)
    return False


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_close_that_is_interrupted_anywhere_is_finished_by_the_next(registry_url: str, side: str, tier: Tier):
    """Ctrl-C reaches the main thread between any two lines."""
    files = {
        "prefill": (
            *("endpoint.py", "driver.py", "rooms.py", "registration.py", "telemetry.py"),
            *("registry_client.py", "shared_registry.py"),
        ),
        "decode": (
            *("endpoint.py", "driver.py", "rooms.py", "links.py", "quarantine.py", "connections.py"),
            *("control/ends.py", "control/channel.py", "registry_client.py", "shared_registry.py"),
        ),
    }[side]
    before, network, open_files = our_threads(), InProcessNetwork(), []
    for line in itertools.count(1, tier.amount(quick=5, full=1, long=1)):
        engine = f"interrupted-{side}-{line}"
        settings = Settings(registry_url=registry_url, workers=1, close_timeout_s=0.05, staging_ring_mib=2.0)
        transports = FaultyTransport(network), FaultyTransport(network)
        prefill = PrefillEndpoint(MEMORY.layout, engine=engine, settings=settings, transport=transports[0])
        decode = DecodeEndpoint(MEMORY.layout, settings=settings, transport=transports[1])
        assert prefill.wait_registered(WAIT_S)
        decode.connect(engine, timeout_s=WAIT_S)
        receiver, sender = decode.open(1, [0], engine="nowhere"), prefill.open(1)
        endpoint, transport = (prefill, transports[0]) if side == "prefill" else (decode, transports[1])
        is_interrupted = interrupted_at(line, endpoint.close, files)
        endpoint.close()
        assert is_closed(transport), f"interrupted at line {line}"
        assert not endpoint.is_healthy
        decode.close()
        prefill.close()
        assert our_threads() <= before, f"interrupted at line {line}"
        for transfer in (receiver, sender):
            with pytest.raises(TransferAbortedError):
                transfer.wait(WAIT_S)
        open_files.append(psutil.Process().num_fds())
        if not is_interrupted:
            break
    assert line > 20, "otherwise nothing was interrupted"
    eventually(f"no more files than {open_files} are open", lambda: psutil.Process().num_fds() <= open_files[2])


def test_what_is_looked_up_until_a_close_is_interrupted_is_not_taken_by_the_next(
    monkeypatch: pytest.MonkeyPatch, registry_url: str
):
    """The registry answers once nothing takes its answer any more, and the next close finds its client closed."""
    asked, may_answer = threading.Event(), threading.Event()
    ask, close_links = RegistryClient.engine, Links.close

    def slow(client: RegistryClient, name: str) -> EngineView:
        asked.set()
        assert may_answer.wait(WAIT_S)
        return ask(client, name)

    def answered_first(links: Links) -> None:
        may_answer.set()
        close_links(links)

    def interrupted() -> None:
        raise Interrupted

    monkeypatch.setattr(RegistryClient, "engine", slow)
    monkeypatch.setattr(Links, "close", answered_first)
    transport = FaultyTransport(InProcessNetwork())
    settings = Settings(registry_url=registry_url, close_timeout_s=0.05, staging_ring_mib=2.0)
    decode = DecodeEndpoint(MEMORY.layout, settings=settings, transport=transport)
    decode.open(1, [0], engine="nowhere")
    assert asked.wait(WAIT_S)
    with monkeypatch.context() as patch:
        patch.setattr(transport, "close", interrupted)
        with pytest.raises(Interrupted):
            decode.close()
    decode.close()
    assert is_closed(transport)


def test_nothing_works_after_close(pair: Callable[..., Requests]):
    requests = pair()
    done, pending = requests.run(1), requests.new(2)
    requests.open_prefill(pending)
    prefill, decode = requests.prefill.endpoints[0], requests.decode.endpoints[0]
    prefill.close()
    decode.close()
    with pytest.raises(EndpointClosedError, match="room 3: the endpoint is closed"):
        prefill.open(3)
    with pytest.raises(EndpointClosedError, match="room 3: the endpoint is closed"):
        decode.open(3, [0])
    with pytest.raises(EndpointClosedError):
        decode.connect(requests.prefill.name)
    with pytest.raises(UnknownRoomError):
        prefill.sender(2)
    pending.senders[0].submit([1])
    for sender in (*done.senders, *pending.senders):
        sender.abort()
    done.receivers[0].abort()
    assert done.receivers[0].aux == b"token"
    assert (prefill.open_rooms, decode.open_rooms) == (0, 0)


def test_who_waits_for_a_connection_is_told_of_the_close(engines: Callable[..., Engines]):
    decode = engines().decode(Model()).endpoints[0]
    problems = []

    def connect() -> None:
        try:
            decode.connect("nowhere")
        except EndpointClosedError as error:
            problems.append(error)

    waiting = [threading.Thread(target=connect) for _ in range(3)]
    for thread in waiting:
        thread.start()
    eventually("they wait", lambda: len(probe(decode).links.callers) == 3)
    decode.close()
    for thread in waiting:
        thread.join(WAIT_S)
    assert len(problems) == 3


# ---- in a child -------------------------------------------------------------------------------------------------


def in_child(call: Callable[[], object]) -> str:
    """Calls in a forked child; returns the type and text of what it raised, or what it returned."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking a process that has threads
        child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends a child that hangs
        try:
            answer = repr(call())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answers:
        answer = answers.read()
    os.waitpid(child, 0)
    return answer


def test_a_forked_child_is_told_that_an_endpoint_is_its_parents(pair: Callable[..., Requests]):
    """Its threads do not exist there: a room would never end."""
    requests = pair()
    prefill, decode = requests.prefill.endpoints[0], requests.decode.endpoints[0]
    requests.run(1)
    for side, call in (
        ("prefill", lambda: prefill.open(2)),
        ("decode", lambda: decode.open(2, [0], engine=requests.prefill.name)),
        ("decode", lambda: decode.connect(requests.prefill.name)),
    ):
        says = f"UsageError: this {side} endpoint belongs to process {os.getpid()}, and this is process "
        assert in_child(call).startswith(says)
    for close in (decode.close, prefill.close):
        assert in_child(close) == "None"
    assert (prefill.open_rooms, decode.open_rooms) == (0, 0)
    requests.run(2)


def test_a_child_that_is_forked_under_an_endpoints_lock_does_not_wait_for_it(pair: Callable[..., Requests]):
    requests = pair()
    prefill, decode = requests.prefill.endpoints[0], requests.decode.endpoints[0]
    with probe(prefill).rooms_lock, probe(decode).rooms_lock, probe(decode).closers, probe(prefill).closers:
        for call in (lambda: prefill.open(2), lambda: decode.open(2, [0]), prefill.close, decode.close):
            assert in_child(call).startswith(("UsageError", "None"))


def test_a_forked_child_is_told_that_a_client_is_its_parents(registry_url: str):
    with RegistryClient(registry_url) as client:
        client.health()
        assert in_child(client.health).startswith(
            f"UsageError: the client of the registry at {registry_url} belongs to"
        )
        assert in_child(client.close) == "None"
        client.health()


# ---- starting ---------------------------------------------------------------------------------------------------


@pytest.fixture
def taken_port() -> Iterator[int]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.REP) as taken:
        yield taken.bind_to_random_port("tcp://127.0.0.1")
    context.term()


@pytest.mark.parametrize("which", ["control_port", "registry_port"])
def test_a_port_that_is_taken_is_named_with_its_variable(taken_port: int, which: str):
    network, layout = InProcessNetwork(), MEMORY.layout
    settings = Settings(**{"registry_port": 0, which: taken_port})
    files = psutil.Process().num_fds()
    for _ in range(5):
        transport = FaultyTransport(network)
        with pytest.raises(SettingsError, match=f"{taken_port}.*KVFERRY_{which.upper()}") as caught:
            PrefillEndpoint(layout, settings=settings, transport=transport)
        assert "hoose another" in str(caught.value)
        assert is_closed(transport)
    assert psutil.Process().num_fds() <= files + 1
    assert network.members == {}


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_memory_that_cannot_be_registered_gives_everything_back(side: str):
    network, layout = InProcessNetwork(), MEMORY.layout
    transport = FaultyTransport(network)

    def refuse() -> None:
        raise RegistrationError("this memory is not yours")

    transport.on_register = refuse
    endpoint = PrefillEndpoint if side == "prefill" else DecodeEndpoint
    with pytest.raises(RegistrationError, match="not yours"):
        endpoint(layout, settings=Settings(registry_port=0, registry_url="http://127.0.0.1:1"), transport=transport)
    assert is_closed(transport)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_registry_address_that_makes_no_sense_is_refused(side: str):
    network, layout = InProcessNetwork(), MEMORY.layout
    settings = Settings(registry_url="registry.local:8998")
    endpoint = PrefillEndpoint if side == "prefill" else DecodeEndpoint
    with pytest.raises(SettingsError, match=r"registry.local:8998.*it must read like http://127.0.0.1:8998"):
        endpoint(layout, settings=settings, transport=FaultyTransport(network))


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_impossible_engine_name_is_refused_before_anything_is_taken(
    side: str, registry_url: str, monkeypatch: pytest.MonkeyPatch
):
    taken: list[str] = []
    for name in ("create_transport", "SystemPlatform"):
        monkeypatch.setattr(f"kvferry.endpoint.base.{name}", lambda *_, name=name, **__: taken.append(name))
    endpoint = PrefillEndpoint if side == "prefill" else DecodeEndpoint
    with pytest.raises(SettingsError, match="'no name' cannot be an engine's name"):
        endpoint(MEMORY.layout, engine="no name", settings=Settings(registry_url=registry_url))
    assert taken == []


def test_any_engine_name_makes_an_endpoint_name_that_registries_and_sockets_take():
    name = endpoint_name("x" * 128, 2**20)
    assert name.startswith("x" * 20)
    assert len(name) <= 64
    assert name != endpoint_name("x" * 128, 2**20)


def test_parallel_sizes_of_zero_are_refused():
    with pytest.raises(LayoutError, match="tp_size is 0: a parallel size is at least 1"):
        RankCoordinates(tp_size=0)
    with pytest.raises(LayoutError, match=r"tp_rank is 2: it must lie in \[0, 2\)"):
        RankCoordinates(tp_rank=2, tp_size=2)


# ---- arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pages", [[0.5], [[1, 2]]])
def test_pages_that_are_no_integers_are_refused_on_both_sides(pair: Callable[..., Requests], pages: Any):
    requests = pair()
    sender = requests.prefill.endpoints[0].open(1)
    for call in (lambda: sender.submit(pages), lambda: requests.decode.endpoints[0].open(1, pages)):
        with pytest.raises(PageError, match="pages must be a flat sequence of integers"):
            call()
    sender.abort()
    assert requests.decode.endpoints[0].open_rooms == 0


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: torch.arange(3, device="meta"), r"a Tensor \(torch.int64, meta, torch.strided\)"),
        (lambda: torch.arange(3).to_sparse(), r"a Tensor \(torch.int64, cpu, torch.sparse_coo\)"),
        (lambda: torch.ones(3, dtype=torch.bfloat16), r"a Tensor \(torch.bfloat16, cpu, torch.strided\)"),
        (lambda: torch.ones(3, requires_grad=True), r"a Tensor \(torch.float32, cpu, torch.strided\)"),
        (lambda: [torch.ones(1, requires_grad=True)], "a list: "),
    ],
)
def test_pages_in_a_tensor_that_cannot_be_read_are_refused_on_both_sides(
    pair: Callable[..., Requests], made: Callable[[], Any], says: str
):
    requests, pages = pair(), made()
    sender = requests.prefill.endpoints[0].open(1)
    for call in (lambda: sender.submit(pages), lambda: requests.decode.endpoints[0].open(1, pages)):
        with pytest.raises(PageError, match=f"room 1: no page numbers can be read from {says}.*NumPy array of int64"):
            call()
    sender.submit([0])  # a refused chunk changes nothing
    sender.abort()
    assert requests.decode.endpoints[0].open_rooms == 0


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"engine": None}, SettingsError, "None cannot be an engine's name"),
        ({"engine": b"prefill"}, SettingsError, "b'prefill' cannot be an engine's name"),
        ({"prefill_dp_rank": None}, LayoutError, "prefill_dp_rank is None: it must be an integer"),
        ({"prefill_dp_rank": "0"}, LayoutError, "prefill_dp_rank is '0': it must be an integer"),
    ],
)
def test_what_is_no_name_and_no_number_names_no_prefill_engine(
    pair: Callable[..., Requests], arguments: dict[str, Any], error: type[KVFerryError], says: str
):
    decode = pair().decode.endpoints[0]
    for call in (
        lambda: decode.open(1, [0], **arguments),
        lambda: decode.refuse(1, "no memory", **arguments),
        lambda: decode.connect(**{"engine": "prefill", **arguments}),
    ):
        with pytest.raises(error, match=says):
            call()
    assert decode.open_rooms == 0


@pytest.mark.parametrize("kind", [PrefillEndpoint, DecodeEndpoint])
def test_what_is_no_name_makes_no_endpoint(registry_url: str, kind: Any):
    with pytest.raises(SettingsError, match="None cannot be an engine's name"):
        kind(MEMORY.layout, engine=None, settings=Settings(registry_url=registry_url))


@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize(
    ("pages", "says"),
    [
        ([3, 4, 3], "room 1: page 3 appears 2 times; a request holds each page once"),
        ([0, 32, 1], "room 1: page 32 at position 1 is out of range: the pool has 32 pages"),
        ([0, 1, -1], "room 1: page -1 at position 2 is out of range: the pool has 32 pages"),
        ([0, 1, 2**62], f"room 1: page {2**62} at position 2 is out of range: the pool has 32 pages"),
    ],
)
def test_impossible_pages_are_refused_by_decode_and_fail_the_room_on_prefill(
    pair: Callable[..., Requests], pages: Any, says: str, as_array: bool
):
    requests = pair()
    pages = np.array(pages) if as_array else pages
    with pytest.raises(PageError, match=says):
        requests.decode.endpoints[0].open(1, pages)
    receiver = requests.decode.endpoints[0].open(1, [3, 4, 5], engine=requests.prefill.name)
    sender = requests.prefill.endpoints[0].open(1)
    sender.submit(pages, last=True)
    with pytest.raises(PageError, match=says):
        sender.wait(WAIT_S)
    with pytest.raises(TransferFailedError, match=f"PageError: {says}"):
        receiver.wait(WAIT_S)
    assert requests.prefill.transports[0].posted == 0


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.array])
def test_whatever_is_an_integer_is_a_room_number(pair: Callable[..., Requests], kind: Callable[[int], Any]):
    requests = pair()
    sender = requests.prefill.endpoints[0].open(kind(7))
    receiver = requests.decode.endpoints[0].open(kind(7), [0], engine=requests.prefill.name)
    sender.submit([1], last=True)
    receiver.wait(WAIT_S)
    assert (type(sender.room), type(receiver.room)) == (int, int)


@pytest.mark.parametrize("room", [-1, 2**63, True, np.True_, "1", 1.0, np.float64(1), np.int64(-1), None])
def test_wrong_room_numbers_are_refused_on_both_sides(pair: Callable[..., Requests], room: int):
    requests = pair()
    with pytest.raises(UsageError, match=r"is not an integer in \[0, 2\*\*63\)"):
        requests.prefill.endpoints[0].open(room)
    with pytest.raises(UsageError, match=r"is not an integer in \[0, 2\*\*63\)"):
        requests.decode.endpoints[0].open(room, [0])


def test_impossible_numbers_of_tokens_are_refused(pair: Callable[..., Requests]):
    decode = pair().decode.endpoints[0]
    for arguments, says in (
        ({"prefix_tokens": -4}, "prefix_tokens is -4: it must not be negative"),
        ({"tokens": -1}, "tokens is -1: it must not be negative"),
        ({"prefix_tokens": 9, "tokens": 8}, "a prefix of 9 tokens is longer than the request's 8"),
        ({"tokens": 5}, "1 pages where tokens 0 to 5 of the request take 2 pages of 4 on this rank"),
    ):
        with pytest.raises(PageError, match=f"room 1: {says}"):
            decode.open(1, [0], **arguments)  # type: ignore[arg-type]
    assert decode.open_rooms == 0


def test_aux_data_goes_with_the_last_chunk_and_has_a_limit(pair: Callable[..., Requests]):
    sender = pair().prefill.endpoints[0].open(1)
    with pytest.raises(UsageError, match=r"aux data goes with the last chunk \(last=True\)"):
        sender.submit([0], aux=b"pending")
    with pytest.raises(UsageError, match="1048577 bytes of aux data exceed the limit of 1048576"):
        sender.submit([0], last=True, aux=b"x" * (2**20 + 1))
    sender.submit([0], last=True, aux=b"x" * 2**20)
    sender.abort()
