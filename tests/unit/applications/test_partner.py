"""Two ends of a conversation over the peer channel, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import msgspec
import pytest
import zmq
from tests.support.waiting import eventually

from kvferry.applications.partner import Caller, Listener, Message, calling, listening
from kvferry.errors import PeerDisconnectedError
from kvferry.settings import Settings


class Greeting(Message, frozen=True):
    name: str


class Question(Message, frozen=True):
    pass


class Answer(Message, frozen=True):
    text: str


class Engaged(Message, frozen=True):
    pass


ToListener: TypeAlias = Greeting | Question
ToCaller: TypeAlias = Answer | Engaged
TO_LISTENER: msgspec.msgpack.Decoder[ToListener] = msgspec.msgpack.Decoder(ToListener)
TO_CALLER: msgspec.msgpack.Decoder[ToCaller] = msgspec.msgpack.Decoder(ToCaller)

SETTINGS = Settings(host="127.0.0.1")


@pytest.fixture
def listener(request: pytest.FixtureRequest) -> Iterator[Listener[ToListener]]:
    silence_s = getattr(request, "param", float("inf"))
    with listening(
        SETTINGS, 0, TO_LISTENER, opens=lambda said: isinstance(said, Greeting), busy=Engaged(), silence_s=silence_s
    ) as found:
        yield found


@contextmanager
def caller_of(listener: Listener[ToListener], name: str = "caller") -> Iterator[Caller[ToCaller]]:
    with calling(SETTINGS, f"tcp://127.0.0.1:{listener.port}", TO_CALLER, name=name) as caller:
        yield caller


def hear(listener: Listener[ToListener], count: int = 1) -> list[ToListener]:
    received: list[ToListener] = []

    def has_heard() -> bool:
        listener.wait()
        received.extend(listener.receive())
        return len(received) >= count

    eventually("all was heard", has_heard)
    return received


def answers(caller: Caller[ToCaller], listener: Listener[ToListener]) -> list[ToCaller]:
    received: list[ToCaller] = []

    def has_heard() -> bool:
        assert list(listener.receive()) == []
        received.extend(caller.receive())
        return bool(received)

    eventually("an answer came", has_heard)
    return received


def test_whoever_opens_a_conversation_is_heard_and_answered(listener: Listener[ToListener]):
    with caller_of(listener) as caller:
        caller.send(Greeting("a"))
        caller.send(Question())
        assert hear(listener, 2) == [Greeting("a"), Question()]
        listener.send(Answer("yes"))
        assert answers(caller, listener) == [Answer("yes")]


def test_others_hear_that_it_is_engaged_until_the_partner_is_dismissed(listener: Listener[ToListener]):
    with caller_of(listener, "first") as first, caller_of(listener, "second") as second:
        first.send(Greeting("first"))
        assert hear(listener) == [Greeting("first")]
        second.send(Greeting("second"))
        assert answers(second, listener) == [Engaged()]
        listener.dismiss()
        second.send(Greeting("second"))
        assert hear(listener) == [Greeting("second")]
        listener.send(Answer("to the second"))
        assert answers(second, listener) == [Answer("to the second")]
        assert first.receive() == []


@pytest.mark.parametrize("listener", [0.0], indirect=True)
def test_another_may_take_the_place_of_a_partner_that_fell_silent(listener: Listener[ToListener]):
    with caller_of(listener, "first") as first, caller_of(listener, "second") as second:
        first.send(Greeting("first"))
        assert hear(listener) == [Greeting("first")]
        second.send(Greeting("second"))
        assert hear(listener) == [Greeting("second")]


def test_strays_are_not_heard(listener: Listener[ToListener]):
    with zmq.Context() as context, context.socket(zmq.DEALER) as stray, caller_of(listener) as caller:
        stray.connect(f"tcp://127.0.0.1:{listener.port}")
        # The last would be a message, but nobody has opened a conversation.
        for data in (b"", b"\xff\xff", b"GET / HTTP/1.1\r\n\r\n", msgspec.msgpack.encode(Question())):
            stray.send(data)
        caller.send(Question())
        caller.send(Greeting("a"))
        assert hear(listener) == [Greeting("a")]
        assert not stray.poll(0)


def test_where_nobody_answers_the_secret_is_named(listener: Listener[ToListener]):
    with caller_of(listener) as caller, pytest.raises(PeerDisconnectedError, match=r"nobody answers .* KVFERRY_SECRET"):
        caller.ask(Greeting("a"), 0.1)
