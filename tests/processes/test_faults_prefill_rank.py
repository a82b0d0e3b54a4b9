"""A prefill rank is killed, restarted or frozen at every step of a room; the decode rank and everybody else survive.

Every cell is a step and a fault, on either path. In each, rooms between survivors are half-way when the fault strikes
and more are run meanwhile; the decode rank's room ends in time and says why; its pages come back; the prefill rank, or
its successor of the same name, serves everybody again; and no survivor holds more than before.

Every pair of step and fault makes sense here. At two steps the decode rank opens the room only after the fault has
struck: before the two have connected, and where only the prefill rank had it open.
"""

from __future__ import annotations

import itertools
import re
import statistics
import time

import pytest
from tests.support.cells import Cell, Clusters
from tests.support.matrix import Role, cells
from tests.support.processes import End, Rank
from tests.support.real_transport import skip_unless_installed
from tests.support.victims import (
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

skip_unless_installed()
OPENED_AFTERWARDS = (Step.NOT_CONNECTED, Step.OPEN_ON_PREFILL)
NEVER_ASKED = (Step.NOT_CONNECTED, Step.ATTACHING)
"""The prefill rank has not been asked for the room: it cannot write, and the room waits until it answers."""

NEVER_ASKED_IF_DEAD = (*NEVER_ASKED, Step.OPEN_ON_PREFILL)
"""It died before it was asked: the room is its successor's."""


class PrefillCell(Cell):
    """A cell whose decode rank survives."""

    def __init__(self, cluster: Cluster, step: Step) -> None:
        super().__init__(
            cluster,
            step,
            witness=cluster.struck_decode,
            struck=cluster.struck_prefill,
            others=[(cluster.other_prefill, each) for each in cluster.decodes],
        )

    def struck(self, *, is_dead: bool = False) -> None:
        """After the fault: the decode rank lives, and so do the rooms of others."""
        self.opens_and_lets_go(is_dead=is_dead)
        self.others_go_on()

    def opens_and_lets_go(self, *, is_dead: bool = False) -> None:
        """The decode rank goes on, and opens the room if it has not.

        Args:
            is_dead: whether the prefill rank has ended. Then the decode rank knows before it opens a room: else it
                would be chance whether the room relies on the dead rank, or waits for its successor.
        """
        if self.step is Step.WRITING:
            self.decode.process.thaw()
        self.decode.do(Rank.open_gates)
        if self.step in OPENED_AFTERWARDS:
            if is_dead:
                self.wait_until_given_up()
            self.cluster.open_target(self.room)

    def decode_fails(self, *, is_dead: bool = False) -> None:
        """The decode rank's room ends, with the cause.

        Args:
            is_dead: whether the prefill rank has ended: rooms that it was not asked for wait for its successor.
        """
        if self.step is Step.SUCCEEDED:
            return
        is_found = self.step not in (NEVER_ASKED_IF_DEAD if is_dead else NEVER_ASKED)
        self.says_why(self.cluster.fails(self.decode, self.room), is_found=is_found)

    def says_why(self, end: End, *, is_found: bool) -> None:
        name = re.escape(self.prefill.name)
        if self.step is Step.ABORTING:
            cause = "aborted by the decode side: the test wants it so"
        elif not is_found:
            cause = rf"knows 0 of an unknown number of ranks of engine '{name}'|'{name}'.*still asking the ranks"
        else:
            cause = (
                rf"prefill rank 0 of '{name}' "
                "(has been silent for|has ended: its process|does not know this endpoint any more)"
                "|must attach before it opens rooms"
            )
        assert re.search(cause, end.error), end

    def comes_back(self) -> None:
        """The decode rank's pages may be used again."""
        assert self.decode.do(Rank.wait_reusable, self.room.number, END_S), "pages are kept that nobody can write to"

    def stays_away(self) -> None:
        """They may not."""
        assert not self.decode.do(Rank.wait_reusable, self.room.number, 0.5), "a frozen rank may still write"

    def stays_as_it_is(self) -> None:
        """Whatever the decode rank does with pages that it was given back, nobody else changes."""
        assert self.decode.do(Rank.changed, self.room.number) == 0, "a late write changed pages that were given back"


def killed(cell: PrefillCell) -> None:
    struck_at = time.monotonic()
    cell.prefill.process.kill()
    cell.struck(is_dead=True)
    cell.decode_fails(is_dead=True)
    cell.comes_back()
    noticed(struck_at)
    cell.cluster.restart(cell.prefill)


def restarted(cell: PrefillCell) -> None:
    cluster, room = cell.cluster, cell.room
    cell.prefill.process.kill()
    cluster.restart(cell.prefill)
    restarted_at = time.monotonic()
    cell.struck(is_dead=True)
    if cell.step in NEVER_ASKED_IF_DEAD:
        room.is_open.discard(cell.prefill.name)
        room.submitted = 0
        cluster.finish(room)  # by the successor
    else:
        cell.decode_fails()
    cell.comes_back()
    noticed(restarted_at)


def frozen_for_a_moment(cell: PrefillCell) -> None:
    cell.prefill.process.freeze()
    cell.opens_and_lets_go()
    time.sleep(MOMENT_S)
    cell.prefill.process.thaw()
    cell.prefill.do(Rank.open_gates)
    if cell.step is Step.ABORTING:
        cell.decode_fails()
        assert "aborted by" in cell.cluster.fails(cell.prefill, cell.room).error
    else:
        cell.cluster.finish(cell.room)
    cell.comes_back()


def frozen_for_long(cell: PrefillCell) -> None:
    cluster, room, prefill = cell.cluster, cell.room, cell.prefill
    struck_at = time.monotonic()
    prefill.process.freeze()
    cell.struck()
    waits = cell.step in NEVER_ASKED
    if not waits:
        cell.decode_fails()
    noticed(struck_at)
    is_reused = not waits and cell.decode.do(Rank.reuse, room.number, 0.0)
    prefill.process.thaw()
    prefill.do(Rank.open_gates)
    if not waits:
        is_reused = is_reused or cell.decode.do(Rank.reuse, room.number, END_S)
    if waits:
        cluster.finish(room)
    elif cell.step is Step.BEFORE_FINISH:  # it tells a decode rank that does not care any more
        assert prefill.do(Rank.end, room.number, END_S).state in ("SUCCESS", "FAILED")
    elif prefill.name in room.is_open and cell.step is not Step.SUCCEEDED:
        end = cluster.fails(prefill, room)
        # Which of them it hears of first, when it thaws, is chance: the messages that came meanwhile, or the time.
        causes = (
            f"aborted by {cell.decode.name}|{cell.decode.name}.* is gone: .*silent for|decode ranks opened it within"
            f"|of '{cell.decode.name}' refused it: PeerDisconnectedError: .* has been silent for"
        )
        assert re.search(causes, end.error), end
    if prefill.name in room.is_open:
        assert prefill.do(Rank.wait_reusable, room.number, END_S)
    cell.comes_back()
    assert is_reused or cell.decode.do(Rank.reuse, room.number, END_S)
    time.sleep(LATE_WRITE_S)


def frozen_for_ever(cell: PrefillCell) -> None:
    struck_at = time.monotonic()
    cell.prefill.process.freeze()
    cell.struck()
    cell.decode_fails()
    if cell.cluster.path == "staged" or cell.step in (*NEVER_ASKED, Step.SUCCEEDED):
        cell.comes_back()
    else:
        cell.stays_away()
    noticed(struck_at)
    cell.prefill.process.kill()
    cell.comes_back()
    cell.cluster.restart(cell.prefill)


CELLS = {
    Fault.KILL: killed,
    Fault.RESTART: restarted,
    Fault.SHORT_FREEZE: frozen_for_a_moment,
    Fault.LONG_FREEZE: frozen_for_long,
    Fault.FREEZE: frozen_for_ever,
}


@pytest.mark.parametrize(("path", "step", "fault"), cells(Role.PREFILL_RANK))
def test_a_prefill_rank_is_struck(clusters: Clusters, path: str, step: Step, fault: Fault):
    cluster = clusters.get(path, step)
    survivors = (cluster.struck_decode, cluster.other_decode, cluster.other_prefill)
    try:
        sockets = RECONNECT_SOCKETS if fault is Fault.LONG_FREEZE else 0
        if fault in (Fault.KILL, Fault.RESTART, Fault.FREEZE):
            sockets = FAILED_CONNECT_SOCKETS
        with cluster.nothing_left_over(*survivors, step=step, sockets=sockets):
            cell = PrefillCell(cluster, step)
            CELLS[fault](cell)
            cell.others_go_on()
            cluster.served()
            if fault is Fault.LONG_FREEZE:
                cell.stays_as_it_is()
    except BaseException:
        clusters.drop(cluster)
        raise


@pytest.mark.full
@pytest.mark.parametrize("path", ["direct", "staged"])
def test_prefill_ranks_that_die_one_after_the_other_leave_no_memory_behind(clusters: Clusters, path: str):
    """A ring has 1 MiB. What is made once, such as a part of the heap, does not come again every time."""
    cluster, rounds = clusters.get(path), 5
    held = []
    for _ in range(rounds + 1):
        held.append(cluster.other_decode.do(Rank.resources).resident_bytes)
        struck_at = time.monotonic()
        cluster.struck_prefill.process.kill()
        noticed(struck_at)
        cluster.restart(cluster.struck_prefill)
        cluster.served()
    steps = [after - before for before, after in itertools.pairwise(held)]
    assert statistics.median(steps) < 0.5 * 2**20, [f"{step / 2**20:.2f} MiB" for step in steps]
