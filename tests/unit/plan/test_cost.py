"""The cost model: what makes either path faster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from kvferry.errors import SettingsError
from kvferry.plan.cost import PathCosts, TransferPath, WriteSize, choose, estimate

COSTS = PathCosts(
    seconds_per_descriptor=1e-3,
    wire_bytes_per_s=1e6,
    bulk_bytes_per_s=4e6,
    gather_bytes_per_s=5e5,
    scatter_bytes_per_s=2e6,
    seconds_per_run=1e-6,
    seconds_per_write=1e-2,
)


def test_the_estimates_are_what_the_constants_say():
    size = WriteSize(num_bytes=1_000_000, runs=1_000, descriptors=500, bulk_writes=4)
    seconds = estimate(size, COSTS)
    assert seconds[TransferPath.DIRECT] == pytest.approx(0.01 + 0.5 + 1.0)
    gather, wire, scatter = 2.0 + 0.001, 0.25 + 0.04, 0.5 + 0.001
    assert seconds[TransferPath.STAGED] == pytest.approx(gather + (wire + scatter) / 4)


def test_in_one_memory_nothing_overlaps():
    size = WriteSize(num_bytes=1_000_000, runs=1_000, descriptors=500, bulk_writes=4)
    apart, together = estimate(size, COSTS), estimate(size, replace(COSTS, is_one_memory=True))
    assert together[TransferPath.STAGED] == pytest.approx(2.001 + 0.29 + 0.501)
    assert together[TransferPath.DIRECT] == apart[TransferPath.DIRECT]


def test_a_single_bulk_write_overlaps_with_nothing():
    size = WriteSize(num_bytes=1_000_000, runs=1, descriptors=1, bulk_writes=1)
    assert estimate(size, COSTS)[TransferPath.STAGED] == pytest.approx(2.0 + 0.26 + 0.5 + 2e-6)


def test_small_runs_are_staged_and_large_ones_are_not():
    num_bytes = 1 << 28
    paths = [
        choose(WriteSize(num_bytes, num_bytes // length, num_bytes // length, num_bytes >> 20), PathCosts()).path
        for length in (256, 512, 2048, 4096, 32768, 131072, 1 << 20)
    ]
    assert paths[:4] == [TransferPath.STAGED] * 4
    assert paths[-3:] == [TransferPath.DIRECT] * 3


def test_staged_must_be_faster_by_far():
    """Direct takes a second; staged less, but no less than the measurements may be off."""
    size = WriteSize(num_bytes=1_000_000, runs=1, descriptors=1, bulk_writes=1)
    costs = replace(
        COSTS, seconds_per_descriptor=1e-6, seconds_per_write=1e-6, bulk_bytes_per_s=1e9, scatter_bytes_per_s=1e9
    )
    slightly, much = replace(costs, gather_bytes_per_s=1.3e6), replace(costs, gather_bytes_per_s=2e6)
    choice = choose(size, slightly)
    assert choice.staged_s < choice.direct_s
    assert choice.path is TransferPath.DIRECT
    assert "are not much slower than gathering" in choice.reason
    assert choose(size, much).path is TransferPath.STAGED


def test_merging_makes_direct_faster():
    size = WriteSize(num_bytes=1 << 28, runs=1 << 20, descriptors=1 << 20, bulk_writes=256)
    assert choose(size, PathCosts()).path is TransferPath.STAGED
    assert choose(replace(size, descriptors=128), PathCosts()).path is TransferPath.DIRECT


def test_a_machine_with_cheap_descriptors_writes_direct():
    size = WriteSize(num_bytes=1 << 28, runs=1 << 20, descriptors=1 << 20, bulk_writes=256)
    assert choose(size, PathCosts(seconds_per_descriptor=1e-8)).path is TransferPath.DIRECT


def test_slow_staging_memory_makes_direct_faster():
    size = WriteSize(num_bytes=1 << 28, runs=1 << 20, descriptors=1 << 20, bulk_writes=256)
    for slow in (
        PathCosts(gather_bytes_per_s=1e7),
        PathCosts(scatter_bytes_per_s=1e7),
        PathCosts(bulk_bytes_per_s=1e7),
        PathCosts(seconds_per_run=1e-4),
    ):
        assert choose(size, slow).path is TransferPath.DIRECT


def test_the_reason_names_what_was_compared():
    choice = choose(WriteSize(num_bytes=1 << 28, runs=1 << 20, descriptors=1 << 20, bulk_writes=256), PathCosts())
    assert choice.staged_s < choice.direct_s
    for named in ("1,048,576 descriptors of 256 bytes", "gathering 1,048,576 runs", "256 bulk writes", "is faster"):
        assert named in choice.reason
    assert choice.reason.index("gathering") < choice.reason.index("descriptors")


def test_the_reason_begins_with_the_winner():
    choice = choose(WriteSize(num_bytes=1 << 20, runs=1, descriptors=1, bulk_writes=1), PathCosts())
    assert choice.reason.startswith("1 descriptor of 1,048,576 bytes (")


@pytest.mark.parametrize(
    ("name", "value"), [("seconds_per_descriptor", 0.0), ("wire_bytes_per_s", 0.0), ("seconds_per_run", -1e-9)]
)
def test_a_cost_that_is_not_positive_is_refused(name: str, value: float):
    with pytest.raises(SettingsError, match=name):
        replace(PathCosts(), **cast(Any, {name: value}))


@pytest.mark.parametrize("numbers", [(0, 1, 1, 1), (8, 1, 2, 1), (8, 1, 1, 0), (8, 9, 1, 1)])
def test_a_load_that_makes_no_sense_is_refused(numbers: tuple[int, int, int, int]):
    with pytest.raises(SettingsError, match="make no sense"):
        WriteSize(*numbers)
