"""Rooms whose prefill rank has gone and never answers: what is kept for its answer alone has an end.

The rank is on another machine, so that nothing proves its end, and sends all through staging memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from tests.support.caches import Model, Shape, pool
from tests.support.crashes import crash, prefill_elsewhere
from tests.support.engines import new_engine_name
from tests.support.waiting import eventually

from kvferry import DecodeEndpoint, RankCoordinates, Receiver, TransferState
from kvferry.errors import QueueFullError, RoomExistsError
from kvferry.testing import LocalNetwork
from kvferry.testing.probe import probe

ROOMS = 8
QUICK = {"heartbeat_interval_s": 0.05, "peer_timeout_s": 0.8, "quarantine_s": 0.0, "close_timeout_s": 0.2}
STAGED = {"path": "auto", "staging_ring_mib": 0.25, "staging_chunk_mib": 0.125}


class Scene:
    """A decode rank, and a prefill rank elsewhere that crashes with rooms open."""

    def __init__(self, network: LocalNetwork, **settings: Any) -> None:
        self.network, self.engine = network, new_engine_name("prefill")
        self._settings = {**QUICK, **STAGED, **settings}
        self.decode: DecodeEndpoint = network.decode(
            pool(Model(), Shape(), RankCoordinates()), **self._settings, end_proofs="operator"
        )

    def crash(self) -> list[Receiver]:
        """Starts a prefill rank that crashes with rooms open; returns these."""
        prefill = prefill_elsewhere(self.network, engine=self.engine, **{**self._settings, "peer_timeout_s": 60.0})
        self.decode.connect(self.engine)
        rooms = [self.decode.open(number, np.arange(1), engine=self.engine) for number in range(ROOMS)]
        senders = [prefill.open(number) for number in range(ROOMS)]
        for sender in senders:
            eventually("both have it open", lambda: sender.state is TransferState.WAITING_FOR_INPUT)  # noqa: B023
        crash(prefill)
        return rooms

    def abort(self) -> None:
        """Aborts the rooms of a prefill rank that has crashed, which nobody has noticed: nobody answers."""
        rooms = self.crash()
        for room in rooms:
            room.abort()
        for room in rooms:
            eventually("it has ended here", lambda: room.pages_reusable)  # noqa: B023


@pytest.fixture
def scene(registry_url: str) -> Iterator[Callable[..., Scene]]:
    with ExitStack() as made:
        yield lambda **settings: Scene(made.enter_context(LocalNetwork(registry_url)), **settings)


def test_rooms_that_nobody_answers_for_are_forgotten_soon_after_their_rank_was_given_up(scene: Callable[..., Scene]):
    its = scene()
    for _ in range(2):  # the numbers, too, are free again
        rooms = its.crash()
        eventually("the rank is lost", lambda: all(room.pages_reusable for room in rooms))  # noqa: B023
        eventually("all rooms are forgotten", lambda: its.decode.open_rooms == 0)
        assert not probe(its.decode).links.rooms_of


UNNOTICED = {"peer_timeout_s": 600.0}


def test_rooms_of_a_rank_that_is_not_given_up_and_never_answers_are_forgotten_as_refusals_are(
    scene: Callable[..., Scene],
):
    its = scene(**UNNOTICED, bootstrap_timeout_s=2.0)
    its.abort()
    eventually("all rooms are forgotten", lambda: its.decode.open_rooms == 0)


def test_a_number_stays_taken_while_the_rank_may_hear_that_its_room_is_over(scene: Callable[..., Scene]):
    its = scene(**UNNOTICED)
    its.abort()
    with pytest.raises(RoomExistsError):
        its.decode.open(0, np.arange(1), engine=its.engine)


def test_rooms_that_wait_for_an_answer_alone_take_no_place_of_others(scene: Callable[..., Scene]):
    its = scene(**UNNOTICED, max_rooms=ROOMS)
    its.abort()
    for number in range(ROOMS):
        its.decode.open(ROOMS + number, np.arange(1), engine=its.engine)
    with pytest.raises(QueueFullError):
        its.decode.open(2 * ROOMS, np.arange(1), engine=its.engine)


def test_a_drain_that_is_overdue_waits_for_no_answer(scene: Callable[..., Scene]):
    its = scene(**UNNOTICED)
    its.abort()
    its.decode.drain()
    assert not its.decode.is_drained
    its.decode.drain(0.0)
    assert its.decode.is_drained


def test_a_decode_rank_whose_rooms_have_all_ended_sleeps_as_if_it_had_none(scene: Callable[..., Scene]):
    its = scene(**UNNOTICED)
    end, waited_ms = probe(its.decode).context.end, []
    right = end.wait

    def wait(timeout_ms: int) -> Any:
        waited_ms.append(timeout_ms)
        return right(timeout_ms)

    its.abort()
    end.wait = wait  # type: ignore[method-assign]
    eventually("it sleeps", lambda: waited_ms[-1:] == [500])
    assert its.decode.open_rooms == ROOMS
