"""The demo's verdict can be negative: one wrong byte, one stray byte or one wrong token is found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvferry.applications.demo.options import DemoOptions, EngineShape, Request
from kvferry.applications.demo.ranks import (
    DECODE_POISON,
    PREFILL_POISON,
    Answered,
    Computed,
    Ended,
    Moved,
    pages_of_chunk,
    rank_pool,
)
from kvferry.applications.demo.reference.caches import array_shape
from kvferry.applications.demo.reference.engine import PrefilledChunk
from kvferry.applications.demo.reference.specification import ModelSpec
from kvferry.applications.demo.run import Outcome, RankName
from kvferry.applications.demo.verdict import judge
from kvferry.endpoint import ReceiverStats, SenderStats, WriteRecord
from kvferry.layout import (
    Axis,
    Component,
    Entry,
    PageOrder,
    ShardedComponent,
    attention_components,
    state_component,
)
from kvferry.plan import TransferPath
from kvferry.plan.requests.page_numbers import GroupPages
from kvferry.pools.places import places
from kvferry.pools.pool import Pool, copied_contents

TOKENS, WINDOW, ROOM = 10, 3, 1000


def sharded(component: Component, *layers: int) -> ShardedComponent:
    return ShardedComponent(component=component, layers=layers, tp_axis="head")


def convolution(name: str, channels: int) -> ShardedComponent:
    axes = Axis("head", 4), Axis("channel", channels), Axis("width", 3)
    return sharded(state_component(name, num_layers=1, axes=axes, dtype="float32"), 0)


SIZES: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 4, "head_dim": 2}
COMPONENTS = (
    *(sharded(each, 1) for each in attention_components(**SIZES, dtype="float32")),
    *(sharded(each, 2) for each in attention_components(**SIZES, dtype="float32", window_tokens=WINDOW, prefix="w_")),
    sharded(state_component("state", num_layers=1, axes=(Axis("head", 4), Axis("dim", 5)), dtype="float32"), 0),
    convolution("conv_q", 2),
    convolution("conv_v", 3),
)
PREFILL = EngineShape(tp_size=4, stages=(3,), count=1, page_tokens=4)
DECODE = EngineShape(tp_size=2, stages=(2, 1), count=1, page_tokens=6, order=PageOrder.HND)


@pytest.fixture
def options() -> DemoOptions:
    return DemoOptions(
        model=ModelSpec.small(),
        components=COMPONENTS,
        prefill=PREFILL,
        decode=DECODE,
        requests=(Request(ROOM, "prompt", tuple(range(TOKENS)), 0, 0),),
        chunk_tokens=4,
        max_new_tokens=2,
        in_flight=1,
        seed=0,
        transport="any",
    )


def make_pool(options: DemoOptions, shape: EngineShape, rank: int, poison: int) -> Pool:
    return rank_pool(options, shape, shape.coordinates[rank], poison=poison, seed=f"{rank}")


def whole_caches() -> dict[str, torch.Tensor]:
    caches = {}
    for offset, each in enumerate(COMPONENTS):
        entries = 1 if each.component.entry is Entry.REQUEST else TOKENS
        shape = array_shape(each.component, entries)
        caches[each.component.name] = torch.arange(prod(shape), dtype=torch.float32).reshape(shape) + offset
    return caches


@pytest.fixture
def outcome(options: DemoOptions) -> Outcome:
    return run_without_processes(options)


def run_without_processes(options: DemoOptions) -> Outcome:
    """Every decode rank holds what the prefill ranks hold, by definition."""
    caches = whole_caches()
    write = WriteRecord("d", TransferPath.DIRECT, "", 64, 1, 1.0, 1.5, 2.0, 0.1, 0.2)
    made = Outcome()
    for name, shape, poison in (
        ("prefill", options.prefill, PREFILL_POISON),
        ("decode", options.decode, DECODE_POISON),
    ):
        for coordinates in shape.coordinates:
            pool = make_pool(options, shape, coordinates.engine_rank, poison)
            placed = pool.pages_for(TOKENS, whole_windows=name == "prefill")
            report: Moved
            if name == "prefill":
                pool.fill(Computed(caches, 0), placed, tokens=TOKENS)
                report = Moved(ROOM, placed, SenderStats(0.0, 1.0, 3.0, (write,)))
            else:
                for shard, index, where, positions in places(pool.layout, placed, TOKENS, 0):
                    layer = shard.box[0].start + index
                    pool.elements(shard, index)[where] = Computed(caches, 0).of(shard, layer, positions)
                report = Moved(ROOM, placed, ReceiverStats(0.0, 2.0, 4.0, 1))
            ended = Ended(pool.touched_bytes(pool.untaken(), poison), pool)
            made.reports[RankName(name, 0, coordinates)] = [report, ended]
    first = RankName("decode", 0, options.decode.coordinates[0])
    made.reports[first].append(Answered(ROOM, [1, 2]))
    made.reports[RankName("undivided")] = [Answered(ROOM, [1, 2]), Ended()]
    return made


@contextmanager
def changing(outcome: Outcome, side: str, kind: type, name: str, rank: int = 0) -> Iterator[NDArray[np.uint8]]:
    """What a rank's pages hold of a component's first layer, to be changed: bytes, [place in its pages, ..., byte]."""
    rank_name, report = outcome.of(kind, side)[rank]
    pool, (shard,) = outcome.pool(rank_name), outcome.pool(rank_name).layout.shards_of(name)
    pages, elements = report.pages[shard.group].pages, pool.elements(shard, 0)
    entries = np.ascontiguousarray(elements[pages]).view(np.uint8)
    yield entries.reshape(-1, *entries.shape[2:])
    elements[pages] = entries.view(elements.dtype)


def changed(outcome: Outcome, side: str, kind: type, rank: int = 0, **fields: Any) -> Outcome:
    """The outcome with fields of one rank's report of one kind replaced."""
    name, report = outcome.of(kind, side)[rank]
    reports = [replace(report, **fields) if each is report else each for each in outcome.reports[name]]
    return Outcome({**outcome.reports, name: reports})


def test_what_arrived_as_it_was_sent_holds(options: DemoOptions, outcome: Outcome):
    verdict = judge(options, outcome)
    assert verdict.holds
    of_heads = 2 * TOKENS * 2 + 2 * WINDOW * 2 + 5 + 2 * 3 + 3 * 3  # k and v, the windows, the state, the convolution
    assert verdict.bytes_checked == 4 * of_heads * 4
    assert verdict.transfer_ms == (3000.0,)
    assert verdict.total_bytes == 4 * 64


def test_a_rank_that_sent_nothing_has_no_part_in_the_time(options: DemoOptions, outcome: Outcome):
    name, sent = next((name, sent) for name, sent in outcome.of(Moved, "prefill") if not name.coordinates.is_aux_writer)
    late = replace(sent, stats=SenderStats(0.0, 9.0, 9.5, ()))
    outcome.reports[name] = [late if report is sent else report for report in outcome.reports[name]]
    assert judge(options, outcome).transfer_ms == (3000.0,)


# Decode ranks 0 and 1 hold layers 0 and 1, ranks 2 and 3 layer 2.
@pytest.mark.parametrize(("rank", "name"), [(0, "k"), (1, "v"), (0, "state"), (1, "conv_q"), (0, "conv_v"), (2, "w_v")])
def test_one_wrong_byte_is_found(options: DemoOptions, outcome: Outcome, rank: int, name: str):
    with changing(outcome, "decode", Moved, name, rank) as entries:
        first = 6 if name == "w_v" else 0  # pages of 6 tokens, of which the first has left the window
        entries[TOKENS - 1 - first if name in ("k", "v", "w_v") else 0].reshape(-1)[7] ^= 1
    verdict = judge(options, outcome)
    assert verdict.bytes_mismatched == 1
    assert not verdict.holds


def test_two_tokens_in_each_others_place_are_found(options: DemoOptions, outcome: Outcome):
    with changing(outcome, "decode", Moved, "k") as entries:
        entries[[1, 0]] = entries[[0, 1]]
    assert judge(options, outcome).bytes_mismatched > 0


def test_a_window_that_starts_one_token_off_is_found(options: DemoOptions, outcome: Outcome):
    for name in ("w_k", "w_v"):
        with changing(outcome, "decode", Moved, name, 2) as entries:
            entries[:] = np.roll(entries, 1, axis=0)
    assert judge(options, outcome).bytes_mismatched > 0


def test_channels_in_each_others_place_are_found(options: DemoOptions, outcome: Outcome):
    with (
        changing(outcome, "decode", Moved, "conv_q") as queries,
        changing(outcome, "decode", Moved, "conv_v") as values,
    ):
        queries.reshape(-1)[:] = values.reshape(-1)[: queries.size]
    assert judge(options, outcome).bytes_mismatched > 0


def test_a_part_that_never_arrived_is_found(options: DemoOptions, outcome: Outcome):
    with changing(outcome, "decode", Moved, "state") as entries:
        sent = np.count_nonzero(entries != DECODE_POISON)
        entries[:] = DECODE_POISON
    assert judge(options, outcome).bytes_mismatched == sent


def test_bytes_around_the_tokens_may_be_the_senders_or_untouched(options: DemoOptions, outcome: Outcome):
    """Pages of 6 tokens end after token 11, and the window's begin with token 6, of which it needs none."""
    with changing(outcome, "decode", Moved, "k") as entries:
        entries[10:] = PREFILL_POISON
    assert judge(options, outcome).holds
    with changing(outcome, "decode", Moved, "k") as entries:
        entries[10, 0, 0] = 1
    assert judge(options, outcome).bytes_mismatched == 1
    with changing(outcome, "decode", Moved, "k") as entries:
        entries[10:] = PREFILL_POISON
    assert {each.pages["window-3"].start for _, each in outcome.of(Moved, "decode")} == {1}
    with changing(outcome, "decode", Moved, "w_k", 2) as entries:
        entries[0, 0, 0] ^= 0xFF
    assert judge(options, outcome).bytes_mismatched == 1


def test_what_was_sent_differs_from_what_arrived(options: DemoOptions, outcome: Outcome):
    with changing(outcome, "prefill", Moved, "k") as entries:
        entries.reshape(-1)[0] ^= 1
    assert judge(options, outcome).bytes_mismatched == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_prefill_ranks_that_disagree_are_found(options: DemoOptions, rank: int):
    """Ranks 0 and 1 of eight hold the same of four heads. What arrived can only be what one of them holds."""
    options = replace(options, prefill=replace(PREFILL, tp_size=8))
    outcome = run_without_processes(options)
    assert judge(options, outcome).holds
    with changing(outcome, "prefill", Moved, "state", rank) as entries:
        entries.reshape(-1)[0] ^= 1
    assert not judge(options, outcome).holds


def test_a_byte_written_where_nobody_may_is_found(options: DemoOptions, outcome: Outcome):
    verdict = judge(options, changed(outcome, "decode", Ended, damaged_bytes=3))
    assert verdict.bytes_mismatched == 3
    assert not verdict.holds


def test_a_wrong_token_is_found(options: DemoOptions, outcome: Outcome):
    verdict = judge(options, changed(outcome, "decode", Answered, token_ids=[1, 3]))
    assert not verdict.tokens_match
    assert not verdict.holds


def test_a_missing_answer_is_found(options: DemoOptions, outcome: Outcome):
    name, _ = outcome.of(Answered, "decode")[0]
    outcome.reports[name] = [report for report in outcome.reports[name] if not isinstance(report, Answered)]
    assert not judge(options, outcome).tokens_match


@pytest.mark.parametrize("name", [each.component.name for each in COMPONENTS])
def test_a_pool_notices_bytes_outside_of_allocated_pages(options: DemoOptions, name: str):
    pool = make_pool(options, options.prefill, 0, PREFILL_POISON)
    (shard,) = pool.layout.shards_of(name)
    group = shard.group
    taken = pool.pages_for(TOKENS)[group].pages
    free = next(page for page in range(pool.layout.group(group).num_pages) if page not in taken)
    assert pool.touched_bytes(pool.untaken(), PREFILL_POISON) == 0
    pool.elements(shard, 0)[free].flat[0] = 1
    assert 0 < pool.touched_bytes(pool.untaken(), PREFILL_POISON) <= 4


@pytest.mark.parametrize("order", [PageOrder.NHD, PageOrder.HND])
def test_a_pool_reads_what_was_written_in_pieces(options: DemoOptions, order: PageOrder):
    pool = make_pool(options, replace(PREFILL, order=order), 1, PREFILL_POISON)
    placed = pool.pages_for(TOKENS, whole_windows=True)
    caches = whole_caches()
    states = {name for name, array in caches.items() if array.shape[1] == 1}
    for start, stop in ((0, 4), (4, 8), (8, 10)):
        given = {name: array[:, start:stop] for name, array in caches.items() if name not in states}
        given |= {name: caches[name] for name in states if stop == TOKENS}
        pages = {
            group: GroupPages(each.pages[start // 4 : -(-stop // 4)], start=start // 4)
            for group, each in placed.items()
            if group != "state"
        }
        pages |= {"state": placed["state"]} if stop == TOKENS else {}
        pool.fill(Computed(given, start), pages, tokens=stop)
    contents = copied_contents([(pool, placed)], tokens=TOKENS)
    for shard in pool.layout.shards:
        array = caches[shard.component.name][:, :, 1:2]
        found = contents.of(shard, 0, np.arange(array.shape[1]))
        assert np.array_equal(found, array[0].contiguous().numpy().view(np.uint32))


def test_the_channels_of_a_convolution_are_slices_of_one_tensor(options: DemoOptions):
    layout = make_pool(options, PREFILL, 0, PREFILL_POISON).layout
    (query,), (value,) = (layout.shards_of(name) for name in ("conv_q", "conv_v"))
    assert value.addresses[0] - query.addresses[0] == 1 * 2 * 3 * 4
    assert query.paging.page_stride == value.paging.page_stride == (2 + 3) * 3 * 4


def test_pages_of_a_window_alone(options: DemoOptions):
    pool = make_pool(options, PREFILL, 0, PREFILL_POISON)
    window = pool.pages_for(TOKENS)[f"window-{WINDOW}"]
    assert (window.start, len(window.pages)) == (1, 2)  # tokens 7 to 9, in pages of 4
    whole = pool.pages_for(TOKENS, whole_windows=True)[f"window-{WINDOW}"]
    assert (whole.start, len(whole.pages)) == (0, 3)


def test_what_a_rank_hands_in_with_each_chunk(options: DemoOptions):
    """Window pages from the first that decoding needs, and the state with the last chunk alone."""
    pool = make_pool(options, PREFILL, 0, PREFILL_POISON)
    placed = pool.pages_for(TOKENS, whole_windows=True)
    handed = []
    for start, stop in ((0, 4), (4, 8), (8, 10)):
        chunk = PrefilledChunk(start, stop, {}, 7 if stop == TOKENS else None)
        pages = pages_of_chunk(pool.layout, placed, options.requests[0], chunk)
        handed.append({group: (each.start, len(np.asarray(each.pages))) for group, each in pages.items()})
    assert handed == [
        {"kv": (0, 1)},
        {"kv": (1, 1), "window-3": (1, 1)},
        {"kv": (2, 1), "window-3": (2, 1), "state": (None, 1)},
    ]
