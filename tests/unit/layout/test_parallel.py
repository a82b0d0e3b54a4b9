"""Rank numbers, and the part of an axis that each rank holds."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LayoutError
from kvferry.layout import Interval, RankCoordinates, all_coordinates, split, stage_layers

SIZES = st.integers(1, 5)


@pytest.mark.parametrize("axis", ["tp", "cp", "pp", "dp"])
def test_a_parallel_size_of_zero_is_refused(axis: str):
    message = f"{axis}_size is 0: a parallel size is at least 1"
    with pytest.raises(LayoutError, match=message):
        RankCoordinates(**{f"{axis}_size": 0})
    with pytest.raises(LayoutError, match=message):
        all_coordinates(**{f"{axis}_size": 0})


@pytest.mark.parametrize("axis", ["tp", "cp", "pp", "dp"])
@pytest.mark.parametrize("rank", [-1, 2, 3])
def test_a_rank_outside_of_its_size_is_refused(axis: str, rank: int):
    with pytest.raises(LayoutError, match=rf"{axis}_rank is {rank}: it must lie in \[0, 2\), the {axis}_size"):
        RankCoordinates(**{f"{axis}_rank": rank, f"{axis}_size": 2})


@given(SIZES, SIZES, SIZES, SIZES)
def test_engine_ranks_number_all_coordinates_once(tp: int, cp: int, pp: int, dp: int):
    ranks = all_coordinates(tp_size=tp, cp_size=cp, pp_size=pp, dp_size=dp)
    assert [rank.engine_rank for rank in ranks] == list(range(tp * cp * pp * dp))
    assert {rank.world_size for rank in ranks} == {tp * cp * pp * dp}
    assert len(set(ranks)) == len(ranks)
    for dp_rank in range(dp):
        group = [rank for rank in ranks if rank.dp_rank == dp_rank]
        assert {rank.group_size for rank in group} == {len(group)} == {tp * cp * pp}
        assert [rank.group_rank for rank in group] == list(range(len(group)))
        writers = [(rank.tp_rank, rank.cp_rank, rank.pp_rank) for rank in group if rank.is_aux_writer]
        assert writers == [(0, 0, pp - 1)]


def test_ranks_are_numbered_tensor_context_pipeline_data():
    rank = RankCoordinates(tp_rank=1, tp_size=4, pp_rank=2, pp_size=3, dp_rank=1, dp_size=2)
    assert (rank.group_rank, rank.engine_rank) == (2 * 4 + 1, 12 + 2 * 4 + 1)
    divided = RankCoordinates(tp_rank=1, tp_size=4, cp_rank=3, cp_size=5, pp_rank=2, pp_size=3, dp_rank=1, dp_size=2)
    assert (divided.group_rank, divided.engine_rank) == ((2 * 5 + 3) * 4 + 1, 60 + (2 * 5 + 3) * 4 + 1)
    assert (divided.group_size, divided.world_size) == (60, 120)


@given(st.integers(1, 40), st.integers(1, 40))
def test_split_covers_the_axis_in_order_and_evenly(total: int, parts: int):
    intervals = [split(total, parts, index) for index in range(parts)]
    assert intervals[0].start == 0
    assert intervals[-1].stop == total
    sizes = {len(interval) for interval in intervals}
    if parts <= total:
        assert all(one.stop == other.start for one, other in pairwise(intervals))
        assert sizes <= {total // parts, total // parts + 1}
    else:
        assert sizes == {1}
        holders = [sum(interval.start == index for interval in intervals) for index in range(total)]
        assert min(holders) >= parts // total
        assert max(holders) <= parts // total + 1
        assert sorted(intervals) == intervals


@pytest.mark.parametrize(
    ("heads", "tp", "starts"),
    [(2, 4, [0, 0, 1, 1]), (2, 8, [0, 0, 0, 0, 1, 1, 1, 1]), (1, 3, [0, 0, 0]), (4, 4, [0, 1, 2, 3])],
)
def test_more_ranks_than_heads_replicate_neighbours_as_engines_do(heads: int, tp: int, starts: list[int]):
    assert [split(heads, tp, rank) for rank in range(tp)] == [Interval(start, start + 1) for start in starts]


def test_sizes_that_do_not_divide_are_split_nearly_evenly():
    assert [split(6, 4, rank) for rank in range(4)] == [
        Interval(0, 1),
        Interval(1, 3),
        Interval(3, 4),
        Interval(4, 6),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 2, 0), "cannot split an axis of size 0: it must have at least one index"),
        ((4, 0, 0), "cannot split an axis into 0 parts: a parallel size is at least 1"),
        ((4, 2, 2), "part 2 does not exist: there are 2 parts"),
        ((4, 2, -1), "part -1 does not exist: there are 2 parts"),
    ],
)
def test_impossible_splits_are_refused(arguments: tuple[int, int, int], message: str):
    with pytest.raises(LayoutError, match=message):
        split(*arguments)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_stages_follow_each_other_with_the_layers_they_were_given(counts: list[int]):
    stages = [stage_layers(counts, stage) for stage in range(len(counts))]
    assert [len(stage) for stage in stages] == counts
    assert [index for stage in stages for index in range(stage.start, stage.stop)] == list(range(sum(counts)))


@pytest.mark.parametrize("stage", [-1, 2])
def test_a_stage_that_does_not_exist_is_refused(stage: int):
    with pytest.raises(LayoutError, match=f"pipeline stage {stage} does not exist: there are 2"):
        stage_layers([1, 1], stage)


def test_a_stage_of_negative_size_is_refused():
    with pytest.raises(LayoutError, match=r"layers per stage \[3, -1\] must not be negative"):
        stage_layers([3, -1], 0)
