"""Endpoints with a shared secret: friends exchange caches, and nobody else gets as far as the transport."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import zmq
from tests.support.caches import Model
from tests.support.engines import WAIT_S, Engines, Requests
from tests.support.waiting import eventually

from kvferry.control.credentials import Credentials
from kvferry.control.registry_server import RegistryServer
from kvferry.errors import PeerDisconnectedError, PeerError, RegistryAccessError
from kvferry.layout import RankCoordinates
from kvferry.protocol.wire import codec, messages
from kvferry.testing.probe import probe

SECRET = "the secret of these tests"
OTHER = "another secret than that"
SHORT_S = 2.0


@pytest.fixture(scope="module")
def closed_registry() -> Iterator[str]:
    """Answers only to those who know the secret."""
    with RegistryServer(port=0, token=Credentials.derived_from(SECRET).registry_token) as registry:
        yield registry.url


class Connects:
    """Counts what reaches an engine's transports."""

    def __init__(self, requests: Requests) -> None:
        self.names: list[str] = []
        for transport in requests.prefill.transports:
            transport.connect = self._counting(transport.connect)  # type: ignore[assignment, method-assign]

    def _counting(self, connect: Callable[[bytes], str]) -> Callable[[bytes], str]:
        def counting(metadata: bytes) -> str:
            self.names.append(connect(metadata))
            return self.names[-1]

        return counting


def test_friends_exchange_caches(closed_registry: str):
    with Engines(closed_registry, secret=SECRET) as engines:
        requests = Requests(engines.prefill(Model()), engines.decode(Model()))
        for room in range(3):
            requests.run(room)


def test_a_decode_rank_with_another_secret_is_told_at_once_by_the_registry(closed_registry: str):
    with Engines(closed_registry, secret=SECRET) as engines:
        prefill = engines.prefill(Model())
        friends = Requests(prefill, engines.decode(Model()))
        friends.run(1)
        for wrong in ({"secret": OTHER}, {"secret": None}):
            strangers = Requests(prefill, engines.decode(Model(), bootstrap_timeout_s=3600, **wrong))
            connects = Connects(strangers)
            with pytest.raises(RegistryAccessError, match="KVFERRY_SECRET_FILE"):
                strangers.connect()
            request = strangers.new(2)
            strangers.open_decode(request)
            with pytest.raises(Exception, match="KVFERRY_SECRET_FILE"):
                request.receivers[0].wait(WAIT_S)
            assert request.receivers[0].pages_reusable
            assert connects.names == []
        friends.run(3)


def test_a_prefill_rank_with_another_secret_is_not_registered(closed_registry: str):
    with (
        Engines(closed_registry, secret=OTHER) as engines,
        pytest.raises(RegistryAccessError, match="KVFERRY_SECRET_FILE"),
    ):
        engines.prefill(Model())


def test_where_the_registry_lets_everyone_in_the_channel_does_not(registry_url: str):
    """A registry without a secret tells strangers where a rank is, and no more."""
    with Engines(registry_url, secret=SECRET, bootstrap_timeout_s=SHORT_S) as engines:
        prefill = engines.prefill(Model())
        for wrong, mine in (({"secret": OTHER}, "this side has a secret"), ({"secret": None}, "has no secret")):
            strangers = Requests(prefill, engines.decode(Model(), **wrong))
            connects = Connects(strangers)
            request = strangers.new(2)
            strangers.open_decode(request)
            with pytest.raises(Exception, match=mine) as caught:
                request.receivers[0].wait(SHORT_S + WAIT_S)
            assert "KVFERRY_SECRET_FILE" in str(caught.value)
            assert connects.names == []
            assert len(probe(prefill.endpoints[0]).ranks) == 0
        Requests(prefill, engines.decode(Model())).run(1)


def test_a_decode_rank_with_a_secret_gives_nothing_to_a_prefill_rank_without(registry_url: str):
    with Engines(registry_url, bootstrap_timeout_s=SHORT_S) as engines:
        prefill = engines.prefill(Model())
        requests = Requests(prefill, engines.decode(Model(), secret=SECRET))
        with pytest.raises(PeerDisconnectedError, match="both need the same"):
            requests.connect()
        assert len(probe(prefill.endpoints[0]).ranks) == 0


@contextmanager
def connected(address: str, name: str, credentials: Credentials | None = None) -> Iterator[zmq.Socket[bytes]]:
    """A socket such as anybody can make who has ZMQ."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as opened:
        opened.setsockopt(zmq.LINGER, 0)
        opened.setsockopt(zmq.IDENTITY, name.encode())
        if credentials is not None:
            opened.setsockopt(zmq.CURVE_SERVERKEY, credentials.listening.public)
            opened.setsockopt(zmq.CURVE_PUBLICKEY, credentials.connecting.public)
            opened.setsockopt(zmq.CURVE_SECRETKEY, credentials.connecting.secret)
        opened.connect(address)
        yield opened


def attach_of(requests: Requests, name: str) -> bytes:
    """What a decode rank would say, complete in everything."""
    memory, transport = requests.decode.pools[0], requests.decode.transports[0]
    return codec.encode(
        messages.Attach(
            endpoint=name,
            attempt=1,
            engine="decode",
            coordinates=RankCoordinates(),
            layout=memory.layout,
            pieces=(),
            transport="inprocess",
            transport_metadata=transport.metadata(),
        )
    )


@pytest.mark.parametrize("stranger", [None, Credentials.derived_from(OTHER)], ids=["none", "another"])
def test_an_attach_of_a_stranger_never_reaches_the_transport(closed_registry: str, stranger: Credentials | None):
    with Engines(closed_registry, secret=SECRET) as engines:
        requests = Requests(engines.prefill(Model()), engines.decode(Model()))
        endpoint, connects = requests.prefill.endpoints[0], Connects(requests)
        name = requests.decode.transports[0].endpoint_name
        with connected(endpoint.control_address, name, stranger) as socket:
            socket.send(attach_of(requests, name))
            with suppress(zmq.Again):  # once ZMQ has given the stranger up, its socket has nobody to send to
                socket.send(codec.encode(messages.Ping()), zmq.NOBLOCK)
            assert not socket.poll(1000), "not even an answer"
        assert connects.names == []
        assert len(probe(endpoint).ranks) == 0
        with connected(endpoint.control_address, name, Credentials.derived_from(SECRET)) as socket:
            socket.send(attach_of(requests, name))
            assert socket.poll(int(WAIT_S * 1000)), "the same from a friend is heard"
        assert len(probe(endpoint).ranks) == 1


def test_metadata_of_somebody_else_is_refused(registry_url: str):
    with Engines(registry_url) as engines:
        requests = Requests(engines.prefill(Model()), engines.decode(Model()))
        endpoint, connects = requests.prefill.endpoints[0], Connects(requests)
        with connected(endpoint.control_address, "somebody") as socket:
            socket.send(attach_of(requests, "somebody"))
            assert socket.poll(int(WAIT_S * 1000))
            answer = codec.decode_to_decode(socket.recv())
        assert isinstance(answer, messages.Refused)
        assert "sent the transport metadata of" in answer.reason
        assert connects.names == []


def test_only_so_many_decode_ranks_are_connected(registry_url: str):
    with Engines(registry_url, max_decode_ranks=2) as engines:
        prefill = engines.prefill(Model())
        decodes = [Requests(prefill, engines.decode(Model())) for _ in range(3)]
        decodes[0].connect()
        decodes[1].connect()
        with pytest.raises(PeerError, match="KVFERRY_MAX_DECODE_RANKS"):
            decodes[2].connect()
        decodes[0].run(1)
        decodes[1].decode.endpoints[0].close()
        eventually("there is room", lambda: len(probe(prefill.endpoints[0]).ranks) == 1)
        decodes[2].run(2)


def test_no_secret_in_any_log_or_error(caplog: pytest.LogCaptureFixture, closed_registry: str):
    caplog.set_level(logging.DEBUG)
    shown: list[Any] = []
    with Engines(closed_registry, secret=SECRET) as engines:
        requests = Requests(engines.prefill(Model()), engines.decode(Model()))
        requests.run(1)
        strangers = Requests(requests.prefill, engines.decode(Model(), secret=OTHER))
        with pytest.raises(RegistryAccessError) as caught:
            strangers.connect()
        shown += [caught.value, caught.getrepr(), requests.prefill.endpoints[0].settings]
        driver = probe(strangers.decode.endpoints[0]).driver
        shown += [requests.decode.endpoints[0].__dict__, driver.__dict__, driver.rooms.links.__dict__]
    text = caplog.text + "".join(map(repr, shown))
    for secret in (SECRET, OTHER):
        derived = Credentials.derived_from(secret)
        for value in (
            secret,
            derived.registry_token,
            derived.listening.secret.decode(),
            derived.connecting.public.decode(),
        ):
            assert value not in text
