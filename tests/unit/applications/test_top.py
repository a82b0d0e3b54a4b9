"""`kvferry top`: addresses, rates, and what is shown of what."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console
from tests.support.statuses import WELL

from kvferry.applications.top.asking import Sample, addresses
from kvferry.applications.top.view import page, rates, troubles
from kvferry.errors import ConfigurationError
from kvferry.observe.status import (
    LostPeerStatus,
    RoomStatus,
    StagingStatus,
    ThreadStatus,
)

LOST = LostPeerStatus(
    endpoint="prefill-1-9-ab",
    lost_for_s=12.0,
    pages=8,
    ring_bytes=2**25,
    proof="",
    frees=("this", "that"),
    problem="no answer",
)


def room(number: int, **changes: Any) -> RoomStatus:
    shown = RoomStatus(
        room=number, state="transferring", age_s=1.0, chunks=2, path="staged", moved_bytes=0, waits_for="", peers=()
    )
    return msgspec.structs.replace(shown, **changes)


def sample(at_s: float = 0.0, *, sent_bytes: float = 0.0, address: str = "h:1", **changes: Any) -> Sample:
    return Sample(address, at_s, msgspec.structs.replace(WELL, **changes), sent_bytes=sent_bytes)


def shown(*samples: Sample, width: int = 80, most_rooms: int = 10) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(page(samples, rates((), samples), width=width, most_rooms=most_rooms))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("9470", ["127.0.0.1:9470"]),
        ("node:9470", ["node:9470"]),
        ("http://node:9470/", ["node:9470"]),
        ("10.0.0.5:9470-9472", ["10.0.0.5:9470", "10.0.0.5:9471", "10.0.0.5:9472"]),
        ("[::1]:9470", ["[::1]:9470"]),
    ],
)
def test_addresses(given: str, expected: list[str]):
    assert addresses([given, given]) == expected


@pytest.mark.parametrize("given", ["", "node", "node:", "node:0", "node:70000", "node:9-1", "::1:9470", "n:1-9999"])
def test_what_is_no_address_is_refused_by_name(given: str):
    with pytest.raises(ConfigurationError, match="is no address of endpoints"):
        addresses([given])


def test_rates_are_of_what_moved_between_two_looks():
    before = sample(10.0, sent_bytes=100, rooms=(room(1, moved_bytes=50),))
    now = sample(12.0, sent_bytes=700, rooms=(room(1, moved_bytes=250), room(2, moved_bytes=80)))
    found = rates([before], [now])
    assert found.endpoint == {"h:1": 300.0}
    assert found.room == {("h:1", 1): 100.0, ("h:1", 2): 40.0}


def test_an_endpoint_that_started_anew_has_no_rate():
    found = rates([sample(10.0, sent_bytes=1000)], [sample(11.0, sent_bytes=5, endpoint="prefill-3-new")])
    assert found.endpoint == {}


@pytest.mark.parametrize("width", [60, 80, 120])
def test_it_fits(width: int):
    busy = sample(
        rooms=tuple(room(10**12 + each, moved_bytes=10**11, waits_for="w" * 200) for each in range(30)),
        engine="a-very-long-engine-name-of-somebody",
    )
    for line in shown(busy, width=width).splitlines():
        assert len(line) <= width, line
    assert "and 20 more, opened later" in shown(busy, width=width)


def test_a_room_says_what_it_waits_for():
    text = shown(sample(rooms=(room(7, waits_for="writes to decode-0-xyz", moved_bytes=1_500_000),)))
    (line,) = [line for line in text.splitlines() if "p prefill/3" in line]
    assert " ".join(line.split()) == "7 p prefill/3 transfer 1.0 s 1.5 MB - writes to decode-0-xyz"


def test_nothing_is_wrong_where_nothing_is():
    assert list(troubles([sample()])) == []
    assert "well" in shown(sample())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"peers": (msgspec.structs.replace(WELL.peers[0], silent_s=4.5),)},
            "has received nothing from decode-0-xyz for 4.5 s",
        ),
        ({"threads": (ThreadStatus(name="t", is_alive=False, failures=1, last_failure="E: x"),)}, "thread t has ended"),
        (
            {
                "threads": (
                    ThreadStatus(name="t", is_alive=True, failures=0, last_failure="", held_up_by="the signal f"),
                )
            },
            "prefill prefill/3: thread t is held up by the signal f",
        ),
        ({"problem": "not registered: no answer"}, "prefill prefill/3: not registered: no answer"),
        ({"quarantined_pages": 6, "quarantine_s": 12.0}, "6 pages are quarantined, the first for 12.0 s"),
        (
            {"quarantine": (LOST,)},
            "prefill-1-9-ab, lost for 12.0 s, keeps 8 pages and 33.6 MB of staging memory in quarantine until it is "
            "proved to have ended, by this; or by that (not asked: no answer)",
        ),
        (
            {"quarantine": (msgspec.structs.replace(LOST, proof="kubernetes", frees=(), problem=""),)},
            "in quarantine; it has ended (proof: kubernetes), and they come back within seconds",
        ),
        ({"staging": StagingStatus(total_bytes=9, used_bytes=9, waiting_rooms=2)}, "2 rooms wait for staging memory"),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, Any], expected: str):
    (said,) = troubles([sample(**changes)])
    assert expected in said


def test_who_does_not_answer_is_shown():
    silent = Sample("h:2", 0.0, None, "does not answer: refused")
    assert next(troubles([sample(), silent])) == "h:2 does not answer: refused"
    assert "not there" in shown(silent)
