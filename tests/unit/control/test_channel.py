"""The peer channel: who comes in, who does not, and what is dropped."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import psutil
import pytest
import zmq
from tests.support.resources import only_descriptors
from tests.support.waiting import PATIENCE_S, eventually

from kvferry.control.channel import most_connections
from kvferry.control.credentials import Credentials, KeyPair
from kvferry.control.ends import Connection, ZmqConnectingEnd, ZmqConnection, ZmqListeningEnd
from kvferry.errors import PeerDisconnectedError, SettingsError

FRIENDS = Credentials.derived_from("the secret of this test")
STRANGERS = Credentials.derived_from("another secret than that")
PATIENCE_MS = int(PATIENCE_S * 1000)
REFUSED_FOR_S = 1.0
"""How long a stranger tries: a friend is in after a few milliseconds."""


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as made:
        yield made


@pytest.fixture
def listen(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Callable[..., ZmqListeningEnd]]:
    opened: list[ZmqListeningEnd] = []

    def make(credentials: Credentials | None) -> ZmqListeningEnd:
        opened.append(ZmqListeningEnd(context=context, host="127.0.0.1", port=0, credentials=credentials))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


@pytest.fixture
def connect() -> Iterator[Callable[..., ZmqConnection]]:
    """In a context of their own, as they are in another process."""
    with zmq.Context() as context:
        opened: list[ZmqConnection] = []

        def make(
            channel: ZmqListeningEnd, credentials: Credentials | None, name: str = "decode", number: int = 0
        ) -> ZmqConnection:
            address = f"tcp://127.0.0.1:{channel.port}"
            opened.append(
                ZmqConnection(context, identity=name, address=address, number=number, credentials=credentials)
            )
            opened[-1].socket.setsockopt(zmq.LINGER, 0)
            return opened[-1]

        yield make
        for each in opened:
            each.close()


def received(channel: ZmqListeningEnd, within_s: float) -> list[tuple[str, bytes]]:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        channel.wait(50)
        if found := channel.receive():
            return found
    return []


def test_two_with_the_same_secret_talk(listen, connect):
    prefill = listen(FRIENDS)
    decode = connect(prefill, FRIENDS)
    decode.send(b"question")
    assert received(prefill, PATIENCE_S) == [("decode", b"question")]
    prefill.send("decode", b"answer")
    assert decode.socket.poll(PATIENCE_S * 1000)
    assert decode.receive() == [b"answer"]


OTHER_CLIENT_KEY = replace(FRIENDS, connecting=STRANGERS.connecting)
"""Of somebody who learned the listening side's public key, and has no key of ours."""


def ask(connected: ZmqConnection) -> None:
    """Sends a question, unless the side was refused before it could."""
    with contextlib.suppress(PeerDisconnectedError):
        connected.send(b"question")


@pytest.mark.parametrize(
    "stranger", [None, STRANGERS, OTHER_CLIENT_KEY], ids=["no-security", "another-secret", "another-client-key"]
)
def test_nobody_else_says_or_hears_anything(listen, connect, stranger: Credentials | None):
    prefill = listen(FRIENDS)
    outside, friend = connect(prefill, stranger, "stranger"), connect(prefill, FRIENDS)
    ask(outside)
    friend.send(b"question")
    assert received(prefill, PATIENCE_S) == [("decode", b"question")]
    assert received(prefill, REFUSED_FOR_S) == []
    with pytest.raises(Exception, match="no connection to stranger"):
        prefill.send("stranger", b"answer")
    assert outside.receive() == []


def test_a_listener_that_knows_the_secret_no_more_than_a_stranger_hears_nothing(listen, connect):
    """The connecting side, too, asks who is there: a registry may have been told a wrong address."""
    for impostor in (None, STRANGERS):
        listening = listen(impostor)
        ask(connect(listening, FRIENDS))
        assert received(listening, REFUSED_FOR_S) == []
        listening.close()


def test_nobody_comes_in_if_nobody_answers_for_them(context, listen, connect):
    """The question whether a client is known is not skipped when its answer is missing."""
    prefill = listen(FRIENDS)
    assert prefill.doorkeeper is not None
    connect(prefill, FRIENDS).send(b"question")
    deadline = time.monotonic() + REFUSED_FOR_S
    while time.monotonic() < deadline:
        assert not prefill.socket.poll(50)  # without `receive`, which answers
    assert received(prefill, PATIENCE_S) == [("decode", b"question")]
    prefill.doorkeeper.socket.close()
    ask(connect(prefill, FRIENDS, "late"))
    assert not prefill.socket.poll(REFUSED_FOR_S * 1000)


def test_credentials_with_a_wrong_key_of_ours_do_not_even_start(context):
    broken = replace(FRIENDS, listening=KeyPair(b"x", b"x"))
    with pytest.raises((ValueError, zmq.ZMQError)):
        ZmqListeningEnd(context=context, host="127.0.0.1", port=0, credentials=broken)
    context.destroy(linger=0)


@pytest.mark.parametrize("name", [b"\xff\xfe", b"two words", b"line\nfeed", b""])
def test_a_sender_whose_name_could_not_stand_in_a_log_is_dropped(listen, connect, name: bytes):
    prefill = listen(None)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        if name:
            stranger.setsockopt(zmq.IDENTITY, name)
        stranger.connect(f"tcp://127.0.0.1:{prefill.port}")
        stranger.send(b"question")
        friend = connect(prefill, None)
        friend.send(b"question")
        assert received(prefill, PATIENCE_S) == [("decode", b"question")]
        assert received(prefill, REFUSED_FOR_S / 2) == []


def test_a_port_that_is_taken_leaves_nothing_behind(context):
    with socket.create_server(("127.0.0.1", 0)) as taken:  # noqa: SIM117
        with pytest.raises(SettingsError, match="KVFERRY_CONTROL_PORT"):
            ZmqListeningEnd(context=context, host="127.0.0.1", port=taken.getsockname()[1], credentials=FRIENDS)
    context.term()  # would wait for ever for a socket that was left open


def test_what_interrupts_a_listening_end_as_it_is_made_gets_out(monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    ended = threading.Event()
    monkeypatch.setattr("kvferry.control.channel.Connections.watch", interrupted)

    def make() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            ZmqListeningEnd(host="127.0.0.1", port=0)
        ended.set()

    threading.Thread(target=make, daemon=True).start()
    assert ended.wait(PATIENCE_S / 6), "it waits for a socket that nobody closes"


def test_a_decode_rank_reaches_more_prefill_ranks_than_zmq_allows_by_itself():
    """A connection takes three of a context's sockets, of which there are 1,023 by default."""
    end = ZmqConnectingEnd("decode-0")
    connections: list[Connection] = []
    try:
        for number in range(400):
            address = f"tcp://127.0.{number // 200}.{1 + number % 200}:9"  # where nobody listens
            connections.append(end.connect(address))
    finally:
        for connection in connections:
            end.disconnect(connection)
        end.close()


class Ends:
    """A decode rank's end, one that listens, and connections between the two."""

    def __init__(self) -> None:
        self.listening = ZmqListeningEnd(host="127.0.0.1", port=0)
        self.connecting = ZmqConnectingEnd("decode")
        self.connections: list[Connection] = []

    def connect(self) -> Connection:
        self.connections.append(self.connecting.connect(f"tcp://127.0.0.1:{self.listening.port}"))
        return self.connections[-1]

    def take(self, questions: int) -> None:
        """Waits until so many have come."""
        came = 0
        deadline = time.monotonic() + PATIENCE_S
        while came < questions and time.monotonic() < deadline:
            self.listening.wait(50)
            came += len(self.listening.receive())
        assert came == questions

    def close(self) -> None:
        for connection in self.connections:
            self.connecting.disconnect(connection)
        self.connecting.close()
        self.listening.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    opened = Ends()
    yield opened
    opened.close()


@pytest.mark.parametrize("credentials", [None, FRIENDS], ids=["open", "secret"])
def test_of_too_many_connections_the_oldest_stranger_goes_and_whoever_comes_gets_in(
    credentials: Credentials | None, caplog: pytest.LogCaptureFixture
):
    end = ZmqListeningEnd(host="127.0.0.1", port=0, credentials=credentials, max_connections=4)
    connecting = ZmqConnectingEnd("decode", credentials)
    opened = ExitStack()
    try:
        friend = connecting.connect(f"tcp://127.0.0.1:{end.port}")
        assert answered(end, friend, b"in")
        strangers = [
            opened.enter_context(socket.create_connection(("127.0.0.1", end.port), PATIENCE_S)) for _ in range(12)
        ]
        assert eventually_closed(end, strangers, 9) == strangers[:9]
        assert answered(end, friend, b"still in")
        assert caplog.text.count("KVFERRY_MAX_DECODE_RANKS, ulimit -n") == 1
        another = connecting.connect(f"tcp://127.0.0.1:{end.port}")
        assert answered(end, another, b"in, too")
        assert eventually_closed(end, strangers, 10) == strangers[:10], "it has taken the place of one more"
        connecting.disconnect(another)
        connecting.disconnect(friend)
    finally:
        opened.close()
        connecting.close()
        end.close()


@pytest.mark.parametrize("credentials", [None, FRIENDS], ids=["open", "secret"])
def test_among_peers_the_connection_that_is_one_too_many_is_refused(credentials: Credentials | None):
    end = ZmqListeningEnd(host="127.0.0.1", port=0, credentials=credentials, max_connections=2)
    connecting = [ZmqConnectingEnd(f"decode-{number}", credentials) for number in range(3)]
    try:
        peers = [each.connect(f"tcp://127.0.0.1:{end.port}") for each in connecting[:2]]
        assert all(answered(end, peer, b"in") for peer in peers)
        surplus = connecting[2].connect(f"tcp://127.0.0.1:{end.port}")

        def is_refused() -> bool:
            end.wait(20)
            end.receive()
            return surplus.take_break()

        eventually("it is refused", is_refused)
        assert all(answered(end, peer, b"still in") for peer in peers)
        assert not any(peer.take_break() for peer in peers)
    finally:
        for each in connecting:
            each.close()
        end.close()


def test_strangers_that_never_greet_make_room_at_the_deadline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvferry.control.channel._LONGEST_HANDSHAKE_MS", 300)
    end = ZmqListeningEnd(host="127.0.0.1", port=0, max_connections=2)
    connecting = ZmqConnectingEnd("decode")
    try:
        with ExitStack() as opened:
            for _ in range(2):
                opened.enter_context(socket.create_connection(("127.0.0.1", end.port), PATIENCE_S))
            friend = connecting.connect(f"tcp://127.0.0.1:{end.port}")
            assert answered(end, friend, b"in")
            connecting.disconnect(friend)
    finally:
        connecting.close()
        end.close()


def answered(end: ZmqListeningEnd, connection: Connection, message: bytes) -> bool:
    """Whether a message comes through a connection, and an answer. It is repeated: a broken connection loses some."""
    deadline, send_at = time.monotonic() + PATIENCE_S, 0.0
    while time.monotonic() < deadline:
        if time.monotonic() >= send_at:
            connection.send(message)
            send_at = time.monotonic() + 0.5
        end.wait(20)
        for sender, data in end.receive():
            if data == message:
                end.send(sender, b"an answer")
        if b"an answer" in connection.receive():
            return True
    return False


def eventually_closed(end: ZmqListeningEnd, connections: list[socket.socket], count: int) -> list[socket.socket]:
    """Lets an end have turns until it has closed so many connections. Returns these, in order."""
    closed: set[socket.socket] = set()
    deadline = time.monotonic() + PATIENCE_S
    while len(closed) < count and time.monotonic() < deadline:
        end.wait(20)
        end.receive()
        for each in select.select([each for each in connections if each not in closed], [], [], 0)[0]:
            try:
                is_closed = not each.recv(65536)
            except ConnectionResetError:
                is_closed = True
            if is_closed:
                closed.add(each)
    return [each for each in connections if each in closed]


def test_a_process_with_few_files_has_fewer_connections(monkeypatch: pytest.MonkeyPatch):
    for soft, expected in ((1024, 384), (1 << 20, 4608), (resource.RLIM_INFINITY, 4608)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert most_connections(4096) == expected


@pytest.mark.parametrize("credentials", [None, FRIENDS], ids=["open", "secret"])
def test_running_out_of_descriptors_anywhere_is_said_and_leaks_nothing(credentials: Credentials | None, ends: Ends):
    end, process = ZmqConnectingEnd("decode", credentials), psutil.Process()
    address = f"tcp://127.0.0.1:{ends.listening.port}"
    end.disconnect(end.connect(address))  # what ZMQ takes for all connections together
    before, problems = process.num_fds(), []
    try:
        for spare in itertools.count():
            with only_descriptors(spare):
                try:
                    connection = end.connect(address)
                    break
                except PeerDisconnectedError as error:
                    problems.append(str(error))
            eventually("all are closed again", lambda: process.num_fds() <= before)
        assert len(problems) > 2, "one that the transport needs was not to be had"
        for problem in problems:
            assert f"cannot connect to {address!r}: " in problem
            assert "of the 1024 files and sockets that this process may have open are free" in problem
            assert "ulimit -n" in problem
        end.disconnect(connection)
    finally:
        end.close()


def test_a_look_at_which_nothing_has_come_asks_no_connection(ends, monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    poll = zmq.zmq_poll

    def counted_poll(sockets: list[tuple[Any, int]], timeout: int) -> list[tuple[Any, int]]:
        asked.append(len(sockets))
        return poll(sockets, timeout)

    monkeypatch.setattr("zmq.sugar.poll.zmq_poll", counted_poll)

    class Counted(zmq.Socket[bytes]):
        def getsockopt(self, option: int) -> int | bytes:
            if option == zmq.EVENTS:
                asked.append(1)
            return super().getsockopt(option)

    monkeypatch.setattr(zmq.Context, "_socket_class", Counted)
    end = ZmqConnectingEnd("decode")
    connections = [end.connect(f"tcp://127.0.0.1:{ends.listening.port}") for _ in range(40)]
    try:
        for connection in connections[:-1]:
            connection.send(b"question")
        ends.take(39)
        connections[-1].send(b"question")  # the youngest speaks last, so that the answer goes by one connection alone
        ends.take(1)
        ends.listening.send("decode", b"answer")
        came: list[bytes] = []
        while not came:
            came = [answer for connection in end.wait(PATIENCE_MS) for answer in connection.receive()]
        assert came == [b"answer"]
        while end.wait(20):
            pass
        asked.clear()
        assert not end.wait(0)
        assert sum(asked) == 0
    finally:
        for connection in connections:
            end.disconnect(connection)
        end.close()


def test_one_connection_may_have_more_than_is_received_at_a_time(ends):
    ends.connect().send(b"question")
    ends.take(1)
    for _ in range(2500):
        ends.listening.send("decode", b"answer")
    came = 0
    while came < 2500:
        ready = ends.connecting.wait(PATIENCE_MS)
        assert ready, f"{2500 - came} answers were not found"
        came += sum(len(connection.receive()) for connection in ready)


def test_what_came_is_found_although_sending_has_taken_the_news(ends):
    """ZMQ makes a descriptor readable once, and unreadable again when anything is done with the socket."""
    connection = ends.connect()

    def has_news(timeout_s: float) -> bool:
        return bool(select.select([connection.socket.fileno()], [], [], timeout_s)[0])

    for turn in range(20):
        questions = 1
        connection.send(b"question")
        while ends.connecting.wait(0):
            connection.receive()
        ends.take(1)
        ends.listening.send("decode", b"%d" % turn)
        assert has_news(PATIENCE_S)
        while has_news(0):
            connection.send(b"question")
            questions += 1
        assert list(ends.connecting.wait(PATIENCE_MS)) == [connection]
        assert connection.receive() == [b"%d" % turn]
        ends.take(questions - 1)


def test_a_break_and_a_wake_end_a_wait(ends):
    connection = ends.connect()
    connection.send(b"question")
    ends.take(1)
    ends.listening.send("decode", b"answer")
    assert list(ends.connecting.wait(PATIENCE_MS)) == [connection]
    connection.receive()
    ends.connecting.wake()
    begun = time.monotonic()
    while ends.connecting.wait(PATIENCE_MS):
        pass
    assert time.monotonic() - begun < PATIENCE_S / 2
    ends.listening.close()
    ends.listening = ZmqListeningEnd(host="127.0.0.1", port=0)
    assert list(ends.connecting.wait(PATIENCE_MS)) == [connection]
    assert connection.take_break()
    assert connection.receive() == []


def test_what_a_closed_connection_had_left_takes_nothing_from_the_next(listen, connect):
    """ZMQ goes on connecting for one that was closed, and where two have one identity the first hears nothing again."""
    prefill = listen(None)
    old, new = connect(prefill, None, number=1), connect(prefill, None, number=2)
    new.send(b"question")
    assert received(prefill, PATIENCE_S) == [("decode", b"question")]
    old.send(b"left over")
    assert received(prefill, PATIENCE_S) == [("decode", b"left over")]
    for number in range(3):
        new.send(b"again %d" % number)
        assert received(prefill, PATIENCE_S) == [("decode", b"again %d" % number)]
        prefill.send("decode", b"answer")
        assert new.socket.poll(PATIENCE_S * 1000)
        assert new.receive() == [b"answer"]


def test_who_connects_under_anothers_name_keeps_no_answer_from_it(listen, connect):
    """Where there is no secret anybody can, with any number; without a word more, or with many."""
    prefill = listen(None)
    decode, stranger = connect(prefill, None, number=1), connect(prefill, None, number=1 << 40)
    for number in range(3):
        stranger.send(b"somebody else's")
        assert received(prefill, PATIENCE_S) == [("decode", b"somebody else's")]
        decode.send(b"question %d" % number)
        assert received(prefill, PATIENCE_S) == [("decode", b"question %d" % number)]
        prefill.send("decode", b"answer %d" % number)
        assert decode.socket.poll(PATIENCE_S * 1000)
        assert decode.receive() == [b"answer %d" % number]


def test_the_system_ends_connections_whose_other_end_is_silent_for_good():
    """A decode rank makes a connection anew that is lost; what is left of the old one must not stay here for good."""
    end = ZmqListeningEnd(host="127.0.0.1", port=0, peer_timeout_s=2.5)
    try:
        with socket.create_connection(("127.0.0.1", end.port), PATIENCE_S) as client:
            eventually("it is accepted", lambda: accepted(end.port, client))
            with socket.socket(fileno=os.dup(accepted(end.port, client)[0])) as connection:
                assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                idle_s, apart_s, probes, unacknowledged_ms = (
                    connection.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (
                        socket.TCP_KEEPIDLE,
                        socket.TCP_KEEPINTVL,
                        socket.TCP_KEEPCNT,
                        socket.TCP_USER_TIMEOUT,
                    )
                )
        assert 2.5 <= idle_s < 5 <= idle_s + apart_s * probes <= 7.5
        assert unacknowledged_ms == 5000
    finally:
        end.close()


def accepted(port: int, client: socket.socket) -> list[int]:
    """The descriptor of the end of a client's connection that a port of this process has, once it does."""
    return [
        each.fd
        for each in psutil.Process().net_connections("tcp")
        if each.raddr and each.laddr.port == port and each.raddr.port == client.getsockname()[1]
    ]
