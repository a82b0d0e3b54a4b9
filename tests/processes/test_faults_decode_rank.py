"""A decode rank is killed, restarted or frozen at every step of a room; the prefill rank and everybody else survive.

Every cell is a step and a fault, on either path. In each, rooms between survivors are half-way when the fault strikes
and more are run meanwhile; the prefill rank's room ends in time and says why; its pages come back once nothing reads
them; the decode rank, or its successor of the same name, is served by everybody again; and no survivor holds more than
before.

Every pair of step and fault makes sense here. At two steps the prefill rank opens the room only after the fault has
struck: before the two have connected, and where only the decode rank had it open.
"""

from __future__ import annotations

import re
import time

import pytest
from tests.support.cells import Cell, Clusters
from tests.support.matrix import Role, cells
from tests.support.processes import Rank
from tests.support.real_transport import REAL, skip_unless_installed
from tests.support.victims import (
    DEADLINE_S,
    END_S,
    FAILED_CONNECT_SOCKETS,
    LATE_WRITE_S,
    MOMENT_S,
    RECONNECT_SOCKETS,
    Cluster,
    Fault,
    Step,
    noticed,
)
from tests.support.waiting import eventually

skip_unless_installed()
OPENED_AFTERWARDS = (Step.NOT_CONNECTED, Step.OPEN_ON_DECODE)
STILL_WAITED_FOR = (Step.NOT_CONNECTED, Step.ATTACHING, Step.OPEN_ON_PREFILL)
"""No decode rank has opened the room: whoever does so in time is served."""

WAITED_FOR_IF_DEAD = (*STILL_WAITED_FOR, Step.OPEN_ON_DECODE)
"""Nor has any that lives."""


class DecodeCell(Cell):
    """A cell whose prefill rank survives."""

    def __init__(self, cluster: Cluster, step: Step) -> None:
        super().__init__(
            cluster,
            step,
            witness=cluster.struck_prefill,
            struck=cluster.struck_decode,
            others=[(each, cluster.other_decode) for each in cluster.prefills],
        )

    def struck(self, *, is_dead: bool = False) -> None:
        """After the fault: the prefill rank lives, and so do the rooms of others."""
        self.opens_and_lets_go(is_dead=is_dead)
        self.others_go_on()

    def opens_and_lets_go(self, *, is_dead: bool = False) -> None:
        """The prefill rank goes on, and opens the room if it has not.

        Args:
            is_dead: whether the decode rank has ended. Then the prefill rank knows before it opens a room: else it
                would be chance whether that fails with the dead rank, or waits for its successor.
        """
        self.prefill.do(Rank.open_gates)
        if self.step in OPENED_AFTERWARDS:
            if is_dead:
                self.wait_until_given_up()
            self.cluster.open_source(self.room)
            self.cluster.submit(self.room, 1)

    def prefill_fails(self, *, is_dead: bool = False) -> None:
        """The prefill rank's room ends, with the cause.

        Args:
            is_dead: whether the decode rank has ended: rooms that were opened afterwards wait for its successor.
        """
        if self.step is Step.SUCCEEDED:
            return
        if self.step is Step.BEFORE_FINISH:  # all is written: it may or may not learn that nobody is told
            end = self.prefill.do(Rank.end, self.room.number, END_S)
            assert end.state in ("SUCCESS", "FAILED")
            return
        is_found = self.step not in (WAITED_FOR_IF_DEAD if is_dead else STILL_WAITED_FOR)
        end = self.cluster.fails(self.prefill, self.room)
        if self.step is Step.ABORTING:
            cause = f"aborted by {self.decode.name}.*the test wants it so"
        elif not is_found:
            # One that was frozen may open it when it thaws, having been given up; it may be attaching anew by then.
            late = f"decode rank . of '{self.decode.name}' refused it: .* does not know this endpoint any more"
            cause = rf"0 of an unknown number of decode ranks opened it within {DEADLINE_S:g} s|{late}"
        else:
            gone = "PeerDisconnectedError: .*(silent for|connection to .* is gone)"
            cause = rf"{self.decode.name}\S* (is gone|failed): {gone}"
        assert re.search(cause, end.error), end

    def is_attached_anew(self) -> bool:
        """Whether the decode rank noticed the silence first, attached anew and opened the room: then it is served.

        Else it read first that it is attached, which is no longer so, and its open request is refused.
        """

        def state() -> str:
            name: str
            name, _, _ = self.prefill.do(Rank.state, self.room.number)
            return name

        eventually("the room is opened or refused", lambda: state() != "BOOTSTRAPPING")
        return state() != "FAILED"

    def comes_back(self) -> None:
        """The prefill rank's pages may be used again."""
        if self.prefill.name in self.room.is_open:
            assert self.prefill.do(Rank.wait_reusable, self.room.number, END_S)

    def stays_away(self) -> None:
        """They may not."""
        assert not self.prefill.do(Rank.wait_reusable, self.room.number, 0.5), "the transport still reads them"


def killed(cell: DecodeCell) -> None:
    struck_at = time.monotonic()
    cell.decode.process.kill()
    cell.struck(is_dead=True)
    cell.prefill_fails(is_dead=True)
    cell.comes_back()
    noticed(struck_at)
    cell.cluster.restart(cell.decode)


def restarted(cell: DecodeCell) -> None:
    cluster, room = cell.cluster, cell.room
    struck_at = time.monotonic()
    cell.decode.process.kill()
    cluster.restart(cell.decode)
    cell.opens_and_lets_go(is_dead=True)
    if cell.step in WAITED_FOR_IF_DEAD:  # the successor asks for it, in time
        room.is_open.discard(cell.decode.name)
        cluster.finish(room)
    else:
        cell.prefill_fails()
    cell.others_go_on()
    cell.comes_back()
    noticed(struck_at)


def frozen_for_a_moment(cell: DecodeCell) -> None:
    cell.decode.process.freeze()
    cell.opens_and_lets_go()
    time.sleep(MOMENT_S)
    cell.decode.process.thaw()
    cell.decode.do(Rank.open_gates)
    if cell.step is Step.ABORTING:
        cell.prefill_fails()
        assert cell.decode.do(Rank.wait_reusable, cell.room.number, END_S)
    else:
        cell.cluster.finish(cell.room)
    cell.comes_back()


def frozen_for_long(cell: DecodeCell) -> None:
    cluster, room, decode = cell.cluster, cell.room, cell.decode
    struck_at = time.monotonic()
    decode.process.freeze()
    cell.struck()
    if cell.step not in STILL_WAITED_FOR:
        cell.prefill_fails()
    noticed(struck_at)
    decode.process.thaw()
    is_writing = cell.step is Step.WRITING and cluster.path == "direct"
    if is_writing:  # before the rest of the write has come, if they are given back too soon
        assert decode.do(Rank.reuse, room.number, END_S)
    decode.do(Rank.open_gates)
    if cell.step is Step.NOT_CONNECTED:
        cluster.finish(room)
    elif cell.step is Step.OPEN_ON_PREFILL:
        cluster.agree(cell.prefill, decode)
        cluster.finish(room)
    elif cell.step is Step.BEFORE_FINISH:  # it hears that all is there, or first that it was given up
        assert decode.do(Rank.end, room.number, END_S).state in ("SUCCESS", "FAILED")
    elif cell.step is Step.ATTACHING and cell.is_attached_anew():
        cluster.finish(room)
    elif cell.step is not Step.SUCCEEDED:
        end = cluster.fails(decode, room)
        assert re.search("silent for|does not know this endpoint any more|the test wants it so|must attach", end.error)
        if cell.step is Step.ATTACHING:
            cell.prefill_fails()
    cell.comes_back()
    if not is_writing:
        assert decode.do(Rank.reuse, room.number, END_S)
    time.sleep(LATE_WRITE_S)


def frozen_for_ever(cell: DecodeCell) -> None:
    struck_at = time.monotonic()
    cell.decode.process.freeze()
    cell.struck()
    cell.prefill_fails()
    if cell.cluster.path == "direct" and cell.step is Step.WRITING and REAL.name != "nixl":
        cell.stays_away()  # UCX's connection breaks, since nothing is acknowledged
    elif cell.step is not Step.OPEN_ON_DECODE:  # there a write was begun while it was frozen: it may have ended or not
        cell.comes_back()
    noticed(struck_at)
    cell.decode.process.kill()
    cell.comes_back()
    cell.cluster.restart(cell.decode)


CELLS = {
    Fault.KILL: killed,
    Fault.RESTART: restarted,
    Fault.SHORT_FREEZE: frozen_for_a_moment,
    Fault.LONG_FREEZE: frozen_for_long,
    Fault.FREEZE: frozen_for_ever,
}


@pytest.mark.parametrize(("path", "step", "fault"), cells(Role.DECODE_RANK))
def test_a_decode_rank_is_struck(clusters: Clusters, path: str, step: Step, fault: Fault):
    cluster = clusters.get(path, step)
    survivors = (cluster.struck_prefill, cluster.other_prefill, cluster.other_decode)
    try:
        sockets = RECONNECT_SOCKETS if fault is Fault.LONG_FREEZE else 0
        if fault in (Fault.KILL, Fault.RESTART, Fault.FREEZE):
            sockets = FAILED_CONNECT_SOCKETS
        with cluster.nothing_left_over(*survivors, step=step, sockets=sockets):
            cell = DecodeCell(cluster, step)
            CELLS[fault](cell)
            cell.others_go_on()
            cluster.served()
            if fault is Fault.LONG_FREEZE:
                changed = cluster.struck_decode.do(Rank.changed, cell.room.number)
                assert changed == 0, "a late write changed pages that were given back"
    except BaseException:
        clusters.drop(cluster)
        raise
