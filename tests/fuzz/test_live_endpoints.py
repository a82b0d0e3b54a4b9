"""Messages and notifications that are nearly right, to endpoints at work, from peers that are and are not attached."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import numpy as np
import pytest
import zmq
from tests.fuzz.bystanders import Bystanders
from tests.fuzz.conftest import Alarms, Fuzz
from tests.fuzz.mutation import PROCESS, Corpus, Mutator, renumbered, tree_of
from tests.support.waiting import PATIENCE_S

from kvferry import InProcessTransport
from kvferry.errors import KVFerryError, MessageError
from kvferry.layout import Device, RankCoordinates, Region
from kvferry.protocol.wire import codec, field_types, messages
from kvferry.protocol.wire.registrations import RankRegistration
from kvferry.protocol.wire.versions import PROTOCOL_VERSION
from kvferry.testing.probe import probe

BURST = 200
WITHIN_S = PATIENCE_S
CHECK_EVERY_S = 5.0
HOSTILE = "hostile-"


class HostileDecodeRank:
    """Talks to the prefill rank; attached, as far as its own messages leave it so."""

    def __init__(self, bystanders: Bystanders, context: zmq.Context[zmq.Socket[bytes]], name: str) -> None:
        self.name = name
        self._attempts = itertools.count(1)
        self._attempt = 0
        self._numbers = itertools.count(1)
        self._bystanders = bystanders
        self._memory = np.zeros(1 << 16, np.uint8)
        self._transport = InProcessTransport(bystanders.engines.network, name)
        self._transport.register([Region(self._memory.ctypes.data, self._memory.nbytes)], Device())
        self._transport.connect(bystanders.prefill.transport.metadata())
        self._transport.connect(bystanders.decode.transport.metadata())
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.connect(bystanders.prefill.control_address)

    def attach(self) -> field_types.Message:
        """What makes it a peer, if it is heard: a layout of its own, of the right caches."""
        self._attempt, self._numbers = next(self._attempts), itertools.count(1)
        layout = self._bystanders.pair.decode.pools[0].layout
        return messages.Attach(
            endpoint=self.name,
            attempt=self._attempt,
            engine="hostile",
            coordinates=RankCoordinates(),
            layout=layout,
            pieces=(),
            transport="inprocess",
            transport_metadata=self._transport.metadata(),
        )

    def tell(self, data: bytes) -> None:
        self._socket.send(renumbered(data, self._attempt, self._numbers))

    def synchronize(self) -> None:
        """Waits until everything was read: the answer to a question comes after that to everything before it."""
        self.tell(codec.encode(messages.Hello()))
        deadline = time.monotonic() + WITHIN_S
        quiet = False
        while not quiet:
            assert time.monotonic() < deadline, "the prefill rank does not answer any more"
            quiet = bool(self._socket.poll(1000)) and isinstance(
                codec.decode_to_decode(self._socket.recv()), messages.Welcome
            )
        while self._socket.poll(0):
            self._socket.recv()

    def notify(self, data: bytes) -> None:
        for endpoint in (self._bystanders.prefill, self._bystanders.decode):
            self._transport.notify(endpoint.transport.endpoint_name, data)

    def close(self) -> None:
        self._socket.close()
        self._transport.close()


class HostilePrefillRank:
    """An engine that decode ranks may ask for; it answers as it likes."""

    def __init__(self, bystanders: Bystanders, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._bystanders = bystanders
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.registration = RankRegistration(
            engine="hostile",
            incarnation="hostile",
            coordinates=RankCoordinates(),
            control_address=f"tcp://127.0.0.1:{port}",
            layout_digest="digest",
            started_at=0.0,
            protocol_version=PROTOCOL_VERSION,
        )

    def welcome(self) -> messages.Welcome:
        return messages.Welcome(
            endpoint="p0",
            engine="hostile",
            coordinates=RankCoordinates(),
            layout=self._bystanders.pair.prefill.pools[0].layout,
            transport="inprocess",
            process=PROCESS,
        )

    def asked_by(self, within_s: float) -> bytes | None:
        """Who greets it, if anybody does in time."""
        who = None
        deadline = time.monotonic() + within_s
        while who is None and (left_s := deadline - time.monotonic()) > 0:
            if self._socket.poll(int(left_s * 1000) + 1):
                identity, data = self._socket.recv_multipart()
                if isinstance(codec.decode_to_prefill(data), messages.Hello):
                    who = identity
        return who

    def tell(self, who: bytes, data: bytes) -> None:
        self._socket.send_multipart([who, data])

    def close(self) -> None:
        self._socket.close()


class Attack:
    """What is done to the bystanders in a round."""

    def __init__(self, bystanders: Bystanders, corpus: Corpus) -> None:
        self._bystanders = bystanders
        self._corpus = corpus
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._decodes = [HostileDecodeRank(bystanders, self._context, f"{HOSTILE}{number}") for number in range(2)]
        self._prefill = HostilePrefillRank(bystanders, self._context)
        self._rooms = itertools.count(1 << 20)

    def close(self) -> None:
        for each in self._decodes:
            each.close()
        self._prefill.close()
        self._context.term()

    def mutator(self, chance: random.Random) -> Mutator:
        """Knows what an attacker could hope to know: names, and numbers of a room that is open."""
        decode = self._bystanders.decode
        (room,) = probe(decode).rooms.open.values()
        writer = self._bystanders.prefill.transport.endpoint_name
        known: list[field_types.Message] = [
            messages.ChunkArrived(room=room.room, generation=room.generation, writer=0, sequence=0),
            messages.WriterFinished(room=room.room, generation=room.generation, writer=0, chunks=0, aux=b"forged"),
            messages.Drained(endpoint=writer, room=room.room, generation=room.generation, writer=0),
            messages.RoomFailed(room=room.room, generation=room.generation, writer=0, error="", reason="forged"),
            messages.AbortRoom(room=room.room, generation=room.generation, reason="forged"),
            messages.Detach(endpoint=decode.transport.endpoint_name),
            messages.Closed(endpoint=writer),
            messages.Ping(),
            *(each.attach() for each in self._decodes),
        ]
        return self._corpus.mutator(chance, [tree_of(each) for each in known])

    def on_prefill(self, mutator: Mutator) -> int:
        """From one that is attached, and from one that is not unless its messages make it so."""
        attached, unattached = self._decodes
        attached.tell(codec.encode(attached.attach()))
        for _ in range(BURST):
            for each in (attached, unattached):
                each.tell(mutator.message())
        for each in (attached, unattached):
            each.synchronize()
            each.tell(codec.encode(messages.Detach(endpoint=each.name)))
            each.synchronize()
        return 2 * BURST

    def notifications(self, mutator: Mutator) -> int:
        for _ in range(BURST):
            for each in self._decodes:
                each.notify(mutator.message())
        return 4 * BURST

    def on_decode(self, mutator: Mutator) -> int:
        """From a rank that a caller asked for: it fails what was asked of it, and nothing else."""
        decode, chance = self._bystanders.decode, mutator.random
        self._bystanders.client.register(self._prefill.registration)
        receiver = decode.open(next(self._rooms), np.array([0]), engine="hostile")
        who = self._prefill.asked_by(WITHIN_S)
        assert who is not None, "the decode rank does not ask any more"
        links = probe(decode).links  # this one's may have failed already: it was given up by what came before
        epoch = max((each.attempt for each in (*links.current, *links.retired)), default=1)
        told, numbers = 0, itertools.count(1)
        if chance.random() < 0.5:
            self._prefill.tell(who, codec.encode(self._prefill.welcome()))
        while told < BURST and not receiver.state.is_final:
            self._prefill.tell(who, renumbered(mutator.message(), epoch, numbers))
            told += 1
        self._prefill.tell(who, codec.encode(messages.Closed(endpoint="p0")))
        receiver.abort()
        deadline = time.monotonic() + WITHIN_S
        while not (receiver.state.is_final and receiver.pages_reusable):
            assert time.monotonic() < deadline, f"the room does not end: {receiver.state}, {receiver.error}"
            time.sleep(0.001)
        self._bystanders.client.remove("hostile", 0, "hostile")
        return told


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus()


@pytest.fixture
def bystanders() -> Iterator[Bystanders]:
    """With staged transfers, so that there is something behind what is said of staging memory, too."""
    with Bystanders(path="staged", staging_ring_mib=1, staging_chunk_mib=0.25) as made:
        yield made


def test_endpoints_go_on_as_if_nothing_had_been_said(
    fuzz: Fuzz, alarms: Alarms, corpus: Corpus, bystanders: Bystanders
):
    attack = Attack(bystanders, corpus)
    checked_at = time.monotonic()
    try:
        for chance in fuzz.rounds():
            mutator = attack.mutator(chance)
            fuzz.inputs += attack.on_prefill(mutator)
            fuzz.inputs += attack.notifications(mutator)
            fuzz.inputs += attack.on_decode(mutator)
            assert not alarms.records, alarms.records[0]
            if time.monotonic() - checked_at > CHECK_EVERY_S:
                bystanders.check(strangers=HOSTILE)
                checked_at = time.monotonic()
    finally:
        attack.close()
    bystanders.check(strangers=HOSTILE)
    bystanders.finish()


@pytest.mark.parametrize("said", ["Closed", "Welcome"])
def test_a_rank_says_nothing_for_another(alarms: Alarms, said: str):
    """Found by the fuzzer: staging memory was taken from a rank that another one had called closed."""
    with Bystanders(path="staged", staging_ring_mib=1, staging_chunk_mib=0.25) as bystanders:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        hostile = HostilePrefillRank(bystanders, context)
        bystanders.client.register(hostile.registration)
        receiver = bystanders.decode.open(1 << 20, np.array([0]), engine="hostile")
        who = hostile.asked_by(WITHIN_S)
        assert who is not None
        other = bystanders.prefill.transport.endpoint_name
        forged = msgspec.structs.replace(hostile.welcome(), endpoint=other)
        hostile.tell(who, codec.encode(forged if said == "Welcome" else messages.Closed(endpoint=other)))
        if said == "Closed":  # nobody listens; the room goes on waiting for an answer that makes sense
            hostile.tell(who, codec.encode(forged))
        with pytest.raises(KVFerryError):
            receiver.wait(WITHIN_S)
        hostile.close()
        context.term()
        bystanders.client.remove("hostile", 0, "hostile")
        bystanders.check()
        bystanders.finish()


def test_messages_are_those_of_a_working_deployment(corpus: Corpus):
    """The corpus is what endpoints say: each of its messages is accepted as it is."""
    for message in corpus.messages:
        accepted = 0
        for decode in (codec.decode_to_prefill, codec.decode_to_decode, codec.decode_notification):
            with suppress(MessageError):
                accepted += decode(codec.encode(message)) == message
        for inner in (codec.decode_numbered_to_prefill, codec.decode_numbered_to_decode):
            with suppress(MessageError):
                accepted += inner(msgspec.Raw(msgspec.msgpack.encode(message))) == message
        assert accepted == (2 if isinstance(message, messages.Numbered) else 1), message
