"""How decode ranks find, lose and find again the ranks of a prefill engine."""

from __future__ import annotations

import errno
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import msgspec
import numpy as np
import pytest
import zmq
from tests.support.caches import Model, Shape, pool
from tests.support.engines import WAIT_S, Engines, PrefillEngine, Requests, new_engine_name
from tests.support.proxy import ControlProxy
from tests.support.waiting import eventually

from kvferry import DecodeEndpoint, InProcessTransport, TokenShare, TransferState, interleaved
from kvferry.applications.up.supervision import free_ports
from kvferry.control.registry_client import RegistryClient
from kvferry.control.registry_server import RegistryServer
from kvferry.endpoint.prefill.control_channel import Answers
from kvferry.errors import (
    EndpointClosedError,
    EngineEndedError,
    IncompatiblePeerError,
    LayoutError,
    PeerDisconnectedError,
    PeerError,
    RegistryUnreachableError,
    SettingsError,
    TransferAbortedError,
    TransferFailedError,
    TransferTimeoutError,
    VersionError,
)
from kvferry.protocol.wire.registrations import RankRegistration
from kvferry.protocol.wire.versions import PROTOCOL_VERSION
from kvferry.testing.probe import probe
from kvferry.transport import PeerMetadata


def waited(event: threading.Event, seconds: float) -> None:
    event.wait(seconds)


QUICK = {"heartbeat_interval_s": 0.1, "peer_timeout_s": 2.0}


def freeze(engine: PrefillEngine, rank: int) -> threading.Event:
    """Stops a prefill rank's control thread, as if the process hung, until the event is set."""
    endpoint, go_on, stopped = engine.endpoints[rank], threading.Event(), threading.Event()
    receive = probe(endpoint).driver.channel.connection.receive

    def frozen() -> Any:
        stopped.set()
        go_on.wait(60)
        return receive()

    probe(endpoint).driver.channel.connection.receive = frozen  # type: ignore[method-assign]
    probe(endpoint).driver.wake()
    assert stopped.wait(WAIT_S)
    return go_on


def hold_as_it_prepares(engine: PrefillEngine) -> tuple[threading.Event, threading.Event]:
    """Has rank 0 stop as it prepares for a decode rank; returns what is set then, and what lets it go on."""
    prepares, goes_on = threading.Event(), threading.Event()

    def prepare(_: Any) -> None:
        prepares.set()
        goes_on.wait(2 * WAIT_S)

    engine.transports[0].on_prepare = prepare
    return prepares, goes_on


# ---- finding ----------------------------------------------------------------------------------------------------


def test_the_decode_side_may_start_before_the_prefill_engine(engines: Callable[..., Engines]):
    both, model, name = engines(), Model(), new_engine_name("late")
    decode = both.decode(model)
    receiver = decode.endpoints[0].open(1, np.arange(4), engine=name)
    prefill = both.prefill(model, Shape(tp=2), name=name, ranks=[1])
    assert receiver.state is TransferState.BOOTSTRAPPING, "one of its two ranks is not there"
    missing = both.prefill(model, Shape(tp=2), name=name, ranks=[0])
    for endpoint in (*prefill.endpoints, *missing.endpoints):
        endpoint.open(1).submit(np.arange(4), last=True)
    receiver.wait(WAIT_S)


def test_connecting_ahead_makes_the_first_room_wait_for_nothing(pair: Callable[..., Requests]):
    requests = pair(Model(), Shape(tp=2), Shape(tp=2))
    requests.connect()
    requests.connect()
    assert all(probe(transport).connected for transport in requests.prefill.transports)
    requests.run(1)


def test_who_begins_to_connect_hears_when_it_is_done_and_why_it_failed(engines: Callable[..., Engines]):
    both, name = engines(bootstrap_timeout_s=0.4), new_engine_name("prefill")
    decode = both.decode(Model()).endpoints[0]
    missing = decode.connecting(name)
    assert not missing.done()
    with pytest.raises(PeerDisconnectedError, match=f"knows 0 of an unknown number of ranks of engine '{name}'"):
        missing.result(WAIT_S)
    both.prefill(Model(), name=name)
    decode.connecting(name).result(WAIT_S)
    decode.connecting(name).result(WAIT_S)
    assert not probe(decode).links.are_awaited
    decode.close()
    with pytest.raises(EndpointClosedError):
        decode.connecting(name)


def test_who_begins_to_connect_hears_in_time_whoever_else_names_the_engine(engines: Callable[..., Engines]):
    both, name = engines(bootstrap_timeout_s=0.4), new_engine_name("prefill")
    decode = both.decode(Model()).endpoints[0]
    missing = decode.connecting(name)
    for room in range(50):
        decode.refuse(room, "its client has gone", engine=name)
        time.sleep(0.1)
        if missing.done():
            break
    assert isinstance(missing.exception(0), PeerDisconnectedError)
    assert not probe(decode).links.are_awaited


def test_an_engine_that_has_ended_is_not_waited_for_and_its_registry_hears_of_it(
    engines: Callable[..., Engines], monkeypatch: pytest.MonkeyPatch
):
    both, name = engines(), new_engine_name("prefill")
    prefill, decode = both.prefill(Model(), name=name).endpoints[0], both.decode(Model()).endpoints[0]
    decode.connecting(name).result(WAIT_S)
    registry, lost = probe(decode).registry, list[str]()
    monkeypatch.setattr(registry, "lost", lost.append)
    prefill.close()
    eventually("its registry hears of it", lambda: lost == [name])

    def ended(engine: str) -> NoReturn:
        raise EngineEndedError(f"{engine} has ended")

    monkeypatch.setattr(registry, "engine", ended)
    with pytest.raises(TransferFailedError, match=f"{name} has ended"):
        decode.open(1, [0], engine=name).wait(WAIT_S)


def test_engines_that_are_not_there_hold_nobody_up(pair: Callable[..., Requests]):
    requests = pair()
    decode = requests.decode.endpoints[0]
    missing = [decode.open(100 + n, [n], engine=new_engine_name("missing")) for n in range(8)]
    request = requests.new(1)
    requests.open_decode(request)
    requests.open_prefill(request)
    requests.submit(request)
    request.wait()
    assert all(each.state is TransferState.BOOTSTRAPPING for each in missing)


def test_an_engine_that_never_comes_fails_its_rooms_by_the_bootstrap_deadline(engines: Callable[..., Engines]):
    both = engines(bootstrap_timeout_s=0.4)
    name = new_engine_name("missing")
    decode = both.decode(Model()).endpoints[0]
    receiver = decode.open(1, [0], engine=name)
    with pytest.raises(TransferFailedError, match=f"knows 0 of an unknown number of ranks of engine '{name}'"):
        receiver.wait(WAIT_S)
    assert isinstance(receiver.error.__cause__ if receiver.error else None, PeerDisconnectedError)
    assert both.settings().registry_address in str(receiver.error)
    assert receiver.pages_reusable
    assert decode.open_rooms == 0


def test_an_engine_of_which_a_rank_is_missing_is_told_apart(engines: Callable[..., Engines]):
    both = engines(bootstrap_timeout_s=0.4)
    prefill = both.prefill(Model(), Shape(tp=2), ranks=[0])
    receiver = both.decode(Model()).endpoints[0].open(1, [0], engine=prefill.name)
    with pytest.raises(TransferFailedError, match=f"knows 1 of 2 ranks of engine '{prefill.name}'"):
        receiver.wait(WAIT_S)


def test_a_data_parallel_group_of_which_a_rank_is_missing_holds_up_no_other_group(engines: Callable[..., Engines]):
    both, model, shape = engines(bootstrap_timeout_s=1.5), Model(), Shape(tp=2, dp=3)
    prefill = both.prefill(model, shape, ranks=[0, 2, 3])  # all of group 1, a rank of group 0, none of group 2
    decode = both.decode(model)
    Requests(prefill, decode, prefill_dp_rank=1).run(1)
    for dp_rank, known in ((0, 1), (2, 0)):
        says = f"knows {known} of 2 ranks of data-parallel group {dp_rank} of engine '{prefill.name}'"
        with pytest.raises(PeerDisconnectedError, match=says):
            decode.endpoints[0].connect(prefill.name, prefill_dp_rank=dp_rank, timeout_s=WAIT_S)


def test_a_data_parallel_group_that_cannot_be_is_refused_before_all_ranks_are_there(engines: Callable[..., Engines]):
    both = engines()
    prefill = both.prefill(Model(), Shape(dp=2), ranks=[1])
    with pytest.raises(IncompatiblePeerError, match="has no dp_rank 2: its dp_size is 2"):
        both.decode(Model()).endpoints[0].connect(prefill.name, prefill_dp_rank=2, timeout_s=WAIT_S)


def test_a_link_for_which_there_are_not_enough_descriptors_fails_and_the_next_is_made(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch
):
    requests = pair(Model(), Shape(tp=2))
    get, asked = zmq.Socket.get_monitor_socket, []

    def lacks_one(self: Any, *arguments: Any) -> Any:
        asked.append(self)
        if len(asked) == 2:
            raise zmq.ZMQError(errno.EMFILE)
        return get(self, *arguments)

    monkeypatch.setattr(zmq.Socket, "get_monitor_socket", lacks_one)
    with pytest.raises(PeerDisconnectedError, match=r"Too many open files.*ulimit -n"):
        requests.connect()
    links = probe(requests.decode.endpoints[0]).links
    eventually("nothing is left of it", lambda: not (links.current or links.retired or links.connections.lines))
    assert asked[1].closed
    requests.run(1)
    assert requests.decode.endpoints[0].health[0].failures == 0


@pytest.fixture
def free_port() -> int:
    (port,) = free_ports(1)
    return port


def test_a_registry_that_is_down_is_named(engines: Callable[..., Engines], free_port: int):
    url = f"http://127.0.0.1:{free_port}"
    decode = engines(bootstrap_timeout_s=0.4, registry_url=url).decode(Model()).endpoints[0]
    receiver = decode.open(1, [0])
    with pytest.raises(TransferFailedError, match=url) as caught:
        receiver.wait(WAIT_S)
    assert isinstance(caught.value.__cause__, RegistryUnreachableError)
    with pytest.raises(RegistryUnreachableError, match=url):
        decode.connect(timeout_s=WAIT_S)
    with pytest.raises(TransferTimeoutError, match=r"'prefill' was not connected within 0.05 s"):
        decode.connect(timeout_s=0.05)


def test_an_engine_that_is_found_and_does_not_answer_is_not_said_to_be_missing(
    engines: Callable[..., Engines], monkeypatch: pytest.MonkeyPatch
):
    both, name = engines(), new_engine_name("late")
    decode = both.decode(Model()).endpoints[0]
    with pytest.raises(TransferTimeoutError, match="nobody of that name is there"):
        decode.connect(name, timeout_s=0.5)
    with monkeypatch.context() as silent:
        silent.setattr(Answers, "receive", lambda *_: None)
        both.prefill(Model(), name=name)
        eventually("it is found", lambda: decode.status().peers[0].state == "asking the ranks what they hold")
        with pytest.raises(TransferTimeoutError, match="was not connected within") as caught:
            decode.connect(name, timeout_s=0.05)
    assert "nobody of that name is there" not in str(caught.value)
    decode.connect(name, timeout_s=WAIT_S)


def test_whoever_waits_in_vain_leaves_nothing_behind(engines: Callable[..., Engines]):
    decode = engines().decode(Model()).endpoints[0]
    for _ in range(10):
        with pytest.raises(TransferTimeoutError, match="'nowhere' was not connected"):
            decode.connect("nowhere", timeout_s=0.01)
    links = probe(decode).links
    assert not links.are_awaited
    assert len(links.current) == 1, "the link is still looked for"


def test_a_prefill_rank_says_that_its_registry_is_down_and_joins_when_it_is_up(
    engines: Callable[..., Engines], free_port: int, caplog: pytest.LogCaptureFixture
):
    url = f"http://127.0.0.1:{free_port}"
    both = engines(registry_url=url)
    made = pool(Model(), Shape(), Shape().coordinates()[0])
    from kvferry import PrefillEndpoint

    with (
        caplog.at_level(logging.ERROR),
        PrefillEndpoint(made.layout, settings=both.settings(), transport=InProcessTransport(both.network)) as endpoint,
    ):
        assert not endpoint.wait_registered(0.1)
        eventually("the problem is known", lambda: endpoint.registry_error is not None)
        assert isinstance(endpoint.registry_error, RegistryUnreachableError)
        assert url in str(endpoint.registry_error)
        assert any("prefill rank 0 of 'prefill' is not registered" in text for text in caplog.messages)
        with RegistryServer(port=free_port):
            assert endpoint.wait_registered(WAIT_S)
            assert endpoint.registry_error is None


# ---- refusing ---------------------------------------------------------------------------------------------------

BASE = Model(layers=4, heads=4, head_dim=8, page_tokens=4, dtype="int32")


@pytest.mark.parametrize(
    ("theirs", "values"),
    [
        (Model(layers=6), ["layer 4", "layer 6"]),
        (Model(heads=8), ["head 4", "head 8"]),
        (Model(head_dim=16), ["dim 8", "dim 16"]),
        (Model(dtype="int16"), ["int32", "int16"]),
        (Model(latent_dim=16), ["'k', 'v'", "'latent'"]),
    ],
    ids=["layers", "heads", "head dim", "dtype", "components"],
)
def test_caches_that_differ_are_refused_when_the_sides_connect(
    engines: Callable[..., Engines], theirs: Model, values: list[str]
):
    both = engines()
    prefill, decode = both.prefill(BASE, Shape(tp=2)), both.decode(theirs).endpoints[0]
    with pytest.raises(IncompatiblePeerError) as caught:
        decode.connect(prefill.name)
    receiver = decode.open(1, [0], engine=prefill.name)
    with pytest.raises(TransferFailedError) as failed:
        receiver.wait(WAIT_S)
    assert isinstance(failed.value.__cause__, IncompatiblePeerError)
    for value in (*values, f"of '{prefill.name}'", "this decode rank"):
        assert value in str(caught.value)
        assert value in str(failed.value)
    assert receiver.pages_reusable


def test_transports_that_differ_are_refused(pair: Callable[..., Requests]):
    requests = pair()
    answers = probe(requests.prefill.endpoints[0]).driver.answers
    answers.welcome = msgspec.structs.replace(answers.welcome, transport="carrier pigeon")
    with pytest.raises(IncompatiblePeerError, match="uses carrier pigeon, this decode rank inprocess"):
        requests.connect()


def test_a_prefill_rank_checks_for_itself(pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch):
    requests = pair()

    def refuse(*_: Any, **__: Any) -> None:
        raise IncompatiblePeerError("the prefill side does not like it")

    monkeypatch.setattr("kvferry.endpoint.prefill.attachment.check_exchangeable", refuse)
    with pytest.raises(IncompatiblePeerError, match=r"prefill rank 0 .* refused: the prefill side does not like it"):
        requests.connect()
    monkeypatch.undo()
    requests.run(1)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_peer_whose_layout_holds_other_tokens_than_its_place_is_refused(pair: Callable[..., Requests], side: str):
    requests = pair()
    other = TokenShare(interleaved(2), 1)
    if side == "prefill":
        answers = probe(requests.prefill.endpoints[0]).driver.answers
        layout = msgspec.structs.replace(answers.welcome.layout, tokens=other)
        answers.welcome = msgspec.structs.replace(answers.welcome, layout=layout)
    else:
        identity = probe(requests.decode.endpoints[0]).context.identity
        object.__setattr__(identity, "layout", msgspec.structs.replace(identity.layout, tokens=other))
    with pytest.raises(LayoutError, match="part 1 of 2 parts of every request's tokens, but the rank has cp_rank 0 of"):
        requests.connect()


def test_memory_that_was_never_registered_is_refused(pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch):
    requests = pair()
    transport = requests.decode.transports[0]
    without = msgspec.structs.replace(PeerMetadata.decode(transport.metadata()), regions=())
    monkeypatch.setattr(transport, "metadata", without.encode)
    with pytest.raises(Exception, match="outside the memory") as caught:
        requests.connect()
    assert type(caught.value).__name__ == "RegistrationError"


def test_a_data_parallel_group_that_does_not_exist_is_refused(pair: Callable[..., Requests]):
    requests = pair(Model(), Shape(dp=2), Shape())
    with pytest.raises(IncompatiblePeerError, match="has no dp_rank 2: its dp_size is 2"):
        requests.decode.endpoints[0].connect(requests.prefill.name, prefill_dp_rank=2)


def foreign_registration(address: str, **changed: Any) -> RankRegistration:
    """What no endpoint of ours would register."""
    usual = {
        "engine": new_engine_name("foreign"),
        "incarnation": "x",
        "coordinates": Shape().coordinates()[0],
        "control_address": address,
        "layout_digest": "x",
        "started_at": 0.0,
        "protocol_version": PROTOCOL_VERSION,
    }
    return RankRegistration(**{**usual, **changed})


@contextmanager
def foreign_engine(url: str, address: str = "tcp://127.0.0.1:1", **changed: Any) -> Iterator[str]:
    """An engine of one such rank, by name."""
    registration = foreign_registration(address, **changed)
    with RegistryClient(url) as registry:
        registry.register(registration)
        yield registration.engine
        registry.remove(registration.engine, 0, "x")


def test_another_protocol_version_is_refused_before_anything_is_sent(
    engines: Callable[..., Engines], registry_url: str
):
    both = engines()
    with (
        foreign_engine(registry_url, protocol_version=99) as name,
        pytest.raises(
            VersionError,
            match=f"speaks protocol version 99, this side protocol version {PROTOCOL_VERSION}: upgrade",
        ),
    ):
        both.decode(Model()).endpoints[0].connect(name)


def test_an_address_that_makes_no_sense_fails_the_link(engines: Callable[..., Engines], registry_url: str):
    both = engines()
    with (
        foreign_engine(registry_url, "no://address") as name,
        pytest.raises(PeerDisconnectedError, match="cannot connect to 'no://address'"),
    ):
        both.decode(Model()).endpoints[0].connect(name)


def test_another_rank_behind_the_registered_address_is_refused(pair: Callable[..., Requests], registry_url: str):
    requests = pair()
    with (
        foreign_engine(registry_url, requests.prefill.endpoints[0].control_address) as name,
        pytest.raises(
            PeerError, match=f"the registry named rank 0 of '{name}', but rank 0 of '{requests.prefill.name}' answered"
        ),
    ):
        requests.decode.endpoints[0].connect(name)
    requests.run(1)


def test_an_engine_whose_name_cannot_be_is_refused_at_once(pair: Callable[..., Requests]):
    decode = pair().decode.endpoints[0]
    with pytest.raises(SettingsError, match="'no such/engine' cannot be an engine's name"):
        decode.open(1, [0], engine="no such/engine")
    with pytest.raises(SettingsError, match="cannot be an engine's name"):
        decode.connect("")
    with pytest.raises(SettingsError, match="cannot be an engine's name"):
        DecodeEndpoint(decode.layout, engine="n" * 300, transport=InProcessTransport(probe(decode.transport).network))  # type: ignore[call-overload]


# ---- losing and finding again -----------------------------------------------------------------------------------


def test_a_slow_rank_does_not_cost_the_others_their_connection(engines: Callable[..., Engines]):
    both = engines(**QUICK)
    prefill, decode = both.prefill(Model(), Shape(tp=2)), both.decode(Model())
    slow = threading.Event()
    prefill.transports[1].on_prepare = lambda _: waited(slow, 1.2)
    requests = Requests(prefill, decode)
    requests.connect()
    for room in range(5):
        requests.run(room)
    assert len(probe(decode.endpoints[0]).links.current) == 1


def test_a_silent_prefill_rank_fails_its_rooms_and_is_named(engines: Callable[..., Engines]):
    both = engines(**QUICK)
    requests = Requests(both.prefill(Model(), Shape(tp=2)), both.decode(Model()))
    requests.run(1)
    request = requests.new(2)
    requests.open_decode(request)
    requests.open_prefill(request)
    go_on = freeze(requests.prefill, 1)
    with pytest.raises(TransferFailedError, match=f"prefill rank 1 of '{requests.prefill.name}' has been silent"):
        request.receivers[0].wait(WAIT_S)
    assert isinstance(request.receivers[0].error.__cause__ if request.receivers[0].error else None, Exception)
    assert not request.receivers[0].pages_reusable, "the silent rank may still write"
    go_on.set()
    assert request.receivers[0].wait_pages_reusable(WAIT_S)
    request.wait_ended()
    requests.run(2)


def test_a_silent_decode_rank_fails_its_rooms_and_no_others(engines: Callable[..., Engines]):
    both = engines(**QUICK)
    prefill = both.prefill(Model(), Shape(tp=2))
    dying, living = (Requests(prefill, both.decode(Model())) for _ in range(2))
    request, other = dying.new(1), living.new(2)
    for requests, each in ((dying, request), (living, other)):
        requests.connect()
        requests.open_decode(each)
        requests.open_prefill(each)
    eventually("both are open", lambda: request.senders[0].state is other.senders[0].state is not None)
    driver = probe(dying.decode.endpoints[0]).driver
    stop, turn = threading.Event(), driver.turn
    driver.turn = lambda **named: stop.wait(60) and turn(**named)  # type: ignore[method-assign]
    for sender in request.senders:
        with pytest.raises(TransferFailedError, match="is gone: PeerDisconnectedError: silent for"):
            sender.wait(WAIT_S)
        assert sender.pages_reusable
    living.submit(other)
    other.wait()
    driver.turn = turn  # type: ignore[method-assign]
    stop.set()
    with pytest.raises(TransferFailedError, match="does not know this endpoint any more"):
        request.receivers[0].wait(WAIT_S)
    assert request.receivers[0].wait_pages_reusable(WAIT_S)
    dying.run(3)


def test_a_survivor_serves_on_after_its_neighbour_was_replaced(engines: Callable[..., Engines]):
    """Pages of a lost rank's rooms stay in quarantine; that must not disturb the connection to the survivor."""
    both = engines(**QUICK)
    model, name = Model(), new_engine_name("restarted")
    survivor = both.prefill(model, Shape(tp=2), name=name, ranks=[0])
    lost = both.prefill(model, Shape(tp=2), name=name, ranks=[1])
    decode = both.decode(model)
    whole = PrefillEngine(
        name,
        survivor.model,
        survivor.pools + lost.pools,
        survivor.endpoints + lost.endpoints,
        survivor.transports + lost.transports,
    )
    requests = Requests(whole, decode)
    requests.run(1)
    request = requests.new(2)
    requests.open_decode(request)
    requests.open_prefill(request)
    eventually("the room is open", lambda: request.senders[1].state is TransferState.WAITING_FOR_INPUT)
    go_on = freeze(lost, 0)  # never to speak again
    try:
        with pytest.raises(TransferFailedError, match="rank 1"):
            request.receivers[0].wait(WAIT_S)
        replaced = both.prefill(model, Shape(tp=2), name=name, ranks=[1])
        again = Requests(
            PrefillEngine(
                name,
                survivor.model,
                survivor.pools + replaced.pools,
                survivor.endpoints + replaced.endpoints,
                survivor.transports + replaced.transports,
            ),
            decode,
        )
        again.run(3)
        link = next(iter(probe(decode.endpoints[0]).links.current))
        until = time.monotonic() + 3.0  # longer than a peer may be silent
        room = 4
        while time.monotonic() < until:
            again.run(room)
            room += 1
        assert next(iter(probe(decode.endpoints[0]).links.current)) is link, "the connection never broke"
        assert not request.receivers[0].pages_reusable
        assert decode.endpoints[0].open_rooms == 1
    finally:
        go_on.set()
    assert request.receivers[0].wait_pages_reusable(WAIT_S)
    eventually("no link is left over", lambda: not probe(decode.endpoints[0]).links.retired)
    again.run(2)


@pytest.mark.parametrize("is_word_lost", [False, True])
def test_a_decode_rank_that_was_given_up_hears_of_it_at_once_or_else_with_the_first_room_that_it_opens(
    engines: Callable[..., Engines], is_word_lost: bool
):
    both = engines(heartbeat_interval_s=3_600.0, peer_timeout_s=7_200.0)
    requests = Requests(both.prefill(Model()), both.decode(Model()))
    requests.run(1)
    (prefill,), (decode,) = requests.prefill.endpoints, requests.decode.endpoints
    (peer,) = probe(prefill).peers
    assert peer.attachment is not None
    broken = PeerDisconnectedError("the test wants it so")
    if is_word_lost:
        probe(prefill).ranks.give_up(peer.name, broken)  # which tells nobody
        lost = requests.new(2)
        requests.open_decode(lost)
        with pytest.raises(TransferFailedError, match="any more: it was given up: the test wants it so"):
            lost.receivers[0].wait(WAIT_S)
    else:
        probe(prefill).driver.write_failed(peer.attachment, broken)
        eventually("the decode rank has heard of it", lambda: not decode.status().peers)
    requests.run(3)  # connected anew, long before a heartbeat


@pytest.mark.parametrize(
    ("how", "comes_late", "why"),
    [
        ("aborts it and is lost", True, ".*: the client left"),
        ("is lost and lives", False, ".* does not know this endpoint any more"),
        ("is lost and lives", True, ".* does not know this endpoint any more"),
        ("connects anew", True, "it connects anew, and has given up what it had opened"),
    ],
)
def test_a_room_that_a_decode_rank_opened_early_and_has_given_up_ends_on_the_prefill_side(
    engines: Callable[..., Engines], monkeypatch: pytest.MonkeyPatch, how: str, comes_late: bool, why: str
):
    """As soon as that is known, and not by its deadline: its pages are needed."""
    both = engines(heartbeat_interval_s=0.1)
    requests = Requests(both.prefill(Model()), both.decode(Model()))
    (prefill,), driver = requests.prefill.endpoints, probe(requests.decode.endpoints[0]).driver
    early, error = requests.new(2), PeerDisconnectedError("the test wants it so")
    requests.open_decode(early)
    eventually("it waits for the prefill side", lambda: len(probe(prefill).pending))
    if how == "aborts it and is lost":
        early.receivers[0].abort("the client left")
        assert early.receivers[0].wait_pages_reusable(WAIT_S)
    if how == "connects anew":  # its queues were full: it could take nothing back
        monkeypatch.setattr(probe(prefill).rooms, "take_abort", lambda receiver, message, is_unopened: None)
        (link,) = driver.rooms.links.current
        driver.context.submit(lambda now: driver.rooms.links.fail(link, error, now))
        eventually("it was given up", lambda: not driver.rooms.links.current)
        requests.connect()
        eventually("it has given it up", lambda: not len(probe(prefill).pending))
    else:
        (peer,) = probe(prefill).peers
        assert peer.attachment is not None
        probe(prefill).driver.write_failed(peer.attachment, error)
        eventually("it was given up", lambda: peer not in probe(prefill).peers)
    if not comes_late:
        requests.open_prefill(early)
    with pytest.raises((TransferAbortedError, TransferFailedError)):
        early.receivers[0].wait(WAIT_S)
    if comes_late:
        requests.open_prefill(early)
    with pytest.raises(TransferFailedError, match=rf"decode rank 0 of .* refused it: {why}"):
        early.senders[0].wait(WAIT_S)


def test_a_room_that_both_sides_have_open_ends_when_its_decode_rank_connects_anew_and_takes_nothing_back(
    pair: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch
):
    """Its aborts may all be lost, and it repeats them only for a while."""
    requests = pair()
    (prefill,), links = requests.prefill.endpoints, probe(requests.decode.endpoints[0]).links
    monkeypatch.setattr(probe(prefill).rooms, "take_abort", lambda *_, **__: None)
    request, error = requests.new(1), PeerDisconnectedError("the test wants it so")
    requests.open_decode(request)
    requests.open_prefill(request)
    eventually("both have it open", lambda: request.senders[0].state is TransferState.WAITING_FOR_INPUT)
    (link,) = links.current
    links.context.submit(lambda now: links.fail(link, error, now))
    with pytest.raises(TransferFailedError, match="the test wants it so"):
        request.receivers[0].wait(WAIT_S)
    requests.connect()
    with pytest.raises(TransferFailedError, match="it connects anew, and has given up what it had opened"):
        request.senders[0].wait(WAIT_S)


def test_a_connection_is_not_undone_while_a_write_uses_it(engines: Callable[..., Engines]):
    both = engines(**QUICK)
    requests = Requests(both.prefill(Model()), both.decode(Model()))
    transport = requests.prefill.transports[0]
    requests.connect()
    request = requests.begin_held()
    driver = probe(requests.decode.endpoints[0]).driver
    stop, turn = threading.Event(), driver.turn
    driver.turn = lambda **named: stop.wait(60) and turn(**named)  # type: ignore[method-assign]
    with pytest.raises(TransferFailedError, match="silent for"):
        request.senders[0].wait(WAIT_S)
    driver.turn = turn  # type: ignore[method-assign]
    stop.set()
    with pytest.raises(TransferFailedError):
        request.receivers[0].wait(WAIT_S)
    second = requests.new(2)
    requests.open_decode(second)  # connects anew
    requests.open_prefill(second)
    requests.submit(second)
    threading.Event().wait(0.3)
    assert transport.misused == []
    assert transport.in_flight == 1
    assert not request.receivers[0].pages_reusable
    transport.held = False
    second.wait()
    requests.check(second)
    for transfer in (*request.senders, *request.receivers):
        assert transfer.wait_pages_reusable(WAIT_S)
    requests.run(3)
    assert transport.misused == []


def test_a_prefill_engine_that_closes_says_so(engines: Callable[..., Engines]):
    both = engines()
    name = new_engine_name("restarted")
    prefill, decode = both.prefill(Model(), Shape(tp=2), name=name), both.decode(Model())
    requests = Requests(prefill, decode)
    requests.connect()
    opened, pending = requests.new(1), requests.new(2)
    requests.open_decode(opened)
    requests.open_decode(pending)
    requests.open_prefill(opened)
    for endpoint in prefill.endpoints:
        eventually("the second room waits", lambda endpoint: len(probe(endpoint).pending) == 1, endpoint)
    for endpoint in prefill.endpoints:
        endpoint.close()
    for receiver in (*opened.receivers, *pending.receivers):
        with pytest.raises(TransferFailedError, match="closed"):
            receiver.wait(WAIT_S)
        assert receiver.wait_pages_reusable(WAIT_S), "a rank that closed writes no more"
    again = Requests(both.prefill(Model(), Shape(tp=2), name=name), decode)
    again.run(1)


def test_a_rank_that_closed_may_be_asked_for_a_room_in_the_same_moment(engines: Callable[..., Engines]):
    both = engines(**QUICK, bootstrap_timeout_s=0.5)
    requests = Requests(both.prefill(Model()), both.decode(Model()))
    requests.connect()
    endpoint = requests.prefill.endpoints[0]
    closing = threading.Thread(target=endpoint.close)
    closing.start()
    receivers = []
    for room in range(200):
        request = requests.new(room, 1)
        requests.open_decode(request)
        receivers += request.receivers
        if not closing.is_alive():
            break
    closing.join()
    for receiver in receivers:
        with pytest.raises(TransferFailedError):
            receiver.wait(WAIT_S)


def test_a_restarted_engine_is_found_although_the_registry_still_knew_the_old_one(engines: Callable[..., Engines]):
    both = engines(**QUICK)
    name = new_engine_name("restarted")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # takes connections from nobody
        address = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        with RegistryClient(both.settings().registry_address) as registry:
            registry.register(foreign_registration(address, engine=name))  # died without a word; its lease lives on
        decode = both.decode(Model())
        receiver = decode.endpoints[0].open(1, np.arange(3), engine=name)
        eventually(
            "it greets the dead rank",
            lambda: any(link.state.name == "GREETING" for link in probe(decode.endpoints[0]).links.current),
        )
        prefill = both.prefill(Model(), name=name)
        prefill.endpoints[0].open(1).submit(np.arange(3), last=True)
        receiver.wait(WAIT_S)


def test_a_rank_that_is_restarted_while_it_prepares_is_met_again(engines: Callable[..., Engines]):
    with ControlProxy() as proxy:  # as a rank that keeps its port
        both = engines(**QUICK, advertise_port=proxy.port)
        name = new_engine_name("restarted")
        first = both.prefill(Model(), name=name)
        prepares, goes_on = hold_as_it_prepares(first)
        proxy.target = probe(first.endpoints[0]).port
        receiver = both.decode(Model()).endpoints[0].open(1, np.arange(3), engine=name)
        assert prepares.wait(WAIT_S)
        second = both.prefill(Model(), name=name)
        proxy.target = probe(second.endpoints[0]).port
        proxy.cut()
        proxy.heal()
        second.endpoints[0].open(1).submit(np.arange(3), last=True)
        try:
            receiver.wait(WAIT_S)
        finally:
            goes_on.set()


def test_a_room_goes_on_whose_prefill_rank_is_renewed_while_it_prepares_for_it(engines: Callable[..., Engines]):
    both = engines(heartbeat_interval_s=3_600.0, peer_timeout_s=7_200.0)
    prefill, decode = both.prefill(Model()), both.decode(Model())
    prepares, goes_on = hold_as_it_prepares(prefill)
    receiver = decode.endpoints[0].open(1, np.arange(3), engine=prefill.name)
    assert prepares.wait(WAIT_S)
    prefill.endpoints[0].renew(prefill.endpoints[0].fingerprint, "its weights were replaced")
    goes_on.set()
    prefill.endpoints[0].open(1).submit(np.arange(3), last=True)
    receiver.wait(WAIT_S)


def test_a_rank_that_is_given_up_while_it_attaches_need_not_hear_of_it_to_begin_anew(engines: Callable[..., Engines]):
    with ControlProxy() as proxy:
        both = engines(**QUICK, advertise_port=proxy.port)
        prefill, decode = both.prefill(Model()), both.decode(Model())
        prepares, goes_on = hold_as_it_prepares(prefill)
        proxy.target = probe(prefill.endpoints[0]).port
        receiver = decode.endpoints[0].open(1, np.arange(3), engine=prefill.name)
        assert prepares.wait(WAIT_S)
        proxy.cut()
        prefill.endpoints[0].renew(prefill.endpoints[0].fingerprint, "its weights were replaced")
        eventually(
            "it is given up", lambda: all(each.state == "detaching" for each in prefill.endpoints[0].status().peers)
        )
        proxy.heal()
        goes_on.set()
        prefill.endpoints[0].open(1).submit(np.arange(3), last=True)
        receiver.wait(WAIT_S)


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_start_that_is_newer_than_its_link_is_looked_up_and_serves(engines: Callable[..., Engines], is_ready: bool):
    """The one that the decode rank knows does not answer any more, and nobody has given it up."""
    both, name = engines(peer_timeout_s=10 * WAIT_S), new_engine_name("restarted")
    first, decode = both.prefill(Model(), name=name, instance="first"), both.decode(Model()).endpoints[0]
    if is_ready:
        decode.connect(name, timeout_s=WAIT_S)
        go_on = freeze(first, 0)
    else:
        prepares, go_on = hold_as_it_prepares(first)
    lost = decode.open(1, np.arange(3), engine=name, instance="first")
    if not is_ready:
        assert prepares.wait(WAIT_S)
    second = both.prefill(Model(), name=name, instance="second").endpoints[0]
    receiver = decode.open(2, np.arange(3), engine=name, instance="second")
    second.open(2).submit(np.arange(3), last=True)
    receiver.wait(WAIT_S)
    go_on.set()
    gone = "was started anew: registered is second" if is_ready else r"\(first\) has gone: registered is second"
    with pytest.raises(TransferFailedError, match=gone):
        lost.wait(WAIT_S)


def test_a_start_that_registers_while_the_one_before_is_looked_up_serves(
    engines: Callable[..., Engines], monkeypatch: pytest.MonkeyPatch
):
    both, name = engines(), new_engine_name("restarted")
    first, decode = both.prefill(Model(), name=name, instance="first"), both.decode(Model()).endpoints[0]
    is_asked, goes_on, right = threading.Event(), threading.Event(), RegistryClient.engine

    def engine(client: RegistryClient, engine_name: str) -> Any:
        view = right(client, engine_name)
        is_asked.set()
        goes_on.wait(WAIT_S)
        return view

    monkeypatch.setattr(RegistryClient, "engine", engine)
    lost = decode.open(1, np.arange(3), engine=name, instance="first")
    assert is_asked.wait(WAIT_S)
    go_on = freeze(first, 0)
    second = both.prefill(Model(), name=name, instance="second").endpoints[0]
    receiver = decode.open(2, np.arange(3), engine=name, instance="second")
    goes_on.set()
    second.open(2).submit(np.arange(3), last=True)
    receiver.wait(WAIT_S)
    go_on.set()
    with pytest.raises(TransferFailedError, match=r"\(first\) has gone: registered is second"):
        lost.wait(WAIT_S)


def test_a_room_whose_start_has_gone_is_not_opened_at_another_while_that_is_looked_up(
    engines: Callable[..., Engines], monkeypatch: pytest.MonkeyPatch
):
    both, name = engines(), new_engine_name("restarted")
    both.prefill(Model(), name=name, instance="second")
    decode, look_ups, right = both.decode(Model()).endpoints[0], itertools.count(), RegistryClient.engine

    def engine(client: RegistryClient, engine_name: str) -> Any:
        if next(look_ups):
            links = probe(decode).links
            eventually("the link is ready", lambda: [link.state.name for link in links.current] == ["READY"])
        return right(client, engine_name)

    monkeypatch.setattr(RegistryClient, "engine", engine)
    receiver = decode.open(1, np.arange(3), engine=name, instance="first")
    with pytest.raises(TransferFailedError, match=r"\(first\) has gone: registered is second"):
        receiver.wait(WAIT_S)
    assert next(look_ups) > 1


def test_many_rooms_of_a_start_that_has_gone_cost_few_look_ups(
    engines: Callable[..., Engines], monkeypatch: pytest.MonkeyPatch
):
    both, name = engines(), new_engine_name("restarted")
    both.prefill(Model(), name=name, instance="second")
    decode = both.decode(Model()).endpoints[0]
    decode.connect(name, timeout_s=WAIT_S)
    look_ups, all_open, right = list[str](), threading.Event(), RegistryClient.engine

    def engine(client: RegistryClient, engine_name: str) -> Any:
        look_ups.append(engine_name)
        all_open.wait(WAIT_S)
        return right(client, engine_name)

    monkeypatch.setattr(RegistryClient, "engine", engine)
    rooms = [decode.open(number, np.arange(3), engine=name, instance="first") for number in range(100)]
    all_open.set()
    for room in rooms:
        with pytest.raises(TransferFailedError, match=r"\(first\) has gone: registered is second"):
            room.wait(WAIT_S)
    assert len(look_ups) < 10


def test_a_room_that_ends_while_its_start_is_looked_up_is_refused_there(engines: Callable[..., Engines]):
    both, name = engines(), new_engine_name("restarted")
    first, decode = both.prefill(Model(), name=name, instance="first"), both.decode(Model()).endpoints[0]
    decode.connect(name, timeout_s=WAIT_S)
    go_on = freeze(first, 0)
    second = both.prefill(Model(), name=name, instance="second").endpoints[0]
    sender = second.open(1)
    decode.open(1, np.arange(3), engine=name, instance="second").abort("the client left")
    with pytest.raises(TransferFailedError, match="the client left"):
        sender.wait(WAIT_S)
    go_on.set()


def test_a_rank_that_is_silent_while_it_prepares_is_waited_for(engines: Callable[..., Engines]):
    with ControlProxy() as proxy:
        both = engines(heartbeat_interval_s=0.05, peer_timeout_s=0.3, advertise_port=proxy.port)
        prefill, decode = both.prefill(Model()), both.decode(Model())
        prepares, goes_on = hold_as_it_prepares(prefill)
        proxy.target = probe(prefill.endpoints[0]).port
        receiver = decode.endpoints[0].open(1, np.arange(3), engine=prefill.name)
        assert prepares.wait(WAIT_S)
        proxy.hold()
        eventually(
            "it is asked anew what it holds",
            lambda: [link.state.name for link in probe(decode.endpoints[0]).links.current] == ["GREETING"],
        )
        proxy.heal()
        goes_on.set()
        prefill.endpoints[0].open(1).submit(np.arange(3), last=True)
        receiver.wait(WAIT_S)
