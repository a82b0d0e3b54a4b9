"""Lost ranks count as through only by proof."""

from __future__ import annotations

from kvferry.protocol.links.proofs import LostRanks, Proof
from kvferry.protocol.wire.field_types import ProcessIdentity

HERE = ProcessIdentity(machine="m", pid=1, started=10)
THERE = ProcessIdentity(machine="n", pid=1, started=10)


def wait(lost: LostRanks, seconds: float, *, since: float) -> list[str]:
    """What settles while somebody looks ten times a second."""
    ticks = range(round(seconds * 10) + 1)
    return [endpoint for tick in ticks for endpoint in lost.take_settled(since + tick / 10)]


def test_silence_is_no_proof():
    lost = LostRanks(settle_s=1.0)
    lost.add("p0", HERE, 0.0)
    lost.look(lambda process: False, Proof.PROCESS)
    assert wait(lost, 100.0, since=0.0) == []
    assert lost.doubtful == [("p0", HERE)]


def test_a_process_that_has_ended_is_through_once_the_network_has_delivered():
    lost = LostRanks(settle_s=1.0)
    lost.add("p0", HERE, 0.0)
    lost.add("p1", THERE, 0.0)
    lost.take_settled(5.0)
    lost.look(lambda process: process == HERE, Proof.PROCESS)
    assert lost.doubtful == [("p1", THERE)]
    assert wait(lost, 0.9, since=5.0) == []
    lost.look(lambda process: process == HERE, Proof.PROCESS)  # looking again does not begin anew
    assert wait(lost, 0.2, since=5.9) == ["p0"]
    assert wait(lost, 5.0, since=6.1) == []
    assert len(lost) == 1


def test_time_before_it_was_known_does_not_count():
    lost = LostRanks(settle_s=1.0)
    lost.add("p0", HERE, 0.0)
    lost.look(lambda process: True, Proof.PROCESS)
    assert wait(lost, 0.9, since=1000.0) == []
    assert wait(lost, 0.2, since=1000.9) == ["p0"]


def test_time_that_nobody_lived_through_does_not_count():
    """A suspended process has not taken what the network had for it."""
    lost = LostRanks(settle_s=1.0)
    lost.add("p0", HERE, 0.0)
    lost.look(HERE.__eq__, Proof.RANK)
    assert lost.take_settled(0.0) == []
    assert lost.take_settled(1000.0) == []
    assert wait(lost, 0.7, since=1000.0) == []
    assert wait(lost, 0.2, since=1000.7) == ["p0"]


def test_it_is_through_by_the_clock_also_where_looks_are_half_a_second_apart():
    lost = LostRanks(settle_s=2.0)
    lost.add("p0", HERE, 0.0)
    lost.ended("p0", Proof.RANK)
    assert [lost.take_settled(now) for now in (10.0, 10.5, 11.0, 11.5, 12.0)] == [[], [], [], [], ["p0"]]


def test_somebody_else_may_say_so():
    lost = LostRanks(settle_s=1.0)
    lost.add("p1", THERE, 0.0)
    lost.take_settled(0.0)
    lost.look(HERE.__eq__, Proof.RANK)  # another one
    assert lost.doubtful
    lost.look(THERE.__eq__, Proof.RANK)
    assert wait(lost, 0.9, since=0.0) == []
    lost.look(THERE.__eq__, Proof.RANK)
    assert wait(lost, 0.2, since=0.9) == ["p1"]


def test_who_is_found_again_is_not_lost():
    lost = LostRanks(settle_s=0.0)
    lost.add("p0", HERE, 0.0)
    lost.look(HERE.__eq__, Proof.RANK)
    lost.discard("p0")
    lost.discard("p0")
    assert wait(lost, 1.0, since=0.0) == []


def test_to_be_lost_twice_is_to_be_lost_since_the_first_time():
    lost = LostRanks(settle_s=1.0)
    lost.add("p0", HERE, 0.0)
    lost.take_settled(0.0)
    lost.look(HERE.__eq__, Proof.RANK)
    assert wait(lost, 0.9, since=0.0) == []
    lost.add("p0", HERE, 0.0)
    assert wait(lost, 0.2, since=0.9) == ["p0"]
