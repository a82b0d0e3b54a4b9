"""Context parallelism: which positions a rank holds, against positions listed one by one."""

from __future__ import annotations

import tracemalloc
from math import lcm
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.errors import LayoutError, UsageError
from kvferry.layout import TokenPartition, TokenShare, contiguous, interleaved, zigzag
from kvferry.layout.tokens import BlockLength, parts_met


def shares_may_meet(one: TokenShare, other: TokenShare) -> bool:
    return one.part in parts_met(one.partition, other)


def owners(partition: TokenPartition, tokens: int) -> list[int]:
    """The part that gets each position, partitioned like cards."""
    pattern, page, block = partition.pattern, partition.page_tokens, partition.block_tokens
    if page is not None:
        pages = np.array_split(np.arange(-(-tokens // page)), len(pattern))
        dealt = [part for part, mine in zip(pattern, pages, strict=True) for _ in range(len(mine) * page)]
        return dealt[:tokens]
    if block is None:
        block = max(1, -(-tokens // len(pattern)))
    dealt = []
    while len(dealt) < tokens:
        for part in pattern:
            dealt += [part] * block
    return dealt[:tokens]


@st.composite
def partitions(draw: st.DrawFn) -> TokenPartition:
    size = draw(st.integers(1, 5))
    pattern = [*range(size), *draw(st.lists(st.integers(0, size - 1), max_size=4))]
    in_order = tuple(draw(st.permutations(pattern)))
    block, page = draw(st.tuples(st.none() | st.integers(1, 6), st.none()) | st.tuples(st.none(), st.integers(1, 6)))
    return TokenPartition(in_order, block, page)


@st.composite
def shares(draw: st.DrawFn) -> TokenShare:
    partition = draw(partitions())
    return TokenShare(partition, draw(st.integers(0, partition.num_parts - 1)))


# --- partitions

TO_ONE_PART = (contiguous(1), contiguous(1, 16), interleaved(1, 16), zigzag(1), TokenPartition((0, 0, 0), None))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_kinds_of_context_parallelism(size: int):
    assert owners(interleaved(size), 2 * size) == [*range(size), *range(size)]
    tokens = 6 * size
    assert owners(contiguous(size), tokens) == [part for part in range(size) for _ in range(6)]
    parts = [part for part in range(size) for _ in range(3)]
    assert owners(zigzag(size), tokens) == parts + parts[::-1]


def test_blocks_of_tokens_go_round_robin():
    partition = interleaved(2, 3)
    assert owners(partition, 12) == [0, 0, 0, 1, 1, 1] * 2
    assert (partition.num_parts, partition.is_whole, partition.depends_on_length) == (2, False, False)


@pytest.mark.parametrize("kind", [contiguous, zigzag])
def test_one_cycle_over_a_request_needs_its_length(kind: type):
    partition = kind(2)
    assert partition.depends_on_length
    with pytest.raises(UsageError, match=r"contiguous context parallelism .* say how many tokens it has"):
        partition.block(None)


@pytest.mark.parametrize(
    ("partition", "tokens", "block"),
    [
        (contiguous(4), 8, 2),
        (contiguous(4), 9, 3),
        (contiguous(4), 1, 1),
        (contiguous(4), 0, 1),
        (zigzag(2), 16, 4),
        (zigzag(2), 17, 5),
        (interleaved(4, 16), 3, 16),
    ],
)
def test_a_block_is_as_long_as_one_cycle_needs(partition: TokenPartition, tokens: int, block: int):
    assert partition.block(tokens) == BlockLength(block)


@pytest.mark.parametrize(
    ("size", "pages", "tokens", "ranges"),
    [
        (3, 10, 40, [(0, 16), (16, 28), (28, 40)]),
        (3, 10, 37, [(0, 16), (16, 28), (28, 37)]),
        (3, 12, 45, [(0, 16), (16, 32), (32, 45)]),
        (3, 11, 44, [(0, 16), (16, 32), (32, 44)]),
        (3, 3, 12, [(0, 4), (4, 8), (8, 12)]),
        (3, 2, 5, [(0, 4), (4, 5), (5, 5)]),
        (3, 1, 4, [(0, 4), (4, 4), (4, 4)]),
        (2, 0, 0, [(0, 0), (0, 0)]),
    ],
)
def test_whole_pages_are_given_out_evenly_and_the_first_parts_get_one_more(
    size: int, pages: int, tokens: int, ranges: list[tuple[int, int]]
):
    partition = contiguous(size, page_tokens=4)
    assert -(-tokens // 4) == pages
    block = partition.block(tokens)
    for part, (start, stop) in enumerate(ranges):
        share = TokenShare(partition, part)
        assert np.flatnonzero(share.holds(np.arange(tokens), block=block)).tolist() == list(range(start, stop))
        before = [min(max(position - start, 0), stop - start) for position in range(tokens + 1)]
        assert share.local(np.arange(tokens + 1), block=block).tolist() == before
        assert [share.position(local, block=block) for local in range(stop - start)] == list(range(start, stop))
        assert share.position(stop - start, block=block) >= tokens
    assert partition.depends_on_length
    assert partition != contiguous(size)


def test_whole_pages_take_no_longer_in_a_long_request():
    block = contiguous(3, page_tokens=4).block(4 * (3 * 2**40 + 1))
    assert block == BlockLength(4 * 2**40, longer=1, more=4)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (((0, 1), None, 0), "page_tokens is 0: a page has 1 to 4294967296 tokens"),
        (((0, 1), None, 2**32 + 1), "page_tokens is 4294967297"),
        (((0, 1), 16, 16), "blocks of 16 tokens and whole pages of 16"),
    ],
)
def test_impossible_pages_are_refused(arguments: Any, says: str):
    with pytest.raises(LayoutError, match=says):
        TokenPartition(*arguments)


@pytest.mark.parametrize("partition", [TokenPartition(), *TO_ONE_PART])
def test_a_single_part_holds_every_token_of_any_request(partition: TokenPartition):
    assert (partition.num_parts, partition.is_whole, partition.depends_on_length) == (1, True, False)
    share = TokenShare(partition)
    block = partition.block(None)
    positions = np.arange(50, dtype=np.int64)
    assert share.holds(positions, block=block).all()
    assert share.local(positions, block=block).tolist() == positions.tolist()
    assert [share.position(each, block=block) for each in range(50)] == positions.tolist()
    assert str(partition) == "every token"


@pytest.mark.parametrize("partition", TO_ONE_PART)
def test_all_dealings_to_a_single_part_are_equal(partition: TokenPartition):
    """Otherwise two sides without context parallelism would seem to partition tokens differently."""
    assert partition == TokenPartition()
    assert hash(partition) == hash(TokenPartition())
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(partition), type=TokenPartition)
    assert travelled == TokenPartition()
    assert shares_may_meet(TokenShare(partition), TokenShare())


@pytest.mark.parametrize("pattern", [(1,), (0, 2), (0, -1), (1, 2)])
def test_a_pattern_that_leaves_a_part_out_is_refused(pattern: tuple[int, ...]):
    with pytest.raises(LayoutError, match="must name every part from 0 on at least once") as caught:
        TokenPartition(pattern)
    assert str(list(pattern)) in str(caught.value)


@pytest.mark.parametrize("pattern", [(), tuple(range(2**14 + 1))], ids=["empty", "very long"])
def test_a_pattern_of_an_impossible_length_is_refused(pattern: tuple[int, ...]):
    with pytest.raises(LayoutError, match=f"a pattern has 1 to 16384 blocks, not {len(pattern)}"):
        TokenPartition(pattern)


def test_a_part_with_an_absurd_number_costs_no_memory():
    tracemalloc.start()
    with pytest.raises(LayoutError, match="must name every part"):
        TokenPartition((0, 10**9))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_local_positions_of_a_long_pattern_cost_no_table():
    share = TokenShare(interleaved(2**14), 3)
    positions = np.arange(2**16, dtype=np.int64)
    tracemalloc.start()
    local = share.local(positions, block=BlockLength(1))
    assert tracemalloc.get_traced_memory()[1] < 64 * positions.nbytes
    tracemalloc.stop()
    assert np.array_equal(local, np.cumsum(positions % 2**14 == 3) - (positions % 2**14 == 3))


@pytest.mark.parametrize("block_tokens", [0, -1, 2**32 + 1])
def test_an_impossible_block_is_refused(block_tokens: int):
    with pytest.raises(LayoutError, match=f"block_tokens is {block_tokens}: a block has 1 to 4294967296 tokens"):
        interleaved(2, block_tokens)


@pytest.mark.parametrize("part", [-1, 2])
def test_a_part_that_does_not_exist_is_refused(part: int):
    with pytest.raises(LayoutError, match=f"part {part} does not exist: positions are partitioned over 2 parts"):
        TokenShare(interleaved(2), part)


def test_dealings_in_words():
    assert str(interleaved(3, 16)) == "blocks of 16 tokens over parts [0, 1, 2]"
    assert str(contiguous(2)) == "one cycle over parts [0, 1]"
    assert str(contiguous(2, 16)) == "one cycle of whole pages of 16 tokens over parts [0, 1]"
    assert str(zigzag(2)) == "one cycle over parts [0, 1, 1, 0]"


# --- shares


@given(shares(), st.integers(0, 80))
def test_a_share_numbers_the_positions_that_it_holds(share: TokenShare, tokens: int):
    block = share.partition.block(tokens)
    dealt = owners(share.partition, tokens)
    mine = [position for position, part in enumerate(dealt) if part == share.part]
    positions = np.arange(tokens, dtype=np.int64)
    assert np.flatnonzero(share.holds(positions, block=block)).tolist() == mine
    before = [sum(held < position for held in mine) for position in range(tokens + 1)]
    assert share.local(np.arange(tokens + 1, dtype=np.int64), block=block).tolist() == before
    assert [share.held_before(position, block=block) for position in range(tokens + 1)] == before
    assert [share.position(local, block=block) for local in range(len(mine))] == mine


@given(shares(), st.integers(0, 80), st.integers(0, 80))
def test_ranges_are_the_blocks_that_a_share_holds(share: TokenShare, low: int, high: int):
    block = share.partition.block(80)
    starts, stops = share.ranges(low, high, block=block)
    dealt = owners(share.partition, 80)
    found = [position for start, stop in zip(starts, stops, strict=True) for position in range(start, stop)]
    if low < high:
        assert found == [position for position in range(low, high) if dealt[position] == share.part]
        assert (starts < stops).all()


@given(shares(), st.integers(1, 60))
def test_local_positions_behind_a_request_lie_behind_it(share: TokenShare, tokens: int):
    """A page's last positions may have no tokens: what would be there comes after the request."""
    block = share.partition.block(tokens)
    held = share.held_before(tokens, block=block)
    assert all(share.position(held + more, block=block) >= tokens for more in range(5))


@given(partitions(), st.integers(0, 60))
def test_every_position_has_one_owner(partition: TokenPartition, tokens: int):
    block = partition.block(tokens)
    positions = np.arange(tokens, dtype=np.int64)
    held = [TokenShare(partition, part).holds(positions, block=block) for part in range(partition.num_parts)]
    assert (np.sum(held, axis=0) == 1).all()


def some_request_shows_that_they_meet(one: TokenShare, other: TokenShare, longest: int) -> bool:
    for tokens in range(1, longest + 1):
        both = zip(
            owners(one.partition, tokens),
            owners(other.partition, tokens),
            strict=True,
        )
        if (one.part, other.part) in both:
            return True
    return False


@given(shares(), shares())
@example(TokenShare(interleaved(2), 0), TokenShare(interleaved(2), 1))
@example(TokenShare(interleaved(2, 2), 0), TokenShare(interleaved(4, 1), 3))
@example(TokenShare(contiguous(2), 0), TokenShare(contiguous(2), 1))
def test_shares_that_meet_are_never_said_to_be_apart(one: TokenShare, other: TokenShare):
    if some_request_shows_that_they_meet(one, other, longest=40):
        assert shares_may_meet(one, other)
        assert shares_may_meet(other, one)


@given(shares(), shares())
def test_shares_of_fixed_blocks_are_apart_if_no_request_shows_otherwise(one: TokenShare, other: TokenShare):
    if one.partition.block_tokens is None or other.partition.block_tokens is None:
        return
    cycles = [len(each.partition.pattern) * each.partition.block_tokens for each in (one, other)]  # type: ignore[operator]
    tokens = lcm(*cycles)
    ours, theirs = (owners(each.partition, tokens) for each in (one, other))
    meet = (one.part, other.part) in zip(ours, theirs, strict=True)
    assert shares_may_meet(one, other) == meet


def test_parts_of_one_dealing_never_meet():
    for partition in (contiguous(3), contiguous(3, 4), zigzag(3), interleaved(3, 2)):
        parts = [TokenShare(partition, part) for part in range(3)]
        assert [[shares_may_meet(one, other) for one in parts] for other in parts] == np.eye(3, dtype=bool).tolist()


def test_a_period_too_long_to_look_at_counts_as_a_meeting():
    one, other = TokenShare(interleaved(2, 100_003), 0), TokenShare(interleaved(2, 100_019), 1)
    assert shares_may_meet(one, other)


def test_shares_travel():
    share = TokenShare(zigzag(2), 1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(share), type=TokenShare) == share
