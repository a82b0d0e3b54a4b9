"""What happens costs the same, however much is open that it has nothing to do with.

The ranks of these tests have no threads, and a clock and a network of their own: steps can be counted.
"""

from __future__ import annotations

import gc
from functools import partial

import numpy as np
import pytest
from benchmarks.growing_costs import Cluster, Straight
from tests.support.steps import steps_of

from kvferry.errors import PeerDisconnectedError
from kvferry.protocol.transfer.states import TransferState
from kvferry.protocol.wire import codec, messages
from kvferry.testing.probe import probe

PAGES = np.arange(1)


def cluster(prefill_ranks: int = 1, decode_ranks: int = 1, *, prefill_rooms: int = 0, decode_rooms: int = 0) -> Cluster:
    """Ranks that are connected, with rooms that only one side has opened."""
    made = Cluster(prefill_ranks, decode_ranks, pages=1)
    made.run(1, 1)
    for room in range(decode_rooms):
        for decode in made.decoders:
            decode.open(1000 + room, PAGES, engine="prefill")
    for room in range(prefill_rooms):
        for prefill in made.prefillers:
            prefill.open(5000 + room).submit(PAGES, last=True)
    for _ in range(300):
        made.round()
    assert all(decode.open_rooms == decode_rooms for decode in made.decoders)
    assert all(prefill.open_rooms == prefill_rooms for prefill in made.prefillers)
    return made


class Finalized:
    """Refers to itself, so that only the garbage collector can end it; and that takes steps."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        sum(number for number in range(100))


def test_what_others_left_for_the_garbage_collector_is_no_step_of_a_call():
    def allocate() -> list[list[int]]:
        return [[number] for number in range(2 * gc.get_threshold()[0])]  # enough for a collection

    alone = steps_of(allocate)
    Finalized()
    assert steps_of(allocate) == alone


def test_a_decode_ranks_tick_takes_as_many_steps_with_a_thousand_rooms_as_with_ten():
    taken = {}
    for rooms in (10, 1_000):
        decode = cluster(decode_rooms=rooms).decoders[0]
        driver = probe(decode).driver
        now = probe(decode).now
        driver.next_ping_at = now + 1
        tick = steps_of(partial(driver.tick, now))
        driver.next_ping_at = now
        taken[rooms] = tick, steps_of(partial(driver.tick, now))
    assert taken[10] == taken[1_000]


def test_a_prefill_ranks_tick_takes_as_many_steps_with_a_thousand_rooms_as_with_ten():
    """Of either kind: those that it has opened, and those that decode ranks have."""
    taken = {}
    for rooms in (10, 1_000):
        prefill = cluster(prefill_rooms=rooms, decode_rooms=rooms).prefillers[0]
        now = probe(prefill).now
        taken[rooms] = steps_of(partial(probe(prefill).driver.tick, now, longest_wait_s=1.0))
    assert taken[10] == taken[1_000]


def test_a_message_takes_as_many_steps_from_the_last_of_fifty_ranks_as_from_the_last_of_two():
    taken = {}
    for ranks in (2, 50):
        made = cluster(ranks)
        driver = probe(made.decoders[0]).driver
        (link,) = driver.rooms.links.current
        channel = driver.rooms.links.connections.lines[link.addresses[-1]].connection
        assert isinstance(channel, Straight)
        endpoint = made.prefillers[-1].transport.endpoint_name
        channel.arrived.append(codec.encode(messages.Pong(endpoint=endpoint, attached=True)))
        taken[ranks] = steps_of(partial(driver.receive, channel, made.now))
        assert not link.is_given_up
    assert taken[2] == taken[50]


def test_a_thousand_engines_that_never_come_cost_as_much_each_as_a_hundred():
    taken = {}
    for count in (100, 1_000):
        made = Cluster(1, 1, pages=1)
        (decode,) = made.decoders
        waiting = [decode.open(number, PAGES, engine=f"nobody-{number}") for number in range(count)]
        made.round()
        made.now += decode.settings.bootstrap_timeout_s + 1
        driver = probe(decode).driver
        taken[count] = steps_of(partial(driver.tick, made.now)) / count
        assert all(each.state is TransferState.FAILED for each in waiting)
    assert taken[1_000] < 1.1 * taken[100]


def test_a_rank_that_is_lost_is_no_event_of_rooms_that_it_did_not_open(monkeypatch: pytest.MonkeyPatch):
    made = cluster(prefill_rooms=1_000)
    prefill, decode = made.prefillers[0], made.decoders[0]
    decode.open(5_007, PAGES, engine="prefill")
    room = probe(prefill).table.rooms[5_007]
    while not room.generations:
        made.round()
    (other,) = (each for number, each in probe(prefill).table.rooms.items() if number == 5_008)
    posted: list[int] = []
    for each in (room, other):
        monkeypatch.setattr(each, "post", lambda event, number=each.room: posted.append(number))
    probe(prefill).driver.dismissals.give_up(decode.transport.endpoint_name, PeerDisconnectedError("lost"))
    assert posted == [5_007]


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_status_costs_little_for_rooms_that_it_does_not_show(side: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvferry.endpoint.base.MOST_ROOMS", 5)

    def steps(rooms: int) -> int:
        made = cluster(prefill_rooms=rooms, decode_rooms=rooms)
        endpoint = (made.prefillers if side == "prefill" else made.decoders)[0]
        assert len(endpoint.status().rooms) == 5
        return steps_of(endpoint.status)

    assert (steps(60) - steps(10)) / 50 < 120
