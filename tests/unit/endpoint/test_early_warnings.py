"""What rooms wait for in vain is said after a second or two, and not only when they fail."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from tests.support.caches import Model
from tests.support.engines import Engines, new_engine_name
from tests.support.waiting import eventually

from kvferry.endpoint import early_warnings
from kvferry.endpoint.early_warnings import MISSED_S, UNASKED_S, MissedEngines, UnaskedRooms
from kvferry.errors import PeerDisconnectedError

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


def test_rooms_that_nobody_has_asked_for_are_said_on_one_line(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    rooms, unasked = UnaskedRooms("prefill rank 0 of 'p'", "Is it named so?"), {*range(100)} - {3}
    for room in range(8):
        rooms.opened(room, 0.0)
    rooms.look(UNASKED_S - 0.1, is_unasked=unasked.__contains__, decode_ranks=0)
    assert not caplog.messages
    rooms.look(UNASKED_S, is_unasked=unasked.__contains__, decode_ranks=0)
    assert caplog.messages == [
        "prefill rank 0 of 'p': no decode rank has asked for room 0, 1, 2, 4, 5 and 2 more, opened 2 s ago or earlier; "
        "0 decode ranks are connected. Rooms wait until KVFERRY_BOOTSTRAP_TIMEOUT_S. Is it named so?"
    ]
    assert caplog.records[0].levelno == logging.WARNING
    rooms.opened(9, 3.0)
    rooms.opened(200, 3.0)
    rooms.look(6.0, is_unasked=unasked.__contains__, decode_ranks=2)
    assert len(caplog.messages) == 1, "so soon after the other line"
    rooms.look(20.0, is_unasked=unasked.__contains__, decode_ranks=2)
    assert "has asked for room 9, opened" in caplog.messages[1]
    assert caplog.records[1].levelno == logging.INFO, "it may be their turn later"
    rooms.look(60.0, is_unasked=unasked.__contains__, decode_ranks=2)
    assert len(caplog.messages) == 2


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
    assert [peer.problem for peer in decode.status().peers] == [str(decode._driver.rooms.links.current[0].problem)]
    assert here in decode.status().peers[0].problem
    receiver.abort()
