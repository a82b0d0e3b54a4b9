"""Lost ranks count as through only by proof."""

from __future__ import annotations

from kvferry.protocol.lost_ranks import LostRanks
from kvferry.protocol.messages import ProcessIdentity

HERE = ProcessIdentity(machine="m", pid=1, started=10)
THERE = ProcessIdentity(machine="n", pid=1, started=10)


def test_silence_is_no_proof():
    lost = LostRanks(settle_s=1.0)
    lost.add("p0", HERE)
    lost.look(lambda process: False, now=1e9)
    assert lost.take_settled(now=1e9) == []
    assert lost.doubtful == [("p0", HERE)]


def test_a_process_that_has_ended_is_through_once_the_network_has_delivered():
    lost = LostRanks(settle_s=1.0)
    lost.add("p0", HERE)
    lost.add("p1", THERE)
    lost.look(lambda process: process == HERE, now=5.0)
    assert lost.doubtful == [("p1", THERE)]
    assert lost.take_settled(now=5.9) == []
    lost.look(lambda process: process == HERE, now=5.9)  # looking again does not begin anew
    assert lost.take_settled(now=6.0) == ["p0"]
    assert lost.take_settled(now=7.0) == []
    assert len(lost) == 1


def test_somebody_else_may_say_so():
    lost = LostRanks(settle_s=1.0)
    lost.add("p1", THERE)
    lost.gone(HERE, now=0.0)  # another one
    assert lost.doubtful
    lost.gone(THERE, now=1.0)
    lost.gone(THERE, now=1.9)
    assert lost.take_settled(now=2.0) == ["p1"]


def test_who_is_found_again_is_not_lost():
    lost = LostRanks(settle_s=0.0)
    lost.add("p0", HERE)
    lost.gone(HERE, now=0.0)
    lost.discard("p0")
    lost.discard("p0")
    assert lost.take_settled(now=1.0) == []


def test_to_be_lost_twice_is_to_be_lost_since_the_first_time():
    lost = LostRanks(settle_s=1.0)
    lost.add("p0", HERE)
    lost.gone(HERE, now=0.0)
    lost.add("p0", HERE)
    assert lost.take_settled(now=1.0) == ["p0"]
