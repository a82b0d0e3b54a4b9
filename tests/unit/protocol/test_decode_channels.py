"""The prefill rank's ends of reliable channels: whose messages count, and what heartbeats are answered with."""

from __future__ import annotations

import pytest

from kvferry.errors import MessageError
from kvferry.protocol.links.reliable_channel import DecodeChannels
from kvferry.protocol.wire import codec, messages

VERIFIED = messages.RoomVerified(room=1, generation=2)
FAILED = messages.RoomFailed(room=1, generation=2, writer=0, error="PageError", reason="no")


def numbered(number: int, epoch: int = 1, body: bytes | None = None) -> messages.Numbered:
    raw = codec.encode_body(VERIFIED)
    return messages.Numbered(epoch=epoch, number=number, body=raw if body is None else type(raw)(body))


def channels(*attempts: int) -> DecodeChannels:
    made = DecodeChannels("p0")
    for attempt in attempts:
        made.attached("d0", attempt)
    return made


def test_only_a_newer_attempt_to_attach_begins_a_channel():
    made = DecodeChannels("p0")
    assert [made.attached("d0", attempt) for attempt in (2, 2, 1, 3)] == [True, False, False, True]
    made.close("d0")
    assert not made.attached("d0", 3), "a late copy of what asked for it"
    assert not made.is_open("d0")


def test_messages_count_once_for_the_attempt_that_is_attached():
    made = channels(1)
    assert made.take("d0", numbered(1)) == [VERIFIED]
    assert made.take("d0", numbered(1)) == []
    made.attached("d0", 2)
    assert made.take("d0", numbered(2)) == [], "of the attempt before"
    assert made.take("d0", numbered(1, epoch=2)) == [VERIFIED]


@pytest.mark.parametrize("epoch", [1, 2])
def test_who_is_not_attached_and_does_not_know_is_to_be_told(epoch: int):
    made = channels(1)
    made.close("d0")
    assert made.take("d0", numbered(1, epoch=epoch)) is None
    assert made.take("a stranger", numbered(1)) is None


def test_a_malformed_message_is_refused_and_the_next_one_counts():
    made = channels(1)
    with pytest.raises(MessageError):
        made.take("d0", numbered(1, body=b"\xc0"))
    assert made.take("d0", numbered(2)) == [VERIFIED]


def test_a_heartbeat_is_answered_with_what_was_sent_and_has_come():
    made = channels(1)
    (failed,) = made.outgoing("d0", FAILED)
    made.take("d0", numbered(1))
    ping = messages.Ping(epoch=1, sent=3)
    pong = messages.Pong(endpoint="p0", attached=True, epoch=1, sent=1, received=1, heard_of=3)
    assert made.answer("d0", ping) == [pong]
    again = messages.Ping(epoch=1, sent=3, resends=True)
    assert made.answer("d0", again) == [failed, pong]
    heard = messages.Ping(epoch=1, sent=3, received=1, resends=True)
    assert made.answer("d0", heard) == [pong], "it has come"


def test_what_is_not_numbered_goes_out_as_it_is_and_what_is_goes_to_nobody_without_a_channel():
    made, drained = channels(), messages.Drained(endpoint="p0", room=1, generation=2, writer=0)
    assert made.outgoing("d0", drained) == [drained]
    assert made.outgoing("d0", FAILED) == []


def test_a_message_is_taken_back_unless_it_has_come():
    made = channels(2)
    made.take("d0", numbered(1, epoch=2))
    assert not made.take_back("d0", 2, 1)
    assert made.take_back("d0", 2, 2)
    assert made.take("d0", numbered(2, epoch=2)) == []
    assert made.take_back("d0", 3, 1)
    assert made.take_back("a stranger", 1, 1)


def test_what_had_not_come_when_the_decode_rank_attached_anew_is_taken_back_too():
    """Found by enumeration: else nobody hears that the room of a lost open request will not be opened."""
    made = channels(2)
    made.take("d0", numbered(1, epoch=2))
    made.attached("d0", 4)
    assert not made.take_back("d0", 2, 1), "it had come"
    assert made.take_back("d0", 2, 2)
    assert made.take("d0", numbered(2, epoch=2)) == []
    assert made.take_back("d0", 3, 1), "that attempt has not come either"
    made.attached("d0", 5)
    assert (made.take_back("d0", 2, 2), made.take_back("d0", 2, 1)) == (True, False), "and so is what came before that"
    assert made.take_back("d0", 1, 1), "an attempt that never came"
    for attempt in range(6, 22):
        made.attached("d0", attempt)
    assert not made.take_back("d0", 2, 2), "too long ago to be known"
