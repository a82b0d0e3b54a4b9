"""Pools: memory of every layout as arrays, pages in random order, and a check that every wrong byte falls to."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.support.tiers import Tier
from tests.unit.testing.models import ATTENTION, EVERYTHING, LAYERS, PACKED, WINDOW, pool

from kvferry import GroupPages, Interval, RankCoordinates, RankLayout, all_coordinates, shard_from_tensors
from kvferry.layout import Device, MemoryKind, PageOrder, VirtualPools, virtual_layout
from kvferry.pools.pool import ALIGNMENT, bytes_of, placed
from kvferry.testing import Block, CopiedContents, KnownContents, Pool, copied_contents

CONTENTS = KnownContents(3)
KINDS = {"attention": ATTENTION, "window": WINDOW, "packed": PACKED, "everything": EVERYTHING}


@pytest.mark.parametrize("order", [PageOrder.NHD, PageOrder.HND])
@pytest.mark.parametrize("beside", [(), (("k", "v"), ("conv_q", "conv_v"))], ids=["apart", "beside"])
def test_every_byte_of_every_element_is_that_elements_alone(order: PageOrder, beside: Any):
    made = pool(EVERYTHING, order=order, beside=beside)
    (block,) = made.blocks
    made.wipe(0)
    total = 0
    for shard in made.layout.shards:
        for index in range(LAYERS):
            elements = made.elements(shard, index)
            elements += 1
            total += elements.size
            assert (elements == 1).all(), "two elements of one array share memory"
    assert int(np.count_nonzero(block.host)) == total, "elements of two arrays share memory"
    assert block.address % ALIGNMENT == 0


def test_elements_are_where_the_layout_says():
    made = pool(EVERYTHING, RankCoordinates(tp_rank=1, tp_size=2), order=PageOrder.HND, beside=(("k", "v"),))
    for shard in made.layout.shards:
        elements, steps = made.elements(shard, 1), {step.name: step.stride for step in shard.steps()}
        place = tuple(size - 1 for size in elements.shape)
        address = shard.addresses[1] + place[0] * steps["page"] + place[1] * steps.get("token", 0)
        address += sum(inner * stride for inner, stride in zip(place[2:], shard.strides, strict=True))
        found: Any = elements[place[0], place[1], ...]
        for inner in place[2:]:
            found = found[inner, ...]
        assert found.ctypes.data == address


def test_an_engines_own_tensors_are_looked_at_where_they_are():
    tensors = [np.zeros((16, 2, 4, 4, 2), np.int16) for _ in range(LAYERS)]
    dims = ("page", "token", "head", "dim")
    shards = [
        shard_from_tensors(each.component, [tensor[:, part] for tensor in tensors], dims=dims)
        for part, each in enumerate(ATTENTION)
    ]
    made = Pool(RankLayout(shards=tuple(shards)), memory=tensors)
    made.elements(made.layout.shards[1], 2)[5, 3, 1, 1] = 7
    assert tensors[2][5, 1, 3, 1, 1] == 7
    assert sum(int(tensor.sum()) for tensor in tensors) == 7
    with pytest.raises(ValueError, match=r"call wipe\(\) or mark\(\)"):
        made.check(CONTENTS, [1])
    made.mark()
    made.fill(CONTENTS, [1])
    made.check(CONTENTS, [1])
    tensors[0][5, 0, 0, 0, 0] = 1
    assert [str(each) for each in made.wrong_bytes(CONTENTS, [1])] == [
        "k of layer 0, page 5: 1 byte changed, though nobody was to write there, the first at token 0 head 0 dim 0"
    ]


def test_a_device_is_looked_at_by_way_of_a_copy():
    layout = virtual_layout(
        ATTENTION,
        RankCoordinates(),
        VirtualPools(num_pages=4, layers_per_stage=(LAYERS,)),
        device=Device(MemoryKind.VRAM),
    )
    with pytest.raises(ValueError, match="not seen by this process"):
        Pool(layout)
    address = 1 << 40
    copy = np.zeros(bytes_of(layout), np.uint8)
    made = Pool(placed(layout, address), blocks=[Block(address, copy)])
    made.fill(CONTENTS, [2, 0])
    assert copy.any()
    made.check(CONTENTS, [2, 0], elsewhere=False)


def test_memory_that_is_in_no_block_is_refused():
    made = pool()
    other = pool().layout.shards[0]
    with pytest.raises(ValueError, match="layer 1 of the shard of 'k' lies in none"):
        made.elements(other, 1)


# ---- pages -------------------------------------------------------------------------------------------------------


def test_pages_come_in_random_order_and_again_only_when_none_is_left():
    made = pool(EVERYTHING)
    first, second = made.take("kv", 10), made.take("kv", 6)
    assert sorted([*first, *second]) == list(range(16))
    assert first.tolist() != sorted(first)
    assert made.untaken()["kv"].tolist() == []
    assert len(made.untaken()["state"]) == 16
    assert made.take("kv", 3).tolist() == first[:3].tolist()
    assert pool(EVERYTHING).take("kv", 10).tolist() == first.tolist(), "the same seed"
    assert pool(EVERYTHING, seed=1).take("kv", 10).tolist() != first.tolist()


def test_groups_that_share_memory_get_no_page_twice():
    shards = pool().layout.shards
    late = [
        replace(shard, box=(Interval(2, 3), *shard.box[1:]), addresses=shard.addresses[:1], group="late")
        for shard in shards
    ]
    pending = [replace(shard, box=(Interval(0, 2), *shard.box[1:]), addresses=shard.addresses[:2]) for shard in shards]
    made = Pool.backed(RankLayout(shards=(*pending, *late)))
    taken = [*made.take("kv", 5), *made.take("late", 5), *made.take("kv", 6)]
    assert sorted(taken) == list(range(16))


@pytest.mark.parametrize(
    ("tokens", "prefix_tokens", "kv", "window"),
    [
        (10, 0, (0, 3), (1, 2)),
        (10, 5, (1, 2), (1, 2)),
        (10, 9, (2, 1), (2, 1)),
        (10, 10, (2, 0), (2, 0)),
        (4, 0, (0, 1), (0, 1)),
    ],
)
def test_a_request_gets_the_pages_that_it_needs(
    tokens: int, prefix_tokens: int, kv: tuple[int, int], window: tuple[int, int]
):
    """A window of 6 tokens, in pages of 4."""
    taken = pool(EVERYTHING).pages_for(tokens, prefix_tokens=prefix_tokens)
    assert {name: (each.start, len(each.pages)) for name, each in taken.items()} == {
        "kv": kv,
        "window-6": window,
        "state": (0, 1),
    }
    whole = pool(EVERYTHING).pages_for(tokens, whole_windows=True)["window-6"]
    assert (whole.start, len(whole.pages)) == (0, -(-tokens // 4))


def test_what_was_wiped_is_untouched_until_somebody_writes():
    made = pool(EVERYTHING)
    assert made.touched_bytes(range(16)) == 0
    made.fill(CONTENTS, {name: [3, 4] for name in ("kv", "window-6", "state")}, tokens=8)
    assert made.touched_bytes([5]) == 0
    assert made.touched_bytes([3]) > 0.9 * made.bytes_per_page  # of all bytes some are what poison is, too
    made.wipe_pages([3, 4])
    assert made.touched_bytes(range(16)) == 0
    made.wipe(1)
    assert made.touched_bytes(range(16), 1) == 0
    assert made.touched_bytes([0]) == made.bytes_per_page


# ---- the check ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [8, 11])
def test_every_single_wrong_byte_is_found_and_named(kind: str, tokens: int, tier: Tier):
    """Wherever a byte is flipped, it is found, as one that was to arrive or one that was not, or it is left open."""
    made = pool(KINDS[kind])
    pages = made.pages_for(tokens)
    made.fill(CONTENTS, pages, tokens=tokens)
    awaited = sum(each.num_bytes for each in pool(KINDS[kind]).wrong_bytes(CONTENTS, pages, tokens=tokens))
    assert not made.wrong_bytes(CONTENTS, pages, tokens=tokens)
    (block,) = made.blocks
    found = {True: 0, False: 0, None: 0}
    step = tier.amount(quick=37, full=17, long=1)
    for place in range(0, len(block.host), step):
        block.host[place] ^= 0x10
        wrong = made.wrong_bytes(CONTENTS, pages, tokens=tokens)
        block.host[place] ^= 0x10
        assert sum(each.num_bytes for each in wrong) == len(wrong) <= 1
        found[wrong[0].was_awaited if wrong else None] += 1
    assert found[True] == pytest.approx(awaited / step, rel=0.1)
    assert found[False] > 0
    # Behind the last token of a page that is not full, and before a window's first token.
    assert (found[None] > 0) == (kind in ("window", "everything") or (kind == "attention" and tokens == 11))


def test_a_wrong_byte_is_named():
    made = pool(rank=RankCoordinates(tp_rank=1, tp_size=2))
    pages = [7, 2]
    made.fill(CONTENTS, pages)
    made.check(CONTENTS, pages)
    made.elements(made.layout.shards[1], 2)[2, 3, 1, 0] ^= 1
    made.elements(made.layout.shards[0], 0)[9, 0, 0, 1] = 0
    with pytest.raises(AssertionError, match=r"^wrong bytes on rank 1: 3\n") as caught:
        made.check(CONTENTS, pages)
    assert str(caught.value).splitlines()[1:] == [
        "  k of layer 0, page 9: 2 bytes changed, though nobody was to write there, the first at token 0 head 2 dim 1",
        "  v of layer 2, page 2: 1 byte not what was to arrive, the first at token 3 head 3 dim 0",
    ]
    made.elements(made.layout.shards[1], 2)[2, 3, 1, 0] ^= 1
    made.check(CONTENTS, pages, elsewhere=False)  # of other transfers, say


def test_bytes_between_tensors_are_looked_at():
    made = pool(num_pages=3)
    (block,) = made.blocks
    used = np.zeros(len(block.host), np.bool_)
    for region in made.layout.regions():
        used[region.address - block.address : region.stop - block.address] = True
    (gap, *_) = np.flatnonzero(~used)
    block.host[gap] = 0
    (wrong,) = made.wrong_bytes(CONTENTS, [])
    assert (wrong.what, wrong.num_bytes) == ("memory between two tensors", 1)
    assert f"{block.address + int(gap):#x}" in str(wrong)


def test_many_wrong_places_are_counted_and_few_shown():
    with pytest.raises(AssertionError, match=re.escape("and in 10 more places")):
        pool().check(CONTENTS, [0, 1, 2])  # in 3 pages of 3 layers of keys and values


@pytest.mark.parametrize("swapped", ["pages", "tokens", "heads", "layers", "components", "requests"])
def test_right_bytes_in_a_wrong_place_are_wrong(swapped: str):
    made = pool()
    made.fill(CONTENTS, [4, 5])
    keys, values = (made.elements(shard, 0) for shard in made.layout.shards)
    if swapped == "pages":
        keys[[4, 5]] = keys[[5, 4]]
    elif swapped == "tokens":
        keys[4, [0, 1]] = keys[4, [1, 0]]
    elif swapped == "heads":
        keys[4, :, [0, 1]] = keys[4, :, [1, 0]]
    elif swapped == "layers":
        keys[4] = made.elements(made.layout.shards[0], 1)[4]
    elif swapped == "components":
        keys[4], values[4] = values[4].copy(), keys[4].copy()
    else:
        made.fill(KnownContents(4), [4], tokens=4)
    assert made.wrong_bytes(CONTENTS, [4, 5])


def test_a_prefix_must_stay_as_it_was():
    """A decode rank holds 6 tokens of a request, the last two of them in the first page that it asks for."""
    made, given = pool(), {"kv": GroupPages([6, 1], start=1)}
    layers = [(shard, index, made.elements(shard, index)) for shard in made.layout.shards for index in range(LAYERS)]
    for _, _, elements in layers:
        elements[6, :2] = 7
    made.mark()
    for shard, index, elements in layers:
        elements[[6, 6, 1, 1, 1, 1], [2, 3, 0, 1, 2, 3]] = CONTENTS.of(shard, index, np.arange(6, 12))
    made.check(CONTENTS, given, tokens=12, prefix_tokens=6)
    made.fill(CONTENTS, given, tokens=12)
    (changed, *_) = made.wrong_bytes(CONTENTS, given, tokens=12, prefix_tokens=6)
    assert (changed.was_awaited, changed.page, changed.first) == (False, 6, "token 0 head 0 dim 0")


# ---- contents ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_ranks_hold_can_be_copied_and_put_together(kind: str):
    sources = [pool(KINDS[kind], rank) for rank in all_coordinates(tp_size=2)]
    held = [(source, source.pages_for(10, whole_windows=True)) for source in sources]
    for source, pages in held:
        source.fill(CONTENTS, pages, tokens=10)
    copied = copied_contents(held, tokens=10)
    target = pool(KINDS[kind], seed=9)
    pages = target.pages_for(10)
    target.fill(CONTENTS, pages, tokens=10)
    target.check(copied, pages, tokens=10)
    shard = target.layout.shards[0]
    target.elements(shard, 1)[int(pages[shard.group].pages[-1]), 0] ^= 1
    assert target.wrong_bytes(copied, pages, tokens=10)


def test_ranks_that_disagree_are_refused():
    """Of 4 heads, 8 ranks hold each twice."""
    twins = [pool(rank=RankCoordinates(tp_rank=rank, tp_size=8)) for rank in (0, 1)]
    for twin in twins:
        twin.fill(CONTENTS, [0])
    twins[1].elements(twins[1].layout.shards[1], 2)[0, 3, 0, 0] ^= 1
    with pytest.raises(ValueError, match="two ranks hold the same part of layer 2 of 'v'"):
        copied_contents([(twin, [0]) for twin in twins], tokens=4)


def test_what_no_rank_holds_is_said():
    half = pool(rank=RankCoordinates(tp_rank=0, tp_size=2))
    half.fill(CONTENTS, [0])
    copied = copied_contents([(half, [0])], tokens=4)
    with pytest.raises(ValueError, match="no rank that was copied holds all of layer 0 of 'k'"):
        pool().check(copied, [0], tokens=4)
    with pytest.raises(ValueError, match="no rank"):
        pool().check(CopiedContents(4), [0], tokens=4)


def test_elements_of_one_request_differ_from_those_of_another():
    shard, positions = pool().layout.shards[0], np.arange(100)
    one, other = (KnownContents(request).of(shard, 0, positions) for request in (1, 2))
    assert np.count_nonzero(one == other) < one.size // 100
