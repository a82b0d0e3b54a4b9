"""Packed pages that say how they are cut: moved whole where they can be, between tokens where they must be."""

from __future__ import annotations

import re

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import IncompatiblePeerError, LayoutError
from kvferry.layout import (
    Entry,
    Interval,
    Paging,
    RankLayout,
    Shard,
    TokenPartition,
    TokenShare,
    contiguous,
    empty_shard,
    interleaved,
    packed_component,
)
from kvferry.layout.token_parts import cut_between_tokens
from kvferry.plan import (
    PairPlan,
    Unit,
    check_exchangeable,
    described_alike,
    pieces_for_receiver,
    prove,
)

PAGE, PAGES, WIDTH = 8, 5, 6
EVERY_TOKEN = TokenPartition()
INDEX = msgspec.structs.replace(
    packed_component("index", num_layers=2, num_kv_heads=1, packed=PAGE * WIDTH, dtype="uint8", packing="theirs"),
    token_parts=(4, 2),
)


def layout(
    partition: TokenPartition = EVERY_TOKEN, part: int = 0, *, page: int = PAGE, parts: bool = True
) -> RankLayout:
    component = msgspec.structs.replace(
        INDEX,
        axes=(*INDEX.axes[:2], msgspec.structs.replace(INDEX.axes[2], size=page * WIDTH)),
        token_parts=INDEX.token_parts if parts else (),
    )
    shard = Shard(
        component=component,
        box=component.whole,
        addresses=(1 << 20, 2 << 20),
        strides=(page * WIDTH, 1),
        paging=Paging(page, PAGES, page * WIDTH, 0),
    )
    return RankLayout(shards=(shard,), tokens=TokenShare(partition, part))


def engine(partition: TokenPartition, **more: bool) -> dict[int, RankLayout]:
    return {part: layout(partition, part, **more) for part in range(partition.num_parts)}


WHOLE = [
    (EVERY_TOKEN, EVERY_TOKEN),
    (interleaved(2), interleaved(2)),
    (contiguous(2), contiguous(2)),
    (interleaved(2, PAGE), EVERY_TOKEN),
    (interleaved(2, PAGE), interleaved(4, 3 * PAGE)),
]
CUT = [
    (interleaved(2), EVERY_TOKEN),
    (EVERY_TOKEN, interleaved(3, 2)),
    (interleaved(2), interleaved(4)),
    (interleaved(2, 2), interleaved(2, PAGE)),
    (contiguous(2), EVERY_TOKEN),
]


@pytest.mark.parametrize(("theirs", "ours"), WHOLE, ids=str)
def test_pages_that_can_be_moved_whole_are(theirs: TokenPartition, ours: TokenPartition):
    """Each in one run, as if nobody could cut it."""
    sources, (destination, *_) = engine(theirs), engine(ours).values()
    assert described_alike(sources, destination) == (sources, destination)
    plan = PairPlan(sources[0], destination, pieces_for_receiver(sources, destination)[:1])
    rows = plan.descriptor_rows(Unit.WHOLE)
    assert rows.source[:, 1].tolist() == [PAGE * WIDTH, PAGE * WIDTH], "one of each layer"


@pytest.mark.parametrize(("theirs", "ours"), CUT, ids=str)
def test_pages_that_would_have_to_be_cut_are(theirs: TokenPartition, ours: TokenPartition):
    """On both sides, each of which decides it alone; every token comes from one rank."""
    sources, receivers = engine(theirs), engine(ours)
    check_exchangeable(sources[0], receivers[0], source_name="prefill", destination_name="decode")
    held, wanted = described_alike(sources, receivers[0])
    for rank, source in sources.items():
        assert described_alike({rank: source}, receivers[0]) == ({rank: held[rank]}, wanted)
    assert [shard.component.entry for shard in wanted.shards] == [Entry.TOKEN, Entry.TOKEN]
    assert wanted.groups == receivers[0].groups, "pages keep their numbers"
    assert wanted.regions() == receivers[0].regions(), "and their memory"
    assert prove(sources, receivers, room=3).receivers == len(receivers)


@pytest.mark.parametrize("says", [(True, False), (False, True), (False, False)])
def test_pages_of_which_one_side_does_not_say_how_are_not_cut(says: tuple[bool, bool]):
    here, there = engine(interleaved(2), parts=says[0]), engine(EVERY_TOKEN, parts=says[1])
    assert described_alike(here, there[0]) == (here, there[0])
    words = (
        "layout of 'index': packed pages (theirs) cannot be cut between tokens, but prefill has pages of 8 tokens "
        "(blocks of 1 tokens over parts [0, 1]) and decode pages of 8 (every token); give both sides the same, or let "
        "ranks that share tokens take whole pages in turns"
    )
    with pytest.raises(IncompatiblePeerError, match=re.escape(words)):
        check_exchangeable(here[0], there[0], source_name="prefill", destination_name="decode")


@given(page=st.integers(1, 12), number=st.integers(0, PAGES - 1), seed=st.integers(0, 1 << 16))
def test_every_byte_of_a_page_is_one_tokens(page: int, number: int, seed: int):
    """All first parts, then all second parts: what is read by token is what was written by part."""
    whole = layout(page=page)
    cut = cut_between_tokens(whole, {"index"})
    keys = np.random.default_rng(seed).integers(0, 256, (page, 4), np.uint8)
    scales = np.random.default_rng(seed + 1).integers(0, 256, (page, 2), np.uint8)
    start = number * whole.shards[0].paging.page_stride
    memory = np.zeros(PAGES * page * WIDTH, np.uint8)
    memory[start : start + page * WIDTH] = np.concatenate([keys.ravel(), scales.ravel()])
    for token in range(page):
        found = []
        for shard in cut.shards:
            place = shard.addresses[0] - whole.shards[0].addresses[0]
            place += number * shard.paging.page_stride + token * shard.paging.token_stride
            found.append(memory[place : place + len(shard.box[2])])
        assert np.concatenate(found).tolist() == [*keys[token], *scales[token]]
    assert cut.regions() == whole.regions()


def test_a_peer_that_cuts_what_is_moved_whole_is_refused():
    """The bytes of a part are not those of a page's beginning."""
    source, destination = layout(), layout()
    cut = cut_between_tokens(source, {"index"}), cut_between_tokens(destination, {"index"})
    with pytest.raises(IncompatiblePeerError, match="cuts pages of 'index' between tokens, which"):
        PairPlan(source, destination, pieces_for_receiver({0: cut[0]}, cut[1]))


def test_a_rank_that_holds_nothing_describes_it_so_too():
    empty = RankLayout(shards=(empty_shard(INDEX, page_tokens=1, num_pages=1, group="elsewhere"),))
    (shard,) = cut_between_tokens(empty, {"index"}).shards
    assert (shard.component.entry, shard.box[2], shard.group) == (Entry.TOKEN, Interval(0, 0), "elsewhere")
    sources, receivers = {0: layout(interleaved(2)), 1: layout(interleaved(2), 1)}, {0: layout(), 1: empty}
    assert prove(sources, receivers, room=3).receivers == 2


def test_what_is_not_named_stays_as_it_is():
    assert cut_between_tokens(layout(), ()) == layout()


def test_parts_are_of_packed_pages_and_fill_them():
    with pytest.raises(LayoutError, match=r"token_parts \(4, 0\): packed pages alone have parts"):
        msgspec.structs.replace(INDEX, token_parts=(4, 0))
    with pytest.raises(LayoutError, match="packed pages alone have parts"):
        msgspec.structs.replace(INDEX, entry=Entry.TOKEN, packing=None)
    (shard,) = layout().shards
    words = r"'index' holds packed \[0, 48\) of 48, in pages of 8 tokens: with token_parts \(4, 3\) a page has 7"
    with pytest.raises(LayoutError, match=words):
        msgspec.structs.replace(shard, component=msgspec.structs.replace(INDEX, token_parts=(4, 3)))
    with pytest.raises(LayoutError, match="with token_parts"):
        msgspec.structs.replace(shard, box=(*shard.box[:2], Interval(0, 24)))
