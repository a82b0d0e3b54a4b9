"""What is not answered is sent again, ever less often, and no less often than a silent peer is given up."""

from __future__ import annotations

from kvferry.endpoint.decode.connections import Repetition
from kvferry.settings import Settings

SETTINGS = Settings(heartbeat_interval_s=2.0, peer_timeout_s=15.0)


def due_at(again: Repetition, until: float) -> list[int]:
    return [second for second in range(int(until)) if again.is_due(float(second))]


def test_repetitions_are_ever_further_apart_up_to_a_bound():
    again = Repetition.begun(0.0, SETTINGS, keep_s=60.0)
    assert due_at(again, 80.0) == [2, 6, 14, 29, 44, 59, 74]
    assert again.until == 60.0, "it is for others to say what ends then"


def test_what_a_broken_connection_may_have_lost_is_sent_at_once_and_then_after_the_usual_pause():
    again = Repetition.begun(0.0, SETTINGS, keep_s=60.0)
    assert again.is_due(1.0, at_once=True)
    assert due_at(again, 20.0) == [5, 13]
