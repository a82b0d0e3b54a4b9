"""Notifications over connections of kvferry's own."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from tests.support.waiting import eventually

from kvferry.errors import PeerDisconnectedError, TransportError
from kvferry.transport.message_channel import ChannelAddress, ConnectionState, MessageChannel


@pytest.fixture
def receiver() -> Iterator[MessageChannel]:
    made = MessageChannel("receiver", "127.0.0.1", "127.0.0.1")
    yield made
    made.close()


@pytest.fixture
def sender() -> Iterator[MessageChannel]:
    made = MessageChannel("sender", "127.0.0.1", "127.0.0.1")
    yield made
    made.close()


def taken(channel: MessageChannel, count: int) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []

    def enough() -> bool:
        found.extend(channel.take())
        return len(found) >= count

    eventually(f"{count} messages", enough)
    return found


def test_messages_of_any_bytes_arrive_in_order_with_their_senders_name(
    sender: MessageChannel, receiver: MessageChannel
):
    connection = sender.connect("receiver", receiver.address)
    messages = [b"", b"\x00\xff", bytes(300_000), *(b"%d" % number for number in range(2000))]
    for message in messages:
        connection.send(message)
    assert taken(receiver, len(messages)) == [("sender", message) for message in messages]
    connection.close()


def test_a_connection_whose_other_end_is_closed_is_gone_for_good(sender: MessageChannel):
    first = MessageChannel("receiver", "127.0.0.1", "127.0.0.1")
    connection = sender.connect("receiver", first.address)
    eventually("it is connected", lambda: connection.state is ConnectionState.CONNECTED)
    first.close()
    eventually("the end is noticed", lambda: connection.state is ConnectionState.LOST)
    with socket.create_server(("127.0.0.1", first.address.port)) as successor:
        successor.settimeout(0.3)
        with pytest.raises(PeerDisconnectedError, match="the connection to receiver is gone"):
            connection.send(b"lost")
        with pytest.raises(TimeoutError):  # nobody comes to whoever has the port now
            successor.accept()
    connection.close()
    connection.close()
    with pytest.raises(PeerDisconnectedError):
        connection.send(b"closed")


def test_whoever_does_not_know_the_token_is_not_heard(
    sender: MessageChannel, receiver: MessageChannel, caplog: pytest.LogCaptureFixture
):
    stranger = sender.connect("receiver", msgspec.structs.replace(receiver.address, token=bytes(16)))
    with zmq.Context() as context, context.socket(zmq.PUSH) as rude, caplog.at_level(logging.WARNING):
        rude.connect(f"tcp://127.0.0.1:{receiver.address.port}")
        rude.send(b"one frame")
        stranger.send(b"guessed")
        connection = sender.connect("receiver", receiver.address)
        heard: list[tuple[str, bytes]] = []

        def both_are_dropped() -> bool:
            heard.extend(receiver.take())
            return bool(heard) or caplog.text.count("without this endpoint's token") == 2

        eventually("both are dropped", both_are_dropped)
        assert not heard
        connection.send(b"known")
        assert taken(receiver, 1) == [("sender", b"known")]
        connection.close()
    stranger.close()


def test_a_stranger_who_floods_neither_holds_whoever_takes_nor_fills_the_log(
    receiver: MessageChannel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    sent = 4_000
    with zmq.Context() as context, context.socket(zmq.PUSH) as rude, caplog.at_level(logging.WARNING):
        rude.setsockopt(zmq.LINGER, 0)
        rude.connect(f"tcp://127.0.0.1:{receiver.address.port}")
        for _ in range(sent):
            rude.send(b"one frame")
        received: list[int] = []
        receive: Any = zmq.Socket.recv_multipart

        def counted(socket: object, flags: int) -> list[bytes]:
            frames: list[bytes] = receive(socket, flags)
            received[-1] += 1
            return frames

        monkeypatch.setattr(zmq.Socket, "recv_multipart", counted)

        def all_are_dropped() -> bool:
            received.append(0)
            assert receiver.take() == []
            return sum(received) == sent

        eventually("all are dropped", all_are_dropped)
    assert max(received) <= 1_000
    assert caplog.text.count("without this endpoint's token") <= 12


def test_a_connection_that_breaks_as_it_is_looked_at_is_lost(
    sender: MessageChannel, receiver: MessageChannel, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(zmq.Socket, "poll", lambda *_: 0)
        connection = sender.connect("receiver", receiver.address)
        connection.send(b"waits")
        assert connection.state is ConnectionState.CONNECTING
    attempts: list[object] = []

    def broken(*message: object) -> None:
        attempts.append(message)
        raise zmq.Again

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(zmq.Socket, "send_multipart", broken)
        eventually("it is lost", lambda: connection.state is ConnectionState.LOST)
    assert len(attempts) == 1
    with pytest.raises(PeerDisconnectedError):
        connection.send(b"too late")
    connection.close()


def send_to(sender: MessageChannel, address: ChannelAddress) -> None:
    connection = sender.connect("receiver", address)
    eventually("it is given up", lambda: connection.state is ConnectionState.LOST)
    connection.send(b"nobody")


@pytest.mark.parametrize("host", ["no-such-host.invalid", "not a host", ""])
def test_a_host_that_is_none_cannot_be_listened_on_or_reached(
    sender: MessageChannel, host: str, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(TransportError, match=f"cannot listen on {host!r} .KVFERRY_HOST."):
        MessageChannel("nowhere", host, host)
    monkeypatch.setattr("kvferry.transport.message_channel._CONNECT_S", 0.1)
    with pytest.raises(TransportError, match=r"receiver cannot be reached|connection to receiver is gone"):
        send_to(sender, ChannelAddress(host, 70_000, b""))


def pump(source: socket.socket, target: socket.socket) -> None:
    """Passes bytes on until either end is closed."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)


def test_nobody_waits_for_a_connection_and_what_is_sent_meanwhile_follows(
    sender: MessageChannel, receiver: MessageChannel
):
    """The receiver is frozen at first: the system takes the connection, and nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        address = msgspec.structs.replace(receiver.address, port=frozen.getsockname()[1])
        connection = sender.connect("receiver", address)
        messages = [b"%d" % number for number in range(100)]
        for message in messages:
            connection.send(message)
        assert connection.state is ConnectionState.CONNECTING
        with frozen.accept()[0] as here, socket.create_connection(("127.0.0.1", receiver.address.port)) as there:
            threads = [threading.Thread(target=pump, args=each) for each in ((here, there), (there, here))]
            for thread in threads:
                thread.start()
            eventually("it is connected", lambda: connection.state is ConnectionState.CONNECTED)
            connection.send(b"the last")
            assert taken(receiver, 101) == [("sender", message) for message in [*messages, b"the last"]]
            for each in (here, there):
                each.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
    connection.close()


def test_whoever_does_not_answer_is_lost_in_time(sender: MessageChannel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvferry.transport.message_channel._CONNECT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        connection = sender.connect("receiver", ChannelAddress("127.0.0.1", mute.getsockname()[1], b"token"))
        eventually("it is given up", lambda: connection.state is ConnectionState.LOST)
        with pytest.raises(PeerDisconnectedError, match="the connection to receiver is gone"):
            connection.send(b"late")
    connection.close()


def test_several_threads_send_and_take(sender: MessageChannel, receiver: MessageChannel):
    connection = sender.connect("receiver", receiver.address)

    def work(number: int) -> None:
        for _ in range(500):
            connection.send(b"%d" % number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    found = taken(receiver, 2000)
    for thread in threads:
        thread.join()
    assert sorted(message for _, message in found) == sorted(b"%d" % number for number in range(4) for _ in range(500))
    connection.close()


def test_what_was_sent_before_closing_arrives(receiver: MessageChannel):
    sender = MessageChannel("sender", "127.0.0.1", "127.0.0.1")
    connection = sender.connect("receiver", receiver.address)
    for number in range(100):
        connection.send(b"%d" % number)
    connection.close()
    sender.close()
    assert len(taken(receiver, 100)) == 100


def test_a_connection_that_somebody_has_forgotten_keeps_nobody_from_closing(receiver: MessageChannel):
    sender = MessageChannel("sender", "127.0.0.1", "127.0.0.1")
    connection = sender.connect("receiver", receiver.address)
    connection.send(b"the last")
    sender.close()
    assert taken(receiver, 1) == [("sender", b"the last")]
    with pytest.raises(PeerDisconnectedError):
        connection.send(b"too late")
