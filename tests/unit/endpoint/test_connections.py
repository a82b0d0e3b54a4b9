"""When a decode rank makes a connection anew that says nothing, and when it does not."""

from __future__ import annotations

import itertools
import logging

import pytest
from proof.simulation.control_network import ControlNetwork, SimulatedConnectingEnd

from kvferry.endpoint.decode.connections import Connections
from kvferry.errors import PeerDisconnectedError
from kvferry.protocol.wire import codec, messages
from kvferry.protocol.wire.field_types import Message
from kvferry.protocol.wire.versions import PROTOCOL_VERSION

HERE, THERE = "tcp://prefill:1", "tcp://prefill:2"
LIMIT_S = 4.0
OPEN = messages.Numbered(epoch=1, number=1, body=codec.encode_body(messages.RoomVerified(room=1, generation=1)))


class Looks:
    """Connections through which questions go, and a clock."""

    def __init__(self) -> None:
        self.end = SimulatedConnectingEnd(ControlNetwork(lambda: False), "decode")
        self.connections = Connections(self.end, "decode")
        self.now = 100.0

    def ask(self, address: str, message: Message | None = None) -> None:
        self.connections.send(address, message or messages.Ping(), PROTOCOL_VERSION)

    def pass_by(self, seconds: float) -> list[str]:
        """A heartbeat so much later."""
        self.now += seconds
        return self.connections.renew_silent(self.now, LIMIT_S)

    @property
    def open(self) -> int:
        return len(self.end.lines)


def test_a_connection_through_which_no_answer_comes_is_closed_and_made_anew():
    looks = Looks()
    for address in (HERE, THERE):
        looks.ask(address)
    before = looks.connections.lines[HERE].connection
    assert looks.pass_by(0) == []
    looks.connections.record_answer(THERE)
    assert looks.pass_by(LIMIT_S) == []
    assert looks.pass_by(0.1) == [HERE]
    assert not looks.connections.owns(before)
    assert looks.connections.owns(looks.connections.lines[HERE].connection)
    assert looks.open == 2


def test_a_connection_that_was_made_anew_has_as_long_to_answer():
    """So a rank that is frozen gets one connection after the other, slowly, and never two at a time."""
    looks, renewed_at = Looks(), []
    for _ in range(100):
        looks.ask(HERE)
        if looks.pass_by(1.0):
            renewed_at.append(looks.now)
        assert looks.open == 1
    apart_s = {later - earlier for earlier, later in itertools.pairwise(renewed_at)}
    assert min(apart_s) > LIMIT_S
    assert len(renewed_at) > 10, "it goes on as long as nobody answers"


def test_what_is_owed_no_answer_makes_no_silence():
    looks = Looks()
    looks.ask(HERE, OPEN)
    assert not any(looks.pass_by(LIMIT_S) for _ in range(5))


def test_an_answer_ends_the_silence_and_the_next_question_begins_it_anew():
    looks = Looks()
    for _ in range(10):
        looks.ask(HERE)
        assert looks.pass_by(LIMIT_S - 1) == []
        looks.connections.record_answer(HERE)
    looks.ask(HERE)
    assert looks.pass_by(10 * LIMIT_S) == [], "it was asked a moment before this heartbeat"
    assert looks.pass_by(LIMIT_S + 1) == [HERE]


def test_time_in_which_this_side_did_not_listen_is_nobodys_silence():
    looks = Looks()
    looks.ask(HERE)
    looks.pass_by(0)
    looks.connections.forgive(3600, looks.now + 3600)
    assert looks.pass_by(3600) == []
    assert looks.pass_by(LIMIT_S + 0.1) == [HERE]


def test_where_no_connection_can_be_made_the_old_one_stays_until_one_can(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    looks = Looks()
    looks.ask(HERE)
    looks.pass_by(0)

    def refuses(address: str) -> None:
        raise PeerDisconnectedError("this process may have no more open files")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(looks.end, "connect", refuses)
        assert looks.pass_by(LIMIT_S + 1) == []
    assert "cannot be made anew yet: this process may have no more open files" in caplog.text
    assert looks.open == 1
    assert looks.pass_by(1) == [HERE]
