"""Whatever comes to a port from whoever has no business there: nobody notices, and without the secret nobody learns."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from tests.fuzz.bystanders import Bystanders
from tests.fuzz.conftest import Alarms, Fuzz
from tests.fuzz.foreign import Connections, Foreign
from tests.fuzz.mutation import Corpus

from kvferry.control.credentials import Credentials
from kvferry.layout import RankCoordinates
from kvferry.protocol.wire import codec
from kvferry.protocol.wire.registrations import RankRegistration
from kvferry.protocol.wire.versions import PROTOCOL_VERSION

SECRET = "the secret of this test"
CREDENTIALS = Credentials.derived_from(SECRET)
OTHERS = Credentials.derived_from("another secret than that")
CHECK_EVERY_S = 5.0
STREAMS = 20
MESSAGES = 100
BODIES = [
    msgspec.json.encode(
        RankRegistration(
            engine="stranger",
            incarnation="stranger",
            coordinates=RankCoordinates(),
            control_address="tcp://127.0.0.1:1",
            layout_digest="digest",
            started_at=0.0,
            protocol_version=PROTOCOL_VERSION,
        )
    ),
    b'{"engine": "stranger"}',
    b"{}",
]


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus()


@pytest.fixture
def bystanders() -> Iterator[Bystanders]:
    with Bystanders() as made:
        yield made


@pytest.fixture
def closed_bystanders() -> Iterator[Bystanders]:
    with Bystanders(CREDENTIALS.registry_token, secret=SECRET) as made:
        yield made


def test_foreign_traffic_changes_nothing(fuzz: Fuzz, alarms: Alarms, corpus: Corpus, bystanders: Bystanders):
    connections = Connections([bystanders.control_port, bystanders.registry_port])
    checked_at = time.monotonic()
    try:
        for chance in fuzz.rounds():
            foreign = Foreign(chance, corpus.mutator(chance), BODIES)
            for _ in range(STREAMS):
                connections.say(chance, foreign.stream())
            fuzz.inputs += STREAMS
            assert not alarms.records, alarms.records[0]
            connections.take_heard()
            if time.monotonic() - checked_at > CHECK_EVERY_S:
                bystanders.check()
                checked_at = time.monotonic()
    finally:
        connections.close()
    bystanders.check()
    bystanders.finish()


class Strangers:
    """Peers that speak ZMQ well, and lack the secret."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets = []
        for number, keys in enumerate((None, OTHERS, OTHERS)):
            opened = self._context.socket(zmq.DEALER)
            opened.setsockopt(zmq.LINGER, 0)
            opened.setsockopt(zmq.SNDHWM, 1000)
            opened.setsockopt(zmq.RECONNECT_IVL, 10)
            opened.setsockopt(zmq.IDENTITY, f"stranger-{number}".encode())
            if keys is not None:
                # The last has learned the listening side's public key, and is refused for its own.
                server = OTHERS if number == 1 else CREDENTIALS
                opened.setsockopt(zmq.CURVE_SERVERKEY, server.listening.public)
                opened.setsockopt(zmq.CURVE_PUBLICKEY, keys.connecting.public)
                opened.setsockopt(zmq.CURVE_SECRETKEY, keys.connecting.secret)
            opened.connect(address)
            self._sockets.append(opened)

    def say(self, data: bytes) -> None:
        for each in self._sockets:
            try:
                each.send(data, zmq.NOBLOCK)
            except zmq.Again:  # nobody reads it: good
                continue

    def record_answer(self) -> bool:
        """Whether anybody ever answered."""
        return any(each.poll(0) for each in self._sockets)

    def close(self) -> None:
        self._context.destroy(linger=0)


def test_without_the_secret_nobody_learns_or_changes_anything(
    fuzz: Fuzz, alarms: Alarms, corpus: Corpus, closed_bystanders: Bystanders
):
    bystanders = closed_bystanders
    prefill, decode = bystanders.prefill, bystanders.decode
    private = [
        prefill.engine,
        prefill.transport.endpoint_name,
        decode.transport.endpoint_name,
        prefill.control_address,
        prefill.layout.digest,
        CREDENTIALS.registry_token,
        SECRET,
    ]
    connections = Connections([bystanders.control_port, bystanders.registry_port])
    strangers = Strangers(prefill.control_address)
    checked_at = time.monotonic()
    try:
        for chance in fuzz.rounds():
            mutator = corpus.mutator(chance)
            foreign = Foreign(chance, mutator, BODIES)
            for _ in range(STREAMS):
                connections.say(chance, foreign.stream())
            connections.say(chance, registering(BODIES[0], chance.choice((None, OTHERS.registry_token))))
            for message in (codec.encode(chance.choice(corpus.messages)), *_some(mutator.message, MESSAGES)):
                strangers.say(message)
            fuzz.inputs += STREAMS + 1 + 3 * (MESSAGES + 1)
            assert not strangers.record_answer(), "a stranger was answered"
            deduplication = connections.take_heard()
            assert not [each for each in private if each.encode() in deduplication]
            assert b"HTTP/1.1 2" not in deduplication, deduplication
            assert not alarms.records, alarms.records[0]
            if time.monotonic() - checked_at > CHECK_EVERY_S:
                bystanders.check()
                checked_at = time.monotonic()
    finally:
        connections.close()
        strangers.close()
    bystanders.check()
    assert bystanders.connects == [], "a stranger's metadata reached the transport"
    bystanders.finish()


def registering(body: bytes, token: str | None) -> bytes:
    """A registration that is right in everything but what it knows."""
    access = "" if token is None else f"Authorization: Bearer {token}\r\n"
    head = f"PUT /v1/engines/stranger/ranks/0 HTTP/1.1\r\nHost: x\r\n{access}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _some(make, count: int) -> list[bytes]:
    return [make() for _ in range(count)]
