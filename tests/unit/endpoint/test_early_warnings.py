"""What rooms wait for in vain is said after a second or two, and not only when they fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import pytest
from tests.support.caches import Model
from tests.support.engines import Engines, new_engine_name
from tests.support.waiting import eventually

from kvferry.endpoint import early_warnings
from kvferry.endpoint.early_warnings import MISSED_S, QUEUED_S, UNASKED_S, MissedEngines, UnaskedRooms
from kvferry.errors import PeerDisconnectedError
from kvferry.layout import RankCoordinates
from kvferry.protocol.links.link import LinkKey
from kvferry.protocol.wire.field_types import DecodeRank
from kvferry.testing.probe import probe

PROBLEM = PeerDisconnectedError("the registry knows nobody")


def test_an_engine_that_is_missed_is_said_once_until_it_is_found(caplog: pytest.LogCaptureFixture):
    missed = MissedEngines(60.0)
    for moment in (0.0, MISSED_S / 2, MISSED_S, MISSED_S + 1, MISSED_S + 50):
        missed.missed("there", PROBLEM, moment)
        assert len(caplog.messages) == (moment >= MISSED_S)
    missed.missed("elsewhere", PROBLEM, 60.0)
    assert len(caplog.messages) == 1
    missed.found("there")
    missed.missed("there", PROBLEM, 70.0)
    missed.missed("there", PROBLEM, 70.0 + MISSED_S)
    assert caplog.messages == 2 * [
        "prefill engine 'there' is not found: the registry knows nobody. Its rooms wait for it for 60 s "
        "(KVFERRY_BOOTSTRAP_TIMEOUT_S)"
    ]


def decode_ranks(*engines: str) -> list[DecodeRank]:
    return [DecodeRank(engine, RankCoordinates()) for engine in engines]


class Rooms:
    """A hundred rooms that nobody has asked for, but one."""

    def __init__(self) -> None:
        self.unasked = {*range(100)} - {3}
        self.rooms = UnaskedRooms("prefill rank 0 of 'p'", "Is it named so?")

    def look(self, now: float, connected: Sequence[DecodeRank | None] = ()) -> None:
        self.rooms.look(now, is_unasked=self.unasked.__contains__, connected=lambda: connected)


def test_rooms_that_nobody_has_asked_for_are_said_on_one_line(caplog: pytest.LogCaptureFixture):
    each = Rooms()
    for room in range(8):
        each.rooms.opened(room, 0.0)
    each.look(UNASKED_S - 0.1)
    assert not caplog.messages
    each.look(UNASKED_S)
    assert caplog.messages == [
        "prefill rank 0 of 'p': no decode rank has asked for room 0, 1, 2, 4, 5 and 2 more, opened 2 s ago or earlier; "
        "no decode rank is connected. Rooms wait until KVFERRY_BOOTSTRAP_TIMEOUT_S. Is it named so?"
    ]
    each.rooms.opened(9, 3.0)
    each.rooms.opened(200, 3.0)
    each.look(6.0)
    assert len(caplog.messages) == 1, "so soon after the other line"
    each.look(40.0)
    assert "has asked for room 9, opened 2 s ago" in caplog.messages[1]
    each.look(80.0)
    assert len(caplog.messages) == 2
    assert {record.levelno for record in caplog.records} == {logging.WARNING}, "engines show no less"


def test_beside_decode_ranks_rooms_are_said_once_a_queue_there_does_not_explain_them(caplog: pytest.LogCaptureFixture):
    each, connected = Rooms(), [*decode_ranks("d", "e", "d"), None]
    each.rooms.opened(1, 0.0)
    each.rooms.opened(2, 0.0)
    for moment in (UNASKED_S, QUEUED_S - 0.1):
        each.look(moment, connected)
    assert not caplog.messages, "they may wait for their turn"
    each.unasked.remove(2)
    each.look(QUEUED_S, connected)
    each.look(QUEUED_S + 60, connected)
    assert caplog.messages == [
        "prefill rank 0 of 'p': no decode rank has asked for room 1, opened 10 s ago or earlier; connected are decode "
        "ranks, 2 of 'd', 1 of 'e', 1 of engines not yet known, where rooms may wait for their turn. Rooms wait until "
        "KVFERRY_BOOTSTRAP_TIMEOUT_S. Is it named so?"
    ]
    assert caplog.records[0].levelno == logging.WARNING


def test_no_more_than_a_few_engines_are_named(caplog: pytest.LogCaptureFixture):
    each = Rooms()
    each.rooms.opened(1, 0.0)
    each.look(UNASKED_S, decode_ranks(*map(str, range(7))))
    each.look(QUEUED_S, decode_ranks(*map(str, range(7))))
    assert "1 of '4' and of 2 more engines, where" in caplog.messages[0]


def test_both_sides_say_that_they_do_not_find_each_other(
    engines: Callable[..., Engines], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(early_warnings, "MISSED_S", 0.2)
    monkeypatch.setattr(early_warnings, "UNASKED_S", 0.2)
    both = engines()
    prefill, decode = both.prefill(Model(), name=new_engine_name("prefill-of-mine")), both.decode(Model()).endpoints[0]
    wrong = prefill.name.upper()
    prefill.endpoints[0].open(1)
    receiver = decode.open(1, [0], engine=wrong)
    here = (
        f"knows 0 of an unknown number of ranks of engine '{wrong}': nobody of that name is there, but '{prefill.name}'"
    )
    there = f"prefill rank 0 of '{prefill.name}': no decode rank has asked for room 1, opened"

    def said(text: str) -> list[str]:
        return [message for message in caplog.messages if text in message]

    eventually("both have said it", lambda: bool(said(here) and said(there)))
    assert f"at the registry {both.settings().registry_address}?" in said(there)[0]
    assert [peer.problem for peer in decode.status().peers] == [str(probe(decode).links.current[0].problem)]
    assert here in decode.status().peers[0].problem
    receiver.abort()


def test_an_engine_for_which_no_room_waits_is_not_said_to_be_missed(
    engines: Callable[..., Engines], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """As one that died with all its rooms, and is looked up for a proof that it writes no more."""
    monkeypatch.setattr(early_warnings, "MISSED_S", 0.0)
    both = engines()
    decode, name = both.decode(Model()).endpoints[0], new_engine_name("gone")
    links = probe(decode).links

    def look_up(now: float) -> None:
        links.to(LinkKey(name, 0), now + 60)

    links.context.submit(look_up)
    eventually("it was looked up", lambda: any(peer.problem for peer in decode.status().peers))
    assert not caplog.messages
    links.context.submit(lambda now: links.fail(links.current[0], PROBLEM, now))
    eventually("it was given up", lambda: not links.current)
    assert not caplog.messages
    receiver = decode.open(1, [0], engine=name)
    eventually("it is said", lambda: any(f"prefill engine '{name}' is not found" in each for each in caplog.messages))
    receiver.abort()


def test_a_prefill_rank_says_which_engines_ask_for_other_rooms(
    engines: Callable[..., Engines], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(early_warnings, "UNASKED_S", 0.1)
    monkeypatch.setattr(early_warnings, "QUEUED_S", 0.2)
    both = engines()
    prefill, decode = both.prefill(Model()), both.decode(Model()).endpoints[0]
    decode.connect(prefill.name)
    prefill.endpoints[0].open(7)
    said = f"asked for room 7, opened 0.2 s ago or earlier; connected are decode ranks, 1 of '{decode.engine}'"
    eventually("it has said so", lambda: any(said in message for message in caplog.messages))
