"""The rules of docs/specification/layouts.md are enough: who has nothing else comes to what the planner does."""

from __future__ import annotations

import json

import pytest
from docs.specification.vectors import LATENT, STATE, Case, heads_of, made
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from tests.support import vector_reader
from tests.support.tiers import examples

from kvferry.applications.plan.vector import as_text
from kvferry.errors import KVFerryError
from kvferry.layout import PageOrder

SHARES = ["", "cp=2", "cp=3:zigzag", "cp=2:interleaved", "cp=3:interleaved:16", "cp=3:contiguous:16"]


@st.composite
def sides(draw: st.DrawFn) -> str:
    parts = [draw(st.sampled_from(["", "tp=2", "tp=3", "tp=4"])), draw(st.sampled_from(["", "stages=1+2", "pp=3"]))]
    return ",".join(filter(None, [*parts, draw(st.sampled_from(SHARES))]))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    components = [*heads_of(draw(st.integers(1, 4)), 2, "k")]
    components += heads_of(2, 2, "window_k", window_tokens=draw(st.integers(1, 40))) if draw(st.booleans()) else ()
    components += [each for each in (LATENT, STATE) if draw(st.booleans())]
    tokens = draw(st.integers(1, 80))
    orders = st.sampled_from([PageOrder.NHD, PageOrder.HND])
    packed = st.just((PageOrder.PACKED, PageOrder.PACKED))
    return Case(
        title="drawn",
        layers=3,
        components=tuple(components),
        prefill=draw(sides()),
        decode=draw(sides()),
        page_tokens=draw(st.tuples(st.sampled_from([8, 16, 24, 48]), st.sampled_from([8, 16, 32, 48]))),
        orders=draw(st.one_of(st.tuples(orders, orders), packed)),
        tokens=tokens,
        prefix_tokens=draw(st.integers(0, tokens)),
        room=draw(st.integers(0, 2**63 - 1)),
    )


@pytest.mark.full
@settings(max_examples=examples(30))
@given(cases())
def test_a_second_reader_comes_to_the_moves_of_any_two_sides(case: Case):
    try:
        vector = json.loads(as_text(made(case)))
    except KVFerryError:  # no such sides can be, or they cannot exchange caches
        reject()
    assert vector_reader.moves(vector) == vector["moves"]
    for rank in (*vector["prefill"], *vector["decode"]):
        assert vector_reader.regions(rank) == rank["regions"]
