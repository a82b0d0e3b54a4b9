"""The demo's verdict can be negative: one wrong byte, one stray byte or one wrong token is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.cli.demo.options import DemoOptions, EngineShape, Request
from kvferry.cli.demo.pool import DECODE_POISON, PREFILL_POISON, RankPool
from kvferry.cli.demo.ranks import Decoded, Described, Ended, Received, Sent, Undivided
from kvferry.cli.demo.run import Outcome, RankName
from kvferry.cli.demo.verdict import judge
from kvferry.endpoint import ReceiverStats, SenderStats, WriteRecord
from kvferry.engines.reference.specification import ModelSpec
from kvferry.layout import attention_components

PAGE_TOKENS, TOKENS, ROOM = 4, 10, 1000
COMPONENTS = attention_components(num_layers=2, num_kv_heads=4, head_dim=2, dtype="float32")


@pytest.fixture
def options() -> DemoOptions:
    return DemoOptions(
        model=ModelSpec.small(),
        components=COMPONENTS,
        prefill=EngineShape(tp_size=4, stages=(2,), count=1),
        decode=EngineShape(tp_size=2, stages=(1, 1), count=1),
        requests=(Request(ROOM, "prompt", tuple(range(TOKENS)), 0, 0),),
        page_tokens=PAGE_TOKENS,
        chunk_tokens=PAGE_TOKENS,
        max_new_tokens=2,
        in_flight=1,
        seed=0,
    )


def make_pool(options: DemoOptions, shape: EngineShape, rank: int, poison: int) -> RankPool:
    return RankPool(
        COMPONENTS,
        shape,
        shape.coordinates[rank],
        pages=options.pool_pages(),
        page_tokens=PAGE_TOKENS,
        poison=poison,
        seed=f"{rank}",
    )


@pytest.fixture
def outcome(options: DemoOptions) -> Outcome:
    """A run without processes: every decode rank holds what the prefill ranks hold, by definition."""
    caches = {
        component.name: torch.arange(2 * TOKENS * 4 * 2, dtype=torch.float32).reshape(2, TOKENS, 4, 2) + offset
        for offset, component in enumerate(COMPONENTS)
    }
    write = WriteRecord("d", 64, 1, 1.0, 1.5, 2.0, 0.1, 0.2)
    made = Outcome()
    for name, shape, poison in (
        ("prefill", options.prefill, PREFILL_POISON),
        ("decode", options.decode, DECODE_POISON),
    ):
        for coordinates in shape.coordinates:
            pool = make_pool(options, shape, coordinates.engine_rank, poison)
            pages = pool.allocate(options.requests[0].pages(PAGE_TOKENS))
            # What the prefill side never wrote travels as well, with the rest of the last page.
            for tensors in pool._tensors.values():
                for tensor in tensors:
                    tensor.view(torch.uint8)[torch.from_numpy(pages)] = PREFILL_POISON
            pool.write(pages, caches)
            shard, ended = pool.read(pages), Ended(pool.damaged_bytes())
            report: Sent | Received
            if name == "prefill":
                report = Sent(ROOM, shard, SenderStats(0.0, 1.0, 3.0, (write,)))
            else:
                report = Received(ROOM, shard, ReceiverStats(0.0, 2.0, 4.0, 1))
            made.reports[RankName(name, 0, coordinates)] = [Described(pool.layout), report, ended]
    first = RankName("decode", 0, options.decode.coordinates[0])
    made.reports[first].append(Decoded(ROOM, [1, 2]))
    made.reports[RankName("undivided")] = [Undivided(ROOM, [1, 2]), Ended()]
    return made


def changed(outcome: Outcome, side: str, kind: type, **fields: Any) -> Outcome:
    """The outcome with fields of the first report of one kind replaced."""
    name, report = outcome.of(kind, side)[0]
    reports = [replace(report, **fields) if each is report else each for each in outcome.reports[name]]
    return Outcome({**outcome.reports, name: reports})


def test_what_arrived_as_it_was_sent_holds(options: DemoOptions, outcome: Outcome):
    verdict = judge(options, outcome)
    assert verdict.holds
    assert (
        verdict.bytes_checked == 2 * 2 * 12 * 4 * 2 * 4
    )  # components, layers, tokens of whole pages, heads, dims, bytes
    assert verdict.transfer_ms == (3000.0,)
    assert verdict.total_bytes == 4 * 64


def test_a_rank_that_sent_nothing_has_no_part_in_the_time(options: DemoOptions, outcome: Outcome):
    name, sent = next((name, sent) for name, sent in outcome.of(Sent, "prefill") if not name.coordinates.is_aux_writer)
    late = replace(sent, stats=SenderStats(0.0, 9.0, 9.5, ()))
    outcome.reports[name] = [late if report is sent else report for report in outcome.reports[name]]
    assert judge(options, outcome).transfer_ms == (3000.0,)


def test_one_wrong_byte_is_found(options: DemoOptions, outcome: Outcome):
    shard = {name: part.copy() for name, part in outcome.of(Received, "decode")[0][1].shard.items()}
    shard["v"].reshape(-1)[17] ^= 1
    verdict = judge(options, changed(outcome, "decode", Received, shard=shard))
    assert verdict.bytes_mismatched == 1
    assert not verdict.holds


def test_two_tokens_in_each_others_place_are_found(options: DemoOptions, outcome: Outcome):
    shard = {
        name: part[:, np.r_[1, 0, 2 : part.shape[1]]]
        for name, part in outcome.of(Received, "decode")[0][1].shard.items()
    }
    assert judge(options, changed(outcome, "decode", Received, shard=shard)).bytes_mismatched > 0


def test_prefill_ranks_that_disagree_are_found(options: DemoOptions, outcome: Outcome):
    shard = {name: part.copy() for name, part in outcome.of(Sent, "prefill")[0][1].shard.items()}
    shard["k"].reshape(-1)[0] ^= 1
    assert not judge(options, changed(outcome, "prefill", Sent, shard=shard)).holds


def test_a_byte_written_where_nobody_may_is_found(options: DemoOptions, outcome: Outcome):
    verdict = judge(options, changed(outcome, "decode", Ended, damaged_bytes=3))
    assert verdict.bytes_mismatched == 3
    assert not verdict.holds


def test_a_wrong_token_is_found(options: DemoOptions, outcome: Outcome):
    verdict = judge(options, changed(outcome, "decode", Decoded, token_ids=[1, 3]))
    assert not verdict.tokens_match
    assert not verdict.holds


def test_a_missing_answer_is_found(options: DemoOptions, outcome: Outcome):
    name, _ = outcome.of(Decoded, "decode")[0]
    outcome.reports[name] = [report for report in outcome.reports[name] if not isinstance(report, Decoded)]
    assert not judge(options, outcome).tokens_match


def test_a_pool_notices_bytes_outside_of_allocated_pages(options: DemoOptions):
    pool = make_pool(options, options.decode, 0, DECODE_POISON)
    pages = pool.allocate(2)
    free = next(page for page in range(options.pool_pages()) if page not in pages)
    assert pool.damaged_bytes() == 0
    pool._tensors["k"][0][free, 0, 0, 0] = 1.0
    assert 0 < pool.damaged_bytes() <= 4
