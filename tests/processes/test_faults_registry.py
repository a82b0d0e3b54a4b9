"""The registry is killed, restarted or frozen; ranks that know each other do not notice, others find each other later.

The registry matters at few steps, and only those are here:

* before the two have connected: the decode rank looks the engine up;
* between two chunks: rooms that are open need no registry, and links that are ready neither;
* while a prefill rank starts: it must register.

At every other step between opening and success the two ranks speak with each other only, as between two chunks.
"""

from __future__ import annotations

import re
import time

import pytest
from tests.support.cells import Clusters
from tests.support.matrix import Role, cells
from tests.support.processes import Rank
from tests.support.real_transport import skip_unless_installed
from tests.support.victims import END_S, LEASE_S, Cluster, Fault, Step, noticed

skip_unless_installed()


def strike(cluster: Cluster, fault: Fault) -> None:
    if fault in (Fault.KILL, Fault.RESTART):
        cluster.registry.kill()
    else:
        cluster.registry.freeze()
    if fault is Fault.RESTART:
        cluster.registry.restart()
    elif fault is Fault.SHORT_FREEZE:
        time.sleep(LEASE_S / 2)
        cluster.registry.thaw()


def heal(cluster: Cluster, fault: Fault) -> None:
    """It is there again, and every prefill rank is registered."""
    if fault is Fault.LONG_FREEZE:
        cluster.registry.thaw()
    elif fault is Fault.FREEZE:
        cluster.registry.thaw()
        cluster.registry.kill()
    if fault in (Fault.KILL, Fault.FREEZE):
        cluster.registry.restart()
    for each in cluster.prefills:
        assert each.do(Rank.registered, END_S)


def is_away(fault: Fault) -> bool:
    return fault in (Fault.KILL, Fault.LONG_FREEZE, Fault.FREEZE)


@pytest.mark.parametrize(("path", "step", "fault"), cells(Role.REGISTRY, Step.BETWEEN_CHUNKS))
def test_rooms_between_ranks_that_know_each_other_do_not_notice(
    clusters: Clusters, path: str, step: Step, fault: Fault
):
    cluster = clusters.get(path)
    try:
        with cluster.nothing_left_over(*cluster.engines):
            room = cluster.reach(step)
            struck_at = time.monotonic()
            strike(cluster, fault)
            while time.monotonic() < struck_at + 2 * LEASE_S:
                cluster.served()
            cluster.finish(room)
            heal(cluster, fault)
            cluster.served()
    except BaseException:
        clusters.drop(cluster)
        raise


@pytest.mark.parametrize(("path", "step", "fault"), cells(Role.REGISTRY, Step.NOT_CONNECTED))
def test_a_decode_rank_that_looks_an_engine_up_waits_or_says_why(
    clusters: Clusters, path: str, step: Step, fault: Fault
):
    cluster = clusters.get(path)
    try:
        with cluster.nothing_left_over(*cluster.engines, step=step):
            cluster.prepare(step)
            standing = [cluster.begin(each, cluster.other_decode) for each in cluster.prefills]
            room = cluster.reach(step)
            strike(cluster, fault)
            cluster.open_target(room)
            for each in standing:
                cluster.finish(each)
            if is_away(fault):
                end = cluster.fails(cluster.struck_decode, room)
                assert re.search(rf"the registry at {cluster.registry.url} cannot be reached", end.error), end
                assert cluster.struck_decode.do(Rank.wait_reusable, room.number, END_S)
                heal(cluster, fault)
            else:
                heal(cluster, fault)
                cluster.finish(room)
            cluster.served()
    except BaseException:
        clusters.drop(cluster)
        raise


@pytest.mark.parametrize(
    "fault",
    [pytest.param(each, id=each.name.lower(), marks=() if each is Fault.KILL else pytest.mark.full) for each in Fault],
)
def test_a_prefill_rank_that_starts_meanwhile_registers_as_soon_as_it_can(clusters: Clusters, fault: Fault):
    """It is killed first, so that a decode rank must look it up again."""
    cluster = clusters.get("direct")
    survivors = (cluster.other_prefill, *cluster.decodes)
    try:
        with cluster.nothing_left_over(*survivors):
            killed_at = time.monotonic()
            cluster.struck_prefill.process.kill()
            strike(cluster, fault)
            cluster.restart(cluster.struck_prefill, is_registered=not is_away(fault))
            noticed(killed_at)
            for each in cluster.decodes:
                cluster.run(cluster.other_prefill, each)
            heal(cluster, fault)
            cluster.served()
    except BaseException:
        clusters.drop(cluster)
        raise
